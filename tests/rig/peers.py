"""Other load generators as their users run them: the command, and how to read what they report.

Each lives in an environment of its own, `.cache/peers/NAME` (README.md says how to make them); one that is not there is
skipped with a word. All get the same: N streams, R requests, 16 tokens in, 128 out, and a word-level tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rig.rig import HERE, ROOT, MissingError

PEERS = ROOT / ".cache/peers"
TOKENIZER = PEERS / "tokenizer"
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 128

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Peer:
    """A command to run in `folder`, and `read`, which gives what it reported once it is over (milliseconds)."""

    command: list[str]
    read: Callable[[], dict[str, float | None]]
    env: Mapping[str, str] = field(default_factory=dict)


def _program(peer: str, name: str) -> str:
    path = PEERS / peer / "bin" / name
    if not path.exists():
        raise MissingError(f"{path.relative_to(ROOT)} is not there (tests/rig/README.md says how to install it)")
    return str(path)


def _tokenizer() -> str:
    if not TOKENIZER.is_dir():
        raise MissingError(f"{TOKENIZER.relative_to(ROOT)} is not there (tests/rig/README.md says how to make it)")
    return str(TOKENIZER)


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def aiperf(url: str, model: str, streams: int, requests: int, folder: Path) -> Peer:
    def read() -> dict[str, float | None]:
        said = _json(folder / "profile_export_aiperf.json")
        return {
            "ttft_p50": said["time_to_first_token"]["p50"], "ttft_p99": said["time_to_first_token"]["p99"],
            "gap_p50": said["inter_chunk_latency"]["p50"], "gap_p99": said["inter_chunk_latency"]["p99"],
            "done": said["request_count"]["avg"],
        }  # fmt: skip

    return Peer([
        _program("aiperf", "aiperf"), "profile", "-m", model, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", _tokenizer(), "--concurrency", str(streams), "--request-count", str(requests),
        "--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS), "--ui", "none", "--artifact-dir", str(folder),
    ], read)  # fmt: skip


def guidellm(url: str, model: str, streams: int, requests: int, folder: Path) -> Peer:
    def read() -> dict[str, float | None]:
        said = _json(folder / "g.json")["benchmarks"][0]["metrics"]

        def q(key: str, p: str) -> float:
            return float(said[key]["successful"]["percentiles"][p])

        return {
            "ttft_p50": q("time_to_first_token_ms", "p50"), "ttft_p99": q("time_to_first_token_ms", "p99"),
            "gap_p50": None, "gap_p99": None, "done": said["request_totals"]["successful"],
        }  # fmt: skip

    return Peer([
        _program("guidellm", "guidellm"), "run", "--backend", f"kind=openai_http,target={url},model={model}",
        "--profile", f"kind=concurrent,streams={streams}", "--constraint", f"kind=max_requests,count={requests}",
        "--tokenizer", f"kind=huggingface_auto,model={_tokenizer()}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={folder}/g.json", "--disable-progress",
    ], read, {"GUIDELLM__MAX_WORKER_PROCESSES": "1", **OFFLINE})  # fmt: skip


INFERENCE_PERF = """\
load: {{type: concurrent, num_workers: 1, worker_max_concurrency: 4000,
  stages: [{{concurrency_level: {streams}, num_requests: {requests}}}]}}
api: {{type: completion, streaming: true}}
server: {{type: vllm, model_name: {model}, base_url: "{url}", ignore_eos: true}}
tokenizer: {{pretrained_model_name_or_path: {tokenizer}}}
data: {{type: random,
  input_distribution: {{min: 16, max: 16, mean: 16, std_dev: 0, total_count: {requests}}},
  output_distribution: {{min: 128, max: 128, mean: 128, std_dev: 0, total_count: {requests}}}}}
report: {{request_lifecycle: {{summary: true, per_stage: true, per_request: false}}}}
storage: {{local_storage: {{path: {folder}/r}}}}
"""


def inference_perf(url: str, model: str, streams: int, requests: int, folder: Path) -> Peer:
    program, tokenizer = _program("inference-perf", "inference-perf"), _tokenizer()
    config = folder / "config.yml"
    config.write_text(INFERENCE_PERF.format(
        url=url, model=model, streams=streams, requests=requests, folder=folder, tokenizer=tokenizer
    ))  # fmt: skip

    def read() -> dict[str, float | None]:
        said = _json(folder / "r/stage_0_lifecycle_metrics.json")["successes"]

        def q(key: str, p: str) -> float:
            return float(said["latency"][key][p]) * 1e3

        return {
            "ttft_p50": q("time_to_first_token", "median"), "ttft_p99": q("time_to_first_token", "p99"),
            "gap_p50": q("inter_token_latency", "median"), "gap_p99": q("inter_token_latency", "p99"),
            "done": said["count"],
        }  # fmt: skip

    return Peer([program, "--config_file", str(config)], read, OFFLINE)


def sglang_rust(url: str, model: str, streams: int, requests: int, folder: Path) -> Peer:
    home = PEERS / "sglang-rust"

    def read() -> dict[str, float | None]:
        said = json.loads((folder / "o.jsonl").read_text().splitlines()[-1])
        return {
            "ttft_p50": said["median_ttft_ms"], "ttft_p99": said["p99_ttft_ms"],
            "gap_p50": said["median_itl_ms"], "gap_p99": said["p99_itl_ms"], "done": said["completed"],
        }  # fmt: skip

    return Peer([
        _program("sglang-rust", "python"), str(HERE / "sglang_rust.py"), str(home), "--backend", "sglang-oai-chat",
        "--base-url", url, "--dataset-name", "random-ids", "--model", model, "--tokenizer", _tokenizer(),
        "--num-prompts", str(requests), "--random-input-len", str(PROMPT_TOKENS),
        "--random-output-len", str(OUTPUT_TOKENS), "--random-range-ratio", "1", "--max-concurrency", str(streams),
        "--output-file", str(folder / "o.jsonl"), "--disable-tqdm",
    ], read, {"PYTHONPATH": str(home / "wheel"), **OFFLINE})  # fmt: skip


def vllm(url: str, model: str, streams: int, requests: int, folder: Path) -> Peer:
    program, code = _program("vllm", "python"), PEERS / "vllm/endpoint_request_func.py"
    if not code.exists():
        raise MissingError(f"{code.relative_to(ROOT)} is not there (tests/rig/README.md says how to get it)")
    return Peer(
        [program, str(HERE / "vllm_driver.py"), str(code), url, model, str(streams), str(requests), str(folder / "o")],
        lambda: dict(_json(folder / "o")),
    )


ALL: Mapping[str, Callable[[str, str, int, int, Path], Peer]] = {
    "vllm": vllm,
    "sglang-rust": sglang_rust,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "inference-perf": inference_perf,
}
