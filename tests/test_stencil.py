"""A stencil reads what the decoder would have read, or nothing."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import plugins
from loadgen.answer import Answer, End
from loadgen.dialects import openai_chat
from loadgen.http1 import Response
from loadgen.stencil import Stencil, cut
from loadgen.types import Event, Outcome, Request

TEXTS = st.text(max_size=12) | st.sampled_from(["\n", '"', "\\", "\u00e9", "\u4e2d", "\U0001f600", '","x":"', "[DONE]"])


def event_of(text: str, ascii_only: bool = True, **fields: Any) -> bytes:
    delta = {"content": text, **fields}
    chunk = {"id": "c1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    return b"data: " + json.dumps(chunk, ensure_ascii=ascii_only).encode() + b"\n\n"


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def stencil() -> Stencil:
    found = cut(event_of("Hello"), Event("content", "Hello", 7), openai_chat)
    assert found is not None
    return found


@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=20), st.integers(0, 3))
def test_stencil_gives_the_text_that_the_server_meant_or_leaves_it_to_the_parser(
    said: list[tuple[str, bool]], first: int
) -> None:
    reads = [chunked(event_of(text, ascii_only)) for text, ascii_only in said]
    n, text = stencil().texts(reads, first)
    assert text == "".join(text for text, _ in said[first : first + n])
    assert all(text for text, _ in said[first : first + n])


@given(st.binary(max_size=40))
def test_bytes_inside_a_string_are_read_as_json_does_or_not_at_all(inside: bytes) -> None:
    head, tail = event_of("Hello").split(b"Hello")
    n, text = stencil().texts([chunked(head + inside + tail)], 0)
    if n:
        assert json.loads(b'"%b"' % inside) == text


@pytest.mark.parametrize(
    "read",
    [
        event_of("x"),  # not chunked
        chunked(event_of("x")).replace(b"\r\n", b"0\r\n", 1),  # another length than it says
        chunked(event_of("x")).replace(b"\r\n", b";a=b\r\n", 1),
        b"+" + chunked(event_of("x")),
        chunked(event_of("x")) * 2,
        chunked(event_of("x"))[:-1],
        chunked(event_of("")),
        chunked(event_of("x", role="assistant")),
        chunked(event_of("x").replace(b"c1", b"c2")),
        b"0\r\n\r\n",
        b"",
    ],
)  # fmt: skip
def test_what_differs_in_more_than_its_text_is_for_the_parser(read: bytes) -> None:
    assert stencil().texts([read], 0) == (0, "")


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (event_of("c1"), Event("content", "c1")),  # the same word twice: which of them is the text?
        (event_of("a\nb"), Event("content", "a\nb")),  # spelled otherwise than it reads
        (event_of("x"), Event("content", "x", index=1)),
        (event_of("x"), Event("content", "x", data={"same_chunk": True})),
        (event_of("x"), Event("content", "y")),
        (event_of(""), Event("content", "")),
    ],
)  # fmt: skip
def test_no_stencil_is_cut_where_it_could_not_be_trusted(data: bytes, event: Event) -> None:
    assert cut(data, event, openai_chat) is None


class _AllSoFar:
    """The decoder of an API whose every chunk repeats the whole text."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, data: bytes, at_ns: int) -> list[Event]:
        text = json.loads(data.removeprefix(b"data: "))["choices"][0]["delta"]["content"]
        new, self._text = text.removeprefix(self._text), text
        return [Event("content", new, at_ns)] if new else []


def test_no_stencil_is_cut_of_an_api_that_repeats_its_text() -> None:
    dialect = ModuleType("all_so_far")
    dialect.decoder = _AllSoFar  # type: ignore[attr-defined]
    assert cut(event_of("Hello"), Event("content", "Hello"), dialect) is None  # type: ignore[arg-type]


def test_every_streaming_dialect_survives_the_trial() -> None:
    for name in plugins.names("dialects"):
        dialect = plugins.load("dialects", name)
        if dialect.STREAMS:
            cut(event_of("Hello"), Event("content", "Hello"), dialect)  # type: ignore[arg-type]


# The same answer, decoded and by stencil -----------------------------------------------------------------------------


def outcome_of(texts: list[str], quick: bool) -> Outcome:
    answer = Answer(Request("r", "c", [], 16), openai_chat)
    answer.begin(200, {"content-type": "text/event-stream"}, 0)
    at_ns, n = 0, 0
    reads = [event_of(text) for text in texts]
    while n < len(reads):
        times = [100 * (i + 1) for i in range(len(reads))]
        taken = answer.quick([chunked(body) for body in reads], n, times) if quick else 0
        n += taken
        if n < len(reads):
            at_ns = times[n]
            answer.piece(reads[n], at_ns)
            n += 1
    answer.piece(b"data: [DONE]\n\n", 100 * len(reads) + 1)
    return answer.conclude(End(None, "", 100 * len(reads) + 2))


@given(st.lists(TEXTS, max_size=30))
def test_answer_is_the_same_with_and_without_stencils(texts: list[str]) -> None:
    assert outcome_of(texts, True) == outcome_of(texts, False)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_parser_knows_whether_it_stands_between_two_chunks(cuts: list[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(chunked(event_of("x" * n)) for n in cuts)
    response = Response()
    response.feed(head, 0)
    rest, ends = body, set()
    position = 0
    for n in cuts:
        position += len(chunked(event_of("x" * n)))
        ends.add(position)
    at = 0
    for size in cuts:
        response.feed(rest[:size], 0)
        rest, at = rest[size:], at + size
        if response.between:
            assert at in ends
    if rest:
        response.feed(rest, 0)
    assert response.between


@given(st.lists(st.lists(st.sampled_from(["a", "bc", "\n"]), min_size=1, max_size=4), max_size=8))
def test_chunks_that_came_in_one_read_are_cut_apart_and_share_its_time(reads: list[list[str]]) -> None:
    joined = [b"".join(chunked(event_of(text)) for text in read) for read in reads]
    apart, times_ns = stencil().single(joined, list(range(len(joined))))
    assert apart == [chunked(event_of(text)) for read in reads for text in read]
    assert times_ns == [n for n, read in enumerate(reads) for _ in read]
