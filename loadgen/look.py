"""One look through the monitors: each one's first samples, by the lanes that a run would start, within a few seconds.

Whether a monitor can see is asked of the monitor and of nothing else. The lanes write into a folder of their own, which
is read and thrown away; one that a stuck driver holds is killed, and if that does not end it, it is left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from loadgen import child, clock, plugins, secrets
from loadgen.journal import Damage, expand, read_lines
from loadgen.types import Json, Lane

LANES: tuple[Lane, ...] = ("fast", "gpu", "slow")
LIMIT_S = 6.0  # the slowest monitor that answers is docker: three requests of at most 2 s each
ENOUGH_S = 1.3  # rates and digests need the end of a second
POLL_S = 0.05
HARDENED = "fast lane"  # under this name the lane says what it was granted to survive
END_S = 2.0  # a lane flushes and leaves within this, as in a run


@dataclass(slots=True)
class Seen:
    """What one monitor said. `observed` None: nothing at all within the limit. `values`: its last readings without
    labels; `labelled`: those with labels, as (labels, values)."""

    observed: bool | None = None
    text: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    labelled: list[tuple[dict[str, str], dict[str, float]]] = field(default_factory=list)
    happenings: list[tuple[str, str]] = field(default_factory=list)


def look(
    monitors: Mapping[str, Json],
    target_url: str,
    headers: Mapping[str, str],
    *,
    root: str = "/",
    limit_s: float = LIMIT_S,
) -> dict[str, Seen]:
    """What each of these monitors sees now, with its options, by its name; and under HARDENED what the fast lane was
    granted. Takes at least ENOUGH_S, at most `limit_s` and the time that lanes get to end."""
    wanted = {lane: [n for n in monitors if lane == plugins.load("monitors", n).LANE] for lane in LANES}
    folder = Path(tempfile.mkdtemp(prefix="loadgen-look-"))
    lanes = {}
    try:
        for lane, names in wanted.items():
            if names:
                lanes[lane] = _start(lane, {n: monitors[n] for n in names}, folder, target_url, headers, root)
        begin_ns = clock.now_ns()
        while (elapsed_s := (clock.now_ns() - begin_ns) / 1e9) < limit_s:
            seen = read(folder, monitors)
            over = {lane for lane, process in lanes.items() if process.poll() is not None}
            waiting = [n for lane, names in wanted.items() if lane not in over for n in names
                       if seen[n].observed is None]  # fmt: skip
            if not waiting and elapsed_s >= ENOUGH_S:
                break
            time.sleep(POLL_S)
        child.end(list(lanes.values()), END_S)
        seen = read(folder, monitors)
        for lane, names in wanted.items():
            for name in names:
                if seen[name].observed is None:
                    seen[name].text = _silence(lane, lanes[lane], folder, limit_s)
        return seen
    finally:
        child.end(list(lanes.values()), END_S)
        shutil.rmtree(folder, ignore_errors=True)


def read(folder: Path, monitors: Mapping[str, Json]) -> dict[str, Seen]:
    """What the lanes have written so far."""
    seen = {name: Seen() for name in [*monitors, HARDENED]}
    for lane in LANES:
        for line in read_lines(folder / f"samples-{lane}.jsonl", Damage()):
            one = seen.get(line.get("monitor", ""))
            if one is None:
                continue
            labels = line.get("labels") or {}
            if line.get("metric") == "observed":
                text = str(line.get("text", "")).replace(str(folder), "the run folder")
                one.observed, one.text, one.labels = bool(line["value"]), text, labels
            elif "metric" in line:
                one.happenings.append((line["metric"], str(line.get("text", ""))))
            elif "values" in line:
                values = {metric: expand(value)[2] for metric, value in line["values"].items()}
                if labels:
                    one.labelled.append((labels, values))
                else:
                    one.values.update(values)
    return seen


def _start(
    lane: Lane, monitors: Mapping[str, Json], folder: Path, target_url: str, headers: Mapping[str, str], root: str
) -> subprocess.Popen[bytes]:
    config = {
        "monitors": monitors,
        "root": root,
        "target_url": target_url,
        "headers_env": secrets.HANDED_ON,
        "parent_pid": os.getpid(),
        "harden": True,
    }
    env = {secrets.HANDED_ON: orjson.dumps(dict(headers)).decode()} if lane == "slow" else {}
    args = [lane, str(folder), orjson.dumps(config).decode()]
    return child.spawn("monitors.lane", args, folder / f"stderr-{lane}.txt", env)


def _silence(lane: Lane, process: subprocess.Popen[bytes], folder: Path, limit_s: float) -> str:
    """Why a monitor said nothing."""
    words = child.last_words(folder / f"stderr-{lane}.txt")
    if process.poll() is None:
        return f"the {lane} lane hangs in a call that cannot be ended"
    return f"the {lane} lane ended: {words}" if words else f"no answer within {limit_s:g} s"
