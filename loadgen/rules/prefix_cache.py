"""Prompts that were meant to be new to the server and were not: its prefix cache answered for the prefill.

What: the share of the prompt tokens of `cold` requests that came from the cache, per class by `usage`; where `usage`
does not say and every request is cold, the engine's own counters over the measured time, all classes together. What
the chat template and a block around it share (`allow_tokens`) is left out.
Why: a test that repeats its prompts measures the cache: a hit rate of 95 % showed a prefill twenty times too fast,
and the server's lifetime average hid it as 48 %.
Threshold: salted prompts share nothing, so 1 % is a mistake of the workload or of the server.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.rules import Needs, measured, not_evaluated, readings
from loadgen.types import Finding

if TYPE_CHECKING:
    from loadgen.record import Run


@dataclass(frozen=True, slots=True)
class Options:
    share: float = 0.01
    allow_tokens: int = 32


def needs(options: Options) -> Needs:
    return Needs()


def check(run: Run, options: Options) -> list[Finding]:
    calibration = run.scenario.calibration
    allowed = options.allow_tokens + (calibration.template_tokens if calibration else 0)
    labels = {p.name for p in run.phases if p.kind == "measure"}
    prompt: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    told: Counter[str] = Counter()
    intents: Counter[str] = Counter()
    for outcome in run.outcomes():
        if outcome.phase not in labels:
            continue
        intents[outcome.cache] += 1
        if outcome.cache == "cold" and outcome.outcome == "ok" and outcome.cached_tokens is not None:
            told[outcome.cls] += 1
            prompt[outcome.cls] += outcome.prompt_tokens or 0
            hits[outcome.cls] += max(0, outcome.cached_tokens - allowed)
    shares = {cls: hits[cls] / prompt[cls] for cls in sorted(told) if prompt[cls]}
    if intents and not intents["cold"]:
        return []  # nothing was meant to be new
    if shares:
        return [_finding(share, options, cls, told[cls], "outcomes: cached_tokens") for cls, share in shares.items()]
    share = _engine_share(run, allowed * intents["cold"]) if set(intents) == {"cold"} else None
    if share is None:
        why = "nobody told how many prompt tokens came from the server's prefix cache"
        return [not_evaluated("prefix_cache", "measurement", why)]
    where = "samples: engine.prefix_cache_hits_total, engine.prefix_cache_queries_total"
    return [_finding(share, options, "", intents["cold"], where)]


def _engine_share(run: Run, allowed: int) -> float | None:
    """Hits by queries within the measured time; a counter that began anew counts from there."""
    rises = []
    for name in ("prefix_cache_hits_total", "prefix_cache_queries_total"):
        counter = readings(run, "engine", name, measured(run)).last
        if len(counter) < 2:
            return None
        rises.append(float(np.clip(np.diff(counter), 0, None).sum()))
    return max(0.0, rises[0] - allowed) / rises[1] if rises[1] else None


def _finding(share: float, options: Options, scope: str, n: int, where: str) -> Finding:
    warm = share > options.share
    said = f"{100 * share:.0f} % of the prompt tokens that were meant to be new came from the server's prefix cache"
    return Finding(
        "prefix_cache", "measurement", "warn" if warm else "pass", said, scope, share, options.share, "share", n, where,
        None, "prefix_cache_warm" if warm else "",
    )  # fmt: skip
