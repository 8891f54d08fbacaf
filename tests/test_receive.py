"""When bytes arrived, as the kernel saw it: late readers, waiting segments, clock steps, and where it is not known."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import uvloop

from loadgen import clock, receive
from loadgen.client import Client
from loadgen.dialects import openai_chat
from loadgen.types import Limits, Outcome, Request, Target
from tests.scripted import OK_HEAD, chunk_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's receive times are Linux's")

FROZEN_S, GAP_S = 0.08, 0.02
# Between our clock before `send` and the kernel's stamp lie some 10 µs; the rest is for a busy machine.
SLACK_NS = 5_000_000


@dataclass
class Sent:
    """What a server in a thread of its own has sent, and when: it goes on while the client's loop stands still."""

    port: int = 0
    at_ns: list[int] = field(default_factory=list)
    requests: int = 0


def serve_in_a_thread(listener: socket.socket, sent: Sent, waits_s: list[float]) -> None:
    """One stream: a chunk after each wait."""

    def chunk(text: str) -> bytes:
        return b"%x\r\n%s\r\n" % (len(text), text.encode())

    with listener, listener.accept()[0] as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.recv(65536)
        sent.requests += 1
        sock.sendall(OK_HEAD.encode())
        for wait_s in waits_s:
            time.sleep(wait_s)
            sent.at_ns.append(clock.now_ns())
            sock.sendall(chunk(chunk_of(content="x")))
        sock.sendall(chunk(chunk_of(finish_reason="stop")) + chunk("data: [DONE]\n\n") + b"0\r\n\r\n")
        sock.recv(1)


def streamed(
    waits_s: list[float], frozen_s: float, kernel: bool, before: Callable[[Client], None] = lambda client: None
) -> tuple[Outcome, list[int]]:
    """The outcome of one stream during which our own loop stands still, from its first token on; and the gaps as
    sent."""
    sent = Sent()
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve_in_a_thread, args=(listener, sent, waits_s))
    thread.start()
    target = Target(url=f"http://127.0.0.1:{listener.getsockname()[1]}")

    async def run() -> Outcome:
        client = Client(target, Limits(), openai_chat, model="m", headers={}, connections=1, kernel_times=kernel)
        request = Request("r", "c", [{"role": "user", "content": "hi"}], 16)
        asked = asyncio.create_task(client.send(request, openai_chat.encode(request, "m", {})))
        while client.last_token_ns is None:  # noqa: ASYNC110 it sees a server, not an event of ours
            await asyncio.sleep(0.001)
        before(client)
        time.sleep(frozen_s)  # noqa: ASYNC251 the loop is to stand still
        outcome = await asked
        await client.close()
        return outcome

    outcome = uvloop.run(run())
    thread.join()
    assert outcome.outcome == "ok", outcome
    return outcome, [after - first for first, after in zip(sent.at_ns, sent.at_ns[1:], strict=False)]


def test_time_of_a_chunk_is_its_arrival_however_late_it_is_read() -> None:
    outcome, gaps_ns = streamed([0.0, GAP_S], FROZEN_S, kernel=True)
    assert (outcome.times, outcome.inexact) == ("kernel", 0)
    assert abs(outcome.gaps_ns[0] - gaps_ns[0]) < SLACK_NS
    assert max(outcome.lags_ns) > (FROZEN_S - GAP_S) * 0.9e9


def test_without_the_kernels_times_a_chunk_counts_when_it_is_read_and_the_outcome_says_so() -> None:
    outcome, gaps_ns = streamed([0.0, GAP_S], FROZEN_S, kernel=False)
    assert (outcome.times, outcome.lags_ns) == ("read", array("q"))
    assert outcome.gaps_ns[0] - gaps_ns[0] > (FROZEN_S - GAP_S) * 0.9e9


@pytest.mark.parametrize("kernel", [True, False])
def test_chunks_that_waited_in_one_read_are_counted_as_inexact(kernel: bool) -> None:
    outcome, _ = streamed([0.0, 0.01, 0.01, 0.01, 2 * FROZEN_S], FROZEN_S, kernel)
    assert (outcome.chunks, outcome.inexact) == (5, 2)


@pytest.mark.parametrize("step_ns", [3_600_000_000_000, -3_600_000_000_000, 2_000_000])
def test_step_of_the_clock_falls_back_to_the_time_of_the_read_and_is_flagged(step_ns: int) -> None:
    def stepped(client: Client) -> None:
        assert client.kernel is not None
        offset = client.kernel.offset  # as if the wall clock had stood elsewhere until now
        before_ns = clock.now_ns()
        offset.take(before_ns, clock.wall_ns() - step_ns, clock.now_ns())

    outcome, gaps_ns = streamed([0.0, GAP_S, 3 * FROZEN_S], FROZEN_S, kernel=True, before=stepped)
    assert "clock_step" in outcome.flags
    assert min(outcome.gaps_ns) >= 0
    assert outcome.gaps_ns[0] >= gaps_ns[0]  # read after the freeze
    assert abs(sum(outcome.gaps_ns) - sum(gaps_ns)) < SLACK_NS  # the last chunk is exact again


def test_stream_without_receive_times_says_that_its_times_are_those_of_reads() -> None:
    def unstamped(client: Client) -> None:
        (connection,) = client.connections
        assert isinstance(connection, receive.KernelReader)
        with socket.socket(fileno=os.dup(connection.fd)) as same:
            same.setsockopt(socket.SOL_SOCKET, receive.SO_TIMESTAMPING, 0)

    outcome, _ = streamed([0.0, GAP_S, GAP_S], 0, kernel=True, before=unstamped)
    assert (outcome.times, outcome.chunks) == ("read", 3)


def test_socket_that_takes_no_option_is_left_to_the_loop() -> None:
    closed = socket.socket()
    closed.close()
    assert not receive.kernel_stamps(closed)


def test_first_tokens_are_read_before_all_others() -> None:
    """A stream whose first token waits until its second has come loses the time of the first."""
    many = 2 * receive.MAX_READY

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        readers = receive.KernelReaders(loop)
        loop.remove_reader(readers._epoll.fileno())  # turns come when we say so
        turns: list[int] = []
        with socket.create_server(("127.0.0.1", 0), backlog=many) as listener:
            socks = [socket.create_connection(listener.getsockname()) for _ in range(many)]
            peers = [listener.accept()[0] for _ in range(many)]
        connections = [receive.KernelReader(readers, sock, set()) for sock in socks]
        exchanges = [Heard() for _ in range(many)]
        for number, (connection, exchange) in enumerate(zip(connections, exchanges, strict=True)):
            sock_of(connection).setblocking(False)
            connection.start(exchange, b"x", b"")  # type: ignore[arg-type]
            if number < many - 1:  # in the middle of an answer, all but the last
                exchange.tail = b"tail"
                peers[number].sendall(b"token")
                until(readers, exchange, 1)
        for peer in peers:
            peer.sendall(b"token")
        readers._turn()
        turns.append(exchanges[-1].heard)
        turns.append(sum(exchange.heard == 2 for exchange in exchanges[:-1]))
        for connection, peer in zip(connections, peers, strict=True):
            connection.exchange = None
            connection.abort()
            peer.close()
        readers._epoll.close()
        readers._first.close()
        return turns

    first, others = uvloop.run(run())
    assert first == 1
    assert others <= receive.MAX_READY  # so that it would have had to wait its turn


class Heard:
    """What a reader tells, counted."""

    def __init__(self) -> None:
        self.heard = 0
        self.tail: bytes | None = None
        self.connection: object = None
        self.times = ""
        self.stepped = False
        self.lags_ns = array("q")

    def received(self, data: bytes, at_ns: int) -> None:
        self.heard += 1

    def sent(self, at_ns: int) -> None: ...
    def writing(self, at_ns: int) -> None: ...


def sock_of(connection: receive.KernelReader) -> socket.socket:
    assert connection._sock is not None
    return connection._sock


def until(readers: receive.KernelReaders, exchange: Heard, heard: int) -> None:
    end = time.monotonic() + 20
    while exchange.heard < heard:
        assert time.monotonic() < end
        readers._turn()
