"""Builds run folders for tests: what a run leaves, written by the real Recorder and Journal at times that we choose.

    run = golden.build(tmp_path, outcomes=golden.steady(600), phases=[golden.phase("measure", "measure", 0, 600)])

Times are seconds after `BASE_NS`, the moment that all headers show.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen.journal import SampleWriter
from loadgen.record import Journal, Recorder, Run, write_json, write_text
from loadgen.types import Grade, Outcome, PhaseKind, Sample

BASE_NS = 1_000_000_000_000
WALL_NS = 1_796_000_000_000_000_000
READING: dict[str, int | str | None] = {
    "mono_ns": BASE_NS,
    "boottime_ns": BASE_NS,
    "wall_ns": WALL_NS,
    "boot_id": "0a5e1f6e-0000-4000-8000-000000000001",
}

SCENARIO = """\
name: golden
concurrency: 4
classes:
  chat_short: {weight: 1}
phases:
  - {kind: measure, duration: 600}
"""


def at(seconds: float) -> int:
    """Nanoseconds of the monotonic clock, `seconds` after the run's start."""
    return BASE_NS + round(seconds * 1e9)


@dataclass(frozen=True)
class Phase:
    """A phase and what the journal says of it. Counts that are None are taken from the outcomes."""

    name: str
    kind: PhaseKind
    start_s: float
    end_s: float | None
    drained_s: float | None
    concurrency: int = 4
    counts: dict[str, int] = field(default_factory=dict)


def phase(
    name: str, kind: PhaseKind, start_s: float, end_s: float | None, *, concurrency: int = 4, **counts: int
) -> Phase:
    """Drained when it ends; build a `Phase` for anything else. `counts` replace what the outcomes say."""
    return Phase(name, kind, start_s, end_s, end_s, concurrency, counts)


def outcome(
    k: int,
    due_s: float,
    *,
    ttft_s: float = 0.2,
    tpot_s: float = 0.02,
    tokens: int = 101,
    send_lag_s: float = 0.001,
    cls: str = "chat_short",
    phase: str = "measure",
    grade: Grade | None = None,
    **more: Any,
) -> Outcome:
    """One streamed answer with one token a chunk; any field of Outcome may be given to replace what follows from it."""
    sent, first = at(due_s + send_lag_s), at(due_s + send_lag_s + ttft_s)
    gap = round(tpot_s * 1e9)
    last = first + gap * (tokens - 1)
    fields: dict[str, Any] = {
        "seat": k % 4, "cache": "cold", "outcome": "ok", "http_status": 200, "finish_reason": "stop",
        "due_ns": at(due_s), "sent_ns": sent, "first_byte_ns": first, "first_ns": first, "first_output_ns": first,
        "last_ns": last, "done_ns": last + 100_000, "queue_ns": 0, "gaps_ns": array("q", [gap] * (tokens - 1)),
        "chunks": tokens, "text": "right", "prompt_tokens": 300, "cached_tokens": 0, "output_tokens": tokens,
        "output_tokens_source": "usage", "prompt_tokens_target": 300, "max_tokens": 128,
        "grade": grade or Grade(True, 1.0, "ok", grader="exact"),
    }  # fmt: skip
    return Outcome(id=f"{cls}-{k:06d}", cls=cls, phase=phase, **(fields | more))


def failed(k: int, due_s: float, error_class: str, *, after_s: float = 0.5, **more: Any) -> Outcome:
    """A request that the server failed before its first token."""
    nothing: dict[str, Any] = {
        "outcome": "failed", "error_class": error_class, "error_message": f"{error_class} by the script",
        "http_status": None, "finish_reason": None, "first_byte_ns": None, "first_ns": None, "first_output_ns": None,
        "last_ns": None, "done_ns": at(due_s + after_s), "gaps_ns": array("q"), "chunks": 0, "text": "",
        "prompt_tokens": None, "cached_tokens": None, "output_tokens": None, "output_tokens_source": None,
    }  # fmt: skip
    made = outcome(k, due_s, **(nothing | more))
    made.grade = more.get("grade")
    return made


def incomplete(k: int, due_s: float, *, cut_s: float, **more: Any) -> Outcome:
    """A request that we cut."""
    return failed(k, due_s, "cancelled", after_s=cut_s - due_s, **({"outcome": "incomplete"} | more))


def steady(seconds: float, *, seats: int = 4, think_s: float = 0.0, **more: Any) -> list[Outcome]:
    """Seats that are busy all the time: each next request is due when the seat's last one is done."""
    made: list[Outcome] = []
    free_s = [0.0] * seats
    while min(free_s) < seconds:
        seat = free_s.index(min(free_s))
        one = outcome(len(made), free_s[seat], seat=seat, **more)
        free_s[seat] = ((one.done_ns or one.due_ns) - BASE_NS) / 1e9 + think_s
        made.append(one)
    return sorted(made, key=lambda o: o.done_ns or 0)


def sample(monitor: str, metric: str, value: float, at_s: float, text: str | None = None, **labels: str) -> Sample:
    return Sample(monitor, metric, value, at(at_s), labels, text)


def series(monitor: str, metric: str, values: Iterable[float], *, step_s: float = 1.0, **labels: str) -> list[Sample]:
    """One reading each `step_s`, from the start of the run."""
    return [sample(monitor, metric, value, k * step_s, **labels) for k, value in enumerate(values)]


def build(
    folder: Path,
    *,
    outcomes: Sequence[Outcome] = (),
    phases: Sequence[Phase] = (),
    samples: Sequence[Sample] = (),
    events: Sequence[tuple[float, str, dict[str, object]]] = (),
    lane: str = "fast",
    shards: int = 1,
    scenario: str | None = SCENARIO,
    environment: dict[str, object] | None = None,
    reason: str | None = "done",
) -> Run:
    """Writes the folder and opens it. Outcome k goes to shard k mod `shards`; samples of the monitor "client" go to the
    shards' own lane, all others to `lane`; `events` are (seconds, name, fields) by the supervisor. `reason` None: a run
    that was killed, without a run_end."""
    folder.mkdir(parents=True, exist_ok=True)
    if scenario is not None:
        write_text(folder, "scenario.yaml", scenario)
    write_json(folder, "environment.json", READING if environment is None else environment)
    lines = [(0.0, "supervise", "run_start", {"scenario": "golden", "concurrency": 4})]
    lines += [(at_s, "supervise", name, dict(fields)) for at_s, name, fields in events]
    for one in phases:
        lines += _phase_events(one, outcomes, shards)
    end_s = max([line[0] for line in lines], default=0.0)
    if reason is not None:
        lines.append((end_s, "supervise", "run_end", {"reason": reason}))
    journals = {by: Journal(folder, by, READING) for by in ["supervise", *(f"shard-{k}" for k in range(shards))]}
    for at_s, by, name, fields in sorted(lines, key=lambda line: line[0]):
        journals[by].event(name, **{"at": at(at_s), "wall": WALL_NS + round(at_s * 1e9), **fields})
    for journal in journals.values():
        journal.close()
    for shard in range(shards):
        recorder = Recorder(folder, shard, READING)
        for k, o in enumerate(outcomes):
            if k % shards == shard:
                recorder.outcome(o)
        if shard == 0:
            recorder.samples([s for s in samples if s.monitor == "client"])
        recorder.close()
        assert recorder.errors == 0, recorder.first_error
    writer = SampleWriter(folder, lane, READING)
    writer.write(sorted((s for s in samples if s.monitor != "client"), key=lambda s: s.at_ns))
    writer.close()
    return Run(folder)


def _phase_events(
    one: Phase, outcomes: Sequence[Outcome], shards: int
) -> list[tuple[float, str, str, dict[str, object]]]:
    lines: list[tuple[float, str, str, dict[str, object]]] = []
    for shard in range(shards):
        by = f"shard-{shard}"
        mine = [o for k, o in enumerate(outcomes) if k % shards == shard and o.phase == one.name]
        words = Counter(o.outcome for o in mine)
        counts: dict[str, object] = {"issued": len(mine), "ok": words["ok"], "failed": words["failed"]}
        counts |= {"incomplete": words["incomplete"], **one.counts}
        seats = one.concurrency // shards
        lines.append((one.start_s, by, "phase_start", {"phase": one.name, "kind": one.kind, "concurrency": seats}))
        if one.end_s is not None:
            lines.append((one.end_s, by, "phase_end", {"phase": one.name, **counts}))
        if one.drained_s is not None:
            drained = {"phase": one.name, **counts, "cut": words["incomplete"]}
            lines.append((one.drained_s, by, "phase_drained", drained))
    return lines


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Every line of every jsonl file, strictly: what a foreign reader would see."""
    paths = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]
