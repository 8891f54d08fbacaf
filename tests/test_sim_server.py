"""The simulated server over a real connection: vLLM's shapes, true times, real memory, and every fault."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from loadgen import clock
from loadgen.sim import config, faults
from loadgen.sim.config import GIB, MIB, Machine
from loadgen.sim.hostroot import FixtureMachine
from loadgen.sim.memory import Ballast, cgroup_limit_bytes
from loadgen.sim.model import MemoryConfig
from loadgen.sim.server import Server, Settings
from loadgen.types import Seconds, UserError

PATIENCE_S = 20.0  # far more than anything takes; a noisy box must not fail a test

TINY = config.load_preset("tiny")
FAST = replace(
    TINY,
    time_scale=10.0,
    engine=replace(TINY.engine, memory=MemoryConfig(weights_bytes=MIB), spec_acceptance=(0.8, 0.6)),
)

Case = Callable[["Client"], Awaitable[None]]


class Client:
    """A connection to a server in this process, and the server itself."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, url: str) -> None:
        self.server = server
        self.session = session
        self.url = url

    async def ask(self, text: str = "Say hi.", path: str = "/v1/chat/completions", **more: Any) -> tuple[int, Any]:
        """Status and JSON body of an answer that does not stream."""
        chat = path == "/v1/chat/completions"
        asked: Any = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        async with self.session.post(self.url + path, json={**asked, "max_tokens": 32, **more}) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, text: str = "Say hi.", **more: Any) -> list[Any]:
        """The events of a stream: parsed, `[DONE]` as it is; "cut" at the end where the connection broke."""
        asked = {
            "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 32,
            "stream_options": {"include_usage": True}, **more,
        }  # fmt: skip
        body = b""
        events: list[Any] = []
        async with self.session.post(f"{self.url}/v1/chat/completions", json=asked) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            try:
                async for data in response.content.iter_any():
                    body += data
            except aiohttp.ClientError:
                events = ["cut"]
        lines = [part.removeprefix("data: ") for part in body.decode().split("\n\n") if part]
        return [line if line == "[DONE]" else json.loads(line) for line in lines] + events

    async def fault(self, **entry: Any) -> tuple[int, Any]:
        before = len(self.server.fired)
        async with self.session.post(f"{self.url}/sim/fault", json=entry) as response:
            told = response.status, json.loads(await response.read())
        if response.status == 200:
            await self.until(lambda: len(self.server.fired) > before)  # it happens just after the answer
        return told

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - what is waited for is the state of a server, not of this test
                await asyncio.sleep(0.005)


def serve(case: Case, **settings: Any) -> None:
    """Run a case against a server of its own."""
    settings.setdefault("preset", FAST)

    @contextlib.asynccontextmanager
    async def serving() -> AsyncIterator[Client]:
        server = Server(Settings(**settings))
        runner = web.AppRunner(server.app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        try:
            server.start()
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            async with aiohttp.ClientSession() as session:
                yield Client(server, session, f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            server.close()
            await runner.cleanup()

    async def run() -> None:
        async with asyncio.timeout(3 * PATIENCE_S), serving() as client:
            await case(client)

    asyncio.run(run())


def truth(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def requests(path: Path) -> list[Any]:
    return [record for record in truth(path) if record.get("event") == "request"]


def content(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in events
        if isinstance(event, dict)
        for choice in event.get("choices", [])
    )


# -- shapes


def test_a_stream_has_the_shape_of_vllm() -> None:
    async def case(client: Client) -> None:
        events = await client.stream("What is 20 + 3? Answer with the integer only.")
        role, last, usage, done = events
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert last["choices"][0]["delta"] == {"content": "23"}
        assert last["choices"][0]["finish_reason"] == "stop"
        assert role["object"] == last["object"] == "chat.completion.chunk"
        assert role["id"] == last["id"] == usage["id"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 1
        assert done == "[DONE]"
        status, whole = await client.ask("What is 20 + 3? Answer with the integer only.")
        assert status == 200
        assert whole["choices"][0]["message"]["content"] == "23"
        assert whole["usage"]["prompt_tokens"] == usage["usage"]["prompt_tokens"]

    serve(case)


def test_reasoning_comes_before_the_answer_and_can_be_turned_off() -> None:
    async def case(client: Client) -> None:
        events = await client.stream("What is 2 + 2? Answer with the integer only.")
        kinds = [next(iter(choice["delta"])) for event in events[:-2] for choice in event["choices"]]
        assert kinds == sorted(kinds, key=["role", "reasoning", "content"].index)
        assert events[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
        assert content(events) == "4"
        off = await client.stream(
            "What is 2 + 2? Answer with the integer only.", chat_template_kwargs={"enable_thinking": False}
        )
        assert off[-2]["usage"]["completion_tokens"] == 1

    serve(case, preset=replace(FAST, reasoning_tokens=12))


def test_streamed_tokens_are_billed_tokens_and_speculation_packs_them() -> None:
    async def case(client: Client) -> None:
        events = await client.stream("Tell me a story.", max_tokens=90, ignore_eos=True)
        usage = events[-2]["usage"]
        assert usage["completion_tokens"] == 90
        assert events[-3]["choices"][0]["finish_reason"] == "length"
        assert 1 < len(events) - 3 < 90
        status, counted = await client.ask(path="/tokenize", prompt=content(events))
        assert (status, counted["count"]) == (200, 90)

    async def with_running_usage(client: Client) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await client.stream("Tell me a story.", max_tokens=20, ignore_eos=True, stream_options=options)
        told = [event["usage"]["completion_tokens"] for event in events[1:-1]]
        assert told == sorted(told)
        assert told[-1] == 20

    serve(case)
    serve(with_running_usage)


def test_completions_and_tool_calls() -> None:
    tool = {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"properties": {"n": {"type": "integer"}}}},
    }

    async def case(client: Client) -> None:
        status, whole = await client.ask("What is 3 * 3?", path="/v1/completions")
        assert (status, whole["choices"][0]["text"], whole["object"]) == (200, "9", "text_completion")
        events = await client.stream("Look up n = 12.", tools=[tool], tool_choice="required")
        deltas = [choice["delta"] for event in events[:-2] for choice in event["choices"]]
        assert deltas[1]["tool_calls"][0]["function"] == {"name": "look_up"}
        arguments = "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[2:])
        assert json.loads(arguments) == {"n": 12}
        assert events[-3]["choices"][0]["finish_reason"] == "tool_calls"
        status, whole = await client.ask("Look up n = 12.", tools=[tool], tool_choice="required")
        assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look_up"

    serve(case)


def test_refusals_have_the_words_of_vllm() -> None:
    async def case(client: Client) -> None:
        long = "word " * 40_000
        status, body = await client.ask(long, max_tokens=1)
        assert status == 400
        assert body["error"] == {
            "message": "This model's maximum context length is 32768 tokens. However, your prompt contains at least "
            "40010 input tokens, which exceeds this limit even without any output tokens. Please reduce the length of "
            "the input prompt. (parameter=input_tokens, value=40010)",
            "type": "BadRequestError", "param": "input_tokens", "code": 400,
        }  # fmt: skip
        status, body = await client.ask("word " * 32_700, max_tokens=100)
        assert (status, body["error"]["param"]) == (400, "input_tokens")
        assert "you requested 100 output tokens" in body["error"]["message"]
        status, body = await client.ask(model="gpt")
        assert (status, body["error"]["type"]) == (404, "NotFoundError")
        assert body["error"]["message"] == "The model `gpt` does not exist. Valid aliases: sim-tiny."
        for wrong, param in (({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10**7}, "max_tokens"),
                             ({"temperature": -3}, "temperature"), ({"messages": []}, "body.messages")):  # fmt: skip
            status, body = await client.ask(**wrong)
            assert (status, body["error"]["param"]) == (400, param)
        image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
        status, body = await client.ask(messages=[{"role": "user", "content": image}])
        assert (status, body["error"]["message"]) == (400, "sim-tiny is not a multimodal model")
        async with client.session.post(f"{client.url}/v1/chat/completions", data=b'{"model": ') as response:
            assert response.status == 400
        assert (await client.get("/v1/nothing")) == (404, '{"detail": "Not Found"}')

    serve(case)


def test_what_is_no_request_is_refused_and_not_a_crash() -> None:
    async def case(client: Client) -> None:
        mistakes: tuple[Any, ...] = (
            {"messages": "hi"}, {"messages": ["hi"]}, {"messages": [{"role": "user", "content": 5}]},
            {"messages": [{"role": "user", "content": ["x"]}]}, {"stream_options": 3}, {"tools": {}}, {"tools": [3]},
            {"tools": [{"function": {"name": "f", "parameters": {"properties": [1]}}}]}, {"temperature": "hot"},
            {"max_tokens": "x"}, {"min_tokens": "x"}, {"chat_template_kwargs": []}, {"n": 3}, {"stream": "yes"},
            {"tool_choice": 4},
        )  # fmt: skip
        for wrong in mistakes:
            status, body = await client.ask(**wrong)
            assert status == 400, wrong
            assert "error" in body

    serve(case)


def test_a_key_is_asked_for_only_where_one_is_set() -> None:
    async def case(client: Client) -> None:
        status, body = await client.ask()
        assert (status, body) == (401, {"error": "Unauthorized"})
        assert (await client.get("/health"))[0] == 200
        client.session.headers["Authorization"] = "Bearer hidden"
        assert (await client.ask())[0] == 200

    serve(case, api_key="hidden")


def test_context_and_scales_stand_where_they_are_looked_for() -> None:
    async def case(client: Client) -> None:
        models = json.loads((await client.get("/v1/models"))[1])
        assert models["data"][0]["id"] == "sim-tiny"
        assert models["data"][0]["max_model_len"] == 32768
        version = json.loads((await client.get("/version"))[1])
        told = json.loads((await client.get("/sim/truth"))[1])
        assert version["simulated"] == {"preset": "tiny", "time_scale": 10.0, "memory_scale": 1.0, "seed": 7}
        assert version["simulated"].items() <= told.items()
        async with client.session.get(f"{client.url}/health") as response:
            assert response.headers["X-Sim-Preset"] == "tiny"
            assert response.headers["X-Sim-Time-Scale"] == "10"
            assert response.headers["X-Sim-Memory-Scale"] == "1"

    serve(case, seed=7)


def test_a_repeated_prompt_is_reported_as_cached() -> None:
    async def case(client: Client) -> None:
        text = "river " * 500
        first = await client.stream(text)
        again = await client.stream(text)
        cached = [events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] for events in (first, again)]
        assert cached == [0, 496]

    serve(case)


def test_metrics_have_the_names_of_vllm_and_add_up() -> None:
    async def case(client: Client) -> None:
        for _ in range(3):
            await client.stream("Tell me a story.", max_tokens=40, ignore_eos=True)
        page = (await client.get("/metrics"))[1]
        families = {family.name: family for family in text_string_to_metric_families(page)}

        def value(name: str, family: str | None = None) -> float:
            return next(s.value for s in families[family or name].samples if s.name == name)

        assert value("vllm:num_requests_running") == 0
        assert value("vllm:num_requests_waiting") == 0
        assert value("vllm:kv_cache_usage_perc") == 0
        assert value("vllm:generation_tokens_total", "vllm:generation_tokens") == 120
        assert value("vllm:prompt_tokens_total", "vllm:prompt_tokens") == 3 * 15
        assert value("vllm:time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds") == 3
        assert value("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens") > 0
        assert {"vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:request_success",
                "vllm:e2e_request_latency_seconds", "vllm:inter_token_latency_seconds"} <= families.keys()  # fmt: skip
        labels = families["vllm:cache_config_info"].samples[0].labels
        assert labels["block_size"] == "16"
        assert labels["kv_cache_size_tokens"] == "131072"

    serve(case)


# -- truth


def test_the_truth_log_brackets_what_a_client_sees(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"

    async def case(client: Client) -> None:
        before_ns = clock.now_ns()
        events = await client.stream("Tell me a story.", max_tokens=50, ignore_eos=True)
        after_ns = clock.now_ns()
        (record,) = requests(path)
        times = [before_ns, record["received_ns"], record["submitted_ns"], *record["chunks_ns"], after_ns]
        assert times == sorted(times)
        assert record["request_id"] == events[0]["id"]
        assert (record["first_ns"], record["last_ns"]) == (record["chunks_ns"][0], record["chunks_ns"][-1])
        assert sum(record["chunk_tokens"]) == record["output_tokens"] == 50
        assert record["ending"] == "finished"

    serve(case, truth=path)
    assert truth(path)[0]["schema"] == "loadgen.sim.truth/1"
    assert truth(path)[0]["preset"] == "tiny"


def test_a_client_that_goes_away_frees_its_place(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"

    async def case(client: Client) -> None:
        asked = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 30_000, "ignore_eos": True}
        async with client.session.post(f"{client.url}/v1/chat/completions", json={**asked, "stream": True}) as response:
            await response.content.readany()
            response.close()
        await client.until(lambda: client.server.engine.counters.cancelled == 1)
        assert not client.server.engine.running
        await client.until(lambda: [record["ending"] for record in requests(path)] == ["cancelled"])

    serve(case, truth=path)


def test_more_requests_than_seats_wait_and_all_are_answered() -> None:
    async def case(client: Client) -> None:
        answers = await asyncio.gather(*(client.stream(f"What is {n} + 1?") for n in range(30)))
        assert [content(events) for events in answers] == [str(n + 1) for n in range(30)]
        assert client.server.engine.counters.finished == 30

    serve(case)


# -- faults


def test_an_unknown_fault_is_one_clear_line() -> None:
    async def case(client: Client) -> None:
        status, body = await client.fault(kind="stal")
        assert (status, body) == (400, {"error": 'fault: unknown kind "stal"; did you mean "stall"?'})
        assert (await client.fault(kind="wedge"))[0] == 400

    serve(case)


def test_hang_answers_health_and_nothing_else() -> None:
    async def case(client: Client) -> None:
        await client.fault(kind="hang")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.stream()
        assert (await client.get("/health"))[0] == 200

    serve(case)


def test_stall_pauses_all_streams_once(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"

    async def case(client: Client) -> None:
        running = [asyncio.ensure_future(client.stream("go", max_tokens=400, ignore_eos=True)) for _ in range(2)]
        await client.until(lambda: client.server.engine.counters.generation_tokens > 40)
        await client.fault(kind="stall", duration="4s")  # 0.4 s at this time scale
        await asyncio.gather(*running)

    serve(case, truth=path)
    for record in requests(path):
        at = record["chunks_ns"]
        assert max(after - before for before, after in pairwise(at)) > 350e6
    assert [event["kind"] for event in truth(path) if event.get("event") == "fault"] == ["stall"]


def test_slow_down_and_leak_change_the_engine() -> None:
    async def case(client: Client) -> None:
        await client.fault(kind="slow_down", factor=3)
        assert client.server.engine.slow_factor == 3
        await client.fault(kind="slow_down", factor=2, duration="1s")
        await client.until(lambda: client.server.engine.slow_factor == 1)
        await client.fault(kind="leak", bytes_per_request=3 * MIB)
        held = client.server.held_bytes
        for _ in range(4):
            await client.ask()
        await client.until(lambda: client.server.held_bytes == held + 12 * MIB)

    serve(case)


def test_unavailable_says_when_to_come_back_or_not() -> None:
    async def case(client: Client) -> None:
        await client.fault(kind="unavailable", requests=2, retry_after="30s")
        async with client.session.post(f"{client.url}/v1/chat/completions", json={}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "3")
        assert (await client.ask())[0] == 503
        assert (await client.ask())[0] == 200
        await client.fault(kind="unavailable", requests=1, status=429)
        async with client.session.post(f"{client.url}/v1/chat/completions", json={}) as response:
            assert response.status == 429
            assert "Retry-After" not in response.headers

    serve(case)


def test_an_error_inside_a_stream_comes_with_status_200(tmp_path: Path) -> None:
    async def case(client: Client) -> None:
        await client.fault(kind="stream_error", after_tokens=5)
        events = await client.stream("Tell me a story.", ignore_eos=True)
        assert "EngineCore encountered an issue" in events[-2]["error"]["message"]
        assert events[-1] == "[DONE]"
        assert content(events)
        assert content(await client.stream("What is 1 + 1?")) == "2"

    serve(case, truth=tmp_path / "truth.jsonl")
    assert [record["ending"] for record in requests(tmp_path / "truth.jsonl")] == ["stream_error", "finished"]


@pytest.mark.parametrize("clean", [False, True])
def test_a_truncated_stream_has_no_end(clean: bool) -> None:
    async def case(client: Client) -> None:
        await client.fault(kind="truncate", after_tokens=5, clean=clean)
        events = await client.stream("Tell me a story.", ignore_eos=True)
        assert "[DONE]" not in events
        assert (events[-1] == "cut") is not clean
        assert content(events)
        await client.fault(kind="truncate", after_tokens=500, clean=clean)  # longer than the answer: cut before its end
        assert "[DONE]" not in await client.stream("Tell me a story.", ignore_eos=True)

    serve(case)


def test_corruption_hits_as_many_requests_as_told_and_is_in_the_truth(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"

    async def case(client: Client) -> None:
        question = "What is 20 + 3? Answer with the integer only."
        for how in ("exclaim", "wrong_answer", "swapped", "reasoning_only", "empty"):
            await client.ask("What is 1 + 1?")
            await client.fault(kind="corrupt", how=how, requests=1)
            status, spoilt = await client.ask(question)
            assert (status, spoilt["choices"][0]["message"]["content"] == "23") == (200, False)
            assert (await client.ask(question))[1]["choices"][0]["message"]["content"] == "23"

    serve(case, truth=path)
    marks = [record["corrupted"] for record in requests(path) if "corrupted" in record]
    assert marks == ["exclaim", "wrong_answer", "swapped", "reasoning_only", "empty"]


def test_oom_takes_real_memory_in_steps_beyond_the_limit_of_claims() -> None:
    async def case(client: Client) -> None:
        await client.fault(kind="oom", step_mib=4, period="0.1s", up_to_mib=20)
        await client.until(lambda: client.server.held_bytes == 21 * MIB)

    serve(case, preset=replace(FAST, memory_limit_mib=2))


def test_a_script_fires_by_time_and_by_count_and_not_what_a_former_life_has_seen() -> None:
    script = (
        faults.Fault(faults.SlowDown(2.0), at_s=0.5),
        faults.Fault(faults.Leak(77), after_requests=2),
        faults.Fault(faults.Unavailable(), at_s=0.0),
    )

    async def case(client: Client) -> None:
        await client.until(lambda: client.server.engine.slow_factor == 2.0)
        assert (await client.ask())[0] == 200
        assert client.server.engine.leak_bytes_per_request == 0
        assert (await client.ask())[0] == 200
        await client.until(lambda: client.server.engine.leak_bytes_per_request == 77)

    serve(case, faults=script, fired=frozenset({2}))


# -- the process


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A server as its own process: it, its port, and the pid that serves."""
    command = [sys.executable, "-m", "loadgen.sim", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port, pid = _ready(process.stdout.readline())
        yield process, port, pid
    finally:
        process.terminate()
        try:
            process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


def _ready(line: str) -> tuple[int, int]:
    assert line.startswith("listening on http://127.0.0.1:"), line
    port, _, pid = line.removeprefix("listening on http://127.0.0.1:").partition(" (pid ")
    return int(port), int(pid.rstrip(")\n"))


def _post(port: int, path: str, asked: Any) -> Any:
    async def post() -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{port}{path}", json=asked) as response,
        ):
            return json.loads(await response.read())

    return asyncio.run(post())


def _rss_anon_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def test_claimed_memory_is_real_and_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    preset = tmp_path / "greedy.yaml"
    preset.write_text(
        "time_scale: 20\nmemory_scale: 0.5\nengine:\n  memory:\n    weights_bytes: 33554432\n    kv_reserved: false\n"
        "    kv_bytes_per_token: 20000\n    leak_bytes_per_request: 20971520\n"
    )
    with child("--preset", str(preset)) as (process, port, pid):
        assert pid == process.pid
        loaded = _rss_anon_mib(pid)
        text = "river " * 2000
        for _ in range(2):
            _post(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 2})
        grown = 0.0
        claimed = (2000 * 20_000 + 2 * 20 * MIB) * 0.5 / MIB
        for _ in range(200):
            grown = _rss_anon_mib(pid) - loaded
            if grown > 0.9 * claimed:
                break
            process.poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        assert grown == pytest.approx(claimed, rel=0.15)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_supervised_server_comes_back_on_its_port_with_another_pid(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"
    with child("--supervised", "--truth", str(path), "--time-scale", "10") as (process, port, pid):
        assert process.stdout is not None
        pids = [process.pid, pid]
        for kind in ("crash", "restart"):
            _post(port, "/sim/fault", {"kind": kind, "restart_after": "1s"})
            again, other = _ready(process.stdout.readline())
            assert again == port
            pids.append(other)
        assert len(set(pids)) == 4
        assert _post(port, "/tokenize", {"prompt": "still here"})["count"] == 2
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert [record["pid"] for record in truth(path) if "schema" in record] == pids[1:]
    assert [record["kind"] for record in truth(path) if record.get("event") == "fault"] == ["crash", "restart"]


def test_an_unsupervised_crash_is_a_kill() -> None:
    with child() as (process, port, _):
        _post(port, "/sim/fault", {"kind": "crash"})
        assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_port_that_is_taken_is_one_line_and_exit_3() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "loadgen.sim", "--port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 3
    assert len(ended.stderr.splitlines()) == 1
    assert "choose another --port" in ended.stderr


def test_bad_options_are_one_line_and_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from loadgen.sim.__main__ import main

    for arguments, complaint in (
        (["--preset", "tinny"], "did you mean"),
        (["--time-scale", "0"], "--time-scale"),
        (["--api-key-env", "NOT_SET_ANYWHERE"], "no such variable"),
        (["--port", "70000"], "0 to 65535"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--port", "0", "--truth", str(tmp_path / "no/such/folder")], "cannot be written"),
        (["--port", "0", "--host-root", "/dev/null/x"], "--host-root /dev/null/x"),
    ):
        with pytest.raises(UserError, match=complaint):
            main(arguments)
    with pytest.raises(SystemExit) as left:
        main(["--nonsense"])
    assert left.value.code == 3
    assert "--nonsense" in capsys.readouterr().err


# -- memory and machine


def test_ballast_grows_and_shrinks_in_real_pages() -> None:
    ballast = Ballast()
    before = _rss_anon_mib(os.getpid())
    ballast.settle(40 * MIB)
    full = _rss_anon_mib(os.getpid())
    ballast.settle(8 * MIB)
    less = _rss_anon_mib(os.getpid())
    ballast.close()
    assert full - before == pytest.approx(40, abs=4)
    assert full - less == pytest.approx(32, abs=4)


def test_a_step_of_memory_is_bounded() -> None:
    ballast = Ballast()
    assert not ballast.step_towards(40 * MIB)
    assert ballast.held_bytes == 16 * MIB
    ballast.close()


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/user/box\n", {"user/memory.max": "1048576", "user/box/memory.max": "max"}, 1048576),
        ("5:memory:/box\n0::/\n", {"memory/box/memory.limit_in_bytes": "2097152"}, 2097152),
        ("5:memory:/box\n", {"memory/box/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/box\n", {"box/memory.max": "max"}, None),
        ("", {}, None),
    ],
)
def test_the_limit_of_a_memory_cgroup_is_found(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16384 kB\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cgroup_limit_bytes(tmp_path) == limit


def meminfo(root: Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def kmsg(root: Path) -> list[tuple[int, int, str]]:
    """Facility and level in one number, sequence, text."""
    records = (root / "dev/kmsg").read_text().splitlines()
    heads = [record.split(";", 1)[0].split(",") for record in records]
    return [(int(h[0]), int(h[1]), r.split(";", 1)[1]) for h, r in zip(heads, records, strict=True)]


def test_the_fixture_machine_follows_the_claims(tmp_path: Path) -> None:
    machine = FixtureMachine(tmp_path, Machine(), 0)
    machine.update(80 * GIB, 1, 1_000_000_000)
    before = meminfo(tmp_path)
    machine.update(90 * GIB, 4, 2_000_000_000)
    after = meminfo(tmp_path)
    machine.close()
    assert before["MemFree"] - after["MemFree"] == 10 * GIB
    assert before["MemAvailable"] - after["MemAvailable"] == 10 * GIB
    assert before["AnonPages"] == after["AnonPages"]  # a driver's pages stand in no counter
    in_counters = ("MemFree", "Active", "Inactive", "Slab", "PageTables", "Unevictable")
    residual = after["MemTotal"] - sum(after[name] for name in in_counters)
    assert residual == pytest.approx(90 * GIB, rel=0.03)
    assert after["CmaFree"] <= after["MemFree"]


def test_a_kept_descriptor_always_reads_one_whole_state(tmp_path: Path) -> None:
    machine = FixtureMachine(tmp_path, Machine(), 0)
    machine.update(1 * GIB, 0, 0)
    names = ("meminfo", "vmstat", "buddyinfo", "pressure/memory", "pressure/io", "pressure/cpu")
    kept = {name: os.open(tmp_path / "proc" / name, os.O_RDONLY) for name in names}
    try:
        sizes = {name: os.fstat(fd).st_size for name, fd in kept.items()}
        machine.wedge(9.0, 2.0, 10, 0)
        for tick in range(25):
            machine.update(60 * GIB, 4, tick * 100_000_000)
            for name, fd in kept.items():
                data = os.pread(fd, 65536, 0)
                assert len(data) == sizes[name]
                assert data.endswith(b"\n")
    finally:
        for fd in kept.values():
            os.close(fd)
        machine.close()


def test_a_wedge_collapses_memfree_while_memavailable_stays(tmp_path: Path) -> None:
    machine = FixtureMachine(tmp_path, Machine(), 0)
    machine.update(95 * GIB, 4, 0)
    healthy = meminfo(tmp_path)
    boot_id = (tmp_path / "proc/sys/kernel/random/boot_id").read_text()
    machine.wedge(12.0, 2.0, 40, 0)
    machine.update(95 * GIB, 4, 1_000_000_000)
    halfway = meminfo(tmp_path)
    machine.update(95 * GIB, 4, 2_000_000_000)
    end = meminfo(tmp_path)
    some_us = int((tmp_path / "proc/pressure/memory").read_text().split("total=")[1].split()[0])
    assert "avg10=90.00" in (tmp_path / "proc/pressure/memory").read_text()
    assert healthy["MemFree"] > 10 * GIB
    assert healthy["MemFree"] > halfway["MemFree"] > end["MemFree"]
    assert end["MemFree"] < GIB
    assert 6 * GIB <= end["MemAvailable"] <= 22 * GIB
    assert 1_000_000 < some_us < 2_000_000
    driver = [text for priority, _, text in kmsg(tmp_path) if "NV_ERR_NO_MEMORY" in text and priority < 8]
    assert len(driver) == 40
    assert "oom_kill 0" in (tmp_path / "proc/vmstat").read_text()

    machine.silence(2_100_000_000)
    last = (tmp_path / "proc/meminfo").read_bytes()
    machine.update(10 * GIB, 0, 3_000_000_000)
    assert (tmp_path / "proc/meminfo").read_bytes() == last

    machine.reboot(30_000_000_000)
    assert (tmp_path / "proc/sys/kernel/random/boot_id").read_text() != boot_id
    assert meminfo(tmp_path)["MemFree"] > 80 * GIB
    assert not any("NV_ERR" in text for _, _, text in kmsg(tmp_path))
    assert [sequence for _, sequence, _ in kmsg(tmp_path)] == [0, 1]
    machine.close()


def test_a_machine_survives_its_server(tmp_path: Path) -> None:
    first = FixtureMachine(tmp_path, Machine(), 0)
    first.update(GIB, 0, 1_000_000_000)
    boot_id = (tmp_path / "proc/sys/kernel/random/boot_id").read_text()
    first.close()
    again = FixtureMachine(tmp_path, Machine(), 9_000_000_000)
    again.kernel_line("NVRM: Xid (PCI:000f:01:00): 31", 9_500_000_000)
    again.close()
    assert (tmp_path / "proc/sys/kernel/random/boot_id").read_text() == boot_id
    assert [sequence for _, sequence, _ in kmsg(tmp_path)] == [0, 1, 2]


def test_a_wedged_machine_does_not_even_answer_health(tmp_path: Path) -> None:
    async def case(client: Client) -> None:
        await client.until(lambda: client.server.effects.silent)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.get("/health")
        assert meminfo(tmp_path)["MemFree"] < GIB

    wedge = faults.Wedge(collapse=Seconds(2), reboot_after=None)
    serve(case, host_root=tmp_path, faults=(faults.Fault(wedge, 0.5),))
