"""Out-of-memory kills, and whose death they were.

What: kill lines of the kernel log (and of user-space killers), told apart by victim and by cause; the kernel's counters
of kills, of the server's cgroup and of the whole host; and the word of the container engine or of systemd. A kill
within the server's process tree, its container or its cgroup, or by the whole host's shortage, is hard; a container of
somebody else that hit its own limit is a warning. Next to each kill of the server stand the other two of the three
signs: the engine's flag and the exit code.
Why: exit code 137 is any SIGKILL, and OOMKilled is missing after real kills (moby#38352) and true after survived ones
(moby#15621); the log line with its pid and cgroup lies in neither direction.
Threshold: none, any kill counts. Of the engine's signs alone none is a verdict: flag and code together are, unless the
kernel counted no kill. Without the log the host's counter can still say that nobody was killed, but not who was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.rules import NOT_OBSERVED, SECOND, Needs, happenings, not_evaluated, readings, unwatched, when
from loadgen.types import Digest, Finding, FindingStatus

if TYPE_CHECKING:
    from loadgen.record import Run

WHOLE_HOST = ("oom_kill_global", "oom_deadlock", "oom_reaper_failed")
KILLS = ("oom_kill_memcg", "userspace_oom_kill", *WHOLE_HOST)
# Signs this close are of one event: the engine is asked every 5 s, systemd every 15 s.
NEAR_NS = 20 * SECOND
SIGKILL_CODES = ("137", "9")  # as a container's exit code (128 + 9), as systemd's status


@dataclass(frozen=True, slots=True)
class Options:
    foreign_fails: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    """By what a victim is known to be the server's: pids of its tree, its containers, its own cgroups, its units; and
    which of the pids answer for it (listener, a container's first process)."""

    pids: frozenset[str]
    mains: frozenset[str]
    containers: frozenset[str]
    cgroups: frozenset[str]
    units: frozenset[str]

    def owns(self, kill: Digest) -> bool:
        path = kill.labels.get("task_memcg") or kill.labels.get("cgroup") or ""  # systemd-oomd kills a whole cgroup
        return (
            kill.labels.get("pid") in self.pids
            or kill.labels.get("unit") in self.units
            or any(container in path for container in self.containers)
            or any(f"{path}/".startswith(f"{own}/") for own in self.cgroups)
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """What container engine or systemd said of one end: when, flag, exit code; None where it did not say."""

    at_ns: int
    flag: bool | None
    code: str | None
    source: str

    def words(self) -> str:
        flag = {None: "flag unknown", True: "flag set", False: "flag not set"}[self.flag]
        name = "OOMKilled" if self.source == "docker" else "Result=oom-kill"
        return f"{name} {flag}, {'still running' if self.code is None else f'exit code {self.code}'}"


def needs(options: Options) -> Needs:
    return Needs(monitors=("kernel", "host", "cgroup"))


def check(run: Run, options: Options) -> list[Finding]:
    if blind := unwatched(run, "oom"):
        return blind
    log_seen, log_why = run.observed().get("kernel", (False, "the kernel log was not watched"))
    kills = [d for d in happenings(run, "kernel", *KILLS) if "burst" not in d.labels]
    server = _server(run)
    said = _engine(run)
    counted, host = _rise(run, "cgroup"), _rise(run, "host")
    findings = [_kill(run, kill, server, said, counted, options) for kill in kills]
    ours = [kill for kill in kills if server.owns(kill)]
    if counted is not None and counted[0] > len(ours):
        findings.append(_counted(run, counted, len(ours), said))
        counted_ours = _own_cgroup(run)
    else:
        counted_ours = False
    explained = max(len(kills), int(counted[0]) if counted else 0)
    if host is not None and host[0] > explained:
        # the counter and a vanished process of the server are two signs of one event; the counter alone names nobody
        gone = bool(happenings(run, "process", "process_gone", "restart"))
        message = f"the host counted {host[0]:.0f} OOM kills, the kernel log showed {len(kills)}"
        message += ", and a process of the server vanished" if gone else ": victim unknown"
        findings.append(_finding(gone, message, "counter", host[0], "samples: host.oom_kill_total", host[1]))
    if not ours and not counted_ours:
        counters = [rise for rise in (counted, host) if rise is not None]
        nobody = log_seen and bool(counters) and not any(rise[0] for rise in counters)
        findings += [f for each in said if (f := _by_word(run, each, nobody, log_seen)) is not None]
    if findings:
        return findings
    if not log_seen and host is None and counted is None:
        why = f"no OOM kill could have been seen: {log_why}"
        if any(each.code in SIGKILL_CODES for each in said):
            why += "; the server was ended by SIGKILL, which may have been one"
        return [not_evaluated("oom", "stability", why, cause=NOT_OBSERVED)]
    counter = "the host's counter" if host is not None else "its cgroup's counter"
    source = "in the kernel log" if log_seen else f"by {counter} (the kernel log was not seen)"
    return [Finding("oom", "stability", "pass", f"no OOM kill {source}", number=0, bound=0, unit="kills")]


def _server(run: Run) -> Server:
    pids: set[str] = set()
    mains: set[str] = set()
    containers: set[str] = set()
    cgroups: set[str] = set()
    units: set[str] = set()
    said = [d for monitor in ("cgroup", "docker", "systemd") for d in run.digests(monitor, "observed")]
    said += [*happenings(run, "cgroup", "cgroup_new"), *happenings(run, "docker", "started", "restarted")]
    for source in (run.digests("process"), said):
        for d in source:
            pid = d.labels.get("pid", "")
            if pid and (d.metric == "observed" or d.labels.get("role") == "listener"):
                mains.add(pid)
            pids.add(pid)
            containers.add(d.labels.get("container", ""))
            units.add(d.labels.get("unit", ""))
            if "shared" not in d.labels:
                cgroups.add(d.labels.get("cgroup", ""))
    for monitor in ("docker", "systemd"):  # the first process is another one after a restart
        mains |= {str(int(pid)) for pid in readings(run, monitor, "main_pid", None).last.tolist()}
    nothing = {"", "/"}
    return Server(*(frozenset(found - nothing) for found in (pids | mains, mains, containers, cgroups, units)))


def _engine(run: Run) -> list[Engine]:
    """Each end and each flag that was told. An OOM event and the exit that follows are one."""
    found: list[Engine] = []
    for d in happenings(run, "docker", "oom", "oom_flag", "exited"):
        flag = {"true": True, "false": False}.get(d.labels.get("oom_killed", ""))
        found.append(Engine(d.at_ns, True if d.metric != "exited" else flag, d.labels.get("exit_code"), "docker"))
    found += [
        Engine(d.at_ns, d.labels.get("result") == "oom-kill", d.labels.get("status"), "systemd")
        for d in happenings(run, "systemd", "result")
    ]
    merged: list[Engine] = []
    for each in found:
        last = merged[-1] if merged else None
        if last is not None and last.source == each.source and last.code is None and each.at_ns - last.at_ns < NEAR_NS:
            merged[-1] = Engine(last.at_ns, bool(last.flag or each.flag), each.code, each.source)
        else:
            merged.append(each)
    return merged


def _near(said: list[Engine], at_ns: int) -> Engine | None:
    near = [each for each in said if abs(each.at_ns - at_ns) < NEAR_NS]
    return min(near, key=lambda each: (each.code is None, abs(each.at_ns - at_ns)), default=None)


def _own_cgroup(run: Run) -> bool:
    """Whether the counter was of a cgroup that is the server's alone; one that does not say was."""
    own = readings(run, "cgroup", "own", None)
    return len(own) == 0 or bool(own.last.max() > 0)


def _rise(run: Run, monitor: str) -> tuple[float, int] | None:
    """By how much the counter of kills rose, and when first; None where it was not read. A new cgroup begins at 0."""
    counter = readings(run, monitor, "oom_kill_total", None)
    if len(counter) == 0:
        return None
    total, first_ns, before = 0.0, 0, float(counter.min[0])
    for at_ns, now in zip(counter.at_ns.tolist(), counter.max.tolist(), strict=True):
        if now > before:
            total += now - before
            first_ns = first_ns or at_ns
        before = now
    return total, first_ns


def _counted(run: Run, counted: tuple[float, int], known: int, said: list[Engine]) -> Finding:
    """The cgroup counted more kills than the log shows."""
    kills, at_ns = counted
    log = f", the kernel log shows {known} of them" if known else ""
    if _own_cgroup(run):
        word = _near(said, at_ns)
        message = f"the server's cgroup counted {kills:.0f} kills{log}{f' ({word.words()})' if word else ''}"
        return _finding(True, message, "cgroup", kills, "samples: cgroup.oom_kill_total", at_ns)
    gone = [d for d in happenings(run, "process", "process_gone", "restart") if abs(d.at_ns - at_ns) < NEAR_NS]
    message = f"a cgroup that the server shares counted {kills:.0f} kills{log}"
    message += ", and a process of the server vanished" if gone else ": victim unknown"
    return _finding(bool(gone), message, "cgroup", kills, "samples: cgroup.oom_kill_total", at_ns)


def _kill(
    run: Run, kill: Digest, server: Server, said: list[Engine], counted: tuple[float, int] | None, options: Options
) -> Finding:
    ours = server.owns(kill)
    whole_host = kill.metric in WHOLE_HOST
    whole = kill.labels.get("unit") or kill.labels.get("cgroup")
    who = f"pid {kill.labels.get('pid', '?')} ({kill.labels.get('comm', '?')})"
    who = f"all of {whole}" if whole and "pid" not in kill.labels else who
    killer = {"userspace_oom_kill": "a user-space OOM daemon", "oom_kill_memcg": "its memory cgroup"}.get(kill.metric)
    message = f"at {when(run, kill.at_ns)} {killer or 'the out-of-memory host'} killed {who}, "
    scope = "" if ours else "foreign"
    if ours and _is_child(run, kill, server):
        scope = "child"
        message += "a child of the server, which still runs"
    else:
        message += "of the server" if ours else "not of the server"
    evidence = "samples: kernel"
    signs = ["kernel log yes"]
    if ours and counted is not None:
        signs.append(f"its cgroup counted {counted[0]:.0f}")
        evidence += ", cgroup.oom_kill_total"
    if ours and (word := _near(said, kill.at_ns)) is not None:
        signs.append(word.words())
        evidence += f", {word.source}"
    message += f" ({', '.join(signs)})" if len(signs) > 1 else ""
    cause = "host_oom" if whole_host and not ours else "oom_kill"
    hard = ours or whole_host or options.foreign_fails
    return _finding(hard, message, scope, 1, evidence, kill.at_ns, cause)


def _is_child(run: Run, kill: Digest, server: Server) -> bool:
    """Whether somebody died who does not answer for the server, and the one who does went on."""
    if not server.mains or kill.labels.get("pid") in server.mains:
        return False
    ends = [d for d in happenings(run, "process", "process_gone") if d.labels.get("role") == "listener"]
    ends += happenings(run, "docker", "exited", "removed")
    ends += [d for d in happenings(run, "systemd", "state") if d.labels.get("state") in ("failed", "inactive")]
    return not any(abs(d.at_ns - kill.at_ns) < NEAR_NS for d in ends)


def _by_word(run: Run, each: Engine, nobody: bool, log_seen: bool) -> Finding | None:
    """What the engine alone makes of it: flag and code are two signs; the kernel's silence is worth more than one."""
    if not each.flag:
        return None
    two = each.code in SIGKILL_CODES
    log = "the kernel counted no kill" if nobody else "no line in the kernel log" if log_seen else "kernel log not seen"
    message = f"at {when(run, each.at_ns)} {each.words()}, {log}"
    message += "" if two and not nobody else ": no verdict alone"
    return _finding(two and not nobody, message, "engine", 1, f"samples: {each.source}", each.at_ns)


def _finding(
    hard: bool, message: str, scope: str, number: float, evidence: str, since_ns: int, cause: str = "oom_kill"
) -> Finding:
    status: FindingStatus = "fail" if hard else "warn"
    return Finding(
        "oom", "stability", status, message, scope, number, 0, "kills", None, evidence, since_ns, cause, hard
    )
