"""The selftest tested: its pairing on made-up logs, its server against its schedule, and the whole of it once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import uvloop

from loadgen import plugins
from loadgen.client import Client
from loadgen.selftest import framing, suite, truth
from loadgen.selftest.drive import drive
from loadgen.selftest.server import schedule_of
from loadgen.selftest.truth import Schedule, Seen, Served
from loadgen.types import Limits, Outcome, Target

MS = 1_000_000
SECOND = 1_000_000_000


def served(rid: int, *sent_ms: float, arrived_ms: float = 0.0, done_ms: float | None = None) -> Served:
    times = np.array([round(at * MS) for at in sent_ms], dtype=np.int64)
    end = sent_ms[-1] if done_ms is None else done_ms
    return Served(rid, round(arrived_ms * MS), round(end * MS), len(sent_ms), times)


def seen(rid: int, *at_ms: float, sent_ms: float = 0.0, lags_ms: tuple[float, ...] = ()) -> Seen:
    times = [round(at * MS) for at in at_ms]
    gaps = array("q", np.diff(times).tolist())
    return Seen(rid, round(sent_ms * MS), times[0], times[-1], gaps, [round(lag * MS) for lag in lags_ms])


# -- pairing -----------------------------------------------------------------------------------------------------------


def test_what_arrives_as_it_left_has_no_error() -> None:
    pair = truth.pair([served(1, 200, 220, 240)], [seen(1, 200, 220, 240)])
    assert pair.gap_error.tolist() == [0, 0]
    assert pair.ttft.tolist() == pair.ttft_true.tolist() == [200]
    assert pair.tpot.tolist() == pair.tpot_true.tolist() == [20]
    assert pair.e2e.tolist() == pair.e2e_true.tolist() == [240]
    assert (pair.chunks, pair.inexact, pair.unpaired) == (3, 0, 0)


def test_a_constant_delay_of_the_wire_is_in_the_ttft_and_in_no_gap() -> None:
    pair = truth.pair([served(1, 200, 220, 240)], [seen(1, 203, 223, 243)])
    assert pair.gap_error.tolist() == [0, 0]
    assert (pair.ttft - pair.ttft_true).tolist() == [3]


def test_streams_are_paired_by_name_in_any_order() -> None:
    pair = truth.pair([served(1, 10, 30), served(2, 15, 45)], [seen(2, 15, 45), seen(1, 10, 30)])
    assert pair.gap_error.max() == 0
    assert pair.unpaired == 0


def test_a_late_server_is_no_error_of_the_client() -> None:
    late = served(1, 200, 720, 740)
    assert truth.pair([late], [seen(1, 200, 720, 740)]).gap_error.max() == 0
    assert truth.late_ms([late], Schedule(200, 20, 3)).tolist() == [0, 500, 500]


def test_chunks_that_shared_a_read_are_counted_and_are_in_no_error_of_a_gap() -> None:
    """The second chunk waited for the third: both gaps at the second are worth nothing, the one after is exact."""
    pair = truth.pair([served(1, 0, 20, 40, 60)], [seen(1, 0, 40, 40, 60)])
    assert pair.inexact == 1
    assert pair.inexact_share == 0.25
    assert pair.gap_error.tolist() == [0]
    assert pair.gap.tolist() == [40, 0, 20]  # the percentiles hide nothing


@pytest.mark.parametrize(
    "ours", [[], [seen(1, 0, 20)], [seen(7, 0, 20, 40)], [seen(1, 0, 20, 40), seen(1, 0, 20, 40), seen(9, 1, 2)]]
)
def test_streams_in_one_log_only_are_counted(ours: list[Seen]) -> None:
    there = [served(1, 0, 20, 40), served(2, 0, 20)]
    pair = truth.pair(there, [seen(2, 0, 20), *ours])
    assert pair.unpaired > 0


def test_no_pair_at_all_is_an_error_and_no_zero() -> None:
    with pytest.raises(ValueError, match="no stream"):
        truth.pair([served(1, 0, 20)], [])


def test_open_streams_are_those_of_the_servers_log() -> None:
    there = [served(1, 50, done_ms=100), served(2, 150, arrived_ms=100, done_ms=200), served(3, 150, done_ms=200)]
    assert truth.mean_open(there) == 2
    assert truth.most_open(there) == 2  # one ends at the very moment at which another begins
    assert truth.chunks_per_s(there) == pytest.approx(3 / 0.2)


def test_rate_and_open_streams_can_be_those_while_all_seats_were_asked_for() -> None:
    there = [
        served(1, 50, done_ms=100), served(2, 90, arrived_ms=40, done_ms=150),
        served(3, 120, arrived_ms=100, done_ms=200), served(4, 160, arrived_ms=150, done_ms=250),
    ]  # fmt: skip
    within = truth.held(there, 2)
    assert within == (40_000_000, 150_000_000)  # the ramp before it and the tail behind it are nobody's fault
    assert truth.mean_open(there, within) == pytest.approx((60 + 110 + 50) / 110)
    assert truth.chunks_per_s(there, within) == pytest.approx(3 / 0.11)
    assert truth.held(there[:3], 2) == truth.span(there[:3])


def test_lag_is_of_all_reads() -> None:
    assert truth.lag_ms([seen(1, 0, 1, lags_ms=(1, 2)), seen(2, 0, 1, lags_ms=(3,))]).tolist() == [1, 2, 3]
    assert truth.lag_ms([]).size == 0


def test_the_models_name_is_the_schedule() -> None:
    schedule = Schedule(123.5, 7, 64)
    assert schedule_of(schedule.model, 9) == schedule
    assert schedule_of("t5-i1", 9) == Schedule(5, 1, 9)
    assert schedule_of("gpt-something-new", 9).tokens == 9


# -- the ladder's judgement --------------------------------------------------------------------------------------------

GOOD = suite.Step(
    streams=64, times="kernel", ttft_p50_off_ms=0.1, ttft_p99_off_ms=0.3, itl_p99_ms=20.1, itl_p99_true_ms=20.0,
    gap_error_p99_ms=0.02, inexact_share=0.0, achieved=63.0, rate_share=0.98, unpaired=0, server_late_p99_ms=0.3,
    server_cpu_share=0.2, cpu_share=0.3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("ttft_p50_off_ms", -0.6, "TTFT p50"), ("ttft_p99_off_ms", 2.1, "TTFT p99"), ("itl_p99_ms", 20.3, "ITL p99"),
        ("gap_error_p99_ms", 1.1, "gap error"), ("rate_share", 0.9, "offered rate"), ("unpaired", 1, "one log only"),
    ],
)  # fmt: skip
def test_each_bound_of_a_step_is_told(field: str, value: float, word: str) -> None:
    assert GOOD.wrong == []
    (why,) = replace(GOOD, **{field: value}).wrong  # type: ignore[arg-type]
    assert word in why


def climbed(monkeypatch: pytest.MonkeyPatch, step: Callable[[int], suite.Step]) -> list[suite.Line]:
    """A ladder whose steps are as `step` makes them."""
    monkeypatch.setattr(suite, "_try", lambda _url, streams, _schedule: (step(streams), 1))
    return suite.ladder("", (1, 16, 64), Schedule(), lambda _text: None)


def test_the_ladder_names_the_client_where_the_client_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(GOOD, gap_error_p99_ms=9.0)
    *_, last = climbed(monkeypatch, lambda streams: wrong if streams == 64 else replace(GOOD, streams=streams))
    assert last.status == "PASS"
    assert "16 streams; at 64: gap error p99 9.00 ms" in last.message
    *_, last = climbed(monkeypatch, lambda streams: replace(wrong, streams=streams))
    assert last.status == "FAIL"
    assert last.numbers["streams"] == 0


def test_the_ladder_does_not_blame_the_client_for_a_server_that_is_the_bottleneck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = replace(GOOD, rate_share=0.5, server_cpu_share=0.97)
    *_, last = climbed(monkeypatch, lambda streams: slow if streams == 64 else replace(GOOD, streams=streams))
    assert last.status == "PASS"
    assert "scripted server is the bottleneck" in last.message
    assert "no word on the client" in last.message


# -- against the scripted server ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with suite.scripted_server() as (address, _):
        yield address


def test_the_servers_log_agrees_with_its_schedule(url: str) -> None:
    schedule = Schedule(30, 10, 12)
    driven = uvloop.run(drive(url, 4, 8, schedule))
    assert driven.issued == len(driven.served) == len(driven.tape.seen) == 8
    assert driven.connections == 4
    assert {len(each.sent_ns) for each in driven.served} == {12}
    late = truth.late_ms(driven.served, schedule)
    assert late.min() >= 0  # nothing leaves early
    assert truth.rank(late, 0.5) < 10  # on a busy box too, half of the chunks leave before the next is due
    assert driven.paired.unpaired == 0
    assert driven.tape.tokens == 8 * 12
    assert truth.most_open(driven.served) <= 4


def test_every_odd_framing_is_read_right(url: str) -> None:
    assert [line.message for line in suite.odd_framing(url) if line.status != "PASS"] == []


def test_a_framing_that_is_read_wrong_is_told() -> None:
    outcome = Outcome("odd-crlf", "odd", "", 0, "cold", "ok", 0)
    outcome.text = "something else"
    assert "other text" in suite.differs(framing.CASES["crlf"], outcome)
    assert suite.differs(framing.CASES["truncated"], outcome) == "counted as a success"
    outcome.text, outcome.outcome, outcome.error_class = framing.RIGHT, "failed", "idle_timeout"
    assert "idle_timeout" in suite.differs(framing.CASES["crlf"], outcome)
    assert "failed as idle_timeout" in suite.differs(framing.CASES["truncated"], outcome)


def test_a_request_that_is_given_up_is_logged_as_aborted(url: str) -> None:
    async def give_up() -> dict[str, Any]:
        schedule = Schedule(20, 20, 500)
        control = Client(
            Target(url), Limits(), plugins.load("dialects", "openai_chat"), model="", headers={}, connections=1
        )  # fmt: skip

        async def counted(word: str) -> dict[str, Any]:
            for _ in range(400):
                stats: dict[str, Any] = await control.get_json("/stats")
                if stats[word]:
                    break
                await asyncio.sleep(0.05)
            return stats

        await control.get_json("/reset")
        running = asyncio.create_task(drive(url, 1, 1, schedule))
        try:
            await counted("chunks")  # it is in the middle of its answer
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return await counted("aborted")
        finally:
            await control.close()

    stats = uvloop.run(give_up())
    assert stats["aborted"] == 1
    assert stats["received"] == 1


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_the_quick_selftest_holds_on_this_machine_and_is_honest_where_it_is_too_busy() -> None:
    """Only the ladder measures the machine; everything else must pass on any, the frozen generator above all."""
    done = subprocess.run(
        [sys.executable, "-m", "loadgen", "selftest", "--quick", "--json"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    lines = {line["check"]: line for line in report["lines"]}
    ladder = {name for name in lines if name.endswith(" streams") or name == "accurate up to"}
    assert [line for name, line in lines.items() if name not in ladder and line["status"] != "PASS"] == []
    ours = lines["we frozen 2 s"]
    assert (ours["verdict"], ours["exit_code"], ours["loop_lag"]) == ("INCONCLUSIVE", 2, "fail")
    theirs = lines["server frozen 2 s"]
    assert theirs["e2e_due_held"] == suite.SEATS
    assert theirs["e2e_due_max_s"] >= suite.FROZEN_S
    best = lines["accurate up to"]
    accurate = [
        lines[name]["streams"] for name in ladder if name != "accurate up to" and lines[name]["status"] == "PASS"
    ]
    assert best["streams"] == max(accurate, default=0)
    assert (best["status"] == "PASS") == (best["streams"] >= suite.MUST_STREAMS)
    assert report["overall"] == ("PASS" if all(line["status"] == "PASS" for line in lines.values()) else "FAIL")
    assert done.returncode == (0 if report["overall"] == "PASS" else 1)
    assert "streams" in done.stderr  # progress is shown meanwhile
