"""The chunks of one answer are the same bytes but for their text; a stencil reads the next ones without a JSON parser.

It is cut from a chunk that a dialect's decoder has read, and kept only if a decoder of its own, shown the chunk with
another text in that place, reads that text and nothing else. What it then fits byte for byte means the same; whatever
does not fit goes to the parser of HTTP and to the decoder. One microsecond a chunk instead of seven.
"""

from __future__ import annotations

import orjson

from loadgen.dialects import Dialect
from loadgen.types import Event, EventKind

# Stands in the place of the text while a stencil is tried: no server says it, and it needs no escape.
TRIAL = "loadgen tries its stencil \u03bb"
# Different lengths of a read whose beginnings are remembered; tokens have few lengths.
MAX_LENGTHS = 64


class Stencil:
    """What stands before and behind the text in a read that is one HTTP chunk with one event. `kind` is that event's;
    its text goes to the first choice."""

    __slots__ = ("_before", "_heads", "_least", "kind", "tail")

    def __init__(self, before: bytes, after: bytes, kind: EventKind) -> None:
        self._before = before
        self._heads: dict[int, bytes] = {}  # by length of the read: the chunk's size line and what is before the text
        self.kind = kind
        self.tail = after + b"\r\n"
        self._least = len(before) + len(self.tail)

    def single(self, reads: list[bytes], times_ns: list[int]) -> tuple[list[bytes], list[int]]:
        """The same bytes with chunks apart that came in one read: a client that is late must not have the dearer work
        for it, or it would never catch up."""
        two, tail = 2 * self._least, self.tail
        if all(len(data) < two for data in reads):
            return reads, times_ns
        apart: list[bytes] = []
        times: list[int] = []
        for data, at_ns in zip(reads, times_ns, strict=True):
            parts = [part + tail for part in data.split(tail)[:-1]]  # every read here ends with it
            apart += parts
            times += [at_ns] * len(parts)
        return apart, times

    def texts(self, reads: list[bytes], first: int) -> tuple[int, str]:
        """How many reads from `first` on fit, up to the one that has to be parsed, and their texts as one. A read that
        fits has a text."""
        heads, tail, end = self._heads, self.tail, -len(self.tail)
        inner: list[bytes] = []
        for data in reads[first:] if first else reads:
            head = heads.get(len(data)) or self._head(data)
            if not head or not data.startswith(head) or not data.endswith(tail) or not (text := data[len(head) : end]):
                break
            inner.append(text)
        together = _string(b"".join(inner), alone=False)
        if together is not None:
            return len(inner), together
        texts: list[str] = []
        for text in inner:
            string = _string(text)
            if string is None:
                break
            texts.append(string)
        return len(texts), "".join(texts)

    def text(self, body: bytes) -> str | None:
        """The text of a chunk's body alone; None where it has to be decoded."""
        before, end = self._before, 2 - len(self.tail)
        if len(body) > len(before) - end and body.startswith(before) and body.endswith(self.tail[:-2]):
            return _string(body[len(before) : end])
        return None

    def _head(self, data: bytes) -> bytes | None:
        """How reads of this length begin, if this one is a whole chunk."""
        start = data.find(b"\r\n") + 2
        size = data[: start - 2]
        head = data[: start + len(self._before)]
        whole = size.isalnum() and head.endswith(self._before) and len(data) >= len(head) + len(self.tail)
        try:
            whole = whole and int(size, 16) == len(data) - start - 2
        except ValueError:
            whole = False
        if not whole:
            return None
        if len(self._heads) < MAX_LENGTHS:
            self._heads[len(data)] = head
        return head


def _string(inside: bytes, alone: bool = True) -> str | None:
    """What stands between the quotes of a JSON string; None where this is none. Not `alone`: of several strings in a
    row, and None also where that could be something else than each of them read alone."""
    if b"\\" not in inside and b'"' not in inside and (alone or inside.isascii()):
        try:
            text = inside.decode()
        except UnicodeDecodeError:
            return None
        if text.isprintable():  # control characters are no JSON
            return text
    if not alone:
        return None
    try:
        parsed: str = orjson.loads(b'"%b"' % inside)
    except orjson.JSONDecodeError:  # the text ends inside, and something else follows
        return None
    return parsed


def cut(data: bytes, event: Event, dialect: Dialect) -> Stencil | None:
    """The stencil of some bytes of a body, whole events from the first byte to the last, of which a decoder made one
    event; None where there is none that can be trusted."""
    text = f'"{event.text}"'.encode(errors="replace")
    if event.index or event.data is not None or not event.text or data.count(text) != 1:
        return None
    before, after = data.split(text)
    if _string(text[1:-1]) != event.text:
        return None
    # Three readings in a row: an API whose chunks hold all the text so far would give only what is new at the second.
    decoder = dialect.decoder()
    for said in (event.text, event.text + TRIAL, event.text):
        if decoder.feed(before + f'"{said}"'.encode() + after, event.at_ns) != [Event(event.kind, said, event.at_ns)]:
            return None
    return Stencil(before + b'"', b'"' + after, event.kind)
