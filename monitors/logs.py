"""The server's own log while it runs: what it says of itself at the start, and the lines that say that it is dying.

An engine that dies tells the client nothing but a cut stream; the reason stands in its log. Lines are not kept: they
are counted, start-up facts become figures, and lines that mean something become happenings, with secrets taken out.
What the log held when the run began is read once; its facts bear the label `before_run`, its fatal lines are counted.

One of three sources: a file (`path`; rotation and truncation are followed), a container (`container`, over the Docker
socket, which is as good as root: hence only when asked for), or a systemd unit (`unit`, through journalctl).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from loadgen import clock
from loadgen.types import Json, Lane, Sample, Seconds

if TYPE_CHECKING:
    import asyncio

LANE: Lane = "slow"
PERIOD_S = 1.0

EARLIER_BYTES = 8 << 20  # of what the log held before: a start-up is 100 KB to 2 MB; of a file this much at each end
MAX_TICK_BYTES = 4 << 20  # read in one tick: 4 MB/s, of which none of these servers writes a tenth
MAX_BACKLOG_BYTES = 16 << 20  # behind by more than this, the middle is passed over and counted
MAX_LINE_BYTES = 2000  # looked at around a word that means something: one line may be a whole request
MAX_REST_BYTES = 1 << 16  # of a line without an end
MAX_TEXT_CHARS = 500
MIN_SECRET_CHARS = 8  # a header value that is shorter is a word, and would be struck out of every line
MAX_LOOKS = 2000  # per word and tick: past it hits are counted, not looked at
MAX_SAME_EVENTS = 20  # of one kind a tick, as in `kernel`; the rest is one sample with its count
MAX_TOLD_EVENTS = 200  # of one kind a run: afterwards only counts
MAX_SAME_FACTS = 64  # each rank of a large model says the same of itself
RETRY_S = 5.0  # a stream that ended is asked for again: the server may come back
ASK_LIMIT_S = 5.0
GIB, MIB = 1 << 30, 1 << 20

Severity = Literal["fail", "high", "warn", "info"]


# ---------------------------------------------------------------------------------------------------------------------
# What lines mean. Words that must stand in the line come first: only lines that have one meet a regular expression.


@dataclass(frozen=True, slots=True)
class Signal:
    """A line that means something. Named groups of the pattern become labels."""

    name: str
    severity: Severity
    meaning: str
    words: tuple[bytes, ...]
    pattern: re.Pattern[bytes]


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure of the start-up: the sum of the pattern's groups, times `scale`."""

    metric: str
    word: bytes
    pattern: re.Pattern[bytes]
    scale: float = 1.0


def _signal(name: str, severity: Severity, meaning: str, words: Sequence[str], pattern: str = "") -> Signal:
    found = pattern or "|".join(re.escape(word) for word in words)
    return Signal(name, severity, meaning, tuple(word.encode() for word in words), re.compile(found.encode()))


def _fact(metric: str, word: str, pattern: str, scale: float = 1.0) -> Fact:
    return Fact(metric, word.encode(), re.compile(pattern.encode()), scale)


# The first that matches counts. New and old spellings stand side by side.
SIGNALS: tuple[Signal, ...] = (
    _signal(
        "engine_dead", "fail", "the engine behind the API has died",
        ("EngineDeadError", "EngineCore encountered", "EngineCore failed to start", "AsyncLLMEngine has failed",
         "Engine core initialization failed", "died unexpectedly", "Scheduler hit an exception",
         "Received sigquit from a child process", "WorkerProc hit an exception", "WorkerProc failed to start"),
    ),
    _signal(
        "gpu_out_of_memory", "fail", "an allocation on the GPU was refused",
        ("OutOfMemoryError", "CUDA out of memory", "HIP out of memory", "CUDA error: out of memory",
         "cudaMalloc failed: out of memory", "cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED"),
        r"OutOfMemoryError|(?:CUDA|HIP) (?:error: )?out of memory|cudaMalloc failed: out of memory"
        r"|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    _signal(
        "host_out_of_memory", "fail", "an allocation of host memory was refused",
        ("insufficient memory", "DefaultCPUAllocator", "std::bad_alloc", "MemoryError", "Cannot allocate memory"),
        r"insufficient memory \(attempted|DefaultCPUAllocator: (?:not enough|can't allocate) memory|std::bad_alloc"
        r"|\bMemoryError\b|Cannot allocate memory",
    ),
    _signal(
        "kv_memory_missing", "fail", "no memory is left for the KV cache that was asked for",
        ("No available memory for the cache blocks", "larger than the available KV cache memory",
         "maximum number of tokens that can be stored in KV cache", "is less than desired GPU memory utilization",
         "Not enough memory. Please try to increase --mem-fraction-static", "failed to allocate buffer for kv cache"),
    ),
    _signal(
        "start_failed", "fail", "the server gave up while starting",
        ("exiting due to model loading error", "exiting due to HTTP server error", "failed to load model"),
    ),
    _signal(
        "collective_timeout", "fail", "GPUs wait for one another in vain",
        ("collective operation timeout", "NCCL error", "ncclSystemError", "ncclUnhandledCudaError"),
    ),
    _signal(
        "watchdog_timeout", "fail", "the engine's own watchdog found it stuck",
        ("atchdog timeout (self.watchdog_timeout",),
        r"(?:Scheduler w|W)atchdog timeout \(self\.watchdog_timeout=(?P<seconds>[\d.]+)",
    ),
    _signal(
        "engine_stuck", "high", "a worker does not answer",
        ("shared memory broadcast block", "No available block found in 60 second", "RPC call to",
         "Server couldn't get a response from detokenizer"),
        r"No available (?:shared memory broadcast )?block found in (?P<seconds>\d+) second"
        r"|RPC call to (?P<call>\w+) timed out|Server couldn't get a response from detokenizer",
    ),
    _signal(
        "gpu_error", "fail", "the GPU or its driver reports an error",
        ("CUDA error", "HIP error", "cudaError", "AcceleratorError", "CUDA driver error"),
        r"(?:CUDA|HIP)(?: driver)? error: (?P<error>[^\r\n.]{1,80})|\b(?P<code>cudaError[A-Z]\w+)|AcceleratorError",
    ),
    _signal(
        "crash", "fail", "a process of the server crashed",
        ("Segmentation fault", "Segfault encountered", "Fatal Python error", "GGML_ASSERT(", "ggml_abort",
         "core dumped", "SIGSEGV", "terminate called after throwing", "double free or corruption"),
        r"Segmentation fault|Segfault encountered|Fatal Python error: (?P<error>[^\r\n]{1,80})"
        r"|GGML_ASSERT\((?P<assertion>[^\r\n]{1,80})\) failed|ggml_abort|core dumped|SIGSEGV"
        r"|terminate called after throwing|double free or corruption",
    ),
    _signal(
        "kv_full", "warn", "the KV cache is full: requests are preempted or refused a slot",
        ("KV cache pool is full", "PreemptionMode", "failed to find a memory slot", "is preempted by"),
        r"KV cache pool is full|is preempted by|failed to find a memory slot",
    ),
    _signal(
        "server_ready", "info", "the server says that it serves",
        ("Application startup complete", "The server is fired up and ready to roll", "listening on http",
         "HTTP server is listening"),
    ),
)  # fmt: skip

# SGLang's GB are GiB (it divides by 2^30). A negative figure is a red flag in itself and is kept as such.
FACTS: tuple[Fact, ...] = (
    # vLLM
    _fact("kv_capacity_tokens", "KV cache size", r"KV cache size: ([\d,]+) tokens"),
    _fact("kv_concurrency", "Maximum concurrency", r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"),
    _fact("context_tokens", "Maximum concurrency", r"Maximum concurrency for ([\d,]+) tokens per request"),
    _fact("kv_available_bytes", "vailable KV cache memory", r"vailable KV cache memory: (-?[\d.]+) GiB", GIB),
    _fact("kv_blocks", " blocks: ", r"# ?(?:GPU|CUDA) blocks: (\d+)"),
    _fact("model_bytes", "odel loading took", r"odel loading took ([\d.]+) Gi?B", GIB),
    _fact("model_load_s", "odel loading took", r"odel loading took [\d.]+ Gi?B(?: memory)? and ([\d.]+) ?s"),
    _fact("model_bytes", "Loading model weights took", r"Loading model weights took ([\d.]+) Gi?B", GIB),
    _fact("weights_load_s", "Loading weights took", r"Loading weights took ([\d.]+) s"),
    _fact("compile_s", "torch.compile", r"torch\.compile (?:takes|took) ([\d.]+) s"),
    _fact("graph_estimate_bytes", "Estimated CUDA graph memory", r"CUDA graph memory: (-?[\d.]+) GiB", GIB),
    _fact("graph_capture_s", "Graph capturing finished", r"Graph capturing finished in ([\d.]+) secs"),
    _fact("graph_bytes", "Graph capturing finished", r"finished in [\d.]+ secs, took (-?[\d.]+) GiB", GIB),
    _fact("device_free_bytes", "Free memory on device", r"on device(?: \S+)? \((-?[\d.]+)/[\d.]+ GiB\)", GIB),
    _fact("device_total_bytes", "Free memory on device", r"on device(?: \S+)? \(-?[\d.]+/([\d.]+) GiB\)", GIB),
    _fact("init_engine_s", "init engine", r"init engine .*?took ([\d.]+) s"),
    # SGLang
    _fact("kv_capacity_tokens", "max_total_num_tokens=", r"\bmax_total_num_tokens=(\d+)"),
    _fact("context_tokens", "context_len=", r"\bcontext_len=(\d+)"),
    _fact("slots", "max_running_requests=", r"\bmax_running_requests=(\d+)"),
    _fact("device_free_bytes", "available_gpu_mem=", r"\bavailable_gpu_mem=(-?[\d.]+) GB", GIB),
    _fact("model_bytes", "Load weight end", r"Load weight end.*mem usage=(-?[\d.]+) GB", GIB),
    _fact("model_load_s", "Load weight end", r"Load weight end\. elapsed=([\d.]+) s"),
    _fact("free_after_load_bytes", "Load weight end", r"Load weight end.*avail mem=(-?[\d.]+) GB", GIB),
    _fact("free_after_kv_bytes", "Memory pool end", r"Memory pool end.*avail mem=(-?[\d.]+) GB", GIB),
    _fact("kv_cache_bytes", "KV size: ", r"\bKV size: ([\d.]+) GB", GIB),
    _fact("kv_cache_bytes", "K size: ", r"\bK size: ([\d.]+) GB, V size: ([\d.]+) GB", GIB),
    _fact("graph_capture_s", "graph end.", r"graph end\. (?:Time )?elapsed[:=] ?([\d.]+) s"),
    _fact("graph_bytes", "graph end.", r"graph end\..*mem usage=(-?[\d.]+) GB", GIB),
    # llama.cpp
    _fact("slots", "n_slots = ", r"\bn_slots = (\d+)"),
    _fact("context_tokens", "n_ctx_slot = ", r"\bn_ctx_slot = (\d+)"),
    _fact("context_tokens", "n_ctx_", r"\bn_ctx_(?:per_)?seq +=\s+(\d+)"),
    _fact("context_total_tokens", ": n_ctx ", r"(?:llama_context|llama_new_context_with_model): n_ctx +=\s+(\d+)"),
    _fact("kv_cache_bytes", "llama_kv_cache", r"llama_kv_cache\w*: size =\s+([\d.]+) MiB", MIB),
    _fact("kv_cache_bytes", "KV self size", r"KV self size +=\s+([\d.]+) MiB", MIB),
    _fact("model_bytes", "file size", r"\bfile size +=\s+([\d.]+) MiB", MIB),
    _fact("model_bytes", "file size", r"\bfile size +=\s+([\d.]+) GiB", GIB),
)

# Lines that quote what a client sent: its words are not the server's.
ECHOES = (b"Received request", b"Received: ", b"prompt: '", b'"messages"', b"GenerateReqInput(")

# ---------------------------------------------------------------------------------------------------------------------
# From bytes to events


@dataclass(frozen=True, slots=True)
class Event:
    """A line that meant something."""

    name: str
    text: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """What a block of lines said: events in order, hits beyond MAX_LOOKS by name, and figures."""

    events: list[Event]
    uncounted: dict[str, int]
    facts: list[tuple[str, float]]


_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SECRETS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), r"\1 ***"),
    (re.compile(r"://[^/\s:@]+:[^/\s@]+@"), "://***@"),
    (
        re.compile(r"\b(?:sk|pk|rk|nvapi|gsk|xox[abps])-[\w-]{8,}|\b(?:hf|gh[opsur]|glpat)[_-]\w{8,}|\bAKIA\w{12,}"),
        "***",
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), "***"),
    (
        re.compile(
            r"(?i)((?<![a-z])(?:api[_-]?keys?|token|secret|passw(?:or)?d|authorization|x-api-key)"
            r"[\"']?\s*[:=]\s*[\[(]?\s*[\"']?)[^\s\"',\])}]+"
        ),
        r"\1***",
    ),
)


def clean(line: bytes, secrets: Sequence[str] = ()) -> str:
    """A line for people: no colours, nothing that a progress bar overwrote, no secret, at most MAX_TEXT_CHARS."""
    text = _ANSI.sub("", line.decode("utf-8", "replace")).rstrip("\r").rpartition("\r")[2]
    for secret in secrets:
        text = text.replace(secret, "***")
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return "".join(c if c.isprintable() else " " for c in text).strip()[:MAX_TEXT_CHARS]


def lines_with(block: bytes, word: bytes) -> Iterator[tuple[int, bytes]]:
    """Where each line with this word begins, and the line: of a long one what stands around the word."""
    at = 0
    while (at := block.find(word, at)) >= 0:
        begin = block.rfind(b"\n", 0, at) + 1
        end = block.find(b"\n", at)
        end = len(block) if end < 0 else end
        yield begin, block[max(begin, at - MAX_LINE_BYTES // 2) : min(end, at + MAX_LINE_BYTES // 2)]
        at = end


def meaning(block: bytes, secrets: Sequence[str] = ()) -> Found:
    """What these lines mean. A line is one event at most: that of the first signal that matches."""
    if not block:
        return Found([], {}, [])
    hits: dict[int, tuple[Signal, re.Match[bytes], bytes]] = {}
    uncounted: dict[str, int] = {}
    for signal in SIGNALS:
        for word in signal.words:
            for n, (begin, line) in enumerate(lines_with(block, word)):
                if n >= MAX_LOOKS:
                    uncounted[signal.name] = uncounted.get(signal.name, 0) + block.count(word, begin)
                    break
                if begin in hits or any(echo in line for echo in ECHOES):
                    continue
                match = signal.pattern.search(line)
                if match is not None:
                    hits[begin] = (signal, match, line)
    facts: list[tuple[str, float]] = []
    for fact in FACTS:
        for n, (_, line) in enumerate(lines_with(block, fact.word)):
            if n >= MAX_SAME_FACTS:
                break
            match = fact.pattern.search(line)
            if match is not None:
                with suppress(ValueError):  # `1.2.3` is no figure
                    facts.append((fact.metric, fact.scale * sum(float(g.replace(b",", b"")) for g in match.groups())))
    events = []
    for _, (signal, match, line) in sorted(hits.items(), key=lambda hit: hit[0]):
        labels = {key: clean(value, secrets) for key, value in match.groupdict().items() if value is not None}
        labels["severity"] = signal.severity
        events.append(Event(signal.name, clean(line, secrets), labels))
    return Found(events, uncounted, facts)


class Lines:
    """Bytes as they come, cut where a line ends. What has no end waits, for one tick or MAX_REST_BYTES."""

    def __init__(self) -> None:
        self._rest = b""
        self._old = False

    def feed(self, data: bytes) -> bytes:
        """The whole lines so far. A last line without an end (a process died in it) is given out when nothing came
        after it since the call before."""
        if not data:
            whole, self._rest = (self._rest, b"") if self._old else (b"", self._rest)
            self._old = bool(self._rest)
            return whole
        block = self._rest + data if self._rest else data
        cut = block.rfind(b"\n") + 1
        if len(block) - cut > MAX_REST_BYTES:
            cut = len(block)
        self._rest, self._old = block[cut:], False
        return block[:cut]

    def end(self) -> bytes:
        """What has no end and will get none."""
        rest, self._rest, self._old = self._rest, b"", False
        return rest


class Frames:
    """A container's output without a terminal: frames of one stream each, `type 0 0 0 length(4, big endian)` first.

    Standard output and error are kept apart until each has a whole line. What is no frame is text from there on.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._streams: dict[int, bytes] = {}
        self.raw = False

    def feed(self, data: bytes) -> bytes:
        if self.raw:
            return data
        self._buffer += data
        out: list[bytes] = []
        while len(self._buffer) >= 8:
            kind, size = self._buffer[0], int.from_bytes(self._buffer[4:8], "big")
            if kind > 3 or self._buffer[1:4] != b"\0\0\0" or size > MAX_BACKLOG_BYTES:
                self.raw = True
                out.append(self._buffer)
                self._buffer = b""
                break
            if len(self._buffer) < 8 + size:
                break
            text = self._streams.get(kind, b"") + self._buffer[8 : 8 + size]
            cut = text.rfind(b"\n") + 1
            cut = len(text) if len(text) - cut > MAX_REST_BYTES else cut
            out.append(text[:cut])
            self._streams[kind] = text[cut:]
            self._buffer = self._buffer[8 + size :]
        return b"".join(out)

    def end(self) -> bytes:
        """What had no end when the stream ended: the last words."""
        rest, self._streams = b"\n".join(text for text in self._streams.values() if text), {}
        return rest


# ---------------------------------------------------------------------------------------------------------------------
# Sources. Each yields one Read a tick.


@dataclass(slots=True)
class Read:
    """What a source has: whole lines, since the run began or from `before` it. `why` None: it can be read. `notes` are
    happenings of the log itself (rotated, ended)."""

    block: bytes = b""
    before: bool = False
    why: str | None = None
    lost_bytes: int = 0
    notes: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class File:
    """A log file and how far it was read."""

    path: str
    fd: int = -1
    at: int = 0
    lines: Lines = field(default_factory=Lines)
    gone: bool = False

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def first(self) -> Read:
        """What the file holds already: its beginning and its end."""
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            size = os.fstat(self.fd).st_size
            block = os.pread(self.fd, EARLIER_BYTES, 0)
            lost = max(0, size - 2 * EARLIER_BYTES)
            if size > len(block):
                at = max(len(block), size - EARLIER_BYTES)
                block += b"\n" * (lost > 0) + os.pread(self.fd, size - at, at)
            self.at = size
        except OSError as error:
            self.close()
            return Read(why=f"{self.path}: {error.strerror}", before=True)
        whole = self.lines.feed(block)
        return Read(whole, before=True, lost_bytes=lost)

    def more(self) -> Read:
        """What came since. A file that was not there before is read from its beginning."""
        out = Read()
        try:
            here = os.stat(self.path)  # noqa: PTH116
        except OSError as error:
            if self.fd < 0:
                return Read(why=f"{self.path}: {error.strerror}")
            here = None
        try:
            if self.fd < 0:
                self.fd, self.at = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), 0
            out.block = self._rest(out)
            mine = os.fstat(self.fd)
            if here is None:
                if not self.gone:
                    out.notes.append(("log_gone", f"{self.path} is gone; what is still written to it is read"))
                self.gone = True
            elif (here.st_dev, here.st_ino) != (mine.st_dev, mine.st_ino):
                self.close()
                self.fd, self.at, self.gone = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), 0, False
                out.notes.append(("log_rotated", f"{self.path} is another file now, read from its beginning"))
                out.block += self._rest(out)
        except OSError as error:
            self.close()
            out.why = f"{self.path}: {error.strerror}"
        return out

    def _rest(self, out: Read) -> bytes:
        size = os.fstat(self.fd).st_size
        if size < self.at:
            out.notes.append(("log_truncated", f"{self.path} was cut to {size} bytes, read from its beginning"))
            self.at, self.lines = 0, Lines()
        if size - self.at > MAX_BACKLOG_BYTES:
            out.lost_bytes += size - MAX_TICK_BYTES - self.at
            self.at = size - MAX_TICK_BYTES
        data = os.pread(self.fd, MAX_TICK_BYTES, self.at)
        self.at += len(data)
        return self.lines.feed(data)


async def of_file(path: str) -> AsyncIterator[Read]:
    """A file, in a thread: the disk under test may hang."""
    import asyncio

    file = File(path)
    try:
        yield await asyncio.to_thread(file.first)
        while True:
            yield await asyncio.to_thread(file.more)
    finally:
        file.close()


@dataclass(slots=True)
class Stream:
    """What a task reads off a stream until the next tick takes it; of a flood the oldest is lost, counted."""

    lines: Lines = field(default_factory=Lines)
    data: bytearray = field(default_factory=bytearray)
    lost_bytes: int = 0

    def put(self, data: bytes) -> None:
        self.data += data
        over = len(self.data) - MAX_BACKLOG_BYTES
        if over > 0:
            del self.data[:over]
            self.lost_bytes += over

    def take(self) -> Read:
        block, self.data = self.lines.feed(bytes(self.data)), bytearray()
        lost, self.lost_bytes = self.lost_bytes, 0
        return Read(block, lost_bytes=lost)


async def _stop(task: asyncio.Task[Any]) -> None:
    import asyncio

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def of_container(name: str, docker_socket: str) -> AsyncIterator[Read]:
    """A container's log: what it said since it was started, then what it says. Followed through restarts, and through
    its replacement by another of the same name."""
    import asyncio

    import aiohttp

    limit = aiohttp.ClientTimeout(total=None, sock_connect=ASK_LIMIT_S)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(docker_socket), timeout=limit) as session:

        async def inspect() -> Json:
            async with asyncio.timeout(ASK_LIMIT_S), session.get(f"http://docker/containers/{name}/json") as answer:
                if answer.status == 404:
                    raise LookupError(f"there is no container {name}")
                answer.raise_for_status()
                found: Json = await answer.json(content_type=None)
                return found

        async def follow(about: Json, stream: Stream, **more: str) -> str:
            """Reads until the stream ends; why it did."""
            frames = Frames()
            frames.raw = bool((about.get("Config") or {}).get("Tty"))
            asked = {"stdout": "1", "stderr": "1", **more}
            async with session.get(f"http://docker/containers/{about['Id']}/logs", params=asked) as answer:
                answer.raise_for_status()
                got = 0
                async for data in answer.content.iter_chunked(1 << 16):
                    stream.put(frames.feed(data))
                    got += len(data)
                    if "follow" not in more and got > EARLIER_BYTES:
                        break
                stream.put(frames.end())
            return f"the log of the container {name} ended"

        since = ended = ""
        while True:
            stream = Stream()
            try:
                about = await inspect()
                now = _docker_time(clock.wall_ns())
                if not since:
                    began = _docker_start(str((about.get("State") or {}).get("StartedAt") or ""))
                    async with asyncio.timeout(ASK_LIMIT_S):
                        await follow(about, stream, since=began, until=now)
                    read = stream.take()
                    read.block += stream.lines.end()
                    read.before = True
                    since = now
                    yield read
            except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
                yield Read(why=_docker_why(error, docker_socket), before=not since)
                for _ in range(round(RETRY_S / PERIOD_S)):
                    yield Read(why=_docker_why(error, docker_socket))
                continue
            task = asyncio.create_task(follow(about, stream, follow="1", since=since))
            try:
                while not task.done():
                    yield stream.take()
            finally:
                await _stop(task)
            failed = task.exception() if not task.cancelled() else None
            since = _docker_time(clock.wall_ns())
            read = stream.take()
            read.block += stream.lines.end()
            life = str((about.get("State") or {}).get("StartedAt"))
            if life != ended:  # a container that was stopped ends its log at once, each time it is asked for
                ended = life
                read.notes.append(("log_ended", _docker_why(failed, docker_socket) if failed else task.result()))
            yield read
            for _ in range(round(RETRY_S / PERIOD_S)):
                yield Read()


def _docker_time(wall_ns: int) -> str:
    return f"{wall_ns // 10**9}.{wall_ns % 10**9:09d}"


def _docker_start(text: str) -> str:
    """`2026-11-30T12:00:00.123456789Z` in seconds, which is what the log is asked by; 0 where it is none."""
    try:
        began = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    except ValueError:
        return "0"
    return str(max(0, math.floor(began.timestamp())))


def _docker_why(error: BaseException, docker_socket: str) -> str:
    cause = getattr(error, "os_error", None) or error
    if isinstance(cause, PermissionError):
        return f"{docker_socket}: {cause.strerror}; to allow it (as good as root): sudo usermod -aG docker $USER"
    if isinstance(cause, OSError) and cause.errno is not None:
        return f"{docker_socket}: {os.strerror(cause.errno)}"
    if isinstance(error, TimeoutError):
        return f"{docker_socket}: no answer within {ASK_LIMIT_S:g} s"
    return f"{docker_socket}: {' '.join(str(error).split()) or type(error).__name__}"


async def of_unit(unit: str) -> AsyncIterator[Read]:
    """A systemd unit's part of the journal: what it said since it was started, then what it says."""
    import asyncio

    began = await _unit_start(unit)
    since_us = clock.wall_ns() // 1000
    earlier = Stream()
    why: str | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(ASK_LIMIT_S):
            until = f"--until=@{since_us // 10**6 + 1}"
            why = await _journal(earlier, unit, [f"--since=@{began}", until], before_us=since_us)
    read = earlier.take()
    if why is None and not read.block and not began:  # journalctl finds no fault in a name that nobody bears
        why = f"the journal has no line of {unit}, and systemd knows of no start of it"
    read.before, read.why = True, why
    said: str | None = ""
    yield read
    while True:
        stream = Stream()
        after = [f"--since=@{since_us // 10**6}", "--no-tail", "--follow"]
        task = asyncio.create_task(_journal(stream, unit, after, after_us=since_us))
        try:
            while not task.done():
                read = stream.take()
                why = None if read.block else why
                read.why = why
                yield read
        finally:
            await _stop(task)
        since_us = clock.wall_ns() // 1000
        read = stream.take()
        read.block += stream.lines.end()
        why = task.result() if task.exception() is None else str(task.exception())
        read.why = why
        if why != said:
            said = why
            read.notes.append(("log_ended", f"journalctl ended{f': {why}' if why else ''}"))
        yield read
        for _ in range(round(RETRY_S / PERIOD_S)):
            yield Read(why=why)


async def _unit_start(unit: str) -> int:
    """When the unit was started, in seconds since the epoch; 0 where nobody says."""
    done = await _ask("systemctl", "show", "--timestamp=unix", "--property=InactiveExitTimestamp", "--", unit)
    value = done.partition("@")[2].strip()
    return int(value) if value.isdigit() else 0


async def _ask(*command: str) -> str:
    """A short command's output; empty where it failed or took too long."""
    import asyncio

    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe, stderr=null)
    except OSError:
        return ""
    try:
        async with asyncio.timeout(ASK_LIMIT_S):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return ""
    return out.decode("utf-8", "replace")


async def _journal(
    stream: Stream, unit: str, more: list[str], *, after_us: int = 0, before_us: int | None = None
) -> str | None:
    """Runs journalctl until it ends (or has given EARLIER_BYTES and is not to follow): None, or why it gave nothing."""
    import asyncio

    command = ["journalctl", f"--unit={unit}", "--output=json", "--output-fields=MESSAGE", "--no-pager", *more]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return f"journalctl: {error.strerror}"
    assert process.stdout is not None
    assert process.stderr is not None
    lines, got = Lines(), 0
    try:
        while data := await process.stdout.read(1 << 16):
            got += len(data)
            for line in lines.feed(data).split(b"\n"):
                stream.put(_message(line, after_us, before_us))
            if before_us is not None and got > EARLIER_BYTES:
                return None
        said = (await process.stderr.read(1 << 14)).decode("utf-8", "replace").strip()
        if await process.wait() or "No journal files" in said or "not seeing messages" in said:
            how = "; to allow it: sudo usermod -aG systemd-journal $USER" if "not seeing messages" in said else ""
            return f"journalctl: {' '.join(said.split())[:200] or f'exit {process.returncode}'}{how}"
        return None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _message(line: bytes, after_us: int, before_us: int | None) -> bytes:
    """The text of a journal record within the time asked for (journalctl itself knows whole seconds only)."""
    try:
        fields = json.loads(line)
        at_us = int(fields.get("__REALTIME_TIMESTAMP", 0))
    except (ValueError, AttributeError, TypeError):
        return b""
    text = fields.get("MESSAGE")
    if isinstance(text, list):  # bytes that are no UTF-8 come as numbers
        text = bytes(n for n in text if isinstance(n, int) and 0 <= n < 256).decode("utf-8", "replace")
    if not isinstance(text, str) or (at_us and (at_us < after_us or (before_us is not None and at_us >= before_us))):
        return b""
    return text.encode() + b"\n"


# ---------------------------------------------------------------------------------------------------------------------
# The monitor


@dataclass(frozen=True, slots=True)
class Options:
    """One of `path`, `container` (name or id; `docker_socket`) and `unit`. `headers_env` names the variable that holds
    the request headers, so that their values never stand in a sample."""

    path: str = ""
    container: str = ""
    unit: str = ""
    docker_socket: str = "/var/run/docker.sock"
    headers_env: str = ""
    period_s: Seconds = Seconds(1)


def source(options: Options) -> tuple[str, AsyncIterator[Read]] | str:
    """Which log this is in words, and its source; or why there is none."""
    given = [name for name in ("path", "container", "unit") if getattr(options, name)]
    if len(given) != 1:
        return "say where the server's log is: monitors: {logs: {path: FILE}}, or container: NAME, or unit: NAME" + (
            f" (one of them, not {' and '.join(given)})" if given else ""
        )
    if options.path:
        return options.path, of_file(options.path)
    if options.container:
        return f"container {options.container}", of_container(options.container, options.docker_socket)
    return f"unit {options.unit}", of_unit(options.unit)


async def watch(options: Options) -> AsyncIterator[list[Sample]]:
    """Facts as samples, lines that mean something as happenings, counts of lines and bytes."""
    chosen = source(options)
    if isinstance(chosen, str):
        yield [Sample("logs", "observed", 0.0, clock.now_ns(), text=chosen)]
        return
    where, reads = chosen
    secrets = _secrets(options.headers_env)
    told: str | None = None
    counts: dict[str, int] = {}
    lines = size = lost = 0
    async with aclosing(reads):  # type: ignore[type-var]
        async for one in reads:
            now = clock.now_ns()
            out: list[Sample] = []
            state = one.why or ""
            if state != told:
                told = state
                out.append(Sample("logs", "observed", float(not state), now, text=state or where))
            out += [Sample("logs", name, 1.0, now, text=text) for name, text in one.notes]
            found = meaning(one.block, secrets)
            if one.before:
                out += [Sample("logs", metric, value, now, {"before_run": "1"}) for metric, value in found.facts]
                earlier: dict[str, int] = dict(found.uncounted)
                for event in found.events:
                    earlier[event.name] = earlier.get(event.name, 0) + 1
                out += [Sample("logs", "before_run", float(n), now, {"event": name}) for name, n in earlier.items()]
            else:
                out += [Sample("logs", metric, value, now) for metric, value in found.facts]
                out += happenings(found, counts, now)
                lines += one.block.count(b"\n")
                size += len(one.block)
            if one.lost_bytes and not one.before:
                if not lost:
                    text = f"the log grew faster than {MAX_TICK_BYTES >> 20} MiB a tick; a part of it was not looked at"
                    out.append(Sample("logs", "log_skipped", 1.0, now, text=text))
                lost += one.lost_bytes
            if not state:
                out.append(Sample("logs", "lines_total", float(lines), now))
                out.append(Sample("logs", "bytes_total", float(size), now))
                out.append(Sample("logs", "lost_bytes_total", float(lost), now))
            yield out


def happenings(found: Found, counts: dict[str, int], now_ns: int) -> list[Sample]:
    """The first MAX_SAME_EVENTS of each kind, and MAX_TOLD_EVENTS over the run; the others as one sample with their
    number."""
    out: list[Sample] = []
    more: dict[str, int] = dict(found.uncounted)
    severities: dict[str, Severity] = {signal.name: signal.severity for signal in SIGNALS}
    seen: dict[str, int] = {}
    for event in found.events:
        seen[event.name] = seen.get(event.name, 0) + 1
        counts[event.name] = counts.get(event.name, 0) + 1
        if seen[event.name] > MAX_SAME_EVENTS or counts[event.name] > MAX_TOLD_EVENTS:
            more[event.name] = more.get(event.name, 0) + 1
        else:
            out.append(Sample("logs", event.name, 1.0, now_ns, event.labels, event.text))
    for name, n in more.items():
        labels = {"severity": severities[name], "burst": str(n)}
        out.append(Sample("logs", name, float(n), now_ns, labels, f"and {n} more like it"))
    return out


def _secrets(headers_env: str) -> list[str]:
    """Header values that are long enough to be secrets, and their last word (what follows `Bearer`)."""
    try:
        headers = json.loads(os.environ.get(headers_env) or "{}") if headers_env else {}
    except ValueError:
        return []
    values = [str(value) for value in headers.values()]
    parts = {part for value in values for part in (value, value.rpartition(" ")[2]) if len(part) >= MIN_SECRET_CHARS}
    return sorted(parts, key=len, reverse=True)
