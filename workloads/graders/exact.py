"""The integer asked for: 503, "503.", "1,234", "1 234", "**503**", "417 + 86 = 503"."""

from __future__ import annotations

import re

from loadgen.types import Grade, Outcome, Request
from workloads.graders import answer, empty, missed, quoted, right

_INTEGER = re.compile(r"([-−–]?)([0-9]+)(\.[0-9]+)?")
_GROUPED = re.compile(r"([-−–]?)([0-9]{1,3}(?:[,  ' ][0-9]{3})+)(?![0-9])()")


def grade(request: Request, outcome: Outcome) -> Grade:
    """The first integer of the answer counts, or the first after its last "=". A group of three digits after a space
    or comma may belong to it or not: either reading may be the right one."""
    expected = str(request.expect["integer"])
    text = answer(outcome)
    if not text:
        return empty("exact", outcome)
    result = text.rpartition("=")[2]
    for part in (result, text) if result != text and not re.search("[0-9]", result) else (result,):
        if expected in _readings(part):
            return right("exact")
    return missed("exact", "wrong", f"expected {expected}, got {quoted(text)}")


def _readings(text: str) -> set[str]:
    """The first number of a text, plain and with its groups joined, as canonical decimal digits (never `int`: it
    refuses numbers of more than 4,300 digits, and a looping model writes them)."""
    found = set()
    for pattern in (_INTEGER, _GROUPED):
        match = pattern.search(text)
        if match is None or (match[3] or "").strip(".0"):
            continue
        digits = re.sub("[^0-9]", "", match[2]).lstrip("0") or "0"
        found.add(f"-{digits}" if match[1] and digits != "0" else digits)
    return found
