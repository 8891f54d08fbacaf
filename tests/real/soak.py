#!/usr/bin/env python3
"""`make real` and `make real-vllm`: start a real server, run the soak on it, end the server.

usage: soak.py llamacpp|vllm [--duration 60s] [--serve "OPTIONS OF serve_….py"] [loadgen run's own options ...]
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache"
LOADGEN = Path(sys.executable).parent / "loadgen"
# What the small real model can carry on one core, and the standard soak for a server with a model of noise.
SCENARIOS = {"llamacpp": str(HERE / "soak-smollm2.yaml"), "vllm": "soak-600s"}
STOP_S = 30  # llama.cpp ends its current batch first, vLLM its three processes; then they are killed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("server", choices=["llamacpp", "vllm"])
    parser.add_argument("--duration", default="60s")
    parser.add_argument("--serve", default="", help="options for the server's script, in one word")
    args, more = parser.parse_known_args()

    # loadgen gets the terminal's Ctrl-C itself, drains and reports; we only wait for it. Not SIG_IGN: it would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    CACHE.mkdir(exist_ok=True)
    log = CACHE / f"{args.server}.log"
    script = HERE / f"serve_{args.server}.py"
    print(f"starting the server: {script.name} {args.serve}(its log: {log})", flush=True)
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [sys.executable, script, *shlex.split(args.serve)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip
    assert server.stdout is not None
    try:
        word, _, url = server.stdout.readline().strip().partition(" ")
        if word != "listening":
            print(log.read_text(errors="replace")[-2000:].rstrip(), file=sys.stderr)
            return server.wait(STOP_S) or 3
        run = [str(LOADGEN), "run", SCENARIOS[args.server], "--url", url, "--duration", args.duration, *more]
        print(f"soak: {shlex.join(['loadgen', *run[1:]])}", flush=True)
        return subprocess.call(run)
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
