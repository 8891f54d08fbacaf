"""The server's own figures, scraped from its /metrics page once a second and brought under one set of names.

vLLM, SGLang, llama.cpp and TGI call the same things differently and rename them from version to version, so names are
tables with aliases. A figure that a server does not export is absent, never 0. A scrape that times out is data: the
server's event loop is starved. A page that is switched off is said once and asked for less often.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds
from monitors.prometheus import Page, Series, parse

if TYPE_CHECKING:
    import aiohttp

LANE: Lane = "slow"
PERIOD_S = 1.0
DEADLINE_S = 1.0  # a page that takes longer says by that how the server's event loop is
MAX_PAGE_BYTES = 16 << 20  # vLLM's page with all histograms is 100 KB; a page without end is not a metrics page
RETRY_OFF_S = 30.0  # a page that is switched off may come with a restart of the server
# What a page has beside the figures that we have names for is kept under its own names, sums over label sets, once a
# minute and at the first look: nobody reads it at 1 Hz, and 150 names a second would be half of a night's file.
UNKNOWN_PERIOD_S = 60.0
MAX_UNKNOWN = 300  # vLLM's page has 130 names beside ours; a page that invents names per request must not fill a disk
MAX_LABEL_VALUES = 16  # of one figure that is kept by label: reasons are 2 to 5, positions of a draft up to 16
MAX_ENGINES = 16  # figures of single engines, where there are several

# Our name → how the values of several label sets are combined, and the names that servers use, newest first: the first
# that the page has counts, so that a metric under two spellings is not added twice. A counter may end in `_total` or
# not, whatever is written here.
COUNTERS: dict[str, tuple[str, ...]] = {
    "prompt_tokens_total": (
        "vllm:prompt_tokens",
        "sglang:prompt_tokens",
        "llamacpp:prompt_tokens",
        "tgi_request_input_length_sum",
    ),
    "generation_tokens_total": (
        "vllm:generation_tokens",
        "sglang:generation_tokens",
        "llamacpp:tokens_predicted",
        "tgi_request_generated_tokens_sum",
    ),
    "preemptions_total": ("vllm:num_preemptions", "sglang:num_retracted_requests"),
    "requests_received_total": ("tgi_request_count",),
    "requests_success_total": ("vllm:request_success", "sglang:num_requests", "tgi_request_success"),
    "requests_aborted_total": ("sglang:num_aborted_requests", "tgi_request_failure"),
    "requests_rejected_total": ("vllm:admission_rejections",),
    "corrupted_requests_total": ("vllm:corrupted_requests",),
    "prompt_tokens_cached_total": ("vllm:prompt_tokens_cached", "sglang:cached_tokens"),
    "prefix_cache_queries_total": (
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries",
        "sglang:prompt_tokens",
    ),
    "prefix_cache_hits_total": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "sglang:cached_tokens"),
    "external_prefix_cache_queries_total": ("vllm:external_prefix_cache_queries",),
    "external_prefix_cache_hits_total": ("vllm:external_prefix_cache_hits",),
    "mm_cache_queries_total": ("vllm:mm_cache_queries",),
    "mm_cache_hits_total": ("vllm:mm_cache_hits",),
    "spec_draft_tokens_total": ("vllm:spec_decode_num_draft_tokens", "llamacpp:spec_decode_num_draft_tokens"),
    "spec_accepted_tokens_total": (
        "vllm:spec_decode_num_accepted_tokens",
        "llamacpp:spec_decode_num_accepted_tokens",
    ),
    "spec_drafts_total": ("vllm:spec_decode_num_drafts", "llamacpp:spec_decode_num_drafts"),
    "decode_calls_total": ("llamacpp:n_decode",),
}
# Of a histogram the two figures from which the mean of any stretch of time follows: its buckets are ten times as much.
HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "itl": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",  # what vLLM called the gap between tokens until 0.10
        "sglang:inter_token_latency_seconds",
    ),
    "tpot": (
        "vllm:request_time_per_output_token_seconds",
        "sglang:time_per_output_token_seconds",
        "tgi_request_mean_time_per_token_duration",
    ),
    "e2e": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds", "tgi_request_duration"),
    "queue": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds", "tgi_request_queue_duration"),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
    "inference": ("vllm:request_inference_time_seconds", "tgi_request_inference_duration"),
}
COUNTERS |= {f"{ours}_count_total": tuple(f"{name}_count" for name in names) for ours, names in HISTOGRAMS.items()}
COUNTERS |= {f"{ours}_seconds_total": tuple(f"{name}_sum" for name in names) for ours, names in HISTOGRAMS.items()}
COUNTERS["prefill_seconds_total"] += ("llamacpp:prompt_seconds",)
COUNTERS["decode_seconds_total"] += ("llamacpp:tokens_predicted_seconds",)

SUMMED_GAUGES: dict[str, tuple[str, ...]] = {
    "requests_running": (
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "llamacpp:requests_processing",
        "tgi_batch_current_size",
    ),
    "requests_waiting": (
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "llamacpp:requests_deferred",
        "tgi_queue_size",
    ),
    "requests_paused": ("sglang:num_paused_reqs",),
    "requests_retracted": ("sglang:num_retracted_reqs",),
    "decode_tokens_per_s": ("sglang:gen_throughput", "llamacpp:predicted_tokens_seconds"),
    "prefill_tokens_per_s": ("llamacpp:prompt_tokens_seconds",),
    "kv_capacity_tokens": ("sglang:max_total_num_tokens",),
    "kv_used_tokens": ("sglang:kv_used_tokens", "sglang:num_used_tokens"),
    "kv_evictable_tokens": ("sglang:kv_evictable_tokens",),
    "busy_slots_per_decode": ("llamacpp:n_busy_slots_per_decode",),
    "batch_max_tokens": ("tgi_batch_current_max_tokens",),
}
# Of several engines the fullest counts: requests on it suffer, whatever the others have left.
WORST_GAUGES: dict[str, tuple[str, ...]] = {
    "kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "swa_usage_ratio": ("sglang:swa_token_usage",),
    "mamba_usage_ratio": ("sglang:mamba_usage",),
    "context_tokens": ("sglang:context_len",),
    "context_high_water_tokens": ("llamacpp:n_tokens_max",),
}
# A rate of several engines is no sum and no maximum.
MEAN_GAUGES: dict[str, tuple[str, ...]] = {
    "prefix_cache_hit_ratio": ("sglang:cache_hit_rate",),
    "spec_accept_length": ("sglang:spec_accept_length",),
    "spec_accept_ratio": ("sglang:spec_accept_rate",),
}
# SGLang's "GB" are 2^30 bytes; what start-up took is one figure per rank, and adds up.
GIB_GAUGES: dict[str, tuple[str, ...]] = {
    "model_bytes": ("sglang:weight_memory_usage_gb",),
    "kv_cache_bytes": ("sglang:kv_cache_memory_usage_gb",),
    "graph_bytes": ("sglang:graph_memory_usage_gb",),
}
# Figures that say most by one of their labels: our name, our word for the label, then theirs, and their names.
BY_LABEL: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "requests_waiting_by_reason": ("reason", "reason", ("vllm:num_requests_waiting_by_reason",)),
    "requests_finished_by_reason_total": ("reason", "finished_reason", ("vllm:request_success",)),
    "requests_rejected_by_reason_total": ("reason", "reason", ("vllm:admission_rejections",)),
    "prompt_tokens_by_source_total": ("source", "source", ("vllm:prompt_tokens_by_source",)),
    "sleep_state": ("state", "sleep_state", ("vllm:engine_sleep_state",)),
    # a position whose share of drafts stays at 1.00 is a fault of its own
    "spec_accepted_tokens_by_position_total": (
        "position",
        "position",
        ("vllm:spec_decode_num_accepted_tokens_per_pos", "llamacpp:spec_decode_num_accepted_tokens_per_pos"),
    ),
}
# What is kept of each engine alone where there are several: one that does nothing, or is full, hides in the sum.
PER_ENGINE = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
ENGINE_LABELS = ("engine", "dp_rank", "engine_id")
# Figures that a server hides in the labels of a constant gauge.
LABEL_FACTS: dict[str, tuple[str, str]] = {
    "kv_capacity_tokens": ("vllm:cache_config_info", "kv_cache_size_tokens"),
    "kv_concurrency": ("vllm:cache_config_info", "kv_cache_max_concurrency"),
    "kv_blocks": ("vllm:cache_config_info", "num_gpu_blocks"),
    "kv_block_tokens": ("vllm:cache_config_info", "block_size"),
}
# Lines that nobody reads: the buckets of histograms are three quarters of vLLM's page, and of the time it takes.
UNREAD = ("_bucket{", "_created{", "_created ")
PREFIXES = ("vllm:", "sglang:", "llamacpp:", "tgi_")

# What an answer other than 200 says about the page.
OFF = {
    401: "the page wants credentials: set api_key in the scenario's target",
    403: "the page may not be read with these credentials",
    404: "there is no /metrics page (SGLang: start it with --enable-metrics)",
    405: "there is no /metrics page",
    501: "the page is switched off (llama.cpp: start the server with --metrics)",
}


@dataclass(frozen=True, slots=True)
class Options:
    """`metrics_url` where the page is not at /metrics of the target. `headers_env` names an environment variable that
    holds the request headers as a JSON object: keys never stand in a file or on a command line."""

    target_url: str = ""
    metrics_url: str = ""
    headers_env: str = ""
    verify_tls: bool = True
    period_s: Seconds = Seconds(1)


# ---------------------------------------------------------------------------------------------------------------------
# Names to ours


def spelled(page: Page, names: tuple[str, ...], counter: bool) -> tuple[str, Series] | None:
    """The first of these names that the page has, and its values."""
    for name in names:
        bare = name.removesuffix("_total")
        for spelling in (f"{bare}_total", bare) if counter else (name,):
            series = page.series.get(spelling)
            if series:
                return spelling, series
    return None


def normalised(page: Page) -> tuple[dict[str, float], dict[str, str]]:
    """Values under our names, and which name of the page each was read from."""
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    for table, counter, combine in (
        (COUNTERS, True, sum),
        (SUMMED_GAUGES, False, sum),
        (WORST_GAUGES, False, max),
        (MEAN_GAUGES, False, _mean),
        (GIB_GAUGES, False, _gib),
    ):
        for ours, names in table.items():
            found = spelled(page, names, counter)
            if found is not None:
                sources[ours] = found[0]
                values[ours] = float(combine(found[1].values()))
    for ours, (name, label) in LABEL_FACTS.items():
        facts = [dict(labels).get(label, "") for labels in page.series.get(name, {})]
        numbers = [float(fact) for fact in facts if _NUMBER.fullmatch(fact)]
        if numbers and ours not in values:
            values[ours] = sum(numbers) if ours != "kv_block_tokens" else max(numbers)
            sources[ours] = f"{name}{{{label}}}"
    if "kv_capacity_tokens" not in values and {"kv_blocks", "kv_block_tokens"} <= values.keys():
        values["kv_capacity_tokens"] = values["kv_blocks"] * values["kv_block_tokens"]  # older vLLM
        sources["kv_capacity_tokens"] = "kv_blocks x kv_block_tokens"
    return values, sources


_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


def _gib(values: Collection[float]) -> float:
    return sum(values) * (1 << 30)


def by_label(page: Page) -> list[tuple[str, dict[str, str], float]]:
    """The figures of BY_LABEL, and those of PER_ENGINE where the page has several engines; label sets that differ in
    other labels only are added up."""
    out: list[tuple[str, dict[str, str], float]] = []
    for ours, (word, theirs, names) in BY_LABEL.items():
        found = spelled(page, names, ours.endswith("_total"))
        sums: dict[str, float] = {}
        for labels, value in found[1].items() if found is not None else ():
            key = dict(labels).get(theirs)
            if key is not None:
                sums[key] = sums.get(key, 0.0) + value
        out += [(ours, {word: key}, value) for key, value in sorted(sums.items())[:MAX_LABEL_VALUES]]
    for ours in PER_ENGINE:
        found = spelled(page, SUMMED_GAUGES.get(ours) or WORST_GAUGES[ours], False)
        engines = {name: value for labels, value in (found[1].items() if found else ()) if (name := _engine(labels))}
        if len(engines) > 1:
            out += [
                (f"{ours}_per_engine", {"engine": name}, value) for name, value in sorted(engines.items())[:MAX_ENGINES]
            ]
    return out


def _engine(labels: frozenset[tuple[str, str]]) -> str | None:
    named = dict(labels)
    return next((named[label] for label in ENGINE_LABELS if label in named), None)


_TABLES = (COUNTERS, SUMMED_GAUGES, WORST_GAUGES, MEAN_GAUGES, GIB_GAUGES)
KNOWN = frozenset(
    name
    for names in [names for table in _TABLES for names in table.values()] + [names for *_, names in BY_LABEL.values()]
    for each in names
    for name in (each.removesuffix("_total"), f"{each.removesuffix('_total')}_total")
) | {name for name, _ in LABEL_FACTS.values()}


def unknown(page: Page) -> tuple[dict[str, float], int]:
    """What we have no name for, under the page's own names and summed over label sets: the first MAX_UNKNOWN by name,
    and how many there are. Buckets and times of creation are left out."""
    names = sorted(
        name for name in page.series if name not in KNOWN and not name.endswith(("_bucket", "_created", "_info"))
    )
    return {name: sum(page.series[name].values()) for name in names[:MAX_UNKNOWN]}, len(names)


def resets(before: Page, now: Page) -> list[str]:
    """Our names of the counters that fell in at least one label set: that engine started anew."""
    fallen: list[str] = []
    for ours, names in COUNTERS.items():
        old, new = spelled(before, names, True), spelled(now, names, True)
        if old and new and any(new[1].get(labels, value) < value for labels, value in old[1].items()):
            fallen.append(ours)
    return fallen


# ---------------------------------------------------------------------------------------------------------------------
# Scraping


@dataclass(slots=True)
class Scrape:
    """One answer: the page, or why there is none. `off`: the server answered that it has no such page."""

    page: Page | None
    why: str = ""
    off: bool = False


async def scrape(session: aiohttp.ClientSession, url: str) -> Scrape:
    """Fetch and parse the page once. Never raises for what a server does."""
    import aiohttp

    try:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                why = OFF.get(response.status, f"HTTP {response.status}")
                return Scrape(None, f"{url}: {why}", off=response.status in OFF)
            body = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > MAX_PAGE_BYTES:
                    return Scrape(None, f"{url}: more than {MAX_PAGE_BYTES >> 20} MiB is no metrics page", off=True)
    except TimeoutError:
        return Scrape(None, f"{url}: no answer within {DEADLINE_S:g} s")
    except aiohttp.ClientConnectorError as error:
        return Scrape(None, f"{url}: {os.strerror(error.errno) if error.errno else error.os_error}")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Scrape(None, f"{url}: {' '.join(str(error).split()) or type(error).__name__}")
    page = parse(body.decode("utf-8", "replace"), UNREAD)
    if not any(name.startswith(PREFIXES) for name in page.series):
        return Scrape(None, f"{url}: none of the metrics of vLLM, SGLang, llama.cpp or TGI are there", off=True)
    return Scrape(page)


def page_url(options: Options) -> str | None:
    """Where the page should be: at the root of the target, whatever path its API has."""
    if options.metrics_url:
        return options.metrics_url
    url = urlsplit(options.target_url)
    return f"{url.scheme}://{url.netloc}/metrics" if url.scheme and url.netloc else None


async def watch(options: Options) -> AsyncIterator[list[Sample]]:
    """Samples of one scrape; happenings scrape_failed (once an outage), counter_reset, bad_lines (once)."""
    url = page_url(options)
    if url is None:
        yield [Sample("engine", "observed", 0.0, clock.now_ns(), text="no target_url to scrape")]
        return
    headers = json.loads(os.environ.get(options.headers_env) or "{}") if options.headers_env else {}

    import aiohttp

    connector = aiohttp.TCPConnector(limit=1, ssl=options.verify_tls)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        before: Page | None = None
        told: str | None = None
        told_names: set[str] = set()
        told_bad = failing = False
        not_before_ns = failed = unknown_due_ns = 0
        while True:
            out: list[Sample] = []
            start = clock.now_ns()
            if start >= not_before_ns:
                answer = await scrape(session, url)
                at = clock.now_ns()
                if answer.page is not None:
                    out += readings(answer.page, before, at)
                    out.append(Sample("engine", "scrape_ms", (at - start) / 1e6, at))
                    if at >= unknown_due_ns:
                        out += others(answer.page, at, told_names)
                        unknown_due_ns = at + round(UNKNOWN_PERIOD_S * 1e9)
                    if answer.page.bad_lines and not told_bad:
                        told_bad = True
                        text = f"{answer.page.bad_lines} unreadable lines, the first: {answer.page.first_bad}"
                        out.append(Sample("engine", "bad_lines", float(answer.page.bad_lines), at, text=text))
                    before, failing = answer.page, False
                else:
                    failed += 1
                    if answer.off:
                        not_before_ns = at + round(RETRY_OFF_S * 1e9)
                    elif not failing and told == "":
                        out.append(Sample("engine", "scrape_failed", 1.0, at, text=answer.why))
                    failing = True
                out.append(Sample("engine", "scrapes_failed_total", float(failed), at))
                # an outage of a page that has been seen is a happening, not blindness
                if answer.page is not None and told != "":
                    told = ""
                    out.insert(0, Sample("engine", "observed", 1.0, at, text=seen(answer.page)))
                elif answer.page is None and told != answer.why and (told != "" or answer.off):
                    told = answer.why
                    out.insert(0, Sample("engine", "observed", 0.0, at, text=answer.why))
            yield out


def readings(page: Page, before: Page | None, at: int) -> list[Sample]:
    """The page's figures under our names, and what fell since the page before."""
    values, sources = normalised(page)
    out = [Sample("engine", name, value, at) for name, value in values.items()]
    out += [Sample("engine", name, value, at, labels) for name, labels, value in by_label(page)]
    fallen = resets(before, page) if before is not None else []
    if fallen:
        text = f"counters began anew: {', '.join(f'{name} ({sources[name]})' for name in fallen)}"
        out.append(Sample("engine", "counter_reset", 1.0, at, text=text))
    return out


def others(page: Page, at: int, told: set[str]) -> list[Sample]:
    """What we have no name for, with the label `name` = `theirs`, and a happening that lists the names not told yet."""
    values, n = unknown(page)
    out = [Sample("engine", name, value, at, {"name": "theirs"}) for name, value in values.items()]
    new = [name for name in values if name not in told]
    if new and len(told) < MAX_UNKNOWN:
        told.update(new)
        more = f" and {n - len(values)} more, not kept" if n > len(values) else ""
        out.append(Sample("engine", "unknown_names", float(len(new)), at, text=f"{' '.join(new)}{more}"))
    return out


def seen(page: Page) -> str:
    """Which server this is, and which names its figures were read from."""
    _, sources = normalised(page)
    missing = [name for name in ("requests_running", "kv_cache_usage_ratio") if name not in sources]
    without = f"; without {', '.join(missing)}" if missing else ""
    return f"{', '.join(f'{ours} = {theirs}' for ours, theirs in sorted(sources.items()))}{without}"
