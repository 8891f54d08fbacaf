"""OpenAI chat completions, as vLLM, SGLang, llama.cpp, transformers and gateways speak it."""

from __future__ import annotations

from typing import Any

import orjson

from loadgen.dialects import error_text
from loadgen.dialects.json_events import JsonEvents, add, counts, finish, merged, text_of, whole_number, whole_object
from loadgen.types import Event, EventKind, Json, Request

PATH = "/v1/chat/completions"
STREAMS = True

# Fields of a delta that carry generated text. Of several names for reasoning in one delta the first counts: some
# servers send the same text under two.
TEXT_FIELDS: dict[str, EventKind] = {
    "content": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "reasoning_text": "reasoning",
    "reasoning_details": "reasoning",
    "refusal": "refusal",
}
# Fields of a delta that carry generated media.
MEDIA_FIELDS = frozenset({"audio", "images"})


def encode(request: Request, model: str, extra_body: Json) -> bytes:
    """The request's body; messages go as they are, with all their parts."""
    body: Json = {
        "messages": request.messages,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.ignore_eos:
        body["ignore_eos"] = True
    return merged(body, model, extra_body, request.extra_body)


def decoder() -> JsonEvents:
    flags: set[str] = set()
    return JsonEvents(_Choices(flags).read, flags)


def whole(body: bytes, flags: set[str]) -> list[Event]:
    """The events of an answer in one piece. Raises ValueError where it is not JSON; empty where it is no answer."""
    answer, events = whole_object(body, flags)
    if isinstance(answer, dict):
        _Choices(flags).read(b"", answer, 0, events)
    return events


class _Choices:
    """Chunks to events. What it remembers: which tool call an unnumbered piece belongs to, the answer's id, and the
    tokens of each choice, where a server counts by choice."""

    __slots__ = ("_call_ids", "_choice_tokens", "_flags", "_id", "_last", "_streams")

    def __init__(self, flags: set[str]) -> None:
        self._call_ids: list[tuple[Any, str | None]] = []  # per tool call: the server's index, its id
        self._flags = flags
        self._id: Any = None
        self._streams = False  # then a `message` repeats at the end what came in deltas
        self._last = 0  # the choice that spoke last: llama.cpp's counts of a choice come behind its end
        self._choice_tokens: dict[int, int] = {}

    def read(self, kind: bytes, chunk: Json, at_ns: int, events: list[Event]) -> None:
        first = len(events)
        choices = chunk.get("choices")
        if isinstance(choices, list):
            for choice in choices:
                if type(choice) is dict:
                    self._choice(choice, at_ns, events, first)
        elif choices is None and (message := error_text(chunk)) is not None:
            events.append(Event("error", message, at_ns))
            return
        ident = chunk.get("id")
        if ident != self._id and ident:  # the connection identifies an answer, its id does not: noted, not used
            if self._id is not None:
                self._flags.add("unstable_ids")
            self._id = ident
        usage, timings = chunk.get("usage"), chunk.get("timings")
        if not usage and isinstance(groq := chunk.get("x_groq"), dict):
            usage = groq.get("usage")
        if (usage or timings) and (data := counts(usage, timings)):
            if timings and "output_tokens" in data:  # llama.cpp, which counts each choice for itself
                self._choice_tokens[self._last] = data["output_tokens"]
                data["output_tokens"] = sum(self._choice_tokens.values())
            events.append(Event("usage", "", at_ns, 0, data))

    def _choice(self, choice: Json, at_ns: int, events: list[Event], first: int) -> None:
        index = self._last = whole_number(choice.get("index"))
        delta = choice.get("delta")
        if delta is not None:
            self._streams = True
        elif not self._streams:
            delta = choice.get("message")
        if type(delta) is dict:
            self._delta(delta, index, at_ns, events, first)
        elif text := delta or choice.get("text"):
            add(events, first, "content", text_of(text), at_ns, index)
        reason = choice.get("finish_reason")
        if reason and reason != "null":  # as a word, in every chunk of some gateways
            events.append(finish(reason, at_ns, index))
        if (usage := choice.get("usage")) and (data := counts(usage)):  # Moonshot puts it here
            events.append(Event("usage", "", at_ns, 0, data))
        if (error := choice.get("error")) and (message := error_text({"error": error})):  # OpenRouter does
            events.append(Event("error", message, at_ns))

    def _delta(self, delta: Json, index: int, at_ns: int, events: list[Event], first: int) -> None:
        thought = False
        for key, value in delta.items():
            if not value:
                continue
            kind = TEXT_FIELDS.get(key)
            if kind == "content" and type(value) is str:
                add(events, first, kind, value, at_ns, index)
            elif kind == "reasoning":
                if not thought and (text := text_of(value)):
                    thought = True
                    add(events, first, kind, text, at_ns, index)
            elif kind is not None:
                _parts(kind, value, at_ns, events, first, index)
            elif key == "tool_calls" and isinstance(value, list):
                for call in value:
                    self._tool_call(call, at_ns, events, first, index)
            elif key == "function_call":
                self._tool_call({"index": 0, "function": value}, at_ns, events, first, index)
            elif key in MEDIA_FIELDS and (key != "audio" or _sounds(value)):
                add(events, first, "content", text_of(value), at_ns, index)
        if len(events) == first and "role" in delta:
            events.append(Event("role", "", at_ns, index))

    def _tool_call(self, call: Any, at_ns: int, events: list[Event], first: int, choice: int) -> None:
        if not isinstance(call, dict):
            return
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if not isinstance(arguments, str):  # some send the object itself
            arguments = orjson.dumps(arguments).decode()
        if not name and not arguments:
            return
        if choice:
            add(events, first, "content", "", at_ns, choice)
            return
        slot = self._slot(call.get("index"), call.get("id"), bool(name))
        add(events, first, "tool_call", arguments, at_ns, slot, {"id": str(call.get("id") or ""), "name": str(name)})

    def _slot(self, index: Any, ident: Any, named: bool) -> int:
        """Which call a piece continues. By index; but several servers send no index, or 0 for every call, and then a
        new name with a new id begins the next one."""
        for slot in range(len(self._call_ids) - 1, -1, -1):
            known_index, known_id = self._call_ids[slot]
            same = index == known_index if index is not None else not ident or ident == known_id or not named
            if same and not (named and ident and known_id and ident != known_id):
                return slot
        self._call_ids.append((index, ident))
        return len(self._call_ids) - 1


def _parts(kind: EventKind, value: Any, at_ns: int, events: list[Event], first: int, index: int) -> None:
    """Content that is a list of parts: Mistral puts its reasoning there, others media, which count as a token."""
    parts = [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str | dict)]
    thoughts = [part for part in parts if isinstance(part, dict) and part.get("type") == "thinking"]
    if thoughts:
        text = "".join(text_of(part.get("thinking")) for part in thoughts)
        if text:
            add(events, first, "reasoning", text, at_ns, index)
        parts = [part for part in parts if part not in thoughts]
    if parts:
        add(events, first, kind, text_of(parts), at_ns, index)


def _sounds(audio: Any) -> bool:
    """Whether a piece of audio has sound or words; its first piece and its last have an id and a date only."""
    return isinstance(audio, dict) and bool(audio.get("data") or audio.get("transcript"))
