"""Service levels that the scenario states: `ttft[class=chat_short] p95 < 2s -> fail`.

What: each line of `slo:` is `metric[class=…,phase=…,cache=…] aggregate op bound [-> fail|warn]`, judged over the
measuring phases. Metrics are the latencies of good answers, `error_rate` and `grade_rate` (shares), and
`output_tokens_per_s` (`rate`: all of a class's tokens per second of the run; other aggregates: of single requests).
Why: what is good enough only its user knows.
Threshold: none of ours. A percentile that so few samples do not certify is not evaluated: it can neither fail nor
pass.
"""

from __future__ import annotations

import difflib
import operator
import re
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from loadgen.hist import Hist, tag_part
from loadgen.rules import SECOND, Needs, measured, not_evaluated
from loadgen.stats import certified, floor_n
from loadgen.types import OUR_ERRORS, Finding, Outcome, UserError

if TYPE_CHECKING:
    from loadgen.record import Run

LATENCIES = ("ttft", "ttfo", "gap", "tpot", "e2e", "connect", "queue", "send_lag")
SHARES = ("error_rate", "grade_rate")
METRICS = (*LATENCIES, *SHARES, "output_tokens_per_s")
WHERE = ("class", "phase", "cache")
EXAMPLE = "ttft[class=chat_short] p95 < 2s -> fail"

_OPS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
_SLO = re.compile(
    r"\s*(?P<metric>\w+)\s*(?:\[(?P<where>[^\]]*)\])?\s*(?P<agg>[a-z]+\d*(?:\.\d+)?)?\s*(?P<op><=|>=|<|>)"
    r"\s*(?P<bound>\d+(?:\.\d+)?)\s*(?P<unit>[a-z%/]*)\s*(?:->\s*(?P<then>\w+)\s*)?"
)


@dataclass(frozen=True, slots=True)
class Options:
    pass


@dataclass(frozen=True, slots=True)
class Slo:
    """One line, understood. `bound` is in seconds, a share, or tokens per second; `p` where a percentile is meant."""

    text: str
    metric: str
    where: tuple[tuple[str, str], ...]
    agg: str
    p: float | None
    op: str
    bound: float
    then: Literal["fail", "warn"]

    def holds(self, number: float) -> bool:
        return _OPS[self.op](number, self.bound)

    def asks(self, cls: str, phase: str, cache: str) -> bool:
        """Whether requests of this class, phase and cache intent are meant."""
        is_ = {"class": cls, "phase": phase, "cache": cache}
        return all(tag_part(is_[key]) == tag_part(value) for key, value in self.where)

    @property
    def cls(self) -> str | None:
        """The class that is meant; None: all of them."""
        return dict(self.where).get("class")

    @property
    def unit(self) -> str:
        return "s" if self.metric in LATENCIES else "share" if self.metric in SHARES else "tokens/s"


def parse_slo(text: str, classes: Collection[str] | None = None) -> Slo:
    """Raises UserError, one line with the nearest name. `classes` None: any class is believed."""
    found = _SLO.fullmatch(text)
    if found is None:
        raise UserError(f'slo "{text}": cannot be read; write it like "{EXAMPLE}"')
    metric = found["metric"]
    if metric not in METRICS:
        raise UserError(f'slo "{text}": unknown metric "{metric}"{_nearest(metric, METRICS)}')
    where = _where(text, found["where"] or "", classes)
    agg, p = _aggregate(text, metric, found["agg"])
    then = found["then"] or "fail"
    if then not in ("fail", "warn"):
        raise UserError(f'slo "{text}": after -> stands fail or warn, not "{then}"')
    bound = _bound(text, metric, float(found["bound"]), found["unit"])
    return Slo(text, metric, where, agg, p, found["op"], bound, cast(Literal["fail", "warn"], then))


def _where(text: str, inside: str, classes: Collection[str] | None) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in filter(None, (p.strip() for p in inside.split(","))):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals or not value:
            raise UserError(f'slo "{text}": between the brackets stands key=value, not "{part}"')
        if key not in WHERE:
            raise UserError(f'slo "{text}": unknown key "{key}"{_nearest(key, WHERE)}')
        if key == "class" and classes is not None and value not in classes:
            raise UserError(f'slo "{text}": unknown class "{value}"{_nearest(value, classes)}')
        pairs.append((key, value))
    return tuple(pairs)


def _aggregate(text: str, metric: str, agg: str | None) -> tuple[str, float | None]:
    if metric in SHARES:
        if agg not in (None, "rate"):
            raise UserError(f'slo "{text}": {metric} is one share, leave out "{agg}"')
        return "rate", None
    known = ("p50", "p90", "p95", "p99", "p99.9", "mean", "max", "min") + (() if metric in LATENCIES else ("rate",))
    if agg is None and metric == "output_tokens_per_s":
        return "rate", None
    found = _PERCENTILE.fullmatch(agg or "")
    if found and 50 <= float(found[1]) <= 99.9:
        return str(agg), float(found[1]) / 100
    if agg not in known or agg.startswith("p"):
        raise UserError(f'slo "{text}": unknown aggregate "{agg or ""}"{_nearest(agg or "", known)}')
    return agg, None


def _bound(text: str, metric: str, number: float, unit: str) -> float:
    if metric in LATENCIES:
        if unit not in _UNITS_S:
            raise UserError(f'slo "{text}": a bound of {metric} needs a unit of time: {number:g}s or {number:g}ms')
        return number * _UNITS_S[unit]
    if metric in SHARES:
        share = number / 100 if unit == "%" else number
        if unit not in ("", "%") or share > 1:
            raise UserError(f'slo "{text}": a bound of {metric} is a share: 0.01 or 1%')
        return share
    if unit not in ("", "/s", "tok/s", "tokens/s"):
        raise UserError(f'slo "{text}": a bound of {metric} is a bare number of tokens per second')
    return number


def _nearest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.4)
    return f'; did you mean "{close[0]}"?' if close else f"; known: {', '.join(sorted(known))}"


def needs(options: Options) -> Needs:
    return Needs()


def check(run: Run, options: Options) -> list[Finding]:
    return [_judge(run, parse_slo(text)) for text in run.scenario.slo]


def _judge(run: Run, slo: Slo) -> Finding:
    axis: Literal["functional", "performance"] = "functional" if slo.metric == "grade_rate" else "performance"
    number, n = _latency(run, slo) if slo.metric in LATENCIES else _from_outcomes(run, slo)
    said = slo.text.partition("->")[0].strip()
    if number is None:
        return not_evaluated("slo", axis, f"{said}: nothing of the kind was measured", said, n)
    if slo.p is not None and not certified(slo.p, n):
        why = f"{said}: {number:.4g} {slo.unit} of n = {n} is not certified, needs {floor_n(slo.p)}"
        return not_evaluated("slo", axis, why, said, n)
    holds = slo.holds(number)
    message = f"{said}: {number:.4g} {slo.unit}, n = {n}"
    return Finding(
        "slo", axis, "pass" if holds else slo.then, message, said, number, slo.bound, slo.unit, n,
        "windows-*.hlog" if slo.metric in LATENCIES else "outcomes", cause="" if holds else "slo",
    )  # fmt: skip


def _phases(run: Run) -> set[str]:
    return {p.name for p in run.phases if p.kind == "measure"}


def _latency(run: Run, slo: Slo) -> tuple[float | None, int]:
    merged, labels = Hist(), {tag_part(name) for name in _phases(run)}
    for tag, _, _, hist in run.windows():
        if tag.metric == slo.metric and tag.phase in labels and slo.asks(tag.cls, tag.phase, tag.cache):
            merged.add(hist)
    us = merged.quantile(slo.p) if slo.p is not None else getattr(merged, slo.agg)
    return (None if us is None else us / 1e6), merged.n


def _from_outcomes(run: Run, slo: Slo) -> tuple[float | None, int]:
    """Shares and token rates; n is the number of requests behind them."""
    span, labels = measured(run), _phases(run)
    n, hits, tokens, rates = 0, 0, 0, array("d")
    for o in run.outcomes():
        if o.phase not in labels or not slo.asks(o.cls, o.phase, o.cache) or o.outcome == "incomplete":
            continue
        if slo.metric == "error_rate":
            n += o.error_class not in OUR_ERRORS
            hits += o.outcome == "failed" and o.error_class not in OUR_ERRORS
        elif slo.metric == "grade_rate" and o.grade is not None:
            n += 1
            hits += o.grade.ok
        elif slo.metric == "output_tokens_per_s" and (rate := _tokens_per_s(o)) is not None:
            n += 1
            tokens += o.output_tokens or 0
            rates.append(rate)
    if not n or span is None or span[1] <= span[0]:
        return None, n
    if slo.metric in SHARES:
        return hits / n, n
    if slo.agg == "rate":
        return tokens * SECOND / (span[1] - span[0]), n
    values = np.asarray(rates)
    if slo.p is not None:
        return float(np.quantile(values, slo.p, method="inverted_cdf")), n
    by_name: dict[str, float] = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return float(by_name[slo.agg]), n


def _tokens_per_s(outcome: Outcome) -> float | None:
    if outcome.outcome != "ok" or outcome.output_tokens_source != "usage" or not outcome.e2e_ns:
        return None
    return (outcome.output_tokens or 0) * SECOND / outcome.e2e_ns
