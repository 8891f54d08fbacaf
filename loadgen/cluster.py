"""Shards on the nodes of a Ray cluster: the same processes as on one machine, each looked after by an actor.

The actor (`Station`) runs `loadgen.shard` as a child with a folder of its own and hands what that folder gains to the
supervisor, who asks for it. So nothing that the network does reaches the path on which requests are sent: what nobody
fetches waits on the node's disk, up to a bound. Actors are never restarted: a restarted generator is another test.
Moments are put into the supervisor's clock as they arrive; durations are the shard's own. Ray is an extra and is
imported here only, and only when asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from loadgen import __version__, child, clock, secrets
from loadgen.gate import Crew, Exit, Shard, Start, guard_line
from loadgen.guard import Word
from loadgen.record import Foreign, Journal, shard_files, write_text
from loadgen.types import Json, UserError

# Between the last READY and the start of a phase: several looks, and a slow network (notes on load testing: 2 s).
LEAD_S = 2.0
# A shard that hears nothing from home for this long stops sending, and home gives up on a shard as silent: an orphaned
# generator is worse than a lost one.
SILENT_S = 30.0
# An actor that is not up by then (a worker imports for 2 s; a node that starts workers for all its cores, 30 s) has no
# room in the cluster.
START_S = 90.0
# What one answer carries at most, of all files together.
BATCH_BYTES = 4 << 20
# What waits on the node's disk to be fetched, per file: a minute of the busiest shard. Older lines are passed over.
BUFFER_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
# Round trips to learn a clock: the shortest of them tells most (notes on load testing), and again every minute.
ROUND_TRIPS, ROUND_TRIPS_AGAIN, CLOCK_EVERY_S = 20, 5, 60.0
CLOCK_WAIT_S = 5.0
REACH_S = 5.0
# Ray's least: nothing of ours is an object.
OBJECT_STORE_BYTES = 80 << 20
# The child gets this long to leave when its actor ends it.
END_S = 2.0


class Ahead(NamedTuple):
    """Our clock less the shard's, and how far that may be off: half of the round trip."""

    ns: int
    error_ns: int


# ---------------------------------------------------------------------------------------------------------------------
# There


class Station:
    """One shard on its node. Calls come one at a time, all of them short."""

    def __init__(self, shard: int, silent_s: float = SILENT_S, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.shard, self.silent_s, self.buffer_bytes = shard, silent_s, buffer_bytes
        self.folder = Path(tempfile.mkdtemp(prefix="loadgen-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.talk: child.Talk | None = None
        self.why: str | None = None
        self.heard_ns = clock.now_ns()
        self.offsets = dict.fromkeys(shard_files(shard), 0)
        self.batch: Json = {"seq": 0}

    def hello(self) -> Json:
        context = _ray().get_runtime_context()
        return {"version": __version__, "node": context.get_node_id(), "address": socket.gethostname()}

    def clock(self) -> int:
        self.heard_ns = clock.now_ns()
        return self.heard_ns

    def start(self, scene: str, shards: int, headers: dict[str, str]) -> None:
        """In the actor's main thread: the kernel ends the child when the thread that started it ends."""
        write_text(self.folder, "scenario.yaml", scene)
        args = [str(self.folder), "--shard", str(self.shard), "--shards", str(shards), "--gated"]
        env = {secrets.HANDED_ON: orjson.dumps(headers).decode()}
        stderr = self.folder / f"stderr-shard-{self.shard}.txt"
        self.process = child.spawn("loadgen.shard", args, stderr, env, talks=True)
        self.talk = child.Talk(self.process)
        self.heard_ns = clock.now_ns()
        threading.Thread(target=self._mind_home, args=[self.process], daemon=True).start()

    def tell(self, line: bytes) -> None:
        if self.talk is not None:
            self.talk.tell(line)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def fetch(self, seq: int) -> Json:
        """What is new since batch `seq`, the last that arrived; the one after it once more where that got lost. `exit`
        stands in the batch that is the last."""
        self.heard_ns = clock.now_ns()
        if self.batch["seq"] > seq:
            return self.batch
        assert self.process is not None
        assert self.talk is not None
        rc = self.process.poll()  # before the files are read: what a dead child wrote is all there
        files, lost, room = [], 0, BATCH_BYTES
        for name in self.offsets:
            skipped = self._skip(name)
            lost += skipped
            data = self._read(name, room, rc is not None)
            room -= len(data)
            if data:
                files.append((name, data))
        self.batch = {"seq": seq + 1, "said": self.talk.heard(), "files": files, "lost": lost}
        if rc is not None and not files:
            text = self.why or child.last_words(self.folder / f"stderr-shard-{self.shard}.txt")
            self.batch["exit"] = (None if self.why else rc, text)
        return self.batch

    def close(self) -> None:
        if self.process is not None:
            child.end([self.process], END_S)
        if self.talk is not None:
            self.talk.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, name: str, room: int, over: bool) -> bytes:
        """Whole lines; of a child that is over all that is there."""
        path = self.folder / name
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(self.offsets[name])
            data = file.read(room)
        if not (over and len(data) < room):
            data = data[: data.rfind(b"\n") + 1]
        self.offsets[name] += len(data)
        return data

    def _skip(self, name: str) -> int:
        """How many lines are passed over because more wait than may: the newest half stays."""
        path = self.folder / name
        waiting = path.stat().st_size - self.offsets[name] if path.exists() else 0
        if waiting <= self.buffer_bytes:
            return 0
        lines, goal = 0, self.offsets[name] + waiting - self.buffer_bytes // 2
        with path.open("rb") as file:
            file.seek(self.offsets[name])
            while file.tell() < goal:
                lines += file.read(min(BLOCK_BYTES, goal - file.tell())).count(b"\n")
            lines += bool(file.readline())
            self.offsets[name] = file.tell()
        return lines

    def _mind_home(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            time.sleep(1)
            if clock.now_ns() - self.heard_ns > self.silent_s * 1e9:
                self.why = f"it heard nothing from home for {self.silent_s:g} s and stopped"
                child.end([process], END_S)


# ---------------------------------------------------------------------------------------------------------------------
# Here


class RayShard:
    """One shard as seen from home."""

    def __init__(self, ray: Any, actor: Any, number: int, where: str, ahead: Ahead, folder: Path) -> None:
        self.ray, self.actor, self.number = ray, actor, number
        self.about: Json = {"where": where}
        self.ahead = ahead
        self.files = Foreign(folder, number)
        self.journal = Journal(folder, "cluster")
        self.lines: list[bytes] = []
        self.ended: Exit | None = None
        self.seq = 0
        self.asked: Any = None
        self.heard_ns = self.clock_ns = clock.now_ns()
        self._tell_clock(ahead)

    def heard(self) -> list[bytes]:
        self.look()
        lines, self.lines = self.lines, []
        return lines

    def begin(self, start: Start) -> None:
        self.actor.tell.remote(replace(start, at_ns=start.at_ns - self.ahead.ns).line())

    def guard(self, word: Word) -> None:
        if self.ended is None:
            self.actor.tell.remote(guard_line(word))

    def stop(self) -> None:
        if self.ended is None:
            self.actor.stop.remote()

    def lose(self, why: str) -> None:
        self.ended = Exit(None, why)
        self.ray.kill(self.actor)

    def exit(self) -> Exit | None:
        return self.ended

    def look(self) -> None:
        """Takes in the answer that came, if one did, and asks for the next."""
        if self.ended is not None:
            return
        now = clock.now_ns()
        if now - self.heard_ns > SILENT_S * 1e9:
            self.lose(f"nothing came from it for {SILENT_S:g} s")
            return
        try:
            if self.asked is not None:
                if not self.ray.wait([self.asked], timeout=0)[0]:
                    return
                answer, self.asked = self.asked, None
                self._take(self.ray.get(answer))
            if self.ended is None and now - self.clock_ns > CLOCK_EVERY_S * 1e9:
                self._look_at_clock()
            if self.ended is None:
                self.asked = self.actor.fetch.remote(self.seq)
        except self.ray.exceptions.ActorUnavailableError:
            self.asked = None  # the network: asked again at the next look, until SILENT_S
        except self.ray.exceptions.RayActorError:
            self.ended = Exit(None, "its node or its actor died")

    def close(self) -> None:
        """The actor, its folder and its child go; what it still had is left behind."""
        with suppress(self.ray.exceptions.RayError):
            self.ray.get(self.actor.close.remote(), timeout=END_S + 1)
        with suppress(Exception):  # killing what is dead already
            self.ray.kill(self.actor)
        self.files.close()
        self.journal.close()

    def _take(self, batch: Json) -> None:
        self.heard_ns = clock.now_ns()
        if batch["seq"] <= self.seq:
            return
        self.seq = batch["seq"]
        self.lines += batch["said"]
        for name, data in batch["files"]:
            self.files.add(name, data, self.ahead.ns)
        if batch["lost"]:
            self.journal.event("records_lost", shard=self.number, n=batch["lost"], bound=BUFFER_BYTES)
        if "exit" in batch:
            self.ended = Exit(*batch["exit"])

    def _look_at_clock(self) -> None:
        """Clocks drift apart by seconds a day where nothing disciplines them."""
        self.clock_ns = clock.now_ns()
        with suppress(self.ray.exceptions.GetTimeoutError):
            ahead = clock_ahead(self.ray, self.actor, ROUND_TRIPS_AGAIN)
            self._tell_clock(ahead)
            # a poor reading corrects a good one only where it contradicts it
            if abs(ahead.ns - self.ahead.ns) > ahead.error_ns:
                self.ahead = ahead

    def _tell_clock(self, ahead: Ahead) -> None:
        self.journal.event("shard_clock", shard=self.number, ahead_ns=ahead.ns, error_ns=ahead.error_ns)


def clock_ahead(ray: Any, actor: Any, round_trips: int) -> Ahead:
    """By the shortest of some round trips, in which the other clock was read midway, give or take half."""
    best: Ahead | None = None
    for _ in range(round_trips):
        before = clock.now_ns()
        theirs = ray.get(actor.clock.remote(), timeout=CLOCK_WAIT_S)
        half = (clock.now_ns() - before + 1) // 2
        if best is None or half < best.error_ns:
            best = Ahead(before + half - theirs, half)
    assert best is not None
    return best


class _Actors:
    """The crew of a cluster."""

    lead_s = LEAD_S

    def __init__(self, ray: Any, actors: Sequence[Any], places: Sequence[str]) -> None:
        self.ray, self.actors, self.places = ray, actors, places
        self.machines = len(set(places))
        self.shards: list[RayShard] = []

    def start(self, folder: Path, shards: int, headers: dict[str, str]) -> Sequence[Shard]:
        scene = (folder / "scenario.yaml").read_text(encoding="utf-8")
        for number, (actor, where) in enumerate(zip(self.actors, self.places, strict=True)):
            ahead = clock_ahead(self.ray, actor, ROUND_TRIPS)
            actor.start.remote(scene, shards, headers)
            self.shards.append(RayShard(self.ray, actor, number, where, ahead, folder))
        return self.shards

    def end(self, wait_s: float) -> None:
        """Shards that still run are stopped, and what they say within `wait_s` is taken in."""
        end_ns = clock.now_ns() + round(wait_s * 1e9)
        for shard in self.shards:
            shard.stop()
            shard.stop()
        while clock.now_ns() < end_ns and any(shard.exit() is None for shard in self.shards):
            for shard in self.shards:
                shard.look()
            time.sleep(0.05)
        for shard in self.shards:
            shard.close()


@contextmanager
def connect(address: str, shards: int, say: Callable[[str], None]) -> Iterator[Crew]:
    """A crew of `shards` actors on the cluster at `address` (HOST:PORT, `auto`), or on a cluster of this machine that
    lasts as long as the run (`local`). Raises UserError before anything is sent."""
    ray = _ray()
    folder = _join(ray, address, shards)
    try:
        actors = [_hire(ray, number) for number in range(shards)]
        try:
            ids, hellos = _greet(ray, address, actors)
            check_versions(address, hellos)
            nodes = list(dict.fromkeys(ids))
            say(f"{shards} shards on {len(nodes)} of {len(ray.nodes())} Ray nodes")
            yield _Actors(ray, actors, [f"node {nodes.index(each) + 1}" for each in ids])
        finally:
            for actor in actors:
                with suppress(Exception):  # those that are gone
                    ray.kill(actor)
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def check_versions(address: str, hellos: Sequence[Json]) -> None:
    """Shards of two versions are two tests. Raises UserError."""
    for hello in hellos:
        if hello["version"] != __version__:
            raise UserError(
                f"--ray {address}: {hello['address']} has loadgen {hello['version']}, here is {__version__}; "
                "install the same version on every node"
            )


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError("--ray needs Ray: pip install 'loadgen-soak[ray]', on every node") from None


def _join(ray: Any, address: str, shards: int) -> str | None:
    """Connects; the folder of a cluster that was started for us."""
    quiet: Json = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    folder: str | None = None
    try:
        if address == "local":
            folder = tempfile.mkdtemp(prefix="lg-")  # short: a socket's path in it has 107 characters
            ray.init(
                "local", num_cpus=shards, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=folder, **quiet,
            )  # fmt: skip
        else:
            if address != "auto":
                _reach(address)
            try:
                ray.init(address, **quiet)
            except ConnectionError as error:
                raise UserError(
                    f"--ray {address}: {_one_line(error)} (has this node joined it, with its token?)"
                ) from None
        cores = int(ray.cluster_resources().get("CPU", 0))
        if cores < shards:
            raise UserError(f"--ray {address}: {cores} CPUs in the cluster, {shards} shards need one each")
    except BaseException as error:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, UserError) or not isinstance(error, Exception):
            raise
        raise UserError(f"--ray {address}: {_one_line(error)}") from None  # Ray raises what it likes
    return folder


def _reach(address: str) -> None:
    """Ray itself tries an address for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--ray {address}: write HOST:PORT of the cluster's head, auto, or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        raise UserError(f"--ray {address}: no Ray there ({error.strerror or error})") from None


def _hire(ray: Any, number: int) -> Any:
    options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
    return ray.remote(Station).options(**options).remote(number)


def _greet(ray: Any, address: str, actors: Sequence[Any]) -> tuple[list[str], list[Json]]:
    """The node and the version of each. Raises UserError where an actor does not come up."""
    try:
        hellos: list[Json] = ray.get([actor.hello.remote() for actor in actors], timeout=START_S)
    except ray.exceptions.GetTimeoutError:
        raise UserError(f"--ray {address}: the shards found no room in the cluster in {START_S:g} s") from None
    except ray.exceptions.RayError as error:
        raise UserError(f"--ray {address}: no shard can run there: {_one_line(error)}") from None
    return [str(hello["node"]) for hello in hellos], hellos


def _one_line(error: Exception) -> str:
    """What matters of an error of Ray's stands in its last line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]
