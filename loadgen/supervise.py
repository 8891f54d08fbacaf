"""One run from start to verdict: run folder, preflight, monitor lanes, engine shards, signals, judgement.

The supervisor sends no load and measures nothing. It starts processes that share only the run folder with it and with
each other, says to several shards when a phase begins, shows what they write, passes signals on, and judges when they
are done or dead. A shard that dies is named and never replaced: its load, moved elsewhere, would be another test.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import orjson

from loadgen import child, clock, fingerprint, plugins, preflight, scenario, secrets, strict, verdict
from loadgen.client import Client
from loadgen.gate import Barrier, Crew, Exit, Shard, Start, guard_line, parsed
from loadgen.guard import WORDS, Level, S, Word
from loadgen.live import Progress
from loadgen.record import Journal, write_json, write_text
from loadgen.rules import on_this_host
from loadgen.types import Guards, Json, Lane, Scenario, Target, UserError, Verdict
from monitors import server

# What the fast lane is told when the load begins.
ARM = b"load\n"
LANES: tuple[Lane, ...] = ("fast", "gpu", "slow")
# How often the guard is told when the server last answered well: what ends the boot of a server that began anew.
SERVED_EVERY_NS = 1_000_000_000
# What the user's command to stop a server may still take when the run is over: containers are killed after 10 s.
STOP_COMMAND_S = 30.0
# The monitors of a scenario that names none.
DEFAULT_MONITORS = ("host", "process", "cgroup", "kernel", "nvidia", "engine", "disk")
# How often the view looks and children are polled.
LOOK_S = 0.25
# Monitors look at the idle machine this long before the first request: what is "normal" is read off here.
IDLE_S = 2.0
# Before a long run they look longer: the guard's floors are shares of what they see (notes on monitors: 60 s).
LONG_RUN_S, LONG_IDLE_S = 600.0, 60.0
# After the second signal everything is gone within this.
HURRY_S = 2.0
# Lanes flush and leave within this.
LANE_END_S = 3.0
# A run folder is not begun on a disk with less free space than this: an hour of a busy soak takes a few MB.
MIN_FREE_BYTES = 64 << 20
# What the default monitors write on a calm machine (`make bench-monitors`); said before a run of LONG_S or more.
SAMPLE_BYTES_PER_S = 4_800
LONG_S = 3600.0
# Between the last READY and the start of a phase: two looks of a shard at its pipe on a busy box.
LEAD_S = 0.5
# A shard that has not said READY by then (imports take 1 s on an idle core) will not.
READY_S = 60.0
# Streams that one engine carries on one core with room to spare (notes on performance: 256 to 512).
SEATS_PER_SHARD = 256
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class View(Protocol):
    """Whoever shows the run. `say` is for one-off lines, `show` is called every LOOK_S."""

    def say(self, text: str) -> None: ...
    def show(self, progress: Progress) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run a scenario, besides what the scenario says. `shards` None: as many as its seats need; `ray`: the
    address of a Ray cluster that runs them, or `local`; None: processes of this machine."""

    out: Path
    shards: int | None = 1
    ray: str | None = None
    wait_s: float = 0.0
    busy_ok: bool = False
    monitor_root: str = "/"
    argv: list[str] = field(default_factory=list)


class _LocalShard:
    def __init__(self, number: int, process: subprocess.Popen[bytes], stderr: Path) -> None:
        self.number, self.process, self.stderr = number, process, stderr
        self.about: Json = {"pid": process.pid}
        self.talk = child.Talk(process)
        self.why: str | None = None

    def heard(self) -> list[bytes]:
        return self.talk.heard()

    def begin(self, start: Start) -> None:
        self.talk.tell(start.line())

    def guard(self, word: Word) -> None:
        self.talk.tell(guard_line(word))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()

    def lose(self, why: str) -> None:
        self.why = why
        self.process.kill()

    def exit(self) -> Exit | None:
        rc = self.process.poll()
        return None if rc is None else Exit(rc, self.why or child.last_words(self.stderr))


class _Processes:
    """Shards as processes of this machine. One alone starts at once; several are told when."""

    lead_s = LEAD_S
    machines = 1

    def __init__(self) -> None:
        self.shards: list[_LocalShard] = []

    def start(self, folder: Path, shards: int, headers: dict[str, str]) -> Sequence[Shard]:
        env = {secrets.HANDED_ON: orjson.dumps(headers).decode()}
        for number in range(shards):
            args = [str(folder), "--shard", str(number), "--shards", str(shards)]
            args += ["--gated"] if shards > 1 else ["--heeds"]
            stderr = folder / f"stderr-shard-{number}.txt"
            process = child.spawn("loadgen.shard", args, stderr, env, talks=True)
            self.shards.append(_LocalShard(number, process, stderr))
        return self.shards

    def end(self, wait_s: float) -> None:
        child.end([shard.process for shard in self.shards], wait_s)
        for shard in self.shards:
            shard.talk.close()


@dataclass(slots=True)
class _Signals:
    """Which signals came, in order. A handler that only notes: the loop acts."""

    came: list[int] = field(default_factory=list)

    def note(self, number: int, _frame: object) -> None:
        self.came.append(number)


class _Guard:
    """The supervisor's end of the guard: hears its levels from the fast lane, passes them on to the shards."""

    def __init__(self, options: Guards, lane: subprocess.Popen[bytes], journal: Journal, view: View) -> None:
        self.options, self.journal, self.view = options, journal, view
        self.talk = child.Talk(lane)
        self.pipe = lane.stdout
        self.held_ns: int | None = None
        self.ended = False
        self.stopping: subprocess.Popen[bytes] | None = None
        self.told_ns = 0

    def arm(self) -> None:
        """The load begins: what memory was until now is its baseline."""
        self.talk.tell(ARM)

    def served(self, at_ns: int | None) -> None:
        """The server last gave a good answer then."""
        if at_ns is not None and at_ns - self.told_ns > SERVED_EVERY_NS:
            self.told_ns = at_ns
            self.talk.tell(b"served %d\n" % at_ns)

    def wait(self, seconds: float) -> None:
        """Until the next look, or until the lane says something."""
        if self.pipe is None:
            time.sleep(seconds)
        else:
            select.select([self.pipe], [], [], seconds)

    def attend(self, shards: Sequence[Shard]) -> None:
        """Does what the guard said since the last call, and ends a hold that lasts too long."""
        for line in self.talk.heard():
            said = parsed(line)
            if said.get("guard") in WORDS and not self.ended:
                self._enter(said["guard"], str(said.get("why", "")), said, shards)
        if self.held_ns is not None and not self.ended and clock.now_ns() - self.held_ns > self.options.hold_most * S:
            self._end(f"memory did not come back within {self.options.hold_most:g} s", shards)

    def close(self) -> None:
        self.talk.close()
        if self.stopping is not None:
            with suppress(subprocess.TimeoutExpired):
                self.stopping.wait(STOP_COMMAND_S)
            self.journal.event("guard_stop_command", pid=self.stopping.pid, rc=self.stopping.poll())

    def _enter(self, level: Level, why: str, said: Json, shards: Sequence[Shard]) -> None:
        word = WORDS[level]
        if word == "release" and self.held_ns is None:
            return
        # `guard` in the journal is what the verdict knows: it touched the load
        self.journal.event("guard", level=level, word=word, why=why, at_ns=said.get("at_ns"), synced=said.get("synced"))
        for shard in shards:
            shard.guard(word)
        self.view.say({"hold": "guard: no more requests, ", "release": "guard: on again, "}.get(word, "guard: ") + why)
        self.held_ns = None if word == "release" else self.held_ns or clock.now_ns()
        if word == "abort":
            self.ended = True
            self._stop_server()

    def _end(self, why: str, shards: Sequence[Shard]) -> None:
        self.ended = True
        self.journal.event("guard", level="stop", word="end", why=why)
        self.view.say(f"guard: {why}, the run ends")
        for shard in shards:
            shard.stop()

    def _stop_server(self) -> None:
        """The user's own command, once, and only where one was given."""
        if not self.options.stop_command:
            return
        try:
            self.stopping = subprocess.Popen(
                self.options.stop_command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self.journal.event("guard_stop_command", command=self.options.stop_command, pid=self.stopping.pid)
        except OSError as error:
            self.journal.event("guard_stop_command", command=self.options.stop_command, text=str(error))


def run(scene: Scenario, plan: Plan, view: View) -> tuple[Path, Verdict]:
    """Raises UserError or NotReadyError before any load is sent; after that there is always a verdict."""
    headers = secrets.headers(scene.target)
    # a cluster refuses what it has no cores for
    shards = how_many(plan.shards, scene.concurrency, _cores() if plan.ray is None else sys.maxsize)
    if plan.shards is None:
        view.say(f"{shards} shard{'s' * (shards > 1)}: {scene.concurrency} seats, {SEATS_PER_SHARD} a core")
    with _crew(plan, shards, view) as crew:
        here = [url for url in scene.target.urls or (scene.target.url,) if on_this_host(url)]
        if crew.machines > 1 and here:
            raise UserError(f"{here[0]} is another machine on each of {crew.machines} nodes: give the server's address")
        folder = _run(scene, plan, headers, shards, crew, view)
    return folder, verdict.judge(folder)


def how_many(asked: int | None, seats: int, cores: int) -> int:
    """How many shards: as asked, else one per SEATS_PER_SHARD seats, while a core is left for all others. Raises
    UserError where some would have no seat."""
    if asked is None:
        return max(1, min(-(-seats // SEATS_PER_SHARD), cores - 1))
    if asked > seats:
        raise UserError(f"--shards {asked}: the scenario has {seats} seats (concurrency), and each shard needs one")
    return asked


def _cores() -> int:
    """The cores that we may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _crew(plan: Plan, shards: int, view: View) -> AbstractContextManager[Crew]:
    if plan.ray is None:
        return nullcontext(_Processes())
    from loadgen import cluster

    return cluster.connect(plan.ray, shards, view.say)


def _run(scene: Scenario, plan: Plan, headers: dict[str, str], shards: int, crew: Crew, view: View) -> Path:
    scene = replace(scene, salt=scene.salt or os.urandom(4).hex())
    if not scene.monitors:
        scene = replace(scene, monitors={name: {} for name in DEFAULT_MONITORS})
    _ask_monitors(scene, plan)
    planned_s = sum(phase.duration or 0 for phase in scene.phases)
    folder = make_folder(plan.out, scene.name, planned_s)
    if planned_s >= LONG_S:
        size = f"{planned_s * SAMPLE_BYTES_PER_S / 1e6:.0f} MB for these {planned_s / 3600:.1f} h"
        view.say(
            f"samples take about {size} ({86_400 * SAMPLE_BYTES_PER_S / 1e6:.0f} MB a day), each request 1 KB more"
        )
    gathered = fingerprint.begin(scene.target.url, scene.monitors, plan.monitor_root, headers)
    try:
        facts = asyncio.run(_preflight(scene, headers, plan, view))
    except BaseException:
        shutil.rmtree(folder)  # made a moment ago and still empty
        raise
    scene = facts.scenario
    write_text(folder, "scenario.yaml", scenario.dump(scene))
    write_json(folder, "environment.json", fingerprint.environment(facts.facts, plan.argv, gathered))
    journal = Journal(folder, "supervise")
    try:
        _tell(facts, shards, journal, view)
        with _noting_signals() as signals:
            reason = _attend(scene, plan, folder, journal, headers, shards, crew, view, signals)
        journal.event("run_end", reason=reason)
    finally:
        journal.close()
    _drop_empty(folder)
    return folder


def make_folder(out: Path, name: str, planned_s: float = 0.0) -> Path:
    """A new folder for a run of so many seconds. Raises UserError where it cannot be written, or would not fit."""
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
    needed = MIN_FREE_BYTES + round(planned_s * SAMPLE_BYTES_PER_S)
    if free < needed:
        folder.rmdir()
        raise UserError(f"--out {out}: only {free >> 20} MiB are free there; this run needs {needed >> 20} MiB")
    return folder


def _ask_monitors(scene: Scenario, plan: Plan) -> None:
    """Some monitors know that a load would be in vain (a container that never started). Raises UserError."""
    shared = {"root": plan.monitor_root, "target_url": scene.target.url}
    for name, given in scene.monitors.items():
        module = plugins.load("monitors", name)
        if hasattr(module, "preflight"):
            known = {key: value for key, value in shared.items() if key in module.Options.__dataclass_fields__}
            why = asyncio.run(module.preflight(module.Options(**{**known, **(given or {})})))
            if why is not None:
                raise UserError(f"monitors: {name}: {why}")


async def _preflight(scene: Scenario, headers: dict[str, str], plan: Plan, view: View) -> preflight.Preflight:
    dialect = plugins.load("dialects", scene.target.dialect)

    def connect(target: Target, model: str) -> Client:
        return Client(target, scene.limits, dialect, model=model, headers=headers, connections=1)

    return await preflight.examine(scene, connect, wait_s=plan.wait_s, busy_ok=plan.busy_ok, say=view.say)


def _tell(found: preflight.Preflight, shards: int, journal: Journal, view: View) -> None:
    """What preflight learnt, into the journal and to the user."""
    facts, scene = found.facts, found.scenario
    journal.event(
        "run_start",
        scenario=scene.name,
        concurrency=scene.concurrency,
        shards=shards,
        seed=scene.seed,
        salt=scene.salt,
    )
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
    scene: Scenario,
    plan: Plan,
    folder: Path,
    journal: Journal,
    headers: dict[str, str],
    count: int,
    crew: Crew,
    view: View,
    signals: _Signals,
) -> str:
    """Start everything, watch it, stop it. Returns the reason of the end."""
    progress = Progress(folder)
    lanes = {lane: _start_lane(lane, scene, plan, folder, headers) for lane in LANES}
    for lane, process in lanes.items():
        journal.event("lane_start", lane=lane, pid=process.pid)
    exits: dict[int, Exit] = {}
    guard = _Guard(scene.guards, lanes["fast"], journal, view) if _is_guarded(scene) else None
    try:
        _look_for(_idle_s(scene), progress, view, signals)
        if guard is not None:
            guard.arm()
        shards = crew.start(folder, count, headers) if not signals.came else []
        for shard in shards:
            journal.event("shard_start", shard=shard.number, **shard.about)
        labels = [phase.label for phase in scene.phases]
        exits = _watch(shards, lanes, labels, crew.lead_s, progress, journal, view, signals, guard)
    finally:
        crew.end(HURRY_S)
        child.end(list(lanes.values()), LANE_END_S)
        if guard is not None:
            guard.close()
    for lane, process in lanes.items():
        if process.returncode not in (0, -signal.SIGTERM):
            hangs = "it hangs in a call that no signal ends" if process.returncode is None else None
            text = hangs or child.last_words(folder / f"stderr-{lane}.txt")
            journal.event("lane_exit", lane=lane, rc=process.returncode, text=text)
    if signals.came:
        return "signal"
    if guard is not None and guard.ended:
        return "guard"
    return "done" if all(found.rc == 0 for found in exits.values()) else "broken"


def _is_guarded(scene: Scenario) -> bool:
    """A guard watches the host on which the server runs, or none."""
    urls = scene.target.urls or (scene.target.url,)
    return scene.guards.enabled and "host" in scene.monitors and any(map(_is_ours, urls))


def _is_ours(url: str) -> bool:
    """Whether a server of this machine is meant: by loopback, by a socket of its file system, by one of its own
    addresses."""
    if on_this_host(url) or "unix://" in url:
        return True
    host = urlsplit(url).hostname
    return host is not None and server.is_here(host)


def _idle_s(scene: Scenario) -> float:
    """How long the monitors look at the idle server before the load."""
    if scene.guards.baseline is not None:
        return scene.guards.baseline
    planned = sum(phase.duration or 0.0 for phase in scene.phases if phase.kind == "measure")
    return LONG_IDLE_S if planned >= LONG_RUN_S else IDLE_S


def _start_lane(
    lane: Lane, scene: Scenario, plan: Plan, folder: Path, headers: dict[str, str]
) -> subprocess.Popen[bytes]:
    config = {
        "monitors": scene.monitors,
        "root": plan.monitor_root,
        "target_url": scene.target.url,
        "headers_env": secrets.HANDED_ON,
        "parent_pid": os.getpid(),
        "harden": scene.harden,
    }
    guarded = lane == "fast" and _is_guarded(scene)
    if guarded:
        config["guards"] = strict.plain(scene.guards)
    env = {secrets.HANDED_ON: orjson.dumps(headers).decode()} if lane == "slow" else {}
    args = [lane, str(folder), orjson.dumps(config).decode()]
    return child.spawn("monitors.lane", args, folder / f"stderr-{lane}.txt", env, talks=guarded)


def _look_for(seconds: float, progress: Progress, view: View, signals: _Signals) -> None:
    end_ns = clock.now_ns() + round(seconds * 1e9)
    while clock.now_ns() < end_ns and not signals.came:
        progress.look()
        view.show(progress)
        time.sleep(LOOK_S)


def _watch(
    shards: Sequence[Shard],
    lanes: dict[Lane, subprocess.Popen[bytes]],
    phases: Sequence[str],
    lead_s: float,
    progress: Progress,
    journal: Journal,
    view: View,
    signals: _Signals,
    guard: _Guard | None = None,
) -> dict[int, Exit]:
    """Until every shard is over: look, show, start phases, pass signals on; how each ended. After a second signal, at
    most HURRY_S longer."""
    passed = 0
    hurry_ns: int | None = None
    told: set[str] = set()
    exits: dict[int, Exit] = {}
    barrier = Barrier({shard.number for shard in shards})
    ready_ns: int | None = clock.now_ns() + round(READY_S * 1e9) if len(shards) > 1 else None
    while len(exits) < len(shards):
        if guard is not None:
            guard.attend([shard for shard in shards if shard.number not in exits])
        progress.look()
        if guard is not None:
            guard.served(progress.last_ok_ns)
        view.show(progress)
        for shard in shards:
            if shard.number in exits:
                continue
            for line in shard.heard():
                barrier.hear(shard.number, line)
            if (found := shard.exit()) is not None:
                exits[shard.number] = found
                barrier.gone(shard.number)
                text = found.text or (None if found.rc == 0 else f"exit {found.rc}")
                journal.event("shard_exit", shard=shard.number, rc=found.rc, text=text)
            elif ready_ns is not None and shard.number not in barrier.waiting and clock.now_ns() > ready_ns:
                shard.lose(f"not ready after {READY_S:g} s")
        if (opened := barrier.open()) is not None:
            ready_ns = None
            phase, together = opened
            start = Start(phase, clock.now_ns() + round(lead_s * 1e9), tuple(sorted(barrier.left_out)))
            journal.event("start", phase=phases[phase], shards=together, at_ns=start.at_ns)
            for shard in shards:
                if shard.number in together:
                    shard.begin(start)
        for number in signals.came[passed : passed + 1]:
            journal.event("signal", name=signal.Signals(number).name)
            for shard in shards:
                shard.stop()
            passed += 1
            if passed == 2:
                hurry_ns = clock.now_ns() + round((HURRY_S - 2 * LOOK_S) * 1e9)
        if hurry_ns is not None and clock.now_ns() > hurry_ns:
            break
        for lane, process in lanes.items():
            if lane not in told and process.poll() is not None:
                told.add(lane)
                text = child.last_words(progress.folder / f"stderr-{lane}.txt")
                journal.event("lane_exit", lane=lane, rc=process.returncode, text=text)
        if guard is not None and "fast" not in told:
            guard.wait(LOOK_S)
        else:
            time.sleep(LOOK_S)
    for number in signals.came[passed:]:
        journal.event("signal", name=signal.Signals(number).name)
    progress.look()
    view.show(progress)
    return exits


def follow(folder: Path, view: View) -> None:
    """Show a run that others run, until it ends or the watcher leaves."""
    progress = Progress(folder)
    while not progress.ended:
        progress.look()
        view.show(progress)
        time.sleep(LOOK_S)


def _drop_empty(folder: Path) -> None:
    for path in folder.glob("stderr-*.txt"):
        if path.stat().st_size == 0:
            path.unlink()
