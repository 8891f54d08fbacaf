"""The vocabulary: every noun that crosses a module, in the order in which a run makes them.

Standard library only, so that the monitors' fast lane and any foreign tool can import it. Hot types (`Request`,
`Event`, `Outcome`, `Sample`) are plain slotted dataclasses with one owner at a time; cold ones are frozen. Times are
integer nanoseconds of CLOCK_MONOTONIC unless a name says otherwise; "not measured" is `None`, never 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeAlias

# What foreign JSON looks like to us. The only place for Any besides the code that reads it.
Json: TypeAlias = dict[str, Any]

OutcomeWord = Literal["ok", "failed", "incomplete"]
CacheIntent = Literal["cold", "warm", "shared"]
TimesSource = Literal["kernel", "read"]
EventKind = Literal["content", "reasoning", "tool_call", "refusal", "usage", "error", "finish", "done", "role"]
FindingStatus = Literal["pass", "warn", "fail", "not_evaluated"]
Axis = Literal["functional", "performance", "stability", "measurement"]
PhaseKind = Literal["functional", "warmup", "measure"]
Lane = Literal["fast", "gpu", "slow"]

AXES: tuple[Axis, ...] = ("functional", "performance", "stability", "measurement")

# error_class of a failed outcome: what the server or the network did, and what was our own doing.
THEIR_ERRORS = frozenset(
    {
        "connect_refused", "connect_timeout", "dns_error", "tls_error", "connection_reset", "header_timeout",
        "idle_timeout", "progress_timeout", "total_timeout", "stream_truncated", "in_band_error",
        "aborted_by_server", "empty_response", "rate_limited", "context_limit", "unauthorized", "http_error",
        "unexpected_content_type", "unexpected_content_encoding", "protocol_error",
    }
)  # fmt: skip
OUR_ERRORS = frozenset({"client_resource", "cancelled"})
ERROR_CLASSES = THEIR_ERRORS | OUR_ERRORS

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter"})


class UserError(Exception):
    """A mistake that the user can mend: what is wrong, where, and what to do next, in one line. Exit code 3."""

    exit_code = 3


class NotReadyError(UserError):
    """The target does not serve (yet), or the box is busy: nothing was judged. Exit code 75 (EX_TEMPFAIL)."""

    exit_code = 75


# ---------------------------------------------------------------------------------------------------------------------
# What to do. `loadgen.scenario` reads these from YAML, strictly; each field may stand in a scenario under its name.


class Seconds(float):
    """A duration: 90, "90s", "10m", "1h30m", "250ms". A bare number is seconds."""


class Tokens(int):
    """A number of tokens: 8192 or "8k" (k = 1024, as context lengths are counted)."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Where a secret is, never the secret itself: an environment variable or a file."""

    env: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. `model` None: the only model that it serves; `endpoint` None: the dialect's own path.

    `urls` are several servers in place of `url`: sessions go round them, all requests of one session to the same;
    before a run each is asked, monitors watch the first. `proxy: env` uses the HTTP proxies that the environment names,
    which nothing else does. `ca_file` (PEM) is believed beside the system's authorities;
    `client_cert` and `client_key` (PEM, in one file or two) are shown to a server that asks.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    dialect: str = "openai_chat"
    endpoint: str | None = None
    api_key: Secret | None = None
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: Json = field(default_factory=dict)
    verify_tls: bool = True
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    proxy: Literal["env"] | None = None
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """One class of requests: which workload builds it (None: the one of the class's name), with which options, and
    its share of the mix (`weight`), or `seats` that it keeps for itself."""

    workload: str | None = None
    weight: float = 0.0
    seats: int = 0
    options: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """One phase. `functional` asks each class once, alone; `warmup` and `measure` keep all seats busy until
    `duration` or `count` is reached. What still runs `drain` after the end is cut and counts as incomplete."""

    kind: PhaseKind
    name: str | None = None
    duration: Seconds | None = None
    count: int | None = None
    drain: Seconds = Seconds(60)

    @property
    def label(self) -> str:
        return self.name or self.kind


@dataclass(frozen=True, slots=True)
class Limits:
    """How long we wait: for the connection, for the first byte of the response, between bytes, between tokens, and for
    the whole request. Comments that keep a connection alive reset `idle_timeout` only. The defaults leave room for a
    prefill of 260K tokens at 1K tokens/s (260 s, notes on boundaries: 245 s seen at 183K) with a factor of two."""

    connect_timeout: Seconds = Seconds(5)
    header_timeout: Seconds = Seconds(600)
    idle_timeout: Seconds = Seconds(600)
    progress_timeout: Seconds = Seconds(600)
    timeout: Seconds = Seconds(1800)


@dataclass(frozen=True, slots=True)
class Guards:
    """When the load stops lest the server's host dies of it; see `loadgen.guard`. B is MemAvailable of the idle server.

    Warn below max(`warn_gib`, `warn_share` of B); issue nothing more below max(`stop_gib`, `stop_share` of B) for
    `stop_for`, or when the slope over `slope_over` leads to `reach_gib` within `reach_within`; cut our own requests
    when that lasts `abort_after` more and a second sign stands beside it: a driver that refuses memory, tasks stalled
    on memory `psi_full_percent` of `psi_over`, or `swap_out_pages_per_s`. `most` bounds the three floors (warn, stop,
    reach) by shares of B. Issuing is released after `release_after` above the warning line; a hold of `hold_most` ends
    the run. `baseline` is how long the idle server is watched for B (None: 60 s before 10 minutes of measuring or
    more, else 2 s). `stop_command` stops the server when requests were cut: run once, and only where it is given.
    A server that came back `loop_restarts` times within `loop_within` is asked nothing more either: a crash loop.
    Numbers from notes on guards in the field: 3 to 6 GiB of 121.7 in use, and healthy servers at 1.5.
    """

    enabled: bool = True
    warn_gib: float = 4.0
    warn_share: float = 0.35
    stop_gib: float = 2.5
    stop_share: float = 0.2
    stop_for: Seconds = Seconds(0.5)
    reach_gib: float = 1.5
    reach_within: Seconds = Seconds(2)
    slope_over: Seconds = Seconds(2)
    abort_after: Seconds = Seconds(2)
    psi_full_percent: float = 10.0
    psi_over: Seconds = Seconds(2)
    swap_out_pages_per_s: float = 2000.0
    most: tuple[float, float, float] = (0.7, 0.5, 0.3)
    release_after: Seconds = Seconds(10)
    hold_most: Seconds = Seconds(60)
    baseline: Seconds | None = None
    loop_restarts: int = 2
    loop_within: Seconds = Seconds(600)
    stop_command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Calibration:
    """What preflight learnt of the server and the workloads need to know."""

    template_tokens: int = 0
    tokens_per_word: float | None = None
    context_tokens: int | None = None
    slots: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to do, whole. `rules` and `monitors` map a plug-in's name to its options; every rule runs unless it
    stands in `skip_rules`; `require` names those without whose answer the run is INCONCLUSIVE. `salt` None
    is drawn at the start of a run and stands in the run folder's copy, which therefore replays byte for byte. `harden`:
    the monitors' lanes guard themselves against the OOM killer, swap and starvation, as far as they are allowed."""

    name: str
    about: str = ""
    target: Target = Target()
    concurrency: int = 4
    seed: int = 1
    salt: str | None = None
    classes: dict[str, ClassSpec] = field(default_factory=dict)
    phases: tuple[PhaseSpec, ...] = ()
    limits: Limits = Limits()
    monitors: dict[str, Json] = field(default_factory=dict)
    rules: dict[str, Json] = field(default_factory=dict)
    skip_rules: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    slo: tuple[str, ...] = ()
    guards: Guards = Guards()
    harden: bool = True
    calibration: Calibration | None = None


# ---------------------------------------------------------------------------------------------------------------------
# From a request to an outcome


@dataclass(slots=True)
class Request:
    """One logical question, before any dialect knows of it.

    `expect` is what `grader` compares the answer with. `prompt_tokens` is the length that the workload aimed at
    (template included) or None where it did not aim. `due_ns` is when the request should have left: at fixed
    concurrency the moment its seat became free. Both `due_ns` and the outcome's `sent_ns` are kept to the end.
    `server` chooses among several servers of a target (modulo their number).
    """

    id: str
    cls: str
    messages: list[Json]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    cache: CacheIntent = "cold"
    grader: str | None = None
    expect: Json = field(default_factory=dict)
    prompt_tokens: int | None = None
    extra_body: Json = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    phase: str = ""
    seat: int = -1
    due_ns: int = 0
    server: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """What a workload may know besides its own options. The same Draw gives byte-identical requests anywhere.

    `salt` differs from run to run (unless the scenario pins it) and stands at the head of every cold prompt, so that
    no earlier run is found in the server's prefix cache. `template_tokens` is what the server's chat template adds to
    a one-message prompt, calibrated by `usage` before the run.
    """

    seed: int
    cls: str
    salt: str
    template_tokens: int = 0

    def random(self, item: int, what: str) -> Random:
        """A generator of its own for one field of one item: no two tasks ever share a stream of random numbers.

        blake2b, because Python's own hash of strings changes from process to process.
        """
        return Random(int.from_bytes(_blake2b(f"{self.seed}\0{self.cls}\0{item}\0{what}", 8)))

    def nonce(self, item: int) -> str:
        """Twelve hex digits that no other item of any run shares: the salt at the head of a cold prompt."""
        return _blake2b(f"{self.salt}\0{self.seed}\0{self.cls}\0{item}", 6).hex()


def _blake2b(text: str, size: int) -> bytes:
    import hashlib  # 4 MB with its OpenSSL: the monitors' lanes, which draw nothing, go without

    return hashlib.blake2b(text.encode(), digest_size=size).digest()


Session: TypeAlias = Generator[Request, "Outcome", None]
"""A conversation: yields its next Request, is sent that request's Outcome. Most have exactly one turn."""


@dataclass(slots=True)
class Event:
    """One decoded piece of a stream. `text` of a tool_call is its arguments' next piece.

    `usage` events carry the server's figures in `data`; `error` events its message in `text`; `finish` the mapped
    finish reason in `text` (the raw word, where it is none of FINISH_REASONS, in `data["raw"]`).
    """

    kind: EventKind
    text: str = ""
    at_ns: int = 0
    index: int = 0
    data: Json | None = None


@dataclass(slots=True)
class ToolCall:
    """One assembled tool call; `arguments` is the raw JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Grade:
    """A grader's word on one answer. `score` is 0..1; `kind` names the family of a miss (`wrong`, `distractor`,
    `garbage`, `degenerate`, `empty`, `malformed`), `ok` when right."""

    ok: bool
    score: float
    kind: str
    why: str = ""
    grader: str = ""


@dataclass(frozen=True, slots=True)
class Gaps:
    """What is kept of one stream's gaps in its record; the whole distribution stands in the windows."""

    n: int
    sum_ns: int
    p50_ns: int
    p95_ns: int
    max_ns: int


@dataclass(slots=True)
class Outcome:
    """One finished request. The client makes it, the grader adds `grade`, the recorder writes it; nobody else writes.

    Times: `due_ns` ≤ `sent_ns` (last byte of the request handed to the kernel) ≤ `first_byte_ns` ≤ `first_ns` (first
    token of any kind) ≤ `first_output_ns` (first output token that is not reasoning) ≤ `last_ns` (last token) ≤
    `done_ns` (end of the body, or when it failed). `gaps_ns` are the times between chunks that carry tokens; a record
    read back has their summary in `gaps` instead, and of the text only what the recorder kept.
    `queue_ns` and `connect_ns` are durations before `sent_ns`: waiting for us, and making the connection (None when
    it was reused).

    What the arrival times are worth: `times` names their source (the kernel's receive time, or when we read); `inexact`
    counts the chunks that waited in one read with a later one and share its time; `lags_ns` holds how late we read what
    the kernel had received (empty where times are those of reads, and in a record read back).
    """

    id: str
    cls: str
    phase: str
    seat: int
    cache: CacheIntent
    outcome: OutcomeWord
    due_ns: int
    error_class: str | None = None
    error_message: str | None = None
    flags: set[str] = field(default_factory=set)
    http_status: int | None = None
    retry_after_s: float | None = None
    finish_reason: str | None = None
    sent_ns: int | None = None
    first_byte_ns: int | None = None
    first_ns: int | None = None
    first_output_ns: int | None = None
    last_ns: int | None = None
    done_ns: int | None = None
    connect_ns: int | None = None
    queue_ns: int | None = None
    gaps_ns: array[int] = field(default_factory=lambda: array("q"))
    gaps: Gaps | None = None
    chunks: int = 0
    times: TimesSource | None = None
    inexact: int = 0
    lags_ns: array[int] = field(default_factory=lambda: array("q"))
    text: str = ""
    reasoning_text: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_source: Literal["usage", "estimated"] | None = None
    reasoning_tokens: int | None = None
    prompt_tokens_target: int | None = None
    max_tokens: int | None = None
    tags: dict[str, str] = field(default_factory=dict)
    grade: Grade | None = None

    @property
    def ttft_ns(self) -> int | None:
        """Sent to first token of any kind."""
        return None if self.first_ns is None or self.sent_ns is None else self.first_ns - self.sent_ns

    @property
    def ttfo_ns(self) -> int | None:
        """Sent to first output token that is not reasoning."""
        return None if self.first_output_ns is None or self.sent_ns is None else self.first_output_ns - self.sent_ns

    @property
    def tpot_ns(self) -> float | None:
        """(last − first) / (n − 1), n = tokens that were streamed: tokens that were billed but hidden are left out."""
        n = self.output_tokens
        if n is not None and "hidden_reasoning" in self.flags:
            n -= self.reasoning_tokens or 0
        if n is None or n < 2 or self.first_ns is None or self.last_ns is None:
            return None
        return (self.last_ns - self.first_ns) / (n - 1)

    @property
    def e2e_ns(self) -> int | None:
        """Sent to the last token (the end of the body where no token came)."""
        end = self.last_ns if self.last_ns is not None else self.done_ns
        return None if end is None or self.sent_ns is None else end - self.sent_ns

    @property
    def send_lag_ns(self) -> int | None:
        """Due to sent: our own delay, connecting included. Never hidden inside a latency."""
        return None if self.sent_ns is None else self.sent_ns - self.due_ns


# ---------------------------------------------------------------------------------------------------------------------
# What monitors see


@dataclass(slots=True)
class Sample:
    """One reading. `metric` ends in its unit (`mem_available_bytes`, `pswpout_pages_per_s`, `temperature_c`).

    A happening (an OOM kill, a vanished process) is a Sample with `text`; its metric is the name of the event and its
    value is 1. Whether a monitor can see at all is the metric `observed` (1, or 0 with the reason in `text`).
    """

    monitor: str
    metric: str
    value: float
    at_ns: int
    labels: dict[str, str] = field(default_factory=dict)
    text: str | None = None


@dataclass(slots=True)
class Digest:
    """A second of one metric as it stands in a run folder: minimum, maximum, last, and how many readings."""

    monitor: str
    metric: str
    at_ns: int
    min: float
    max: float
    last: float
    n: int
    labels: dict[str, str] = field(default_factory=dict)
    text: str | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Judgement


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """When a phase ran. `end_ns` is when it stopped issuing, `drained_ns` when its last request was over; both None
    where the run was cut short before."""

    name: str
    kind: PhaseKind
    start_ns: int
    end_ns: int | None
    drained_ns: int | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule's answer. `hard` evidence (a kill, a crash, a wrong answer) fails a run whatever else is true of it.

    `cause` is the short word printed beside the verdict (`oom_kill`, `degrading`, `client_limited`, …); `evidence`
    says where to look (file and record); `since_ns` is when it began.
    """

    rule: str
    axis: Axis
    status: FindingStatus
    message: str
    scope: str = ""
    number: float | None = None
    bound: float | None = None
    unit: str = ""
    n: int | None = None
    evidence: str = ""
    since_ns: int | None = None
    cause: str = ""
    hard: bool = False
    required: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The overall word, one word per axis, the reasons in order of weight, and what could not be judged."""

    overall: Literal["PASS", "FAIL", "INCONCLUSIVE"]
    exit_code: int
    axes: Mapping[Axis, str]
    cause: str
    reasons: tuple[str, ...]
    partial: tuple[str, ...]
    interrupted: bool = False

    @property
    def line(self) -> str:
        """`FAIL (oom_kill)`, `PASS (partial: nvidia not observed)`, `INCONCLUSIVE (interrupted)`."""
        if self.overall == "PASS":
            return f"PASS (partial: {'; '.join(self.partial)})" if self.partial else "PASS"
        return f"{self.overall} ({self.cause})" if self.cause else self.overall
