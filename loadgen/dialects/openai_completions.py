"""OpenAI completions: a text goes on; no chat template, no roles, no tools, no media."""

from __future__ import annotations

from loadgen.dialects import openai_chat
from loadgen.dialects.json_events import merged, prompt
from loadgen.types import Json, Request

PATH = "/v1/completions"
STREAMS = True


def encode(request: Request, model: str, extra_body: Json) -> bytes:
    """The request's body; the prompt is the messages' contents with a blank line between two. Raises UserError for
    media."""
    body: Json = {
        "prompt": prompt(request.messages, "openai_completions"),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.ignore_eos:
        body["ignore_eos"] = True
    return merged(body, model, extra_body, request.extra_body)


# Answers are those of a chat with `text` in a choice where a chat has a `delta`.
decoder = openai_chat.decoder
whole = openai_chat.whole
