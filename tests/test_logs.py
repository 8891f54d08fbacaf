"""The server's log: figures of its start, lines that say it is dying, and sources that rotate, end or flood."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import clock
from loadgen.rules import server_log
from loadgen.types import Finding, Sample
from monitors import logs

DATA = Path(__file__).parent / "data/logs"
GIB, MIB = 1 << 30, 1 << 20
DEADLINE_S = 30.0


def facts(name: str) -> dict[str, float]:
    return dict(logs.meaning((DATA / name).read_bytes()).facts)


def event(line: str) -> logs.Event | None:
    found = logs.meaning(line.encode() + b"\n").events
    assert len(found) <= 1, "a line is one event"
    return found[0] if found else None


# ---------------------------------------------------------------------------------------------------------------------
# Figures of the start


def test_start_of_a_real_llamacpp_gives_slots_context_and_cache() -> None:
    assert facts("llamacpp-start.log") == {
        "slots": 4, "context_tokens": 1024, "context_total_tokens": 4096,
        "kv_cache_bytes": 90 * MIB, "model_bytes": pytest.approx(92.10 * MIB),
    }  # fmt: skip


def test_start_of_vllm_gives_capacity_memory_and_times_even_when_negative() -> None:
    assert facts("vllm-start.log") == {
        "weights_load_s": 21.49, "model_bytes": 55.22 * GIB, "model_load_s": 22.120985, "compile_s": 54.60,
        "graph_estimate_bytes": -20.19 * GIB, "kv_available_bytes": 12.15 * GIB, "kv_capacity_tokens": 240_000,
        "context_tokens": 262_144, "kv_concurrency": 0.92, "graph_capture_s": 8, "graph_bytes": -0.31 * GIB,
        "init_engine_s": 70.62,
    }  # fmt: skip


def test_start_of_an_older_vllm_says_the_same_in_other_words() -> None:
    assert facts("vllm-start-2024.log") == {
        "model_bytes": pytest.approx(14.2978 * GIB), "kv_blocks": 27541, "kv_capacity_tokens": 440_656,
        "context_tokens": 131_072, "kv_concurrency": 3.36, "graph_capture_s": 2, "graph_bytes": 0.11 * GIB,
        "init_engine_s": 28.44,
    }  # fmt: skip


def test_start_of_sglang_gives_capacity_and_what_each_step_left() -> None:
    assert facts("sglang-start.log") == {
        "model_load_s": 787.55, "model_bytes": 82.97 * GIB, "free_after_load_bytes": 29.01 * GIB,
        "kv_cache_bytes": pytest.approx(10.44 * GIB), "free_after_kv_bytes": 18.55 * GIB, "graph_capture_s": 25.74,
        "graph_bytes": 2.66 * GIB, "kv_capacity_tokens": 171_008, "slots": 48, "context_tokens": 169_000,
        "device_free_bytes": 8.27 * GIB,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["llamacpp-start.log", "vllm-start.log", "sglang-start.log"])
def test_healthy_start_is_ready_and_nothing_else(name: str) -> None:
    found = logs.meaning((DATA / name).read_bytes()).events
    assert {e.name for e in found} == {"server_ready"}


def test_free_memory_is_read_from_the_refusal_to_start() -> None:
    line = (
        "ValueError: Free memory on device cuda:0 (2.6/121.63 GiB) on startup is less than desired GPU memory "
        "utilization (0.8, 97.3 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    found = logs.meaning(line.encode())
    assert dict(found.facts) == {"device_free_bytes": 2.6 * GIB, "device_total_bytes": 121.63 * GIB}
    assert [(e.name, e.labels["severity"]) for e in found.events] == [("kv_memory_missing", "fail")]


# ---------------------------------------------------------------------------------------------------------------------
# Fatal lines


def test_real_llamacpp_that_cannot_allocate_its_cache_says_so_in_our_words() -> None:
    found = logs.meaning((DATA / "llamacpp-kv-refused.log").read_bytes()).events
    assert [e.name for e in found] == ["host_out_of_memory", "kv_memory_missing"]
    assert all(e.labels["severity"] == "fail" for e in found)


@pytest.mark.parametrize(
    ("line", "name", "severity", "labels"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "gpu_out_of_memory", "fail", {}),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", "gpu_out_of_memory", "fail", {}),
        ("RuntimeError: CUDA error: out of memory", "gpu_out_of_memory", "fail", {}),
        ("E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 13285.50 MiB on device 0: cudaMalloc failed: "
         "out of memory", "gpu_out_of_memory", "fail", {}),
        ("(EngineCore_0 pid=26) ERROR 06-11 11:46:39 [core.py:517] EngineCore encountered a fatal error.",
         "engine_dead", "fail", {}),
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "engine_dead", "fail", {}),
        ("Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", "engine_dead", "fail", {}),
        ("[2026-03-29 18:56:25 TP0] Scheduler hit an exception: Traceback", "engine_dead", "fail", {}),
        ("INFO [shm_broadcast.py:548] No available shared memory broadcast block found in 60 seconds. This typically "
         "happens when some processes are hanging", "engine_stuck", "high", {"seconds": "60"}),
        ("[shm_broadcast.py:430] No available block found in 60 second.", "engine_stuck", "high", {"seconds": "60"}),
        ("TimeoutError: RPC call to sample_tokens timed out.", "engine_stuck", "high", {"call": "sample_tokens"}),
        ("Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "watchdog_timeout", "fail",
         {"seconds": "300"}),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "gpu_error", "fail",
         {"error": "an illegal memory access was encountered"}),
        ("Segmentation fault (core dumped)", "crash", "fail", {}),
        ("Fatal Python error: Aborted", "crash", "fail", {"error": "Aborted"}),
        ("/src/ggml.c:3123: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed", "crash", "fail",
         {"assertion": "ggml_can_mul_mat(a, b)"}),
        ("KV cache pool is full. Retract requests. #retracted_reqs: 1", "kv_full", "warn", {}),
        ("0.00.494.302 E srv          init: exiting due to model loading error", "start_failed", "fail", {}),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", "collective_timeout", "fail", {}),
    ],
)  # fmt: skip
def test_fatal_lines_of_every_server(line: str, name: str, severity: str, labels: dict[str, str]) -> None:
    found = event(line)
    assert found is not None
    assert (found.name, found.labels) == (name, {**labels, "severity": severity})


@pytest.mark.parametrize(
    "line",
    [
        "INFO 06-11 11:46:39 Engine 000: Avg generation throughput: 10.0 tokens/s, GPU KV cache usage: 0.0%",
        "Received request cmpl-1: prompt: 'why does CUDA out of memory happen?', params: SamplingParams(n=1)",
        "RPC call to nobody was fine",
        "insufficient memory of the past, said the old man",
        '10.0.0.1 - "GET /health HTTP/1.1" 200 OK',
    ],
)
def test_harmless_lines_are_none(line: str) -> None:
    assert event(line) is None


def test_key_in_a_line_never_reaches_a_sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOADGEN_TEST_HEADERS", json.dumps({"Authorization": "Bearer my-own-key-1"}))
    log = tmp_path / "log"
    log.write_text("")
    ticks = Ticks(logs.Options(path=str(log), headers_env="LOADGEN_TEST_HEADERS"))
    with ticks:
        ticks.next()
        with log.open("a") as file:
            file.write("\x1b[31mEngineDeadError\x1b[0m Bearer abcdef123 sk-abcdefgh12 http://me:pw@host my-own-key-1 ")
            file.write("api_key='topsecret' hf_ABCDEFGHIJ {'token': 'abc'} max_total_num_tokens=5\n")
        (said,) = of(ticks.until(lambda seen: bool(of(seen, "engine_dead"))), "engine_dead")
    for secret in ("abcdef123", "abcdefgh12", "pw@", "my-own-key-1", "topsecret", "ABCDEFGHIJ", "'abc'", "\x1b"):
        assert secret not in (said.text or "")
    assert "max_total_num_tokens=5" in (said.text or "")


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_no_bytes_break_the_reader(a: bytes, b: bytes) -> None:
    for block in (a, a + b"EngineDeadError" + b, b"KV cache size: " + a + b" tokens"):
        for found in logs.meaning(block).events:
            assert len(found.text) <= logs.MAX_TEXT_CHARS


def test_line_as_long_as_a_file_is_looked_at_around_its_word() -> None:
    block = b"x" * 5_000_000 + b" EngineDeadError " + b"y" * 5_000_000 + b"\nSegmentation fault\n"
    found = logs.meaning(block).events
    assert [e.name for e in found] == ["engine_dead", "crash"]
    assert len(found[0].text) <= logs.MAX_TEXT_CHARS


def test_flood_of_one_line_becomes_a_count() -> None:
    counts: dict[str, int] = {}
    found = logs.meaning(b"EngineDeadError\n" * 5000)
    told = logs.happenings(found, counts, 1)
    assert len(told) == logs.MAX_SAME_EVENTS + 1
    assert sum(s.value for s in told) == 5000
    assert told[-1].labels == {"severity": "fail", "burst": str(5000 - logs.MAX_SAME_EVENTS)}


def test_error_of_a_whole_night_is_told_a_bounded_number_of_times() -> None:
    counts: dict[str, int] = {}
    told = [s for _ in range(1000) for s in logs.happenings(logs.meaning(b"EngineDeadError\n"), counts, 1)]
    assert sum(s.value for s in told) == 1000
    assert len([s for s in told if "burst" not in s.labels]) == logs.MAX_TOLD_EVENTS


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 7))
def test_lines_come_out_whole_however_they_were_cut(pieces: list[bytes], size: int) -> None:
    data = b"".join(pieces)
    lines = logs.Lines()
    blocks = [lines.feed(data[at : at + size]) for at in range(0, len(data), size)]
    assert all(block.endswith(b"\n") for block in blocks if block)
    assert b"".join(blocks) + lines.feed(b"") + lines.feed(b"") == data, "and the last words are given out in the end"


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.text("ab", min_size=0, max_size=9)), max_size=12), st.integers(1, 9)
)
def test_frames_of_a_container_are_put_together_by_stream(frames: list[tuple[int, str]], size: int) -> None:
    wire = b"".join(bytes([kind, 0, 0, 0]) + len(text).to_bytes(4, "big") + text.encode() for kind, text in frames)
    decoder = logs.Frames()
    out = b"".join(decoder.feed(wire[at : at + size]) for at in range(0, len(wire), size))
    streams = ["".join(text for kind, text in frames if kind == wanted) for wanted in (1, 2)]
    assert sorted((out + decoder.end()).replace(b"\n", b"")) == sorted("".join(streams).encode())
    assert not decoder.raw


def test_line_that_comes_in_two_frames_is_not_cut_by_the_other_stream() -> None:
    def frame(kind: int, text: bytes) -> bytes:
        return bytes([kind, 0, 0, 0]) + len(text).to_bytes(4, "big") + text

    decoder = logs.Frames()
    out = decoder.feed(frame(2, b"Engine") + frame(1, b"hello\n") + frame(2, b"DeadError\n"))
    assert out == b"hello\nEngineDeadError\n"


# ---------------------------------------------------------------------------------------------------------------------
# Sources


class Ticks:
    """The monitor's ticks, asked for one by one in a loop of its own."""

    def __init__(self, options: logs.Options) -> None:
        self.options = options

    def __enter__(self) -> Ticks:
        self.runner = asyncio.Runner()
        self.watch: Any = logs.watch(self.options)
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self._end())
        self.runner.close()

    async def _end(self) -> None:
        await self.watch.aclose()
        await asyncio.sleep(0)

    def next(self) -> list[Sample]:
        return self.runner.run(self._next())

    async def _next(self) -> list[Sample]:
        await asyncio.sleep(0.02)
        found: list[Sample] = await anext(self.watch)
        return found

    def until(self, wanted: Callable[[list[Sample]], bool]) -> list[Sample]:
        """All samples up to the tick after which `wanted` holds of them."""
        seen: list[Sample] = []
        end = clock.now_ns() + DEADLINE_S * 1e9
        while not wanted(seen):
            assert clock.now_ns() < end, f"not within {DEADLINE_S:g} s; seen {[(s.metric, s.text) for s in seen][-20:]}"
            seen += self.next()
        return seen


def of(samples: list[Sample], metric: str) -> list[Sample]:
    return [s for s in samples if s.metric == metric]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_what_stood_in_the_file_before_is_a_fact_and_no_happening(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes((DATA / "vllm-start.log").read_bytes() + b"EngineDeadError\nEngineDeadError\n")
    with Ticks(logs.Options(path=str(log))) as ticks:
        first, second = ticks.next(), ticks.next()
    assert [(s.value, s.text) for s in of(first, "observed")] == [(1.0, str(log))]
    assert [(s.value, s.labels) for s in of(first, "kv_capacity_tokens")] == [(240_000, {"before_run": "1"})]
    before = {s.labels["event"]: s.value for s in of(first, "before_run")}
    assert before == {"engine_dead": 2, "server_ready": 1}
    assert of(first, "engine_dead") == of(second, "engine_dead") == []
    assert of(second, "lines_total")[0].value == 0


def test_new_lines_are_followed_through_rotation_truncation_and_a_torn_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    with Ticks(logs.Options(path=str(log))) as ticks:
        ticks.next()
        append(log, "Segmenta")
        ticks.next()
        append(log, "tion fault\n")
        assert len(of(ticks.until(lambda seen: bool(of(seen, "crash"))), "crash")) == 1
        append(log, "last words: EngineDeadError\n")
        log.rename(tmp_path / "log.1")
        log.write_text("NCCL error in the new file\n")
        seen = ticks.until(lambda seen: bool(of(seen, "collective_timeout")))
        assert [len(of(seen, m)) for m in ("engine_dead", "log_rotated")] == [1, 1]
        log.write_text("x\n")  # shorter than before: copytruncate
        seen = ticks.until(lambda seen: bool(of(seen, "log_truncated")))
        append(log, "watchdog: terminate called after throwing")  # and died before the newline
        assert of(ticks.until(lambda seen: bool(of(seen, "crash"))), "crash")
        log.unlink()
        seen = ticks.until(lambda seen: bool(of(seen, "log_gone")))
        assert of(ticks.next(), "log_gone") == [], "said once"


def test_log_that_is_not_there_yet_is_not_observed_until_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Ticks(logs.Options(path=str(log))) as ticks:
        first, second = ticks.next(), ticks.next()
        log.write_text("The server is fired up and ready to roll!\n")
        later = ticks.until(lambda seen: bool(of(seen, "server_ready")))
    assert [(s.value, s.text) for s in of(first, "observed")] == [(0.0, f"{log}: No such file or directory")]
    assert second == []
    assert [s.value for s in of(later, "observed")] == [1.0]


def test_old_log_of_many_gigabytes_is_read_at_both_ends_only(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.write((DATA / "vllm-start.log").read_bytes())
        file.truncate(20 << 30)  # a hole: nothing is stored
        file.seek(0, os.SEEK_END)
        file.write(b"\nEngineDeadError\n")
    with Ticks(logs.Options(path=str(log))) as ticks:
        first = ticks.next()
    assert of(first, "kv_capacity_tokens")[0].value == 240_000
    assert {s.labels["event"] for s in of(first, "before_run")} == {"engine_dead", "server_ready"}


def test_log_that_grows_faster_than_it_is_read_is_passed_over_and_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    with Ticks(logs.Options(path=str(log))) as ticks:
        ticks.next()
        append(log, "y" * 99 + "\n")
        with log.open("ab") as file:
            file.truncate(300 << 20)
            file.seek(0, os.SEEK_END)
            file.write(b"\nEngineDeadError\n")
        seen = ticks.until(lambda seen: bool(of(seen, "engine_dead")))
    assert len(of(seen, "log_skipped")) == 1
    assert of(seen, "lost_bytes_total")[-1].value > 200 << 20


@pytest.mark.parametrize(
    "options", [logs.Options(), logs.Options(path="a", container="b")], ids=["none", "two"]
)  # fmt: skip
def test_log_that_nobody_named_is_not_observed_and_says_how_to_name_it(options: logs.Options) -> None:
    with Ticks(options) as ticks:
        (said,) = ticks.next()
    assert (said.metric, said.value) == ("observed", 0.0)
    assert "path: FILE" in (said.text or "")


@contextlib.asynccontextmanager
async def docker(path: Path, log: list[tuple[int, bytes]], tty: bool = False) -> AsyncIterator[list[str]]:
    """A Docker socket with one container `llm`: its log so far, then what is put into `log` while it is followed.
    Keeps what it was asked."""
    asked: list[str] = []

    def frames(part: list[tuple[int, bytes]]) -> bytes:
        return b"".join(t if tty else bytes([k, 0, 0, 0]) + len(t).to_bytes(4, "big") + t for k, t in part)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            line = (await reader.readuntil(b"\r\n\r\n")).decode().split(" ")[1]
            asked.append(line)
            if "/containers/llm/json" in line:
                body = json.dumps(
                    {"Id": "c0ffee", "State": {"StartedAt": "2026-11-30T12:00:00.5Z"}, "Config": {"Tty": tty}}
                ).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
            elif "/containers/c0ffee/logs" in line:
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                if "follow" not in line:
                    writer.write(frames(log))
                    log.clear()
                while "follow" in line:
                    part, log[:] = list(log), []
                    writer.write(frames([each for each in part if each[0] >= 0]))
                    await writer.drain()
                    if any(kind < 0 for kind, _ in part):
                        break
                    await asyncio.sleep(0.01)
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, str(path))
    try:
        yield asked
    finally:
        server.close()


@pytest.mark.parametrize("tty", [False, True], ids=["frames", "terminal"])
def test_log_of_a_container_is_followed_over_the_socket(tmp_path: Path, tty: bool) -> None:
    async def run() -> tuple[list[Sample], list[Sample], list[str]]:
        log = [(2, line) for line in (DATA / "vllm-start.log").read_bytes().splitlines(keepends=True)]
        async with docker(tmp_path / "docker.sock", log, tty) as asked:
            watch: Any = logs.watch(logs.Options(container="llm", docker_socket=str(tmp_path / "docker.sock")))
            first = await anext(watch)
            log += [(2, b"EngineDead"), (1 if not tty else 2, b"" if tty else b"hello\n"), (2, b"Error\n"), (-1, b"")]
            later: list[Sample] = []
            end = clock.now_ns() + DEADLINE_S * 1e9
            while len(asked) < 7:  # it stays as it is: asked for again, its end is not told again
                assert clock.now_ns() < end
                later += await anext(watch)
                await asyncio.sleep(0.01)
                if of(later, "log_ended") and not log:
                    log.append((-1, b""))
            await watch.aclose()
            return first, later, asked

    first, later, asked = asyncio.run(run())
    assert [(s.value, s.text) for s in of(first, "observed")] == [(1.0, "container llm")]
    assert [(s.value, s.labels) for s in of(first, "kv_capacity_tokens")] == [(240_000, {"before_run": "1"})]
    assert len(of(later, "engine_dead")) == len(of(later, "log_ended")) == 1
    assert "since=1796040000&" in asked[1], "since the container was started"
    assert all(line.startswith("/containers/") for line in asked), "nothing but reading"


@pytest.mark.parametrize(("name", "why"), [("llm", "No such file"), ("other", "there is no container other")])
def test_container_that_cannot_be_read_says_why(tmp_path: Path, name: str, why: str) -> None:
    async def run() -> list[Sample]:
        socket = tmp_path / "docker.sock"
        async with docker(tmp_path / "real.sock", []):
            if name == "other":
                (tmp_path / "real.sock").rename(socket)
            watch: Any = logs.watch(logs.Options(container=name, docker_socket=str(socket)))
            first: list[Sample] = await anext(watch)
            assert await anext(watch) == [], "said once"
            await watch.aclose()
            return first

    (said,) = asyncio.run(run())
    assert said.value == 0.0
    assert why in (said.text or "")


FAKE_JOURNALCTL = """#!{python}
import json, sys, time
args = " ".join(sys.argv[1:])
def say(text, us):
    print(json.dumps({{"MESSAGE": text, "__REALTIME_TIMESTAMP": str(us)}}), flush=True)
if "--follow" not in args:
    for line in open({log!r}):
        say(line.rstrip("\\n"), 1_000_000)
else:
    say("EngineDeadError of a second ago", 1_000_000)
    say(list(b"Segmentation \\xff fault"), int(time.time() * 1e6) + 1)
    say("Segmentation fault", int(time.time() * 1e6) + 1)
    sys.stdin.close()
    time.sleep({seconds})
"""


@pytest.mark.parametrize("seconds", [0, 60], ids=["ends", "goes on"])
def test_log_of_a_unit_comes_from_the_journal(tmp_path: Path, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "journalctl": FAKE_JOURNALCTL.format(
            python=sys.executable, log=str(DATA / "sglang-start.log"), seconds=seconds
        ),
        "systemctl": "#!/bin/sh\necho InactiveExitTimestamp=@1764500000\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Ticks(logs.Options(unit="sglang.service")) as ticks:
        first = ticks.next()
        later = ticks.until(lambda seen: bool(of(seen, "crash") and (seconds or of(seen, "log_ended"))))
    assert [(s.value, s.text) for s in of(first, "observed")] == [(1.0, "unit sglang.service")]
    assert of(first, "kv_capacity_tokens")[0].value == 171_008
    assert len(of(later, "crash")) == 1
    assert of(later, "engine_dead") == [], "whole seconds of journalctl are cut to the moment"
    running = subprocess.run(["pgrep", "-f", str(tmp_path / "journalctl")], capture_output=True, check=False).stdout
    assert running == b"", "no journalctl is left behind"


def test_unit_that_nobody_knows_is_not_observed_until_it_says_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FAKE_JOURNALCTL.format(python=sys.executable, log=os.devnull, seconds=60)
    (tmp_path / "journalctl").write_text(text)
    (tmp_path / "journalctl").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    with Ticks(logs.Options(unit="typo.service")) as ticks:
        first = ticks.next()
        later = ticks.until(lambda seen: bool(of(seen, "crash")))
    assert [s.value for s in of(first, "observed")] == [0.0]
    assert "no line of typo.service" in (of(first, "observed")[0].text or "")
    assert [s.value for s in of(later, "observed")] == [1.0]


def test_machine_without_a_journal_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Ticks(logs.Options(unit="sglang.service")) as ticks:
        (said,) = of(ticks.next(), "observed")
    assert (said.value, said.text) == (0.0, "journalctl: No such file or directory")


# ---------------------------------------------------------------------------------------------------------------------
# The rule


def judged(tmp_path: Path, *samples: Sample, failed_at_s: float | None = None) -> list[Finding]:
    outcomes = golden.steady(60)
    if failed_at_s is not None:
        outcomes.append(golden.failed(999, failed_at_s, "stream_truncated"))
    seen = golden.sample("logs", "observed", 1.0, 0, text="server.log")
    phases = [golden.phase("measure", "measure", 0, 60)]
    run = golden.build(tmp_path, outcomes=outcomes, phases=phases, samples=[seen, *samples], lane="slow")
    return server_log.check(run, server_log.Options())


def fatal(name: str, severity: str, at_s: float = 30, value: float = 1.0) -> Sample:
    return golden.sample("logs", name, value, at_s, text=f"a line of {name}", severity=severity)


def test_quiet_log_passes_and_a_log_that_nobody_named_says_nothing(tmp_path: Path) -> None:
    assert [f.status for f in judged(tmp_path / "a")] == ["pass"]
    run = golden.build(tmp_path / "b", outcomes=golden.steady(9), phases=[golden.phase("measure", "measure", 0, 9)])
    assert server_log.check(run, server_log.Options()) == []


def test_dead_engine_is_hard_and_names_time_and_line(tmp_path: Path) -> None:
    (found,) = judged(tmp_path, fatal("engine_dead", "fail"), fatal("engine_dead", "fail", 31, 9.0))
    assert (found.status, found.hard, found.cause, found.number) == ("fail", True, "engine_dead", 10)
    assert "a line of engine_dead" in found.message
    assert "0:30" in found.message


@pytest.mark.parametrize(("failed_at_s", "status"), [(None, "warn"), (35, "fail")])
def test_refused_memory_fails_only_where_a_request_felt_it(
    failed_at_s: float | None, status: str, tmp_path: Path
) -> None:
    (found,) = judged(tmp_path, fatal("gpu_out_of_memory", "fail"), failed_at_s=failed_at_s)
    assert (found.status, found.hard) == (status, status == "fail")
    assert ("1 request failed" in found.message) == (status == "fail")


def test_stuck_worker_and_negative_accounting_warn(tmp_path: Path) -> None:
    negative = golden.sample("logs", "graph_estimate_bytes", -20.19 * GIB, 1)
    found = judged(tmp_path, fatal("engine_stuck", "high"), negative)
    assert [(f.status, f.cause) for f in found] == [("warn", "engine_stuck"), ("warn", "graph_estimate_bytes")]
    assert "-20.19 GiB" in found[1].message
