"""OpenAI chat completions, as vLLM, SGLang, llama.cpp, transformers and gateways speak it."""

from __future__ import annotations

import json
from typing import Any

import orjson

from loadgen.dialects import error_text
from loadgen.sse import EventStream
from loadgen.types import FINISH_REASONS, Event, EventKind, Json, Request

PATH = "/v1/chat/completions"
DONE = b"[DONE]"

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

# Fields of a delta that carry generated text.
TEXT_FIELDS: dict[str, EventKind] = {
    "content": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "refusal": "refusal",
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
            if word == DONE:
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
        if chunk == DONE.decode():  # as a JSON string
            events.append(Event("done", at_ns=at_ns))
            return
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
        if isinstance(choices, list):
            for choice in choices:
                if isinstance(choice, dict):
                    self._choice(choice, at_ns, events, first)
        usage, timings = chunk.get("usage"), chunk.get("timings")
        if usage or timings:
            data = _usage(usage if isinstance(usage, dict) else {}, timings if isinstance(timings, dict) else {})
            if data:
                events.append(Event("usage", "", at_ns, 0, data))

    def _choice(self, choice: Json, at_ns: int, events: list[Event], first: int) -> None:
        index = choice.get("index") or 0
        delta = choice.get("delta") or choice.get("message")
        if isinstance(delta, dict):
            for key, value in delta.items():
                if not value:
                    continue
                kind = TEXT_FIELDS.get(key)
                if kind is not None:
                    if key != "reasoning" or not delta.get("reasoning_content"):  # some send both, alike
                        _add(events, first, kind, value if type(value) is str else _text(value), at_ns, index)
                elif key == "tool_calls" and isinstance(value, list):
                    for call in value:
                        self._tool_call(call, at_ns, events, first, index)
                elif key == "function_call":
                    self._tool_call({"index": 0, "function": value}, at_ns, events, first, index)
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
        _add(events, first, "tool_call", arguments, at_ns, slot, {"id": str(call.get("id") or ""), "name": str(name)})

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
    cached, prompt = _count(timings.get("cache_n")), _count(timings.get("prompt_n"))
    whole_prompt = None if prompt is None else prompt + (cached or 0)
    hit = _inside(usage, "prompt_tokens_details", "cached_tokens")
    thought = _inside(usage, "completion_tokens_details", "reasoning_tokens")
    places = {
        "prompt_tokens": (usage.get("prompt_tokens"), whole_prompt),
        "cached_tokens": (hit, usage.get("prompt_cache_hit_tokens"), cached),
        "output_tokens": (usage.get("completion_tokens"), timings.get("predicted_n")),
        "reasoning_tokens": (thought, usage.get("reasoning_tokens")),
    }
    counts = {name: [count for count in map(_count, values) if count is not None] for name, values in places.items()}
    return {name: found[0] for name, found in counts.items() if found}


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
