"""`loadgen doctor`: what can be seen on this machine and as this user, what serves, and what would spoil a run.

It assembles: the machine's files, one look by all monitors as a run would start them, a tiny generation, what the GPU's
driver says. `checks` grades what was found. Everything is bounded; nothing is changed.

Exit code 0: a run could be trusted. 1: a problem would make its verdict partial or impossible (`checks` says what
counts as one). 3: usage.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen import checks, clock, gpus, machine, plugins, preflight, redact, served, strict
from loadgen.checks import GRADES, Check, Grade
from loadgen.client import Client
from loadgen.look import HARDENED, Seen, look
from loadgen.machine import Busy, Machine, Volume
from loadgen.preflight import Facts
from loadgen.served import Served
from loadgen.types import Json, Limits, NotReadyError, Scenario, Seconds, Target, UserError
from monitors import server as place

SCHEMA = "loadgen.doctor/1"
# A first generation may load a model or compile kernels; who waits longer for a diagnosis thinks that it hangs.
LIMITS = Limits(Seconds(5), Seconds(60), Seconds(60), Seconds(60), Seconds(60))
ASK_S = 0.5  # one unknown listener, and it is on this machine
MAX_LISTENERS = 64  # a desktop has two dozen
AT_ONCE = 8
# These have nothing to see without a server.
OF_A_SERVER = frozenset({"process", "smaps", "cgroup", "engine", "docker", "systemd", "logs"})

MARKS: dict[Grade, tuple[str, str]] = {"problem": ("✗", "bold red"), "note": ("!", "yellow"), "ok": ("✓", "green")}
TITLES: dict[Grade, str] = {"problem": "problems", "note": "notes", "ok": "ok"}
NAME_COLUMNS = 14
# Rows that are told in full even when they are in order: who is under test.
WHOLE = frozenset({"server", "found", "gpu"})


@dataclass(frozen=True, slots=True)
class Listener:
    """A server that answers /v1/models on loopback."""

    url: str
    process: str
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found. `listeners` None: a URL was given, nobody searched."""

    url: str | None
    checks: tuple[Check, ...]
    machine: Machine
    volume: Volume | None
    gpus: Json
    facts: Facts | None = None
    served: Served | None = None
    monitors: dict[str, Seen] = field(default_factory=dict)
    busy: tuple[Busy, ...] = ()
    listeners: tuple[Listener, ...] | None = None

    @property
    def exit_code(self) -> int:
        return 1 if any(check.grade == "problem" for check in self.checks) else 0


def examine(
    target: Target | None, headers: Mapping[str, str], *, root: str = "/", out: Path = Path("runs")
) -> Diagnosis:
    """Look at the machine, and at the server where there is a target. Takes 2 s, and at most a minute when it waits for
    a first token. Raises UserError where the target is wrong (its key, its model, no such API)."""
    tree = Path(root)
    if not (tree / "proc").is_dir():
        raise UserError(f"--root {root}: not a file tree of a machine (no proc in it)")
    found = machine.read(tree)
    proc = place.tree(root) / "proc"
    wall = clock.WallOffset()
    before, began_ns = machine.ticks(proc), clock.now_ns()
    with ThreadPoolExecutor(1) as pool:
        asked_gpus = pool.submit(_gpus, tree)
        facts, why = asyncio.run(_ask(target, headers)) if target is not None else (None, "")
        wanted = [name for name in plugins.names("monitors") if target is not None or name not in OF_A_SERVER]
        url = target.url if target is not None else ""
        seen = look({name: {} for name in wanted}, url, headers, root=root)
        granted = seen.pop(HARDENED)
        process, hidden = served.find(url, tree, hashed=False) if target is not None else (None, "")
        family = _family(root, process)
        elapsed_s = (clock.now_ns() - began_ns) / 1e9
        busy = machine.busiest(before, machine.ticks(proc), elapsed_s, family | _ourselves(proc))
        driver = asked_gpus.result()
    wall.look()
    volume = machine.volume(out, tree)
    listeners = asyncio.run(_listening(tree)) if target is None else None
    rows: list[Check | None] = []
    if target is not None:
        rows += [checks.server(facts, why), checks.load(facts), checks.found(process, hidden),
                 checks.restart_policy(process, seen)]  # fmt: skip
    rows += [
        *checks.monitors(seen, found),
        checks.machine_(found), checks.memory(found), checks.swap(found), checks.memory_killers(found),
        checks.sysctls(found), checks.huge_pages(found), checks.pressure(found),
        checks.gpu(driver, found), checks.others_on_gpu(driver, family),
        checks.others_on_cpu(busy, found.cpus), checks.clock(found, wall.steps), checks.clock_source(found),
        checks.run_folder(volume), checks.limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _ports(found)),
        checks.hardening(granted),
    ]  # fmt: skip
    kept = sorted((row for row in rows if row is not None), key=lambda row: GRADES.index(row.grade))
    return Diagnosis(
        redact.url(target.url) if target is not None else None,
        tuple(kept), found, volume, driver, facts, process, seen,
        tuple(each for each in busy if each.cpu_percent > checks.BUSY_PERCENT), listeners,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Asking


async def _ask(target: Target, headers: Mapping[str, str]) -> tuple[Facts | None, str]:
    """What the server says of itself, or why it does not."""
    scene = Scenario("doctor", target=target)

    def connect(to: Target, model: str) -> Client:
        dialect = plugins.load("dialects", to.dialect)
        return Client(to, LIMITS, dialect, model=model, headers=headers, connections=1)

    try:
        return await preflight.ready(scene, connect, 0.0, lambda _text: None), ""
    except NotReadyError as error:
        return None, str(error)


async def _listening(tree: Path) -> tuple[Listener, ...]:
    """Servers of this machine that answer /v1/models on loopback: of sockets that we may see, each asked once."""
    found = served.listeners(tree)[:MAX_LISTENERS]
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(port: int, host: str, stat: place.Stat) -> Listener | None:
        url = f"http://{host}:{port}"
        async with gate:
            limits = Limits(*[Seconds(ASK_S)] * 5)
            client = Client(
                Target(url), limits, plugins.load("dialects", "openai_chat"), model="", headers={}, connections=1
            )
            try:
                async with asyncio.timeout(2 * ASK_S):
                    answer = await client.get_json("/v1/models", ASK_S)
                models = tuple(str(entry["id"]) for entry in answer["data"])
            except UserError as error:
                # a key is wanted: it is such a server all the same
                return Listener(url, stat.name, ()) if "--api-key" in str(error) else None
            except (TimeoutError, LookupError, TypeError, ValueError):
                return None
            finally:
                await client.close()
            return Listener(url, stat.name, models)

    answers = await asyncio.gather(*(ask(*each) for each in found))
    return tuple(answer for answer in answers if answer is not None)


def _gpus(tree: Path) -> Json:
    if tree != Path("/"):
        return {"not_read": "the tree is not this machine's, the driver would be"}
    return gpus.ask()


def _family(root: str, process: Served | None) -> set[int]:
    """The server's whole tree, as the monitor `process` sees it."""
    if process is None:
        return set()
    watcher = plugins.load("monitors", "process").watch(
        plugins.load("monitors", "process").Options(root=root, pid=process.pid)
    )
    try:
        return {int(sample.labels["pid"]) for sample in next(watcher) if "pid" in sample.labels}
    finally:
        watcher.close()


def _ourselves(proc: Path) -> set[int]:
    """This process, all above it, and its children."""
    own = os.getpid()
    above: set[int] = plugins.load("monitors", "process").ancestors(proc, own)
    below = {pid for pid in place.pids(proc) if (stat := place.stat_of(proc, pid)) and stat.parent == own}
    return above | below


def _ports(found: Machine) -> int | None:
    words = found.sysctl.get("net.ipv4.ip_local_port_range", "").split()
    return int(words[1]) - int(words[0]) + 1 if len(words) == 2 else None


# ---------------------------------------------------------------------------------------------------------------------
# Telling


def document(found: Diagnosis) -> Json:
    """The same as the screen, for programs. Names are a promise; what is not known is absent."""
    known: Json = {
        "schema": SCHEMA,
        "at": clock.utc(clock.wall_ns() / 1e9),
        "url": found.url,
        "exit_code": found.exit_code,
        "counts": {TITLES[grade]: _count(found, grade) for grade in GRADES},
        "checks": [strict.plain(check) for check in found.checks],
        "monitors": {name: _said(seen) for name, seen in found.monitors.items()},
        "machine": strict.plain(found.machine),
        "gpus": found.gpus,
        "run_folder": None if found.volume is None else strict.plain(found.volume),
        "server": None if found.facts is None else strict.plain(found.facts),
        "process": None if found.served is None else strict.plain(found.served),
        "busy": strict.plain(found.busy),
        "listeners": None if found.listeners is None else strict.plain(found.listeners),
    }  # fmt: skip
    return {key: value for key, value in known.items() if value is not None}


def _said(seen: Seen) -> Json:
    said: Json = {"observed": seen.observed, "text": seen.text, "labels": seen.labels}
    return {key: value for key, value in said.items() if value not in (None, "", {})}


def screen(found: Diagnosis, width: int) -> RenderableType:
    """One screen: problems first, each with what to do."""
    head = Text.assemble(
        ("loadgen doctor", "bold"), f" · {found.url or 'this machine'} · ", *_counts(found),
    )  # fmt: skip
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=NAME_COLUMNS, no_wrap=True)
    table.add_column(width=max(20, width - NAME_COLUMNS - 4), overflow="fold")
    for check in found.checks:
        mark, style = MARKS[check.grade]
        said = Text(_short(check.name, check.text, check.grade, width))
        if check.remedy and check.grade != "ok":
            said.append(f"\n→ {check.remedy}", "cyan")
        table.add_row(Text(mark, style), Text(check.name, "bold" if check.grade == "problem" else ""), said)
    rows: list[RenderableType] = [head, table]
    for each in found.listeners or ():
        what = ", ".join(each.models) or "wants a key"
        rows.append(Text(f"serves here: {each.url} ({each.process}): {what} → loadgen doctor {each.url}"))
    if found.listeners == ():
        rows.append(Text("no server that answers /v1/models listens on this machine → loadgen doctor URL"))
    return Group(*rows)


def _counts(found: Diagnosis) -> list[tuple[str, str]]:
    said: list[tuple[str, str]] = []
    for grade in GRADES:
        count = _count(found, grade)
        word = TITLES[grade] if count != 1 or grade == "ok" else TITLES[grade].removesuffix("s")
        said.append((f"{', ' if said else ''}{count} {word}", MARKS[grade][1] if count else ""))
    return said


def _count(found: Diagnosis, grade: Grade) -> int:
    return sum(check.grade == grade for check in found.checks)


def _short(name: str, text: str, grade: Grade, width: int) -> str:
    """What is in order gets one line, so that the whole stays one screen."""
    columns = max(20, width - NAME_COLUMNS - 4)
    return (
        text if grade != "ok" or name in WHOLE else text if len(text) <= columns else f"{text[: columns - 1].rstrip()}…"
    )
