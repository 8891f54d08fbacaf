"""A lane of monitors: its grid, what a monitor that fails or hangs does to the others, and how the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loadgen import clock, journal
from loadgen.journal import Damage, read_lines
from loadgen.types import Json, Sample
from monitors import lane

MS = 1_000_000
DEADLINE_S = 20.0


@dataclass(frozen=True)
class NoOptions:
    pass


class Clock:
    """Time that moves when somebody sleeps, or when a monitor says that it worked."""

    def __init__(self) -> None:
        self.ns = 10**9

    def now_ns(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


def watched(name: str, watch: Callable[[Any], Any], period_ms: int = 100, due_ns: int = 10**9) -> lane.Watched:
    module = ModuleType(name)
    module.__dict__["watch"] = watch
    return lane.Watched(name, module, NoOptions(), period_ms * MS, due_ns)


def run(monitors: list[lane.Watched], clock_: Clock, seconds: float) -> list[Sample]:
    written: list[Sample] = []
    end = clock_.ns + round(seconds * 1e9)
    lane.run_ticks(monitors, written.extend, lambda: clock_.ns >= end, clock_.now_ns, clock_.sleep)
    return written


def of(samples: list[Sample], monitor: str, metric: str) -> list[Sample]:
    return [s for s in samples if (s.monitor, s.metric) == (monitor, metric)]


def counter(name: str, clock_: Clock, cost_ms: Callable[[int], float] = lambda n: 0) -> Callable[[Any], Any]:
    def watch(_: object) -> Iterator[list[Sample]]:
        n = 0
        while True:
            yield [Sample(name, "n", float(n), clock_.ns)]
            n += 1
            clock_.sleep(cost_ms(n) / 1e3)

    return watch


# ---------------------------------------------------------------------------------------------------------------------
# On a virtual clock


def test_cost_of_a_tick_does_not_shift_the_next() -> None:
    clock_ = Clock()
    samples = run([watched("a", counter("a", clock_, lambda n: 30))], clock_, 2.05)
    assert len(of(samples, "a", "n")) == 21
    assert max(s.value for s in of(samples, "a", "tick_lateness_ms")) == 0


def test_ticks_that_were_slept_through_are_counted_not_made_up_for() -> None:
    clock_ = Clock()
    samples = run([watched("a", counter("a", clock_, lambda n: 730 if n == 5 else 0))], clock_, 2.05)
    assert len(of(samples, "a", "n")) == 21 - 6
    assert of(samples, "a", "missed_ticks_total")[-1].value == 6
    assert max(s.value for s in of(samples, "a", "tick_lateness_ms")) == pytest.approx(630)


def test_first_look_round_is_not_called_late() -> None:
    clock_ = Clock()

    def slow_start(_: object) -> Iterator[list[Sample]]:
        clock_.sleep(3)
        yield from counter("a", clock_)(_)

    samples = run([watched("a", slow_start)], clock_, 4)
    assert of(samples, "a", "missed_ticks_total")[-1].value == 0


def test_monitor_that_raises_is_tried_again_and_at_last_switched_off() -> None:
    clock_ = Clock()
    starts: list[int] = []

    def broken(_: object) -> Iterator[list[Sample]]:
        starts.append(clock_.ns)
        yield [Sample("broken", "n", 1.0, clock_.ns)]
        raise ValueError("no\nsuch  thing")

    samples = run([watched("broken", broken), watched("a", counter("a", clock_))], clock_, 60)
    failures = of(samples, "broken", "monitor_failed")
    assert len(failures) == len(starts) == lane.MAX_FAILURES
    assert (failures[0].text or "").startswith("ValueError: no such thing (test_lane.py:")
    assert [s.value for s in of(samples, "broken", "observed")] == [0.0]
    assert all(b - a >= lane.RETRY_NS for a, b in pairwise(starts))
    assert len(of(samples, "a", "n")) == 600, "its neighbour has all its ticks"


def test_rare_failures_of_a_long_night_are_forgiven() -> None:
    clock_ = Clock()

    def hiccup(_: object) -> Iterator[list[Sample]]:
        for _n in range(800):
            yield []
        raise OSError("again")

    samples = run([watched("a", hiccup, period_ms=1000)], clock_, 8 * 3600)
    assert len(of(samples, "a", "monitor_failed")) > lane.MAX_FAILURES
    assert of(samples, "a", "observed") == []


def test_monitor_that_ends_is_over_and_not_a_failure() -> None:
    clock_ = Clock()

    def blind(_: object) -> Iterator[list[Sample]]:
        yield [Sample("blind", "observed", 0.0, clock_.ns, text="no such device")]

    samples = run([watched("blind", blind)], clock_, 2)
    assert [s.metric for s in samples] == ["observed"]


def test_monitors_clean_up_when_the_lane_ends() -> None:
    clock_ = Clock()
    closed: list[str] = []

    def holds(_: object) -> Iterator[list[Sample]]:
        try:
            while True:
                yield []
        finally:
            closed.append("holds")
            raise OSError("even if this fails")

    run([watched("holds", holds), watched("a", counter("a", clock_))], clock_, 1)
    assert closed == ["holds"]


def test_slow_lane_monitor_that_hangs_disturbs_no_other() -> None:
    async def hangs(_: object) -> AsyncIterator[list[Sample]]:
        await asyncio.sleep(3600)
        yield []

    async def works(_: object) -> AsyncIterator[list[Sample]]:
        while True:
            yield [Sample("works", "n", 1.0, clock.now_ns())]

    written: list[Sample] = []

    async def both() -> None:
        now = clock.now_ns()
        tasks = [
            asyncio.create_task(lane.keep(watched(name, watch, 20, now), written.extend, limit_s=0.05))
            for name, watch in (("hangs", hangs), ("works", works))
        ]
        for _ in range(2000):
            await asyncio.sleep(0.01)
            if of(written, "hangs", "monitor_failed") and len(of(written, "works", "n")) > 5:
                break
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(both())
    assert "TimeoutError" in (of(written, "hangs", "monitor_failed")[0].text or "")


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


def test_lane_takes_its_own_monitors_and_hands_them_what_they_know() -> None:
    config: Json = {
        "monitors": {"host": {}, "process": {"pid": 7, "root": "/other"}, "engine": {}, "nvidia": None},
        "root": "/fixture",
        "target_url": "http://127.0.0.1:1",
        "headers_env": "NAME",
    }
    fast, complaints = lane.load("fast", config, 5)
    options = {m.name: m.options for m in fast}
    assert complaints == []
    assert set(options) == {"host", "process"}
    assert options["host"].root == "/fixture"  # type: ignore[attr-defined]
    assert options["process"].root == "/other"  # type: ignore[attr-defined]
    assert options["process"].target_url == "http://127.0.0.1:1"  # type: ignore[attr-defined]
    slow, _ = lane.load("slow", config, 5)
    assert [(m.name, m.options.headers_env) for m in slow] == [("engine", "NAME")]  # type: ignore[attr-defined]


def test_monitor_that_cannot_be_loaded_is_said_and_the_others_run() -> None:
    loaded, complaints = lane.load("fast", {"monitors": {"hots": {}, "host": {}, "kernel": {"colour": 1}}}, 5)
    assert [m.name for m in loaded] == ["host"]
    assert [(s.monitor, s.metric) for s in complaints] == [
        ("hots", "monitor_failed"),
        ("hots", "observed"),
        ("kernel", "monitor_failed"),
        ("kernel", "observed"),
    ]


def test_period_has_a_floor() -> None:
    (host,), _ = lane.load("fast", {"monitors": {"host": {"period_s": 0.001}}}, 5)
    assert host.period_ns == lane.MIN_PERIOD_S * 1e9


# ---------------------------------------------------------------------------------------------------------------------
# The process


@contextlib.contextmanager
def process(folder: Path, kind: str, config: Json) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "monitors.lane", kind, str(folder), json.dumps(config)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def lines(folder: Path, kind: str = "fast") -> list[Json]:
    return list(read_lines(folder / f"samples-{kind}.jsonl", Damage()))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = clock.now_ns() + DEADLINE_S * 1e9
    while not condition():
        assert clock.now_ns() < end, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.02)


def machine(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 500 kB\n")
    return tmp_path


def test_lane_writes_until_sigterm_and_leaves_a_whole_file(tmp_path: Path) -> None:
    config = {"monitors": {"host": {}, "kernel": {}}, "root": str(machine(tmp_path))}
    with process(tmp_path, "fast", config) as child:
        wait_for(lambda: bool(lines(tmp_path)), "a first line")
        child.send_signal(signal.SIGINT)
        wait_for(lambda: any("values" in line for line in lines(tmp_path)), "a digest, Ctrl-C or not")
        child.terminate()
        assert child.wait(DEADLINE_S) == 0
    damage = Damage()
    written = list(read_lines(tmp_path / "samples-fast.jsonl", damage))
    assert damage.counts() == {}
    observed = {line["monitor"]: line["value"] for line in written if line.get("metric") == "observed"}
    assert observed == {"host": 1, "kernel": 0}
    (first, *_) = [line for line in written if line["monitor"] == "host" and "values" in line]
    assert journal.expand(first["values"]["mem_available_bytes"])[2] == 500 * 1024


@pytest.mark.parametrize("kind", ["gpu", "slow"])
def test_other_lanes_end_on_sigterm(tmp_path: Path, kind: str) -> None:
    config = {"monitors": {"engine": {}, "nvidia": {}}, "target_url": "http://127.0.0.1:9"}
    with process(tmp_path, kind, config) as child:
        wait_for(lambda: bool(lines(tmp_path, kind)), "a first line")
        child.terminate()
        assert child.wait(DEADLINE_S) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death signal is Linux")
def test_lane_ends_when_its_parent_dies(tmp_path: Path) -> None:
    config = json.dumps({"monitors": {"host": {}}, "root": str(machine(tmp_path))})
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'monitors.lane', 'fast', *sys.argv[1:]])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), config], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(lambda: bool(lines(tmp_path)), "a first line")
        parent.kill()

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] == b"Z"
        except OSError:
            return True

    wait_for(is_gone, "the end of the lane")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_fast_lane_stays_small(tmp_path: Path) -> None:
    config = {"monitors": {"host": {}, "kernel": {}, "process": {}, "thermal": {}}, "target_url": "http://127.0.0.1:9"}
    with process(tmp_path, "fast", config) as child:
        wait_for(lambda: any("values" in line for line in lines(tmp_path)), "a digest")
        status = Path(f"/proc/{child.pid}/status").read_text()
    rss_kb = int(status.partition("VmHWM:")[2].split()[0])
    assert rss_kb * 1024 <= 25_000_000


def test_fast_lane_loads_none_of_the_heavy_packages(tmp_path: Path) -> None:
    code = (
        "import sys, monitors.lane, monitors.host, monitors.kernel, monitors.process, monitors.thermal\n"
        "import loadgen.journal\n"
        "print([m for m in ('numpy', 'aiohttp', 'psutil', 'orjson', 'msgspec', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("argv", [[], ["fast"], ["quick", "/tmp", "{}"]])
def test_wrong_call_says_how_to_call(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert lane.main(argv) == 3
    assert "usage" in capsys.readouterr().err


def test_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with process(tmp_path / "none", "fast", {"monitors": {}}) as child:
        assert child.wait(DEADLINE_S) == 3
        assert child.stderr is not None
        assert len(child.stderr.read().splitlines()) == 1
    assert os.listdir(tmp_path) == []  # noqa: PTH208
