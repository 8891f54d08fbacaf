from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import mix

SOAK = {"chat": 50.0, "arithmetic": 15.0, "json": 15.0, "long": 10.0, "generate": 10.0}


def test_every_hand_holds_the_promised_shares_to_the_card() -> None:
    size = mix.hand_size(SOAK)
    assert size == 20
    cards = mix.deck(SOAK, seed=1)
    for _ in range(50):
        assert Counter(islice(cards, size)) == {"chat": 10, "arithmetic": 3, "json": 3, "long": 2, "generate": 2}


def test_two_nights_of_one_seed_deal_the_same_cards_and_another_seed_does_not() -> None:
    first, second, other = (list(islice(mix.deck(SOAK, seed), 200)) for seed in (7, 7, 8))
    assert first == second
    assert first != other


def test_the_order_is_shuffled_not_blocked() -> None:
    hand = list(islice(mix.deck(SOAK, 1), 20))
    assert hand != sorted(hand, key=list(SOAK).index)


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.floats(0.01, 100), min_size=1, max_size=8),
    st.integers(0, 2**32),
)
def test_shares_that_no_hand_meets_are_carried_not_lost(weights: dict[str, float], seed: int) -> None:
    hands = 12
    size = mix.hand_size(weights)
    dealt = Counter(islice(mix.deck(weights, seed), hands * size))
    total = sum(weights.values())
    for name, weight in weights.items():
        assert abs(dealt[name] - hands * size * weight / total) <= 1 + 1e-6


@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 99))
def test_shards_together_deal_the_one_deck(shards: int, count: int, seed: int) -> None:
    one = list(islice(mix.deal(SOAK, seed), count))
    many = []
    for shard in range(shards):
        many += list(islice(mix.deal(SOAK, seed, shard, shards), len(range(shard, count, shards))))
    assert sorted(one) == sorted(many)


def test_items_of_a_class_are_numbered_without_a_gap() -> None:
    items = [card.item for card in islice(mix.deal(SOAK, 3), 100) if card.cls == "chat"]
    assert items == list(range(50))


def test_weights_that_sum_to_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        next(mix.deck({"a": 0.0}, 1))
