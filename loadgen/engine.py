"""The engine of one shard: fixed seats that keep a server busy, phase after phase, until told to stop.

A seat asks, waits for the whole answer, grades it, records it and asks again: closed loop, constant concurrency. A
request is due the moment its seat is free, so that whatever we need to build and send it shows as `send_lag` and hides
in no latency. What this module leaves out: sending (client), judging (rules), and reading clocks (clock); sending and
time are parameters, so that tests run hours of a soak in seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

from loadgen import clock, mix, plugins, scenario
from loadgen.gate import Start
from loadgen.guard import Word
from loadgen.types import (
    ClassSpec,
    Draw,
    Grade,
    Outcome,
    PhaseSpec,
    Request,
    Sample,
    Scenario,
    Session,
)

T = TypeVar("T")

# How often a functional phase asks each class where the scenario does not say: three right answers in a row are a
# baseline, one may be luck.
FUNCTIONAL_ASKS = 3
# A seat whose request failed at once (a dead server refuses in microseconds) waits before the next: 0.25 s, doubling.
# Bounded so that the return of a restarted server is noticed within 5 s.
QUICK_FAILURE_NS = 100_000_000
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 5.0
# A server's Retry-After is obeyed up to this (design, policy 3).
RETRY_AFTER_MAX_S = 60.0
# Answers longer than this are graded off the loop: graders cost up to 1 ms per 1,000 characters.
GRADE_INLINE_CHARS = 4_000
# Prompts longer than this (about a token per 6 characters) are built and serialised off the loop.
BUILD_INLINE_TOKENS = 4_000
# The seats of a load begin one after the other, 2 ms apart and all within 2 s: hundreds of connections and
# prompts in one turn of the loop would hold up the first tokens of those that began, and requests of one length that
# begin together end together, for ever after.
RAMP_SEAT_S, RAMP_MAX_S = 0.002, 2.0
# After the drain limit our own cut must end every stream: closing sockets takes no longer than this.
CUT_S = 2.0
# The health of the generator: loop lag is probed this often, samples are written once a second.
LAG_PROBE_S, HEALTH_S = 0.05, 1.0
# Answers for which a class is left out after the functional phase: the server says no, or the model cannot.
REFUSALS = frozenset({"context_limit", "http_error"})
CANNOT = frozenset({"wrong", "distractor", "garbage", "malformed", "empty"})


class Sender(Protocol):
    """What the engine needs of a client. `last_token_ns`: when any stream last gave a token; None before the first."""

    @property
    def last_token_ns(self) -> int | None: ...

    async def send(self, request: Request, body: bytes) -> Outcome: ...
    def abort_all(self) -> None: ...


class Recorder(Protocol):
    """What the engine needs of a recorder."""

    def outcome(self, o: Outcome) -> None: ...
    def samples(self, samples: list[Sample]) -> None: ...
    def event(self, name: str, /, **fields: object) -> None: ...


class Stop:
    """A signal's will: `graceful` stops issuing and drains, `now` cuts what runs. Each is sticky."""

    def __init__(self) -> None:
        self.graceful = asyncio.Event()
        self.now = asyncio.Event()

    def press(self) -> None:
        """The first press is graceful, the second is not."""
        (self.now if self.graceful.is_set() else self.graceful).set()


@dataclass(slots=True)
class Tally:
    """Conservation: issued = ok + failed + incomplete + still running, at every moment."""

    issued: int = 0
    ok: int = 0
    failed: int = 0
    incomplete: int = 0

    @property
    def running(self) -> int:
        return self.issued - self.ok - self.failed - self.incomplete

    def count(self, outcome: Outcome) -> None:
        setattr(self, outcome.outcome, getattr(self, outcome.outcome) + 1)

    def fields(self) -> dict[str, int]:
        return {"issued": self.issued, "ok": self.ok, "failed": self.failed, "incomplete": self.incomplete}


class Phase:
    """One running phase: open until the conductor closes it, or its count of cards is dealt."""

    def __init__(self, spec: PhaseSpec, cards: int | None) -> None:
        self.spec = spec
        self.cards_left = cards
        self.open = True
        self.tally = Tally()
        self.dealt = asyncio.Event()
        self.closed = asyncio.Event()
        if cards == 0:  # fewer cards than shards
            self.dealt.set()

    def draw(self) -> bool:
        """Whether one more card may be played."""
        if not self.open or self.cards_left == 0:
            return False
        if self.cards_left is not None:
            self.cards_left -= 1
            if self.cards_left == 0:
                self.dealt.set()
        return True

    def hold(self) -> None:
        """Play no further card; the seats wait for the next phase."""
        self.cards_left = 0

    def close(self) -> None:
        self.open = False
        self.closed.set()


class Book:
    """A class's sessions by item number. Items come in rising order, so skipping ahead is all the access needed."""

    def __init__(self, sessions: Iterator[Session], prompt_tokens: int) -> None:
        self.sessions = sessions
        self.prompt_tokens = prompt_tokens
        self.position = 0

    def session(self, item: int) -> Session:
        while self.position < item:
            next(self.sessions).close()
            self.position += 1
        self.position += 1
        return next(self.sessions)


def apart_s(seats: int) -> float:
    """How long after one seat the next begins."""
    return min(RAMP_SEAT_S, RAMP_MAX_S / seats)


def inline(function: Callable[..., T], *args: Any) -> Awaitable[T]:
    """Call now, for tests on a virtual clock, where a thread's real time would be out of step."""

    async def call() -> T:
        return function(*args)

    return call()


class Engine:
    """Runs a scenario's phases over one sender; `stop` may be pressed from outside.

    With a `gate`, phases begin when it says so, at the same moment in all shards, and end by duration at the same
    moment too; without one each begins when the one before is over.
    """

    def __init__(
        self,
        scene: Scenario,
        *,
        sender: Sender,
        encode: Callable[[Request], bytes],
        recorder: Recorder,
        shard: int = 0,
        shards: int = 1,
        gate: Callable[[int, Collection[str]], Awaitable[Start]] | None = None,
        now_ns: Callable[[], int] = clock.now_ns,
        off_loop: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self.scene = scene
        self.sender = sender
        self.encode = encode
        self.recorder = recorder
        self.shard, self.shards = shard, shards
        self.gate = gate
        self.now_ns = now_ns
        self.off_loop = off_loop
        self.stop = Stop()
        self.free = asyncio.Event()  # a guard may clear it: then nothing is issued
        self.free.set()
        self.aborted = False
        self.servers = count(shard)  # round robin over the servers of the target; shards begin at different ones
        self.total = Tally()
        self.in_flight: Counter[str] = Counter()
        self.classes: dict[str, ClassSpec] = dict(scene.classes)
        self.books = {name: _book(scene, name, spec) for name, spec in scene.classes.items()}
        self.degenerate = plugins.load("graders", "degenerate").grade
        self.graders: dict[str, Callable[[Request, Outcome], Grade]] = {}
        self.shared: Iterator[mix.Card] | None = None
        self.own: dict[str, Iterator[mix.Card]] = {}
        self.counted = 0

    def guard(self, word: Word) -> None:
        """What a guard wants: `hold` issues nothing more, `release` goes on, `abort` cuts what runs and ends the
        phases. Idle seats are nobody's fault then: the journal says from when to when."""
        if self.aborted or word not in ("hold", "release", "abort"):
            return
        self.recorder.event("guard_heeded", word=word, shard=self.shard, running=self.total.running)
        if word == "release":
            self.free.set()
            return
        self.free.clear()
        if word == "abort":
            self.aborted = True
            self.sender.abort_all()
            self.stop.graceful.set()

    async def run(self) -> str:
        """Returns why it ended: `done`, `signal`, `guard`, or `aborted` with its reason in the journal."""
        load: list[PhaseSpec] = []
        for number, spec in enumerate([*self.scene.phases, None]):
            if spec is not None and spec.kind != "functional":
                load.append(spec)  # warm-up flows into measuring without a drain between
                continue
            if load and not self.stop.graceful.is_set():
                await self._load(load, number - len(load))
                load = []
            if self.stop.graceful.is_set():
                break
            if spec is not None:
                await self._functional(spec, number)
        if self.aborted:
            return "guard"
        if self.classes or self.stop.graceful.is_set():
            return "signal" if self.stop.graceful.is_set() else "done"
        if self.shard == 0:
            self.recorder.event("note", text="no class is left to ask")
        return "aborted"

    async def _together(self, number: int) -> int:
        """Waits until phase `number` may begin: when it began, in ns. What the functional phase left out in shard 0 is
        then left out in all."""
        if self.gate is None:
            return self.now_ns()
        asking = asyncio.ensure_future(self.gate(number, [n for n in self.scene.classes if n not in self.classes]))
        await _first(asking, self.stop.graceful.wait())
        if not asking.done() or asking.cancelled():
            return self.now_ns()
        start = asking.result()
        for name in start.left_out:
            self.classes.pop(name, None)
        await _first(asyncio.sleep((start.at_ns - self.now_ns()) / 1e9), self.stop.graceful.wait())
        return start.at_ns

    # -- functional: each class alone, before anything else --------------------------------------------------------

    async def _functional(self, spec: PhaseSpec, number: int) -> None:
        """Asks the items that the load will ask first, under another salt: what was right here was right before. Only
        shard 0 asks; the others wait at their next phase, so that the server is idle but for it."""
        await self._together(number)
        if self.shard != 0 or self.stop.graceful.is_set():
            return
        phase = Phase(spec, None)
        self._announce(phase, 1)
        for name in list(self.classes):
            book = _book(self.scene, name, self.scene.classes[name], salt="functional")
            answers: list[Outcome] = []
            for item in range(spec.count or FUNCTIONAL_ASKS):
                if not self.stop.graceful.is_set():
                    playing = asyncio.create_task(self._session(name, book.session(item), phase, seat=0))
                    await _first(asyncio.wait({playing}), self.stop.graceful.wait())
                    if not playing.done():
                        phase.close()
                        await self._drain([phase], playing)
                    answers += await playing
            if refused := [why for outcome in answers if (why := _cannot(outcome))]:
                why = f"{len(refused)} of {len(answers)} answers: {refused[0]}"
                self.recorder.event("class_left_out", cls=name, why=why, when="functional")
                del self.classes[name]
        self._end(phase)
        self._drained(phase, 0)

    # -- load: all seats busy ----------------------------------------------------------------------------------------

    async def _load(self, specs: list[PhaseSpec], number: int) -> None:
        """Seats live through all phases of `specs`, the first of which is phase `number`; a conductor opens one phase
        after the other under them."""
        begin_ns = await self._together(number)
        if self.stop.graceful.is_set() or not self.classes:
            return
        for name, spec in self.scene.classes.items():
            if name not in self.classes and spec.seats and self.shard == 0:
                self.recorder.event("note", text=f"{spec.seats} reserved seats stay empty: {name} was left out")
        phases = [Phase(s, self._part(s.count)) for s in specs]
        current = [phases[0]]
        dealt = self._deal()
        if not dealt:
            self.recorder.event("note", text="no seat has a class to ask")
            return
        step_s = apart_s(len(dealt))
        seats = [
            asyncio.create_task(self._seat(seat, cards, current, place * step_s))
            for place, (seat, cards) in enumerate(dealt)
        ]
        begun: list[Phase] = []
        try:
            for place, phase in enumerate(phases, number + 1):
                current[0] = phase  # in one stretch with the close below: no seat ever sees a closed phase between two
                begun.append(phase)
                self._announce(phase, len(seats))
                begin_ns = await self._until_over(phase, seats, begin_ns)
                if phase.spec.count is not None and phase is not phases[-1] and not any(s.done() for s in seats):
                    phase.hold()  # shards deal their parts at different speeds: the next phase waits for the slowest
                    begin_ns = await self._together(place)
                self._end(phase)
                if self.stop.graceful.is_set():
                    break
            cut = await self._drain(begun, *seats)
            for phase in begun:
                self._drained(phase, cut[phase])
        finally:
            for seat in seats:
                seat.cancel()
            for result in await asyncio.gather(*seats, return_exceptions=True):
                if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                    raise result

    def _deal(self) -> list[tuple[int, Iterator[mix.Card]]]:
        """A stream of cards for each seat of this shard: reserved seats first, the others share the deck."""
        owners = [name for name, spec in self.scene.classes.items() for _ in range(spec.seats)]
        for name in owners:
            self.own.setdefault(name, _own_cards(name, self.shard, self.shards))
        weights = scenario.mixed_weights(self.classes)
        if weights and self.shared is None:
            # one deck for the whole run: dealt anew for a later load, it would give two shards the same items
            deck = mix.deal(weights, self.scene.seed, self.shard, self.shards)
            self.shared = (card for card in deck if card.cls in self.classes)
        dealt: list[tuple[int, Iterator[mix.Card]]] = []
        for seat in range(self.shard, self.scene.concurrency, self.shards):
            if seat < len(owners):
                if owners[seat] in self.classes:
                    dealt.append((seat, self.own[owners[seat]]))
            elif weights and self.shared is not None:
                dealt.append((seat, self.shared))
        return dealt

    def _part(self, count: int | None) -> int | None:
        """This shard's part of a count: those of the next `count` cards of the whole deck that are its own."""
        if count is None:
            return None
        first, self.counted = self.counted, self.counted + count
        return len(range(self.shard, self.counted, self.shards)) - len(range(self.shard, first, self.shards))

    async def _seat(self, seat: int, cards: Iterator[mix.Card], current: list[Phase], after_s: float) -> None:
        if after_s:
            await asyncio.sleep(after_s)
        quick_failures = 0
        while (phase := current[0]).open:
            if not phase.draw():
                await phase.closed.wait()  # its count is dealt: the conductor turns the page
                continue
            card = next(cards)
            outcomes = await self._session(card.cls, self.books[card.cls].session(card.item), phase, seat)
            last = outcomes[-1] if outcomes else None
            if last is None or last.outcome == "ok":
                quick_failures = 0
                continue
            pause_s = 0.0
            if last.error_class == "rate_limited":
                pause_s = BACKOFF_FIRST_S if last.retry_after_s is None else min(last.retry_after_s, RETRY_AFTER_MAX_S)
            elif last.done_ns is not None and last.done_ns - last.due_ns < QUICK_FAILURE_NS:
                pause_s = min(BACKOFF_FIRST_S * 2.0**quick_failures, BACKOFF_MAX_S)
                quick_failures = min(quick_failures + 1, 10)
            if pause_s and current[0].open:
                await _first(asyncio.sleep(pause_s), self.stop.graceful.wait())

    # -- one session, which is nearly always one request -------------------------------------------------------------

    async def _session(self, name: str, session: Session, phase: Phase, seat: int) -> list[Outcome]:
        """The outcomes of all its turns, as many as the phase stays open for."""
        outcomes: list[Outcome] = []
        due_ns = self.now_ns()
        server = next(self.servers)  # one server for all turns: its prefix cache is what a conversation lives on
        while True:
            request = await self._next_turn(session, outcomes[-1] if outcomes else None, name)
            if not self.free.is_set():
                await self._freed(phase)
                due_ns = self.now_ns()
            if request is None or not phase.open or not self.free.is_set():
                session.close()
                return outcomes
            phase.tally.issued += 1
            self.total.issued += 1
            request.phase, request.seat, request.due_ns = phase.spec.label, seat, due_ns
            request.server = server
            outcome = await self._ask(request)
            self.total.count(outcome)
            phase.tally.count(outcome)
            self.recorder.outcome(outcome)
            outcomes.append(outcome)
            due_ns = self.now_ns()

    async def _freed(self, phase: Phase) -> None:
        """Until the guard lets go, the phase is over, or a stop asks for it."""
        await _first(self.free.wait(), phase.closed.wait(), self.stop.graceful.wait())

    async def _next_turn(self, session: Session, last: Outcome | None, name: str) -> Request | None:
        def turn() -> Request | None:
            try:
                return next(session) if last is None else session.send(last)
            except StopIteration:
                return None

        if self.books[name].prompt_tokens > BUILD_INLINE_TOKENS:
            request: Request | None = await self.off_loop(turn)
            return request
        return turn()

    async def _ask(self, request: Request) -> Outcome:
        self.in_flight[request.cls] += 1
        try:
            if (request.prompt_tokens or 0) > BUILD_INLINE_TOKENS:
                body = await self.off_loop(self.encode, request)
            else:
                body = self.encode(request)
            outcome = _unsent(request, self.now_ns()) if self.aborted else await self.sender.send(request, body)
        finally:
            self.in_flight[request.cls] -= 1
        if self.aborted and outcome.outcome == "incomplete":
            outcome.flags.add("guard")
        if outcome.outcome == "ok":
            if len(outcome.text) + len(outcome.reasoning_text) > GRADE_INLINE_CHARS:
                outcome.grade = await self.off_loop(self._grade, request, outcome)
            else:
                outcome.grade = self._grade(request, outcome)
        return outcome

    def _grade(self, request: Request, outcome: Outcome) -> Grade:
        """The request's own grader, unless the text is degenerate: that is the worse news."""
        general: Grade = self.degenerate(request, outcome)
        general.grader = general.grader or "degenerate"
        if request.grader is None or not general.ok:
            return general
        if request.grader not in self.graders:
            self.graders[request.grader] = plugins.load("graders", request.grader).grade
        own = self.graders[request.grader](request, outcome)
        own.grader = own.grader or request.grader
        return own

    # -- phases ------------------------------------------------------------------------------------------------------

    def _announce(self, phase: Phase, seats: int) -> None:
        self.recorder.event(
            "phase_start",
            phase=phase.spec.label,
            kind=phase.spec.kind,
            concurrency=seats,
            duration_s=phase.spec.duration,
            drain_s=phase.spec.drain,
        )

    def _end(self, phase: Phase) -> None:
        phase.close()
        self.recorder.event("phase_end", phase=phase.spec.label, **phase.tally.fields())

    async def _until_over(self, phase: Phase, seats: list[asyncio.Task[None]], begin_ns: int) -> int:
        """By count, by duration, by a stop; a seat that breaks ends the phase instead of going unnoticed. When it was
        over: where shards keep step, the moment that was due and not when we woke."""
        end_ns = None if phase.spec.duration is None else begin_ns + round(phase.spec.duration * 1e9)
        waits = [
            phase.dealt.wait(),
            self.stop.graceful.wait(),
            asyncio.wait(seats, return_when=asyncio.FIRST_COMPLETED),
        ]
        if end_ns is not None:
            waits.append(asyncio.sleep((end_ns - self.now_ns()) / 1e9))
        await _first(*waits)
        now = self.now_ns()
        return now if self.gate is None or end_ns is None else min(now, end_ns)

    async def _drain(self, phases: list[Phase], *tasks: asyncio.Task[Any]) -> dict[Phase, int]:
        """Wait for what still runs, at most the last phase's drain limit, then cut it; how many were cut per phase."""
        if not all(task.done() for task in tasks):
            limit = phases[-1].spec.drain
            await _first(asyncio.wait(tasks, timeout=limit), self.stop.now.wait())
        cut = {phase: phase.tally.running for phase in phases}
        if not all(task.done() for task in tasks):
            self.sender.abort_all()
            await asyncio.wait(tasks, timeout=CUT_S)
        return cut

    def _drained(self, phase: Phase, cut: int) -> None:
        self.recorder.event("phase_drained", phase=phase.spec.label, cut=cut, **phase.tally.fields())


def _book(scene: Scenario, name: str, spec: ClassSpec, salt: str = "") -> Book:
    module = plugins.load("workloads", spec.workload or name)
    template = scene.calibration.template_tokens if scene.calibration else 0
    draw = Draw(seed=scene.seed, cls=name, salt=f"{scene.salt}{salt}", template_tokens=template)
    options = plugins.options(module, spec.options)
    return Book(module.sessions(options, draw), int(options.prompt_tokens))


def _unsent(request: Request, now_ns: int) -> Outcome:
    """Of a request that was being built when a guard cut all that ran."""
    return Outcome(
        id=request.id, cls=request.cls, phase=request.phase, seat=request.seat, cache=request.cache,
        outcome="incomplete", due_ns=request.due_ns, error_class="cancelled", error_message="cut by us", done_ns=now_ns,
        prompt_tokens_target=request.prompt_tokens, max_tokens=request.max_tokens, tags=request.tags,
    )  # fmt: skip


def _cannot(outcome: Outcome) -> str | None:
    """Why a class is left out after this answer; None where it is not the model's lack of skill."""
    if outcome.outcome == "failed" and outcome.error_class in REFUSALS and (outcome.http_status or 0) < 500:
        return f"refused, {outcome.error_message or outcome.error_class}"
    if outcome.grade is not None and not outcome.grade.ok and outcome.grade.kind in CANNOT:
        return f"model cannot ({outcome.grade.kind}: {outcome.grade.why})"
    return None


def _own_cards(name: str, shard: int, shards: int) -> Iterator[mix.Card]:
    """The cards of a class with seats of its own; the seats of one shard take from one stream."""
    return (mix.Card(name, item) for item in count(shard, shards))


async def _first(*awaitables: Awaitable[Any]) -> None:
    """Return when the first of them is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watch_health(engine: Engine, cpu_ns: Callable[[], int], rss_bytes: Callable[[], int | None]) -> None:
    """The generator's own samples, once a second until cancelled: without them no latency of ours is worth anything."""
    now_ns = engine.now_ns
    own = {"shard": str(engine.shard)} if engine.shards > 1 else {}
    mark_ns, mark_cpu_ns = now_ns(), cpu_ns()
    worst_lag_ns = 0
    while True:
        before = now_ns()
        await asyncio.sleep(LAG_PROBE_S)
        at = now_ns()
        worst_lag_ns = max(worst_lag_ns, at - before - round(LAG_PROBE_S * 1e9))
        if at - mark_ns < HEALTH_S * 1e9:
            continue
        used_ns = cpu_ns()
        values: dict[str, float | None] = {
            "in_flight": engine.total.running,
            "requested_seats": len(range(engine.shard, engine.scene.concurrency, engine.shards)),
            "loop_lag_ms": worst_lag_ns / 1e6,
            "cpu_percent": 100 * (used_ns - mark_cpu_ns) / (at - mark_ns),
            "rss_bytes": rss_bytes(),
            "last_token_age_s": None
            if engine.sender.last_token_ns is None
            else (at - engine.sender.last_token_ns) / 1e9,
            **{f"{word}_total": number for word, number in engine.total.fields().items()},
        }
        samples = [Sample("client", metric, value, at, own) for metric, value in values.items() if value is not None]
        samples += [Sample("client", "in_flight", n, at, {"cls": cls, **own}) for cls, n in engine.in_flight.items()]
        engine.recorder.samples(samples)
        mark_ns, mark_cpu_ns, worst_lag_ns = at, used_ns, 0
