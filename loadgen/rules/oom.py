"""Out-of-memory kills, and whose death they were.

What: kill lines of the kernel log (and of user-space killers), told apart by victim and by cause, and the kernel's own
counters of kills. A kill within the server's process tree, or by the whole host's shortage, or counted by the server's
cgroup, is hard; a container of somebody else that hit its own limit is a warning.
Why: exit code 137 and Docker's OOMKilled flag both lie in both directions; the log line with its pid does not.
Threshold: none, any kill counts. Without the log the host's counter alone can still say that nobody was killed, but
not who was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.rules import NOT_OBSERVED, Needs, happenings, not_evaluated, readings, unwatched, when
from loadgen.types import Digest, Finding, FindingStatus

if TYPE_CHECKING:
    from loadgen.record import Run

WHOLE_HOST = ("oom_kill_global", "oom_deadlock", "oom_reaper_failed")
KILLS = ("oom_kill_memcg", "userspace_oom_kill", *WHOLE_HOST)


@dataclass(frozen=True, slots=True)
class Options:
    foreign_fails: bool = False


def needs(options: Options) -> Needs:
    return Needs(monitors=("kernel", "host", "cgroup"))


def check(run: Run, options: Options) -> list[Finding]:
    if blind := unwatched(run, "oom"):
        return blind
    log_seen, log_why = run.observed().get("kernel", (False, "the kernel log was not watched"))
    kills = [d for d in happenings(run, "kernel", *KILLS) if "burst" not in d.labels]
    tree = {d.labels["pid"] for d in run.digests("process") if "pid" in d.labels}
    findings = [_kill(run, kill, kill.labels.get("pid") in tree, options) for kill in kills]
    counted, host = _rise(run, "cgroup"), _rise(run, "host")
    if counted is not None and counted[0] > 0:
        message = f"the server's cgroup counted {counted[0]:.0f} kills"
        findings.append(_finding(True, message, "cgroup", counted[0], "samples: cgroup.oom_kill_total", counted[1]))
    if host is not None and host[0] > len(kills):
        # the counter and a vanished process of the server are two signs of one event; the counter alone names nobody
        gone = bool(happenings(run, "process", "process_gone", "restart"))
        message = f"the host counted {host[0]:.0f} OOM kills, the kernel log showed {len(kills)}"
        message += ", and a process of the server vanished" if gone else ": victim unknown"
        findings.append(_finding(gone, message, "counter", host[0], "samples: host.oom_kill_total", host[1]))
    if findings:
        return findings
    if not log_seen and host is None:
        return [not_evaluated("oom", "stability", f"no OOM kill could have been seen: {log_why}", cause=NOT_OBSERVED)]
    source = "in the kernel log" if log_seen else "by the host's counter (the kernel log was not seen)"
    return [Finding("oom", "stability", "pass", f"no OOM kill {source}", number=0, bound=0, unit="kills")]


def _rise(run: Run, monitor: str) -> tuple[float, int] | None:
    """By how much the counter of kills rose, and when first; None where it was not read."""
    counter = readings(run, monitor, "oom_kill_total", None)
    if len(counter) == 0:
        return None
    risen = counter.at_ns[counter.last > counter.min[0]]
    return float(counter.last[-1] - counter.min[0]), int(risen[0]) if len(risen) else 0


def _kill(run: Run, kill: Digest, ours: bool, options: Options) -> Finding:
    whole_host = kill.metric in WHOLE_HOST
    who = f"pid {kill.labels.get('pid', '?')} ({kill.labels.get('comm', '?')})"
    killer = {"userspace_oom_kill": "a user-space OOM daemon", "oom_kill_memcg": "its memory cgroup"}.get(kill.metric)
    message = f"at {when(run, kill.at_ns)} {killer or 'the out-of-memory host'} killed {who}, "
    message += "of the server" if ours else "not of the server"
    cause = "host_oom" if whole_host and not ours else "oom_kill"
    hard = ours or whole_host or options.foreign_fails
    return _finding(hard, message, "" if ours else "foreign", 1, "samples: kernel", kill.at_ns, cause)


def _finding(
    hard: bool, message: str, scope: str, number: float, evidence: str, since_ns: int, cause: str = "oom_kill"
) -> Finding:
    status: FindingStatus = "fail" if hard else "warn"
    return Finding(
        "oom", "stability", status, message, scope, number, 0, "kills", None, evidence, since_ns, cause, hard
    )
