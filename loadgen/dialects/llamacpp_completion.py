"""llama.cpp's native completion: a text goes on; counted by the server, with its own timings."""

from __future__ import annotations

from typing import Any

from loadgen.dialects import error_text
from loadgen.dialects.json_events import (
    JsonEvents,
    add,
    count,
    counts,
    finish,
    merged,
    prompt,
    whole_number,
    whole_object,
)
from loadgen.types import Event, Json, Request

PATH = "/completion"
STREAMS = True

# How servers before `stop_type` said why they stopped.
STOPPED = {"stopped_limit": "limit", "stopped_eos": "eos", "stopped_word": "word"}


def encode(request: Request, model: str, extra_body: Json) -> bytes:
    """The request's body; the prompt is the messages' contents with a blank line between two. Raises UserError for
    media."""
    body: Json = {
        "prompt": prompt(request.messages, "llamacpp_completion"),
        "n_predict": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
    }
    if request.ignore_eos:
        body["ignore_eos"] = True
    return merged(body, model, extra_body, request.extra_body)


def decoder() -> JsonEvents:
    return JsonEvents(_Choices().read)


def whole(body: bytes, flags: set[str]) -> list[Event]:
    """The events of an answer in one piece; of several choices it is a list."""
    answer, events = whole_object(body, flags)
    choices = _Choices()
    for each in answer if isinstance(answer, list) else [answer]:
        if isinstance(each, dict) and "content" in each:
            choices.read(b"", {**each, "stop": True}, 0, events)
    return events


class _Choices:
    """Chunks to events. What it remembers: the choices that have begun, and the tokens of those that have ended. There
    is no end marker, so the answer is done when all of them have."""

    __slots__ = ("_begun", "_tokens")

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._tokens: dict[int, int] = {}

    def read(self, kind: bytes, chunk: Json, at_ns: int, events: list[Event]) -> None:
        content, stop = chunk.get("content"), chunk.get("stop")
        if not isinstance(content, str):
            message = error_text(chunk)
            if message is not None:
                events.append(Event("error", message, at_ns))
                return
            content = ""
        index = whole_number(chunk.get("index"))
        self._begun.add(index)
        if content:
            add(events, len(events), "content", content, at_ns, index)
        elif not stop:
            events.append(Event("role", "", at_ns, index))
        if stop:
            data = self._usage(chunk, index)
            if data:
                events.append(Event("usage", "", at_ns, 0, data))
            events.append(finish(_why(chunk), at_ns, index))
            self._begun.discard(index)
            if not self._begun:
                events.append(Event("done", at_ns=at_ns))

    def _usage(self, chunk: Json, index: int) -> Json:
        """The tokens of all choices. `tokens_cached` is where the slot's cache stands after the answer, not what was
        found in it, and is used only where it can be the latter and nothing better is there."""
        timings = chunk.get("timings")
        data = counts({"prompt_tokens": chunk.get("tokens_evaluated")}, timings)
        prompt_tokens, output = data.get("prompt_tokens"), count(chunk.get("tokens_predicted"))
        output = data.get("output_tokens") if output is None else output
        if "cached_tokens" not in data and prompt_tokens is not None:
            computed = count(timings.get("prompt_n")) if isinstance(timings, dict) else None
            known = count(chunk.get("tokens_cached")) if computed is None else prompt_tokens - computed
            if known is not None and 0 <= known < prompt_tokens:
                data["cached_tokens"] = known
        if output is not None:
            self._tokens[index] = output
            data["output_tokens"] = sum(self._tokens.values())
        return data


def _why(chunk: Json) -> Any:
    said = chunk.get("stop_type")
    if isinstance(said, str):
        return said
    return next((word for key, word in STOPPED.items() if chunk.get(key) is True), "stop")
