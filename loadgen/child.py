"""Child processes of a run: out of reach of the terminal's Ctrl-C, gone when their parent is gone. Standard library."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when our parent dies. Linux only; elsewhere an orphan ends with its own phases."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def spawn(
    module: str, args: Sequence[str], stderr: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """`python -m module args…` in a session of its own; what it says on stderr is kept, as evidence should it break."""
    with stderr.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )


def end(children: Sequence[subprocess.Popen[Any]], wait_s: float) -> None:
    """SIGTERM to those that still run, `wait_s` for all of them together, then SIGKILL: no orphan is left behind."""
    for process in children:
        if process.poll() is None:
            process.terminate()
    for process in children:
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
