"""Every row of the table of verdicts, and judging a folder: offline, again, and with a rule that breaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import verdict as judging
from loadgen.record import Run
from loadgen.rules import ELSEWHERE, NOT_OBSERVED
from loadgen.types import AXES, Finding, Outcome, UserError, Verdict
from loadgen.verdict import judge, run_rule

SOUND = Finding("generator", "measurement", "pass", "sound", "loop lag", 2, 250, "ms", 600)
FAST = Finding("drift", "performance", "pass", "flat", "chat", 1.0, 1.25, "ratio", 100)
UP = Finding("restart", "stability", "pass", "no restart")
RIGHT = Finding("grades", "functional", "pass", "all right", "chat", 0, 0.02, "share", 100)
ALL = (SOUND, FAST, UP, RIGHT)

KILLED = replace(UP, rule="oom", status="fail", cause="oom_kill", message="killed", hard=True, since_ns=50)
CRASHED = replace(UP, status="fail", cause="restart", message="restarted", hard=True, since_ns=40)
DRIFTED = replace(FAST, status="fail", cause="degrading", message="slower")
LOST_LAG = replace(SOUND, status="fail", cause="client_limited", message="loop late")
OPEN = replace(FAST, status="not_evaluated", message="too few", scope="long", n=3)


def say(
    *findings: Finding, required: tuple[str, ...] = (), interrupted: str | None = None, guard: bool = False
) -> Verdict:
    return judging.verdict(findings, required=required, interrupted=interrupted, guard_stopped=guard)


# ---------------------------------------------------------------------------------------------------------------------
# The table


def test_all_that_was_asked_passes() -> None:
    result = say(*ALL, required=("drift", "grades", "restart", "generator"))
    assert (result.line, result.exit_code) == ("PASS", 0)
    assert dict(result.axes) == {
        "functional": "PASS", "performance": "PASS", "stability": "PASS", "measurement": "VALID",
    }  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"interrupted": "SIGINT"}, {"interrupted": "SIGTERM"}, {"guard": True}])
@pytest.mark.parametrize("spoilt", [(), (LOST_LAG,), (DRIFTED,), (LOST_LAG, DRIFTED)])
def test_hard_evidence_fails_whatever_else_is_true(more: dict[str, Any], spoilt: tuple[Finding, ...]) -> None:
    result = say(*ALL, *spoilt, KILLED, required=("nothing_like_it",), **more)
    assert (result.line, result.exit_code) == ("FAIL (oom_kill)", 1)
    assert result.reasons[0] == "killed"
    assert result.interrupted is ("interrupted" in more)


def test_the_root_cause_names_the_verdict_although_its_result_was_seen_first() -> None:
    result = say(*ALL, CRASHED, KILLED)
    assert result.cause == "oom_kill"
    assert result.reasons == ("killed", "restarted")


def test_an_unsound_measurement_is_inconclusive_even_if_it_looks_slow() -> None:
    result = say(*ALL, DRIFTED, LOST_LAG)
    assert (result.line, result.exit_code) == ("INCONCLUSIVE (client_limited)", 2)
    assert result.axes["measurement"] == "INVALID"
    assert result.reasons == ("loop late", "slower")


def test_a_guard_alone_is_inconclusive() -> None:
    result = say(*ALL, replace(UP, rule="headroom", status="warn", message="low"), guard=True)
    assert (result.line, result.exit_code) == ("INCONCLUSIVE (guard)", 2)
    assert result.reasons == ("a guard stopped the run", "low")


def test_a_guard_beside_a_broken_soft_rule_is_a_failure() -> None:
    assert say(*ALL, DRIFTED, guard=True).exit_code == 1


def test_a_broken_soft_rule_fails() -> None:
    result = say(*ALL, DRIFTED)
    assert (result.line, result.exit_code) == ("FAIL (degrading)", 1)
    assert result.axes["performance"] == "FAIL"


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("nonsense", 130)])
@pytest.mark.parametrize("spoilt", [(), (LOST_LAG,), (DRIFTED,), (OPEN,)])
def test_an_interrupted_run_is_inconclusive_by_its_signal(name: str, code: int, spoilt: tuple[Finding, ...]) -> None:
    result = say(*ALL, *spoilt, interrupted=name)
    assert (result.line, result.exit_code) == ("INCONCLUSIVE (interrupted)", code)
    assert result.interrupted
    assert result.reasons[0] == f"interrupted by {name}"


def test_a_rule_without_samples_that_nobody_required_makes_the_pass_partial() -> None:
    result = say(*ALL, OPEN)
    assert (result.line, result.exit_code) == ("PASS (partial: drift not evaluated for 1 of 2)", 0)


def test_a_required_rule_without_samples_is_inconclusive() -> None:
    result = say(SOUND, UP, RIGHT, OPEN, required=("drift",))
    assert (result.line, result.exit_code) == ("INCONCLUSIVE (not_evaluated)", 2)
    assert result.reasons == ("required rule drift not evaluated: too few",)


def test_a_required_rule_about_classes_has_answered_when_it_did_for_one() -> None:
    assert say(*ALL, OPEN, required=("drift",)).overall == "PASS"


def test_a_required_rule_about_the_host_must_answer_everywhere() -> None:
    blind = replace(UP, status="not_evaluated", scope="cgroup", message="not seen")
    assert say(*ALL, blind, required=("restart",)).exit_code == 2


def test_a_required_rule_that_never_ran_is_inconclusive() -> None:
    assert say(*ALL, required=("thermal",)).reasons == ("required rule thermal did not run",)


def test_nothing_judged_is_no_pass() -> None:
    assert say().line == "INCONCLUSIVE (not_evaluated)"
    assert say(OPEN).overall == "INCONCLUSIVE"
    assert set(say().axes.values()) == {"NOT EVALUATED"}


def test_warnings_do_not_fail_and_are_told() -> None:
    result = say(*ALL, replace(FAST, status="warn", message="a bit slower"))
    assert result.overall == "PASS"
    assert result.axes["performance"] == "WARN"
    assert result.reasons == ("a bit slower",)


def test_a_monitor_that_saw_nothing_is_said_once_and_not_by_every_rule() -> None:
    blind = Finding("blind", "measurement", "not_evaluated", "nvidia not observed: no driver", "nvidia")
    rules = [
        Finding(rule, "stability", "not_evaluated", "no driver", cause=NOT_OBSERVED) for rule in ("gpu", "thermal")
    ]
    assert say(*ALL, blind, *rules).line == "PASS (partial: nvidia not observed)"
    assert say(*ALL, *rules).line == "PASS (partial: gpu not evaluated; thermal not evaluated)"


def test_a_host_that_nobody_watched_and_a_class_left_out_are_named_once() -> None:
    rules = [
        Finding(rule, "stability", "not_evaluated", "another host", cause=ELSEWHERE) for rule in ("oom", "swap", "gpu")
    ]
    out = Finding("grades", "functional", "not_evaluated", "json left out: cannot", "json")
    assert say(*ALL, *rules, out).partial == ("another host", "json left out")


STATUSES = st.sampled_from(["pass", "warn", "fail", "not_evaluated"])
FINDINGS = st.lists(
    st.builds(
        Finding,
        rule=st.sampled_from(["a", "b", "blind", "grades"]),
        axis=st.sampled_from(AXES),
        status=STATUSES,
        message=st.text(max_size=8),
        scope=st.sampled_from(["", "x", "y"]),
        since_ns=st.none() | st.integers(0, 9),
        cause=st.sampled_from(["", "oom_kill", "restart", "odd"]),
    ).flatmap(lambda f: st.booleans().map(lambda hard: replace(f, hard=hard and f.status == "fail"))),
    max_size=12,
)


@given(FINDINGS, st.sets(st.sampled_from("ab")), st.sampled_from([None, "SIGINT"]), st.booleans())
def test_no_evidence_of_harm_ever_passes(
    findings: list[Finding], required: set[str], interrupted: str | None, guard: bool
) -> None:
    result = judging.verdict(findings, required=required, interrupted=interrupted, guard_stopped=guard)
    harm = [f for f in findings if f.status == "fail"]
    if any(f.hard for f in harm):
        assert (result.overall, result.exit_code) == ("FAIL", 1)
    if result.overall == "PASS":
        assert not harm
        assert not interrupted
        assert not guard
        assert any(f.status in ("pass", "warn") for f in findings)
        assert bool(result.partial) == any(f.status == "not_evaluated" for f in findings)
    assert (result.exit_code == 0) == (result.overall == "PASS")
    assert len(result.line) < 4000


# ---------------------------------------------------------------------------------------------------------------------
# Folders

PHASES = [golden.phase("measure", "measure", 0, 600)]
TICKS: list[tuple[float, str, dict[str, object]]] = [(60.0 * k, "note", {"text": "tick"}) for k in range(10)]


def slow(seconds: float) -> list[Outcome]:
    """Answers of 8 s: enough for every rule, and few lines."""
    return golden.steady(seconds, tpot_s=0.08)


def client() -> list[Any]:
    steady = {"loop_lag_ms": 2, "cpu_percent": 3, "in_flight": 4, "rss_bytes": 90 << 20}
    return [s for metric, value in steady.items() for s in golden.series("client", metric, [value] * 600)]


def host() -> list[Any]:
    seen = [golden.sample(m, "observed", 1, 0, text="") for m in ("host", "kernel", "process")]
    metrics = {"mem_available_bytes": 20 << 30, "pswpin_pages_per_s": 0, "pswpout_pages_per_s": 0, "oom_kill_total": 0}
    return (
        seen
        + [s for metric, value in metrics.items() for s in golden.series("host", metric, [value] * 602)]
        + (golden.series("process", "rss_anon_bytes", [1 << 30] * 602))
    )


def test_a_healthy_run_passes_but_for_the_gpu_that_it_lacks(tmp_path: Path) -> None:
    blind = golden.sample("nvidia", "observed", 0, 0, text="no NVIDIA driver")
    golden.build(tmp_path, outcomes=slow(600), phases=PHASES, events=TICKS, samples=[*client(), *host(), blind])
    result = judge(tmp_path)
    assert (result.line, result.exit_code) == ("PASS (partial: nvidia not observed)", 0)


def test_a_crash_at_minute_five_names_the_restart_the_time_and_the_lost_requests(tmp_path: Path) -> None:
    lost = [golden.failed(9000 + k, 299.9, "connection_reset", after_s=0.2) for k in range(4)]
    lost += [golden.failed(9010 + k, 301 + k, "connect_refused", after_s=0.01) for k in range(8)]
    outcomes = [o for o in slow(600) if not golden.at(300) < (o.done_ns or 0) < golden.at(312)] + lost
    gone = [
        golden.sample("process", "process_gone", 1, 300.5, text="gone", pid="7", name="serve", role="listener"),
        golden.sample("process", "restart", 1, 310, text="back", pid="8", name="serve"),
    ]
    golden.build(tmp_path, outcomes=outcomes, phases=PHASES, events=TICKS, samples=[*client(), *host(), *gone])
    result = judge(tmp_path)
    assert (result.line, result.exit_code) == ("FAIL (restart)", 1)
    assert "at 5:0" in result.reasons[0]
    assert "12 requests lost" in result.reasons[0]
    assert "answers again after" in result.reasons[0]


def test_judging_again_offline_gives_the_same_files(tmp_path: Path) -> None:
    golden.build(tmp_path, outcomes=golden.steady(60), phases=[golden.phase("measure", "measure", 0, 60)])
    first = judge(tmp_path)
    names = ("findings.json", "summary.json", "report.md")
    before = [(tmp_path / name).read_bytes() for name in names]
    assert judge(tmp_path) == first
    assert [(tmp_path / name).read_bytes() for name in names] == before


def test_a_run_cut_by_a_signal_has_a_complete_partial_report(tmp_path: Path) -> None:
    phases = [golden.phase("measure", "measure", 0, 210)]
    golden.build(tmp_path, outcomes=golden.steady(210), phases=phases, samples=client(), reason="signal",
                 events=[(210.0, "signal", {"name": "SIGTERM"})])  # fmt: skip
    result = judge(tmp_path)
    assert (result.line, result.exit_code) == ("INCONCLUSIVE (interrupted)", 143)
    assert any("210 s of 600 s planned" in reason for reason in result.reasons)
    assert "TTFT p50" in (tmp_path / "report.md").read_text()


def test_a_killed_client_leaves_a_run_that_is_judged_and_does_not_pass(tmp_path: Path) -> None:
    phases = [golden.phase("measure", "measure", 0, None)]
    golden.build(tmp_path, outcomes=golden.steady(100), phases=phases, reason=None)
    with (tmp_path / "outcomes-0.jsonl").open("ab") as file:
        file.write(b'{"id":"chat_short-00')
    assert judge(tmp_path).line == "INCONCLUSIVE (cut_short)"


def test_a_run_in_which_nothing_succeeded_is_judged_and_valid_json(tmp_path: Path) -> None:
    outcomes = [golden.failed(k, 0.02 * k, "connect_refused", after_s=0.001) for k in range(20)]
    golden.build(tmp_path, outcomes=outcomes, phases=[golden.phase("measure", "measure", 0, 600)])
    result = judge(tmp_path)
    assert result.exit_code == 1
    assert result.overall == "FAIL"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["requests"] == {"ok": 0, "failed": 20, "incomplete": 0}
    assert summary["errors"] == {"connect_refused": 20}
    assert summary["classes"][0]["output_tokens_per_s"] in (None, 0.0)
    assert "ttft" not in summary["classes"][0]["latencies"]


def test_skipped_rules_do_not_run_and_options_reach_their_rule(tmp_path: Path) -> None:
    text = golden.SCENARIO + "skip_rules: [blind]\nrules: {duration: {min_seconds: 700}}\n"
    golden.build(tmp_path, outcomes=slow(600), phases=PHASES, scenario=text)
    judge(tmp_path)
    findings = json.loads((tmp_path / "findings.json").read_text())["findings"]
    assert "blind" not in {f["rule"] for f in findings}
    duration = next(f for f in findings if f["rule"] == "duration")
    assert (duration["status"], duration["bound"]) == ("fail", 700.0)


def test_a_rule_that_breaks_is_our_own_fault_and_hides_nothing(tmp_path: Path) -> None:
    run = golden.build(tmp_path, outcomes=golden.steady(5))
    module = ModuleType("broken")

    def check(run: Run, options: object) -> list[Finding]:
        raise ZeroDivisionError("by nothing")

    module.check = check  # type: ignore[attr-defined]
    findings = run_rule("broken", module, run, None)
    assert {f.status for f in findings} == {"fail", "not_evaluated"}
    result = say(*ALL, *findings)
    assert (result.line, result.exit_code) == ("INCONCLUSIVE (own_fault)", 2)
    assert "ZeroDivisionError: by nothing (test_verdict.py:" in result.reasons[0]
    assert say(*ALL, *findings, KILLED).exit_code == 1


def test_a_folder_without_a_scenario_says_so(tmp_path: Path) -> None:
    golden.build(tmp_path, outcomes=[], scenario=None)
    with pytest.raises(UserError):
        judge(tmp_path)


@pytest.mark.parametrize("name", ["outcomes-0.jsonl", "samples-fast.jsonl", "samples-engine-0.jsonl", "windows-0.hlog",
                                  "environment.json", "journal.jsonl"])  # fmt: skip
@pytest.mark.parametrize("keep", [None, 0.5])
def test_a_file_that_is_gone_empty_or_half_breaks_no_rule(name: str, keep: float | None, tmp_path: Path) -> None:
    phases = [golden.phase("measure", "measure", 0, 60)]
    golden.build(tmp_path, outcomes=golden.steady(60), phases=phases, samples=client()[:200] + host())
    path = tmp_path / name
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[: int(len(data) * keep)])
    result = judge(tmp_path)
    findings = json.loads((tmp_path / "findings.json").read_text())["findings"]
    assert not [f["message"] for f in findings if f["cause"] == "own_fault"]
    assert result.overall != "PASS"
    assert (tmp_path / "report.md").stat().st_size > 500
