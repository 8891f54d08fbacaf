"""Was the test sound? The load generator's own health; every finding is of the axis MEASUREMENT.

What, while load ran: the event loop's worst lag; how late chunks were read and how many of their times are inexact; CPU
above 90 % for 10 s, of any one shard; requests sent late beyond what connecting took; the seats really kept (by the
engine's samples, all shards together); Little's law (by the requests' own times); how far apart shards began;
conservation of requests; the monotonic clock against the wall clock.
Why: a client that cannot keep up reads exactly like a slow server, and has been published as one.
Threshold: lag 250 ms; reads p99 later than 5 % of the median gap while more than 1 % of the times are inexact; send lag
p99 10 ms or 1 % of the median TTFT, 98 % of the seats, clocks 0.1 % and 1 %: the limits of MLPerf's LoadGen where it
has one; a loop 250 ms late spoils any TTFT; shards that begin 100 ms apart are no one load any more. A percentile that
n does not certify is taken lower.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.hist import Hist, tag_part
from loadgen.rules import (
    SECOND,
    Ints,
    Needs,
    longest,
    lost_shards,
    measured,
    not_evaluated,
    per_shard,
    serving,
    when,
)
from loadgen.stats import certified
from loadgen.types import OUR_ERRORS, Finding, FindingStatus, OutcomeWord, Seconds

if TYPE_CHECKING:
    from loadgen.record import Run

# Seats that wait for a refused or throttled server are not ours: above this share of failures they prove nothing.
FAILED_SHARE = 0.01
CLOCK_WARN, CLOCK_FAIL, CLOCK_SET_S = 0.001, 0.01, 1.0


@dataclass(frozen=True, slots=True)
class Options:
    loop_lag_ms: float = 250.0
    send_lag_ms: float = 10.0
    send_lag_share: float = 0.01
    cpu_percent: float = 90.0
    cpu_for: Seconds = Seconds(10)
    seats_share: float = 0.98
    littles_share: float = 0.95
    arrival_lag_share: float = 0.05
    inexact_share: float = 0.01
    skew_ms: float = 100.0


def needs(options: Options) -> Needs:
    return Needs(seconds=options.cpu_for)


def check(run: Run, options: Options) -> list[Finding]:
    return [
        *_lag(run, options), *_arrivals(run, options), *_cpu(run, options), *_requests(run, options),
        *_skew(run, options), *_conservation(run), *_clocks(run),
    ]  # fmt: skip


def _finding(
    scope: str, status: FindingStatus, message: str, number: float, bound: float, unit: str, n: int,
    since_ns: int | None = None, cause: str = "client_limited", evidence: str = "samples: client",
) -> Finding:  # fmt: skip
    bad = status in ("warn", "fail")
    return Finding(
        "generator", "measurement", status, message, scope, number, bound, unit, n, evidence,
        since_ns if bad else None, cause if bad else "",
    )  # fmt: skip


def _missing(scope: str, why: str) -> list[Finding]:
    return [not_evaluated("generator", "measurement", f"{scope}: {why}", scope)]


def _lag(run: Run, options: Options) -> list[Finding]:
    lags = {shard: of for shard, of in per_shard(run, "loop_lag_ms", serving(run)).items() if len(of)}
    if not lags:
        return _missing("loop lag", "the engine wrote no samples under load")
    shard, lag = max(lags.items(), key=lambda each: float(each[1].max.max()))
    i = int(lag.max.argmax())
    worst, at = float(lag.max[i]), int(lag.at_ns[i])
    status: FindingStatus = "fail" if worst > options.loop_lag_ms else "pass"
    message = f"event loop{_of(shard)} at most {worst:.0f} ms late, at {when(run, at)}"
    return [_finding("loop lag", status, message, worst, options.loop_lag_ms, "ms", len(lag), at)]


def _arrivals(run: Run, options: Options) -> list[Finding]:
    """How late we read what the kernel had received, against the gaps that we are to measure. Its times stay right
    meanwhile, until two chunks meet in one read: only both together spoil a run."""
    phases = {tag_part(p.name) for p in run.phases if p.kind == "measure"}
    lag, gap = Hist(), Hist()
    for tag, _, _, hist in run.windows():
        if tag.phase in phases and tag.metric in ("lag", "gap"):
            (lag if tag.metric == "lag" else gap).add(hist)
    lag_us, gap_us = lag.quantile(0.99), gap.quantile(0.5)
    if lag_us is None or not gap_us:
        return []  # without the kernel's receive times only the loop's lag is known
    chunks = inexact = 0
    for o in run.outcomes():
        if tag_part(o.phase) in phases:
            chunks, inexact = chunks + o.chunks, inexact + o.inexact
    share = inexact / max(1, chunks)
    bound_us = options.arrival_lag_share * gap_us
    late, met = lag_us > bound_us, share > options.inexact_share
    message = f"chunks read p50 {(lag.quantile(0.5) or 0) / 1e3:.3g} ms, p99 {lag_us / 1e3:.3g} ms late"
    message += f" (median gap {gap_us / 1e3:.3g} ms), {100 * share:.2g} % of their times inexact"
    if late and not met:
        message += "; the kernel's times stay right"
    status: FindingStatus = "fail" if late and met else "pass"
    return [_finding("arrival lag", status, message, lag_us / 1e3, bound_us / 1e3, "ms", lag.n, None,
                     evidence="windows: lag, gap")]  # fmt: skip


def _cpu(run: Run, options: Options) -> list[Finding]:
    cpus = {shard: of for shard, of in per_shard(run, "cpu_percent", serving(run)).items() if len(of)}
    if not cpus:
        return _missing("cpu", "the engine wrote no samples under load")
    held = {shard: longest(of.min > options.cpu_percent, of.at_ns) for shard, of in cpus.items()}
    shard, cpu = max(cpus.items(), key=lambda each: (held[each[0]][0], float(each[1].last.mean())))
    held_s, since_ns = held[shard]
    status: FindingStatus = "fail" if held_s >= options.cpu_for else "pass"
    message = f"engine CPU{_of(shard)} mean {cpu.last.mean():.1f} %, at most {cpu.max.max():.0f} %"
    if status == "fail":
        message += f", above {options.cpu_percent:.0f} % for {held_s:.0f} s from {when(run, since_ns)}"
    return [_finding("cpu", status, message, held_s, options.cpu_for, "s", len(cpu), since_ns)]


def _of(shard: str) -> str:
    return f" of shard {shard}" if shard else ""


def _skew(run: Run, options: Options) -> Iterator[Finding]:
    """Shards of other machines have their own clocks: how well these are known stands beside it."""
    starts: dict[str, list[int]] = {}
    for r in run.journal:
        if r["event"] == "phase_start":
            starts.setdefault(str(r.get("phase")), []).append(int(r["at"]))
    apart = {phase: (max(at) - min(at)) / 1e6 for phase, at in starts.items() if len(at) > 1}
    if not apart:
        return
    phase, ms = max(apart.items(), key=lambda each: each[1])
    known_ms = max((int(r["error_ns"]) / 1e6 for r in run.journal if r["event"] == "shard_clock"), default=0.0)
    status: FindingStatus = "fail" if ms > options.skew_ms else "pass"
    message = f"{len(starts[phase])} shards began {phase} within {ms:.1f} ms"
    message += f", clocks known to ±{known_ms:.1f} ms" if known_ms else ""
    yield _finding("start", status, message, ms, options.skew_ms, "ms", len(starts[phase]), min(starts[phase]),
                   evidence="journal.jsonl")  # fmt: skip


def _requests(run: Run, options: Options) -> Iterator[Finding]:
    """Send lag, seats and Little's law: one pass over the outcomes."""
    span, seats = measured(run), _seats(run)
    labels = {p.name for p in run.phases if p.kind == "measure"}
    lags, ttfts = array("d"), array("d")
    busy_ns, n, failed = 0, 0, 0
    for o in run.outcomes():
        if span is None or o.sent_ns is None:
            continue
        begin, end = o.sent_ns - (o.connect_ns or 0), o.done_ns if o.done_ns is not None else span[1]
        busy_ns += max(0, min(end, span[1]) - max(begin, span[0]))
        if o.phase not in labels:
            continue
        n += 1
        failed += o.outcome == "failed" and o.error_class not in OUR_ERRORS
        lags.append((o.sent_ns - o.due_ns - (o.connect_ns or 0)) / 1e6)
        if o.outcome == "ok" and o.ttft_ns is not None:
            ttfts.append(o.ttft_ns / 1e6)
    yield from _send_lag(lags, ttfts, options)
    if span is None or not seats or not n or span[1] <= span[0]:
        yield from _missing("seats", "no requests were measured at a known concurrency")
    elif failed / n > FAILED_SHARE:
        yield from _missing("seats", f"{failed} of {n} requests failed, seats waited for the server")
    elif run.events("guard"):
        yield from _missing("seats", "a guard kept them empty")
    elif lost := lost_shards(run):
        yield from _missing("seats", f"those of lost shard {', '.join(map(str, lost))} stayed empty")
    else:
        little = busy_ns / (span[1] - span[0])
        status: FindingStatus = "pass" if abs(little / seats - 1) <= 1 - options.littles_share else "fail"
        message = f"Little's law: {little:.2f} requests in flight by their own times, {seats} seats"
        yield _finding("littles law", status, message, little / seats, options.littles_share, "share", n, span[0],
                       "client_limited", "outcomes")  # fmt: skip
        held = [shard for shard in per_shard(run, "in_flight", span).values() if len(shard)]
        if not held:
            yield from _missing("seats", "the engine wrote no samples while measuring")
        else:
            share = sum(float(shard.last.mean()) for shard in held) / seats  # each shard tells of its own seats
            status = "pass" if share >= options.seats_share else "fail"
            message = f"{100 * share:.1f} % of {seats} seats busy while measuring"
            yield _finding("seats", status, message, share, options.seats_share, "share", sum(map(len, held)),
                           span[0])  # fmt: skip


def _seats(run: Run) -> int:
    """How many seats the measuring phase kept, over all shards."""
    measuring = {p.name for p in run.phases if p.kind == "measure"}
    starts = {
        (str(r.get("by")), str(r.get("phase"))): int(r.get("concurrency") or 0)
        for r in run.journal
        if r.get("event") == "phase_start" and r.get("phase") in measuring
    }
    per_phase: Counter[str] = Counter()
    for (_, phase), seats in starts.items():
        per_phase[phase] += seats
    return min(per_phase.values(), default=0)


def _send_lag(lags: array[float], ttfts: array[float], options: Options) -> Iterator[Finding]:
    p = next((p for p in (0.99, 0.95, 0.9, 0.5) if certified(p, len(lags))), None)
    if p is None:
        yield from _missing("send lag", f"{len(lags)} requests measured, too few for any percentile")
        return
    lag_ms = float(np.quantile(np.asarray(lags), p, method="inverted_cdf"))
    ttft_ms = float(np.median(np.asarray(ttfts))) if len(ttfts) else 0.0
    bound = max(options.send_lag_ms, options.send_lag_share * ttft_ms)
    status: FindingStatus = "fail" if lag_ms > bound else "pass"
    message = f"requests sent p{100 * p:g} {lag_ms:.1f} ms after they were due, connecting left out"
    yield _finding("send lag", status, message, lag_ms, bound, "ms", len(lags), evidence="outcomes")


def _conservation(run: Run) -> list[Finding]:
    """issued = ok + failed + incomplete per drained phase, and as many outcomes on disk as were counted."""
    drained = [r for r in run.journal if r.get("event") == "phase_drained"]
    if not drained or not run.finished:
        return _missing("conservation", "the run has no end on record")
    if lost := lost_shards(run):
        return _missing("conservation", f"lost shard {', '.join(map(str, lost))} told of no end")
    words: tuple[OutcomeWord, ...] = ("ok", "failed", "incomplete")
    issued = sum(int(r["issued"]) for r in drained)
    counted: Counter[OutcomeWord] = Counter({w: sum(int(r[w]) for r in drained) for w in words})
    phases = {r.get("phase") for r in drained}
    written = Counter(o.outcome for o in run.outcomes() if o.phase in phases)
    off = abs(issued - counted.total()) + sum(abs(counted[w] - written[w]) for w in words)
    message = f"{issued} issued = " + " + ".join(f"{counted[w]} {w}" for w in words)
    if off:
        message = f"{issued} issued, {counted.total()} counted, {written.total()} on record: they must agree"
    status: FindingStatus = "fail" if off else "pass"
    return [
        _finding("conservation", status, message, off, 0, "requests", issued, None, "lost_records", "journal.jsonl")
    ]


def _clocks(run: Run) -> list[Finding]:
    """A clock that runs at another rate spoils every duration; a wall clock that was merely set does not."""
    stamps = sorted({(int(r["at"]), int(r["wall"])) for r in run.journal if r.get("by") == "supervise" and "wall" in r})
    stamps = stamps or sorted({(int(r["at"]), int(r["wall"])) for r in run.journal if "wall" in r})
    mono: Ints = np.array([at for at, _ in stamps], dtype=np.int64)
    wall: Ints = np.array([w for _, w in stamps], dtype=np.int64)
    far = np.diff(mono) >= 5 * SECOND
    if not far.any():
        return _missing("clocks", "the journal has no two records 5 s apart")
    ratios = (np.diff(wall) / np.maximum(np.diff(mono), 1))[far]
    rate = float(abs(np.median(ratios) - 1))
    set_s = float(np.abs(np.diff(wall) - np.diff(mono)).max()) / SECOND
    status: FindingStatus = "warn" if rate > CLOCK_WARN or set_s > CLOCK_SET_S else "pass"
    if rate > CLOCK_FAIL and len(ratios) >= 3:  # one or two steps cannot be told from a rate
        status = "fail"
    message = f"wall and monotonic clock run alike to {100 * rate:.3f} %"
    message += f", the wall clock was set by {set_s:.1f} s" if set_s > CLOCK_SET_S else ""
    return [
        _finding("clocks", status, message, rate, CLOCK_FAIL, "share", len(stamps), None, "clocks", "journal.jsonl")
    ]
