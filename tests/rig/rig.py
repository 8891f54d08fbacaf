"""What the benches share: the ground-truth server, cores and priorities, and what a tree of processes costs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / ".cache/rig"
TOOLS = {"truth_server": ("g++", "truth_server.cpp"), "c_reader": ("gcc", "c_reader.c")}
STOP_S = 5.0
TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Real-time priorities: the server must be on time, and whatever else the machine does must not take the client's core
# away; without them a wake-up is late by 3 to 5 ms now and then, which is nobody's error.
SERVER_PRIORITY, CLIENT_PRIORITY, PEER_NICE = 10, 5, -15
LOOK_S = 0.1


class MissingError(Exception):
    """What cannot be measured here, and why."""


def built(tool: str) -> Path:
    """The binary, built by make where it is older than its source. Raises MissingError without a compiler."""
    compiler, source = TOOLS[tool]
    done = subprocess.run(
        ["make", "--silent", f".cache/rig/{tool}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise MissingError(f"{source}: no {compiler} here, or it failed: {done.stderr.strip()[-200:]}")
    return BUILD / tool


@dataclass(frozen=True, slots=True)
class Cores:
    """The server on one core, the client on another; where there is one only, both share it and the head says so."""

    server: int
    client: int

    @staticmethod
    def chosen() -> Cores:
        usable = sorted(os.sched_getaffinity(0))
        return Cores(usable[-1], usable[0])


def as_real_time(core: int, policy: int | None, priority: int) -> Callable[[], None]:
    """For a child before its program starts: pinned, and real-time where that is permitted."""

    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        if policy is not None:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, policy, os.sched_param(priority))

    return prepare


def may_be_real_time() -> bool:
    """Tried on a child, so that we stay as we are."""
    pid = os.fork()
    if pid == 0:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(CLIENT_PRIORITY))
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


@dataclass
class TruthServer:
    """A running truth_server."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def truth_server(core: int | None = None, model: str = "t200-i20-n128") -> Iterator[TruthServer]:
    """A ground-truth server for the length of a `with`; pinned and real-time if a core is given."""
    prepare = None if core is None else as_real_time(core, os.SCHED_FIFO, SERVER_PRIORITY)
    process = subprocess.Popen(
        [built("truth_server"), "0", model],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=prepare,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        word, _, url = process.stdout.readline().strip().partition(" ")
        assert word == "listening", word
        os.set_blocking(process.stdout.fileno(), False)
        yield TruthServer(url, process)
    finally:
        process.terminate()
        process.wait(STOP_S)
        process.stdout.close()


def machine() -> str:
    """The class of machine, for the head of a table: no names, no addresses."""
    model = "unknown CPU"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES / 2**30
    return (
        f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}"
    )


def head(cores: Cores) -> str:
    """Date, machine and conditions of a table."""
    apart = "server and client on one core each" if cores.server != cores.client else "server and client SHARE one core"
    realtime = "real-time priorities" if may_be_real_time() else "no real-time priorities (not permitted)"
    load = os.getloadavg()[0]
    return f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}; {machine()}; {apart}; {realtime}; load {load:.1f}"


def median(values: Sequence[float | None]) -> float | None:
    """The middle one of those that there are; of two, the lower."""
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None


# ---------------------------------------------------------------------------------------------------------------------
# What a command costs, seen from outside


@dataclass(frozen=True, slots=True)
class Usage:
    """A tree of processes at one moment."""

    at_ns: int
    cpu_s: float
    rss_mb: float
    pids: tuple[int, ...]


def usage(root: int) -> Usage:
    """CPU (children that are over included) and resident memory of a process and all below it, through /proc."""
    stats: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text()
                fields = text[text.rindex(")") + 2 :].split()
                stats[int(entry.name)] = fields
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        if pid in stats:
            found.append(pid)
        waiting += children.get(pid, [])
    cpu = sum(int(field) for pid in found for field in stats[pid][11:15]) / TICKS
    rss = sum(int(stats[pid][21]) for pid in found) * PAGE_BYTES / 2**20
    return Usage(time.monotonic_ns(), cpu, rss, tuple(found))


@dataclass(slots=True)
class Cost:
    """A whole command against the server. CPU is that from the first request to the exit, reports included."""

    rc: int
    killed: bool
    truth: dict[str, Any]
    wall_s: float
    start_s: float | None
    exit_s: float | None
    cpu_s: float
    us_per_chunk: float | None
    chunks_per_s: float | None
    rss_mb: float
    processes: int
    looks: list[Usage] = field(default_factory=list)


def cost(
    command: Sequence[str | Path], server: TruthServer, core: int, *,
    env: dict[str, str] | None = None, cwd: Path | None = None, log: Path | None = None,
    limit_s: float = 170, raise_late: bool = False,
) -> Cost:  # fmt: skip
    """Runs a command pinned to a core and watches it. `raise_late`: a peer, whose start-up (tens of seconds of imports)
    runs at a better nice value only, and which becomes real-time with its first request."""
    server.get("/reset")
    _first_request(server)  # whatever line an earlier command has left
    policy = None if raise_late else os.SCHED_RR
    begun_ns = time.monotonic_ns()
    with (log or Path(os.devnull)).open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **(env or {})}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=as_real_time(core, policy, CLIENT_PRIORITY) if not raise_late else _as_peer(core),
        )  # fmt: skip
    looks: list[Usage] = []
    serving = killed = False
    while (total_s := _over(process)) is None:
        looks.append(usage(process.pid))
        serving = serving or _first_request(server)
        if raise_late and serving:
            _raise(looks[-1].pids)
        if (time.monotonic_ns() - begun_ns) / 1e9 > limit_s:
            killed = True
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    over_ns = time.monotonic_ns()
    truth = server.get("/stats")
    looks = [look for look in looks if look.pids] or [Usage(begun_ns, 0.0, 0.0, ())]
    first_ns, last_ns, chunks = truth["first_ns"], truth["last_ns"], truth["chunks"]
    spent = max(total_s, looks[-1].cpu_s) - cpu_at(looks, first_ns)
    return Cost(
        rc=process.returncode, killed=killed, truth=truth, wall_s=(over_ns - begun_ns) / 1e9,
        start_s=(first_ns - begun_ns) / 1e9 if first_ns else None,
        exit_s=(over_ns - last_ns) / 1e9 if last_ns else None,
        cpu_s=spent, us_per_chunk=spent * 1e6 / chunks if chunks else None,
        chunks_per_s=chunks * 1e9 / (last_ns - first_ns) if chunks and last_ns > first_ns else None,
        rss_mb=max(look.rss_mb for look in looks), processes=max(len(look.pids) for look in looks), looks=looks,
    )  # fmt: skip


def _over(process: subprocess.Popen[bytes]) -> float | None:
    """CPU seconds of the command and the children that it has waited for; None while it runs."""
    pid, status, used = os.wait4(process.pid, os.WNOHANG)
    if pid == 0:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def cpu_at(looks: Sequence[Usage], at_ns: int) -> float:
    """CPU seconds at a moment, between two looks in proportion."""
    before = [look for look in looks if look.at_ns <= at_ns]
    after = [look for look in looks if look.at_ns > at_ns]
    if not before or not after:
        return (looks[0] if not before else looks[-1]).cpu_s
    a, b = before[-1], after[0]
    return a.cpu_s + (b.cpu_s - a.cpu_s) * (at_ns - a.at_ns) / (b.at_ns - a.at_ns)


def _as_peer(core: int) -> Callable[[], None]:
    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, PEER_NICE)

    return prepare


def _first_request(server: TruthServer) -> bool:
    """Whether the server has told of a first request since the last look."""
    assert server.process.stdout is not None
    try:
        return "request" in (server.process.stdout.read() or "")
    except (OSError, TypeError):  # nothing to read
        return False


def _raise(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                if os.sched_getscheduler(int(task.name)) != os.SCHED_RR:
                    os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(CLIENT_PRIORITY))
