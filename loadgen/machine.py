"""What this machine is, as far as its files tell: hardware, kernel, memory, swap, settings, clocks, memory killers.

Everything is read below one root, so that a fixture tree stands in for a machine. What cannot be read is absent, and
`not_read` says why: an absent value is never a default. Nothing here says a host name, a path or an address.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from loadgen import clock
from monitors import server

SYSCTLS = (
    "vm.swappiness", "vm.overcommit_memory", "vm.overcommit_ratio", "vm.min_free_kbytes", "vm.watermark_scale_factor",
    "vm.watermark_boost_factor", "vm.panic_on_oom", "vm.oom_kill_allocating_task", "vm.vfs_cache_pressure",
    "vm.dirty_ratio", "vm.dirty_background_ratio", "vm.max_map_count", "vm.zone_reclaim_mode", "vm.nr_hugepages",
    "vm.compaction_proactiveness", "kernel.numa_balancing", "kernel.panic", "kernel.hung_task_timeout_secs",
    "kernel.dmesg_restrict", "kernel.sched_rt_runtime_us", "net.core.somaxconn", "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_max_syn_backlog", "net.ipv4.tcp_tw_reuse", "fs.file-max",
)  # fmt: skip

# By the name of their process, for want of anything better: they serve no port and own no file that we may ask for.
KILLERS = {
    "earlyoom": "kills the largest process when memory and swap are both low",
    "systemd-oomd": "kills whole cgroups by memory pressure and swap use",
    "oomd": "kills whole cgroups by memory pressure",
    "nohang": "kills by memory, swap and pressure",
    "nohang-desktop": "kills by memory, swap and pressure",
    "low-memory-moni": "asks programs to free memory, and may let the kernel kill",
    "anti-oom": "a vendor's guard against running out of memory",
}

# What /proc/cpuinfo of Arm machines leaves out: (implementer, part) → name, as util-linux's lscpu prints it.
ARM_PARTS = {
    (0x41, 0xD42): "Cortex-A78AE", (0x41, 0xD4F): "Neoverse-V2", (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD85): "Cortex-X925", (0x41, 0xD87): "Cortex-A725", (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1", (0x41, 0xD49): "Neoverse-N2",
}  # fmt: skip

DMI = {"product": "product_name", "vendor": "sys_vendor", "board": "board_name", "firmware": "bios_version"}
PCI_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# Serial numbers and asset tags are in none of these; firmware fills fields with such words where it knows nothing.
UNFILLED = re.compile(
    r"^(?:to be filled.*|default string|system product name|not specified|none|unknown|o\.e\.m\.?)$", re.I
)

STA_UNSYNC = 0x40  # <linux/timex.h>
TIME_ERROR = 5
MAX_FILE_BYTES = 1 << 20  # /proc/cpuinfo of the largest machines has 500 kB


@dataclass(frozen=True, slots=True)
class Swap:
    """One swap device. `kind`: partition, file or zram."""

    kind: str
    size_bytes: int
    used_bytes: int
    priority: int


@dataclass(frozen=True, slots=True)
class ClockState:
    """What the kernel thinks of its clock (adjtimex): whether somebody keeps it right, and how far off it may be."""

    synchronized: bool
    max_error_us: int
    estimated_error_us: int


@dataclass(frozen=True, slots=True)
class Killer:
    """A program that kills for memory in place of the kernel."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Machine:
    """None and empty: could not be read, or there is none. Bytes are bytes; names are the kernel's own."""

    system: str
    kernel: str | None = None
    distribution: str | None = None
    architecture: str | None = None
    product: str | None = None
    vendor: str | None = None
    board: str | None = None
    firmware: str | None = None
    virtual: bool | None = None
    cpu: str | None = None
    cpus: int | None = None
    cpu_governor: str | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swaps: tuple[Swap, ...] = ()
    zswap: bool | None = None
    boot_id: str | None = None
    uptime_s: int | None = None
    sysctl: dict[str, str] = field(default_factory=dict)
    transparent_hugepages: str | None = None
    thp_defrag: str | None = None
    pressure_stalls: bool | None = None
    cgroup: str | None = None
    clocksource: str | None = None
    clocksources: tuple[str, ...] = ()
    clock: ClockState | None = None
    watchdog_bootstatus: int | None = None
    nvidia_driver: str | None = None
    gpus: tuple[str, ...] = ()
    killers: tuple[Killer, ...] = ()
    not_read: dict[str, str] = field(default_factory=dict)


class Reader:
    """Files below a root, and a word on each that could not be read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.not_read: dict[str, str] = {}

    def text(self, name: str, fact: str = "") -> str | None:
        """A file's text without the blanks around it; None where there is none, noted under `fact` if that is given."""
        try:
            with (self.root / name).open("rb") as file:
                return file.read(MAX_FILE_BYTES).decode("utf-8", "replace").strip("\0 \n\t")
        except OSError as error:
            if fact:
                self.not_read[fact] = (error.strerror or type(error).__name__).lower()
            return None

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.root / folder))
        except OSError:
            return []


def read(root: Path = Path("/")) -> Machine:
    """The machine whose file tree this is. Takes some milliseconds, plus 15 µs for each process."""
    at = Reader(root)
    here = root == Path("/")
    memory = meminfo(at.text("proc/meminfo", "memory") or "")
    cpuinfo = at.text("proc/cpuinfo", "cpu") or ""
    dmi = {key: filled(at.text(f"sys/class/dmi/id/{name}")) for key, name in DMI.items()}
    dmi["product"] = dmi["product"] or filled(at.text("proc/device-tree/model"))
    if dmi["product"] is None:
        at.not_read["product"] = "this machine has no DMI table and no device tree"
    up = at.text("proc/uptime")
    pressure = at.text("proc/pressure/memory")
    bootstatus = at.text("sys/class/watchdog/watchdog0/bootstatus")
    sysctl = {name: value for name in SYSCTLS if (value := at.text(f"proc/sys/{name.replace('.', '/')}")) is not None}
    return Machine(
        system=sys.platform if here else "linux",
        kernel=at.text("proc/sys/kernel/osrelease") or (platform.release() if here else None),
        distribution=distribution(at.text("etc/os-release", "distribution") or ""),
        architecture=platform.machine() if here else at.text("proc/sys/kernel/arch"),
        **dmi,
        virtual=" hypervisor" in cpuinfo if "flags" in cpuinfo else None,
        cpu=cpu_name(cpuinfo),
        cpus=len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or (os.cpu_count() if here else None),
        cpu_governor=at.text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        swap_total_bytes=memory.get("SwapTotal"),
        swaps=swaps(at.text("proc/swaps", "swap devices") or ""),
        zswap={"Y": True, "N": False}.get(at.text("sys/module/zswap/parameters/enabled") or ""),
        boot_id=clock.boot_id(root),
        uptime_s=int(float(up.split()[0])) if up else None,
        sysctl={name: re.sub(r"\s+", " ", value) for name, value in sysctl.items()},
        transparent_hugepages=chosen(at.text("sys/kernel/mm/transparent_hugepage/enabled", "transparent_hugepages")),
        thp_defrag=chosen(at.text("sys/kernel/mm/transparent_hugepage/defrag")),
        pressure_stalls=pressure is not None if memory else None,
        cgroup=cgroup_version(at),
        clocksource=at.text("sys/devices/system/clocksource/clocksource0/current_clocksource", "clocksource"),
        clocksources=tuple(
            (at.text("sys/devices/system/clocksource/clocksource0/available_clocksource") or "").split()
        ),
        clock=clock_state() if here else None,
        watchdog_bootstatus=int(bootstatus) if bootstatus and bootstatus.isdigit() else None,
        nvidia_driver=nvidia_driver(at.text("proc/driver/nvidia/version") or ""),
        gpus=display_devices(at),
        killers=killers(root / "proc"),
        not_read=at.not_read,
    )


# ---------------------------------------------------------------------------------------------------------------------
# One file each, pure


def meminfo(text: str) -> dict[str, int]:
    """In bytes."""
    return {key: int(kb) * 1024 for key, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def distribution(text: str) -> str | None:
    """`Ubuntu 24.04.3 LTS` of an os-release."""
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)', text, re.MULTILINE)
    return found[1].strip() if found else None


def filled(text: str | None) -> str | None:
    """A field of the firmware, unless it says that nobody filled it."""
    return None if not text or UNFILLED.match(text) else " ".join(text.split())


def cpu_name(cpuinfo: str) -> str | None:
    """The model by name; on Arm the core types and how many there are of each: `10 × Cortex-X925, 10 × Cortex-A725`."""
    named = re.search(r"^model name\s*: *(.+)$", cpuinfo, re.MULTILINE)
    if named:
        return " ".join(named[1].split())
    parts: dict[tuple[int, int], int] = {}
    for implementer, part in re.findall(
        r"^CPU implementer\s*: *(0x\w+)$.*?^CPU part\s*: *(0x\w+)$", cpuinfo, re.MULTILINE | re.DOTALL
    ):
        key = int(implementer, 16), int(part, 16)
        parts[key] = parts.get(key, 0) + 1
    said = [
        f"{count} × {ARM_PARTS.get(key) or f'implementer {key[0]:#x} part {key[1]:#x}'}" for key, count in parts.items()
    ]
    return ", ".join(said) or None


def swaps(text: str) -> tuple[Swap, ...]:
    """/proc/swaps. A zram device calls itself a partition, which it is not: it is memory."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 5 and fields[-1].lstrip("-").isdigit():
            kind = "zram" if "zram" in fields[0] else fields[1]
            found.append(Swap(kind, int(fields[2]) * 1024, int(fields[3]) * 1024, int(fields[4])))
    return tuple(found)


def chosen(text: str | None) -> str | None:
    """The word in brackets: `always [madvise] never` → madvise."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


def cgroup_version(at: Reader) -> str | None:
    """Which hierarchy limits memory: v2, v1 or both mounted."""
    mounted = server.mounts((at.text("proc/self/mountinfo") or at.text("proc/1/mountinfo") or "").encode())
    v2 = any(server.UNIFIED in mount.controllers for mount in mounted)
    v1 = any("memory" in mount.controllers for mount in mounted)
    return "hybrid (memory in v1)" if v1 and v2 else "v1" if v1 else "v2" if v2 else None


def nvidia_driver(text: str) -> str | None:
    """The version in /proc/driver/nvidia/version, which needs no library."""
    found = re.search(r"Kernel Module(?: for \w+)?\s+(\d[\d.]+)", text)
    return found[1] if found else None


def display_devices(at: Reader) -> tuple[str, ...]:
    """Vendors of the GPUs on the PCI bus (class 03: display and 3D controllers), whether a driver is loaded or not."""
    found = []
    for name in at.names("sys/bus/pci/devices"):
        folder = f"sys/bus/pci/devices/{name}"
        if (at.text(f"{folder}/class") or "").startswith("0x03"):
            vendor = at.text(f"{folder}/vendor") or ""
            found.append(PCI_VENDORS.get(vendor, f"vendor {vendor}"))
    return tuple(found)


def killers(proc: Path) -> tuple[Killer, ...]:
    found = []
    for pid in server.pids(proc):
        name = (server.read(proc / str(pid) / "comm") or b"").decode("utf-8", "replace").strip()
        if name in KILLERS:
            found.append(Killer(name, pid))
    return tuple(sorted(found, key=lambda killer: killer.pid))


class _Timex(ctypes.Structure):
    """struct timex of <sys/timex.h>; only the head is read, the padding is larger than what follows anywhere."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 512),
    )


def clock_state() -> ClockState | None:
    """This machine's clock. None where the system has no adjtimex, or does not let us ask."""
    if sys.platform != "linux":
        return None
    timex = _Timex()  # modes 0: only ask
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        return None
    synchronized = state != TIME_ERROR and not timex.status & STA_UNSYNC
    return ClockState(synchronized, timex.maxerror, timex.esterror)


# ---------------------------------------------------------------------------------------------------------------------
# Where files go


@dataclass(frozen=True, slots=True)
class Volume:
    """The file system that a folder lies on. `in_memory`: what is written there is lost with the machine."""

    file_system: str | None
    free_bytes: int
    total_bytes: int
    free_files: int | None
    in_memory: bool
    read_only: bool


def volume(folder: Path, root: Path = Path("/")) -> Volume | None:
    """Of a folder, or of the nearest one above it that exists; None where even that cannot be asked."""
    where = folder.absolute()
    while not where.exists() and where != where.parent:
        where = where.parent
    try:
        found = os.statvfs(where)
    except OSError:
        return None
    kind = file_system(
        (server.read(root / "proc/self/mountinfo") or b"").decode("utf-8", "replace"), str(where.resolve())
    )
    return Volume(
        kind,
        found.f_bavail * found.f_frsize,
        found.f_blocks * found.f_frsize,
        found.f_favail if found.f_files else None,
        kind in ("tmpfs", "ramfs"),
        bool(found.f_flag & os.ST_RDONLY),
    )


def file_system(mountinfo: str, path: str) -> str | None:
    """The type of the mount that a path is on: the longest mount point that holds it, the last one where several do."""
    best, kind = -1, None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, what = left.split(), right.split()
        if len(fields) < 5 or not what:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        inside = path == point or path.startswith(f"{point.rstrip('/')}/")
        if inside and len(point) >= best:
            best, kind = len(point), what[0]
    return kind


# ---------------------------------------------------------------------------------------------------------------------
# Who is busy


@dataclass(frozen=True, slots=True)
class Busy:
    """A process that took CPU between two looks, in percent of one core."""

    name: str
    pid: int
    cpu_percent: float


def ticks(proc: Path) -> dict[tuple[int, int], tuple[str, int]]:
    """CPU ticks of every process by pid and start: 15 µs each."""
    everyone = (server.stat_of(proc, pid) for pid in server.pids(proc))
    return {(stat.pid, stat.start): (stat.name, stat.cpu_ticks) for stat in everyone if stat is not None}


def busiest(
    before: dict[tuple[int, int], tuple[str, int]],
    after: dict[tuple[int, int], tuple[str, int]],
    elapsed_s: float,
    leave_out: set[int],
) -> list[Busy]:
    """Who took how much between two looks, most first. New processes count from their start."""
    hertz = os.sysconf("SC_CLK_TCK")
    found = [
        Busy(name, key[0], 100.0 * (used - before.get(key, (name, 0))[1]) / hertz / elapsed_s)
        for key, (name, used) in after.items()
        if key[0] not in leave_out
    ]
    return sorted((busy for busy in found if busy.cpu_percent > 0), key=lambda busy: -busy.cpu_percent)
