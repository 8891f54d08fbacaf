"""Throughput that is kept: tokens per second of each answer, at the end of the run against its beginning.

What: the ratio of median output tokens per second of a request (first byte to last included), last third by first
third, per class, cache intent and length bin. Token counts are those of `usage`.
Why: decode that slows down from 50 to 100 ms per token shows here, whatever TTFT does.
Threshold: at least 0.95 passes, 0.80 to 0.95 warns, below fails: the two values that published soaks use (98 %
promised, 80 % enforced) with 5 % as the practical difference; `strict` asks for 0.98. As in `drift` a fall must also
be sure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loadgen.rules import Needs, busier_box, measured, not_evaluated, sureness, thirds
from loadgen.stats import MIN_PER_THIRD
from loadgen.types import Axis, Finding, FindingStatus, Outcome

if TYPE_CHECKING:
    from loadgen.record import Run


AXIS: Axis = "performance"


@dataclass(frozen=True, slots=True)
class Options:
    preset: Literal["default", "strict"] = "default"
    pass_ratio: float = 0.95
    fail_ratio: float = 0.80
    per_third: int = MIN_PER_THIRD
    warn_z: float = 2.33
    fail_z: float = 3.09


STRICT_RATIO = 0.98


def needs(options: Options) -> Needs:
    return Needs(per_class=3 * options.per_third)


def _tokens_per_s(outcome: Outcome) -> float | None:
    if outcome.output_tokens_source != "usage" or not outcome.output_tokens or not outcome.e2e_ns:
        return None
    return outcome.output_tokens * 1e9 / outcome.e2e_ns


def check(run: Run, options: Options) -> list[Finding]:
    pass_ratio, fail_ratio = options.pass_ratio, options.fail_ratio
    if options.preset == "strict":
        pass_ratio = fail_ratio = STRICT_RATIO
    groups = thirds(run, _tokens_per_s)
    if not groups:
        return [not_evaluated("retention", AXIS, "no good answer with a token count was measured", n=0)]
    span = measured(run)
    findings = []
    for scope, group in groups.items():
        if group.n < options.per_third:
            why = f"tokens/s {scope}: {group.n} answers per third, needs {options.per_third}"
            findings.append(not_evaluated("retention", AXIS, why, scope, group.n))
            continue
        ratio, z = group.ratio, sureness(group.last, group.first)
        message = f"tokens/s {scope}: median {100 * ratio:.0f} % of the first third (z {z:.1f})"
        if ratio < fail_ratio and z <= options.warn_z:
            findings.append(not_evaluated("retention", AXIS, f"{message}: may be chance", scope, group.n))
            continue
        status: FindingStatus = "pass"
        if ratio < pass_ratio and z > options.warn_z:
            status = "fail" if ratio < fail_ratio and z > options.fail_z else "warn"
        bound = fail_ratio if status == "fail" else pass_ratio
        since = span[0] + 2 * (span[1] - span[0]) // 3 if span and status != "pass" else None
        cause, axis = "degrading" if status != "pass" else "", AXIS
        if status == "fail" and (others := busier_box(run)):
            cause, axis, message = "busy_box", "measurement", f"{message}; but {others}"
        findings.append(
            Finding(
                "retention", axis, status, message, scope, ratio, bound, "ratio", group.n, "outcomes", since,
                cause,
            )
        )  # fmt: skip
    return findings
