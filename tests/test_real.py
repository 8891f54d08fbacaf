"""Real servers, through the command line: what a user types, what the run folder then holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

LOADGEN = str(Path(sys.executable).parent / "loadgen")

# The mix of `soak-600s` cut to what one core answers in 30 s, at 80 tokens/s when quiet and at 15 when it is not: so
# the rule that wants eleven answers to judge our own lateness is not required here.
SMALLER = [
    f"--set={each}"
    for each in (
        "classes.chat_short.options.prompt_tokens=64",
        "classes.chat_short.options.max_tokens=16",
        "classes.json.options.max_tokens=32",
        "classes.long_context.options.prompt_tokens=256",
        "classes.long_context.options.max_tokens=16",
        "classes.generate.options.max_tokens=16",
        "salt=smollm2",  # a salt of its own would make it luck which questions a model of 135M parameters gets right
        "phases.warmup.duration=5s",
        "require=[errors, grades, oom, restart, hung]",
        # these would judge whatever else runs on a CI box in these 30 s
        "skip_rules=[drift, retention]",
        "rules={generator: {loop_lag_ms: 5000, send_lag_ms: 5000, inexact_share: 0.5, cpu_for: 60s},"
        " blind: {fail_share: 0.5}}",
    )
]

EVIDENCE = ["scenario.yaml", "environment.json", "journal.jsonl", "outcomes-0.jsonl", "windows-0.hlog"]
EVIDENCE += ["samples-fast.jsonl", "samples-slow.jsonl", "samples-gpu.jsonl"]
JUDGEMENT = ["findings.json", "summary.json", "report.md"]

Json = dict[str, Any]


def lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def loadgen(*args: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LOADGEN, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def soak(url: str, out: Path, *more: str) -> Path:
    """A 30-second soak that passed; its run folder."""
    done = loadgen("run", "soak-600s", "--url", url, "--duration", "30s", "--out", str(out), *more, timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "VERDICT: PASS" in done.stdout
    (folder,) = out.iterdir()
    return folder


def check_evidence(folder: Path) -> None:
    """Every file is there, and what it says of a real server's answers is plausible."""
    missing = [name for name in EVIDENCE + JUDGEMENT if not (folder / name).is_file()]
    assert not missing

    events = lines(folder / "journal.jsonl")
    assert [event["reason"] for event in events if event.get("event") == "run_end"] == ["done"]
    (phase,) = [event for event in events if event.get("event") == "phase_drained" and event["phase"] == "measure"]
    assert phase["issued"] == phase["ok"] + phase["failed"] + phase["incomplete"]
    assert phase["failed"] == 0

    outcomes = lines(folder / "outcomes-0.jsonl")[1:]
    measured = [outcome for outcome in outcomes if outcome["phase"] == "measure" and outcome["outcome"] == "ok"]
    assert len(measured) == phase["ok"] >= 4
    assert len({outcome["cls"] for outcome in measured}) >= 2
    for outcome in measured:
        assert outcome["output_tokens_source"] == "usage"
        assert 1 <= outcome["output_tokens"] <= outcome["max_tokens"]
        assert outcome["due_ns"] <= outcome["sent_ns"] <= outcome["first_ns"] <= outcome["last_ns"]
        assert 1e6 < outcome["first_ns"] - outcome["sent_ns"] < 120e9, "TTFT between 1 ms and two minutes"


@pytest.mark.timeout(300)
def test_a_real_llamacpp_passes_a_30_second_soak(llamacpp_url: str, tmp_path: Path) -> None:
    folder = soak(llamacpp_url, tmp_path / "runs", *SMALLER)
    check_evidence(folder)
    facts = next(event for event in lines(folder / "journal.jsonl") if event.get("event") == "preflight")
    assert (facts["context_tokens"], facts["slots"]) == (1024, 4), "llama.cpp's context is each slot's"


@pytest.mark.timeout(120)
def test_probe_describes_real_answers(llamacpp_url: str) -> None:
    done = loadgen(
        "probe", llamacpp_url, "--json", "--prompt", "Name the four seasons.", "--requests", "2",
        "--max-tokens", "16", timeout_s=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["outcome"] for answer in answers] == ["ok", "ok"]
    for answer in answers:
        assert answer["text"].strip()
        assert answer["http_status"] == 200
        assert answer["output_tokens_source"] == "usage"
        assert answer["finish_reason"] in {"stop", "length"}
        assert 0 < answer["ttft_ms"] <= answer["last_token_ms"] <= answer["stream_end_ms"]


def test_a_prompt_beyond_the_context_is_named_as_such(llamacpp_url: str) -> None:
    done = loadgen("probe", llamacpp_url, "--json", "--prompt", "time " * 2000, timeout_s=60)
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert (answer["outcome"], answer["error_class"], answer["http_status"]) == ("failed", "context_limit", 400)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_vllm_passes_a_30_second_soak(vllm_url: str, tmp_path: Path) -> None:
    check_evidence(soak(vllm_url, tmp_path / "runs", *SMALLER))
