"""The run folder: written while the run is on, read back by whoever judges it. Nobody else writes there.

One engine shard has one `Recorder`; the supervisor and anyone else with something to tell has a `Journal`; `Run` reads
all of it lazily, whatever state a crash left it in. What a day costs at 1 request/s of 512 streamed tokens in four
classes, measured: 56 MB of outcomes, 65 MB of windows; and of samples 4 MB per metric that is read all the time.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, get_args

import orjson

from loadgen import clock
from loadgen.journal import (
    CLOSE_WAIT_S,
    NS,
    SAMPLES_SCHEMA,
    Appender,
    Damage,
    Reading,
    SampleWriter,
    dumps,
    expand,
    header,
    read_header,
    read_lines,
)
from loadgen.types import (
    Digest,
    Gaps,
    Grade,
    Json,
    Outcome,
    OutcomeWord,
    PhaseKind,
    PhaseSpan,
    Sample,
    Scenario,
    ToolCall,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from loadgen.hist import Hist

JOURNAL_SCHEMA = "loadgen.journal/1"
OUTCOMES_SCHEMA = "loadgen.outcomes/1"

# Ten outcomes a second fill it in seven minutes: longer than any disk that comes back, and at most some hundred MB.
QUEUE_BOUND = 4096
# Events are few and say why the rest is missing: they may still go where outcomes may not.
EVENT_RESERVE = 256
WINDOW_S = 10
# The head of a wrong answer that is kept: enough to see what went wrong, and 86,400 of them are still below 200 MB.
TEXT_CHARS = 2000
MAX_TOOL_CALLS = 8
# Past this many tags (class × cache × metric, by mistake) the window is written early.
MAX_TAGS = 10_000


class Journal:
    """What happened, in the order in which `by` saw it. Several processes may write one journal at once."""

    def __init__(self, folder: Path, by: str, reading: Reading | None = None) -> None:
        self.by = by
        self._file = Appender(folder / "journal.jsonl", header(JOURNAL_SCHEMA, reading))

    @property
    def errors(self) -> int:
        return self._file.errors

    @property
    def first_error(self) -> str | None:
        return self._file.first_error

    def event(self, name: str, /, **fields: object) -> None:
        """One line: now, by us, with these fields (`at` and `wall` among them would replace the clocks). On its way to
        the disk at once, by the file's own thread."""
        self._file.append({"at": clock.now_ns(), "wall": clock.wall_ns(), "by": self.by, "event": name, **fields})
        self._file.sync_soon()

    def sync(self) -> None:
        """Waits until it is on the disk. Before a step that may kill the host."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


_Item: TypeAlias = Outcome | list[Sample] | tuple[str, dict[str, object]]


class Recorder:
    """Writes what one engine shard has to tell. No call but `close` waits for the disk or for a histogram: everything
    is handed to one writer thread through a bounded queue. What overflows is counted in `lost` and told in the journal
    (`records_lost`) as soon as the disk is back; lines that could not be written (a full disk) are told at the end
    (`records_failed`), a fault of the recorder itself at once (`recorder_failed`).

    An outcome handed in belongs to the recorder. Windows are slices of `WINDOW_S` seconds of the outcomes' own time,
    aligned to the monotonic clock, so that those of all shards cover the same slices; `reading` stands in for
    the clocks (a virtual run, a golden run).
    """

    def __init__(self, folder: Path, shard: int, reading: Reading | None = None) -> None:
        self._outcomes = Appender(folder / f"outcomes-{shard}.jsonl", header(OUTCOMES_SCHEMA, reading, shard=shard))
        self._samples = SampleWriter(folder, f"engine-{shard}", reading)
        self._journal = Journal(folder, f"shard-{shard}", reading)
        self._windows = _Windows(folder / f"windows-{shard}.hlog", reading or clock.reading())
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._told = 0
        self.lost = 0
        self.crash: str | None = None
        self._thread = threading.Thread(target=self._write_all, name=f"record shard {shard}", daemon=True)
        self._thread.start()

    @property
    def errors(self) -> int:
        """Lines that could not be written (a full disk), plus records that never reached the writer."""
        files = (self._outcomes, self._samples, self._journal, self._windows.file)
        return self.lost + sum(file.errors for file in files) + (self.crash is not None)

    @property
    def first_error(self) -> str | None:
        files = (self._outcomes, self._samples, self._journal, self._windows.file)
        return self.crash or next((file.first_error for file in files if file.first_error), None)

    def outcome(self, outcome: Outcome) -> None:
        self._put(outcome, QUEUE_BOUND)

    def samples(self, samples: list[Sample]) -> None:
        self._put(samples, QUEUE_BOUND)

    def event(self, name: str, /, **fields: object) -> None:
        """As `Journal.event`, stamped here and written behind."""
        stamped = {"at": clock.now_ns(), "wall": clock.wall_ns(), **fields}
        self._put((name, stamped), QUEUE_BOUND + EVENT_RESERVE)

    def close(self) -> None:
        """Writes all that waits, the running window included, and closes the files."""
        if self._thread.is_alive():
            self._queue.put(None)
        self._thread.join(CLOSE_WAIT_S)
        if self._thread.is_alive():
            self.crash = f"the disk did not answer for {CLOSE_WAIT_S:g} s"
            return
        for file in (self._outcomes, self._samples, self._windows.file):
            file.close()
        failed = self.errors - self.lost
        if failed and self.crash is None:
            self._journal.event("records_failed", n=failed, why=self.first_error)
        self._journal.close()

    def _put(self, item: _Item, bound: int) -> None:
        if self._queue.qsize() >= bound or not self._thread.is_alive():
            self.lost += 1
        else:
            self._queue.put(item)

    def _write_all(self) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=WINDOW_S)
                except queue.Empty:
                    self._windows.flush()  # nothing comes: let the file say what is known
                    continue
                if self.lost > self._told:
                    lost, self._told = self.lost - self._told, self.lost
                    self._journal.event("records_lost", n=lost, bound=QUEUE_BOUND)
                if item is None:
                    break
                if isinstance(item, Outcome):
                    self._outcomes.append_raw(_outcome_line(item))
                    self._windows.add(item)
                elif isinstance(item, list):
                    self._samples.write(item)
                else:
                    self._journal.event(item[0], **item[1])
            self._windows.flush()
        except Exception as error:  # a fault of ours must not take the load down with it; the journal tells
            self.crash = f"the recorder failed: {error!r}"
            self._journal.event("recorder_failed", why=repr(error))


# ---------------------------------------------------------------------------------------------------------------------
# Outcomes as lines

_PLAIN = (
    "id", "cls", "phase", "seat", "cache", "outcome", "due_ns", "error_class", "error_message", "http_status",
    "retry_after_s", "finish_reason", "sent_ns", "first_byte_ns", "first_ns", "first_output_ns", "last_ns", "done_ns",
    "connect_ns", "queue_ns", "chunks", "prompt_tokens", "cached_tokens", "output_tokens", "output_tokens_source",
    "reasoning_tokens", "prompt_tokens_target", "max_tokens", "times", "inexact",
)  # fmt: skip


_WORDS = frozenset(get_args(OutcomeWord))


def _outcome_line(o: Outcome) -> bytes:
    line: Json = {}
    for name in _PLAIN:
        value = getattr(o, name)
        if value is not None and (value or name != "inexact"):
            line[name] = value
    if o.error_message and len(o.error_message) > TEXT_CHARS:
        line["error_message"] = o.error_message[:TEXT_CHARS]
    if o.flags:
        line["flags"] = sorted(o.flags)
    if o.tags:
        line["tags"] = o.tags
    gaps = summarise(o.gaps_ns) or o.gaps
    if gaps is not None:
        line["gaps"] = dataclasses.asdict(gaps)
    if o.grade is not None:
        line["grade"] = dataclasses.asdict(o.grade)
    if o.text:
        line["text_chars"] = len(o.text)
    if o.reasoning_text:
        line["reasoning_chars"] = len(o.reasoning_text)
    if o.outcome != "ok" or (o.grade is not None and not o.grade.ok):
        if o.text:
            line["text"] = o.text[:TEXT_CHARS]
        if o.reasoning_text:
            line["reasoning_text"] = o.reasoning_text[:TEXT_CHARS]
        if o.tool_calls:
            line["tool_calls"] = [
                {"id": call.id, "name": call.name, "arguments": call.arguments[:TEXT_CHARS]}
                for call in o.tool_calls[:MAX_TOOL_CALLS]
            ]
    try:
        return orjson.dumps(line)
    except TypeError:  # a lone surrogate in a server's text, a "usage" of 10³⁰ tokens: a server may send anything
        return dumps(_printable(line))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, int) and value.bit_length() > 63:
        return None
    return value


def summarise(gaps_ns: array[int]) -> Gaps | None:
    """What is kept of a stream's gaps; quantiles at rank ceil(p·n)."""
    n = len(gaps_ns)
    if not n:
        return None
    ordered = sorted(gaps_ns)
    return Gaps(n, sum(ordered), ordered[(n + 1) // 2 - 1], ordered[(95 * n + 99) // 100 - 1], ordered[-1])


def _outcome_of(line: Json) -> Outcome:
    """ValueError, TypeError or KeyError where a line is not an outcome."""
    if type(line["due_ns"]) is not int or not isinstance(line["cls"], str) or line["outcome"] not in _WORDS:
        raise ValueError("not an outcome")
    fields: Json = {name: line[name] for name in _PLAIN if name in line}
    fields["flags"] = set(line.get("flags", ()))
    fields["tags"] = line.get("tags", {})
    fields["text"] = line.get("text", "")
    fields["reasoning_text"] = line.get("reasoning_text", "")
    if "tool_calls" in line:
        fields["tool_calls"] = [ToolCall(**call) for call in line["tool_calls"]]
    if line.get("gaps") is not None:
        fields["gaps"] = Gaps(**line["gaps"])
    if line.get("grade") is not None:
        fields["grade"] = Grade(**line["grade"])
    return Outcome(**fields)


# ---------------------------------------------------------------------------------------------------------------------
# Windows


class _Windows:
    """The running window: one histogram per tag."""

    def __init__(self, path: Path, reading: Reading) -> None:
        # numpy and its users are imported now: this is before the load, the first outcome is not.
        from loadgen import hist, stats

        self._hist, self._stats = hist, stats
        # The base is the start of the first window, so that no line starts before it.
        early_ns = int(reading["mono_ns"] or 0) % (WINDOW_S * NS)
        self._base_ns = int(reading["mono_ns"] or 0) - early_ns
        self._start_ns = self._base_ns
        self._hists: dict[str, Hist] = {}
        self.file = Appender(path, None)
        for line in hist.log_header({"mono_ns": self._base_ns, "wall_ns": int(reading["wall_ns"] or 0) - early_ns}):
            self.file.append_raw(line.encode())

    def add(self, o: Outcome) -> None:
        at_ns = o.done_ns if o.done_ns is not None else o.due_ns
        start_ns = at_ns - at_ns % (WINDOW_S * NS)
        # An outcome of an earlier window (two streams that end together, read in either order) joins the running one.
        if start_ns > self._start_ns or len(self._hists) > MAX_TAGS:
            self.flush()
            self._start_ns = max(start_ns, self._start_ns)
        prefix = f"{self._hist.tag_part(o.phase)}:{self._hist.tag_part(o.cls)}:{o.cache}:"
        for metric, us in self._stats.durations_us(o):
            self._of(prefix + metric).record((us,))
        if o.outcome == "ok" and o.gaps_ns:
            self._of(prefix + "gap").record(self._hist.whole_us(o.gaps_ns))
        if o.lags_ns:  # ours, so of failures too
            self._of(prefix + "lag").record(self._hist.whole_us(o.lags_ns))

    def flush(self) -> None:
        end_ns = self._start_ns + WINDOW_S * NS
        for tag, hist in sorted(self._hists.items()):
            self.file.append_raw(self._hist.log_line(tag, self._start_ns, end_ns, self._base_ns, hist))
        self._hists.clear()

    def _of(self, tag: str) -> Hist:
        found = self._hists.get(tag)
        if found is None:
            found = self._hists[tag] = self._hist.Hist()
        return found


# ---------------------------------------------------------------------------------------------------------------------
# A shard of another machine

# The moments in a line of ours, whatever it records; all else that ends in _ns is a duration.
MOMENTS = frozenset({
    "at", "mono_ns", "due_ns", "sent_ns", "first_byte_ns", "first_ns", "first_output_ns", "last_ns", "done_ns",
})  # fmt: skip
_LOG_HEAD = re.compile(rb"(#\[loadgen\.windows/1 mono_ns=)(\d+)")


def shard_files(shard: int) -> tuple[str, ...]:
    """What one shard writes."""
    return (
        f"outcomes-{shard}.jsonl", f"windows-{shard}.hlog", f"samples-engine-{shard}.jsonl", "journal.jsonl",
        f"stderr-shard-{shard}.txt",
    )  # fmt: skip


class Foreign:
    """The files of a shard that runs elsewhere, appended to here as they come, its moments put into our clock."""

    def __init__(self, folder: Path, shard: int) -> None:
        self._files = {name: Appender(folder / name, None) for name in shard_files(shard)}

    def add(self, name: str, data: bytes, ahead_ns: int) -> None:
        """Whole lines; our clock is `ahead_ns` ahead of the shard's. A window keeps the slices of the shard's clock."""
        file = self._files[name]
        for line in data.splitlines():
            if name.endswith(".jsonl"):
                line = moved(line, ahead_ns)
                if name == "journal.jsonl" and b'"schema"' in line:
                    continue  # ours has a head
            elif name.endswith(".hlog"):
                line = _LOG_HEAD.sub(lambda found: found[1] + b"%d" % (int(found[2]) + ahead_ns), line)
            file.append_raw(line)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def moved(line: bytes, ahead_ns: int) -> bytes:
    """A line with its moments put into a clock that is `ahead_ns` ahead; one that cannot be read stays as it is, and
    the reader will count it."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return line
    if not isinstance(record, dict):
        return line
    for name in MOMENTS & record.keys():
        if isinstance(record[name], int):
            record[name] += ahead_ns
    return orjson.dumps(record)


# ---------------------------------------------------------------------------------------------------------------------
# Whole files


def write_json(folder: Path, name: str, value: object) -> None:
    """Writes a file as a whole or not at all: a reader never sees half of it, nor does a power cut leave half."""
    text = orjson.dumps(value, default=_plain, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    write_bytes(folder, name, text + b"\n")


def write_text(folder: Path, name: str, text: str) -> None:
    """The same for a text (scenario.yaml, report.md)."""
    write_bytes(folder, name, text.encode(errors="backslashreplace"))


def write_bytes(folder: Path, name: str, data: bytes) -> None:
    draft = folder / f".{name}.{os.getpid()}"
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / name)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _plain(value: object) -> object:
    """What orjson leaves to us: subclasses of float (Seconds) and the containers that JSON has no word for."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


# ---------------------------------------------------------------------------------------------------------------------
# A run read back


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one label set over time, as arrays of equal length. `at_ns` is when `last` was read."""

    labels: dict[str, str]
    at_ns: NDArray[np.int64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]
    last: NDArray[np.float64]


class Tag(NamedTuple):
    """What one histogram of an interval log holds."""

    phase: str
    cls: str
    cache: str
    metric: str


class WindowLine(NamedTuple):
    """One histogram of an interval log."""

    tag: Tag
    start_ns: int
    end_ns: int
    hist: Hist


@dataclass(slots=True)
class _Points:
    at_ns: array[int] = field(default_factory=lambda: array("q"))
    min: array[float] = field(default_factory=lambda: array("d"))
    max: array[float] = field(default_factory=lambda: array("d"))
    last: array[float] = field(default_factory=lambda: array("d"))


class Run:
    """A run folder read back. Small files are kept once read; outcomes, samples and windows are read anew each time,
    one at a time. A run that still goes on, or died, reads the same way: `damage` says what is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._damage: dict[str, Damage] = {}

    @cached_property
    def scenario(self) -> Scenario:
        from loadgen import scenario

        return scenario.load(self.folder / "scenario.yaml")

    @cached_property
    def environment(self) -> Json:
        """The fingerprint of client, server and host; empty where there is none."""
        damage = self._damage["environment.json"] = Damage()
        try:
            read = orjson.loads((self.folder / "environment.json").read_bytes())
        except FileNotFoundError:
            damage.missing += 1
        except OSError:
            damage.unreadable += 1
        except ValueError:
            damage.malformed += 1
        else:
            if isinstance(read, dict):
                return read
            damage.malformed += 1
        return {}

    @cached_property
    def journal(self) -> list[Json]:
        """All events in order of time, those without a name or time left out (and counted)."""
        path = self.folder / "journal.jsonl"
        damage = self._damage[path.name] = Damage()
        events = []
        for record in read_lines(path, damage, JOURNAL_SCHEMA, orjson.loads):
            if isinstance(record.get("at"), int) and isinstance(record.get("event"), str):
                events.append(record)
            else:
                damage.malformed += 1
        return sorted(events, key=lambda record: cast(int, record["at"]))

    def events(self, name: str) -> list[Json]:
        return [record for record in self.journal if record["event"] == name]

    @cached_property
    def phases(self) -> tuple[PhaseSpan, ...]:
        """In order of their start. A phase that not every shard ended has no end, but for shards that were lost."""
        spans = []
        lost = {f"shard-{e.get('shard')}" for e in self.events("shard_exit") if e.get("rc") != 0}
        starts: dict[str, list[Json]] = {}
        for start in self.events("phase_start"):
            starts.setdefault(str(start.get("phase")), []).append(start)
        for name, begun in starts.items():
            shards = [by for e in begun if (by := e.get("by")) not in lost] or [e.get("by") for e in begun]
            ends, drains = (
                [e["at"] for e in self.events(what) if str(e.get("phase")) == name and e.get("by") in shards]
                for what in ("phase_end", "phase_drained")
            )
            kind: PhaseKind = begun[0].get("kind", "measure")
            end_ns = max(ends) if len(ends) >= len(shards) else None
            drained_ns = max(drains) if len(drains) >= len(shards) else None
            spans.append(PhaseSpan(name, kind, begun[0]["at"], end_ns, drained_ns))
        return tuple(spans)

    @property
    def interrupted(self) -> str | None:
        """The name of the first signal that ended the run, if one did."""
        signals = self.events("signal")
        return str(signals[0].get("name", "signal")) if signals else None

    @property
    def finished(self) -> bool:
        """Whether the run could say that it ended: false after a kill, a power cut, a lost host."""
        return bool(self.events("run_end"))

    @cached_property
    def end_ns(self) -> int | None:
        """The last moment of which the journal knows."""
        return self.journal[-1]["at"] if self.journal else None

    @property
    def damage(self) -> dict[str, int]:
        """What is wrong with the files: `outcomes-0.jsonl: torn_lines` → 1. Empty is good. Files that nobody has read
        to their end yet are read for it."""
        _ = self.environment, self.journal
        for files, read in (
            ("outcomes-*.jsonl", self.outcomes),
            ("samples-*.jsonl", self.digests),
            ("windows-*.hlog", self.windows),
        ):
            if any(path.name not in self._damage for path in self.folder.glob(files)):
                deque(read(), maxlen=0)
        if not self.shards:
            self._damage["outcomes-0.jsonl"] = Damage(missing=1)
        return {
            f"{name}: {what}": n for name, damage in sorted(self._damage.items()) for what, n in damage.counts().items()
        }

    @property
    def shards(self) -> list[int]:
        """The numbers of the shards that left outcomes."""
        numbers = (path.stem.removeprefix("outcomes-") for path in self.folder.glob("outcomes-*.jsonl"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def clocks(self, name: str = "journal.jsonl") -> Json | None:
        """The clocks at the head of a file: what turns the monotonic times of a run into wall time."""
        return read_header(self.folder / name)

    def outcomes(self) -> Iterator[Outcome]:
        """Shard after shard, each in the order in which its requests ended."""
        for shard in self.shards:
            path, damage = self.folder / f"outcomes-{shard}.jsonl", Damage()
            for line in read_lines(path, damage, OUTCOMES_SCHEMA, orjson.loads):
                try:
                    outcome = _outcome_of(line)
                except (TypeError, ValueError, KeyError):
                    damage.malformed += 1
                else:
                    yield outcome
            self._damage[path.name] = damage

    def digests(self, monitor: str | None = None, metric: str | None = None) -> Iterator[Digest]:
        """What the monitors saw, lane after lane; happenings (with `text`) included. `at_ns` of a digest is its last
        reading, at most a second after its first."""
        # Most lines are of other monitors: they are passed over before they are parsed.
        needles = [dumps(word) for word in (monitor, metric) if word is not None]
        for path in sorted(self.folder.glob("samples-*.jsonl")):
            damage = Damage()
            for line in read_lines(path, damage, SAMPLES_SCHEMA, orjson.loads, needles):
                if monitor is not None and line.get("monitor") != monitor:
                    continue
                try:
                    yield from _digests_of(line, metric)
                except (TypeError, ValueError, KeyError):
                    damage.malformed += 1
            if not needles:
                self._damage[path.name] = damage

    def series(self, monitor: str, metric: str) -> dict[tuple[tuple[str, str], ...], Series]:
        """One metric over time per label set, sorted by time; without happenings."""
        import numpy as np

        points: dict[tuple[tuple[str, str], ...], _Points] = {}
        for digest in self.digests(monitor, metric):
            if digest.text is None:
                of = points.setdefault(tuple(sorted(digest.labels.items())), _Points())
                of.at_ns.append(digest.at_ns)
                of.min.append(digest.min)
                of.max.append(digest.max)
                of.last.append(digest.last)
        found = {}
        for labels, of in sorted(points.items()):
            at_ns = np.array(of.at_ns, np.int64)
            order = np.argsort(at_ns, kind="stable")
            low, high, last = (np.array(values, np.float64)[order] for values in (of.min, of.max, of.last))
            found[labels] = Series(dict(labels), at_ns[order], low, high, last)
        return found

    def observed(self) -> dict[str, tuple[bool, str]]:
        """Per monitor whether it could see, by its last word on it, and why not; one that never said is absent."""
        return self._observed

    @cached_property
    def _observed(self) -> dict[str, tuple[bool, str]]:
        latest: dict[str, Digest] = {}
        for digest in self.digests(metric="observed"):
            if digest.monitor not in latest or digest.at_ns >= latest[digest.monitor].at_ns:
                latest[digest.monitor] = digest
        return {name: (digest.last > 0, digest.text or "") for name, digest in sorted(latest.items())}

    def windows(self) -> Iterator[WindowLine]:
        """The interval histograms, shard after shard, each in order of time."""
        from loadgen.hist import read_log

        for path in sorted(self.folder.glob("windows-*.hlog")):
            damage = Damage()
            for interval in read_log(path, damage):
                parts = interval.tag.split(":")
                if len(parts) == 4:
                    yield WindowLine(Tag(*parts), interval.start_ns, interval.end_ns, interval.hist)
                else:
                    damage.malformed += 1
            self._damage[path.name] = damage


def _digests_of(line: Json, metric: str | None) -> Iterator[Digest]:
    at_ns, monitor, labels = int(line["at"]), str(line["monitor"]), dict(line.get("labels", {}))
    if "values" not in line:
        if metric is None or line["metric"] == metric:
            value = float(line["value"])
            yield Digest(monitor, str(line["metric"]), at_ns, value, value, value, 1, labels, str(line["text"]))
        return
    values = line["values"]
    for name in values if metric is None else (metric,):
        if name in values:
            low, high, last, n = expand(values[name])
            yield Digest(monitor, name, at_ns, float(low), float(high), float(last), n, labels)
