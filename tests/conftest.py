"""Fixtures that several test files share: addresses of servers that run in processes of their own, ended by pid."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

# No limit on the time of one example: a busy box would break it. In CI the examples are the same each time.
settings.register_profile("loadgen", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("loadgen")

TESTS = Path(__file__).parent
MODEL = TESTS.parent / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
STOP_S = 20


@contextmanager
def serving(*command: str | Path, log: Path) -> Iterator[str]:
    """A server's process: the address that its first line of output holds; it is ended after."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        urls = [word for word in words if word.startswith("http://")]
        assert urls, f"no address in {words}; the end of its log: {log.read_text(errors='replace')[-1000:]}"
        yield urls[0]
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """An empty run folder."""
    folder = tmp_path / "20261130T204500Z-test"
    folder.mkdir()
    return folder


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def sim_url(tmp_path: Path) -> Iterator[str]:
    """A simulated server of one test's own, preset `tiny`."""
    with serving("-m", "loadgen.sim", "--preset", "tiny", "--port", "0", log=tmp_path / "sim.log") as url:
        yield url


@pytest.fixture(scope="session")
def llamacpp_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real llama.cpp server with a small real model: four slots of 1,024 tokens."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed (make setup)")
    if not MODEL.is_file():
        pytest.skip(f"{MODEL} is missing (python tests/real/smollm2.py downloads it)")
    log = tmp_path_factory.mktemp("llamacpp") / "server.log"
    with serving(TESTS / "real/serve_llamacpp.py", MODEL, log=log) as url:
        yield url


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM: the one at VLLM_URL on this machine, or one started from the environment VLLM_VENV."""
    url, venv = os.environ.get("VLLM_URL"), os.environ.get("VLLM_VENV")
    if url:
        yield url
    elif venv:
        log = tmp_path_factory.mktemp("vllm") / "server.log"
        with serving(TESTS / "real/serve_vllm.py", "--venv", venv, log=log) as url:
            yield url
    else:
        pytest.skip("neither VLLM_URL nor VLLM_VENV is set (make real-vllm says how to install vLLM)")
