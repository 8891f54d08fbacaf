"""What a lane is granted against the OOM killer, swap and starvation; said as it is, read back from the kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.journal import read_header
from monitors import harden
from tests.test_lane import lines, process, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def test_score_that_is_denied_is_said_and_not_claimed(tmp_path: Path) -> None:
    sealed = tmp_path / "sealed"
    sealed.symlink_to("/proc/sys/kernel/random/entropy_avail")  # a number that may be written by nobody, root included
    assert harden.oom_score(sealed) == f"oom_score_adj stays {int(sealed.read_text())} (denied)"
    assert harden.oom_score(tmp_path / "none") == "no oom_score_adj here"


def test_score_that_is_granted_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "oom_score_adj").write_text("0")
    assert harden.oom_score(tmp_path / "oom_score_adj") == "oom_score_adj -1000"


def test_what_is_said_is_what_the_kernel_says() -> None:
    code = (
        "import os, json\n"
        "from pathlib import Path\n"
        "from monitors import harden\n"
        "said = harden.harden('fast')\n"
        "policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK\n"
        "locked = Path('/proc/self/status').read_text().partition('VmLck:')[2].split()[0]\n"
        "print(json.dumps([said, harden._read(harden.OOM_ADJ), policy == os.SCHED_FIFO, int(locked),"
        " os.getpriority(os.PRIO_PROCESS, 0)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, score, fifo, locked_kb, nice = json.loads(done.stdout)
    assert (f"oom_score_adj {score}" in said) == (score in harden.OOM_SCORES)
    assert ("SCHED_FIFO" in said) == fifo
    assert ("memory locked" in said) == (locked_kb > 0)
    assert fifo or f"nice {nice}" in said


@pytest.mark.parametrize("wanted", [True, False])
def test_lane_says_what_it_was_granted_and_can_be_left_as_it_is(tmp_path: Path, wanted: bool) -> None:
    config = {"monitors": {"host": {}}, "harden": wanted}
    with process(tmp_path, "fast", config) as child:
        wait_for(lambda: any("values" in line for line in lines(tmp_path)), "a digest")
        status = Path(f"/proc/{child.pid}/status").read_text()
    said = [line for line in lines(tmp_path) if line.get("monitor") == "fast lane"]
    assert [line["metric"] for line in said] == ["observed"] * wanted
    if wanted:
        assert "oom_score_adj" in said[0]["text"]
    assert int(status.partition("VmHWM:")[2].split()[0]) * 1024 <= 25_000_000
    assert read_header(tmp_path / "samples-fast.jsonl") is not None
