"""Every `sse` and `http` situation from public bug reports (`data/cases`), played on loopback and read by the probe."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvloop

from loadgen import preflight, scenario
from loadgen.client import Client
from loadgen.dialects import openai_chat
from loadgen.probe import probe
from loadgen.types import Limits, Seconds, Target, UserError
from tests.scripted import Scripted, serve

CASES = {
    case["id"]: case
    for name in ("sse", "http")
    for case in map(json.loads, (Path(__file__).parent / f"data/cases/{name}.jsonl").read_text("utf-8").splitlines())
}
LIMITS = {"idle_timeout_s": "idle_timeout", "first_byte_timeout_s": "header_timeout"}
# A time is never earlier than scripted, but for a timer's millisecond; how late depends on who else is busy here.
EARLY_MS, LATE_FACTOR, LATE_MS = 12, 3, 1500


async def _play(case: dict[str, Any]) -> tuple[list[dict[str, Any]], Scripted]:
    expect = case["expect"]
    asked = expect.get("request", {})
    settings = {LIMITS[name]: Seconds(value) for name, value in expect.get("client_settings", {}).items()}
    at_once = expect.get("parallel_requests", 1)
    loading = expect.get("loading_responses", 0)
    async with serve(case["input"]["play"]) as server:
        answers = probe(
            Target(url=server.url),
            Limits(**settings),
            headers={},
            model="test-model",
            prompt="Say hello.",
            max_tokens=asked.get("max_tokens", 64),
            ignore_eos=asked.get("ignore_eos", False),
            requests=max(expect.get("requests", 1), at_once, loading + 1),
            concurrency=at_once,
        )
        return [answer async for answer in answers], server


@functools.cache
def played() -> dict[str, tuple[list[dict[str, Any]], Scripted]]:
    """All cases at once: most of their time is waiting."""

    async def everything() -> list[tuple[list[dict[str, Any]], Scripted]]:
        return await asyncio.gather(*map(_play, CASES.values()))

    return dict(zip(CASES, uvloop.run(everything()), strict=True))


def _compare(answer: dict[str, Any], expect: dict[str, Any]) -> None:
    """One answer against `expect`, through the words of outcomes in `loadgen/dialects/README.md`."""
    known: dict[str, Callable[[Any], bool]] = {
        "outcome": lambda want: answer["outcome"] == ("ok" if want == "ok_flagged" else want),
        "text_length": lambda want: len(answer["text"]) == want,
        "partial_text": lambda want: answer["text"] == want,
        "partial_output_tokens": lambda want: answer["output_tokens"] == want,
        "error_message_contains": lambda want: want in answer["error_message"],
        "limit_tokens": lambda want: str(want) in answer["error_message"],
        "tokens_per_chunk": lambda want: answer["output_tokens"] / answer["chunks"] == want,
        "malformed_events": lambda want: ("malformed_events" in answer["flags"]) == bool(want),
        "flags": lambda want: set(want) <= set(answer["flags"]) if want else answer["flags"] == [],
        "output_tokens": lambda want: (
            (answer["output_tokens"], answer["output_tokens_source"]) == (want["value"], want["source"])
        ),
    }
    for key, want in expect.items():
        if key in known:
            assert known[key](want), (key, want, answer)
        elif key.endswith("_ms") and isinstance(want, dict) and key != "gap_between_requests_ms":
            got = answer[{"ttft_answer_ms": "ttfo_ms"}.get(key, key)]
            early = want["min"] / LATE_FACTOR if key == "tpot_ms" else want["min"] - EARLY_MS
            assert early <= got <= want["max"] * LATE_FACTOR + LATE_MS, (key, want, got)
        elif key in answer:
            assert answer[key] == want, (key, want, answer)


@pytest.mark.parametrize("name", CASES)
def test_case_is_reported_as_it_was(name: str) -> None:
    answers, server = played()[name]
    expect = CASES[name]["expect"]
    results = expect.get("results")
    if results is not None:
        assert len(answers) == len(results)
        for answer, want in zip(answers, results, strict=True):
            _compare(answer, want)
    elif name == "http-503-loading-then-ok":  # waiting until it is ready is preflight's part; here: what it is told
        assert [(answer["http_status"], answer["error_class"]) for answer in answers[:3]] == [(503, "http_error")] * 3
        _compare(answers[3], expect)
    else:
        for answer in answers:
            _compare(answer, expect)
    if "connections_opened" in expect:
        assert server.connections == expect["connections_opened"]
        assert all(answer["outcome"] == "ok" for answer in answers)
    if "gap_between_requests_ms" in expect:
        assert server.times_ms[1] - server.times_ms[0] >= expect["gap_between_requests_ms"]["min"]


def _examined(name: str, model: str | None) -> tuple[preflight.Preflight | UserError, Scripted]:
    """What preflight makes of a case's server, and what the server saw."""

    async def examine() -> tuple[preflight.Preflight | UserError, Scripted]:
        async with serve(CASES[name]["input"]["play"]) as server:
            target = Target(url=server.url, model=model)
            scene = replace(scenario.load("smoke"), target=target)

            def connect(target: Target, model: str) -> Client:
                return Client(target, Limits(), openai_chat, model=model, headers={}, connections=1)

            try:
                return await preflight.examine(scene, connect, wait_s=10, busy_ok=True, say=lambda text: None), server
            except UserError as error:
                return error, server

    return uvloop.run(examine())


def test_loading_server_is_waited_for_before_anything_is_measured() -> None:
    found, server = _examined("http-503-loading-then-ok", "test-model")
    assert isinstance(found, preflight.Preflight)
    attempts = CASES["http-503-loading-then-ok"]["expect"]["readiness_attempts_min"]
    assert server.paths[:attempts] == ["/v1/models"] * attempts
    gaps = [later - earlier for earlier, later in pairwise(server.times_ms[:attempts])]
    assert min(gaps) >= 900, "a server that loads is not hammered"


@pytest.mark.parametrize("model", [None, "test-model"])
def test_web_page_in_place_of_a_server_fails_at_once_as_a_mistake_of_the_address(model: str | None) -> None:
    found, server = _examined("http-health-200-html", model)
    assert isinstance(found, UserError)
    assert found.exit_code == 3
    assert "text/html" in str(found)
    assert "<!DOCTYPE html>" in str(found)
    assert set(server.paths).isdisjoint({"/health"})
    assert server.paths.count("/v1/chat/completions") <= 1
