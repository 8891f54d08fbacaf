"""The simulated server's `/metrics`: vLLM 0.33's names and labels, rendered by hand (a page of text is all it is)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from loadgen.sim.model import Engine

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
GAP_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(lead * 10**power) for power in range(6) for lead in (1, 2, 5))
COUNT_BUCKETS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class Histogram:
    """Counts per bucket, as Prometheus wants them: a value falls into the first bucket that is not below it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def lines(self, name: str, labels: str) -> list[str]:
        found = []
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            found.append(f'{name}_bucket{{{labels},le="{bound}"}} {float(below)}')
        return [*found, f"{name}_count{{{labels}}} {float(below)}", f"{name}_sum{{{labels}}} {self.sum}"]


@dataclass(slots=True)
class Meters:
    """What is only known at the rim: times in seconds as a client could have seen them, and how requests ended."""

    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS))
    gap: Histogram = field(default_factory=lambda: Histogram(GAP_BUCKETS))
    tpot: Histogram = field(default_factory=lambda: Histogram(GAP_BUCKETS))
    e2e: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    queue: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    prefill: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    decode: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    inference: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS))
    generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS))
    preemptions: Histogram = field(default_factory=lambda: Histogram(COUNT_BUCKETS))
    endings: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
    )
    rejections: int = 0


def render(model: str, engine: Engine, meters: Meters) -> str:
    """The page that `/metrics` answers."""
    labels = f'engine="0",model_name="{model}"'
    done = engine.counters
    lines: list[str] = []

    def metric(name: str, kind: str, about: str, *values: tuple[str, float]) -> None:
        lines.extend((f"# HELP vllm:{name} {about}", f"# TYPE vllm:{name} {kind}"))
        for more, value in values:
            lines.append(f"vllm:{name}{{{labels}{more}}} {float(value)}")

    def gauge(name: str, about: str, value: float) -> None:
        metric(name, "gauge", about, ("", value))

    def counter(name: str, about: str, value: float) -> None:
        metric(f"{name}_total", "counter", about, ("", value))

    gauge("num_requests_running", "Requests in the batch.", len(engine.running))
    gauge("num_requests_waiting", "Requests in the queue.", len(engine.waiting))
    metric(
        "num_requests_waiting_by_reason", "gauge", "Requests in the queue, by reason.",
        (',reason="capacity"', len(engine.waiting)), (',reason="deferred"', 0),
    )  # fmt: skip
    gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", engine.kv_usage)
    counter("num_preemptions", "Preemptions.", done.preemptions)
    counter("prompt_tokens", "Prompt tokens of requests whose prefill is done.", done.prompt_tokens)
    counter("prompt_tokens_cached", "Those of them that came from the prefix cache.", done.cached_tokens)
    counter("generation_tokens", "Generated tokens.", done.generation_tokens)
    counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", done.prefix_queries)
    counter("prefix_cache_hits", "Tokens found there.", done.prefix_hits)
    if engine.config.spec_acceptance:
        counter("spec_decode_num_drafts", "Drafts.", done.drafts)
        counter("spec_decode_num_draft_tokens", "Drafted tokens.", done.draft_tokens)
        counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.", done.accepted_tokens)
        metric(
            "spec_decode_num_accepted_tokens_per_pos_total", "counter", "Accepted draft tokens by position.",
            *((f',position="{at}"', count) for at, count in enumerate(done.accepted_per_position)),
        )  # fmt: skip
    metric(
        "request_success_total", "counter", "Finished requests by reason.",
        *((f',finished_reason="{reason}"', count) for reason, count in meters.endings.items()),
    )  # fmt: skip
    metric(
        "admission_rejections_total", "counter", "Requests turned away at a full queue.",
        (',reason="max_num_queued_reqs"', meters.rejections),
    )  # fmt: skip
    for name, about, histogram in (
        ("time_to_first_token_seconds", "Time to first token.", meters.ttft),
        ("inter_token_latency_seconds", "Time between outputs of one request.", meters.gap),
        ("request_time_per_output_token_seconds", "Mean time per output token of a request.", meters.tpot),
        ("e2e_request_latency_seconds", "Time of a whole request.", meters.e2e),
        ("request_queue_time_seconds", "Time in the queue.", meters.queue),
        ("request_prefill_time_seconds", "Admission to first token.", meters.prefill),
        ("request_decode_time_seconds", "First token to last.", meters.decode),
        ("request_inference_time_seconds", "Admission to last token.", meters.inference),
        ("request_prompt_tokens", "Prompt tokens of a request.", meters.prompt_tokens),
        ("request_generation_tokens", "Generated tokens of a request.", meters.generation_tokens),
        ("request_num_preemptions", "Preemptions of a request.", meters.preemptions),
    ):
        lines.extend((f"# HELP vllm:{name} {about}", f"# TYPE vllm:{name} histogram"))
        lines.extend(histogram.lines(f"vllm:{name}", labels))
    config = engine.config
    metric(
        "cache_config_info", "gauge", "The KV cache's configuration.",
        (
            f',block_size="{config.block_tokens}",enable_prefix_caching="{config.prefix_cache}"'
            f',num_gpu_blocks="{engine.blocks}",kv_cache_size_tokens="{engine.blocks * config.block_tokens}"'
            f',kv_cache_max_concurrency="{engine.blocks * config.block_tokens / config.context_tokens:.2f}"'
            f',kv_cache_memory_bytes="{engine.blocks * config.block_tokens * config.memory.kv_bytes_per_token}"',
            1.0,
        ),
    )  # fmt: skip
    return "\n".join((*lines, ""))
