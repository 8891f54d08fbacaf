#!/usr/bin/env python3
"""Make `runs/example` of a run: a copy with fewer host metrics, judged again, and the picture of its live view.

usage: example.py RUN

Everything stays as produced, but for what neither a rule nor the report reads: most metrics of the host monitor, and
the series per process and per class. They are most of the bytes, and what is checked in is to stay below 2 MB.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from loadgen.journal import compact, expand

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "runs" / "example"
KEPT = (
    "mem_total_bytes", "mem_free_bytes", "mem_available_bytes", "swap_total_bytes", "swap_free_bytes",
    "driver_residual_bytes", "pswpin_pages_per_s", "pswpout_pages_per_s", "oom_kill_total", "cpu_busy_percent",
    "psi_memory_some_percent", "psi_memory_full_percent", "psi_cpu_some_percent", "load1", "tick_lateness_ms",
    "missed_ticks_total",
)  # fmt: skip
PICTURE_S = 420  # in the middle of measuring


def main() -> int:
    run = Path(sys.argv[1])
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    for path in sorted(run.iterdir()):
        if path.name.startswith("samples-"):
            records = (json.loads(line) for line in path.read_text().splitlines())
            lines = (json.dumps(thinner(record), separators=(",", ":")) for record in records if not single(record))
            (OUT / path.name).write_text("".join(f"{line}\n" for line in lines))
        elif not path.name.startswith("stderr"):
            shutil.copy(path, OUT / path.name)
    judged = subprocess.call([sys.executable, "-m", "loadgen", "judge", OUT])
    subprocess.check_call([sys.executable, HERE / "picture.py", OUT, str(PICTURE_S), OUT / "live.svg"])
    return judged


def single(record: dict[str, object]) -> bool:
    """The series of one process or one class beside the sum of all."""
    labels = record.get("labels")
    return "values" in record and isinstance(labels, dict) and bool({"pid", "cls"} & labels.keys())


def thinner(record: dict[str, object]) -> dict[str, object]:
    values = record.get("values")
    if not isinstance(values, dict):
        return record
    host = record.get("monitor") == "host"
    kept = {metric: compact(*expand(value)) for metric, value in values.items() if metric in KEPT or not host}
    return {**record, "values": kept}


if __name__ == "__main__":
    sys.exit(main())
