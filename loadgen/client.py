"""The streaming HTTP client: own connections, own clock stamps, hard limits; one Outcome per request.

On the way of a byte: the event loop hands a read to `_Connection.data_received`, which stamps it before anything else
and lets `http1.Response` frame it. Decoding waits for the end of the loop's turn and is done in slices of at most 1 ms,
so that no stream's decoding delays another stream's stamp. Not aiohttp: its own queues move arrival times by up to
40 ms at a few hundred streams. What a server does wrong is in the Outcome; only `get_json` and its like raise.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar, cast

import orjson

from loadgen import __version__
from loadgen.address import ConnectError, connect_failure, parse_url, reason, tls_context
from loadgen.answer import ERROR_BODY_BYTES, MAX_BODY_BYTES, Answer, told
from loadgen.clock import now_ns
from loadgen.dialects import Dialect, one_line
from loadgen.exchange import Exchange, Sink, ns
from loadgen.http1 import request_head, with_length
from loadgen.types import Limits, NotReadyError, Outcome, Request, Seconds, Target, UserError

T = TypeVar("T")

# Decoding in one turn of the loop; a stamp is late by at most this much because of it.
SLICE_NS = 1_000_000
# One write: encrypting it takes about 0.1 ms, so that a body of 16 MiB is 64 short turns instead of one long one.
WRITE_BYTES = 256 * 1024
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

    def piece(self, data: bytes, at_ns: int) -> None:
        self.last_ns = at_ns  # any byte is progress here
        self.content += data[: MAX_BODY_BYTES - len(self.content)]


class _Connection(asyncio.Protocol):
    """One connection of the pool. It only moves bytes, and stamps them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.served = 0
        self._rest: memoryview | None = None
        self._blocked = False
        self._paused = False
        self.gone: asyncio.Future[None] = client.loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        # resume_writing shall mean that the buffer is empty: that moment is `sent`. (With a high mark of 0 the TLS
        # transport would pause at every write, also when nothing waits.)
        self.transport.set_write_buffer_limits(high=1, low=0)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client.connections.add(self)

    def data_received(self, data: bytes) -> None:
        at_ns = now_ns()
        if self.exchange is not None:
            self.exchange.received(data, at_ns)
        else:
            self.abort()  # nobody asked: a time-out notice, or the rest of an answer that was too long

    def eof_received(self) -> None:
        at_ns = now_ns()
        if self.exchange is not None:
            self.exchange.lost(None, at_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        at_ns = now_ns()
        self.client.connections.discard(self)
        if self.exchange is not None:
            self.exchange.lost(exc, at_ns)
        if not self.gone.done():
            self.gone.set_result(None)

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self._written()

    def start(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        assert self.transport is not None
        self.exchange = exchange
        exchange.connection = self
        whole = len(body) <= WRITE_BYTES
        self._rest = None if whole else memoryview(body)
        exchange.writing(now_ns())
        self.transport.write(head + body if whole else head)
        if not self._blocked:
            self._written()

    def _written(self) -> None:
        exchange = self.exchange
        if exchange is None or self.transport is None or self.transport.is_closing():
            return
        at_ns = now_ns()
        if self._rest is None:
            if exchange.sent_ns is None:
                exchange.sent(at_ns)
            return
        exchange.writing(at_ns)
        self.client.loop.call_soon(self._write_on)

    def _write_on(self) -> None:
        if self._rest is None or self.transport is None or self.transport.is_closing():
            return
        piece, rest = self._rest[:WRITE_BYTES], self._rest[WRITE_BYTES:]
        self._rest = rest if len(rest) else None
        self.transport.write(piece)
        if not self._blocked:
            self._written()

    def pause(self) -> None:
        if not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    @property
    def alive(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def abort(self) -> None:
        """Close now, whatever is under way: the server is to notice."""
        self._rest = None
        if self.transport is not None:
            self.transport.abort()


class Client:
    """Requests to one target. `headers` are the caller's, secrets included; they are sent and never shown.

    `connections` bounds the open ones; a request beyond them waits, and its wait is `queue_ns`. It belongs to the loop
    that first uses it.
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
    ) -> None:
        self.target = target
        self.limits = limits
        self.dialect = cast(Dialect, dialect)
        self.model = model
        self.connections: set[_Connection] = set()
        self.connections_opened = 0
        self.last_token_ns: int | None = None
        self._address = parse_url(target.url)
        self._tls = tls_context(target.verify_tls) if self._address.tls else None
        self._headers = {
            "host": self._address.authority,
            "user-agent": f"loadgen/{__version__}",
            "accept": "text/event-stream, application/json",
            "accept-encoding": "identity",
            "content-type": "application/json",
        } | {name.lower(): value for name, value in {**target.headers, **headers}.items()}
        self._secrets = _secret_words(headers)
        self._post = self._head("POST", self._address.path(target.endpoint or dialect.PATH))
        self._free = max(1, connections)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle: list[_Connection] = []
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

    async def send(self, request: Request, body: bytes) -> Outcome:
        """Send one encoded request and follow its answer to the end. Raises nothing but CancelledError."""
        answer = Answer(request, self.dialect)
        outcome = answer.outcome
        exchange = await self._perform(answer, self._post, body, self.limits, outcome)
        assert exchange.end is not None
        outcome.sent_ns, outcome.first_byte_ns = exchange.sent_ns, exchange.first_byte_ns
        if exchange.paused:
            outcome.flags.add("client_backlog")
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
        head = self._head(method, self._address.path(path))
        exchange = await self._perform(body, head, content, limits, None)
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

    async def _perform(self, sink: Sink, head: bytes, body: bytes, limits: Limits, outcome: Outcome | None) -> Exchange:
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
            connection = self._kept()
            if connection is None:
                connection = await self._before(exchange, self.loop.create_task(self._connect(limits)))
                if outcome is not None:
                    outcome.connect_ns = now_ns() - queued
            if outcome is not None:
                outcome.queue_ns = queued - started
            await self._run(exchange, connection, head, body)
            if connection.served and _stale(exchange):
                self._active.discard(exchange)
                exchange = Exchange(self.loop, self._decode_soon, sink, limits, started)
                self._active.add(exchange)
                again = now_ns()
                if outcome is not None:
                    outcome.flags.add("stale_connection_retry")
                connection = await self._before(exchange, self.loop.create_task(self._connect(limits)))
                if outcome is not None:
                    outcome.connect_ns = now_ns() - again
                await self._run(exchange, connection, head, body)
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

    async def _run(self, exchange: Exchange, connection: _Connection, head: bytes, body: bytes) -> None:
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
                self._idle.append(connection)
            else:
                connection.abort()

    def _kept(self) -> _Connection | None:
        """The connection used last: the others may grow old and be closed by the server."""
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        return None

    async def _connect(self, limits: Limits) -> _Connection:
        """Try every address of the host in turn (`localhost` may be ::1 first and 127.0.0.1 only be served)."""
        address, deadline_ns = self._address, now_ns() + ns(limits.connect_timeout)
        where = address.authority
        failure: ConnectError | None = None
        try:
            async with asyncio.timeout(limits.connect_timeout):
                found = await self.loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise ConnectError("dns_error", f"{address.host}: no answer from the resolver") from None
        except (OSError, UnicodeError) as error:
            raise ConnectError("dns_error", f"{address.host}: {reason(error)}") from None
        hosts = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for n, host in enumerate(hosts):
            left_s = max(0.001, (deadline_ns - now_ns()) / 1e9 / (len(hosts) - n))
            try:
                async with asyncio.timeout(left_s):
                    _, connection = await self.loop.create_connection(
                        lambda: _Connection(self),
                        host,
                        address.port,
                        ssl=self._tls,
                        server_hostname=address.host if self._tls else None,
                    )
            except TimeoutError:
                failure = ConnectError("connect_timeout", f"{where}: no connection within {limits.connect_timeout:g} s")
            except (OSError, ssl.CertificateError) as error:
                worse = connect_failure(error, where, self._tls is not None)
                if failure is None or worse.error_class != "connect_refused":
                    failure = worse
            else:
                self.connections_opened += 1
                return connection
        raise failure or ConnectError("dns_error", f"{address.host}: no address")

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
            if (last_ns := exchange.sink.last_ns) is not None:
                self.last_token_ns = max(last_ns, self.last_token_ns or 0)
            if now_ns() >= until_ns:
                break
        self._decoding = bool(self._ready)
        if self._decoding:
            self.loop.call_soon(self._decode)

    # Words -----------------------------------------------------------------------------------------------------------

    def _head(self, method: str, path: str) -> bytes:
        try:
            return request_head(method, path, self._headers)
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
