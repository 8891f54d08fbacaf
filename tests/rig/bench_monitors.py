"""`make bench-monitors`: what the monitors cost, how late they are, how soon a kill is written, what kill -9 takes.

Each figure stands beside its goal and is measured in this run, on this machine, against a simulated server in a process
of its own. Monitors run one by one in a lane of their own, then all together in their three lanes, as in a run. A bench
for people, not a gate: the kill of a memory cgroup and the lines in the kernel log need root, and are left out aloud
where they cannot be made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from loadgen import clock, plugins, supervise
from loadgen.journal import Damage, expand, read_lines
from tests.rig import rig

SECONDS = 20.0  # of each measurement
SETTLE_S = 3.0  # imports and first looks are the start's, not the monitor's
LIMIT_S = 60.0
HOGS = 4
REPEATS = 5  # of everything that is killed
LINES = 20  # written into the kernel log
LIMIT_BYTES = 32 << 20
# What sees a host and a server without being told where to look.
BASIC = (*supervise.DEFAULT_MONITORS, "cgroup", "thermal", "disk")
# Two a second, about what a server under light load writes.
LOG_LINE = (
    "INFO 11-30 12:00:00 [loggers.py:200] Engine 000: Avg generation throughput: 10.0 tokens/s, Running: 4 reqs\n"
)
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `reached` None: no goal was set for it, or it could not be measured."""

    what: str
    figure: str
    goal: str = "–"
    reached: bool | None = None

    def cells(self) -> list[str]:
        return [self.what, self.goal, self.figure, {True: "reached", False: "**missed**", None: "–"}[self.reached]]


def percentile(values: Sequence[float], share: float) -> float:
    """The value at rank ceil(share · n)."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S, nap_s: float = 0.02) -> None:
    end = clock.now_ns() + limit_s * NS
    while not condition():
        if clock.now_ns() > end:
            raise SystemExit(f"bench-monitors: {what}: not within {limit_s:g} s")
        time.sleep(nap_s)


# ---------------------------------------------------------------------------------------------------------------------
# What is measured: lanes, and what they look at


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def simulator(*more: str) -> Iterator[str]:
    """A simulated server; yields its address."""
    command = [sys.executable, "-m", "loadgen.sim", "--preset", "tiny", "--port", "0", *more]
    with ended(
        subprocess.Popen(command, cwd=rig.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    ) as server:
        assert server.stdout is not None
        yield next(word for word in server.stdout.readline().split() if word.startswith("http://"))


@contextlib.contextmanager
def lane(name: str, folder: Path, config: dict[str, Any]) -> Iterator[subprocess.Popen[Any]]:
    command = [sys.executable, "-m", "monitors.lane", name, str(folder), json.dumps(config)]
    with ended(subprocess.Popen(command, cwd=rig.ROOT, start_new_session=True, stderr=subprocess.DEVNULL)) as child:
        yield child


@contextlib.contextmanager
def hogs(n: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            stack.enter_context(ended(subprocess.Popen([sys.executable, "-c", "while True: pass"])))
        yield


def cpu_ns(pid: int) -> int:
    """CPU time of a process, all threads, and of the children it waited for."""
    own = sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return own + (int(stat[13]) + int(stat[14])) * NS // rig.TICKS


def rss_mb(pid: int, field: str = "VmRSS") -> float:
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024 / 1e6


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(read_lines(folder / f"samples-{name}.jsonl", Damage()))


@dataclass(frozen=True, slots=True)
class Target:
    """What the monitors look at."""

    url: str
    folder: Path

    def options(self, name: str) -> dict[str, Any]:
        """The options without which a monitor would look at nothing."""
        return {
            "logs": {"path": str(self.folder / "server.log")},
            "textfile": {"path": str(self.folder / "*.prom")},
            "docker": {},
        }.get(name, {})

    def config(self, names: Sequence[str]) -> dict[str, Any]:
        return {"monitors": {name: self.options(name) for name in names}, "target_url": self.url}


def keep_writing(target: Target, seconds: float) -> None:
    """A log and a text file that are written meanwhile."""
    end = clock.now_ns() + seconds * NS
    with (target.folder / "server.log").open("a") as log:
        while clock.now_ns() < end:
            log.write(LOG_LINE)
            log.flush()
            (target.folder / "new").write_text(f'power_w{{socket="0"}} {clock.now_ns() % 100}\n')
            (target.folder / "new").rename(target.folder / "power.prom")
            time.sleep(min(0.5, max(0.0, (end - clock.now_ns()) / NS)))


# ---------------------------------------------------------------------------------------------------------------------
# Cost


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU as share of one core, resident memory, written bytes a second, and what the monitors said they see."""

    cpu: float
    rss_mb: float
    bytes_per_s: float
    observed: dict[str, tuple[bool, str]]


def cost(lanes: dict[str, list[str]], target: Target, seconds: float) -> dict[str, Cost]:
    """These lanes with these monitors side by side, as in a run."""
    with tempfile.TemporaryDirectory(prefix="bench-monitors-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        children = {
            lane_: stack.enter_context(lane(lane_, folder, target.config(names))) for lane_, names in lanes.items()
        }
        keep_writing(target, SETTLE_S)
        before = {lane_: cpu_ns(child.pid) for lane_, child in children.items()}
        size = {lane_: (folder / f"samples-{lane_}.jsonl").stat().st_size for lane_ in lanes}
        start = clock.now_ns()
        keep_writing(target, seconds)
        took = clock.now_ns() - start
        return {
            lane_: Cost(
                (cpu_ns(child.pid) - before[lane_]) / took,
                rss_mb(child.pid),
                ((folder / f"samples-{lane_}.jsonl").stat().st_size - size[lane_]) / took * NS,
                {
                    line["monitor"]: (bool(line["value"]), line.get("text", ""))
                    for line in lines(folder, lane_)
                    if line.get("metric") == "observed"
                },
            )
            for lane_, child in children.items()
        }


def costs(target: Target, seconds: float) -> Iterator[Row]:
    by_lane: dict[str, list[str]] = {}
    for name in plugins.names("monitors"):
        module = plugins.load("monitors", name)
        by_lane.setdefault(module.LANE, []).append(name)
    empty = {lane_: cost({lane_: []}, target, seconds / 2)[lane_] for lane_ in by_lane}
    for lane_, alone in empty.items():
        yield Row(f"{lane_} lane without a monitor", f"{100 * alone.cpu:.2f} % of a core, {alone.rss_mb:.0f} MB")
    for lane_, names in by_lane.items():
        for name in names:
            one = cost({lane_: [name]}, target, seconds)[lane_]
            seen, why = one.observed.get(name, (False, "said nothing"))
            period = plugins.load("monitors", name).PERIOD_S
            blind = "" if seen else f" (not observed: {why[:60]})"
            figure = f"{100 * one.cpu:.2f} % of a core, {one.rss_mb:.0f} MB, {one.bytes_per_s / 1e3:.1f} kB/s{blind}"
            goal, reached = ("≤ 1.2 % of a core", one.cpu <= 0.012) if name == "host" else ("–", None)
            yield Row(f"`{name}` alone, every {period:g} s ({lane_} lane)", figure, goal, reached)
    basic = {lane_: [name for name in names if name in BASIC] for lane_, names in by_lane.items()}
    for title, lanes in (("the basic monitors", basic), ("every monitor there is", by_lane)):
        together = cost(lanes, target, seconds)
        cpu, rss = sum(c.cpu for c in together.values()), sum(c.rss_mb for c in together.values())
        each = ", ".join(f"{lane_} {100 * c.cpu:.2f} %" for lane_, c in together.items())
        yield Row(f"{title}, three lanes: CPU", f"{100 * cpu:.2f} % ({each})", "≤ 2.5 % of a core", cpu <= 0.025)
        fast = together["fast"].rss_mb
        yield Row(f"{title}: RSS of the fast lane", f"{fast:.1f} MB", "≤ 25 MB", fast <= 25)
        each = ", ".join(f"{lane_} {c.rss_mb:.0f}" for lane_, c in together.items())
        yield Row(f"{title}: RSS of all lanes", f"{rss:.0f} MB ({each})", "≤ 100 MB", rss <= 100)
        written = sum(c.bytes_per_s for c in together.values())
        yield Row(f"{title}: written", f"{written / 1e3:.1f} kB/s, {written * 86400 / 1e6:.0f} MB a day")


# ---------------------------------------------------------------------------------------------------------------------
# Lateness


def lateness(target: Target, seconds: float, load: int) -> Row:
    """The worst tick of each second, of `host` at 10 Hz beside the other monitors of its lane."""
    names = [n for n in plugins.names("monitors") if plugins.load("monitors", n).LANE == "fast"]
    with tempfile.TemporaryDirectory(prefix="bench-monitors-") as name, lane("fast", Path(name), target.config(names)):
        keep_writing(target, SETTLE_S)
        start = clock.now_ns()
        with hogs(load):
            keep_writing(target, seconds)
        said = [
            line["values"]
            for line in lines(Path(name), "fast")
            if line["monitor"] == "host" and line["at"] > start and "tick_lateness_ms" in line.get("values", {})
        ]
    worst = [expand(values["tick_lateness_ms"])[1] for values in said]
    missed = [expand(values["missed_ticks_total"]) for values in said]
    figure = (
        f"{percentile(worst, 0.5):.2f} / {percentile(worst, 0.99):.1f} / {max(worst):.1f} ms; "
        f"{missed[-1][2] - missed[0][0]:.0f} ticks missed"
    )
    beside = f"{load} CPU hogs on {os.cpu_count()} cores" if load else "idle"
    return Row(f"worst tick of a second late by, p50 / p99 / max, {beside}", figure)


# ---------------------------------------------------------------------------------------------------------------------
# From a kill to its line


def memory_cgroup() -> Path | None:
    """A memory cgroup of our own, 32 MiB without swap; None where it cannot be made."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, _, what = line.partition(" - ")
        mount, kind, options = Path(where.split()[4]), what.split()[0], what.split()[-1].split(",")
        enabled = "memory" in options
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                enabled = "memory" in (mount / "cgroup.subtree_control").read_text().split()
        if not enabled:
            continue
        folder = mount / f"loadgen-bench-{uuid.uuid4().hex[:12]}"
        try:
            folder.mkdir()
        except OSError:
            continue
        for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"):
            with contextlib.suppress(OSError):
                if (folder / file).exists():
                    (folder / file).write_text(str(LIMIT_BYTES))
        with contextlib.suppress(OSError):
            if (folder / "memory.swap.max").exists():
                (folder / "memory.swap.max").write_text("0")
        return folder
    return None


class Tail:
    """When a line that holds a word stood in a file for the first time, looked for every 0.5 ms."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        self.file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self.file.close()

    def first(self, word: bytes) -> tuple[int, dict[str, Any]]:
        end, rest = clock.now_ns() + 10 * NS, b""
        while clock.now_ns() < end:
            *whole, rest = (rest + self.file.read()).split(b"\n")
            now = clock.now_ns()
            for line in whole:
                if word in line:
                    found: dict[str, Any] = json.loads(line)
                    return now, found
            time.sleep(0.0005)
        raise SystemExit(f"bench-monitors: no line with {word!r} within 10 s")


def kills(target: Target) -> Iterator[Row]:
    if os.geteuid() != 0 or not os.access("/dev/kmsg", os.R_OK | os.W_OK):
        yield Row("from a kill to its line", "not measured: needs root and /dev/kmsg", "≤ 100 ms")
        return
    names = [n for n in plugins.names("monitors") if plugins.load("monitors", n).LANE == "fast"]
    config = target.config(names)
    config["monitors"]["kernel"] = {"any_facility": True}
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-monitors-"))
        stack.enter_context(lane("fast", Path(name), config))
        path = Path(name) / "samples-fast.jsonl"
        wait_for(
            lambda: path.exists() and any(x.get("metric") == "observed" for x in lines(Path(name), "fast")), "lane"
        )
        time.sleep(SETTLE_S)
        tail = stack.enter_context(contextlib.closing(Tail(path)))
        waits = []
        for n in range(LINES):
            mark = uuid.uuid4().hex
            time.sleep(0.137 + 0.011 * n)  # at no fixed place within a tick
            sent = clock.now_ns()
            # without the newline the record stays invisible until the next one comes
            Path("/dev/kmsg").write_bytes(f"<4>NVRM: loadgen bench {mark} NV_ERR_NO_MEMORY\n".encode())
            waits.append((tail.first(mark.encode())[0] - sent) / 1e6)
        yield Row(
            f"from a line in the kernel log to our file, p50 / max of {LINES}",
            f"{percentile(waits, 0.5):.0f} / {max(waits):.0f} ms", "≤ 100 ms", max(waits) <= 100,
        )  # fmt: skip
        cgroup = memory_cgroup()
        if cgroup is None:
            yield Row("from an OOM kill to its line", "not measured: no memory cgroup can be made", "≤ 100 ms")
            return
        try:
            waits = []
            code = "import os\nhoard = []\nwhile True: hoard.append(bytearray(os.urandom(1)) * (1 << 20))"
            for _ in range(REPEATS):
                command = ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(cgroup), sys.executable]
                with subprocess.Popen([*command, "-c", code]) as victim:
                    seen, line = tail.first(f'"pid":"{victim.pid}"'.encode())
                    victim.wait()
                assert line["metric"] == "oom_kill_memcg", line
                waits.append((seen - line["at"]) / 1e6)
            yield Row(
                f"from an OOM kill (the kernel's own stamp) to its line, p50 / max of {REPEATS}",
                f"{percentile(waits, 0.5):.0f} / {max(waits):.0f} ms", "≤ 100 ms", max(waits) <= 100,
            )  # fmt: skip
        finally:
            for _ in range(200):
                with contextlib.suppress(OSError):
                    cgroup.rmdir()
                    break
                time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------------------------
# kill -9 of everything

SCENARIO = """\
name: bench
classes: {chat_short: {weight: 1, options: {max_tokens: 24}}}
phases: [{kind: measure, duration: 60s}]
monitors: {host: {}, kernel: {}, process: {}, thermal: {}, engine: {}, disk: {}}
"""


def family(folder: Path) -> list[int]:
    """Our processes that were started for this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


@dataclass(frozen=True, slots=True)
class Loss:
    """What `kill -9` of a whole run took: seconds since the first reading of each lane that was lost, and of the
    requests whose last byte the server had sent GRACE_MS before (by its own log) how many stand in no record."""

    seconds: dict[str, float]
    finished: int
    unrecorded: int


GRACE_MS = 50  # on its way to the client: nobody had finished it
# How often a lane reads: what is missing begins one period after the last reading that is there.
PERIODS_S = {"fast": 0.1, "slow": 1.0, "engine-0": 1.0}
SAME_MS = 50  # the server's last send and our last read of one request


def loss(seconds: float) -> Loss:
    """One run against a simulated server that writes down what it did, killed after so many seconds of load."""
    with tempfile.TemporaryDirectory(prefix="bench-monitors-") as name:
        out, truth, scenario = Path(name) / "runs", Path(name) / "truth", Path(name) / "bench.yaml"
        scenario.write_text(SCENARIO)
        truth.touch()
        with simulator("--truth", str(truth)) as url:
            command = [
                sys.executable,
                "-m",
                "loadgen",
                "run",
                str(scenario),
                "--url",
                url,
                "--out",
                str(out),
                "--quiet",
            ]
            run = subprocess.Popen(
                command, cwd=rig.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            with ended(run):
                wait_for(
                    lambda: any(len(path.read_bytes()) > 1000 for path in out.glob("*/outcomes-0.jsonl")), "answers"
                )
                time.sleep(seconds)
                pids = family(out)
                killed_ns = clock.now_ns()
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                run.wait()
            time.sleep(0.5)  # the server notices that nobody listens any more, and writes it down
        (folder,) = out.iterdir()
        last = {name: max(line["at"] for line in lines(folder, name)) for name in PERIODS_S}
        records = sorted(record["done_ns"] for record in read_lines(folder / "outcomes-0.jsonl", Damage()))
        first = min(record["sent_ns"] for record in read_lines(folder / "outcomes-0.jsonl", Damage()))
        finished = sorted(
            line["done_ns"]
            for line in read_lines(truth, Damage())
            if line.get("ending") == "finished"
            and line["received_ns"] >= first - 10_000_000
            and line["done_ns"] < killed_ns - GRACE_MS * 1_000_000
        )
        unrecorded, at = 0, 0
        for done in finished:  # both in order of time: each takes the first record that is not earlier by much
            while at < len(records) and records[at] < done - SAME_MS * 1_000_000:
                at += 1
            if at < len(records) and records[at] <= done + SAME_MS * 1_000_000:
                at += 1
            else:
                unrecorded += 1
        seconds_lost = {name: max(0.0, (killed_ns - at) / NS - PERIODS_S[name]) for name, at in last.items()}
        return Loss(seconds_lost, len(finished), unrecorded)


def losses() -> Iterator[Row]:
    found = [loss(3.0 + 0.23 * n) for n in range(REPEATS)]  # at no fixed place within a second
    worst = {name: max(one.seconds[name] for one in found) for name in found[0].seconds}
    each = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in worst.items())
    what = f"kill -9 of everything, worst of {REPEATS}"
    yield Row(f"{what}: samples lost at the end", each, "≤ 1 s", max(worst.values()) <= 1.0)
    finished, unrecorded = sum(one.finished for one in found), sum(one.unrecorded for one in found)
    yield Row(f"{what}: finished requests lost", f"{unrecorded} of {finished}", "0", unrecorded == 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_monitors", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    parser.add_argument("--only", default="cost,late,kill,loss", help="which parts, with commas")
    args = parser.parse_args()
    wanted = args.only.split(",")
    print(f"{rig.machine()}; {args.seconds:g} s a figure\n")
    print("| what | goal | measured | |\n|---|---|---|---|", flush=True)
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(f"| {' | '.join(row.cells())} |", flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-monitors-") as name, simulator() as url:
        target = Target(url, Path(name))
        (target.folder / "server.log").touch()
        if "cost" in wanted:
            for row in costs(target, args.seconds):
                show(row)
        if "late" in wanted:
            show(lateness(target, args.seconds, 0))
            show(lateness(target, args.seconds, HOGS))
        if "kill" in wanted:
            for row in kills(target):
                show(row)
    if "loss" in wanted:
        for row in losses():
            show(row)
    missed = [row.what for row in rows if row.reached is False]
    print(f"\ngoals: {'all reached' if not missed else 'missed: ' + '; '.join(missed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
