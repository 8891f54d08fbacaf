"""What the kernel and the GPU driver say in /dev/kmsg while the run lasts: kills, allocation failures, Xids, stalls.

The log still holds everything since boot, so what is there when the run starts is counted once as `before_run` and is
no event of the run. Lines that user space wrote (facility other than 0) are ignored: any root process could fake a
verdict. Follow-up lines of one event are attached to it, not counted: a lost GPU logs three or four, a kill up to 86.

User-space killers (earlyoom, systemd-oomd, nohang) leave no line in the kernel's log, so where the machine keeps a
systemd journal it is followed for them; where /dev/kmsg may not be read, for the kernel's lines as well. Its records
are taken as JSON: other formats carry dates in the system's language.

Where `root` is a simulated machine, its `dev/kmsg` is a regular file and is followed like one. Lines of that file may
be records as the kernel gives them, journal records (JSON) or text; text whose date cannot be read has time "unknown".
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
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

JOURNALS = ("run/log/journal", "var/log/journal")  # where journald keeps one, in memory or on disk
KILLER_UNITS = ("earlyoom.service", "systemd-oomd.service", "nohang.service", "nohang-desktop.service")
PIPE_BYTES = 1 << 16  # a read; Linux gives a pipe that much
MAX_JOURNAL_LINE = 1 << 18  # the journal's fields are not bounded; a line of the kernel is below 2 KB
MAX_JOURNAL_READS = 16  # a tick: 1 MB, a thousand records; the rest waits in the pipe
RETRY_NS = 30_000_000_000  # a journal that ended (journald restarted) is followed again, from where it stood
MAX_ENDS = 5  # then it is given up, and said so
QUIET_NS = 3_000_000_000  # a journal that may be read shows lines of this boot at once; silence for 3 s says it may not

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
    _signal(
        "userspace_oom_kill",
        r"[Ss]ending SIG(?:TERM|KILL) to the victim",
        "fail",
        "nohang killed a process; the lines before it say which",
    ),
)
USERSPACE_KILLERS = frozenset({"systemd-oomd", "earlyoom", "nohang", "nohang-desktop"})

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

KILLERS_UNSEEN = (
    "user-space killers are not observed: this user may not read their journal; to allow it: "
    "sudo usermod -aG systemd-journal USER"
)
HOW_TO_ALLOW = {
    "EPERM": "sudo sysctl -w kernel.dmesg_restrict=0",
    "EACCES": "sudo chmod a+r /dev/kmsg",
    "ENOENT": "in a container: docker run --device /dev/kmsg --cap-add SYSLOG …",
}


@dataclass(frozen=True, slots=True)
class Options:
    """`any_facility` also believes lines that user space wrote: for tests that inject them. `journalctl` is the program
    that reads the systemd journal; empty: do not follow it."""

    root: str = "/"
    period_s: Seconds = Seconds(0.1)
    any_facility: bool = False
    journalctl: str = "journalctl"


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


@dataclass(slots=True)
class Journal:
    """`journalctl` following the journal, and where we stand in it. `pid` 0: it does not run."""

    program: str
    folder: str  # "" on this machine itself: where a simulated one keeps its journal
    with_kernel: bool
    began_us: int
    pid: int = 0
    out: int = -1
    err: int = -1
    torn: bytes = b""
    said: bytes = b""
    cursor: str = ""
    ends: int = 0
    due_ns: int = 0


def journal_of(options: Options, with_kernel: bool, now_ns: int) -> Journal | str:
    """A journal to follow, or why there is none."""
    if not options.journalctl:
        return "the journal is not followed"
    kept = [path for name in JOURNALS if (path := Path(options.root) / name).is_dir()]
    if not kept:
        return "this machine keeps no systemd journal"
    places = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = [Path(place, options.journalctl) for place in places]  # an absolute program stays as it is
    program = next((path for path in found if os.access(path, os.X_OK)), None)
    if program is None:
        return f"{options.journalctl} is not installed"
    folder = "" if options.root == "/" else str(kept[0])
    return Journal(str(program), folder, with_kernel, now_ns // 1000)


def start(journal: Journal) -> None:
    """Run journalctl with pipes of ours. No subprocess module: it would cost the fast lane a megabyte."""
    # From the beginning of this boot where the kernel's lines are wanted, to know what was there before the run;
    # killers from now on. After an end, from where we stood.
    where = [f"--directory={journal.folder}"] if journal.folder else ["--boot"]
    if journal.cursor:
        where.append(f"--after-cursor={journal.cursor}")
    lines = "all" if journal.with_kernel or journal.cursor else "0"
    command = [journal.program, "--follow", "--output=json", "--no-pager", f"--lines={lines}", *where]
    # fields that begin with _ are written by journald itself: no program can pretend to be another's unit
    wanted = [["_TRANSPORT=kernel"]] if journal.with_kernel else []
    wanted += [["_PID=1"], [f"_SYSTEMD_UNIT={unit}" for unit in KILLER_UNITS]]
    command += [word for match in wanted for word in ("+", *match)][1:]
    out, child_out = os.pipe()
    err, child_err = os.pipe()
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, child_out, 1),
            (os.POSIX_SPAWN_DUP2, child_err, 2),
        ]
        journal.pid = os.posix_spawn(journal.program, command, os.environ, file_actions=actions)
    except OSError as error:
        os.close(out)
        os.close(err)
        journal.said = (error.strerror or "cannot be started").encode()
        return
    finally:
        os.close(child_out)
        os.close(child_err)
    os.set_blocking(out, False)
    os.set_blocking(err, False)
    journal.out, journal.err, journal.torn, journal.said = out, err, b"", b""


def stop(journal: Journal) -> None:
    """End journalctl: it only reads, so that nothing is lost by killing it."""
    if not journal.pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(journal.pid, SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(journal.pid, 0)
    os.close(journal.out)
    os.close(journal.err)
    journal.pid, journal.out, journal.err = 0, -1, -1


def read_journal(journal: Journal) -> tuple[list[Record], bool]:
    """What is new, and whether journalctl still runs."""
    said, _ = _pipe(journal.err)
    journal.said = (journal.said + said)[-1000:]
    data, open_ = _pipe(journal.out)
    *lines, torn = (journal.torn + data).split(b"\n")
    journal.torn = torn[-MAX_JOURNAL_LINE:]
    records: list[Record] = []
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict):
            journal.cursor = str(fields.get("__CURSOR", journal.cursor))
            record = from_journal(fields)
            if record is not None:
                records.append(record)
    return records, open_


def _pipe(fd: int) -> tuple[bytes, bool]:
    """What stands in a pipe, and whether anybody may still write into it."""
    out = b""
    for _ in range(MAX_JOURNAL_READS):
        try:
            data = os.read(fd, PIPE_BYTES)
        except BlockingIOError:
            return out, True
        if not data:
            return out, False
        out += data
    return out, True


def watch(options: Options) -> Iterator[list[Sample]]:
    """Events of the run as happenings, with counts of records and of those that were lost."""
    path = Path(options.root) / "dev/kmsg"
    follower: Follower | None = None
    refusal: OSError | None = None
    earlier: dict[str, int] = {}
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        refusal = error
    else:
        follower = Follower(fd, stat.S_ISREG(os.fstat(fd).st_mode))
        try:
            earlier = drain(follower, options.any_facility)
            follower.lost = 0
        except OSError as error:  # opening may be allowed and reading not
            os.close(fd)
            follower, refusal = None, error
    now = clock.now_ns()
    journal = journal_of(options, refusal is not None, now)
    if refusal is not None and isinstance(journal, str):
        yield [not_observed(path, refusal, journal)]
        return
    side = Side(journal, path, refusal)
    try:
        memory = Memory()
        out: list[Sample] = []
        if follower is not None:
            without = f"user-space killers are not observed: {journal}" if isinstance(journal, str) else ""
            out.append(Sample("kernel", "observed", 1.0, now, text=without))
            out += before(earlier, now)
        out += side.begin(now)
        total = lost = 0
        while True:
            yield out
            if side.over and follower is None:
                return
            now = clock.now_ns()
            told, out = side.tick(now)
            records = read(follower) if follower is not None else []
            happened = events(records, memory, options.any_facility)
            happened += events(told, side.memory)
            total += len(records) + len(told)
            out += samples(happened, clock.now_ns())
            if follower is not None and follower.lost:
                lost += follower.lost
                text = f"{follower.lost} kernel messages were overwritten before they could be read"
                out.append(Sample("kernel", "messages_lost", float(follower.lost), now, text=text))
                follower.lost = 0
            out.append(Sample("kernel", "records_total", float(total), now))
            out.append(Sample("kernel", "lost_total", float(lost), now))
    finally:
        side.end()
        if follower is not None:
            os.close(follower.fd)


class Side:
    """The journal beside the kernel's own log, or in its place."""

    def __init__(self, journal: Journal | str, path: Path, refusal: OSError | None) -> None:
        self.journal = journal if isinstance(journal, Journal) else None
        self.memory = Memory()
        self.over = self.journal is None
        self._path, self._refusal = path, refusal
        self._seen = self._told_quiet = self._told_limit = False
        self._began_ns = 0

    def begin(self, now_ns: int) -> list[Sample]:
        if self.journal is None:
            return []
        start(self.journal)
        self._began_ns = now_ns
        if self._refusal is None:
            return []
        return [not_observed(self._path, self._refusal, "the journal has shown nothing yet")]

    def tick(self, now_ns: int) -> tuple[list[Record], list[Sample]]:
        """Records of the run, and what there is to say of the journal itself."""
        journal = self.journal
        if journal is None or self.over:
            return [], []
        if not journal.pid:
            if now_ns < journal.due_ns:
                return [], []
            start(journal)
        if not journal.pid:
            return [], self._ended(journal, now_ns)
        records, open_ = read_journal(journal)
        out: list[Sample] = []
        if records and not self._seen:
            self._seen = True
            if self._refusal is not None:
                text = f"by the systemd journal; {_why(self._path, self._refusal)}"
                out.append(Sample("kernel", "observed", 1.0, now_ns, text=text))
        if self._refusal is not None and not (self._seen or self._told_quiet) and now_ns - self._began_ns > QUIET_NS:
            self._told_quiet = True
            said = " ".join(journal.said.decode("utf-8", "replace").split())[-200:]
            out.append(
                not_observed(self._path, self._refusal, f"the journal shows nothing{': ' + said if said else ''}")
            )
        if self._refusal is None and b"not seeing messages" in journal.said and not self._told_limit:
            self._told_limit = True  # journalctl's hint: a user outside the groups sees his own messages only
            out.append(Sample("kernel", "killers_unseen", 1.0, now_ns, {"severity": "info"}, KILLERS_UNSEEN))
        # what the journal held before the run is history, as in the kernel's own log
        new = [r for r in records if r.us is None or r.us >= journal.began_us]
        old = events([r for r in records if r.us is not None and r.us < journal.began_us], Memory())
        counts: dict[str, int] = {}
        for event in old:
            counts[event.name] = counts.get(event.name, 0) + 1
        out += before(counts, now_ns)
        if not open_:
            out += self._ended(journal, now_ns)
        return new, out

    def _ended(self, journal: Journal, now_ns: int) -> list[Sample]:
        """journalctl is gone: again in a while, or never."""
        said = " ".join(journal.said.decode("utf-8", "replace").split())[-200:]
        stop(journal)
        journal.ends += 1
        journal.due_ns = now_ns + RETRY_NS
        final = journal.ends >= MAX_ENDS or (not self._seen and self._refusal is not None)
        self.over = final
        why = f"journalctl ended{': ' + said if said else ''}" + ("" if final else "; it is started again in 30 s")
        if self._refusal is not None and final:
            return [not_observed(self._path, self._refusal, why)]
        return [Sample("kernel", "journal_ended", 1.0, now_ns, {"severity": "info"}, why)]

    def end(self) -> None:
        if self.journal is not None:
            stop(self.journal)


def before(counts: dict[str, int], now_ns: int) -> list[Sample]:
    """What the log held when the run began."""
    return [Sample("kernel", "before_run", float(n), now_ns, {"event": name}) for name, n in sorted(counts.items())]


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


def not_observed(path: Path, error: OSError, journal: str = "") -> Sample:
    """The reason, what the journal could not do either, and the one command that would allow it."""
    how = HOW_TO_ALLOW.get(_code(error))
    text = _why(path, error) + (f"; {journal}" if journal else "") + (f"; to allow it: {how}" if how else "")
    return Sample("kernel", "observed", 0.0, clock.now_ns(), text=text)


def _code(error: OSError) -> str:
    return {1: "EPERM", 13: "EACCES", 2: "ENOENT"}.get(error.errno or 0, str(error.errno))


def _why(path: Path, error: OSError) -> str:
    return f"{path}: {_code(error)} ({error.strerror})"
