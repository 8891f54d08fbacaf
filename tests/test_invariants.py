"""The rules of the whole: who may import whom, read a clock, speak HTTP, await, or write into a run folder.

Read off the syntax trees of every file that we ship. A failure prints file:line and the rule that the line breaks.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from loadgen import plugins

ROOT = Path(__file__).parents[1]
PACKAGES = ("loadgen", "workloads", "monitors")

# Imports point down, or stay within a layer. A package stands for all of its modules.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"types"}),
    frozenset({"clock", "journal", "mix", "sse", "http1", "strict", "plugins", "scenario", "hist", "stats", "dialects",
               "rules", "secrets", "child", "address", "answer", "connect", "receive", "stencil", "exchange", "expect",
               "gate", "guard", "redact", "machine", "gpus", "served", "look", "sim"}),
    frozenset({"client", "record", "summary", "report", "verdict", "live"}),
    frozenset({"probe", "preflight", "fingerprint", "engine"}),
    frozenset({"shard", "supervise", "cluster", "selftest", "checks", "doctor"}),
    frozenset({"cli", "__main__"}),
)  # fmt: skip

HTTP_LIBRARIES = {"aiohttp", "httptools", "http.client", "urllib.request", "requests", "httpx"}
# client is cut into three files: the connection's bytes (exchange), their framing (http1), and itself.
HTTP_SPEAKERS = {"loadgen.client", "loadgen.exchange", "loadgen.http1", "loadgen.sim", "monitors.docker",
                 "monitors.engine", "monitors.logs"}  # fmt: skip

# Of the module `time`, all but these read a clock.
CLOCKLESS = {"sleep", "struct_time"}

SYNCHRONOUS = {"loadgen.types", "loadgen.clock", "loadgen.journal", "loadgen.mix", "loadgen.sse", "loadgen.http1",
               "loadgen.scenario", "loadgen.hist", "loadgen.stats", "loadgen.dialects", "loadgen.rules",
               "loadgen.record", "loadgen.verdict", "loadgen.summary", "loadgen.report", "loadgen.sim.model",
               "workloads"}  # fmt: skip

STANDARD_LIBRARY_ONLY = {"loadgen", "loadgen.types", "loadgen.clock", "loadgen.journal", "loadgen.guard", "monitors"}

# record and journal write what a run is; child keeps what a process says on stderr; the simulated server has files
# of its own, outside of any run folder; harden asks the kernel for a score.
WRITERS = {"loadgen.record", "loadgen.journal", "loadgen.child", "loadgen.sim", "monitors.harden"}

# What makes a file a plug-in, by package.
PLUGIN_FUNCTION = dict(plugins.KINDS.values())


@dataclass(frozen=True)
class Import:
    """One imported name. `typing` imports stand under TYPE_CHECKING and do not exist at run time."""

    line: int
    module: str
    typing: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    def at(self, line: int, rule: str) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}: {rule}"

    def is_in(self, names: set[str]) -> bool:
        """Is it one of the modules, or inside one of the packages?"""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


@cache
def modules() -> dict[str, Module]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    return found


def imports(module: Module) -> Iterator[Import]:
    """All imports, those inside functions too."""
    typing_only = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        typing = id(node) in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, typing)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, module.at(node.lineno, "imports are absolute")
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"  # `from package import module` names the module
                yield Import(node.lineno, inner if inner in modules() else str(node.module), typing)


def project_imports(module: Module) -> Iterator[Import]:
    return (each for each in imports(module) if not each.typing and each.module in modules())


def layer(name: str) -> int | None:
    """The layer of a module; None for `loadgen` itself. What we ask and what we watch know the lowest two."""
    parts = name.split(".")
    if parts[0] != "loadgen":
        return 1
    if len(parts) == 1:
        return None
    return next((number for number, names in enumerate(LAYERS) if parts[1] in names), None)


def is_plugin(module: Module) -> bool:
    wanted = PLUGIN_FUNCTION.get(module.name.rpartition(".")[0])
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == wanted
               for node in module.tree.body)  # fmt: skip


def calls(module: Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))


def report(broken: list[str]) -> None:
    assert not broken, "\n" + "\n".join(broken)


def test_every_module_says_in_its_first_line_what_it_is_for() -> None:
    report([
        module.at(1, "no docstring")
        for module in modules().values()
        if not ast.get_docstring(module.tree) and module.tree.body
    ])  # fmt: skip


def test_every_module_of_loadgen_has_its_layer() -> None:
    report([
        module.at(1, "in no layer of tests/test_invariants.py")
        for name, module in modules().items()
        if name.startswith("loadgen.") and layer(name) is None
    ])  # fmt: skip


def test_imports_point_down() -> None:
    broken = []
    for name, module in modules().items():
        for each in project_imports(module):
            mine, theirs = layer(name), layer(each.module)
            if mine is not None and theirs is not None and theirs > mine:
                broken.append(module.at(each.line, f"imports {each.module}, which stands above it"))
    report(broken)


def test_imports_are_acyclic() -> None:
    graph = {
        name: {each.module for each in project_imports(module) if not name.startswith(f"{each.module}.")}
        for name, module in modules().items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"imports go in a circle: {' → '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_nothing_in_loadgen_names_a_workload_or_a_monitor() -> None:
    """They are loaded by name. Parts that several of them share (words, lengths) are no plug-ins and may be named."""
    report([
        module.at(each.line, f"names the plug-in {each.module}")
        for name, module in modules().items()
        if name.startswith("loadgen")
        for each in imports(module)
        if each.module.split(".")[0] in {"workloads", "monitors"}
        and each.module in modules()
        and is_plugin(modules()[each.module])
    ])  # fmt: skip


def test_only_the_client_and_http_monitors_speak_http() -> None:
    report([
        module.at(each.line, f"imports {each.module}")
        for module in modules().values()
        if not module.is_in(HTTP_SPEAKERS)
        for each in imports(module)
        if not each.typing and (each.module in HTTP_LIBRARIES or each.module.split(".")[0] in HTTP_LIBRARIES)
    ])  # fmt: skip


def reads_a_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and not {alias.name for alias in node.names} <= CLOCKLESS
    if not isinstance(node, ast.Attribute):
        return False
    owner = ast.unparse(node.value)
    if owner == "time":
        return node.attr not in CLOCKLESS and not node.attr.startswith("CLOCK_")
    if owner in {"datetime", "datetime.datetime", "date", "datetime.date"}:
        return node.attr in {"now", "utcnow", "today"}
    return node.attr == "time" and owner.endswith(("loop", "loop()"))


def test_only_clock_reads_a_clock() -> None:
    report([
        module.at(getattr(node, "lineno", 0), "reads a clock itself; loadgen.clock does that")
        for module in modules().values()
        if module.name != "loadgen.clock"
        for node in ast.walk(module.tree)
        if reads_a_clock(node)
    ])  # fmt: skip


def test_no_async_where_nothing_is_waited_for() -> None:
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    report([
        module.at(getattr(node, "lineno", 0), "async in a module that decides and does not wait")
        for module in modules().values()
        if module.is_in(SYNCHRONOUS)
        for node in ast.walk(module.tree)
        if isinstance(node, waiting)
    ])  # fmt: skip


def is_fast(module: Module) -> bool:
    """A monitor of the fast lane, or the lane's own loop."""
    return module.name == "monitors.lane" or any(
        ast.unparse(node).startswith(("LANE: Lane = 'fast'", "LANE = 'fast'")) for node in module.tree.body
    )


def test_the_vocabulary_and_the_fast_lane_import_the_standard_library_only() -> None:
    allowed = sys.stdlib_module_names | set(PACKAGES)
    report([
        module.at(each.line, f"imports {each.module}, which is not in the standard library")
        for name, module in modules().items()
        if name in STANDARD_LIBRARY_ONLY or is_fast(module)
        for each in imports(module)
        if not each.typing and each.module.split(".")[0] not in allowed
    ])  # fmt: skip


def test_the_vocabulary_and_the_fast_lane_start_without_any_installed_package() -> None:
    """The same for what they import in turn: an interpreter without site-packages must do."""
    names = sorted(name for name, module in modules().items() if name in STANDARD_LIBRARY_ONLY or is_fast(module))
    assert "monitors.host" in names
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport {', '.join(names)}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def writes_a_file(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name == "os.open":
        return any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR")) and "os.devnull" not in ast.unparse(
            call
        )
    if name == "open" or name.endswith(".open"):
        mode = call.args[1:2] if name == "open" else call.args[:1]
        modes = [*mode, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        return any(isinstance(each, ast.Constant) and set(str(each.value)) & set("wax+") for each in modes)
    owner, _, method = name.rpartition(".")
    return method in {"write_text", "write_bytes"} and owner not in {"", "record"}


def test_only_record_writes_files() -> None:
    report([
        module.at(call.lineno, "writes a file; what a run leaves is written by loadgen.record")
        for module in modules().values()
        if not module.is_in(WRITERS)
        for call in calls(module)
        if writes_a_file(call)
    ])  # fmt: skip


def node_of(code: str) -> ast.AST:
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


@pytest.mark.parametrize(
    "code", ["time.monotonic_ns", "time.time", "from time import perf_counter", "datetime.now", "loop.time"]
)
def test_the_clock_rule_sees(code: str) -> None:
    assert reads_a_clock(node_of(code))


@pytest.mark.parametrize("code", ["time.sleep", "time.CLOCK_REALTIME", "from time import sleep", "outcome.time"])
def test_the_clock_rule_leaves_alone(code: str) -> None:
    assert not reads_a_clock(node_of(code))


@pytest.mark.parametrize(
    "code",
    ["open(p, 'a')", "p.open('wb')", "p.open(mode='w')", "p.write_text(t)", "(f / 'x').write_bytes(b)",
     "os.open(p, os.O_RDWR | os.O_CREAT)"],
)  # fmt: skip
def test_the_writing_rule_sees(code: str) -> None:
    call = node_of(code)
    assert isinstance(call, ast.Call)
    assert writes_a_file(call)


@pytest.mark.parametrize("code", ["open(p)", "p.open('rb')", "record.write_text(f, n, t)", "os.open(p, os.O_RDONLY)"])
def test_the_writing_rule_leaves_alone(code: str) -> None:
    call = node_of(code)
    assert isinstance(call, ast.Call)
    assert not writes_a_file(call)


def test_every_plugin_has_its_parts() -> None:
    """A docstring, `Options` as a frozen slotted dataclass whose every field has a default, and its one function."""
    broken = []
    for module in modules().values():
        if not is_plugin(module) or module.name.rpartition(".")[0] == "loadgen.dialects":
            continue  # dialects have no options: what they may differ in is in the target
        if module.name.startswith("workloads.graders."):
            continue  # nor have graders: what they compare with is in the request
        options = [node for node in module.tree.body if isinstance(node, ast.ClassDef) and node.name == "Options"]
        if not options:
            broken.append(module.at(1, "a plug-in without Options"))
            continue
        (options_,) = options
        decorators = " ".join(ast.unparse(decorator) for decorator in options_.decorator_list)
        if not ("dataclass" in decorators and "frozen=True" in decorators and "slots=True" in decorators):
            broken.append(module.at(options_.lineno, "Options is @dataclass(frozen=True, slots=True)"))
        broken += [
            module.at(field.lineno, "an option without a default")
            for field in options_.body
            if isinstance(field, ast.AnnAssign) and field.value is None
        ]
    report(broken)


def test_evidence_and_tests_are_no_packages() -> None:
    assert [str(path) for folder in ("runs", "tests") for path in (ROOT / folder).rglob("__init__.py")] == []


def test_the_top_level_is_what_it_should_be() -> None:
    """Five folders, and nothing besides what a Python project needs. What git ignores does not count."""
    ours = {"loadgen", "workloads", "monitors", "tests", "runs"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert folders - {"build", "dist"} == ours
