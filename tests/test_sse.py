"""The event-stream rules, at any split, against a reading of the whole text."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import sse
from loadgen.sse import EventStream, EventTooLargeError


def events(*pieces: bytes) -> list[bytes]:
    stream = EventStream()
    return [data for piece in pieces for _, data in stream.feed(piece)]


def by_the_standard(text: bytes) -> list[tuple[bytes, bytes]]:
    """The rules of the HTML standard read off one complete text, with no thought of speed or of splits."""
    found: list[tuple[bytes, bytes]] = []
    kind, data = b"", []
    lines = re.split(rb"\r\n|\r|\n", text.removeprefix(b"\xef\xbb\xbf"))
    for line in lines[:-1]:
        if not line:
            if data:
                found.append((kind, b"\n".join(data)))
            kind, data = b"", []
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            kind = value
    return found


LINE_ENDS = [b"\n", b"\r\n", b"\r"]
LINES = st.sampled_from(
    [b"data: {}", b"data:x", b"data:  two", b"data", b"data:", b": note", b":", b"event: error", b"id: 1", b"retry: 5",
     b"other: x", b"data: \xe4\xbd\xa0", b"datax: no", b"", b"", b""]
)  # fmt: skip
TEXTS = st.builds(
    lambda bom, parts: bom + b"".join(line + end for line, end in parts),
    st.sampled_from([b"", b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(LINES, st.sampled_from(LINE_ENDS)), max_size=20),
)


@settings(max_examples=200)
@given(TEXTS, st.lists(st.integers(0, 200), max_size=10))
def test_any_split_gives_the_events_of_the_standard(text: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stream = EventStream()
    got = [event for a, b in pairwise(edges) for event in stream.feed(text[a:b])]
    assert got == by_the_standard(text)


@given(st.lists(st.binary(max_size=50), max_size=10))
def test_no_bytes_crash_it(pieces: list[bytes]) -> None:
    stream = EventStream()
    for piece in pieces:
        stream.feed(piece)
    stream.close()


@pytest.mark.parametrize("end", LINE_ENDS)
def test_event_counts_when_its_blank_line_has_come_and_not_later(end: bytes) -> None:
    stream = EventStream()
    assert stream.feed(b"data: a" + end) == []
    assert stream.feed(end) == [(b"", b"a")]


def test_cut_carriage_return_line_feed_is_one_line_end() -> None:
    assert events(b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n") == [b"a\nb"]


def test_only_one_blank_after_the_colon_is_removed() -> None:
    assert events(b"data:  a\n\ndata:b\n\n") == [b" a", b"b"]


def test_several_data_lines_are_one_event() -> None:
    assert events(b"data: {\ndata: }\n\n") == [b"{\n}"]


def test_event_type_goes_with_its_event_only() -> None:
    assert EventStream().feed(b"event: error\ndata: a\n\ndata: b\n\n") == [(b"error", b"a"), (b"", b"b")]


def test_last_event_without_its_blank_line_is_left_to_the_caller() -> None:
    for text in (b"data: a", b"data: a\n", b"data: a\r"):
        stream = EventStream()
        assert stream.feed(text) == []
        assert stream.close() == (b"", b"a")
    assert EventStream().close() is None


def test_line_of_16_mib_is_one_event_and_copied_only_a_few_times() -> None:
    stream, piece = EventStream(), b"x" * 65536
    stream.feed(b"data: ")
    for _ in range(256):
        assert stream.feed(piece) == []
    ((_, data),) = stream.feed(b"\n\n")
    assert len(data) == 16 * 1024 * 1024


@pytest.mark.parametrize("line", [b"x" * (1 << 20), b"data: " + b"x" * (1 << 20) + b"\n"])
def test_memory_is_bounded_by_one_event(line: bytes) -> None:
    stream = EventStream()
    for _ in range(sse.MAX_EVENT_BYTES // len(line)):
        stream.feed(line)
    with pytest.raises(EventTooLargeError):
        stream.feed(line + line)
