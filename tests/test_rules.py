"""Each rule passes a healthy run, fails on each kind of evidence, and never passes what it could not see."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import plugins, strict
from loadgen.record import Run
from loadgen.rules import Needs, slo, sureness
from loadgen.rules.slo import parse_slo
from loadgen.types import Finding, Grade, Outcome, PhaseSpan, Sample, UserError

SECONDS = 90
GIB = 1 << 30
SCENARIO = """\
name: golden
concurrency: 4
classes:
  chat_short: {weight: 1}
phases:
  - {kind: measure, duration: %d}
%s"""


def seen(monitor: str, observed: bool = True, why: str = "", at_s: float = 0.0) -> Sample:
    return golden.sample(monitor, "observed", float(observed), at_s, text=why)


def host(**metrics: Any) -> list[Sample]:
    """A quiet host; a metric given is a number, or a function of the second."""
    quiet = {
        "mem_available_bytes": 20 * GIB, "pswpin_pages_per_s": 0, "pswpout_pages_per_s": 0, "oom_kill_total": 3,
        "psi_memory_some_percent": 0, "psi_memory_full_percent": 0,
    }  # fmt: skip
    made = [seen("host")]
    for metric, value in (quiet | metrics).items():
        each = [value(k) if callable(value) else value for k in range(SECONDS + 2)]
        made += golden.series("host", metric, each)
    return made


def client(**metrics: Any) -> list[Sample]:
    steady = {"loop_lag_ms": 2, "cpu_percent": 3, "in_flight": 4, "rss_bytes": 90 << 20}
    return [
        sample
        for metric, value in (steady | metrics).items()
        for sample in golden.series("client", metric, [value(k) if callable(value) else value for k in range(SECONDS)])
    ]


def gpu(**metrics: Any) -> list[Sample]:
    steady = {
        "memory_used_bytes": 20 * GIB, "temperature_c": 60, "utilization_percent": 100, "sm_clock_mhz": 2000,
        "clock_event_reasons": 0,
    }  # fmt: skip
    made = [seen("nvidia")]
    for metric, value in (steady | metrics).items():
        each = [value(k) if callable(value) else value for k in range(SECONDS + 2)]
        made += golden.series("nvidia", metric, each, gpu="0")
    return made


def tree(pid: str = "7") -> list[Sample]:
    return [seen("process"), *golden.series("process", "rss_anon_bytes", [GIB] * (SECONDS + 2), pid=pid, name="serve")]


def happening(monitor: str, event: str, at_s: float, /, text: str = "said so", **labels: str) -> Sample:
    return Sample(monitor, event, 1.0, golden.at(at_s), labels, text)


def run_of(
    folder: Path,
    outcomes: Sequence[Outcome] | None = None,
    samples: Sequence[Sample] | None = None,
    *,
    scenario: str = "",
    phases: Sequence[golden.Phase] | None = None,
    **more: Any,
) -> Run:
    """A run of 90 s without a fault, but for what is given."""
    return golden.build(
        folder,
        outcomes=golden.steady(SECONDS) if outcomes is None else outcomes,
        samples=[*host(), seen("kernel"), *tree(), *gpu(), *client()] if samples is None else samples,
        phases=[golden.phase("measure", "measure", 0, SECONDS)] if phases is None else phases,
        scenario=SCENARIO % (SECONDS, scenario),
        **({"events": [(k * 10.0, "note", {"text": "tick"}) for k in range(9)]} | more),
    )


def check(name: str, run: Run, **options: Any) -> list[Finding]:
    module = plugins.load("rules", name)
    findings: list[Finding] = module.check(run, plugins.options(module, options))
    return findings


def only(findings: list[Finding], status: str) -> Finding:
    found = [f for f in findings if f.status == status]
    assert len(found) == 1, findings
    return found[0]


def replaced(outcomes: list[Outcome], at_s: float, *instead: Outcome) -> list[Outcome]:
    """The outcomes with those that ended after `at_s` dropped and others in their place."""
    return [o for o in outcomes if (o.done_ns or 0) < golden.at(at_s)] + list(instead)


RULES = plugins.names("rules")


# ---------------------------------------------------------------------------------------------------------------------
# What holds for every rule


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("healthy"))


@pytest.mark.parametrize("name", RULES)
def test_a_healthy_run_passes_every_rule(name: str, healthy: Run) -> None:
    findings = check(name, healthy)
    assert {f.status for f in findings} <= {"pass"}, findings
    assert findings or name in {"slo", "server_log", "guard"}
    assert all(f.rule == name and f.message and not f.hard and not f.cause for f in findings)


@pytest.mark.parametrize("name", RULES)
def test_an_empty_folder_passes_no_rule_about_the_server(name: str, tmp_path: Path) -> None:
    run = golden.build(tmp_path, outcomes=[], phases=[], reason=None)
    findings = check(name, run)
    statuses = {f.status for f in findings if f.axis != "measurement"}
    assert statuses <= {"not_evaluated"}, findings
    assert all(f.status != "pass" for f in findings if name == "duration")


@pytest.mark.parametrize("name", RULES)
def test_every_rule_says_what_it_needs_and_documents_itself(name: str) -> None:
    module = plugins.load("rules", name)
    assert isinstance(module.needs(module.Options()), Needs)
    for part in ("What:", "Why:", "Threshold:"):
        assert part.removesuffix(":") in (module.__doc__ or ""), part


def readme_row(name: str) -> str:
    """The rule's row of the reference table in the folder's README."""
    module = plugins.load("rules", name)
    options = strict.plain(module.Options())
    said = ", ".join(
        f"`{key}` {' '.join(value) or '–' if isinstance(value, list) else value}" for key, value in options.items()
    )
    return f"| `{name}` | {plugins.about('rules', name)} | {said or '–'} |"


@pytest.mark.parametrize("name", RULES)
def test_the_readme_has_a_row_that_is_true(name: str) -> None:
    readme = Path(plugins.__file__).parent / "rules" / "README.md"
    assert readme_row(name) in readme.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", ["oom", "headroom", "swap", "gpu", "thermal", "kernel"])
def test_a_host_that_is_not_the_servers_proves_nothing(name: str, tmp_path: Path) -> None:
    text = (SCENARIO % (SECONDS, "")) + "target: {url: 'http://spark.example:8000'}\n"
    run = golden.build(tmp_path, outcomes=golden.steady(9), samples=host(), scenario=text,
                       phases=[golden.phase("measure", "measure", 0, 9)])  # fmt: skip
    finding = only(check(name, run), "not_evaluated")
    assert "another host" in finding.message


def test_needs_name_what_a_scenario_lacks() -> None:
    needs = Needs(seconds=60, per_class=24, monitors=("host", "kernel"))
    assert needs.unreachable(600, {"chat": 30.0}, ["kernel"]) == []
    why = needs.unreachable(30, {"chat": 30.0, "long": 3.5}, ["nvidia"])
    assert len(why) == 3
    assert "long" in why[1]
    assert "chat" not in why[1]


# ---------------------------------------------------------------------------------------------------------------------
# errors, grades


def test_one_error_inside_a_200_stream_is_hard(tmp_path: Path) -> None:
    outcomes = [*golden.steady(SECONDS), golden.failed(999, 40, "in_band_error", http_status=200)]
    finding = [f for f in check("errors", run_of(tmp_path, outcomes)) if f.hard]
    assert [f.cause for f in finding] == ["in_band_error"]
    assert "0:40" in finding[0].message
    assert "chat_short-000999" in finding[0].evidence


def test_one_refused_connection_in_a_hundred_and_fifty_warns_and_five_fail(tmp_path: Path) -> None:
    base = golden.steady(SECONDS)
    one = check("errors", run_of(tmp_path / "1", [*base, golden.failed(900, 40, "http_error")]))
    assert only(one, "warn").n == len(base) + 1
    five = [golden.failed(900 + k, 40 + k, "http_error") for k in range(5)]
    finding = only(check("errors", run_of(tmp_path / "5", [*base, *five])), "fail")
    assert not finding.hard
    assert finding.number == pytest.approx(5 / (len(base) + 5))


def test_a_class_that_fails_shows_although_the_others_hide_it(tmp_path: Path) -> None:
    outcomes = golden.steady(600)
    outcomes += [golden.failed(k, 10 * k, "http_error", cls="long") for k in range(3)]
    finding = only(check("errors", run_of(tmp_path, outcomes)), "fail")
    assert finding.scope == "long"


def test_nothing_that_succeeded_is_a_hard_failure(tmp_path: Path) -> None:
    run = run_of(tmp_path, [golden.failed(k, k / 50, "connect_refused") for k in range(20)])
    finding = only(check("errors", run), "fail")
    assert finding.hard
    assert finding.cause == "failed"
    assert "no request succeeded" in finding.message


def test_what_we_cut_or_broke_ourselves_is_no_error_of_the_server(tmp_path: Path) -> None:
    outcomes = [
        *golden.steady(SECONDS),
        golden.incomplete(900, 89, cut_s=90),
        golden.failed(901, 50, "client_resource"),
    ]
    assert {f.status for f in check("errors", run_of(tmp_path, outcomes))} == {"pass"}


@pytest.mark.parametrize("kind", ["garbage", "degenerate", "empty"])
def test_one_garbage_answer_is_hard(kind: str, tmp_path: Path) -> None:
    bad = golden.outcome(900, 50, grade=Grade(False, 0, kind, why="!!!!!!", grader="degenerate"))
    finding = only(check("grades", run_of(tmp_path, [*golden.steady(SECONDS), bad])), "fail")
    assert finding.hard
    assert finding.cause == "degenerate_output"


def test_one_slip_warns_and_many_are_hard(tmp_path: Path) -> None:
    wrong = [golden.outcome(900 + k, 50 + k, grade=Grade(False, 0, "wrong", why="42")) for k in range(6)]
    base = golden.steady(SECONDS)
    assert only(check("grades", run_of(tmp_path / "1", base + wrong[:1])), "warn").cause == "wrong_answers"
    run = run_of(tmp_path / "6", base + wrong)
    assert only(check("grades", run), "fail").hard
    assert only(check("grades", run, tolerate=0.5), "warn").n == len(base) + 6


def test_a_class_left_out_is_named_and_not_evaluated(tmp_path: Path) -> None:
    event = (1.0, "class_left_out", {"cls": "json", "why": "model cannot", "when": "functional"})
    findings = check("grades", run_of(tmp_path, events=[event]))
    assert only(findings, "not_evaluated").scope == "json"
    assert only(findings, "pass").scope == "chat_short"


def test_answers_that_nobody_graded_do_not_pass(tmp_path: Path) -> None:
    ungraded = golden.steady(20)
    for outcome in ungraded:
        outcome.grade = None
    assert only(check("grades", run_of(tmp_path, ungraded)), "not_evaluated").n == 0


# ---------------------------------------------------------------------------------------------------------------------
# oom, kernel, restart, hung


def oom(folder: Path, *extra: Sample, log: bool = True, **metrics: Any) -> list[Finding]:
    samples = [*host(**metrics), *tree(), seen("kernel", log, "" if log else "EPERM"), *extra]
    return check("oom", run_of(folder, golden.steady(5), samples))


def test_a_kill_in_the_servers_tree_is_hard_and_names_pid_and_time(tmp_path: Path) -> None:
    finding = only(oom(tmp_path, happening("kernel", "oom_kill_memcg", 44, pid="7", comm="serve")), "fail")
    assert finding.hard
    assert finding.cause == "oom_kill"
    assert "0:44" in finding.message
    assert "pid 7 (serve), of the server" in finding.message


def test_a_foreign_containers_kill_only_warns(tmp_path: Path) -> None:
    kill = happening("kernel", "oom_kill_memcg", 44, pid="4711", comm="browser")
    assert only(oom(tmp_path, kill, oom_kill_total=lambda k: 3 + (k > 44)), "warn").scope == "foreign"


def test_a_whole_host_out_of_memory_is_hard_whoever_died(tmp_path: Path) -> None:
    finding = only(oom(tmp_path, happening("kernel", "oom_kill_global", 44, pid="4711", comm="sshd")), "fail")
    assert finding.cause == "host_oom"


def test_the_cgroups_own_counter_is_enough(tmp_path: Path) -> None:
    counter = golden.series("cgroup", "oom_kill_total", [0] * 40 + [1] * 50)
    finding = only(oom(tmp_path, *counter, log=False), "fail")
    assert finding.since_ns == golden.at(40)


def test_an_unexplained_rise_of_the_hosts_counter_warns_and_with_a_vanished_server_is_hard(tmp_path: Path) -> None:
    rise = {"oom_kill_total": lambda k: 3 + (k > 44)}
    assert "victim unknown" in only(oom(tmp_path / "a", log=False, **rise), "warn").message
    gone = happening("process", "process_gone", 45, pid="7", name="serve", role="listener")
    assert only(oom(tmp_path / "b", gone, log=False, **rise), "fail").hard


def test_without_log_and_counter_no_kill_could_have_been_seen(tmp_path: Path) -> None:
    run = run_of(tmp_path, golden.steady(5), [*tree(), seen("kernel", False, "EPERM")])
    assert "EPERM" in only(check("oom", run), "not_evaluated").message


def test_kernel_events_fail_and_warn_by_their_severity(tmp_path: Path) -> None:
    events = [
        happening("kernel", "machine_check", 30, severity="fail"),
        happening("kernel", "hung_task", 31, severity="high"),
    ]
    findings = check("kernel", run_of(tmp_path, golden.steady(5), [seen("kernel"), *tree(), *events]))
    assert {f.scope: f.status for f in findings} == {"machine_check": "fail", "hung_task": "warn"}


def test_one_outage_is_one_finding_with_time_and_lost_requests(tmp_path: Path) -> None:
    base = golden.steady(SECONDS)
    crash = [o for o in base if not 40 <= ((o.done_ns or 0) - golden.BASE_NS) / 1e9 < 50]
    crash += [golden.failed(900 + k, 39.8, "connection_reset", after_s=0.4) for k in range(4)]
    crash += [golden.failed(910 + k, 41 + 0.5 * k, "connect_refused", after_s=0.01) for k in range(10)]
    samples = [
        *tree(),
        happening("process", "process_gone", 41, pid="7", name="serve", role="listener"),
        happening("process", "restart", 48, pid="8", name="serve"),
        happening("engine", "counter_reset", 49),
    ]
    finding = only(check("restart", run_of(tmp_path, crash, samples)), "fail")
    assert finding.hard
    assert finding.cause == "restart"
    assert finding.number == 14
    assert finding.since_ns == golden.at(41)
    for part in ("at 0:41", "serve is gone", "10 connections were refused", "another process", "14 requests lost"):
        assert part in finding.message


def test_a_server_that_never_comes_back_is_down(tmp_path: Path) -> None:
    outcomes = replaced(golden.steady(SECONDS), 40, *(golden.failed(k, 40 + k, "connect_refused") for k in range(20)))
    finding = only(check("restart", run_of(tmp_path, outcomes)), "fail")
    assert finding.cause == "server_down"
    assert "no answer since" in finding.message


def test_two_crashes_are_two_findings(tmp_path: Path) -> None:
    events = [happening("process", "restart", s, pid=str(s), name="serve") for s in (20, 60)]
    findings = check("restart", run_of(tmp_path, samples=[*tree(), *events]))
    assert [f.since_ns for f in findings] == [golden.at(20), golden.at(60)]


def test_single_refusals_between_good_answers_are_no_restart(tmp_path: Path) -> None:
    refused = [golden.failed(900 + k, 10 * k + 5, "connect_refused", after_s=0.001) for k in range(6)]
    assert check("restart", run_of(tmp_path, golden.steady(SECONDS) + refused))[0].status == "pass"


def test_silence_with_requests_in_flight_is_hung_and_hard_when_it_never_ends(tmp_path: Path) -> None:
    stuck = [golden.failed(900 + k, 30, "idle_timeout", after_s=60) for k in range(4)]
    run = run_of(tmp_path, replaced(golden.steady(SECONDS), 30, *stuck))
    finding = only(check("hung", run, silence=20), "fail")
    assert finding.hard
    assert finding.number == pytest.approx(60, abs=3)
    assert "0:3" in finding.message or "0:28" in finding.message


def test_a_stall_that_ends_is_no_hard_failure(tmp_path: Path) -> None:
    stuck = [golden.failed(900 + k, 30, "idle_timeout", after_s=40) for k in range(4)]
    outcomes = replaced(golden.steady(SECONDS), 30, *stuck, golden.outcome(999, 72))
    finding = only(check("hung", run_of(tmp_path, outcomes), silence=20), "fail")
    assert not finding.hard


def test_a_long_prefill_that_this_server_needs_is_not_hung(tmp_path: Path) -> None:
    long = [golden.outcome(k, 30 * k, ttft_s=25, tokens=10) for k in range(3)]
    assert only(check("hung", run_of(tmp_path, long), silence=20), "pass").bound == pytest.approx(50)


# ---------------------------------------------------------------------------------------------------------------------
# headroom, swap, gpu, thermal


def dip(to_gib: float) -> dict[str, Any]:
    return {"mem_available_bytes": lambda k: (to_gib if 70 <= k < 75 else 20) * GIB}


@pytest.mark.parametrize(("sign", "status"), [
    ({}, "warn"),
    ({"psi_memory_full_percent": lambda k: 40 * (68 <= k < 76)}, "fail"),
    ({"pswpout_pages_per_s": lambda k: 9000 * (k == 72)}, "fail"),
])  # fmt: skip
def test_memory_below_the_stop_line_fails_only_with_a_second_sign(
    sign: dict[str, Any], status: str, tmp_path: Path
) -> None:
    samples = [*host(**dip(2.0), **sign), *tree(), seen("kernel")]
    finding = only(check("headroom", run_of(tmp_path, golden.steady(5), samples)), status)
    assert finding.number == pytest.approx(2.0)
    assert not finding.hard


def test_driver_refusals_warn_alone_and_fail_with_low_memory(tmp_path: Path) -> None:
    refusal = happening("kernel", "nv_no_memory", 72, severity="warn")
    alone = check("headroom", run_of(tmp_path / "a", golden.steady(5), [*host(), *tree(), seen("kernel"), refusal]))
    assert only(alone, "warn").scope == "driver"
    both = check("headroom", run_of(tmp_path / "b", golden.steady(5), [*host(**dip(2.0)), *tree(), refusal]))
    assert "driver refused" in only(both, "fail").message


def test_headroom_is_measured_against_this_hosts_own_idle_memory(tmp_path: Path) -> None:
    phases = [golden.phase("measure", "measure", 30, SECONDS)]
    samples = [*host(mem_available_bytes=lambda k: (100 if k < 30 else 30) * GIB), *tree()]
    finding = only(check("headroom", run_of(tmp_path, golden.steady(5), samples, phases=phases)), "warn")
    assert finding.bound == pytest.approx(35.0)


def test_memory_that_nobody_read_is_not_evaluated(tmp_path: Path) -> None:
    for rule in ("headroom", "swap"):
        assert only(check(rule, run_of(tmp_path / rule, golden.steady(5), tree())), "not_evaluated")


@pytest.mark.parametrize(("rate", "seconds", "psi", "status"), [
    (3000, 8, 30, "fail"), (3000, 8, 1, "warn"), (3000, 3, 30, "pass"), (1000, 40, 30, "pass"),
])  # fmt: skip
def test_swapping_fails_when_it_lasts_and_hurts(rate: int, seconds: int, psi: int, status: str, tmp_path: Path) -> None:
    busy = range(40, 40 + seconds)
    samples = host(
        pswpin_pages_per_s=lambda k: rate // 2 * (k in busy), pswpout_pages_per_s=lambda k: rate // 2 * (k in busy),
        psi_memory_some_percent=lambda k: psi * (k in busy),
    )  # fmt: skip
    assert only(check("swap", run_of(tmp_path, golden.steady(5), [*samples, *tree()])), status)


def gpu_run(folder: Path, *extra: Sample, **metrics: Any) -> Run:
    return run_of(folder, golden.steady(5), [*tree(), seen("kernel"), *gpu(**metrics), *extra])


def test_gpu_memory_that_goes_on_growing_fails_and_a_plateau_does_not(tmp_path: Path) -> None:
    leak = check("gpu", gpu_run(tmp_path / "leak", memory_used_bytes=lambda k: 20 * GIB + k * (6 << 20)))
    assert only(leak, "fail").cause == "memory_growing"
    plateau = check("gpu", gpu_run(tmp_path / "flat", memory_used_bytes=lambda k: 20 * GIB + min(k, 30) * (20 << 20)))
    assert only(plateau, "pass").number == pytest.approx(360, abs=120)


def test_a_fatal_xid_is_hard_and_an_advice_warns(tmp_path: Path) -> None:
    bus = happening("kernel", "xid", 50, xid="79", group="bus", severity="fail")
    finding = only(check("gpu", gpu_run(tmp_path / "a", bus)), "fail")
    assert finding.hard
    assert finding.cause == "gpu_lost"
    advice = happening("kernel", "xid", 50, xid="154", group="recovery_action", severity="warn")
    assert only(check("gpu", gpu_run(tmp_path / "b", advice)), "warn")


def test_one_xid_that_kernel_and_driver_tell_is_one_finding(tmp_path: Path) -> None:
    logged = happening("kernel", "xid", 50, xid="31", group="application", severity="fail")
    heard = happening("nvidia", "xid", 50.2, xid="31", group="application", severity="fail", gpu="0")
    alone = happening("nvidia", "xid", 70, xid="13", group="application", severity="fail", gpu="0")
    failed = [f for f in check("gpu", gpu_run(tmp_path, logged, heard, alone)) if f.status == "fail"]
    assert [(f.scope, f.evidence) for f in failed] == [("xid 31", "samples: kernel"), ("xid 13", "samples: nvidia")]


def test_driver_call_that_returned_warns_and_one_that_never_did_fails(tmp_path: Path) -> None:
    held = happening("nvidia", "call_pending", 30, call="power", gpu="0")
    back = happening("nvidia", "call_returned", 60, call="power", gpu="0", seconds="35")
    assert "after 35 s" in only(check("gpu", gpu_run(tmp_path / "a", held, back)), "warn").message
    assert "never returned" in only(check("gpu", gpu_run(tmp_path / "b", held)), "fail").message


@pytest.mark.parametrize(
    ("metric", "status"),
    [("ecc_uncorrected_total", "fail"), ("ecc_corrected_total", "warn"), ("remap_pending", "warn"),
     ("remap_failed", "fail")],
)  # fmt: skip
def test_errors_of_the_memory_count_by_what_came_during_the_run(metric: str, status: str, tmp_path: Path) -> None:
    before = check("gpu", gpu_run(tmp_path / "a", **{metric: 7}))
    assert {f.status for f in before} == {"pass"}, "from before the run"
    during = gpu_run(tmp_path / "b", **{metric: lambda k: 7 + (k > 40)})
    assert only(check("gpu", during), status).since_ns == golden.at(41)


def test_pcie_replays_warn_and_a_hundred_an_hour_fail(tmp_path: Path) -> None:
    assert only(check("gpu", gpu_run(tmp_path / "a", pcie_replays_total=lambda k: k // 30)), "warn")
    assert only(check("gpu", gpu_run(tmp_path / "b", pcie_replays_total=lambda k: k * 2)), "fail")


def test_a_gpu_that_stops_answering_is_lost(tmp_path: Path) -> None:
    gone = seen("nvidia", False, "GPU is lost", at_s=60)
    assert only(check("gpu", gpu_run(tmp_path, gone)), "fail").hard


def test_no_gpu_is_not_evaluated(tmp_path: Path) -> None:
    run = run_of(tmp_path, golden.steady(5), [*tree(), seen("nvidia", False, "no driver")])
    for rule in ("gpu", "thermal"):
        assert "no driver" in only(check(rule, run), "not_evaluated").message


def test_unified_memory_without_a_figure_is_not_evaluated(tmp_path: Path) -> None:
    samples = [s for s in gpu() if s.metric != "memory_used_bytes"]
    assert (
        only(check("gpu", run_of(tmp_path, golden.steady(5), [*tree(), *samples])), "not_evaluated").scope == "memory"
    )


@pytest.mark.parametrize(("hot_seconds", "status"), [(0, "pass"), (5, "warn"), (40, "fail")])
def test_heat_counts_by_its_share_of_the_busy_time(hot_seconds: int, status: str, tmp_path: Path) -> None:
    run = gpu_run(tmp_path, clock_event_reasons=lambda k: 0x40 if k < hot_seconds else 0x1)
    assert only(check("thermal", run), status)


@pytest.mark.parametrize(("bits", "warns"), [(0x4, 0), (0x1, 0), (0x48, 0), (0x8, 1), (0x80, 1), (0xC8, 1)])
def test_hardware_that_holds_the_clock_for_another_reason_than_heat_warns(
    bits: int, warns: int, tmp_path: Path
) -> None:
    found = check("thermal", gpu_run(tmp_path, clock_event_reasons=lambda k: bits if k == 40 else 0))
    assert [f.since_ns for f in found if f.cause == "power_brake"] == [golden.at(40)] * warns


def test_sensor_that_reached_its_critical_temperature_warns(tmp_path: Path) -> None:
    hot = happening("thermal", "critical_temperature", 40, "nvme Composite at 85 °C", chip="nvme")
    assert "nvme Composite at 85 °C" in only(check("thermal", gpu_run(tmp_path, hot)), "warn").message


def test_high_temperature_alone_is_no_verdict_and_a_falling_clock_warns(tmp_path: Path) -> None:
    assert only(check("thermal", gpu_run(tmp_path / "a", temperature_c=88)), "pass")
    slow = gpu_run(tmp_path / "b", sm_clock_mhz=lambda k: 1000 if k > 70 else 2000)
    assert only(check("thermal", slow), "warn")


# ---------------------------------------------------------------------------------------------------------------------
# generator, blind, duration


def generator(folder: Path, outcomes: list[Outcome] | None = None, **metrics: Any) -> dict[str, Finding]:
    return {f.scope: f for f in check("generator", run_of(folder, outcomes, client(**metrics)))}


@pytest.mark.parametrize(("scope", "metrics"), [
    ("loop lag", {"loop_lag_ms": lambda k: 900 if k == 50 else 2}),
    ("cpu", {"cpu_percent": lambda k: 99 if 30 <= k < 45 else 5}),
    ("seats", {"in_flight": 3}),
])  # fmt: skip
def test_a_client_at_its_limit_invalidates_the_measurement(scope: str, metrics: dict[str, Any], tmp_path: Path) -> None:
    findings = generator(tmp_path, **metrics)
    assert [f.scope for f in findings.values() if f.status == "fail"] == [scope]
    assert findings[scope].cause == "client_limited"
    assert findings[scope].axis == "measurement"


def test_a_short_burst_of_cpu_is_no_limit(tmp_path: Path) -> None:
    assert generator(tmp_path, cpu_percent=lambda k: 99 if 30 <= k < 38 else 5)["cpu"].status == "pass"


def test_requests_sent_late_invalidate_but_connecting_is_not_ours(tmp_path: Path) -> None:
    late = golden.steady(SECONDS, send_lag_s=0.03)
    assert generator(tmp_path / "a", late)["send lag"].status == "fail"
    connecting = golden.steady(SECONDS, send_lag_s=0.03, connect_ns=29_000_000)
    assert generator(tmp_path / "b", connecting)["send lag"].status == "pass"


def test_littles_law_finds_time_that_the_client_lost(tmp_path: Path) -> None:
    assert generator(tmp_path, golden.steady(SECONDS, think_s=0.3))["littles law"].status == "fail"


def test_seats_that_wait_for_a_refusing_server_are_not_the_clients_fault(tmp_path: Path) -> None:
    outcomes = replaced(golden.steady(SECONDS), 40, *(golden.failed(k, 40 + k, "connect_refused") for k in range(20)))
    findings = generator(tmp_path, outcomes)
    assert "littles law" not in findings
    assert findings["seats"].status == "not_evaluated"


@pytest.mark.parametrize(
    ("lag_ms", "inexact", "status"), [(0.1, 0, "pass"), (30, 0, "pass"), (30, 5, "fail"), (0.1, 5, "pass")]
)
def test_late_reads_spoil_a_run_only_where_chunks_meet_in_them(
    tmp_path: Path, lag_ms: float, inexact: int, status: str
) -> None:
    outcomes = golden.steady(SECONDS)
    for o in outcomes:
        o.times, o.inexact = "kernel", inexact
        o.lags_ns.extend([int(lag_ms * 1e6)] * max(1, o.chunks))
    finding = generator(tmp_path, outcomes)["arrival lag"]
    assert (finding.status, finding.cause) == (status, "client_limited" if status == "fail" else "")


def test_lost_records_are_found(tmp_path: Path) -> None:
    outcomes = golden.steady(SECONDS)
    phases = [golden.phase("measure", "measure", 0, SECONDS, issued=len(outcomes) + 2, ok=len(outcomes) + 2)]
    findings = {f.scope: f for f in check("generator", run_of(tmp_path, outcomes, phases=phases))}
    assert findings["conservation"].status == "fail"
    assert findings["conservation"].cause == "lost_records"


def test_without_engine_samples_its_health_is_not_evaluated(tmp_path: Path) -> None:
    findings = {f.scope: f.status for f in check("generator", run_of(tmp_path, samples=host()))}
    assert findings["loop lag"] == findings["cpu"] == findings["seats"] == "not_evaluated"


def test_a_wall_clock_that_was_set_warns_and_a_clock_at_another_rate_fails(tmp_path: Path) -> None:
    def clocks(folder: str, wall_s: Any) -> Finding:
        events = [(10.0 * k, "note", {"wall": golden.WALL_NS + round(wall_s(10.0 * k) * 1e9)}) for k in range(10)]
        events = [(at_s, name, fields | {"by": "supervise"}) for at_s, name, fields in events]
        run = run_of(tmp_path / folder, golden.steady(5), client(), events=events)
        return next(f for f in check("generator", run) if f.scope == "clocks")

    assert clocks("set", lambda t: t - (25 if t > 50 else 0)).status == "warn"
    assert clocks("rate", lambda t: t * 1.03).status == "fail"


def test_holes_in_a_monitor_invalidate_and_name_where(tmp_path: Path) -> None:
    samples = [s for s in host() if not golden.at(40) < s.at_ns < golden.at(60)]
    finding = only(check("blind", run_of(tmp_path, golden.steady(5), samples)), "fail")
    assert finding.scope == "host"
    assert "0:40" in finding.message


def test_a_monitor_that_cannot_see_is_not_evaluated_with_its_reason(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, golden.steady(5), [*host(), seen("kernel", False, "EPERM")], scenario="monitors: {disk: {}}\n"
    )
    said = {f.scope: f.message for f in check("blind", run) if f.status == "not_evaluated"}
    assert said == {"kernel": "kernel not observed: EPERM", "disk": "disk said nothing"}


def test_a_lane_that_died_under_load_invalidates_and_one_that_ended_after_does_not(tmp_path: Path) -> None:
    died = run_of(tmp_path / "a", events=[(40.0, "lane_exit", {"lane": "gpu", "rc": -9})])
    assert only(check("blind", died), "fail").cause == "lane_died"
    after = run_of(tmp_path / "b", events=[(40.0, "signal", {"name": "SIGINT"}), (41.0, "lane_exit", {"lane": "gpu"})])
    assert {f.status for f in check("blind", after)} == {"pass"}


def test_damaged_records_invalidate_a_finished_run_and_warn_of_a_killed_one(tmp_path: Path) -> None:
    for reason, status in (("done", "fail"), (None, "warn")):
        run = run_of(tmp_path / str(reason), reason=reason)
        with (run.folder / "outcomes-0.jsonl").open("ab") as file:
            file.write(b'{"id": "chat_short-0')
        assert only(check("blind", Run(run.folder)), status).cause == "damaged_records"


def test_a_short_run_and_one_without_an_end_are_no_measurement(tmp_path: Path) -> None:
    short = run_of(tmp_path / "a", golden.steady(50), phases=[golden.phase("measure", "measure", 0, 50)])
    assert only(check("duration", short), "fail").cause == "too_short"
    killed = run_of(
        tmp_path / "b", golden.steady(50), phases=[golden.phase("measure", "measure", 0, None)], reason=None
    )
    assert only(check("duration", killed), "fail").cause == "cut_short"
    guard = (50.0, "guard", {"why": "memory"})
    stopped = run_of(tmp_path / "c", phases=[golden.phase("measure", "measure", 0, 50)], events=[guard])
    assert only(check("duration", stopped), "warn").cause == "guard"


# ---------------------------------------------------------------------------------------------------------------------
# drift, retention


@dataclass
class Told:
    """As much of a run as the rules on thirds read, without files: for hundreds of runs."""

    made: list[Outcome]
    seconds: float
    journal: list[dict[str, Any]] = field(default_factory=lambda: [{"at": golden.at(0), "event": "run_start"}])

    finished: bool = True
    environment: dict[str, Any] = field(default_factory=dict)

    def series(self, monitor: str, metric: str) -> dict[Any, Any]:
        return {}

    @property
    def phases(self) -> tuple[PhaseSpan, ...]:
        end = golden.at(self.seconds)
        return (PhaseSpan("measure", "measure", golden.at(0), end, end),)

    def outcomes(self) -> Iterator[Outcome]:
        return iter(self.made)


def noisy(seed: int, *, n: int, rho: float = 0.0, spread: float = 0.4, grow: float = 1.0) -> Told:
    """n requests over 600 s with log-normal latencies of this autocorrelation; `grow` is their rise over the run."""
    rng = random.Random(seed)
    made, x = [], rng.gauss(0, 1)
    for k in range(n):
        x = rho * x + (1 - rho * rho) ** 0.5 * rng.gauss(0, 1)
        slow = 2.718 ** (spread * x) * (1 + (grow - 1) * k / n)
        made.append(golden.outcome(k, 600 * k / n, ttft_s=0.5 * slow, tpot_s=0.02 * slow, tokens=20))
    return Told(made, 600)


@pytest.mark.parametrize("name", ["drift", "retention"])
def test_two_hundred_flat_noisy_runs_give_no_false_alarm(name: str) -> None:
    module: ModuleType = plugins.load("rules", name)
    statuses = [
        finding.status
        for seed in range(200)
        for finding in module.check(noisy(seed, n=(24, 60, 150)[seed % 3], rho=(0, 0.3)[seed % 2]), module.Options())
    ]
    assert statuses.count("fail") == 0
    assert statuses.count("warn") <= 8  # 1 % by design, some more with correlated noise


@pytest.mark.parametrize("name", ["drift", "retention"])
def test_latencies_that_climb_to_three_times_are_found_nearly_always(name: str) -> None:
    module: ModuleType = plugins.load("rules", name)
    found = [module.check(noisy(seed, n=150, grow=3.0), module.Options())[0] for seed in range(40)]
    assert sum(f.status == "fail" for f in found) >= 38
    assert {f.cause for f in found if f.status == "fail"} == {"degrading"}


def test_too_few_answers_per_third_are_not_evaluated_and_say_how_many() -> None:
    for name in ("drift", "retention"):
        module = plugins.load("rules", name)
        finding = only(module.check(noisy(1, n=21), module.Options()), "not_evaluated")
        assert finding.n == 7
        assert "needs 8" in finding.message


@pytest.mark.parametrize("name", ["drift", "retention"])
@pytest.mark.parametrize(
    ("others", "axis", "cause"), [(10, "performance", "degrading"), (70, "measurement", "busy_box")]
)
def test_a_compile_beside_the_server_is_no_decay(name: str, others: int, axis: str, cause: str, tmp_path: Path) -> None:
    slow = [golden.outcome(k, 0.9 * k, ttft_s=0.2 + 0.4 * (k > 60), tpot_s=0.01 + 0.01 * (k > 60)) for k in range(100)]
    samples = host(cpu_busy_percent=lambda k: 30 + (others if k > 50 else 0)) + client()
    samples += [seen("process"), *golden.series("process", "cpu_percent", [100] * SECONDS)]
    (finding,) = check(name, run_of(tmp_path, slow, samples, environment={"host": {"cpus": 4}}))
    assert (finding.status, finding.axis, finding.cause) == ("fail", axis, cause), finding
    assert ("since 0:51" in finding.message) == (cause == "busy_box")


def test_a_mix_that_shifts_to_longer_prompts_is_no_drift() -> None:
    short = [golden.outcome(k, k, ttft_s=0.2, prompt_tokens=300) for k in range(0, 600, 3)]
    long = [
        golden.outcome(k, k, ttft_s=5.0, prompt_tokens=30_000) for k in range(600) if k % (3 if k > 400 else 20) == 0
    ]
    module = plugins.load("rules", "drift")
    findings = module.check(Told(short + long, 600), module.Options())
    assert len(findings) == 2
    assert all(f.status == "pass" for f in findings)


def test_the_strict_preset_fails_what_the_default_lets_pass() -> None:
    module = plugins.load("rules", "retention")
    run = noisy(3, n=300, spread=0.005, grow=1.045)
    assert only(module.check(run, module.Options()), "pass")
    assert only(module.check(run, module.Options(preset="strict")), "fail")


def test_estimated_tokens_are_no_throughput() -> None:
    run = noisy(1, n=60)
    for outcome in run.made:
        outcome.output_tokens_source = "estimated"
    module = plugins.load("rules", "retention")
    assert only(module.check(run, module.Options()), "not_evaluated")


def test_tpot_that_creeps_up_through_a_soak_is_degrading() -> None:
    made = [golden.outcome(k, 2 * k, tpot_s=0.05 + 0.0009 * (2 * k / 10), tokens=60) for k in range(300)]
    module = plugins.load("rules", "retention")
    assert only(module.check(Told(made, 600), module.Options()), "fail").cause == "degrading"


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=40), st.lists(st.floats(0.01, 100), min_size=4, max_size=40))
@settings(max_examples=60, deadline=None)
def test_sureness_turns_its_sign_with_its_sides_and_is_finite(a: list[float], b: list[float]) -> None:
    import numpy as np

    there, back = sureness(np.array(a), np.array(b)), sureness(np.array(b), np.array(a))
    assert there == pytest.approx(-back, abs=1e-6)
    assert abs(there) < 100


# ---------------------------------------------------------------------------------------------------------------------
# slo


def slo_of(folder: Path, text: str, outcomes: list[Outcome] | None = None) -> Finding:
    (finding,) = check("slo", run_of(folder, outcomes, client(), scenario=f'slo: ["{text}"]\n'))
    return finding


@pytest.mark.parametrize(("text", "status", "number"), [
    ("ttft[class=chat_short] p95 < 2s -> fail", "pass", 0.2),
    ("ttft p95 < 150ms", "fail", 0.2),
    ("ttft p95 < 150ms -> warn", "warn", 0.2),
    ("gap max <= 21ms", "pass", 0.02),
    ("tpot[phase=measure,cache=cold] mean < 20.5ms", "pass", 0.02),
    ("error_rate < 1%", "pass", 0.0),
    ("grade_rate >= 0.99", "pass", 1.0),
    ("output_tokens_per_s > 300", "fail", None),
    ("output_tokens_per_s p50 > 40", "pass", 45.9),
])  # fmt: skip
def test_a_service_level_is_judged_by_its_own_words(
    text: str, status: str, number: float | None, tmp_path: Path
) -> None:
    finding = slo_of(tmp_path, text)
    assert finding.status == status, finding
    assert number is None or finding.number == pytest.approx(number, rel=0.01)
    assert finding.n
    assert not finding.hard


def test_an_uncertified_percentile_neither_fails_nor_passes(tmp_path: Path) -> None:
    finding = slo_of(tmp_path, "ttft p99 < 1ms")
    assert finding.status == "not_evaluated"
    assert "662" in finding.message


def test_a_service_level_on_nothing_is_not_evaluated(tmp_path: Path) -> None:
    assert slo_of(tmp_path, "ttft[cache=warm] p50 < 1s").status == "not_evaluated"


@pytest.mark.parametrize(("text", "hint"), [
    ("tftt p95 < 2s", 'did you mean "ttft"'),
    ("ttft[clas=a] p95 < 2s", 'did you mean "class"'),
    ("ttft[class=chat_shrt] p95 < 2s", 'did you mean "chat_short"'),
    ("ttft[class] p95 < 2s", "key=value"),
    ("ttft p95 < 2", "unit of time"),
    ("ttft p96x < 2s", "cannot be read"),
    ("ttft med < 2s", "unknown aggregate"),
    ("ttft p10 < 2s", "unknown aggregate"),
    ("ttft < 2s", "unknown aggregate"),
    ("error_rate p50 < 1%", "leave out"),
    ("error_rate < 5", "share"),
    ("output_tokens_per_s > 3s", "bare number"),
    ("ttft p95 < 2s -> die", "fail or warn"),
    ("ttft p95 = 2s", "cannot be read"),
    ("", "cannot be read"),
])  # fmt: skip
def test_a_service_level_that_cannot_be_read_says_what_is_meant(text: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_slo(text, classes=["chat_short", "json"])
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.sampled_from(slo.LATENCIES), st.sampled_from(["p50", "p95", "p99.9", "mean", "max"]),
    st.sampled_from(["<", "<=", ">"]),
    st.integers(1, 10**6), st.sampled_from(["ms", "s", "m"]), st.sampled_from(["", " -> warn", "->fail"]),
)  # fmt: skip
def test_every_latency_level_parses(metric: str, agg: str, op: str, bound: int, unit: str, then: str) -> None:
    parsed = parse_slo(f" {metric} [class=a, cache=cold]  {agg}{op} {bound}{unit}{then} ")
    assert (parsed.metric, parsed.agg, parsed.op, parsed.cls) == (metric, agg, op, "a")
    assert parsed.bound == pytest.approx(bound * {"ms": 1e-3, "s": 1, "m": 60}[unit])
    assert parsed.then == ("warn" if "warn" in then else "fail")
    assert parsed == replace(parsed)


@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(UserError):
        parse_slo(text)
