"""The streaming HTTP client: own connections, own clock stamps, hard limits; one Outcome per request.

On the way of a byte: a reader of `receive` takes it from its socket with the time of its arrival and lets
`http1.Response` frame it. Decoding waits for the end of the loop's turn and is done in slices of at most 1 ms, so that
no stream's decoding delays another stream's read. Not aiohttp: its own queues move arrival times by up to 40 ms at a
few hundred streams. What a server does wrong is in the Outcome; only `get_json` and its like raise.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar, cast

import orjson

from loadgen import __version__
from loadgen.address import ConnectError, Route, routes
from loadgen.answer import ERROR_BODY_BYTES, MAX_BODY_BYTES, Answer, told
from loadgen.clock import now_ns
from loadgen.connect import connect
from loadgen.dialects import Dialect, one_line
from loadgen.exchange import SLICE_NS, Exchange, Sink
from loadgen.http1 import request_head, with_length
from loadgen.receive import Connection, KernelReaders, keep_stamping
from loadgen.types import Limits, NotReadyError, Outcome, Request, Seconds, Target, UserError

T = TypeVar("T")

# How long `close` waits for connections to be gone.
CLOSE_S = 1.0


# Headers whose values are secrets, however short.
SECRET_NAME = re.compile(r"auth|key|token|secret|cookie", re.IGNORECASE)


class NoEndpointError(UserError):
    """The server answered, but has nothing (that works) at this path."""


class Body:
    """The plain body of a control call."""

    def __init__(self) -> None:
        self.last_ns: int | None = None
        self.terminal_ns: int | None = None
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.content = bytearray()

    def begin(self, status: int, headers: Mapping[str, str], wall_ns: int) -> None:
        self.status, self.headers = status, headers

    @property
    def tail(self) -> bytes | None:
        return None

    def single(self, reads: list[bytes], times_ns: list[int]) -> tuple[list[bytes], list[int]]:
        return reads, times_ns

    def quick(self, reads: list[bytes], first: int, times_ns: list[int]) -> int:
        return 0

    def piece(self, data: bytes, at_ns: int) -> None:
        self.last_ns = at_ns  # any byte is progress here
        self.content += data[: MAX_BODY_BYTES - len(self.content)]


class Server:
    """One server of the target: the way there, the head of a request, and the connections that are free."""

    __slots__ = ("idle", "post", "route")

    def __init__(self, route: Route, post: bytes) -> None:
        self.route = route
        self.post = post
        self.idle: list[Connection] = []

    def kept(self) -> Connection | None:
        """The connection used last: the others may grow old and be closed by the server."""
        while self.idle:
            connection = self.idle.pop()
            if connection.alive:
                return connection
        return None


class Client:
    """Requests to one target. `headers` are the caller's, secrets included; they are sent and never shown.

    `connections` bounds the open ones; a request beyond them waits, and its wait is `queue_ns`. `kernel_times` False
    leaves the kernel's receive times alone. It belongs to the loop that first uses it.
    """

    def __init__(
        self,
        target: Target,
        limits: Limits,
        dialect: Dialect | ModuleType,
        *,
        model: str,
        headers: Mapping[str, str],
        connections: int,
        kernel_times: bool = True,
    ) -> None:
        self.target = target
        self.limits = limits
        self.dialect = cast(Dialect, dialect)
        self.model = model
        self.connections: set[Connection] = set()
        self.connections_opened = 0
        self._headers = {
            "user-agent": f"loadgen/{__version__}",
            "accept": "text/event-stream, application/json",
            "accept-encoding": "identity",
            "content-type": "application/json",
        } | {name.lower(): value for name, value in {**target.headers, **headers}.items()}
        self._secrets = _secret_words(headers)
        ways = routes(target, os.environ)
        self._servers = [Server(way, self._head("POST", way, target.endpoint or dialect.PATH)) for way in ways]
        self._kernel_times = kernel_times
        if kernel_times:
            keep_stamping()
        self.kernel: KernelReaders | None = None
        self._last_token_ns: int | None = None
        self._free = max(1, connections)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._active: set[Exchange] = set()
        self._ready: deque[Exchange] = deque()
        self._decoding = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    @property
    def in_flight(self) -> int:
        return len(self._active)

    @property
    def last_token_ns(self) -> int | None:
        """When any stream last gave a token, as far as it can be told without decoding; None before the first."""
        last = [at_ns for exchange in self._active if (at_ns := exchange.last_token_ns) is not None]
        if last:
            self._last_token_ns = max(self._last_token_ns or 0, *last)
        return self._last_token_ns

    async def send(self, request: Request, body: bytes) -> Outcome:
        """Send one encoded request and follow its answer to the end. Raises nothing but CancelledError."""
        answer = Answer(request, self.dialect)
        outcome = answer.outcome
        number = request.server % len(self._servers)
        server = self._servers[number]
        if len(self._servers) > 1:
            outcome.tags["server"] = str(number)
        exchange = await self._perform(answer, server, server.post, body, self.limits, outcome)
        assert exchange.end is not None
        outcome.sent_ns, outcome.first_byte_ns = exchange.sent_ns, exchange.first_byte_ns
        outcome.times, outcome.lags_ns = exchange.times, exchange.lags_ns
        if exchange.paused:
            outcome.flags.add("client_backlog")
        if exchange.stepped:
            outcome.flags.add("clock_step")
        answer.conclude(exchange.end)
        if outcome.error_message is not None:
            outcome.error_message = self._clean(outcome.error_message)
        return outcome

    def abort_all(self) -> None:
        """Cut every request now: each pending `send` returns an incomplete Outcome."""
        for exchange in list(self._active):
            exchange.cut = "cut by us"
            if exchange.waiter is not None:
                exchange.waiter.cancel()
            exchange.finish("cancelled", exchange.cut, now_ns())
            if exchange.connection is not None:
                exchange.connection.abort()

    async def close(self) -> None:
        """Cut what runs, close what is open, and wait until it is gone."""
        self.abort_all()
        gone = [connection.gone for connection in self.connections]
        for connection in list(self.connections):
            connection.abort()
        if gone:
            await asyncio.wait(gone, timeout=CLOSE_S)
        if self.kernel is not None:
            self.kernel.close()
            self.kernel = None

    # Control calls ---------------------------------------------------------------------------------------------------

    async def get_json(self, path: str, timeout_s: float = 10.0) -> Any:
        """The JSON at a path of the target. Raises NotReadyError where nobody serves, UserError where it is the wrong
        address or the wrong key."""
        return self._json(path, await self._control("GET", path, b"", timeout_s))

    async def post_json(self, path: str, obj: Any, timeout_s: float = 10.0) -> Any:
        """As `get_json`, with a body."""
        return self._json(path, await self._control("POST", path, orjson.dumps(obj), timeout_s))

    async def get_text(self, path: str, timeout_s: float = 10.0) -> str:
        """The text at a path of the target; raises as `get_json`."""
        return (await self._control("GET", path, b"", timeout_s)).content.decode(errors="replace")

    async def _control(self, method: str, path: str, content: bytes, timeout_s: float) -> Body:
        body, seconds = Body(), Seconds(timeout_s)
        limits = Limits(min(seconds, self.limits.connect_timeout), seconds, seconds, seconds, seconds)
        server = self._servers[0]
        exchange = await self._perform(body, server, self._head(method, server.route, path), content, limits, None)
        where = f"{self.target.url} {path}"
        end = exchange.end
        if end is not None and end.error_class is not None:
            message = self._clean(f"{where}: {end.message}")
            if end.error_class in ("dns_error", "tls_error", "protocol_error", "unexpected_content_encoding"):
                raise UserError(message)
            raise NotReadyError(message)
        said = self._clean(told(bytes(body.content[:ERROR_BODY_BYTES])))
        if body.status in (401, 403):
            key = f"the server wants another API key ({said}); set `api_key`"
            raise UserError(f"{where}: HTTP {body.status}, {key}")
        if body.status in (429, 503):
            raise NotReadyError(f"{where}: HTTP {body.status}: {said}")
        if body.status != 200:
            raise NoEndpointError(f"{where}: HTTP {body.status}: {said}")
        return body

    def _json(self, path: str, body: Body) -> Any:
        try:
            return orjson.loads(body.content)
        except orjson.JSONDecodeError:
            kind = body.headers.get("content-type", "no content-type")
            quoted = self._clean(one_line(body.content[:60].decode(errors="replace")))
            raise NoEndpointError(f"{self.target.url} {path}: not JSON ({kind}: {quoted!r})") from None

    # One request -----------------------------------------------------------------------------------------------------

    async def _perform(
        self, sink: Sink, server: Server, head: bytes, body: bytes, limits: Limits, outcome: Outcome | None
    ) -> Exchange:
        """A seat in the pool, a connection, the exchange; and once more on a fresh connection, where a kept one proved
        to be closed before it gave a byte. The exchange that comes back has an `end`."""
        started = now_ns()
        exchange = Exchange(self.loop, self._decode_soon, sink, limits, started)
        self._active.add(exchange)
        head = with_length(head, len(body))
        seated = self._free > 0
        try:
            if seated:
                self._free -= 1
            else:
                seat: asyncio.Future[None] = self.loop.create_future()
                self._waiting.append(seat)
                try:
                    await self._before(exchange, seat)
                finally:  # the seat may have been handed over in the very turn in which we were cancelled
                    seated = seat.done() and not seat.cancelled()
            queued = now_ns()
            connection = server.kept()
            if connection is None:
                connection = await self._before(exchange, self.loop.create_task(self._connect(server, limits)))
                if outcome is not None:
                    outcome.connect_ns = now_ns() - queued
            if outcome is not None:
                outcome.queue_ns = queued - started
            await self._run(exchange, server, connection, head, body)
            if connection.served and _stale(exchange):
                self._active.discard(exchange)
                exchange = Exchange(self.loop, self._decode_soon, sink, limits, started)
                self._active.add(exchange)
                again = now_ns()
                if outcome is not None:
                    outcome.flags.add("stale_connection_retry")
                connection = await self._before(exchange, self.loop.create_task(self._connect(server, limits)))
                if outcome is not None:
                    outcome.connect_ns = now_ns() - again
                await self._run(exchange, server, connection, head, body)
        except ConnectError as error:
            exchange.finish(error.error_class, str(error), now_ns())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if exchange.cut is None or (task is not None and task.cancelling()):
                exchange.finish("cancelled", "cancelled", now_ns())
                if exchange.connection is not None:
                    exchange.connection.abort()
                raise
        finally:
            exchange.release()
            self._active.discard(exchange)
            if (last_ns := sink.last_ns) is not None:
                self._last_token_ns = max(last_ns, self._last_token_ns or 0)
            if seated:
                self._leave()
        return exchange

    def _leave(self) -> None:
        """Hand the seat to the one who has waited longest."""
        while self._waiting:
            seat = self._waiting.popleft()
            if not seat.done():
                seat.set_result(None)
                return
        self._free += 1

    async def _before(self, exchange: Exchange, waiter: asyncio.Future[T]) -> T:
        """Wait for something that `abort_all` may cancel."""
        exchange.waiter = waiter
        try:
            return await waiter
        finally:
            exchange.waiter = None
            if not waiter.done():
                waiter.cancel()

    async def _run(self, exchange: Exchange, server: Server, connection: Connection, head: bytes, body: bytes) -> None:
        if exchange.end is None and connection.alive:
            connection.start(exchange, head, body)
        elif exchange.end is None:  # closed in the turn in which it was made
            exchange.lost(None, now_ns())
        try:
            await exchange.ended
        finally:
            connection.exchange = None
            response = exchange.response
            reusable = response.complete and response.keep_alive and not response.leftover
            if reusable and connection.alive and exchange.sent_ns is not None:
                connection.served += 1
                server.idle.append(connection)
            else:
                connection.abort()

    async def _connect(self, server: Server, limits: Limits) -> Connection:
        kernel = self._kernel_readers if self._kernel_times else None
        connection = await connect(server.route, limits.connect_timeout, self.connections, kernel)
        self.connections_opened += 1
        return connection

    def _kernel_readers(self) -> KernelReaders:
        if self.kernel is None:
            self.kernel = KernelReaders(self.loop)
        return self.kernel

    # Decoding between two looks at the sockets -----------------------------------------------------------------------

    def _decode_soon(self, exchange: Exchange) -> None:
        self._ready.append(exchange)
        if not self._decoding:
            self._decoding = True
            self.loop.call_soon(self._decode)

    def _decode(self) -> None:
        until_ns = now_ns() + SLICE_NS
        while self._ready:
            exchange = self._ready.popleft()
            if not exchange.decode(until_ns):
                self._ready.append(exchange)
            if now_ns() >= until_ns:
                break
        self._decoding = bool(self._ready)
        if self._decoding:
            self.loop.call_soon(self._decode)

    # Words -----------------------------------------------------------------------------------------------------------

    def _head(self, method: str, route: Route, path: str) -> bytes:
        try:
            return request_head(method, route.line(path), route.headers() | self._headers)
        except UnicodeEncodeError:
            raise UserError("headers: only characters of ISO 8859-1 can be sent in a header") from None
        except ValueError as error:
            raise UserError(f"headers: {error}") from None

    def _clean(self, message: str) -> str:
        """Servers quote the key that they refuse; we do not."""
        for secret in self._secrets:
            message = message.replace(secret, "***")
        return message


def _secret_words(headers: Mapping[str, str]) -> list[str]:
    """The words of the caller's headers that no message may show, the longest first: all long ones, and shorter ones
    under names that promise a secret."""
    words = {
        word
        for name, value in headers.items()
        for word in (value, *value.split())
        if len(word) >= (4 if SECRET_NAME.search(name) else 8) and word.lower() not in ("bearer", "basic")
    }
    return sorted(words, key=len, reverse=True)


def _stale(exchange: Exchange) -> bool:
    end = exchange.end
    return (
        exchange.first_byte_ns is None and end is not None and end.error_class in ("connection_reset", "empty_response")
    )
