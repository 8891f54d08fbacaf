"""The journal: what a crash, a power cut or a full disk leaves can be read, and never stops the one who writes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import disks
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import journal
from loadgen.journal import MAX_LINE_BYTES, Appender, Damage, SampleWriter, header, read_header, read_lines
from loadgen.record import Run
from loadgen.types import Json, Sample

SCHEMA = "loadgen.test/1"


def written(path: Path, records: list[Json]) -> bytes:
    appender = Appender(path, header(SCHEMA))
    for record in records:
        appender.append(record)
    appender.close()
    assert appender.errors == 0
    return path.read_bytes()


def read(path: Path) -> tuple[list[Json], dict[str, int]]:
    damage = Damage()
    return list(read_lines(path, damage, SCHEMA)), damage.counts()


def test_what_is_appended_comes_back_after_the_header(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    records: list[Json] = [{"k": 0, "text": "zwölf\n\0\ud800"}, {"k": 1, "deep": {"a": [1, None, 2.5]}}]
    raw = written(path, records)
    assert read(path) == (records, {})
    assert raw.isascii()
    first = read_header(path)
    assert first is not None
    assert first["schema"] == SCHEMA
    assert {"mono_ns", "wall_ns", "boot_id", "pid"} <= first.keys()


def test_values_that_json_does_not_know_do_not_raise(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    written(path, [{"nan": float("nan"), "deep": [float("inf"), 1.0], "path": Path("x")}])
    ((record,), damage) = read(path)
    assert record == {"nan": None, "deep": [None, 1.0], "path": "PosixPath('x')"}
    assert damage == {}


def test_several_processes_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    code = (
        "import sys; from pathlib import Path; from loadgen.journal import *\n"
        f"a = Appender(Path({str(path)!r}), header({SCHEMA!r}))\n"
        "for k in range(200): a.append({'by': sys.argv[1], 'k': k, 'fill': 'x' * 300})\n"
        "a.close()"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(k)]) for k in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    records, damage = read(path)
    assert damage == {}
    assert {by: [r["k"] for r in records if r["by"] == by] for by in "012"} == {by: list(range(200)) for by in "012"}


@given(st.integers(1, 200))
def test_a_file_cut_anywhere_loses_at_most_its_last_record(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "j.jsonl"
    raw = written(path, [{"k": k} for k in range(30)])
    path.write_bytes(raw[:-cut])
    records, damage = read(path)
    whole = raw[:-cut].count(b"\n") - 1
    assert records[:whole] == [{"k": k} for k in range(whole)]
    assert len(records) - whole + damage.get("torn_lines", 0) <= 1  # a line that lacks only its newline is whole


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_no_bytes_at_all_can_make_the_reader_raise(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("rubbish") / "j.jsonl"
    path.write_bytes(b'{"k":1}\n' + b"\n".join(parts) + b'\n{"k":2}\n')
    records, _ = read(path)
    assert records[0] == {"k": 1}
    assert records[-1] == {"k": 2}


def test_a_nul_tail_is_counted_and_nothing_else_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    raw = written(path, [{"k": 1}, {"k": 2}])
    path.write_bytes(raw + bytes(4096))
    assert read(path) == ([{"k": 1}, {"k": 2}], {"nul_bytes": 4096})


def test_a_hole_followed_by_valid_lines_costs_only_the_line_it_tore(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    raw = written(path, [{"k": 1}])
    path.write_bytes(raw + b'{"k": 2, "te' + bytes(5000) + b'{"k":3}\n{"k":4}\n')
    assert read(path) == ([{"k": 1}, {"k": 3}, {"k": 4}], {"torn_lines": 1, "nul_bytes": 5000})


def test_a_hole_larger_than_memory_should_be_is_read_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    raw = written(path, [{"k": 1}])
    with path.open("r+b") as file:
        file.seek(len(raw) + 64 * journal.READ_BLOCK_BYTES)
        file.write(b'{"k":2}\n')  # sparse: takes no disk
    assert read(path) == ([{"k": 1}, {"k": 2}], {"nul_bytes": 64 * journal.READ_BLOCK_BYTES})


def test_a_line_without_end_is_skipped_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"k":1}\n' + b"x" * (5 * MAX_LINE_BYTES) + b'\n{"k":2}\n' + b"y" * (2 * MAX_LINE_BYTES))
    assert read(path) == ([{"k": 1}, {"k": 2}], {"long_lines": 2})


def test_a_missing_file_and_one_that_is_a_folder_are_counted(tmp_path: Path) -> None:
    assert read(tmp_path / "none.jsonl") == ([], {"missing": 1})
    assert read(tmp_path) == ([], {"unreadable": 1})


def test_a_file_of_another_schema_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"schema":"loadgen.test/2"}\n{"k":1}\n')
    assert read(path) == ([], {"unknown_schema": 1})


def test_a_torn_file_is_continued_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    raw = written(path, [{"k": 1}, {"k": 2}])
    path.write_bytes(raw[:-3])
    written(path, [{"k": 3}])
    assert read(path) == ([{"k": 1}, {"k": 3}], {"torn_lines": 1})


def test_appending_after_close_and_lines_too_long_are_counted_not_raised(tmp_path: Path) -> None:
    appender = Appender(tmp_path / "j.jsonl", None)
    appender.append({"fill": "x" * MAX_LINE_BYTES})
    appender.close()
    appender.append({"k": 1})
    appender.close()
    assert appender.errors == 2
    assert "longer than" in (appender.first_error or "")


def test_an_append_does_not_wait_for_a_sync_that_hangs(tmp_path: Path) -> None:
    syncing, answer = threading.Event(), threading.Event()

    def slow_disk(_fd: int) -> None:
        syncing.set()
        assert answer.wait(60)

    appender = Appender(tmp_path / "j.jsonl", None, 3600, slow_disk)
    appender.append({"k": 1})
    waiter = threading.Thread(target=appender.sync)
    waiter.start()
    assert syncing.wait(60)
    appender.append({"k": 2})  # would never return if it waited
    assert appender.path.read_bytes() == b'{"k":1}\n{"k":2}\n'
    answer.set()
    waiter.join()
    appender.close()


def test_a_failing_sync_is_counted(tmp_path: Path) -> None:
    def broken(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    appender = Appender(tmp_path / "j.jsonl", None, 3600, broken)
    appender.append({"k": 1})
    appender.sync()
    appender.close()
    assert appender.errors == 1
    assert "Input/output error" in (appender.first_error or "")


def test_kill_9_leaves_everything_that_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    code = (
        "import sys; from pathlib import Path; from loadgen.journal import *\n"
        f"a = Appender(Path({str(path)!r}), header({SCHEMA!r}))\n"
        "k = 0\n"
        "while True:\n"
        "    a.append({'k': k}); k += 1\n"
        "    if k % 100 == 0: print(k, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = [int(child.stdout.readline()) for _ in range(20)][-1]
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    records, damage = read(path)
    assert len(records) >= told
    assert [record["k"] for record in records] == list(range(len(records)))
    assert damage.get("torn_lines", 0) <= 1


@pytest.mark.root
def test_a_full_disk_raises_nothing_and_is_counted(tmp_path: Path) -> None:
    with disks.tiny(tmp_path / "disk") as disk:
        appender = Appender(disk / "j.jsonl", header(SCHEMA))
        for k in range(2000):
            appender.append({"k": k, "fill": "x" * 200})
        lost = appender.errors
        (disk / "ballast").unlink()
        appender.append({"k": "after"})
        appender.close()
        records, damage = read(disk / "j.jsonl")
    assert 0 < lost == appender.errors
    assert appender.first_error is not None
    assert records[-1] == {"k": "after"}  # once there is room again, writing goes on, on a line of its own
    assert len(records) == 2001 - lost
    assert damage.get("torn_lines", 0) <= 1


# ---------------------------------------------------------------------------------------------------------------------

SECOND = 10**9


def sample(metric: str, value: float, at_s: float, text: str | None = None, **labels: str) -> Sample:
    return Sample("host", metric, value, round(at_s * SECOND), labels, text)


def lines(folder: Path) -> list[Json]:
    return [json.loads(line) for line in (folder / "samples-fast.jsonl").read_text().splitlines()][1:]


def test_samples_of_one_second_become_one_line_of_digests(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, "fast")
    for k, value in enumerate([5.5, 3.0, 9.25, 4.0]):
        writer.write([sample("load1", value, 7 + k / 10), sample("mem_free_bytes", 2**33, 7 + k / 10)])
    writer.write([sample("load1", 1.0, 8.0)])
    assert lines(tmp_path) == [
        {
            "at": 7_300_000_000,
            "monitor": "host",
            "values": {"load1": [3, 9.25, 4, 4], "mem_free_bytes": [2**33, 4]},
        }
    ]
    writer.close()
    assert lines(tmp_path)[-1] == {"at": 8 * SECOND, "monitor": "host", "values": {"load1": 1}}


def test_each_label_set_has_a_line_of_its_own(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, "fast")
    writer.write([sample("temperature_c", 40, 1, gpu="0"), sample("temperature_c", 50, 1, gpu="1")])
    writer.close()
    assert [(line["labels"], line["values"]["temperature_c"]) for line in lines(tmp_path)] == (
        [({"gpu": "0"}, 40), ({"gpu": "1"}, 50)]
    )


def test_happenings_are_written_at_once_and_whole(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, "fast")
    writer.write([sample("load1", 1, 3), sample("oom_kill_global", 1, 3, "Out of memory: Killed process 7", pid="7")])
    writer.write([sample("observed", 1, 3)])
    assert lines(tmp_path) == [
        {"at": 3 * SECOND, "monitor": "host", "metric": "oom_kill_global", "value": 1, "labels": {"pid": "7"},
         "text": "Out of memory: Killed process 7"},
        {"at": 3 * SECOND, "monitor": "host", "metric": "observed", "value": 1, "text": ""},
    ]  # fmt: skip
    writer.close()


def test_near_a_guard_every_reading_is_kept(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, "fast")
    writer.near_guard(True)
    for k in range(5):
        writer.write([sample("load1", k, 1 + k / 10)])
    writer.near_guard(False)
    writer.write([sample("load1", 9, 1.9)])
    assert [line["values"]["load1"] for line in lines(tmp_path)] == list(range(5))
    writer.close()


def test_a_reading_of_an_earlier_second_is_not_lost(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, "fast")
    for at_s in (5.1, 6.1, 5.9, 6.2):
        writer.write([sample("load1", at_s, at_s)])
    writer.close()
    assert sum(journal.expand(line["values"]["load1"])[3] for line in lines(tmp_path)) == 4


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, "fast")
    writer.write([sample("load1", float("nan"), 1), sample("load1", float("inf"), 1), sample("load1", 2, 1)])
    writer.close()
    assert writer.dropped == 2
    assert lines(tmp_path) == [{"at": SECOND, "monitor": "host", "values": {"load1": 2}}]


def test_many_label_sets_in_one_second_stay_bounded(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, "fast")
    for pid in range(journal.MAX_PENDING_DIGESTS + 10):
        writer.write([sample("rss_bytes", 1, 1, pid=str(pid))])
    assert len(writer._pending) < journal.MAX_PENDING_DIGESTS
    writer.close()
    assert len(lines(tmp_path)) == journal.MAX_PENDING_DIGESTS + 10


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.integers(1, 20))
def test_a_digest_is_read_back_as_it_was_however_short_it_was_written(a: float, b: float, c: float, n: int) -> None:
    low, last, high = sorted((a, b, c))
    for digest in ((low, high, last, n), (last, last, last, n), (last, last, last, 1)):
        assert journal.expand(journal.compact(*digest)) == digest


def test_a_day_of_one_lane_is_bounded_in_memory_and_in_files_and_reads_back_whole(tmp_path: Path) -> None:
    day_s, metrics, segment = 86_400, 3, 2 << 20
    writer = SampleWriter(tmp_path, "fast", segment_bytes=segment)
    most = 0
    for second in range(day_s):
        value = float((20 << 30) - second * 4096)
        writer.write([Sample("host", f"metric_{k}_bytes", value + k, second * journal.NS) for k in range(metrics)])
        most = max(most, len(writer._pending))
    writer.close()
    for thread in threading.enumerate():
        if thread.name.startswith("close "):
            thread.join(30)
    files = sorted(tmp_path.glob("samples-fast*.jsonl"))
    sizes = [path.stat().st_size for path in files]
    assert most <= 2
    assert len(files) == -(-sum(sizes) // segment)
    assert max(sizes) < segment + 1000
    assert sum(sizes) / day_s < 30 * metrics + 60, "bytes a second"
    assert all((read_header(path) or {})["lane"] == "fast" for path in files)
    series = Run(tmp_path).series("host", "metric_2_bytes")
    [found] = series.values()
    assert len(found.at_ns) == day_s
    assert found.at_ns.tolist() == [second * journal.NS for second in range(day_s)]
    assert writer.errors == 0
