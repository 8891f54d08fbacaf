"""Whole runs as a user starts them: the command, a server in a process of its own, signals, a verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadgen.record import Run

QUICK = """\
name: quick
classes:
  chat_short: {weight: 4, options: {max_tokens: 24}}
  arithmetic: {weight: 2}
  json: {weight: 2}
  long_context: {weight: 1, options: {prompt_tokens: 2k}}
phases:
  - {kind: functional, count: 1}
  - {kind: measure, duration: 6s, drain: 10s}
require: [errors, grades, oom, restart]
# These tests are of the way to a verdict, not of how busy the machine is on which they run.
rules:
  generator:
    {loop_lag_ms: 5000, send_lag_ms: 5000, inexact_share: 0.5, cpu_for: 60s, seats_share: 0.5, littles_share: 0.5}
  blind: {fail_share: 0.5}
"""


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "loadgen", *args]


def quick(folder: Path, text: str = QUICK) -> str:
    path = folder / "quick.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def only_run(out: Path) -> Path:
    [folder] = out.iterdir()
    return folder


def wait_for(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.05)


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in Run(folder).journal if e.get("event") == name]


def loading(out: Path) -> bool:
    """Whether the measuring phase has begun and answers come in."""
    folders = list(out.iterdir()) if out.exists() else []
    if not folders or not (folders[0] / "journal.jsonl").exists():
        return False
    text = (folders[0] / "journal.jsonl").read_text(errors="replace")
    outcomes = folders[0] / "outcomes-0.jsonl"
    return '"phase":"measure"' in text and outcomes.exists() and '"measure"' in outcomes.read_text(errors="replace")


def ours(folder: Path) -> list[int]:
    """Pids of processes that were started for this run folder and are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_run_against_the_simulator_passes_and_leaves_a_whole_run_folder(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    done = subprocess.run(
        command("run", quick(tmp_path), "--sim", "tiny", "--out", str(out)), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT: PASS" in done.stdout
    folder = only_run(out)
    assert str(folder) in done.stdout
    names = {path.name for path in folder.iterdir()}
    assert {
        "scenario.yaml", "environment.json", "journal.jsonl", "outcomes-0.jsonl", "windows-0.hlog",
        "samples-fast.jsonl", "samples-slow.jsonl", "samples-engine-0.jsonl", "findings.json", "summary.json",
        "report.md",
    } <= names  # fmt: skip
    run = Run(folder)
    assert run.finished
    outcomes = list(run.outcomes())
    assert {o.outcome for o in outcomes} == {"ok"}
    assert all(o.grade is not None and o.grade.ok for o in outcomes)
    assert all(o.output_tokens_source == "usage" for o in outcomes)
    exact = [o for o in outcomes if o.cls == "long_context"]
    assert exact
    assert {o.prompt_tokens for o in exact} == {2048}
    assert not ours(folder)

    again = subprocess.run(command("judge", str(folder)), capture_output=True, text=True, timeout=60)
    assert again.returncode == 0
    assert "VERDICT: PASS" in again.stdout


def test_a_crash_is_a_fail_that_names_the_restart_the_time_and_the_lost_requests(tmp_path: Path) -> None:
    # minute 5 of a big box at 25 times its speed: 12 s after the simulator began
    faults = tmp_path / "faults.yaml"
    faults.write_text("faults:\n  - {at: 300s, kind: crash, restart_after: 60s}\n", encoding="utf-8")
    out = tmp_path / "runs"
    scene = quick(tmp_path, QUICK.replace("duration: 6s", "duration: 18s"))
    more = f"--time-scale 25 --faults {faults}"
    done = subprocess.run(
        command("run", scene, "--sim", "gb10-262k", "--sim-args", more, "--out", str(out)),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VERDICT: FAIL (restart)" in done.stdout
    folder = only_run(out)
    findings = json.loads((folder / "findings.json").read_text())
    findings = findings["findings"] if isinstance(findings, dict) else findings
    [restart] = [f for f in findings if f["rule"] == "restart" and f["status"] == "fail"]
    assert restart["since_ns"] is not None
    outcomes = list(Run(folder).outcomes())
    lost = [o for o in outcomes if o.error_class in ("stream_truncated", "connection_reset")]
    assert 1 <= len(lost) <= 4
    assert any(o.outcome == "ok" and o.due_ns > restart["since_ns"] for o in outcomes), "the server came back"
    assert any(word in restart["message"] for word in ("lost", "cut")), restart["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_and_still_gives_a_report(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "runs"
    scene = quick(tmp_path, QUICK.replace("duration: 6s", "duration: 300s"))
    with subprocess.Popen(
        command("run", scene, "--sim", "tiny", "--out", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: loading(out))
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stdout + stderr
    assert "VERDICT: INCONCLUSIVE (interrupted)" in stdout
    folder = only_run(out)
    assert (folder / "report.md").exists()
    run = Run(folder)
    assert run.interrupted == number.name
    [drained] = [e for e in events(folder, "phase_drained") if e["phase"] == "measure"]
    assert drained["issued"] == drained["ok"] + drained["failed"] + drained["incomplete"]
    assert drained["cut"] == 0
    assert not ours(folder)


def test_the_second_signal_ends_it_within_two_seconds_with_files_closed_and_no_orphan(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    slow = QUICK.replace("duration: 6s, drain: 10s", "duration: 300s, drain: 300s").replace(
        "max_tokens: 24", "max_tokens: 4096"
    )
    generate = slow.replace("classes:\n", "classes:\n  generate: {weight: 99, options: {max_tokens: 8192}}\n")
    generate = generate.replace("kind: functional, count: 1", "kind: warmup, duration: 1s")
    with subprocess.Popen(
        command("run", quick(tmp_path, generate), "--sim", "tiny", "--out", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: out.exists() and bool(list(out.glob("*/journal.jsonl"))))
        wait_for(lambda: bool(events(only_run(out), "phase_start")))
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: bool(events(only_run(out), "signal")))
        assert process.poll() is None, "it drains"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stdout + stderr
    folder = only_run(out)
    run = Run(folder)
    assert any(o.outcome == "incomplete" for o in run.outcomes())
    assert not run.damage
    [first, second] = events(folder, "signal")
    ended = events(folder, "run_end")[0]["at"]
    assert ended - second["at"] < 10e9  # two seconds by our clock, on a box that others use as well
    assert first["at"] < second["at"]
    assert not ours(folder)


def test_a_run_whose_supervisor_was_killed_is_judged_all_the_same(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    scene = quick(tmp_path, QUICK.replace("duration: 6s", "duration: 300s"))
    with subprocess.Popen(
        command("run", scene, "--sim", "tiny", "--out", str(out), "--quiet"), stdout=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: loading(out))
        time.sleep(1.5)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 5, "shard, lanes and simulator"
        process.kill()
    folder = only_run(out)
    wait_for(lambda: not any(member.is_running() for member in family), 20)  # nobody survives the supervisor
    judged = subprocess.run(command("judge", str(folder)), capture_output=True, text=True, timeout=60)
    assert judged.returncode == 2, judged.stdout + judged.stderr
    assert "INCONCLUSIVE" in judged.stdout
    assert list(Run(folder).outcomes())


def test_a_key_reaches_the_server_and_no_file(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    env = {**os.environ, "TEST_KEY": "sk-very-secret-81723"}
    args = ["run", quick(tmp_path), "--sim", "tiny", "--sim-args", "--api-key-env TEST_KEY", "--out", str(out)]
    refused = subprocess.run(command(*args), capture_output=True, text=True, timeout=60, env=env)
    assert refused.returncode == 3
    assert "401" in refused.stderr
    assert refused.stderr.count("\n") <= 2
    done = subprocess.run(
        command(*args, "--api-key-env", "TEST_KEY"), capture_output=True, text=True, timeout=100, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for path in only_run(out).iterdir():
        assert b"sk-very-secret" not in path.read_bytes()
    assert "sk-very-secret" not in done.stdout + done.stderr + refused.stderr


def test_what_we_measured_is_what_the_simulator_did(tmp_path: Path) -> None:
    out, truth = tmp_path / "runs", tmp_path / "truth.jsonl"
    one_seat = QUICK.replace("phases:", "concurrency: 1\nphases:")
    done = subprocess.run(
        command("run", quick(tmp_path, one_seat), "--sim", "tiny", "--sim-args", f"--truth {truth}", "--out", str(out)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = sorted((o for o in Run(only_run(out)).outcomes()), key=lambda o: o.sent_ns or 0)
    true = [json.loads(line) for line in truth.read_text().splitlines()]
    true = sorted((t for t in true if "first_ns" in t), key=lambda t: t["received_ns"])[-len(outcomes) :]
    assert len(true) == len(outcomes) > 10
    late_ms = []
    for ours, theirs in zip(outcomes, true, strict=True):
        assert (ours.prompt_tokens, ours.output_tokens) == (theirs["prompt_tokens"], theirs["output_tokens"])
        assert ours.cached_tokens == theirs["cached_tokens"]
        assert ours.first_ns is not None
        assert ours.last_ns is not None
        late_ms += [(ours.first_ns - theirs["first_ns"]) / 1e6, (ours.last_ns - theirs["last_ns"]) / 1e6]
    assert min(late_ms) >= 0, "nothing arrives before it was sent"
    assert sorted(late_ms)[len(late_ms) // 2] < 10, "half of all stamps are within 10 ms on any box"
