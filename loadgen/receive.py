"""Two thin readers that carry bytes between a socket and an `Exchange`, each with the best time that it can have.

`KernelReader`, on plain TCP under Linux, asks the kernel when the bytes arrived: that time stays right however late we
come to read them, so that a busy loop of ours is not taken for a slow server (error of a gap 9 µs at p99 and 512
streams, where a time taken at the read is 1 to 2 ms off and aiohttp's 40). `LoopReader`, everywhere else (TLS, Unix
sockets, other systems), stamps what the loop hands over before anything else is done with it.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import sys
from functools import cache
from time import sleep
from typing import TypeAlias, cast

from loadgen.clock import STEADY_NS, WallOffset, now_ns
from loadgen.exchange import Exchange

# One write: encrypting it takes about 0.1 ms, so that a body of 16 MiB is 64 short turns instead of one long one.
WRITE_BYTES = 256 * 1024
# One read: more than any server writes at once but a flood, and what waits behind it is seen again in the next turn.
READ_BYTES = 64 * 1024
# With the kernel's times nothing is lost by reading a little later, and much is won: at 256 streams and 50 tokens/s a
# nap of 0.2 ms before the sockets are read turns most wake-ups, of 5 µs and cold caches each, into one. It is never
# longer than this share of a stream's mean gap, which keeps two chunks from meeting in one read, and not taken where
# it would gather next to nothing, nor where the turn before had company enough. The load is looked at ten times a
# second.
NAP_MAX_NS, NAP_SHARE, NAP_READS = 200_000, 0.01, 2
COMPANY = 16
LOAD_NS = 100_000_000
# Sockets read in one turn of the loop, 10 µs each; then decoding has its slice, however many more are ready.
MAX_READY = 128

# linux/net_tstamp.h and asm-generic/socket.h, which `socket` does not name. The flags: stamp what is received, in
# software, and report it. The newest option first; the older one gives the same time where a sandbox knows only it.
SO_TIMESTAMPING, SO_TIMESTAMPNS = 37, 35
RX_SOFTWARE, SOFTWARE = 1 << 3, 1 << 4
OPTIONS = ((SO_TIMESTAMPING, RX_SOFTWARE | SOFTWARE), (SO_TIMESTAMPNS, 1))
ANCILLARY_BYTES = 128
TIMESPEC = struct.Struct("@qq").unpack_from
SECOND = 1_000_000_000


def kernel_stamps(sock: socket.socket) -> bool:
    """Ask for receive times; False where this system has none for TCP (another system, a filtered `setsockopt`)."""
    if sys.platform != "linux" or struct.calcsize("l") != 8:
        return False
    for option, value in OPTIONS:
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, value)
        except OSError:
            continue
        return True
    return False


@cache
def keep_stamping() -> None:
    """Have the kernel stamp as long as this process lives: it begins in its own time after the first socket asks, and
    what arrives before that has no time."""
    if sys.platform == "linux":
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        kernel_stamps(sock)
        sock.detach()  # open to the end


class LoopReader(asyncio.Protocol):
    """A connection read by the event loop; an arrival is when the loop hands it over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, opened: set[Connection]) -> None:
        self.exchange: Exchange | None = None
        self.served = 0
        self.gone: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._rest: memoryview | None = None
        self._blocked = False
        self._paused = False

    # Called by the loop ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        # resume_writing shall mean that the buffer is empty: that moment is `sent`. (With a high mark of 0 the TLS
        # transport would pause at every write, also when nothing waits.)
        self._transport.set_write_buffer_limits(high=1, low=0)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._opened.add(self)

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
        self._opened.discard(self)
        if self.exchange is not None:
            self.exchange.lost(exc, at_ns)
        if not self.gone.done():
            self.gone.set_result(None)

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self._written()

    # Called by the client and the exchange ---------------------------------------------------------------------------

    def start(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self.exchange = exchange
        exchange.connection = self
        exchange.times = "read"
        whole = len(body) <= WRITE_BYTES
        self._rest = None if whole else memoryview(body)
        exchange.writing(now_ns())
        self._transport.write(head + body if whole else head)
        if not self._blocked:
            self._written()

    def _written(self) -> None:
        exchange = self.exchange
        if exchange is None or not self.alive:
            return
        at_ns = now_ns()
        if self._rest is None:
            if exchange.sent_ns is None:
                exchange.sent(at_ns)
            return
        exchange.writing(at_ns)
        self._loop.call_soon(self._write_on)

    def _write_on(self) -> None:
        if self._rest is None or self._transport is None or not self.alive:
            return
        piece, rest = self._rest[:WRITE_BYTES], self._rest[WRITE_BYTES:]
        self._rest = rest if len(rest) else None
        self._transport.write(piece)
        if not self._blocked:
            self._written()

    def pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None and self.alive:
            self._paused = False
            self._transport.resume_reading()

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close now, whatever is under way: the server is to notice."""
        self._rest = None
        if self._transport is not None:
            self._transport.abort()


class KernelReader:
    """A plain TCP connection that is read by `KernelReaders`; an arrival is when the kernel received it.

    One read a wake-up. Where two segments wait for it, both get the time of the last: the kernel keeps one time a read.
    """

    __slots__ = (
        "_events", "_last_ns", "_opened", "_readers", "_recvmsg", "_sock", "_unsent", "exchange", "fd", "fresh",
        "gone", "served",
    )  # fmt: skip

    def __init__(self, readers: KernelReaders, sock: socket.socket, opened: set[Connection]) -> None:
        self.exchange: Exchange | None = None
        self.served = 0
        self.fresh = True  # no token of a response has been decoded yet
        self.fd = sock.fileno()
        self.gone: asyncio.Future[None] = readers.loop.create_future()
        self._readers = readers
        self._opened = opened
        self._sock: socket.socket | None = sock
        self._recvmsg = sock.recvmsg
        self._unsent: list[memoryview] = []
        self._events = 0
        self._last_ns = 0
        opened.add(self)
        self._listen(select.EPOLLIN)

    # Called by the client and the exchange ---------------------------------------------------------------------------

    def start(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        self.exchange = exchange
        self._move(fresh=True)
        exchange.connection = self
        exchange.times = "kernel"
        whole = len(body) <= WRITE_BYTES
        self._unsent = [memoryview(head + body)] if whole else [memoryview(head), memoryview(body)]
        exchange.writing(now_ns())
        self.write()

    def pause(self) -> None:
        if self._events & select.EPOLLIN:
            self._listen(self._events & ~select.EPOLLIN)

    def resume(self) -> None:
        if not self._events & select.EPOLLIN and self._sock is not None:
            self._listen(self._events | select.EPOLLIN)

    @property
    def alive(self) -> bool:
        return self._sock is not None

    def abort(self) -> None:
        """Close now, whatever is under way: the server is to notice."""
        self._close(None)

    # Called by KernelReaders -----------------------------------------------------------------------------------------

    def write(self) -> None:
        """One slice; `sent` is when the kernel was given the last of them. The clock is read before: on a busy box the
        answer's first bytes can be there, with the kernel's time, before we are let go on after `send`."""
        exchange, sock = self.exchange, self._sock
        if exchange is None or sock is None or not self._unsent:
            return
        piece = self._unsent[0]
        at_ns = now_ns()
        try:
            taken = sock.send(piece[:WRITE_BYTES])
        except BlockingIOError:
            taken = 0
        except OSError:
            # The server closed its side. What it said before (often a refusal) may still wait to be read, and the end
            # of that tells how the connection died.
            self._unsent.clear()
            self._listen(self._events & ~select.EPOLLOUT)
            return
        if taken == len(piece):
            del self._unsent[0]
        else:
            self._unsent[0] = piece[taken:]
        if self._unsent:
            if taken:
                exchange.writing(at_ns)
            self._listen(self._events | select.EPOLLOUT)
        else:
            self._listen(self._events & ~select.EPOLLOUT)
            exchange.sent(at_ns)

    def read(self, offset_ns: int | None) -> None:
        """Read once. `offset_ns` turns the kernel's time into ours; None: the clock was set since the turn before, and
        only our own stamp can be believed."""
        try:
            data, ancillary, _, _ = self._recvmsg(READ_BYTES, ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._close(error)
            return
        read_ns = now_ns()
        exchange = self.exchange
        if self.fresh and exchange is not None and exchange.tail is not None:
            self._move(fresh=False)
        if not data:
            self._close(None, read_ns)
        elif exchange is None:
            self.abort()  # nobody asked: a time-out notice, or the rest of an answer that was too long
        elif not ancillary:
            exchange.times = "read"
            exchange.received(data, read_ns)
        else:
            seconds, nanoseconds = TIMESPEC(ancillary[0][2])
            at_ns = seconds * SECOND + nanoseconds - (offset_ns or 0)
            # Bytes come in order and not from the future: what says otherwise was stamped across a step of the clock.
            if offset_ns is None or at_ns < self._last_ns - STEADY_NS or at_ns > read_ns + STEADY_NS:
                exchange.stepped = True
                at_ns = read_ns
            else:
                exchange.lags_ns.append(read_ns - at_ns)
                at_ns = max(at_ns, self._last_ns)
            self._last_ns = at_ns
            exchange.received(data, at_ns)

    def _listen(self, events: int) -> None:
        if events != self._events and self._sock is not None:
            self._readers.listen(self, self._events, events)
            self._events = events

    def _move(self, fresh: bool) -> None:
        if fresh is not self.fresh:
            events = self._events
            self._listen(0)
            self.fresh = fresh
            self._listen(events)

    def _close(self, error: OSError | None, at_ns: int | None = None) -> None:
        sock = self._sock
        if sock is None:
            return
        self._listen(0)
        self._sock = None
        self._unsent.clear()
        sock.close()
        self._opened.discard(self)
        if self.exchange is not None:
            self.exchange.lost(error, now_ns() if at_ns is None else at_ns)
        if not self.gone.done():
            self.gone.set_result(None)


Connection: TypeAlias = LoopReader | KernelReader


class KernelReaders:
    """The kernel-timed connections of one client, so that a turn of the loop is: look at the clocks once, then read
    every socket that has something, then let the others work.

    Two epolls, the one inside the other: connections whose first token has not been decoded are read first. The kernel
    gives one time to what waits for one read, so that a first token that has to wait for the second loses its own, and
    a stream has only one first token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.offset = WallOffset()
        self._epoll = select.epoll()
        self._first = select.epoll()
        self._epoll.register(self._first.fileno(), select.EPOLLIN)
        self._readers: dict[int, KernelReader] = {}
        self._reads = 0
        self._since_ns = now_ns()
        self._nap_s = 0.0
        self._company = False  # many came together in the last turn, or were left unread
        loop.add_reader(self._epoll.fileno(), self._turn)

    def listen(self, reader: KernelReader, before: int, events: int) -> None:
        """No events at all means no watching: a hang-up would be reported without end."""
        epoll = self._first if reader.fresh else self._epoll
        if not before:
            self._readers[reader.fd] = reader
            epoll.register(reader.fd, events)
        elif events:
            epoll.modify(reader.fd, events)
        else:
            del self._readers[reader.fd]
            epoll.unregister(reader.fd)

    def close(self) -> None:
        self.loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._first.close()

    def _turn(self) -> None:
        if self._nap_s and not self._company:
            sleep(self._nap_s)
        offset_ns = self.offset.ns if self.offset.look() else None
        reads = self._read(self._first.poll(0, MAX_READY), offset_ns)
        reads += self._read(self._epoll.poll(0, MAX_READY), offset_ns)
        self._company = reads >= COMPANY
        self._reads += reads
        if (passed_ns := now_ns() - self._since_ns) > LOAD_NS:
            self._nap_s = nap_s(self._reads, len(self._readers), passed_ns)
            self._reads = 0
            self._since_ns += passed_ns

    def _read(self, ready: list[tuple[int, int]], offset_ns: int | None) -> int:
        readers = self._readers
        for fd, events in ready:
            reader = readers.get(fd)
            if reader is None:  # closed by an earlier one of this turn, or the epoll inside
                continue
            if events & select.EPOLLOUT:
                reader.write()
            if events & ~select.EPOLLOUT:
                reader.read(offset_ns)
        return len(ready)


def nap_s(reads: int, connections: int, passed_ns: int) -> float:
    """How long to wait for company before the next read, after so many reads from so many connections."""
    if not reads:
        return 0.0
    nap_ns = min(NAP_MAX_NS, NAP_SHARE * passed_ns * connections / reads)
    return nap_ns / 1e9 if nap_ns * reads >= NAP_READS * passed_ns else 0.0
