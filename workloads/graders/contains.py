"""The answer repeats this request's own code, and none of another request: answers that were swapped are found out."""

from __future__ import annotations

import re

from loadgen.types import Grade, Outcome, Request
from workloads.graders import answer, empty, missed, quoted, right

_CODE = re.compile(r"(?<![0-9a-f])[0-9a-f]{12}(?![0-9a-f])")


def grade(request: Request, outcome: Outcome) -> Grade:
    """Case and white space do not count."""
    expected = str(request.expect["text"])
    text = answer(outcome)
    if not text:
        return empty("contains", outcome)
    if _plain(expected) in _plain(text):
        return right("contains")
    others = [code for code in _CODE.findall(text.lower()) if code != expected]
    if others:
        return missed("contains", "wrong", f"expected code {expected}, got another one: {others[0]}")
    return missed("contains", "wrong", f"expected {quoted(expected)}, got {quoted(text)}")


def _plain(text: str) -> str:
    return "".join(text.lower().split())
