"""An inference engine as a pure model of time and memory: no I/O, no clock, no texts.

Continuous batching as vLLM V1 does it: there is no prefill and no decode, only sequences whose tokens outnumber those
that stand in the KV cache. A step computes some of the missing ones of every running sequence; a sequence with none
missing yields a token (several with speculative decoding). How long a step takes is the whole model of speed:

    step = base + per sequence + per 1,000 KV tokens read + Σ chunk / rate(depth),  rate(d) = rate(0) / (1 + d / D)

The caller says what time it is. `advance` carries out every step that ended by then and says when each token was due;
it does not matter how late or how often it is called. The same seed and the same calls give the same run.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from random import Random
from typing import Literal

MIN_JITTER_FACTOR = 0.2  # however large the jitter, a step takes some time
WATERMARK = 0.01  # vLLM's: the share of blocks that an admission must leave, lest it preempts in the next step


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """What the engine claims, in four parts that behave differently (plus the weights, which never move)."""

    weights_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_reserved: bool = True
    """True: the whole KV cache is claimed at the start, as vLLM does. False: block by block, as llama.cpp can."""
    transient_bytes_per_token: int = 0
    ratchet_bytes_per_token: int = 0
    leak_bytes_per_request: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's size and speed, in its own seconds."""

    context_tokens: int = 32_768
    max_num_seqs: int = 8
    max_queue: int = 1024
    kv_tokens: int = 131_072
    block_tokens: int = 16
    prefix_cache: bool = True
    chunk_tokens: int = 2048
    """vLLM's max_num_batched_tokens: how many tokens one step may compute."""
    prefill_tokens_per_s: float = 20_000.0
    prefill_half_depth_tokens: float = 100_000.0
    """The depth at which prefill runs at half speed."""
    step_ms: float = 6.0
    step_ms_per_seq: float = 0.3
    step_ms_per_1k_kv_tokens: float = 0.02
    jitter: float = 0.03
    spec_acceptance: tuple[float, ...] = ()
    """Chance that the draft at each position is accepted, given that those before were; empty: no speculation."""
    memory: MemoryConfig = MemoryConfig()


@dataclass(frozen=True, slots=True)
class SimRequest:
    """How long a prompt is, how many tokens it will be answered with, and what its full blocks look like."""

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine; the handle that `submit` returns. Only the engine writes it."""

    request: SimRequest
    arrived_s: float
    state: Literal["waiting", "running", "finished", "cancelled"] = "waiting"
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    generated: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    computed: int = 0
    """Tokens of it that stand in the KV cache."""
    private_blocks: int = 0
    hashed_blocks: list[int] = field(default_factory=list)
    registered: int = 0
    """How many of the prompt's full blocks have been offered to the prefix cache."""

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True)
class Emission:
    """`count` tokens of a sequence that left the engine together at `at_s`."""

    sequence: Sequence
    at_s: float
    count: int
    finished: bool


@dataclass(slots=True)
class Counters:
    """What the engine has done since it began; the source of `/metrics`."""

    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    steps: int = 0
    step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Claims:
    """Bytes that the engine claims now, by part."""

    weights: int
    kv: int
    transient: int
    ratchet: int
    leak: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.transient + self.ratchet + self.leak


class Engine:
    """The state of the engine between two calls. Times are seconds of any clock that does not run backwards."""

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        if config.kv_tokens < config.context_tokens:
            raise ValueError("kv_tokens must hold one full context: else one request alone could never be served")
        self.config = config
        self.counters = Counters(accepted_per_position=[0] * len(config.spec_acceptance))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.slow_factor = 1.0
        self.leak_bytes_per_request = config.memory.leak_bytes_per_request
        self.hung = False
        self._random = Random(seed)
        self._blocks = config.kv_tokens // config.block_tokens
        self._free = self._blocks
        self._referenced: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody; the oldest goes first
        self._step: list[tuple[Sequence, int]] = []
        self._step_end_s: float | None = None
        self._stalled_until_s = -math.inf
        self._emitted: list[Emission] = []
        self._largest_tokens = 0
        self._leaked_bytes = 0

    # -- what a caller does

    def submit(self, request: SimRequest, now_s: float) -> Sequence:
        """Queue a request. It must fit the context; who asks for more is turned away before the engine."""
        if request.output_tokens < 1 or request.prompt_tokens < 1:
            raise ValueError("a request has at least one token of prompt and one of output")
        if request.prompt_tokens + request.output_tokens > self.config.context_tokens:
            raise ValueError("prompt and output exceed the context")
        self._run_to(now_s)
        sequence = Sequence(request, now_s)
        self.waiting.append(sequence)
        self._start_if_idle(now_s)
        return sequence

    def cancel(self, sequence: Sequence, now_s: float) -> None:
        """Forget a request whose client is gone. The step in progress is not cut short by it."""
        self._run_to(now_s)
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
        elif sequence.state == "running":
            self.running.remove(sequence)
            self._release(sequence)
        else:
            return
        sequence.state = "cancelled"
        self.counters.cancelled += 1

    def advance(self, now_s: float) -> list[Emission]:
        """Everything that left the engine up to now and was not yet told, in order."""
        self._run_to(now_s)
        emitted, self._emitted = self._emitted, []
        return emitted

    def next_event_s(self) -> float | None:
        """When the step in progress ends; None while there is nothing to do (or nothing gets done)."""
        return None if self.hung else self._step_end_s

    # -- what a fault does

    def stall(self, now_s: float, for_s: float) -> None:
        """Nothing leaves for a while; afterwards all goes on as if the step had taken that long."""
        self._run_to(now_s)
        self._stalled_until_s = max(self._stalled_until_s, now_s + for_s)
        if self._step_end_s is not None:
            self._step_end_s += for_s

    def hang(self, now_s: float) -> None:
        """Accept everything, answer nothing, until `resume`."""
        self._run_to(now_s)
        self.hung = True

    def resume(self, now_s: float) -> None:
        if not self.hung:
            return
        self.hung = False
        if self._step_end_s is not None:
            self._step_end_s = max(self._step_end_s, now_s)
        self._start_if_idle(now_s)

    # -- what one may know

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that running sequences hold; what is only cached counts as free, as in vLLM."""
        return 1.0 - (self._free + len(self._idle)) / self._blocks

    @property
    def blocks(self) -> int:
        return self._blocks

    def claims(self) -> Claims:
        memory = self.config.memory
        held = self._blocks if memory.kv_reserved else self._blocks - self._free
        return Claims(
            weights=memory.weights_bytes,
            kv=held * self.config.block_tokens * memory.kv_bytes_per_token,
            transient=sum(sequence.computed for sequence in self.running) * memory.transient_bytes_per_token,
            ratchet=self._largest_tokens * memory.ratchet_bytes_per_token,
            leak=self._leaked_bytes,
        )

    def check(self) -> None:
        """What must hold between two calls: no block is lost or held twice."""
        private = sum(sequence.private_blocks for sequence in self.running)
        assert self._free + len(self._idle) + len(self._referenced) + private == self._blocks
        assert self._free >= 0
        assert all(sequence.private_blocks == 0 and not sequence.hashed_blocks for sequence in self.waiting)
        assert len(self.running) <= self.config.max_num_seqs
        held: dict[int, int] = {}
        for sequence in self.running:
            for block in sequence.hashed_blocks:
                held[block] = held.get(block, 0) + 1
        assert held == self._referenced
        assert not held.keys() & self._idle.keys()

    # -- steps

    def _run_to(self, now_s: float) -> None:
        while not self.hung and self._step_end_s is not None and self._step_end_s <= now_s:
            at_s = self._step_end_s
            self._end_step(at_s)
            self._begin_step(at_s)

    def _start_if_idle(self, now_s: float) -> None:
        if self._step_end_s is None and not self.hung:
            self._begin_step(now_s)

    def _begin_step(self, at_s: float) -> None:
        """Choose what the step computes (running first, in order of admission, then the head of the queue), and when
        it ends."""
        budget = self.config.chunk_tokens
        step: list[tuple[Sequence, int]] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            chunk = min(budget, sequence.tokens - sequence.computed)
            while not self._grow(sequence, chunk):
                victim = self.running[-1]
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    break
            if sequence.state == "running":
                step.append((sequence, chunk))
                budget -= chunk
                index += 1
        while self.waiting and budget > 0 and not preempted and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            if not self._admit(sequence, at_s):
                break  # first come, first served: nobody overtakes a request that does not fit
            self.waiting.popleft()
            self.running.append(sequence)
            chunk = min(budget, sequence.tokens - sequence.computed)
            if not self._grow(sequence, chunk):
                raise AssertionError("an admitted request must fit")
            step.append((sequence, chunk))
            budget -= chunk
        self._step = step
        self._step_end_s = max(at_s, self._stalled_until_s) + self._duration_s(step) if step else None

    def _duration_s(self, step: list[tuple[Sequence, int]]) -> float:
        config = self.config
        ms = config.step_ms + config.step_ms_per_seq * len(step)
        prefill_s = 0.0
        for sequence, chunk in step:
            if self._decodes(sequence, chunk):
                ms += config.step_ms_per_1k_kv_tokens * sequence.computed / 1000
            else:
                depth = sequence.computed + chunk / 2
                prefill_s += chunk * (1 + depth / config.prefill_half_depth_tokens) / config.prefill_tokens_per_s
        jitter = max(MIN_JITTER_FACTOR, 1 + config.jitter * self._random.gauss(0, 1)) if config.jitter else 1.0
        return (ms / 1000 + prefill_s) * jitter * self.slow_factor

    @staticmethod
    def _decodes(sequence: Sequence, chunk: int) -> bool:
        return chunk == 1 and sequence.generated > 0

    def _end_step(self, at_s: float) -> None:
        self.counters.steps += 1
        for sequence, chunk in self._step:
            if sequence.state != "running":
                continue
            decodes = self._decodes(sequence, chunk)
            sequence.computed += chunk
            self.counters.step_tokens += chunk
            self._register(sequence)
            if sequence.computed < sequence.tokens:
                continue
            self._yield_tokens(sequence, 1 + (self._accepted() if decodes else 0), at_s)
        self._step = []
        self._largest_tokens = max([self._largest_tokens, *(sequence.computed for sequence in self.running)])
        for sequence in [s for s in self.running if s.generated >= s.request.output_tokens]:
            sequence.state = "finished"
            self.running.remove(sequence)
            self._release(sequence)
            self.counters.finished += 1
            self._leaked_bytes += self.leak_bytes_per_request

    def _yield_tokens(self, sequence: Sequence, count: int, at_s: float) -> None:
        count = min(count, sequence.request.output_tokens - sequence.generated)
        if sequence.first_s is None:
            sequence.first_s = at_s
            self.counters.prompt_tokens += sequence.request.prompt_tokens
            self.counters.cached_tokens += sequence.cached_tokens
        sequence.last_s = at_s
        sequence.generated += count
        sequence.computed = sequence.tokens - 1  # accepted drafts are computed already; the newest token is not
        self.counters.generation_tokens += count
        finished = sequence.generated >= sequence.request.output_tokens
        self._emitted.append(Emission(sequence, at_s, count, finished))

    def _accepted(self) -> int:
        """How many drafts of one step pass: a draft counts only if all before it passed."""
        if not self.config.spec_acceptance:
            return 0
        accepted = 0
        for position, chance in enumerate(self.config.spec_acceptance):
            if self._random.random() >= chance:
                break
            accepted += 1
            self.counters.accepted_per_position[position] += 1
        self.counters.drafts += 1
        self.counters.draft_tokens += len(self.config.spec_acceptance)
        self.counters.accepted_tokens += accepted
        return accepted

    # -- the KV cache

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

    def _take(self, count: int) -> bool:
        if count > self._free + len(self._idle):
            return False
        while self._free < count:
            self._idle.popitem(last=False)
            self._free += 1
        self._free -= count
        return True

    def _grow(self, sequence: Sequence, chunk: int) -> bool:
        """Room for the tokens of this step and the drafts that come on top."""
        tokens = sequence.computed + chunk
        if self._decodes(sequence, chunk):
            tokens = min(
                tokens + len(self.config.spec_acceptance),
                sequence.request.prompt_tokens + sequence.request.output_tokens,
            )
        missing = self._blocks_for(tokens) - len(sequence.hashed_blocks) - sequence.private_blocks
        if missing <= 0:
            return True
        if not self._take(missing):
            return False
        sequence.private_blocks += missing
        return True

    def _admit(self, sequence: Sequence, at_s: float) -> bool:
        """Look the prompt up in the prefix cache, and hold what was found if the rest has room."""
        hits = self._hits(sequence)
        revived = sum(1 for block in hits if block in self._idle)
        needed = self._blocks_for(sequence.tokens) - len(hits)
        spare = self._free + len(self._idle) - revived - needed
        if spare < 0 or (self.running and spare < self._blocks * WATERMARK):
            return False
        for block in hits:
            self._idle.pop(block, None)
            self._referenced[block] = self._referenced.get(block, 0) + 1
        sequence.hashed_blocks = list(hits)
        sequence.registered = len(hits)
        sequence.computed = len(hits) * self.config.block_tokens
        sequence.state = "running"
        if sequence.admitted_s is None:
            sequence.admitted_s = at_s
            sequence.cached_tokens = sequence.computed
            if self.config.prefix_cache:
                self.counters.prefix_queries += sequence.request.prompt_tokens
                self.counters.prefix_hits += sequence.computed
        return True

    def _hits(self, sequence: Sequence) -> list[int]:
        if not self.config.prefix_cache:
            return []
        hits: list[int] = []
        # at least the last token is computed: without it there is nothing to sample from
        usable = (sequence.request.prompt_tokens - 1) // self.config.block_tokens
        for block in sequence.request.blocks[:usable]:
            if block not in self._referenced and block not in self._idle:
                break
            hits.append(block)
        return hits

    def _register(self, sequence: Sequence) -> None:
        """Offer the prompt's blocks that are full by now to later requests."""
        if not self.config.prefix_cache:
            return
        full = min(sequence.computed // self.config.block_tokens, len(sequence.request.blocks))
        for block in sequence.request.blocks[sequence.registered : full]:
            if block not in self._referenced and block not in self._idle:  # else a twin was faster; ours stays private
                self._referenced[block] = 1
                sequence.hashed_blocks.append(block)
                sequence.private_blocks -= 1
        sequence.registered = max(sequence.registered, full)

    def _release(self, sequence: Sequence) -> None:
        """Give the blocks back, the tail first: it is the least likely to be asked for again."""
        for block in reversed(sequence.hashed_blocks):
            self._referenced[block] -= 1
            if self._referenced[block] == 0:
                del self._referenced[block]
                self._idle[block] = None
        self._free += sequence.private_blocks
        sequence.hashed_blocks = []
        sequence.private_blocks = 0
        sequence.registered = 0
        sequence.computed = 0

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; all its tokens will be computed again."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = "waiting"
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(sequence)
