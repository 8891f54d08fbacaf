"""One load of our engine against the ground-truth server, as a process of its own: prints its figures as JSON.

`client.py URL STREAMS REQUESTS [--ttft 200] [--gap 20] [--tokens 128] [--read-times] [--alone]`. The engine, its
grading and the client are the real ones; only the recorder is replaced by one that keeps every gap. `--alone` drives
the client without the engine, as the rig drives the request function of vLLM's own client.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from pathlib import Path

import uvloop

from loadgen import clock, plugins
from loadgen.client import Client
from loadgen.engine import apart_s
from loadgen.selftest.drive import Driven, Tape, drive, scene
from loadgen.selftest.truth import Schedule, lag_ms, late_ms, most_open, rank
from loadgen.types import Request


def peak_rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def figures(driven: Driven, rss_mb: float) -> dict[str, object]:
    """Reported against true, in milliseconds."""
    p, lag, late = driven.paired, lag_ms(driven.tape.seen), late_ms(driven.served, driven.schedule)
    return {
        "streams": driven.streams, "requests": driven.requests, "unpaired": p.unpaired,
        "failed": len(driven.tape.failed), "times": "+".join(sorted(driven.tape.times)),
        **{f"{name}_{tag}{side}": rank(getattr(p, f"{name}{side}"), q)
           for name, tags in (("ttft", ("p50", "p99")), ("gap", ("p50", "p99", "p99.9")),
                              ("tpot", ("p50", "p99")), ("e2e", ("p50", "p99")))
           for tag in tags for q in [float(tag[1:]) / 100] for side in ("", "_true")},
        "error_p99": rank(p.gap_error, 0.99), "error_p99.9": rank(p.gap_error, 0.999),
        "inexact": p.inexact_share, "lag_p50": rank(lag, 0.5), "lag_p99": rank(lag, 0.99),
        "late_p99": rank(late, 0.99), "open_mean": driven.achieved, "open_most": most_open(driven.served),
        "rate_share": driven.rate_share,
        "us_per_chunk": driven.cpu_s * 1e6 / max(1, driven.chunks), "busy": driven.cpu_s / driven.wall_s,
        "rss_mb": rss_mb, "server_cpu_s": driven.server.get("cpu_s"),
    }  # fmt: skip


async def alone(url: str, streams: int, requests: int, schedule: Schedule, kernel_times: bool) -> dict[str, object]:
    """The client by itself: a semaphore, tasks, no deck, no grading, no record."""
    load = scene(url, streams, requests, schedule)
    dialect = plugins.load("dialects", load.target.dialect)
    client = Client(load.target, load.limits, dialect, model=schedule.model, headers={}, connections=streams,
                    kernel_times=kernel_times)  # fmt: skip
    prompt = [{"role": "user", "content": " ".join(f"w{n}" for n in range(16))}]
    seats = asyncio.Semaphore(streams)
    bad = 0

    async def one(number: int) -> None:
        nonlocal bad
        request = Request(f"alone-{number}", "alone", prompt, schedule.tokens, ignore_eos=True)
        await asyncio.sleep(min(number, streams) * apart_s(streams))  # as seats do
        async with seats:
            outcome = await client.send(request, dialect.encode(request, schedule.model, {"rid": number}))
        bad += outcome.outcome != "ok"

    gc.collect()
    gc.freeze()
    cpu_ns = clock.cpu_ns()
    await asyncio.gather(*(one(number) for number in range(requests)))
    cpu_s = (clock.cpu_ns() - cpu_ns) / 1e9
    await client.close()
    chunks = (requests - bad) * schedule.tokens
    return {"streams": streams, "requests": requests, "failed": bad, "us_per_chunk": cpu_s * 1e6 / max(1, chunks),
            "rss_mb": peak_rss_mb()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("streams", type=int)
    parser.add_argument("requests", type=int)
    parser.add_argument("--ttft", type=float, default=200)
    parser.add_argument("--gap", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--read-times", action="store_true")
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args()
    schedule, kernel = Schedule(args.ttft, args.gap, args.tokens), not args.read_times
    if args.alone:
        found = uvloop.run(alone(args.url, args.streams, args.requests, schedule, kernel))
    else:
        held: list[float] = []

        class Measured(Tape):
            """Notes the peak of memory when the last answer is in: the server's log comes after."""

            def event(self, name: str, /, **fields: object) -> None:
                if name == "phase_drained":
                    held.append(peak_rss_mb())

        driven = uvloop.run(drive(args.url, args.streams, args.requests, schedule, Measured(), kernel))
        found = figures(driven, held[0])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
