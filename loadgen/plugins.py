"""Finding plug-ins: the file is the registration, its module name is the name in a scenario.

A file counts as a plug-in when it defines its kind's function; other files beside it (words, lanes, calibration) are
support. A dotted name loads third-party code.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from loadgen import strict
from loadgen.types import Json, UserError

# kind → (package, the function that makes a file one of this kind)
KINDS: dict[str, tuple[str, str]] = {
    "workloads": ("workloads", "sessions"),
    "graders": ("workloads.graders", "grade"),
    "monitors": ("monitors", "watch"),
    "rules": ("loadgen.rules", "check"),
    "dialects": ("loadgen.dialects", "encode"),
}


def names(kind: str) -> list[str]:
    """All plug-ins of one kind that ship with us, found without importing them."""
    package, function = KINDS[kind]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    defines = re.compile(rf"^(async )?def {function}\(", re.MULTILINE)
    files = Path(next(iter(spec.submodule_search_locations))).glob("*.py")
    return sorted(f.stem for f in files if f.stem != "__init__" and defines.search(f.read_text(encoding="utf-8")))


def load(kind: str, name: str) -> ModuleType:
    """The plug-in's module; UserError with the nearest name where there is none."""
    package, function = KINDS[kind]
    known = names(kind)
    if "." not in name and name not in known:
        raise UserError(f'no {kind.removesuffix("s")} is called "{name}"{strict.nearest(name, known)}')
    try:
        module = importlib.import_module(name if "." in name else f"{package}.{name}")
    except ModuleNotFoundError as error:
        raise UserError(f"{kind.removesuffix('s')} {name}: cannot be imported ({error})") from None
    if not hasattr(module, function):
        raise UserError(f"{kind.removesuffix('s')} {name}: has no function {function}()")
    return module


def options(module: ModuleType, mapping: Json, path: strict.Path = ()) -> Any:
    """The plug-in's own Options, strictly; StrictError names the key."""
    return strict.build(module.Options, mapping, path)


def about(kind: str, name: str) -> str:
    """The first line of the plug-in's docstring."""
    return (load(kind, name).__doc__ or "").strip().partition("\n")[0]
