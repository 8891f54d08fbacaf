"""What the classes of one question have in common: the salt at their head, asking again, and how long a text may be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from loadgen.types import Draw, Json, Request, Session

# Vocabularies for many languages spend one token on about four letters of English; short words, digits, marks and
# line breaks may each cost one. Counting every piece of that kind errs upwards, which is what a bound needs.
_PIECE = re.compile(r"[A-Za-z]{1,4}|[^\sA-Za-z]|\n")


def opening(draw: Draw, item: int) -> str:
    """The salt line: it stands first, so that no earlier run is found in the server's prefix cache."""
    return f"[{draw.nonce(item)}]\n"


def user(text: str) -> list[Json]:
    """One user message."""
    return [{"role": "user", "content": text}]


def asked(make: Callable[[], Request], times: int) -> Session:
    """The same question `times` times in one session: cold, then warm.

    The copies share a session because only there the second leaves after the first was answered; two seats would send
    both at once, and the warm one would find nothing. Where the cold one fails the warm ones would not be warm: they
    are not asked. The request is made when it is wanted: sessions that another shard takes cost nothing to skip.
    """
    request = make()
    for turn in range(times):
        name = request.id if times == 1 else f"{request.id}.{turn}"
        outcome = yield replace(request, id=name, cache="cold" if turn == 0 else "warm")
        if outcome.outcome != "ok":
            return


def pieces(text: str) -> int:
    """No fewer tokens than the text has."""
    return len(_PIECE.findall(text))


def most_tokens(text: str, draw: Draw) -> int:
    """No fewer tokens than the text will have as a whole prompt, chat template included."""
    return pieces(text) + draw.template_tokens
