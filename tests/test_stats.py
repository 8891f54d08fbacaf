"""Certainty of percentiles, by the published rule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.hist import Hist
from loadgen.stats import (
    PERCENTILES,
    certified,
    floor_n,
    incomplete_beta,
    printable,
    quantile,
    samples_needed,
)


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
    assert [floor_n(p) for p in PERCENTILES] == [11, 64, 130, 662, 6636]
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
