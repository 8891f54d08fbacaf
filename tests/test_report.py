"""The report prints finished numbers, hides what is private, and its summary keeps to the published schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import report, summary
from loadgen.hist import Hist
from loadgen.summary import Bar, Counts, Judged, Percentile, Seen, Summary, redact
from loadgen.types import Finding, Grade, UserError
from loadgen.verdict import judge

SCENARIO = """\
name: mixed
about: a small mix
concurrency: 4
target: {url: 'http://operator:hunter2@spark-7.example.net:8000/v1'}
classes:
  chat: {workload: chat_short, weight: 3}
  json: {weight: 1}
phases:
  - {kind: functional}
  - {kind: measure, duration: 120}
"""
ENVIRONMENT: dict[str, Any] = {
    "schema": "loadgen.environment/1",
    "client": {"loadgen": "1.0", "python": "3.11", "arguments": ["run", "--url", "http://spark-7.example.net:8000"]},
    "server": {
        "engine": "llama.cpp",
        "model": "/home/alice/models/tiny.gguf",
        "extra": {"api_key": "sk-verysecretkey"},
    },
    "host": {"cpus": 2, "hostname": "spark-7.example.net"},
}
PRIVATE = ("hunter2", "operator", "spark-7", "alice", "verysecret", "10.20.30.40", "/home", "/tmp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A judged run with a bit of everything."""
    folder = tmp_path_factory.mktemp("run")
    outcomes = [
        golden.outcome(k, 2.4 * k, ttft_s=0.1 + 0.01 * (k % 17), cls="chat", cache=("cold", "warm")[k % 2], seat=k % 4)
        for k in range(50)
    ]
    outcomes += [golden.outcome(k, 0, cls=cls, phase="functional") for k, cls in enumerate(["chat", "chat", "json"])]
    outcomes += [golden.failed(900 + k, 40 + k, "http_error", cls="chat") for k in range(3)]
    outcomes += [golden.incomplete(950, 119, cut_s=120, cls="chat")]
    wrong = Grade(
        False, 0, "wrong", why="connect to spark-7.example.net at 10.20.30.40 failed, see /home/alice/x | <b>"
    )
    outcomes += [golden.outcome(980 + k, 50 + k, cls="chat", grade=wrong) for k in range(3)]
    samples = [
        golden.sample("host", "observed", 1, 0, text=""),
        golden.sample(
            "kernel", "observed", 0, 0, text="/dev/kmsg: EPERM; to allow it: sudo sysctl kernel.dmesg_restrict=0"
        ),
        golden.sample("process", "restart", 1, 60, text="pid 8 serves", pid="8", name="serve"),
        *golden.series("host", "mem_available_bytes", [(20 - 0.05 * k) * (1 << 30) for k in range(122)]),
        *golden.series("client", "loop_lag_ms", [1.5] * 120),
        *golden.series("client", "cpu_percent", [2.5] * 120),
        *golden.series("client", "in_flight", [4] * 120),
        *golden.series("client", "rss_bytes", [80 << 20] * 120),
    ]
    golden.build(
        folder, outcomes=outcomes, samples=samples, scenario=SCENARIO, environment=ENVIRONMENT,
        phases=[golden.phase("functional", "functional", 0, 1), golden.phase("measure", "measure", 0, 120)],
        events=[(1.0, "class_left_out", {"cls": "json", "why": "model cannot (malformed)", "when": "functional"})],
    )  # fmt: skip
    judge(folder)
    return folder


def read(folder: Path) -> Summary:
    return msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)


def findings_of(folder: Path) -> list[Finding]:
    return [Finding(**f) for f in json.loads((folder / "findings.json").read_text())["findings"]]


# ---------------------------------------------------------------------------------------------------------------------
# summary.json


def conforms(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str = "$") -> list[str]:
    """What is wrong, by the part of JSON Schema that ours uses."""
    known = {"$ref", "anyOf", "type", "properties", "required", "items", "additionalProperties", "enum", "default"}
    assert not set(schema) - known - {"$schema", "$defs", "title", "description"}, schema
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, where)
    if "anyOf" in schema:
        return [] if any(not conforms(value, s, root, where) for s in schema["anyOf"]) else [f"{where}: none of anyOf"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    kind = schema.get("type")
    if kind == "null":
        return [] if value is None else [f"{where}: not null"]
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{where}: not {kind}"]
    wrong = []
    if isinstance(value, dict):
        wrong += [f"{where}: lacks {name}" for name in schema.get("required", ()) if name not in value]
        more = schema.get("additionalProperties")
        for key, inner in value.items():
            if key in schema.get("properties", {}):
                wrong += conforms(inner, schema["properties"][key], root, f"{where}.{key}")
            elif isinstance(more, Mapping):
                wrong += conforms(inner, more, root, f"{where}.{key}")
            elif "properties" in schema:
                wrong.append(f"{where}: unknown {key}")
    if isinstance(value, list) and "items" in schema:
        for i, inner in enumerate(value):
            wrong += conforms(inner, schema["items"], root, f"{where}[{i}]")
    return wrong


def test_the_published_schema_is_the_one_of_this_version() -> None:
    published = json.loads((Path(summary.__file__).parent / "summary.schema.json").read_text(encoding="utf-8"))
    assert published == summary.json_schema(), "make it anew: python -m loadgen.summary > loadgen/summary.schema.json"


def test_a_summary_keeps_to_the_published_schema(folder: Path) -> None:
    schema = json.loads((Path(summary.__file__).parent / "summary.schema.json").read_text(encoding="utf-8"))
    data = json.loads((folder / "summary.json").read_text())
    assert conforms(data, schema, schema) == []
    assert conforms(data | {"seed": "one"}, schema, schema) == ["$.seed: not integer"]
    assert conforms(data | {"more": 1}, schema, schema) == ["$: unknown more"]


def test_a_summary_read_back_is_the_one_that_was_written(folder: Path) -> None:
    data = (folder / "summary.json").read_bytes()
    assert json.loads(msgspec.json.encode(read(folder))) == json.loads(data)


def test_the_summarys_numbers_are_those_of_the_run(folder: Path) -> None:
    s = read(folder)
    assert s.requests == Counts(ok=53, failed=3, incomplete=1)
    assert s.errors == {"http_error": 3}
    rows = {(row.cls, row.cache): row for row in s.classes}
    assert set(rows) == {("chat", "cold"), ("chat", "warm")}  # cold and repeat are never pooled
    cold = rows["chat", "cold"]
    assert (cold.ok, cold.failed, cold.incomplete) == (28, 3, 1)
    assert cold.output_tokens_per_s == pytest.approx(28 * 101 / 120)
    ttft = cold.latencies["ttft"]
    assert ttft.n == 28
    assert ttft.percentiles["p50"].certified
    assert not ttft.percentiles["p90"].certified
    assert "p99" not in ttft.percentiles  # 28 values do not print a p99
    assert sum(bar.n for bar in ttft.histogram) == 28
    assert cold.latencies["gap"].n == 28 * 100
    assert [(f.cls, f.asked, f.right, bool(f.left_out)) for f in s.functional] == [
        ("chat", 2, 2, False), ("json", 1, 1, True),
    ]  # fmt: skip
    low = next(e for e in s.extremes if e.metric == "mem_available_bytes")
    assert low.value == pytest.approx((20 - 0.05 * 120) * (1 << 30), rel=1e-3)
    assert low.at_s == pytest.approx(120, abs=2)
    assert next(e for e in s.events if e.name == "restart").n == 1


# ---------------------------------------------------------------------------------------------------------------------
# Redaction


@pytest.mark.parametrize("name", ["summary.json", "report.md", "findings.json"])
def test_nothing_private_leaves_the_folder(name: str, folder: Path) -> None:
    text = (folder / name).read_text()
    assert [word for word in PRIVATE if word in text] == []


@pytest.mark.parametrize(("text", "kept"), [
    ("see https://user:pw@host/x?key=1 now", "see ‹url› now"),
    ("key sk-abcdefghijkl and Bearer abc.def", "key ‹key› and ‹key›"),
    ("/dev/kmsg: EPERM, /proc/meminfo, /v1/models, /health", "/dev/kmsg: EPERM, /proc/meminfo, /v1/models, /health"),
    ("model /data/models/a.gguf: gone", "model ‹path›: gone"),
    ("from 192.168.1.7:8000 to 127.0.0.1:9", "from ‹address› to 127.0.0.1:9"),
    ("version 1.2.3 took 1.5 s", "version 1.2.3 took 1.5 s"),
])  # fmt: skip
def test_redaction_hides_what_names_a_place_and_keeps_what_explains(text: str, kept: str) -> None:
    assert redact(text) == kept


# ---------------------------------------------------------------------------------------------------------------------
# Text


def test_the_block_says_verdict_reasons_axes_load_classes_host_and_generator(folder: Path) -> None:
    lines = report.block_of(folder).splitlines()
    assert len(lines) <= 15
    assert lines[0] == "FAIL (restart)"
    assert "at 1:00 the server went down" in lines[1]
    text = "\n".join(lines)
    for part in ("STABILITY FAIL", "57 requests: 53 ok, 3 failed, 1 cut", "TTFT p50", "(n 28)", "tok/s",
                 "MemAvailable low-water 14.0 GiB", "1 restarts", "loop lag at most 1.5 ms", "RSS 80 MiB"):  # fmt: skip
        assert part in text, part


def test_the_report_names_what_was_not_seen_and_what_it_does_not_mean(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    for part in ("**NOT OBSERVED**", "sudo sysctl", "json left out", "Thresholds used", "drift: warn_ratio 1.25",
                 "does not mean", "Nothing is known of json under load", "llama.cpp"):  # fmt: skip
        assert part in text, part
    assert re.search(r"chat cold ttft +\S+ ms [▁▂▃▄▅▆▇█·]{24} ", text)


def test_uncertified_percentiles_stand_in_brackets_and_unprintable_ones_are_left_out(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| ttft |"))
    cells = [cell.strip() for cell in row.split("|")]
    n, p50, p90, p99 = cells[2], cells[4], cells[5], cells[7]
    assert n == "28"
    assert not p50.startswith("(")
    assert p90.startswith("(")
    assert p99 == "–"


def test_a_servers_words_cannot_break_a_table(folder: Path) -> None:
    text = report.markdown(read(folder), [Finding("x", "stability", "fail", "a | b\nc <img> `d`")])
    assert "a \\| b c &lt;img> 'd'" in text


def test_a_report_of_thousands_of_findings_stays_below_the_limit(folder: Path) -> None:
    many = [Finding("drift", "performance", "warn", "x" * 500, f"group {k}") for k in range(5000)]
    long = replace(read(folder), thresholds={f"rule{k}": {"option": "y" * 2000} for k in range(300)})
    text = report.markdown(long, many)
    assert len(text) <= 65_000
    assert "… and 4940 more." in text


def test_a_folder_that_was_not_judged_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loadgen judge"):
        report.block_of(tmp_path)


def bare(**more: Any) -> Summary:
    judged = Judged("PASS", "PASS", 0, {"functional": "PASS"}, "", (), (), False)
    fields: dict[str, Any] = {
        "schema": summary.SCHEMA, "loadgen": "1", "scenario": "s", "about": "", "started_utc": None, "verdict": judged,
        "seed": 1, "concurrency": 4, "planned_s": None, "measured_s": None, "requests": Counts(),
    }  # fmt: skip
    return Summary(**(fields | more))


def test_a_run_that_measured_nothing_still_has_a_report() -> None:
    text = report.markdown(bare(monitors=(Seen("host", False, "no /proc"),)), [])
    assert "nothing measured" in text
    assert "no /proc" in text


@given(st.lists(st.text(min_size=1, max_size=30), max_size=8), st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_a_block_never_has_more_than_15_lines(reasons: list[str], classes: int) -> None:
    judged = Judged("FAIL", "FAIL (x)", 1, {"functional": "PASS"}, "x", tuple(reasons), (), False)
    row = summary.ClassRow("c", "cold", 1, 0, 0, 9, "usage", 1.0, 5, None,
                           {"ttft": summary.Figure(1, 1.0, 1.0, {"p50": Percentile(1.0, False)})})  # fmt: skip
    text = report.block(bare(verdict=judged, classes=tuple(replace(row, cls=f"c{k}") for k in range(classes))))
    assert len(text.splitlines()) <= 15
    assert (f"+{len(reasons) - 3} more" in text) == (len(reasons) > 3)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=200))
@settings(max_examples=60, deadline=None)
def test_a_histogram_holds_every_value_and_draws_one_mark_a_bar(values: list[int]) -> None:
    bars = list(summary._bars(Hist(values)))
    assert sum(bar.n for bar in bars) == len(values)
    drawn = report.sketch(bars)
    assert len(drawn) == len(bars)
    assert all((mark == "·") == (bar.n == 0) for mark, bar in zip(drawn, bars, strict=True))


def test_the_highest_bar_is_the_highest_mark() -> None:
    assert report.sketch([Bar(1, 2, 1), Bar(2, 3, 0), Bar(3, 4, 100), Bar(4, 5, 50)]) == "▁·█▄"
