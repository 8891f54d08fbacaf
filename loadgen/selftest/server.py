"""The scripted server of the selftest: every chunk leaves on an exact schedule, and the log says when it did.

One thread and plain sockets: an event loop's timers count whole milliseconds, a `select` counts microseconds. Chunks
are ready-made bytes, one `send` each with TCP_NODELAY, stamped just before; a request arrives when the kernel received
it, where the kernel tells, so that our being slow to read it is not taken for the client's doing. The model that a
request names is its schedule (`t200-i20-n128`: first token after 200 ms, then one every 20 ms, 128 in all). Loopback
only.

    POST /v1/chat/completions    a scheduled answer; "rid" in the body names it in the log
    POST /odd/NAME               one of the odd framings (framing.py), exactly as scripted
    GET /v1/models, /health      what clients ask first
    GET /log, /stats, /reset     the truth, its counts, and forgetting it

`python -m loadgen.selftest.server` takes a free port and prints `listening http://127.0.0.1:PORT`.
"""

from __future__ import annotations

import contextlib
import heapq
import select
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FrameType

import orjson

from loadgen import child, clock
from loadgen.receive import ANCILLARY_BYTES, SECOND, TIMESPEC, kernel_stamps
from loadgen.selftest import framing
from loadgen.selftest.truth import Schedule
from loadgen.types import Json

# The model that it lists; any other schedule can be asked for as well.
MODEL = "t300-i10"
# One request of ours is below 100 KB.
MAX_REQUEST_BYTES = 16 << 20
# Finished requests and chunk times that the log keeps between two resets: 40 MB.
MAX_LOGGED, MAX_TIMES = 100_000, 1_000_000
# Chunks sent before the sockets are looked at again, and sockets accepted in one go.
AT_ONCE = 256
MAX_WAIT_S = 0.5
READ_BYTES = 1 << 16

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@dataclass(slots=True)
class Answer:
    """One answer under way: its pieces of bytes, and when each is to leave."""

    rid: int
    arrived_ns: int
    due_ns: list[int]
    pieces: list[bytes]
    end: bytes
    close: bool = False
    times: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Connection:
    sock: socket.socket
    arrived_ns: int = 0
    received: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)
    answer: Answer | None = None
    closing: bool = False


class Server:
    """Serves until told to stop."""

    def __init__(self, port: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.due: list[tuple[int, int, Connection, Answer]] = []
        self.pushed = 0  # decides between equal deadlines: first come, first served
        self.stopped = False
        self.offset = clock.WallOffset()
        self.forget()

    def forget(self) -> None:
        self.log: list[list[object]] = []
        self.times_kept = self.received = self.chunks = self.aborted = 0
        self.cpu_ns = clock.cpu_ns()

    def run(self) -> None:
        while not self.stopped:
            wait_s = MAX_WAIT_S
            if self.due:
                wait_s = min(wait_s, max(0.0, (self.due[0][0] - clock.now_ns()) / 1e9))
            if select.select([self.selector], [], [], wait_s)[0]:
                for key, mask in self.selector.select(0):
                    if key.data is None:
                        self._accept()
                    else:
                        self._ready(key.data, mask)
            self._send_what_is_due()

    # Connections -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, _ = self.listener.accept()
            except OSError:  # nobody waits, or we are out of descriptors: the next turn looks again
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            kernel_stamps(sock)
            self.selector.register(sock, selectors.EVENT_READ, Connection(sock))

    def _ready(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._put(connection, b"")
        if mask & selectors.EVENT_READ and not connection.closing:
            steady = self.offset.look()
            try:
                data, ancillary, _, _ = connection.sock.recvmsg(READ_BYTES, ANCILLARY_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            connection.arrived_ns = clock.now_ns()
            if ancillary and steady:
                seconds, nanoseconds = TIMESPEC(ancillary[0][2])
                connection.arrived_ns = min(connection.arrived_ns, seconds * SECOND + nanoseconds - self.offset.ns)
            connection.received += data
            if not data or len(connection.received) > MAX_REQUEST_BYTES:
                self._close(connection)
            else:
                self._requests(connection)

    def _put(self, connection: Connection, data: bytes) -> None:
        """Send now what the socket takes, keep the rest."""
        waited = bool(connection.waiting)
        if waited:
            connection.waiting += data
            data = bytes(connection.waiting)
        try:
            sent = connection.sock.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        connection.waiting = bytearray(data[sent:])
        if bool(connection.waiting) != waited:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.waiting else 0)
            self.selector.modify(connection.sock, events, connection)
        if connection.closing and not connection.waiting:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        if connection.answer is not None:
            self.aborted += 1
            self._over(connection, connection.answer)
        connection.closing = True
        with contextlib.suppress(KeyError, ValueError):  # closed before
            self.selector.unregister(connection.sock)
        connection.sock.close()

    # Requests --------------------------------------------------------------------------------------------------------

    def _requests(self, connection: Connection) -> None:
        """Answer as many whole requests as have arrived, each after the one before is over."""
        while connection.answer is None and not connection.closing:
            head, separator, rest = bytes(connection.received).partition(b"\r\n\r\n")
            if not separator:
                return
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.strip().lower() == b"content-length":
                    length = int(value)
            if len(rest) < length:
                return
            connection.received = bytearray(rest[length:])
            path = head.split(b" ")[1].decode("latin-1")
            self._dispatch(connection, path, rest[:length], connection.arrived_ns)

    def _dispatch(self, connection: Connection, path: str, body: bytes, arrived_ns: int) -> None:
        if path == "/v1/chat/completions":
            self.received += 1
            self._begin(connection, scheduled(orjson.loads(body), arrived_ns), HEAD)
        elif path.startswith("/odd/") and path[5:] in framing.CASES:
            case = framing.CASES[path[5:]]
            pieces = list(case.pieces)
            due_ns = [arrived_ns + case.pause_ns * number for number in range(len(pieces))]
            self._begin(connection, Answer(-1, arrived_ns, due_ns, pieces, b"", close=True), b"")
        elif path == "/log":
            self._reply(connection, {"requests": self.log})
        elif path == "/stats":
            self._reply(connection, self.stats())
        elif path == "/reset":
            self.forget()
            self._reply(connection, {})
        elif path == "/v1/models":
            model = {"id": MODEL, "object": "model", "owned_by": "selftest", "max_model_len": 131072}
            self._reply(connection, {"object": "list", "data": [model]})
        elif path == "/health":
            self._reply(connection, {})
        else:
            self._reply(connection, {"error": {"message": "not here"}}, b"404 Not Found")

    def stats(self) -> Json:
        cpu_s = (clock.cpu_ns() - self.cpu_ns) / 1e9
        return {"received": self.received, "chunks": self.chunks, "aborted": self.aborted, "cpu_s": cpu_s}

    def _reply(self, connection: Connection, value: Json, status: bytes = b"200 OK") -> None:
        body = orjson.dumps(value)
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self._put(connection, head + body)

    # Answers ---------------------------------------------------------------------------------------------------------

    def _begin(self, connection: Connection, answer: Answer, head: bytes) -> None:
        connection.answer = answer
        if head:
            self._put(connection, head)
        self._push(connection, answer)

    def _push(self, connection: Connection, answer: Answer) -> None:
        self.pushed += 1
        heapq.heappush(self.due, (answer.due_ns[len(answer.times)], self.pushed, connection, answer))

    def _send_what_is_due(self) -> None:
        for _ in range(AT_ONCE):
            if not self.due or self.due[0][0] > clock.now_ns():
                return
            _, _, connection, answer = heapq.heappop(self.due)
            if connection.answer is answer:
                self._emit(connection, answer)

    def _emit(self, connection: Connection, answer: Answer) -> None:
        data = answer.pieces[len(answer.times)]
        self.chunks += 1
        answer.times.append(clock.now_ns())
        self._put(connection, data)
        if connection.answer is not answer:
            return  # the client has gone
        if len(answer.times) < len(answer.pieces):
            self._push(connection, answer)
            return
        connection.answer = None
        if answer.close:
            connection.closing = True
        self._put(connection, answer.end)
        self._over(connection, answer)
        if connection.received and not connection.closing:
            self._requests(connection)

    def _over(self, connection: Connection, answer: Answer) -> None:
        connection.answer = None
        self.times_kept += len(answer.times)
        if len(self.log) < MAX_LOGGED and answer.rid >= 0:
            times = answer.times if self.times_kept <= MAX_TIMES else []
            self.log.append([answer.rid, answer.arrived_ns, clock.now_ns(), len(answer.times), times])


def scheduled(body: Json, arrived_ns: int) -> Answer:
    """The answer that a request's model name asks for."""
    schedule = schedule_of(str(body.get("model", "")), int(body.get("max_tokens") or Schedule().tokens))
    first_ns, gap_ns = arrived_ns + round(schedule.ttft_ms * 1e6), round(schedule.gap_ms * 1e6)
    due_ns = list(range(first_ns, first_ns + gap_ns * schedule.tokens, gap_ns))
    words = sum(str(message.get("content", "")).count(" ") + 1 for message in body.get("messages", []))
    usage = {
        "prompt_tokens": words, "completion_tokens": schedule.tokens, "total_tokens": words + schedule.tokens,
    }  # fmt: skip
    end = _framed(_event({"choices": [], "usage": usage})) + _framed(b"data: [DONE]\n\n") + END
    return Answer(int(body.get("rid", 0)), arrived_ns, due_ns, _pieces(schedule.tokens), end)


def schedule_of(model: str, max_tokens: int) -> Schedule:
    """`t200-i20-n128`; what the name does not say is as by default, the length as the request asks."""
    parts = {part[:1]: part[1:] for part in model.split("-")}
    default = Schedule()
    try:
        return Schedule(
            float(parts.get("t", default.ttft_ms)),
            max(0.001, float(parts.get("i", default.gap_ms))),
            max(1, int(parts.get("n", max_tokens))),
        )
    except ValueError:
        return Schedule(tokens=max(1, max_tokens))


def _event(fields: Json) -> bytes:
    """About 215 bytes for one token, as vLLM's."""
    told = {"id": "chatcmpl-00000000", "object": "chat.completion.chunk", "created": 1760000000, "model": "selftest"}
    return b"data: %s\n\n" % orjson.dumps(told | fields)


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(event), event)


@cache
def _pieces(tokens: int) -> list[bytes]:
    """All chunks of an answer of that length, the same for every request: sending must cost no more than a send."""
    return list(_texts(tokens))


def _texts(tokens: int) -> Iterator[bytes]:
    for number in range(tokens):
        delta = {"content": f" w{number & 255}"} if number else {"role": "assistant", "content": " w0"}
        finish = "length" if number + 1 == tokens else None
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        yield _framed(_event({"choices": [choice]}))


def main() -> int:
    server = Server()

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child.die_with_parent()
    print(f"listening {server.url}", flush=True)
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
