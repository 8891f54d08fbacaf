"""From what a YAML or JSON file says to typed dataclasses, strictly: each unknown key or wrong type is one clear line.

Conversion itself is msgspec's. What it does not do for dataclasses stands here: refusing unknown keys with the nearest
valid spelling, durations like "1h30m", token counts like "8k", and a schema that editors read.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from loadgen.types import Json, Seconds, Tokens, UserError

T = TypeVar("T")
Path = tuple[str | int, ...]

_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([km]?)")


class StrictError(Exception):
    """What is wrong and at which key path; the caller knows the file and the line and makes a UserError of it."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean "drain"?`, or all that is known where nothing is near."""
    choices = sorted(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known: {', '.join(choices)}" if choices else ""


def seconds(value: object) -> Seconds:
    """90, 1.5, "90s", "250ms", "1h30m" → seconds; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"expected a duration such as 90s or 1h30m, got {value!r}")
    if isinstance(value, str):
        text = value.strip().lower()
        if _DURATION.fullmatch(text):
            return Seconds(sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(text)))
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected a duration such as 90s or 1h30m, got {value!r}") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"a duration cannot be {value}")
    return Seconds(value)


def tokens(value: object) -> Tokens:
    """8192 or "8k" (k = 1024) → tokens; ValueError otherwise."""
    if isinstance(value, str) and (match := _TOKENS.fullmatch(value.strip().lower())):
        return Tokens(float(match[1]) * {"": 1, "k": 1024, "m": 1024 * 1024}[match[2]])
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a number of tokens such as 8192 or 8k, got {value!r}")
    return Tokens(value)


def _decode(kind: type, value: Any) -> Any:
    if kind is Seconds:
        return value if isinstance(value, Seconds) else seconds(value)
    if kind is Tokens:
        return value if isinstance(value, Tokens) else tokens(value)
    raise NotImplementedError(f"no conversion to {kind}")


def build(kind: type[T], value: object, path: Path = ()) -> T:
    """`value` as a `kind` (a dataclass), or StrictError with the path of the first fault."""
    _refuse_unknown(kind, value, path)
    try:
        return msgspec.convert(value, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        raise StrictError(path + _path(where.rstrip("`")), message[:1].lower() + message[1:]) from None


def _path(text: str) -> Path:
    """msgspec's `$.phases[2].drain` as key path. Keys of mappings read `[...]` there: `_refuse_unknown` saw those."""
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", text)
    return tuple(int(index) if index else key for key, index in parts)


def _refuse_unknown(kind: Any, value: object, path: Path) -> None:
    """Depth first over the type: unknown keys, and the types of mapping values, whose keys msgspec would not name."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
                _refuse_unknown(option, value, path)
    elif dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise StrictError(path, f"expected a mapping, got {_say(value)}")
        hints = typing.get_type_hints(kind)
        for key, entry in value.items():
            if key not in hints:
                raise StrictError((*path, str(key)), f'unknown key "{key}"{nearest(str(key), hints)}')
            _refuse_unknown(hints[key], entry, (*path, key))
    elif origin is dict and isinstance(value, Mapping):
        inner = typing.get_args(kind)[1]
        for key, entry in value.items():
            if dataclasses.is_dataclass(inner):
                build(inner, entry, (*path, str(key)))  # type: ignore[arg-type]
    elif origin is tuple and isinstance(value, (list, tuple)):
        inner = typing.get_args(kind)[0]
        for index, entry in enumerate(value):
            _refuse_unknown(inner, entry, (*path, index))


def _say(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), repr(value))


def plain(value: Any) -> Any:
    """A dataclass as YAML and JSON can say it: defaults that are None left out, durations and tokens as numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {key: entry for key, entry in fields.items() if entry is not None}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return int(value) if value == int(value) else float(value)
    return int(value) if isinstance(value, Tokens) else value


def schema(kind: type) -> Json:
    """The JSON schema of a dataclass, closed: an editor underlines what `build` would refuse."""
    definitions: Json = {}
    top = _schema(kind, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": definitions}


_LEAVES: dict[object, Json] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Seconds: {"type": ["number", "string"], "description": "a duration: 90, 90s, 10m, 1h30m"},
    Tokens: {"type": ["integer", "string"], "description": "a number of tokens: 8192 or 8k"},
    Any: {},
}


def _schema(kind: Any, definitions: Json) -> Json:
    """One type; dataclasses go to `definitions` by name. (msgspec's own writer stops at defaults of custom types.)"""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in _LEAVES:
        return dict(_LEAVES[kind])
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, definitions) for each in inner]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], definitions)}
    if origin is tuple:
        return {"type": "array", "items": _schema(inner[0], definitions)}
    if not dataclasses.is_dataclass(kind) or not isinstance(kind, type):
        raise NotImplementedError(f"no schema for {kind}")
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = entry = {"type": "object", "additionalProperties": False}
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        entry["description"] = " ".join((kind.__doc__ or "").split())
        entry["properties"] = {field.name: _schema(hints[field.name], definitions) for field in fields}
        missing = dataclasses.MISSING
        entry["required"] = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    return {"$ref": f"#/$defs/{kind.__name__}"}


def as_user_error(error: StrictError, where: str) -> UserError:
    """`file.yaml:12: classes.chat.weight: …`: where it stands, then what is wrong."""
    key = ".".join(map(str, error.path))
    return UserError(f"{where}: {key}: {error.message}" if key else f"{where}: {error.message}")
