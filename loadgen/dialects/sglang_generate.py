"""SGLang's native generate: a text goes on; each event repeats the whole text so far, with the server's counts."""

from __future__ import annotations

from loadgen.dialects import error_text
from loadgen.dialects.json_events import JsonEvents, counts, finish, merged, prompt, whole_number, whole_object
from loadgen.types import Event, Json, Request

PATH = "/generate"
STREAMS = True


def encode(request: Request, model: str, extra_body: Json) -> bytes:
    """The request's body; the prompt is the messages' contents with a blank line between two. Extra `sampling_params`
    are added to ours, one by one. The API knows no model. Raises UserError for media."""
    sampling: Json = {"max_new_tokens": request.max_tokens, "temperature": request.temperature}
    if request.ignore_eos:
        sampling["ignore_eos"] = True
    for extra in (extra_body, request.extra_body):
        if isinstance(more := extra.get("sampling_params"), dict):
            sampling |= more
    body: Json = {"text": prompt(request.messages, "sglang_generate"), "stream": True}
    return merged(body, "", extra_body, request.extra_body | {"sampling_params": sampling})


def decoder() -> JsonEvents:
    return JsonEvents(_Choices().read)


def whole(body: bytes, flags: set[str]) -> list[Event]:
    """The events of an answer in one piece; of several choices it is a list."""
    answer, events = whole_object(body, flags)
    choices = _Choices()
    for index, each in enumerate(answer if isinstance(answer, list) else [answer]):
        if isinstance(each, dict):
            choices.read(b"", {"index": index, **each}, 0, events)
    return events


class _Text:
    """What one choice has said: how much of it is known, and whether events repeat it (a server started with
    `--incremental-streaming-output` sends the new part only)."""

    __slots__ = ("first", "length", "repeats", "tokens")

    def __init__(self) -> None:
        self.first = ""
        self.length = 0
        self.repeats = True
        self.tokens = 0

    def new(self, text: str) -> str:
        """The part of an event's text that is new. That texts are repeated is seen when the second one comes, and
        again whenever one is too short to hold those before; the last character may have been half of one."""
        if self.repeats and self.length:
            kept = self.first[:-1]
            self.repeats = len(text) >= self.length and text.startswith(kept)
        elif not self.length:
            self.first = text
        part = text[self.length :] if self.repeats else text
        self.length += len(part)
        return part


class _Choices:
    """Chunks to events; remembers how far each choice has come."""

    __slots__ = ("_texts",)

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def read(self, kind: bytes, chunk: Json, at_ns: int, events: list[Event]) -> None:
        text, ids, meta = chunk.get("text"), chunk.get("output_ids"), chunk.get("meta_info")
        if not isinstance(text, str) and not isinstance(ids, list) and not isinstance(meta, dict):
            message = error_text(chunk)
            if message is not None:
                events.append(Event("error", message, at_ns))
            return
        index = whole_number(chunk.get("index"))
        known = self._texts.setdefault(index, _Text())
        if isinstance(text, str):
            if part := known.new(text):  # how far it has come: the same bytes mean something else the next time
                events.append(Event("content", part, at_ns, index, {"so_far": known.length}))
            else:
                events.append(Event("role", "", at_ns, index))
        elif isinstance(ids, list) and ids:  # a server without a tokenizer answers in token numbers
            events.append(Event("content", "", at_ns, index))
        if not isinstance(meta, dict):
            return
        reason = meta.get("finish_reason")
        if reason:
            data = counts(meta)
            if "output_tokens" in data:
                known.tokens = data["output_tokens"]
                data["output_tokens"] = sum(each.tokens for each in self._texts.values())
            if data:
                events.append(Event("usage", "", at_ns, 0, data))
            events.append(finish(reason, at_ns, index))
