"""What the kernel and the GPU driver say in /dev/kmsg while the run lasts: kills, allocation failures, Xids, stalls.

The log still holds everything since boot, so what is there when the run starts is counted once as `before_run` and is
no event of the run. Lines that user space wrote (facility other than 0) are ignored: any root process could fake a
verdict. Follow-up lines of one event are attached to it, not counted: a lost GPU logs three or four, a kill up to 86.

Where `root` is a simulated machine, its `dev/kmsg` is a regular file and is followed like one. Lines of that file may
be records as the kernel gives them, journal records (JSON) or text; text whose date cannot be read has time "unknown".
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from loadgen import clock
from loadgen.types import Json, Lane, Sample, Seconds

LANE: Lane = "fast"
PERIOD_S = 0.1

RECORD_BYTES = 8192  # what the kernel may hand out as one record (CONSOLE_EXT_LOG_MAX); it refuses a smaller buffer
MAX_RECORDS = 2000  # a tick: a kill logs 86, a machine with thousands of tasks logs each; the rest waits 100 ms
MAX_SAME_EVENTS = 20  # of one signal a tick: 198 driver lines came in one burst; the rest is one sample with its count
FOLLOW_UP_US = 300_000_000  # lines on the same device within 5 minutes belong to the event that began it
PENDING_US = 10_000_000  # what was said before a kill is its detail for 10 s: the kill follows within milliseconds
MAX_DEVICES = 64
RECENT_NS = 1_000_000_000  # a record's own time is trusted within 1 s: kernel log time drifts from the monotonic clock

Severity = Literal["fail", "high", "warn", "info"]


@dataclass(frozen=True, slots=True)
class Signal:
    """A line that means something. Named groups of the pattern become labels."""

    name: str
    pattern: re.Pattern[str]
    severity: Severity
    meaning: str


def _signal(name: str, pattern: str, severity: Severity, meaning: str) -> Signal:
    return Signal(name, re.compile(pattern), severity, meaning)


_VICTIM = r"(?P<pid>\d+) \((?P<comm>.*?)\)(?=,? (?:total-vm|score|UID)|$)"

# The first that matches counts.
SIGNALS: tuple[Signal, ...] = (
    _signal(
        "oom_kill_memcg",
        rf"Memory cgroup out of memory: Killed process {_VICTIM}",
        "fail",
        "a container reached its memory limit",
    ),
    _signal(
        "oom_kill_global",
        rf"(?<!cgroup )[Oo]ut of memory(?: \([^)]*\))?: Killed process {_VICTIM}",
        "fail",
        "the host is out of memory; the victim may be innocent",
    ),
    _signal(
        "oom_reaper_failed",
        r"oom_reaper: unable to reap pid:(?P<pid>\d+)",
        "fail",
        "a victim is stuck and keeps its memory",
    ),
    _signal(
        "oom_deadlock",
        r"Out of memory and no killable processes|System is deadlocked on memory",
        "fail",
        "nothing is left to kill; panic or wedge comes next",
    ),
    _signal(
        "xid",
        r"NVRM: Xid \((?P<pci>[^)]*)\): (?P<xid>\d+)",
        "warn",
        "the GPU driver reports an error; severity and group by its code",
    ),
    _signal(
        "gsp_dead",
        r"GSP RM heartbeat timed out|_kgspIsHeartbeatTimedOut|GSP task watchdog timeout",
        "fail",
        "the GPU's firmware stopped; the host may follow",
    ),
    _signal(
        "iova_no_memory",
        r"NVRM: _iovaspaceCreateMappingDataFromMemDesc: failed to allocate (?P<size>0x[0-9a-f]+)",
        "high",
        "a small kernel allocation of the GPU driver failed: memory is really exhausted",
    ),
    _signal(
        "nv_no_memory",
        r"NVRM: .*NV_ERR_NO_MEMORY",
        "warn",
        "the GPU driver was refused memory; seen in healthy runs as well",
    ),
    _signal(
        "hung_task",
        r"INFO: task (?P<comm>.+):(?P<pid>\d+) (?:<[^>]*> )?blocked (?:in I/O wait )?"
        r"for more than (?P<seconds>\d+) seconds",
        "high",
        "a task has been in D state for minutes",
    ),
    _signal(
        "soft_lockup",
        r"watchdog: BUG: soft lockup - CPU#(?P<cpu>\d+) stuck for (?P<seconds>\d+)s",
        "fail",
        "a CPU does not schedule",
    ),
    _signal(
        "rcu_stall",
        r"rcu: INFO: rcu_\w+ (?:self-detected stall|detected stalls|detected expedited stalls)",
        "fail",
        "the kernel does not schedule",
    ),
    _signal(
        "page_allocation_failure",
        r"(?P<comm>\S.*?): page allocation failure: order:(?P<order>0)\b",
        "fail",
        "a single page could not be had",
    ),
    _signal(
        "page_allocation_failure",
        r"(?P<comm>\S.*?): page allocation failure: order:(?P<order>\d+)",
        "warn",
        "a contiguous piece of memory could not be had",
    ),
    _signal(
        "pcie_error",
        r"AER: (?:Multiple )?Uncorrect\w* .*received|PCIe Bus Error: severity=(?P<kind>Uncorrect[^,]*)",
        "fail",
        "a PCIe link or device failed",
    ),
    _signal(
        "pcie_error",
        r"AER: .*[Ee]rror.*received|PCIe Bus Error: severity=(?P<kind>[^,]+)",
        "warn",
        "a PCIe link or device had an error that was corrected",
    ),
    _signal(
        "thermal_critical",
        r"critical temperature reached",
        "fail",
        "the machine is about to switch itself off",
    ),
    _signal(
        "thermal_throttle",
        r"temperature above threshold, cpu clock throttled",
        "warn",
        "the CPU slows down",
    ),
    _signal(
        "storage_error",
        r"nvme\w*: I/O (?:tag )?\d+.*timeout|I/O error, dev (?P<device>\w+)|Remounting filesystem read-only",
        "fail",
        "a disk fails; the run's own files are at risk",
    ),
    _signal(
        "machine_check",
        r"mce: \[Hardware Error\]|\{\d+\}\[Hardware Error\]|Memory failure: 0x",
        "fail",
        "the hardware reports a fault",
    ),
)
# What user-space killers say; no line of the kernel tells of them.
USER_SIGNALS: tuple[Signal, ...] = (
    _signal(
        "userspace_oom_kill",
        r"^Killed (?P<cgroup>\S+) due to (?P<why>memory pressure|memory used)"
        r"(?:.*? being (?P<percent>[\d.]+)%.*? for > (?P<seconds>\d+)s)?",
        "fail",
        "systemd-oomd killed a control group",
    ),
    _signal(
        "userspace_oom_kill",
        r"[Ss]ending SIG(?:TERM|KILL) to process (?P<pid>\d+)",
        "fail",
        "earlyoom killed a process",
    ),
)
USERSPACE_KILLERS = frozenset({"systemd-oomd", "earlyoom"})

# Xid codes by what they say about whose fault it is, after NVIDIA's catalogue; unknown codes are warnings.
XIDS: dict[int, tuple[str, Severity]] = {
    **dict.fromkeys((13, 31, 43, 45), ("application", "fail")),
    **dict.fromkeys((48, 64, 92, 94, 95), ("memory_hardware", "fail")),
    63: ("memory_hardware", "warn"),  # a row is marked for remapping: reset needed
    79: ("bus", "fail"),
    **dict.fromkeys((109, 119, 120), ("firmware", "fail")),
    154: ("recovery_action", "warn"),
}

# Lines that only tell more of a kill that is reported next.
_INVOKED = re.compile(r"(?P<invoked_by>\S+) invoked oom-killer: gfp_mask=(?P<gfp>[^,]+), order=(?P<order>-?\d+)")
_OOM_DETAIL = re.compile(
    r"oom-kill:constraint=(?P<constraint>CONSTRAINT_\w+)(?:.*?task_memcg=(?P<task_memcg>[^,]*))?"
    r".*?task=(?P<comm>.*?),pid=(?P<pid>\d+)"
)
# Kernels before 4.19 say two lines for one kill, and the scope stands in the first.
_OLD_FIRST = re.compile(r"(?P<scope>Memory cgroup out of memory|Out of memory): Kill process \d+ ")
_OLD_SECOND = re.compile(rf"^Killed process {_VICTIM}")
_ANON_RSS = re.compile(r"anon-rss:(\d+)kB")
_UNIT_KILLED = re.compile(r"^(?P<unit>\S+): systemd-oomd killed (?P<processes>\d+) process")
_PCI = re.compile(r"\b(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\b", re.IGNORECASE)

_KMSG = re.compile(r"^(?P<prio>\d+),(?P<seq>\d+),(?P<us>\d+),[^;]*;(?P<text>.*)$", re.DOTALL)
_KERNEL_TEXT = re.compile(r"(?:^|\s)kernel: (?:\[ *\d+\.\d+\] )?(?P<text>.*)$")

HOW_TO_ALLOW = {
    "EPERM": "sudo sysctl -w kernel.dmesg_restrict=0",
    "EACCES": "sudo chmod a+r /dev/kmsg",
    "ENOENT": "in a container: docker run --device /dev/kmsg --cap-add SYSLOG …",
}


@dataclass(frozen=True, slots=True)
class Options:
    """`any_facility` also believes lines that user space wrote: for tests that inject them."""

    root: str = "/"
    period_s: Seconds = Seconds(0.1)
    any_facility: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a log, wherever it came from. `us` and `seq` None: the source does not say."""

    text: str
    us: int | None = None
    seq: int | None = None
    facility: int = 0
    identifier: str = "kernel"


@dataclass(slots=True)
class Event:
    """One thing that happened, told by one or more lines."""

    name: str
    us: int | None
    text: str
    labels: dict[str, str]
    lines: int = 1


@dataclass(slots=True)
class Memory:
    """What earlier lines said that later ones need: the details before a kill, and devices with an event on them."""

    details: dict[str, str] = field(default_factory=dict)
    details_us: int = 0
    devices: dict[str, Event] = field(default_factory=dict)
    unit_kill: Event | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Lines to records


def parse(line: str) -> Record | None:
    """A record as the kernel gives it, a journal record, or a text line; None for what is none of them."""
    found = _KMSG.match(line)
    if found:
        text = found["text"].partition("\n")[0]  # continuation lines (` SUBSYSTEM=…`) describe the device only
        return Record(text, int(found["us"]), int(found["seq"]), int(found["prio"]) >> 3)
    if line.startswith("{"):
        try:
            return from_journal(json.loads(line))
        except ValueError:
            return None
    found = _KERNEL_TEXT.search(line)
    return Record(found["text"]) if found else None


def from_journal(fields: Json) -> Record | None:
    """A record of the systemd journal. Only what came through the kernel's own transport speaks for the kernel."""
    text, us = fields.get("MESSAGE"), str(fields.get("__MONOTONIC_TIMESTAMP", ""))
    if not isinstance(text, str):  # the journal gives bytes that are not UTF-8 as a list of numbers
        return None
    kernel = fields.get("_TRANSPORT") == "kernel"
    identifier = "kernel" if kernel else str(fields.get("SYSLOG_IDENTIFIER", ""))
    return Record(text, int(us) if us.isdigit() else None, None, 0 if kernel else 1, identifier)


# ---------------------------------------------------------------------------------------------------------------------
# Records to events


def events(records: list[Record], memory: Memory, any_facility: bool = False) -> list[Event]:
    """What happened in these lines, in their order. `memory` carries what was said before to the next call."""
    out: list[Event] = []
    for record in records:
        if record.identifier in USERSPACE_KILLERS or record.identifier == "systemd":
            event = _from_user(record, memory)
        elif record.facility == 0 or any_facility:
            event = _from_kernel(record, memory)
        else:
            continue
        if event is not None:
            out.append(event)
    return out


def _from_user(record: Record, memory: Memory) -> Event | None:
    found = _UNIT_KILLED.search(record.text)
    if found and record.identifier == "systemd":
        before = memory.unit_kill
        if before is not None and before.labels.get("cgroup", "").endswith(found["unit"]):
            before.labels.update(found.groupdict())
            before.lines += 1
            return None
        return Event("userspace_oom_kill", record.us, record.text, {**found.groupdict(), "severity": "fail"})
    if record.identifier not in USERSPACE_KILLERS:
        return None
    for signal in USER_SIGNALS:
        found = signal.pattern.search(record.text)
        if found:
            labels = _labels(found, signal.severity) | {"by": record.identifier}
            memory.unit_kill = Event(signal.name, record.us, record.text, labels)
            return memory.unit_kill
    return None


def _from_kernel(record: Record, memory: Memory) -> Event | None:
    text, us = record.text, record.us or 0
    if us - memory.details_us > PENDING_US:
        memory.details = {}
    for pattern in (_INVOKED, _OOM_DETAIL, _OLD_FIRST):
        found = pattern.search(text)
        if found:
            memory.details.update({key: value for key, value in found.groupdict().items() if value})
            memory.details_us = us
            return None
    found = _OLD_SECOND.search(text)
    if found and "scope" in memory.details:
        memcg = memory.details.pop("scope").startswith("Memory cgroup")
        return _kill("oom_kill_memcg" if memcg else "oom_kill_global", found, record, memory)
    for signal in SIGNALS:
        found = signal.pattern.search(text)
        if not found:
            continue
        if signal.name.startswith("oom_kill"):
            return _kill(signal.name, found, record, memory)
        event = Event(signal.name, record.us, text, _labels(found, signal.severity))
        if signal.name == "xid":
            group, severity = XIDS.get(int(found["xid"]), ("unknown", "warn"))
            event.labels |= {"group": group, "severity": severity, "pci": _device(found["pci"])}
            return _on_device(event, us, memory)
        return event
    _attach(text, us, memory)
    return None


def _labels(found: re.Match[str], severity: str) -> dict[str, str]:
    return {key: value for key, value in found.groupdict().items() if value is not None} | {"severity": severity}


def _kill(name: str, found: re.Match[str], record: Record, memory: Memory) -> Event:
    """One kill with all that the lines before it said, as long as they speak of the same victim."""
    details, memory.details = memory.details, {}
    if details.get("pid", found["pid"]) != found["pid"]:  # a group kill: each further victim is told by one line
        details = {key: value for key, value in details.items() if key not in {"pid", "comm", "task_memcg"}}
    labels = {"constraint": "CONSTRAINT_MEMCG"} if name == "oom_kill_memcg" else {}
    labels |= details | _labels(found, "fail")
    anon = _ANON_RSS.search(record.text)
    if anon:
        labels["anon_rss_kb"] = anon[1]
    return Event(name, record.us, record.text, labels)


def _device(pci: str) -> str:
    """`PCI:0000:06:00` and `0000:06:00.0` are one device."""
    found = _PCI.search(pci)
    return found[0].lower() if found else pci


def _on_device(event: Event, us: int, memory: Memory) -> Event | None:
    """A repetition of the same Xid on the same device within five minutes belongs to the first."""
    key = event.labels["pci"]
    before = memory.devices.get(key)
    if before is not None and before.labels["xid"] == event.labels["xid"] and us - (before.us or 0) < FOLLOW_UP_US:
        before.lines += 1
        return None
    if len(memory.devices) >= MAX_DEVICES:
        memory.devices.pop(next(iter(memory.devices)))
    memory.devices[key] = event
    return event


def _attach(text: str, us: int, memory: Memory) -> None:
    """Count a line that only elaborates on a device's event: it names the device, or the code of the last error."""
    if "NVRM" not in text:
        return
    for key, event in memory.devices.items():
        names_it = key in text.lower() or re.search(rf"\berror {event.labels['xid']}\b", text)
        if names_it and us - (event.us or 0) < FOLLOW_UP_US:
            event.lines += 1
            return


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(slots=True)
class Follower:
    """Where we stand in the log: `seq` of the last record, the torn end of a file, records known to be lost."""

    fd: int
    is_file: bool
    seq: int | None = None
    torn: bytes = b""
    lost: int = 0


def read(follower: Follower) -> list[Record]:
    """What is new, at most MAX_RECORDS. Lost records are counted in the follower."""
    return _read_file(follower) if follower.is_file else _read_device(follower)


def _read_device(follower: Follower) -> list[Record]:
    records: list[Record] = []
    overrun = False
    while len(records) < MAX_RECORDS:
        try:
            data = os.read(follower.fd, RECORD_BYTES)
        except BlockingIOError:
            break
        except BrokenPipeError:  # the ring buffer went past us; the next read continues with the oldest that is left
            overrun = True
            continue
        record = parse(data.decode("utf-8", "replace"))
        if record is None or record.seq is None:
            continue
        if follower.seq is not None and record.seq > follower.seq + 1:
            follower.lost += record.seq - follower.seq - 1
        elif overrun:
            follower.lost += 1  # at least one: there was no record before to count from
        overrun = False
        follower.seq = record.seq
        records.append(record)
    return records


def _read_file(follower: Follower) -> list[Record]:
    if os.fstat(follower.fd).st_size < os.lseek(follower.fd, 0, os.SEEK_CUR):
        os.lseek(follower.fd, 0, os.SEEK_SET)  # the file began anew
        follower.torn, follower.seq = b"", None
    data = follower.torn + os.read(follower.fd, MAX_RECORDS * RECORD_BYTES // 16)
    *lines, follower.torn = data.split(b"\n")
    follower.torn = follower.torn[-RECORD_BYTES:]
    records: list[Record] = []
    for line in lines:
        record = parse(line.decode("utf-8", "replace"))
        if record is None:
            continue
        if record.seq is not None:
            if follower.seq is not None and record.seq > follower.seq + 1:
                follower.lost += record.seq - follower.seq - 1
            follower.seq = record.seq
        records.append(record)
    return records


def watch(options: Options) -> Iterator[list[Sample]]:
    """Events of the run as happenings, with counts of records and of those that were lost."""
    path = Path(options.root) / "dev/kmsg"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        yield [not_observed(path, error)]
        return
    try:
        follower = Follower(fd, stat.S_ISREG(os.fstat(fd).st_mode))
        memory = Memory()
        try:
            earlier = drain(follower, options.any_facility)
        except OSError as error:  # opening may be allowed and reading not
            yield [not_observed(path, error)]
            return
        now = clock.now_ns()
        out = [Sample("kernel", "observed", 1.0, now, text="")]
        out += [Sample("kernel", "before_run", float(n), now, {"event": name}) for name, n in sorted(earlier.items())]
        follower.lost = 0
        total = lost = 0
        while True:
            yield out
            records = read(follower)
            now = clock.now_ns()
            total += len(records)
            out = samples(events(records, memory, options.any_facility), now)
            if follower.lost:
                lost += follower.lost
                text = f"{follower.lost} kernel messages were overwritten before they could be read"
                out.append(Sample("kernel", "messages_lost", float(follower.lost), now, text=text))
                follower.lost = 0
            out.append(Sample("kernel", "records_total", float(total), now))
            out.append(Sample("kernel", "lost_total", float(lost), now))
    finally:
        os.close(fd)


def drain(follower: Follower, any_facility: bool) -> dict[str, int]:
    """Read what was logged before the run, and count what would have been events."""
    memory = Memory()
    counts: dict[str, int] = {}
    while records := read(follower):
        for event in events(records, memory, any_facility):
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


def samples(happened: list[Event], now_ns: int) -> list[Sample]:
    """Events as happenings at their own time; a burst beyond MAX_SAME_EVENTS of one kind as one with its count."""
    out: list[Sample] = []
    seen: dict[str, int] = {}
    for event in happened:
        seen[event.name] = seen.get(event.name, 0) + 1
        if seen[event.name] > MAX_SAME_EVENTS:
            continue
        labels = dict(event.labels)
        if event.lines > 1:
            labels["lines"] = str(event.lines)
        at_ns = now_ns
        if event.us is None:
            labels["time"] = "unknown"
        elif now_ns - RECENT_NS <= event.us * 1000 <= now_ns:
            at_ns = event.us * 1000
        out.append(Sample("kernel", event.name, 1.0, at_ns, labels, event.text))
    for name, n in seen.items():
        if n > MAX_SAME_EVENTS:
            more = n - MAX_SAME_EVENTS
            out.append(Sample("kernel", name, float(more), now_ns, {"burst": str(n)}, f"and {more} more like it"))
    return out


def not_observed(path: Path, error: OSError) -> Sample:
    """The reason, and the one command that would allow it."""
    code = {1: "EPERM", 13: "EACCES", 2: "ENOENT"}.get(error.errno or 0, str(error.errno))
    how = HOW_TO_ALLOW.get(code)
    text = f"{path}: {code} ({error.strerror})" + (f"; to allow it: {how}" if how else "")
    return Sample("kernel", "observed", 0.0, clock.now_ns(), text=text)
