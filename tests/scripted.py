"""A server on loopback that sends exactly the bytes of a script, with its delays, silences, FINs and resets.

Scripts have the form of the wire cases in `data/cases`: `{"routes": {path or "*": [{"steps": [...]}, ...]}}`; the n-th
request on a route gets script n, later ones the last. It runs on the test's own event loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

OK_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk_of(**delta: Any) -> str:
    """One event of a chat stream."""

    finish = delta.pop("finish_reason", None)
    return (
        "data: " + json.dumps({"id": "c1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + "\n\n"
    )


def answer(*steps: dict[str, Any] | str, end: bool = True) -> list[dict[str, Any]]:
    """The steps of a chunked event stream: strings are events; `end` closes the body."""
    made: list[dict[str, Any]] = [{"text": OK_HEAD}]
    made += [{"text": step, "chunk": True} if isinstance(step, str) else step for step in steps]
    return made + ([{"text": "0\r\n\r\n"}] if end else [])


HELLO = answer(chunk_of(content="Hello"), chunk_of(finish_reason="stop"), "data: [DONE]\n\n")


def plain(status: str, body: str, *headers: str) -> list[dict[str, Any]]:
    """A response with a length."""
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body.encode())}", *headers])
    return [{"text": f"{head}\r\n\r\n{body}"}]


def always(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The play that answers every request so."""
    return {"routes": {"*": [{"steps": steps}]}}


@dataclass
class Scripted:
    """What the server saw."""

    url: str = ""
    port: int = 0
    connections: int = 0
    open: int = 0
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)


@contextlib.asynccontextmanager
async def serve(
    play: dict[str, Any], host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, read_body: bool = True
) -> AsyncIterator[Scripted]:
    seen = Scripted()
    counts: dict[str, int] = {}
    running: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        seen.connections += 1
        seen.open += 1
        try:
            served = 0
            while await _one(reader, writer, play["routes"], counts, seen, served, read_body):
                served += 1
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            seen.open -= 1
            running.discard(task)
            writer.transport.abort()

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = await asyncio.start_server(connected, host, 0, family=family, ssl=tls, limit=1 << 20)
    seen.port = server.sockets[0].getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    seen.url = f"{'https' if tls else 'http'}://{shown}:{seen.port}"
    try:
        yield seen
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()


async def _one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    routes: dict[str, Any],
    counts: dict[str, int],
    seen: Scripted,
    served: int,
    read_body: bool,
) -> bool:
    """One request; True when the connection may serve another."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.lower().startswith("content-length")), 0)
    path = head.split(" ")[1]
    if read_body:
        seen.bodies.append(await reader.readexactly(length))
    seen.paths.append(path)
    seen.heads.append(head)
    seen.times_ms.append(time.monotonic() * 1000)
    key = path if path in routes else "*"
    script = routes[key][min(counts.get(key, 0), len(routes[key]) - 1)]
    counts[key] = counts.get(key, 0) + 1
    if served and "if_reused" in script:
        script = script["if_reused"]
    for step in script["steps"]:
        if step.get("delay_ms"):
            await asyncio.sleep(step["delay_ms"] / 1000)
        action = step.get("action")
        if action == "rst":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        if action == "fin":
            writer.close()
            return False
        if action == "hold":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(1), step["ms"] / 1000)
                return False
        if action is None and len(step) > ("delay_ms" in step):
            writer.write(step_bytes(step))
            await writer.drain()
    return True


def step_bytes(step: dict[str, Any]) -> bytes:
    """The exact bytes that a step puts on the wire."""
    data = b"".join(_atom(part) for part in step.get("parts", [step]))
    return b"%x\r\n%s\r\n" % (len(data), data) if step.get("chunk") else data


def _atom(atom: dict[str, Any]) -> bytes:
    if "text" in atom:
        return str(atom["text"]).encode()
    if "b64" in atom:
        return base64.b64decode(atom["b64"])
    return str(atom["repeat"]["text"]).encode() * int(atom["repeat"]["times"])
