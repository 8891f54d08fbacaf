"""Holes in the telemetry and what they were: starvation, sleep, a clock that was set, a reboot; the cases `host`."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from loadgen import clock
from loadgen.clock import Gap, Reading
from loadgen.rules import Finding, blind, host_lost
from loadgen.types import Sample
from monitors import lane
from tests import golden

S = 1_000_000_000
MIB = 1 << 20
CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent / "data/cases/host-clocks.jsonl").read_text().splitlines())
}


def reading(mono_s: float, wall_s: float | None = None, slept_s: float = 0.0, boot: str | None = "b1") -> Reading:
    wall = None if wall_s is None else round(wall_s * S)
    return Reading(round(mono_s * S), round((mono_s + slept_s) * S), wall, boot)


def wall_s(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


@pytest.mark.parametrize(
    ("before", "after", "gaps"),
    [
        (reading(10, 100), reading(11, 101), []),
        (reading(10, 100), reading(22, 112), [Gap("starved", 11.0)]),
        (reading(10, 100), reading(11, 401, 300), [Gap("suspend", 300.0)]),
        (reading(10, 100), reading(11, 76), [Gap("clock_step", -25.0)]),
        (
            reading(10, 100),
            reading(16, 466, 300),
            [Gap("suspend", 300), Gap("clock_step", 60), Gap("starved", 5)],
        ),
        (reading(90000, 100), reading(41, 727, boot="b2"), [Gap("reboot", 627.0)]),
        (reading(10), reading(11), []),
        (reading(10), reading(3, boot="b2"), [Gap("reboot", None)]),
        (reading(10, 100, boot=None), reading(11, 101), []),
    ],
)
def test_what_lay_between_two_readings(before: Reading, after: Reading, gaps: list[Gap]) -> None:
    assert clock.between(before, after, S) == gaps


def test_case_of_a_wall_clock_that_steps_back_during_a_request() -> None:
    case = CASES["host-wallclock-steps-back"]
    sent, _, first = case["input"]["events"]
    before, after = (Reading(round(e["mono_s"] * S), None, round(wall_s(e["wall"]) * S)) for e in (sent, first))
    steps = [gap.seconds for gap in clock.between(before, after, S) if gap.kind == "clock_step"]
    assert steps == pytest.approx(case["expect"]["clock_steps"])
    assert (after.mono_ns - before.mono_ns) / 1e6 == pytest.approx(case["expect"]["ttft_ms"])


def noted(readings: list[tuple[float, Reading]]) -> list[Sample]:
    """The samples of a lane in which `timed` saw these readings at these seconds of the run."""
    out: list[Sample] = []
    now = [0]

    def read(_: Path) -> dict[str, int | str | None]:
        r = current[0]
        return {"mono_ns": now[0], "boottime_ns": r.boottime_ns, "wall_ns": r.wall_ns, "boot_id": r.boot_id}

    current = [readings[0][1]]
    write = lane.timed(out.extend, "fast", Path("/"), read, lambda: now[0])
    for at_s, each in readings:
        now[0], current[0] = golden.at(at_s), each
        write([])
    return out


def at(at_s: float, wall: float, slept: float = 0.0, boot: str = "b1") -> tuple[float, Reading]:
    mono = golden.at(at_s)
    return at_s, Reading(mono, mono + round(slept * S), round(wall * S), boot)


def found(folder: Path, samples: list[Sample], rule: str = "blind") -> list[Finding]:
    run = golden.build(
        folder, samples=samples, outcomes=golden.steady(60), phases=[golden.phase("measure", "measure", 0, 60)]
    )
    module = {"blind": blind, "host_lost": host_lost}[rule]
    return module.check(run, module.Options())


def test_case_of_a_hole_and_a_younger_uptime_is_a_lost_host_with_its_last_memory(tmp_path: Path) -> None:
    case = CASES["host-telemetry-gap-reboot"]
    old, young = case["input"]["samples"]
    readings = [
        at(10, wall_s(old["wall"]) - 1), at(11, wall_s(old["wall"])), at(20, wall_s(young["wall"]), boot="b2"),
        at(21, wall_s(young["wall"]) + 1, boot="b2"),
    ]  # fmt: skip
    samples = noted(readings)
    for at_s, each in ((11, old), (20, young)):
        samples += [
            golden.sample("host", "mem_used_bytes", each["used_mib"] * MIB, at_s),
            golden.sample("host", "mem_total_bytes", case["input"]["total_mib"] * MIB, at_s),
        ]
    [finding] = found(tmp_path, samples, "host_lost")
    assert (finding.status, finding.hard, finding.cause) == ("fail", True, case["expect"]["verdict"])
    assert finding.number == case["expect"]["gap_s"]
    assert f"({case['expect']['last_used_percent']} %)" in finding.message


def test_heat_before_the_host_was_lost_is_named_as_its_likely_cause(tmp_path: Path) -> None:
    readings = [at(k, 1000 + k) for k in range(30)] + [at(50, 1050, boot="b2"), at(51, 1051, boot="b2")]
    hot = golden.series("nvidia", "temperature_c", [80 + k / 3 for k in range(30)], gpu="0")
    slowed = golden.series("nvidia", "sw_thermal_slowdown_s", [k / 2 for k in range(30)], gpu="0")
    [finding] = found(tmp_path, [*noted(readings), *hot, *slowed], "host_lost")
    assert finding.cause == "host_lost"
    assert "likely cause heat: GPU 0 at 90 °C, held down by heat for 14.5 s and rising" in finding.message


def test_one_boot_is_no_loss(tmp_path: Path) -> None:
    samples = noted([at(k, 1000 + k) for k in range(30)])
    assert [f.status for f in found(tmp_path, samples, "host_lost")] == ["pass"]


def test_a_step_of_the_wall_clock_is_an_event_with_its_sign(tmp_path: Path) -> None:
    samples = noted([at(k, 1000 + k - (25 if k >= 30 else 0)) for k in range(60)])
    [finding] = [f for f in found(tmp_path, samples) if f.cause == "clock_step"]
    assert (finding.status, finding.number) == ("warn", pytest.approx(-25))
    assert "0:30" in finding.message


def test_a_host_that_slept_is_told_from_a_lane_that_was_starved(tmp_path: Path) -> None:
    ticks = [k for k in range(60) if not 20 <= k < 32]
    host = [golden.sample("host", "observed", 1, 0, "")]
    host += [golden.sample("host", "tick_lateness_ms", 0.0, k) for k in ticks]
    starved = noted([at(k, 1000 + k) for k in ticks])
    [hole] = [f for f in found(tmp_path / "a", host + starved) if f.scope == "host"]
    assert "a lane was starved" in hole.message
    slept = noted([at(k, 1000 + k + (600 if k >= 32 else 0), 600 if k >= 32 else 0) for k in ticks])
    findings = found(tmp_path / "b", host + slept)
    assert [f.number for f in findings if f.cause == "suspend"] == [pytest.approx(600)]
    assert "the host slept" in next(f for f in findings if f.scope == "host").message


def test_clocks_are_noted_once_a_second_and_a_boot_id_once() -> None:
    samples = noted([at(k / 10, 1000 + k / 10) for k in range(51)])
    assert len([s for s in samples if s.metric == "wall_ahead_ms"]) == 6
    assert {s.value for s in samples if s.metric != "boot_id"} == {0.0}
    assert [s.text for s in samples if s.metric == "boot_id"] == ["b1"]
