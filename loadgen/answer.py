"""From the timed bytes of one response to its Outcome, without I/O: decoding, counting, and what is a success.

The client feeds it while the stream runs; `conclude` gives the verdict on the request. Everything that a server can
get wrong ends here as an error class or a flag, and nothing of it raises.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from operator import sub

import orjson

from loadgen.dialects import Decoder, Dialect, characters, error_text, one_line
from loadgen.sse import EventTooLargeError
from loadgen.stencil import Stencil, cut
from loadgen.types import Event, Outcome, Request, ToolCall

# A success; 201 and 203 are the same through some gateways.
OK_STATUSES = frozenset({200, 201, 203})
# An answer in one piece (a JSON body where a stream was asked for); 262,144 tokens are about 1.5 MiB.
MAX_BODY_BYTES = 32 * 1024 * 1024
# Of an error's body, the part that is read for its message; the rest is read and dropped, so the connection lives on.
ERROR_BODY_BYTES = 64 * 1024
# Characters of text kept per answer and field; further ones are counted, for the estimate of tokens, and dropped.
MAX_TEXT_CHARS = 8 * 1024 * 1024
# Tool calls kept per answer, against a server that numbers without end.
MAX_TOOL_CALLS = 1024
# Where a server counts no tokens: a chunk is taken for a token, unless chunks are longer than tokens are; then about
# four characters make one (English text, current tokenizers).
CHARS_PER_TOKEN, LONGEST_TOKEN_CHUNK = 4, 8
# A chunk usually is a token, give or take what is held back for half a character; beyond this ratio chunks and tokens
# are different things (speculative decoding, batched output).
MULTI_TOKEN_RATIO = 1.25
# `usage` below this share of the aimed-at prompt: the server has cut the prompt, not our estimate been off.
PROMPT_KEPT_RATIO = 0.75
# A stream whose tokens all come within this share of the time to the first one was collected by somebody on the way.
BUFFERED_SPAN_RATIO = 0.02

# Events that a stencil may stand for: of the others each is different.
STENCILLED = frozenset({"content", "reasoning"})
# Cutting one costs about as much as decoding so many chunks; that often it may be in vain.
STENCIL_WORTH, STENCIL_TRIES = 8, 2

SSE_PREFIXES = (b"data:", b"event:", b"retry:", b"error:", b"id:", b":")
# Before the JSON of an event; and what of a web page is no text.
EVENT_HEAD = re.compile(rb"(?:event:[^\n]*\n)?data:")
MARKUP = re.compile(r"<(style|script)\b.*?</\1>|<!--.*?-->|</?[a-z!][^<>]*>", re.IGNORECASE | re.DOTALL)
CONTEXT_LIMIT = re.compile(
    r"context[ _](?:length|size|window|limit)|maximum (?:context|input|sequence|prompt)|max_(?:model|seq|total|input)_"
    r"(?:len|length|tokens)|exceed_context|(?:prompt|input)\b.{0,40}\b(?:too long|longer than|exceeds?)\b"
    r"|\binputs?\b.{0,40} must (?:have less than|be <=) |max_num_tokens",
    re.IGNORECASE | re.DOTALL,
)
CONTEXT_STATUSES = frozenset({400, 413, 422, 500})
# "Come back later" where it says when; 529 is Anthropic's.
OVERLOADED = frozenset({503, 529})


@dataclass(frozen=True, slots=True)
class End:
    """How the exchange ended on the wire: with an error class, or None where the framing said that all had come."""

    error_class: str | None
    message: str
    at_ns: int


class Answer:
    """One answer in the making. The client reads `last_ns` (the last token) and `terminal_ns` (nothing more is to be
    expected: [DONE] or an error) for its limits."""

    __slots__ = (
        "_body", "_body_limit", "_calls", "_chars", "_decoder", "_dialect", "_error", "_events", "_expect_all",
        "_finished", "_fitted", "_held", "_mime", "_outcome", "_reasoning", "_rested", "_status", "_stencil",
        "_stencils", "_text", "_usage", "_zero_gaps", "last_ns", "terminal_ns",
    )  # fmt: skip

    def __init__(self, request: Request, dialect: Dialect) -> None:
        self._outcome = Outcome(
            request.id, request.cls, request.phase, request.seat, request.cache, "failed", request.due_ns,
            prompt_tokens_target=request.prompt_tokens, max_tokens=request.max_tokens, tags=dict(request.tags),
        )  # fmt: skip
        self._expect_all = request.ignore_eos
        self._dialect = dialect
        self._status = 0
        self._mime = ""
        self._decoder: Decoder | None = None
        self._held = b""
        self._body: bytearray | None = None
        self._body_limit = ERROR_BODY_BYTES
        self._error: tuple[str, str, int] | None = None
        self._finished: Event | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[ToolCall, list[str]]] = {}
        self._chars = 0
        self._events = 0
        self._usage: dict[str, int] = {}
        self._zero_gaps = 0
        self._rested = False  # the decoder stands between two events
        self._stencil: Stencil | None = None
        self._stencils = self._fitted = 0
        self.last_ns: int | None = None
        self.terminal_ns: int | None = None

    @property
    def tail(self) -> bytes | None:
        """How the next read of a token ends, chunked as HTTP does; None where that is not known."""
        return None if self._stencil is None else self._stencil.tail

    @property
    def outcome(self) -> Outcome:
        return self._outcome

    def begin(self, status: int, headers: Mapping[str, str], wall_ns: int) -> None:
        """The head of the response; `wall_ns` is for a Retry-After that is a date."""
        self._status = self._outcome.http_status = status
        self._mime = headers.get("content-type", "").partition(";")[0].strip().lower()
        self._outcome.retry_after_s = retry_after_s(headers.get("retry-after"), wall_ns)
        if self._outcome.retry_after_s is None and (ms := retry_after_s(headers.get("retry-after-ms"), wall_ns)):
            self._outcome.retry_after_s = ms / 1000  # Azure and OpenAI
        if status not in OK_STATUSES:
            self._body = bytearray()

    def single(self, reads: list[bytes], times_ns: list[int]) -> tuple[list[bytes], list[int]]:
        """Reads that end with `tail`, cut where an earlier chunk of them does."""
        return (reads, times_ns) if self._stencil is None else self._stencil.single(reads, times_ns)

    def quick(self, reads: list[bytes], first: int, times_ns: list[int]) -> int:
        """Take reads, each a whole HTTP chunk, from `first` on, while they differ from an earlier one in nothing but
        their text; returns how many. The next one is for the parser and for `piece`."""
        stencil = self._stencil
        if stencil is None or self.last_ns is None or not self._rested:
            return 0
        n, text = stencil.texts(reads, first)
        if not n:
            return 0
        outcome = self._outcome
        arrivals = [self.last_ns, *times_ns[first : first + n]]
        gaps_ns = array("q", map(sub, arrivals[1:], arrivals))
        outcome.gaps_ns += gaps_ns
        self._zero_gaps += gaps_ns.count(0)
        self.last_ns = arrivals[-1]
        outcome.chunks += n
        self._fitted += n
        self._events += n
        self._chars += len(text)
        self._keep(self._reasoning if stencil.kind == "reasoning" else self._text, text)
        return n

    def piece(self, data: bytes, at_ns: int) -> None:
        """Some bytes of the body, decompressed."""
        if self._decoder is not None:
            stencil = self._stencil  # here too: what has piled up must not have the dearer work for it
            if stencil is not None and self._rested and (text := stencil.text(data)):
                self._fitted += 1
                self._take([Event(stencil.kind, text, at_ns)])
                return
            try:
                events = self._decoder.feed(data, at_ns)
            except EventTooLargeError as error:
                self._fail("protocol_error", str(error), at_ns)
                self._decoder, self._body, self._body_limit = None, bytearray(), 0
                return
            if events:
                self._take(events)
            rested, self._rested = self._rested, data.endswith(b"\n\n")
            if rested and self._rested and len(events) == 1 and events[0].kind in STENCILLED:
                self._cut(data, events[0])
        elif self._body is not None:
            room = self._body_limit - len(self._body)
            self._body += data[:room]
            if len(data) > room and self._body_limit == MAX_BODY_BYTES:
                self._fail("protocol_error", f"a JSON answer of more than {MAX_BODY_BYTES} bytes", at_ns)
        else:
            self._recognise(self._held + data, at_ns)

    def _cut(self, data: bytes, event: Event) -> None:
        """The next pieces may be alike; where they never are, this is not tried for ever."""
        if self._stencils * STENCIL_WORTH <= self._fitted + STENCIL_TRIES * STENCIL_WORTH:
            self._stencils += 1
            self._stencil = cut(data, event, self._dialect)

    def _recognise(self, held: bytes, at_ns: int) -> None:
        """Event stream or JSON? The first bytes are believed more than the content type: JSON errors come under
        `text/event-stream`, and streams as `text/plain`."""
        start = held.removeprefix(b"\xef\xbb\xbf").lstrip()
        stream = self._mime == "text/event-stream"
        if start[:1] in (b"{", b"["):
            self._body, self._body_limit = bytearray(), MAX_BODY_BYTES
        elif start and self._dialect.STREAMS and (stream or start.startswith(SSE_PREFIXES)):
            self._decoder = self._dialect.decoder()
            if not stream:
                self._outcome.flags.add("odd_content_type")
        elif not start or any(prefix.startswith(start) for prefix in SSE_PREFIXES):
            self._held = held[-ERROR_BODY_BYTES:]  # too little to tell; blank bytes carry no event and no time
            return
        else:
            kind = self._mime or "an answer without content-type"
            wanted = "an event stream" if self._dialect.STREAMS else "JSON"
            message = f"HTTP {self._status}, {kind} instead of {wanted}: {_quoted(held)}"
            self._fail("unexpected_content_type", message, at_ns)
            self._body, self._body_limit = bytearray(), 0
        self._held = b""
        self.piece(held, at_ns)

    def _take(self, events: list[Event]) -> None:
        outcome = self._outcome
        for event in events:
            kind = event.kind
            self._events += 1
            if kind == "content" or kind == "reasoning" or kind == "tool_call" or kind == "refusal":
                at = event.at_ns
                if event.data is None or "same_chunk" not in event.data:
                    if self.last_ns is None:
                        outcome.first_ns = at
                    else:
                        gap = at - self.last_ns
                        outcome.gaps_ns.append(gap)
                        self._zero_gaps += not gap
                    self.last_ns = at
                    outcome.chunks += 1
                self._chars += len(event.text)
                if kind == "reasoning":
                    if not event.index:
                        self._keep(self._reasoning, event.text)
                    continue
                if outcome.first_output_ns is None:
                    outcome.first_output_ns = at
                if kind == "tool_call":
                    self._call(event)
                elif not event.index:
                    self._keep(self._text, event.text)
            elif kind == "usage":
                for name, number in (event.data or {}).items():
                    if number or name not in self._usage:  # a zero behind a figure is a field left unfilled
                        self._usage[name] = number
            elif kind == "finish":
                if self._finished is None or (self._finished.index and not event.index):
                    self._finished = event
            elif kind == "error":
                # Some answer 200 before they look at the prompt's length; an error later on is one of the engine.
                too_long = not outcome.chunks and CONTEXT_LIMIT.search(event.text)
                self._fail("context_limit" if too_long else "in_band_error", event.text, event.at_ns)
            elif kind == "done":
                self.terminal_ns = self.terminal_ns or event.at_ns

    def _keep(self, parts: list[str], text: str) -> None:
        if self._chars > MAX_TEXT_CHARS:
            self._outcome.flags.add("text_cut")
            text = text[: max(0, MAX_TEXT_CHARS - self._chars + len(text))]
        parts.append(text)
        if len(parts) > 4096:  # a million small strings cost 50 bytes each
            parts[:] = ["".join(parts)]

    def _call(self, event: Event) -> None:
        if event.index not in self._calls:
            if len(self._calls) >= MAX_TOOL_CALLS:
                self._outcome.flags.add("text_cut")
                return
            self._calls[event.index] = ToolCall("", "", ""), []
        call, arguments = self._calls[event.index]
        data = event.data or {}
        call.id = call.id or data.get("id", "")
        call.name = call.name or data.get("name", "")
        self._keep(arguments, event.text)

    def _fail(self, error_class: str, message: str, at_ns: int) -> None:
        """The first reason counts. Nothing more is expected then, whether or not the server ends the body."""
        if self._error is None:
            self._error = (error_class, message, at_ns)
            self.terminal_ns = self.terminal_ns or at_ns

    # The end ---------------------------------------------------------------------------------------------------------

    def conclude(self, end: End) -> Outcome:
        """The finished outcome; call once."""
        outcome = self._outcome
        if self._held and self._decoder is None and self._body is None:
            self._recognise(self._held + b"\n" if self._mime == "text/event-stream" else self._held, end.at_ns)
        if self._decoder is not None:
            done = self.terminal_ns is not None
            self._take(self._decoder.close(end.at_ns))
            outcome.flags |= self._decoder.flags
            if self._decoder.cut and not done and end.error_class is None:
                end = End("stream_truncated", "the stream ends in the middle of an event", end.at_ns)
        elif self._status in OK_STATUSES and self._body_limit == MAX_BODY_BYTES and end.error_class is None:
            self._whole(end.at_ns)
        outcome.last_ns, outcome.done_ns, outcome.inexact = self.last_ns, end.at_ns, self._zero_gaps
        outcome.text, outcome.reasoning_text = characters("".join(self._text)), characters("".join(self._reasoning))
        for _, (call, arguments) in sorted(self._calls.items()):
            call.id, call.name, call.arguments = map(characters, (call.id, call.name, "".join(arguments)))
            outcome.tool_calls.append(call)
        if self._finished is not None:
            outcome.finish_reason = self._finished.text or one_line((self._finished.data or {}).get("raw", ""))
        self._count_tokens()
        error = self._verdict(end)
        if error is None:
            outcome.outcome = "ok"
            self._flag()
        elif error[0] == "cancelled":
            outcome.outcome, outcome.error_class, outcome.error_message = "incomplete", error[0], error[1]
        else:
            outcome.error_class, outcome.error_message, outcome.done_ns = error[0], one_line(error[1]), error[2]
        return outcome

    def _whole(self, at_ns: int) -> None:
        """JSON in one piece: every time of it is the time of its end."""
        body = bytes(self._body or b"")
        try:
            events = self._dialect.whole(body, self._outcome.flags)
        except ValueError as error:
            self._fail("protocol_error", f"the JSON answer cannot be read ({error}): {_quoted(body)}", at_ns)
            return
        if not events:
            self._fail("unexpected_content_type", f"JSON, but no answer: {_quoted(body)}", at_ns)
        for event in events:
            event.at_ns = at_ns
        self._take(events)

    def _verdict(self, end: End) -> tuple[str, str, int] | None:
        """The reason of the failure, or None. What the server said outweighs how the connection ended."""
        if self._status and self._status not in OK_STATUSES:
            return self._refused(end)
        if self._error is not None:
            return self._error
        if self._finished is not None and not self._finished.text:
            message = (self._finished.data or {}).get("message")
            said = f"finish_reason {self._outcome.finish_reason!r}" + (f": {message}" if message else "")
            return "aborted_by_server", said, self._finished.at_ns
        if end.error_class == "cancelled" and self.terminal_ns is None:
            return "cancelled", end.message, end.at_ns
        if end.error_class is not None and self.terminal_ns is None:
            return end.error_class, end.message, end.at_ns
        silent = self._dialect.STREAMS and not self._outcome.chunks and not self._usage.get("output_tokens")
        if self._finished is None and (silent or not self._events):
            if self._events and self.terminal_ns is None:
                return "stream_truncated", "the stream ends without a token and without finish_reason", end.at_ns
            return "empty_response", f"status {self._status} without an answer", end.at_ns
        if self._finished is None and self.terminal_ns is None:
            return "stream_truncated", "the stream ends without finish_reason and without [DONE]", end.at_ns
        if end.error_class is not None:  # all had been said; the body's own end is missing
            self._outcome.flags.add("unterminated_body")
            self._outcome.done_ns = self.terminal_ns
        return None

    def _refused(self, end: End) -> tuple[str, str, int]:
        """Any status but 200."""
        status, body = self._status, bytes(self._body or b"")
        message = f"HTTP {status}: {told(body)}"
        retry = self._outcome.retry_after_s is not None
        if status in (401, 403):
            return "unauthorized", message, end.at_ns
        if status == 429 or (status in OVERLOADED and retry):
            return "rate_limited", message, end.at_ns
        if status in CONTEXT_STATUSES and CONTEXT_LIMIT.search(body.decode(errors="replace")):
            return "context_limit", message, end.at_ns
        if status == 204:
            return "empty_response", message, end.at_ns
        return "http_error", message, end.at_ns

    def _count_tokens(self) -> None:
        outcome, usage = self._outcome, self._usage
        outcome.prompt_tokens = usage.get("prompt_tokens")
        outcome.cached_tokens = usage.get("cached_tokens")
        outcome.reasoning_tokens = usage.get("reasoning_tokens")
        counted = usage.get("output_tokens")
        if counted or (counted == 0 and not outcome.chunks):  # a zero beside text is a field left unfilled
            outcome.output_tokens, outcome.output_tokens_source = counted, "usage"
        elif self._status in OK_STATUSES and self._dialect.STREAMS:
            longer = self._chars > LONGEST_TOKEN_CHUNK * outcome.chunks
            outcome.output_tokens = round(self._chars / CHARS_PER_TOKEN) if longer else outcome.chunks
            outcome.output_tokens_source = "estimated"

    def _flag(self) -> None:
        outcome, flags = self._outcome, self._outcome.flags
        if not self._dialect.STREAMS:
            flags |= set() if outcome.prompt_tokens is not None else {"no_usage"}
            return
        streamed = self._decoder is not None
        tokens = outcome.output_tokens or 0
        if streamed and self.terminal_ns is None:
            flags.add("no_done_marker")
        if self._finished is None:
            flags.add("no_finish_reason")
        if outcome.output_tokens_source != "usage":
            flags.add("no_usage")
        if outcome.reasoning_tokens and not self._reasoning:
            flags.add("hidden_reasoning")
            tokens -= outcome.reasoning_tokens
        if not outcome.chunks:
            flags.add("no_visible_output")
        elif outcome.first_output_ns is None:
            flags.add("reasoning_only")
        if streamed and outcome.chunks and tokens >= max(outcome.chunks + 2, outcome.chunks * MULTI_TOKEN_RATIO):
            flags.add("multi_token_chunks")
        gaps, zero = len(outcome.gaps_ns), self._zero_gaps
        if zero and (zero == gaps or (zero > 1 and zero * 10 >= gaps)):
            flags.add("coalesced_arrivals")
        span_ns = (self.last_ns or 0) - (outcome.first_ns or 0)
        if not streamed or (zero * 2 > gaps and span_ns <= (outcome.ttft_ns or 0) * BUFFERED_SPAN_RATIO):
            flags.add("buffered_stream")
        counted = outcome.output_tokens_source == "usage" and outcome.output_tokens is not None
        if self._expect_all and counted and (outcome.output_tokens or 0) < (outcome.max_tokens or 0):
            flags.add("short_output")
        target, prompt = outcome.prompt_tokens_target, outcome.prompt_tokens
        if target is not None and prompt is not None and prompt < target * PROMPT_KEPT_RATIO:
            flags.add("prompt_truncated")


def told(body: bytes) -> str:
    """What the body of a refusal says, in one line, whatever its shape: JSON, an event of it, a proxy's web page."""
    event = EVENT_HEAD.sub(b"", body.lstrip()).partition(b"\n\n")[0]
    try:
        message = error_text(orjson.loads(event))
    except orjson.JSONDecodeError:
        message = None
    text = body.decode(errors="replace")
    return message or one_line(MARKUP.sub(" ", text)) or one_line(text) or "no body"


def retry_after_s(value: str | None, wall_ns: int) -> float | None:
    """Retry-After: seconds, or an HTTP date; None where it says nothing usable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - wall_ns / 1e9
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if seconds < float("inf") else None


def _quoted(body: bytes) -> str:
    return repr(body[:80].decode(errors="replace"))
