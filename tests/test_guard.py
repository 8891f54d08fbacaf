"""The guard on recorded and invented traces: what it must stop in time, and whom it must leave alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadgen import scenario, strict
from loadgen.engine import Engine, inline
from loadgen.guard import GIB, Decision, Guard, S, lines, low
from loadgen.journal import SampleWriter
from loadgen.types import Guards, Sample, Scenario, Seconds, UserError
from monitors import lane
from tests import virtual
from tests.virtual import Tape, VirtualServer

TICK_S = 0.1
Trace = Callable[[float], float]  # seconds → MemAvailable in GiB


def armed(idle_gib: float, options: Guards | None = None) -> Guard:
    guard = Guard(options or Guards())
    for tick in range(20):
        guard.look([reading("mem_available_bytes", idle_gib * GIB, tick * TICK_S)])
    assert guard.arm(2 * S) is not None
    return guard


def reading(metric: str, value: float, at_s: float) -> Sample:
    return Sample("host", metric, value, round(at_s * S))


def played(guard: Guard, trace: Trace, seconds: float, *others: Callable[[float], Sample]) -> Iterator[Decision]:
    """Ten times a second from second 2 on; `trace` begins with second 0."""
    for tick in range(round(seconds / TICK_S)):
        t = tick * TICK_S
        said = guard.look([reading("mem_available_bytes", trace(t) * GIB, 2 + t), *(other(2 + t) for other in others)])
        if said is not None:
            yield said


def after_s(decision: Decision) -> float:
    return decision.at_ns / S - 2


def collapse(from_gib: float, to_gib: float, within_s: float, at_s: float = 10.0) -> Trace:
    def trace(t: float) -> float:
        done = min(1.0, max(0.0, (t - at_s) / within_s))
        return from_gib + (to_gib - from_gib) * done

    return trace


def stalled(percent: float) -> Callable[[float], Sample]:
    return lambda t: reading("psi_memory_full_percent", percent, t)


def test_the_collapse_of_a_unified_memory_box_is_stopped_on_the_way_down() -> None:
    # 34.0 to 12.7 GiB in 1.5 s, and on at that speed: dgx-spark-playbooks#116
    trace = collapse(34.0, 34.0 - 21.3 / 1.5 * 10, 10)
    [stop, *_] = [d for d in played(armed(34.0), trace, 30) if d.level == "stop"]
    assert stop.memory > 1.5 * GIB
    assert 10 < after_s(stop) < 12
    assert "falls by" in stop.why


def test_three_samples_of_a_death_that_was_recorded_every_two_seconds_are_enough() -> None:
    # 23.8, 10.6, 6.3 GiB: vllm#56824, straight lines between the samples
    def trace(t: float) -> float:
        points = [(0, 23.8), (10, 23.8), (12, 10.6), (14, 6.3), (16, 2.0), (18, 0.9)]
        for (a, high), (b, deep) in pairwise(points):
            if t <= b:
                return high + (deep - high) * (t - a) / (b - a)
        return 0.9

    [stop, *_] = [d for d in played(armed(23.8), trace, 20) if d.level == "stop"]
    assert stop.memory > 1.5 * GIB


@pytest.mark.parametrize("idle_gib", [1.5, 1.9, 4.6])
def test_a_server_that_lives_close_to_the_limit_is_not_condemned(idle_gib: float) -> None:
    guard = armed(idle_gib)
    wobble: Trace = lambda t: idle_gib * (1 - 0.1 * (t % 3) / 3)  # noqa: E731
    assert list(played(guard, wobble, 120, stalled(3.0))) == []


def test_an_arena_that_is_taken_once_is_no_collapse() -> None:
    # a first long prompt takes 6 GiB within half a second and keeps them
    levels = [d.level for d in played(armed(26.0), collapse(26.0, 20.0, 0.5), 60)]
    assert levels == []


def test_a_slow_descent_warns_first_and_stops_at_the_floor() -> None:
    [warn, stop] = list(played(armed(20.0), collapse(20.0, 3.0, 170, 0), 180))
    assert (warn.level, stop.level) == ("warn", "stop")
    assert warn.memory == pytest.approx(7.0 * GIB, rel=0.01)
    assert stop.memory == pytest.approx(4.0 * GIB, rel=0.05)


def test_half_a_second_below_the_floor_is_what_it_takes() -> None:
    dip: Trace = lambda t: 3.9 if 10.0 <= t < 10.35 else 4.5  # noqa: E731
    assert "stop" not in {d.level for d in played(armed(20.0), dip, 20)}


@pytest.mark.parametrize(
    ("sign", "word"),
    [
        (stalled(25.0), "stalled on memory 25 %"),
        (lambda t: reading("pswpout_pages_per_s", 5000.0, t), "5000 pages/s"),
        (lambda t: Sample("kernel", "nv_no_memory", 1.0, round(t * S), text="NVRM"), "the driver refused memory"),
    ],
)
def test_our_own_requests_are_cut_when_a_second_sign_stands_beside_a_stop(
    sign: Callable[[float], Sample], word: str
) -> None:
    said = list(played(armed(20.0), collapse(20.0, 3.0, 2.0), 60, sign))
    assert [d.level for d in said][-2:] == ["stop", "abort"]
    assert word in said[-1].why
    assert 1.9 <= after_s(said[-1]) - after_s(said[-2]) <= 3


def test_without_a_second_sign_nothing_is_cut() -> None:
    said = list(played(armed(20.0), collapse(20.0, 3.0, 2.0), 300, stalled(2.0)))
    assert said[-1].level == "stop"


def test_a_driver_line_from_before_the_fall_is_no_second_sign() -> None:
    guard = armed(20.0)
    guard.look([Sample("kernel", "nv_no_memory", 1.0, 2 * S, text="NVRM")])
    assert {d.level for d in played(guard, collapse(20.0, 3.0, 2.0), 60)} <= {"warn", "stop"}


def test_issuing_is_released_when_memory_stayed_back_for_ten_seconds() -> None:
    def trace(t: float) -> float:
        return 3.0 if 10 <= t < 20 else 18.0

    said = [d for d in played(armed(20.0), trace, 60) if d.level in ("stop", "calm")]
    assert [d.level for d in said] == ["stop", "calm"]
    assert 9.9 <= after_s(said[1]) - 20 <= 10.3


def test_a_lane_that_was_starved_through_the_fall_judges_by_the_slope_over_the_hole() -> None:
    guard = armed(30.0)
    assert guard.look([reading("mem_available_bytes", 30 * GIB, 3)]) is None
    said = guard.look([reading("mem_available_bytes", 8 * GIB, 6)])
    assert said is not None
    assert said.level == "stop"


def came_back(at_s: float, **labels: str) -> Sample:
    return Sample("process", "restart", 1.0, round(at_s * S), labels, "serves the port that nobody served for 3.0 s")


def test_a_server_that_comes_back_twice_in_ten_minutes_is_let_be_for_good() -> None:
    guard = armed(20.0)
    container = "c0ffee" * 10 + "abcd"
    assert guard.look([came_back(100, container=container)]) is None
    stop = guard.look([came_back(650, container=container)])
    assert stop is not None
    assert (stop.level, "2 times within 10 minutes" in stop.why) == ("stop", True)
    assert "`docker stop c0ffeec0ffee` ends it" in stop.why
    assert not list(played(guard, lambda t: 20.0, 60)), "plenty of memory releases nothing"


def test_a_loop_of_a_podman_container_names_podman_and_of_a_pod_neither() -> None:
    for engine, said in (("podman", "`podman stop c0ffeec0ffee`"), ("kubernetes", "stop whatever starts it again")):
        guard = armed(20.0)
        again = [guard.look([came_back(at_s, container="c0ffee" * 10, engine=engine)]) for at_s in (100, 200)]
        assert again[1] is not None
        assert said in again[1].why


def went_away(at_s: float, role: str = "listener") -> Sample:
    return Sample("process", "process_gone", 1.0, round(at_s * S), {"role": role}, "is gone")


def driver_line(t: float) -> Sample:
    return Sample("kernel", "nv_no_memory", 1.0, round(t * S), {}, "NVRM: Out of memory [NV_ERR_NO_MEMORY]")


def test_a_server_that_boots_again_is_only_recorded_until_it_has_answered() -> None:
    # a normal start dips far below what it leaves when it serves, with driver lines that mean nothing
    guard = armed(30.0)
    guard.look([went_away(1.5)])
    said = list(played(guard, lambda t: 2.0, 30, stalled(40.0), driver_line))
    assert [d.level for d in said] == ["warn"]
    assert "boots" in said[0].why
    guard.served(round(1.4 * S))  # an answer from before
    assert list(played(guard, lambda t: 2.0, 30, stalled(40.0))) == []
    guard.served(33 * S)
    later = list(played(guard, lambda t: 2.0, 30, stalled(40.0)))
    assert [d.level for d in later] == ["stop", "abort"]


def test_a_member_of_the_tree_that_ends_is_no_boot() -> None:
    guard = armed(30.0)
    guard.look([went_away(1.5, role="member")])
    assert [d.level for d in played(guard, lambda t: 2.0, 2)] == ["warn", "stop"]


def test_a_held_load_is_not_cut_while_the_server_boots_and_goes_on_when_memory_is_back() -> None:
    guard = armed(30.0)
    held = list(played(guard, lambda t: 2.0, 1))
    assert held[-1].level == "stop"
    guard.look([went_away(3)])
    assert list(played(guard, lambda t: 2.0, 20, stalled(40.0))) == []
    assert [d.level for d in played(guard, lambda t: 28.0, 20)] == ["calm"]


def test_restarts_far_apart_or_of_an_idle_server_are_no_loop() -> None:
    guard = armed(20.0)
    assert [guard.look([came_back(at_s)]) for at_s in (100, 701, 1302)] == [None] * 3
    idle = Guard(Guards())
    assert [idle.look([came_back(at_s)]) for at_s in (1, 2, 3)] == [None] * 3


def test_without_memory_readings_no_guard_stands() -> None:
    guard = Guard(Guards())
    assert guard.arm(S) is None
    assert guard.look([reading("mem_available_bytes", 0, 2)]) is None


def test_floors_follow_the_baseline_and_never_reach_it() -> None:
    for gib in (0.5, 1.5, 4.6, 20, 100):
        at = lines(Guards(), gib * GIB)
        assert at.reach < at.stop < at.warn < gib * GIB
    assert lines(Guards(), 20 * GIB).stop == 4 * GIB
    fixed = Guards(warn_gib=6, warn_share=0, stop_gib=6, stop_share=0, most=(1, 1, 1))  # a boundary search's
    assert lines(fixed, 20 * GIB).stop == 6 * GIB


def test_the_baseline_is_a_low_percentile() -> None:
    assert low(float(v) for v in range(100)) == 4
    assert low([]) is None


# ---------------------------------------------------------------------------------------------------------------------
# In the fast lane


def test_the_reason_stands_in_the_file_before_the_guard_says_it(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, "fast")
    path = tmp_path / "samples-fast.jsonl"
    said: list[tuple[bytes, bool]] = []
    words = iter([b"", b"load\n"])
    write = lane.guarded(
        writer,
        Guard(Guards()),
        lambda: next(words, b""),
        lambda line: said.append((line, '"metric":"stop"' in path.read_text())),
        lambda: 2 * S,
    )
    for tick in range(30):
        write([reading("mem_available_bytes", (20 if tick < 10 else 2) * GIB, 2 + tick * TICK_S)])
    near = path.read_text().count("mem_available_bytes")
    writer.close()
    [(line, was_written)] = said
    assert was_written
    assert json.loads(line)["guard"] == "stop"
    assert json.loads(line)["synced"]
    assert '"metric":"baseline"' in path.read_text()
    assert near >= 19, "every reading is kept near a guard"


def test_what_the_supervisor_heard_of_the_server_ends_its_boot_in_the_lane(tmp_path: Path) -> None:
    said: list[bytes] = []
    words = iter([b""] * 5 + [b"load\n"] + [b""] * 20 + [b"served 2100000000\nserved 4", b"served 4500000000\n"])
    writer = SampleWriter(tmp_path, "fast")
    write = lane.guarded(writer, Guard(Guards()), lambda: next(words, b""), said.append, lambda: 2 * S)
    at_words = []
    for tick in range(45):
        write([reading("mem_available_bytes", (20 if tick < 7 else 2) * GIB, 2 + tick * TICK_S)])
        if tick == 6:
            write([went_away(2.6)])
        at_words.append(len(said))
    writer.close()
    # the word at 4.5 s comes with the 27th line that is heard; half a second below the floor from then on
    assert at_words[25] == 0, "nothing is held while the server boots"
    assert json.loads(said[0])["guard"] == "stop"
    assert "boots" in (tmp_path / "samples-fast.jsonl").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# In the engine


def scene(**fields: Any) -> Scenario:
    data = {"name": "t", "concurrency": 4, "classes": {"chat_short": {"weight": 1}}, **fields}
    built = strict.build(Scenario, {"phases": [{"kind": "measure", "duration": 60}], **data})
    scenario.check(built)
    return built


def play(what: Scenario, *words: tuple[float, str]) -> tuple[Tape, VirtualServer, str]:
    """A run on the virtual clock in which a guard says `words`, each at its second."""
    tape = Tape()

    async def main() -> tuple[VirtualServer, str]:
        server = VirtualServer()
        engine = Engine(
            what, sender=server, encode=lambda request: b"", recorder=tape, now_ns=virtual.now_ns, off_loop=inline
        )

        async def speak() -> None:
            for at_s, word in words:
                await asyncio.sleep(at_s - virtual.now_ns() / S)
                engine.guard(word)  # type: ignore[arg-type]

        speaking = asyncio.create_task(speak())
        reason = await engine.run()
        await speaking
        await server.close()
        return server, reason

    server, reason = virtual.run(main())
    return tape, server, reason


def test_a_hold_issues_nothing_and_lets_what_runs_end() -> None:
    tape, _, reason = play(scene(), (20, "hold"), (40, "release"))
    assert reason == "done"
    assert not [o for o in tape.outcomes if 20 * S < o.due_ns < 40 * S]
    assert [o for o in tape.outcomes if o.due_ns >= 40 * S], "it went on"
    assert {o.outcome for o in tape.outcomes} == {"ok"}
    first = min(o.due_ns for o in tape.outcomes if o.due_ns >= 40 * S)
    assert first < 40.1 * S, "a seat that was held owes nothing"


def test_a_hold_that_is_never_released_ends_with_the_phase() -> None:
    tape, _, reason = play(scene(), (20, "hold"))
    assert reason == "done"
    [end] = tape.named("phase_drained")
    assert end["issued"] == end["ok"] == len(tape.outcomes)


@pytest.mark.parametrize("phases", [{"kind": "measure", "duration": 60}, {"kind": "measure", "count": 5000}])
def test_an_abort_cuts_what_runs_counts_it_as_neither_and_ends_the_run(phases: dict[str, Any]) -> None:
    tape, server, reason = play(scene(phases=[phases]), (20, "hold"), (20.01, "abort"))
    assert reason == "guard"
    cut = [o for o in tape.outcomes if o.outcome == "incomplete"]
    assert cut
    assert all(o.flags == {"guard"} for o in cut)
    assert not [o for o in tape.outcomes if o.outcome == "failed"]
    [end] = tape.named("phase_drained")
    assert end["issued"] == end["ok"] + end["incomplete"] == len(server.sent)
    assert end["at"] < 21 * S


def test_a_guard_holds_the_functional_phase_too() -> None:
    tape, _, _ = play(scene(phases=[{"kind": "functional", "count": 50}]), (0.5, "hold"), (30, "release"))
    assert not [o for o in tape.outcomes if 0.5 * S < o.due_ns < 30 * S]
    assert len(tape.outcomes) == 50


def test_words_that_no_guard_knows_change_nothing() -> None:
    tape, _, reason = play(scene(), (20, "explode"), (30, "abort"), (31, "release"))
    assert reason == "guard"
    assert [e["word"] for e in tape.named("guard_heeded")] == ["abort"]


# ---------------------------------------------------------------------------------------------------------------------
# In a scenario


def test_guards_are_options_of_a_scenario_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    text = "name: s\nclasses: {chat_short: {weight: 1}}\nphases: [{kind: measure, duration: 60}]\n"
    path.write_text(text + "guards: {stop_gib: 6, baseline: 30s, stop_command: [docker, stop, vllm]}\n")
    loaded = scenario.load(path)
    assert loaded.guards == Guards(stop_gib=6, baseline=Seconds(30), stop_command=("docker", "stop", "vllm"))
    again = tmp_path / "again.yaml"
    again.write_text(scenario.dump(loaded))
    assert scenario.load(again).guards == loaded.guards
    path.write_text(text + "guards: {stop_gb: 6}\n")
    with pytest.raises(UserError, match=r"stop_gb.*stop_gib"):
        scenario.load(path)
