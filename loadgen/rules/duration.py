"""Was it long enough? The measured time against what the scenario planned.

What: from the start of the first measuring phase to the moment when the last one stopped issuing. A run without its
end on record, or one whose measuring never began, proves nothing either.
Why: a server that dies at minute nine passes a test of eight minutes; a run that was cut must not look like a short
one.
Threshold: 95 % of the plan, and `min_seconds` where a team wants one (MLPerf's is 600). A run that a guard stopped is
short for a reason: it warns. How many answers each rule needs it says itself; a required rule that lacks them makes
the run INCONCLUSIVE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.rules import SECOND, Needs, measured
from loadgen.types import Finding, FindingStatus, Seconds

if TYPE_CHECKING:
    from loadgen.record import Run


@dataclass(frozen=True, slots=True)
class Options:
    min_seconds: Seconds = Seconds(0)
    plan_share: float = 0.95


def needs(options: Options) -> Needs:
    return Needs(seconds=options.min_seconds)


def check(run: Run, options: Options) -> list[Finding]:
    span = measured(run)
    plan = [p for p in run.scenario.phases if p.kind == "measure"]
    seconds = 0.0 if span is None else (span[1] - span[0]) / SECOND
    planned = sum(float(p.duration or 0) for p in plan)
    # a phase that ends by its count is as long as it takes
    wanted = max(options.min_seconds, 0 if any(p.count for p in plan) else options.plan_share * planned)
    status: FindingStatus = "pass"
    message = f"measured {seconds:.0f} s" + (f" of {planned:.0f} s planned" if planned else "")
    cause = ""
    if not plan:
        return [Finding("duration", "measurement", "not_evaluated", "the scenario has no measuring phase")]
    if span is None:
        status, message, cause = "fail", "measuring never began", "too_short"
    elif not run.finished and run.interrupted is None:
        status, message, cause = "fail", f"{message}: the run has no end on record", "cut_short"
    elif seconds < wanted:
        guarded = any(r["event"] == "guard" for r in run.journal)
        status, cause = ("warn", "guard") if guarded else ("fail", "too_short")
        message += f", needs {wanted:.0f} s"
    return [
        Finding(
            "duration", "measurement", status, message, "", seconds, wanted, "s", None, "journal.jsonl", None, cause
        )
    ]
