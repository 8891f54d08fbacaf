"""Histograms: HdrHistogram's buckets and bytes, exact merging, and logs that survive a cut."""

from __future__ import annotations

import base64
import math
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.hist import HIGHEST_US, Hist, Interval, log_header, log_line, merged, read_log
from loadgen.journal import Damage

SHORT = st.integers(0, 3_000)
LOG_UNIFORM = st.integers(0, 36).flatmap(lambda bits: st.integers(0, min(1 << bits, HIGHEST_US)))
VALUES = st.lists(st.one_of(SHORT, LOG_UNIFORM, st.just(HIGHEST_US)), max_size=200)
READING: dict[str, int | str | None] = {"mono_ns": 5_000_000_000, "wall_ns": 1_796_000_000_000_000_000}


def width_at(value: int) -> int:
    """How wide the bucket around a value is: 1 µs below 2,048, then doubling."""
    return 1 << max(value.bit_length() - 11, 0)


def exact_quantile(values: list[int], p: float) -> int:
    return sorted(values)[max(math.ceil(p * len(values) - 1e-9), 1) - 1]


@given(VALUES)
def test_encoding_is_byte_identical_to_hdrhistogram(values: list[int]) -> None:
    hdrh = pytest.importorskip("hdrh.histogram", reason="hdrhistogram has no wheel for this platform")
    oracle = hdrh.HdrHistogram(1, HIGHEST_US, 3)
    for value in values:
        oracle.record_value(value)
    assert Hist(values).encode() == oracle.encode()


@given(st.dictionaries(LOG_UNIFORM, st.integers(1, 1 << 52), max_size=8))
def test_large_counts_encode_like_hdrhistogram_and_come_back(counts: dict[int, int]) -> None:
    hdrh = pytest.importorskip("hdrh.histogram", reason="hdrhistogram has no wheel for this platform")
    oracle = hdrh.HdrHistogram(1, HIGHEST_US, 3)
    for value, n in counts.items():
        oracle.record_value(value, n)
    decoded = Hist.decode(oracle.encode())
    assert decoded.n == sum(counts.values())
    assert decoded.encode() == oracle.encode()


@given(VALUES)
def test_hdrhistogram_decodes_what_we_encode(values: list[int]) -> None:
    hdrh = pytest.importorskip("hdrh.histogram", reason="hdrhistogram has no wheel for this platform")
    other = hdrh.HdrHistogram.decode(Hist(values).encode())
    assert other.get_total_count() == len(values)


@given(VALUES)
def test_encode_and_decode_are_a_round_trip(values: list[int]) -> None:
    hist = Hist(values)
    again = Hist.decode(hist.encode())
    assert again == hist
    assert again.n == hist.n
    if values:
        assert abs((again.mean or 0) - (hist.mean or 0)) <= (hist.mean or 0) / 1000 + 1


@given(VALUES, VALUES)
def test_merging_equals_recording_everything_at_once(left: list[int], right: list[int]) -> None:
    total = merged([Hist(left), Hist(right)])
    whole = Hist(left + right)
    assert total == whole
    assert (total.n, total.min, total.max, total.sum, total.overflow) == (
        (whole.n, whole.min, whole.max, whole.sum, whole.overflow)
    )


@given(VALUES, VALUES, VALUES)
def test_merging_is_associative_and_commutative(a: list[int], b: list[int], c: list[int]) -> None:
    left = merged([merged([Hist(a), Hist(b)]), Hist(c)])
    right = merged([Hist(c), merged([Hist(b), Hist(a)])])
    assert left == right
    assert left.encode() == right.encode()


@given(VALUES.filter(bool), st.sampled_from([0.001, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0]))
def test_quantile_is_the_rank_rounded_up_within_one_bucket_and_never_above_the_maximum(
    values: list[int], p: float
) -> None:
    got, exact = Hist(values).quantile(p), exact_quantile(values, p)
    assert got is not None
    assert exact <= got < exact + width_at(exact)
    assert got <= max(values)


@given(st.lists(VALUES, min_size=1, max_size=4).filter(any))
def test_quantiles_of_merged_windows_are_those_of_all_values(parts: list[list[int]]) -> None:
    everything = [value for part in parts for value in part]
    got = merged(Hist(part) for part in parts).quantile(0.99)
    exact = exact_quantile(everything, 0.99)
    assert got is not None
    assert exact <= got < exact + width_at(exact)


def test_percentiles_of_two_windows_are_merged_not_averaged() -> None:
    total = merged([Hist([10_000] * 1000), Hist([2_000_000] * 10)])
    assert total.n == 1010
    assert total.quantile(0.95) == total.quantile(0.99) == 10_007  # the bucket's highest equivalent value
    assert total.quantile(0.995) == 2_000_000


def test_rank_is_rounded_up_as_java_does() -> None:
    hist = Hist(range(1, 1601))
    assert hist.quantile(0.999) == 1599  # 1598.4 rounded up; the Python package says 1598
    assert Hist(range(1, 101)).quantile(0.07) == 7  # 0.07 · 100 is 7.000000000000001 in floating point


def test_no_value_has_no_quantile_and_no_mean() -> None:
    empty = Hist()
    assert (empty.quantile(0.5), empty.mean, empty.min, empty.max, empty.n) == (None, None, None, None, 0)


def test_merging_with_an_empty_histogram_keeps_the_minimum() -> None:
    total = merged([Hist(), Hist([500]), Hist()])
    assert (total.min, total.max, total.n) == (500, 500, 1)


def test_values_out_of_range_are_counted_and_the_maximum_stays_exact() -> None:
    hist = Hist([120_000] * 97 + [65_000_000, HIGHEST_US + 1, 3 * HIGHEST_US])
    assert (hist.n, hist.overflow, hist.max) == (100, 2, 3 * HIGHEST_US)
    assert hist.quantile(0.5) == 120_063
    assert (hist.quantile(0.99) or 0) >= HIGHEST_US  # never a smaller number than the truth
    assert Hist([-5, 10]).overflow == 1


def test_a_batch_of_numpy_values_counts_like_a_list() -> None:
    values = np.random.default_rng(1).integers(1, 10_000_000, 5_000)
    assert Hist(values) == Hist(values.tolist())


def test_small_histograms_are_small() -> None:
    hist = Hist(range(1_000_000, 1_100_000, 1_000))
    assert hist._index.nbytes + hist._count.nbytes <= 12 * 100


@given(st.binary(max_size=60))
def test_rubbish_is_a_value_error(data: bytes) -> None:
    framed = (0x1C849313).to_bytes(4) + len(data).to_bytes(4) + bytes(7) + b"\3" + bytes(7) + b"\1" + bytes(16) + data
    packed = zlib.compress(framed)
    blob = base64.b64encode((0x1C849314).to_bytes(4) + len(packed).to_bytes(4) + packed)
    for attempt in (data, base64.b64encode(data), blob):
        try:
            hist = Hist.decode(attempt)
        except ValueError:
            continue
        assert hist.n >= 0


def test_java_writes_a_lone_empty_bucket_as_zero() -> None:
    counters = bytes([0, 2, 0, 2])  # empty, 1, empty, 1
    inner = (0x1C849313).to_bytes(4) + len(counters).to_bytes(4) + bytes(4) + (3).to_bytes(4)
    inner += (1).to_bytes(8) + HIGHEST_US.to_bytes(8) + bytes.fromhex("3ff0000000000000")
    packed = zlib.compress(inner + counters)
    blob = base64.b64encode((0x1C849314).to_bytes(4) + len(packed).to_bytes(4) + packed)
    assert Hist.decode(blob) == Hist([1, 3])


def test_another_layout_is_refused_by_name() -> None:
    hdrh = pytest.importorskip("hdrh.histogram", reason="hdrhistogram has no wheel for this platform")
    with pytest.raises(ValueError, match="another layout: 2 digits"):
        Hist.decode(hdrh.HdrHistogram(1, 3_600_000, 2).encode())


# ---------------------------------------------------------------------------------------------------------------------


def write_log(path: Path, intervals: list[Interval]) -> None:
    base_ns = int(READING["mono_ns"] or 0)
    lines = [line.encode() for line in log_header(READING)]
    lines += [log_line(i.tag, i.start_ns, i.end_ns, base_ns, i.hist) for i in intervals]
    path.write_bytes(b"\n".join(lines) + b"\n")


def interval(tag: str, at_s: int, values: list[int]) -> Interval:
    return Interval(tag, at_s * 10**9, (at_s + 10) * 10**9, Hist(values))


def test_a_log_comes_back_with_tags_times_and_exact_maxima(tmp_path: Path) -> None:
    wrote = [interval("measure:chat:cold:ttft", 10, [123_456_789, 5]), interval("measure:chat:cold:gap", 20, [3])]
    write_log(tmp_path / "w.hlog", wrote)
    damage = Damage()
    read = list(read_log(tmp_path / "w.hlog", damage))
    assert read == wrote
    assert read[0].hist.max == 123_456_789
    assert damage.counts() == {}


def test_a_maximum_beyond_the_range_stands_in_the_log(tmp_path: Path) -> None:
    write_log(tmp_path / "w.hlog", [interval("a:b:c:e2e", 10, [7, 3 * HIGHEST_US])])
    (read,) = read_log(tmp_path / "w.hlog", Damage())
    assert read.hist.max == read.hist.quantile(0.99) == 3 * HIGHEST_US


def test_a_log_cut_anywhere_loses_at_most_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "w.hlog"
    write_log(path, [interval("a:b:c:ttft", 10, [5, 6]), interval("a:b:c:ttft", 20, [7])])
    whole = path.read_bytes()
    last = whole.rindex(b"\nTag=") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        damage = Damage()
        read = list(read_log(path, damage))
        assert [i.hist.n for i in read[:1]] == [2]
        if cut < len(whole) - 1:  # a line that lacks only its newline is whole
            assert (len(read), damage.torn_lines) == (1, int(cut > last))


def test_the_python_package_reads_our_log_with_its_tags(tmp_path: Path) -> None:
    log = pytest.importorskip("hdrh.log", reason="hdrhistogram has no wheel for this platform")
    hdrh = pytest.importorskip("hdrh.histogram", reason="hdrhistogram has no wheel for this platform")
    path = tmp_path / "w.hlog"
    write_log(path, [interval("m:chat:cold:ttft", 10, [5_000, 6_000]), interval("m:chat:cold:gap", 10, [7])])
    reader = log.HistogramLogReader(str(path), hdrh.HdrHistogram(1, HIGHEST_US, 3))
    first = reader.get_next_interval_histogram()
    assert (first.get_tag(), first.get_total_count(), first.get_start_time_stamp()) == (
        ("m:chat:cold:ttft", 2, 1_796_000_005_000)
    )
    assert reader.get_next_interval_histogram().get_tag() == "m:chat:cold:gap"
    reader.close()


def test_javas_log_processor_reads_our_log_with_its_tags(tmp_path: Path) -> None:
    jars = sorted((Path.home() / ".m2/repository/org/hdrhistogram/HdrHistogram").glob("*/HdrHistogram-*.jar"))
    java = shutil.which("java")
    if java is None or not jars:
        pytest.skip("no Java with HdrHistogram in the local Maven repository")
    path = tmp_path / "w.hlog"
    values = [*range(1_000, 200_000, 700), 86_399_999_999]
    write_log(path, [interval("m:chat:cold:ttft", 10, values[::2]), interval("m:chat:cold:ttft", 20, values[1::2]),
                     interval("m:chat:cold:gap", 20, [3] * 7)])  # fmt: skip

    def processor(*options: str) -> str:
        command = [java, "-cp", str(jars[-1]), "org.HdrHistogram.HistogramLogProcessor", "-i", str(path), *options]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    assert {"m:chat:cold:ttft", "m:chat:cold:gap"} <= set(processor("-listtags").split())
    table = processor("-tag", "m:chat:cold:ttft", "-outputValueUnitRatio", "1")
    rows = [line.split() for line in table.splitlines() if re.match(r" *[\d.]+ +[\d.]+ +\d+ ", line)]
    hist = Hist(values)
    assert int(rows[-1][2]) == hist.n
    for value, p, *_ in rows[:-1]:
        assert abs(float(value) - (hist.quantile(float(p)) or 0)) <= width_at(round(float(value)))
