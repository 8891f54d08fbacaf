"""Runs that a guard stops before the host of the simulated server dies: the command, real processes, a fixture host."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadgen import scenario, supervise
from loadgen.record import Run

SCENE = """\
name: guarded
concurrency: 4
classes: {{{cls}: {{weight: 1, options: {{max_tokens: {tokens}}}}}}}
phases: [{{kind: measure, duration: 60s, drain: 20s}}]
monitors: {{host: {{root: {root}}}, kernel: {{root: {root}}}}}
guards: {{hold_most: 2s{more}}}
rules:
  generator:
    {{loop_lag_ms: 5000, send_lag_ms: 5000, inexact_share: 0.5, cpu_for: 60s, seats_share: 0.5, littles_share: 0.5}}
  blind: {{fail_share: 0.5}}
skip_rules: [prefix_cache]
"""


def run(
    tmp_path: Path, fault: str, *args: str, more: str = "", cls: str = "chat_short", tokens: int = 64
) -> tuple[int, str, Run]:
    (tmp_path / "faults.yaml").write_text(fault)
    (tmp_path / "scene.yaml").write_text(SCENE.format(root=tmp_path / "host", more=more, cls=cls, tokens=tokens))
    sim = f"--host-root {tmp_path / 'host'} --faults {tmp_path / 'faults.yaml'} --time-scale 20"
    command = [
        sys.executable, "-m", "loadgen", "run", str(tmp_path / "scene.yaml"), "--sim", "gb10-262k", "--sim-args", sim,
        "--out", str(tmp_path / "runs"), *args,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    [folder] = (tmp_path / "runs").iterdir()
    return done.returncode, done.stdout + done.stderr, Run(folder)


def raw(found: Run, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (found.folder / name).read_text().splitlines()]


LEAK = "faults: [{after_requests: 12, kind: leak, bytes_per_request: 1600000000}]\n"


def test_a_load_that_eats_the_host_is_stopped_and_the_verdict_is_inconclusive(tmp_path: Path) -> None:
    code, said, found = run(tmp_path, LEAK)
    assert code == 2, said
    assert "VERDICT: INCONCLUSIVE (guard)" in said
    acts = found.events("guard")
    assert [(r["level"], r["word"]) for r in acts] == [("stop", "hold"), ("stop", "end")]
    assert acts[0]["synced"]
    [heeded, *_] = found.events("guard_heeded")
    assert (heeded["at"] - acts[0]["at"]) / 1e9 < 5  # 0.3 s on a machine that is not busy with other tests
    held_ns = heeded["at"]
    assert not [o for o in found.outcomes() if o.due_ns > held_ns], "nothing was issued after the hold"
    assert {o.outcome for o in found.outcomes()} <= {"ok"}
    low = min(d.min for d in found.digests("host") if d.metric == "mem_available_bytes")
    assert low > 1.5 * (1 << 30)
    stops = [r for r in raw(found, "samples-fast.jsonl") if r.get("metric") == "stop"]
    assert stops
    assert stops[0]["text"] == acts[0]["why"]
    assert "the guard stopped issuing" in (found.folder / "report.md").read_text()


def test_requests_are_cut_when_the_host_stalls_as_well(tmp_path: Path) -> None:
    wedge = (
        "faults: [{at: 120s, kind: wedge, collapse: 200s, available_gib: 2, driver_lines: 9, reboot_after: 900s, "
        "restart_after: 5s}]\n"
    )
    stop = f", stop_command: [touch, {tmp_path / 'stopped'}]"
    code, said, found = run(tmp_path, wedge, more=stop, cls="generate", tokens=40_000)  # 40 s each: seats keep step
    assert code in (1, 2), said
    assert [r["word"] for r in found.events("guard")][-1] == "abort", said
    cut = [o for o in found.outcomes() if o.outcome == "incomplete"]
    assert cut, "what ran for seconds was cut"
    assert all("guard" in o.flags for o in cut)
    assert not [o for o in found.outcomes() if o.outcome == "failed"]
    assert found.events("run_end")[0]["reason"] == "guard"
    assert (tmp_path / "stopped").exists(), "the user's own command ran"
    assert found.events("shard_end")[0]["reason"] == "guard"


def test_with_no_guard_the_load_goes_on(tmp_path: Path) -> None:
    _, _, found = run(tmp_path, LEAK, "--duration", "2s", "--no-guard")
    assert not found.events("guard")
    assert not list(found.digests("guard"))
    assert found.events("run_end")[0]["reason"] == "done"


@pytest.mark.parametrize(
    ("url", "guarded"),
    [("http://127.0.0.1:8000", True), ("http+unix://%2Ftmp%2Fs.sock", True), ("unix:///tmp/s.sock", True),
     ("http://[::1]:8000", True), ("http://192.0.2.1:8000", False)],
)  # fmt: skip
def test_a_guard_stands_where_the_server_is_on_this_machine(url: str, guarded: bool) -> None:
    scene = scenario.load("smoke", [f"target.url={url}"])
    scene = replace(scene, monitors={"host": {}})
    assert supervise._is_guarded(scene) is guarded
    assert not supervise._is_guarded(replace(scene, guards=replace(scene.guards, enabled=False)))


def test_an_own_address_that_is_no_loopback_is_this_machine() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks for the route
        except OSError:
            pytest.skip("no address but loopback")
        own = probe.getsockname()[0]
    assert supervise._is_ours(f"http://{own}:8000")
