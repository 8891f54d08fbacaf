"""The real engine and the real client, kept busy for a count of requests against a scripted server, all times kept.

It wires what an engine shard wires (`loadgen.shard`), but keeps each stream's gaps instead of writing a run folder: a
record has only their summary, and the selftest compares them one by one.
"""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, field
from typing import Any

from loadgen import clock, plugins, strict
from loadgen.client import Client
from loadgen.engine import Engine, watch_health
from loadgen.selftest.truth import (
    Paired,
    Schedule,
    Seen,
    Served,
    chunks_per_s,
    held,
    mean_open,
    pair,
    read_log,
    rid_of,
    seen_of,
)  # fmt: skip
from loadgen.types import Json, Outcome, Request, Sample, Scenario

# The workload that asks for answers of a fixed length; its prompts are short.
WORKLOAD = "generate"
# Waiting for the server's log: it is the server's last task, and 1,000 streams give some 5 MB.
LOG_S = 20.0


class Tape:
    """A recorder that keeps the times of every stream in memory; `kept` bounds how many (None: all, which a caller
    with a bounded count may say)."""

    def __init__(self, kept: int | None = None) -> None:
        self.kept = kept
        self.seen: list[Seen] = []
        self.failed: list[str] = []
        self.outcomes = 0
        self.tokens = 0
        self.times: set[str] = set()

    def outcome(self, o: Outcome) -> None:
        self.outcomes += 1
        self.tokens += o.output_tokens or 0
        if o.times is not None:
            self.times.add(o.times)
        seen = seen_of(o)
        if seen is None:
            self.failed.append(f"{o.id}: {o.error_class} {o.error_message}"[:200])
        elif self.kept is None or len(self.seen) < self.kept:
            self.seen.append(seen)

    def samples(self, samples: list[Sample]) -> None:
        pass

    def event(self, name: str, /, **fields: object) -> None:
        pass


@dataclass(slots=True, repr=False)  # the loop asks for the repr of what its main task returned
class Driven:
    """One load: what both sides saw, and what it cost us. `cpu_s` is of the whole process while load ran."""

    streams: int
    requests: int
    schedule: Schedule
    served: list[Served]
    tape: Tape
    issued: int
    cpu_s: float
    wall_s: float
    connections: int
    server: Json = field(default_factory=dict)

    @property
    def paired(self) -> Paired:
        return pair(self.served, self.tape.seen)

    @property
    def chunks(self) -> int:
        return sum(len(each.sent_ns) for each in self.served)

    @property
    def achieved(self) -> float:
        """Streams that the server truly had open, on average, while all were asked for."""
        return mean_open(self.served, held(self.served, self.streams))

    @property
    def rate_share(self) -> float:
        """Of the chunks a second that the schedule offers to so many streams, while all were asked for."""
        rate_per_s = chunks_per_s(self.served, held(self.served, self.streams))
        return rate_per_s / self.schedule.rate_per_s(self.streams)


def scene(url: str, streams: int, requests: int, schedule: Schedule) -> Scenario:
    """`requests` answers of the schedule's length at `streams` seats, and nothing else."""
    spec = {
        "name": "selftest",
        "target": {"url": url, "model": schedule.model},
        "concurrency": streams,
        "salt": "selftest",
        "classes": {WORKLOAD: {"weight": 1, "options": {"max_tokens": schedule.tokens}}},
        "phases": [{"kind": "measure", "count": requests, "drain": 30}],
    }
    return strict.build(Scenario, spec)


async def drive(
    url: str, streams: int, requests: int, schedule: Schedule, tape: Tape | None = None, kernel_times: bool = True
) -> Driven:
    """Cold start: no connection is open before the first request. The server's log is emptied first, read after."""
    load = scene(url, streams, requests, schedule)
    dialect = plugins.load("dialects", load.target.dialect)

    def connect(connections: int) -> Client:
        return Client(
            load.target, load.limits, dialect, model=schedule.model, headers={}, connections=connections,
            kernel_times=kernel_times,
        )  # fmt: skip

    def encode(request: Request) -> bytes:
        body: bytes = dialect.encode(request, schedule.model, {"rid": rid_of(request.id)})
        return body

    tape = tape or Tape()
    control, client = connect(1), connect(streams)
    engine = Engine(load, sender=client, encode=encode, recorder=tape)
    try:
        await control.get_json("/reset")
        health = asyncio.create_task(watch_health(engine, clock.cpu_ns, lambda: None))
        gc.collect()
        gc.freeze()
        begun_ns, cpu_ns = clock.now_ns(), clock.cpu_ns()
        try:
            await engine.run()
            wall_ns, cpu_ns = clock.now_ns() - begun_ns, clock.cpu_ns() - cpu_ns
        finally:
            health.cancel()
            await asyncio.gather(health, return_exceptions=True)
            await client.close()
            gc.unfreeze()
        answer, server = await _log_of(control, requests), await control.get_json("/stats")
    finally:
        await control.close()
    return Driven(
        streams, requests, schedule, read_log(answer), tape, engine.total.issued, cpu_ns / 1e9, wall_ns / 1e9,
        client.connections_opened, server,
    )  # fmt: skip


async def _log_of(control: Client, requests: int) -> Any:
    """The server logs a request when it has sent its end, which may be a moment after we have read it."""
    for wait_s in (0.0, 0.1, 0.5):
        await asyncio.sleep(wait_s)
        answer = await control.get_json("/log", LOG_S)
        if len(answer["requests"]) >= requests:
            break
    return answer
