"""Heat: how hot the GPU became, and whether it slowed down for it.

What: per GPU the high-water of temperature and the low-water of the clock while busy (information); a finding only
with evidence: the share of busy seconds with a thermal clock-event reason (or by the driver's own count of seconds, if
that is more), or with the clock below 80 % of its own busy median, which catches boards that throttle and say nothing.
A GPU that was held back by its hardware for another reason than heat (its power brake) warns, as does any sensor of the
machine that reached its critical temperature.
Why: temperature alone is no verdict (boards are built to run at 85 °C); a clock that falls is lost speed.
Threshold: up to 1 % of the busy time passes, up to 10 % warns, more fails; the clock rule alone only warns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.rules import (
    NOT_OBSERVED,
    SECOND,
    Needs,
    Readings,
    happenings,
    not_evaluated,
    readings,
    serving,
    unwatched,
    when,
)
from loadgen.types import Finding, FindingStatus

if TYPE_CHECKING:
    from loadgen.record import Run

# NVML's clock-event reasons that mean heat: software thermal (0x20) and hardware thermal slow-down (0x40).
THERMAL_REASONS = 0x20 | 0x40
# Hardware slow-down (0x8) says heat or power, without telling which; the power brake (0x80) is the supply's.
HW_SLOWDOWN, POWER_BRAKE = 0x8, 0x80
BUSY_PERCENT = 90.0
LOOK_BACK_S = 600  # before a machine was lost: a heat-up takes minutes


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
    findings = []
    for event in happenings(run, "thermal", "critical_temperature"):
        message, scope = f"at {when(run, event.at_ns)} {event.text}", event.labels.get("chip", "")
        findings.append(
            Finding(
                "thermal", "stability", "warn", message, scope, evidence="samples: thermal", since_ns=event.at_ns,
                cause="thermal",
            )
        )  # fmt: skip
    boards = run.series("nvidia", "temperature_c")
    if not boards:
        why = run.observed().get("nvidia", (False, "no GPU was watched"))[1]
        return [*findings, not_evaluated("thermal", "stability", f"no GPU temperature: {why}", cause=NOT_OBSERVED)]
    findings += [found for labels in boards if (found := _braked(run, tuple(labels))) is not None]
    return [*findings, *(_board(run, tuple(labels), options) for labels in boards)]


def _braked(run: Run, labels: tuple[tuple[str, str], ...]) -> Finding | None:
    """Seconds under load in which the hardware held the clocks down and heat was not the reason."""
    why = readings(run, "nvidia", "clock_event_reasons", serving(run), labels)
    bits = why.last.astype(np.int64)
    cold = ((bits & HW_SLOWDOWN) != 0) & ((bits & THERMAL_REASONS) == 0)
    held_at = why.at_ns[((bits & POWER_BRAKE) != 0) | cold]
    if not len(held_at):
        return None
    scope = f"gpu {dict(labels).get('gpu', '?')}"
    message = f"{scope}: held down by its hardware (power brake or slow-down without heat) in {len(held_at)} of "
    message += f"{len(why)} readings, first at {when(run, int(held_at[0]))}"
    return Finding(
        "thermal", "stability", "warn", message, f"{scope} power", len(held_at), 0, "readings", len(why),
        "samples: nvidia.clock_event_reasons", int(held_at[0]), "power_brake",
    )  # fmt: skip


def _board(run: Run, labels: tuple[tuple[str, str], ...], options: Options) -> Finding:
    scope, span = f"gpu {dict(labels).get('gpu', '?')}", serving(run)
    heat, load, clock, why = (
        readings(run, "nvidia", metric, span, labels)
        for metric in ("temperature_c", "utilization_percent", "sm_clock_mhz", "clock_event_reasons")
    )
    if not len(heat):
        return not_evaluated("thermal", "stability", f"{scope}: no reading under load", scope, 0)
    hottest = float(heat.max.max())
    counted_s = slowdown_s(run, labels, span)
    busy_at = load.at_ns[load.max >= BUSY_PERCENT]
    clocks, reasons = _at(clock, busy_at), _at(why, busy_at)
    message = f"{scope}: at most {hottest:.0f} °C"
    if len(clocks):
        message += f", busy clock {clocks.min():.0f} to {clocks.max():.0f} MHz"
    hot = float(((reasons.astype(np.int64) & THERMAL_REASONS) != 0).mean()) if len(reasons) else None
    slow = float((clocks < options.slow_clock * np.median(clocks)).mean()) if len(clocks) else None
    if counted_s:
        message += f", held down by heat for {counted_s:.1f} s"
        lasted_s = max(len(busy_at), (int(heat.at_ns[-1]) - int(heat.at_ns[0])) / SECOND if not len(load) else 0, 1)
        hot = max(hot or 0.0, min(1.0, counted_s / lasted_s))
    if not counted_s and (len(busy_at) < options.min_busy or (hot is None and slow is None)):
        return not_evaluated("thermal", "stability", f"{message}, busy for {len(busy_at)} s only", scope, len(busy_at))
    throttled = hot or 0.0
    status: FindingStatus = "pass"
    if throttled > options.warn_share or (slow or 0.0) > options.fail_share:
        status = "fail" if throttled > options.fail_share else "warn"
    message += f", throttled by heat {100 * throttled:.0f} % and slow {100 * (slow or 0):.0f} % of the busy time"
    since = int((busy_at if len(busy_at) else heat.at_ns)[0])
    return Finding(
        "thermal", "stability", status, message, scope, throttled, options.fail_share, "share", len(busy_at),
        "samples: nvidia.clock_event_reasons", since if status != "pass" else None,
        "thermal" if status != "pass" else "",
    )  # fmt: skip


def slowdown_s(run: Run, labels: tuple[tuple[str, str], ...], span: tuple[int, int] | None) -> float:
    """Seconds within a span for which the driver says that heat held the clocks down; 0.0 where it does not count."""
    total = 0.0
    for metric in ("sw_thermal_slowdown_s", "hw_thermal_slowdown_s"):
        count = readings(run, "nvidia", metric, span, labels)
        if len(count):
            total = max(total, float(count.last[-1] - count.min[0]))  # the two may run at once: never their sum
    return total


def heat_before(run: Run, at_ns: int) -> str | None:
    """What the last ten minutes before a moment say for heat as its cause, in words; None where nothing does.

    A rising count of thermal slow-down, a thermal clock-event reason in the last ten seconds, or the kernel's own
    word. Temperature alone is none (boards are built for 85 °C), but it is told.
    """
    span = (at_ns - LOOK_BACK_S * SECOND, at_ns)
    for event in happenings(run, "kernel", "thermal_critical"):
        if span[0] <= event.at_ns <= at_ns:
            return event.text or "critical temperature reached"
    for labels in map(tuple, run.series("nvidia", "temperature_c")):
        heat = readings(run, "nvidia", "temperature_c", span, labels)
        why = readings(run, "nvidia", "clock_event_reasons", (at_ns - 10 * SECOND, at_ns), labels)
        held_s = slowdown_s(run, labels, span)
        held_now = bool(len(why)) and bool((why.last.astype(np.int64) & THERMAL_REASONS).any())
        if len(heat) and (held_s > 0 or held_now):
            words = f"GPU {dict(labels).get('gpu', '?')} at {heat.last[-1]:.0f} °C"
            return words + (f", held down by heat for {held_s:.1f} s and rising" if held_s else ", held down by heat")
    return None


def _at(series: Readings, moments: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.float64]:
    """The series' values of those seconds: one monitor reads all its metrics at one moment."""
    return series.last[np.isin(series.at_ns, moments)]
