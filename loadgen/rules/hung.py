"""A server that takes requests and answers nothing.

What: the longest time in which requests were in flight and no stream gave a token. It fails above the larger of
`silence` and twice the longest TTFT of any good answer of the run; it is hard if the server never answered again.
Why: `/health` says 200 while the scheduler is dead; connection limits of ten minutes hide it for ten minutes.
Threshold: engines log "no answer for 60 s" themselves; 120 s is twice that. A prefill of 260K tokens is silent for
four minutes and healthy, hence the run's own longest TTFT.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.rules import SECOND, Ints, Needs, loaded, not_evaluated, when
from loadgen.types import Finding, Seconds

if TYPE_CHECKING:
    from loadgen.record import Run


@dataclass(frozen=True, slots=True)
class Options:
    silence: Seconds = Seconds(120)


def needs(options: Options) -> Needs:
    return Needs(seconds=options.silence)


def check(run: Run, options: Options) -> list[Finding]:
    labels = {p.name for p in loaded(run)}
    spoke, fell_silent, sent, done = (array("q") for _ in range(4))
    allowed_ns, n = float(options.silence) * SECOND, 0
    for outcome in run.outcomes():
        if outcome.phase not in labels or outcome.sent_ns is None:
            continue
        n += 1
        sent.append(outcome.sent_ns)
        done.append(outcome.done_ns or outcome.sent_ns)
        if outcome.outcome == "ok" and outcome.ttft_ns is not None:
            allowed_ns = max(allowed_ns, 2.0 * outcome.ttft_ns)
        if outcome.first_ns is None or outcome.last_ns is None:
            continue
        whole = outcome.gaps is None or outcome.gaps.max_ns <= allowed_ns
        # a stream with a long hole in it spoke at its ends only: where the hole was is not on record
        for a, b in (
            [(outcome.first_ns, outcome.last_ns)] if whole else [(outcome.first_ns,) * 2, (outcome.last_ns,) * 2]
        ):
            spoke.append(a)
            fell_silent.append(b)
    if not n:
        return [not_evaluated("hung", "stability", "no request was sent under load", n=0)]
    silence_ns, since_ns, back = _longest_silence(
        *(np.asarray(x, dtype=np.int64) for x in (spoke, fell_silent, sent, done))
    )
    hung = silence_ns > allowed_ns
    message = f"longest silence with requests in flight {silence_ns / SECOND:.1f} s"
    if hung:
        message += f" from {when(run, since_ns)}, " + ("then it answered again" if back else "and no answer since")
    return [
        Finding(
            "hung", "stability", "fail" if hung else "pass", message, "", silence_ns / SECOND, allowed_ns / SECOND, "s",
            n, "outcomes", since_ns if hung else None, "hung" if hung else "", hard=hung and not back,
        )
    ]  # fmt: skip


def _longest_silence(spoke: Ints, fell_silent: Ints, sent: Ints, done: Ints) -> tuple[float, int, bool]:
    """Length and begin of the longest overlap of a request in flight with a stretch without any token, and whether
    a token came after it."""
    order = np.argsort(spoke)
    starts, ends = spoke[order], np.maximum.accumulate(fell_silent[order]) if len(spoke) else fell_silent
    # the holes between streams, the one before the first token and the one after the last
    begin = np.concatenate([[sent.min()], ends])
    end = np.concatenate([starts, [done.max()]])
    best, since, back = 0.0, 0, True
    widths = end - begin
    for i in np.argsort(-widths):  # widest first: the loop ends as soon as no narrower hole can win
        if widths[i] <= best:
            break
        overlap = np.minimum(done, end[i]) - np.maximum(sent, begin[i])
        j = int(overlap.argmax())
        if overlap[j] > best:
            best, since, back = float(overlap[j]), int(max(sent[j], begin[i])), bool(i < len(starts))
    return best, since, back
