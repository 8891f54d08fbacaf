"""A scenario: YAML in, one checked `Scenario` out; every mistake is one line with file, line, key and a way out.

A scenario is found by name in the package's `workloads/scenarios`, or by path. `extends: NAME` lays one over another
(mappings merge, lists are replaced), `--set a.b=c` lays single values over that. This module asks no server anything.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from loadgen import plugins, strict
from loadgen.types import ClassSpec, Json, PhaseSpec, Scenario, Seconds, UserError

# A chain of scenarios longer than this is a loop or a maze.
MAX_EXTENDS = 8
# A warm-up never takes more than this share of a measuring phase that was shortened by --duration.
WARMUP_SHARE = 0.2


@dataclass(slots=True)
class _Source:
    """A merged mapping and, for each key path, the file and line that said it last."""

    data: Json
    lines: dict[strict.Path, str]
    name: str

    def where(self, path: strict.Path) -> str:
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return self.name


@cache
def folder() -> Path:
    """Where the scenarios that ship with us lie."""
    spec = importlib.util.find_spec("workloads")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "scenarios"


def names() -> list[str]:
    return sorted(f.stem for f in folder().glob("*.yaml"))


def find(name: str | Path, beside: Path | None = None) -> Path:
    """The file behind a scenario's name or path; UserError with the nearest name."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or "/" in str(name):
        candidates = [path, beside / path] if beside else [path]
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        raise UserError(f"scenario {name}: no such file")
    if (folder() / f"{name}.yaml").is_file():
        return folder() / f"{name}.yaml"
    raise UserError(f'no scenario is called "{name}"{strict.nearest(str(name), names())} (or give the path of a file)')


def load(source: str | Path, overrides: Iterable[str] = (), duration: Seconds | None = None) -> Scenario:
    """Read, merge, convert and check a scenario. Raises UserError."""
    merged = _merge_chain(find(source))
    for override in overrides:
        _override(merged, override)
    try:
        scenario = strict.build(Scenario, merged.data)
        if duration is not None:
            scenario = shortened(scenario, duration)
        check(scenario)
    except strict.StrictError as error:
        raise strict.as_user_error(error, merged.where(error.path)) from None
    return scenario


def shortened(scenario: Scenario, duration: Seconds) -> Scenario:
    """The same with its measuring phases at `duration`; warm-ups shrink along, so that they stay a small share."""

    def fit(phase: PhaseSpec) -> PhaseSpec:
        if phase.kind == "measure":
            return replace(phase, duration=duration)
        if phase.kind == "warmup" and phase.duration is not None:
            return replace(phase, duration=Seconds(min(phase.duration, duration * WARMUP_SHARE)))
        return phase

    return replace(scenario, phases=tuple(fit(phase) for phase in scenario.phases))


def dump(scenario: Scenario) -> str:
    """YAML that `load` reads back to an equal Scenario."""
    return yaml.safe_dump(strict.plain(scenario), sort_keys=False, allow_unicode=True, width=100)


def schema() -> Json:
    """The JSON schema of a scenario file, for editors."""
    result = strict.schema(Scenario)
    definition: Json = result["$defs"]["Scenario"]
    definition["properties"]["extends"] = {"type": "string", "description": "name or path of the scenario below this"}
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _read(path: Path) -> _Source:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"scenario {path}: cannot be read ({error})") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[strict.Path, str] = {}
        if node is not None:
            _index(node, (), path, lines)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{at}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a scenario is a mapping with at least classes and phases")
    return _Source(data, lines, str(path))


def _index(node: yaml.Node, path: strict.Path, file: Path, lines: dict[strict.Path, str]) -> None:
    """Remember where each key stands. YAML lets a key stand twice and silently drops the first: we do not."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here: strict.Path = (*path, str(key.value))
            where = f"{file}:{key.start_mark.line + 1}"
            if here in lines:
                raise UserError(f"{where}: {'.'.join(map(str, here))}: this key stands twice")
            lines[here] = where
            _index(value, here, file, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = f"{file}:{value.start_mark.line + 1}"
            _index(value, (*path, index), file, lines)


def _merge_chain(path: Path) -> _Source:
    chain = [_read(path)]
    while (below := chain[-1].data.pop("extends", None)) is not None:
        if len(chain) == MAX_EXTENDS:
            raise UserError(f"{path}: extends more than {MAX_EXTENDS} scenarios in a row: is it a loop?")
        chain.append(_read(find(str(below), Path(chain[-1].name).parent)))
    merged = chain.pop()
    for over in reversed(chain):
        merged.lines.update(over.lines)
        merged = _Source(_merge(merged.data, over.data), merged.lines, over.name)
    merged.data.setdefault("name", path.stem)
    return merged


def _merge(below: Any, over: Any) -> Any:
    if isinstance(below, dict) and isinstance(over, dict):
        return {key: _merge(below.get(key), over[key]) if key in over else below[key] for key in [*below, *over]}
    return over


def _override(source: _Source, text: str) -> None:
    """`classes.chat_short.weight=50`, `phases.measure.duration=2h`: a list's entry by index, a phase by its label."""
    path_text, equals, value_text = text.partition("=")
    keys = path_text.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f'--set {text}: write it as key=value, for example "--set concurrency=8"')
    try:
        value = yaml.safe_load(value_text)
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is not valid YAML") from None
    at: Any = source.data
    path: strict.Path = ()
    for key in keys[:-1]:
        step: str | int = _list_index(at, key, text) if isinstance(at, list) else key
        path = (*path, step)
        if isinstance(at, dict) and at.get(key) is None:
            at[key] = {}
        at = at[step]
        if not isinstance(at, (dict, list)):
            raise UserError(f"--set {text}: {'.'.join(map(str, path))} is a single value, nothing stands below it")
    last: str | int = _list_index(at, keys[-1], text) if isinstance(at, list) else keys[-1]
    at[last] = value
    source.lines[(*path, last)] = f"--set {path_text}"


def _list_index(entries: list[Any], key: str, text: str) -> int:
    labels = [str(e.get("name") or e.get("kind")) if isinstance(e, Mapping) else str(e) for e in entries]
    if key in labels:
        return labels.index(key)
    if key.isdigit() and int(key) < len(entries):
        return int(key)
    raise UserError(f'--set {text}: the list has no entry "{key}"{strict.nearest(key, labels)}')


# ---------------------------------------------------------------------------------------------------------------------
# Checking: what no type can say


def check(scenario: Scenario) -> None:
    """Raises StrictError at the first thing that cannot work."""
    if scenario.concurrency < 1:
        raise strict.StrictError(("concurrency",), "at least one seat is needed")
    _check_classes(scenario)
    _check_phases(scenario)
    secret = scenario.target.api_key
    if secret is not None and (secret.env is None) == (secret.file is None):
        raise strict.StrictError(("target", "api_key"), "say where the key is: {env: NAME} or {file: PATH}")
    _check_plugin("dialects", scenario.target.dialect, None, ("target", "dialect"))
    for name, mapping in scenario.monitors.items():
        _check_plugin("monitors", name, mapping, ("monitors", name))
    for name, mapping in scenario.rules.items():
        _check_plugin("rules", name, mapping, ("rules", name))
    known = plugins.names("rules")
    for key in ("require", "skip_rules"):
        for index, name in enumerate(getattr(scenario, key)):
            if name not in known:
                raise strict.StrictError((key, index), f'no rule is called "{name}"{strict.nearest(name, known)}')
    for index, text in enumerate(scenario.slo):
        _check_slo(scenario, text, ("slo", index))


def _check_classes(scenario: Scenario) -> None:
    if not scenario.classes:
        raise strict.StrictError((), "no classes: give at least one, such as `classes: {chat_short: {weight: 1}}`")
    reserved = 0
    for name, spec in scenario.classes.items():
        path: strict.Path = ("classes", name)
        if spec.weight < 0 or spec.seats < 0:
            raise strict.StrictError(path, "weight and seats cannot be negative")
        if spec.weight and spec.seats:
            raise strict.StrictError(path, "a class has a weight in the mix or seats of its own, not both")
        reserved += spec.seats
        _check_plugin("workloads", spec.workload or name, spec.options, (*path, "options"))
    if reserved > scenario.concurrency:
        message = f"the classes reserve {reserved} seats, but there are only {scenario.concurrency}"
        raise strict.StrictError(("concurrency",), message)
    mixed = sum(spec.weight for spec in scenario.classes.values())
    if mixed == 0 and reserved < scenario.concurrency:
        message = "the weights sum to nothing: give at least one class a weight above 0"
        raise strict.StrictError(("classes",), message)
    if mixed and reserved == scenario.concurrency:
        message = "every seat is reserved: none is left for the classes with a weight"
        raise strict.StrictError(("concurrency",), message)


def _check_phases(scenario: Scenario) -> None:
    if not scenario.phases:
        raise strict.StrictError((), "no phases: a scenario needs at least `phases: [{kind: measure, duration: 60s}]`")
    labels = [phase.label for phase in scenario.phases]
    for index, phase in enumerate(scenario.phases):
        path: strict.Path = ("phases", index)
        if labels.index(phase.label) != index:
            raise strict.StrictError(path, f'two phases are called "{phase.label}": give one of them a name')
        if ":" in phase.label or "/" in phase.label:
            raise strict.StrictError((*path, "name"), "a phase's name has no : and no /")
        if phase.count is not None and phase.count < 1:
            raise strict.StrictError((*path, "count"), "a count is at least 1")
        if phase.kind == "functional":
            if phase.duration is not None:
                raise strict.StrictError((*path, "duration"), "a functional phase has a `count` per class, no duration")
        elif not phase.duration and phase.count is None:
            raise strict.StrictError(path, f"a {phase.kind} phase needs a duration or a count")


def _check_plugin(kind: str, name: str, mapping: Json | None, path: strict.Path) -> None:
    try:
        module = plugins.load(kind, name)
    except UserError as error:
        raise strict.StrictError(path, str(error)) from None
    if mapping is not None:
        plugins.options(module, mapping, path)


def _check_slo(scenario: Scenario, text: str, path: strict.Path) -> None:
    from loadgen.rules import slo  # a rule is a plug-in: found when it is needed, not when we are imported

    try:
        goal = slo.parse_slo(text)
    except UserError as error:
        raise strict.StrictError(path, str(error)) from None
    if goal.cls is not None and goal.cls not in scenario.classes:
        message = f'no class is called "{goal.cls}"{strict.nearest(goal.cls, scenario.classes)}'
        raise strict.StrictError(path, message)


def mixed_weights(classes: Mapping[str, ClassSpec]) -> dict[str, float]:
    """The classes that share the common seats."""
    return {name: spec.weight for name, spec in classes.items() if spec.weight > 0}
