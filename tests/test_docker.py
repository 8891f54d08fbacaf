"""The container monitor against an engine that speaks on a Unix socket, and the rules on what it saw."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import golden
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from loadgen import clock, plugins
from loadgen.types import Finding, Sample, Seconds
from monitors import docker

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent / "data/docker.jsonl").read_text(encoding="utf-8").splitlines())
}
ID = "c0ffee" + "0" * 58
OTHER = "deadbeef" + "1" * 56
DEADLINE_S = 20.0
WORKER = 4300  # a child of the server's first process, 4242

RUNNING: dict[str, Any] = {
    "Id": ID, "Name": "/llm", "RestartCount": 0, "Image": "sha256:" + "ab" * 32,
    "State": {
        "Status": "running", "Running": True, "Restarting": False, "OOMKilled": False, "Pid": 4242, "ExitCode": 0,
        "Error": "", "StartedAt": "2026-01-01T00:00:00.000000001Z", "FinishedAt": "0001-01-01T00:00:00Z",
        "Health": {"Status": "healthy", "FailingStreak": 0},
    },
    "HostConfig": {
        "Memory": 8 << 30, "MemorySwap": -1, "ShmSize": 64 << 20, "NanoCpus": 0, "PidsLimit": None,
        "RestartPolicy": {"Name": "unless-stopped", "MaximumRetryCount": 0},
    },
    "Config": {
        "Image": "vllm/vllm-openai:v0.33.0",
        "Env": ["HF_TOKEN=hf_secret", "VLLM_API_KEY=sk-secret", "VLLM_ATTENTION_BACKEND=FLASHINFER",
                "NCCL_TOPO_FILE=/home/someone/topo.xml", "PATH=/usr/bin"],
        "Labels": {"com.docker.compose.project": "soak", "com.docker.compose.service": "llm"},
    },
}  # fmt: skip


@dataclass
class Engine:
    """A container engine of our own: what it knows of each container, what it publishes, who asked for what."""

    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    listing: list[dict[str, Any]] = field(default_factory=list)
    version: dict[str, Any] = field(default_factory=lambda: {"Version": "28.2.2", "ApiVersion": "1.50",
                                                             "MinAPIVersion": "1.24"})  # fmt: skip
    asked: list[tuple[str, str]] = field(default_factory=list)
    listeners: list[asyncio.Queue[bytes | None]] = field(default_factory=list)
    since: list[str] = field(default_factory=list)

    def publish(self, action: str, container: str = ID, **attributes: str) -> None:
        event = {"Type": "container", "Action": action, "timeNano": clock.wall_ns(),
                 "Actor": {"ID": container, "Attributes": {"name": "llm", **attributes}}}  # fmt: skip
        self.write(json.dumps(event).encode() + b"\n")

    def write(self, data: bytes | None) -> None:
        for queue in self.listeners:
            queue.put_nowait(data)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        path = request.path
        if path == "/version":
            return web.json_response(self.version)
        _, version, *parts = path.split("/")
        assert version.startswith("v1."), path
        match parts:
            case ["containers", "json"]:
                wanted = json.loads(request.query.get("filters", "{}")).get("label", [])
                found = [c for c in self.listing if all(w in c.get("labels", []) for w in wanted)]
                return web.json_response(found)
            case ["containers", name, "json"]:
                for inspect in self.containers.values():
                    if name in (inspect["Id"], inspect["Name"].lstrip("/")):
                        return web.json_response(inspect)
                return web.json_response({"message": f"No such container: {name}"}, status=404)
            case ["images", _, "json"]:
                return web.json_response({"RepoDigests": ["vllm/vllm-openai@sha256:" + "cd" * 32]})
            case ["events"]:
                return await self.stream(request)
        return web.json_response({"message": "page not found"}, status=404)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        self.since.append(request.query.get("since", ""))
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.listeners.append(queue)
        try:
            while (data := await queue.get()) is not None:
                await response.write(data)
        finally:
            self.listeners.remove(queue)
        return response


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Short: the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def serving(engine: Engine, path: Path) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield
    finally:
        engine.write(None)
        await runner.cleanup()


class Ticks:
    """The monitor, asked for one tick after the other; every sample is kept."""

    def __init__(self, path: Path, **options: Any) -> None:
        given = {"socket": str(path), "container": "llm", "inspect_every": Seconds(0)} | options
        self._watch = docker.watch(docker.Options(**given))
        self.all: list[Sample] = []

    async def next(self) -> list[Sample]:
        samples = await anext(self._watch)
        self.all += samples
        return samples

    async def until(self, true: Callable[[], bool], what: str) -> None:
        end = clock.now_ns() + round(DEADLINE_S * 1e9)
        while not true():
            assert clock.now_ns() < end, f"waited in vain: {what}; {[s for s in self.all if s.text is not None]}"
            await self.next()
            await asyncio.sleep(0.005)

    async def until_told(self, metric: str) -> Sample:
        await self.until(lambda: bool(self.told(metric)), metric)
        return self.told(metric)[0]

    def told(self, metric: str) -> list[Sample]:
        return [s for s in self.all if s.metric == metric and s.text is not None]

    def value(self, metric: str) -> float | None:
        found = [s.value for s in self.all if s.metric == metric and s.text is None]
        return found[-1] if found else None

    async def close(self) -> None:
        await self._watch.aclose()  # type: ignore[attr-defined]


def play(
    path: Path, script: Callable[[Engine, Ticks], Any], engine: Engine | None = None, **options: Any
) -> tuple[Engine, Ticks]:
    """Run a script against an engine that has the container `llm`, unless another is given."""
    made = engine or Engine({ID: deepcopy(RUNNING)})

    async def run() -> Ticks:
        async with serving(made, path):
            ticks = Ticks(path, **options)
            try:
                await script(made, ticks)
            finally:
                await ticks.close()
            return ticks

    return made, asyncio.run(run())


async def first_look(engine: Engine, ticks: Ticks) -> None:
    await ticks.next()
    await ticks.until(lambda: len(engine.listeners) == 1, "the monitor listens to events")


# ---------------------------------------------------------------------------------------------------------------------
# What it reads


def test_container_is_told_with_its_facts_and_no_secret(socket_folder: Path) -> None:
    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)

    engine, ticks = play(socket_folder / "s", script)
    (observed,) = ticks.told("observed")
    assert observed.value == 1
    for part in ("container llm (c0ffee000000)", "vllm/vllm-openai:v0.33.0 (sha256:cdcd", "policy unless-stopped",
                 "started 2026-01-01T00:00:00Z", "Docker 28.2.2, API v1.44"):  # fmt: skip
        assert part in (observed.text or "")
    assert (observed.labels["project"], observed.labels["service"]) == ("soak", "llm")
    assert observed.labels["env"] == (
        "HF_TOKEN=… NCCL_TOPO_FILE=… PATH=… VLLM_API_KEY=… VLLM_ATTENTION_BACKEND=FLASHINFER"
    )
    assert "secret" not in repr(ticks.all)
    assert ticks.value("running") == 1
    assert ticks.value("memory_limit_bytes") == 8 << 30
    assert ticks.value("memory_swap_limit_bytes") is None, "-1 is no limit"
    assert ticks.value("cpus_limit") is None
    assert ticks.value("exit_code") is None, "a container that runs has none"
    assert ticks.value("healthy") == 1
    assert {method for method, _ in engine.asked} == {"GET"}, "nothing but reading"


@pytest.mark.parametrize(
    ("said", "api"),
    [
        ({"ApiVersion": "1.50", "MinAPIVersion": "1.24"}, "v1.44"),
        ({"ApiVersion": "1.41", "MinAPIVersion": "1.24"}, "v1.41"),
        ({"ApiVersion": "1.60", "MinAPIVersion": "1.48"}, "v1.48"),
        ({}, "v1.44"),
    ],
)
def test_api_version_is_one_that_both_sides_speak(said: dict[str, str], api: str) -> None:
    assert docker.agreed(said) == api


def test_podman_is_named_and_its_words_are_understood(socket_folder: Path) -> None:
    podman = {"Version": "5.4.0", "ApiVersion": "1.41", "Components": [{"Name": "Podman Engine"}]}

    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        engine.publish("died", containerExitCode="137")
        await ticks.until_told("exited")

    _, ticks = play(socket_folder / "s", script, Engine({ID: deepcopy(RUNNING)}, version=podman))
    assert (ticks.told("observed")[0].text or "").endswith("Podman 5.4.0, API v1.41")
    assert ticks.told("exited")[0].labels["exit_code"] == "137"


def test_container_is_found_by_compose_labels_and_the_running_one_wins(socket_folder: Path) -> None:
    labels = ["com.docker.compose.project=soak", "com.docker.compose.service=llm"]
    engine = Engine(
        {ID: deepcopy(RUNNING)},
        [{"Id": OTHER, "State": "exited", "Created": 9, "labels": labels},
         {"Id": ID, "State": "running", "Created": 5, "labels": labels},
         {"Id": "f" * 64, "State": "running", "Created": 7, "labels": []}],
    )  # fmt: skip
    _, ticks = play(socket_folder / "s", first_look, engine, container="", project="soak", service="llm")
    assert ticks.told("observed")[0].labels["container"] == ID


def test_container_that_publishes_the_targets_port_is_found_without_a_process(socket_folder: Path) -> None:
    engine = Engine({ID: deepcopy(RUNNING)}, [{"Id": ID, "State": "running", "Ports": [{"PublicPort": 9}]}])
    options = {"container": "", "target_url": "http://127.0.0.1:9/v1"}
    _, ticks = play(socket_folder / "s", first_look, engine, **options)
    assert ticks.told("observed")[0].labels["container"] == ID


def test_plain_process_is_no_container(socket_folder: Path) -> None:
    async def script(engine: Engine, ticks: Ticks) -> None:
        await ticks.next()
        await ticks.next()

    _, ticks = play(socket_folder / "s", script, Engine(), container="", target_url="http://127.0.0.1:9")
    (observed,) = ticks.told("observed")
    assert observed.value == 0
    assert "no container serves port 9" in (observed.text or "")


KEYS = ["State", "Config", "HostConfig", "Health", "Env", "Labels", "RestartCount", "Running", "Pid", "Id", "StartedAt"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_no_inspect_breaks_the_reader(inspect: Any) -> None:
    look = docker.look_of(inspect)
    assert docker.differences(look, look, 0) == []
    assert docker.figures(look, 0)[0].metric == "running"


# ---------------------------------------------------------------------------------------------------------------------
# What happens


def test_events_come_at_their_own_time_with_code_flag_and_signal(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "EVENT_WAIT_NS", 10**12)

    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        engine.publish("exec_start: /bin/sh -c curl localhost/health")
        engine.publish("kill", signal="9")
        engine.containers[ID]["State"] |= {"Running": False, "Status": "exited", "ExitCode": 137, "Pid": 0}
        engine.publish("die", exitCode="137")
        await ticks.until_told("exited")

    before = clock.now_ns()
    _, ticks = play(socket_folder / "s", script)
    (killed,), (exited,) = ticks.told("killed"), ticks.told("exited")
    assert killed.labels["signal"] == "SIGKILL"
    assert (exited.labels["exit_code"], exited.labels["oom_killed"], exited.labels["signal"]) == (
        "137", "false", "SIGKILL",
    )  # fmt: skip
    assert "after SIGKILL was sent through the engine" in (exited.text or "")
    assert before <= killed.at_ns <= exited.at_ns <= clock.now_ns()
    assert exited.labels["source"] == "events"
    assert ticks.value("exit_code") == 137


def test_events_of_other_containers_are_none_of_ours(socket_folder: Path) -> None:
    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        engine.publish("oom", OTHER, name="db")
        engine.write(b"no json at all\n[1]\n")
        engine.publish("health_status: unhealthy")
        await ticks.until_told("health")

    _, ticks = play(socket_folder / "s", script)
    assert ticks.told("oom") == []
    assert ticks.told("health")[0].labels["status"] == "unhealthy"


def test_restart_between_two_inspects_is_seen_without_any_event(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "EVENT_WAIT_NS", 0)

    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        engine.containers[ID]["RestartCount"] = 1
        engine.containers[ID]["State"] |= {"StartedAt": "2026-01-01T00:09:00Z", "Pid": 5000}
        await ticks.until_told("restarted")
        await ticks.until_told("exited")

    _, ticks = play(socket_folder / "s", script)
    assert ticks.told("restarted")[0].labels["restart_count"] == "1"
    assert ticks.told("started")[0].labels["source"] == "inspect"
    assert "exit_code" not in ticks.told("exited")[0].labels, "its next life does not show how the last one ended"
    assert ticks.value("main_pid") == 5000


def test_what_an_event_told_is_not_told_again_by_inspect(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "EVENT_WAIT_NS", 10**12)  # however busy this machine is

    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        engine.containers[ID]["State"] |= {"Running": False, "Status": "exited", "ExitCode": 1}
        engine.publish("die", exitCode="1")
        await ticks.until_told("exited")
        for _ in range(5):
            await ticks.next()

    _, ticks = play(socket_folder / "s", script)
    assert [s.labels["source"] for s in ticks.told("exited")] == ["events"]


def test_stream_that_breaks_goes_on_where_it_ended(socket_folder: Path) -> None:
    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        engine.publish("pause")
        await ticks.until_told("paused")
        engine.write(None)
        await ticks.until(lambda: len(engine.since) == 2, "the stream is opened again")
        await ticks.until(lambda: len(engine.listeners) == 1, "the stream is up")
        engine.publish("unpause")
        await ticks.until_told("unpaused")

    engine, _ = play(socket_folder / "s", script)
    assert float(engine.since[1]) > float(engine.since[0]) > 0


def test_container_that_compose_makes_anew_is_followed(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "EVENT_WAIT_NS", 0)

    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        again = deepcopy(RUNNING) | {"Id": OTHER}
        again["State"] |= {"StartedAt": "2026-01-01T00:09:00Z", "Pid": 5000}
        engine.containers = {OTHER: again}
        await ticks.until_told("started")

    _, ticks = play(socket_folder / "s", script)
    assert ticks.told("started")[0].labels["container"] == OTHER


def test_removed_container_is_told_once(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "EVENT_WAIT_NS", 0)

    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        engine.containers = {}
        await ticks.until_told("removed")
        for _ in range(5):
            await ticks.next()

    _, ticks = play(socket_folder / "s", script)
    assert len(ticks.told("removed")) == 1


def test_engine_that_goes_away_is_told_and_no_exception(socket_folder: Path) -> None:
    async def run() -> Ticks:
        engine = Engine({ID: deepcopy(RUNNING)})
        async with serving(engine, socket_folder / "s"):
            ticks = Ticks(socket_folder / "s")
            await first_look(engine, ticks)
        await ticks.until(lambda: any(s.value == 0 for s in ticks.told("observed")), "it says that it is blind")
        await ticks.close()
        return ticks

    ticks = asyncio.run(run())
    assert [s.value for s in ticks.told("observed")] == [1, 0]
    assert len(ticks.told("inspect_failed")) == 1
    assert (ticks.value("inspects_failed_total") or 0) >= 1


# ---------------------------------------------------------------------------------------------------------------------
# Cases from the field, through the rules


def kernel_kill(at_s: float, case: dict[str, Any]) -> Sample:
    pid = str(case["input"]["kernel"]["pid"])
    labels = {"pid": pid, "comm": "python3", "task_memcg": f"/system.slice/docker-{ID}.scope",
              "constraint": "CONSTRAINT_MEMCG", "severity": "fail"}  # fmt: skip
    return Sample("kernel", "oom_kill_memcg", 1.0, golden.at(at_s), labels, f"Killed process {pid}")


def judged(folder: Path, samples: list[Sample], *extra: Sample) -> dict[str, list[Finding]]:
    """What `oom` and `restart` make of it: the first look at 1 s, all that follows at 44 s."""
    first = [s for s in samples if s.at_ns <= samples[0].at_ns]
    moved = [replace(s, at_ns=golden.at(1 if s in first else 44)) for s in samples]
    quiet = [
        golden.sample("kernel", "observed", 1.0, 0, text=""),
        golden.sample("process", "observed", 1.0, 0, text=""),
    ]
    run = golden.build(
        folder, outcomes=golden.steady(60), samples=[*quiet, *moved, *extra],
        phases=[golden.phase("measure", "measure", 0, 60)],
    )  # fmt: skip
    found: dict[str, list[Finding]] = {}
    for name in ("oom", "restart"):
        module = plugins.load("rules", name)
        found[name] = module.check(run, plugins.options(module, {}))
    return found


def test_case_exit_137_without_the_flag_is_an_oom_kill_by_the_kernels_word(socket_folder: Path, tmp_path: Path) -> None:
    case = CASES["docker-137-flag-false"]

    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        engine.containers[ID] = RUNNING | case["input"]["inspect"]
        engine.publish("die", exitCode="137")
        await ticks.until_told("exited")

    _, ticks = play(socket_folder / "s", script)
    found = judged(tmp_path / "run", ticks.all, kernel_kill(43.9, case))
    (oom,) = found["oom"]
    assert (oom.status, oom.hard, oom.cause) == ("fail", True, case["expect"]["cause"])
    assert oom.evidence.startswith("samples: kernel")
    assert case["expect"]["evidence"] == "kernel_log"
    assert f"OOMKilled flag not set, exit code {case['expect']['exit_code']}" in oom.message
    assert f"pid {case['input']['main_pid_before']} (python3), of the server" in oom.message
    (restart,) = found["restart"]
    assert restart.status == "fail"
    assert "exit code 137" in restart.message


def test_case_child_killed_while_the_container_runs_on(socket_folder: Path, tmp_path: Path) -> None:
    case = CASES["docker-oomkilled-child-survived"]

    async def script(engine: Engine, ticks: Ticks) -> None:
        await first_look(engine, ticks)
        engine.containers[ID] = RUNNING | case["input"]["inspect"]
        await ticks.until_told("oom_flag")

    _, ticks = play(socket_folder / "s", script)
    found = judged(tmp_path / "run", ticks.all, kernel_kill(43.9, case))
    (oom,) = found["oom"]
    assert oom.status == "fail"
    assert oom.cause == case["expect"]["verdict"]
    assert f"{oom.cause}_{oom.scope}" == case["expect"]["cause"]
    assert f"pid {WORKER} (python3), a child of the server, which still runs" in oom.message
    assert "OOMKilled flag set, still running" in oom.message
    assert (ticks.value("running") == 1) is case["expect"]["server_running"]
    assert [f.status for f in found["restart"]] == ["pass"]


def test_case_container_that_never_started(socket_folder: Path, tmp_path: Path) -> None:
    case = CASES["docker-never-started"]

    async def script(engine: Engine, ticks: Ticks) -> None:
        await ticks.until_told("never_started")
        said = await docker.preflight(docker.Options(socket=str(socket_folder / "s"), container="llm"))
        assert said is not None
        assert 'never started: exec: "/serve": no such file' in said
        assert f"(exit code {case['expect']['exit_code']})" in said

    _, ticks = play(socket_folder / "s", script, Engine({ID: case["input"]["inspect"]}))
    assert ticks.value("exit_code") is None, "nothing ran that could have ended"
    (restart,) = judged(tmp_path / "run", ticks.all)["restart"]
    assert (restart.status, restart.hard, restart.cause) == ("fail", True, case["expect"]["cause"])
    assert restart.number == case["expect"]["exit_code"]


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root may open everything; for what is denied to others it becomes another user for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_case_socket_that_may_not_be_used(socket_folder: Path) -> None:
    case = CASES["docker-socket-denied"]

    async def run() -> list[Sample]:
        async with serving(Engine({ID: deepcopy(RUNNING)}), socket_folder / "s"):
            (socket_folder / "s").chmod(0)
            socket_folder.chmod(0o755)
            watch = docker.watch(docker.Options(socket=str(socket_folder / "s")))
            with as_nobody():
                samples = [s for _ in range(5) for s in await anext(watch)]
                needed = docker.Options(socket=str(socket_folder / "s"), required=True)
                assert await docker.preflight(docker.Options(socket=str(socket_folder / "s"))) is None
                why = await docker.preflight(needed)
            await watch.aclose()  # type: ignore[attr-defined]
        assert (why is not None) is (case["expect"]["if_required"] == "stop_before_load")
        assert "Permission denied" in (why or "")
        return samples

    samples = asyncio.run(run())
    assert len(samples) == case["expect"]["log_lines_max"]
    assert samples[0].metric == "observed"
    assert samples[0].value == 0
    for part in (str(socket_folder / "s"), "Permission denied", "usermod -aG docker"):
        assert part in (samples[0].text or "")


def test_missing_socket_is_one_line(socket_folder: Path) -> None:
    async def run() -> list[Sample]:
        watch = docker.watch(docker.Options(socket=str(socket_folder / "none")))
        samples = [s for _ in range(3) for s in await anext(watch)]
        await watch.aclose()  # type: ignore[attr-defined]
        return samples

    (observed,) = asyncio.run(run())
    assert observed.value == 0
    assert observed.text == f"{socket_folder / 'none'}: No such file or directory"


# ---------------------------------------------------------------------------------------------------------------------
# No sign alone is a verdict


def said(metric: str, **labels: str) -> Sample:
    return Sample("docker", metric, 1.0, golden.at(44), {"container": ID, **labels}, metric)


@pytest.mark.parametrize(
    ("signs", "kills", "status", "hard"),
    [
        ([said("exited", exit_code="137", oom_killed="false")], 0, "pass", False),
        ([said("oom_flag")], None, "warn", False),
        ([said("oom"), said("exited", exit_code="1", oom_killed="true")], None, "warn", False),
        ([said("oom"), said("exited", exit_code="137", oom_killed="true")], None, "fail", True),
        ([said("exited", exit_code="137", oom_killed="true")], 0, "warn", False),
    ],
    ids=[
        "code alone",
        "flag alone",
        "flag with another code",
        "flag and code",
        "flag and code, the kernel counted none",
    ],
)
def test_word_of_the_engine_is_held_against_the_kernels(
    tmp_path: Path, signs: list[Sample], kills: int | None, status: str, hard: bool
) -> None:
    host = [] if kills is None else golden.series("host", "oom_kill_total", [3 + kills] * 60)
    (oom,) = judged(tmp_path / "run", [golden.sample("docker", "observed", 1, 1, text=""), *signs], *host)["oom"]
    assert (oom.status, oom.hard) == (status, hard), oom


def test_foreign_containers_kill_stays_foreign(tmp_path: Path) -> None:
    kill = kernel_kill(44, CASES["docker-137-flag-false"])
    other = replace(kill, labels=kill.labels | {"task_memcg": f"/docker/{OTHER}"})
    observed = golden.sample("docker", "observed", 1.0, 1, text="", container=ID)
    (oom,) = judged(tmp_path / "run", [observed], other)["oom"]
    assert (oom.status, oom.scope) == ("warn", "foreign")


def test_kill_in_a_shared_cgroup_names_nobody_unless_the_server_vanished(tmp_path: Path) -> None:
    shared = [
        *golden.series("cgroup", "own", [0] * 60),
        *golden.series("cgroup", "oom_kill_total", [0] * 40 + [1] * 20),
    ]
    first = golden.sample("cgroup", "observed", 1.0, 1, text="")
    assert judged(tmp_path / "a", [first], *shared)["oom"][0].status == "warn"
    gone = golden.sample("process", "process_gone", 1, 41, text="x", pid="7", name="serve", role="listener")
    assert judged(tmp_path / "b", [first], *shared, gone)["oom"][0].hard


def test_worker_that_ends_is_a_crash_only_with_another_sign(tmp_path: Path) -> None:
    def gone(seen_s: str) -> Sample:
        labels = {"pid": "9", "name": "worker", "role": "member", "seen_s": seen_s}
        return Sample("process", "process_gone", 1.0, golden.at(44), labels, "gone")

    observed = golden.sample("process", "observed", 1.0, 1, text="")
    (quiet,) = judged(tmp_path / "a", [observed], gone("500"))["restart"]
    assert (quiet.status, quiet.hard, quiet.cause) == ("warn", False, "member_gone")
    (passing,) = judged(tmp_path / "b", [observed], gone("3"))["restart"]
    assert passing.status == "pass"
    reset = golden.sample("engine", "counter_reset", 1.0, 46, text="x")
    (crash,) = judged(tmp_path / "c", [observed], gone("500"), reset)["restart"]
    assert (crash.status, crash.hard) == ("fail", True)
    assert "worker, a process of the server, is gone" in crash.message


def test_container_and_process_that_end_together_are_one_outage(tmp_path: Path) -> None:
    signs = [
        said("exited", exit_code="139", oom_killed="false"), said("started"),
        golden.sample("cgroup", "cgroup_gone", 1, 44, text="x", cgroup="/docker/x"),
        golden.sample("process", "process_gone", 1, 44, text="x", pid="7", name="serve", role="listener"),
    ]  # fmt: skip
    (outage,) = judged(tmp_path / "run", [golden.sample("docker", "observed", 1.0, 1, text="")], *signs)["restart"]
    assert outage.status == "fail"
    for part in ("samples: docker", "samples: process", "samples: cgroup"):
        assert part in outage.evidence
