"""A fixture machine: the files under /proc and the kernel log that a host monitor reads, following the engine's claims.

For deaths that no cgroup can show: on unified memory the driver's allocations appear in no counter but as less MemFree,
and the box dies with MemAvailable high, no OOM kill and a cut log. Files keep their length and are rewritten in place
with one write, so a reader with an open descriptor always sees one whole state.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from loadgen.sim.config import GIB, MIB, Machine
from loadgen.types import UserError

KIB = 1024
PAGE_BYTES = 4096
FLOOR_BYTES = 900 * MIB  # what MemFree falls to: the kernel's reserve, which the driver cannot have
MAX_KMSG_BYTES = 1 << 20  # a kernel's ring is as small; after that nothing more is written
WIDTH = 96  # of a line of PSI, load or vmstat: room for the largest numbers

DRIVER_LINE = (
    "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from "
    "_memdescAllocInternal(pMemDesc) @ mem_desc.c:1359"
)
STALLS = {"memory": (0.9, 0.7), "io": (0.5, 0.4), "cpu": (0.1, 0.0)}  # some and full, at full pressure
CALM_STALL = 0.0005  # share of time that a healthy machine's tasks wait
SMALLER_ORDERS = (420, 360, 300, 240, 180, 120, 80, 50, 30, 16)  # free blocks of orders 0 to 9 on a used machine


class FixtureMachine:
    """A machine of `machine`'s size under `root`. Whoever owns it says what time it is and calls `update` ten times a
    second."""

    def __init__(self, root: Path, machine: Machine, now_ns: int) -> None:
        self.root = root
        self.machine = machine
        self._fds: dict[str, int] = {}
        self._kmsg_bytes = 0
        self._sequence = 0
        self._pressed_us = 0
        """Time under pressure, weighted by how hard: what stalls and reclaim are reckoned from."""
        self._updated_ns = now_ns
        self._claimed_bytes = 0
        self._wedge_began_ns: int | None = None
        self._wedge_ns = 1
        self._wedge_available = 0
        self._wedge_from = 0
        self._wedge_lines = 0
        self._lines_written = 0
        self._silent = False
        try:
            for folder in ("proc/pressure", "proc/sys/kernel/random", "dev"):
                (root / folder).mkdir(parents=True, exist_ok=True)
            if (root / "proc/sys/kernel/random/boot_id").exists():
                self._resume()
            else:
                self._boot(now_ns)
        except OSError as error:
            raise UserError(f"--host-root {root}: cannot be written: {error.strerror}") from None

    def update(self, claimed_bytes: int, running: int, now_ns: int) -> None:
        """Write the state that belongs to so many claimed bytes and running requests, now."""
        if self._silent:
            return
        self._claimed_bytes = claimed_bytes
        free, available = self._free_and_available(now_ns)
        pressed = self._pressed(now_ns)
        self._pressed_us += int((now_ns - self._updated_ns) / 1000 * pressed)
        self._updated_ns = now_ns
        self._rewrite("proc/meminfo", self._meminfo(free, available))
        self._rewrite("proc/buddyinfo", _buddyinfo(free))
        self._rewrite("proc/vmstat", self._vmstat(now_ns))
        for resource in STALLS:
            self._rewrite(f"proc/pressure/{resource}", self._pressure(resource, pressed, now_ns))
        self._rewrite(
            "proc/loadavg", f"{running + 0.4:.2f} {running + 0.3:.2f} {running + 0.2:.2f} {1 + running}/900 4242"
        )
        due = round(self._wedge_lines * pressed)
        while self._lines_written < due:
            self._lines_written += 1
            self.kernel_line(DRIVER_LINE, now_ns, level=3)

    def wedge(self, available_gib: float, collapse_s: float, driver_lines: int, now_ns: int) -> None:
        """From now on MemFree falls to the floor within `collapse_s`, while MemAvailable stays at `available_gib`."""
        self._wedge_from = self._free_and_available(now_ns)[0]
        self._wedge_began_ns = now_ns
        self._wedge_ns = max(1, int(collapse_s * 1e9))
        self._wedge_available = int(available_gib * GIB)
        self._wedge_lines = driver_lines
        self._lines_written = 0

    def silence(self, now_ns: int) -> None:
        """The last sign of life: from now on no file changes."""
        self.update(self._claimed_bytes, 0, now_ns)
        self._silent = True

    def reboot(self, now_ns: int) -> None:
        """A new boot: another boot id, an empty kernel log, counters from the start."""
        self._wedge_began_ns = None
        self._wedge_lines = 0
        self._pressed_us = 0
        self._silent = False
        self._claimed_bytes = 0
        self._boot(now_ns)
        self.update(0, 0, now_ns)

    def kernel_line(self, text: str, now_ns: int, level: int = 4) -> None:
        """Append one record as /dev/kmsg gives it: facility 0 (the kernel), sequence, microseconds since boot."""
        record = f"{level},{self._sequence},{now_ns // 1000},-;{text}\n".encode()
        if self._kmsg_bytes + len(record) <= MAX_KMSG_BYTES:
            os.write(self._fds["dev/kmsg"], record)
            self._kmsg_bytes += len(record)
            self._sequence += 1

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    # -- files

    def _boot(self, now_ns: int) -> None:
        self._rewrite("proc/sys/kernel/random/boot_id", str(uuid.uuid4()))
        os.ftruncate(self._open_kmsg(), 0)
        self._kmsg_bytes = 0
        self._sequence = 0
        self.kernel_line("Linux version 6.14.0-1015-nvidia (fixture machine of loadgen sim)", now_ns, level=5)
        self.kernel_line("NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.159.04", now_ns, level=6)

    def _resume(self) -> None:
        """A server that comes back finds the same boot: the machine did not die with it."""
        self._open_kmsg()
        text = (self.root / "dev/kmsg").read_text()
        self._kmsg_bytes = len(text.encode())
        self._sequence = text.count("\n")

    def _open_kmsg(self) -> int:
        if "dev/kmsg" not in self._fds:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._fds["dev/kmsg"] = os.open(self.root / "dev/kmsg", flags, 0o644)
        return self._fds["dev/kmsg"]

    def _rewrite(self, name: str, text: str) -> None:
        fd = self._fds.get(name)
        if fd is None:
            fd = self._fds[name] = os.open(self.root / name, os.O_RDWR | os.O_CREAT, 0o644)
        data = text.encode() if text.endswith("\n") else text.encode() + b"\n"
        os.pwrite(fd, data, 0)
        if os.fstat(fd).st_size != len(data):  # the first time, over what an earlier machine left
            os.ftruncate(fd, len(data))

    # -- what they say

    def _free_and_available(self, now_ns: int) -> tuple[int, int]:
        machine = self.machine
        taken = int(machine.system_gib * GIB) + self._claimed_bytes
        free = max(FLOOR_BYTES, int((machine.total_gib - machine.page_cache_gib) * GIB) - taken)
        available = free + int(machine.page_cache_gib * GIB * 0.9)
        if self._wedge_began_ns is None:
            return free, available
        pressed = self._pressed(now_ns)
        free = int(self._wedge_from + (min(FLOOR_BYTES, self._wedge_from) - self._wedge_from) * pressed)
        return free, max(free, int(available + (self._wedge_available - available) * min(1.0, pressed * 2)))

    def _pressed(self, now_ns: int) -> float:
        """How far the collapse has gone, 0 to 1."""
        if self._wedge_began_ns is None:
            return 0.0
        return min(1.0, (now_ns - self._wedge_began_ns) / self._wedge_ns)

    def _meminfo(self, free: int, available: int) -> str:
        machine = self.machine
        cache = max(0, min(int(machine.page_cache_gib * GIB), available))
        system = int(machine.system_gib * GIB)
        swap = int(machine.swap_gib * GIB)
        values = {
            "MemTotal": int(machine.total_gib * GIB), "MemFree": free, "MemAvailable": available, "Buffers": 64 * MIB,
            "Cached": cache, "SwapCached": 0, "Active": cache // 2 + system // 4, "Inactive": cache // 2 + system // 4,
            "Active(anon)": system // 4, "Inactive(anon)": system // 4, "Active(file)": cache // 2,
            "Inactive(file)": cache // 2, "Unevictable": 32 * MIB, "Mlocked": 32 * MIB, "SwapTotal": swap,
            "SwapFree": swap, "Dirty": MIB, "Writeback": 0, "AnonPages": system // 2, "Mapped": 256 * MIB,
            "Shmem": 16 * MIB, "KReclaimable": 300 * MIB, "Slab": 500 * MIB, "SReclaimable": 300 * MIB,
            "SUnreclaim": 200 * MIB, "KernelStack": 20 * MIB, "PageTables": 60 * MIB, "CommitLimit": swap,
            "Committed_AS": system, "CmaTotal": GIB, "CmaFree": min(free, int(machine.cma_free_gib * GIB)),
        }  # fmt: skip
        counts = "HugePages_Total:       0\nHugePages_Free:        0\n"
        return "".join(f"{name + ':':<16}{value // KIB:>10} kB\n" for name, value in values.items()) + counts

    def _vmstat(self, now_ns: int) -> str:
        stalls = self._pressed_us // 1000
        values = {
            "nr_free_pages": self._free_and_available(now_ns)[0] // PAGE_BYTES,
            "pgfault": now_ns // 1_100_000,
            "pgmajfault": 12_000 + stalls // 50, "pswpin": 0, "pswpout": 0, "workingset_refault_anon": 0,
            "workingset_refault_file": stalls // 20, "pgsteal_anon": 0, "pgsteal_file": stalls // 10,
            "pgscan_kswapd": stalls // 8, "pgscan_direct": stalls // 9, "allocstall_normal": stalls // 30,
            "compact_stall": stalls // 40, "compact_fail": stalls // 60, "thp_fault_fallback": 0, "oom_kill": 0,
            "drop_pagecache": 0,
        }  # fmt: skip
        return "".join(f"{f'{name} {value}':<{WIDTH}}\n" for name, value in values.items())

    @staticmethod
    def _line(kind: str, percent: float, total_us: int) -> str:
        return f"{kind} avg10={percent:.2f} avg60={percent / 5:.2f} avg300={percent / 20:.2f} total={total_us}"

    def _pressure(self, resource: str, pressed: float, now_ns: int) -> str:
        some, full = STALLS[resource]
        calm_us = int(now_ns / 1000 * CALM_STALL)
        lines = (
            self._line("some", 100 * some * pressed, calm_us + int(some * self._pressed_us)),
            self._line("full", 100 * full * pressed, calm_us // 4 + int(full * self._pressed_us)),
        )
        return "".join(f"{line:<{WIDTH}}\n" for line in lines)


def _buddyinfo(free: int) -> str:
    """Free blocks by order: the large ones go first, which is why a driver fails long before memory is used up."""
    largest = max(0, free - GIB) // (PAGE_BYTES << 10) * 9 // 10
    columns = (*(count * max(1, free // (8 * GIB)) for count in SMALLER_ORDERS), largest)
    return f"Node 0, zone   Normal {' '.join(f'{count:>7}' for count in columns)}\n"
