"""Statistics: certainty by the published rule, totals that add up, then against now with like compared to like."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import stats
from loadgen.hist import Hist
from loadgen.stats import (
    Key,
    Quantile,
    Totals,
    certified,
    conservation,
    drift,
    floor_n,
    in_flight,
    incomplete_beta,
    latency_table,
    length_bin,
    printable,
    quantile,
    retention,
    samples_needed,
    thirds,
    windows,
)
from loadgen.types import Grade, Outcome

MEASURE = golden.phase("measure", "measure", 0, 600)


@pytest.mark.parametrize(
    ("over", "needed"),
    [
        (0, [7, 44, 90, 459, 4603]),
        (1, [11, 64, 130, 662, 6636]),
        (5, [22, 127, 259, 1307, 13105]),
        (10, [35, 197, 398, 2010, 20140]),
    ],
)
def test_samples_needed_are_those_of_mlperf_loadgen(over: int, needed: list[int]) -> None:
    assert [samples_needed(p, over) for p in (0.5, 0.9, 0.95, 0.99, 0.999)] == needed


def test_a_percentile_is_certified_from_its_floor_on() -> None:
    assert [floor_n(p) for p in stats.PERCENTILES] == [11, 64, 130, 662, 6636]
    assert not certified(0.99, 661)
    assert certified(0.99, 662)


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0.01, 0.99))
def test_incomplete_beta_is_a_sum_of_binomial_terms(a: int, b: int, x: float) -> None:
    n = a + b - 1
    exact = sum(math.comb(n, j) * x**j * (1 - x) ** (n - j) for j in range(a, n + 1))
    assert incomplete_beta(a, b, x) == pytest.approx(exact, rel=1e-9, abs=1e-12)


@given(st.integers(1, 3000), st.sampled_from([0.5, 0.9, 0.99]))
def test_what_is_certified_can_be_printed(n: int, p: float) -> None:
    assert printable(p, n) or not certified(p, n)


def test_a_percentile_is_printed_from_one_in_one_minus_p() -> None:
    assert next(n for n in range(1, 2000) if printable(0.9, n)) == 10
    assert next(n for n in range(1, 2000) if printable(0.99, n)) == 100
    assert next(n for n in range(1, 2000) if printable(0.999, n)) == 1000


def test_p99_of_six_samples_is_not_a_number() -> None:
    hist = Hist([210_000, 215_000, 220_000, 230_000, 260_000, 900_000])
    median = quantile(hist, 0.5)
    assert median is not None
    assert median.n == 6
    assert 220_000 <= median.value_us <= 230_000
    assert not median.certified
    assert quantile(hist, 0.99) is quantile(hist, 0.999) is None
    assert hist.max == 900_000


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not a share"):
        samples_needed(99, 1)


def test_lengths_are_binned_by_powers_of_two() -> None:
    assert [length_bin(n) for n in (None, 0, 1, 128, 129, 256, 257, 262_144)] == (
        [None, None, 128, 128, 256, 256, 512, 262_144]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Totals


def random_outcomes(seed: int, n: int) -> list[Outcome]:
    draw = Random(seed)
    made = []
    for k in range(n):
        due_s = draw.uniform(0, 600)
        cls, cache = draw.choice(["chat_short", "long_context"]), draw.choice(["cold", "warm"])
        kind = draw.random()
        if kind < 0.1:
            made.append(golden.failed(k, due_s, draw.choice(["http_error", "idle_timeout"]), cls=cls, cache=cache))
        elif kind < 0.15:
            made.append(golden.incomplete(k, due_s, cut_s=600, cls=cls, cache=cache))
        else:
            grade = draw.choice([None, Grade(True, 1.0, "ok"), Grade(False, 0.0, "wrong")])
            made.append(
                golden.outcome(
                    k, due_s, cls=cls, cache=cache, ttft_s=draw.lognormvariate(-1, 1), tpot_s=draw.uniform(0.005, 0.1),
                    tokens=draw.randint(1, 40), prompt_tokens=draw.randint(1, 9000), grade=grade,
                )
            )  # fmt: skip
    return made


SLICES = [(golden.at(0), golden.at(200)), (golden.at(200), golden.at(400)), (golden.at(400), golden.at(600))]


def test_windows_of_two_shards_add_up_to_those_of_the_concatenation(tmp_path: Path) -> None:
    outcomes = random_outcomes(1, 200)
    whole = windows(golden.build(tmp_path / "whole", outcomes=outcomes, phases=[MEASURE]), SLICES)
    left = windows(golden.build(tmp_path / "left", outcomes=outcomes[::2], phases=[MEASURE]), SLICES)
    right = windows(golden.build(tmp_path / "right", outcomes=outcomes[1::2], phases=[MEASURE]), SLICES)
    for a, b in zip(left, right, strict=True):
        a.add(b)
    assert left == whole
    assert sum(w.total().n for w in whole) == 200


def test_slices_add_up_to_the_whole(tmp_path: Path) -> None:
    run = golden.build(tmp_path, outcomes=random_outcomes(2, 150), phases=[MEASURE])
    first, *rest = windows(run, SLICES)
    for window in rest:
        first.add(window)
    assert (first,) == windows(run, [(golden.at(0), golden.at(600))])


def test_totals_count_failures_and_cuts_but_not_their_latencies_or_tokens() -> None:
    totals = Totals()
    for o in (
        golden.outcome(0, 1, tokens=50, flags={"x"}),
        golden.outcome(1, 1, tokens=60, grade=Grade(False, 0.0, "wrong")),
        golden.failed(2, 1, "idle_timeout", first_ns=golden.at(2), output_tokens=1000, output_tokens_source="usage"),
        golden.incomplete(3, 1, cut_s=5),
    ):
        totals.count(o)
    assert (totals.ok, totals.failed, totals.incomplete, totals.n) == (2, 1, 1, 4)
    assert (totals.errors, totals.flags, totals.grades) == ({"idle_timeout": 1}, {"x": 1}, {"ok": 1, "wrong": 1})
    assert totals.tokens() == (110, "usage")
    assert totals.hists["ttft"].n == 2
    assert totals.hists["send_lag"].n == 4


def test_estimated_tokens_are_never_added_to_counted_ones() -> None:
    totals = Totals()
    totals.count(golden.outcome(0, 1, tokens=50, output_tokens_source="estimated"))
    assert totals.tokens() == (50, "estimated")
    assert "tpot" not in totals.hists
    totals.count(golden.outcome(1, 1, tokens=50))
    assert totals.tokens() is None


# ---------------------------------------------------------------------------------------------------------------------
# Then and now


def test_a_creeping_decode_rate_shows_in_the_thirds_and_not_in_the_mean(tmp_path: Path) -> None:
    creeping = [golden.outcome(k, k * 10, tpot_s=0.05 + 0.0009 * k, tokens=20) for k in range(60)]
    found = thirds(golden.build(tmp_path, outcomes=creeping, phases=[MEASURE]))
    assert found is not None
    (one,) = drift(found[0], found[2], ["tpot"])
    assert (one.first.n, one.last.n, one.enough) == (20, 20, True)
    assert one.ratio == pytest.approx(94.1 / 58.1, rel=0.01)
    assert one.key == Key("chat_short", "cold", 512)


def test_a_mix_that_shifts_is_not_drift(tmp_path: Path) -> None:
    short = [golden.outcome(k, k * 8, ttft_s=0.1, prompt_tokens=200) for k in range(66)]
    long = [golden.outcome(100 + k, 100 + k * 8, ttft_s=4.0, prompt_tokens=9000) for k in range(60)]
    found = thirds(golden.build(tmp_path, outcomes=short + long, phases=[MEASURE]))
    assert found is not None
    ratios = {d.key.up_to_tokens: d.ratio for d in drift(found[0], found[2], ["ttft"])}
    assert ratios == {256: 1.0, 16384: 1.0}


def test_cold_and_repeated_prompts_are_not_pooled(tmp_path: Path) -> None:
    outcomes = [golden.outcome(k, k * 10, cache="cold" if k % 2 else "warm") for k in range(60)]
    found = thirds(golden.build(tmp_path, outcomes=outcomes, phases=[MEASURE]))
    assert found is not None
    assert [d.key.cache for d in drift(found[0], found[2], ["ttft"])] == ["cold", "warm"]


def test_a_steady_server_retains_its_throughput(tmp_path: Path) -> None:
    found = thirds(golden.build(tmp_path, outcomes=golden.steady(600), phases=[MEASURE]))
    assert found is not None
    (one,) = retention(found[0], found[2])
    assert one.ratio == pytest.approx(1, abs=0.03)
    assert (one.source, one.cut, one.enough) == ("usage", 0, True)


def test_a_class_that_gets_nothing_done_at_the_end_retains_nothing(tmp_path: Path) -> None:
    outcomes = [golden.outcome(k, k * 10) if k < 40 else golden.failed(k, k * 10, "connect_refused") for k in range(60)]
    found = thirds(golden.build(tmp_path, outcomes=outcomes, phases=[MEASURE]))
    assert found is not None
    (one,) = retention(found[0], found[2])
    assert (one.ratio, one.last_ok, one.enough) == (0.0, 0, False)


def test_rates_of_two_sources_are_not_compared(tmp_path: Path) -> None:
    outcomes = [golden.outcome(k, k * 10, output_tokens_source="usage" if k < 30 else "estimated") for k in range(60)]
    found = thirds(golden.build(tmp_path, outcomes=outcomes, phases=[MEASURE]))
    assert found is not None
    (one,) = retention(found[0], found[2])
    assert (one.ratio, one.source) == (None, None)


def test_a_run_that_was_cut_ends_with_its_last_sign_of_life(tmp_path: Path) -> None:
    phase = golden.Phase("measure", "measure", 0, None, None)
    run = golden.build(tmp_path, outcomes=golden.steady(60), phases=[phase], reason=None)
    found = thirds(run)
    assert found is not None
    assert found[2].end_ns == max(o.done_ns or 0 for o in run.outcomes())
    assert thirds(golden.build(tmp_path / "none")) is None


# ---------------------------------------------------------------------------------------------------------------------
# The whole run


def test_the_latency_table_has_a_row_per_class_and_cache(tmp_path: Path) -> None:
    outcomes = golden.steady(600) + golden.steady(60, cls="long", cache="warm", phase="measure", ttft_s=2.0)
    outcomes += [golden.failed(5000, 3, "http_error"), golden.incomplete(5001, 590, cut_s=600)]
    outcomes += golden.steady(50, phase="warmup")
    phases = [golden.phase("warmup", "warmup", -50, 0), MEASURE]
    chat, long = latency_table(golden.build(tmp_path, outcomes=outcomes, phases=phases, shards=2))
    n = len(golden.steady(600))
    assert (chat.cls, chat.cache, chat.n, chat.ok, chat.failed, chat.incomplete) == (
        ("chat_short", "cold", n + 2, n, 1, 1)
    )
    assert (long.cls, long.cache) == ("long", "warm")
    assert chat.quantiles["ttft"][0.99] == Quantile(0.99, 200_000, n, True)
    assert 0.999 in chat.quantiles["ttft"]  # n is above 1,000: printed, not certified
    assert not chat.quantiles["ttft"][0.999].certified
    assert 0.999 not in long.quantiles["ttft"]
    assert chat.quantiles["gap"][0.5].n == 100 * n
    assert chat.max_us["ttft"] == 200_000
    assert chat.tokens_per_s == pytest.approx(101 * n / 600)
    assert chat.tokens_source == "usage"


def test_a_run_without_any_success_has_counts_and_no_numbers(tmp_path: Path) -> None:
    outcomes = [golden.failed(k, k / 50, "connect_refused", sent_ns=None) for k in range(20)]
    run = golden.build(tmp_path / "run", outcomes=outcomes, phases=[golden.phase("measure", "measure", 0, 0.4)])
    (row,) = latency_table(run)
    assert (row.ok, row.failed, row.quantiles, row.tokens_per_s, row.tokens_source) == (0, 20, {}, None, None)
    assert latency_table(golden.build(tmp_path / "nothing")) == []


def test_littles_law_gives_the_seats_of_a_busy_run(tmp_path: Path) -> None:
    run = golden.build(tmp_path, outcomes=golden.steady(600, seats=7), phases=[MEASURE])
    assert in_flight(run) == pytest.approx(7, rel=1e-3)
    idle = golden.build(tmp_path / "idle", outcomes=golden.steady(600, seats=4, think_s=2.2), phases=[MEASURE])
    assert in_flight(idle) == pytest.approx(2, rel=0.02)
    assert in_flight(golden.build(tmp_path / "none")) is None


def test_requests_that_ran_across_the_border_of_a_phase_count_for_their_part(tmp_path: Path) -> None:
    outcomes = [golden.outcome(0, -50, phase="warmup", done_ns=golden.at(100)), golden.incomplete(1, 500, cut_s=660)]
    run = golden.build(tmp_path, outcomes=outcomes, phases=[golden.phase("warmup", "warmup", -60, 0), MEASURE])
    assert in_flight(run) == pytest.approx((100 + 100) / 600)


def test_what_was_issued_is_accounted_for(tmp_path: Path) -> None:
    run = golden.build(tmp_path, outcomes=random_outcomes(3, 80), phases=[MEASURE], shards=2)
    (one,) = conservation(run)
    assert (one.issued, one.holds) == (80, True)


def test_a_request_that_nobody_accounts_for_is_seen(tmp_path: Path) -> None:
    short = golden.phase("measure", "measure", 0, 600, issued=11)
    (one,) = conservation(golden.build(tmp_path / "a", outcomes=random_outcomes(4, 10), phases=[short]))
    assert not one.holds
    lying = golden.phase("measure", "measure", 0, 600, issued=11, ok=11, failed=0, incomplete=0)
    (one,) = conservation(golden.build(tmp_path / "b", outcomes=random_outcomes(4, 10), phases=[lying]))
    assert not one.holds
