"""The one module that reads clocks.

Durations are integer nanoseconds of CLOCK_MONOTONIC, which all processes of a host share. Never `loop.time()`: under
uvloop it moves in steps of 1 ms. Wall time, boot time and the boot id are read together, so that a suspend (BOOTTIME
runs ahead of MONOTONIC), a clock step (REALTIME jumps) and a reboot (another boot id) can be told apart later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

now_ns = time.monotonic_ns
wall_ns = time.time_ns


def boottime_ns() -> int | None:
    """CLOCK_BOOTTIME, or None where the system has none (macOS)."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.clock_gettime_ns(clock)


def boot_id(root: Path = Path("/")) -> str | None:
    """The kernel's random id of this boot; `root` stands in for another machine's file tree."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Reading:
    """All clocks of a host at one moment; None: this host has none, or nobody read it."""

    mono_ns: int
    boottime_ns: int | None = None
    wall_ns: int | None = None
    boot_id: str | None = None


def reading(root: Path = Path("/")) -> dict[str, int | str | None]:
    """All clocks at one moment, as it stands at the head of every file of a run."""
    return {"mono_ns": now_ns(), "boottime_ns": boottime_ns(), "wall_ns": wall_ns(), "boot_id": boot_id(root)}


def utc_stamp() -> str:
    """`20261130T204500Z`, for names of run folders."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def utc(seconds: float) -> str:
    """A moment of the wall clock (seconds since 1970) as `2026-11-30T20:45:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def cpu_ns() -> int:
    """CPU time of this process, user and system, all threads."""
    return time.process_time_ns()


# Brackets of one steady clock overlap, or miss each other by the rounding of the clocks; no clock is set by less than
# this on purpose.
STEADY_NS = 1_000


class WallOffset:
    """How far CLOCK_REALTIME, in which the kernel stamps, is ahead of CLOCK_MONOTONIC.

    Slewing (NTP) bends both clocks alike, so the difference is a constant until somebody sets the clock or the machine
    sleeps. Reading monotonic, real, monotonic brackets it; every bracket since the last step holds, so what is kept is
    their intersection: after a few looks it is narrower than any single reading, whoever took the core meanwhile.
    """

    __slots__ = ("_high_ns", "_low_ns", "ns", "steps")

    def __init__(self) -> None:
        self._low_ns = self._high_ns = self.ns = 0
        self.steps = 0
        before_ns, real_ns = now_ns(), wall_ns()
        self._set(real_ns - now_ns(), real_ns - before_ns)

    def look(self) -> bool:
        """Read the clocks; as `take`."""
        before_ns, real_ns = now_ns(), wall_ns()
        return self.take(before_ns, real_ns, now_ns())

    def take(self, before_ns: int, real_ns: int, after_ns: int) -> bool:
        """One bracket. False where the clock was set since the one before: what the kernel stamped before the step and
        is converted after it would be wrong by the whole step."""
        low_ns, high_ns = real_ns - after_ns, real_ns - before_ns
        if low_ns > self._high_ns + STEADY_NS or high_ns < self._low_ns - STEADY_NS:
            self._set(low_ns, high_ns)
            self.steps += 1
            return False
        if low_ns > self._high_ns or high_ns < self._low_ns:
            self._set(low_ns, high_ns)
        elif low_ns > self._low_ns or high_ns < self._high_ns:
            self._set(max(low_ns, self._low_ns), min(high_ns, self._high_ns))
        return True

    def _set(self, low_ns: int, high_ns: int) -> None:
        self._low_ns, self._high_ns, self.ns = low_ns, high_ns, (low_ns + high_ns) // 2


# ---------------------------------------------------------------------------------------------------------------------
# What happened between two readings of all clocks

# A hole of more than this many periods is one.
HOLE_PERIODS = 3.0
# NTP slews by at most 0.5 ms a second, and a reading of four clocks on a busy machine is torn by milliseconds: less
# than this between two readings is no step and no sleep.
STEP_NS = 500_000_000


@dataclass(frozen=True, slots=True)
class Gap:
    """What two readings tell: `reboot`, `suspend`, `clock_step` or `starved`, and by how many seconds; those of a clock
    step have a sign, those of a reboot are None where there is no wall clock to tell."""

    kind: Literal["reboot", "suspend", "clock_step", "starved"]
    seconds: float | None


def between(before: Reading, after: Reading, period_ns: int) -> list[Gap]:
    """Why nothing was read in between, or why times of the wall do not fit: pure, of two `reading`s of one host.

    Another boot id is a reboot, after which the monotonic clock began anew and nothing else can be compared. BOOTTIME
    that ran ahead of MONOTONIC is a suspend; REALTIME that ran ahead of BOOTTIME (or fell back) was set; MONOTONIC that
    went on for more than three periods while nobody was asleep means that the reader was starved.
    """
    if before.boot_id is not None and after.boot_id is not None and before.boot_id != after.boot_id:
        walls = (before.wall_ns, after.wall_ns)
        return [Gap("reboot", None if None in walls else (after.wall_ns - before.wall_ns) / 1e9)]  # type: ignore[operator]
    gaps = []
    ran_ns = after.mono_ns - before.mono_ns
    slept_ns = 0
    if before.boottime_ns is not None and after.boottime_ns is not None:
        slept_ns = after.boottime_ns - before.boottime_ns - ran_ns
        if slept_ns > STEP_NS:
            gaps.append(Gap("suspend", slept_ns / 1e9))
        else:
            slept_ns = 0
    if before.wall_ns is not None and after.wall_ns is not None:
        set_ns = after.wall_ns - before.wall_ns - ran_ns - slept_ns
        if abs(set_ns) > STEP_NS:
            gaps.append(Gap("clock_step", set_ns / 1e9))
    if ran_ns > HOLE_PERIODS * period_ns:
        gaps.append(Gap("starved", (ran_ns - period_ns) / 1e9))
    return gaps
