"""The server's metrics page: every spelling of every server under one name, and what is absent stays absent."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loadgen.rules import prefix_cache
from loadgen.types import Outcome, Sample
from loadgen.verdict import judge
from monitors import engine, prometheus

# Lines end at LF only: one case has another line separator of Unicode inside.
LINES = (Path(__file__).parent / "data/monitors/metrics.jsonl").read_text(encoding="utf-8").split("\n")
CASES = {case["id"]: case for case in map(json.loads, filter(None, LINES))}


def pages(name: str) -> tuple[list[prometheus.Page], dict[str, Any]]:
    return [prometheus.parse(text) for text in CASES[name]["input"]["scrapes"]], CASES[name]["expect"]


def values(page: prometheus.Page) -> dict[str, float]:
    return engine.normalised(page)[0]


# ---------------------------------------------------------------------------------------------------------------------
# The recorded cases


def test_cache_gauge_is_found_under_its_new_name() -> None:
    (page,), expect = pages("metrics-kv-renamed")
    found, sources = engine.normalised(page)
    assert found["kv_cache_usage_ratio"] == expect["kv_cache_usage"]
    assert sources["kv_cache_usage_ratio"] == expect["source_metric"]


def test_counter_with_and_without_total_is_one_counter() -> None:
    (first, second), expect = pages("metrics-total-suffix")
    counted = [values(p)["prompt_tokens_total"] for p in (first, second)]
    assert (counted, counted[1] - counted[0]) == (expect["prompt_tokens_total"], expect["delta"])
    assert engine.resets(first, second) == []
    assert engine.resets(second, first) == ["prompt_tokens_total"]


def test_exponents_and_infinity_are_numbers() -> None:
    (page,), expect = pages("metrics-exponent-and-inf")
    found = values(page)
    assert found["prompt_tokens_total"] == expect["prompt_tokens_total"]
    assert found["ttft_count_total"] == expect["ttft_count"]
    assert found["ttft_seconds_total"] == expect["ttft_sum_s"]
    buckets = {dict(k)["le"]: v for k, v in page.series["vllm:time_to_first_token_seconds_bucket"].items()}
    assert buckets["+Inf"] - buckets["1e+01"] == expect["above_10s"]


def test_blank_in_a_label_and_timestamp_do_not_move_the_value() -> None:
    (page,), expect = pages("metrics-label-space-timestamp")
    found = values(page)
    assert found["spec_accepted_tokens_total"] == expect["accepted"]
    assert found["spec_draft_tokens_total"] == expect["drafted"]


def test_one_bad_line_costs_one_line() -> None:
    (page,), expect = pages("metrics-one-bad-line")
    found = values(page)
    assert found["requests_running"] == expect["running"]
    assert found["requests_waiting"] == expect["waiting"]
    assert found["generation_tokens_total"] == expect["generation_tokens_total"]
    assert page.bad_lines == expect["bad_lines"]


def test_bad_line_is_said_once_and_not_at_every_scrape() -> None:
    with server([answer(CASES["metrics-one-bad-line"]["input"]["scrapes"][0])]) as (url, _):
        first, second = ticks(engine.Options(target_url=url), 2)
    (said,) = of(first, "bad_lines")
    assert (said.value, 'model="bad"quote"' in (said.text or "")) == (1.0, True)
    assert of(second, "bad_lines") == []
    assert of(second, "generation_tokens_total")[0].value == 77


def test_cache_usage_that_is_not_exported_is_absent_not_zero() -> None:
    (page,), expect = pages("metrics-kv-absent")
    found = values(page)
    assert "kv_cache_usage_ratio" not in found
    assert found["decode_tokens_per_s"] == expect["decode_tokens_per_s"]
    assert found["prefill_tokens_per_s"] == expect["prefill_tokens_per_s"]
    assert "without kv_cache_usage_ratio" in engine.seen(page)


def test_what_is_not_exported_is_said_once_and_never_read_as_zero() -> None:
    with server([answer(CASES["metrics-kv-absent"]["input"]["scrapes"][0])]) as (url, _):
        first, second = ticks(engine.Options(target_url=url), 2)
    (said,) = of(first, "observed")
    assert "without kv_cache_usage_ratio" in (said.text or "")
    assert of(first, "kv_cache_usage_ratio") == of(second, "observed") == of(second, "kv_cache_usage_ratio") == []


def test_every_case_has_its_test_here() -> None:
    own = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in own for name in CASES)


def test_engines_are_added_up_and_the_run_has_its_own_hit_rate() -> None:
    (before, after), expect = pages("metrics-prefix-cache-warm")
    a, b = values(before), values(after)
    queries = b["prefix_cache_queries_total"] - a["prefix_cache_queries_total"]
    hits = b["prefix_cache_hits_total"] - a["prefix_cache_hits_total"]
    assert hits / queries == expect["run_hit_rate"]


@pytest.mark.parametrize("cache", ["cold", "warm", "shared"])
def test_warm_prefix_cache_is_a_warning_where_every_prompt_was_meant_to_be_new(tmp_path: Path, cache: str) -> None:
    scrapes, expect = pages("metrics-prefix-cache-warm")
    samples = [
        golden.sample("engine", name, value, 1 + 50 * n)
        for n, page in enumerate(scrapes)
        for name, value in values(page).items()
    ]
    answers: list[Outcome] = [golden.outcome(k, k, cached_tokens=None, cache=cache) for k in range(50)]
    phases = [golden.phase("measure", "measure", 0, 60)]
    run = golden.build(tmp_path, outcomes=answers, phases=phases, samples=samples, lane="slow")
    found = prefix_cache.check(run, prefix_cache.Options(allow_tokens=0))
    warned = [("warn", expect["warning"], expect["run_hit_rate"])]
    assert [(f.status, f.cause, f.number) for f in found] == (warned if cache == "cold" else [])


def test_cached_tokens_of_answers_count_by_class_beyond_what_every_prompt_shares(tmp_path: Path) -> None:
    few = golden.steady(60, cached_tokens=32)
    many = [golden.outcome(k, k, cls="repeats", cached_tokens=290) for k in range(20)]
    phases = [golden.phase("measure", "measure", 0, 60)]
    found = prefix_cache.check(golden.build(tmp_path, outcomes=[*few, *many], phases=phases), prefix_cache.Options())
    assert [(f.scope, f.status) for f in found] == [("chat_short", "pass"), ("repeats", "warn")]


# ---------------------------------------------------------------------------------------------------------------------
# The parser and the tables


def test_of_two_engines_the_fuller_cache_counts_and_the_queues_are_added() -> None:
    page = prometheus.parse(
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.9\n'
        'vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_waiting{engine="1"} 4\n'
    )
    assert values(page) == {"kv_cache_usage_ratio": 0.9, "requests_waiting": 7.0}


def test_metric_under_old_and_new_name_is_not_added_twice() -> None:
    page = prometheus.parse(
        "vllm:kv_cache_usage_perc 0.5\nvllm:gpu_cache_usage_perc 0.5\n"
        "vllm:prompt_tokens_total 9\nvllm:prompt_tokens 9\n"
    )
    assert values(page) == {"kv_cache_usage_ratio": 0.5, "prompt_tokens_total": 9.0}


def test_restart_of_one_engine_is_a_reset_though_the_sum_grew() -> None:
    before = prometheus.parse(
        'vllm:generation_tokens_total{engine="0"} 100\nvllm:generation_tokens_total{engine="1"} 100\n'
    )
    after = prometheus.parse(
        'vllm:generation_tokens_total{engine="0"} 5\nvllm:generation_tokens_total{engine="1"} 900\n'
    )
    assert engine.resets(before, after) == ["generation_tokens_total"]


def test_capacity_is_read_from_labels() -> None:
    page = prometheus.parse(
        'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="262144",num_gpu_blocks="16384"} 1.0\n'
    )
    assert values(page) == {"kv_capacity_tokens": 262144.0, "kv_blocks": 16384.0, "kv_block_tokens": 16.0}


@pytest.mark.parametrize(
    ("text", "running"),
    [
        ("sglang:num_running_reqs 2.0\n", 2.0),
        ("llamacpp:requests_processing 1\n", 1.0),
        ("tgi_batch_current_size 4\n", 4.0),
        ("vllm:num_requests_running 3\r\n", 3.0),
    ],
)
def test_running_requests_of_every_server(text: str, running: float) -> None:
    assert values(prometheus.parse(text))["requests_running"] == running


NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,10}[a-z]", fullmatch=True).filter(
    lambda n: not n.endswith(("_total", "_created", "_info", "_bucket", "_sum", "_count"))
)


@given(
    st.dictionaries(
        NAMES,
        st.tuples(
            st.booleans(),
            st.dictionaries(
                st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.floats(0, 1e300), max_size=3
            ),
        ),
        max_size=5,
    )
)
def test_good_pages_are_read_as_prometheus_reads_them(families: dict[str, tuple[bool, dict[str, float]]]) -> None:
    registry = CollectorRegistry()
    for name, (is_counter, series) in families.items():
        metric = (Counter if is_counter else Gauge)(name, "help\n\\ text", ["label"], registry=registry)
        for label, value in series.items():
            child = metric.labels(label)
            child.inc(value) if isinstance(child, Counter) else child.set(value)
    text = generate_latest(registry).decode()
    theirs: dict[str, prometheus.Series] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            theirs.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    page = prometheus.parse(text)
    assert page.bad_lines == 0
    assert page.series == theirs


@given(st.text())
def test_no_page_breaks_the_parser(text: str) -> None:
    engine.normalised(prometheus.parse(text))


def wire(name: str) -> prometheus.Page:
    """A page as a real server gave it."""
    data = (Path(__file__).parent / "data/wire" / name).read_bytes()
    return prometheus.parse(data.partition(b"\r\n\r\n")[2].decode())


def test_real_page_of_vllm_gives_latencies_reasons_and_sources() -> None:
    page = wire("vllm-metrics.http")
    found = values(page)
    assert (found["ttft_count_total"], round(found["ttft_seconds_total"], 3)) == (9.0, 26.438)
    assert (found["itl_count_total"], round(found["itl_seconds_total"], 3)) == (66.0, 3.546)
    assert {"tpot_count_total", "e2e_seconds_total", "queue_count_total", "prefill_seconds_total"} <= found.keys()
    kept = {(name, *labels.values()): value for name, labels, value in engine.by_label(page)}
    assert kept["requests_waiting_by_reason", "capacity"] == kept["requests_waiting_by_reason", "deferred"] == 0
    assert kept["requests_finished_by_reason_total", "length"] == 9
    assert kept["prompt_tokens_by_source_total", "local_compute"] == 114
    assert kept["sleep_state", "awake"] == 1
    assert not [name for name, *_ in kept if name.endswith("_per_engine")], "one engine is no several"


def test_real_page_of_llamacpp_gives_its_times() -> None:
    found = values(wire("llamacpp-metrics.http"))
    assert {"prefill_seconds_total", "decode_seconds_total", "busy_slots_per_decode"} <= found.keys()


def test_accepted_tokens_are_kept_by_position_over_all_engines() -> None:
    page = prometheus.parse(
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 10\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 40\n'
    )
    name = "spec_accepted_tokens_by_position_total"
    assert engine.by_label(page) == [(name, {"position": "0"}, 100.0), (name, {"position": "1"}, 40.0)]


def test_of_several_engines_each_has_its_own_figures_up_to_a_bound() -> None:
    text = "".join(f'vllm:num_requests_running{{engine="{n:02d}"}} {n}\n' for n in range(40))
    kept = engine.by_label(prometheus.parse(text))
    assert len(kept) == engine.MAX_ENGINES
    assert kept[3] == ("requests_running_per_engine", {"engine": "03"}, 3.0)


def test_page_of_tgi_has_names_too() -> None:
    page = prometheus.parse(
        "tgi_queue_size 2\ntgi_request_count 9\ntgi_request_success 7\ntgi_request_duration_sum 12.5\n"
        "tgi_request_duration_count 7\ntgi_request_generated_tokens_sum 700\ntgi_batch_current_max_tokens 4096\n"
        "tgi_request_mean_time_per_token_duration_sum 0.2\ntgi_request_mean_time_per_token_duration_count 7\n"
    )
    assert values(page) == {
        "requests_waiting": 2.0, "requests_received_total": 9.0, "requests_success_total": 7.0,
        "e2e_seconds_total": 12.5, "e2e_count_total": 7.0, "generation_tokens_total": 700.0,
        "batch_max_tokens": 4096.0, "tpot_seconds_total": 0.2, "tpot_count_total": 7.0,
    }  # fmt: skip


def test_page_of_sglang_has_capacity_hit_rate_and_start_up_memory() -> None:
    page = prometheus.parse(
        "sglang:max_total_num_tokens 171008\nsglang:kv_used_tokens 1000\nsglang:num_used_tokens 999\n"
        'sglang:cache_hit_rate{dp_rank="0"} 0.2\nsglang:cache_hit_rate{dp_rank="1"} 0.4\n'
        "sglang:weight_memory_usage_gb 2\nsglang:cached_tokens_total 30\nsglang:prompt_tokens_total 300\n"
    )
    found = values(page)
    assert found["kv_capacity_tokens"] == 171008
    assert found["kv_used_tokens"] == 1000
    assert found["prefix_cache_hit_ratio"] == pytest.approx(0.3)
    assert found["model_bytes"] == 2 << 30
    assert (found["prefix_cache_hits_total"], found["prefix_cache_queries_total"]) == (30, 300)


def test_capacity_of_an_older_vllm_is_blocks_times_their_size() -> None:
    page = prometheus.parse('vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n')
    assert values(page)["kv_capacity_tokens"] == 16000


def test_names_that_nobody_knows_are_kept_and_bounded() -> None:
    text = 'vllm:num_requests_running 1\nvllm:new_thing_bucket{le="1"} 1\n' + "".join(
        f'vllm:of_tomorrow_{n:04d}{{engine="{e}"}} {n}\n' for n in range(1000) for e in (0, 1)
    )
    kept, n = engine.unknown(prometheus.parse(text))
    assert (len(kept), n) == (engine.MAX_UNKNOWN, 1000)
    assert kept["vllm:of_tomorrow_0007"] == 14.0, "summed over engines"


def test_unknown_names_are_listed_once_and_their_values_once_a_minute() -> None:
    with server([answer("vllm:num_requests_running 5\nvllm:of_tomorrow 3\n")]) as (url, _):
        first, second = ticks(engine.Options(target_url=url), 2)
    (kept,) = of(first, "vllm:of_tomorrow")
    assert (kept.value, kept.labels) == (3.0, {"name": "theirs"})
    assert [s.text for s in of(first, "unknown_names")] == ["vllm:of_tomorrow"]
    assert of(second, "vllm:of_tomorrow") == of(second, "unknown_names") == []


# ---------------------------------------------------------------------------------------------------------------------
# Scraping a real socket


@contextmanager
def server(answers: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A socket that gives the n-th connection the n-th answer (later ones the last) and keeps what it was asked."""
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for n in range(1000):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(65536))
                connection.sendall(answers[min(n, len(answers) - 1)])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def answer(body: str, status: str = "200 OK") -> bytes:
    data = body.encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


def ticks(options: engine.Options, n: int) -> list[list[Sample]]:
    async def run() -> list[list[Sample]]:
        watch = engine.watch(options)
        try:
            return [await anext(watch) for _ in range(n)]
        finally:
            await watch.aclose()  # type: ignore[attr-defined]

    return asyncio.run(run())


def of(samples: list[Sample], metric: str) -> list[Sample]:
    return [s for s in samples if s.metric == metric]


def test_page_at_the_root_of_the_target_is_scraped() -> None:
    with server([answer("vllm:num_requests_running 5\n")]) as (url, asked):
        (samples,) = ticks(engine.Options(target_url=url), 1)
    assert asked[0].startswith(b"GET /metrics ")
    assert [s.value for s in of(samples, "observed")] == [1.0]
    assert [s.value for s in of(samples, "requests_running")] == [5.0]
    assert of(samples, "scrape_ms")[0].value > 0


def test_page_that_is_switched_off_is_said_once_and_not_asked_again() -> None:
    script = CASES["metrics-disabled-501"]["input"]["play"]["routes"]["*"][0]["steps"][0]["text"].encode()
    with server([script]) as (url, asked):
        first, second, third = ticks(engine.Options(target_url=url), 3)
    (observed,) = of(first, "observed")
    assert observed.value == 0.0
    assert "--metrics" in (observed.text or "")
    assert second == third == []
    assert len(asked) == 1


def test_run_goes_on_without_the_page_and_nothing_that_needs_it_is_passed(tmp_path: Path) -> None:
    """A page that is switched off: judged to the end, said in one finding, which is no pass."""
    expect = CASES["metrics-disabled-501"]["expect"]
    off = [golden.sample("engine", "observed", 0.0, 1, text="the page is switched off")]
    run = golden.build(
        tmp_path / "run",
        outcomes=golden.steady(60),
        phases=[golden.phase("measure", "measure", 0, 60)],
        samples=off,
        lane="slow",
    )
    judge(run.folder)
    findings = json.loads((run.folder / "findings.json").read_text(encoding="utf-8"))
    about = [f for f in findings["findings"] if f.get("scope") == "engine"]
    assert [f["status"] for f in about] == [expect["criteria"]]
    assert about[0]["message"] == "engine not observed: the page is switched off"
    assert (run.finished and len(list(run.outcomes())) > 0) == expect["run_continues"]


def test_counter_that_falls_is_a_happening() -> None:
    pages_ = [answer("vllm:generation_tokens_total 100\n"), answer("vllm:generation_tokens_total 7\n")]
    with server(pages_) as (url, _):
        _, second = ticks(engine.Options(target_url=url), 2)
    (reset,) = of(second, "counter_reset")
    assert "generation_tokens_total" in (reset.text or "")


def test_outage_of_a_page_that_was_seen_is_one_happening() -> None:
    with server([answer("vllm:num_requests_running 1\n"), b""]) as (url, _):
        first, second, third = ticks(engine.Options(target_url=url), 3)
    assert of(first, "observed")[0].value == 1.0
    assert len(of(second, "scrape_failed")) == 1
    assert of(second, "observed") == of(third, "observed") == of(third, "scrape_failed") == []
    assert of(third, "scrapes_failed_total")[0].value == 2.0


def test_server_that_is_not_there_yet_is_not_observed_until_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (samples,) = ticks(engine.Options(target_url=f"http://127.0.0.1:{port}"), 1)
    (observed,) = of(samples, "observed")
    assert observed.value == 0.0
    assert (observed.text or "").endswith("Connection refused")


def test_page_of_something_else_is_not_observed() -> None:
    with server([answer("<html>hello</html>")]) as (url, _):
        (samples,) = ticks(engine.Options(target_url=url), 1)
    assert of(samples, "observed")[0].value == 0.0


def test_key_reaches_the_server_through_the_environment_and_no_sample() -> None:
    os.environ["LOADGEN_TEST_HEADERS"] = json.dumps({"Authorization": "Bearer sk-secret"})
    try:
        with server([answer("vllm:num_requests_running 5\n")]) as (url, asked):
            (samples,) = ticks(engine.Options(target_url=url, headers_env="LOADGEN_TEST_HEADERS"), 1)
    finally:
        del os.environ["LOADGEN_TEST_HEADERS"]
    assert b"Authorization: Bearer sk-secret" in asked[0]
    assert "sk-secret" not in repr(samples)
