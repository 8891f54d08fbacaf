"""One run from start to verdict: run folder, preflight, monitor lanes, engine shards, signals, judgement.

The supervisor sends no load and measures nothing. It starts processes that share only the run folder with it and with
each other, shows what they write, passes signals on, and judges when they are done or dead.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import orjson

from loadgen import child, clock, fingerprint, plugins, preflight, scenario, secrets, strict, verdict
from loadgen.client import Client
from loadgen.live import Progress
from loadgen.record import Journal, write_json, write_text
from loadgen.types import Lane, Scenario, UserError, Verdict

LANES: tuple[Lane, ...] = ("fast", "gpu", "slow")
# The monitors of a scenario that names none.
DEFAULT_MONITORS = ("host", "process", "kernel", "nvidia", "engine")
# How often the view looks and children are polled.
LOOK_S = 0.25
# Monitors look at the idle machine this long before the first request: what is "normal" is read off here.
IDLE_S = 2.0
# After the second signal everything is gone within this.
HURRY_S = 2.0
# Lanes flush and leave within this.
LANE_END_S = 3.0
# A run folder is not begun on a disk with less free space than this: an hour of a busy soak takes a few MB.
MIN_FREE_BYTES = 64 << 20
HEADERS_ENV = "LOADGEN_TARGET_HEADERS"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class View(Protocol):
    """Whoever shows the run. `say` is for one-off lines, `show` is called every LOOK_S."""

    def say(self, text: str) -> None: ...
    def show(self, progress: Progress) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run a scenario, besides what the scenario says."""

    out: Path
    shards: int = 1
    wait_s: float = 0.0
    busy_ok: bool = False
    monitor_root: str = "/"
    argv: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Signals:
    """Which signals came, in order. A handler that only notes: the loop acts."""

    came: list[int] = field(default_factory=list)

    def note(self, number: int, _frame: object) -> None:
        self.came.append(number)


def run(scene: Scenario, plan: Plan, view: View) -> tuple[Path, Verdict]:
    """Raises UserError or NotReadyError before any load is sent; after that there is always a verdict."""
    headers = secrets.headers(scene.target)
    scene = replace(scene, salt=scene.salt or os.urandom(4).hex())
    if not scene.monitors:
        scene = replace(scene, monitors={name: {} for name in DEFAULT_MONITORS})
    folder = make_folder(plan.out, scene.name)
    try:
        facts = asyncio.run(_preflight(scene, headers, plan, view))
    except BaseException:
        shutil.rmtree(folder)  # made a moment ago and still empty
        raise
    scene = facts.scenario
    write_text(folder, "scenario.yaml", scenario.dump(scene))
    write_json(folder, "environment.json", fingerprint.environment(facts.facts, plan.argv))
    journal = Journal(folder, "supervise")
    try:
        _tell(facts, journal, view)
        with _noting_signals() as signals:
            reason = _attend(scene, plan, folder, journal, headers, view, signals)
        journal.event("run_end", reason=reason)
    finally:
        journal.close()
    _drop_empty(folder)
    return folder, verdict.judge(folder)


def make_folder(out: Path, name: str) -> Path:
    """A new folder for a run. Raises UserError where it cannot be written."""
    folder = out / f"{clock.utc_stamp()}-{name}"
    try:
        number = 1
        while folder.exists():
            number += 1
            folder = out / f"{clock.utc_stamp()}-{name}-{number}"
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(f"--out {out}: no run folder can be made there ({error.strerror})") from None
    if free < MIN_FREE_BYTES:
        folder.rmdir()
        raise UserError(f"--out {out}: only {free >> 20} MiB are free there; a run needs {MIN_FREE_BYTES >> 20} MiB")
    return folder


async def _preflight(scene: Scenario, headers: dict[str, str], plan: Plan, view: View) -> preflight.Preflight:
    dialect = plugins.load("dialects", scene.target.dialect)

    def connect(model: str) -> Client:
        return Client(scene.target, scene.limits, dialect, model=model, headers=headers, connections=1)

    return await preflight.examine(scene, connect, wait_s=plan.wait_s, busy_ok=plan.busy_ok, say=view.say)


def _tell(found: preflight.Preflight, journal: Journal, view: View) -> None:
    """What preflight learnt, into the journal and to the user."""
    facts, scene = found.facts, found.scenario
    journal.event("run_start", scenario=scene.name, concurrency=scene.concurrency, seed=scene.seed, salt=scene.salt)
    journal.event("preflight", **{key: value for key, value in strict.plain(facts).items() if value})
    context = f"context {facts.context_tokens}" if facts.context_tokens else "context not told"
    slots = f", {facts.slots} slots" if facts.slots else ""
    engine = " ".join(filter(None, (facts.engine or "server", facts.version)))
    view.say(f"{engine} serves {facts.model}: {context}{slots}")
    if facts.lengths != "exact":
        view.say(f"prompt lengths are {facts.lengths}")
    if facts.slots is not None and facts.slots < scene.concurrency:
        view.say(f"{scene.concurrency - facts.slots} of {scene.concurrency} seats will queue on the server")
    for change in found.changes:
        if change.got is None:
            journal.event("class_left_out", cls=change.cls, why=change.why, when="preflight")
            view.say(f"{change.cls} is left out: {change.why}")
        else:
            journal.event("class_shrunk", cls=change.cls, option="prompt_tokens", asked=change.asked, got=change.got)
            view.say(f"{change.cls} is shrunk from {change.asked} to {change.got} prompt tokens: {change.why}")


@contextmanager
def _noting_signals() -> Iterator[_Signals]:
    signals = _Signals()
    before = {number: signal.signal(number, signals.note) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _attend(
    scene: Scenario, plan: Plan, folder: Path, journal: Journal, headers: dict[str, str], view: View, signals: _Signals
) -> str:
    """Start everything, watch it, stop it. Returns the reason of the end."""
    progress = Progress(folder)
    lanes = {lane: _start_lane(lane, scene, plan, folder, headers) for lane in LANES}
    for lane, process in lanes.items():
        journal.event("lane_start", lane=lane, pid=process.pid)
    shards: dict[str, subprocess.Popen[bytes]] = {}
    try:
        _look_for(IDLE_S, progress, view, signals)
        if not signals.came:
            for number in range(plan.shards):
                args = [str(folder), "--shard", str(number), "--shards", str(plan.shards)]
                shards[str(number)] = child.spawn("loadgen.shard", args, folder / f"stderr-shard-{number}.txt")
                journal.event("shard_start", shard=number, pid=shards[str(number)].pid)
        _watch(shards, lanes, progress, journal, view, signals)
    finally:
        child.end(list(shards.values()), HURRY_S)
        child.end(list(lanes.values()), LANE_END_S)
    for lane, process in lanes.items():
        if process.returncode not in (0, -signal.SIGTERM):
            journal.event(
                "lane_exit", lane=lane, rc=process.returncode, text=_last_words(folder / f"stderr-{lane}.txt")
            )
    if signals.came:
        return "signal"
    return "done" if all(process.returncode == 0 for process in shards.values()) else "broken"


def _start_lane(
    lane: Lane, scene: Scenario, plan: Plan, folder: Path, headers: dict[str, str]
) -> subprocess.Popen[bytes]:
    config = {
        "monitors": scene.monitors,
        "root": plan.monitor_root,
        "target_url": scene.target.url,
        "headers_env": HEADERS_ENV,
        "parent_pid": os.getpid(),
    }
    env = {HEADERS_ENV: orjson.dumps(headers).decode()} if lane == "slow" else {}
    args = [lane, str(folder), orjson.dumps(config).decode()]
    return child.spawn("monitors.lane", args, folder / f"stderr-{lane}.txt", env)


def _look_for(seconds: float, progress: Progress, view: View, signals: _Signals) -> None:
    end_ns = clock.now_ns() + round(seconds * 1e9)
    while clock.now_ns() < end_ns and not signals.came:
        progress.look()
        view.show(progress)
        time.sleep(LOOK_S)


def _watch(
    shards: dict[str, subprocess.Popen[bytes]],
    lanes: dict[Lane, subprocess.Popen[bytes]],
    progress: Progress,
    journal: Journal,
    view: View,
    signals: _Signals,
) -> None:
    """Until every shard is over: look, show, pass signals on. After a second signal, at most HURRY_S longer."""
    passed = 0
    hurry_ns: int | None = None
    told: set[str] = set()
    while any(process.poll() is None for process in shards.values()):
        progress.look()
        view.show(progress)
        for number in signals.came[passed : passed + 1]:
            journal.event("signal", name=signal.Signals(number).name)
            for process in shards.values():
                if process.poll() is None:
                    process.terminate()
            passed += 1
            if passed == 2:
                hurry_ns = clock.now_ns() + round((HURRY_S - 2 * LOOK_S) * 1e9)
        if hurry_ns is not None and clock.now_ns() > hurry_ns:
            break
        for lane, process in lanes.items():
            if lane not in told and process.poll() is not None:
                told.add(lane)
                text = _last_words(progress.folder / f"stderr-{lane}.txt")
                journal.event("lane_exit", lane=lane, rc=process.returncode, text=text)
        time.sleep(LOOK_S)
    for number in signals.came[passed:]:
        journal.event("signal", name=signal.Signals(number).name)
    for name, process in shards.items():
        if process.poll() is not None:
            text = _last_words(progress.folder / f"stderr-shard-{name}.txt")
            journal.event("shard_exit", shard=int(name), rc=process.returncode, text=text)
    progress.look()
    view.show(progress)


def follow(folder: Path, view: View) -> None:
    """Show a run that others run, until it ends or the watcher leaves."""
    progress = Progress(folder)
    while not progress.ended:
        progress.look()
        view.show(progress)
        time.sleep(LOOK_S)


def _last_words(path: Path) -> str | None:
    """The last line that a child wrote to stderr."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return None
    return lines[-1][:500] if lines else None


def _drop_empty(folder: Path) -> None:
    for path in folder.glob("stderr-*.txt"):
        if path.stat().st_size == 0:
            path.unlink()
