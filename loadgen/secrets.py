"""API keys: where they come from, and nowhere do they go but into a request's head."""

from __future__ import annotations

import os
from pathlib import Path

import orjson

from loadgen.types import Target, UserError

# All headers as JSON, from a supervisor to its children, on this machine or another: the key may not be known there.
HANDED_ON = "LOADGEN_TARGET_HEADERS"


def headers(target: Target) -> dict[str, str]:
    """The headers of every request to the target, its key included. Raises UserError where the key cannot be found."""
    found = dict(target.headers)
    secret = target.api_key
    if secret is None:
        return found
    if secret.env is not None:
        key = os.environ.get(secret.env)
        if not key:
            raise UserError(f"target.api_key: the environment variable {secret.env} is not set")
    else:
        try:
            key = Path(secret.file or "").expanduser().read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UserError(f"target.api_key: {secret.file} cannot be read ({error.strerror})") from None
    return {"Authorization": f"Bearer {key}", **found}


def handed_on() -> dict[str, str]:
    """The headers that the supervisor handed on; none in a process that nobody started so."""
    found: dict[str, str] = orjson.loads(os.environ.get(HANDED_ON) or "{}")
    return found
