"""The arithmetic of `make bench-monitors`, and one short run of its parts that need no privilege."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rig import bench_monitors


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_percentile_is_the_value_at_rank_ceil(values: list[float], share: float) -> None:
    found = bench_monitors.percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_percentile_of_a_hundred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [bench_monitors.percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]


def test_missed_goal_is_told_from_one_that_nobody_set() -> None:
    rows = [bench_monitors.Row("a", "1 %", "≤ 2 %", True), bench_monitors.Row("b", "3 %", "≤ 2 %", False)]
    assert [row.cells()[3] for row in [*rows, bench_monitors.Row("c", "4 %")]] == ["reached", "**missed**", "–"]


def test_line_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    path.write_text('{"word":"old"}\n')
    tail = bench_monitors.Tail(path)
    with path.open("a") as file:
        file.write('{"word":"new"')
        file.flush()
        file.write(',"n":1}\n')
    with tail.file:
        assert tail.first(b'"new"')[1] == {"word": "new", "n": 1}


def test_process_that_sleeps_has_cost_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeper:
        try:
            time.sleep(1)
            slept = bench_monitors.cpu_ns(sleeper.pid)
            worked = time.process_time_ns()
            sum(n * n for n in range(3_000_000))
            worked = time.process_time_ns() - worked
            assert bench_monitors.cpu_ns(sleeper.pid) - slept < worked / 2
            assert bench_monitors.rss_mb(sleeper.pid) > 1
        finally:
            sleeper.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_short_bench_finds_a_cost_for_a_lane(tmp_path: Path) -> None:
    (tmp_path / "server.log").touch()
    target = bench_monitors.Target("http://127.0.0.1:9", tmp_path)
    found = bench_monitors.cost({"slow": ["textfile", "logs"]}, target, 0.5)["slow"]
    assert 0 < found.cpu < 1
    assert found.rss_mb > 5
    assert found.observed == {
        "textfile": (True, f"1 files: {tmp_path}/*.prom"),
        "logs": (True, str(tmp_path / "server.log")),
    }, json.dumps(found.observed)
