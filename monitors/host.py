"""The host's memory, swap, pressure and load from /proc, ten times a second.

On machines whose GPU shares the host's memory this is also the GPU memory monitor: their driver has no memory figure,
and containers' counters do not contain CUDA allocations. Ten times a second, because MemAvailable has been seen to
fall by 21 GiB in 1.5 s. Reading by kept file descriptors costs a third of open and read, allocates little and needs no
path look-up while the machine has no memory left. No psutil: its figures are slower and hide where they come from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds

LANE: Lane = "fast"
PERIOD_S = 0.1
SLOW_EVERY_NS = 1_000_000_000  # buddyinfo, stat and loadavg change slowly (loadavg every 5 s): once a second
# Nodes with memory that are watched; a machine of eight GPUs whose memory is the host's as well has ten.
MAX_NODES = 16
READ_BYTES = 1 << 18  # the largest file here is /proc/stat: 20 KiB at 128 cores plus 6 bytes an interrupt line

MEMINFO = {
    "MemTotal": "mem_total_bytes",
    "MemFree": "mem_free_bytes",
    "MemAvailable": "mem_available_bytes",
    "Buffers": "buffers_bytes",
    "Cached": "cached_bytes",
    "SwapCached": "swap_cached_bytes",
    "Active(anon)": "active_anon_bytes",
    "Inactive(anon)": "inactive_anon_bytes",
    "Active(file)": "active_file_bytes",
    "Inactive(file)": "inactive_file_bytes",
    "Unevictable": "unevictable_bytes",
    "SwapTotal": "swap_total_bytes",
    "SwapFree": "swap_free_bytes",
    "Dirty": "dirty_bytes",
    "Writeback": "writeback_bytes",
    "AnonPages": "anon_bytes",
    "Mapped": "mapped_bytes",
    "Shmem": "shmem_bytes",
    "SUnreclaim": "slab_unreclaimable_bytes",
    "PageTables": "page_tables_bytes",
    "Committed_AS": "committed_bytes",
    "CmaFree": "cma_free_bytes",
    "NvMapMemUsed": "nvmap_used_bytes",
}
# Of /sys/devices/system/node/node*/meminfo, where several nodes have memory. There is no MemAvailable of a node.
NODE = {
    "MemTotal": "node_total_bytes",
    "MemFree": "node_free_bytes",
    "MemUsed": "node_used_bytes",
    "FilePages": "node_file_bytes",
    "AnonPages": "node_anon_bytes",
    "SUnreclaim": "node_slab_unreclaimable_bytes",
}

# What neither the page lists nor the kernel's own tables hold: on unified memory, what the GPU driver took. 1.1 GiB on
# an idle GB10, 77 to 90 GiB with a model loaded (vllm-project/vllm#56457, where the formula comes from).
RESIDUAL = ("MemFree", "Active", "Inactive", "Slab", "PageTables", "Unevictable")

# Counters of /proc/vmstat that are reported as rates; a name that ends in `*` is the sum over all zones.
VMSTAT_RATES = {
    "pswpin": "pswpin_pages_per_s",
    "pswpout": "pswpout_pages_per_s",
    "pgmajfault": "pgmajfault_per_s",
    "workingset_refault_anon": "refault_anon_pages_per_s",
    "workingset_refault_file": "refault_file_pages_per_s",
    "pgsteal_anon": "pgsteal_anon_pages_per_s",
    "pgsteal_file": "pgsteal_file_pages_per_s",
    "pgscan_kswapd": "pgscan_kswapd_pages_per_s",
    "pgscan_direct": "pgscan_direct_pages_per_s",
    "allocstall_*": "allocstall_per_s",  # 0 while a container thrashes at its own limit: global reclaim only
    "compact_stall": "compact_stall_per_s",
    "compact_fail": "compact_fail_per_s",
    "thp_fault_fallback": "thp_fault_fallback_per_s",
    "zswpin": "zswpin_pages_per_s",
    "zswpout": "zswpout_pages_per_s",
}
# Counters that are reported as they stand: each step is an event of its own.
VMSTAT_TOTALS = {"oom_kill": "oom_kill_total", "drop_pagecache": "drop_pagecache_total"}

# `cpu full` means nothing for the whole system and is left out.
PSI = {
    "memory": ("some", "full"),
    "io": ("some", "full"),
    "cpu": ("some",),
}

FILES = {
    "meminfo": "proc/meminfo",
    "vmstat": "proc/vmstat",
    "memory": "proc/pressure/memory",
    "io": "proc/pressure/io",
    "cpu": "proc/pressure/cpu",
    "loadavg": "proc/loadavg",
    "buddyinfo": "proc/buddyinfo",
    "stat": "proc/stat",
}

_MEMINFO_LINE = re.compile(
    rb"^(" + b"|".join(re.escape(k.encode()) for k in {**MEMINFO, **dict.fromkeys(RESIDUAL)}) + rb"): +(\d+)",
    re.MULTILINE,
)
_NODE_LINE = re.compile(rb"^Node \d+ (" + b"|".join(key.encode() for key in NODE) + rb"): +(\d+)", re.MULTILINE)
_VMSTAT_LINE = re.compile(
    rb"^("
    + b"|".join(re.escape(k.encode()).replace(rb"\*", rb"\w+") for k in (*VMSTAT_RATES, *VMSTAT_TOTALS))
    + rb") (\d+)",
    re.MULTILINE,
)
_PSI_LINE = re.compile(rb"^(some|full) .*total=(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Options:
    """`root` stands in for another machine's file tree; `period_s` is 0.05 to 0.25 (20 to 4 Hz)."""

    root: str = "/"
    period_s: Seconds = Seconds(0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Bytes to numbers


def meminfo(data: bytes) -> dict[str, int]:
    """/proc/meminfo in bytes, under the kernel's names. Keys that this kernel lacks are not there."""
    return {key.decode(): int(value) * 1024 for key, value in _MEMINFO_LINE.findall(data)}


def node_meminfo(data: bytes) -> dict[str, float]:
    """A node's meminfo in bytes, under our names."""
    return {NODE[key.decode()]: float(value) * 1024 for key, value in _NODE_LINE.findall(data)}


def residual(memory: dict[str, int]) -> int | None:
    """Memory that the kernel's own books do not explain, or None where a term is missing."""
    if "MemTotal" not in memory or any(key not in memory for key in RESIDUAL):
        return None
    return memory["MemTotal"] - sum(memory[key] for key in RESIDUAL)


def vmstat(data: bytes) -> dict[str, int]:
    """The counters of the two tables above under their table names, zones added up."""
    out: dict[str, int] = {}
    for raw, value in _VMSTAT_LINE.findall(data):
        key = raw.decode()
        if key.startswith("allocstall_"):
            key = "allocstall_*"
        out[key] = out.get(key, 0) + int(value)
    return out


def pressure(data: bytes) -> dict[str, int]:
    """Stalled microseconds since boot. The averages of that file move every 2 s only and decay for half a minute."""
    return {key.decode(): int(value) for key, value in _PSI_LINE.findall(data)}


def buddyinfo(data: bytes) -> dict[str, int]:
    """Free blocks of at least 1 MiB and 4 MiB (orders 8 and 10 of 4 KiB pages), all zones: what a driver that needs
    contiguous memory can still get."""
    large = {8: 0, 10: 0}
    for line in data.decode("ascii", "replace").splitlines():
        counts = line.partition(" zone ")[2].split()[1:]
        for order, count in enumerate(counts):
            for least in large:
                if order >= least and count.isdigit():
                    large[least] += int(count)
    return {f"buddy_order{order}_blocks": blocks for order, blocks in large.items()}


def cpu_ticks(data: bytes) -> tuple[int, int, int] | None:
    """All, idle and I/O-wait ticks of all CPUs since boot."""
    fields = data.partition(b"\n")[0].split()
    if len(fields) < 6 or fields[0] != b"cpu":
        return None
    ticks = [int(field) for field in fields[1:9]]  # guest time (fields 9 and 10) is contained in user time
    return sum(ticks), ticks[3], ticks[4]


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def opened(root: Path) -> dict[str, int]:
    """A file descriptor for each file that this kernel has."""
    fds: dict[str, int] = {}
    for name, path in FILES.items():
        try:
            fds[name] = os.open(root / path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # PSI may be off, buddyinfo may be hidden: said once in `observed`
    return fds


def nodes(root: Path) -> dict[str, Path]:
    """The meminfo of each NUMA node that has memory, by its number; empty where one node has all. Where a GPU's memory
    is the host's as well (GH200, GB200) that memory is a node: what fills it is in no other figure of the host."""
    found: dict[int, Path] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/meminfo"):
        try:
            if node_meminfo(path.read_bytes()).get("node_total_bytes"):
                found[int(path.parent.name.removeprefix("node"))] = path
        except (OSError, ValueError):
            continue  # a node that went offline, or one that is none
    return {str(number): found[number] for number in sorted(found)[:MAX_NODES]} if len(found) > 1 else {}


def watch(options: Options) -> Iterator[list[Sample]]:
    """Samples of one tick: stocks as they stand, rates over the time since the last tick."""
    root = Path(options.root)
    fixture = root != Path("/")
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    fds = opened(root)
    several = nodes(root)

    def read(name: str) -> bytes:
        if fixture:  # a simulated machine replaces its files: a kept descriptor would read the old one for ever
            try:
                return (root / FILES[name]).read_bytes()
            except OSError:
                return b""
        fd = fds.get(name)
        if fd is None:
            return b""
        try:
            return bytes(view[: os.preadv(fd, [view], 0)])
        except OSError:
            return b""

    last_ns = 0
    slow_ns = 0
    counters: dict[str, int] = {}
    cpu: tuple[int, int, int] | None = None
    seeing: bool | None = None
    try:
        while True:
            now = clock.now_ns()
            values: dict[str, float] = {}
            memory = meminfo(read("meminfo"))
            values.update({MEMINFO[key]: float(kept) for key, kept in memory.items() if key in MEMINFO})
            unexplained = residual(memory)
            if unexplained is not None:
                values["driver_residual_bytes"] = unexplained
            if "MemTotal" in memory and "MemAvailable" in memory:
                values["mem_used_bytes"] = memory["MemTotal"] - memory["MemAvailable"]

            seen = vmstat(read("vmstat"))
            for what, kinds in PSI.items():
                stalled = pressure(read(what))
                seen.update({f"psi_{what}_{kind}": stalled[kind] for kind in kinds if kind in stalled})
            values.update(rates(counters, seen, now - last_ns))
            for key, metric in VMSTAT_TOTALS.items():
                if key in seen:
                    values[metric] = seen[key]
            counters, last_ns = seen, now

            if now - slow_ns >= SLOW_EVERY_NS:
                slow_ns = now
                cpu_now = cpu_ticks(read("stat"))
                values.update(slowly(read("loadavg"), read("buddyinfo"), cpu, cpu_now))
                cpu = cpu_now

            samples = [Sample("host", metric, value, now) for metric, value in values.items()]
            if slow_ns == now:
                samples += of_nodes(several, now)
            if seeing != bool(memory):
                seeing = bool(memory)
                samples.insert(0, observed(memory, seen, root, now))
            yield samples
    finally:
        for fd in fds.values():
            os.close(fd)


def observed(memory: dict[str, int], seen: dict[str, int], root: Path, now: int) -> Sample:
    """Whether there is anything to see, and what is missing."""
    if not memory:
        return Sample("host", "observed", 0.0, now, text=f"{root / FILES['meminfo']} cannot be read (Linux only)")
    missing = [f"pressure of {what}" for what in PSI if f"psi_{what}_some" not in seen]
    missing += [] if "pswpin" in seen else ["swap rates"]
    missing += [] if "oom_kill" in seen else ["the kill counter of vmstat"]
    text = f"not in this kernel: {', '.join(missing)}" if missing else ""
    return Sample("host", "observed", 1.0, now, text=text)


def rates(before: dict[str, int], now: dict[str, int], elapsed_ns: int) -> dict[str, float]:
    """Counters per second, stalled time in percent. A counter that was not there or fell (a restored VM) has none."""
    out: dict[str, float] = {}
    if not before or elapsed_ns <= 0:
        return out
    for key, metric in VMSTAT_RATES.items():
        if key in before and key in now and now[key] >= before[key]:
            out[metric] = (now[key] - before[key]) * 1e9 / elapsed_ns
    for key, total_us in now.items():
        if key.startswith("psi_") and total_us >= before.get(key, total_us + 1):
            # the kernel books a stall when it ends or is asked: a short tick may be given more than its own length
            out[f"{key}_percent"] = min(100.0, (total_us - before[key]) * 1e5 / elapsed_ns)
    return out


def of_nodes(several: dict[str, Path], now: int) -> list[Sample]:
    """Figures of each node. Opened anew each second: a node may go offline, and 25 µs a node are little."""
    samples: list[Sample] = []
    for number, path in several.items():
        try:
            values = node_meminfo(path.read_bytes())
        except OSError:
            continue
        samples += [Sample("host", metric, value, now, {"node": number}) for metric, value in values.items()]
    return samples


def slowly(
    loadavg: bytes, buddy: bytes, cpu_before: tuple[int, int, int] | None, cpu_now: tuple[int, int, int] | None
) -> dict[str, float]:
    """What is read once a second."""
    out: dict[str, float] = {}
    fields = loadavg.split()
    if len(fields) >= 4:
        out["load1"] = float(fields[0])
        out["procs_running"] = float(fields[3].partition(b"/")[0])
    if buddy:
        out.update(buddyinfo(buddy))
    if cpu_before and cpu_now and cpu_now[0] > cpu_before[0]:
        total, idle, iowait = (b - a for a, b in zip(cpu_before, cpu_now, strict=True))
        out["cpu_busy_percent"] = 100.0 * max(0, total - idle - iowait) / total
        out["cpu_iowait_percent"] = 100.0 * max(0, iowait) / total
    return out
