"""What a run's numbers allow to be said: totals that add up, percentiles with their certainty, then against now.

Latencies and tokens are those of successes only; requests that failed or that we cut are counted and nothing else.
Tokens from the server's usage and estimated ones are never added. Percentiles are read at rank ceil(p·n) and carry n;
the method that says when one is certified is MLPerf LoadGen's early stopping (99 % confidence).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from loadgen.hist import Hist, merged, tag_part
from loadgen.types import Outcome, PhaseKind, PhaseSpan

if TYPE_CHECKING:
    from loadgen.record import Run

K = TypeVar("K")

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
# Totals that add up


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


class Key(NamedTuple):
    """What may be compared with one another: class, cache intent, and prompt length up to a power of two (None where
    the length is not known)."""

    cls: str
    cache: str
    up_to_tokens: int | None


def length_bin(prompt_tokens: int | None) -> int | None:
    """The power of two that a prompt stays within, from 128 up: below that, length hardly shows in a latency."""
    return None if not prompt_tokens else 1 << max(7, (prompt_tokens - 1).bit_length())


@dataclass(slots=True)
class Totals:
    """What is known of a set of requests; adding two gives what is known of both."""

    ok: int = 0
    failed: int = 0
    incomplete: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    grades: Counter[str] = field(default_factory=Counter)
    output_tokens: Counter[str] = field(default_factory=Counter)  # of successes, by source
    prompt_tokens: int = 0
    cached_tokens: int = 0
    hists: dict[str, Hist] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.ok + self.failed + self.incomplete

    def count(self, o: Outcome) -> None:
        self.flags.update(o.flags)
        for metric, us in durations_us(o):
            self.hist(metric).record((us,))
        if o.outcome == "incomplete":
            self.incomplete += 1
        elif o.outcome == "failed":
            self.failed += 1
            self.errors[o.error_class or "unknown"] += 1
        else:
            self.ok += 1
            self.finishes[o.finish_reason or "none"] += 1
            self.prompt_tokens += o.prompt_tokens or 0
            self.cached_tokens += o.cached_tokens or 0
            if o.output_tokens is not None:
                self.output_tokens[o.output_tokens_source or "estimated"] += o.output_tokens
        if o.grade is not None:
            self.grades[o.grade.kind] += 1

    def add(self, other: Totals) -> None:
        self.ok += other.ok
        self.failed += other.failed
        self.incomplete += other.incomplete
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        for name in ("errors", "flags", "finishes", "grades", "output_tokens"):
            getattr(self, name).update(getattr(other, name))
        for metric, hist in other.hists.items():
            self.hist(metric).add(hist)

    def hist(self, metric: str) -> Hist:
        found = self.hists.get(metric)
        if found is None:
            found = self.hists[metric] = Hist()
        return found

    def tokens(self) -> tuple[int, str] | None:
        """Output tokens of the successes and their source; None where there are none, or where some were counted by
        the server and some estimated by us."""
        known = [(n, source) for source, n in self.output_tokens.items() if n]
        return known[0] if len(known) == 1 else None


@dataclass(slots=True)
class Window:
    """Totals of the requests that were due in one slice of time, by what may be compared."""

    start_ns: int
    end_ns: int
    groups: dict[Key, Totals] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def count(self, o: Outcome) -> None:
        length = o.prompt_tokens if o.prompt_tokens is not None else o.prompt_tokens_target
        self.groups.setdefault(Key(o.cls, o.cache, length_bin(length)), Totals()).count(o)

    def add(self, other: Window) -> None:
        """Adds another shard's window of the same slice, or a neighbour: the slice then spans both."""
        self.start_ns, self.end_ns = min(self.start_ns, other.start_ns), max(self.end_ns, other.end_ns)
        for key, totals in other.groups.items():
            self.groups.setdefault(key, Totals()).add(totals)

    def by_class(self) -> dict[str, Totals]:
        return _pooled((key.cls, totals) for key, totals in self.groups.items())

    def by_cache(self) -> dict[tuple[str, str], Totals]:
        return _pooled(((key.cls, key.cache), totals) for key, totals in self.groups.items())

    def total(self) -> Totals:
        return _pooled(("", totals) for totals in self.groups.values()).get("", Totals())


def _pooled(parts: Iterable[tuple[K, Totals]]) -> dict[K, Totals]:
    pools: dict[K, Totals] = {}
    for key, totals in parts:
        pools.setdefault(key, Totals()).add(totals)
    return pools


def spans(run: Run, kinds: Sequence[PhaseKind] = ("measure",)) -> list[tuple[PhaseSpan, int]]:
    """The phases of these kinds and when they stopped issuing; where a run was cut, its last sign of life."""
    return [(p, p.end_ns if p.end_ns is not None else _last_sign_ns(run)) for p in run.phases if p.kind in kinds]


def _last_sign_ns(run: Run) -> int:
    ends = (o.done_ns for o in run.outcomes() if o.done_ns is not None)
    return max(run.end_ns or 0, max(ends, default=0))


def windows(
    run: Run, slices: Sequence[tuple[int, int]], kinds: Sequence[PhaseKind] = ("measure",)
) -> tuple[Window, ...]:
    """One pass over the outcomes of these phases. A request counts where it was due: `slices` are in order, and what
    was due before the first or after the last one counts there, so that nothing is left out."""
    made = tuple(Window(start_ns, end_ns) for start_ns, end_ns in slices)
    starts = [start_ns for start_ns, _ in slices]
    names = {p.name for p in run.phases if p.kind in kinds}
    if made:
        for o in run.outcomes():
            if o.phase in names:
                made[max(bisect_right(starts, o.due_ns) - 1, 0)].count(o)
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Then and now


def thirds(run: Run) -> tuple[Window, Window, Window] | None:
    """The measured time from the start of the first measuring phase to the end of issuing, in three equal slices."""
    found = spans(run)
    if not found:
        return None
    start_ns, end_ns = found[0][0].start_ns, max(end for _, end in found)
    cuts = [start_ns + (end_ns - start_ns) * k // 3 for k in range(4)]
    first, middle, last = windows(run, list(pairwise(cuts)))
    return first, middle, last


@dataclass(frozen=True, slots=True)
class Drift:
    """The median of one metric for like requests in the first and the last third."""

    key: Key
    metric: str
    first: Quantile
    last: Quantile

    @property
    def ratio(self) -> float | None:
        """Last by first: above 1 is slower. For tokens per second of a request take 1 / tpot, and so 1 / ratio."""
        return self.last.value_us / self.first.value_us if self.first.value_us else None

    @property
    def enough(self) -> bool:
        return min(self.first.n, self.last.n) >= MIN_PER_THIRD


def drift(first: Window, last: Window, metrics: Sequence[str] = ("ttft", "tpot")) -> list[Drift]:
    """Per group of like requests that has at least two values on either side."""
    found = []
    for key in sorted(first.groups.keys() & last.groups.keys(), key=str):
        for metric in metrics:
            then, now = (quantile(w.groups[key].hists.get(metric, Hist()), 0.5) for w in (first, last))
            if then is not None and now is not None:
                found.append(Drift(key, metric, then, now))
    return found


@dataclass(frozen=True, slots=True)
class Retention:
    """What one class got done of the requests issued in the first and in the last third. `cut` requests of the last
    third are missing from its tokens: with many of them the ratio says more of our drain limit than of the server."""

    cls: str
    first_ok: int
    last_ok: int
    cut: int
    first_tokens_per_s: float | None
    last_tokens_per_s: float | None
    source: str | None

    @property
    def ratio(self) -> float | None:
        """Tokens per second, last by first; None where either is not known or nothing was done at first."""
        if not self.first_tokens_per_s or self.last_tokens_per_s is None:
            return None
        return self.last_tokens_per_s / self.first_tokens_per_s

    @property
    def enough(self) -> bool:
        return min(self.first_ok, self.last_ok) >= MIN_PER_THIRD


def retention(first: Window, last: Window) -> list[Retention]:
    """Per class that was asked in the first third."""
    then, now = first.by_class(), last.by_class()
    found = []
    for cls, before in sorted(then.items()):
        after = now.get(cls, Totals())
        before_rate, source = _rate(before, first.seconds)
        after_rate, after_source = _rate(after, last.seconds)
        if after.ok == 0:
            after_rate, after_source = 0.0, source  # nothing done is a rate, and the worst one
        if source != after_source:
            before_rate = after_rate = source = None
        found.append(Retention(cls, before.ok, after.ok, after.incomplete, before_rate, after_rate, source))
    return found


def _rate(totals: Totals, seconds: float) -> tuple[float | None, str | None]:
    tokens = totals.tokens()
    return (None, None) if tokens is None or seconds <= 0 else (tokens[0] / seconds, tokens[1])


# ---------------------------------------------------------------------------------------------------------------------
# The whole run


@dataclass(frozen=True, slots=True)
class Row:
    """One class and cache intent. `quantiles` by metric, those that can be printed; `tokens_per_s` counts output tokens
    of successes per second of issuing, from the source it names."""

    cls: str
    cache: str
    ok: int
    failed: int
    incomplete: int
    quantiles: dict[str, dict[float, Quantile]]
    max_us: dict[str, int]
    requests_per_s: float | None
    tokens_per_s: float | None
    tokens_source: str | None
    prompt_tokens: int
    cached_tokens: int

    @property
    def n(self) -> int:
        return self.ok + self.failed + self.incomplete


def latency_table(run: Run, kinds: Sequence[PhaseKind] = ("measure",)) -> list[Row]:
    """One row per class and cache intent, over all phases of these kinds. Gaps come from the interval logs, as the
    outcomes keep only a summary of them."""
    found = spans(run, kinds)
    if not found:
        return []
    (whole,) = windows(run, [(found[0][0].start_ns, max(end for _, end in found))], kinds)
    seconds = sum(end - p.start_ns for p, end in found) / 1e9
    gaps = _gaps(run, {tag_part(p.name) for p, _ in found})
    rows = []
    for (cls, cache), totals in sorted(whole.by_cache().items()):
        hists = dict(totals.hists)
        if gap := gaps.get((tag_part(cls), cache)):
            hists["gap"] = gap
        rate, source = _rate(totals, seconds)
        rows.append(
            Row(
                cls=cls,
                cache=cache,
                ok=totals.ok,
                failed=totals.failed,
                incomplete=totals.incomplete,
                quantiles={metric: quantiles(hist) for metric, hist in hists.items()},
                max_us={metric: hist.max for metric, hist in hists.items() if hist.max is not None},
                requests_per_s=totals.ok / seconds if seconds > 0 else None,
                tokens_per_s=rate,
                tokens_source=source,
                prompt_tokens=totals.prompt_tokens,
                cached_tokens=totals.cached_tokens,
            )
        )
    return rows


def _gaps(run: Run, phases: set[str]) -> dict[tuple[str, str], Hist]:
    parts: dict[tuple[str, str], list[Hist]] = {}
    for line in run.windows():
        if line.tag.metric == "gap" and line.tag.phase in phases:
            parts.setdefault((line.tag.cls, line.tag.cache), []).append(line.hist)
    return {key: merged(hists) for key, hists in parts.items()}


def in_flight(run: Run, kinds: Sequence[PhaseKind] = ("measure",)) -> float | None:
    """Little's law: how many requests were under way on average while these phases issued, by the requests' own times
    (due to done, whatever phase they belong to). At fixed concurrency it must come near the number of seats."""
    found = spans(run, kinds)
    seconds = sum(end - p.start_ns for p, end in found)
    if seconds <= 0:
        return None
    busy_ns = 0
    for o in run.outcomes():
        if o.done_ns is not None:
            busy_ns += sum(max(0, min(o.done_ns, end) - max(o.due_ns, p.start_ns)) for p, end in found)
    return busy_ns / seconds


@dataclass(frozen=True, slots=True)
class Conservation:
    """What the shards say they issued in a phase and what came of it, beside what stands in the outcomes."""

    phase: str
    issued: int
    ok: int
    failed: int
    incomplete: int
    recorded: dict[str, int]

    @property
    def holds(self) -> bool:
        said = {"ok": self.ok, "failed": self.failed, "incomplete": self.incomplete}
        return self.issued == sum(said.values()) and said == self.recorded


def conservation(run: Run) -> list[Conservation]:
    """Per phase that was drained: issued = ok + failed + incomplete, in the counters and in the records."""
    recorded: dict[str, Counter[str]] = {}
    for o in run.outcomes():
        recorded.setdefault(o.phase, Counter())[o.outcome] += 1
    found = []
    for span in run.phases:
        said = [e for e in run.events("phase_drained") if e.get("phase") == span.name]
        if span.drained_ns is None or not said:
            continue
        issued, ok, failed, incomplete = (
            sum(int(e.get(name) or 0) for e in said) for name in ("issued", "ok", "failed", "incomplete")
        )
        of = recorded.get(span.name, Counter())
        words = {word: of[word] for word in ("ok", "failed", "incomplete")}
        found.append(Conservation(span.name, issued, ok, failed, incomplete, words))
    return found
