"""OpenAI embeddings: texts in, vectors out, in one piece of JSON; there are no tokens to time."""

from __future__ import annotations

import base64
import binascii
import math
from array import array
from typing import Any

from loadgen.dialects.json_events import input_counts, merged, plain_text, whole_object
from loadgen.types import Event, Json, Request

PATH = "/v1/embeddings"
STREAMS = False


def encode(request: Request, model: str, extra_body: Json) -> bytes:
    """The request's body: one input per message, its content. Raises UserError for media."""
    texts = [plain_text(message, "openai_embeddings") for message in request.messages]
    return merged({"input": texts[0] if len(texts) == 1 else texts}, model, extra_body, request.extra_body)


def whole(body: bytes, flags: set[str]) -> list[Event]:
    """The events of an answer. Raises ValueError where it is not JSON or a vector is unsound: empty, of another length
    than its neighbours, or with a value that is no finite number; empty where it is no answer."""
    answer, events = whole_object(body, flags)
    if answer is None or not (vectors := list(_vectors(answer))):
        return events
    for number, vector in enumerate(vectors):
        _check(vector, number, len(vectors[0]))
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if data := input_counts(usage):
        events.append(Event("usage", "", 0, 0, data))
    return [*events, Event("done")]


def _vectors(answer: Any) -> list[list[Any]]:
    """OpenAI's `data`, Ollama's and TEI's lists of vectors, llama.cpp's list of objects."""
    found = answer
    if isinstance(answer, dict):
        found = answer.get("data") or answer.get("embeddings") or answer.get("embedding")
    if isinstance(found, list) and found and not isinstance(found[0], list | dict | str):
        found = [found]
    vectors = []
    for each in found if isinstance(found, list) else []:
        vector = each.get("embedding") if isinstance(each, dict) else each
        if isinstance(vector, str):
            vector = _unpacked(vector)
        if isinstance(vector, list) and len(vector) == 1 and isinstance(vector[0], list):
            vector = vector[0]  # llama.cpp's own endpoint: one vector per token or pooled into one
        vectors.append(vector if isinstance(vector, list) else [])
    return vectors


def _unpacked(text: str) -> list[float]:
    """`encoding_format: base64`: float32, little-endian."""
    try:
        numbers = array("f", base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error):
        raise ValueError("an embedding that is neither numbers nor base64") from None
    return list(numbers)


def _check(vector: list[Any], number: int, length: int) -> None:
    if not vector:
        raise ValueError(f"embedding {number} is empty")
    if len(vector) != length:
        raise ValueError(f"embedding {number} has {len(vector)} values, the first has {length}")
    for value in vector:
        if type(value) not in (float, int) or not abs(value) < math.inf:
            raise ValueError(f"embedding {number} holds {value!r}, which is no finite number")
