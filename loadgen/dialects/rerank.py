"""Rerank: a query and documents in, a score per document out, in one piece of JSON (Jina, Cohere, vLLM, SGLang)."""

from __future__ import annotations

import math
from typing import Any

from loadgen.dialects.json_events import input_counts, merged, plain_text, whole_object
from loadgen.types import Event, Json, Request

PATH = "/v1/rerank"
STREAMS = False


def encode(request: Request, model: str, extra_body: Json) -> bytes:
    """The request's body. The last message is the query and those before it are the documents; of a single message the
    last paragraph is the query and those before it are the documents; a single paragraph is both. Raises UserError for
    media."""
    texts = [plain_text(message, "rerank") for message in request.messages]
    if len(texts) == 1:
        texts = [part for part in texts[0].split("\n\n") if part.strip()] or texts
    body: Json = {"query": texts[-1], "documents": texts[:-1] or texts}
    return merged(body, model, extra_body, request.extra_body)


def whole(body: bytes, flags: set[str]) -> list[Event]:
    """The events of an answer. Raises ValueError where it is not JSON, a score is missing or no finite number, or two
    results are of one document; empty where it is no answer."""
    answer, events = whole_object(body, flags)
    results = answer
    if isinstance(answer, dict):
        results = answer.get("results") or answer.get("data")
    if not isinstance(results, list) or not results or not any(isinstance(each, dict) for each in results):
        return events
    seen: set[Any] = set()
    for number, each in enumerate(results):
        score = _score(each)
        if type(score) not in (float, int) or not abs(score) < math.inf:
            raise ValueError(f"result {number} has the score {score!r}, which is no finite number")
        index = each.get("index", number)
        if not isinstance(index, int) or index in seen:
            raise ValueError(f"result {number} has the index {index!r}, which is no other result's number")
        seen.add(index)
    if data := input_counts(_usage(answer)):
        events.append(Event("usage", "", 0, 0, data))
    return [*events, Event("done")]


def _score(result: Any) -> Any:
    if not isinstance(result, dict):
        return None
    return result["relevance_score"] if "relevance_score" in result else result.get("score")


def _usage(answer: Any) -> Any:
    """`usage`, or where Cohere has its counts."""
    if not isinstance(answer, dict):
        return None
    meta = answer.get("meta")
    return answer.get("usage") or (meta.get("tokens") or meta.get("billed_units") if isinstance(meta, dict) else None)
