"""The chat dialect and the counting of its answers: field names, token accounts, odd servers."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.answer import Answer, End, retry_after_s, told
from loadgen.dialects import openai_chat
from loadgen.types import Outcome, Request

STOP = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def asked(**fields: Any) -> Request:
    return Request("r", "c", [{"role": "user", "content": "hi"}], 64, **fields)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def stream(*events: dict[str, Any] | str, end: str = "data: [DONE]\n\n", request: Request | None = None) -> Outcome:
    """The outcome of these events, one a millisecond, after a head at 0."""
    answer = Answer(request or asked(), openai_chat)
    answer.outcome.sent_ns = 0
    answer.begin(200, {"content-type": "text/event-stream"}, 0)
    for n, event in enumerate([*events, end]):
        text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
        answer.piece(text.encode(), (n + 1) * 1_000_000)
    return answer.conclude(End(None, "", (len(events) + 1) * 1_000_000))


def whole(body: str, kind: str = "application/json") -> Outcome:
    answer = Answer(asked(), openai_chat)
    answer.begin(200, {"content-type": kind}, 0)
    answer.piece(body.encode(), 5)
    return answer.conclude(End(None, "", 7))


def test_request_streams_and_asks_for_usage() -> None:
    body = orjson.loads(openai_chat.encode(asked(ignore_eos=True, temperature=0.5), "m", {}))
    assert body == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "temperature": 0.5,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    assert "model" not in orjson.loads(openai_chat.encode(asked(), "", {}))
    assert "ignore_eos" not in orjson.loads(openai_chat.encode(asked(), "m", {}))


def test_extra_body_is_merged_last_and_the_request_has_the_last_word() -> None:
    request = asked(extra_body={"top_p": 1, "seed": 2})
    body = orjson.loads(openai_chat.encode(request, "m", {"top_p": 0, "temperature": 1}))
    assert (body["top_p"], body["temperature"], body["seed"]) == (1, 1, 2)


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm", "content": None},
        {"thinking": "hm"},
        {"reasoning_text": "hm"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"reasoning": {"content": "hm"}},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
    ],
)
def test_reasoning_is_read_under_all_its_names_and_once(thought: dict[str, Any]) -> None:
    outcome = stream(delta(**thought), delta(content="42"), STOP)
    assert (outcome.reasoning_text, outcome.text, outcome.chunks) == ("hm", "42", 2)
    assert (outcome.first_ns, outcome.first_output_ns) == (1_000_000, 2_000_000)


def test_reasoning_field_without_words_is_no_token() -> None:
    outcome = stream(delta(reasoning={"effort": "low"}), delta(reasoning_details=[{"type": "x"}]), delta(content="42"))
    assert (outcome.chunks, outcome.first_ns) == (1, 3_000_000)


def test_sound_and_images_are_tokens_and_what_is_spoken_is_text() -> None:
    outcome = stream(
        delta(audio={"id": "a"}),
        delta(audio={"data": "UklGRg=="}),
        delta(audio={"transcript": "hello"}),
        delta(images=[{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}]),
        STOP,
    )
    assert (outcome.text, outcome.chunks, outcome.first_ns) == ("hello", 3, 2_000_000)


def test_parts_of_a_message_are_sent_as_they_are() -> None:
    parts = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    ]
    request = Request("r", "c", [{"role": "user", "content": parts}], 64)
    assert orjson.loads(openai_chat.encode(request, "m", {}))["messages"][0]["content"] == parts


def test_one_event_with_reasoning_and_content_is_one_chunk() -> None:
    outcome = stream(delta(reasoning="hm", content="42"), delta(content="."), STOP)
    assert (outcome.chunks, list(outcome.gaps_ns), outcome.text) == (2, [1_000_000], "42.")


@pytest.mark.parametrize(
    "usage",
    [
        [{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}],
        [{"usage": {"prompt_tokens": 9, "completion_tokens": 2}}],
        [STOP | {"usage": {"prompt_tokens": 9.0, "completion_tokens": 2.0}}],
        [{"choices": [], "timings": {"prompt_n": 4, "cache_n": 5, "predicted_n": 2}}],
        [{"choices": [], "usage": None}, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}],
        [{"choices": [], "x_groq": {"usage": {"prompt_tokens": 9, "completion_tokens": 2}}}],
        [{"choices": [{"index": 0, "delta": {}, "usage": {"prompt_tokens": 9, "completion_tokens": 2}}]}],
        [{"choices": [], "usage": {"input_tokens": 9, "output_tokens": 2}}],
        [{"choices": None, "usage": {"prompt_tokens": 9, "completion_tokens": 2}}],
    ],
)
def test_usage_is_read_wherever_it_comes(usage: list[dict[str, Any]]) -> None:
    outcome = stream(delta(content="a"), delta(content="b"), STOP, *usage)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.output_tokens_source) == (9, 2, "usage")
    assert outcome.flags == set()


def test_usage_on_every_event_counts_once() -> None:
    events = [delta(content="x") | {"usage": {"prompt_tokens": 3, "completion_tokens": n}} for n in (1, 2, 3)]
    outcome = stream(*events, STOP)
    assert (outcome.output_tokens, outcome.chunks) == (3, 3)


def test_details_of_usage_are_kept_and_hidden_reasoning_stays_out_of_tpot() -> None:
    usage = {
        "prompt_tokens": 30, "completion_tokens": 104, "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 100},
    }  # fmt: skip
    outcome = stream(*[delta(content="x")] * 4, STOP, {"choices": [], "usage": usage})
    assert (outcome.cached_tokens, outcome.reasoning_tokens, outcome.flags) == (16, 100, {"hidden_reasoning"})
    assert outcome.tpot_ns == 1_000_000


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens_details": {"cached_tokens": 16}},
        {"input_tokens_details": {"cached_tokens": 16}},
        {"prompt_cache_hit_tokens": 16},
        {"cached_tokens": 16},
        {"cache_read_input_tokens": 16},
    ],
)
def test_cached_tokens_are_read_under_all_their_names(usage: dict[str, Any]) -> None:
    counts = {"prompt_tokens": 30, "completion_tokens": 1, "prompt_tokens_details": None, **usage}
    assert stream(delta(content="x"), STOP, {"choices": [], "usage": counts}).cached_tokens == 16


@pytest.mark.parametrize("bad", [None, "12", -1, True, [], {}])
def test_a_count_that_is_none_is_not_measured(bad: Any) -> None:
    outcome = stream(delta(content="x"), STOP, {"choices": [], "usage": {"completion_tokens": bad}})
    assert (outcome.output_tokens, outcome.output_tokens_source) == (1, "estimated")
    assert "no_usage" in outcome.flags


def test_zero_tokens_beside_text_is_an_unfilled_field() -> None:
    outcome = stream(delta(content="x"), STOP, {"choices": [], "usage": {"completion_tokens": 0}})
    assert (outcome.output_tokens, outcome.output_tokens_source) == (1, "estimated")


def test_without_usage_long_chunks_are_estimated_by_their_length() -> None:
    assert stream(delta(content="x" * 400), STOP).output_tokens == 100
    assert stream(*[delta(content="word ")] * 7, STOP).output_tokens == 7


def test_nan_and_infinity_are_flagged_and_the_event_is_used() -> None:
    outcome = stream('data: {"choices":[{"index":0,"delta":{"content":"x"},"logprobs":NaN,"a":-Infinity}]}\n\n', STOP)
    assert (outcome.text, outcome.flags) == ("x", {"nonfinite_json", "no_usage"})


def test_logprobs_of_a_whole_answer_may_be_infinite() -> None:
    choice = (
        '{"index":0,"message":{"content":"x"},"logprobs":{"content":[{"logprob":-Infinity}]},"finish_reason":"stop"}'
    )
    outcome = whole('{"usage":{"completion_tokens":1},"choices":[' + choice + "]}")
    assert (outcome.text, outcome.flags) == ("x", {"nonfinite_json", "buffered_stream"})


def test_character_cut_into_two_escapes_is_whole_again_and_a_lone_half_is_replaced() -> None:
    escapes = "\\ud83e", "\\udd80", "\\ud83e"
    halves = [f'data: {{"choices":[{{"delta":{{"content":"{half}"}}}}]}}\n\n' for half in escapes]
    outcome = stream(*halves, STOP)
    assert (outcome.text, outcome.chunks) == ("🦀\ufffd", 3)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: f"data: data: {text}\n\n",  # a gateway that makes an event stream of an event stream
        lambda text: f"data: {json.dumps(text)}\n\n",
        lambda text: "".join(f"data: {line}\n" for line in json.dumps(json.loads(text), indent=1).split("\n")) + "\n",
        lambda text: f"id: 7\nevent: message\nretry: 10\ndata:{text}\n\n",
    ],
)
def test_object_is_read_however_it_is_wrapped(wrap: Any) -> None:
    outcome = stream(*(wrap(json.dumps(event)) for event in (delta(content="a"), delta(content="b"), STOP)))
    assert (outcome.outcome, outcome.text, outcome.flags) == ("ok", "ab", {"no_usage"})


def test_lines_that_end_but_whose_events_do_not_are_read_all_the_same() -> None:
    lines = "".join(f"data: {json.dumps(event)}\n" for event in (delta(content="a"), delta(content="b"), STOP))
    outcome = stream(lines, end="data: [DONE]\n")
    assert (outcome.outcome, outcome.text, outcome.finish_reason) == ("ok", "ab", "stop")
    assert outcome.flags == {"unterminated_last_event", "no_usage", "coalesced_arrivals", "buffered_stream"}


def test_done_marker_may_be_padded_or_a_json_string() -> None:
    ends = "data:[DONE]\n\n", "data: [DONE] \r\n\r\n", 'data: "[DONE]"\n\n', "data: [DONE]", "data: [done]\n\n"
    for end in ends:
        assert "malformed_events" not in stream(delta(content="x"), STOP, end=end).flags
        assert "no_done_marker" not in stream(delta(content="x"), STOP, end=end).flags


def test_pings_are_nothing() -> None:
    outcome = stream('event: ping\ndata: {"type": "ping"}\n\n', "event: ping\ndata:\n\n", delta(content="x"), STOP)
    assert (outcome.outcome, outcome.chunks, outcome.flags) == ("ok", 1, {"no_usage"})


def test_malformed_event_is_counted_and_does_not_end_the_stream() -> None:
    outcome = stream(delta(content="a"), 'data: {"choices": [\n\n', "data: 12\n\n", delta(content="b"), STOP)
    assert (outcome.outcome, outcome.text) == ("ok", "ab")
    assert "malformed_events" in outcome.flags


def test_text_that_is_no_utf8_costs_the_character_only() -> None:
    answer = Answer(asked(), openai_chat)
    answer.begin(200, {"content-type": "text/event-stream"}, 0)
    answer.piece(b'data: {"choices":[{"index":0,"delta":{"content":"a\xff"},"finish_reason":"stop"}]}\n\n', 1)
    assert answer.conclude(End(None, "", 1)).text == "a\ufffd"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": {"message": "engine stopped", "code": 500}}, "engine stopped (code 500)"),
        ({"error": "engine stopped"}, "engine stopped"),
        ({"object": "error", "message": "engine stopped"}, "engine stopped"),
        ({"detail": "engine stopped"}, "engine stopped"),
        ("event: error\ndata: engine stopped\n\n", "engine stopped"),
        ('event: error\ndata: {"message": "engine stopped"}\n\n', "engine stopped"),
        ('error: {"message": "engine stopped"}\n\n', "engine stopped"),
        ({"choices": [], "error": {"message": "engine stopped"}}, "engine stopped"),
        ({"choices": [{"error": {"message": "engine stopped", "code": 502}}]}, "engine stopped (code 502)"),
        ({"error": True, "message": "engine stopped"}, "engine stopped"),
        ({"error": {"error": {"message": "engine stopped"}}}, "engine stopped"),
        ({"error": {"message": {"detail": "engine stopped"}}}, "engine stopped"),
        ({"error": ["engine stopped", "twice"]}, "engine stopped; twice"),
        ({"errors": [{"code": 7, "message": "engine stopped"}]}, "engine stopped (code 7)"),
        ({"error": {"type": "overloaded_error"}}, "overloaded_error"),
        ({"error_code": 18, "error_msg": "engine stopped"}, "engine stopped (code 18)"),
        ({"fault": {"faultstring": "engine stopped"}}, "engine stopped"),
        ({"code": 500, "msg": "engine stopped"}, "engine stopped (code 500)"),
        ({"title": "Bad", "status": 500, "detail": "engine stopped"}, "engine stopped"),
        ('data: [{"error": {"message": "engine stopped"}}]\n\n', "engine stopped"),
        ('event: error\ndata: "engine stopped"\n\n', "engine stopped"),
        ("event: error\ndata: {}\n\n", "error without a message"),
        ("event: error\ndata:\n\n", "error without a message"),
        ('data: "{\\"error\\": \\"engine stopped\\"}"\n\n', "engine stopped"),
    ],
)
def test_error_inside_the_stream_fails_the_request(event: Any, message: str) -> None:
    outcome = stream(delta(content="par"), event)
    assert (outcome.outcome, outcome.error_class, outcome.error_message) == ("failed", "in_band_error", message)
    assert (outcome.text, outcome.done_ns) == ("par", 2_000_000)


@pytest.mark.parametrize("nothing", [None, False, "", {}, []])
def test_error_null_is_no_error(nothing: Any) -> None:
    assert stream(delta(content="x") | {"error": nothing}, STOP).outcome == "ok"


def finished(word: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": word}]}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("abort", "abort"), ("error", "error"), ("cancelled", "cancelled"), ("repetition", "repetition"),
        ("insufficient_system_resource", "insufficient_system_resource"), ({"type": "odd"}, "odd"), (["x"], "['x']"),
        (7, "7"),
    ],
)  # fmt: skip
def test_unknown_finish_reason_means_that_the_server_aborted(word: Any, said: str) -> None:
    outcome = stream(delta(content="x"), finished(word))
    assert (outcome.error_class, outcome.finish_reason) == ("aborted_by_server", said)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("STOP", "stop"), ("eos_token", "stop"), ("COMPLETE", "stop"), ({"type": "stop", "matched": 2}, "stop"),
        ("MAX_TOKENS", "length"), ("model_length", "length"), ({"type": "length", "length": 3}, "length"),
        ("function_call", "tool_calls"), ("SAFETY", "content_filter"), ("refusal", "content_filter"),
    ],
)  # fmt: skip
def test_finish_reasons_of_other_servers_mean_the_same(word: Any, ours: str) -> None:
    outcome = stream(delta(content="x"), finished(word))
    assert (outcome.outcome, outcome.finish_reason) == ("ok", ours)


def test_words_of_an_abort_are_told() -> None:
    outcome = stream(delta(content="x"), finished({"type": "abort", "message": "out of memory"}))
    assert outcome.error_message == "finish_reason 'abort': out of memory"


def test_finish_without_done_and_done_without_finish_are_flagged_successes() -> None:
    assert stream(delta(content="x"), STOP, end="").flags == {"no_done_marker", "no_usage"}
    assert stream(delta(content="x")).flags == {"no_finish_reason", "no_usage"}


def test_neither_finish_nor_done_is_truncation() -> None:
    assert stream(delta(content="x"), end="").error_class == "stream_truncated"
    assert stream(delta(role="assistant"), end="").error_class == "stream_truncated"
    assert stream(delta(content="x"), STOP, end='data: {"usa').error_class == "stream_truncated"


def test_empty_answers() -> None:
    legal = stream(delta(role="assistant", content=""), STOP, {"choices": [], "usage": {"completion_tokens": 0}})
    assert (legal.outcome, legal.flags, legal.output_tokens) == ("ok", {"no_visible_output"}, 0)
    for events in ((), (": only a comment\n\n",), (delta(role="assistant"),)):
        assert stream(*events).error_class == "empty_response"


def test_tool_calls_are_assembled_by_index() -> None:
    def call(**fields: Any) -> dict[str, Any]:
        return delta(tool_calls=[fields])

    outcome = stream(
        call(index=0, id="a", function={"name": "f", "arguments": ""}),
        call(index=0, function={"arguments": '{"x":'}),
        call(index=1, id="b", function={"name": "g", "arguments": '{"y":2}'}),
        call(index=0, function={"arguments": "1}"}),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    )
    calls = [(made.id, made.name, made.arguments) for made in outcome.tool_calls]
    assert calls == [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')]
    assert (outcome.chunks, outcome.finish_reason, outcome.first_output_ns) == (4, "tool_calls", 1_000_000)


@pytest.mark.parametrize("index", [{}, {"index": 0}])
def test_tool_calls_that_are_not_numbered_are_told_apart_by_id_and_name(index: dict[str, int]) -> None:
    parts = [
        {"id": "a", "function": {"name": "f", "arguments": "{}"}, **index},
        {"id": "b", "function": {"name": "g", "arguments": {"y": 2}}, **index},
    ]
    outcome = stream(delta(tool_calls=parts), STOP)
    assert [(made.name, json.loads(made.arguments)) for made in outcome.tool_calls] == [("f", {}), ("g", {"y": 2})]
    assert outcome.chunks == 1


def test_old_function_call_and_refusal_and_parts_are_output() -> None:
    assert stream(delta(function_call={"name": "f", "arguments": "{}"}), STOP).tool_calls[0].name == "f"
    assert stream(delta(refusal="I can"), delta(refusal="not."), STOP).text == "I cannot."
    assert stream(delta(content=[{"type": "text", "text": "a"}, {"type": "audio"}]), STOP).text == "a"


def test_other_choices_count_as_chunks_but_not_as_text() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "length"}]}
    outcome = stream(other, delta(content="yes"), STOP)
    assert (outcome.text, outcome.chunks, outcome.finish_reason) == ("yes", 2, "stop")


def test_reasoning_only_prompt_truncated_and_short_output_are_flagged() -> None:
    assert "reasoning_only" in stream(delta(reasoning="hm"), STOP).flags
    usage = {"choices": [], "usage": {"prompt_tokens": 2048, "completion_tokens": 1}}
    request = asked(prompt_tokens=4096, ignore_eos=True)
    assert stream(delta(content="x"), STOP, usage, request=request).flags == {"prompt_truncated", "short_output"}


def test_stream_that_somebody_collected_is_flagged() -> None:
    events = "".join(f"data: {json.dumps(delta(content='x'))}\n\n" for _ in range(5))
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    assert stream(events, STOP, usage).flags == {"buffered_stream", "coalesced_arrivals"}


def test_json_in_place_of_a_stream_is_an_answer_without_times() -> None:
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
    for kind in ("application/json", "text/event-stream", ""):
        outcome = whole(json.dumps(body | {"usage": {"completion_tokens": 1, "prompt_tokens": 2}}), kind)
        assert (outcome.outcome, outcome.text, outcome.first_ns) == ("ok", "hi", 7)
        assert outcome.flags == {"buffered_stream"}


@pytest.mark.parametrize(
    ("body", "error_class"),
    [
        ('{"error": {"message": "no healthy upstream"}}', "in_band_error"),
        ('{"status": "ok"}', "unexpected_content_type"),
        ('{"choices": [', "protocol_error"),
        ("[" * 100_000, "protocol_error"),
        ("<html>", "unexpected_content_type"),
        ("", "empty_response"),
        ("  \n", "empty_response"),
    ],
)
def test_what_is_no_answer_is_named(body: str, error_class: str) -> None:
    assert whole(body).error_class == error_class


def test_stream_under_another_content_type_is_read_and_flagged() -> None:
    body = f"data: {json.dumps(delta(content='x'))}\n\ndata: {json.dumps(STOP)}\n\ndata: [DONE]\n\n"
    outcome = whole(body, "text/plain")
    assert (outcome.outcome, outcome.text) == ("ok", "x")
    assert "odd_content_type" in outcome.flags


@pytest.mark.parametrize(
    ("status", "headers", "body", "error_class"),
    [
        (401, {}, "no", "unauthorized"),
        (403, {}, "no", "unauthorized"),
        (429, {}, "slow down", "rate_limited"),
        (503, {"retry-after": "3"}, "busy", "rate_limited"),
        (503, {}, '{"error":{"code":503,"message":"Loading model"}}', "http_error"),
        (400, {}, '{"error":{"message":"9 tokens are longer than the model\'s context length"}}', "context_limit"),
        (413, {}, '{"error":"prompt is too long: 9 > 8"}', "context_limit"),
        (400, {}, '{"error":{"message":"temperature must be non-negative"}}', "http_error"),
        (404, {}, '{"detail":"Not Found"}', "http_error"),
        (307, {"location": "/x"}, "", "http_error"),
        (204, {}, "", "empty_response"),
    ],
)  # fmt: skip
def test_status_decides_the_error_class(status: int, headers: dict[str, str], body: str, error_class: str) -> None:
    answer = Answer(asked(), openai_chat)
    answer.begin(status, headers, 0)
    answer.piece(body.encode(), 1)
    outcome = answer.conclude(End(None, "", 2))
    assert (outcome.outcome, outcome.error_class, outcome.http_status) == ("failed", error_class, status)
    assert f"HTTP {status}" in (outcome.error_message or "")


def test_error_bodies_of_any_shape_are_one_short_line() -> None:
    assert told(b'{"detail":[{"loc":["body",15],"msg":"JSON decode error"}]}') == "body.15: JSON decode error"
    assert told(b"Internal\n Server   Error") == "Internal Server Error"
    assert told(b"") == "no body"
    assert len(told(b"x" * 9999)) == 300
    assert told(b'[{"error": {"message": "m"}}]') == "m"


def test_refusals_in_an_event_or_on_a_web_page_are_told_without_their_dress() -> None:
    assert told(b'data: {"error": {"message": "too long"}}\n\ndata: [DONE]\n\n') == "too long"
    assert told(b'event: error\ndata: {"detail": "too long"}\n\n') == "too long"
    page = b"<html><head><title>502 Bad Gateway</title><style>a {b: c}</style></head><!-- x --><hr>nginx</html>"
    assert told(page) == "502 Bad Gateway nginx"
    assert told(b"max < 5 and 7 > 6") == "max < 5 and 7 > 6"


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "The input (20031 tokens) is longer than the model's context length (8192 tokens).",
        "Input length (20031 tokens) exceeds the maximum allowed length (8190 tokens).",
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",
        "request (20031 tokens) exceeds the available context size (2048 tokens), try increasing it",
        "prompt is too long: 200001 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 199000 + 4096 > 200000",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens",
        "Input validation error: `inputs` must have less than 1024 tokens. Given: 2000",
        "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
        "The sum of prompt length (9000), query length (0) and max_tokens (10) should not exceed max_num_tokens (8192)",
        "too many tokens: total number of tokens in the prompt cannot exceed 4081",
    ],
)
def test_refusal_of_a_prompt_that_is_too_long_is_known_whoever_says_it(message: str) -> None:
    body = json.dumps({"error": {"message": message}}).encode()
    answer = Answer(asked(), openai_chat)
    answer.begin(400, {}, 0)
    answer.piece(body, 1)
    assert answer.conclude(End(None, "", 2)).error_class == "context_limit"
    assert stream({"error": {"message": message}}).error_class == "context_limit"
    assert stream(delta(content="x"), {"error": {"message": message}}).error_class == "in_band_error"


def test_waiting_time_in_milliseconds_and_an_overloaded_server_are_rate_limits() -> None:
    for status, headers in ((429, {"retry-after-ms": "1500"}), (529, {"retry-after": "1.5"})):
        answer = Answer(asked(), openai_chat)
        answer.begin(status, headers, 0)
        outcome = answer.conclude(End(None, "", 2))
        assert (outcome.error_class, outcome.retry_after_s) == ("rate_limited", 1.5)


def test_message_at_the_end_that_repeats_all_deltas_is_not_read_twice() -> None:
    last = {"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]}
    outcome = stream(delta(content="a"), delta(content="b"), last)
    assert (outcome.text, outcome.chunks, outcome.finish_reason) == ("ab", 2, "stop")
    both = {"choices": [{"index": 0, "delta": {}, "message": {"content": "a"}, "finish_reason": "stop"}]}
    assert stream(delta(content="a"), both).text == "a"


def test_null_as_a_word_is_no_finish_reason_and_a_delta_may_be_bare_text() -> None:
    bare = {"choices": [{"index": 0, "delta": "b", "finish_reason": "null"}]}
    outcome = stream(delta(content="a") | {"x": 1}, bare, STOP)
    assert (outcome.text, outcome.finish_reason) == ("ab", "stop")


def test_total_of_tokens_stands_in_for_the_output_and_a_later_zero_for_nothing() -> None:
    total = {"choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 11}}
    zeros = {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}
    outcome = stream(delta(content="a"), delta(content="b"), STOP, total, zeros)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.output_tokens_source) == (9, 2, "usage")


@pytest.mark.parametrize("status", [201, 203])
def test_other_words_for_success_are_success(status: int) -> None:
    answer = Answer(asked(), openai_chat)
    answer.begin(status, {"content-type": "text/event-stream"}, 0)
    answer.piece(f"data: {json.dumps(delta(content='x') | {'usage': {'completion_tokens': 1}})}\n\n".encode(), 1)
    answer.piece(b"data: [DONE]\n\n", 2)
    outcome = answer.conclude(End(None, "", 2))
    assert (outcome.outcome, outcome.output_tokens, outcome.http_status) == ("ok", 1, status)


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s("1.5", 0) == 1.5
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 20_000_000_000) == 40
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 90_000_000_000) == 0
    assert retry_after_s("soon", 0) is None
    assert retry_after_s("inf", 0) is None
    assert retry_after_s("nan", 0) is None
    assert retry_after_s(None, 0) is None


NAMES = st.sampled_from(
    ["choices", "delta", "message", "content", "index", "usage", "error", "tool_calls", "function", "arguments", "name",
     "id", "finish_reason", "timings", "prompt_n", "completion_tokens", "completion_tokens_details", "detail", "code",
     "text", "reasoning", "audio", "images", "type", "thinking", "x_groq", "errors", "x"]
)  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=4))
def test_no_json_crashes_the_decoder(values: list[Any]) -> None:
    outcome = stream(*(f"data: {json.dumps(value)}\n\n" for value in values))
    assert outcome.outcome in ("ok", "failed")
    whole(json.dumps(values[0] if values else {}))


@given(st.lists(st.sampled_from(["a", "é", "🦀", ""]), max_size=6), st.lists(st.integers(0, 900), max_size=6))
def test_any_split_gives_the_same_text(texts: list[str], cuts: list[int]) -> None:
    body = "".join(f"data: {json.dumps(delta(content=text), ensure_ascii=False)}\n\n" for text in texts).encode()
    decoder, got = openai_chat.decoder(), ""
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for a, b in pairwise(edges):
        got += "".join(event.text for event in decoder.feed(body[a:b], 1) if event.kind == "content")
    assert got == "".join(texts)


def test_line_of_16_mib_is_one_answer_and_more_than_the_bound_fails() -> None:
    long = json.dumps(delta(content="x" * (16 << 20)))
    outcome = stream(f"data: {long}\n\n", STOP)
    assert (outcome.outcome, len(outcome.text), "text_cut" in outcome.flags) == ("ok", 8 << 20, True)
    assert outcome.output_tokens == 4 << 20
    answer = Answer(asked(), openai_chat)
    answer.begin(200, {"content-type": "text/event-stream"}, 0)
    for _ in range(40):
        answer.piece(b"data: " + b"x" * (1 << 20), 1)
    assert answer.conclude(End(None, "", 2)).error_class == "protocol_error"
