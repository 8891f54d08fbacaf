"""The server's process tree, found by its listening port: memory, swap, state, and whether it is still the same one.

Never by name: the port leads to a socket, the socket to the processes that hold it, and from the oldest of them the
tree is climbed as long as the parent is of the same session, process group and cgroup. So the API server, its engine
core, its workers and the script that started them are one tree, and the shell, the service manager or the test that
started the script is not. A port that Docker forwards is followed into the container's network namespace.

A process is its pid and its start ticks: pids are used again. Leaks show in RssAnon + VmSwap, not in RSS, which falls
when leaked pages are swapped out.
"""

# ruff: noqa: PTH115, PTH208 - a Path for each of thousands of directory entries triples the cost of a scan
from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds

LANE: Lane = "fast"
PERIOD_S = 1.0
TREE_EVERY_NS = 5_000_000_000  # reading the state of every process of the machine costs 15 µs each
SCAN_SHARE = 100  # and never more than 1 % of the time, on machines with tens of thousands of them
MAX_MEMBERS = 512  # processes of one tree that are read each second
MAX_LABELLED = 16  # of them with figures of their own, the first to be seen: front end, engine core, workers
MAX_HAPPENINGS = 20  # a tick; a server that forks for each request must not fill the file
MAX_THREADS = 2000  # looked at for D state with each look at the tree
STUCK_TICKS = 2  # a D state that two looks a second apart see is worth a word; shorter ones are ordinary I/O

LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
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


@dataclass(frozen=True, slots=True)
class Stat:
    """What we need of /proc/PID/stat."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    threads: int
    start: int


@dataclass(slots=True)
class Member:
    """A process of the server's tree. `stuck` counts the looks that found it in a state worth a word."""

    stat: Stat
    labels: dict[str, str]
    stuck: int = 0


@dataclass(slots=True)
class Tree:
    """The server as it was last seen. `gone_ns`: since when nobody has been listening."""

    listener: Stat | None = None
    top: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    gone_ns: int | None = None
    seen_ns: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Who listens, or why that cannot be said."""

    listener: Stat | None
    why: str = ""
    hidden: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# Reading /proc


def read(path: Path) -> bytes | None:
    """A file, or None: a process may end between any two reads."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def stat_of(proc: Path, pid: int | str) -> Stat | None:
    """One process, or None where it is gone. Its name may hold blanks and parentheses."""
    data = read(proc / str(pid) / "stat")
    if data is None:
        return None
    head, _, tail = data.decode("utf-8", "replace").rpartition(")")
    number, _, name = head.partition(" (")
    f = tail.split()
    try:
        return Stat(
            int(number), name, f[0], int(f[1]), int(f[2]), int(f[3]), int(f[11]) + int(f[12]), int(f[17]), int(f[19])
        )
    except (ValueError, IndexError):
        return None


def pids(proc: Path) -> list[int]:
    """All processes, as far as this user may see them."""
    try:
        return [int(name) for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return []


def listening(net: Path, port: int) -> set[str]:
    """Inodes of the sockets that listen on a port, in the network namespace whose tables these are."""
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in (read(net / table) or b"").decode("ascii", "replace").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == LISTEN and fields[1].endswith(f":{port:04X}"):
                inodes.add(fields[9])
    return inodes


def holders(proc: Path, inodes: set[str]) -> tuple[list[Stat], int]:
    """The processes that hold one of these sockets, oldest first, and how many could not be looked into."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found: list[Stat] = []
    hidden = 0
    for pid in pids(proc) if wanted else []:
        folder = proc / str(pid) / "fd"
        try:
            for fd in os.listdir(folder):
                try:
                    held = os.readlink(folder / fd) in wanted
                except OSError:
                    continue
                if held:
                    stat = stat_of(proc, pid)
                    found += [stat] if stat else []
                    break
        except PermissionError:
            hidden += 1
        except OSError:
            continue
    return sorted(found, key=lambda s: (s.start, s.pid)), hidden


def forwards(proc: Path, pid: int) -> tuple[str, int] | None:
    """Where Docker's port forwarder hands connections on to: the container's address and port."""
    words = (read(proc / str(pid) / "cmdline") or b"").decode("utf-8", "replace").split("\0")
    options = dict(pairwise(words))
    port = options.get("-container-port", "")
    return (options.get("-container-ip", ""), int(port)) if port.isdigit() else None


def in_containers(proc: Path, address: str | None, port: int) -> set[str]:
    """Inodes of listeners in other network namespaces. `address` None: whichever, if there is only one that listens."""
    own = namespace(proc, "self")
    seen: set[str] = set()
    found: list[set[str]] = []
    for pid in pids(proc):
        name = namespace(proc, str(pid))
        if name is None or name == own or name in seen:
            continue
        net = proc / str(pid) / "net"
        if read(net / "tcp") is None:  # it ended meanwhile: the next process of the namespace will do
            continue
        seen.add(name)
        inodes = listening(net, port)
        if not inodes:
            continue
        if address is None:
            found.append(inodes)
        elif f"|-- {address}\n".encode() in (read(net / "fib_trie") or b""):
            return inodes
    return found[0] if len(found) == 1 else set()


def namespace(proc: Path, pid: str) -> str | None:
    try:
        return os.readlink(proc / pid / "ns/net")
    except OSError:
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Finding the server


def find(proc: Path, port: int) -> Found:
    """Who listens on the port, here or in a container that the port is forwarded to."""
    inodes = listening(proc / "net", port)
    found, hidden = holders(proc, inodes)
    forwarded = forwards(proc, found[0].pid) if found else None
    if forwarded is not None:
        found, hidden = holders(proc, in_containers(proc, *forwarded))
    elif not inodes:
        found, hidden = holders(proc, in_containers(proc, None, port))
    if found:
        return Found(found[0])
    if inodes or forwarded:
        return Found(None, f"port {port} is served by a process of another user ({hidden} hidden): run as root", True)
    return Found(None, f"nobody listens on port {port}")


def ancestors(proc: Path, pid: int) -> set[int]:
    """A process and all above it."""
    above: set[int] = set()
    while pid > 0 and pid not in above:
        above.add(pid)
        stat = stat_of(proc, pid)
        pid = stat.parent if stat else 0
    return above


def climb(proc: Path, listener: Stat, foreign: set[int]) -> Stat:
    """The top of the listener's tree: as far up as session, process group and cgroup are the same. An interactive
    shell gives each job a group of its own, a service manager each unit a session and a cgroup."""
    top = listener
    group = read(proc / str(listener.pid) / "cgroup")
    while top.parent > 1 and top.parent not in foreign:
        parent = stat_of(proc, top.parent)
        if (
            parent is None
            or (parent.session, parent.group) != (listener.session, listener.group)
            or read(proc / str(parent.pid) / "cgroup") != group
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


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a name that cannot be resolved, or that is none
        return False
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False


# ---------------------------------------------------------------------------------------------------------------------
# Watching


def watch(options: Options) -> Iterator[list[Sample]]:
    """Sums over the tree, figures of its first members, and happenings: process_gone, process_new, restart."""
    proc = Path(options.root) / "proc"
    if not (proc / "net").exists():  # a simulated machine without a process table: its server is one of this machine
        proc = Path("/proc")
    port = 0
    if not options.pid:
        url = urlsplit(options.target_url)
        port = url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
        why = ""
        if not port or not url.hostname:
            why = "no target_url to take the port from"
        elif not is_here(url.hostname):
            why = f"target is not on this host ({url.hostname})"
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
            found = named(proc, options.pid) if options.pid else find(proc, port)
            find_ns = now + SCAN_SHARE * (clock.now_ns() - now) if found.hidden else 0
            if found.listener is not None:
                out += arrived(proc, tree, found.listener, foreign, now)
                scan_ns = 0
            text = about(tree) if found.listener else found.why
            if told != text and (told is None or found.listener):
                out.append(Sample("process", "observed", 1.0 if found.listener else 0.0, now, text=text))
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


def named(proc: Path, pid: int) -> Found:
    """The process that the user named."""
    stat = stat_of(proc, pid)
    return Found(stat, "" if stat else f"there is no process {pid}")


def look(proc: Path, tree: Tree, now: int) -> list[Sample]:
    """Read every member again; report who is gone, and who has been in a bad state for two looks."""
    out: list[Sample] = []
    for pid, member in list(tree.members.items()):
        before, stat = member.stat, stat_of(proc, pid)
        if stat is None or stat.start != before.start or stat.state in DEAD:
            del tree.members[pid]
            role = "listener" if tree.listener is not None and pid == tree.listener.pid else "member"
            out.append(
                happening(
                    "process_gone",
                    before,
                    now,
                    "ended and is left behind as a zombie" if stat and stat.state in DEAD else "is gone",
                    role=role,
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


def arrived(proc: Path, tree: Tree, listener: Stat, foreign: set[int], now: int) -> list[Sample]:
    """Somebody listens: the first time that is how things are, later it is a restart."""
    tree.listener = listener
    tree.top = climb(proc, listener, foreign).pid
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
            )
        )
    tree.members[listener.pid] = Member(listener, labels(listener))
    tree.gone_ns = None
    return out


def grow(proc: Path, tree: Tree, foreign: set[int], now: int) -> list[Sample]:
    """Look for new members. Those that have left the tree (their parent died) stay members."""
    everyone = {stat.pid: stat for pid in pids(proc) if (stat := stat_of(proc, pid)) is not None}
    top = tree.top if tree.top in everyone else tree.listener.pid if tree.listener else 0
    out: list[Sample] = []
    first = not tree.seen_ns
    tree.seen_ns = now
    for stat in descendants(everyone, top, foreign):
        if stat.pid not in tree.members and len(tree.members) < MAX_MEMBERS:
            tree.members[stat.pid] = Member(stat, labels(stat))
            if not first:
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


def happening(metric: str, stat: Stat, now: int, text: str, **more: str) -> Sample:
    return Sample(
        "process",
        metric,
        1.0,
        now,
        {**labels(stat), "start_ticks": str(stat.start), **more},
        f"pid {stat.pid} ({stat.name}) {text}".strip(),
    )


def about(tree: Tree) -> str:
    """How the server was found, for the report."""
    if tree.listener is None:
        return ""
    return f"pid {tree.listener.pid} ({tree.listener.name}) serves the port; its tree begins at pid {tree.top}"
