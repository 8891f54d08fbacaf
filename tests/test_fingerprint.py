"""`environment.json`: what ran where, complete enough to compare by, and fit to be passed on."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import serving
from test_docker import ID, RUNNING, Engine
from test_docker import serving as engine_at

from loadgen import clock, fingerprint, served
from loadgen.fingerprint import Gathered
from loadgen.preflight import Facts

PATIENCE_S = 30.0
KEY = "plantedsecretzq"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A simulated server with keys in its arguments and its environment."""
    folder = tmp_path_factory.mktemp("private-folder")
    script = folder / "serve.py"
    script.write_text(
        "import runpy, sys\nsys.argv = ['sim', '--preset', 'tiny', '--port', '0']\n"
        "runpy.run_module('loadgen.sim', run_name='__main__')\n"
    )
    argv = ["--model", "/srv/private/Qwen3-8B", "--api-key", KEY, "--revision", "main", "--dtype", "bfloat16",
            "--quantization=fp8", "--host", "spark-7.lan", "--note", f"x {KEY}handed"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        patch.setenv("VLLM_USE_V1", "1")
        with serving(script, *argv, log=folder / "log") as url:
            yield url


def gathered(url: str, monitors: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """As a run has it, but with all the time in the world."""
    found = fingerprint.begin(url, monitors or {}, headers=headers)
    for thread in found.threads:
        thread.join(PATIENCE_S)
    told: dict[str, Any] = json.loads(
        json.dumps(fingerprint.environment(Facts(engine="vLLM", model="m"), ["run"], found))
    )
    return told


def test_server_is_told_apart_by_program_arguments_and_settings(server: str) -> None:
    found = gathered(server)["server"]
    process = found["process"]
    assert process["arguments"][2:] == [
        "--model", "…/Qwen3-8B", "--api-key", "…", "--revision", "main", "--dtype", "bfloat16", "--quantization=fp8",
        "--host", "…", "--note", f"x {KEY}handed",
    ]  # fmt: skip
    assert len(process["arguments_sha256"]) == len(process["executable_sha256"]) == 64
    assert process["settings"]["VLLM_USE_V1"] == "1"
    assert process["started"].endswith("Z")
    assert (found["revision"], found["dtype"], found["quantization"]) == ("main", "bfloat16", "fp8")
    assert "pid" not in process


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_is_told_with_clocks_and_settings(server: str) -> None:
    found = gathered(server)
    host = found["host"]
    assert host["cpus"] == os.cpu_count()
    assert host["memory_total_bytes"] > 0
    assert {"kernel", "boot_id", "sysctl", "uptime_s", "architecture", "swap_total_bytes"} <= host.keys()
    assert set(found["started"]) == {"mono_ns", "boottime_ns", "wall_ns", "boot_id"}
    assert isinstance(host["others"], list)
    assert "gpu_driver" in host or "gpus" in found["not_read"]


def test_nothing_in_it_names_a_machine_a_person_or_a_key(server: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}handed"}
    text = json.dumps(gathered(server, headers=headers), ensure_ascii=False)
    port = server.rpartition(":")[2]
    for private in (KEY, "spark-7", "private-folder", "/srv", tempfile.gettempdir(), f"127.0.0.1:{port}", sys.prefix):
        assert private not in text, private
    for name in (socket.gethostname(), getpass.getuser()):
        assert f'"{name}"' not in text


def test_what_could_not_be_read_is_absent_and_named() -> None:
    found = gathered("http://192.0.2.1:8000")
    assert "process" not in found["server"]
    assert found["not_read"]["server process"] == "target is not on this host (…)"


def test_container_is_told_where_its_monitor_is_asked_for(server: str) -> None:
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        path = Path(folder) / "d.sock"

        async def ask() -> dict[str, Any]:
            async with engine_at(Engine({ID: RUNNING}), path):
                return await asyncio.to_thread(gathered, server, {"docker": {"socket": str(path), "container": "llm"}})

        found = asyncio.run(ask())["server"]
    assert found["container"] == {
        "image_digest": "sha256:" + "cd" * 32, "restart_policy": "unless-stopped", "project": "soak", "service": "llm",
        "started_at": "2026-01-01T00:00:00.000000001Z", "image": "vllm-openai:v0.33.0",
        "settings": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
    }  # fmt: skip
    assert found["container_limits"] == {"memory_limit_bytes": 8 << 30, "shm_size_bytes": 64 << 20}


def test_start_does_not_wait_for_what_hangs() -> None:
    found = Gathered(left={"gpus"})
    never = threading.Event()
    found.threads = [threading.Thread(target=never.wait, args=(PATIENCE_S,), daemon=True)]
    found.threads[0].start()
    begin_ns = clock.now_ns()
    told = fingerprint.environment(Facts(), [], found)
    assert (clock.now_ns() - begin_ns) / 1e9 < PATIENCE_S / 2
    assert told["not_read"] == {"gpus": "not read in time"}
    never.set()


def test_reader_that_breaks_costs_its_fact_and_no_other(server: str) -> None:
    found = gathered(server, {"docker": {"no_such_option": 1, "socket": "/nonexistent/d.sock"}})
    assert "process" in found["server"]
    assert found["not_read"]["docker"] == "…/d.sock: No such file or directory"


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("x-Q4_K_M.gguf", "Q4_K_M"), ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"), ("Qwen3-8B-FP8", "FP8"),
     ("m-iq2_xs", "IQ2_XS"),
     ("gpt-oss-120b-MXFP4", "MXFP4"), ("org/M-AWQ", "AWQ"), ("Llama-3.1-8B", None), (None, None)],
)  # fmt: skip
def test_quantization_is_read_off_a_name(name: str | None, quantization: str | None) -> None:
    assert served.quantization(name) == quantization


def test_model_served_from_a_path_is_told_by_its_last_part() -> None:
    told = fingerprint.environment(Facts(model="/srv/alice/Qwen3-8B"), [])
    assert told["server"]["model"] == "…/Qwen3-8B"
