"""Wrong answers: of classes that the model could do alone on the idle server.

What: under load, the share of answers whose grader said no. Garbage, degenerate or empty text has nothing to do with
skill: one is enough. A wrong or malformed answer may be a slip of sampling: from two on, and above `tolerate`, it is
hard. Classes that the model could not do in the functional phase were left out; each is named as not evaluated.
Why: a corrupted cache, a bad kernel at depth or a broken batch shows as fluent nonsense long before it shows as an
error, and speed figures of nonsense are worth nothing.
Threshold: 2 % of slips; temperature 0 is not bit-exact across batch sizes, and a healthy server still misses none of
the easy tasks in most runs. For a small model whose skill wavers, raise `tolerate`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.rules import Needs, graded, not_evaluated, when
from loadgen.types import Finding, FindingStatus, Outcome

if TYPE_CHECKING:
    from loadgen.record import Run


@dataclass(frozen=True, slots=True)
class Options:
    tolerate: float = 0.02
    min_misses: int = 2
    hard_kinds: tuple[str, ...] = ("garbage", "degenerate", "empty")


def needs(options: Options) -> Needs:
    return Needs()


def check(run: Run, options: Options) -> list[Finding]:
    left_out = {str(r.get("cls")): str(r.get("why", "")) for r in run.journal if r.get("event") == "class_left_out"}
    findings = [
        not_evaluated("grades", "functional", f"{cls} left out: {why}", scope=cls)
        for cls, why in sorted(left_out.items())
    ]
    answers: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    first: dict[tuple[str, bool], Outcome] = {}
    for outcome in graded(run, run.outcomes()):
        assert outcome.grade is not None
        answers[outcome.cls] += 1
        if not outcome.grade.ok:
            kinds[outcome.cls][outcome.grade.kind] += 1
            first.setdefault((outcome.cls, outcome.grade.kind in options.hard_kinds), outcome)
    if not answers:
        return [*findings, not_evaluated("grades", "functional", "no answer under load was graded", n=0)]
    for cls, n in sorted(answers.items()):
        missed = kinds[cls]
        bad, slips = (sum(c for k, c in missed.items() if (k in options.hard_kinds) is hard) for hard in (True, False))
        fails = bad > 0 or (slips >= options.min_misses and slips / n > options.tolerate)
        status: FindingStatus = "fail" if fails else "warn" if missed else "pass"
        message = f"{cls}: all {n} answers right"
        witness = first.get((cls, True)) or first.get((cls, False))
        if witness is not None and witness.grade is not None:
            said = ", ".join(f"{count} {kind}" for kind, count in missed.most_common())
            at = when(run, witness.done_ns or witness.due_ns)
            message = f"{cls}: {missed.total()} of {n} answers missed ({said}), first at {at}: {witness.grade.why}"
        findings.append(
            Finding(
                "grades", "functional", status, message, cls, missed.total() / n, options.tolerate, "share", n,
                f"outcomes: {witness.id}" if witness else "outcomes",
                None if witness is None else witness.done_ns, _cause(bad, slips), fails,
            )
        )  # fmt: skip
    return findings


def _cause(bad: int, slips: int) -> str:
    return "degenerate_output" if bad else "wrong_answers" if slips else ""
