"""The HTTP rim of the simulated server: vLLM's endpoints around the engine model, its memory made real, its faults.

One timer follows the engine: at each end of a step it hands out what became due, and each waiting request writes its
tokens, stamping the time just before. What was truly done stands in the truth log, for tests to compare with.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import signal
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Generic, TypeVar

import orjson
from aiohttp import web

from loadgen import clock, strict
from loadgen.sim import answers, faults, wire
from loadgen.sim.config import MIB, Preset
from loadgen.sim.hostroot import FixtureMachine
from loadgen.sim.memory import Ballast, cgroup_limit_bytes
from loadgen.sim.metrics import Meters, render
from loadgen.sim.model import Emission, Engine, Sequence, SimRequest
from loadgen.sim.tokens import block_hashes
from loadgen.types import Json, UserError

MAX_BODY_BYTES = 64 * MIB  # 262,144 words are 1.5 MB; room for media
OFF_LOOP_BYTES = 128 * 1024  # bodies above are read in a thread: 8K words take 2 ms, 262K words 60 ms
MEMORY_PERIOD_S = 0.05
MEMORY_STEP_S = 0.002  # pause between two steps of growing, so that tokens get out in between
MAX_FAULTS = 1000  # told to the admin endpoint in one life


A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Settings:
    """One life of the server: the preset with its scales already overridden, and where its by-products go."""

    preset: Preset
    seed: int = 0
    faults: tuple[faults.Fault, ...] = ()
    truth: Path | None = None
    host_root: Path | None = None
    api_key: str | None = None
    start_ns: int | None = None
    """When the first life began (None: now): faults at a time count from there."""
    ended: int = 0
    """Requests that former lives have ended."""
    fired: frozenset[int] = frozenset()
    """Which faults of the script have happened in former lives."""
    supervised: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """One request between the engine and its connection."""

    asked: wire.Asked
    reply: answers.Reply
    truth: Json
    sequence: Sequence | None = None
    due: deque[Emission] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    stamps: array[int] = field(default_factory=lambda: array("q"))
    counts: array[int] = field(default_factory=lambda: array("q"))
    error_after: int | None = None
    cut_after: int | None = None
    cut_clean: bool = False


@dataclass(slots=True)
class InForce(Generic[A]):
    """A fault that hits requests, and how many it still hits (None: all)."""

    action: A
    left: int | None
    until_s: float = math.inf


@dataclass(slots=True)
class Effects:
    """Faults that are in force."""

    corrupt: InForce[faults.Corrupt] | None = None
    stream_error: InForce[faults.StreamError] | None = None
    truncate: InForce[faults.Truncate] | None = None
    unavailable: InForce[faults.Unavailable] | None = None
    oom_bytes: int = 0
    silent: bool = False
    """The whole machine is wedged: connections are accepted by the kernel and nobody answers, not even `/health`."""


class Server:
    """The engine, its streams and its by-products. `app` is what aiohttp serves."""

    def __init__(self, settings: Settings, tell: Callable[[Json], None] = lambda message: None) -> None:
        self.settings = settings
        self.preset = settings.preset
        self.scale = settings.preset.time_scale
        self.engine = Engine(settings.preset.engine, settings.seed)
        self.meters = Meters()
        self.effects = Effects()
        self.ended = settings.ended
        self.began_ns = clock.now_ns()
        self.start_ns = self.began_ns if settings.start_ns is None else settings.start_ns
        self.leaving = asyncio.Event()
        self._closed = False
        self._tell = tell
        self._streams: dict[Sequence, Stream] = {}
        self._open: set[Stream] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._random = Random(settings.seed)
        self._last_text = ""
        self.fired: list[Json] = []
        self._pending = {index: fault for index, fault in enumerate(settings.faults) if index not in settings.fired}
        self._ballast = Ballast()
        self._machine = (
            None
            if settings.host_root is None
            else FixtureMachine(settings.host_root, self.preset.machine, self.began_ns)
        )
        self._truth_fd: int | None = None
        if settings.truth is not None:
            self._truth_fd = _open_truth(settings.truth)
            self._log({"schema": "loadgen.sim.truth/1", **clock.reading(), **self.identity(), "pid": os.getpid()})
        self.app = self._routes()

    # -- life

    def start(self) -> None:
        """Claim the memory of a loaded model, arm the script, start to follow the time."""
        self._ballast.settle(self._real_bytes())
        self._follow_memory()
        self._follow_machine()
        for index, fault in list(self._pending.items()):
            if fault.at_s is not None:
                self._later(fault.at_s - (clock.now_ns() - self.start_ns) / 1e9 * self.scale, self._fire, index)
        self._fire_counted()

    def close(self) -> None:
        self._closed = True
        for timer in (self._timer, *self._timers):
            if timer is not None:
                timer.cancel()
        for stream in self._open:
            self._end(stream, "shutdown")
        self._open.clear()
        if self._truth_fd is not None:
            os.close(self._truth_fd)
            self._truth_fd = None
        if self._machine is not None:
            self._machine.close()
        self._ballast.close()

    def now_s(self) -> float:
        """The engine's time: seconds since the process began, times the scale."""
        return (clock.now_ns() - self.began_ns) / 1e9 * self.scale

    @property
    def held_bytes(self) -> int:
        """Real memory that the claims fill now."""
        return self._ballast.held_bytes

    def identity(self) -> Json:
        """What must stand beside every number that was made with this server."""
        return {
            "preset": self.preset.name,
            "time_scale": self.preset.time_scale,
            "memory_scale": self.preset.memory_scale,
            "seed": self.settings.seed,
        }

    def _later(self, engine_s: float, call: Callable[..., None], *args: object) -> None:
        """Call after so many seconds of the engine's time."""

        def run() -> None:
            self._timers.discard(timer)
            call(*args)

        timer = asyncio.get_running_loop().call_later(max(0.0, engine_s) / self.scale, run)
        self._timers.add(timer)

    # -- the engine's time

    def _wake(self) -> None:
        """Hand out what is due by now, and come back when the step in progress ends."""
        if self._closed:
            return
        now_s = self.now_s()
        for emission in self.engine.advance(now_s):
            stream = self._streams.get(emission.sequence)
            if stream is None:
                continue
            stream.due.append(emission)
            if stream.waiter is not None and not stream.waiter.done():
                stream.waiter.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self.engine.next_event_s()
        if next_s is not None:
            # whole milliseconds, upwards: loops round there anyway, and to wake early is to wake twice
            wait_s = math.ceil(max(0.0, next_s - now_s) / self.scale * 1000) / 1000
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake)

    async def _next(self, stream: Stream) -> Emission:
        while not stream.due:
            stream.waiter = asyncio.get_running_loop().create_future()
            await stream.waiter
        return stream.due.popleft()

    @property
    def busy(self) -> bool:
        """Is any request being served?"""
        return bool(self._open)

    # -- memory and machine

    def _real_bytes(self) -> int:
        claimed = int(self.engine.claims().total * self.preset.memory_scale)
        return min(claimed, self.preset.memory_limit_mib * MIB) + self.effects.oom_bytes

    def _follow_memory(self) -> None:
        settled = self._ballast.step_towards(self._real_bytes())
        wait_s = MEMORY_PERIOD_S if settled else MEMORY_STEP_S
        self._later(wait_s * self.scale, self._follow_memory)

    def _follow_machine(self) -> None:
        if self._machine is not None:
            self._machine.update(self.engine.claims().total, len(self.engine.running), clock.now_ns())
            self._later(0.1 * self.scale, self._follow_machine)

    # -- faults

    def _fire_counted(self) -> None:
        for index, fault in list(self._pending.items()):
            if fault.after_requests is not None and self.ended >= fault.after_requests:
                self._fire(index)

    def _fire(self, index: int) -> None:
        fault = self._pending.pop(index, None)
        if fault is not None:
            self._tell({"fired": index})
            try:
                self.apply(fault)
            except UserError as error:
                self._log({"event": "fault_refused", "kind": fault.kind, "at_ns": clock.now_ns(), "why": str(error)})

    def apply(self, fault: faults.Fault) -> None:
        """Let a fault happen now. UserError where it must not."""
        self._permit(fault)
        action = fault.action
        now_s = self.now_s()
        happening: Json = {"event": "fault", "kind": fault.kind, "at_ns": clock.now_ns(), **strict.plain(action)}
        self.fired = [*self.fired[-MAX_FAULTS:], happening]
        self._log(happening)
        effects = self.effects
        match action:
            case faults.Crash():
                self._die(action.how, action.restart_after)
            case faults.Restart():
                self._tell(
                    {"ending": "restart", "restart_after": action.restart_after / self.scale, "ended": self.ended}
                )
                self.leaving.set()
            case faults.Hang():
                self.engine.hang(now_s)
                if action.duration is not None:
                    self._later(action.duration, self._resume)
            case faults.Stall():
                self.engine.stall(now_s, action.duration)
            case faults.SlowDown():
                self.engine.slow_factor = action.factor
                if action.duration is not None:
                    self._later(action.duration, self._full_speed)
            case faults.Leak():
                self.engine.leak_bytes_per_request = action.bytes_per_request
            case faults.Corrupt():
                effects.corrupt = InForce(action, action.requests)
            case faults.StreamError():
                effects.stream_error = InForce(action, action.requests)
            case faults.Truncate():
                effects.truncate = InForce(action, action.requests)
            case faults.Unavailable():
                until_s = math.inf if action.duration is None else now_s + action.duration
                effects.unavailable = InForce(action, action.requests, until_s)
            case faults.Oom():
                self._grow_oom(action)
            case faults.Wedge():
                self._wedge(action)
        self._wake()

    def _permit(self, fault: faults.Fault) -> None:
        action = fault.action
        if isinstance(action, faults.Oom) and action.up_to_mib is None and cgroup_limit_bytes() is None:
            raise UserError("oom: no memory cgroup bounds this server: set up_to_mib, or the host goes with it")
        if isinstance(action, faults.Wedge) and self._machine is None:
            raise UserError("wedge: needs the fixture machine: start with --host-root DIR")

    def _resume(self) -> None:
        self.engine.resume(self.now_s())
        self._wake()

    def _full_speed(self) -> None:
        self.engine.slow_factor = 1.0

    def _grow_oom(self, action: faults.Oom) -> None:
        room = math.inf if action.up_to_mib is None else action.up_to_mib * MIB - self.effects.oom_bytes
        step = int(min(action.step_mib * MIB, room))
        if step > 0:
            self.effects.oom_bytes += step
            self._later(action.period, self._grow_oom, action)

    def _wedge(self, action: faults.Wedge) -> None:
        assert self._machine is not None
        self._machine.wedge(action.available_gib, action.collapse / self.scale, action.driver_lines, clock.now_ns())
        self._later(action.collapse, self._fall_silent, action)

    def _fall_silent(self, action: faults.Wedge) -> None:
        assert self._machine is not None
        self._machine.silence(clock.now_ns())
        self.effects.silent = True
        self.engine.hang(self.now_s())
        if action.reboot_after is not None:
            self._later(action.reboot_after, self._reboot, action)

    def _reboot(self, action: faults.Wedge) -> None:
        assert self._machine is not None
        self._machine.reboot(clock.now_ns())
        self._die("kill", action.restart_after)

    def _die(self, how: str, restart_after: float | None) -> None:
        for stream in self._open:
            self._end(stream, "crash")
        pause = None if restart_after is None else restart_after / self.scale
        self._tell({"ending": "crash", "restart_after": pause, "ended": self.ended})
        if how == "exit":
            os._exit(70)
        os.kill(os.getpid(), signal.SIGKILL)

    def _hit(self, force: InForce[A] | None) -> A | None:
        """The fault, if it hits one more request; counts it."""
        if force is None or force.left == 0 or self.now_s() >= force.until_s:
            return None
        if force.left is not None:
            force.left -= 1
        return force.action

    # -- truth

    def _log(self, record: Json) -> None:
        if self._truth_fd is not None:
            os.write(self._truth_fd, orjson.dumps(record) + b"\n")

    def _end(self, stream: Stream, ending: str) -> None:
        """Write what was truly done for one request."""
        sequence = stream.sequence
        done_ns = clock.now_ns()
        truth = stream.truth
        truth["ending"] = ending
        truth["done_ns"] = done_ns
        if sequence is not None:
            truth["cached_tokens"] = sequence.cached_tokens
            truth["preemptions"] = sequence.preemptions
            truth["generated_tokens"] = sequence.generated
            truth["queue_s"] = None if sequence.admitted_s is None else sequence.admitted_s - sequence.arrived_s
        truth["output_tokens"] = sum(stream.counts)
        truth["first_ns"] = stream.stamps[0] if stream.stamps else None
        truth["last_ns"] = stream.stamps[-1] if stream.stamps else None
        truth["chunks_ns"] = list(stream.stamps)
        truth["chunk_tokens"] = list(stream.counts)
        self._log(truth)

    def _measure(self, stream: Stream) -> None:
        """Feed the histograms of `/metrics` with a finished request."""
        sequence = stream.sequence
        if sequence is None or sequence.first_s is None or sequence.last_s is None or sequence.admitted_s is None:
            return
        real = 1 / self.scale
        meters = self.meters
        meters.endings[stream.reply.finish if stream.reply.finish == "length" else "stop"] += 1
        meters.ttft.observe((sequence.first_s - sequence.arrived_s) * real)
        meters.e2e.observe((sequence.last_s - sequence.arrived_s) * real)
        meters.queue.observe((sequence.admitted_s - sequence.arrived_s) * real)
        meters.prefill.observe((sequence.first_s - sequence.admitted_s) * real)
        meters.decode.observe((sequence.last_s - sequence.first_s) * real)
        meters.inference.observe((sequence.last_s - sequence.admitted_s) * real)
        if sequence.generated > 1:
            meters.tpot.observe((sequence.last_s - sequence.first_s) * real / (sequence.generated - 1))
        for before, after in zip(stream.stamps, stream.stamps[1:], strict=False):
            meters.gap.observe((after - before) / 1e9)
        meters.prompt_tokens.observe(sequence.request.prompt_tokens)
        meters.generation_tokens.observe(sequence.generated)
        meters.preemptions.observe(sequence.preemptions)

    # -- HTTP

    def _routes(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.on_response_prepare.append(self._mark)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/sim/truth", self._truth),
                web.post("/sim/fault", self._fault),
            ]
        )
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """What comes before every answer: silence of a wedged machine, the key, and errors in vLLM's words."""
        if self.effects.silent:
            await self.leaving.wait()
        key = self.settings.api_key
        if (
            key is not None
            and request.path.startswith("/v1")
            and request.headers.get("Authorization") != f"Bearer {key}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except wire.Refused as refused:
            return web.Response(status=refused.status, body=refused.body, content_type="application/json")
        except web.HTTPException as error:
            return web.json_response({"detail": error.reason}, status=error.status)

    async def _mark(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "loadgen-sim"
        response.headers["X-Sim-Preset"] = self.preset.name
        response.headers["X-Sim-Time-Scale"] = f"{self.preset.time_scale:g}"
        response.headers["X-Sim-Memory-Scale"] = f"{self.preset.memory_scale:g}"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completions")

    async def _generate(self, request: web.Request, endpoint: wire.Endpoint) -> web.StreamResponse:
        """One request, from its body to its last token."""
        refusal = self._turned_away()
        body = await request.read()
        received_ns = clock.now_ns()
        if refusal is not None:
            self._count_end()
            return refusal
        if len(body) <= OFF_LOOP_BYTES:
            asked, blocks, reply = self._understand(body, endpoint)
        else:
            asked, blocks, reply = await asyncio.to_thread(self._understand, body, endpoint)
        if len(self.engine.waiting) >= self.preset.engine.max_queue:
            self.meters.rejections += 1
            raise wire.Refused(503, "The request queue is full.", "ServiceUnavailable")
        answer_id = f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{self._request_id(request)}"
        truth: Json = {
            "event": "request",
            "request_id": answer_id,
            "path": request.path,
            "stream": asked.stream,
            "body_blake2b": hashlib.blake2b(body, digest_size=8).hexdigest(),
            "received_ns": received_ns,
            "prompt_tokens": len(asked.tokens),
            "max_tokens": asked.max_tokens,
        }
        stream = self._spoilt(asked, reply, truth)
        sequence = self.engine.submit(SimRequest(len(asked.tokens), stream.reply.tokens, blocks), self.now_s())
        truth["submitted_ns"] = clock.now_ns()
        truth["reasoning_tokens"] = len(stream.reply.reasoning)
        truth["finish_reason"] = stream.reply.finish
        stream.sequence = sequence
        self._streams[sequence] = stream
        self._open.add(stream)
        self._wake()
        ending = "cancelled"
        try:
            chunks = wire.Chunks(asked, stream.reply, answer_id, clock.wall_ns() // 10**9, self.preset.model)
            if asked.stream:
                response, ending = await self._stream(request, stream, chunks)
            else:
                response, ending = await self._whole(stream, answer_id)
            return response
        except ConnectionError:
            return web.Response()  # the client is gone: nobody reads this
        finally:
            self._close_stream(stream, sequence, ending)

    def _turned_away(self) -> web.Response | None:
        """The answer of a server that is unavailable, while that fault is in force."""
        fault = self._hit(self.effects.unavailable)
        if fault is None:
            return None
        message = wire.error(
            "The server is overloaded. Please try again later.", "ServiceUnavailable", None, fault.status
        )
        headers = {} if fault.retry_after is None else {"Retry-After": f"{math.ceil(fault.retry_after / self.scale)}"}
        return web.json_response({"error": message}, status=fault.status, headers=headers)

    def _understand(self, body: bytes, endpoint: wire.Endpoint) -> tuple[wire.Asked, tuple[int, ...], answers.Reply]:
        """All that takes time and touches no state: read the prompt, hash it, think of the answer."""
        config = self.preset.engine
        asked = wire.read(body, endpoint, self.preset.model, config.context_tokens)
        blocks = block_hashes(asked.tokens, config.block_tokens) if config.prefix_cache else ()
        reply = answers.reply(
            asked.prompt,
            self.settings.seed,
            min(asked.max_tokens, config.context_tokens - len(asked.tokens)),
            min_tokens=asked.min_tokens,
            ignore_eos=asked.ignore_eos,
            reasoning=self.preset.reasoning_tokens if asked.thinking and asked.endpoint == "chat" else 0,
        )
        return asked, blocks, reply

    def _request_id(self, request: web.Request) -> str:
        """The client's X-Request-Id, as vLLM does, where it is harmless; else one of ours."""
        given = request.headers.get("X-Request-Id", "")
        if given.isascii() and given.replace("-", "").replace(".", "").replace("_", "").isalnum() and len(given) <= 128:
            return given
        return f"{self._random.getrandbits(64):016x}"

    def _spoilt(self, asked: wire.Asked, reply: answers.Reply, truth: Json) -> Stream:
        """The answer as it will go out: spoilt by the faults in force."""
        honest = "".join(reply.content)
        effects = self.effects
        long_enough = effects.corrupt is not None and len(asked.tokens) >= effects.corrupt.action.min_prompt_tokens
        if long_enough and (corrupt := self._hit(effects.corrupt)) is not None:
            truth["corrupted"] = corrupt.how
            reply = answers.corrupted(reply, corrupt.how, asked.prompt, self._last_text, asked.max_tokens)
        self._last_text = honest
        stream = Stream(asked, reply, truth)
        if (error := self._hit(effects.stream_error)) is not None:
            stream.error_after = error.after_tokens
        elif (cut := self._hit(effects.truncate)) is not None:
            stream.cut_after, stream.cut_clean = cut.after_tokens, cut.clean
        return stream

    async def _stream(
        self, request: web.Request, stream: Stream, chunks: wire.Chunks
    ) -> tuple[web.StreamResponse, str]:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"")
        sequence = stream.sequence
        assert sequence is not None
        told = 0
        finished = False
        while not finished:
            emission = await self._next(stream)
            data = b"" if stream.stamps else chunks.opening()
            while True:  # what became due while this task slept leaves in one write
                told += emission.count
                finished = emission.finished
                data += chunks.tokens(
                    emission.count, self._usage(stream, told) if stream.asked.continuous_usage else None
                )
                stream.stamps.append(clock.now_ns())
                stream.counts.append(emission.count)
                if finished or not stream.due or self._breaks(stream, told):
                    break
                emission = stream.due.popleft()
            if stream.error_after is not None and told >= stream.error_after:
                await response.write(data + b"data: " + json.dumps({"error": wire.ENGINE_ERROR}).encode() + b"\n\n")
                await response.write_eof(b"data: [DONE]\n\n")
                return response, "stream_error"
            if stream.cut_after is not None and (told >= stream.cut_after or finished):
                return await self._cut(request, response, stream, b"" if finished else data)
            if not finished:
                await response.write(data)
        used = self._usage(stream, told) if stream.asked.include_usage else None
        await response.write_eof(data + chunks.closing(used))
        return response, "finished"

    @staticmethod
    def _breaks(stream: Stream, told: int) -> bool:
        return any(at is not None and told >= at for at in (stream.error_after, stream.cut_after))

    async def _cut(
        self, request: web.Request, response: web.StreamResponse, stream: Stream, data: bytes
    ) -> tuple[web.StreamResponse, str]:
        await response.write(data)
        if stream.cut_clean:
            await response.write_eof()
        elif request.transport is not None:
            request.transport.close()
        return response, "truncated"

    async def _whole(self, stream: Stream, answer_id: str) -> tuple[web.StreamResponse, str]:
        finished = False
        while not finished:
            emission = await self._next(stream)
            finished = emission.finished
            stream.stamps.append(clock.now_ns())
            stream.counts.append(emission.count)
        if stream.error_after is not None or stream.cut_after is not None:
            return web.json_response({"error": wire.ENGINE_ERROR}, status=500), "stream_error"
        used = self._usage(stream, stream.reply.tokens)
        created = clock.wall_ns() // 10**9
        body = wire.whole(stream.asked, stream.reply, answer_id, created, self.preset.model, used)
        return web.Response(body=body, content_type="application/json"), "finished"

    def _usage(self, stream: Stream, told: int) -> Json:
        assert stream.sequence is not None
        return wire.usage(
            len(stream.asked.tokens), stream.sequence.cached_tokens, told, min(told, len(stream.reply.reasoning))
        )

    def _close_stream(self, stream: Stream, sequence: Sequence, ending: str) -> None:
        self.engine.cancel(sequence, self.now_s())  # without effect on a finished one
        self._streams.pop(sequence, None)
        if ending == "finished":
            self._measure(stream)
        else:
            self.meters.endings["error" if ending == "stream_error" else "abort"] += 1
        if stream in self._open:
            self._open.discard(stream)
            self._end(stream, ending)
        self._wake()
        self._count_end()

    def _count_end(self) -> None:
        self.ended += 1
        if self._pending:
            asyncio.get_running_loop().call_soon(self._fire_counted)

    async def _models(self, request: web.Request) -> web.Response:
        created = clock.wall_ns() // 10**9
        return web.json_response(wire.models(self.preset.model, created, self.preset.engine.context_tokens))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.read()
        return web.json_response(wire.tokenize(body, self.preset.model, self.preset.engine.context_tokens))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.33.0", "simulated": self.identity()})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._wake()
        page = render(self.preset.model, self.engine, self.meters)
        return web.Response(body=page.encode(), headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _truth(self, request: web.Request) -> web.Response:
        """What is really going on, now."""
        self._wake()
        claims = self.engine.claims()
        return web.json_response(
            {
                **self.identity(),
                "pid": os.getpid(),
                "now_ns": clock.now_ns(),
                "start_ns": self.start_ns,
                "began_ns": self.began_ns,
                "engine_s": self.now_s(),
                "requests_ended": self.ended,
                "running": len(self.engine.running),
                "waiting": len(self.engine.waiting),
                "kv_usage": self.engine.kv_usage,
                "claimed_bytes": {**asdict(claims), "total": claims.total},
                "held_bytes": self.held_bytes,
                "counters": asdict(self.engine.counters),
                "faults": self.fired,
            },
            dumps=lambda value: orjson.dumps(value).decode(),
        )

    async def _fault(self, request: web.Request) -> web.Response:
        """`{"kind": "stall", "duration": "5s"}`: as an entry of a script; at once unless `at` or `after_requests`."""
        try:
            fault = faults.fault(orjson.loads(await request.read()), "fault")
            self._permit(fault)
            if fault.after_requests is not None:
                self._later_after(fault)
            elif fault.at_s:
                self._later(fault.at_s, self.apply, fault)
            else:
                asyncio.get_running_loop().call_later(0.01, self.apply, fault)
        except (UserError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"accepted": fault.kind})

    def _later_after(self, fault: faults.Fault) -> None:
        """A fault told now counts requests from now."""
        index = -1 - len(self._pending)
        self._pending[index] = faults.Fault(fault.action, None, self.ended + (fault.after_requests or 0))
        self._fire_counted()


def _open_truth(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"--truth {path}: cannot be written: {error.strerror}") from None
