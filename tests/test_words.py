"""Exact lengths: the list, the filler and the calibration that confirms both."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.types import Draw
from workloads import calibrate, long_context, words


def test_list_is_sorted_unique_short_lower_case_and_one_word_for_ten_bits() -> None:
    assert list(words.WORDS) == sorted(set(words.WORDS))
    assert len(words.WORDS) == 1024
    assert all(re.fullmatch("[a-z]{3,8}", word) for word in words.WORDS)


def test_list_has_no_word_that_frames_a_needle() -> None:
    assert not {"register", "holds", "hold", "number", "digits"} & set(words.WORDS)


@given(st.integers(0, 700), st.integers(0, 2**32))
def test_filler_has_exactly_n_words_of_the_list_with_single_spaces(n: int, seed: int) -> None:
    text = words.filler(Random(seed), n)
    found = text.split(" ") if text else []
    assert len(found) == n
    assert set(found) <= set(words.WORDS)
    assert text == words.filler(Random(seed), n)


def test_filler_of_a_whole_context_is_exact_and_no_prefix_of_another() -> None:
    one, other = (words.filler(Random(seed), 262_144) for seed in (1, 2))
    assert one.count(" ") == other.count(" ") == 262_143
    assert one[:200] != other[:200]


def test_filler_never_changes_from_one_version_to_the_next() -> None:
    # Another list or another way to draw from it would change every prompt of every scenario: do it knowingly.
    found = words.filler(Random(1), 70).split(" ")
    assert found[:4] + found[-2:] == ["test", "ago", "release", "lower", "link", "question"]


@given(st.integers(0, 2**48 - 1))
def test_salt_is_five_words_and_spells_the_nonce_one_to_one(number: int) -> None:
    nonce = f"{number:012x}"
    text = words.salt(nonce)
    assert len(text.split(" ")) == 5
    assert words.unsalt(text) == nonce


@pytest.mark.parametrize("text", ["", "apple", "apple apple apple apple holds", "apple " * 6])
def test_words_that_are_no_salt_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not 5 words"):
        words.unsalt(text)


def test_probes_hold_k_2k_3k_words_and_try_nearly_the_whole_list() -> None:
    requests = calibrate.probes(seed=3, words_step=170)
    texts = [request.messages[0]["content"] for request in requests]
    assert [len(text.split(" ")) for text in texts] == [170, 340, 510]
    assert [request.expect["words"] for request in requests] == [170, 340, 510]
    assert len(set(" ".join(texts).split(" "))) == 1020
    assert all(request.max_tokens == 1 for request in requests)
    assert requests == calibrate.probes(seed=3, words_step=170)
    assert requests != calibrate.probes(seed=4, words_step=170)


@given(st.integers(0, 5000), st.integers(1, 2000))
def test_a_server_that_counts_words_gives_its_template(template: int, step: int) -> None:
    line = calibrate.fit([(number * step, template + number * step) for number in (1, 2, 3)])
    assert line == calibrate.Line(template, 1.0, exact=True)


def test_a_slope_that_is_not_one_says_by_how_much() -> None:
    line = calibrate.fit([(100, 140), (200, 250), (300, 360)])
    assert not line.exact
    assert line.tokens_per_word == pytest.approx(1.1)
    assert line.template_tokens == 30
    assert "1.1000 tokens" in line.why
    assert "up to 20 in 300" in line.why


def test_usage_that_leaves_out_the_cached_part_is_named() -> None:
    assert "40 tokens fewer" in calibrate.fit([(100, 60), (200, 160), (300, 260)]).why


def test_one_word_of_two_tokens_is_not_exact() -> None:
    line = calibrate.fit([(100, 130), (200, 231), (300, 330)])
    assert not line.exact
    assert "up to 1 in 300" in line.why


def test_one_length_is_no_line() -> None:
    with pytest.raises(ValueError, match="two lengths"):
        calibrate.fit([(100, 130), (100, 130)])


def test_frame_probes_give_the_frame_and_their_disagreement() -> None:
    options, draw = long_context.Options(), Draw(seed=1, cls="long_context", salt="s")
    probes = [long_context.frame_probe(options, draw, number) for number in range(3)]
    counted = [(probe, 137 + int(probe.expect["words"])) for probe in probes]
    assert len({words for _, words in counted}) == 3
    assert calibrate.frame_tokens(counted) == (137, 0)
    probe, tokens = counted[0]
    assert calibrate.frame_tokens([(probe, tokens - 2), *counted[1:]]) == (137, 2)
