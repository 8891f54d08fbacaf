"""A needle in a prompt of exactly n tokens, at its beginning, middle or end: is the whole context really there?

A prompt is register lines with filler of single-token words between them:

    SALT (five words)
    The lines below are an archive. Some of them say which number a register holds.
    register WORD WORD holds DDDDDDD
    filler …
    register WORD WORD holds DDDDDDD
    …
    Find the line about register WORD WORD. Which number does register WORD WORD hold? Answer with the number only.

Everything but the filler is the *frame*. Its text differs from prompt to prompt, its number of tokens does not: the
same count of listed words, digits, marks and line breaks in the same places. So one measured frame makes every prompt
exact. Seven digits are seven tokens or three wherever a vocabulary cuts numbers by ones or threes, as those of today's
servers do (checked as `words` was); GPT-2's and the older Anthropic table merge them as they like. `spaced` writes
them apart, exact there too, but a small model copies `4710932` and gets `4 7 1 0 9 3 2` wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

from loadgen.types import Draw, Request, Session, Tokens, UserError
from workloads import words
from workloads.turns import asked, user

MIN_PROMPT_TOKENS = 256  # the frame of four distractors as the greediest vocabulary counts it, and some filler

HEADER = "The lines below are an archive. Some of them say which number a register holds."
# Sent to the line first, a model of 135M parameters was right 6 times of 9; only asked for the number, 3 or 4 times.
QUESTION = "Find the line about register {key}. Which number does register {key} hold? Answer with the number only."
DIGITS = 7
DIFFERENT_DIGITS = 3  # between any two values of a prompt: a near miss can be told from a wrong register
PROBE_WORDS = 8  # of filler between two register lines of a frame probe

_PIECE = re.compile(r"[A-Za-z]+|[^\sA-Za-z]|\n")


@dataclass(frozen=True, slots=True)
class Options:
    """`prompt_tokens`: the exact length, template included. `depths`: where the needle is, in percent, in turn;
    rounded to the evenly spaced register lines. `distractors`: other register lines, 1 to 40. `repeat`: how often each
    prompt is asked, first cold then warm. `spaced`: digits apart. `frame_tokens`: what `frame_probe` measured; None:
    estimated upwards, and prompts end up a little short."""

    prompt_tokens: Tokens = Tokens(8192)
    max_tokens: int = 256
    depths: tuple[int, ...] = (0, 50, 100)
    distractors: int = 4
    repeat: int = 1
    spaced: bool = False
    frame_tokens: int | None = None


def sessions(options: Options, draw: Draw) -> Iterator[Session]:
    if not options.depths or not all(0 <= depth <= 100 for depth in options.depths):
        raise UserError(f"long_context: depths is {list(options.depths)}; choose percentages, for example [0, 50, 100]")
    if not 1 <= options.distractors <= 40:
        raise UserError(f"long_context: distractors is {options.distractors}; choose 1 to 40")
    frame = options.frame_tokens
    if frame is None:
        frame = _estimate(_prompt(options, draw, 0, 0).messages[0]["content"]) + draw.template_tokens
    filler = options.prompt_tokens - frame
    if filler < options.distractors:
        raise UserError(
            f"long_context: prompt_tokens is {options.prompt_tokens}, but the question and its "
            f"{options.distractors} distractors take {frame}; raise it or lower distractors"
        )
    return (asked(partial(_prompt, options, draw, item, filler), options.repeat) for item in count())


def frame_probe(options: Options, draw: Draw, number: int = 0) -> Request:
    """A small prompt of this class's frame; `prompt_tokens` of its usage less `expect["words"]` are `frame_tokens`.
    Probes of other numbers hold other words and digits and must give the same; where they do not, `spaced` helps."""
    filler = PROBE_WORDS * options.distractors * (number + 1)
    probe = _prompt(options, draw, -1 - number, filler)
    probe.id, probe.max_tokens, probe.prompt_tokens = f"{draw.cls}-frame-{number}", 1, None
    probe.grader, probe.expect = None, {"words": filler}
    return probe


def _prompt(options: Options, draw: Draw, item: int, filler: int) -> Request:
    gaps = options.distractors  # register lines stand at both ends, so there is one gap less than lines
    place = round(options.depths[item % len(options.depths)] / 100 * gaps)
    random = draw.random(item, "registers")
    keys, values = _keys(random, gaps + 1), _values(random, gaps + 1)
    counts = [filler * (gap + 1) // gaps - filler * gap // gaps for gap in range(gaps)]
    between = words.lines(draw.random(item, "filler"), counts)
    shown = [" ".join(value) for value in values] if options.spaced else values
    registers = [f"register {key} holds {value}" for key, value in zip(keys, shown, strict=True)]
    text = [words.salt(draw.nonce(item)), HEADER, registers[0]]
    for words_between, register in zip(between, registers[1:], strict=True):
        text += [words_between, register]
    text.append(QUESTION.format(key=keys[place]))
    return Request(
        id=f"{draw.cls}-{item:06d}",
        cls=draw.cls,
        messages=user("\n".join(text)),
        max_tokens=options.max_tokens,
        grader="needle",
        expect={"value": values[place], "distractors": values[:place] + values[place + 1 :]},
        prompt_tokens=None if options.frame_tokens is None else options.prompt_tokens,
        tags={"depth": str(round(100 * place / gaps))},
    )


def _estimate(frame: str) -> int:
    """One token for each word of the list, mark and line break, two for a digit that stands alone (some vocabularies
    give the space a token of its own) or begins a number: the most that any table checked takes."""
    return len(_PIECE.findall(frame)) + len(re.findall(r" [0-9]", frame))


def _keys(random: Random, n: int) -> list[str]:
    """n pairs of words that differ in their first two letters, so that no key reads like another."""
    keys: dict[str, str] = {}
    while len(keys) < n:
        pair = words.pick(random, 2)
        keys.setdefault(pair[0][:2], " ".join(pair))
    return list(keys.values())


def _values(random: Random, n: int) -> list[str]:
    """n numbers of seven digits, no two alike in more than four places."""
    values: list[str] = []
    while len(values) < n:
        value = f"{int(random.random() * 10**DIGITS):0{DIGITS}d}"
        if all(sum(a != b for a, b in zip(value, other, strict=True)) >= DIFFERENT_DIGITS for other in values):
            values.append(value)
    return values
