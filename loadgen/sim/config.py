"""Presets of the simulated server: strict YAML in, dataclasses out."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import yaml

from loadgen import strict
from loadgen.sim.model import EngineConfig
from loadgen.types import UserError

PRESETS = Path(__file__).parent / "presets"
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that `--host-root` plays: unified memory, in which the engine's claims appear in no counter but as
    less MemFree."""

    total_gib: float = 121.7
    system_gib: float = 3.0
    """What the operating system itself uses."""
    page_cache_gib: float = 8.0
    cma_free_gib: float = 0.5
    swap_gib: float = 16.0


@dataclass(frozen=True, slots=True)
class Preset:
    """One engine on one machine. The scales say how much faster than life it runs, and how small its memory is."""

    about: str = ""
    model: str = "sim"
    engine: EngineConfig = EngineConfig()
    reasoning_tokens: int = 0
    """Tokens of reasoning before each answer; requests turn it off with `chat_template_kwargs.enable_thinking`."""
    time_scale: float = 1.0
    memory_scale: float = 1.0
    memory_limit_mib: int = 512
    """Real memory that the claims may fill at most, whatever the scales say."""
    machine: Machine = Machine()
    name: str = ""


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_preset(name: str) -> Preset:
    """A preset of ours by name, or any YAML file by path."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(preset_names())}"
        raise UserError(f'no preset "{name}"{hint}')
    try:
        preset = strict.build(Preset, {**(read_yaml(path) or {}), "name": path.stem})
    except strict.StrictError as error:
        raise strict.as_user_error(error, str(path)) from None
    for key, value in (("time_scale", preset.time_scale), ("memory_scale", preset.memory_scale)):
        check_scale(key, value)
    engine = preset.engine
    if -(-engine.context_tokens // engine.block_tokens) > engine.kv_tokens // engine.block_tokens:
        raise UserError(f"{path}: engine.kv_tokens: must hold one full context ({engine.context_tokens} tokens)")
    return preset


def check_scale(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{name}: expected a number above 0, got {value}")


def read_yaml(path: Path) -> dict[str, object]:
    """A YAML mapping, or one line that says why not."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise UserError(f"{path}{where}: not YAML: {getattr(error, 'problem', error)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of keys to values")
    return data
