"""Free space where the run folder is, and where the model is: a full disk ends the evidence, and a server that swaps,
logs or reads its weights from the disk as well.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds

if TYPE_CHECKING:
    import asyncio

LANE: Lane = "slow"
PERIOD_S = 5.0

ANSWER_LIMIT_S = 2.0  # a network volume may hang for minutes; what it says then is not waited for
FILL_WINDOW_S = 60.0  # the fill rate is a mean over this: logs and checkpoints are written in bursts
FILL_LEAST_S = 10.0  # less tells a burst from a rate badly
MAX_FILL_POINTS = 1200  # of the window: one look per 0.05 s, the lane's shortest period
SOON_S = 3600.0  # a disk that is full within the hour is said once; an hour is time to act
SECTOR_BYTES = 512  # the kernel counts in these whatever the disk has


@dataclass(frozen=True, slots=True)
class Options:
    """`run_folder` is filled in by the lane; `volumes` are further paths to watch, such as the model's."""

    run_folder: str = "."
    volumes: tuple[str, ...] = ()
    root: str = "/"
    period_s: Seconds = Seconds(5)


@dataclass(slots=True)
class Volume:
    """One path: its free bytes over the last minute, counters at the look before, and what was said of it."""

    path: str
    free: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_FILL_POINTS))
    counters: dict[str, float] = field(default_factory=dict)
    counters_ns: int = 0
    pending: asyncio.Task[list[Sample]] | None = None
    said: str = ""
    soon: bool = False
    read_only: bool = False


def fill_rate(free: deque[tuple[int, float]]) -> float | None:
    """By how many bytes a second the free space shrinks (negative: it grows), over the window; None while too short."""
    if len(free) < 2 or (seconds := (free[-1][0] - free[0][0]) / 1e9) < FILL_LEAST_S:
        return None
    return (free[0][1] - free[-1][1]) / seconds


def device_counters(root: Path, device: int) -> dict[str, float]:
    """What the kernel counts of the block device under a path: bytes read and written, milliseconds busy, errors.
    Nothing for what has none (tmpfs, overlay, network)."""
    block = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    out: dict[str, float] = {}
    try:
        words = (block / "stat").read_text().split()
        out["read_bytes"] = float(words[2]) * SECTOR_BYTES
        out["written_bytes"] = float(words[6]) * SECTOR_BYTES
        out["busy_ms"] = float(words[9])
    except (OSError, ValueError, IndexError):
        pass
    try:
        name = block.resolve().name
        out["filesystem_errors_total"] = float((root / f"sys/fs/ext4/{name}/errors_count").read_text())
    except (OSError, ValueError):
        pass
    for folder in (block, block.resolve().parent):  # of a partition the disk has it
        try:
            out["io_errors_total"] = float(int((folder / "device/ioerr_cnt").read_text(), 16))
            break
        except (OSError, ValueError):
            continue
    return out


def look(volume: Volume, root: Path) -> list[Sample]:
    """One look at one path; raises OSError where it cannot be had."""
    found = os.statvfs(volume.path)
    device = os.stat(volume.path).st_dev  # noqa: PTH116
    now = clock.now_ns()
    labels = {"path": volume.path}
    free = float(found.f_bavail * found.f_frsize)
    volume.free.append((now, free))
    while now - volume.free[0][0] > FILL_WINDOW_S * 1e9:
        volume.free.popleft()
    values = {
        "free_bytes": free,
        "total_bytes": float(found.f_blocks * found.f_frsize),
        "free_inodes": float(found.f_favail),
        "total_inodes": float(found.f_files),
    }
    rate = fill_rate(volume.free)
    if rate is not None:
        values["fill_bytes_per_s"] = rate
    counters = device_counters(root, device)
    seconds = (now - volume.counters_ns) / 1e9
    for name, metric, scale in (
        ("read_bytes", "read_bytes_per_s", 1.0),
        ("written_bytes", "written_bytes_per_s", 1.0),
        ("busy_ms", "io_busy_percent", 0.1),
    ):
        if name in counters and name in volume.counters and seconds > 0:
            values[metric] = max(0.0, counters[name] - volume.counters[name]) * scale / seconds
    errors = {name: value for name, value in counters.items() if name.endswith("_total")}
    out = [Sample("disk", metric, value, now, labels) for metric, value in {**values, **errors}.items()]
    for name, value in errors.items():
        more = value - volume.counters.get(name, value)
        if more > 0:
            text = f"{volume.path}: {more:.0f} more {name.removesuffix('_total').replace('_', ' ')}"
            out.append(Sample("disk", "disk_errors", more, now, labels, text))
    volume.counters, volume.counters_ns = counters, now
    read_only = bool(found.f_flag & os.ST_RDONLY)
    if read_only and not volume.read_only:
        out.append(Sample("disk", "read_only", 1.0, now, labels, f"{volume.path} can be read only"))
    volume.read_only = read_only
    if rate and rate > 0 and free / rate < SOON_S and not volume.soon:
        text = f"{volume.path} is full in {free / rate / 60:.0f} minutes at {rate / 2**20:.1f} MiB/s"
        out.append(Sample("disk", "full_soon", free / rate, now, labels, text))
        volume.soon = True
    volume.soon = volume.soon and bool(rate and rate > 0 and free / rate < 2 * SOON_S)
    return out


async def watch(options: Options) -> AsyncIterator[list[Sample]]:
    """Free and total bytes and inodes of each path, fill rate, transfers and errors of its device; happenings
    unreadable (once an outage), read_only, disk_errors, full_soon."""
    import asyncio

    volumes = [Volume(path) for path in dict.fromkeys((options.run_folder, *options.volumes))]
    out = [Sample("disk", "observed", 1.0, clock.now_ns(), text=", ".join(volume.path for volume in volumes))]
    while True:
        for volume in volumes:
            if volume.pending is None:  # in a thread: a network volume that hangs would stop the whole lane
                volume.pending = asyncio.ensure_future(asyncio.to_thread(look, volume, Path(options.root)))
        await asyncio.wait([v.pending for v in volumes if v.pending is not None], timeout=ANSWER_LIMIT_S)
        for volume in volumes:
            why = ""
            if volume.pending is None or not volume.pending.done():
                why = f"{volume.path}: no answer within {ANSWER_LIMIT_S:g} s"
            else:
                try:
                    out += volume.pending.result()
                except OSError as error:
                    why = f"{volume.path}: {error.strerror}"
                volume.pending = None
            if why and why != volume.said:
                out.append(Sample("disk", "unreadable", 1.0, clock.now_ns(), {"path": volume.path}, why))
            volume.said = why
        yield out
        out = []
