"""Free space where the run folder is: a full disk ends the evidence, and a server that swaps or logs as well."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds

LANE: Lane = "slow"
PERIOD_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """`run_folder` is filled in by the lane; `volumes` are further paths to watch, such as the model's."""

    run_folder: str = "."
    volumes: tuple[str, ...] = ()
    period_s: Seconds = Seconds(5)


async def watch(options: Options) -> AsyncIterator[list[Sample]]:
    """Free and total bytes and free inodes of each path."""
    import asyncio

    paths = (options.run_folder, *options.volumes)
    out = [Sample("disk", "observed", 1.0, clock.now_ns(), text=", ".join(paths))]
    while True:
        for path in paths:
            try:  # in a thread: a network volume that hangs would stop the whole lane
                found = await asyncio.to_thread(os.statvfs, path)
            except OSError as error:
                text = f"{path}: {error.strerror}"
                out.append(Sample("disk", "unreadable", 1.0, clock.now_ns(), {"path": path}, text))
                continue
            now = clock.now_ns()
            out += [
                Sample("disk", "free_bytes", float(found.f_bavail * found.f_frsize), now, {"path": path}),
                Sample("disk", "total_bytes", float(found.f_blocks * found.f_frsize), now, {"path": path}),
                Sample("disk", "free_inodes", float(found.f_favail), now, {"path": path}),
            ]
        yield out
        out = []
