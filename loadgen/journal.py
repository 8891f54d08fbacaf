"""Append-only JSON lines that survive crashes: one writer for every file of a run, one reader that takes what is left.

Standard library only, because the fast lane of the monitors must stay small and start quickly. What a crash leaves
behind and the reader accepts, counted: a torn last line, a tail of NUL bytes (the file grew, the data never reached the
disk), a hole of NULs followed by valid lines, no file at all.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from loadgen import clock
from loadgen.types import Json, Sample

# No record of ours comes near it (the longest keeps 2,000 characters of text); it bounds what a damaged file can make
# a reader hold in memory.
MAX_LINE_BYTES = 1 << 20
READ_BLOCK_BYTES = 1 << 20
SYNC_S = 1.0
SYNC_NEAR_GUARD_S = 0.2
# A disk that has not answered for this long is left to its fate, so that a run can end.
CLOSE_WAIT_S = 10.0
# Label sets times monitors of one lane and second; past it the second is written early.
MAX_PENDING_DIGESTS = 4096
# A lane writes 10 to 60 MB a day; near a guard ten times that. Small enough to be looked at with an editor.
SEGMENT_BYTES = 64 << 20
NS = 1_000_000_000

# macOS has no fdatasync.
_sync_fd: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


class Appender:
    """Appends lines to one file; no call but `sync` and `close` waits for the disk, and none raises when it is full.

    Each line is a single write() to a descriptor with O_APPEND, so several processes may share a file. A thread of its
    own calls fdatasync every `sync_s` seconds (may be changed at any time): what a power cut can take is that much.
    Lines that could not be written are counted in `errors`; `first_error` says why the first one failed. A file that an
    earlier process left torn is continued on a new line. Opening raises OSError as usual.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, object] | None,
        sync_s: float = SYNC_S,
        sync_fd: Callable[[int], None] = _sync_fd,
    ) -> None:
        self.path = path
        self._sync_fd = sync_fd
        self.sync_s = sync_s
        self.errors = 0
        self.first_error: str | None = None
        self.written_bytes = 0
        self.slowest_sync_ns = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._dirty = False
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._asked: list[threading.Event] = []
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        if header is not None and size == 0:
            self.append(header)
        self._thread = threading.Thread(target=self._sync_often, name=f"sync {path.name}", daemon=True)
        self._thread.start()

    def append(self, record: Mapping[str, object]) -> None:
        """Writes one record. A value that JSON does not know is written as its repr, NaN and infinity as null."""
        self.append_raw(dumps(record))

    def append_raw(self, line: bytes) -> None:
        """Writes one line that is encoded already; the newline is added here."""
        if len(line) > MAX_LINE_BYTES:
            self._failed(f"a line of {len(line)} bytes is longer than {MAX_LINE_BYTES}")
            return
        with self._lock:
            if self._fd < 0:
                self._failed("closed")
                return
            data = b"\n" + line + b"\n" if self._torn else line + b"\n"
            try:
                done = os.write(self._fd, data)
            except OSError as error:
                self._failed(str(error))
                return
            self.written_bytes += done
            self._dirty = True
            # A disk that fills up takes a part of the line; the next one must not be glued to it.
            self._torn = done < len(data)
            if self._torn:
                self._failed(f"only {done} of {len(data)} bytes were written")

    def sync(self) -> None:
        """Waits until everything written so far is on the disk. Before a step that may kill the host."""
        with self._sync_lock:  # a sync that already runs is waited for: it may hold what the caller means
            if self._fd < 0 or not self._dirty:
                return
            self._dirty = False
            start = clock.now_ns()
            try:
                self._sync_fd(self._fd)
            except OSError as error:
                self._failed(str(error))
            self.slowest_sync_ns = max(self.slowest_sync_ns, clock.now_ns() - start)

    def sync_soon(self, wait_s: float = 0.0) -> bool:
        """Has the sync thread sync at once, and waits for it at most `wait_s`: whether all that was written before is
        on the disk by then. A disk that hangs costs the caller no more than that."""
        if not wait_s:
            self._wake.set()
            return False
        done = threading.Event()
        self._asked.append(done)
        self._wake.set()
        return done.wait(wait_s)

    def close(self) -> None:
        """Syncs and closes. Further lines are counted as errors; a second close does nothing."""
        self._stop.set()
        self._wake.set()
        self._thread.join(CLOSE_WAIT_S)
        if self._thread.is_alive():  # fdatasync hangs: closing the descriptor under it would only hang as well
            self._failed(f"the disk did not answer for {CLOSE_WAIT_S:g} s")
            return
        self.sync()
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _sync_often(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self.sync_s)
            self._wake.clear()
            asked, self._asked = self._asked, []
            self.sync()
            for done in asked:
                done.set()

    def _failed(self, why: str) -> None:
        self.errors += 1
        if self.first_error is None:
            self.first_error = f"{self.path.name}: {why}"


Reading: TypeAlias = Mapping[str, int | str | None]  # what clock.reading() gives


def header(schema: str, reading: Reading | None = None, **fields: object) -> dict[str, object]:
    """The first line of a file: what it holds, all clocks at one moment, and who writes. `reading` stands in for the
    clocks (a virtual run, a golden run)."""
    return {"schema": schema, **(reading or clock.reading()), "pid": os.getpid(), **fields}


def dumps(record: object) -> bytes:
    """One line of ASCII JSON, whatever is in it."""
    try:
        text = json.dumps(record, separators=(",", ":"), default=repr, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(record), separators=(",", ":"), default=repr)
    return text.encode("ascii")


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Samples

SAMPLES_SCHEMA = "loadgen.samples/1"
_Labels = tuple[tuple[str, str], ...]


class _Second:
    """One second of one monitor and label set: per metric [min, max, last, n]."""

    __slots__ = ("at_ns", "values")

    def __init__(self) -> None:
        self.at_ns = 0
        self.values: dict[str, list[float]] = {}


class SampleWriter:
    """Writes the samples of one lane as digests of a second (min, max, last, n): one line per monitor and label set.

    A digest's `at` is its last reading. While `full_rate` is true, each call's samples are a digest of their own.
    Happenings (samples with a text, and whether a monitor can see at all) are written at once. Values that are not
    finite are not measured: left out, and counted in `dropped`. Past `segment_bytes` a file is closed and the next one
    begun (`samples-<lane>.2.jsonl`), so that no damage reaches further; None: one file.
    """

    def __init__(
        self, folder: Path, lane: str, reading: Reading | None = None, segment_bytes: int | None = None
    ) -> None:
        self.full_rate = False
        self.dropped = 0
        self._folder, self._lane = folder, lane
        self._segment_bytes, self._segment = segment_bytes, 1
        self._earlier_errors = 0
        self._earlier_error: str | None = None
        self._file = Appender(folder / f"samples-{lane}.jsonl", header(SAMPLES_SCHEMA, reading, lane=lane))
        self._pending: dict[tuple[int, str, _Labels], _Second] = {}
        self._newest_s = 0

    @property
    def errors(self) -> int:
        return self._earlier_errors + self._file.errors

    @property
    def first_error(self) -> str | None:
        return self._earlier_error or self._file.first_error

    def write(self, samples: list[Sample]) -> None:
        happened = False
        for sample in samples:
            value = float(sample.value)
            if value - value != 0:  # NaN and both infinities
                self.dropped += 1
            elif sample.text is not None or sample.metric == "observed":
                self._file.append(_happening(sample))
                happened = True
            else:
                self._digest(sample, value)
        if self.full_rate or len(self._pending) > MAX_PENDING_DIGESTS:
            self._flush(self._newest_s + 1)
        if self._segment_bytes is not None and self._file.written_bytes > self._segment_bytes:
            self._rotate()
        if happened:  # it may be the last thing that this host says
            self._file.sync_soon()

    def _rotate(self) -> None:
        """The next segment. The disk is waited for by a thread; where no file can be made the old one goes on."""
        old, path = self._file, self._folder / f"samples-{self._lane}.{self._segment + 1}.jsonl"
        try:
            self._file = Appender(path, header(SAMPLES_SCHEMA, lane=self._lane, segment=self._segment + 1), old.sync_s)
        except OSError:
            self._segment_bytes = None
            return
        self._segment += 1
        self._earlier_errors += old.errors
        self._earlier_error = self._earlier_error or old.first_error
        threading.Thread(target=old.close, name=f"close {old.path.name}").start()

    def sync(self) -> None:
        """Writes even the running second, and waits for the disk."""
        self._flush(self._newest_s + 1)
        self._file.sync()

    def sync_soon(self, wait_s: float = 0.0) -> bool:
        """As `Appender.sync_soon`, the running second included."""
        self._flush(self._newest_s + 1)
        return self._file.sync_soon(wait_s)

    def near_guard(self, near: bool) -> None:
        """Near a guard every reading counts: full rate, and at most 0.2 s to lose."""
        self.full_rate = near
        self._file.sync_s = SYNC_NEAR_GUARD_S if near else SYNC_S

    def close(self) -> None:
        self._flush(self._newest_s + 1)
        self._file.close()

    def _digest(self, sample: Sample, value: float) -> None:
        second = sample.at_ns // NS
        if second > self._newest_s:
            self._flush(second)
            self._newest_s = second
        # A reading of an earlier second starts a line of its own: digests of one second may be merged.
        key = (second, sample.monitor, tuple(sorted(sample.labels.items())))
        digest = self._pending.get(key)
        if digest is None:
            digest = self._pending[key] = _Second()
        digest.at_ns = max(digest.at_ns, sample.at_ns)
        of = digest.values.get(sample.metric)
        if of is None:
            digest.values[sample.metric] = [value, value, value, 1.0]
            return
        if value < of[0]:
            of[0] = value
        if value > of[1]:
            of[1] = value
        of[2] = value
        of[3] += 1

    def _flush(self, before_s: int) -> None:
        done = [key for key in self._pending if key[0] < before_s]
        for key in done:
            digest = self._pending.pop(key)
            line: dict[str, object] = {
                "at": digest.at_ns,
                "monitor": key[1],
                "values": {metric: compact(*map(_short, of)) for metric, of in digest.values.items()},
            }
            if key[2]:
                line["labels"] = dict(key[2])
            self._file.append(line)


def compact(low: float, high: float, last: float, n: float) -> float | list[float]:
    """A second of one metric in as few numbers as say it: `v` for one reading, `[v, n]` for n equal ones, else
    `[min, max, last, n]`. Most metrics stand still in most seconds: it halves the files of a night."""
    if not low == high == last:
        return [low, high, last, n]
    return last if n == 1 else [last, n]


def expand(value: float | list[float]) -> tuple[float, float, float, int]:
    """What `compact` wrote, as (min, max, last, n)."""
    if not isinstance(value, list):
        return value, value, value, 1
    if len(value) == 2:
        return value[0], value[0], value[0], int(value[1])
    low, high, last, n = value
    return low, high, last, int(n)


def _happening(sample: Sample) -> dict[str, object]:
    line: dict[str, object] = {
        "at": sample.at_ns,
        "monitor": sample.monitor,
        "metric": sample.metric,
        "value": _short(float(sample.value)),
    }
    if sample.labels:
        line["labels"] = sample.labels
    # A kernel line has 1 KiB, a log line can have anything.
    return {**line, "text": (sample.text or "")[:4000]}


def _short(value: float) -> float:
    """Nine digits are more than any sensor has; whole numbers (bytes, counters) stay whole and lose the `.0`."""
    return int(value) if value.is_integer() else float(f"{value:.9g}")


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(slots=True)
class Damage:
    """What was wrong with one file. Each line that is missing from the evidence is in one of the counts, except those
    that vanished without a trace."""

    missing: int = 0
    unreadable: int = 0
    unknown_schema: int = 0
    torn_lines: int = 0
    long_lines: int = 0
    nul_bytes: int = 0
    malformed: int = 0

    def counts(self) -> dict[str, int]:
        """Those that are not zero."""
        return {name: n for name, n in asdict(self).items() if n}


_NULS = re.compile(rb"\0+")


def read_lines(
    path: Path,
    damage: Damage,
    schema: str | None = None,
    loads: Callable[[bytes], Any] = json.loads,
    needles: Sequence[bytes] = (),
) -> Iterator[Json]:
    """The records of a file, headers left out; never raises for what it finds, and holds one line at a time.

    `schema` is the name that headers must bear ("loadgen.outcomes/1"). A file of another one is counted and not read:
    numbers under a wrong meaning are worse than none. Lines that lack one of `needles` are passed over unparsed (and
    then `damage` does not know of all).
    """
    for line in raw_lines(path, damage):
        if needles and not all(needle in line for needle in needles) and b'"schema"' not in line:
            continue
        try:
            record = loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            damage.torn_lines += 1
        elif "schema" not in record:
            yield record
        elif schema is not None and record["schema"] != schema:
            damage.unknown_schema += 1
            return


def read_header(path: Path) -> Json | None:
    """A file's first header, or None where there is none to be read."""
    for line in raw_lines(path, Damage()):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) and "schema" in record else None
    return None


def raw_lines(path: Path, damage: Damage) -> Iterator[bytes]:
    """Lines that are not empty. A NUL ends a line as a newline does: what stands before a hole and what comes after it
    are read on their own."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        damage.missing += 1
        return
    except OSError:
        damage.unreadable += 1
        return
    rest, skipping = b"", False
    with file:
        while True:
            try:
                block = file.read(READ_BLOCK_BYTES)
            except OSError:  # a bad sector: what came before it is still good
                damage.unreadable += 1
                block = b""
            if not block:
                break
            nuls = block.count(0)
            if nuls:
                damage.nul_bytes += nuls
                block = _NULS.sub(b"\n", block)
            lines = block.split(b"\n")
            lines[0] = rest + lines[0]
            rest = lines.pop()
            for line in lines:
                if skipping:
                    skipping = False
                elif len(line) > MAX_LINE_BYTES:
                    damage.long_lines += 1
                elif line:
                    yield line
            if len(rest) > MAX_LINE_BYTES:
                damage.long_lines += not skipping
                rest, skipping = b"", True
    if rest and not skipping:
        yield rest
