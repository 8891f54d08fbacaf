"""Several engine processes: they begin together, ask what one alone would ask, and are missed when they are gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import cli, live, record, scenario, strict, verdict
from loadgen.cluster import BATCH_BYTES, Station, check_versions
from loadgen.engine import Engine, inline
from loadgen.gate import Barrier, Gate, Start
from loadgen.hist import Hist, merged
from loadgen.record import Run
from loadgen.rules import blind, generator
from loadgen.stats import durations_us
from loadgen.supervise import how_many
from loadgen.types import Finding, Json, Outcome, Scenario, UserError
from tests import virtual
from tests.virtual import S, Tape, VirtualServer

LEAD_S = 0.5
READY_0 = b'{"ready": 0, "left_out": []}'

# -- deciding ----------------------------------------------------------------------------------------------------------


def test_a_phase_begins_when_every_living_shard_is_ready() -> None:
    barrier = Barrier({0, 1, 2})
    assert barrier.hear(0, READY_0)
    assert barrier.hear(1, READY_0)
    assert barrier.open() is None
    barrier.gone(2)
    assert barrier.open() == (0, [0, 1])
    assert barrier.open() is None  # both run


def test_a_shard_that_waits_for_a_later_phase_is_let_wait() -> None:
    barrier = Barrier({0, 1})
    barrier.hear(0, b'{"ready": 2, "left_out": ["vision"]}')
    barrier.hear(1, b'{"ready": 4}')
    assert barrier.open() == (2, [0])
    barrier.hear(0, b'{"ready": 4, "left_out": ["vision"]}')
    assert barrier.open() == (4, [0, 1])
    assert barrier.left_out == {"vision"}


@given(st.binary(max_size=60))
def test_what_a_plug_in_prints_is_no_ready(line: bytes) -> None:
    barrier = Barrier({0})
    assert barrier.hear(0, line) is False
    assert not barrier.waiting


def test_as_many_shards_as_asked_or_one_per_256_seats_while_a_core_is_left() -> None:
    assert [how_many(None, seats, 8) for seats in (1, 256, 257, 1000, 9000)] == [1, 1, 2, 4, 7]
    assert how_many(None, 1000, 1) == 1
    assert how_many(4, 4, 1) == 4


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--shards", "5"], "--shards 5: the scenario has 4 seats"),
        (["--shards", "0"], "a number from 1 up, or auto"),
        (["--shards", "many"], "a number from 1 up, or auto"),
    ],
)
def test_a_number_of_shards_that_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "smoke", "--concurrency", "4", "--url", "http://127.0.0.1:1", "--out", str(tmp_path), *args])
    err = capsys.readouterr().err
    assert ended.value.code == 3
    assert said in err
    assert err.count("\n") == 1


# -- engines together, on a virtual clock ------------------------------------------------------------------------------


def scene(**more: Any) -> Scenario:
    classes = {"chat_short": {"weight": 3}, "arithmetic": {"weight": 1}}
    data: Json = {"name": "test", "classes": classes, "concurrency": 6, "salt": "x", **more}
    built = strict.build(Scenario, data)
    scenario.check(built)
    return built


def together(
    scene: Scenario, shards: int, meddle: Callable[[Engine], None] | None = None
) -> list[tuple[Tape, VirtualServer]]:
    """All shards of a scenario, started as the supervisor does it, each with a server of its own."""

    async def main() -> list[tuple[Tape, VirtualServer]]:
        barrier = Barrier(set(range(shards)))
        gates: list[Gate] = []
        made = [(Tape(), VirtualServer()) for _ in range(shards)]

        def heard(shard: int, line: bytes) -> None:
            barrier.hear(shard, line)
            if (opened := barrier.open()) is not None:
                at_ns = virtual.now_ns() + round(LEAD_S * S)
                for each in opened[1]:
                    gates[each].hear(Start(opened[0], at_ns, tuple(barrier.left_out)).line())

        engines = []
        for shard, (tape, server) in enumerate(made):
            gates.append(Gate(lambda line, shard=shard: heard(shard, line)))
            engines.append(
                Engine(
                    scene, sender=server, encode=lambda request: b"", recorder=tape, shard=shard, shards=shards,
                    gate=gates[shard], now_ns=virtual.now_ns, off_loop=inline,
                )
            )  # fmt: skip
            if meddle is not None:
                meddle(engines[-1])

        async def run(shard: int) -> None:
            await engines[shard].run()
            barrier.gone(shard)
            heard(-1, b"")

        await asyncio.gather(*(run(shard) for shard in range(shards)))
        for _, server in made:
            await server.close()
        return made

    return virtual.run(main())


def asked(made: list[tuple[Tape, VirtualServer]], phase: str) -> list[tuple[str, str]]:
    return sorted((r.id, r.messages[0]["content"]) for _, server in made for r in server.sent if r.phase == phase)


def test_phases_begin_and_end_at_the_same_moment_in_all_shards() -> None:
    phases = [
        {"kind": "functional"}, {"kind": "warmup", "duration": 1}, {"kind": "measure", "duration": 2},
        {"kind": "measure", "name": "counted", "count": 10}, {"kind": "measure", "name": "after", "duration": 1},
    ]  # fmt: skip
    made = together(scene(phases=phases), 3)
    for event in ("phase_start", "phase_end"):
        at: dict[str, list[int]] = {}
        for tape, _ in made:
            for e in tape.named(event):
                at.setdefault(e["phase"], []).append(e["at"])
        assert len(at.pop("functional")) == 1
        assert {len(each) for each in at.values()} == {3}
        if event == "phase_end":
            del at["counted"]  # by count: each shard ends it when it may go on, which is checked by what starts then
        assert all(max(each) - min(each) <= 2 for each in at.values()), at
    starts = {e["phase"]: e["at"] for e in made[1][0].named("phase_start")}
    ends = {e["phase"]: e["at"] for e in made[1][0].named("phase_end")}
    assert ends["warmup"] == pytest.approx(starts["warmup"] + 1 * S, abs=2)
    assert starts["measure"] == pytest.approx(ends["warmup"], abs=2)
    assert ends["measure"] == pytest.approx(starts["warmup"] + 3 * S, abs=2)


def test_the_functional_phase_runs_alone_and_what_it_leaves_out_nobody_asks() -> None:
    def blame(engine: Engine) -> None:
        right = engine._grade

        def grade(request: Any, outcome: Outcome) -> Any:
            found = right(request, outcome)
            if request.cls == "arithmetic":
                found.ok, found.kind = False, "wrong"
            return found

        engine._grade = grade  # type: ignore[method-assign]

    made = together(scene(phases=[{"kind": "functional"}, {"kind": "measure", "count": 30}]), 3, blame)
    functional_ends = made[0][0].named("phase_end")[0]["at"]
    for tape, server in made[1:]:
        assert {r.phase for r in server.sent} == {"measure"}
        assert min(o.due_ns for o in tape.outcomes) > functional_ends
    assert sum(len(tape.named("class_left_out")) for tape, _ in made) == 1
    assert {r.cls for _, server in made for r in server.sent if r.phase == "measure"} == {"chat_short"}


@pytest.mark.parametrize(("warmup", "measure", "shards"), [(10, 13, 4), (1, 3, 6), (4, 8, 3), (0, 2, 5)])
def test_counted_phases_ask_the_same_for_any_number_of_shards(warmup: int, measure: int, shards: int) -> None:
    phases: list[Json] = [{"kind": "measure", "count": measure}]
    if warmup:
        phases.insert(0, {"kind": "warmup", "count": warmup})
    one, many = together(scene(phases=phases), 1), together(scene(phases=phases), shards)
    assert asked(many, "warmup") == asked(one, "warmup")
    assert asked(many, "measure") == asked(one, "measure")
    assert len(asked(many, "measure")) == measure


def test_no_item_is_asked_twice_when_load_comes_twice() -> None:
    phases = [
        {"kind": "measure", "duration": 3}, {"kind": "functional"}, {"kind": "measure", "name": "more", "duration": 3}
    ]  # fmt: skip
    made = together(scene(phases=phases), 3)
    ids = Counter(r.id for _, server in made for r in server.sent if r.phase != "functional")
    assert max(ids.values()) == 1


def test_a_stop_ends_a_shard_that_waits_for_others() -> None:
    tape = Tape()

    async def main() -> str:
        engine = Engine(
            scene(phases=[{"kind": "measure", "duration": 60}]), sender=VirtualServer(), encode=lambda request: b"",
            recorder=tape, shard=1, shards=2, gate=Gate(lambda line: None), now_ns=virtual.now_ns, off_loop=inline,
        )  # fmt: skip
        asyncio.get_running_loop().call_later(5, engine.stop.press)
        return await engine.run()

    assert virtual.run(main()) == "signal"
    assert tape.outcomes == []


# -- judging -----------------------------------------------------------------------------------------------------------

PHASES = [golden.phase("measure", "measure", 0, 60)]


def health(shard: int, **metrics: float) -> list[Any]:
    values = {"loop_lag_ms": 2, "cpu_percent": 3, "in_flight": 2, "rss_bytes": 90 << 20} | metrics
    return [s for name, value in values.items() for s in golden.series("client", name, [value] * 60, shard=str(shard))]


def found(run: Run, scope: str) -> Finding:
    [finding] = [f for f in generator.check(run, generator.Options()) if f.scope == scope]
    return finding


def test_one_shard_at_its_limit_is_not_hidden_by_an_idle_one(tmp_path: Path) -> None:
    samples = [*health(0), *health(1, cpu_percent=97)]
    run = golden.build(tmp_path, outcomes=golden.steady(60), phases=PHASES, samples=samples, shards=2)
    assert found(run, "cpu").status == "fail"
    assert "shard 1" in found(run, "cpu").message
    assert found(run, "seats").number == pytest.approx(1.0)  # two of each, four in all


def test_a_shard_that_was_lost_is_named_and_makes_the_measurement_invalid(tmp_path: Path) -> None:
    events = [(30.0, "shard_exit", {"shard": 1, "rc": None, "text": "its node died"})]
    run = golden.build(
        tmp_path, outcomes=golden.steady(60), phases=PHASES, samples=[*health(0), *health(1)], shards=2, events=events
    )
    [lost] = [f for f in blind.check(run, blind.Options()) if f.cause == "lost_shard"]
    assert (lost.axis, lost.status, lost.since_ns) == ("measurement", "fail", golden.at(30))
    assert lost.message == "at 0:30 shard 1 was lost (its node died); its load was not moved to others"
    assert found(run, "seats").status == "not_evaluated"
    assert found(run, "conservation").status == "not_evaluated"


def test_hard_evidence_fails_a_run_that_lost_a_shard() -> None:
    lost = Finding("blind", "measurement", "fail", "shard 1 was lost", since_ns=1, cause="lost_shard")
    seats = Finding("generator", "measurement", "fail", "seats were empty", since_ns=0, cause="client_limited")
    killed = Finding("oom", "stability", "fail", "the server was killed", cause="oom_kill", hard=True)
    judged = partial(verdict.verdict, required=(), interrupted=None, guard_stopped=False)
    assert judged([seats, lost]).line == "INCONCLUSIVE (lost_shard)"
    assert judged([seats, lost, killed]).line == "FAIL (oom_kill)"


def test_a_phase_ends_when_the_shards_that_are_left_end_it(tmp_path: Path) -> None:
    run = golden.build(tmp_path, phases=[golden.Phase("measure", "measure", 0, None, None)], shards=2, reason=None)
    journal = record.Journal(tmp_path, "shard-0")
    journal.event("phase_end", phase="measure", at=golden.at(60))
    journal.event("shard_exit", shard=1, rc=-9)
    journal.close()
    assert run.phases[0].end_ns == golden.at(60)


def test_shards_that_begin_apart_are_no_one_load(tmp_path: Path) -> None:
    run = golden.build(tmp_path, outcomes=golden.steady(60), phases=PHASES, samples=[*health(0), *health(1)], shards=2)
    journal = record.Journal(tmp_path, "shard-2")
    journal.event("phase_start", phase="measure", kind="measure", concurrency=2, at=golden.at(0.15))
    journal.close()
    assert found(run, "start").status == "fail"
    assert found(run, "start").number == pytest.approx(150, abs=0.1)


def test_the_live_view_adds_up_shards_and_forgets_the_lost(tmp_path: Path) -> None:
    def append(name: str, *lines: Json) -> None:
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    start = {"event": "phase_start", "phase": "measure", "duration_s": 60}
    append(
        "journal.jsonl",
        *({"at": k, "by": f"shard-{k}", "concurrency": 2 + k, **start} for k in range(2)),
    )
    for shard, flying in ((0, 2), (1, 3)):
        labels = {"shard": str(shard)}
        append(
            f"samples-engine-{shard}.jsonl",
            {"at": 1, "monitor": "client", "values": {"in_flight": [0, 3, flying, 1]}, "labels": labels},
            {"at": 1, "monitor": "client", "values": {"in_flight": flying}, "labels": {"cls": "chat", **labels}},
        )
    progress = live.Progress(tmp_path)
    progress.look()
    assert "5/5 in flight" in live.line(progress, 1)
    assert progress.classes["chat"].in_flight == 5
    assert [text for _, text in progress.events] == ["measure began"]
    append("journal.jsonl", {"at": 2, "event": "shard_exit", "shard": 1, "rc": -9, "text": "killed"})
    progress.look()
    assert "2/5 in flight" in live.line(progress, 3)
    assert progress.classes["chat"].in_flight == 2
    assert "engine 1 is lost: killed" in progress.events[-1][1]


# -- a station, without a cluster --------------------------------------------------------------------------------------


def test_every_moment_of_an_outcome_is_moved_and_no_duration() -> None:
    numbers = {f.name for f in fields(Outcome) if f.name.endswith("_ns")}
    durations = {"connect_ns", "queue_ns", "gaps_ns", "lags_ns"}
    assert numbers - durations <= record.MOMENTS
    line = {"id": "a", "due_ns": 5, "sent_ns": 7, "connect_ns": 2, "gaps": {"max_ns": 3}, "cls": "due_ns"}
    moved = json.loads(record.moved(json.dumps(line).encode(), 1000))
    assert moved == {**line, "due_ns": 1005, "sent_ns": 1007}
    assert record.moved(b'{"torn": 1', 1000) == b'{"torn": 1'


def test_foreign_files_are_appended_in_our_clock(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    away = golden.build(there, outcomes=golden.steady(30), phases=PHASES, samples=health(0))
    home = record.Journal(here, "supervise")
    foreign = record.Foreign(here, 0)
    for name in record.shard_files(0):
        if (there / name).exists():
            foreign.add(name, (there / name).read_bytes(), 7 * S)
    foreign.close()
    home.close()
    run = Run(here)
    assert not {k: v for k, v in run.damage.items() if "environment" not in k}
    assert [o.due_ns - 7 * S for o in run.outcomes()] == [o.due_ns for o in away.outcomes()]
    assert [w.start_ns - 7 * S for w in run.windows()] == [w.start_ns for w in away.windows()]
    assert [w.hist for w in run.windows()] == [w.hist for w in away.windows()]
    assert run.phases[0].start_ns == away.phases[0].start_ns + 7 * S
    assert (here / "journal.jsonl").read_text().count('"schema"') == 1


def station(tmp_path: Path, **options: Any) -> Station:
    made = Station(0, **options)
    text = "name: s\nclasses: {chat_short: {weight: 1}}\nphases: [{kind: measure, duration: 60}]\n"
    path = tmp_path / "scene.yaml"
    path.write_text(text, encoding="utf-8")
    made.start(scenario.dump(scenario.load(str(path))), 2, {})
    return made


def fetched(made: Station, until: Callable[[Json], bool], limit_s: float = 30) -> Json:
    end, seq = time.monotonic() + limit_s, 0
    while not until(batch := made.fetch(seq)):
        assert time.monotonic() < end, batch
        seq = batch["seq"]
        time.sleep(0.05)
    return batch


def test_a_batch_that_got_lost_comes_again_and_one_too_many_is_passed_over(tmp_path: Path) -> None:
    made = station(tmp_path, buffer_bytes=200)
    try:
        outcomes = made.folder / "outcomes-0.jsonl"
        ready = fetched(made, lambda batch: bool(batch["said"]))
        assert json.loads(ready["said"][0]) == {"ready": 0, "left_out": []}
        assert made.fetch(ready["seq"] - 1) is ready
        with outcomes.open("ab") as file:
            file.writelines(b'{"line": %d}\n' % k for k in range(50))
        end = b'{"line": 49}\n'
        batch = fetched(made, lambda batch: any(data.endswith(end) for _, data in batch["files"]))
        [kept] = [data for name, data in batch["files"] if name == outcomes.name]
        assert kept.count(b"\n") + batch["lost"] >= 50  # lines of other files may have been passed over as well
        assert len(kept) <= 100 < BATCH_BYTES
    finally:
        made.close()
    assert not made.folder.exists()


def test_a_shard_that_hears_nothing_from_home_stops(tmp_path: Path) -> None:
    made = station(tmp_path, silent_s=1.0)
    try:
        fetched(made, lambda batch: bool(batch["said"]))
        assert made.process is not None
        made.process.wait(20)
        batch = fetched(made, lambda batch: "exit" in batch)
        assert batch["exit"] == (None, "it heard nothing from home for 1 s and stopped")
    finally:
        made.close()


def test_two_versions_are_refused() -> None:
    with pytest.raises(UserError, match=r"10\.0\.0\.7 has loadgen 0\.0\.1, here is"):
        check_versions("auto", [{"version": "0.0.1", "address": "10.0.0.7"}])


# -- whole runs --------------------------------------------------------------------------------------------------------

COUNTED = """\
name: counted
concurrency: 4
salt: same
classes:
  chat_short: {weight: 2, options: {max_tokens: 16}}
  arithmetic: {weight: 1}
  impossible: {weight: 1, workload: trick.impossible}
phases:
  - {kind: functional, count: 1}
  - {kind: warmup, count: 7}
  - {kind: measure, count: 24}
monitors: {process: {}}
"""
# Nobody ever gives the answer that it wants.
IMPOSSIBLE = """\
from workloads import arithmetic
from workloads.arithmetic import Options

def sessions(options, draw):
    for session in arithmetic.sessions(options, draw):
        yield wrong(session)

def wrong(session):
    request = next(session)
    request.expect = {"integer": -1}
    yield request
"""
MEASURED = """\
name: measured
concurrency: 3
classes: {chat_short: {weight: 1, options: {max_tokens: 24}}}
phases: [{kind: measure, duration: %s, drain: %s}]
monitors: {process: {}}
"""


def start(tmp_path: Path, name: str, text: str, *args: str) -> subprocess.Popen[str]:
    """`loadgen run` against a simulator of its own, writing into tmp_path/name."""
    (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "loadgen", "run", str(tmp_path / f"{name}.yaml"), "--sim", "tiny", *args]
    return subprocess.Popen(
        [*command, "--out", str(tmp_path / name)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, start_new_session=True,
    )  # fmt: skip


def wait_for(what: Callable[[], bool], limit_s: float = 40) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.05)


def events(out: Path, name: str) -> list[Json]:
    return [e for folder in out.glob("*") for e in Run(folder).journal if e["event"] == name]


def test_one_shard_and_four_ask_the_same_and_their_histograms_add_up(tmp_path: Path) -> None:
    (tmp_path / "trick").mkdir()
    (tmp_path / "trick/impossible.py").write_text(IMPOSSIBLE, encoding="utf-8")
    runs = {}
    with start(tmp_path, "one", COUNTED) as one, start(tmp_path, "four", COUNTED, "--shards", "4") as four:
        for name, process in (("one", one), ("four", four)):
            stdout, stderr = process.communicate(timeout=100)
            assert process.returncode in (0, 2), stdout + stderr  # 2: a second of load is too short to judge us by
            [folder] = (tmp_path / name).iterdir()
            runs[name] = Run(folder)
    alone, many = runs["one"], runs["four"]
    assert many.shards == [0, 1, 2, 3]

    def asked(run: Run) -> list[tuple[str, str, int | None, int | None]]:
        return sorted((o.phase, o.id, o.prompt_tokens, o.output_tokens) for o in run.outcomes())

    assert asked(many) == asked(alone)
    assert Counter(o.phase for o in many.outcomes()) == {"functional": 3, "warmup": 7, "measure": 24}
    assert "impossible" not in {o.cls for o in many.outcomes() if o.phase != "functional"}
    assert len(many.events("class_left_out")) == 1

    concatenated: dict[str, Hist] = {}
    for o in many.outcomes():
        for metric, us in durations_us(o):
            concatenated.setdefault(metric, Hist()).record((us,))
    lines = list(many.windows())
    for metric, hist in concatenated.items():
        assert merged(line.hist for line in lines if line.tag.metric == metric) == hist, metric
    gaps = merged(line.hist for line in lines if line.tag.metric == "gap")
    assert gaps.n == sum(o.gaps.n for o in many.outcomes() if o.gaps is not None and o.outcome == "ok")

    for told in many.events("start"):
        assert told["at_ns"] - told["at"] >= 0.4e9
    begun = [e["at"] for e in many.events("phase_start") if e["phase"] == "measure"]
    assert len(begun) == 4
    assert max(begun) - min(begun) < 1e9  # a busy box; the rule `generator` wants 0.1 s


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, Path]]:
    """Two runs of three shards, at once to save time: in one a shard is killed, the other gets two signals. The exit
    code, what was printed, and the folder of each."""
    tmp_path = tmp_path_factory.mktemp("broken")
    long = (MEASURED % ("300s", "300s")).replace("chat_short", "generate").replace("max_tokens: 24", "max_tokens: 8192")
    with (
        start(tmp_path, "lost", MEASURED % ("3s", "10s"), "--shards", "3") as lost,
        start(tmp_path, "cut", long, "--shards", "3") as cut,
    ):
        wait_for(lambda: len(events(tmp_path / "lost", "phase_start")) == 3)
        time.sleep(1)
        [victim] = [e["pid"] for e in events(tmp_path / "lost", "shard_start") if e["shard"] == 1]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(events(tmp_path / "cut", "phase_start")) == 3)
        cut.send_signal(signal.SIGINT)
        wait_for(lambda: len(events(tmp_path / "cut", "phase_end")) == 3)
        assert cut.poll() is None, "they drain"
        cut.send_signal(signal.SIGINT)
        said = {}
        for name, process in (("lost", lost), ("cut", cut)):
            stdout, stderr = process.communicate(timeout=60)
            [folder] = (tmp_path / name).iterdir()
            said[name] = (process.returncode, stdout + stderr, folder)
        return said


def test_a_shard_that_is_killed_is_named_its_load_is_not_moved_and_the_others_go_on(
    broken: dict[str, tuple[int, str, Path]],
) -> None:
    code, said, folder = broken["lost"]
    assert code == 2, said
    assert "VERDICT: INCONCLUSIVE (lost_shard)" in said
    assert "shard 1 was lost (exit -9); its load was not moved to others" in (folder / "report.md").read_text()
    run = Run(folder)
    [lost] = [e for e in run.events("shard_exit") if e["rc"] != 0]
    [ended_0, ended_2] = [e["at"] for e in run.events("phase_end")]
    assert abs(ended_0 - ended_2) < 1e9
    later = [o for o in run.outcomes() if o.due_ns > lost["at"]]
    assert {o.seat for o in later} == {0, 2}
    assert run.phases[0].drained_ns is not None


def test_the_first_signal_drains_all_shards_and_the_second_ends_them_at_once(
    broken: dict[str, tuple[int, str, Path]],
) -> None:
    code, said, folder = broken["cut"]
    assert code == 130, said
    run = Run(folder)
    assert {(o.seat, o.outcome) for o in run.outcomes()} == {(k, "incomplete") for k in range(3)}
    assert not run.damage
    ended, second = run.events("run_end")[0]["at"], run.events("signal")[1]["at"]
    assert ended - second < 10e9
    assert [e["rc"] for e in run.events("shard_exit")] == [0, 0, 0]
