"""One engine process: reads the run folder's scenario, wires client, dialect and recorder to the engine, runs it.

Started by `supervise`, with which it shares nothing but the run folder; it is told on its standard input what a guard
wants and, one of several, when phases begin (`gate`). SIGTERM stops it gracefully, a second one at once, as does the
end of its standard input: an engine that nobody hears any more is worse than a lost one. SIGINT is ignored, since
Ctrl-C reaches the supervisor, who decides.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import uvloop

from loadgen import child, clock, plugins, scenario, secrets
from loadgen.client import Client
from loadgen.engine import Engine, watch_health
from loadgen.gate import MAX_LINE_BYTES, Gate, parsed
from loadgen.record import Recorder

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_bytes() -> int | None:
    """Our own resident memory; None where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE_BYTES
    except OSError:
        return None


def say(line: bytes) -> None:
    """To the supervisor. Lines are short and few: the pipe takes them at once, or nobody listens any more."""
    with suppress(OSError):
        os.write(sys.stdout.fileno(), line)


async def listen(gate: Gate | None, engine: Engine) -> None:
    """Hands on what the supervisor says, until it is gone; then stops the engine at once."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        said = parsed(line)
        if "guard" in said:
            engine.guard(said["guard"])
        elif gate is not None:
            gate.hear(line)
    engine.stop.press()
    engine.stop.press()


async def run(folder: Path, shard: int, shards: int, gated: bool, heeds: bool) -> int:
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
        headers=secrets.handed_on() or secrets.headers(scene.target),
        connections=scene.concurrency,
    )
    gate = Gate(say) if gated else None
    engine = Engine(
        scene,
        sender=client,
        encode=partial(dialect.encode, model=model, extra_body=scene.target.extra_body),
        recorder=recorder,
        shard=shard,
        shards=shards,
        gate=gate,
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, engine.stop.press)
    background = [asyncio.create_task(watch_health(engine, clock.cpu_ns, rss_bytes))]
    if heeds:
        background.append(asyncio.create_task(listen(gate, engine)))
    gc.collect()
    gc.freeze()  # what was built by now lives to the end: a full collection must never walk it
    reason = "broken"
    try:
        reason = await engine.run()
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        recorder.event("shard_end", reason=reason, write_errors=recorder.errors)
        await client.close()
        recorder.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--gated", action="store_true", help="be told on standard input when phases begin")
    parser.add_argument("--heeds", action="store_true", help="be told on standard input what a guard wants")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child.die_with_parent()
    return uvloop.run(run(args.folder, args.shard, args.shards, args.gated, args.gated or args.heeds))


if __name__ == "__main__":
    sys.exit(main())
