"""One HTTP/1.1 response without I/O: bytes and arrival times in; status, headers, timed body pieces and an end out.

Any reader may feed it (a socket protocol, a `recvmsg` loop with the kernel's times, a test with recorded bytes), so the
time is always a parameter. Framing is llhttp's (httptools): content-length, chunked, until-close. What llhttp leaves
to its caller is here: interim 1xx answers, truncation at EOF, compressed bodies inflated as they are flushed, bounds.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping

import httptools

# Heads of real servers stay below 8 KiB and proxies refuse more than 32 KiB; the bound covers the interim 1xx too.
MAX_HEAD_BYTES = 64 * 1024
# Trailers count as headers in llhttp; a server that never stops sending them must not fill our memory.
MAX_HEADERS = 256
# One read (256 KiB at most) may inflate 1000-fold; more than this from one read is an attack or an accident.
MAX_INFLATED_BYTES = 64 * 1024 * 1024
# What of a foreign head is quoted in messages.
QUOTED_BYTES = 40


class ProtocolError(Exception):
    """These bytes are no HTTP/1.1 response, or one beyond our bounds."""


# What servers write where nothing is compressed: the standard's word, and names of other things than a compression.
UNCOMPRESSED = frozenset({"identity", "", "none", "utf-8", "utf8", "binary", "8bit"})


class EncodingError(ProtocolError):
    """The body is compressed in a way that we did not ask for and cannot undo."""


class Response:
    """The machine of one response. Feed it until `complete`; take what is ready from `pieces`.

    `complete` means that the framing said so; `truncated`, that the bytes ended before it did (or before the
    compressed data did). `pieces` holds (arrival ns, body bytes), decompressed; `pending_bytes` is their total, which
    the consumer lowers. `leftover` tells of bytes behind the end: such a connection is not reused.
    """

    __slots__ = (
        "_at_ns", "_head_bytes", "_inflate", "_parser", "between", "complete", "head_ns", "headers",
        "keep_alive", "leftover", "pending_bytes", "pieces", "status", "truncated",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.head_ns: int | None = None
        self.pieces: deque[tuple[int, bytes]] = deque()
        self.pending_bytes = 0
        self.complete = False
        self.truncated = False
        self.leftover = False
        self.keep_alive = False
        self._at_ns = 0
        self.between = False  # it stands between two chunks of an uncompressed body: who knows the next may skip it
        self._head_bytes = 0
        self._inflate: _Inflate | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        # Gateways send content-length beside chunked, bare LF in heads, blanks behind a chunk's size: all readable, and
        # no reason to fail a request.
        self._parser.set_dangerous_leniencies(
            lenient_chunked_length=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )

    def feed(self, data: bytes, at_ns: int) -> None:
        """Take the bytes of one read. Raises ProtocolError; what was complete before the fault stays readable."""
        if self._parser is None or self.complete:
            self.leftover = True
            return
        self._at_ns = at_ns
        self.between = False
        self._head_bytes += len(data) if self.head_ns is None else 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ if isinstance(error.__context__, ProtocolError) else ProtocolError(error) from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.complete or self.leftover:
                self.leftover = True
            elif self.status == 101:
                raise ProtocolError("the server switches protocols, which nobody asked for") from None
            elif self.head_ns is None:
                raise ProtocolError(f"not HTTP ({error}): {data[:QUOTED_BYTES]!r}") from None
            else:
                raise ProtocolError(f"broken HTTP framing: {error}") from None
        if self.head_ns is None and self._head_bytes > MAX_HEAD_BYTES:
            raise ProtocolError(f"response head exceeds {MAX_HEAD_BYTES} bytes")
        # A line that has only begun does not end in CRLF: whoever stood between two chunks then still stands there.
        self.between = self.between and self._inflate is None and not self.complete and data.endswith(b"\r\n")

    def eof(self) -> None:
        """The other side closed. A body without a length ends here; anything else is truncated."""
        if self.complete:
            return
        framed = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self.head_ns is not None and not framed:
            self._end()
        else:
            self.truncated = True
        self._parser = None

    # llhttp's callbacks -------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            self.leftover = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.complete or self.head_ns is not None:
            return  # trailers, or a response that nobody asked for
        if len(self.headers) >= MAX_HEADERS:
            raise ProtocolError(f"more than {MAX_HEADERS} response headers")
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        known = self.headers.get(key)
        self.headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        if self.complete or self._parser is None:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        self.head_ns = self._at_ns
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._inflate = _Inflate(encoding)
        elif encoding not in UNCOMPRESSED:
            raise EncodingError(f"content-encoding {encoding!r}, though identity was asked for")

    def on_chunk_header(self) -> None:
        self.between = False

    def on_chunk_complete(self) -> None:
        self.between = True

    def on_body(self, body: bytes) -> None:
        if self.complete:
            return
        if self._inflate is not None:
            body = self._inflate.feed(body)
        if body:
            self.pieces.append((self._at_ns, body))
            self.pending_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.complete or self._parser is None:
            return
        if self.status < 200:  # an interim answer; the real one follows in the same stream of bytes
            self.headers.clear()
            return
        self.keep_alive = self._parser.should_keep_alive()
        self._end()

    def _end(self) -> None:
        self.complete = True
        if self._inflate is not None and not self._inflate.ended:
            self.truncated = True

    def forget(self) -> None:
        """Drop the parser: it refers back to us, and a cycle per request would be garbage for the collector."""
        self._parser = None


class _Inflate:
    """gzip (also in several members) and deflate (zlib or raw, both are seen), as far as the server has flushed."""

    __slots__ = ("_start", "_wbits", "_z", "ended")

    def __init__(self, encoding: str) -> None:
        self._wbits = 0 if encoding == "deflate" else 31
        self._z = zlib.decompressobj(31)
        self._start = b""
        self.ended = True  # until there is something to inflate

    def feed(self, data: bytes) -> bytes:
        if not self._wbits:  # deflate: the first two bytes tell whether the zlib header is there (RFC 1950, 2.2)
            data = self._start + data
            if len(data) < 2:
                self._start = data
                return b""
            self._wbits = 15 if data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0 else -15
            self._z = zlib.decompressobj(self._wbits)
        out, room = [], MAX_INFLATED_BYTES
        while data:
            if self._z.eof:
                if data[0] != 0x1F:  # padding behind the last member, not a further one
                    break
                self._z = zlib.decompressobj(self._wbits)
            try:
                piece = self._z.decompress(data, room)
            except zlib.error as error:
                raise EncodingError(f"the body is not what content-encoding says: {error}") from None
            out.append(piece)
            room -= len(piece)
            if room <= 0:
                raise ProtocolError(f"one read inflates to more than {MAX_INFLATED_BYTES} bytes")
            data = self._z.unused_data if self._z.eof else b""
            self.ended = self._z.eof
        return b"".join(out)


def request_head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Request line and headers, for `with_length`. Raises ValueError for what would break the framing."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    for line, name in zip(lines, ["the path", *headers], strict=True):
        if any(ord(c) < 32 or ord(c) == 127 for c in line) or (" " in name and name != "the path"):
            raise ValueError(f"control characters or blanks in {name!r}")
    if " " in path:
        raise ValueError("a blank in the path")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n"


def with_length(head: bytes, body_bytes: int) -> bytes:
    """The whole head of a request with a body of that many bytes (0: none)."""
    return head + (b"content-length: %d\r\n\r\n" % body_bytes if body_bytes else b"\r\n")
