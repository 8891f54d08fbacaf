"""`make bench-client`: what a chunk costs our client, beside a C reader that parses nothing and the peers installed.

All in one sitting and in turn: client A, client B, …, and again; medians. CPU is user and system time of the process
tree from the first request to the exit, reports included, divided by the chunks that the server sent. Streams of ours
and of the C reader begin one after the other, as our seats do; peers begin as they do. Ratios are what to carry over to
another machine. A bench for people, not a gate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from loadgen import scenario
from loadgen.engine import apart_s
from loadgen.record import write_text
from loadgen.selftest.drive import scene
from loadgen.selftest.truth import Schedule
from tests.rig import peers, rig
from tests.rig.bench_accuracy import ROUNDS, table

LEVELS = (256, 512, 1000)
RUNS = 3
SCHEDULE = Schedule()
# C reader: without kernel times it reads and looks at a clock, with them it does what our fast reader does.
FLOOR_READ, FLOOR_KERNEL = "C reader, read + clock", "C reader, kernel times"
ENGINE, ALONE, ALONE_READ = "loadgen, whole engine", "loadgen, client alone", "loadgen, client alone, read times"
# Growth: short answers, counted from when pools and histograms have their size.
GROWTH_STREAMS, GROWTH_FROM, GROWTH_TO = 64, 20_000, 120_000
GROWTH_SCHEDULE = Schedule(1, 1, 2)
GROWTH_LIMIT_S = 300

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One client at one level."""

    command: list[str | Path]
    read: Callable[[], Mapping[str, float | None]] = dict
    env: Mapping[str, str] = field(default_factory=dict)
    peer: bool = False


def job(client: str, server: rig.TruthServer, streams: int, requests: int, folder: Path) -> Job:
    """How to run a client. Raises MissingError where it is not installed."""
    mine: list[str | Path] = [sys.executable, "-m", "tests.rig.client", server.url, str(streams), str(requests)]
    if client in (FLOOR_READ, FLOOR_KERNEL):
        mode = "2" if client == FLOOR_KERNEL else "1"
        apart_us = str(round(apart_s(streams) * 1e6))
        return Job(
            [rig.built("c_reader"), str(server.port), SCHEDULE.model, str(streams), str(requests), mode, apart_us]
        )
    if client == ENGINE:
        return Job(
            [sys.executable, "-m", "loadgen.shard", shard_folder(folder, server.url, streams, requests, SCHEDULE)]
        )
    if client == ALONE:
        return Job([*mine, "--alone"])
    if client == ALONE_READ:
        return Job([*mine, "--alone", "--read-times"])
    peer = peers.ALL[client](server.url, SCHEDULE.model, streams, requests, folder)
    return Job(list(peer.command), peer.read, peer.env, peer=True)


def shard_folder(folder: Path, url: str, streams: int, requests: int, schedule: Schedule) -> Path:
    """A run folder as the supervisor would hand it to an engine shard."""
    run = folder / "run"
    run.mkdir()
    write_text(run, "scenario.yaml", scenario.dump(scene(url, streams, requests, schedule)))
    return run


def measure(client: str, streams: int, cores: rig.Cores) -> Row:
    """One client once. Raises MissingError where it cannot be measured."""
    requests = streams * ROUNDS.get(streams, 3)
    folder = Path(tempfile.mkdtemp(prefix="bench-client-"))
    try:
        with rig.truth_server(cores.server, SCHEDULE.model) as server:
            what = job(client, server, streams, requests, folder)
            log = folder / "log.txt"
            cost = rig.cost(
                what.command, server, cores.client, env={"PYTHONPATH": str(rig.ROOT), **what.env} if not what.peer
                else dict(what.env), cwd=folder, log=log, raise_late=what.peer,
            )  # fmt: skip
        said: Mapping[str, float | None] = {}
        if cost.rc == 0:
            try:
                said = what.read()
            except (OSError, KeyError, IndexError, ValueError) as error:
                said = {}
                print(f"({client}: its report cannot be read: {error!r})", file=sys.stderr)
        if cost.rc or not cost.truth["chunks"]:
            words = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no word"]
            raise rig.MissingError(f"{client} at {streams}: exit code {cost.rc}: {words[0][:160]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "client": client, "streams": streams, "requests": requests, "us_per_chunk": cost.us_per_chunk,
        "start_s": cost.start_s, "exit_s": cost.exit_s, "rss_mb": cost.rss_mb, "processes": cost.processes,
        "rate_share": (cost.chunks_per_s or 0) / SCHEDULE.rate_per_s(streams), "peak": cost.truth["peak"], **said,
    }  # fmt: skip


COLUMNS = (
    "streams", "client", "µs CPU / chunk", "× C reader, kernel", "× C reader, read", "ours costs … less",
    "chunks/s a core", "of offered rate", "most open", "reported TTFT p50 / p99 ms", "ITL p99 ms",
    "start s", "exit s", "RSS MB", "runs",
)  # fmt: skip


def rows(found: list[Row]) -> list[list[str]]:
    """Medians per level and client, with ratios to the floor and to our engine in the same sitting."""
    made = []
    for streams in sorted({row["streams"] for row in found}):
        level = [row for row in found if row["streams"] == streams]
        cpu = {
            client: rig.median([row["us_per_chunk"] for row in level if row["client"] == client])
            for client in dict.fromkeys(row["client"] for row in level)
        }
        for client, own in sorted(cpu.items(), key=lambda item: item[1] or 0):
            of_client = [row for row in level if row["client"] == client]

            def mid(key: str, digits: int, of: list[Row] = of_client) -> str:
                value = rig.median([row.get(key) for row in of])
                return "–" if value is None else f"{value:.{digits}f}"

            def times(other: float | None, mine: float | None = own) -> str:
                return f"{mine / other:.2f}" if mine and other else "–"

            made.append([
                str(streams), client, mid("us_per_chunk", 1), times(cpu.get(FLOOR_KERNEL)), times(cpu.get(FLOOR_READ)),
                times(cpu.get(ENGINE)) + "×" if client in peers.ALL else "", f"{1e6 / own:,.0f}" if own else "–",
                f"{100 * (rig.median([row['rate_share'] for row in of_client]) or 0):.1f} %", mid("peak", 0),
                f"{mid('ttft_p50', 0)} / {mid('ttft_p99', 0)}", mid("gap_p99", 1), mid("start_s", 2), mid("exit_s", 2),
                mid("rss_mb", 0), str(len(of_client)),
            ])  # fmt: skip
    return made


def growth(cores: rig.Cores) -> str:
    """How much memory the engine keeps per request, from its own process while it sends."""
    folder = Path(tempfile.mkdtemp(prefix="bench-growth-"))
    try:
        with rig.truth_server(cores.server, GROWTH_SCHEDULE.model) as server:
            run = shard_folder(folder, server.url, GROWTH_STREAMS, GROWTH_TO, GROWTH_SCHEDULE)
            process = subprocess.Popen([sys.executable, "-m", "loadgen.shard", run], cwd=rig.ROOT,
                                       preexec_fn=rig.as_real_time(cores.client, None, 0))  # fmt: skip
            points: list[tuple[int, float]] = []
            begun = time.monotonic()
            try:
                while process.poll() is None and time.monotonic() - begun < GROWTH_LIMIT_S:
                    points.append((server.get("/stats")["requests"], rig.usage(process.pid).rss_mb))
                    time.sleep(0.25)
            finally:
                process.terminate()
                process.wait(rig.STOP_S)
            took_s = time.monotonic() - begun
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return growth_told(points, took_s)


def growth_told(points: list[tuple[int, float]], took_s: float) -> str:
    """The slope between GROWTH_FROM requests and the end: medians of the first and the last tenth of the readings."""
    late = [(n, rss) for n, rss in points if n >= GROWTH_FROM and rss]
    if len(late) < 20:
        return f"growth: too few readings ({len(late)}) past {GROWTH_FROM} requests"
    tenth = max(1, len(late) // 10)
    (n0, rss0), (n1, rss1) = (sorted(part)[len(part) // 2] for part in (late[:tenth], late[-tenth:]))
    per = (rss1 - rss0) / (n1 - n0) * 100_000
    return (
        f"growth: RSS {rss0:.1f} MB at {n0:,} requests, {rss1:.1f} MB at {n1:,} ({took_s:.0f} s): "
        f"{per:+.2f} MB per 100,000 requests (goal: at most 1)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_client", description=__doc__)
    parser.add_argument("--streams", default=",".join(map(str, LEVELS)), help="levels, with commas")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--peer", default=",".join(peers.ALL), help=f"of {', '.join(peers.ALL)}; or none")
    parser.add_argument("--only", help="of the clients that are no peers, those with this in their name")
    parser.add_argument("--growth", action="store_true", help="the engine's memory over 120,000 requests instead")
    parser.add_argument("--json", type=Path, help="append every run to this file, a line each")
    parser.add_argument("--table", type=Path, help="print the table of such a file and measure nothing")
    args = parser.parse_args()
    if args.table is not None:
        print(table(COLUMNS, rows([json.loads(line) for line in args.table.read_text().splitlines()])))
        return 0
    cores = rig.Cores.chosen()
    try:
        rig.built("truth_server")
        rig.built("c_reader")
    except rig.MissingError as why:
        print(f"bench-client: skipped: {why}")
        return 0
    print(f"{rig.head(cores)}; runs interleaved", flush=True)
    if args.growth:
        print(growth(cores))
        return 0
    wanted = [] if args.peer == "none" else args.peer.split(",")
    if unknown := [name for name in wanted if name not in peers.ALL]:
        parser.error(f"--peer: {unknown[0]} is not one of {', '.join(peers.ALL)}")
    ours = [FLOOR_READ, FLOOR_KERNEL, ENGINE, ALONE, ALONE_READ]
    clients = [name for name in ours if args.only is None or args.only in name] + wanted
    found: list[Row] = []
    for _ in range(args.runs):
        for streams in map(int, args.streams.split(",")):
            for client in list(clients):
                try:
                    row = measure(client, streams, cores)
                except rig.MissingError as why:
                    print(f"skipped: {why}", flush=True)
                    if client in peers.ALL:
                        clients.remove(client)
                    continue
                found.append(row)
                print(
                    f"{streams:>5} {client}: {row['us_per_chunk']:.1f} µs a chunk, {row['rss_mb']:.0f} MB", flush=True
                )
                if args.json is not None:
                    with args.json.open("a") as out:
                        out.write(json.dumps(row) + "\n")
    print(f"\n{table(COLUMNS, rows(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
