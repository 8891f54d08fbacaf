"""The run folder: what the recorder writes is what a run says when it is read back, whatever happened in between."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import disks
import golden
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import record
from loadgen.hist import Hist, merged
from loadgen.journal import SampleWriter
from loadgen.record import Journal, Recorder, Run, summarise, write_json, write_text
from loadgen.types import Gaps, Grade, Outcome, Sample, Seconds, ToolCall

WRONG = Grade(False, 0.0, "wrong", "17, not 18", "exact")


def build(folder: Path, outcomes: list[Outcome], **more: object) -> Run:
    return golden.build(folder, outcomes=outcomes, phases=[golden.phase("measure", "measure", 0, 60)], **more)  # type: ignore[arg-type]


def only(run: Run) -> Outcome:
    (found,) = run.outcomes()
    return found


def test_an_outcome_comes_back_with_all_that_judging_needs(tmp_path: Path) -> None:
    wrote = golden.outcome(7, 1.5, flags={"done_without_finish", "x"}, tags={"turn": "2"}, retry_after_s=1.5)
    read = only(build(tmp_path, [wrote]))
    assert read.gaps == Gaps(100, 2_000_000_000, 20_000_000, 20_000_000, 20_000_000)
    assert (read.text, len(read.gaps_ns)) == ("", 0)
    wrote.text, wrote.gaps, wrote.gaps_ns = "", read.gaps, array("q")
    assert read == wrote


def test_the_text_of_a_good_answer_is_not_kept_and_that_of_a_wrong_one_is_its_head(tmp_path: Path) -> None:
    good = golden.outcome(0, 1, text="a" * 5000)
    wrong = golden.outcome(1, 2, text="b" * 5000, reasoning_text="c" * 10, grade=WRONG)
    wrong.tool_calls = [ToolCall("1", "search", '{"q":' + "9" * 5000)] * 20
    failed = golden.failed(2, 3, "stream_truncated", text="d" * 30)
    run = build(tmp_path, [good, wrong, failed])
    texts = {o.id: o.text for o in run.outcomes()}
    assert list(texts.values()) == ["", "b" * record.TEXT_CHARS, "d" * 30]
    kept = [o for o in run.outcomes() if o.tool_calls]
    assert [len(o.tool_calls) for o in kept] == [record.MAX_TOOL_CALLS]
    first = json.loads((tmp_path / "outcomes-0.jsonl").read_text().splitlines()[1])
    assert first["text_chars"] == 5000
    assert "text" not in first


def test_what_was_not_measured_is_not_written_and_reads_as_none(tmp_path: Path) -> None:
    read = only(build(tmp_path, [golden.failed(0, 1, "connect_refused", sent_ns=None)]))
    assert (read.sent_ns, read.ttft_ns, read.output_tokens, read.gaps) == (None, None, None, None)
    assert "null" not in (tmp_path / "outcomes-0.jsonl").read_text().splitlines()[1]


def test_whatever_a_server_sends_can_be_written(tmp_path: Path) -> None:
    odd = golden.failed(0, 1, "in_band_error", text="half \ud83d of a pair", prompt_tokens=10**30)
    odd.error_message = "x" * 100_000
    read = only(build(tmp_path, [odd]))
    assert read.text == "half \\ud83d of a pair"
    assert len(read.error_message or "") == record.TEXT_CHARS
    assert read.prompt_tokens is None


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    samples = golden.series("host", "load1", [1.5, float("nan"), 2.0]) + golden.series("client", "in_flight", [4, 4])
    build(tmp_path, golden.steady(30), samples=samples)
    for path in tmp_path.glob("*.jsonl"):
        assert all(isinstance(orjson.loads(line), dict) for line in path.read_bytes().splitlines())


@given(st.lists(st.integers(0, 10**10), max_size=300))
def test_a_streams_gaps_are_summarised_at_rank_rounded_up(gaps: list[int]) -> None:
    got = summarise(array("q", gaps))
    if not gaps:
        assert got is None
        return
    assert got is not None
    ordered = sorted(gaps)
    assert (got.n, got.sum_ns, got.max_ns) == (len(gaps), sum(gaps), ordered[-1])
    assert got.p50_ns == ordered[-(-len(gaps) // 2) - 1]
    assert got.p95_ns == ordered[-(-95 * len(gaps) // 100) - 1]


# ---------------------------------------------------------------------------------------------------------------------
# Windows


def pooled(run: Run, metric: str) -> Hist:
    return merged(line.hist for line in run.windows() if line.tag.metric == metric)


def test_windows_hold_every_gap_and_every_latency_of_the_successes(tmp_path: Path) -> None:
    good = [golden.outcome(k, k * 0.5, ttft_s=0.1 + k / 1000, tpot_s=0.01 + k / 1e5) for k in range(40)]
    bad = [golden.failed(40, 3, "http_error"), golden.incomplete(41, 4, cut_s=9), golden.outcome(42, 5, sent_ns=None)]
    run = build(tmp_path, good + bad)
    assert pooled(run, "ttft") == Hist([round((o.ttft_ns or 0) / 1000) for o in good])
    assert pooled(run, "gap").n == sum(len(o.gaps_ns) for o in good) + len(bad[2].gaps_ns)
    assert pooled(run, "send_lag").n == 42  # of every request that was sent, whatever became of it
    assert pooled(run, "ttft_due") == Hist([round(((o.first_ns or 0) - o.due_ns) / 1000) for o in good])
    assert {line.tag.metric for line in run.windows()} == (
        {"ttft", "ttfo", "tpot", "e2e", "gap", "queue", "send_lag", "ttft_due", "e2e_due"}
    )


def test_windows_are_ten_seconds_of_the_outcomes_own_time(tmp_path: Path) -> None:
    run = build(tmp_path, [golden.outcome(k, due_s, tokens=2) for k, due_s in enumerate((0.5, 4, 12, 47))])
    spans = [(w.start_ns, w.end_ns, w.hist.n) for w in run.windows() if w.tag.metric == "e2e"]
    assert spans == [(golden.at(s), golden.at(s + 10), n) for s, n in ((0, 2), (10, 1), (40, 1))]


def test_windows_of_two_shards_add_up_to_those_of_one(tmp_path: Path) -> None:
    outcomes = golden.steady(60)
    one, two = build(tmp_path / "one", outcomes), build(tmp_path / "two", outcomes, shards=2)
    assert two.shards == [0, 1]
    slices: list[dict[tuple[object, int], Hist]] = [{}, {}]
    for found, run in zip(slices, (one, two), strict=True):
        for line in run.windows():
            found.setdefault((line.tag, line.start_ns), Hist()).add(line.hist)
    assert slices[0] == slices[1]
    assert len(slices[0]) == 9 * 7  # 61 s, nine metrics


def test_estimated_tokens_have_a_metric_of_their_own(tmp_path: Path) -> None:
    run = build(tmp_path, [golden.outcome(0, 1), golden.outcome(1, 2, output_tokens_source="estimated")])
    assert (pooled(run, "tpot").n, pooled(run, "tpot_estimated").n) == (1, 1)


def test_names_that_would_break_a_tag_are_tamed(tmp_path: Path) -> None:
    run = golden.build(tmp_path, outcomes=[golden.outcome(0, 1, cls="a,b: c", phase="m 1")])
    assert {(line.tag.phase, line.tag.cls) for line in run.windows()} == {("m_1", "a_b__c")}


# ---------------------------------------------------------------------------------------------------------------------
# Reading back


def test_phases_signals_and_the_end_are_read_from_the_journal(tmp_path: Path) -> None:
    phases = [golden.phase("warmup", "warmup", 0, 5), golden.Phase("measure", "measure", 5, 60, 63)]
    run = golden.build(tmp_path, phases=phases, events=[(58, "signal", {"name": "SIGTERM"})], shards=2)
    assert [(p.name, p.kind, p.start_ns, p.end_ns, p.drained_ns) for p in run.phases] == [
        ("warmup", "warmup", golden.at(0), golden.at(5), golden.at(5)),
        ("measure", "measure", golden.at(5), golden.at(60), golden.at(63)),
    ]
    assert (run.interrupted, run.finished, run.end_ns) == ("SIGTERM", True, golden.at(63))
    assert run.damage == {}


def test_a_phase_that_one_of_two_shards_did_not_end_has_no_end(tmp_path: Path) -> None:
    run = golden.build(tmp_path, phases=[golden.Phase("measure", "measure", 0, None, None)], shards=2, reason=None)
    journal = Journal(tmp_path, "shard-0")
    journal.event("phase_end", phase="measure", issued=1, ok=1, failed=0, incomplete=0)
    journal.close()
    assert (run.phases[0].end_ns, run.finished, run.interrupted) == (None, False, None)


def test_samples_of_all_lanes_are_one_series_per_label_set(tmp_path: Path) -> None:
    samples = golden.series("nvidia", "temperature_c", [50, 51, 52], gpu="0")
    samples += golden.series("nvidia", "temperature_c", [60, 61], gpu="1") + golden.series(
        "client", "in_flight", [4, 3]
    )
    run = build(tmp_path, golden.steady(5), samples=samples, lane="gpu")
    series = run.series("nvidia", "temperature_c")
    assert {labels: s.last.tolist() for labels, s in series.items()} == {
        (("gpu", "0"),): [50, 51, 52],
        (("gpu", "1"),): [60, 61],
    }
    assert run.series("client", "in_flight")[()].at_ns.tolist() == [golden.at(0), golden.at(1)]
    assert run.series("nvidia", "power_w") == {}


def test_a_series_is_in_order_of_time_over_several_lanes(tmp_path: Path) -> None:
    for lane, first in (("slow", 10), ("fast", 0)):
        writer = SampleWriter(tmp_path, lane)
        writer.write([Sample("disk", "free_bytes", k, golden.at(k)) for k in range(first, first + 3)])
        writer.close()
    assert Run(tmp_path).series("disk", "free_bytes")[()].last.tolist() == [0, 1, 2, 10, 11, 12]


def test_happenings_stand_among_the_digests_but_not_in_a_series(tmp_path: Path) -> None:
    samples = [golden.sample("kernel", "oom_kill_global", 1, 3, "Killed process 7", pid="7")]
    run = golden.build(tmp_path, samples=samples)
    (digest,) = run.digests("kernel")
    assert (digest.metric, digest.last, digest.n, digest.text, digest.labels) == (
        ("oom_kill_global", 1, 1, "Killed process 7", {"pid": "7"})
    )
    assert run.series("kernel", "oom_kill_global") == {}


def test_the_last_word_of_a_monitor_on_whether_it_sees_counts(tmp_path: Path) -> None:
    said = [
        golden.sample("host", "observed", 1, 0),
        golden.sample("nvidia", "observed", 1, 0),
        golden.sample("nvidia", "observed", 0, 9, "the driver does not answer"),
    ]
    assert golden.build(tmp_path, samples=said).observed() == (
        {"host": (True, ""), "nvidia": (False, "the driver does not answer")}
    )


def test_damage_names_the_file_and_is_not_counted_twice(tmp_path: Path) -> None:
    run = build(tmp_path, golden.steady(10))
    path = tmp_path / "outcomes-0.jsonl"
    path.write_bytes(path.read_bytes()[:-5] + bytes(100) + b'\n{"id":"x"}\n')
    n = len(golden.steady(10))
    for _ in range(2):
        assert sum(1 for _ in run.outcomes()) == n - 1
        assert run.damage == {
            "outcomes-0.jsonl: torn_lines": 1,
            "outcomes-0.jsonl: nul_bytes": 100,
            "outcomes-0.jsonl: malformed": 1,
        }


def test_damage_is_known_of_files_that_nobody_asked_for(tmp_path: Path) -> None:
    build(tmp_path, golden.steady(10), samples=golden.series("host", "load1", [1, 2]))
    for name in ("outcomes-0.jsonl", "samples-fast.jsonl", "windows-0.hlog"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"torn")
    run = Run(tmp_path)
    next(run.outcomes())  # a reader that stops early has not seen the end
    run.series("host", "load1")  # nor has one that looks for one metric
    assert run.damage == {
        "outcomes-0.jsonl: torn_lines": 1,
        "samples-fast.jsonl: torn_lines": 1,
        "windows-0.hlog: torn_lines": 1,
    }


def test_looking_for_one_metric_finds_what_reading_all_finds(tmp_path: Path) -> None:
    samples = golden.series("host", "load1", [1, 2], name="process") + golden.series("process", "load1", [3, 4])
    samples += [*golden.series("process", "threads", [5]), golden.sample("process", "restart", 1, 3, 'said "load1"')]
    run = build(tmp_path, [], samples=samples)
    everything = list(run.digests())
    for monitor in ("host", "process", "none"):
        for metric in (None, "load1", "restart"):
            wanted = [d for d in everything if d.monitor == monitor and metric in (None, d.metric)]
            assert list(run.digests(monitor, metric)) == wanted


def test_an_empty_folder_is_a_run_with_nothing_in_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert (list(run.outcomes()), run.journal, run.phases, run.observed(), run.environment) == ([], [], (), {}, {})
    assert (list(run.windows()), run.finished, run.end_ns) == ([], False, None)
    assert set(run.damage) == {
        "environment.json: missing",
        "journal.jsonl: missing",
        "outcomes-0.jsonl: missing",
    }


@given(st.dictionaries(st.sampled_from(["at", "monitor", "values", "labels", "metric", "value", "event", "id", "gaps"]),
                       st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=4),
                                 st.dictionaries(st.text(max_size=2), st.integers(), max_size=2))))  # fmt: skip
def test_lines_of_the_wrong_shape_are_counted_never_raised(
    tmp_path_factory: pytest.TempPathFactory, line: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    for name in ("outcomes-0", "samples-fast", "journal"):
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    run = Run(folder)
    read = len(list(run.outcomes())), len(list(run.digests())), len(run.journal)
    assert read[0] + run._damage["outcomes-0.jsonl"].malformed == 1
    run.series("host", "x")
    run.observed()


# ---------------------------------------------------------------------------------------------------------------------
# When things go wrong


class Stuck(set[str]):
    """Flags that hold up whoever reads them: what a disk that does not answer does to the writer."""

    def __init__(self) -> None:
        super().__init__({"x"})
        self.reached, self.release = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[str]:
        self.reached.set()
        assert self.release.wait(60)
        return super().__iter__()


def test_a_flood_is_counted_and_told_and_never_blocks(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, golden.READING)
    stuck = Stuck()
    recorder.outcome(golden.outcome(0, 1, flags=stuck))
    assert stuck.reached.wait(60)
    one = golden.outcome(1, 1, tokens=2)
    for _ in range(record.QUEUE_BOUND + 500):
        recorder.outcome(one)
    recorder.samples([golden.sample("client", "in_flight", 4, 1)])
    recorder.event("note", text="still heard")
    stuck.release.set()
    recorder.close()
    run = Run(tmp_path)
    assert sum(1 for _ in run.outcomes()) == 1 + record.QUEUE_BOUND
    assert [e["n"] for e in run.events("records_lost")] == [501]
    assert (recorder.lost, recorder.errors) == (501, 501)
    assert [e["text"] for e in run.events("note")] == ["still heard"]


def test_a_fault_of_the_recorder_is_told_and_does_not_raise(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, golden.READING)
    broken = golden.outcome(0, 1)
    broken.flags = {1, "x"}  # type: ignore[arg-type]
    recorder.outcome(broken)
    recorder.close()
    recorder.outcome(golden.outcome(1, 2))
    assert recorder.lost == 1
    assert "TypeError" in (recorder.first_error or "")
    assert [e["event"] for e in Run(tmp_path).journal] == ["recorder_failed"]


def test_kill_9_of_a_recording_process_leaves_a_readable_run(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import golden; from loadgen.record import Recorder\n"
        "r = Recorder(Path(sys.argv[1]), 0, golden.READING)\n"
        "for k in range(10**6):\n"
        "    r.outcome(golden.outcome(k, k / 10))\n"
        "    while r._queue.qsize(): time.sleep(0.0005)\n"
        "    if k % 100 == 99: print(k, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = [int(child.stdout.readline()) for _ in range(4)][-1]
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    run = Run(tmp_path)
    ids = [o.id for o in run.outcomes()]
    assert len(ids) >= told - 1  # the one that was handed over last may still have been on its way
    assert ids == [f"chat_short-{k:06d}" for k in range(len(ids))]
    assert run.damage.get("outcomes-0.jsonl: torn_lines", 0) <= 1
    recorded = pooled(run, "ttft").n
    assert len(ids) - 110 <= recorded <= len(ids)  # ten requests a second: at most the running window is missing
    assert not run.finished


@pytest.mark.root
def test_a_full_disk_costs_records_and_nothing_else(tmp_path: Path) -> None:
    with disks.tiny(tmp_path / "disk") as disk:
        recorder = Recorder(disk, 0, golden.READING)
        outcomes = golden.steady(300)
        for k, o in enumerate(outcomes):
            recorder.outcome(o)
            recorder.samples([golden.sample("client", "in_flight", 4, k)])
        while recorder._queue.qsize():
            recorder._thread.join(0.01)
        (disk / "ballast").unlink()
        recorder.event("note", text="there is room again")
        recorder.close()
        run = Run(disk)
        read = sum(1 for _ in run.outcomes())
        assert list(run.windows())
        assert [e["event"] for e in run.journal] == ["note", "records_failed"]
    assert 0 < read < len(outcomes)
    assert recorder.errors > 0
    assert recorder.first_error is not None
    assert recorder.lost == 0


# ---------------------------------------------------------------------------------------------------------------------
# Whole files


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(
        tmp_path, "summary.json", {"limit": Seconds(90), "flags": {"b", "a"}, 1: (Path("x"), Gaps(1, 2, 3, 4, 5))}
    )
    gaps = {"n": 1, "sum_ns": 2, "p50_ns": 3, "p95_ns": 4, "max_ns": 5}
    whole = {"limit": 90.0, "flags": ["a", "b"], "1": ["x", gaps]}
    assert json.loads((tmp_path / "summary.json").read_text()) == whole
    with pytest.raises(TypeError, match="object"):
        write_json(tmp_path, "summary.json", {"x": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == whole
    write_text(tmp_path, "report.md", "≤ 5 ms\n")
    assert (tmp_path / "report.md").read_text() == "≤ 5 ms\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "summary.json"]


def test_the_golden_scenario_is_read_as_any_other(tmp_path: Path) -> None:
    pytest.importorskip("loadgen.scenario")
    assert golden.build(tmp_path).scenario.concurrency == 4
