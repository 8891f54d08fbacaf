"""One JSON object, bare or in a fence, strictly equal to the expected: 1 is not true, "1" or 1.0; order is free."""

from __future__ import annotations

import json
import re

from loadgen.types import Grade, Json, Outcome, Request
from workloads.graders import answer, empty, missed, quoted, right

_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)


def grade(request: Request, outcome: Outcome) -> Grade:
    text = answer(outcome)
    if not text:
        return empty("json_equal", outcome)
    fence = _FENCE.search(text)
    try:
        found = _strict(fence[1] if fence else text)
    except (ValueError, RecursionError) as error:
        return missed("json_equal", "malformed", f"{error or 'not JSON'} in {quoted(text)}")
    if not isinstance(found, dict):
        return missed("json_equal", "malformed", f"not an object: {quoted(text)}")
    expected: Json = request.expect["object"]
    wrong = [name for name in expected if name not in found or _text(found[name]) != _text(expected[name])]
    more = [name for name in found if name not in expected]
    if not wrong and not more:
        return right("json_equal")
    score = max(0.0, (len(expected) - len(wrong) - len(more)) / max(1, len(expected)))
    why = [f"{name}: expected {_text(expected[name])}, got {_shown(found, name)}" for name in wrong]
    why += [f"not asked for: {quoted(name)}" for name in more]
    return missed("json_equal", "wrong", f"{why[0]}{f' and {len(why) - 1} more' if len(why) > 1 else ''}", score)


def _shown(found: Json, name: str) -> str:
    return quoted(_text(found[name])) if name in found else "nothing"


def _text(value: object) -> str:
    """Canonical text: Python holds True, 1 and 1.0 for equal, JSON does not."""
    return json.dumps(value, sort_keys=True)


def _strict(text: str) -> object:
    return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)


def _once(pairs: list[tuple[str, object]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _refuse(word: str) -> object:
    raise ValueError(f"{word} is no JSON")
