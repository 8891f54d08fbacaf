"""The deck: in which order the classes of a mix are asked. Pure; the same seed deals the same cards on every machine.

Independent draws would give two nights of one scenario two different compositions. A deck is a shuffled multiset: each
hand holds every class exactly in its share, so after any whole hand the promised shares are met to the card.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from random import Random
from typing import NamedTuple

# Largest hand tried for exact shares: a longer one is more than a 600-s run of long prompts deals at all.
MAX_HAND = 100


def hand_size(weights: Mapping[str, float]) -> int:
    """The smallest hand in which every share is a whole number of cards; MAX_HAND where none up to that is."""
    total = sum(weights.values())
    for size in range(1, MAX_HAND + 1):
        shares = [weight * size / total for weight in weights.values() if weight > 0]
        if all(share > 0.5 and math.isclose(share, round(share), abs_tol=1e-9) for share in shares):
            return size
    return MAX_HAND


def deck(weights: Mapping[str, float], seed: int) -> Iterator[str]:
    """Class names without end. Shares that no hand meets exactly are carried to the next: nothing is lost to rounding.

    Raises ValueError where the weights sum to nothing.
    """
    total = sum(weights.values())
    if total <= 0 or any(weight < 0 for weight in weights.values()):
        raise ValueError("the weights of a mix must be positive somewhere and negative nowhere")
    size = hand_size(weights)
    owed = dict.fromkeys(weights, 0.0)
    for number in count():
        for name, weight in weights.items():
            owed[name] += weight * size / total
        cards = [name for name in weights for _ in range(int(owed[name] + 1e-9))]
        for name in cards:
            owed[name] -= 1
        # largest remainder first fills the hand; what it took in advance is owed back by the next one
        for name in sorted(weights, key=lambda n: -owed[n])[: size - len(cards)]:
            cards.append(name)
            owed[name] -= 1
        digest = hashlib.blake2b(f"{seed}\0deck\0{number}".encode(), digest_size=8).digest()
        Random(int.from_bytes(digest)).shuffle(cards)
        yield from cards


class Card(NamedTuple):
    """Ask item number `item` of class `cls`."""

    cls: str
    item: int


def deal(weights: Mapping[str, float], seed: int, shard: int = 0, shards: int = 1) -> Iterator[Card]:
    """This shard's cards: every shards-th of the one deck. Items are numbered over the whole deck, so that the shards
    together ask exactly what one shard alone would ask."""
    seen: Counter[str] = Counter()
    for number, cls in enumerate(deck(weights, seed)):
        if number % shards == shard:
            yield Card(cls, seen[cls])
        seen[cls] += 1
