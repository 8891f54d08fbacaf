"""The simulated server's words: requests read, errors and chunks written, byte for byte in vLLM's shapes. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from loadgen.sim.answers import Prompt, Reply
from loadgen.sim.tokens import conversation, tokens
from loadgen.types import Json

Endpoint = Literal["chat", "completions"]


# What a field may be; null is always allowed.
FIELDS: Mapping[str, tuple[type, ...]] = {
    "model": (str,), "messages": (list,), "max_tokens": (int,), "max_completion_tokens": (int,), "min_tokens": (int,),
    "temperature": (int, float), "n": (int,), "stream": (bool,), "stream_options": (dict,), "ignore_eos": (bool,),
    "chat_template_kwargs": (dict,), "tools": (list,), "tool_choice": (str, dict), "prompt": (str, list),
}  # fmt: skip
MESSAGE_FIELDS: Mapping[str, tuple[type, ...]] = {"role": (str,), "content": (str, list), "tool_calls": (list,)}
PART_FIELDS: Mapping[str, tuple[type, ...]] = {"type": (str,), "text": (str,)}
TOOL_FIELDS: Mapping[str, tuple[type, ...]] = {"type": (str,), "function": (dict,)}
FUNCTION_FIELDS: Mapping[str, tuple[type, ...]] = {"name": (str,), "parameters": (dict,)}
SCHEMA_FIELDS: Mapping[str, tuple[type, ...]] = {
    "type": (str,), "properties": (dict,), "required": (list,), "enum": (list,), "items": (dict,)
}  # fmt: skip


class Refused(Exception):  # noqa: N818 - it is an answer, not an error of ours
    """A request that is answered with an error status and vLLM's error body."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = orjson.dumps({"error": error(message, kind, param, status)})


def error(message: str, kind: str, param: str | None, code: int) -> Json:
    return {"message": message, "type": kind, "param": param, "code": code}


ENGINE_ERROR = error(
    "EngineCore encountered an issue. See stack trace (above) for the root cause.", "InternalServerError", None, 500
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as the server understands it."""

    endpoint: Endpoint
    prompt: Prompt
    tokens: list[str]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    thinking: bool


def read(body: bytes, endpoint: Endpoint, model: str, context_tokens: int) -> Asked:
    """A request body, or Refused as vLLM would refuse it. Long for long prompts: run it off the event loop then."""
    asked = _json(body)
    _check_types(asked, FIELDS, "body")
    if asked.get("model") not in (None, model):
        name = asked["model"]
        raise Refused(404, f"The model `{name}` does not exist. Valid aliases: {model}.", "NotFoundError", "model")
    max_tokens = _limit(asked, context_tokens)
    if (temperature := asked.get("temperature")) is not None and temperature < 0:
        raise _bad_parameter("temperature", f"temperature must be non-negative, got {float(temperature)}", temperature)
    if asked.get("n") not in (None, 1):
        raise _bad_parameter("n", f"n must be 1, got {asked['n']}", asked["n"])
    if endpoint == "chat":
        prompt = _chat(asked, model)
        counted = conversation(prompt.messages)
        if prompt.tools:
            counted += tokens(json.dumps(prompt.tools))
    else:
        prompt, counted = _completion(asked)
    if max_tokens is None:
        max_tokens = max(1, context_tokens - len(counted))
        requested = 0
    else:
        requested = max_tokens
    _check_context(len(counted), requested, context_tokens)
    options = asked.get("stream_options") or {}
    return Asked(
        endpoint=endpoint,
        prompt=prompt,
        tokens=counted,
        max_tokens=max_tokens,
        min_tokens=int(asked.get("min_tokens") or 0),
        ignore_eos=bool(asked.get("ignore_eos")),
        stream=bool(asked.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        thinking=bool((asked.get("chat_template_kwargs") or {}).get("enable_thinking", True)),
    )


def _json(body: bytes) -> Json:
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as problem:
        detail = {
            "type": "json_invalid", "loc": f"body.{problem.pos}", "msg": "JSON decode error",
            "input": "<dict of 0 items>", "ctx": {"error": problem.msg},
        }  # fmt: skip
        raise Refused(400, f"1 validation error:\n  {detail}", "Bad Request", f"body.{problem.pos}") from None
    if not isinstance(asked, dict):
        raise Refused(400, "1 validation error:\n  the body is not an object", "Bad Request", "body")
    return asked


def _check_types(value: Json, fields: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Refuse fields of a wrong type; null is as good as absent, and unknown fields are anybody's extension."""
    for name, kinds in fields.items():
        found = value.get(name)
        if found is not None and (not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds)):
            expected = " or ".join(kind.__name__ for kind in kinds)
            place = f"{where}.{name}"
            raise Refused(400, f"1 validation error:\n  {place}: {expected} expected", "Bad Request", place)


def _objects(values: list[Any], fields: Mapping[str, tuple[type, ...]], where: str) -> list[Json]:
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            place = f"{where}.{index}"
            raise Refused(400, f"1 validation error:\n  {place}: object expected", "Bad Request", place)
        _check_types(value, fields, f"{where}.{index}")
    return values


def _limit(asked: Json, context_tokens: int) -> int | None:
    value: int | None = asked.get("max_completion_tokens")
    value = asked.get("max_tokens") if value is None else value
    if value is None:
        return None
    if value < 1:
        raise _bad_parameter("max_tokens", f"max_tokens must be at least 1, got {value}.", value)
    if value > context_tokens:
        raise _bad_parameter(
            "max_tokens",
            f"max_tokens={value} cannot be greater than max_model_len={context_tokens}. "
            "Please request fewer output tokens.",
            value,
        )
    return value


def _bad_parameter(name: str, message: str, value: object) -> Refused:
    return Refused(400, f"{message} (parameter={name}, value={value})", param=name)


def _check_context(prompt: int, requested: int, context: int) -> None:
    if prompt >= context:
        message = (
            f"This model's maximum context length is {context} tokens. However, your prompt contains at least {prompt} "
            "input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
    elif prompt + requested > context:
        message = (
            f"This model's maximum context length is {context} tokens. However, you requested {requested} output "
            f"tokens and your prompt contains at least {prompt} input tokens, for a total of at least "
            f"{prompt + requested} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens."
        )
    else:
        return
    raise _bad_parameter("input_tokens", message, prompt)


def _chat(asked: Json, model: str) -> Prompt:
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        detail = {
            "type": "missing", "loc": "body.messages", "msg": "Field required",
            "input": f"<dict of {len(asked)} items>",
        }  # fmt: skip
        raise Refused(400, f"1 validation error:\n  {detail}", "Bad Request", "body.messages")
    _objects(messages, MESSAGE_FIELDS, "body.messages")
    tools = [tool.get("function") or {} for tool in _objects(asked.get("tools") or [], TOOL_FIELDS, "body.tools")]
    for tool in _objects(tools, FUNCTION_FIELDS, "body.tools"):
        parameters = tool.get("parameters") or {}
        _check_types(parameters, SCHEMA_FIELDS, "body.tools.parameters")
        for schema in (parameters.get("properties") or {}).values():
            _objects([schema], SCHEMA_FIELDS, "body.tools.parameters")
    return Prompt(
        messages=tuple((str(message.get("role", "user")), _text(message, model)) for message in messages),
        tools=tuple(tools),
        tool_choice=_tool_choice(asked),
    )


def _tool_choice(asked: Json) -> str:
    choice = asked.get("tool_choice")
    if isinstance(choice, Mapping):
        return str((choice.get("function") or {}).get("name"))
    if choice is None:
        return "auto" if asked.get("tools") else "none"
    return str(choice)


def _text(message: Json, model: str) -> str:
    """The text of one message: its parts joined, and the calls that it made."""
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for part in _objects(content, PART_FIELDS, "body.messages.content"):
            if part.get("type") not in ("text", "input_text"):
                raise Refused(400, f"{model} is not a multimodal model")
            parts.append(str(part.get("text", "")))
        content = "\n".join(parts)
    calls = message.get("tool_calls")
    return f"{content or ''}{json.dumps(calls) if calls else ''}"


def _completion(asked: Json) -> tuple[Prompt, list[str]]:
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise Refused(400, "1 validation error:\n  prompt: one text is expected", "Bad Request", "body.prompt")
    return Prompt((("user", prompt),)), tokens(prompt) or [prompt]


# -- answers


def usage(prompt_tokens: int, cached: int, output: int, reasoning: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class Chunks:
    """Writes one answer's stream; what does not change from chunk to chunk is serialised once."""

    def __init__(self, asked: Asked, reply: Reply, answer_id: str, created: int, model: str) -> None:
        self.reply = reply
        self.chat = asked.endpoint == "chat"
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        self.head = f'data: {{"id":"{answer_id}","object":"{kind}","created":{created},"model":"{model}",'.encode()
        self.call_id = answer_id.replace("chatcmpl-", "chatcmpl-tool-")
        self.told = 0

    def opening(self) -> bytes:
        """The role chunk (and the tool call's name): vLLM sends it together with the first token."""
        if not self.chat:
            return b""
        role = self._chat_chunk(b'{"role":"assistant","content":""}', b"")
        if self.reply.tool is None:
            return role
        call = {"id": self.call_id, "type": "function", "index": 0, "function": {"name": self.reply.tool}}
        return role + self._chat_chunk(orjson.dumps({"content": None, "tool_calls": [call]}), b',"token_ids":null')

    def tokens(self, count: int, usage: Json | None) -> bytes:
        """The next `count` tokens: one chunk, two where they straddle the end of the reasoning."""
        start, self.told = self.told, self.told + count
        thought = len(self.reply.reasoning)
        reasoning = "".join(self.reply.reasoning[start : self.told])
        content = "".join(self.reply.content[max(0, start - thought) : max(0, self.told - thought)])
        finish = self.reply.finish if self.told >= self.reply.tokens else None
        found = b""
        if reasoning or start < thought:
            last = finish if self.told <= thought else None
            found = self._piece(b"reasoning", reasoning, last, usage)
        if self.told > thought:
            found += self._piece(b"content", content, finish, usage)
        return found

    def closing(self, usage: Json | None) -> bytes:
        """The usage chunk, where asked for, and the end."""
        done = b"data: [DONE]\n\n"
        if usage is None:
            return done
        return self.head + b'"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n" + done

    def _piece(self, kind: bytes, text: str, finish: str | None, usage: Json | None) -> bytes:
        word = b"null" if finish is None else b'"%s"' % finish.encode()
        more = b"" if usage is None else b',"usage":' + orjson.dumps(usage)
        if not self.chat:
            return (
                self.head + b'"choices":[{"index":0,"text":' + orjson.dumps(text) + b',"logprobs":null,"finish_reason":'
                + word + b',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]' + more + b"}\n\n"
            )  # fmt: skip
        if self.reply.tool is not None:
            call = {"index": 0, "function": {"arguments": text}}
            delta = orjson.dumps({"content": None, "tool_calls": [call]})
        else:
            delta = b'{"' + kind + b'":' + orjson.dumps(text) + b"}"
        tail = b',"token_ids":null' if finish is None else b',"stop_reason":null,"token_ids":null'
        return self._chat_chunk(delta, tail, word, more)

    def _chat_chunk(self, delta: bytes, tail: bytes, finish: bytes = b"null", more: bytes = b"") -> bytes:
        return (
            self.head + b'"choices":[{"index":0,"delta":' + delta + b',"logprobs":null,"finish_reason":' + finish + tail
            + b"}]" + more + b"}\n\n"
        )  # fmt: skip


def whole(asked: Asked, reply: Reply, answer_id: str, created: int, model: str, used: Json) -> bytes:
    """The answer as one JSON object, for requests that do not stream."""
    content: str | None = "".join(reply.content) or None
    choice: Json = {"index": 0}
    if asked.endpoint == "completions":
        choice |= {"text": content or "", "logprobs": None}
    else:
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if reply.tool is not None:
            call = {"name": reply.tool, "arguments": content or ""}
            message["content"] = None
            message["tool_calls"] = [
                {"id": answer_id.replace("chatcmpl-", "chatcmpl-tool-"), "type": "function", "function": call}
            ]
        if reply.reasoning:
            message["reasoning"] = "".join(reply.reasoning)
        choice |= {"message": message, "logprobs": None}
    choice |= {"finish_reason": reply.finish, "stop_reason": None}
    return orjson.dumps(
        {
            "id": answer_id,
            "object": "chat.completion" if asked.endpoint == "chat" else "text_completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "usage": used,
        }
    )


def models(model: str, created: int, context_tokens: int) -> Json:
    card: Json = {
        "id": model, "object": "model", "created": created, "owned_by": "vllm", "root": model, "parent": None,
        "max_model_len": context_tokens, "permission": [],
    }  # fmt: skip
    return {"object": "list", "data": [card]}


def tokenize(body: bytes, model: str, context_tokens: int) -> Json:
    """`/tokenize` for a prompt or for messages. The ids are checksums: only their number means something."""
    asked = _json(body)
    messages = _chat(asked, model).messages if "messages" in asked else None
    found = tokens(str(asked.get("prompt", ""))) if messages is None else conversation(messages)
    ids: list[Any] = [sum(token.encode()) % 150_000 for token in found]
    return {"count": len(found), "max_model_len": context_tokens, "tokens": ids, "token_strs": None}
