"""A run in finished numbers: what `summary.json` holds, and all that a report may print.

Every number carries its n; nothing in it names a path, a host, an address or a prompt. The schema that is published
beside this file (`summary.schema.json`) is made from these types; a test holds the two together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
import numpy as np

from loadgen import __version__, strict
from loadgen.hist import Hist, tag_part
from loadgen.rules import SECOND, measured, per_shard, serving, start_ns
from loadgen.stats import PERCENTILES, quantiles
from loadgen.types import Digest, Finding, Json, Verdict

if TYPE_CHECKING:
    from loadgen.record import Run

SCHEMA = "loadgen.summary/1"
LATENCIES = (
    "ttft",
    "ttfo",
    "gap",
    "tpot",
    "tpot_estimated",
    "e2e",
    "connect",
    "queue",
    "send_lag",
    "ttft_due",
    "e2e_due",
)
DRAWN = ("ttft", "gap")
BARS = 24
# What stands in the report of what monitors saw under load: the worst value and when.
LOW_WATER = (
    ("host", "mem_available_bytes"), ("host", "mem_free_bytes"), ("host", "swap_free_bytes"),
    ("nvidia", "memory_free_bytes"), ("nvidia", "sm_clock_mhz"),
)  # fmt: skip
HIGH_WATER = (
    ("host", "driver_residual_bytes"), ("host", "psi_memory_some_percent"), ("host", "psi_cpu_some_percent"),
    ("host", "load1"), ("process", "rss_anon_bytes"), ("process", "vm_swap_bytes"), ("nvidia", "memory_used_bytes"),
    ("nvidia", "temperature_c"), ("nvidia", "power_w"), ("engine", "requests_waiting"),
    ("engine", "kv_cache_usage_ratio"), ("client", "loop_lag_ms"), ("client", "cpu_percent"), ("client", "rss_bytes"),
)  # fmt: skip
# Happenings of our own bookkeeping, which say nothing of the server.
NO_EVENT = frozenset({"observed", "before_run", "boot_id", "baseline"})
# What of environment.json may be passed on, and what of it never.
FINGERPRINT = ("client", "server", "host")
PRIVATE = frozenset({"arguments", "argv", "url", "hostname", "user", "path", "root", "key", "api_key", "token"})


@dataclass(frozen=True, slots=True)
class Percentile:
    """`certified`: so many values (n of the Figure) are enough to fail a run on it."""

    ms: float
    certified: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram with logarithmic steps."""

    from_ms: float
    to_ms: float
    n: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One latency. Percentiles that n does not even print are absent."""

    n: int
    mean_ms: float
    max_ms: float
    percentiles: dict[str, Percentile]
    histogram: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class and cache intent over the measuring phases. Latencies and tokens are those of `ok` requests."""

    cls: str
    cache: str
    ok: int
    failed: int
    incomplete: int
    output_tokens: int
    tokens_source: str | None
    output_tokens_per_s: float | None
    prompt_tokens: int
    cached_tokens: int | None
    latencies: dict[str, Figure]


@dataclass(frozen=True, slots=True)
class Times:
    """What the measured times are worth. `source`: the kernel's receive times, or those of our reads (`mixed`: both).
    `inexact_share` of the chunks waited in one read with a later one and got its time. `lag`: how late we read what the
    kernel had received. `achieved_seats`: requests in flight, on average, of as many as were wanted."""

    source: str | None = None
    chunks: int = 0
    inexact_share: float | None = None
    lag: Figure | None = None
    achieved_seats: float | None = None


@dataclass(frozen=True, slots=True)
class Functional:
    """What one class could do alone on the idle server; `left_out` says why it was not asked under load."""

    cls: str
    asked: int
    right: int
    left_out: str | None


@dataclass(frozen=True, slots=True)
class Extreme:
    """The worst reading of a metric under load."""

    monitor: str
    metric: str
    kind: str
    value: float
    mean: float
    at_s: float
    n: int
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Event:
    """Happenings of one kind during the whole run."""

    monitor: str
    name: str
    n: int
    first_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    monitor: str
    observed: bool
    why: str


@dataclass(frozen=True, slots=True)
class Counts:
    ok: int = 0
    failed: int = 0
    incomplete: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict, as it stands in `loadgen.types.Verdict`."""

    overall: str
    line: str
    exit_code: int
    axes: dict[str, str]
    cause: str
    reasons: tuple[str, ...]
    partial: tuple[str, ...]
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Summary:
    schema: str
    loadgen: str
    scenario: str
    about: str
    started_utc: str | None
    verdict: Judged
    seed: int
    concurrency: int
    planned_s: float | None
    measured_s: float | None
    requests: Counts
    classes: tuple[ClassRow, ...] = ()
    errors: dict[str, int] = field(default_factory=dict)
    flags: dict[str, int] = field(default_factory=dict)
    functional: tuple[Functional, ...] = ()
    monitors: tuple[Seen, ...] = ()
    extremes: tuple[Extreme, ...] = ()
    events: tuple[Event, ...] = ()
    rss_spread_last_half_bytes: float | None = None
    times: Times = Times()
    thresholds: dict[str, Json] = field(default_factory=dict)
    fingerprint: Json = field(default_factory=dict)


def json_schema() -> Json:
    """The published schema."""
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA}
    schema: Json = msgspec.json.decode(msgspec.json.encode(title | msgspec.json.schema(Summary)))
    return schema


# ---------------------------------------------------------------------------------------------------------------------
# Redaction: a report is made to be passed on

_REDACTIONS = (
    (re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>)]+", re.IGNORECASE), "‹url›"),
    (re.compile(r"\b(?:sk|hf|ghp|xox[a-z]|nvapi)[-_][A-Za-z0-9_-]{8,}|(?i:bearer)\s+\S+"), "‹key›"),
    (re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|var|opt|srv|mnt|media|data|usr|models?)/[^\s:,;)\"']*"), "‹path›"),
    (re.compile(r"(?<![\d.])(?!127\.)(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\d.])"), "‹address›"),
)  # fmt: skip


def redact(text: str, names: Sequence[str] = ()) -> str:
    """Without URLs, keys, paths, addresses and the given host names."""
    for pattern, instead in _REDACTIONS:
        text = pattern.sub(instead, text)
    for name in names:
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "‹host›", text)
    return text


def host_names(run: Run) -> tuple[str, ...]:
    """The target's host, unless it is one that everybody has."""
    host = urlsplit(run.scenario.target.url).hostname or ""
    return () if host in ("", "localhost") or host[0].isdigit() or ":" in host else (host,)


def redacted(findings: Sequence[Finding], names: Sequence[str]) -> list[Finding]:
    return [
        replace(f, message=redact(f.message, names), scope=redact(f.scope, names), evidence=redact(f.evidence, names))
        for f in findings
    ]


def _scrub(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _scrub(v, names) for k, v in value.items() if str(k).lower() not in PRIVATE}
    if isinstance(value, (list, tuple)):
        return [_scrub(v, names) for v in value]
    return redact(value, names) if isinstance(value, str) else value


# ---------------------------------------------------------------------------------------------------------------------
# From a run to its summary


def summarise(run: Run, verdict: Verdict, thresholds: Mapping[str, Any]) -> Summary:
    """Three passes: outcomes, windows, samples. The verdict's own texts are taken to be redacted already."""
    names, span = host_names(run), measured(run)
    tally, hists = _tally(run), _latencies(run)
    seconds = None if span is None else (span[1] - span[0]) / SECOND
    plan = [float(p.duration) for p in run.scenario.phases if p.kind == "measure" and p.duration is not None]
    extremes, events = _watched(run)
    return Summary(
        schema=SCHEMA,
        loadgen=__version__,
        scenario=redact(run.scenario.name, names),
        about=redact(run.scenario.about.strip(), names),
        started_utc=_started(run),
        verdict=Judged(
            verdict.overall, verdict.line, verdict.exit_code, {str(a): w for a, w in verdict.axes.items()},
            verdict.cause, verdict.reasons, verdict.partial, verdict.interrupted,
        ),
        seed=run.scenario.seed,
        concurrency=run.scenario.concurrency,
        planned_s=sum(plan) if plan else None,
        measured_s=seconds,
        requests=Counts(*(sum(row[word] for row in tally.rows.values()) for word in ("ok", "failed", "incomplete"))),
        classes=tuple(_rows(hists, tally, seconds)),
        errors=dict(tally.errors.most_common()),
        flags=dict(sorted(tally.flags.items())),
        functional=tuple(_functional(run, tally, names)),
        monitors=tuple(Seen(m, seen, redact(why, names)) for m, (seen, why) in run.observed().items())
        + tuple(Seen(m, False, "said nothing") for m in sorted(set(run.scenario.monitors) - set(run.observed()))),
        extremes=tuple(extremes),
        events=tuple(events),
        rss_spread_last_half_bytes=_rss_spread(run),
        times=_times(run, tally, hists),
        thresholds={name: strict.plain(options) for name, options in thresholds.items()},
        fingerprint={part: _scrub(run.environment[part], names) for part in FINGERPRINT if part in run.environment},
    )  # fmt: skip


_Hists: TypeAlias = dict[tuple[str, str, str], Hist]


@dataclass(slots=True)
class _Tally:
    """Counts of one pass over the outcomes; rows are of the measuring phases, by class and cache intent."""

    rows: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    chunks: int = 0
    inexact: int = 0


def _tally(run: Run) -> _Tally:
    kinds = {p.name: p.kind for p in run.phases}
    tally = _Tally()
    for o in run.outcomes():
        kind = kinds.get(o.phase)
        if kind == "functional":
            tally.asked[o.cls] += 1
            tally.right[o.cls] += o.outcome == "ok" and (o.grade is None or o.grade.ok)
        if kind != "measure":
            continue
        row = tally.rows.setdefault((o.cls, o.cache), Counter())
        row[o.outcome] += 1
        tally.flags.update(o.flags)
        tally.chunks += o.chunks
        tally.inexact += o.inexact
        if o.times is not None and o.chunks:
            tally.sources[o.times] += 1
        if o.outcome != "ok":
            tally.errors[o.error_class or "unknown"] += o.outcome == "failed"
            continue
        row[f"tokens {o.output_tokens_source or 'estimated'}"] += o.output_tokens or 0
        row["prompt"] += o.prompt_tokens or 0
        row["cached"] += o.cached_tokens or 0
        row["cached known"] += o.cached_tokens is not None
    tally.errors = +tally.errors
    return tally


def _rows(hists: _Hists, tally: _Tally, seconds: float | None) -> Iterator[ClassRow]:
    for (cls, cache), row in sorted(tally.rows.items()):
        known = {s: row[f"tokens {s}"] for s in ("usage", "estimated") if row[f"tokens {s}"]}
        source = next(iter(known)) if len(known) == 1 else "mixed" if known else None
        tokens = sum(known.values())
        figures = {
            metric: _figure(hist, metric in DRAWN)
            for metric in LATENCIES
            if (hist := hists.get((tag_part(cls), cache, metric))) is not None and hist.n
        }
        yield ClassRow(
            cls, cache, row["ok"], row["failed"], row["incomplete"], tokens, source,
            tokens / seconds if seconds and source in ("usage", "estimated") else None,
            row["prompt"], row["cached"] if row["cached known"] else None, figures,
        )  # fmt: skip


def _latencies(run: Run) -> _Hists:
    """The interval logs of the measuring phases, merged per class, cache intent and metric."""
    phases = {tag_part(p.name) for p in run.phases if p.kind == "measure"}
    merged: _Hists = {}
    for tag, _, _, hist in run.windows():
        if tag.phase in phases:
            merged.setdefault((tag.cls, tag.cache, tag.metric), Hist()).add(hist)
    return merged


def _figure(hist: Hist, drawn: bool) -> Figure:
    ps = {f"p{100 * p:g}": Percentile(q.value_us / 1e3, q.certified) for p, q in quantiles(hist, PERCENTILES).items()}
    return Figure(
        hist.n, (hist.mean or 0.0) / 1e3, (hist.max or 0) / 1e3, ps, tuple(_bars(hist)) if drawn else ()
    )  # fmt: skip


def _bars(hist: Hist) -> Iterator[Bar]:
    """Logarithmic steps from the smallest to the largest value, so that a tail shows beside the bulk."""
    values, counts = hist.buckets()
    low, high = max(1, hist.min or 1), max(2, hist.max or 2)
    if high < low * 1.05:
        yield Bar(low / 1e3, high / 1e3, hist.n)
        return
    edges = np.geomspace(low, high, BARS + 1)
    at = np.clip(np.searchsorted(edges, np.maximum(values, low), side="right") - 1, 0, BARS - 1)
    for i, n in enumerate(np.bincount(at, weights=counts, minlength=BARS)):
        yield Bar(float(edges[i]) / 1e3, float(edges[i + 1]) / 1e3, int(n))


def _functional(run: Run, tally: _Tally, names: Sequence[str]) -> Iterator[Functional]:
    left_out = {
        str(r.get("cls")): redact(str(r.get("why", "")), names) for r in run.journal if r["event"] == "class_left_out"
    }
    for cls in sorted({*tally.asked, *left_out}):
        yield Functional(cls, tally.asked[cls], tally.right[cls], left_out.get(cls))


@dataclass(slots=True)
class _Worst:
    """The running extreme of one metric and label set."""

    digest: Digest
    sum: float = 0.0
    n: int = 0


def _watched(run: Run) -> tuple[list[Extreme], list[Event]]:
    """One pass over the samples: the worst readings under load, and all that happened."""
    span, begin = serving(run), start_ns(run)
    kinds = dict.fromkeys(LOW_WATER, "low") | dict.fromkeys(HIGH_WATER, "high")
    worst: dict[tuple[str, str, tuple[tuple[str, str], ...]], _Worst] = {}
    happened: dict[tuple[str, str], Event] = {}
    for d in run.digests():
        if d.text is not None and d.metric not in NO_EVENT:
            at_s = (d.at_ns - begin) / SECOND
            before = happened.get((d.monitor, d.metric), Event(d.monitor, d.metric, 0, at_s))
            happened[d.monitor, d.metric] = replace(
                before, n=before.n + max(1, round(d.last)), first_s=min(before.first_s, at_s)
            )
        kind = kinds.get((d.monitor, d.metric))
        # of a process tree the sum is told, of GPUs each one
        if kind is None or span is None or not span[0] <= d.at_ns <= span[1] or "pid" in d.labels or "cls" in d.labels:
            continue
        entry = worst.setdefault((d.monitor, d.metric, tuple(sorted(d.labels.items()))), _Worst(d))
        if (d.min < entry.digest.min) if kind == "low" else (d.max > entry.digest.max):
            entry.digest = d
        entry.sum, entry.n = entry.sum + d.last, entry.n + 1
    extremes = [
        Extreme(
            monitor, metric, kind, w.digest.min if kind == "low" else w.digest.max, w.sum / w.n,
            (w.digest.at_ns - begin) / SECOND, w.n, dict(labels),
        )
        for (monitor, metric), kind in kinds.items()
        for (m, k, labels), w in sorted(worst.items())
        if (m, k) == (monitor, metric)
    ]  # fmt: skip
    return extremes, sorted(happened.values(), key=lambda e: (e.first_s, e.monitor, e.name))


def _times(run: Run, tally: _Tally, hists: _Hists) -> Times:
    lag = Hist()
    for (_, _, metric), hist in hists.items():
        if metric == "lag":
            lag.add(hist)
    held = [shard for shard in per_shard(run, "in_flight", measured(run)).values() if len(shard)]
    return Times(
        source=next(iter(tally.sources)) if len(tally.sources) == 1 else "mixed" if tally.sources else None,
        chunks=tally.chunks,
        inexact_share=tally.inexact / tally.chunks if tally.chunks else None,
        lag=_figure(lag, False) if lag.n else None,
        achieved_seats=sum(float(shard.last.mean()) for shard in held) if held else None,
    )


def _rss_spread(run: Run) -> float | None:
    """How far the generator's own memory moved over the last half of the measured time: a leak of ours would show."""
    late = [rss.last[len(rss) // 2 :] for rss in per_shard(run, "rss_bytes", measured(run)).values()]
    return max((float(half.max() - half.min()) for half in late if len(half) > 1), default=None)


def _started(run: Run) -> str | None:
    wall = next((r["wall"] for r in run.journal if r["event"] == "run_start" and "wall" in r), None)
    return None if wall is None else datetime.fromtimestamp(wall / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    import json

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
