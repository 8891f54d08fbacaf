"""The response machine: framing, compression, bounds, and truncation in any place."""

from __future__ import annotations

import gzip
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import http1
from loadgen.http1 import EncodingError, ProtocolError, Response, request_head, with_length

HEAD = b"HTTP/1.1 200 OK\r\n"


def fed(*pieces: bytes) -> Response:
    response = Response()
    for n, piece in enumerate(pieces):
        response.feed(piece, n)
    return response


def body(response: Response) -> bytes:
    return b"".join(data for _, data in response.pieces)


def chunked(*parts: bytes) -> bytes:
    frames = [b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b"")]
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(frames)


def test_content_length_ends_the_body_and_keeps_the_connection() -> None:
    response = fed(HEAD + b"Content-Length: 5\r\n\r\nhel", b"lo")
    assert list(response.pieces) == [(0, b"hel"), (1, b"lo")]
    assert (response.status, response.complete, response.keep_alive, response.truncated) == (200, True, True, False)


def test_chunked_body_with_extensions_and_trailers_ends() -> None:
    response = fed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\nhi\r\n0\r\nX-T: 1\r\n\r\n")
    assert body(response) == b"hi"
    assert response.complete
    assert "x-t" not in response.headers


def test_body_without_length_ends_with_the_connection() -> None:
    response = fed(HEAD + b"Connection: close\r\n\r\nhi")
    assert not response.complete
    response.eof()
    assert (response.complete, response.truncated, response.keep_alive) == (True, False, False)


@pytest.mark.parametrize("head", [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
def test_end_of_connection_before_the_framed_end_is_truncation(head: bytes) -> None:
    response = fed(HEAD + head + b"\r\n\r\n")
    response.eof()
    assert response.truncated
    assert not response.complete


def test_interim_responses_are_skipped() -> None:
    interim = b"HTTP/1.1 100 Continue\r\nX: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
    response = fed(interim + HEAD + b"Content-Length: 2\r\n\r\nhi")
    assert (response.status, body(response), response.complete) == (200, b"hi", True)
    assert response.headers == {"content-length": "2"}


def test_bytes_behind_the_end_spoil_the_connection_not_the_answer() -> None:
    for head in (b"", b"Connection: close\r\n"):
        response = fed(HEAD + head + b"Content-Length: 2\r\n\r\nhiHTTP/1.1 408 Request Timeout\r\n\r\n")
        assert (body(response), response.complete, response.leftover) == (b"hi", True, True)
    later = fed(HEAD + b"Content-Length: 2\r\n\r\nhi", b"junk")
    assert later.leftover


def test_repeated_headers_are_joined_and_case_does_not_matter() -> None:
    response = fed(HEAD + b"VARY: a\r\nVary: b\r\nContent-LENGTH: 0\r\n\r\n")
    assert response.headers["vary"] == "a, b"
    assert response.complete


def test_content_length_beside_chunked_and_bare_line_feeds_are_read() -> None:
    both = fed(HEAD + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
    assert (body(both), both.complete) == (b"hi", True)
    bare = fed(b"HTTP/1.1 200 OK\nContent-Length: 2\n\nhi")
    assert (body(bare), bare.complete) == (b"hi", True)


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH\r\n", b"\x15\x03\x01\x00\x02", b"HTTP/1.1 abc\r\n\r\n", b"hello\n"])
def test_what_is_not_http_says_so_and_quotes_it(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not HTTP"):
        fed(data)


def test_endless_head_is_refused() -> None:
    with pytest.raises(ProtocolError, match="head exceeds"):
        fed(HEAD, *[b"X-A: " + b"a" * 1000 + b"\r\n"] * 100)
    with pytest.raises(ProtocolError, match="head exceeds"):
        fed(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 10_000)
    with pytest.raises(ProtocolError, match="headers"):
        fed(HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(1000)))


def test_protocol_switch_is_refused() -> None:
    with pytest.raises(ProtocolError, match="switches protocols"):
        fed(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n")


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(data) + deflater.flush()


@pytest.mark.parametrize(
    ("encoding", "compressed"),
    [
        (b"gzip", gzip.compress(b"hello" * 50, mtime=0)),
        (b"x-gzip", gzip.compress(b"hello" * 20, mtime=0) + gzip.compress(b"hello" * 30, mtime=0)),
        (b"gzip", gzip.compress(b"hello" * 50, mtime=0) + b"\0" * 7),
        (b"deflate", zlib.compress(b"hello" * 50)),
        (b"deflate", raw_deflate(b"hello" * 50)),
        (b"identity", b"hello" * 50),
    ],
)
def test_compressed_bodies_are_inflated_at_any_split(encoding: bytes, compressed: bytes) -> None:
    head = HEAD + b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (encoding, len(compressed))
    for cut in range(len(compressed)):
        response = fed(head + compressed[:cut], compressed[cut:])
        assert body(response) == b"hello" * 50
        assert response.complete
        assert not response.truncated


def test_flushed_gzip_is_readable_before_its_end() -> None:
    deflater = zlib.compressobj(wbits=31)
    first = deflater.compress(b"data: 1\n\n") + deflater.flush(zlib.Z_SYNC_FLUSH)
    response = fed(HEAD + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n", first)
    assert list(response.pieces) == [(1, b"data: 1\n\n")]
    response.eof()
    assert response.truncated  # a proper end of the body, but not of the compressed data


def test_other_encodings_and_false_claims_are_named() -> None:
    with pytest.raises(EncodingError, match="'br'"):
        fed(HEAD + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\nhi")
    with pytest.raises(EncodingError, match="not what content-encoding says"):
        fed(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\ndata: {}\n")


@pytest.mark.parametrize("word", sorted(http1.UNCOMPRESSED))
def test_a_name_that_is_no_compression_means_none(word: str) -> None:
    response = fed(HEAD + b"Content-Encoding: %b\r\nContent-Length: 2\r\n\r\nhi" % word.upper().encode())
    assert body(response) == b"hi"


def test_bomb_is_refused() -> None:
    bomb = gzip.compress(b"\0" * (http1.MAX_INFLATED_BYTES + 1), compresslevel=1)
    with pytest.raises(ProtocolError, match="inflates"):
        fed(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb)


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=6), st.lists(st.integers(0, 300), max_size=8))
def test_any_split_gives_the_same_body(parts: list[bytes], cuts: list[int]) -> None:
    data = chunked(*parts)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    response = fed(*(data[a:b] for a, b in pairwise(edges) if a < b))
    assert body(response) == b"".join(parts)
    assert response.complete
    assert response.keep_alive
    assert not response.leftover


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=4), st.data())
def test_any_truncation_is_noticed(parts: list[bytes], draw: st.DataObject) -> None:
    data = chunked(*parts)
    response = fed(data[: draw.draw(st.integers(1, len(data) - 1))])
    response.eof()
    assert response.truncated


HTTP_PIECES = st.one_of(st.binary(max_size=60), st.sampled_from([HEAD, b"\r\n", b"0\r\n\r\n", b"a: b\r\n"]))


@given(st.lists(HTTP_PIECES, max_size=8))
def test_no_bytes_raise_anything_but_a_protocol_error(pieces: list[bytes]) -> None:
    response = Response()
    try:
        for piece in pieces:
            response.feed(piece, 1)
    except ProtocolError:
        pass
    response.eof()
    assert response.complete or response.truncated


def test_request_is_built_with_its_length() -> None:
    head = request_head("POST", "/v1/x?a=b", {"host": "h:1", "x-é": "ü"})
    assert with_length(head, 3) == "POST /v1/x?a=b HTTP/1.1\r\nhost: h:1\r\nx-é: ü\r\ncontent-length: 3\r\n\r\n".encode(
        "latin-1"
    )
    assert with_length(request_head("GET", "/", {}), 0) == b"GET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/a b", {}), ("/a\r\nX: 1", {}), ("/", {"a": "b\r\nc: d"}), ("/", {"a b": "c"}), ("/", {"a": "\0"})],
)
def test_nothing_can_be_smuggled_into_a_request(path: str, headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"blank|control"):
        request_head("GET", path, headers)
