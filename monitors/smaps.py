"""The server's proportional memory (PSS), read only while it is idle: at the start and after each phase was drained.

PSS counts a page that four workers share as a quarter each, which RSS does not; so it can be summed up over a tree. The
kernel walks the page tables for it and holds the process's memory lock meanwhile: 18 to 34 ms per GiB of 4 KiB pages,
which a server under load would feel as latency. Hence the moments: the run's journal says when no request is open. And
hence the budget: what would take longer than that is left out, aloud.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds
from monitors import process, server
from monitors.server import Stat, read

LANE: Lane = "slow"
PERIOD_S = 0.2  # a look at the end of the journal; lanes are stopped soon after the last phase was drained
WALK_NS_PER_GIB = 34_000_000  # measured, 4 KiB pages; huge pages take a hundredth
BUDGET_NS = 2_000_000_000  # of one moment: 60 GiB of small pages
MIN_GAP_NS = 10_000_000_000  # phases of a second need no figure each
MAX_JOURNAL_BYTES = 1 << 20  # read at a time; a run writes some lines a phase
MAX_LABELLED = 16  # as in `process`
GIB = 1 << 30

METRICS = {
    "Rss": "rss_bytes",
    "Pss": "pss_bytes",
    "Pss_Anon": "pss_anon_bytes",
    "Pss_File": "pss_file_bytes",
    "Pss_Shmem": "pss_shmem_bytes",
    "Swap": "swap_bytes",
    "SwapPss": "swap_pss_bytes",
}
_LINE = re.compile(rb"^(\w+):\s+(\d+) kB$", re.MULTILINE)
_RESIDENT = re.compile(rb"^VmRSS:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Options:
    root: str = "/"
    target_url: str = ""
    run_folder: str = ""
    pid: int = 0
    period_s: Seconds = Seconds(0.2)


@dataclass(slots=True)
class Phases:
    """What the journal has said so far: how far it was read, which phases (by shard) are open, which ended last."""

    offset: int = 0
    open: set[tuple[str, str]] = field(default_factory=set)
    drained: str = ""


def rollup(data: bytes) -> dict[str, int]:
    """smaps_rollup in bytes, under our names."""
    return {METRICS[key.decode()]: int(kb) * 1024 for key, kb in _LINE.findall(data) if key.decode() in METRICS}


def advance(phases: Phases, journal: Path) -> str:
    """Read what is new: the name of the phase after which nothing is open any more, else the empty string."""
    try:
        with journal.open("rb") as file:
            file.seek(phases.offset)
            data = file.read(MAX_JOURNAL_BYTES)
    except OSError:  # not begun yet
        return ""
    whole, newline, _ = data.rpartition(b"\n")
    phases.offset += len(whole) + len(newline)
    ended = ""
    for line in whole.split(b"\n"):
        if b'"phase_' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        name = str(event.get("phase"))
        key = (str(event.get("by")), name)
        if event.get("event") == "phase_start":
            phases.open.add(key)
            ended = ""
        elif event.get("event") == "phase_drained":
            phases.open.discard(key)
            ended = name
    return "" if phases.open else ended


def whole_tree(root: Path, listener: Stat) -> list[Stat]:
    """Everything that is the server, as `process` sees it."""
    tree = process.Tree()
    foreign = process.ancestors(root / "proc", os.getpid()) if root == Path("/") else set()
    process.arrived(root, tree, listener, foreign, 0)
    process.grow(root / "proc", tree, foreign, 0)
    return [member.stat for member in tree.members.values()]


def measure(options: Options, moment: str) -> list[Sample]:
    """PSS of the tree, sums and the first members; what the budget does not cover is counted and left out."""
    root = server.tree(options.root)
    port, why = (0, "") if options.pid else server.port_of(options.target_url)
    found = server.named(root / "proc", options.pid) if options.pid else server.find(root / "proc", port)
    if why or found.listener is None:
        return []
    begin = clock.now_ns()
    sums: dict[str, int] = {}
    out: list[Sample] = []
    planned_ns = skipped = denied = read_ = 0
    for stat in whole_tree(root, found.listener):
        folder = root / "proc" / str(stat.pid)
        resident = _RESIDENT.search(read(folder / "status") or b"")
        cost_ns = int(resident[1]) * 1024 * WALK_NS_PER_GIB // GIB if resident else 0
        if planned_ns + cost_ns > BUDGET_NS or clock.now_ns() - begin > BUDGET_NS:
            skipped += 1
            continue
        planned_ns += cost_ns
        data = read(folder / "smaps_rollup")
        if not data:
            denied += resident is not None
            continue
        values = rollup(data)
        read_ += 1
        for metric, value in values.items():
            sums[metric] = sums.get(metric, 0) + value
        if read_ <= MAX_LABELLED:
            labels = {"pid": str(stat.pid), "name": stat.name, "moment": moment}
            out += [Sample("smaps", metric, float(value), clock.now_ns(), labels) for metric, value in values.items()]
    now = clock.now_ns()
    # a sum that lacks a process is no sum of the tree
    if not skipped and not denied:
        out += [Sample("smaps", metric, float(value), now, {"moment": moment}) for metric, value in sums.items()]
    counts = {"processes_read": read_, "processes_skipped": skipped, "processes_denied": denied}
    out += [Sample("smaps", metric, float(count), now, {"moment": moment}) for metric, count in counts.items()]
    return [*out, Sample("smaps", "walk_ms", (now - begin) / 1e6, now, {"moment": moment})]


def sight(options: Options) -> tuple[bool, str]:
    """Whether the figures can be read at all, and if not, why."""
    root = server.tree(options.root)
    port, why = (0, "") if options.pid else server.port_of(options.target_url)
    if why:
        return False, why
    found = server.named(root / "proc", options.pid) if options.pid else server.find(root / "proc", port)
    if found.listener is None:
        return False, found.why
    path = root / "proc" / str(found.listener.pid) / "smaps_rollup"
    try:
        with path.open("rb"):
            pass
    except PermissionError:
        return False, f"smaps_rollup of pid {found.listener.pid} belongs to another user: run as root"
    except OSError:
        return False, "this kernel has no smaps_rollup (Linux 4.14 and later)"
    return True, f"pid {found.listener.pid} ({found.listener.name}) and its tree, while no request is open"


async def watch(options: Options) -> AsyncIterator[list[Sample]]:
    """PSS at the start and after each phase, with label `moment` (`start`, or the phase that was drained)."""
    told: str | None = None
    journal = Path(options.run_folder) / "journal.jsonl"
    phases = Phases()
    advance(phases, journal)
    last_ns = 0
    while True:
        out: list[Sample] = []
        if told is None or (told and not last_ns):
            seen, why = await asyncio.to_thread(sight, options)
            if why != told:
                told = why
                out.append(Sample("smaps", "observed", float(seen), clock.now_ns(), text=why))
            if seen and not phases.open:
                out += await asyncio.to_thread(measure, options, "start")
            last_ns = clock.now_ns() if seen else 0
        moment = advance(phases, journal)
        if moment and last_ns and clock.now_ns() - last_ns >= MIN_GAP_NS:
            out += await asyncio.to_thread(measure, options, moment)
            last_ns = clock.now_ns()
        yield out
