"""Anthropic messages: blocks of content, as Anthropic, vLLM, SGLang, llama.cpp and gateways speak it.

Anthropic itself wants `anthropic-version` and `x-api-key` in the target's headers; the others do not.
"""

from __future__ import annotations

from typing import Any

import orjson

from loadgen.dialects import error_text
from loadgen.dialects.json_events import JsonEvents, add, count, counts, finish, merged, text_of, whole_object
from loadgen.types import Event, Json, Request

PATH = "/v1/messages"
STREAMS = True
SYSTEM_ROLES = frozenset({"system", "developer"})
TOOL_BLOCKS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})


def encode(request: Request, model: str, extra_body: Json) -> bytes:
    """The request's body; system messages go into `system`. Parts, tools and tool results in the form of chat
    completions become those of this API; whatever has another form goes as it is."""
    system = [text_of(message.get("content")) for message in request.messages if message.get("role") in SYSTEM_ROLES]
    body: Json = {
        "messages": [_message(each) for each in request.messages if each.get("role") not in SYSTEM_ROLES],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
    }
    if system:
        body["system"] = "\n\n".join(system)
    if request.ignore_eos:
        body["ignore_eos"] = True
    return merged(body, model, _tools(extra_body), _tools(request.extra_body))


def _message(message: Json) -> Json:
    role, content = message.get("role", "user"), message.get("content")
    if role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": content}
        return {"role": "user", "content": [result]}
    if isinstance(content, list):
        content = [_part(part) for part in content]
    calls = message.get("tool_calls")
    if calls:
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        content = [*blocks, *map(_use, calls)]
    return {"role": role, "content": content}


def _part(part: Json) -> Json:
    """An image: inline as base64, or by its address."""
    image = part.get("image_url")
    if part.get("type") != "image_url" or not isinstance(image, dict):
        return part
    url = str(image.get("url", ""))
    head, comma, data = url.partition(",")
    if url.startswith("data:") and comma and head.endswith(";base64"):
        media_type = head.removeprefix("data:").removesuffix(";base64")
        return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}
    return {"type": "image", "source": {"type": "url", "url": url}}


def _use(call: Json) -> Json:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    try:
        given = orjson.loads(arguments or "{}")
    except (TypeError, orjson.JSONDecodeError):
        given = {}
    return {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": given}


def _tools(extra: Json) -> Json:
    """Tools and the choice of one, which this API spells its own way."""
    extra = dict(extra)
    if isinstance(tools := extra.get("tools"), list):
        extra["tools"] = [_tool(tool) for tool in tools]
    if "tool_choice" in extra:
        choice = extra["tool_choice"]
        function = choice.get("function") if isinstance(choice, dict) else None
        if isinstance(choice, str):
            choice = {"type": {"required": "any"}.get(choice, choice)}
        elif isinstance(function, dict):
            choice = {"type": "tool", "name": function.get("name")}
        extra["tool_choice"] = choice
    return extra


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    made = {"name": function.get("name"), "input_schema": function.get("parameters") or {"type": "object"}}
    return made | ({"description": function["description"]} if function.get("description") else {})


def decoder() -> JsonEvents:
    return JsonEvents(_Blocks().read)


def whole(body: bytes, flags: set[str]) -> list[Event]:
    """The events of an answer in one piece. Raises ValueError where it is not JSON; empty where it is no answer."""
    answer, events = whole_object(body, flags)
    if isinstance(answer, dict) and isinstance(answer.get("content"), list):
        blocks = _Blocks()
        for index, block in enumerate(answer["content"]):
            if isinstance(block, dict):
                blocks.block(index, block, 0, events, 0)
        blocks.ended(answer.get("usage"), answer.get("stop_reason"), 0, events)
    return events


class _Blocks:
    """Events of the API to ours. What it remembers: which blocks are tool calls, and the counts of the beginning."""

    __slots__ = ("_calls", "_usage")

    def __init__(self) -> None:
        self._calls: dict[Any, int] = {}
        self._usage: Json = {}

    def read(self, kind: bytes, chunk: Json, at_ns: int, events: list[Event]) -> None:
        said = chunk.get("type") or kind.decode(errors="replace")
        first = len(events)
        if said == "content_block_delta":
            delta = chunk.get("delta")
            if isinstance(delta, dict):
                self._delta(chunk.get("index"), delta, at_ns, events, first)
        elif said == "content_block_start":
            block = chunk.get("content_block")
            if isinstance(block, dict):
                self.block(chunk.get("index"), block, at_ns, events, first)
        elif said == "message_delta":
            delta = chunk.get("delta")
            reason = delta.get("stop_reason") if isinstance(delta, dict) else None
            self.ended(chunk.get("usage"), reason, at_ns, events)
        elif said == "message_stop":
            events.append(Event("done", at_ns=at_ns))
        elif said == "message_start":
            message = chunk.get("message")
            usage = message.get("usage") if isinstance(message, dict) else None
            self._usage = dict(usage) if isinstance(usage, dict) else {}
            self._usage.pop("output_tokens", None)  # a placeholder: nothing has been generated yet
            if data := _counts(self._usage):
                events.append(Event("usage", "", at_ns, 0, data))
            events.append(Event("role", at_ns=at_ns))
        elif said == "error" or not said:
            message = error_text(chunk)
            if message is not None:
                events.append(Event("error", message, at_ns))

    def block(self, index: Any, block: Json, at_ns: int, events: list[Event], first: int) -> None:
        """A block that begins; of an answer in one piece, all of it."""
        kind = block.get("type")
        if kind in TOOL_BLOCKS:
            given = block.get("input")
            arguments = orjson.dumps(given).decode() if given else ""
            data = {"id": str(block.get("id") or ""), "name": str(block.get("name") or "")}
            slot = self._calls[str(index)] = len(self._calls)
            add(events, first, "tool_call", arguments, at_ns, slot, data)
        elif kind == "thinking" and (thought := text_of(block.get("thinking"))):
            add(events, first, "reasoning", thought, at_ns)
        elif kind == "redacted_thinking":
            add(events, first, "reasoning", "", at_ns)
        elif kind == "text" and (text := text_of(block)):
            add(events, first, "content", text, at_ns)

    def _delta(self, index: Any, delta: Json, at_ns: int, events: list[Event], first: int) -> None:
        kind = delta.get("type")
        if kind == "input_json_delta":
            if piece := text_of(delta.get("partial_json")):
                slot = self._calls.setdefault(str(index), len(self._calls))
                events.append(Event("tool_call", piece, at_ns, slot, {}))
        elif kind == "thinking_delta":
            if thought := text_of(delta.get("thinking")):
                add(events, first, "reasoning", thought, at_ns)
        elif text := text_of(delta):  # text_delta; signatures and citations have no text
            add(events, first, "content", text, at_ns)

    def ended(self, usage: Any, reason: Any, at_ns: int, events: list[Event]) -> None:
        """The counts, which add to those of the beginning, and why it ended."""
        if isinstance(usage, dict):
            self._usage |= {name: value for name, value in usage.items() if value is not None}
        if data := _counts(self._usage):
            events.append(Event("usage", "", at_ns, 0, data))
        if reason == "pause_turn":  # a long turn of server tools, to be gone on with: all was said for now
            reason = "end_turn"
        if reason:
            events.append(finish(reason, at_ns))


def _counts(usage: Json) -> Json:
    """The counts under our names. `input_tokens` leaves out what was read from the cache or written to it."""
    data = counts(usage)
    if "prompt_tokens" in data and count(usage.get("input_tokens")) is not None:
        extra = ("cache_read_input_tokens", "cache_creation_input_tokens")
        data["prompt_tokens"] += sum(count(usage.get(name)) or 0 for name in extra)
    return data
