"""Every dialect: what it sends, what it makes of answers in its API's form, and that no bytes break it."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import cli, plugins, preflight, scenario
from loadgen.answer import Answer, End
from loadgen.client import Client
from loadgen.dialects import Dialect
from loadgen.types import Event, Limits, Outcome, Request, Target, UserError
from tests.scripted import Scripted, always, answer, plain, serve

NAMES = plugins.names("dialects")
MODULES: dict[str, ModuleType] = {name: plugins.load("dialects", name) for name in NAMES}
STREAMED = [name for name in NAMES if MODULES[name].STREAMS]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO", "detail": "low"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
WITH_IMAGE = [{"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE, SOUND]}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def asked(messages: list[dict[str, Any]] | None = None, **fields: Any) -> Request:
    return Request("r", "c", CHAT if messages is None else messages, 64, **fields)


def sent(name: str, request: Request, model: str = "m", extra: dict[str, Any] | None = None) -> dict[str, Any]:
    return cast(dict[str, Any], orjson.loads(MODULES[name].encode(request, model, extra or {})))


def told(name: str, pieces: Iterable[bytes], kind: str = "text/event-stream") -> Outcome:
    """The outcome of these reads, one a millisecond, after a head at 0."""
    answer = Answer(asked(), cast(Dialect, MODULES[name]))
    answer.outcome.sent_ns = at_ns = 0
    answer.begin(200, {"content-type": kind}, 0)
    for piece in pieces:
        at_ns += 1_000_000
        answer.piece(piece, at_ns)
    return answer.conclude(End(None, "", at_ns))


def stream(name: str, *events: dict[str, Any] | str) -> Outcome:
    return told(name, map(line, events))


def line(event: dict[str, Any] | str) -> bytes:
    """An event with its type in `data:` alone, as gateways send it; a string stands for itself."""
    return event.encode() if isinstance(event, str) else f"data: {json.dumps(event)}\n\n".encode()


def whole(name: str, answer: Any) -> Outcome:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return told(name, [body], "application/json")


# ---------------------------------------------------------------------------------------------------------------------
# One good stream of each dialect: two tokens of text, "a" and "é🦀", and counts

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
NATIVE_TIMINGS = {"cache_n": 4, "prompt_n": 5, "predicted_n": 2}


def meta(tokens: int, reason: Any = None) -> dict[str, Any]:
    return {"prompt_tokens": 9, "completion_tokens": tokens, "cached_tokens": 4, "finish_reason": reason}


GOOD: dict[str, list[dict[str, Any] | str]] = {
    "openai_chat": [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}}]},
        {"choices": [{"index": 0, "delta": {"content": "é🦀"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": USAGE},
        "data: [DONE]\n\n",
    ],
    "openai_completions": [
        {"choices": [{"index": 0, "text": "", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "a", "logprobs": None}]},
        {"choices": [{"index": 0, "text": "é🦀", "finish_reason": "stop"}], "usage": USAGE},
        "data: [DONE]\n\n",
    ],
    "openai_responses": [
        {"type": "response.created", "response": {"id": "r1", "status": "in_progress", "error": None}},
        {"type": "response.in_progress", "response": {"id": "r1", "status": "in_progress"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"id": "m1", "type": "message"}},
        {"type": "response.content_part.added", "output_index": 0, "item_id": "m1", "part": {"text": ""}},
        {"type": "response.output_text.delta", "output_index": 0, "item_id": "m1", "delta": "a"},
        {"type": "response.output_text.delta", "output_index": 0, "item_id": "m1", "delta": "é🦀"},
        {"type": "response.output_text.done", "output_index": 0, "item_id": "m1", "text": "aé🦀"},
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": {"id": "m1", "type": "message", "content": [{"type": "output_text", "text": "aé🦀"}]},
        },
        {
            "type": "response.completed",
            "response": {
                "id": "r1",
                "status": "completed",
                "output": [{"id": "m1", "type": "message", "content": [{"type": "output_text", "text": "aé🦀"}]}],
                "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2},
            },
        },
    ],
    "anthropic_messages": [
        {
            "type": "message_start",
            "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 1}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "é🦀"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ],
    "llamacpp_completion": [
        {"index": 0, "content": "a", "tokens": [1], "stop": False, "tokens_predicted": 1, "tokens_evaluated": 9},
        {"index": 0, "content": "é🦀", "tokens": [2], "stop": False, "tokens_predicted": 2, "tokens_evaluated": 9},
        {
            "index": 0, "content": "", "stop": True, "stop_type": "eos", "tokens_predicted": 2, "tokens_evaluated": 9,
            "tokens_cached": 10, "truncated": False, "timings": NATIVE_TIMINGS,
        },
    ],
    "sglang_generate": [
        {"text": "", "meta_info": meta(0)},
        {"text": "a", "meta_info": meta(1)},
        {"text": "aé🦀", "meta_info": meta(2)},
        {"text": "aé🦀", "meta_info": meta(2, {"type": "stop", "matched": 151645})},
        "data: [DONE]\n\n",
    ],
}  # fmt: skip


def test_every_dialect_that_streams_has_a_good_stream_here() -> None:
    assert sorted(GOOD) == STREAMED


@pytest.mark.parametrize("name", STREAMED)
def test_good_stream_is_read_to_the_last_count(name: str) -> None:
    outcome = stream(name, *GOOD[name])
    assert (outcome.outcome, outcome.text, outcome.finish_reason, outcome.flags) == ("ok", "aé🦀", "stop", set())
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (9, 4, 2)
    assert (outcome.chunks, outcome.output_tokens_source, list(outcome.gaps_ns)) == (2, "usage", [1_000_000])


@pytest.mark.parametrize("name", STREAMED)
def test_type_of_an_event_may_stand_in_its_event_line_alone(name: str) -> None:
    events = [
        f"event: {e['type']}\n{line(e).decode()}" if isinstance(e, dict) and "type" in e else e for e in GOOD[name]
    ]
    bare = [re.sub(r'"type": "(?:response|message|content_block|ping)[a-z_.]*", ', "", e) if isinstance(e, str) else e
            for e in events]  # fmt: skip
    for each in (events, bare):
        assert stream(name, *each).text == "aé🦀"


@pytest.mark.parametrize("name", STREAMED)
@given(cuts=st.lists(st.integers(0, 3000), max_size=8))
def test_any_split_of_the_bytes_gives_the_same_events(name: str, cuts: list[int]) -> None:
    data = b"".join(map(line, GOOD[name]))

    def events(edges: list[int]) -> list[Event]:
        decoder = MODULES[name].decoder()
        found = [event for a, b in pairwise(edges) for event in decoder.feed(data[a:b], 1)]
        return [*found, *decoder.close(1)]

    assert events([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]) == events([0, len(data)])


@pytest.mark.parametrize("name", STREAMED)
def test_every_truncation_is_noticed(name: str) -> None:
    """What is left after the cut is a failure, unless all of the answer had been said."""
    data = b"".join(map(line, GOOD[name]))
    last = data.rindex(b"data: ")  # the end marker, or the event that ends the answer
    finish = {"openai_chat": b'"finish_reason": "stop"', "openai_completions": b'"finish_reason": "stop"',
              "anthropic_messages": b'"message_delta"', "sglang_generate": b'{"type": "stop"'}  # fmt: skip
    said = data.rindex(finish[name]) if name in finish else last
    complete = data.index(b"\n\n", said)
    for cut in range(len(data)):
        outcome = told(name, [data[:cut]] if cut else [])
        if cut < complete:
            assert outcome.outcome == "failed", cut
        elif outcome.outcome == "ok":
            assert outcome.text == "aé🦀", cut


SAYING: dict[str, Callable[[str], dict[str, Any]]] = {
    "openai_chat": lambda text: {"choices": [{"index": 0, "delta": {"content": text}}]},
    "openai_completions": lambda text: {"choices": [{"index": 0, "text": text}]},
    "openai_responses": lambda text: {"type": "response.output_text.delta", "item_id": "m", "delta": text},
    "anthropic_messages": lambda text: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}},
    "llamacpp_completion": lambda text: {"content": text, "stop": False},
    "sglang_generate": lambda text: {"text": text, "meta_info": {}},
}


@pytest.mark.parametrize("name", STREAMED)
def test_events_that_differ_in_their_text_alone_say_all_of_it(name: str) -> None:
    """Over a socket: the client has a short cut for such events, which knows no dialect."""
    texts = ["Hello", " Hello", "Hello", '"', "a\n", "é", "🦀", "\\", " world", "Hello Hello", "Hello"]
    repeats = name == "sglang_generate"
    said = ["".join(texts[: n + 1]) if repeats else text for n, text in enumerate(texts)]
    events = [line(SAYING[name](text)).decode() for text in said]

    async def outcome() -> Outcome:
        async with serve(always(answer(*events, "data: [DONE]\n\n"))) as server:
            target = Target(url=server.url, dialect=name)
            client = Client(target, Limits(), MODULES[name], model="m", headers={}, connections=1)
            try:
                return await client.send(asked(), MODULES[name].encode(asked(), "m", {}))
            finally:
                await client.close()

    got = asyncio.run(outcome())
    assert (got.outcome, got.text, got.chunks) == ("ok", "".join(texts), len(texts)), got.error_message


WORDS = sorted(
    {word for events in GOOD.values() for event in events for word in re.findall(r'"([a-z_.]+)"', line(event).decode())}
    | {"error", "message", "delta", "item", "output", "refusal", "thinking", "partial_json", "tool_calls", "arguments",
       "function_call", "tool_use", "content_block", "call_id", "function", "usage", "timings", "output_ids", "results",
       "relevance_score", "score", "data", "embedding", "thinking_delta", "input_json_delta", "response.failed"}
)  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.sampled_from(WORDS), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=5)),
    max_leaves=16,
)
TYPED = st.builds(
    lambda kind, rest: {**rest, "type": kind},
    st.sampled_from([word for word in WORDS if word.startswith(("response", "message", "content_block"))]),
    st.dictionaries(st.sampled_from(WORDS), JSON, max_size=5),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(values=st.lists(st.one_of(JSON, TYPED), max_size=4))
def test_no_json_breaks_a_dialect(name: str, values: list[Any]) -> None:
    assert told(name, (f"data: {json.dumps(value)}\n\n".encode() for value in values)).outcome in ("ok", "failed")
    assert whole(name, values[0] if values else {}).outcome in ("ok", "failed")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(pieces=st.lists(st.binary(max_size=30), max_size=5))
def test_no_bytes_break_a_dialect(name: str, pieces: list[bytes]) -> None:
    assert told(name, [b"data: ", *pieces, b"\n\n"]).outcome in ("ok", "failed")
    assert told(name, [b"{", *pieces, b"}"]).outcome in ("ok", "failed")


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "engine died", "type": "server_error", "code": 500}},
        {"error": "engine died"},
        {"type": "error", "error": {"type": "overloaded_error", "message": "engine died"}},
        {"type": "error", "message": "engine died", "code": None, "param": None},
        {"object": "error", "message": "engine died"},
        {"detail": "engine died"},
        {"message": "engine died", "code": 500},
        "event: error\ndata: engine died\n\n",
        'event: error\ndata: {"message": "engine died"}\n\n',
        'error: {"code": 500, "message": "engine died"}\n\n',
    ],
)
def test_error_under_status_200_is_a_failure_in_every_dialect(name: str, event: Any) -> None:
    outcome = stream(name, *GOOD[name][:-3], event, "data: [DONE]\n\n")
    assert (outcome.outcome, outcome.error_class) == ("failed", "in_band_error")
    assert (outcome.error_message or "").startswith("engine died")


# ---------------------------------------------------------------------------------------------------------------------
# From the command line to the wire


@contextmanager
def answering(body: bytes, kind: str) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives every connection this body, and keeps what it was asked."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                data = b""
                while b"\r\n\r\n" not in data or not data.rstrip().endswith(b"}"):
                    data += connection.recv(65536)
                asked.append(data)
                connection.sendall(head.encode() + body)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def probed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["probe", *argv])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out + err


@pytest.mark.parametrize("name", NAMES)
def test_probe_asks_in_the_dialect_that_was_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    one_piece = {"openai_embeddings": embeddings([0.5]), "rerank": [{"index": 0, "score": 0.5}]}
    body = json.dumps(one_piece[name]).encode() if name in one_piece else b"".join(map(line, GOOD[name]))
    with answering(body, "application/json" if name in one_piece else "text/event-stream") as (url, asked):
        more = ["--header", "X-Team: blue", "--extra-body", '{"cache_salt": "s"}', "--model", "m"]
        code, out = probed(capsys, url, "--dialect", name, "--json", *more)
    assert (code, json.loads(out)["outcome"]) == (0, "ok"), out
    (head, sent_body) = asked[0].split(b"\r\n\r\n", 1)
    assert head.startswith(f"POST {MODULES[name].PATH} HTTP/1.1".encode())
    assert b"x-team: blue" in head
    assert orjson.loads(sent_body)["cache_salt"] == "s"


@pytest.mark.parametrize(
    ("argv", "say"),
    [
        (["--dialect", "openai_chta"], 'did you mean "openai_chat"?'),
        (["--header", "nothing"], "write it like 'Name: value'"),
        (["--extra-body", "{"], "--extra-body: not JSON"),
        (["--extra-body", "[1]"], "write an object"),
    ],
)
def test_mistakes_in_how_to_ask_are_told(argv: list[str], say: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = probed(capsys, "http://127.0.0.1:1", *argv)
    assert (code, say in out) == (3, True), out


@pytest.mark.real
@pytest.mark.parametrize(
    "name",
    ["openai_chat", "openai_completions", "openai_responses", "anthropic_messages", "llamacpp_completion"],
)
def test_real_server_answers_in_every_dialect_that_it_speaks(
    name: str, llamacpp_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["--prompt", "Once upon a time", "--max-tokens", "8"]
    code, out = probed(capsys, llamacpp_url, "--dialect", name, "--json", *prompt)
    said = json.loads(out)
    assert (code, said["outcome"], said["output_tokens"], said["chunks"]) == (0, "ok", 8, 8), out
    assert (said["output_tokens_source"], said["flags"]) == ("usage", [])
    assert said["finish_reason"] == ("stop" if name == "openai_responses" else "length")  # it calls it completed
    assert said["cached_tokens"] <= said["prompt_tokens"]


def test_secret_in_a_header_of_a_run_is_refused_because_the_run_folder_would_hold_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "smoke", "--url", "http://127.0.0.1:1", "--out", str(tmp_path), "--header", "X-Api-Key: sk-1"])
    assert end.value.code == 3
    said = capsys.readouterr().err
    assert "use --api-key-env" in said
    assert "sk-1" not in said


def test_server_without_tokens_passes_preflight_uncalibrated() -> None:
    """Ready, the only model named, nothing measured that such an API has not."""
    models = {"object": "list", "data": [{"id": "bge", "max_model_len": 512}]}
    routes = {
        "/v1/models": [{"steps": plain("200 OK", json.dumps(models))}],
        "/v1/embeddings": [{"steps": plain("200 OK", json.dumps(embeddings([0.5])))}],
        "*": [{"steps": plain("404 Not Found", "{}")}],
    }

    async def examined() -> tuple[preflight.Preflight, Scripted]:
        async with serve({"routes": routes}) as server:
            target = Target(url=server.url, dialect="openai_embeddings")
            scene = replace(scenario.load("smoke"), target=target)

            def connect(target: Target, model: str) -> Client:
                return Client(target, Limits(), MODULES["openai_embeddings"], model=model, headers={}, connections=1)

            found = await preflight.examine(scene, connect, wait_s=0, busy_ok=True, say=lambda text: None)
            return found, server

    found, server = asyncio.run(examined())
    assert (found.facts.model, found.facts.lengths) == ("bge", "estimated: openai_embeddings is not calibrated")
    assert found.facts.context_tokens == 512
    assert server.paths.count("/v1/embeddings") == 1


# ---------------------------------------------------------------------------------------------------------------------
# What is sent


@pytest.mark.parametrize("name", NAMES)
def test_extra_body_is_merged_last_and_the_request_has_the_last_word(name: str) -> None:
    body = sent(name, asked(extra_body={"b": 3, "stream": "mine"}), extra={"a": 1, "b": 2, "temperature": 7})
    assert (body["a"], body["b"], body["stream"], body["temperature"]) == (1, 3, "mine", 7)


@pytest.mark.parametrize("name", NAMES)
def test_model_is_left_out_where_the_server_shall_choose(name: str) -> None:
    assert "model" not in sent(name, asked(), model="")
    assert sent(name, asked()).get("model") == (None if name == "sglang_generate" else "m")


@pytest.mark.parametrize("name", STREAMED)
def test_length_temperature_and_ignore_eos_reach_the_server(name: str) -> None:
    body = sent(name, asked(ignore_eos=True, temperature=0.5))
    inner = body.get("sampling_params", body)
    length = {"openai_responses": "max_output_tokens", "llamacpp_completion": "n_predict",
              "sglang_generate": "max_new_tokens"}.get(name, "max_tokens")  # fmt: skip
    assert (inner[length], inner["temperature"], inner["ignore_eos"], body["stream"]) == (64, 0.5, True, True)
    assert "ignore_eos" not in sent(name, asked()).get("sampling_params", sent(name, asked()))


def test_messages_become_a_prompt_where_the_api_has_none() -> None:
    assert sent("openai_completions", asked())["prompt"] == "Be brief.\n\nHi?"
    assert sent("llamacpp_completion", asked())["prompt"] == "Be brief.\n\nHi?"
    assert sent("sglang_generate", asked())["text"] == "Be brief.\n\nHi?"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert sent("openai_completions", asked(parts))["prompt"] == "ab"


@pytest.mark.parametrize(
    "name", ["openai_completions", "llamacpp_completion", "sglang_generate", "openai_embeddings", "rerank"]
)
def test_media_that_an_api_cannot_carry_is_a_mistake_of_the_user(name: str) -> None:
    with pytest.raises(UserError, match="cannot carry a part of type image_url"):
        sent(name, asked(WITH_IMAGE))


def test_sampling_parameters_are_added_one_by_one() -> None:
    body = sent("sglang_generate", asked(extra_body={"sampling_params": {"top_p": 0.9}}))
    assert body["sampling_params"] == {"max_new_tokens": 64, "temperature": 0.0, "top_p": 0.9}


def test_responses_have_their_own_spelling_of_parts_and_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": "7"}]  # fmt: skip
    tools = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    body = sent("openai_responses", asked([*CHAT, *history, *WITH_IMAGE], extra_body=tools))
    assert body["input"] == [
        {"type": "message", "role": "system", "content": "Be brief."},
        {"type": "message", "role": "user", "content": "Hi?"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "what?"},
            {"type": "input_image", "image_url": "data:image/png;base64,iVBO", "detail": "low"}, SOUND,
        ]},
    ]  # fmt: skip
    assert body["tools"] == [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}]
    assert body["tool_choice"] == {"type": "function", "name": "f"}


def test_anthropic_messages_have_their_own_spelling_of_system_parts_and_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    history: list[dict[str, Any]] = [{"role": "assistant", "content": "so", "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": "7"}]  # fmt: skip
    body = sent("anthropic_messages", asked([*CHAT, *history, *WITH_IMAGE], extra_body={"tools": [TOOL]}))
    assert body["system"] == "Be brief."
    assert body["messages"] == [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "so"}, {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "7"}]},
        {"role": "user", "content": [
            {"type": "text", "text": "what?"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}, SOUND,
        ]},
    ]  # fmt: skip
    assert body["tools"] == [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    for choice, ours in (
        ("required", {"type": "any"}),
        ("auto", {"type": "auto"}),
        ({"type": "tool"}, {"type": "tool"}),
    ):
        assert sent("anthropic_messages", asked(), extra={"tool_choice": choice})["tool_choice"] == ours


def test_query_and_documents_are_found_in_messages_and_in_paragraphs() -> None:
    messages = [{"role": "user", "content": text} for text in ("doc one", "doc two", "which?")]
    body = sent("rerank", asked(messages))
    assert (body["query"], body["documents"]) == ("which?", ["doc one", "doc two"])
    one = sent("rerank", asked([{"role": "user", "content": "doc one\n\ndoc two\n\nwhich?"}]))
    assert (one["query"], one["documents"]) == ("which?", ["doc one", "doc two"])
    assert sent("rerank", asked([{"role": "user", "content": "hi"}]))["documents"] == ["hi"]


def test_every_message_is_an_input_of_its_own() -> None:
    assert sent("openai_embeddings", asked())["input"] == ["Be brief.", "Hi?"]
    assert sent("openai_embeddings", asked([{"role": "user", "content": "hi"}]))["input"] == "hi"


# ---------------------------------------------------------------------------------------------------------------------
# Completions


def test_second_choice_of_a_completion_counts_and_stays_out_of_the_text() -> None:
    def choice(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": index, "text": text, "finish_reason": reason}]}

    outcome = stream(
        "openai_completions", choice(1, "no"), choice(0, "yes"), choice(1, "", "length"), choice(0, "", "stop")
    )
    assert (outcome.text, outcome.chunks, outcome.finish_reason) == ("yes", 2, "stop")


def test_completion_in_one_piece() -> None:
    outcome = whole("openai_completions", {"choices": [{"text": "a", "finish_reason": "length"}], "usage": USAGE})
    assert (outcome.text, outcome.finish_reason, outcome.output_tokens) == ("a", "length", 2)


# ---------------------------------------------------------------------------------------------------------------------
# Responses


def responses(*events: tuple[str, dict[str, Any]], end: dict[str, Any] | None = None) -> Outcome:
    last = {
        "type": "response.completed",
        "response": {"status": "completed", "usage": {"output_tokens": 3}} | (end or {}),
    }
    return stream("openai_responses", *({"type": f"response.{kind}", **rest} for kind, rest in events), last)


def test_reasoning_refusal_and_text_of_responses_are_told_apart() -> None:
    for name in ("reasoning_text", "reasoning_summary_text"):
        outcome = responses((f"{name}.delta", {"delta": "hm"}), ("output_text.delta", {"delta": "42"}))
        assert (outcome.reasoning_text, outcome.text, outcome.first_output_ns) == ("hm", "42", 2_000_000)
    assert responses(("refusal.delta", {"delta": "no"})).text == "no"
    assert responses(("output_audio.delta", {"delta": "UklGRg=="})).chunks == 1


@pytest.mark.parametrize("ids", [("f1", "f1", "f1"), ("f1", "x", "y"), ("", "", "")])
def test_tool_calls_of_responses_are_assembled_by_item_and_by_place(ids: tuple[str, str, str]) -> None:
    item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": ""}
    other = {"type": "function_call", "id": "g1", "call_id": "c2", "name": "g", "arguments": '{"y":2}'}
    outcome = responses(
        ("output_item.added", {"output_index": 0, "item": {**item, "id": ids[0]}}),
        ("function_call_arguments.delta", {"output_index": 0, "item_id": ids[1], "delta": '{"x":'}),
        ("function_call_arguments.delta", {"output_index": 0, "item_id": ids[1], "delta": "1}"}),
        ("function_call_arguments.done", {"output_index": 0, "item_id": ids[1], "arguments": '{"x":1}'}),
        ("output_item.done", {"output_index": 0, "item": {**item, "id": ids[2], "arguments": '{"x":1}'}}),
        ("output_item.added", {"output_index": 1, "item": {**other, "arguments": ""}}),
        ("output_item.done", {"output_index": 1, "item": other}),
    )
    calls = [(call.id, call.name, call.arguments) for call in outcome.tool_calls]
    assert calls == [("c1", "f", '{"x":1}'), ("c2", "g", '{"y":2}')]
    assert (outcome.finish_reason, outcome.chunks) == ("tool_calls", 5)


def test_text_that_comes_only_when_its_item_is_done_is_read_once() -> None:
    item = {"id": "m1", "type": "message", "content": [{"type": "output_text", "text": "hi"}]}
    late = responses(("output_item.done", {"output_index": 0, "item": item}), end={"output": [item]})
    assert (late.text, late.chunks) == ("hi", 1)
    latest = responses(end={"output": [{"type": "reasoning", "summary": [{"text": "hm"}]}, item]})
    assert (latest.text, latest.reasoning_text, latest.chunks) == ("hi", "hm", 1)


@pytest.mark.parametrize(
    ("end", "error_class", "reason"),
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, None, "length"),
        ({"status": "completed", "incomplete_details": {"reason": "max_output_tokens"}}, None, "length"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, None, "content_filter"),
        ({"status": "failed", "error": {"code": "server_error", "message": "engine died"}}, "in_band_error", None),
        ({"status": "failed", "error": None}, "in_band_error", None),
        ({"status": "cancelled"}, "aborted_by_server", "cancelled"),
        ({"status": "incomplete"}, "aborted_by_server", "incomplete"),
    ],
)
def test_ends_of_responses(end: dict[str, Any], error_class: str | None, reason: str | None) -> None:
    outcome = responses(("output_text.delta", {"delta": "x"}), end=end)
    assert (outcome.error_class, outcome.finish_reason) == (error_class, reason)


def test_response_in_one_piece() -> None:
    answer = GOOD["openai_responses"][-1]
    assert isinstance(answer, dict)
    outcome = whole("openai_responses", answer["response"])
    assert (outcome.text, outcome.finish_reason, outcome.cached_tokens, outcome.output_tokens) == ("aé🦀", "stop", 4, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Anthropic


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def messages(*blocks: list[dict[str, Any]], reason: str = "end_turn", **usage: Any) -> Outcome:
    end = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 3, **usage}}
    return stream("anthropic_messages", *(e for each in blocks for e in each), end, {"type": "message_stop"})


def test_thinking_text_and_tools_of_messages_are_told_apart() -> None:
    outcome = messages(
        block(
            0,
            {"type": "thinking", "thinking": ""},
            {"type": "thinking_delta", "thinking": "hm"},
            {"type": "signature_delta", "signature": "EqQB"},
        ),
        block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "so"}),
        block(
            2,
            {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
            {"type": "input_json_delta", "partial_json": ""},
            {"type": "input_json_delta", "partial_json": '{"x":'},
            {"type": "input_json_delta", "partial_json": "1}"},
        ),
        block(3, {"type": "tool_use", "id": "t2", "name": "g", "input": {}}),
        reason="tool_use",
    )
    assert (outcome.reasoning_text, outcome.text, outcome.finish_reason) == ("hm", "so", "tool_calls")
    calls = [(call.id, call.name, call.arguments) for call in outcome.tool_calls]
    assert calls == [("t1", "f", '{"x":1}'), ("t2", "g", "")]
    assert outcome.chunks == 6


def test_prompt_tokens_of_messages_include_those_of_the_cache() -> None:
    usage: dict[str, Any] = {"input_tokens": 10, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20}
    outcome = messages(block(0, {"type": "text", "text": "x"}), **usage)
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (130, 100, 3)


@pytest.mark.parametrize(
    ("word", "ours"),
    [("end_turn", "stop"), ("stop_sequence", "stop"), ("max_tokens", "length"), ("refusal", "content_filter"),
     ("pause_turn", "stop"), ("model_context_window_exceeded", "length")],
)  # fmt: skip
def test_stop_reasons_of_messages(word: str, ours: str) -> None:
    assert messages(block(0, {"type": "text", "text": "x"}), reason=word).finish_reason == ours


def test_placeholder_at_the_start_of_a_message_is_no_count() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}
    text = block(0, {"type": "text", "text": ""}, *[{"type": "text_delta", "text": "word "}] * 4)
    outcome = stream("anthropic_messages", start, *text, {"type": "message_stop"})
    assert (outcome.output_tokens, outcome.output_tokens_source) == (4, "estimated")


def test_message_in_one_piece() -> None:
    content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"},
               {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]  # fmt: skip
    usage = {"input_tokens": 9, "output_tokens": 3}
    outcome = whole(
        "anthropic_messages", {"type": "message", "content": content, "stop_reason": "tool_use", "usage": usage}
    )
    assert (outcome.reasoning_text, outcome.text, outcome.tool_calls[0].arguments) == ("hm", "so", '{"x":1}')
    assert (outcome.finish_reason, outcome.output_tokens, outcome.chunks) == ("tool_calls", 3, 1)


# ---------------------------------------------------------------------------------------------------------------------
# llama.cpp


@pytest.mark.parametrize(
    ("end", "reason", "cached"),
    [
        ({"stop_type": "limit", "timings": {"prompt_n": 5, "predicted_n": 1}}, "length", 4),
        ({"stop_type": "word", "timings": {"prompt_n": 9, "cache_n": 0}}, "stop", 0),
        ({"stopped_limit": True, "stopped_eos": False}, "length", None),
        ({"stopped_limit": False, "stopped_eos": True, "tokens_cached": 4}, "stop", 4),
        ({"tokens_cached": 9}, "stop", None),  # where the slot's cache stands now, not what was found in it
    ],
)
def test_ends_and_counts_of_native_completions(end: dict[str, Any], reason: str, cached: int | None) -> None:
    last = {"content": "", "stop": True, "tokens_predicted": 1, "tokens_evaluated": 9, **end}
    outcome = stream("llamacpp_completion", {"content": "a", "stop": False}, last)
    assert (outcome.finish_reason, outcome.cached_tokens, outcome.flags) == (reason, cached, set())
    assert (outcome.prompt_tokens, outcome.output_tokens) == (9, 1)


def test_tokens_of_several_native_completions_are_added_and_the_answer_ends_with_the_last() -> None:
    def said(index: int, **fields: Any) -> dict[str, Any]:
        return {"index": index, "content": "", "stop": False, **fields}

    end = {"stop": True, "stop_type": "limit", "tokens_evaluated": 9}
    events = [said(0, content="a"), said(1, content="b"), said(0, **end, tokens_predicted=1)]
    assert stream("llamacpp_completion", *events).flags >= {"no_done_marker"}
    outcome = stream("llamacpp_completion", *events, said(1, **end, tokens_predicted=1))
    assert (outcome.output_tokens, outcome.chunks, outcome.text, outcome.flags) == (2, 2, "a", set())


def test_native_completion_in_one_piece() -> None:
    answer = {"content": "hi", "stop_type": "limit", "tokens_predicted": 1, "tokens_evaluated": 2}
    for body in (answer, [answer]):
        outcome = whole("llamacpp_completion", body)
        assert (outcome.text, outcome.finish_reason, outcome.output_tokens) == ("hi", "length", 1)


# ---------------------------------------------------------------------------------------------------------------------
# SGLang


def test_texts_that_are_not_repeated_are_joined() -> None:
    parts = ["The", " quick", " fox", " ran", " off"]
    events = [{"text": part, "meta_info": meta(n + 1)} for n, part in enumerate(parts)]
    events[-1]["meta_info"] = meta(5, {"type": "length", "length": 5})
    outcome = stream("sglang_generate", *events, "data: [DONE]\n\n")
    assert (outcome.text, outcome.chunks, outcome.finish_reason) == ("The quick fox ran off", 5, "length")


@pytest.mark.parametrize("said", ["a", "Hello", "Hello Hello"])
def test_repeated_texts_beside_constant_counts_are_not_taken_for_new_ones(said: str) -> None:
    texts = [said, f"{said} world", f"{said} world again", f"{said} world again and again"]
    end = {"text": texts[-1], "meta_info": {"finish_reason": {"type": "stop"}}}
    outcome = stream("sglang_generate", *({"text": text, "meta_info": {}} for text in texts), end)
    assert (outcome.text, outcome.chunks) == (texts[-1], 4)


def test_half_a_character_at_the_end_of_a_repeated_text_does_not_confuse() -> None:
    texts = ["x\ufffd", "xé", "xé!"]
    outcome = stream("sglang_generate", *({"text": text, "meta_info": meta(3)} for text in texts), "data: [DONE]\n\n")
    assert outcome.text == "x\ufffd!"


def test_token_numbers_in_place_of_text_are_counted() -> None:
    events = [{"output_ids": list(range(n)), "meta_info": meta(n, n == 3 and {"type": "length"})} for n in (1, 2, 3)]
    outcome = stream("sglang_generate", *events, "data: [DONE]\n\n")
    assert (outcome.text, outcome.chunks, outcome.output_tokens) == ("", 3, 3)


def test_abort_is_told_with_its_words() -> None:
    abort = {"type": "abort", "message": "Request timed out", "status_code": 503}
    outcome = stream("sglang_generate", {"text": "a", "meta_info": meta(1)}, {"text": "a", "meta_info": meta(1, abort)})
    assert (outcome.error_class, outcome.error_message) == (
        "aborted_by_server",
        "finish_reason 'abort': Request timed out",
    )


def test_generate_in_one_piece() -> None:
    answer = {"text": "hi", "meta_info": meta(2, {"type": "stop"})}
    for body in (answer, [answer]):
        outcome = whole("sglang_generate", body)
        assert (outcome.text, outcome.finish_reason, outcome.cached_tokens) == ("hi", "stop", 4)


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings and rerank


def embeddings(*vectors: Any) -> dict[str, Any]:
    data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "usage": {"prompt_tokens": 7, "total_tokens": 7}}


PACKED = base64.b64encode(array("f", [0.5, -1]).tobytes()).decode()


@pytest.mark.parametrize(
    "answer",
    [embeddings([0.5, -1]), embeddings([1, 2], [0.5, 1e-9]), embeddings(PACKED), [[0.5, 1.0]], {"embeddings": [[1.0]]},
     [{"index": 0, "embedding": [[0.5, 1.0]]}], {"embedding": [0.1, 0.2]}],
)  # fmt: skip
def test_sound_vectors_are_a_success_without_tokens(answer: Any) -> None:
    outcome = whole("openai_embeddings", answer)
    assert (outcome.outcome, outcome.output_tokens, outcome.chunks, outcome.finish_reason) == ("ok", None, 0, None)
    known = isinstance(answer, dict) and "usage" in answer
    assert (outcome.prompt_tokens, outcome.flags) == ((7, set()) if known else (None, {"no_usage"}))
    assert (outcome.e2e_ns, outcome.ttft_ns) == (1_000_000, None)


@pytest.mark.parametrize(
    ("answer", "error_class", "words"),
    [
        (embeddings([]), "protocol_error", "embedding 0 is empty"),
        (embeddings([1.0], [1.0, 2.0]), "protocol_error", "has 2 values"),
        (embeddings([1.0], ["x"]), "protocol_error", "no finite number"),
        (embeddings([None]), "protocol_error", "no finite number"),
        (embeddings([float("nan")]), "protocol_error", "no finite number"),
        (embeddings([float("-inf")]), "protocol_error", "no finite number"),
        (embeddings("!"), "protocol_error", "neither numbers nor base64"),
        (embeddings(base64.b64encode(array("f", [float("nan")]).tobytes()).decode()), "protocol_error", "nan"),
        ({"data": []}, "unexpected_content_type", "no answer"),
        ({"status": "ok"}, "unexpected_content_type", "no answer"),
        ({"error": {"message": "engine died"}}, "in_band_error", "engine died"),
        (b'{"data": [{"embedding": [1', "protocol_error", "cannot be read"),
        (b"", "empty_response", "without an answer"),
        (b"data: {}\n\n", "unexpected_content_type", "instead of JSON"),
    ],
)
def test_unsound_vectors_are_a_failure(answer: Any, error_class: str, words: str) -> None:
    outcome = whole("openai_embeddings", answer)
    assert (outcome.outcome, outcome.error_class) == ("failed", error_class)
    assert words in (outcome.error_message or "")


SCORES = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": -3}]


@pytest.mark.parametrize(
    ("answer", "prompt_tokens"),
    [
        ({"results": SCORES, "usage": {"prompt_tokens": 7, "total_tokens": 7}}, 7),
        ({"results": SCORES, "usage": {"total_tokens": 7}}, 7),
        ({"results": SCORES, "meta": {"tokens": {"input_tokens": 7}}}, 7),
        ({"data": [{"object": "score", "index": 0, "score": 0.5}]}, None),
        ([{"index": 0, "score": 0.5}], None),
    ],
)
def test_sound_scores_are_a_success_without_tokens(answer: Any, prompt_tokens: int | None) -> None:
    outcome = whole("rerank", answer)
    assert (outcome.outcome, outcome.output_tokens, outcome.prompt_tokens) == ("ok", None, prompt_tokens)


@pytest.mark.parametrize(
    ("answer", "error_class"),
    [
        ({"results": [{"index": 0}]}, "protocol_error"),
        ({"results": [{"index": 0, "relevance_score": None}]}, "protocol_error"),
        ({"results": [{"index": 0, "score": float("nan")}]}, "protocol_error"),
        ({"results": [SCORES[0], SCORES[0]]}, "protocol_error"),
        ({"results": [SCORES[0], 7]}, "protocol_error"),
        ({"results": []}, "unexpected_content_type"),
        ({"detail": "engine died"}, "in_band_error"),
    ],
)
def test_unsound_scores_are_a_failure(answer: Any, error_class: str) -> None:
    assert whole("rerank", answer).error_class == error_class


def test_table_of_the_readme_names_every_dialect_and_its_path() -> None:
    readme = (Path(__file__).parent.parent / "loadgen/dialects/README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| `(/[a-z0-9/_]+)` \|", readme, re.MULTILINE))
    assert rows == {name: module.PATH for name, module in MODULES.items()}
