"""Was the server's host lost: did it boot anew while the run went on?

What: the boot id that each lane of monitors notes with its clocks, once a second. Another id in the same lane is
another boot: the run lost its host, whatever the server says afterwards. The finding tells the hole and the last memory
reading before it; nothing is interpolated, and memory did not "recover".
Why: a box that froze and was switched off and on comes back young and healthy, with the only evidence in the hole.
A server that fell silent, a lane that died or a broken link is no lost host: that is for `restart`, `hung` and `blind`.
Threshold: none; a boot id is random and does not change by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from loadgen import clock
from loadgen.rules import GIB, SECOND, Needs, clocks, not_evaluated, readings, when
from loadgen.rules.thermal import heat_before
from loadgen.types import Finding

if TYPE_CHECKING:
    from loadgen.record import Run


@dataclass(frozen=True, slots=True)
class Options:
    pass


def needs(options: Options) -> Needs:
    return Needs()


def check(run: Run, options: Options) -> list[Finding]:
    noted = clocks(run)
    lost: dict[str, tuple[clock.Reading, clock.Reading]] = {}
    for lane, seen in noted.items():
        for before, after in pairwise(seen):
            if any(gap.kind == "reboot" for gap in clock.between(before, after, SECOND)):
                lost.setdefault(lane, (before, after))
    if lost:
        before, after = min(lost.values(), key=lambda pair: pair[0].mono_ns)
        return [_lost(run, before, after, sorted(lost))]
    if not any(reading.boot_id for seen in noted.values() for reading in seen) and not run.finished:
        return [not_evaluated("host_lost", "stability", "no lane noted which boot it saw, and the run has no end")]
    # a supervisor that could say that it ended was not rebooted, and the lanes saw one boot
    return [Finding("host_lost", "stability", "pass", "one boot throughout", "", 0, 0, "boots", len(noted))]


def _lost(run: Run, before: clock.Reading, after: clock.Reading, lanes: list[str]) -> Finding:
    [gap] = clock.between(before, after, SECOND)
    hole = "" if gap.seconds is None else f" after {gap.seconds:.0f} s without a sign of life"
    message = f"the host booted anew{hole}; the last was seen at {when(run, before.mono_ns)} ({', '.join(lanes)})"
    used = readings(run, "host", "mem_used_bytes", (0, before.mono_ns))
    total = readings(run, "host", "mem_total_bytes", (0, before.mono_ns))
    if len(used) and len(total):
        share = 100 * float(used.last[-1]) / float(total.last[-1])
        message += f", {float(used.last[-1]) / GIB:.1f} of {float(total.last[-1]) / GIB:.1f} GiB used ({share:.1f} %)"
    if (heat := heat_before(run, before.mono_ns)) is not None:
        message += f"; likely cause heat: {heat}"
    return Finding(
        "host_lost", "stability", "fail", message, "", gap.seconds, 0, "s", len(lanes), "samples: clock.boot_id",
        before.mono_ns, "host_lost", hard=True,
    )  # fmt: skip
