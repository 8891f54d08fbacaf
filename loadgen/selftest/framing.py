"""Odd but lawful (and some unlawful) streams, as real servers and proxies send them, and what is right for each.

Bytes and expectations only; `server` sends the pieces as they stand, `suite` compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

# Pieces leave this far apart, so that each is a read of its own.
PAUSE_NS = 2_000_000
BIG_EVENT_CHARS = 1 << 20
# Two, three and four bytes a character, so that cutting anywhere cuts a character somewhere.
TEXT = "Grüße, 世界! 🚀 naïve"


@dataclass(frozen=True, slots=True)
class Case:
    """`text` None: the request must fail, with `error_class`. `flag` must be among the outcome's flags."""

    about: str
    pieces: tuple[bytes, ...]
    text: str | None
    error_class: str | None = None
    flag: str | None = None
    pause_ns: int = PAUSE_NS


def _event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": "c1", "object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"


def _whole(body: bytes) -> bytes:
    """A response whose body ends with the connection."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + body


def _chunked(*events: bytes, end: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events) + (b"0\r\n\r\n" if end else b"")


def _cut(data: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(data[at : at + size] for at in range(0, len(data), size))


DONE = b"data: [DONE]\n\n"
PLAIN = _event(TEXT) + _event(" end", "stop") + DONE
BIG = "x" * BIG_EVENT_CHARS
RIGHT = TEXT + " end"

CASES: Mapping[str, Case] = {
    "split-utf8": Case(
        "every byte in a read of its own", _cut(_whole(PLAIN), 1), RIGHT, pause_ns=100_000,
    ),
    "crlf": Case("CRLF line ends", _cut(_whole(PLAIN.replace(b"\n", b"\r\n")), 7), RIGHT),
    "cr": Case("CR line ends", _cut(_whole(PLAIN.replace(b"\n", b"\r")), 7), RIGHT),
    "comments": Case(
        "comments and blank events between", (_whole(b": hello\n\n" + _event(TEXT)), b":\n\n:\n\n\n\n",
        b": ping\n" + _event(" end", "stop") + b"event: x\nid: 7\nretry: 10\n\n" + DONE), RIGHT,
    ),
    "no-space": Case("`data:` without a space", (_whole(PLAIN.replace(b"data: ", b"data:")),), RIGHT),
    "big-event": Case("one event of 1 MiB", (_chunked(_event(BIG), _event("!", "stop"), DONE),), BIG + "!"),
    "no-done": Case(
        "no [DONE]", (_chunked(_event(TEXT), _event(" end", "stop")),), RIGHT, flag="no_done_marker",
    ),
    "no-finish": Case(
        "no finish_reason", (_chunked(_event(TEXT), _event(" end"), DONE),), RIGHT, flag="no_finish_reason",
    ),
    "no-blank-line": Case(
        "the last event lacks its blank line", (_whole(_event(TEXT) + _event(" end", "stop")[:-2]),), RIGHT,
    ),
    "truncated": Case(
        "cut between two events", (_chunked(_event(TEXT), end=False),), None, "stream_truncated",
    ),
    "half-event": Case("cut inside an event", (_whole(_event(TEXT) + _event(" end")[:30]),), None, "stream_truncated"),
    "error-in-200": Case(
        "an error event under HTTP 200",
        (_chunked(_event(TEXT), b'data: {"error": {"message": "engine died", "code": 500}}\n\n', DONE),),
        None, "in_band_error",
    ),
    "silent-close": Case("closed without a byte", (b"",), None, "empty_response"),
}  # fmt: skip
