"""Server-sent events without I/O: bytes in, (event type, data) out, by the event-stream rules of the HTML standard.

LF, CRLF and CR end a line, also mixed and cut anywhere; comments and `id`/`retry` are skipped; a byte order mark is
dropped. Nothing is decoded: a character that was cut between two reads is whole again by the time its line is.
"""

from __future__ import annotations

# A tool call or a base64 image can be one line of many MiB; what is longer is not an event stream.
MAX_EVENT_BYTES = 32 * 1024 * 1024
BOM = b"\xef\xbb\xbf"


class EventTooLargeError(Exception):
    """An event of more than MAX_EVENT_BYTES: the stream cannot be read on."""


class EventStream:
    """Feed it the body as it comes; each call returns the events that it completed."""

    __slots__ = ("_data", "_data_bytes", "_first", "_kind", "_partial", "_partial_bytes", "_skip_lf")

    def __init__(self) -> None:
        self._partial: list[bytes] = []  # pieces of the line that has no end yet: joined once, so linear in its length
        self._partial_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._kind = b""
        self._first = True
        self._skip_lf = False

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Raises EventTooLargeError; after that the stream is lost."""
        # Nearly every read is one event of one line: seen with a few searches, no list of lines is made for it.
        if (
            data.endswith(b"\n\n")
            and data.startswith(b"data: ")
            and data.find(b"\n", 0, -2) < 0
            and b"\r" not in data
            and not (self._partial or self._data or self._kind)
        ):
            self._first = self._skip_lf = False
            return [(b"", data[6:-2])]
        if self._skip_lf and data:  # the LF of a CRLF that was cut after its CR, which has ended the line already
            self._skip_lf = False
            if data[:1] == b"\n":
                data = data[1:]
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events: list[tuple[bytes, bytes]] = []
        if b"\n" not in data:
            if data:
                self._hold(data)
            return events
        if self._partial:
            self._partial.append(data)
            data = b"".join(self._partial)
            self._partial.clear()
            self._partial_bytes = 0
        lines = data.split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line:
                self._line(line)
            elif self._data:
                events.append(self._event())
            else:
                self._kind = b""
        if rest:
            self._hold(rest)
        return events

    def close(self) -> tuple[bytes, bytes] | None:
        """The end of the body: the event that lacks its blank line, if there is one. The standard drops it; for a
        meter losing the last token count is worse, so the caller decides."""
        if self._partial:
            line = b"".join(self._partial)
            self._partial.clear()
            self._line(line)
        return self._event() if self._data else None

    def _hold(self, piece: bytes) -> None:
        self._partial.append(piece)
        self._partial_bytes += len(piece)
        if self._partial_bytes > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def _line(self, line: bytes) -> None:
        if self._first:
            self._first = False
            line = line.removeprefix(BOM)
        if line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
        else:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"event":
                self._kind = value
                return
            if field == b"error":  # no field of the standard: older llama.cpp reports its failures in it
                self._kind = b"error"
            elif field != b"data":
                return
        self._data.append(value)
        self._data_bytes += len(value) + 1
        if self._data_bytes > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def _event(self) -> tuple[bytes, bytes]:
        event = self._kind, self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data.clear()
        self._data_bytes = 0
        self._kind = b""
        return event
