"""Real memory: private anonymous pages, touched, so that RssAnon, a cgroup limit and the OOM killer see the claims."""

from __future__ import annotations

import mmap
from pathlib import Path

PAGE = mmap.PAGESIZE
STEP_BYTES = 16 << 20  # touched at once: some milliseconds, so that no stream waits longer for its next token
SPACE_BYTES = 1 << 40  # address space to grow into; without a page touched it costs nothing
NORESERVE = 0x4000  # MAP_NORESERVE, which Python 3.11's mmap does not name


class Ballast:
    """Pages that are held. One stretch of address space; the first `held_bytes` of it are backed by memory."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._space: mmap.mmap | None = None

    def step_towards(self, target_bytes: int) -> bool:
        """One bounded step towards the target; True when it is reached."""
        target = target_bytes // PAGE * PAGE
        if target < self.held_bytes:
            self._mapped().madvise(mmap.MADV_DONTNEED, target, self.held_bytes - target)
            self.held_bytes = target
        elif target > self.held_bytes:
            end = min(target, self.held_bytes + STEP_BYTES)
            # one byte a page makes it ours; no zero, lest pages be merged or left out when swapped
            self._mapped()[self.held_bytes : end : PAGE] = b"\x5a" * ((end - self.held_bytes) // PAGE)
            self.held_bytes = end
        return self.held_bytes == target

    def settle(self, target_bytes: int) -> None:
        while not self.step_towards(target_bytes):
            pass

    def close(self) -> None:
        if self._space is not None:
            self._space.close()
            self._space = None
        self.held_bytes = 0

    def _mapped(self) -> mmap.mmap:
        if self._space is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
            self._space = mmap.mmap(-1, SPACE_BYTES, flags=flags)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):  # else one touched byte is charged as 2 MiB
                self._space.madvise(mmap.MADV_NOHUGEPAGE)
        return self._space


def cgroup_limit_bytes(root: Path = Path("/")) -> int | None:
    """The lowest memory limit that a cgroup (v1 or v2) puts on this process, or None if no cgroup bounds it."""
    limits: list[int] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        base = root / "sys/fs/cgroup" / mount
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder != base and base not in folder.parents:
                break
            try:
                limits.append(int((folder / name).read_text()))
            except (OSError, ValueError):  # no such file at the root; "max" where v2 sets no limit
                continue
    total = _memory_total_bytes(root)
    bounds = [limit for limit in limits if total is None or limit < total]
    return min(bounds, default=None)


def _memory_total_bytes(root: Path) -> int | None:
    try:
        return int((root / "proc/meminfo").read_text().split(None, 2)[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
