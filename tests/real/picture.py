#!/usr/bin/env python3
"""Draw the live view of a run folder as it looked at one moment, as an SVG: the picture on the front page.

usage: picture.py RUN SECONDS_AFTER_START OUT.svg
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from loadgen import live, scenario

COLUMNS = 104


def main() -> None:
    run, after_s, out = Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    start_ns = json.loads((run / "environment.json").read_text())["started"]["mono_ns"]
    moment_ns = start_ns + round(after_s * 1e9)
    with tempfile.TemporaryDirectory() as folder:
        for path in run.glob("*.jsonl"):
            kept = [line for line in path.read_text().splitlines() if written_ns(json.loads(line)) <= moment_ns]
            (Path(folder) / path.name).write_text("\n".join(kept) + "\n")
        progress = live.Progress(Path(folder))
        progress.look()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(live.table(progress, scenario.load(run / "scenario.yaml").name, moment_ns))
    svg = console.export_svg(title="loadgen run soak-600s")
    out.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # no font from elsewhere


def written_ns(record: dict[str, int]) -> int:
    return record.get("done_ns") or record.get("at") or record.get("due_ns") or 0


if __name__ == "__main__":
    main()
