"""OpenAI chat completions, as vLLM, SGLang, llama.cpp, transformers and gateways speak it."""

from __future__ import annotations

import json
from typing import Any

import orjson

from loadgen.dialects import error_text
from loadgen.sse import EventStream
from loadgen.types import FINISH_REASONS, Event, EventKind, Json, Request

PATH = "/v1/chat/completions"

# Words of compatible servers for our four; whatever is in neither list is `aborted_by_server`.
FINISH_WORDS = {word: word for word in FINISH_REASONS} | {
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
    "end_turn": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
}


def encode(request: Request, model: str, extra_body: Json) -> bytes:
    """The request's body. `extra_body` of the target, then that of the request, override whatever stands there; an
    empty `model` leaves the choice to the server."""
    body: Json = {
        "messages": request.messages,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model:
        body["model"] = model
    if request.ignore_eos:
        body["ignore_eos"] = True
    return orjson.dumps(body | extra_body | request.extra_body)


def decoder() -> Decoder:
    return Decoder()


def whole(body: bytes) -> list[Event]:
    """The events of an answer in one piece. Raises ValueError where it is not JSON; empty where it is no answer."""
    answer, _ = _loads(body)
    message = error_text(answer)
    if message is not None:
        return [Event("error", message)]
    events: list[Event] = []
    if isinstance(answer, dict):
        _Deltas().read(answer, 0, events)
    return events


class Decoder:
    """Events of one stream, in the order of their arrival. See `loadgen.dialects.Decoder`."""

    __slots__ = ("_deltas", "_id", "_stream", "cut", "flags", "malformed")

    def __init__(self) -> None:
        self.flags: set[str] = set()
        self.malformed = 0
        self.cut = False
        self._stream = EventStream()
        self._deltas = _Deltas()
        self._id: Any = None

    def feed(self, data: bytes, at_ns: int) -> list[Event]:
        events: list[Event] = []
        for kind, payload in self._stream.feed(data):
            self._event(kind, payload, at_ns, events)
        return events

    def close(self, at_ns: int) -> list[Event]:
        events: list[Event] = []
        last = self._stream.close()
        if last is not None and last[1].strip():
            malformed = self.malformed
            self._event(*last, at_ns, events)
            if self.malformed > malformed:  # half an event is a cut stream, not a malformed one
                self.malformed, self.cut = malformed, True
                if not malformed:
                    self.flags.discard("malformed_events")
            else:
                self.flags.add("unterminated_last_event")
        return events

    def _event(self, kind: bytes, payload: bytes, at_ns: int, events: list[Event]) -> None:
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError:
            word = payload.strip()
            if word == b"[DONE]":
                events.append(Event("done", at_ns=at_ns))
                return
            if not word:
                return
            try:
                chunk, nonfinite = _loads(payload)
            except ValueError:
                if kind == b"error":
                    events.append(Event("error", payload.decode(errors="replace"), at_ns))
                else:
                    self.malformed += 1
                    self.flags.add("malformed_events")
                return
            if nonfinite:
                self.flags.add("nonfinite_json")
        if not isinstance(chunk, dict):
            self.malformed += 1
            self.flags.add("malformed_events")
            return
        if chunk.get("error") or kind == b"error" or "choices" not in chunk:
            message = error_text(chunk if chunk.get("error") or kind != b"error" else {"error": chunk})
            if message is not None:
                events.append(Event("error", message, at_ns))
                return
        ident = chunk.get("id")
        if ident != self._id and ident:  # the connection identifies an answer, its id does not: noted, not used
            if self._id is not None:
                self.flags.add("unstable_ids")
            self._id = ident
        self._deltas.read(chunk, at_ns, events)


class _Deltas:
    """Chunks to events; all that it remembers is which tool call an unnumbered piece belongs to."""

    __slots__ = ("_call_ids",)

    def __init__(self) -> None:
        self._call_ids: list[tuple[Any, str | None]] = []  # per tool call: the server's index, its id

    def read(self, chunk: Json, at_ns: int, events: list[Event]) -> None:
        first = len(events)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._choice(choice, at_ns, events, first)
        usage = chunk.get("usage")
        timings = chunk.get("timings")
        if isinstance(usage, dict) or isinstance(timings, dict):
            data = _usage(usage if isinstance(usage, dict) else {}, timings if isinstance(timings, dict) else {})
            if data:
                events.append(Event("usage", "", at_ns, 0, data))

    def _choice(self, choice: Json, at_ns: int, events: list[Event], first: int) -> None:
        index = choice.get("index")
        index = index if isinstance(index, int) else 0
        delta = choice.get("delta") or choice.get("message")
        if isinstance(delta, dict):
            content = delta.get("content")
            if content:
                _add(events, first, "content", _text(content), at_ns, index)
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            if reasoning:
                _add(events, first, "reasoning", _text(reasoning), at_ns, index)
            refusal = delta.get("refusal")
            if refusal:
                _add(events, first, "refusal", _text(refusal), at_ns, index)
            calls = delta.get("tool_calls")
            if calls and isinstance(calls, list):
                for call in calls:
                    self._tool_call(call, at_ns, events, first, index)
            elif isinstance(delta.get("function_call"), dict):
                self._tool_call({"index": 0, "function": delta["function_call"]}, at_ns, events, first, index)
            if len(events) == first and "role" in delta:
                events.append(Event("role", "", at_ns, index))
        finish = choice.get("finish_reason")
        if finish:
            word = FINISH_WORDS.get(finish) if isinstance(finish, str) else None
            events.append(Event("finish", word or "", at_ns, index, None if word else {"raw": str(finish)}))

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
            _add(events, first, "content", "", at_ns, choice)
            return
        slot = self._slot(call.get("index"), call.get("id"), bool(name))
        _add(events, first, "tool_call", arguments, at_ns, slot, {"id": call.get("id") or "", "name": str(name)})

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


def _add(
    events: list[Event], first: int, kind: EventKind, text: str, at_ns: int, index: int, data: Json | None = None
) -> None:
    """Append a token event; the second and later ones of a chunk are marked, so that a chunk counts once."""
    if len(events) > first:
        data = {**(data or {}), "same_chunk": True}
    events.append(Event(kind, text, at_ns, index, data))


def _text(value: Any) -> str:
    """Plain text, also where the content is a list of parts; parts without text (audio, images) count as a token."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""


def _usage(usage: Json, timings: Json) -> Json:
    """The server's own counts under our names; llama.cpp's `timings` stand in for what `usage` lacks."""
    found = {
        "prompt_tokens": _count(usage.get("prompt_tokens")),
        "output_tokens": _count(usage.get("completion_tokens")),
        "cached_tokens": _count(_inside(usage, "prompt_tokens_details", "cached_tokens")),
        "reasoning_tokens": _count(_inside(usage, "completion_tokens_details", "reasoning_tokens")),
    }
    cached, prompt = _count(timings.get("cache_n")), _count(timings.get("prompt_n"))
    if found["cached_tokens"] is None:
        found["cached_tokens"] = _count(usage.get("prompt_cache_hit_tokens")) if usage else cached
    if found["cached_tokens"] is None:
        found["cached_tokens"] = cached
    if found["reasoning_tokens"] is None:
        found["reasoning_tokens"] = _count(usage.get("reasoning_tokens"))
    if found["prompt_tokens"] is None and prompt is not None:
        found["prompt_tokens"] = prompt + (cached or 0)
    if found["output_tokens"] is None:
        found["output_tokens"] = _count(timings.get("predicted_n"))
    return {name: count for name, count in found.items() if count is not None}


def _inside(usage: Json, name: str, key: str) -> Any:
    details = usage.get(name)
    return details.get(key) if isinstance(details, dict) else None


def _count(value: Any) -> int | None:
    """A count, also where it came as a float; None for anything that is no count."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value)


def _loads(payload: bytes) -> tuple[Any, bool]:
    """Foreign JSON, and whether it needed NaN or Infinity, which Python's own reader takes and orjson refuses.

    Bytes that are no UTF-8 are replaced: a broken character is no reason to lose the counts beside it.
    """
    try:
        return orjson.loads(payload), False
    except orjson.JSONDecodeError:
        found = False

        def nonfinite(_: str) -> None:
            nonlocal found
            found = True

        try:
            value = json.loads(payload.decode(errors="replace"), parse_constant=nonfinite)
        except RecursionError as error:
            raise ValueError("JSON nested too deeply") from error
        return value, found
