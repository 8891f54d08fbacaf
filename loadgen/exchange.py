"""One request on one connection: what has arrived and when, its limits, and how it ended.

No sockets here: a reader tells it what it sent, received and lost, with the times that it knows. The bytes are framed
at once and decoded later, by `Client`, when the loop has no socket to read.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from loadgen.address import reason
from loadgen.answer import End
from loadgen.clock import now_ns, wall_ns
from loadgen.http1 import EncodingError, ProtocolError, Response
from loadgen.types import Limits, TimesSource

# Undecoded bytes of one response, then its socket is not read until half of them are worked off.
BACKLOG_BYTES = 4 * 1024 * 1024
# What is decoded at once, between two looks at the clock: 100 usual events, 0.5 ms. A flood comes in larger pieces.
DECODE_BYTES = 16 * 1024
# Decoding in one turn of the loop; what is read next is read later by at most this much because of it.
SLICE_NS = 1_000_000
# Reads of one stream that may wait to be worked off together: many at once find code and data in the processor's cache,
# which one every 20 ms does not (5 µs a chunk at 256 streams). They are 8 KiB a stream, and 2/3 s at 50 tokens/s.
MAX_WAITING = 32
# After [DONE] or an error event, how long the body's own end is waited for, so that the connection can be kept.
TERMINAL_GRACE_NS = 250_000_000


class Sink(Protocol):
    """Where a response goes: an Answer, or a plain body."""

    last_ns: int | None
    terminal_ns: int | None

    @property
    def tail(self) -> bytes | None: ...

    def begin(self, status: int, headers: Mapping[str, str], wall_ns: int) -> None: ...

    def single(self, reads: list[bytes], times_ns: list[int]) -> tuple[list[bytes], list[int]]: ...

    def quick(self, reads: list[bytes], first: int, times_ns: list[int]) -> int: ...

    def piece(self, data: bytes, at_ns: int) -> None: ...


class Reader(Protocol):
    """What an exchange asks of the connection that feeds it."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...


class Exchange:
    """One request on one connection: what has arrived and when, and how it ended.

    It knows no sockets: a reader calls `sent`, `received` and `lost` with the times that it knows. One timer serves
    all limits; it is armed for the earliest and looks again when it fires, so a chunk costs no timer.
    """

    __slots__ = (
        "_armed_ns", "_begun", "_decode_in_turn", "_last_byte_ns", "_loop", "_queued", "_second_look", "_timer",
        "_waiting", "_waiting_ns", "connection", "cut", "end", "ended", "first_byte_ns", "lags_ns", "limits", "paused",
        "response", "sent_ns", "sink", "started_ns", "stepped", "tail", "times", "waiter",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        decode_soon: Callable[[Exchange], None],
        sink: Sink,
        limits: Limits,
        started_ns: int,
    ) -> None:
        self._loop = loop
        self._decode_in_turn = decode_soon
        self.sink = sink
        self.limits = limits
        self.started_ns = started_ns
        self.response = Response()
        self.connection: Reader | None = None
        self.sent_ns: int | None = None
        self.first_byte_ns: int | None = None
        self.end: End | None = None
        self.waiter: asyncio.Future[Any] | None = None  # what the caller waits for before it is on the wire
        self.ended: asyncio.Future[None] = loop.create_future()
        self.cut: str | None = None
        self.tail: bytes | None = None  # reads that end so may wait
        self.paused = False  # we could not keep up for a while: later arrival times are late by our own fault
        self.times: TimesSource | None = None  # what the arrival times are; the reader says so
        self.stepped = False  # the wall clock was set meanwhile, so some times are those of our reads
        self.lags_ns: array[int] = array("q")  # how late we read what the kernel had received, one a read
        self._waiting: list[bytes] = []  # reads that look like one more token, and when they came
        self._waiting_ns: list[int] = []
        self._last_byte_ns = started_ns
        self._begun = False
        self._queued = False
        self._second_look = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns = 0

    # Told by the reader ----------------------------------------------------------------------------------------------

    def sent(self, at_ns: int) -> None:
        """The last byte of the request is with the kernel."""
        self.sent_ns = at_ns
        self._watch()

    def writing(self, at_ns: int) -> None:
        """The server takes the request, bit by bit."""
        self._last_byte_ns = at_ns
        self._watch()

    def received(self, data: bytes, at_ns: int) -> None:
        response = self.response
        if self.end is not None:
            response.leftover = True
            return
        self._last_byte_ns = at_ns
        if self.tail is not None and data.endswith(self.tail):
            self._waiting.append(data)
            self._waiting_ns.append(at_ns)
            if len(self._waiting) >= MAX_WAITING or len(data) > DECODE_BYTES:
                self.work_off()
            return
        if self._waiting:
            self.work_off()
        self._feed(data, at_ns)

    def _feed(self, data: bytes, at_ns: int) -> None:
        response = self.response
        first = self.first_byte_ns is None
        if first:
            self.first_byte_ns = at_ns
        try:
            response.feed(data, at_ns)
        except EncodingError as error:
            self.finish("unexpected_content_encoding", str(error), at_ns)
        except ProtocolError as error:
            hint = " (TLS? then the address is https://)" if data[:2] == b"\x15\x03" else ""
            self.finish("protocol_error", f"{error}{hint}", at_ns)
        else:
            if response.complete:
                self._framed_end(at_ns)
            elif response.pending_bytes > BACKLOG_BYTES and self.connection is not None:
                self.paused = True
                self.connection.pause()
        if first:
            self._watch()
        self._decode_soon()

    @property
    def last_token_ns(self) -> int | None:
        """When a token last came, or a read that looks like one more; None before the first."""
        return self._waiting_ns[-1] if self._waiting_ns else self.sink.last_ns

    def work_off(self) -> None:
        """Take the reads that wait, as far as they are what they look like."""
        reads, times_ns, self._waiting, self._waiting_ns = self._waiting, self._waiting_ns, [], []
        if self.tail == self.sink.tail:
            reads, times_ns = self.sink.single(reads, times_ns)
        response, n = self.response, 0
        while n < len(reads):
            if self.end is not None:
                response.leftover = True
                return
            if response.between and not self._queued:
                n += self.sink.quick(reads, n, times_ns)
            if n < len(reads):
                self._feed(reads[n], times_ns[n])
                n += 1
                if self._queued and self.end is None:
                    self.decode(now_ns() + SLICE_NS)  # one piece or two, then the others are quick again

    def lost(self, error: BaseException | None, at_ns: int) -> None:
        """The connection is gone: closed (None) or broken."""
        if self.end is not None:
            return
        if self._waiting:
            self.work_off()
        response = self.response
        if error is not None:
            self.finish("connection_reset", f"connection lost: {reason(error)}", at_ns)
        elif self.first_byte_ns is None:
            self.finish("empty_response", "the server closed the connection without a byte", at_ns)
        else:
            response.eof()
            self._framed_end(at_ns)

    def _framed_end(self, at_ns: int) -> None:
        if self.response.truncated:
            self.finish("stream_truncated", "the connection ended before the response did", at_ns)
        else:
            self.finish(None, "", at_ns)

    def finish(self, error_class: str | None, message: str, at_ns: int) -> None:
        """The wire is done with; what has arrived is still decoded before the caller hears of it."""
        if self.end is None:
            if self._waiting and error_class is not None:
                self.work_off()
            self.end = End(error_class, message, at_ns)
            self._decode_soon()

    # Decoding --------------------------------------------------------------------------------------------------------

    def _decode_soon(self) -> None:
        if not self._queued and (self.response.pieces or self.end is not None):
            self._queued = True
            self._decode_in_turn(self)

    def decode(self, until_ns: int) -> bool:
        """Work off what has arrived, until the time is up. True when nothing is left."""
        response, sink = self.response, self.sink
        if not self._begun and response.head_ns is not None:
            self._begun = True
            sink.begin(response.status, response.headers, wall_ns())
        pieces, terminal = response.pieces, sink.terminal_ns
        while pieces:
            at_ns, data = pieces.popleft()
            if len(data) > DECODE_BYTES:
                pieces.appendleft((at_ns, data[DECODE_BYTES:]))
                data = data[:DECODE_BYTES]
            response.pending_bytes -= len(data)
            try:
                sink.piece(data, at_ns)
            except Exception as error:  # a decoder's own fault must cost its request only, not every stream's decoding
                self.finish("protocol_error", f"the decoder failed: {error!r}", at_ns)
                pieces.clear()
                break
            if now_ns() >= until_ns:
                break
        if sink.terminal_ns != terminal:
            self._watch()
        if self.connection is not None and response.pending_bytes < BACKLOG_BYTES // 2:
            self.connection.resume()
        if pieces:
            return False
        self._queued = False
        # Only between two chunks, which the response knows, and only the reads of one whole event each wait.
        self.tail = sink.tail if response.between and sink.tail is not None else None
        if self.end is not None and not self.ended.done():
            self.release()
            self.ended.set_result(None)
        return True

    def release(self) -> None:
        """Let go of timer, parser and connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.response.forget()

    # Limits ----------------------------------------------------------------------------------------------------------

    def _due(self) -> tuple[int, str | None, str]:
        """The earliest limit: when, its error class, its message."""
        limits, sink, last = self.limits, self.sink, self._last_byte_ns
        total = self.started_ns + ns(limits.timeout), "total_timeout", f"not done after {limits.timeout:g} s"
        first: tuple[int, str | None, str]
        if sink.terminal_ns is not None:
            first = sink.terminal_ns + TERMINAL_GRACE_NS, "total_timeout", "the body has no end"
        elif self.first_byte_ns is not None:
            idle = last + ns(limits.idle_timeout), "idle_timeout", f"no byte for {limits.idle_timeout:g} s"
            since = max(self.first_byte_ns, sink.last_ns or 0)
            progress = (
                since + ns(limits.progress_timeout),
                "progress_timeout",
                f"bytes, but no token for {limits.progress_timeout:g} s",
            )
            first = idle if idle[0] <= progress[0] else progress
        elif self.sent_ns is not None:
            seconds = limits.header_timeout
            first = self.sent_ns + ns(seconds), "header_timeout", f"no response byte for {seconds:g} s"
        else:
            first = last + ns(limits.idle_timeout), "idle_timeout", "the server stopped reading the request"
        return first if first[0] <= total[0] else total

    def _watch(self) -> None:
        """Arm the timer, if the earliest limit moved nearer or there is none."""
        due_ns = self._due()[0]
        if self.end is None and (self._timer is None or due_ns < self._armed_ns):
            if self._timer is not None:
                self._timer.cancel()
            self._armed_ns = due_ns
            # The loop's timers count whole milliseconds: one more, or it would fire early and look twice.
            self._timer = self._loop.call_later(max(0, due_ns - now_ns()) / 1e9 + 0.001, self._look)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self.work_off()
        due_ns, error_class, message = self._due()
        now = now_ns()
        if now < due_ns or self.response.pieces or self.end is not None:
            self._second_look = False
            self._watch()
        elif not self._second_look:
            # If it was we who slept, the bytes are waiting: timers run before sockets are read. What is called soon in
            # a call soon runs when all sockets have been read once.
            self._second_look = True
            self._loop.call_soon(self._loop.call_soon, self._look)
        else:
            self.finish(error_class, message, now)
            if self.connection is not None:
                self.connection.abort()


def ns(seconds: float) -> int:
    return int(seconds * 1e9)
