"""The one module that reads clocks.

Durations are integer nanoseconds of CLOCK_MONOTONIC, which all processes of a host share. Never `loop.time()`: under
uvloop it moves in steps of 1 ms. Wall time, boot time and the boot id are read together, so that a suspend (BOOTTIME
runs ahead of MONOTONIC), a clock step (REALTIME jumps) and a reboot (another boot id) can be told apart later.
"""

from __future__ import annotations

import time
from pathlib import Path

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


def reading(root: Path = Path("/")) -> dict[str, int | str | None]:
    """All clocks at one moment, as it stands at the head of every file of a run."""
    return {"mono_ns": now_ns(), "boottime_ns": boottime_ns(), "wall_ns": wall_ns(), "boot_id": boot_id(root)}


def utc_stamp() -> str:
    """`20261130T204500Z`, for names of run folders."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def cpu_ns() -> int:
    """CPU time of this process, user and system, all threads."""
    return time.process_time_ns()
