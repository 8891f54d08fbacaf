"""A virtual clock: hours of a soak in seconds, the same every time.

`run(main)` runs a coroutine on a loop whose time jumps to the next timer instead of waiting for it. `VirtualServer`
answers on that clock with the simulated engine's own model, so that an engine under test meets queues, batches and
prefill as it would on the wire, without a wire.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from loadgen.sim import answers, tokens
from loadgen.sim.model import Engine, EngineConfig, Sequence, SimRequest
from loadgen.types import Outcome, Request, Sample

T = TypeVar("T")
S = 1_000_000_000


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting for `timeout`, moves the loop's time by it."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is due and nobody will come")
        self.loop.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_s = 0.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


def now_ns() -> int:
    """The virtual clock, to be handed to whoever would read the real one."""
    return round(asyncio.get_running_loop().time() * S)


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Tape:
    """A recorder that keeps all in memory, for tests."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.samples_: list[Sample] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def outcome(self, o: Outcome) -> None:
        self.outcomes.append(o)

    def samples(self, samples: list[Sample]) -> None:
        self.samples_ += samples

    def event(self, name: str, **fields: object) -> None:
        self.events.append((name, {"at": now_ns(), **fields}))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


class VirtualServer:
    """A sender: `send` takes as long on the virtual clock as the model of an engine says, and answers right."""

    def __init__(self, config: EngineConfig | None = None, seed: int = 1) -> None:
        self.engine = Engine(config or EngineConfig(), seed)
        self.seed = seed
        self.most_at_once = 0
        self.last_token_ns: int | None = None
        self.sent: list[Request] = []
        self._waiting: dict[int, tuple[Sequence, asyncio.Future[str]]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.refuse_from_s: float | None = None
        self.refuse_to_s = 0.0

    async def send(self, request: Request, body: bytes) -> Outcome:
        self.sent.append(request)
        outcome = Outcome(
            id=request.id,
            cls=request.cls,
            phase=request.phase,
            seat=request.seat,
            cache=request.cache,
            outcome="ok",
            due_ns=request.due_ns,
            max_tokens=request.max_tokens,
        )
        now_s = now_ns() / S
        if self.refuse_from_s is not None and self.refuse_from_s <= now_s < self.refuse_to_s:
            outcome.outcome, outcome.error_class, outcome.done_ns = "failed", "connect_refused", now_ns()
            return outcome
        messages = [(m["role"], m["content"]) for m in request.messages]
        reply = answers.reply(
            answers.Prompt(tuple(messages)), self.seed, request.max_tokens, ignore_eos=request.ignore_eos
        )
        count = len(reply.reasoning) + len(reply.content)
        sequence = self.engine.submit(SimRequest(len(tokens.conversation(messages)), count), now_s)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[id(sequence)] = (sequence, done)
        self.most_at_once = max(self.most_at_once, len(self._waiting))
        self._changed.set()
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
        outcome.sent_ns = now_ns()
        word = await done
        if word == "cut":
            outcome.outcome, outcome.error_class, outcome.done_ns = "incomplete", "cancelled", now_ns()
            return outcome
        assert sequence.first_s is not None
        assert sequence.last_s is not None
        outcome.first_ns = outcome.first_output_ns = round(sequence.first_s * S)
        outcome.last_ns = outcome.done_ns = round(sequence.last_s * S)
        outcome.text = "".join(reply.content)
        outcome.finish_reason = reply.finish
        outcome.prompt_tokens, outcome.output_tokens = sequence.request.prompt_tokens, count
        outcome.output_tokens_source = "usage"
        return outcome

    def abort_all(self) -> None:
        for sequence, done in self._waiting.values():
            self.engine.cancel(sequence, now_ns() / S)
            if not done.done():
                done.set_result("cut")
        self._waiting.clear()

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._serve()
        except Exception as error:
            for _, done in self._waiting.values():
                done.set_exception(error)
            raise

    async def _serve(self) -> None:
        while True:
            due_s = self.engine.next_event_s()
            self._changed.clear()
            if due_s is None:
                await self._changed.wait()
                continue
            await asyncio.sleep(max(0.0, due_s - now_ns() / S))
            for emission in self.engine.advance(now_ns() / S):
                self.last_token_ns = round(emission.at_s * S)
                if emission.finished:
                    _, done = self._waiting.pop(id(emission.sequence))
                    done.set_result("done")
