"""How each API spells a request and an answer; one file per dialect, all of them without I/O. See README.md here."""

from __future__ import annotations

from typing import Any, Protocol

from loadgen.types import Event, Json, Request

# A server's message is quoted in one line of a report, not archived.
MESSAGE_CHARS = 300
# Where an error object has its words.
MESSAGE_KEYS = ("message", "msg", "error_msg", "error_message", "errorMessage", "Message", "faultstring")


class Decoder(Protocol):
    """Decodes the body of one streamed answer.

    `flags` collects what it noticed (`malformed_events`, `nonfinite_json`, `unstable_ids`, `unterminated_last_event`);
    `cut` is True after `close` when the last event was incomplete.
    """

    flags: set[str]
    malformed: int
    cut: bool

    def feed(self, data: bytes, at_ns: int) -> list[Event]: ...

    def close(self, at_ns: int) -> list[Event]: ...


class Dialect(Protocol):
    """A module of this folder. `STREAMS` False: its answers are JSON in one piece and no tokens come out; such a
    dialect has no `decoder`."""

    PATH: str
    STREAMS: bool

    def encode(self, request: Request, model: str, extra_body: Json) -> bytes: ...

    def decoder(self) -> Decoder: ...

    def whole(self, body: bytes, flags: set[str]) -> list[Event]: ...


def characters(text: str) -> str:
    """A foreign text that can be written as UTF-8: halves of a character (JSON's surrogate escapes, which servers cut
    between two events) are joined where they meet and replaced where they do not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def one_line(text: str) -> str:
    """A foreign text as one short line."""
    text = " ".join(characters(text).split())
    return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 1] + "…"


def error_text(answer: Any) -> str | None:
    """The message of an error object in any of the shapes that servers use; None where `answer` reports no error.

    Seen: `{"error": {"message", "code"}}`, `{"error": "…"}`, `{"error": true, "message": "…"}`, `{"errors": […]}`,
    `{"object": "error", "message": "…"}`, `{"detail": "…"}`, `{"detail": [{"msg", "loc"}]}`, `{"message": "…"}`,
    `{"error_code", "error_msg"}`, `{"fault": {"faultstring"}}`, a list around one of these.
    """
    if isinstance(answer, list):
        answer = answer[0] if answer else None
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    if error is True:
        error = {**answer, "error": None}
    if not error and "choices" not in answer:
        error = next((answer[key] for key in ("errors", "detail", "fault") if answer.get(key)), None)
        if not error and any(isinstance(answer.get(key), str) and answer[key] for key in MESSAGE_KEYS):
            error = answer
    if not error:
        return None
    return one_line(_message(error)) or "error without a message"


def _message(error: Any, depth: int = 0) -> str:
    if isinstance(error, str):
        return error
    if depth > 4:  # foreign nesting, not a message any more
        return ""
    if isinstance(error, list):
        return "; ".join(_message(part, depth + 1) for part in error[:3])
    if not isinstance(error, dict):
        return str(error)
    found = (error.get(key) for key in (*MESSAGE_KEYS, "detail", "error", "type", "status"))
    text = next((_message(each, depth + 1) for each in found if each), "")
    if isinstance(error.get("loc"), list):
        text = f"{'.'.join(map(str, error['loc']))}: {text}"
    code = error.get("code", error.get("error_code"))
    return text if code is None or str(code) in text else f"{text} (code {code})"
