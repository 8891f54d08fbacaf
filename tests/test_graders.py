"""What counts as a right answer, on real shapes of good, wrong and broken ones, and never a crash on any text."""

from __future__ import annotations

import base64
import inspect
import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import clock, plugins
from loadgen.types import Grade, Outcome, Request, ToolCall
from workloads import turns, words
from workloads.graders import contains, degenerate, exact, json_equal, length, needle

NAMES = plugins.names("graders")
KINDS = {"ok", "wrong", "distractor", "garbage", "degenerate", "empty", "malformed"}

EXPECT = {
    "integer": 503,
    "object": {"city": "old harbor", "count": 42, "open": True, "tags": ["a", "b"]},
    "value": "4710932",
    "distractors": ["1234567", "7654321"],
    "text": "3f9a0c11d2e4",
}

PROSE = (
    "The first bicycles had no pedals, and people pushed themselves along with their feet. In time a blacksmith fitted "
    "cranks to the front wheel, which made the ride faster but hard on the knees. Later the chain moved the work to "
    "the rear, tyres were filled with air, and what had been a toy for the rich became the cheapest way to work. "
)


def request(prompt: str = "What is 417 + 86?", **fields: Any) -> Request:
    return Request("c-000000", "c", [{"role": "user", "content": prompt}], 512, expect=dict(EXPECT), **fields)


def outcome(text: str = "", reasoning: str = "", *, reason: str | None = "stop", tokens: int | None = 20) -> Outcome:
    return Outcome(
        "c-000000", "c", "measure", 0, "cold", "ok", 0, text=text, reasoning_text=reasoning, finish_reason=reason,
        output_tokens=tokens, output_tokens_source=None if tokens is None else "usage",
    )  # fmt: skip


def essay(characters: int) -> str:
    """Good text that does not repeat itself: filler words, as varied as a language."""
    return words.filler(Random(7), characters // 4)[:characters]


# -- every grader


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(), reasoning=st.text(max_size=20), reason=st.sampled_from(["stop", "length", None]))
def test_no_text_crashes_a_grader(name: str, text: str, reasoning: str, reason: str | None) -> None:
    grade = plugins.load("graders", name).grade(request(), outcome(text, reasoning, reason=reason))
    assert grade.grader == name
    assert grade.kind in KINDS
    assert grade.ok == (grade.kind == "ok")
    assert 0 <= grade.score <= 1
    assert grade.ok or grade.why
    assert "\n" not in grade.why


HOSTILE = [
    "9" * 5000, "[" * 100_000, '{"a":' * 20_000, "```json\n" * 5000, "1,234" * 5000, "1 2" * 5000, "<|" * 5000,
    "\ud800broken", "\x00\x01", "!" * 20_000, " " * 20_000, "</think>" * 3000, "=" * 5000, "-" * 5000, "0" * 9999,
    '{"count": NaN}', '{"count": 1e999}', "٣٤٥", "ab" * 700, "é" * 1499, '{"count": 1' + "0" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_graded_like_others(name: str, text: str) -> None:
    grade = plugins.load("graders", name).grade(request(), outcome(text))
    assert grade.kind in KINDS
    assert "\n" not in grade.why
    assert len(grade.why) < 400


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("length", "degenerate")])
def test_an_empty_answer_is_told_from_a_wrong_one(name: str) -> None:
    grader = plugins.load("graders", name)
    assert grader.grade(request(), outcome("")).kind == "empty"
    assert grader.grade(request(), outcome("", "I think that", reason="length")).kind == "wrong"
    assert "max_tokens" in grader.grade(request(), outcome("", "I think that", reason="length")).why
    assert "max_tokens" in grader.grade(request(), outcome("<think>so</think>", reason="length")).why


# -- exact


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (503, "503"), (503, " 503.\n"), (503, "**503**"), (503, "The answer is 503."), (503, "417 + 86 = 503"),
        (503, "\\boxed{503}"), (503, "= 503"), (503, "503.0"), (503, "503 (since 417 + 86)"), (1234, "1,234"),
        (1234, "1 234"), (1234567, "1,234,567."), (-5, "-5"), (-5, "−5"), (0, "0"), (0, "-0"), (503, "0503"),
        (503, "417+86=\n503"), (503, "<think>417 + 86 is 500? no</think>503"), (503, "503 = 417 + x"),
        (503, "503 417"), (1234, "1 234 567"),
    ],
)  # fmt: skip
def test_right_integers_are_right_however_written(expected: int, text: str) -> None:
    asked = request()
    asked.expect["integer"] = expected
    if text in ("503 = 417 + x", "1 234 567"):
        assert not exact.grade(asked, outcome(text)).ok  # the result is another number
    else:
        assert exact.grade(asked, outcome(text)) == Grade(True, 1.0, "ok", grader="exact")


@pytest.mark.parametrize("text", ["504", "-503", "5030", "50", "503.5", "about", "417", "5 0 3", "٥٠٣", "1,503"])
def test_wrong_integers_are_wrong(text: str) -> None:
    grade = exact.grade(request(), outcome(text))
    assert (grade.ok, grade.kind) == (False, "wrong")
    assert grade.why.startswith("expected 503, got ")


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "The sum is {}.", "1 + 1 = {}", "**{:,}**"]))
def test_every_integer_is_recognised_and_its_neighbour_refused(number: int, form: str) -> None:
    asked = request()
    asked.expect["integer"] = number
    assert exact.grade(asked, outcome(form.format(number))).ok
    assert not exact.grade(asked, outcome(form.format(number + 1))).ok


# -- json

GOOD = json.dumps(EXPECT["object"])


@pytest.mark.parametrize(
    "form", ["{}", "```json\n{}\n```", "```\n{}\n```", "Here it is:\n```json\n{}\n```\nDone.", "\n {} \n"]
)
def test_bare_and_fenced_objects_are_read(form: str) -> None:
    assert json_equal.grade(request(), outcome(form.replace("{}", GOOD))).ok


def test_order_and_white_space_of_an_object_are_free() -> None:
    backwards = json.dumps(dict(reversed(EXPECT["object"].items())), indent=4)  # type: ignore[attr-defined]
    assert json_equal.grade(request(), outcome(backwards)).ok


@pytest.mark.parametrize(
    ("old", "new", "kind", "why"),
    [
        ("true", "1", "wrong", "open: expected true"),
        ("42", "42.0", "wrong", "count: expected 42"),
        ("42", '"42"', "wrong", "count: expected 42"),
        ("harbor", "harbour", "wrong", "city: expected"),
        ('"a", "b"', '"b", "a"', "wrong", "tags: expected"),
        ('"count": 42, ', "", "wrong", "count: expected 42, got nothing"),
        ("}", ', "more": 1}', "wrong", "not asked for: 'more'"),
        ("}", "", "malformed", "Expecting"),
        ("}", "} Done.", "malformed", "Extra data"),
        ("42", "NaN", "malformed", "NaN is no JSON"),
        ("}", ', "count": 42}', "malformed", "a name stands twice"),
        ("{", "[{", "malformed", "Expecting"),
    ],
)
def test_other_objects_are_wrong_and_broken_ones_malformed(old: str, new: str, kind: str, why: str) -> None:
    grade = json_equal.grade(request(), outcome(GOOD.replace(old, new)))
    assert (grade.ok, grade.kind) == (False, kind)
    assert why in grade.why


def test_partly_right_objects_score_by_fields() -> None:
    assert json_equal.grade(request(), outcome(GOOD.replace("42", "43"))).score == 0.75


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=5), st.booleans(), st.booleans())
def test_any_object_equals_itself_and_no_other(value: dict[str, Any], fenced: bool, ascii_only: bool) -> None:
    asked = request()
    asked.expect["object"] = value
    written = json.dumps(value, ensure_ascii=ascii_only)
    assert json_equal.grade(
        asked, outcome(f"```json\n{written}\n```" if fenced and "```" not in written else written)
    ).ok
    asked.expect["object"] = {**value, "another name": 1}
    if "another name" not in value:
        assert json_equal.grade(asked, outcome(written)).kind == "wrong"


# -- needle


@pytest.mark.parametrize(
    "text",
    [
        "4710932",
        "4 7 1 0 9 3 2",
        "4,710,932",
        "471-0932",
        "The register holds 4710932.",
        "Register 12: 4710932",
        "**4710932**",
    ],
)
def test_needles_are_found_with_or_without_separators(text: str) -> None:
    assert needle.grade(request(), outcome(text)).ok


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1234567", "distractor"), ("7 6 5 4 3 2 1", "distractor"), ("It holds 1234567, not 4710932", "distractor"),
        ("4710933", "garbage"), ("471093", "garbage"), ("47109322", "garbage"),
        ("I cannot find it", "wrong"), ("It holds 5.", "wrong"),
        ("!!!!!!!", "garbage"), ("0000000", "garbage"),
    ],
)  # fmt: skip
def test_another_registers_number_is_told_from_garbage(text: str, kind: str) -> None:
    grade = needle.grade(request(), outcome(text))
    assert (grade.ok, grade.kind) == (False, kind)


def test_a_near_miss_scores_by_its_digits() -> None:
    assert needle.grade(request(), outcome("4710933")).score == pytest.approx(6 / 7)
    assert needle.grade(request(), outcome("nothing")).score == 0


# -- contains


def test_the_own_code_is_found_and_another_requests_code_named() -> None:
    assert contains.grade(request(), outcome("3F9A 0c11d2e4: hello")).ok
    grade = contains.grade(request(), outcome("aaaaaaaaaaaa hello"))
    assert grade.kind == "wrong"
    assert "another one: aaaaaaaaaaaa" in grade.why
    assert "another one" not in contains.grade(request(), outcome("hello")).why


# -- length


@pytest.mark.parametrize(
    ("tokens", "reason", "exact_asked", "ok", "why"),
    [
        (512, "length", True, True, ""),
        (512, "stop", True, True, "finish_reason stop"),
        (513, "length", False, False, "too long"),
        (511, "length", False, False, "cut before max_tokens"),
        (100, "stop", True, False, "ended early"),
        (100, "stop", False, True, "ignore_eos is not honoured"),
        (None, "length", True, True, "no usage"),
    ],
)
def test_length_is_judged_by_usage_and_finish(
    tokens: int | None, reason: str, exact_asked: bool, ok: bool, why: str
) -> None:
    asked = request()
    asked.expect["exact"] = exact_asked
    grade = length.grade(asked, outcome("text", reason=reason, tokens=tokens))
    assert grade.ok is ok
    assert why in grade.why
    assert bool(grade.why) is bool(why)


def test_an_estimated_length_is_not_judged() -> None:
    guessed = outcome("text", tokens=3)
    guessed.output_tokens_source = "estimated"
    assert "not checked" in length.grade(request(), guessed).why


# -- degenerate

LOOPS = {
    "bangs": "!" * 3000, "numbers": "13, 17, " * 400, "uct": "uct" * 800, "sentence": PROSE[:86] * 30,
    "newlines": "x" + "\n" * 3000, "paragraph": PROSE * 40,
}  # fmt: skip


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_loops_fail_in_content_in_reasoning_and_at_either_end_of_good_text(text: str) -> None:
    good = essay(6000)
    for bad in (
        outcome(text),
        outcome("fine", text),
        outcome(good + text),
        outcome(text + good),
        outcome(good + text + good),
    ):
        grade = degenerate.grade(request(), bad)
        assert (grade.ok, grade.kind) == (False, "degenerate")


def test_a_long_loop_to_the_end_of_a_long_answer_fails() -> None:
    page = essay(8000)[6500:]
    assert degenerate.grade(request(), outcome(essay(5000) + page * 5)).kind == "degenerate"
    assert degenerate.grade(request(), outcome(essay(5000) + page * 2)).ok


@pytest.mark.parametrize("text", ["!" * 100, "13, 17, " * 12, "ha" * 50, "Sure. " + "GGGG" * 40, "the the " * 30])
def test_short_answers_that_are_one_cycle_fail(text: str) -> None:
    assert degenerate.grade(request(), outcome(text)).kind == "degenerate"


def sources() -> list[str]:
    """Good text at hand: our own code, but the one file that must spell the leaks it looks for."""
    files = sorted([*Path(turns.__file__).parent.rglob("*.py"), *Path(clock.__file__).parent.glob("*.py")])
    texts = [file.read_text(encoding="utf-8") for file in files if file.name != "degenerate.py"]
    return [text for text in texts if text.strip()]


GOOD_TEXTS = [
    PROSE, PROSE * 3, "503", "", "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 3, f"{'-' * 40}\n{PROSE}\n{'-' * 400}",
    "```python\n" + inspect.getsource(exact) + "\n```", essay(9000), json.dumps({"row": list(range(300))}),
    base64.b64encode(zlib.compress(PROSE.encode() * 9)).decode() * 2, "1. One\n2. Two\n3. Three\n", "x <| f and f |> x",
    "α + β = γ, so Δ = 0. " + PROSE, "Ça va très bien, merci. Über Straßen und Öfen.", *sources(),
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD_TEXTS, ids=range(len(GOOD_TEXTS)))
def test_good_text_passes(text: str) -> None:
    if text:
        grade = degenerate.grade(request(), outcome(text))
        assert grade.ok, grade.why


def test_repetitive_text_between_the_bounds_is_right_with_a_warning() -> None:
    text = "".join(f"item {number // 12}: no change, no error, no warning, nothing to report\n" for number in range(60))
    grade = degenerate.grade(request(), outcome(text))
    assert grade.ok
    assert "repetitive" in grade.why


@pytest.mark.parametrize(
    "text",
    [
        "Hello<|im_end|>",
        "<|eot_id|>",
        "<｜end▁of▁sentence｜>",
        "a <tool_call> {} </tool_call>",
        "<end_of_turn>",
        "caf\ufffd au lait",
    ],
)
def test_template_text_and_broken_characters_are_malformed(text: str) -> None:
    assert degenerate.grade(request(), outcome(text)).kind == "malformed"


def test_a_character_that_the_token_limit_cut_is_no_fault() -> None:
    assert degenerate.grade(request(), outcome("早上好\ufffd", reason="length")).ok
    assert not degenerate.grade(request(), outcome("早上好\ufffd", reason="stop")).ok


def test_thinking_in_the_content_is_a_missing_parser_once_and_a_leak_twice() -> None:
    once = degenerate.grade(request(), outcome("<think>417 and 86</think>503"))
    assert once.ok
    assert "reasoning parser" in once.why
    assert degenerate.grade(request(), outcome("a</think>b</think>c")).kind == "malformed"
    assert degenerate.grade(request(), outcome("a</think>503", "417 and 86")).kind == "malformed"


def test_chinese_in_an_english_answer_is_drift_and_in_a_chinese_one_is_not() -> None:
    chinese = "这是一个关于自行车历史的详细介绍。最早的自行车没有踏板，人们用脚推着地面前进。"
    drifted = degenerate.grade(request("Tell me about bicycles."), outcome(PROSE[:60] + chinese))
    assert drifted.kind == "degenerate"
    assert "script drift" in drifted.why
    assert degenerate.grade(request("请介绍自行车的历史。"), outcome(chinese)).ok
    a_little = degenerate.grade(request("Tell me about bicycles."), outcome(PROSE + "自行车车"))
    assert a_little.ok is (a_little.kind == "ok") is True
    reverse = degenerate.grade(request("请介绍自行车的历史，越详细越好。"), outcome(PROSE))
    assert reverse.ok
    assert "Latin answer" in reverse.why


def test_silence_with_tokens_billed_is_named() -> None:
    silent = degenerate.grade(request(), outcome("", tokens=40))
    assert (silent.ok, silent.kind) == (False, "empty")
    assert "40 tokens billed" in silent.why
    assert degenerate.grade(request(), outcome(" \n\t\n ")).kind == "empty"


def test_reasoning_without_an_answer_is_right_only_where_the_limit_cut_it() -> None:
    assert degenerate.grade(request(), outcome("", PROSE, reason="length")).ok
    assert degenerate.grade(request(), outcome("", PROSE, reason="stop")).kind == "empty"


def test_a_tool_call_needs_no_text() -> None:
    called = outcome("", reason="tool_calls")
    called.tool_calls.append(ToolCall("1", "look_up", "{}"))
    assert degenerate.grade(request(), called).ok


def test_grading_is_cheap() -> None:
    """Below 1 ms per KB: best of three, since a busy machine is no slow grader."""
    for text in (essay(100_000), PROSE * 300, "!" * 100_000):
        best = min(_timed(text) for _ in range(3))
        assert best < 100e6


def _timed(text: str) -> int:
    start = clock.now_ns()
    degenerate.grade(request(), outcome(text))
    return clock.now_ns() - start
