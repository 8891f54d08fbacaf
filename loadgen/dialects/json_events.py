"""What the dialects have in common: JSON objects out of an event stream, and fields that mean the same in every API.

No dialect itself. Servers and the gateways before them break the rules of JSON and of event streams in a few known
ways; each is read here if it can be, and flagged or counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from loadgen.dialects import error_text, one_line
from loadgen.sse import EventStream
from loadgen.types import FINISH_REASONS, Event, EventKind, Json, UserError

DONE = b"[DONE]"
NO_MESSAGE = "error without a message"

# What servers say for our four words, in lower case; whatever is in neither is `aborted_by_server` (abort, error,
# cancelled, repetition, insufficient_system_resource, …).
FINISH_WORDS = {word: word for word in FINISH_REASONS} | {
    "function_call": "tool_calls",
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "end_turn": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "stop_token": "stop",
    "word": "stop",
    "complete": "stop",
    "completed": "stop",
    "finished": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "max_new_tokens": "length",
    "model_length": "length",
    "model_context_window_exceeded": "length",
    "limit": "length",
    "safety": "content_filter",
    "recitation": "content_filter",
    "sensitive": "content_filter",
    "refusal": "content_filter",
}

Read = Callable[[bytes, Json, int, list[Event]], None]
"""How a dialect reads one object: the event's type (often empty), the object, when it arrived, where its events go."""


class JsonEvents:
    """A stream's objects, each given to `read`; the dialects' decoder. See `loadgen.dialects.Decoder`."""

    __slots__ = ("_read", "_stream", "cut", "flags", "malformed")

    def __init__(self, read: Read, flags: set[str] | None = None) -> None:
        """`flags`: the set into which `read` puts what it notices, where it notices something."""
        self.flags: set[str] = set() if flags is None else flags
        self.malformed = 0
        self.cut = False
        self._stream = EventStream()
        self._read = read

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
            value = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self._odd(kind, payload, at_ns, events)
            return
        if type(value) is dict:
            self._object(kind, value, at_ns, events)
        else:
            self._value(kind, value, at_ns, events)

    def _object(self, kind: bytes, value: Json, at_ns: int, events: list[Event]) -> None:
        if kind == b"error" or value.get("error"):
            message = error_text(value if value.get("error") else {"error": value})
            if message is not None or kind == b"error":
                events.append(Event("error", message or NO_MESSAGE, at_ns))
                return
        self._read(kind, value, at_ns, events)

    def _odd(self, kind: bytes, payload: bytes, at_ns: int, events: list[Event]) -> None:
        """What is no JSON as it stands: the end marker, NaN, an event stream wrapped into another (`data: data: {…}`),
        or several objects in what should be one event (the server ends its lines, but not its events)."""
        word = payload.strip().removeprefix(b"data:").lstrip()
        if not word:
            if kind == b"error":
                events.append(Event("error", NO_MESSAGE, at_ns))
            return
        if _is_done(word):
            events.append(Event("done", at_ns=at_ns))
            return
        try:
            values = list(_values(word, self.flags))
        except ValueError:
            if kind == b"error":
                events.append(Event("error", one_line(payload.decode(errors="replace")), at_ns))
            else:
                self._malformed()
            return
        for value in values:
            if type(value) is dict:
                self._object(kind, value, at_ns, events)
            else:
                self._value(kind, value, at_ns, events)

    def _value(self, kind: bytes, value: Any, at_ns: int, events: list[Event]) -> None:
        """JSON that is no object: the end marker or an object as a JSON string, an error as a string or a list."""
        if isinstance(value, str):
            word = value.encode(errors="replace")
            if _is_done(word.strip()):
                events.append(Event("done", at_ns=at_ns))
                return
            try:
                value = orjson.loads(word)
            except orjson.JSONDecodeError:
                pass
            else:
                if isinstance(value, dict):
                    self._object(kind, value, at_ns, events)
                    return
        message = error_text(value) if isinstance(value, list) else None
        if message is None and kind == b"error":
            message = error_text({"error": value}) or NO_MESSAGE
        if message is not None:
            events.append(Event("error", message, at_ns))
        else:
            self._malformed()

    def _malformed(self) -> None:
        self.malformed += 1
        self.flags.add("malformed_events")


def _is_done(word: bytes) -> bool:
    return len(word) <= 8 and word.upper().strip(b'"') in (DONE, b"DONE")


def _values(payload: bytes, flags: set[str]) -> Iterator[Any]:
    """The value, or the values line by line. Raises ValueError where it is neither."""
    try:
        yield loads(payload, flags)
    except ValueError:
        if b"\n" not in payload:
            raise
        for line in payload.split(b"\n"):
            if line.strip():
                yield DONE.decode() if _is_done(line.strip()) else loads(line, flags)


# ---------------------------------------------------------------------------------------------------------------------
# Answers in one piece


def whole_object(body: bytes, flags: set[str]) -> tuple[Any, list[Event]]:
    """The JSON of an answer in one piece; or None and the error that it reports. Raises ValueError where it is no
    JSON."""
    answer = loads(body, flags)
    message = error_text(answer)
    return (None, [Event("error", message)]) if message is not None else (answer, [])


def loads(payload: bytes, flags: set[str]) -> Any:
    """Foreign JSON. NaN and Infinity, which Python's own reader takes and orjson refuses, become None and a flag.

    Bytes that are no UTF-8 are replaced: a broken character is no reason to lose the counts beside it.
    """
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        odd: list[str] = []
        try:
            value = json.loads(payload.decode("utf-8-sig", errors="replace"), parse_constant=odd.append)
        except RecursionError as error:
            raise ValueError("JSON nested too deeply") from error
        if odd:
            flags.add("nonfinite_json")
        return value


# ---------------------------------------------------------------------------------------------------------------------
# Events


def add(
    events: list[Event], first: int, kind: EventKind, text: str, at_ns: int, index: int = 0, data: Json | None = None
) -> None:
    """Append a token event; the second and later ones of a chunk, which began at `first`, are marked, so that a chunk
    counts once."""
    if len(events) > first:
        data = {**(data or {}), "same_chunk": True}
    events.append(Event(kind, text, at_ns, index, data))


def finish(reason: Any, at_ns: int, index: int = 0) -> Event:
    """The finish event of a server's word: a string in any spelling, or SGLang's `{"type", "message"}`."""
    said, message = reason, None
    if isinstance(reason, dict):
        said, message = reason.get("type"), reason.get("message")
    word = FINISH_WORDS.get(said.lower()) if isinstance(said, str) else None
    if word:
        return Event("finish", word, at_ns, index)
    data = {"raw": said if isinstance(said, str) else str(reason)}
    return Event("finish", "", at_ns, index, data | {"message": message} if isinstance(message, str) else data)


def text_of(value: Any) -> str:
    """Plain text, also where it is an object, or a list of parts; what has no text (audio, images) gives none."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return next((value[key] for key in ("text", "content", "transcript") if isinstance(value.get(key), str)), "")
    return "".join(map(text_of, value)) if isinstance(value, list) and not any(map(_is_list, value)) else ""


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def whole_number(value: Any) -> int:
    """An index; 0 where it is none."""
    return value if type(value) is int and 0 <= value < 2**31 else 0


# ---------------------------------------------------------------------------------------------------------------------
# Counts

# Our names, and where servers put the figure: in `usage` under these names, the first that holds a count. Chat and
# completions of OpenAI first, then Responses, then what DeepSeek, Moonshot, SGLang, Anthropic and Ollama say.
USAGE: dict[str, tuple[tuple[str, ...], ...]] = {
    "prompt_tokens": (("prompt_tokens",), ("input_tokens",), ("prompt_eval_count",)),
    "cached_tokens": (
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
        ("prompt_cache_hit_tokens",),
        ("cached_tokens",),
        ("cache_read_input_tokens",),
    ),
    "output_tokens": (("completion_tokens",), ("output_tokens",), ("eval_count",)),
    "reasoning_tokens": (
        ("completion_tokens_details", "reasoning_tokens"),
        ("output_tokens_details", "reasoning_tokens"),
        ("reasoning_tokens",),
    ),
}


def counts(usage: Any, timings: Any = None) -> Json:
    """The server's own counts under our names; llama.cpp's `timings` stand in for what `usage` lacks. In them
    `prompt_n` is what was computed and `cache_n` what was found in the cache."""
    found: Json = {}
    if isinstance(usage, dict):
        for ours, places in USAGE.items():
            for path in places:
                value: Any = usage
                for key in path:
                    value = value.get(key) if isinstance(value, dict) else None
                number = count(value)
                if number is not None:
                    found[ours] = number
                    break
        total = count(usage.get("total_tokens"))
        if total is not None and "output_tokens" not in found and total >= found.get("prompt_tokens", total + 1):
            found["output_tokens"] = total - found["prompt_tokens"]
    if isinstance(timings, dict):
        cached, computed = count(timings.get("cache_n")), count(timings.get("prompt_n"))
        stand_ins = {
            "prompt_tokens": None if computed is None else computed + (cached or 0),
            "cached_tokens": cached,
            "output_tokens": count(timings.get("predicted_n")),
        }
        found = {name: number for name, number in stand_ins.items() if number is not None} | found
    return found


def input_counts(usage: Any) -> Json:
    """The counts of an API where nothing comes out, so that a total says what went in."""
    data = {name: number for name, number in counts(usage).items() if name in ("prompt_tokens", "cached_tokens")}
    total = count(usage.get("total_tokens")) if isinstance(usage, dict) else None
    return data if "prompt_tokens" in data or total is None else {**data, "prompt_tokens": total}


def count(value: Any) -> int | None:
    """A count, also where it came as a float; None for anything that is no count."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value)


# ---------------------------------------------------------------------------------------------------------------------
# Requests


def prompt(messages: list[Json], api: str) -> str:
    """The messages as one text, for APIs without messages: the contents, a blank line between two; roles are dropped
    and no chat template is applied. Raises UserError for images and audio, which have no place in a text."""
    return "\n\n".join(filter(None, (plain_text(message, api) for message in messages)))


def plain_text(message: Json, api: str) -> str:
    """One message's text. Raises UserError as `prompt`."""
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise UserError(
                f"target.dialect: {api} cannot carry a part of type {part.get('type')}; use openai_chat, or leave out "
                "the classes with media"
            )
    return text_of(content)


def merged(body: Json, model: str, extra_body: Json, request_extra_body: Json) -> bytes:
    """The body as it is sent: the target's extra fields, then the request's, override whatever stands there; an empty
    `model` leaves the choice to the server."""
    if model:
        body["model"] = model
    return orjson.dumps(body | extra_body | request_extra_body)
