"""Calibration by usage, the pure part: what the server's template adds, and whether one more word is one more token.

Works on any server that reports `usage.prompt_tokens`, needs no tokenizer: three tiny prompts of k, 2k and 3k words lie
on the line prompt_tokens = a + b·k. b must be 1 exactly, then a is what the template adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.types import Draw, Request
from workloads import words
from workloads.turns import user


@dataclass(frozen=True, slots=True)
class Line:
    """The line through the probes. `exact`: it has slope 1 and meets every probe; otherwise `why` says by how much it
    is off, and lengths are estimates."""

    template_tokens: int
    tokens_per_word: float
    exact: bool
    why: str = ""


def probes(seed: int, words_step: int = 64) -> list[Request]:
    """Three requests of k, 2k and 3k words for one token each; `expect["words"]` says how many. Together they try 6k
    different words of the list (all but four of them with k = 170)."""
    draw = Draw(seed=seed, cls="calibrate", salt="")
    random = draw.random(0, "words")
    deck = sorted(words.WORDS, key=lambda _: random.random())
    requests, start = [], 0
    for number in (1, 2, 3):
        n = number * words_step
        text = " ".join(deck[(start + at) % len(deck)] for at in range(n))
        requests.append(
            Request(
                id=f"calibrate-{number:06d}", cls="calibrate", messages=user(text), max_tokens=1, expect={"words": n}
            )
        )
        start += n
    return requests


def fit(points: Sequence[tuple[int, int]]) -> Line:
    """The line through (words, prompt_tokens), by least squares where the probes do not agree on one of slope 1."""
    if len({k for k, _ in points}) < 2:
        raise ValueError("a line needs probes of at least two lengths")
    mean_k = sum(k for k, _ in points) / len(points)
    mean_tokens = sum(tokens for _, tokens in points) / len(points)
    spread = sum((k - mean_k) ** 2 for k, _ in points)
    slope = sum((k - mean_k) * (tokens - mean_tokens) for k, tokens in points) / spread
    over = [tokens - k for k, tokens in points]
    if len(set(over)) == 1 and over[0] >= 0:
        return Line(over[0], 1.0, exact=True)
    if min(over) < 0:
        why = f"the server counts {-min(over)} tokens fewer than words sent: its usage leaves part of the prompt out"
    else:
        most = max(over) - min(over)
        why = f"one word is {slope:.4f} tokens, not 1: lengths are off by up to {most} in {max(points)[0]}"
    return Line(max(0, round(mean_tokens - slope * mean_k)), slope, exact=False, why=why)


def frame_tokens(measured: Sequence[tuple[Request, int]]) -> tuple[int, int]:
    """From frame probes and the `prompt_tokens` that the server counted for each: the frame, and by how many tokens
    the probes disagree (0 on a server where every prompt will be exact). The largest is taken: never too long."""
    frames = [tokens - int(probe.expect["words"]) for probe, tokens in measured]
    return max(frames), max(frames) - min(frames)
