"""One engine process: reads the run folder's scenario, wires client, dialect and recorder to the engine, runs it.

Started by `supervise`, with which it shares nothing but the run folder. SIGTERM stops it gracefully, a second one at
once; SIGINT is ignored, since Ctrl-C reaches the supervisor, who decides.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from functools import partial
from pathlib import Path

import uvloop

from loadgen import child, clock, plugins, scenario, secrets
from loadgen.client import Client
from loadgen.engine import Engine, watch_health
from loadgen.record import Recorder

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_bytes() -> int | None:
    """Our own resident memory; None where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE_BYTES
    except OSError:
        return None


async def run(folder: Path, shard: int, shards: int) -> int:
    """0 when the phases ran to their end or were stopped by a signal; 70 (EX_SOFTWARE) when we broke."""
    scene = scenario.load(folder / "scenario.yaml")
    dialect = plugins.load("dialects", scene.target.dialect)
    model = scene.target.model or ""
    recorder = Recorder(folder, shard)
    client = Client(
        scene.target,
        scene.limits,
        dialect,
        model=model,
        headers=secrets.headers(scene.target),
        connections=scene.concurrency,
    )
    engine = Engine(
        scene,
        sender=client,
        encode=partial(dialect.encode, model=model, extra_body=scene.target.extra_body),
        recorder=recorder,
        shard=shard,
        shards=shards,
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, engine.stop.press)
    health = asyncio.create_task(watch_health(engine, clock.cpu_ns, rss_bytes))
    gc.collect()
    gc.freeze()  # what was built by now lives to the end: a full collection must never walk it
    reason = "broken"
    try:
        reason = await engine.run()
    finally:
        health.cancel()
        await asyncio.gather(health, return_exceptions=True)
        recorder.event("shard_end", reason=reason, write_errors=recorder.errors)
        await client.close()
        recorder.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child.die_with_parent()
    return uvloop.run(run(args.folder, args.shard, args.shards))


if __name__ == "__main__":
    sys.exit(main())
