"""Percentiles with their certainty, and the durations of which they are taken.

Percentiles are read at rank ceil(p·n) and carry n; the method that says when one is certified is MLPerf LoadGen's
early stopping (99 % confidence). Latencies are those of successes only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from loadgen.hist import Hist
from loadgen.types import Outcome

CONFIDENCE = 0.99
PERCENTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
MIN_PER_THIRD = 8  # below it a ratio of two medians is mostly noise
# Lentz's method needs some √max(a, b) terms: plenty for a million samples.
_MAX_TERMS = 10_000
_TINY = 1e-300


# ---------------------------------------------------------------------------------------------------------------------
# How sure a percentile is


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on one side of the mean only
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or _TINY)
    total = d
    for m in range(1, _MAX_TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or _TINY)
            c = 1 + term / c or _TINY
            total *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return math.exp(log_front) * total / a


@lru_cache(maxsize=1024)
def samples_needed(p: float, over: int) -> int:
    """How many requests it takes to say with 99 % confidence that a share `p` stays below a limit, when `over` of them
    were above it."""
    if not 0 < p < 1:
        raise ValueError(f"{p} is not a share between 0 and 1")

    def sure(below: int) -> bool:
        return incomplete_beta(below, over + 1, p) <= 1 - CONFIDENCE

    high = 1
    while not sure(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if sure(middle) else (middle, high)
    return high + over


def floor_n(p: float) -> int:
    """The smallest run that can certify a percentile: one request may lie beyond the bound. 11, 64, 130, 662, 6,636 for
    p50, p90, p95, p99, p99.9."""
    return samples_needed(p, 1)


def certified(p: float, n: int) -> bool:
    """Whether `n` independent requests are enough to state the percentile. Queueing makes neighbours alike: a lower
    bound on the n that is needed."""
    return n >= floor_n(p)


def printable(p: float, n: int) -> bool:
    """Whether the percentile is more than a name for the maximum: n ≥ 1 / (1 − p)."""
    return n * (1 - p) >= 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Quantile:
    """A percentile in µs with the number of values behind it, and whether they are enough to fail a run on it."""

    p: float
    value_us: int
    n: int
    certified: bool


def quantile(hist: Hist, p: float) -> Quantile | None:
    """None where there are too few values to print it."""
    n, value = hist.n, hist.quantile(p)
    return None if value is None or not printable(p, n) else Quantile(p, value, n, certified(p, n))


def quantiles(hist: Hist, ps: Sequence[float] = PERCENTILES) -> dict[float, Quantile]:
    """Those that can be printed."""
    found = ((p, quantile(hist, p)) for p in ps)
    return {p: q for p, q in found if q is not None}


# ---------------------------------------------------------------------------------------------------------------------
# Durations


def durations_us(o: Outcome) -> Iterator[tuple[str, int]]:
    """Every duration of an outcome but its gaps, by name. Latencies are those of successes only; how long we took
    ourselves is known of every request that was sent. A `tpot` of estimated tokens has a name of its own."""
    if o.sent_ns is None:
        return
    ok = o.outcome == "ok"
    e2e_ns = o.e2e_ns
    for name, ns in (
        ("send_lag", o.send_lag_ns),
        ("connect", o.connect_ns),
        ("queue", o.queue_ns),
        ("ttft", o.ttft_ns if ok else None),
        ("ttfo", o.ttfo_ns if ok else None),
        ("tpot" if o.output_tokens_source == "usage" else "tpot_estimated", o.tpot_ns if ok else None),
        ("e2e", e2e_ns if ok else None),
        ("ttft_due", o.first_ns - o.due_ns if ok and o.first_ns is not None else None),
        ("e2e_due", e2e_ns + o.sent_ns - o.due_ns if ok and e2e_ns is not None else None),
    ):
        if ns is not None:
            yield name, round(ns / 1000)
