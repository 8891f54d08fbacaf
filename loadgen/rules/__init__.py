"""Rules turn a run folder into findings: one file, one question. What several of them share stands here.

A rule never guesses: without data or samples its finding is `not_evaluated`, which is no pass. It reads through `Run`
alone, so that an old folder can be judged again by new rules.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from loadgen import clock
from loadgen.types import AXES, Axis, Digest, Finding, Outcome, PhaseSpan

if TYPE_CHECKING:
    from loadgen.record import Run, Series

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

GIB = 1 << 30
SECOND = 1_000_000_000
# Of the whole host's CPU: others who take this much more than before explain a slower server.
BUSIER_PERCENT = 25.0
LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a rule needs before it can answer: seconds of measuring, good answers per class, monitors that see.

    Each rule says so in `needs(options)`. A rule answers for the classes that reach `per_class`, leaves the others
    not evaluated, and any one of `monitors` is enough.
    """

    seconds: float = 0.0
    per_class: int = 0
    monitors: tuple[str, ...] = ()

    def unreachable(self, seconds: float, per_class: Mapping[str, float], monitors: Collection[str]) -> list[str]:
        """Why a scenario of so many measured seconds and expected answers per class cannot satisfy the rule."""
        why = []
        if seconds < self.seconds:
            why.append(f"needs {self.seconds:g} s of measuring, the scenario has {seconds:g}")
        few = sorted(name for name, n in per_class.items() if n < self.per_class)
        if few:
            why.append(f"needs {self.per_class} answers per class, too few expected of {', '.join(few)}")
        if self.monitors and not set(self.monitors) & set(monitors):
            why.append(f"needs the monitor {' or '.join(self.monitors)}")
        return why


# Causes of a `not_evaluated` that the verdict knows: a monitor that could not see (the rule `blind` names it), and a
# server on a host of which nobody knows anything. Both concern many rules and are said once.
NOT_OBSERVED, ELSEWHERE = "not_observed", "elsewhere"


def not_evaluated(rule: str, axis: Axis, why: str, scope: str = "", n: int | None = None, cause: str = "") -> Finding:
    """The answer of a rule that lacks what it needs."""
    assert axis in AXES
    return Finding(rule=rule, axis=axis, status="not_evaluated", message=why, scope=scope, n=n, cause=cause)


def elsewhere(run: Run) -> str | None:
    """Why nothing measured on this host says anything about the server; None where both are one host."""
    seen, _ = run.observed().get("process", (False, ""))
    if seen or on_this_host(run.scenario.target.url):
        return None
    return "the server runs on another host, which nobody watched"


def on_this_host(url: str) -> bool:
    """Whether an address means the machine on which it is used."""
    return (urlsplit(url).hostname or "").lower().startswith(LOOPBACK)


def unwatched(run: Run, rule: str) -> list[Finding]:
    """The only answer of a rule on the server's host, where that host was not watched; else nothing."""
    why = elsewhere(run)
    return [not_evaluated(rule, "stability", why, cause=ELSEWHERE)] if why else []


# ---------------------------------------------------------------------------------------------------------------------
# Time


def start_ns(run: Run) -> int:
    """When the run began, for times that people read."""
    return min((int(r["at"]) for r in run.journal), default=0)


def end_ns(run: Run) -> int:
    """The last sign of life: of the journal, or of a request where a killed run's journal ends before it."""
    said = max((int(r["at"]) for r in run.journal), default=0)
    if run.finished:
        return said
    return max(said, max((o.done_ns for o in run.outcomes() if o.done_ns is not None), default=0))


def when(run: Run, at_ns: int) -> str:
    """`5:03`: minutes and seconds since the run began."""
    seconds = max(0, round((at_ns - start_ns(run)) / SECOND))
    return f"{seconds // 60}:{seconds % 60:02d}"


def loaded(run: Run) -> list[PhaseSpan]:
    """The phases in which all seats were busy."""
    return [p for p in run.phases if p.kind in ("warmup", "measure")]


def serving(run: Run) -> tuple[int, int] | None:
    """From the first loaded phase to the last answer of the last; None where no load ever began."""
    spans = loaded(run)
    return (spans[0].start_ns, spans[-1].drained_ns or end_ns(run)) if spans else None


def measured(run: Run) -> tuple[int, int] | None:
    """From the first measuring phase to the moment when the last one stopped issuing."""
    spans = [p for p in run.phases if p.kind == "measure"]
    return (spans[0].start_ns, spans[-1].end_ns or end_ns(run)) if spans else None


# ---------------------------------------------------------------------------------------------------------------------
# Readings


@dataclass(frozen=True, slots=True)
class Readings:
    """Seconds of one metric within a span, in order of time."""

    at_ns: Ints
    min: Floats
    max: Floats
    last: Floats

    def __len__(self) -> int:
        return len(self.at_ns)

    def around(self, at_ns: int, reach_s: float) -> Readings:
        keep = np.abs(self.at_ns - at_ns) <= reach_s * SECOND
        return Readings(self.at_ns[keep], self.min[keep], self.max[keep], self.last[keep])


def readings(
    run: Run, monitor: str, metric: str, span: tuple[int, int] | None, labels: tuple[tuple[str, str], ...] | None = None
) -> Readings:
    """All seconds of a metric, of one label set or of every one; empty where it was never measured."""
    series = run.series(monitor, metric).items()
    return _joined([s for key, s in series if labels is None or tuple(key) == labels], span)


def per_shard(run: Run, metric: str, span: tuple[int, int] | None) -> dict[str, Readings]:
    """The generator's own readings by shard; those of one alone bear no number and stand under ""."""
    found = {key: series for key, series in run.series("client", metric).items() if "cls" not in dict(key)}
    return {dict(key).get("shard", ""): _joined([series], span) for key, series in found.items()}


def lost_shards(run: Run) -> list[int]:
    """The shards that did not end by themselves."""
    return sorted({int(r["shard"]) for r in run.journal if r["event"] == "shard_exit" and r.get("rc") != 0})


def _joined(found: list[Series], span: tuple[int, int] | None) -> Readings:
    if not found:
        none = np.array([])
        return Readings(np.array([], dtype=np.int64), none, none, none)
    at = np.concatenate([np.asarray(s.at_ns, dtype=np.int64) for s in found])
    order = np.argsort(at, kind="stable")
    if span is not None:
        order = order[(at[order] >= span[0]) & (at[order] <= span[1])]

    def pick(name: str) -> Floats:
        return np.concatenate([np.asarray(getattr(s, name), dtype=np.float64) for s in found])[order]

    return Readings(at[order], pick("min"), pick("max"), pick("last"))


def happenings(run: Run, monitor: str, *names: str) -> list[Digest]:
    """Events of one monitor (an OOM kill, a vanished process), in order of time."""
    return [d for d in _happenings(run) if d.monitor == monitor and d.metric in names]


@lru_cache(maxsize=1)
def _happenings(run: Run) -> tuple[Digest, ...]:
    """Every event of a run, read once: many rules ask, and the samples of a day are half a million lines. Monitors
    bound how many they write; those of a server that forks for each request are left out."""
    found = (d for d in run.digests() if d.text is not None and d.metric not in ("observed", "process_new"))
    return tuple(sorted(found, key=lambda d: d.at_ns))


def clocks(run: Run) -> dict[str, list[clock.Reading]]:
    """All clocks of the host as each lane of monitors noted them, a reading a second, in order of time."""
    boots: dict[str, list[tuple[int, str]]] = {}
    for d in happenings(run, "clock", "boot_id"):
        boots.setdefault(d.labels.get("lane", ""), []).append((d.at_ns, d.text or ""))
    walls = {dict(key).get("lane", ""): s for key, s in run.series("clock", "wall_ahead_ms").items()}
    asleep = {dict(key).get("lane", ""): s for key, s in run.series("clock", "suspended_ms").items()}
    found: dict[str, list[clock.Reading]] = {}
    for lane, wall in walls.items():
        slept = asleep.get(lane)
        slept_ms = dict(zip(slept.at_ns.tolist(), slept.last.tolist(), strict=True)) if slept is not None else {}
        named, boot_id = iter(boots.get(lane, [])), None
        following = next(named, None)
        for at, ahead_ms in zip(wall.at_ns.tolist(), wall.last.tolist(), strict=True):
            while following is not None and following[0] <= at:
                boot_id, following = following[1], next(named, None)
            boottime = None if at not in slept_ms else at + round(slept_ms[at] * 1e6)
            found.setdefault(lane, []).append(clock.Reading(at, boottime, at + round(ahead_ms * 1e6), boot_id))
    return found


def longest(flags: npt.NDArray[np.bool_], at_ns: Ints, hole_s: float = 3.0) -> tuple[float, int]:
    """The longest stretch of true readings in seconds, one second each, and where it began. A hole ends a stretch."""
    best, best_at, since, previous = 0.0, 0, -1, -1
    for flag, at in zip(flags.tolist(), at_ns.tolist(), strict=True):
        if not flag or (previous >= 0 and at - previous > hole_s * SECOND):
            since = -1
        if flag:
            since = at if since < 0 else since
            if (seconds := (at - since) / SECOND + 1) > best:
                best, best_at = seconds, since
        previous = at
    return best, best_at


# ---------------------------------------------------------------------------------------------------------------------
# Then and now


@dataclass(frozen=True, slots=True)
class Thirds:
    """The values of like requests in the first and in the last third of the measured time."""

    first: Floats
    last: Floats

    @property
    def n(self) -> int:
        return min(len(self.first), len(self.last))

    @property
    def ratio(self) -> float:
        """Median of the last third by median of the first."""
        return float(np.median(self.last) / np.median(self.first))


def _about(prompt_tokens: int | None) -> str:
    """Length bins around powers of two from 128 up: workloads aim at round lengths, which no edge may cut in two."""
    return f" ~{1 << max(7, round(math.log2(prompt_tokens)))} tokens" if prompt_tokens else ""


def thirds(run: Run, value: Callable[[Outcome], float | None]) -> dict[str, Thirds]:
    """Good answers of the measuring phases by `class cache length-bin`: cold and repeat are never pooled, nor
    are lengths, since a mix of lengths that shifts looks like drift."""
    span = measured(run)
    if span is None or span[1] <= span[0]:
        return {}
    labels = {p.name for p in run.phases if p.kind == "measure"}
    found: dict[str, tuple[array[float], array[float]]] = {}
    third = (span[1] - span[0]) / 3
    for outcome in run.outcomes():
        number = value(outcome) if outcome.outcome == "ok" and outcome.phase in labels else None
        if number is None or number <= 0 or outcome.sent_ns is None:
            continue
        key = f"{outcome.cls} {outcome.cache}{_about(outcome.prompt_tokens)}"
        first, last = found.setdefault(key, (array("d"), array("d")))
        part = int((outcome.sent_ns - span[0]) // third)
        if part != 1:
            (first if part < 1 else last).append(number)
    return {key: Thirds(np.array(first), np.array(last)) for key, (first, last) in sorted(found.items())}


def sureness(first: Floats, last: Floats) -> float:
    """How many standard deviations apart two samples are: positive when `last` lies higher.

    Mann–Whitney's z over ranks, with ties, shrunk by sqrt((1 − ρ) / (1 + ρ)) for autocorrelation ρ at lag 1 (Bayley
    and Hammersley's effective sample size): latencies of a queue follow one another, and an uncorrected test cries
    wolf on flat runs. ρ is taken around each sample's own straight line, so that a real trend does not pass for it.
    False failures on flat noise of sd 40 %, 8 / 30 / 150 values a side, by simulation: see the folder's README.
    """
    n, m = len(first), len(last)
    values = np.concatenate([first, last])
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    u = float(ranks[n:].sum()) - m * (m + 1) / 2
    ties = float((counts.astype(np.float64) ** 3 - counts).sum())
    variance = n * m / 12 * ((n + m + 1) - ties / ((n + m) * (n + m - 1)))
    if variance <= 0:
        return 0.0
    products, squares = 0.0, 0.0
    for part in (ranks[:n], ranks[n:]):
        x = np.arange(len(part), dtype=np.float64)
        rest = part - np.polyval(np.polyfit(x, part, 1), x)
        products += float((rest[1:] * rest[:-1]).sum())
        squares += float((rest * rest).sum())
    # ranks on a perfect line leave nothing but rounding, which is no evidence of anything
    rho = products / squares if squares > 1e-9 * (n + m) else 0.0
    rho = min(0.95, max(0.0, rho + 2 * (1 + 3 * rho) / (n + m)))  # what short series underestimate (Kendall)
    return float((u - n * m / 2) / math.sqrt(variance) * math.sqrt((1 - rho) / (1 + rho)))


def busier_box(run: Run) -> str | None:
    """Whether others took much more of the host's CPU in the last third than in the first, in words.

    A compile beside a soak has the very shape of decay, and is none: one read 40.5 instead of 65 tok/s. Others' share
    is what the host was busy with, less the server's process tree and ourselves; None where one was not watched.
    """
    span, cpus = measured(run), (run.environment.get("host") or {}).get("cpus")
    busy, tree = (
        readings(run, monitor, metric, span, ())
        for monitor, metric in (("host", "cpu_busy_percent"), ("process", "cpu_percent"))
    )
    own = [shard for shard in per_shard(run, "cpu_percent", span).values() if len(shard)]
    if span is None or not isinstance(cpus, int) or not (len(busy) and len(tree) and own):
        return None
    ours = sum(np.interp(busy.at_ns, each.at_ns, each.last) for each in [tree, *own])
    others = np.clip(busy.last - ours / cpus, 0.0, 100.0)
    third = (span[1] - span[0]) / 3
    before, after = others[busy.at_ns < span[0] + third], others[busy.at_ns >= span[0] + 2 * third]
    if not len(before) or not len(after):
        return None
    then, now = float(np.median(before)), float(np.median(after))
    if now - then <= BUSIER_PERCENT:
        return None
    since = busy.at_ns[others > (then + now) / 2]
    return f"others use {now:.0f} % of the host's CPU instead of {then:.0f} %, since {when(run, int(since[0]))}"


def graded(run: Run, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Good answers under load that somebody graded."""
    labels = {p.name for p in loaded(run)}
    return (o for o in outcomes if o.outcome == "ok" and o.grade is not None and o.phase in labels)
