"""How shards begin a phase together: each says READY, the supervisor answers when all have, with one time for all.

They talk in lines of JSON over the shard's own pipes, or over whatever carries these to another machine:

    shard → supervisor   {"ready": 2, "left_out": ["vision"]}
    supervisor → shard   {"start": 2, "at_ns": 81234567890, "left_out": ["vision"]}
    supervisor → shard   {"guard": "hold"}, or "release", or "abort" (see `loadgen.guard`)

The numbers are those of the scenario's phases. `Gate` is the shard's end; `Barrier` decides at the other end, purely;
`Shard` and `Crew` are what the supervisor asks of whoever runs shards, here or elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from loadgen.guard import Word
from loadgen.types import Json

# A line of either side names a phase and some classes.
MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Start:
    """Phase `phase` begins at `at_ns` of the shard's monotonic clock, without the classes in `left_out`."""

    phase: int
    at_ns: int
    left_out: tuple[str, ...] = ()

    def line(self) -> bytes:
        return orjson.dumps({"start": self.phase, "at_ns": self.at_ns, "left_out": self.left_out}) + b"\n"


def guard_line(word: Word) -> bytes:
    return orjson.dumps({"guard": word}) + b"\n"


class Gate:
    """A shard's end. Call it to be told when a phase begins; feed what the supervisor says to `hear`."""

    def __init__(self, say: Callable[[bytes], Any]) -> None:
        self.say = say
        self._came: asyncio.Queue[Start] = asyncio.Queue()

    async def __call__(self, phase: int, left_out: Collection[str]) -> Start:
        self.say(orjson.dumps({"ready": phase, "left_out": list(left_out)}) + b"\n")
        while (start := await self._came.get()).phase != phase:
            pass  # an answer that came too late for a phase that a stop has ended
        return start

    def hear(self, line: bytes) -> None:
        said = parsed(line)
        if "start" in said:
            self._came.put_nowait(Start(int(said["start"]), int(said["at_ns"]), tuple(said["left_out"])))


def parsed(line: bytes) -> Json:
    """What a line says; nothing where it is no line of ours (a plug-in that prints)."""
    try:
        said = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


@dataclass(frozen=True, slots=True)
class Exit:
    """How a shard ended: code None where nobody could say, with the reason in `text`."""

    rc: int | None
    text: str | None = None


class Shard(Protocol):
    """An engine process, here or on another machine; `about` says which. No call waits."""

    number: int
    about: Json

    def heard(self) -> list[bytes]:
        """What it has said since the last call."""

    def begin(self, start: Start) -> None:
        """Say when a phase begins, in our clock."""

    def guard(self, word: Word) -> None:
        """Pass on what a guard wants."""

    def stop(self) -> None:
        """Gracefully; the second time at once."""

    def lose(self, why: str) -> None:
        """Give it up."""

    def exit(self) -> Exit | None:
        """None while it runs."""


class Crew(Protocol):
    """Whoever runs the shards, on so many machines. A phase begins `lead_s` after the last READY."""

    lead_s: float
    machines: int

    def start(self, folder: Path, shards: int, headers: dict[str, str]) -> Sequence[Shard]: ...
    def end(self, wait_s: float) -> None: ...


@dataclass(slots=True)
class Barrier:
    """Which phase may begin. A shard that is gone is waited for no longer."""

    alive: set[int]
    waiting: dict[int, int] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)

    def hear(self, shard: int, line: bytes) -> bool:
        """Whether the line was a READY."""
        said = parsed(line)
        if shard not in self.alive or not isinstance(said.get("ready"), int):
            return False
        self.waiting[shard] = said["ready"]
        self.left_out.update(said.get("left_out", ()))
        return True

    def gone(self, shard: int) -> None:
        self.alive.discard(shard)
        self.waiting.pop(shard, None)

    def open(self) -> tuple[int, list[int]] | None:
        """The next phase and who begins it, once every living shard waits. One that waits for a later phase (none of
        its seats has a class to ask in this one) is let wait."""
        if not self.alive or self.waiting.keys() != self.alive:
            return None
        phase = min(self.waiting.values())
        shards = sorted(shard for shard, waits_for in self.waiting.items() if waits_for == phase)
        for shard in shards:
            del self.waiting[shard]
        return phase, shards
