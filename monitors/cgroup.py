"""The server's cgroup, v1, v2 or both: memory, limits, kills, pressure, throttling, and the moment when it vanishes.

A container that reaches its limit dies by a counter of this directory, often before anyone reads the kernel's log. The
directory is found through the server's process and the mount table, never by a path that we know: a machine may have
v1, v2, or v1 for memory and v2 for pressure. Its files are kept open; when the container ends the kernel answers
ENODEV, which is an event, and the last counters stand in it, because they vanish with the directory.

On unified memory these figures are the CPU side only: no cgroup counts what the GPU driver allocates. `failcnt` of v1
is reported and proves nothing: it stays 0 where memory and memory+swap have the same limit.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds
from monitors import server
from monitors.server import UNIFIED, Place, Stat, read

LANE: Lane = "fast"
PERIOD_S = 0.1
SLOW_EVERY_NS = 1_000_000_000  # all but the usage and the kills: memory.stat alone makes the kernel sum up all CPUs
SCAN_SHARE = 100  # looking for a server that is away takes at most 1 % of the time, as in `process`
FIND_EVERY_NS = 500_000_000  # nor is it looked for at 10 Hz where that is cheap
READ_BYTES = 1 << 14  # memory.stat, the longest, has 2 KiB
UNLIMITED = 1 << 62  # v1 writes "no limit" as the largest multiple of a page below 2**63
MAX_LEVELS = 32  # of ancestors whose limit may be lower
STALLED_LOOKS = 2  # a second apart: `under_oom` is also up for the blink of an ordinary kill

# file → metric; what is "max" or unlimited is not there
QUICK_V2 = {"memory.current": "memory_current_bytes", "memory.peak": "memory_peak_bytes"}
SLOW_V2 = {
    "memory.max": "memory_max_bytes",
    "memory.high": "memory_high_bytes",
    "memory.swap.current": "swap_current_bytes",
    "memory.swap.peak": "swap_peak_bytes",
    "memory.swap.max": "swap_max_bytes",
}
QUICK_V1 = {"memory.usage_in_bytes": "memory_current_bytes", "memory.max_usage_in_bytes": "memory_peak_bytes"}
SLOW_V1 = {
    "memory.limit_in_bytes": "memory_max_bytes",
    "memory.memsw.usage_in_bytes": "memsw_current_bytes",
    "memory.memsw.max_usage_in_bytes": "memsw_peak_bytes",
    "memory.memsw.limit_in_bytes": "memsw_max_bytes",
    "memory.failcnt": "failcnt_total",
}
PIDS = {"pids.current": "pids_current", "pids.max": "pids_max"}
LIMITS = ("memory_max_bytes", "memory_high_bytes", "swap_max_bytes", "memsw_max_bytes")
# key of memory.events (v2) or memory.oom_control (v1) → metric
EVENTS = {
    "low": "low_total",
    "high": "high_total",
    "max": "max_total",
    "oom": "oom_total",
    "oom_kill": "oom_kill_total",
    "oom_group_kill": "oom_group_kill_total",
    "under_oom": "under_oom",
    "oom_kill_disable": "oom_kill_disabled",
}
# key of memory.stat → metric; v1 counts what is below only under `total_`
STAT = {
    "anon": "anon_bytes",
    "file": "file_bytes",
    "shmem": "shmem_bytes",
    "kernel": "kernel_bytes",
    "total_rss": "anon_bytes",
    "total_cache": "file_bytes",
    "total_shmem": "shmem_bytes",
    "total_swap": "swap_current_bytes",
}
STAT_RATES = {
    "pgmajfault": "pgmajfault_per_s",
    "workingset_refault_anon": "refault_anon_pages_per_s",
    "workingset_refault_file": "refault_file_pages_per_s",
}
PSI = {"memory": ("some", "full"), "io": ("some", "full"), "cpu": ("some", "full")}

_NUMBER = re.compile(rb"^(\w+) (\d+)$", re.MULTILINE)
_PSI_LINE = re.compile(rb"^(some|full) .*total=(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Options:
    """`target_url` says whose port leads to the cgroup; `pid` names a process of it instead (0: look for the port)."""

    root: str = "/"
    target_url: str = ""
    pid: int = 0
    period_s: Seconds = Seconds(0.1)


class GoneError(Exception):
    """The cgroup was removed."""


# ---------------------------------------------------------------------------------------------------------------------
# Bytes to numbers


def number(data: bytes) -> int | None:
    """A file of one number; None for `max`, for v1's way to say so, and for what is no number."""
    word = data.strip()
    return None if not word.isdigit() or int(word) >= UNLIMITED else int(word)


def table(data: bytes) -> dict[str, int]:
    """A file of `key number` lines."""
    return {key.decode(): int(value) for key, value in _NUMBER.findall(data)}


def stalls(data: bytes) -> dict[str, int]:
    """Microseconds of stall since the cgroup was made. The averages beside them lag by seconds and are not used."""
    return {key.decode(): int(value) for key, value in _PSI_LINE.findall(data)}


# ---------------------------------------------------------------------------------------------------------------------
# Which cgroup, which files


@dataclass(slots=True)
class Group:
    """The cgroup that is watched. `lives`: the process's own word on its cgroups; `memory`: directory of the memory
    figures, None where no controller keeps them; `folder`: that one, else the one with the pressure; `own`: nothing but
    the server is in it; `files`: kept descriptors by name; `before`: what rates are taken from."""

    listener: Stat
    lives: bytes
    place: Place
    memory: Path | None
    folder: Path
    version: int
    own: bool
    path: str
    key: tuple[int, int]
    files: dict[str, int] = field(default_factory=dict)
    before: dict[str, tuple[int, int]] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int | None] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    stalled: int = 0

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1])


def identity(folder: Path) -> tuple[int, int]:
    """What a directory is, whatever its name: a container that restarts may get the same path."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def path_for(at: Place, controller: str, ours: dict[str, str]) -> tuple[str, bool]:
    """The server's cgroup of one hierarchy, and whether it is the server's alone."""
    leaf = at.paths.get(controller, "")
    own = server.own_part(leaf) if leaf else ""
    if own and not f"{ours.get(controller, '')}/".startswith(f"{own}/"):
        return own, True
    return leaf, False


def with_memory(folder: Path | None, path: str) -> tuple[Path | None, str]:
    """The nearest cgroup v2 from here up that counts memory: the controller may be on for a slice only."""
    for _ in range(MAX_LEVELS):
        if folder is None or path == "":
            break
        if (folder / "memory.current").exists():
            return folder, path
        folder, path = folder.parent, "" if path == "/" else path.rpartition("/")[0] or "/"
    return None, ""


def open_group(root: Path, listener: Stat) -> Group | str:
    """The cgroup of a process with its files open, or why there is none to watch."""
    proc = root / "proc"
    at = server.place(proc, listener.pid)
    ours = server.cgroups(read(proc / "self/cgroup") or b"")
    mounted = server.mounts(read(proc / "self/mountinfo") or b"")

    def folder(controller: str, path: str) -> Path | None:
        found = server.directory(root, mounted, controller, path) if path else None
        return found if found is not None and found.is_dir() else None

    version, (path, own) = 1, path_for(at, "memory", ours)
    memory = folder("memory", path)
    unified, alone = path_for(at, UNIFIED, ours)
    v2 = folder(UNIFIED, unified)
    if memory is None:
        memory, path = with_memory(v2, unified)
        version, own = 2, alone and memory == v2
    # the root's pressure is the whole machine's, which `host` has; what a container calls its root is no root
    pressure = v2 if v2 is not None and (unified != "/" or (v2 / "memory.current").exists()) else None
    place_of = memory or pressure
    if place_of is None:
        if unified == "/":
            return "the server is in the root cgroup, where nothing is counted: see the monitor host"
        return f"no cgroup of pid {listener.pid} can be found in the mount table"
    lives = read(proc / str(listener.pid) / "cgroup") or b""
    if memory is None:
        path, own = unified, alone
    group = Group(listener, lives, at, memory, place_of, version, own, path, identity(place_of))
    counted = (*QUICK_V2, *SLOW_V2, "memory.events") if version == 2 else (*QUICK_V1, *SLOW_V1, "memory.oom_control")
    cpu = path_for(at, "cpu", ours)[0]
    wanted: list[tuple[Path | None, tuple[str, ...]]] = [
        (memory, (*counted, "memory.stat")),
        (pressure, tuple(f"{what}.pressure" for what in PSI)),
        ((folder("cpu", cpu) if cpu != "/" else None) or pressure, ("cpu.stat",)),
        (folder("pids", path_for(at, "pids", ours)[0]) or pressure, tuple(PIDS)),
    ]
    for where, names in wanted:
        for name in names if where is not None else ():
            try:
                group.files[name] = os.open(f"{where}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # this kernel, or this controller, does not have it
                continue
    return group


def get(group: Group, name: str) -> bytes | None:
    """One file anew; None where it is not there. Raises GoneError where the cgroup was removed."""
    fd = group.files.get(name)
    if fd is None:
        return None
    try:
        return os.pread(fd, READ_BYTES, 0)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise GoneError from None
        return None


def lowest_limit(group: Group) -> int | None:
    """The lowest memory limit of the cgroup and those above it: a slice or a pod may have less than its container."""
    if group.memory is None:
        return None
    if group.version == 1:
        found = table(get(group, "memory.stat") or b"").get("hierarchical_memory_limit", UNLIMITED)
        return found if found < UNLIMITED else None
    limits: list[int] = []
    folder = group.memory
    for _ in range(MAX_LEVELS):
        data = read(folder / "memory.max")
        if data is None:  # the root has no limit
            break
        if (limit := number(data)) is not None:
            limits.append(limit)
        folder = folder.parent
    return min(limits, default=None)


# ---------------------------------------------------------------------------------------------------------------------
# Watching


def quick(group: Group, now: int) -> list[Sample]:
    """Usage at every tick; peak and the counters of kills are read then too, and told when a counter moved."""
    out: list[Sample] = []
    held = group.last.get("memory_current_bytes")  # after a kill there is less
    for name, metric in (QUICK_V2 if group.version == 2 else QUICK_V1).items():
        if (value := number(get(group, name) or b"")) is not None:
            group.last[metric] = float(value)
    if "memory_current_bytes" in group.last:
        out.append(Sample("cgroup", "memory_current_bytes", group.last["memory_current_bytes"], now))
    seen = table(get(group, "memory.events" if group.version == 2 else "memory.oom_control") or b"")
    before, group.events = group.events, seen
    if before != seen:
        counts = {metric: float(seen[key]) for key, metric in EVENTS.items() if key in seen}
        group.last |= counts
        out += [Sample("cgroup", metric, value, now) for metric, value in counts.items()]
    if before:
        out += risen(group, before, seen, held, now)
    return out


def risen(group: Group, before: dict[str, int], seen: dict[str, int], held: float | None, now: int) -> list[Sample]:
    """Kills and failed allocations since the look before, and how much memory was held then."""
    whose = "the server's cgroup" if group.own else "a cgroup that the server shares with others"
    limit = group.last.get("memory_limit_bytes")
    state = f"held {held:.0f} bytes" if held is not None else "use unknown"
    state += f" of {limit:.0f} just before" if limit is not None else " just before, without a limit of its own"
    kills = seen.get("oom_kill", 0) - before.get("oom_kill", 0)
    if kills > 0:
        what = "a process" if kills == 1 else f"{kills} processes"
        return [happening(group, "oom_kill", now, f"out of memory: {what} of {whose} killed ({state})", n=str(kills))]
    failed = seen.get("oom", 0) - before.get("oom", 0)
    if failed > 0:
        return [happening(group, "oom", now, f"{whose} is out of memory ({state})", n=str(failed))]
    return []


def slow(group: Group, now: int) -> list[Sample]:
    """Everything else, once a second."""
    if not same(group):
        raise GoneError
    told = ("memory_peak_bytes", *EVENTS.values())
    values: dict[str, float] = {metric: group.last[metric] for metric in told if metric in group.last}
    limits: dict[str, int | None] = {}
    for name, metric in {**(SLOW_V2 if group.version == 2 else SLOW_V1), **PIDS}.items():
        if (data := get(group, name)) is None:
            continue
        value = number(data)
        if metric in LIMITS:
            limits[metric] = value
        if value is not None:
            values[metric] = float(value)
    stat = table(get(group, "memory.stat") or b"")
    values |= {metric: float(stat[key]) for key, metric in STAT.items() if key in stat}
    prefix = "total_" if group.version == 1 else ""
    for key, metric in STAT_RATES.items():
        values |= rate(group, metric, stat.get(prefix + key), now)
    for what, kinds in PSI.items():
        total = stalls(get(group, f"{what}.pressure") or b"")
        for kind in kinds:
            values |= rate(group, f"psi_{what}_{kind}_percent", total.get(kind), now, per_s=1e6 / 100)
    cpu = table(get(group, "cpu.stat") or b"")
    values |= rate(group, "throttled_periods_per_s", cpu.get("nr_throttled"), now)
    values |= rate(group, "throttled_percent", cpu.get("throttled_usec"), now, per_s=1e6 / 100)
    values |= rate(group, "throttled_percent", cpu.get("throttled_time"), now, per_s=1e9 / 100)  # v1: nanoseconds
    values |= rate(group, "cpu_percent", cpu.get("usage_usec"), now, per_s=1e6 / 100)
    limit = lowest_limit(group)
    used = group.last.get("memory_current_bytes")
    if limit is not None:
        values["memory_limit_bytes"] = float(limit)
        if used is not None and limit:
            values["memory_used_ratio"] = used / limit
    else:
        group.last.pop("memory_limit_bytes", None)
    group.last |= values
    out = [Sample("cgroup", metric, value, now) for metric, value in values.items()]
    out.append(Sample("cgroup", "own", float(group.own), now))
    return out + changed(group, limits, now) + stall(group, now)


def same(group: Group) -> bool:
    """Whether the directory under this name is still the one whose files are open."""
    try:
        return identity(group.folder) == group.key
    except OSError:
        return False


def rate(group: Group, metric: str, value: int | None, now: int, per_s: float = 1.0) -> dict[str, float]:
    """How fast a counter rose since the look before, in units of `per_s`; nothing at the first look."""
    if value is None:
        return {}
    before, group.before[metric] = group.before.get(metric), (value, now)
    if before is None or value < before[0] or now <= before[1]:
        return {}
    return {metric: (value - before[0]) / per_s / ((now - before[1]) / 1e9)}


def changed(group: Group, limits: dict[str, int | None], now: int) -> list[Sample]:
    """Limits that somebody set meanwhile (`docker update`, a vertical autoscaler)."""
    before, group.limits = group.limits, limits
    return [
        happening(group, "limit_changed", now, f"{metric}: {said(before[metric])} → {said(value)}", limit=metric)
        for metric, value in limits.items()
        if metric in before and before[metric] != value
    ]


def said(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def stall(group: Group, now: int) -> list[Sample]:
    """Tasks that wait for memory with the OOM killer off: nothing dies, nothing moves, and pressure stays silent."""
    was = group.stalled
    group.stalled = was + 1 if group.events.get("under_oom") else 0
    if group.stalled == STALLED_LOOKS:
        why = " and its OOM killer is off" if group.events.get("oom_kill_disable") else ""
        return [happening(group, "stalled", now, f"tasks of the cgroup wait for memory{why}")]
    if was >= STALLED_LOOKS and not group.stalled:
        return [happening(group, "stall_over", now, "tasks of the cgroup run again")]
    return []


def happening(group: Group, metric: str, now: int, text: str, **more: str) -> Sample:
    return Sample("cgroup", metric, 1.0, now, {**known(group), **more}, text)


def known(group: Group) -> dict[str, str]:
    """Which cgroup it is, for a sample."""
    return {**group.place.labels(), "cgroup": group.path, **({} if group.own else {"shared": "true"})}


def about(group: Group) -> str:
    """What is watched, for the report."""
    if group.memory is None:
        return f"cgroup v2 {group.path} for pressure; no memory controller"
    whose = "" if group.own else ", shared with others"
    missing = "" if "memory.pressure" in group.files else "; without pressure"
    return f"memory cgroup v{group.version} {group.path}{whose}{missing}"


def farewell(group: Group, now: int) -> Sample:
    """The cgroup is gone; its last counters go with the word."""
    final = {metric: f"{value:.0f}" for metric, value in group.last.items() if metric.endswith(("_total", "_bytes"))}
    kills = group.last.get("oom_kill_total")
    text = f"cgroup {group.path} is gone"
    text += f"; it had counted {kills:.0f} kills" if kills is not None else ""
    peak = group.last.get("memory_peak_bytes")
    text += f" and {peak:.0f} bytes at most" if peak is not None else ""
    return happening(group, "cgroup_gone", now, text, **final)


def watch(options: Options) -> Iterator[list[Sample]]:
    """Figures of the server's cgroup; happenings oom_kill, oom, stalled, stall_over, limit_changed, cgroup_gone,
    cgroup_new."""
    root = server.tree(options.root)
    port, why = (0, "") if options.pid else server.port_of(options.target_url)
    if why:
        yield [Sample("cgroup", "observed", 0.0, clock.now_ns(), text=why)]
        return
    group: Group | None = None
    told: str | None = None
    find_ns = slow_ns = 0
    stale = False  # the process by which the cgroup was found is no more, or lives elsewhere
    try:
        while True:
            now = clock.now_ns()
            out: list[Sample] = []
            if (group is None or stale) and now >= find_ns:
                found = look(root, options.pid, port)
                find_ns = now + max(FIND_EVERY_NS, SCAN_SHARE * (clock.now_ns() - now))
                if isinstance(found, Group):
                    if group is not None and found.key == group.key:
                        group.listener, group.lives = found.listener, found.lives
                        found.close()
                    else:
                        if group is not None:  # it moved; the old one may well exist still
                            out.append(farewell(group, now))
                            group.close()
                        group, slow_ns = found, 0
                        if told is not None:
                            out.append(happening(group, "cgroup_new", now, f"now {about(group)}"))
                    stale = False
                text = found if isinstance(found, str) else about(found)
                # a server that is away for a moment does not make us blind
                if text != told and (told is None or isinstance(found, Group)):
                    labels = known(found) if isinstance(found, Group) else {}
                    out.insert(0, Sample("cgroup", "observed", float(isinstance(found, Group)), now, labels, text))
                    told = text
            if group is not None:
                try:
                    out += quick(group, now)
                    if now >= slow_ns:
                        out += slow(group, now)
                        slow_ns = now + SLOW_EVERY_NS
                        stale = not lives(root, group)
                except GoneError:
                    out.append(farewell(group, now))
                    group.close()
                    group, find_ns = None, 0
            yield out
    finally:
        if group is not None:
            group.close()


def look(root: Path, pid: int, port: int) -> Group | str:
    """The cgroup of whoever serves now, or why it cannot be said."""
    proc = root / "proc"
    found = server.named(proc, pid) if pid else server.find(proc, port)
    return found.why if found.listener is None else open_group(root, found.listener)


def lives(root: Path, group: Group) -> bool:
    """Whether the process that led here is still the same one, in the same cgroups."""
    stat = server.stat_of(root / "proc", group.listener.pid)
    if stat is None or stat.start != group.listener.start:
        return False
    return read(root / "proc" / str(stat.pid) / "cgroup") == group.lives
