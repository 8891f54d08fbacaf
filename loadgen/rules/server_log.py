"""What the server's own log says of its death: memory that was refused, a dead engine, a crash, a stuck worker.

What: lines of the server's log by the severity that the monitor `logs` gave them: `high` and `warn` warn, `fail` fails,
but a refusal of memory that no request felt (none failed in the minute around it) only warns. Figures of the start
that cannot be right (memory for the KV cache or for graphs below zero) warn. Where no log was named, nothing is said.
Why: an engine that dies shows the client nothing but a cut stream; a server may also refuse one allocation, answer one
request with an error, and serve on.
Threshold: one line; a burst counts as what it says. The table of lines is the monitor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.rules import NOT_OBSERVED, SECOND, Needs, happenings, not_evaluated, when
from loadgen.types import Finding, FindingStatus

if TYPE_CHECKING:
    from loadgen.record import Run

EVENTS = (
    "engine_dead", "crash", "gpu_error", "gpu_out_of_memory", "host_out_of_memory", "kv_memory_missing", "start_failed",
    "collective_timeout", "watchdog_timeout", "engine_stuck", "kv_full",
)  # fmt: skip
# A server may survive these: the request that asked for too much fails, and the next is served.
SURVIVABLE = frozenset({"gpu_out_of_memory", "host_out_of_memory", "kv_memory_missing"})
# Requests that failed this close to the line felt it: the longest that a stream takes to be cut is our idle time-out.
AROUND_S = 60.0
NEVER_NEGATIVE = ("kv_available_bytes", "graph_estimate_bytes", "graph_bytes", "device_free_bytes")


@dataclass(frozen=True, slots=True)
class Options:
    """`ignore`: names of happenings that mean nothing on this server."""

    ignore: tuple[str, ...] = ()


def needs(options: Options) -> Needs:
    return Needs(monitors=("logs",))


def check(run: Run, options: Options) -> list[Finding]:
    said = run.observed().get("logs")
    if said is None:
        return []  # nobody asked for it; where it was asked for and said nothing, `blind` says so
    seen, why = said
    if not seen:
        return [not_evaluated("server_log", "stability", f"server's log not observed: {why}", cause=NOT_OBSERVED)]
    failures = sorted(o.done_ns for o in run.outcomes() if o.outcome == "failed" and o.done_ns is not None)
    findings = []
    for name in EVENTS:
        events = [] if name in options.ignore else happenings(run, "logs", name)
        if not events:
            continue
        felt = sum(any(abs(at - d.at_ns) <= AROUND_S * SECOND for d in events) for at in failures)
        grave = any(d.labels.get("severity") == "fail" for d in events)
        status: FindingStatus = "fail" if grave and (felt or name not in SURVIVABLE) else "warn"
        first, count = events[0], sum(d.last for d in events)
        number = "no request failed" if not felt else f"{felt} request{'s' * (felt > 1)} failed"
        message = f"{count:.0f} × {name.replace('_', ' ')} in the server's log, first at {when(run, first.at_ns)}: "
        message += f"{(first.text or '')[:160]} ({number} within {AROUND_S:.0f} s)"
        findings.append(_finding(status, message, name, count, first.at_ns))
    for metric in NEVER_NEGATIVE:
        values = [s.min[k] for s in run.series("logs", metric).values() for k in range(len(s.at_ns))]
        if values and min(values) < 0:
            text = f"the server's log gives {metric} as {min(values) / 2**30:.2f} GiB: its own accounting is wrong"
            findings.append(_finding("warn", text, metric, min(values), None))
    quiet = "nothing alarming in the server's log"
    return findings or [Finding("server_log", "stability", "pass", quiet, number=0, bound=0, unit="lines")]


def _finding(status: FindingStatus, message: str, name: str, number: float, at_ns: int | None) -> Finding:
    return Finding(
        "server_log", "stability", status, message, name, number, 0, "lines", None, "samples: logs", at_ns, name,
        hard=status == "fail",
    )  # fmt: skip
