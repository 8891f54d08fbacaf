"""Sums with one right answer: the cheapest question that a damaged server gets wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from loadgen.types import Draw, Request, Session, Tokens, UserError
from workloads.turns import asked, opening, user

MIN_PROMPT_TOKENS = 96  # the longest question with its salt, and a template with a system text


@dataclass(frozen=True, slots=True)
class Options:
    """`digits`: of each operand, 1 to 6. `operators`: any of + - *. `repeat`: how often each sum is asked, first cold
    then warm. `max_tokens` leaves room for a model that thinks first."""

    prompt_tokens: Tokens = Tokens(128)
    max_tokens: int = 256
    digits: int = 3
    operators: str = "+"
    repeat: int = 1


def sessions(options: Options, draw: Draw) -> Iterator[Session]:
    if not 1 <= options.digits <= 6:
        raise UserError(f"arithmetic: digits is {options.digits}; choose 1 to 6")
    if not options.operators or set(options.operators) - set("+-*"):
        raise UserError(f'arithmetic: operators is "{options.operators}"; choose from + - *, for example "+-"')
    return (asked(partial(_sum, options, draw, item), options.repeat) for item in count())


def _sum(options: Options, draw: Draw, item: int) -> Request:
    random = draw.random(item, "sum")
    low = 10 ** (options.digits - 1)
    a, b = (low + int(random.random() * 9 * low) for _ in range(2))
    operator = options.operators[int(random.random() * len(options.operators))]
    answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
    question = f"What is {a} {operator} {b}? Answer with the integer only."
    return Request(
        id=f"{draw.cls}-{item:06d}",
        cls=draw.cls,
        messages=user(opening(draw, item) + question),
        max_tokens=options.max_tokens,
        grader="exact",
        expect={"integer": answer},
    )
