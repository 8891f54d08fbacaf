"""What else the kernel said that a healthy host does not say: lock-ups, stalls, failing devices, poisoned memory.

What: events of the kernel log by the severity that the monitor gave them: `fail` fails, `high` and `warn` warn. OOM
kills, Xids and the driver's refusals of memory have rules of their own (`oom`, `gpu`, `headroom`).
Why: a host that is about to be lost often says so first, and afterwards nobody can ask it.
Threshold: one line; a burst counts as what it says. The table of signals is the kernel monitor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.rules import NOT_OBSERVED, Needs, happenings, not_evaluated, unwatched, when
from loadgen.types import Finding, FindingStatus

if TYPE_CHECKING:
    from loadgen.record import Run

EVENTS = (
    "iova_no_memory", "hung_task", "soft_lockup", "rcu_stall", "page_allocation_failure", "pcie_error",
    "thermal_critical", "thermal_throttle", "storage_error", "machine_check",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    ignore: tuple[str, ...] = ()


def needs(options: Options) -> Needs:
    return Needs(monitors=("kernel",))


def check(run: Run, options: Options) -> list[Finding]:
    seen, why = run.observed().get("kernel", (False, "not watched"))
    if blind := unwatched(run, "kernel"):
        return blind
    if not seen:
        return [not_evaluated("kernel", "stability", f"kernel log not observed: {why}", cause=NOT_OBSERVED)]
    findings = []
    for name in EVENTS:
        events = [] if name in options.ignore else happenings(run, "kernel", name)
        if not events:
            continue
        grave = [d for d in events if d.labels.get("severity") == "fail"]
        first = (grave or events)[0]
        status: FindingStatus = "fail" if grave else "warn"
        count = sum(d.last for d in events)
        message = f"{count:.0f} × {name.replace('_', ' ')} in the kernel log, first at {when(run, first.at_ns)}"
        findings.append(
            Finding(
                "kernel",
                "stability",
                status,
                message,
                name,
                count,
                0,
                "events",
                None,
                "samples: kernel",
                first.at_ns,
                name,
            )
        )
    return findings or [
        Finding("kernel", "stability", "pass", "nothing alarming in the kernel log", number=0, bound=0, unit="events")
    ]
