"""What a scripted server says that it sent, held against what our client says that it received. No I/O.

Both sides read CLOCK_MONOTONIC of one machine, so that the difference of two gaps is the client's error and nothing
else: a server that was late itself has logged it. A chunk that waited in one read with a later one has no time of its
own; such chunks are counted (`inexact_share`), and their gaps are in no error of a gap, but in every percentile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.types import Outcome

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Schedule:
    """First token after `ttft_ms`, then one every `gap_ms`, `tokens` in all; `model` is the name that asks for it."""

    ttft_ms: float = 200.0
    gap_ms: float = 20.0
    tokens: int = 128

    @property
    def model(self) -> str:
        return f"t{self.ttft_ms:g}-i{self.gap_ms:g}-n{self.tokens}"

    @property
    def stream_s(self) -> float:
        return (self.ttft_ms + self.gap_ms * (self.tokens - 1)) / 1e3

    def rate_per_s(self, streams: int) -> float:
        """Chunks a second that `streams` closed loops would get from a server and a client without any delay."""
        return streams * self.tokens / self.stream_s


@dataclass(frozen=True, slots=True)
class Served:
    """One request as the server logged it; `sent_ns` is read just before each chunk is handed to the kernel."""

    rid: int
    arrived_ns: int
    done_ns: int
    tokens: int
    sent_ns: Ints


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as our client reported it; `lags_ns` is how late each read was, where the kernel told."""

    rid: int
    sent_ns: int
    first_ns: int
    last_ns: int
    gaps_ns: array[int]
    lags_ns: Sequence[int] = ()


def read_log(answer: Any) -> list[Served]:
    """The body of GET /log: `{"requests": [[rid, arrived, done, tokens, [sent, …]], …]}`."""
    return [
        Served(rid, arrived, done, tokens, np.array(sent, dtype=np.int64))
        for rid, arrived, done, tokens, sent in answer["requests"]
    ]


def seen_of(outcome: Outcome) -> Seen | None:
    """None where the request gave no stream to measure."""
    if outcome.outcome != "ok" or outcome.sent_ns is None or outcome.first_ns is None or outcome.last_ns is None:
        return None
    return Seen(
        rid_of(outcome.id), outcome.sent_ns, outcome.first_ns, outcome.last_ns, outcome.gaps_ns, outcome.lags_ns
    )  # fmt: skip


def rid_of(request_id: str) -> int:
    """The item number at the end of a request's id, by which the server's log names it."""
    return int(request_id.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class Paired:
    """All streams of both logs side by side, in milliseconds; `unpaired` requests or streams of another length are in
    one log only. `gap_error` is |reported − true| of the gaps between chunks with times of their own."""

    ttft: Floats
    ttft_true: Floats
    gap: Floats
    gap_true: Floats
    gap_error: Floats
    tpot: Floats
    tpot_true: Floats
    e2e: Floats
    e2e_true: Floats
    chunks: int
    inexact: int
    unpaired: int

    @property
    def inexact_share(self) -> float:
        return self.inexact / max(1, self.chunks)


def pair(served: Iterable[Served], seen: Iterable[Seen]) -> Paired:
    """Raises ValueError where no stream is in both logs."""
    truth = {each.rid: each for each in served}
    rows: list[tuple[float, ...]] = []
    gaps: list[Ints] = []
    gaps_true: list[Ints] = []
    exact: list[npt.NDArray[np.bool_]] = []
    chunks = inexact = unpaired = 0
    for ours in seen:
        theirs = truth.pop(ours.rid, None)
        if theirs is None or len(theirs.sent_ns) != len(ours.gaps_ns) + 1:
            unpaired += 1
            continue
        own_time = own_times(ours.gaps_ns)
        gap, gap_true = np.asarray(ours.gaps_ns, dtype=np.int64), np.diff(theirs.sent_ns)
        gaps.append(gap)
        gaps_true.append(gap_true)
        exact.append(own_time[1:] & own_time[:-1])
        chunks += len(own_time)
        inexact += int((~own_time).sum())
        span, span_true = ours.last_ns - ours.first_ns, int(theirs.sent_ns[-1] - theirs.sent_ns[0])
        steps = max(1, len(gap))
        rows.append((
            ours.first_ns - ours.sent_ns, int(theirs.sent_ns[0]) - theirs.arrived_ns, span / steps, span_true / steps,
            ours.last_ns - ours.sent_ns, int(theirs.sent_ns[-1]) - theirs.arrived_ns,
        ))  # fmt: skip
    if not rows:
        raise ValueError("no stream is in both logs")
    per_stream = np.array(rows, dtype=np.float64).T / 1e6
    gap_all, true_all, exact_all = np.concatenate(gaps), np.concatenate(gaps_true), np.concatenate(exact)
    error = np.abs(gap_all - true_all)[exact_all]
    return Paired(
        ttft=per_stream[0], ttft_true=per_stream[1], tpot=per_stream[2], tpot_true=per_stream[3],
        e2e=per_stream[4], e2e_true=per_stream[5], gap=gap_all / 1e6, gap_true=true_all / 1e6, gap_error=error / 1e6,
        chunks=chunks, inexact=inexact, unpaired=unpaired + len(truth),
    )  # fmt: skip


def own_times(gaps_ns: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which chunks of a stream have a time of their own: a gap of exactly nothing means that two came in one read,
    whose time is that of the later one."""
    own = np.ones(len(gaps_ns) + 1, dtype=np.bool_)
    own[:-1] = np.asarray(gaps_ns, dtype=np.int64) != 0
    return own


def rank(values: Floats, p: float) -> float:
    """The value at rank ceil(p·n), as everywhere in loadgen; 0 where there is none."""
    return float(np.quantile(values, p, method="inverted_cdf")) if len(values) else 0.0


def lag_ms(seen: Iterable[Seen]) -> Floats:
    """How late we read what the kernel had received, read by read; empty where it gives no times."""
    lags = [np.asarray(each.lags_ns, dtype=np.int64) for each in seen]
    return np.concatenate(lags) / 1e6 if lags else np.empty(0)


def late_ms(served: Iterable[Served], schedule: Schedule) -> Floats:
    """By how much the server missed its own schedule, chunk by chunk."""
    late = [
        (each.sent_ns - each.arrived_ns) / 1e6 - schedule.ttft_ms - schedule.gap_ms * np.arange(len(each.sent_ns))
        for each in served
    ]
    return np.concatenate(late) if late else np.empty(0)


def span(served: Iterable[Served]) -> tuple[int, int]:
    """From the first arrival to the last end. Raises ValueError for none."""
    all_of = list(served)
    return min(each.arrived_ns for each in all_of), max(each.done_ns for each in all_of)


def held(served: Sequence[Served], streams: int) -> tuple[int, int]:
    """While so many streams were asked for: from the arrival of the last seat's first request to the last arrival of
    all, after which seats run dry. Where no seat asked twice, the whole load."""
    arrivals = sorted(each.arrived_ns for each in served)
    return (arrivals[streams - 1], arrivals[-1]) if len(served) >= 2 * streams else span(served)


def mean_open(served: Sequence[Served], within: tuple[int, int] | None = None) -> float:
    """Streams that the server had open on average, by its log: Little's law. `within`: begin and end; None: all."""
    if not served:
        return 0.0
    begin, end = within or span(served)
    open_ns = sum(max(0, min(end, each.done_ns) - max(begin, each.arrived_ns)) for each in served)
    return open_ns / max(1, end - begin)


def most_open(served: Iterable[Served]) -> int:
    """The most streams that the server had open at once, each from its arrival to its last chunk: `done_ns` is stamped
    after the end was sent, and on a busy box the client's next request may have arrived before that."""
    steps = sorted(
        (at, step)
        for each in served
        for at, step in ((each.arrived_ns, 1), (int(each.sent_ns[-1]) if len(each.sent_ns) else each.done_ns, -1))
    )
    level = most = 0
    for _, step in steps:
        level += step
        most = max(most, level)
    return most


def chunks_per_s(served: Sequence[Served], within: tuple[int, int] | None = None) -> float:
    """Chunks that the server sent, a second. `within`: begin and end; None: the whole load, ramp and tail included."""
    if not served:
        return 0.0
    begin, end = within or span(served)
    sent = sum(int(np.count_nonzero((each.sent_ns >= begin) & (each.sent_ns <= end))) for each in served)
    return sent / max(1e-9, (end - begin) / 1e9)
