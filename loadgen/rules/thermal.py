"""Heat: how hot the GPU became, and whether it slowed down for it.

What: per GPU the high-water of temperature and the low-water of the clock while busy (information); a finding only
with evidence: the share of busy seconds with a thermal clock-event reason, or with the clock below 80 % of its own
busy median, which catches boards that throttle without saying so.
Why: temperature alone is no verdict (boards are built to run at 85 °C); a clock that falls is lost speed.
Threshold: up to 1 % of the busy time passes, up to 10 % warns, more fails; the clock rule alone only warns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.rules import NOT_OBSERVED, Needs, Readings, not_evaluated, readings, serving, unwatched
from loadgen.types import Finding, FindingStatus

if TYPE_CHECKING:
    from loadgen.record import Run

# NVML's clock-event reasons that mean heat: software thermal (0x20) and hardware thermal slow-down (0x40).
THERMAL_REASONS = 0x20 | 0x40
BUSY_PERCENT = 90.0


@dataclass(frozen=True, slots=True)
class Options:
    warn_share: float = 0.01
    fail_share: float = 0.10
    slow_clock: float = 0.8
    min_busy: int = 30


def needs(options: Options) -> Needs:
    return Needs(seconds=options.min_busy, monitors=("nvidia",))


def check(run: Run, options: Options) -> list[Finding]:
    if blind := unwatched(run, "thermal"):
        return blind
    boards = run.series("nvidia", "temperature_c")
    if not boards:
        why = run.observed().get("nvidia", (False, "no GPU was watched"))[1]
        return [not_evaluated("thermal", "stability", f"no GPU temperature: {why}", cause=NOT_OBSERVED)]
    return [_board(run, tuple(labels), options) for labels in boards]


def _board(run: Run, labels: tuple[tuple[str, str], ...], options: Options) -> Finding:
    scope, span = f"gpu {dict(labels).get('gpu', '?')}", serving(run)
    heat, load, clock, why = (
        readings(run, "nvidia", metric, span, labels)
        for metric in ("temperature_c", "utilization_percent", "sm_clock_mhz", "clock_event_reasons")
    )
    if not len(heat):
        return not_evaluated("thermal", "stability", f"{scope}: no reading under load", scope, 0)
    hottest = float(heat.max.max())
    busy_at = load.at_ns[load.max >= BUSY_PERCENT]
    clocks, reasons = _at(clock, busy_at), _at(why, busy_at)
    message = f"{scope}: at most {hottest:.0f} °C"
    if len(clocks):
        message += f", busy clock {clocks.min():.0f} to {clocks.max():.0f} MHz"
    hot = float(((reasons.astype(np.int64) & THERMAL_REASONS) != 0).mean()) if len(reasons) else None
    slow = float((clocks < options.slow_clock * np.median(clocks)).mean()) if len(clocks) else None
    if len(busy_at) < options.min_busy or (hot is None and slow is None):
        return not_evaluated("thermal", "stability", f"{message}, busy for {len(busy_at)} s only", scope, len(busy_at))
    throttled = hot or 0.0
    status: FindingStatus = "pass"
    if throttled > options.warn_share or (slow or 0.0) > options.fail_share:
        status = "fail" if throttled > options.fail_share else "warn"
    message += f", throttled by heat {100 * throttled:.0f} % and slow {100 * (slow or 0):.0f} % of the busy time"
    return Finding(
        "thermal", "stability", status, message, scope, throttled, options.fail_share, "share", len(busy_at),
        "samples: nvidia.clock_event_reasons", int(busy_at[0]) if status != "pass" else None,
        "thermal" if status != "pass" else "",
    )  # fmt: skip


def _at(series: Readings, moments: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.float64]:
    """The series' values of those seconds: one monitor reads all its metrics at one moment."""
    return series.last[np.isin(series.at_ns, moments)]
