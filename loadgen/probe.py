"""A few requests and what each of them looked like: `loadgen probe`, and the form in which its JSON says so.

What each field means stands in `dialects/README.md`; names and order are a promise to scripts.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from loadgen import plugins
from loadgen.client import Client
from loadgen.clock import now_ns
from loadgen.dialects import Dialect, one_line
from loadgen.preflight import RUNNING
from loadgen.types import Limits, Outcome, Request, Target, UserError

# A server may ask for an hour; a probe is there to tell, so it waits this long at most (as a seat of a run does).
MAX_RETRY_AFTER_S = 60.0
# From here on, the words of a prompt are a lower bound of its tokens that is worth comparing with `usage`.
LONG_PROMPT_WORDS = 64
# After a cut: how long and how often the server's gauge is watched. Engines notice within a step, proxies in seconds.
CANCEL_SEEN_S, GAUGE_EVERY_S = 30.0, 0.01


async def probe(
    target: Target,
    limits: Limits,
    *,
    headers: Mapping[str, str],
    model: str | None,
    prompt: str,
    max_tokens: int,
    ignore_eos: bool,
    requests: int,
    concurrency: int,
) -> AsyncIterator[dict[str, Any]]:
    """`describe` of each outcome as it ends. Without a model the server chooses; one that insists on one is asked for
    the first of its list."""
    dialect = cast(Dialect, plugins.load("dialects", target.dialect))
    seats = max(1, min(concurrency, requests))
    client = Client(target, limits, dialect, model=model or "", headers=headers, connections=seats)
    results: asyncio.Queue[Outcome | BaseException] = asyncio.Queue(maxsize=seats)
    numbers = iter(range(requests))
    words = len(prompt.split())
    aimed = words if words >= LONG_PROMPT_WORDS else None
    chosen = model or ""

    async def ask(number: int, seat: int) -> Outcome:
        message = {"role": "user", "content": prompt}
        request = Request(
            f"probe-{number:06d}", "probe", [message], max_tokens, ignore_eos=ignore_eos, prompt_tokens=aimed,
            phase="probe", seat=seat, due_ns=now_ns(),
        )  # fmt: skip
        return await client.send(request, dialect.encode(request, chosen, target.extra_body))

    async def seat(index: int) -> None:
        nonlocal chosen
        try:
            for number in numbers:
                outcome = await ask(number, index)
                if not chosen and _wants_model(outcome):
                    chosen = await _first_model(client)
                    if chosen:
                        outcome = await ask(number, index)
                await results.put(outcome)
                if outcome.error_class == "rate_limited" and outcome.retry_after_s:
                    await asyncio.sleep(min(outcome.retry_after_s, MAX_RETRY_AFTER_S))
        except Exception as error:
            await results.put(error)

    tasks = [asyncio.create_task(seat(index)) for index in range(seats)]
    try:
        for _ in range(requests):
            result = await results.get()
            if isinstance(result, BaseException):
                raise result
            yield describe(result)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()


async def cancel(
    target: Target,
    limits: Limits,
    *,
    headers: Mapping[str, str],
    model: str | None,
    prompt: str,
    max_tokens: int,
    after_s: float,
) -> dict[str, Any]:
    """Cut one request `after_s` after it was begun, by closing its connection, and watch the server's gauge of running
    requests. `cancel_seen_ms`: until it had fallen to what it was before; None: not within CANCEL_SEEN_S. Raises
    UserError where there is nothing to see: no gauge, or the answer ended first."""
    dialect = cast(Dialect, plugins.load("dialects", target.dialect))
    client = Client(target, limits, dialect, model=model or "", headers=headers, connections=2)

    async def running() -> float:
        found = RUNNING.findall(await client.get_text("/metrics"))
        if not found:
            raise UserError(f"{target.url} /metrics: no gauge of running requests, so a cut cannot be seen")
        return sum(map(float, found))

    try:
        before = await running()
        chosen = model or await _first_model(client)
        message = {"role": "user", "content": prompt}
        request = Request("cut", "probe", [message], max_tokens, ignore_eos=True, phase="probe", due_ns=now_ns())
        asking = asyncio.create_task(client.send(request, dialect.encode(request, chosen, target.extra_body)))
        done, _ = await asyncio.wait({asking}, timeout=after_s)
        during = await running()
        if done or asking.done():
            outcome = asking.result()
            why = outcome.error_message or "more --max-tokens, or an earlier cut"
            raise UserError(f"the request ended before it could be cut: {outcome.outcome} ({why})")
        cut_ns = now_ns()
        asking.cancel()
        await asyncio.wait({asking})
        seen_ms = None
        while seen_ms is None and now_ns() - cut_ns < CANCEL_SEEN_S * 1e9:
            if await running() <= before:
                seen_ms = (now_ns() - cut_ns) / 1e6
            else:
                await asyncio.sleep(GAUGE_EVERY_S)
        return {
            "cancel_seen_ms": None if seen_ms is None else round(seen_ms, 3),
            "running_before": before,
            "running_during": during,
        }
    finally:
        await client.close()


def _wants_model(outcome: Outcome) -> bool:
    refused = outcome.error_class == "http_error" and outcome.http_status in (400, 404, 422)
    return refused and re.search(r"\bmodel\b", outcome.error_message or "", re.IGNORECASE) is not None


async def _first_model(client: Client) -> str:
    try:
        answer = await client.get_json("/v1/models")
        return str(answer["data"][0]["id"])
    except (UserError, LookupError, TypeError):
        return ""


def describe(outcome: Outcome) -> dict[str, Any]:
    """One outcome as `probe --json` prints it: stable names in a stable order, times in ms from `sent`."""
    sent = outcome.sent_ns

    def since_sent(at_ns: int | None) -> float | None:
        return None if at_ns is None or sent is None else _ms(at_ns - sent)

    failed = outcome.outcome != "ok"
    return {
        "outcome": outcome.outcome,
        "error_class": outcome.error_class,
        "error_message": outcome.error_message,
        "flags": sorted(outcome.flags),
        "http_status": outcome.http_status,
        "retry_after_s": outcome.retry_after_s,
        "finish_reason": outcome.finish_reason,
        "text": outcome.text,
        "reasoning_text": outcome.reasoning_text,
        "tool_calls": [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in outcome.tool_calls],
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": outcome.output_tokens,
        "output_tokens_source": outcome.output_tokens_source,
        "reasoning_tokens": outcome.reasoning_tokens,
        "connect_ms": _ms(outcome.connect_ns),
        "ttft_ms": _ms(outcome.ttft_ns),
        "ttfo_ms": _ms(outcome.ttfo_ns),
        "last_token_ms": since_sent(outcome.last_ns),
        "stream_end_ms": None if failed else since_sent(outcome.done_ns),
        "tpot_ms": _ms(outcome.tpot_ns),
        "fails_at_ms": since_sent(outcome.done_ns) if failed else None,
        "chunks": outcome.chunks,
    }


def sentence(answer: dict[str, Any]) -> str:
    """One `describe` as a line for people."""
    said = f", flags {' '.join(answer['flags'])}" if answer["flags"] else ""
    if answer["outcome"] != "ok":
        after = "" if answer["fails_at_ms"] is None else f" after {answer['fails_at_ms']:.0f} ms"
        return f"{answer['outcome']}: {answer['error_class']}{after}: {answer['error_message']}{said}"
    times = [
        f"{name} {answer[key]:.1f} ms"
        for name, key in (("first token", "ttft_ms"), ("per token", "tpot_ms"), ("total", "stream_end_ms"))
        if answer[key] is not None
    ]
    asked = answer["prompt_tokens"] if answer["prompt_tokens"] is not None else "unknown"
    tokens = f"{answer['output_tokens']} tokens ({answer['output_tokens_source']}) for {asked} prompt tokens"
    text = one_line(answer["text"] or answer["reasoning_text"])
    return f"ok: {tokens}, {', '.join(times)}, finish {answer['finish_reason']}{said}: {text!r}"


def _ms(ns: float | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 3)
