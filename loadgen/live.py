"""The live view: reads what the run's processes have written so far and shows it. It shares nothing but their files.

`Progress` follows the run folder; `table` and `line` turn what it knows into a screen or a plain line. Losing the view
loses nothing: it holds no evidence.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.hist import Hist
from loadgen.journal import expand
from loadgen.types import Json

# Tokens per second are those of answers that ended within this.
RATE_WINDOW_NS = 30_000_000_000
# What a terminal has room for.
EVENTS_SHOWN = 5
# One look never reads more than this of one file: a view that fell behind catches up over several looks.
READ_LIMIT_BYTES = 4 << 20
GIB = 1 << 30

# Journal events worth a line, and what to say of them.
_TOLD = {
    "phase_start": "{phase} began",
    "class_left_out": "{cls} left out: {why}",
    "signal": "{name}: stopping, press again to stop at once",
    "lane_exit": "the {lane} monitors ended with code {rc}",
    "shard_exit": "engine {shard} is lost: {text}",
    "note": "{text}",
    "guard": "guard, {word}: {why}",
}
# Calm bookkeeping of monitors, no news.
_QUIET = frozenset({"observed", "process_new", "before_run", "boot_id"})


@dataclass(slots=True)
class ClassProgress:
    done: int = 0
    failed: int = 0
    wrong: int = 0
    in_flight: int = 0
    left_out: bool = False
    ttft: Hist = field(default_factory=Hist)
    tokens: deque[tuple[int, int]] = field(default_factory=deque)

    def tokens_per_s(self, now_ns: int) -> float:
        while self.tokens and self.tokens[0][0] < now_ns - RATE_WINDOW_NS:
            self.tokens.popleft()
        return sum(n for _, n in self.tokens) / (RATE_WINDOW_NS / 1e9)


@dataclass(slots=True)
class Progress:
    """What can be seen of a run so far. `look()` reads what is new."""

    folder: Path
    phase: str = "starting"
    phase_start_ns: int = 0
    phase_duration_s: float | None = None
    seats: int = 0
    draining: bool = False
    drain_s: float = 0.0
    drain_start_ns: int = 0
    classes: defaultdict[str, ClassProgress] = field(default_factory=lambda: defaultdict(ClassProgress))
    now: dict[str, float] = field(default_factory=dict)
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    events: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    last_done_ns: int | None = None
    last_ok_ns: int | None = None
    ended: bool = False
    _offsets: dict[Path, int] = field(default_factory=dict)
    # What each shard has, added up for the eye: seats by shard, requests in flight by class ("" is all) and shard.
    _seats: dict[str, int] = field(default_factory=dict)
    _flying: dict[tuple[str, str], float] = field(default_factory=dict)

    def look(self) -> None:
        for path in sorted(self.folder.glob("*.jsonl")):
            for record in self._new(path):
                if path.name.startswith("outcomes-"):
                    self._outcome(record)
                elif path.name.startswith("samples-"):
                    self._sample(record)
                else:
                    self._event(record)

    def _new(self, path: Path) -> list[Json]:
        """The complete lines since the last look; a line that is still being written is left for the next."""
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(READ_LIMIT_BYTES)
        end = data.rfind(b"\n") + 1
        self._offsets[path] = offset + end
        records = []
        for line in data[:end].splitlines():
            try:
                records.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                continue  # the judge counts damage; a view only skips it
        return records

    def _outcome(self, record: Json) -> None:
        if "outcome" not in record:
            return
        about = self.classes[record["cls"]]
        at = int(record.get("done_ns") or record["due_ns"])
        self.last_done_ns = max(self.last_done_ns or 0, at)
        if record["outcome"] == "failed":
            about.failed += 1
            why = f"{record['cls']} failed: {record.get('error_class')}"
            if not self.events or self.events[-1][1] != why:
                self.events.append((at, why))
        if record["outcome"] != "ok":
            return
        about.done += 1
        self.last_ok_ns = max(self.last_ok_ns or 0, at)
        grade = record.get("grade")
        if grade is not None and not grade["ok"]:
            about.wrong += 1
        if record.get("first_ns") is not None and record.get("sent_ns") is not None:
            about.ttft.record([(record["first_ns"] - record["sent_ns"]) // 1000])
        if record.get("output_tokens"):
            about.tokens.append((at, record["output_tokens"]))

    def _sample(self, record: Json) -> None:
        monitor = record.get("monitor")
        if "metric" in record:
            told = monitor == "guard" and record["metric"] != "warn"  # by the journal, once it acts
            if record["metric"] not in _QUIET and not told:
                text = record.get("text") or ""
                self.events.append((record["at"], f"{monitor}: {record['metric']} {text}".rstrip()))
            return
        labels = record.get("labels", {})
        for metric, value in record.get("values", {}).items():
            low, high, last, _ = expand(value)
            if monitor == "client" and metric == "in_flight":
                self._flying[labels.get("cls", ""), labels.get("shard", "")] = last
                self._add_up()
                continue
            key = f"{monitor}.{metric}"
            self.now[key] = last
            self.low[key] = min(low, self.low.get(key, low))
            self.high[key] = max(high, self.high.get(key, high))

    def _event(self, record: Json) -> None:
        kind = record.get("event", "")
        if kind == "phase_start":
            if record["phase"] != self.phase:
                self._seats.clear()
            elif self._seats:
                kind = "phase_start_too"  # of another shard: no news
            self._seats[record.get("by", "")] = record.get("concurrency", 0)
            self.phase, self.phase_start_ns = record["phase"], record["at"]
            self.phase_duration_s = record.get("duration_s")
            self.seats = sum(self._seats.values())
            self.drain_s, self.draining = record.get("drain_s") or 0.0, False
        elif kind == "shard_exit":
            for cls, shard in [key for key in self._flying if key[1] == str(record.get("shard"))]:
                self._flying[cls, shard] = 0
            self._add_up()
        elif kind == "phase_end" and record.get("phase") == self.phase:
            self.draining, self.drain_start_ns = True, record["at"]
        elif kind == "class_left_out":
            self.classes[record["cls"]].left_out = True
        self.ended = self.ended or kind == "run_end"
        if kind in _TOLD and not (kind.endswith("_exit") and record.get("rc") == 0):
            self.events.append((record["at"], _TOLD[kind].format_map(defaultdict(str, record))))

    def _add_up(self) -> None:
        sums: dict[str, float] = defaultdict(float)
        for (cls, _), number in self._flying.items():
            sums[cls] += number
        for cls, number in sums.items():
            if cls:
                self.classes[cls].in_flight = int(number)
            else:
                self.now["client.in_flight"] = number

    def left_s(self, now_ns: int) -> float | None:
        """Of the phase, or of its drain; None where a phase ends by count."""
        if self.draining:
            return max(0.0, self.drain_s - (now_ns - self.drain_start_ns) / 1e9)
        if self.phase_duration_s is None:
            return None
        return max(0.0, self.phase_duration_s - (now_ns - self.phase_start_ns) / 1e9)


def clock_text(seconds: float | None) -> str:
    """`9:59`, `1:00:00`; nothing where there is no end to count to."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _phase_text(progress: Progress, now_ns: int) -> str:
    left = clock_text(progress.left_s(now_ns))
    if progress.draining:
        return f"{progress.phase}: draining" + (f", cut in {left}" if left else "")
    return f"{progress.phase}" + (f", {left} left" if left else "")


def _ms(us: int | None) -> str:
    return "-" if us is None else f"{us / 1000:,.0f}"


def _machine(progress: Progress) -> list[str]:
    """Memory, swap, GPU and temperature now, with what was worst so far. Only what is observed."""
    texts = []
    now, low, high = progress.now, progress.low, progress.high
    for key, name in (
        ("host.mem_available_bytes", "available"),
        ("host.mem_free_bytes", "free"),
        ("nvidia.memory_free_bytes", "GPU free"),
    ):
        if key in now:
            texts.append(f"{name} {now[key] / GIB:.1f} GiB (low {low[key] / GIB:.1f})")
    if (rate := now.get("host.pswpout_pages_per_s")) is not None and high["host.pswpout_pages_per_s"] > 0:
        texts.append(f"swap out {rate:.0f} pages/s (high {high['host.pswpout_pages_per_s']:.0f})")
    for key in ("nvidia.temperature_c", "thermal.temperature_c"):
        if key in now:
            texts.append(f"{now[key]:.0f} °C (high {high[key]:.0f})")
            break
    if (waiting := now.get("engine.requests_waiting")) is not None:
        texts.append(f"server running {now.get('engine.requests_running', 0):.0f}, waiting {waiting:.0f}")
    return texts


def table(progress: Progress, title: str, now_ns: int) -> RenderableType:
    """The whole screen."""
    flying = progress.now.get("client.in_flight", 0)
    head = Text.assemble((title, "bold"), f"   {_phase_text(progress, now_ns)}   seats {flying:.0f}/{progress.seats}")
    grid = Table(box=None, pad_edge=False)
    grid.add_column("class")
    for name in ("now", "done", "failed", "wrong", "TTFT p50 ms", "p95 ms", "tokens/s"):
        grid.add_column(name, justify="right")
    for name, about in sorted(progress.classes.items()):
        failed = Text(str(about.failed), "bold red" if about.failed else "")
        wrong = Text(str(about.wrong), "bold red" if about.wrong else "")
        p50, p95 = about.ttft.quantile(0.5), about.ttft.quantile(0.95)
        rate = f"{about.tokens_per_s(now_ns):,.1f}"
        name = f"{name} (left out)" if about.left_out else name
        grid.add_row(name, str(about.in_flight), str(about.done), failed, wrong, _ms(p50), _ms(p95), rate)
    parts: list[RenderableType] = [head, grid, Text(", ".join(_machine(progress)), "cyan")]
    if progress.last_done_ns is not None and (age_s := (now_ns - progress.last_done_ns) / 1e9) > 10:
        parts.append(Text(f"no answer ended for {age_s:.0f} s", "yellow"))
    for at, text in progress.events:
        parts.append(
            Text(f"{clock_text((now_ns - at) / 1e9):>7} ago  {text}", "dim", overflow="ellipsis", no_wrap=True)
        )
    return Group(*parts)


def line(progress: Progress, now_ns: int) -> str:
    """The same on one line, for a log."""
    done = sum(c.done for c in progress.classes.values())
    failed = sum(c.failed for c in progress.classes.values())
    rate = sum(c.tokens_per_s(now_ns) for c in progress.classes.values())
    texts = [
        _phase_text(progress, now_ns),
        f"{progress.now.get('client.in_flight', 0):.0f}/{progress.seats} in flight",
        f"{done} done, {failed} failed",
        f"{rate:,.1f} tokens/s",
        *_machine(progress)[:2],
    ]
    if progress.events and now_ns - progress.events[-1][0] < 10e9:
        texts.append(progress.events[-1][1])
    return " | ".join(texts)
