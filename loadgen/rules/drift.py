"""Latency that creeps up: time to first token at the end of the run against its beginning.

What: the ratio of median TTFT, last third by first third of the measured time, per class, cache intent and length bin.
Why: the mean over a soak can stay within its limit while the end is twice as slow as the beginning, which is the very
thing that a soak is for. Like is compared with like: in a pooled mix a shift of lengths looks like drift.
Threshold: above 1.25 warn, above 1.5 fail, from 8 answers per third. Medians of so few jump by chance, so the shift
must also be sure: z of Mann–Whitney, corrected for autocorrelation, above 2.33 (1 %) to warn and 3.09 (0.1 %) to fail.
A large ratio that may be chance is not evaluated; one that others on the host explain makes the measurement invalid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.rules import Needs, busier_box, measured, not_evaluated, sureness, thirds
from loadgen.stats import MIN_PER_THIRD
from loadgen.types import Axis, Finding, FindingStatus, Outcome

if TYPE_CHECKING:
    from loadgen.record import Run


AXIS: Axis = "performance"


@dataclass(frozen=True, slots=True)
class Options:
    warn_ratio: float = 1.25
    fail_ratio: float = 1.5
    per_third: int = MIN_PER_THIRD
    warn_z: float = 2.33
    fail_z: float = 3.09


def needs(options: Options) -> Needs:
    return Needs(per_class=3 * options.per_third)


def _ttft_s(outcome: Outcome) -> float | None:
    return None if outcome.ttft_ns is None else outcome.ttft_ns / 1e9


def check(run: Run, options: Options) -> list[Finding]:
    groups = thirds(run, _ttft_s)
    if not groups:
        return [not_evaluated("drift", AXIS, "no good answer was measured", n=0)]
    span = measured(run)
    findings = []
    for scope, group in groups.items():
        if group.n < options.per_third:
            why = f"TTFT {scope}: {group.n} answers per third, needs {options.per_third}"
            findings.append(not_evaluated("drift", AXIS, why, scope, group.n))
            continue
        ratio, z = group.ratio, sureness(group.first, group.last)
        message = f"TTFT {scope}: median {ratio:.2f} × that of the first third (z {z:.1f})"
        if ratio > options.fail_ratio and z <= options.warn_z:
            findings.append(not_evaluated("drift", AXIS, f"{message}: may be chance", scope, group.n))
            continue
        status: FindingStatus = "pass"
        if ratio > options.warn_ratio and z > options.warn_z:
            status = "fail" if ratio > options.fail_ratio and z > options.fail_z else "warn"
        bound = options.fail_ratio if status == "fail" else options.warn_ratio
        since = span[0] + 2 * (span[1] - span[0]) // 3 if span and status != "pass" else None
        cause, axis = "degrading" if status != "pass" else "", AXIS
        if status == "fail" and (others := busier_box(run)):
            cause, axis, message = "busy_box", "measurement", f"{message}; but {others}"
        findings.append(
            Finding("drift", axis, status, message, scope, ratio, bound, "ratio", group.n, "outcomes", since, cause)
        )
    return findings
