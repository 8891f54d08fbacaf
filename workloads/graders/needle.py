"""The number of the register asked for: a distractor's is the model's miss, one out of nowhere the server's."""

from __future__ import annotations

import re

from loadgen.types import Grade, Outcome, Request
from workloads.graders import answer, empty, missed, quoted, right

_RUN = re.compile(r"[0-9](?:[ ,.\-]?[0-9])*")


def grade(request: Request, outcome: Outcome) -> Grade:
    """The first number of the right length counts; single spaces, commas, dots and hyphens inside it do not.

    Garbage is a number that stands nowhere in the prompt, or an answer without a word. Words without such a number
    ("I cannot find it") are wrong: a model may say so.
    """
    expected = str(request.expect["value"])
    text = answer(outcome)
    if not text:
        return empty("needle", outcome)
    runs = [re.sub("[^0-9]", "", run) for run in _RUN.findall(text)]
    found = next((run for run in runs if len(run) == len(expected)), "")
    if found == expected:
        return right("needle")
    if found and found in request.expect.get("distractors", ()):
        return missed("needle", "distractor", f"expected {expected}, got another register's {found}")
    nearest = found or next(iter(runs), "")
    score = sum(a == b for a, b in zip(nearest, expected, strict=False)) / len(expected)
    kind = "garbage" if found or not re.search("[A-Za-z]{2}", text) else "wrong"
    return missed("needle", kind, f"expected {expected}, got {quoted(text)}", score if found else 0.0)
