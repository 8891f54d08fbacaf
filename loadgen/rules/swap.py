"""Swapping that hurts: pages moving in and out while tasks wait for memory.

What: `seconds` consecutive seconds under load, each with a reading of in + out of at least `pages_per_s`, with PSI
memory some at `psi_percent` or more within them. Without PSI the rates alone warn.
Why: swap that is full says nothing: cold pages parked there are good, and a stock never drains by itself. Rates
together with waiting are thrash.
Threshold: below 100 pages/s is noise, 2,000 pages/s (8 MB/s) for 5 s was seen in thrash only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.rules import NOT_OBSERVED, SECOND, Needs, longest, not_evaluated, readings, serving, unwatched, when
from loadgen.types import Finding, FindingStatus, Seconds

if TYPE_CHECKING:
    from loadgen.record import Run


@dataclass(frozen=True, slots=True)
class Options:
    pages_per_s: float = 2000.0
    seconds: Seconds = Seconds(5)
    psi_percent: float = 5.0


def needs(options: Options) -> Needs:
    return Needs(seconds=options.seconds, monitors=("host",))


def check(run: Run, options: Options) -> list[Finding]:
    if blind := unwatched(run, "swap"):
        return blind
    span = serving(run)
    into, out = (readings(run, "host", f"pswp{way}_pages_per_s", span) for way in ("in", "out"))
    if span is None or len(into) == 0 or len(into) != len(out):
        cause = "" if run.observed().get("host", (False, ""))[0] else NOT_OBSERVED
        return [not_evaluated("swap", "stability", "swap rates were not measured under load", n=len(into), cause=cause)]
    pages = into.max + out.max  # p95 of ten readings a second is the second's highest
    p95 = float(np.quantile(pages, 0.95, method="higher"))
    held_s, since_ns = longest(pages >= options.pages_per_s, into.at_ns)
    status: FindingStatus = "pass"
    message = f"p95 of pages swapped in and out {p95:.0f}/s"
    if held_s >= options.seconds:
        psi = readings(run, "host", "psi_memory_some_percent", (since_ns, since_ns + round(held_s * SECOND)))
        waiting = float(psi.last.mean()) if len(psi) else None
        thrash = waiting is not None and waiting >= options.psi_percent
        status = "fail" if thrash else "warn"
        stalled = "PSI not measured" if waiting is None else f"tasks waited for memory {waiting:.0f} % of the time"
        message += f"; at {when(run, since_ns)} above {options.pages_per_s:.0f}/s for {held_s:.0f} s, {stalled}"
    return [
        Finding(
            "swap", "stability", status, message, "", p95, options.pages_per_s, "pages/s", len(pages),
            "samples: host.pswpin_pages_per_s, host.pswpout_pages_per_s",
            since_ns if status != "pass" else None, "swapping" if status != "pass" else "",
        )
    ]  # fmt: skip
