"""`make bench-accuracy`: what our client reports against what the ground-truth server did, stream by stream.

Cold start, TTFT 200 ms, gap 20 ms, 128 tokens, server on one core, client on another, median of three runs. Streams
open and rate are those while all streams were asked for: from the last seat's first request to the last request. Every
figure is a difference of two readings of one machine's CLOCK_MONOTONIC. A bench for people, not a gate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from tests.rig import rig

LEVELS = (1, 16, 64, 256, 512, 1000)
RUNS = 3
LIMIT_S = 120.0
# About three rounds a run; single streams need more to have any tail.
ROUNDS = {1: 4, 16: 4}

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal of the product, for the levels at which it holds."""

    name: str
    low: int
    high: int
    holds: Callable[[Figures], bool]


def near(name: str, share: float = 0.0, ms: float = 0.0) -> Callable[[Figures], bool]:
    """Reported within a share of the truth, or within some milliseconds of it."""
    return lambda f: abs(f[name] - f[f"{name}_true"]) <= max(share * f[f"{name}_true"], ms)


GOALS = (
    Goal("ITL p99 within 1 %", 1, 512, near("gap_p99", share=0.01)),
    Goal("gap error p99 ≤ 0.05 ms", 1, 512, lambda f: f["error_p99"] <= 0.05),
    Goal("TTFT p50 within 0.5 ms", 1, 512, near("ttft_p50", ms=0.5)),
    Goal("TTFT p99 within 2 ms", 1, 512, near("ttft_p99", ms=2.0)),
    Goal("≥ 97 % of the rate", 1000, 1000, lambda f: f["rate_share"] >= 0.97),
    Goal("TTFT p50 within 1 %", 1000, 1000, near("ttft_p50", share=0.01)),
    Goal("TTFT p99 within 5 %", 1000, 1000, near("ttft_p99", share=0.05)),
    Goal("no stream failed or unpaired", 1, 1000, lambda f: not f["failed"] and not f["unpaired"]),
)


def missed(figures: Figures) -> list[str]:
    """The goals of this level that were not reached."""
    return [
        goal.name for goal in GOALS if goal.low <= figures["streams"] <= goal.high and not goal.holds(figures)
    ]  # fmt: skip


def middle(runs: list[Figures]) -> Figures:
    """The median of each figure."""
    return {
        key: rig.median([run[key] for run in runs]) if isinstance(value, int | float) else value
        for key, value in runs[-1].items()
    }


def measure(streams: int, cores: rig.Cores, more: list[str]) -> Figures:
    """One run: a fresh server and a fresh client, both pinned."""
    requests = streams * ROUNDS.get(streams, 3)
    with rig.truth_server(cores.server) as server:
        done = subprocess.run(
            [sys.executable, "-m", "tests.rig.client", server.url, str(streams), str(requests), *more],
            cwd=rig.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S,
            preexec_fn=rig.as_real_time(cores.client, os.SCHED_RR, rig.CLIENT_PRIORITY),
        )  # fmt: skip
    figures: Figures = json.loads(done.stdout)
    return figures


COLUMNS = (
    "streams", "times from", "TTFT p50 / p99 ms (true)", "ITL p50 / p99 / p99.9 ms (true)", "gap error p99 / p99.9 ms",
    "TPOT p50 ms (true)", "e2e p50 / p99 ms (true)", "open mean / most", "of offered rate", "inexact",
    "client lag p50 / p99 ms", "µs CPU / chunk", "core busy", "RSS MB", "goals",
)  # fmt: skip


def pairs(f: Figures, name: str, *tags: str, digits: int = 1) -> str:
    def all_of(side: str) -> str:
        return " / ".join(f"{f[f'{name}_{tag}{side}']:.{digits}f}" for tag in tags)

    return f"{all_of('')} ({all_of('_true')})"


def row(f: Figures) -> list[str]:
    without = missed(f)
    lag = f"{f['lag_p50']:.2f} / {f['lag_p99']:.2f}" if "kernel" in f["times"] else "not known"
    return [
        f"{f['streams']}", f["times"],
        pairs(f, "ttft", "p50", "p99"), pairs(f, "gap", "p50", "p99", "p99.9", digits=2),
        f"{f['error_p99']:.3f} / {f['error_p99.9']:.3f}",
        pairs(f, "tpot", "p50", digits=3), pairs(f, "e2e", "p50", "p99"),
        f"{f['open_mean']:.1f} / {f['open_most']}", f"{100 * f['rate_share']:.1f} %", f"{100 * f['inexact']:.2f} %",
        lag, f"{f['us_per_chunk']:.1f}", f"{f['busy']:.2f}", f"{f['rss_mb']:.0f}",
        "reached" if not without else f"missed: {'; '.join(without)}",
    ]  # fmt: skip


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [list(columns), ["---"] * len(columns), *rows])


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_accuracy", description=__doc__)
    parser.add_argument("--streams", default=",".join(map(str, LEVELS)), help="levels, with commas")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--read-times", action="store_true", help="without the kernel's receive times")
    parser.add_argument("--json", type=Path, help="append every run to this file, a line each")
    parser.add_argument("--table", type=Path, help="print the table of such a file and measure nothing")
    args = parser.parse_args()
    if args.table is not None:
        runs = [json.loads(line) for line in args.table.read_text().splitlines()]
        levels = sorted({run["streams"] for run in runs})
        print(table(COLUMNS, [row(middle([run for run in runs if run["streams"] == level])) for level in levels]))
        return 0
    more = ["--read-times"] if args.read_times else []
    cores = rig.Cores.chosen()
    try:
        rig.built("truth_server")
    except rig.MissingError as why:
        print(f"bench-accuracy: skipped: {why}")
        return 0
    print(f"{rig.head(cores)}; medians of {args.runs} runs\n\n{table(COLUMNS, [])}", flush=True)
    all_reached = True
    for streams in map(int, args.streams.split(",")):
        runs = [measure(streams, cores, more) for _ in range(args.runs)]
        if args.json is not None:
            with args.json.open("a") as out:
                out.writelines(json.dumps(run) + "\n" for run in runs)
        found = middle(runs)
        all_reached = all_reached and not missed(found)
        print(f"| {' | '.join(row(found))} |", flush=True)
    print(f"\ngoals of these levels: {'all reached' if all_reached else 'not all reached'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
