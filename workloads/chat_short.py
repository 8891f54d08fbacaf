"""Short questions as people ask them, of mixed length; judged only by whether the answer is sound text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

from loadgen.types import Draw, Request, Session, Tokens
from workloads.turns import asked, most_tokens, opening, pieces, user

MIN_PROMPT_TOKENS = 96  # the longest bare question with its salt, and a template with a system text

QUESTIONS = (
    "What should I look at first when {thing} stops working?",
    "Explain {thing} to a new colleague in a few sentences.",
    "Give me three reasons to replace {thing} this year.",
    "How would you plan a weekend of work on {thing}?",
    "Write a short, friendly message that asks a neighbour for help with {thing}.",
    "What are the usual mistakes with {thing}, and how can I avoid them?",
    "Compare buying and repairing {thing}.",
    "Suggest a name for a small shop that sells spare parts for {thing}, and say why.",
    "Make a checklist of five points for looking after {thing}.",
    "Which questions should I ask before I pay somebody to mend {thing}?",
)
THINGS = (
    "a bicycle", "a garden pump", "an old radio", "a coffee machine", "a wooden boat", "a greenhouse", "a piano",
    "a film camera", "a bread oven", "a rain barrel", "a mountain tent", "a sewing machine", "a wall clock",
    "a stone path", "a bee hive", "a ceiling fan", "a pottery wheel", "a model railway", "a rooftop antenna",
    "a kitchen scale",
)  # fmt: skip
FACTS = (
    "It is about {n} years old and was last checked in {month}.",
    "My budget is {n} euros, and I would like to keep it below that.",
    "We are {n} people in the house and everybody uses it.",
    "I have tried for {n} days already and kept notes every evening.",
    "The manual has {n} pages, most of them in a language that I cannot read.",
    "The nearest workshop is {n} kilometres away and opens again in {month}.",
    "A friend says that {n} minutes a week would be enough.",
    "Last {month} it made a strange noise for {n} seconds and then went quiet.",
    "I have room for a box of {n} centimetres and no more.",
    "There are {n} screws on the back, and two of them are missing.",
)
MONTHS = ("January", "March", "April", "May", "July", "August", "October", "November")


@dataclass(frozen=True, slots=True)
class Options:
    """`prompt_tokens`: no prompt is longer; lengths spread evenly below it. `echo`: ask for a code at the head of the
    answer, which shows answers that went to the wrong request. `temperature`: as people chat; at 0 small models loop.
    `repeat`: how often each question is asked, first cold then warm."""

    prompt_tokens: Tokens = Tokens(256)
    max_tokens: int = 128
    echo: bool = False
    temperature: float = 0.7
    repeat: int = 1


def sessions(options: Options, draw: Draw) -> Iterator[Session]:
    return (asked(partial(_chat, options, draw, item), options.repeat) for item in count())


def _one(random: Random, of: tuple[str, ...]) -> str:
    return of[int(random.random() * len(of))]


def _chat(options: Options, draw: Draw, item: int) -> Request:
    random = draw.random(item, "chat")
    code = draw.nonce(item)
    text = opening(draw, item) + _one(random, QUESTIONS).format(thing=_one(random, THINGS))
    tail = f"\nBegin your answer with this code: {code}" if options.echo else ""
    aim = int(options.prompt_tokens * random.random())
    length = most_tokens(text + tail, draw)
    while True:
        fact = _one(random, FACTS).format(n=2 + int(random.random() * 97), month=_one(random, MONTHS))
        length += pieces(fact)
        if length > aim:
            break
        text = f"{text} {fact}"
    return Request(
        id=f"{draw.cls}-{item:06d}",
        cls=draw.cls,
        messages=user(text + tail),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        grader="contains" if options.echo else None,
        expect={"text": code} if options.echo else {},
        # the same sampling every night, on servers that honour it
        extra_body={"seed": int(random.random() * 2**31)} if options.temperature else {},
    )
