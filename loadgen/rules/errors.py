"""Failed requests: how many, and those that no serving engine should ever produce.

What: the share of requests under load that failed on the server's side, overall and per class; errors delivered inside
a 200 stream, answers that the server aborted and streams that broke off are hard: the engine took a request and lost
it.
Why: aggregates hide them. One error in the middle of a stream was quoted as a slow-down more than once.
Threshold: published soaks fail on any non-200 or broken stream; 1 % leaves room for a refused connection in a long
run, which still warns. A class of its own fails from three failures on, since one of six rare requests proves little.
Requests that we cut, and failures of our own, are not counted here. `ignore` takes error classes that a scenario
provokes on purpose (`rate_limited`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.rules import Needs, loaded, not_evaluated, when
from loadgen.types import OUR_ERRORS, Finding, FindingStatus, Outcome

if TYPE_CHECKING:
    from loadgen.record import Run

# Fewer failures than this do not fail a single class.
CLASS_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Options:
    warn_share: float = 0.0
    fail_share: float = 0.01
    ignore: tuple[str, ...] = ()
    hard: tuple[str, ...] = ("in_band_error", "aborted_by_server", "stream_truncated")


def needs(options: Options) -> Needs:
    return Needs()


def check(run: Run, options: Options) -> list[Finding]:
    labels = {p.name for p in loaded(run)}
    ended: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    by_class: Counter[str] = Counter()
    first: dict[str, Outcome] = {}
    for outcome in run.outcomes():
        if outcome.phase not in labels or outcome.outcome == "incomplete":
            continue
        if outcome.error_class in OUR_ERRORS or outcome.error_class in options.ignore:
            continue
        ended[outcome.cls] += 1
        if outcome.outcome == "failed" and outcome.error_class is not None:
            failed[outcome.cls] += 1
            by_class[outcome.error_class] += 1
            first.setdefault(outcome.error_class, outcome)
    n, bad = ended.total(), failed.total()
    if n == 0:
        return [not_evaluated("errors", "stability", "no request under load came to an end", n=0)]
    if bad == n:
        worst, count = by_class.most_common(1)[0]
        message = f"no request succeeded: {count} of {n} {worst}"
        return [_finding("fail", message, 1.0, options.fail_share, n, first[worst], cause="failed", hard=True)]
    findings = [
        _finding(
            "fail",
            f"{by_class[kind]} × {kind}, first at {when(run, first[kind].done_ns or first[kind].due_ns)}",
            float(by_class[kind]), 0.0, n, first[kind], scope=kind, unit="requests", cause=kind, hard=True,
        )
        for kind in options.hard
        if by_class[kind]
    ]  # fmt: skip
    status = _status(bad / n, options)
    kinds = ", ".join(f"{count} × {kind}" for kind, count in by_class.most_common())
    message = f"{bad} of {n} requests failed ({kinds})" if bad else f"no failure in {n} requests"
    earliest = min(first.values(), key=lambda o: o.done_ns or o.due_ns) if first else None
    findings.append(_finding(status, message, bad / n, options.fail_share, n, earliest, cause="errors" if bad else ""))
    for cls, count in sorted(failed.items()):
        if count >= CLASS_FAILURES and count / ended[cls] > options.fail_share and status != "fail":
            message = f"{count} of {ended[cls]} requests of {cls} failed"
            share = count / ended[cls]
            findings.append(
                _finding("fail", message, share, options.fail_share, ended[cls], None, scope=cls, cause="errors")
            )
    return findings


def _status(share: float, options: Options) -> FindingStatus:
    return "fail" if share > options.fail_share else "warn" if share > options.warn_share else "pass"


def _finding(
    status: FindingStatus, message: str, number: float, bound: float, n: int, first: Outcome | None, *,
    scope: str = "", unit: str = "share", cause: str = "", hard: bool = False,
) -> Finding:  # fmt: skip
    evidence = f"outcomes: {first.id}" if first else "outcomes"
    since = None if first is None else first.done_ns or first.due_ns
    return Finding("errors", "stability", status, message, scope, number, bound, unit, n, evidence, since, cause, hard)
