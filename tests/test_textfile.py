"""Numbers that a user writes to files, and disks that fill up: what is read, what is refused, and what is said once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

import disks
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import clock
from loadgen.types import Sample
from monitors import disk, textfile


class Ticks:
    """A monitor's ticks, one by one."""

    def __init__(self, watch: Any) -> None:
        self.watch = watch

    def __enter__(self) -> Ticks:
        self.runner = asyncio.Runner()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self.watch.aclose())
        self.runner.close()

    def next(self) -> list[Sample]:
        async def one() -> list[Sample]:
            found: list[Sample] = await anext(self.watch)
            return found

        return self.runner.run(one())


def of(samples: list[Sample], metric: str) -> list[Sample]:
    return [s for s in samples if s.metric == metric]


def said(samples: list[Sample], metric: str) -> list[str | None]:
    return [s.text for s in of(samples, metric)]


def read(pattern: Path | str, **options: Any) -> Ticks:
    return Ticks(textfile.watch(textfile.Options(path=str(pattern), **options)))


def test_three_ways_to_write_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.prom").write_text('# HELP queue x\nqueue{name="in",kind="a b"} 3.5\nplain 7\n')
    (tmp_path / "power draw.txt").write_text("41.5\n")
    with read(tmp_path / "*") as ticks:
        seen = ticks.next()
    numbers = [s for s in seen if s.text is None and s.metric != "age_s"]
    assert {(s.metric, tuple(sorted(s.labels.items()))): s.value for s in numbers} == {
        ("queue", (("file", "a.prom"), ("kind", "a b"), ("name", "in"))): 3.5,
        ("plain", (("file", "a.prom"),)): 7.0,
        ("power_draw", (("file", "power draw.txt"),)): 41.5,
    }
    assert said(seen, "observed") == [f"2 files: {tmp_path}/*"]


def test_number_that_nobody_refreshes_is_not_measured_again_and_becomes_stale_once(tmp_path: Path) -> None:
    file = tmp_path / "n.prom"
    file.write_text("x 1\n")
    with read(file, stale=60) as ticks:
        assert [s.value for s in of(ticks.next(), "x")] == [1.0]
        assert of(ticks.next(), "x") == []
        os.utime(file, ns=(clock.wall_ns() - 90 * 10**9,) * 2)
        third, fourth = ticks.next(), ticks.next()
        assert len(said(third, "stale")) == 1
        assert said(fourth, "stale") == []
        assert of(fourth, "age_s")[0].value == pytest.approx(90, abs=30)
        file.write_text("x 2\n")
        assert [s.value for s in of(ticks.next(), "x")] == [2.0]


def test_bad_lines_are_named_once_and_cost_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "n.prom"
    file.write_text("x 1\nthis is no number\nobserved 0\ny 2\n")
    with read(file) as ticks:
        first = ticks.next()
        file.write_text("x 3\nstill none\n")
        second = ticks.next()
    assert [s.value for s in of(first, "x") + of(first, "y") + of(second, "x")] == [1.0, 2.0, 3.0]
    (bad,) = of(first, "bad_lines")
    assert (bad.value, bad.text) == (2.0, f"{file}: 2 bad lines, the first: this is no number")
    assert of(second, "bad_lines") == []
    assert all(s.value == 1.0 for s in of(first, "observed")), "no file can say that we are blind"


def test_file_that_is_half_written_is_believed_only_when_it_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "n"
    file.write_text("x 12")  # 12345 on its way?
    with read(file) as ticks:
        assert of(ticks.next(), "x") == []
        file.write_text("x 12345\n")
        assert [s.value for s in of(ticks.next(), "x")] == [12345.0]
        file.write_text("7")
        assert of(ticks.next(), "n") == []
        os.utime(file, ns=(clock.wall_ns() - 2 * 10**9,) * 2)
        assert [s.value for s in of(ticks.next(), "n")] == [7.0]


def test_writer_that_never_pauses_never_shows_a_value_that_it_did_not_write(tmp_path: Path) -> None:
    file, over = tmp_path / "n.prom", threading.Event()
    file.write_text("x 1111\n")

    def write() -> None:
        while not over.is_set():
            for digit in "123456789":
                with file.open("w") as out:
                    out.write(f"x {digit}")
                    out.flush()
                    out.write(f"{digit * 3}\n")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with read(file) as ticks:
            values = [s.value for _ in range(300) for s in of(ticks.next(), "x")]
    finally:
        over.set()
        thread.join()
    assert {f"{value:.0f}" for value in values} <= {digit * 4 for digit in "123456789"}


def test_series_files_and_sizes_are_bounded(tmp_path: Path) -> None:
    for n in range(textfile.MAX_FILES + 5):
        (tmp_path / f"{n:03d}.prom").write_text("".join(f'x{{n="{k}"}} {k}\n' for k in range(20)))
    (tmp_path / "000.prom").write_bytes(b"y 1\n" * 300_000)
    with read(tmp_path / "*.prom") as ticks:
        seen = ticks.next()
    assert len(of(seen, "x")) == textfile.MAX_SERIES
    assert len(said(seen, "too_many_series")) == 1
    assert "the first 100 are read" in (said(seen, "observed")[0] or "")
    assert "longer than 1 MiB" in (said(seen, "bad_lines")[0] or "")
    assert of(seen, "y") == []


def test_no_file_no_option_and_a_file_that_goes_are_said(tmp_path: Path) -> None:
    file = tmp_path / "n.prom"
    with read("") as ticks:
        assert "path:" in (said(ticks.next(), "observed")[0] or "")
    with read(file) as ticks:
        first, second = ticks.next(), ticks.next()
        assert said(first, "observed") == [f"no file is called {file}"]
        assert second == []
        file.write_text("x 1\n")
        assert [s.value for s in of(ticks.next(), "observed")] == [1.0]
        file.unlink()
        assert said(ticks.next(), "file_gone") == [f"{file} is gone"]


@given(st.text(max_size=200))
def test_no_text_breaks_it(text: str) -> None:
    values, bad, first = textfile.numbers(text, "name")
    assert bad >= 0
    assert (bad == 0) == (first == "")
    assert all(metric not in textfile.OURS for metric, *_ in values)


# ---------------------------------------------------------------------------------------------------------------------
# disk


def test_fill_rate_is_a_mean_over_a_window_that_is_long_enough() -> None:
    free = deque([(0, 1000.0), (5 * 10**9, 900.0)])
    assert disk.fill_rate(free) is None
    free.append((20 * 10**9, 600.0))
    assert disk.fill_rate(free) == 20.0


def volume(path: Path, seconds_ago: float, free_more: float) -> disk.Volume:
    """A path that had so many more bytes free some time ago."""
    found = os.statvfs(path)
    then = (clock.now_ns() - round(seconds_ago * 1e9), float(found.f_bavail * found.f_frsize) + free_more)
    one = disk.Volume(str(path))
    one.free.append(then)
    return one


def test_disk_that_is_full_within_the_hour_is_said_once(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    free = found.f_bavail * found.f_frsize
    one = volume(tmp_path, 30, free / 10)
    first, second = disk.look(one, Path("/")), disk.look(one, Path("/"))
    assert of(first, "fill_bytes_per_s")[0].value == pytest.approx(free / 300, rel=0.5)
    assert "is full in" in (said(first, "full_soon")[0] or "")
    assert of(second, "full_soon") == []
    assert of(disk.look(volume(tmp_path, 30, -free / 10), Path("/")), "full_soon") == []


def test_errors_and_transfers_of_the_device_are_rates_and_a_happening(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev  # noqa: PTH116
    (tmp_path / "sys/devices/sda/sda1").mkdir(parents=True)
    (tmp_path / "sys/devices/sda/device").mkdir()
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    link = tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    link.symlink_to(tmp_path / "sys/devices/sda/sda1")
    errors = tmp_path / "sys/fs/ext4/sda1/errors_count"
    errors.parent.mkdir(parents=True)

    def write(reads: int, busy_ms: int, count: int, io: str) -> None:
        (tmp_path / "sys/devices/sda/sda1/stat").write_text(f"1 0 {reads} 5 1 0 0 9 0 {busy_ms} 14\n")
        errors.write_text(f"{count}\n")
        (tmp_path / "sys/devices/sda/device/ioerr_cnt").write_text(io)

    one = disk.Volume(str(tmp_path))
    write(1000, 0, 2, "0x0\n")
    first = disk.look(one, tmp_path)
    one.counters_ns -= 10**9 * 1000
    write(5000, 5000, 3, "0x1f\n")
    second = disk.look(one, tmp_path)
    assert of(first, "disk_errors") == of(first, "read_bytes_per_s") == []
    assert of(second, "read_bytes_per_s")[0].value == pytest.approx(4000 * 512 / 1000, rel=0.2)
    assert of(second, "io_busy_percent")[0].value == pytest.approx(0.5, rel=0.2)
    assert sorted(str(s) for s in said(second, "disk_errors")) == [
        f"{tmp_path}: 1 more filesystem errors",
        f"{tmp_path}: 31 more io errors",
    ]


def test_volume_that_cannot_be_read_is_said_once(tmp_path: Path) -> None:
    options = disk.Options(run_folder=str(tmp_path), volumes=(str(tmp_path / "none"),))
    with Ticks(disk.watch(options)) as ticks:
        first, second = ticks.next(), ticks.next()
    assert [s.labels["path"] for s in of(first, "unreadable")] == [str(tmp_path / "none")]
    assert of(second, "unreadable") == []
    assert len(of(second, "free_bytes")) == 1


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(4096))


def test_small_disk_that_fills_shows_it_to_the_last_byte(tmp_path: Path) -> None:
    with disks.tiny(tmp_path / "disk") as small, Ticks(disk.watch(disk.Options(run_folder=str(small)))) as ticks:
        before = ticks.next()
        with pytest.raises(OSError, match="No space left"):
            fill(small / "more")
        after = ticks.next()
    assert of(before, "free_bytes")[0].value > 0
    assert of(after, "free_bytes")[0].value == 0
    assert of(after, "total_bytes")[0].value == 256 << 10
