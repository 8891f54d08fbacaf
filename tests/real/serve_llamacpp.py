#!/usr/bin/env python3
"""Serve a small real language model with a real llama.cpp server (its own HTTP server, inside the xllamacpp wheel).

usage: serve_llamacpp.py [MODEL.gguf] [--port 0] [--slots 4] [--context 1024] [--threads 1] [--set NAME=VALUE]...

Prints `listening http://127.0.0.1:PORT` once requests are answered, then serves until SIGTERM or SIGINT. Without a
MODEL it takes SmolLM2-135M, fetched once. Each --set sets a field of xllamacpp's CommonParams: `--set n_batch=512`.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import smollm2

SLOTS = 4
CONTEXT_TOKENS = 1024  # of each slot: 13 s of prefill at 80 tokens/s; the model was trained to 8,192, near two minutes

# One thread, and never as many as there are cores: llama.cpp's threads spin at barriers, so that two of them on two
# cores fell from 80 to 14 tokens/s while other work ran beside them; one kept its pace.
THREADS = 1

# How many prompt tokens are computed between two decode steps. With the default of 2,048 one long prompt stopped
# everybody else's stream for 22 s; with 64 the other streams go on, slowly, in steps of under a second.
BATCH_TOKENS = 64

# llama.cpp keeps the state of finished prompts in host memory, up to 8 GiB by default, and would look like a leak for
# the first hours of a soak. This much is full within the warm-up.
CACHE_RAM_MIB = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL.gguf")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--context", type=int, default=CONTEXT_TOKENS, help="tokens in each slot")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--set", dest="fields", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    try:
        import xllamacpp
    except ImportError as error:
        raise SystemExit(f"xllamacpp does not import ({error}); `make setup` installs it") from None
    model = args.model or smollm2.fetch()
    if not model.is_file():
        raise SystemExit(f"{model}: no such model file")

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {model.stem}
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_parallel = args.slots
    params.n_ctx = args.slots * args.context  # llama.cpp divides it among the slots
    params.n_batch = params.n_ubatch = BATCH_TOKENS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.cache_ram_mib = CACHE_RAM_MIB
    params.endpoint_metrics = True
    params.endpoint_props = True
    params.ui = False
    for field in args.fields:
        name, _, value = field.partition("=")
        if not hasattr(params, name):
            raise SystemExit(f"--set {field}: CommonParams has no field {name}")
        kind = type(getattr(params, name))
        setattr(params, name, value if kind is str else kind(int(value)))

    # Blocked before llama.cpp starts its threads: they inherit the mask, and sigwait is the one that gets the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server  # joins llama.cpp's threads


if __name__ == "__main__":
    main()
