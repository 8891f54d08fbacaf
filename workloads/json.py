"""A JSON object with given fields and values: one wrong character fails, and parsing shows damage that prose hides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

from loadgen.types import Draw, Json, Request, Session, Tokens, UserError
from workloads import words
from workloads.turns import asked, most_tokens, opening, user

MIN_PROMPT_TOKENS = 160  # four fields of the longest kind with the task, the salt, and a template with a system text


@dataclass(frozen=True, slots=True)
class Options:
    """`fields`: how many, 1 to 20; fewer where `prompt_tokens` has no room. `repeat`: how often each object is asked
    for, first cold then warm. `max_tokens` leaves room for a model that thinks first."""

    prompt_tokens: Tokens = Tokens(256)
    max_tokens: int = 256
    fields: int = 4
    repeat: int = 1


def sessions(options: Options, draw: Draw) -> Iterator[Session]:
    if not 1 <= options.fields <= 20:
        raise UserError(f"json: fields is {options.fields}; choose 1 to 20")
    return (asked(partial(_object, options, draw, item), options.repeat) for item in count())


def _value(random: Random, place: int) -> str | int | bool | list[str]:
    """The kinds in turn, so that every object of four fields has each of them."""
    if place % 4 == 0:
        return " ".join(words.pick(random, 2))
    if place % 4 == 1:
        return int(random.random() * 100_000)
    if place % 4 == 2:
        return random.random() < 0.5
    return words.pick(random, 3)


def _object(options: Options, draw: Draw, item: int) -> Request:
    random = draw.random(item, "object")
    fields: Json = {}
    text = (
        f"{opening(draw, item)}Write one JSON object with exactly these fields. "
        "Answer with the JSON object only.\nfields:"
    )
    while len(fields) < options.fields:
        name = words.pick(random, 1)[0]
        if name in fields:
            continue
        value = _value(random, len(fields))
        longer = f"{text}\n{name} = {json.dumps(value)}"
        if fields and most_tokens(longer, draw) > options.prompt_tokens:
            break
        fields[name], text = value, longer
    return Request(
        id=f"{draw.cls}-{item:06d}",
        cls=draw.cls,
        messages=user(text),
        max_tokens=options.max_tokens,
        grader="json_equal",
        expect={"object": fields},
    )
