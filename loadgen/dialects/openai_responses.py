"""OpenAI responses: items of output, told by typed events; also where a gateway leaves the `event:` lines out."""

from __future__ import annotations

from typing import Any

from loadgen.dialects import error_text
from loadgen.dialects.json_events import JsonEvents, add, counts, finish, merged, text_of, whole_object
from loadgen.types import Event, EventKind, Json, Request

PATH = "/v1/responses"
STREAMS = True

# Events whose `delta` is generated text.
DELTAS: dict[str, EventKind] = {
    "response.output_text.delta": "content",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.reasoning_summary.delta": "reasoning",
    "response.reasoning.delta": "reasoning",
    "response.audio.transcript.delta": "content",
    "response.output_audio_transcript.delta": "content",
    "response.function_call_arguments.delta": "tool_call",
    "response.custom_tool_call_input.delta": "tool_call",
    "response.mcp_call_arguments.delta": "tool_call",
}
# Events whose `delta` is generated sound.
SOUNDS = frozenset({"response.audio.delta", "response.output_audio.delta"})
# Events after which no other comes.
ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})
CALLS = frozenset({"function_call", "custom_tool_call", "mcp_call"})


def encode(request: Request, model: str, extra_body: Json) -> bytes:
    """The request's body. Parts, tools and tool results in the form of chat completions become those of this API;
    whatever has another form goes as it is."""
    items: list[Json] = []
    for message in request.messages:
        items += _items(message)
    body: Json = {
        "input": items,
        "max_output_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
    }
    if request.ignore_eos:
        body["ignore_eos"] = True
    return merged(body, model, _flat(extra_body), _flat(request.extra_body))


def _items(message: Json) -> list[Json]:
    role, content = message.get("role", "user"), message.get("content")
    if role == "tool":
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": content}]
    items: list[Json] = []
    if content or not message.get("tool_calls"):
        parts = content
        if isinstance(content, list):
            parts = [_part(part, "output_text" if role == "assistant" else "input_text") for part in content]
        items.append({"type": "message", "role": role, "content": parts})
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        items.append({"type": "function_call", "call_id": call.get("id"), **function})
    return items


def _part(part: Json, text_type: str) -> Json:
    if part.get("type") == "text":
        return {**part, "type": text_type}
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, dict):
        return {"type": "input_image", "image_url": image.get("url"), "detail": image.get("detail", "auto")}
    return part


def _flat(extra: Json) -> Json:
    """Tools and the choice of one, which this API spells without an inner `function`."""
    extra = dict(extra)
    if isinstance(tools := extra.get("tools"), list):
        extra["tools"] = [_unwrapped(tool) for tool in tools]
    if "tool_choice" in extra:
        extra["tool_choice"] = _unwrapped(extra["tool_choice"])
    return extra


def _unwrapped(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return {"type": tool.get("type", "function"), **function} if isinstance(function, dict) else tool


def decoder() -> JsonEvents:
    flags: set[str] = set()
    return JsonEvents(_Items(flags).read, flags)


def whole(body: bytes, flags: set[str]) -> list[Event]:
    """The events of an answer in one piece. Raises ValueError where it is not JSON; empty where it is no answer."""
    answer, events = whole_object(body, flags)
    if isinstance(answer, dict) and ("output" in answer or "status" in answer):
        _Items(flags).end("response.completed", {"response": answer}, 0, events)
    return events


class _Items:
    """Events of the API to ours. What it remembers: which items of output have spoken, so that what a server says once
    more when an item is done, or says only then, counts once."""

    __slots__ = ("_calls", "_flags", "_id", "_named", "_spoken")

    def __init__(self, flags: set[str]) -> None:
        self._calls: list[tuple[str, str]] = []  # per tool call: its item's id and place
        self._named: set[int] = set()
        self._spoken: set[str] = set()  # ids and places of items
        self._flags = flags
        self._id: Any = None

    def read(self, kind: bytes, chunk: Json, at_ns: int, events: list[Event]) -> None:
        said = chunk.get("type")
        said = said if isinstance(said, str) else kind.decode(errors="replace")
        delta = DELTAS.get(said)
        if delta is not None:
            self._delta(delta, chunk, at_ns, events)
        elif said in SOUNDS:
            events.append(Event("content", "", at_ns))
        elif said == "response.output_item.added" or said == "response.output_item.done":
            item = chunk.get("item")
            if isinstance(item, dict):
                ident, place = _where({**chunk, "item_id": item.get("id")})
                self._item(item, ident, place, said.endswith("done"), at_ns, events)
        elif said in ENDS:
            self.end(said, chunk, at_ns, events)
        elif said == "response.created":
            self._same(chunk.get("response"))
            events.append(Event("role", at_ns=at_ns))
        elif said == "error" or not said:
            message = error_text(chunk)
            if message is not None:
                events.append(Event("error", message, at_ns))

    def _same(self, response: Any) -> None:
        """The connection identifies an answer, its id does not: noted, not used."""
        ident = response.get("id") if isinstance(response, dict) else None
        if ident and ident != self._id:
            if self._id is not None:
                self._flags.add("unstable_ids")
            self._id = ident

    def _delta(self, kind: EventKind, chunk: Json, at_ns: int, events: list[Event]) -> None:
        text = text_of(chunk.get("delta"))
        if not text:
            return
        where = _where(chunk)
        self._spoken.update(filter(None, where))
        if kind == "tool_call":
            events.append(Event(kind, text, at_ns, self._slot(*where, begins=False), {}))
        else:
            events.append(Event(kind, text, at_ns))

    def _slot(self, ident: str, place: str, begins: bool) -> int:
        """Which tool call this is: by the item's id, and by its place where the id is new (some servers make another
        one for every event)."""
        for slot, known in enumerate(self._calls):
            if ident and ident == known[0]:
                return slot
        for slot, known in enumerate(self._calls):
            if not begins and place and place == known[1]:
                return slot
        self._calls.append((ident, place))
        return len(self._calls) - 1

    def _item(self, item: Json, ident: str, place: str, done: bool, at_ns: int, events: list[Event]) -> None:
        """An item that begins or is done: a tool call has its name at the beginning, and any item may come whole."""
        first, kind = len(events), item.get("type")
        spoken = ident in self._spoken or place in self._spoken
        if kind in CALLS:
            slot = self._slot(ident, place, begins=not done)
            text = "" if spoken else text_of(item.get("arguments") or item.get("input"))
            if text:
                self._spoken.update(filter(None, (ident, place)))
            if text or slot not in self._named:
                data = {"id": str(item.get("call_id") or ident), "name": str(item.get("name") or "")}
                add(events, first, "tool_call", text, at_ns, slot, data)
                self._named.add(slot)
        elif done and not spoken:
            self._spoken.update(filter(None, (ident, place)))
            content = item.get("content") or item.get("summary")
            for part in content if isinstance(content, list) else []:
                refusal = part.get("refusal") if isinstance(part, dict) else None
                if isinstance(refusal, str) and refusal:
                    add(events, first, "refusal", refusal, at_ns)
                elif text := text_of(part):
                    add(events, first, "reasoning" if kind == "reasoning" else "content", text, at_ns)

    def end(self, said: str, chunk: Json, at_ns: int, events: list[Event]) -> None:
        """The whole response once more: its counts, why it ended, and its output where none of it has come before."""
        response = chunk.get("response")
        self._same(response)
        response = response if isinstance(response, dict) else {}
        error, status = response.get("error"), response.get("status") or said.removeprefix("response.")
        output = response.get("output")
        if not self._spoken and not self._calls:
            first = len(events)
            for number, item in enumerate(output if isinstance(output, list) else []):
                if isinstance(item, dict):
                    self._item(item, "", str(number), True, at_ns, events)
            for event in events[first + 1 :]:  # all of it is one chunk
                event.data = {**(event.data or {}), "same_chunk": True}
        if data := counts(response.get("usage"), chunk.get("timings") or response.get("timings")):
            events.append(Event("usage", "", at_ns, 0, data))
        if error or status == "failed":
            events.append(Event("error", error_text({"error": error or "the response failed"}) or "", at_ns))
            return
        details = response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        if reason is None and status == "completed":
            reason = "tool_calls" if self._calls else "stop"
        events.append(finish(reason or status, at_ns))
        events.append(Event("done", at_ns=at_ns))


def _where(chunk: Json) -> tuple[str, str]:
    """An item's id, and its place among the items; each empty where the server does not say."""
    ident, place = chunk.get("item_id"), chunk.get("output_index")
    return ident if isinstance(ident, str) else "", str(place) if isinstance(place, int) else ""
