"""The server's own figures, scraped from its /metrics page once a second and brought under one set of names.

vLLM, SGLang, llama.cpp and TGI call the same things differently and rename them from version to version, so names are
tables with aliases. A figure that a server does not export is absent, never 0. A scrape that times out is data: the
server's event loop is starved. A page that is switched off is said once and asked for less often.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds

if TYPE_CHECKING:
    import aiohttp

LANE: Lane = "slow"
PERIOD_S = 1.0
DEADLINE_S = 1.0  # a page that takes longer says by that how the server's event loop is
MAX_PAGE_BYTES = 16 << 20  # vLLM's page with all histograms is 100 KB; a page without end is not a metrics page
RETRY_OFF_S = 30.0  # a page that is switched off may come with a restart of the server
MAX_BAD_LINES = 1000

# Our name → how the values of several label sets are combined, and the names that servers use, newest first: the first
# that the page has counts, so that a metric under two spellings is not added twice. A counter may end in `_total` or
# not, whatever is written here.
COUNTERS: dict[str, tuple[str, ...]] = {
    "prompt_tokens_total": ("vllm:prompt_tokens", "sglang:prompt_tokens", "llamacpp:prompt_tokens"),
    "generation_tokens_total": ("vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted"),
    "preemptions_total": ("vllm:num_preemptions", "sglang:num_retracted_requests"),
    "requests_success_total": ("vllm:request_success", "sglang:num_requests", "tgi_request_success"),
    "requests_aborted_total": ("sglang:num_aborted_requests", "tgi_request_failure"),
    "requests_rejected_total": ("vllm:admission_rejections",),
    "corrupted_requests_total": ("vllm:corrupted_requests",),
    "prefix_cache_queries_total": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "prefix_cache_hits_total": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "sglang:cached_tokens"),
    "spec_draft_tokens_total": ("vllm:spec_decode_num_draft_tokens", "llamacpp:spec_decode_num_draft_tokens"),
    "spec_accepted_tokens_total": (
        "vllm:spec_decode_num_accepted_tokens",
        "llamacpp:spec_decode_num_accepted_tokens",
    ),
    "spec_drafts_total": ("vllm:spec_decode_num_drafts", "llamacpp:spec_decode_num_drafts"),
    "decode_calls_total": ("llamacpp:n_decode",),
    "ttft_count_total": ("vllm:time_to_first_token_seconds_count", "sglang:time_to_first_token_seconds_count"),
    "ttft_seconds_total": ("vllm:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_sum"),
    "queue_count_total": (
        "vllm:request_queue_time_seconds_count",
        "sglang:queue_time_seconds_count",
        "tgi_request_queue_duration_count",
    ),
    "queue_seconds_total": (
        "vllm:request_queue_time_seconds_sum",
        "sglang:queue_time_seconds_sum",
        "tgi_request_queue_duration_sum",
    ),
}
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
    "requests_retracted": ("sglang:num_retracted_reqs",),
    "decode_tokens_per_s": ("sglang:gen_throughput", "llamacpp:predicted_tokens_seconds"),
    "prefill_tokens_per_s": ("llamacpp:prompt_tokens_seconds",),
    "kv_capacity_tokens": ("sglang:max_total_num_tokens",),
}
# Of several engines the fullest counts: requests on it suffer, whatever the others have left.
WORST_GAUGES: dict[str, tuple[str, ...]] = {
    "kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "swa_usage_ratio": ("sglang:swa_token_usage",),
    "mamba_usage_ratio": ("sglang:mamba_usage",),
    "context_high_water_tokens": ("llamacpp:n_tokens_max",),
    "spec_accept_length": ("sglang:spec_accept_length",),
}
# Figures that a server hides in the labels of a constant gauge.
LABEL_FACTS: dict[str, tuple[str, str]] = {
    "kv_capacity_tokens": ("vllm:cache_config_info", "kv_cache_size_tokens"),
    "kv_blocks": ("vllm:cache_config_info", "num_gpu_blocks"),
    "kv_block_tokens": ("vllm:cache_config_info", "block_size"),
}
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


Series = dict[frozenset[tuple[str, str]], float]


@dataclass(slots=True)
class Page:
    """A parsed page: per metric name the values by label set, and how many lines could not be read."""

    series: dict[str, Series] = field(default_factory=dict)
    bad_lines: int = 0
    first_bad: str = ""


# ---------------------------------------------------------------------------------------------------------------------
# Text to numbers

# A blank inside a label value, an escaped quote, a timestamp behind the value: all occur. prometheus_client's parser
# reads them too but gives up the whole page at one bad line; a test holds this one against it on good pages.
_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*"
    r"(?:\{(?P<labels>(?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?[ \t]*"
    r"(?P<value>[-+]?(?:[0-9.]+(?:[eE][-+]?[0-9]+)?|[iI]nf(?:inity)?|[nN]a[nN]))(?:[ \t]+-?[0-9.]+)?[ \t\r]*"
)
_LABEL = re.compile(r"\s*(?P<key>[a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*\"(?P<value>(?:[^\"\\]|\\.)*)\"\s*(?:,|$)")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


def parse(text: str) -> Page:
    """The Prometheus text format, line by line: one bad line costs one line. Lines end at LF only (a model's name may
    hold other line separators of Unicode)."""
    page = Page()
    for line in text.split("\n"):
        if not line or line.startswith("#") or line.isspace():
            continue
        found = _LINE.fullmatch(line.lstrip(" \t"))
        labels = None if found is None else label_set(found["labels"] or "")
        try:
            if found is None or labels is None:
                raise ValueError
            value = float(found["value"])
        except ValueError:
            page.bad_lines += 1
            page.first_bad = page.first_bad or line[:200]
            continue
        page.series.setdefault(found["name"], {})[labels] = value
    return page


def label_set(text: str) -> frozenset[tuple[str, str]] | None:
    """`a="b",c="d"` as pairs, or None where it is something else."""
    pairs: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None:
            return None if text[at:].strip() else frozenset(pairs)
        value = found["value"]
        if "\\" in value:
            value = _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[0]), value)
        pairs.append((found["key"], value))
        at = found.end()
    return frozenset(pairs)


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
    for table, counter, combine in ((COUNTERS, True, sum), (SUMMED_GAUGES, False, sum), (WORST_GAUGES, False, max)):
        for ours, names in table.items():
            found = spelled(page, names, counter)
            if found is not None:
                sources[ours] = found[0]
                values[ours] = float(combine(found[1].values()))
    for ours, (name, label) in LABEL_FACTS.items():
        facts = [dict(labels).get(label, "") for labels in page.series.get(name, {})]
        numbers = [float(fact) for fact in facts if fact.isdigit()]
        if numbers and ours not in values:
            values[ours] = sum(numbers) if ours != "kv_block_tokens" else max(numbers)
            sources[ours] = f"{name}{{{label}}}"
    return values, sources


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
    page = parse(body.decode("utf-8", "replace"))
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
        told_bad = failing = False
        not_before_ns = failed = 0
        while True:
            out: list[Sample] = []
            start = clock.now_ns()
            if start >= not_before_ns:
                answer = await scrape(session, url)
                at = clock.now_ns()
                if answer.page is not None:
                    out += readings(answer.page, before, at)
                    out.append(Sample("engine", "scrape_ms", (at - start) / 1e6, at))
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
    fallen = resets(before, page) if before is not None else []
    if fallen:
        text = f"counters began anew: {', '.join(f'{name} ({sources[name]})' for name in fallen)}"
        out.append(Sample("engine", "counter_reset", 1.0, at, text=text))
    return out


def seen(page: Page) -> str:
    """Which server this is, and which names its figures were read from."""
    _, sources = normalised(page)
    missing = [name for name in ("requests_running", "kv_cache_usage_ratio") if name not in sources]
    without = f"; without {', '.join(missing)}" if missing else ""
    return f"{', '.join(f'{ours} = {theirs}' for ours, theirs in sorted(sources.items()))}{without}"
