"""The rig tested: the ground-truth server against its own schedule, and the arithmetic of the benches."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from loadgen.selftest import truth
from loadgen.selftest.drive import drive
from loadgen.selftest.truth import Schedule
from tests.rig import bench_accuracy, bench_client, peers, rig


@pytest.fixture(scope="module")
def server() -> Iterator[rig.TruthServer]:
    """The C++ server, built by make; where no compiler is, its tests are skipped with that reason."""
    try:
        rig.built("truth_server")
    except rig.MissingError as why:
        pytest.skip(str(why))
    with rig.truth_server() as running:
        yield running


def test_the_servers_log_agrees_with_its_schedule(server: rig.TruthServer) -> None:
    schedule = Schedule(30, 10, 12)
    driven = uvloop.run(drive(server.url, 4, 12, schedule))
    assert {len(each.sent_ns) for each in driven.served} == {12}
    assert sorted(each.rid for each in driven.served) == list(range(12))
    late = truth.late_ms(driven.served, schedule)
    assert late.min() >= 0  # nothing leaves early
    assert truth.rank(late, 0.5) < 10  # on a busy box too, half of the chunks leave before the next is due
    stats = server.get("/stats")
    assert (stats["requests"], stats["chunks"], stats["aborted"], stats["active"]) == (12, 12 * 12, 0, 0)
    assert stats["peak"] == truth.most_open(driven.served) == 4


def test_all_streams_can_fire_on_one_tick(server: rig.TruthServer) -> None:
    """The shape of a continuous-batching engine: every stream's chunk of a step leaves at the same moment."""
    schedule = Schedule(25, 20, 4)
    server.get("/reset")
    for offset_s in (0, 0.007):
        time.sleep(offset_s)
        _ask(server, f"{schedule.model}-b")
    for rid, _arrived, _done, tokens, sent in server.get("/log")["requests"]:
        assert tokens == 4, rid
        assert all((at % 20_000_000) / 1e6 < 15 for at in sent)  # on the tick, or late after it, never before


def test_several_tokens_in_one_event_are_counted_as_such(server: rig.TruthServer) -> None:
    server.get("/reset")
    answer = _ask(server, "t1-i1-n5-k3")
    assert answer.count(b"data: ") == 5 + 2  # usage and [DONE]
    assert b'"completion_tokens":15' in answer
    assert server.get("/log")["requests"][0][3] == 15


def test_a_client_that_leaves_is_logged_as_aborted(server: rig.TruthServer) -> None:
    server.get("/reset")
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(_request("t1-i50-n100"))
        sock.recv(1000)
    for _ in range(100):
        if server.get("/stats")["aborted"]:
            break
        time.sleep(0.05)
    stats = server.get("/stats")
    assert (stats["aborted"], stats["active"]) == (1, 0)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_the_c_reader_reads_every_chunk(server: rig.TruthServer, mode: int) -> None:
    server.get("/reset")
    command = [rig.built("c_reader"), str(server.port), "t5-i5-n8", "3", "6", str(mode)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    found = json.loads(done.stdout)
    assert found["requests"] == 6
    assert found["reads"] >= 6
    assert server.get("/stats")["chunks"] == 6 * 8
    if mode == 3:
        assert found["events"] == 6 * (8 + 1)  # and [DONE]


def test_the_cost_of_a_command_is_seen_from_outside(server: rig.TruthServer, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "tests.rig.client", server.url, "2", "4", "--ttft", "20", "--tokens", "5"]
    cost = rig.cost(command, server, core, cwd=rig.ROOT, log=tmp_path / "log")
    assert (cost.rc, cost.killed) == (0, False), (tmp_path / "log").read_text()
    assert cost.truth["chunks"] == 4 * 5
    assert cost.start_s is not None
    assert 0 < cost.start_s < cost.wall_s
    assert 0 < cost.cpu_s < cost.wall_s
    assert cost.rss_mb > 10


def _request(model: str) -> bytes:
    body = f'{{"model": "{model}", "stream": true, "stream_options": {{"include_usage": true}}}}'.encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: rig\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _ask(server: rig.TruthServer, model: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(_request(model))
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += sock.recv(65536)
    return got


# -- arithmetic --------------------------------------------------------------------------------------------------------


def figures(**changed: Any) -> dict[str, Any]:
    """A run that reaches every goal."""
    run: dict[str, Any] = {"streams": 256, "times": "kernel", "failed": 0, "unpaired": 0, "error_p99": 0.01,
                           "rate_share": 0.99}  # fmt: skip
    for name in ("ttft_p50", "ttft_p99", "gap_p99"):
        run[name] = run[f"{name}_true"] = 200.0
    return run | changed


@pytest.mark.parametrize(
    ("changed", "goal"),
    [
        ({"gap_p99": 202.1}, "ITL p99"), ({"error_p99": 0.06}, "gap error"), ({"ttft_p50": 199.4}, "TTFT p50"),
        ({"ttft_p99": 202.1}, "TTFT p99"), ({"streams": 1000, "rate_share": 0.96}, "97 %"),
        ({"streams": 1000, "ttft_p50": 202.1}, "1 %"), ({"streams": 1000, "ttft_p99": 211}, "5 %"),
        ({"failed": 1}, "failed"),
    ],
)  # fmt: skip
def test_each_goal_that_is_missed_is_named(changed: dict[str, Any], goal: str) -> None:
    assert bench_accuracy.missed(figures()) == []
    (name,) = bench_accuracy.missed(figures(**changed))
    assert goal in name


def test_goals_hold_for_their_levels_only() -> None:
    assert bench_accuracy.missed(figures(streams=1000, error_p99=3.0, gap_p99=400.0)) == []
    assert bench_accuracy.missed(figures(streams=512, rate_share=0.5)) == []


def test_figures_of_several_runs_are_their_medians() -> None:
    middle = bench_accuracy.middle([figures(error_p99=value) for value in (0.9, 0.1, 0.3)])
    assert middle["error_p99"] == 0.3
    assert middle["times"] == "kernel"


def test_ratios_are_to_the_reader_of_the_same_sitting() -> None:
    rows = bench_client.rows([
        {"client": client, "streams": 256, "us_per_chunk": cpu, "rate_share": 1.0}
        for client, cpu in ((bench_client.FLOOR_KERNEL, 20.0), (bench_client.FLOOR_READ, 10.0),
                            (bench_client.ENGINE, 30.0), ("vllm", 90.0), ("vllm", 120.0), ("vllm", 60.0))
    ])  # fmt: skip
    cells = {row[1]: row for row in rows}
    assert cells[bench_client.ENGINE][2:5] == ["30.0", "1.50", "3.00"]
    assert cells["vllm"][2] == "90.0"
    assert cells["vllm"][5] == "3.00×"
    assert cells["vllm"][6] == "11,111"


def test_growth_is_a_slope_past_the_start() -> None:
    points = [(n, 90.0 if n < 20_000 else 100.0 + n / 100_000 * 0.5) for n in range(0, 120_001, 1000)]
    told = bench_client.growth_told(points, 60)
    assert "+0.50 MB per 100,000 requests" in told
    assert "too few" in bench_client.growth_told(points[:5], 1)


def test_cpu_between_two_looks_is_in_proportion() -> None:
    looks = [rig.Usage(0, 1.0, 0, ()), rig.Usage(100, 2.0, 0, ()), rig.Usage(200, 4.0, 0, ())]
    assert [rig.cpu_at(looks, at) for at in (-5, 50, 150, 900)] == [1.0, 1.5, 3.0, 4.0]


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", rig.ROOT / ".cache/nobody")
    for name, peer in peers.ALL.items():
        with pytest.raises(rig.MissingError, match="is not there"):
            peer("http://127.0.0.1:1", "m", 1, 1, tmp_path)
        assert name in (rig.HERE / "README.md").read_text()
