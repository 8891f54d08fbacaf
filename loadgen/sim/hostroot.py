"""A fixture machine: the files under /proc and the kernel log that a host monitor reads, following the engine's claims.

For deaths that no cgroup can show: on unified memory the driver's allocations appear in no counter but as less MemFree,
and the box dies with MemAvailable high, no OOM kill and a cut log. Files keep their length and are rewritten in place
with one write, so a reader with an open descriptor always sees one whole state.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from loadgen import clock
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
SMALLER_ORDERS = (420, 360, 300, 240, 180, 120, 80, 50, 30, 16)  # free blocks of orders 0 to 9 on a used machine


class FixtureMachine:
    """A machine of `machine`'s size under `root`. Whoever owns it calls `update` ten times a second."""

    def __init__(self, root: Path, machine: Machine) -> None:
        self.root = root
        self.machine = machine
        self._fds: dict[str, int] = {}
        self._began_ns = clock.now_ns()
        self._kmsg_bytes = 0
        self._sequence = 0
        self._stall_us = {"memory": [80_000_000, 20_000_000], "io": [90_000_000, 30_000_000], "cpu": [700_000_000, 0]}
        self._updated_ns = self._began_ns
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
            self._boot()
        except OSError as error:
            raise UserError(f"--host-root {root}: cannot be written: {error.strerror}") from None

    def update(self, claimed_bytes: int, running: int) -> None:
        """Write the state that belongs to so many claimed bytes and running requests, now."""
        if self._silent:
            return
        now_ns = clock.now_ns()
        self._claimed_bytes = claimed_bytes
        free, available = self._free_and_available(now_ns)
        pressed = self._pressed(now_ns)
        self._pass_time(now_ns, pressed, running)
        self._rewrite("proc/meminfo", self._meminfo(free, available))
        self._rewrite("proc/buddyinfo", _buddyinfo(free))
        self._rewrite("proc/vmstat", self._vmstat(now_ns))
        for resource in self._stall_us:
            self._rewrite(f"proc/pressure/{resource}", self._pressure(resource, pressed))
        self._rewrite(
            "proc/loadavg", f"{running + 0.4:.2f} {running + 0.3:.2f} {running + 0.2:.2f} {1 + running}/900 4242"
        )
        due = round(self._wedge_lines * pressed)
        while self._lines_written < due:
            self._lines_written += 1
            self.kernel_line(DRIVER_LINE, level=3)

    def wedge(self, available_gib: float, collapse_s: float, driver_lines: int) -> None:
        """From now on MemFree falls to the floor within `collapse_s`, while MemAvailable stays at `available_gib`."""
        self._wedge_from = self._free_and_available(clock.now_ns())[0]
        self._wedge_began_ns = clock.now_ns()
        self._wedge_ns = max(1, int(collapse_s * 1e9))
        self._wedge_available = int(available_gib * GIB)
        self._wedge_lines = driver_lines
        self._lines_written = 0

    def silence(self) -> None:
        """The last sign of life: from now on no file changes."""
        self.update(self._claimed_bytes, 0)
        self._silent = True

    def reboot(self) -> None:
        """A new boot: another boot id, an empty kernel log, counters from the start."""
        self._wedge_began_ns = None
        self._wedge_lines = 0
        self._silent = False
        self._claimed_bytes = 0
        self._boot()
        self.update(0, 0)

    def kernel_line(self, text: str, level: int = 4) -> None:
        """Append one record as /dev/kmsg gives it: facility 0 (the kernel), sequence, microseconds since boot."""
        record = f"{level},{self._sequence},{clock.now_ns() // 1000},-;{text}\n".encode()
        if self._kmsg_bytes + len(record) <= MAX_KMSG_BYTES:
            os.write(self._fds["dev/kmsg"], record)
            self._kmsg_bytes += len(record)
            self._sequence += 1

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    # -- files

    def _boot(self) -> None:
        self._rewrite("proc/sys/kernel/random/boot_id", str(uuid.uuid4()))
        if "dev/kmsg" not in self._fds:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._fds["dev/kmsg"] = os.open(self.root / "dev/kmsg", flags, 0o644)
        os.ftruncate(self._fds["dev/kmsg"], 0)
        self._kmsg_bytes = 0
        self._sequence = 0
        self.kernel_line("Linux version 6.14.0-1015-nvidia (fixture machine of loadgen sim)", level=5)
        self.kernel_line("NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.159.04", level=6)

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

    def _pass_time(self, now_ns: int, pressed: float, running: int) -> None:
        passed_us = (now_ns - self._updated_ns) // 1000
        self._updated_ns = now_ns
        for resource, some, full in (("memory", 0.9, 0.7), ("io", 0.5, 0.4), ("cpu", 0.1, 0.0)):
            self._stall_us[resource][0] += int(passed_us * (some * pressed + 0.001 * bool(running)))
            self._stall_us[resource][1] += int(passed_us * full * pressed)

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
        seconds = (now_ns - self._began_ns) / 1e9
        stalls = self._stall_us["memory"][0] // 1000
        values = {
            "nr_free_pages": self._free_and_available(now_ns)[0] // PAGE_BYTES,
            "pgfault": 1_000_000 + int(seconds * 900),
            "pgmajfault": 12_000 + stalls // 50, "pswpin": 0, "pswpout": 0, "workingset_refault_anon": 0,
            "workingset_refault_file": stalls // 20, "pgsteal_anon": 0, "pgsteal_file": stalls // 10,
            "pgscan_kswapd": stalls // 8, "pgscan_direct": stalls // 9, "allocstall_normal": stalls // 30,
            "compact_stall": stalls // 40, "compact_fail": stalls // 60, "thp_fault_fallback": 0, "oom_kill": 0,
            "drop_pagecache": 0,
        }  # fmt: skip
        return "".join(f"{f'{name} {value}':<{WIDTH}}\n" for name, value in values.items())

    def _pressure(self, resource: str, pressed: float) -> str:
        some, full = self._stall_us[resource]
        share = {"memory": 90.0, "io": 50.0, "cpu": 10.0}[resource] * pressed
        lines = (
            f"some avg10={share:.2f} avg60={share / 5:.2f} avg300={share / 20:.2f} total={some}",
            f"full avg10={share * 0.8:.2f} avg60={share / 6:.2f} avg300={share / 25:.2f} total={full}",
        )
        return "".join(f"{line:<{WIDTH}}\n" for line in lines)


def _buddyinfo(free: int) -> str:
    """Free blocks by order: the large ones go first, which is why a driver fails long before memory is used up."""
    largest = max(0, free - GIB) // (PAGE_BYTES << 10) * 9 // 10
    columns = (*(count * max(1, free // (8 * GIB)) for count in SMALLER_ORDERS), largest)
    return f"Node 0, zone   Normal {' '.join(f'{count:>7}' for count in columns)}\n"
