"""Did a guard touch the load: memory of the server's host fell so far that we issued no more, or cut our requests.

What: each level that the guard entered under load (`loadgen.guard`), from the samples of the fast lane and the journal
of the supervisor. It passes where a guard stood and stayed calm, warns where it warned or acted.
Why: a load that stopped for a guard proved nothing about the rest of the run, and killed nothing either: without any
other finding the verdict is INCONCLUSIVE (guard). What memory did is judged by the rule `headroom`.
Threshold: the guard's own, options of the scenario (`guards:`), printed in the finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.rules import GIB, Needs, happenings, not_evaluated, when
from loadgen.types import Finding, FindingStatus

if TYPE_CHECKING:
    from loadgen.record import Run


@dataclass(frozen=True, slots=True)
class Options:
    pass


def needs(options: Options) -> Needs:
    return Needs()


def check(run: Run, options: Options) -> list[Finding]:
    """Nothing where no guard stood (a server elsewhere, `--no-guard`, a host without memory figures)."""
    stood = happenings(run, "guard", "baseline")
    levels = happenings(run, "guard", "warn", "stop", "abort")
    acted = run.events("guard")
    if not stood and not levels and not acted and not run.finished:
        return [not_evaluated("guard", "stability", "no guard said anything, and the run has no end")]
    if acts := [r for r in acted if r.get("word") != "release"]:
        first = acts[0]
        cut = sum("guard" in o.flags for o in run.outcomes())
        message = f"the guard stopped issuing at {when(run, int(first['at']))}: {first.get('why')}"
        if aborts := [r for r in acts if r.get("level") == "abort"]:
            message += f"; at {when(run, int(aborts[0]['at']))} it cut {cut} requests: {aborts[0].get('why')}"
        elif ends := [r for r in acts if r.get("word") == "end"]:
            message += f"; at {when(run, int(ends[0]['at']))} it ended the run: {ends[0].get('why')}"
        held = sum(r.get("word") == "hold" for r in acts)
        return [_finding("warn", message, held, int(first["at"]))]
    if levels:
        low = min(d.min for d in levels) / GIB
        said = f"the guard warned from {when(run, levels[0].at_ns)} on, {len(levels)} times, lowest {low:.1f} GiB"
        return [_finding("warn", said, 0, levels[0].at_ns)]
    return [_finding("pass", f"the guard stayed calm; {stood[0].text}", 0, None)] if stood else []


def _finding(status: FindingStatus, message: str, holds: int, since_ns: int | None) -> Finding:
    return Finding(
        "guard", "stability", status, message, "", holds, 0, "holds", None,
        "samples: guard, journal.jsonl", since_ns, "guard" if status == "warn" else "",
    )  # fmt: skip
