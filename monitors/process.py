"""The server's process tree, found by its listening port: memory, swap, state, and whether it is still the same one.

Never by name: the port leads to a socket, the socket to the processes that hold it. Where the oldest of them lives in a
cgroup of its own (a container, a unit), the server is everything in it. Elsewhere the tree is climbed from it as long
as the parent is of the same session, process group and cgroup: the API server, its engine core, its workers and the
script that started them are one tree; the shell, the service manager or the test that started the script is not. A port
that Docker forwards is followed into the container's network namespace.

A process is its pid and its start ticks: pids are used again. Leaks show in RssAnon + VmSwap, not in RSS, which falls
when leaked pages are swapped out.
"""

# ruff: noqa: PTH208 - a Path for each of thousands of directory entries triples the cost of a scan
from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds
from monitors import server
from monitors.server import Place, Stat, find, read, stat_of

LANE: Lane = "fast"
PERIOD_S = 1.0
TREE_EVERY_NS = 5_000_000_000  # reading the state of every process of the machine costs 15 µs each
SCAN_SHARE = 100  # and never more than 1 % of the time, on machines with tens of thousands of them
MAX_MEMBERS = 512  # processes of one tree that are read each second
MAX_LABELLED = 16  # of them with figures of their own, the first to be seen: front end, engine core, workers
MAX_HAPPENINGS = 20  # a tick; a server that forks for each request must not fill the file
MAX_THREADS = 2000  # looked at for D state with each look at the tree
STUCK_TICKS = 2  # a D state that two looks a second apart see is worth a word; shorter ones are ordinary I/O

SAID_STATES = {"D": "uninterruptible wait", "T": "stopped", "t": "stopped by a tracer"}
DEAD = "ZXx"  # a zombie has ended; that nobody fetched its exit code changes nothing

_STATUS = re.compile(rb"^(VmRSS|RssAnon|RssFile|RssShmem|VmSwap):\s+(\d+) kB", re.MULTILINE)
_STATUS_METRICS = {
    b"VmRSS": "rss_bytes",
    b"RssAnon": "rss_anon_bytes",
    b"RssFile": "rss_file_bytes",
    b"RssShmem": "rss_shmem_bytes",
    b"VmSwap": "vm_swap_bytes",
}


@dataclass(frozen=True, slots=True)
class Options:
    """`target_url` says which port to look for; `pid` names a process instead (0: look for the port)."""

    root: str = "/"
    target_url: str = ""
    pid: int = 0
    period_s: Seconds = Seconds(1)


@dataclass(slots=True)
class Member:
    """A process of the server's tree. `stuck` counts the looks that found it in a state worth a word; `visits`: it runs
    in the server's container but is none of its children (`docker exec`, a health check) and comes and goes as it may;
    `since_ns`: when we first saw it."""

    stat: Stat
    labels: dict[str, str]
    stuck: int = 0
    visits: bool = False
    since_ns: int = 0


@dataclass(slots=True)
class Tree:
    """The server as it was last seen. `gone_ns`: since when nobody has been listening; `folder`: the directory of the
    cgroup that is its own, if it has one."""

    listener: Stat | None = None
    top: int = 0
    place: Place = field(default_factory=Place)
    folder: Path | None = None
    members: dict[int, Member] = field(default_factory=dict)
    gone_ns: int | None = None
    seen_ns: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# The tree


def ancestors(proc: Path, pid: int) -> set[int]:
    """A process and all above it."""
    above: set[int] = set()
    while pid > 0 and pid not in above:
        above.add(pid)
        stat = stat_of(proc, pid)
        pid = stat.parent if stat else 0
    return above


def climb(proc: Path, listener: Stat, home: Place, foreign: set[int]) -> Stat:
    """The top of the listener's tree: as far up as session, process group and cgroup are the same. An interactive
    shell gives each job a group of its own, a service manager each unit a session and a cgroup. In a cgroup that is the
    server's own that alone decides: an init as first process gives its child a group and a session."""
    top = listener
    group = read(proc / str(listener.pid) / "cgroup")
    while top.parent > 1 and top.parent not in foreign:
        parent = stat_of(proc, top.parent)
        if parent is None:
            break
        if home.path:
            path = server.cgroups(read(proc / str(parent.pid) / "cgroup") or b"").get(home.controller, "")
            if not f"{path}/".startswith(f"{home.path}/"):
                break
        elif (parent.session, parent.group) != (listener.session, listener.group) or (
            read(proc / str(parent.pid) / "cgroup") != group
        ):
            break
        top = parent
    return top


def descendants(everyone: dict[int, Stat], top: int, foreign: set[int]) -> list[Stat]:
    """The tree below `top`, top first. Our own processes are never part of the server."""
    children: dict[int, list[Stat]] = {}
    for stat in everyone.values():
        children.setdefault(stat.parent, []).append(stat)
    tree: list[Stat] = []
    todo = [everyone[top]] if top in everyone else []
    while todo:
        stat = todo.pop(0)
        if stat.pid in foreign or stat.state in DEAD:
            continue
        tree.append(stat)
        todo += children.get(stat.pid, [])
    return tree


# ---------------------------------------------------------------------------------------------------------------------
# Watching


def watch(options: Options) -> Iterator[list[Sample]]:
    """Sums over the tree, figures of its first members, and happenings: process_gone, process_new, restart."""
    root = server.tree(options.root)
    proc = root / "proc"
    port, why = (0, "") if options.pid else server.port_of(options.target_url)
    if why:
        yield [Sample("process", "observed", 0.0, clock.now_ns(), text=why)]
        return
    foreign = ancestors(proc, os.getpid()) if proc == Path("/proc") else set()
    hertz = os.sysconf("SC_CLK_TCK")
    tree = Tree()
    last_ns = 0
    last_cpu: dict[int, int] = {}
    scan_ns = find_ns = 0
    told: str | None = None
    while True:
        now = clock.now_ns()
        out: list[Sample] = look(proc, tree, now)
        if tree.listener is None and now >= find_ns:
            found = server.named(proc, options.pid) if options.pid else find(proc, port)
            find_ns = now + SCAN_SHARE * (clock.now_ns() - now) if found.hidden else 0
            if found.listener is not None:
                out += arrived(root, tree, found.listener, foreign, now)
                scan_ns = 0
            text = about(tree) if found.listener else found.why
            if told != text and (told is None or found.listener):
                known = {**identity(found.listener), **tree.place.labels()} if found.listener else {}
                out.append(Sample("process", "observed", 1.0 if found.listener else 0.0, now, known, text))
                told = text
        if tree.listener is not None and now >= scan_ns:
            out += grow(proc, tree, foreign, now)
            out.append(Sample("process", "threads_blocked", float(blocked_threads(proc, tree)), now))
            scan_ns = now + max(TREE_EVERY_NS, SCAN_SHARE * (clock.now_ns() - now))
        if told is not None and (tree.members or tree.seen_ns):
            out += figures(proc, tree, now)
            cpu = {pid: member.stat.cpu_ticks for pid, member in tree.members.items()}
            if last_ns and now > last_ns:
                used = sum(ticks - last_cpu[pid] for pid, ticks in cpu.items() if pid in last_cpu)
                out.append(Sample("process", "cpu_percent", 100.0 * used / hertz / ((now - last_ns) / 1e9), now))
            last_ns, last_cpu = now, cpu
        yield out


def look(proc: Path, tree: Tree, now: int) -> list[Sample]:
    """Read every member again; report who is gone, and who has been in a bad state for two looks."""
    out: list[Sample] = []
    for pid, member in list(tree.members.items()):
        before, stat = member.stat, stat_of(proc, pid)
        if stat is None or stat.start != before.start or stat.state in DEAD:
            del tree.members[pid]
            if member.visits:
                continue
            role = "listener" if tree.listener is not None and pid == tree.listener.pid else "member"
            out.append(
                happening(
                    "process_gone",
                    before,
                    now,
                    "ended and is left behind as a zombie" if stat and stat.state in DEAD else "is gone",
                    role=role,
                    seen_s=f"{(now - member.since_ns) / 1e9:.1f}",
                )
            )
            continue
        member.stat = stat
        was_stuck = member.stuck >= STUCK_TICKS
        member.stuck = member.stuck + 1 if stat.state in SAID_STATES else 0
        if member.stuck == STUCK_TICKS:
            out.append(happening("process_state", stat, now, SAID_STATES[stat.state], state=stat.state))
        elif was_stuck and not member.stuck:
            out.append(happening("process_state", stat, now, "runs again", state=stat.state))
    if tree.listener is not None and tree.listener.pid not in tree.members:
        tree.listener, tree.gone_ns = None, now
    return out[:MAX_HAPPENINGS]


def arrived(root: Path, tree: Tree, listener: Stat, foreign: set[int], now: int) -> list[Sample]:
    """Somebody listens: the first time that is how things are, later it is a restart."""
    proc = root / "proc"
    tree.listener = listener
    tree.place = server.place(proc, listener.pid)
    mounted = server.mounts(read(proc / "self/mountinfo") or b"") if tree.place.path else []
    tree.folder = server.directory(root, mounted, tree.place.controller, tree.place.path) if mounted else None
    tree.top = climb(proc, listener, tree.place, foreign).pid
    out: list[Sample] = []
    if tree.gone_ns is not None:
        down_s = (now - tree.gone_ns) / 1e9
        out.append(
            happening(
                "restart",
                listener,
                now,
                f"serves the port that nobody served for {down_s:.1f} s",
                down_s=f"{down_s:.3f}",
                **tree.place.labels(),
            )
        )
    tree.members[listener.pid] = Member(listener, labels(listener), since_ns=now)
    tree.gone_ns = None
    return out


def grow(proc: Path, tree: Tree, foreign: set[int], now: int) -> list[Sample]:
    """Look for new members. Those that have left the tree (their parent died) stay members."""
    inside = server.members(tree.folder) if tree.folder is not None else None
    looked_at = server.pids(proc) if inside is None else sorted(inside | {tree.top})
    everyone = {stat.pid: stat for pid in looked_at if (stat := stat_of(proc, pid)) is not None}
    top = tree.top if tree.top in everyone else tree.listener.pid if tree.listener else 0
    below = descendants(everyone, top, foreign)
    if inside is not None:
        family = {stat.pid for stat in below}
        below += [s for pid, s in everyone.items() if pid not in family | foreign and s.state not in DEAD]
    else:
        family = set()
    out: list[Sample] = []
    first = not tree.seen_ns
    tree.seen_ns = now
    for stat in below:
        if stat.pid not in tree.members and len(tree.members) < MAX_MEMBERS:
            # everything in a unit is the unit's; into a container others may enter
            visits = bool(tree.place.container) and inside is not None and stat.pid not in family
            tree.members[stat.pid] = Member(stat, labels(stat), visits=visits, since_ns=now)
            if not first and not visits:
                out.append(happening("process_new", stat, now, f"child of {stat.parent}"))
    return out[:MAX_HAPPENINGS]


def figures(proc: Path, tree: Tree, now: int) -> list[Sample]:
    """Sums over the tree; the first members by themselves as well."""
    sums: dict[str, float] = dict.fromkeys((*_STATUS_METRICS.values(), "threads", "fds"), 0.0)
    unseen: set[str] = set()
    out: list[Sample] = []
    for n, (pid, member) in enumerate(tree.members.items()):
        values: dict[str, float] = {
            _STATUS_METRICS[key]: int(kb) * 1024.0
            for key, kb in _STATUS.findall(read(proc / str(pid) / "status") or b"")
        }
        values["threads"] = float(member.stat.threads)
        try:
            values["fds"] = float(len(os.listdir(proc / str(pid) / "fd")))
        except PermissionError:
            unseen.add("fds")
        except OSError:
            pass
        for metric, value in values.items():
            sums[metric] += value
        if n < MAX_LABELLED:
            out += [Sample("process", metric, value, now, member.labels) for metric, value in values.items()]
    if tree.members:
        out += [Sample("process", metric, value, now) for metric, value in sums.items() if metric not in unseen]
    out.append(Sample("process", "processes", float(len(tree.members)), now))
    return out


def blocked_threads(proc: Path, tree: Tree) -> int:
    """Threads in D state. Memory pressure figures stay silent while tasks wait in an out-of-memory wait."""
    blocked = seen = 0
    for pid in tree.members:
        try:
            tasks = os.listdir(proc / str(pid) / "task")
        except OSError:
            continue
        for task in tasks:
            if (seen := seen + 1) > MAX_THREADS:
                return blocked
            data = read(proc / str(pid) / "task" / task / "stat") or b""
            blocked += data.rpartition(b")")[2].lstrip()[:1] == b"D"
    return blocked


def labels(stat: Stat) -> dict[str, str]:
    return {"pid": str(stat.pid), "name": stat.name}


def identity(stat: Stat) -> dict[str, str]:
    """A process beyond doubt: its pid may be used again, with its start ticks it is one of a kind."""
    return {**labels(stat), "start_ticks": str(stat.start)}


def happening(metric: str, stat: Stat, now: int, text: str, **more: str) -> Sample:
    return Sample(
        "process",
        metric,
        1.0,
        now,
        {**identity(stat), **more},
        f"pid {stat.pid} ({stat.name}) {text}".strip(),
    )


def about(tree: Tree) -> str:
    """How the server was found, for the report."""
    if tree.listener is None:
        return ""
    where = tree.place.about()
    who = f"pid {tree.listener.pid} ({tree.listener.name}) serves the port{f' {where}' if where else ''}"
    if tree.folder is not None:
        return f"{who}; all processes of cgroup {tree.place.path} are the server"
    return f"{who}; its tree begins at pid {tree.top}"
