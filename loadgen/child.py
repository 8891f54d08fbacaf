"""Child processes of a run: out of reach of the terminal's Ctrl-C, gone when their parent is gone. Standard library."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from loadgen import clock

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# Of a child's words at once: what a pipe holds.
READ_BYTES = 1 << 16
# The kernel takes a killed process down in milliseconds, with all its memory in a second or so; else it is stuck.
KILLED_WAIT_S = 2.0


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for this signal when our parent dies. Linux only; elsewhere an orphan ends with its own phases."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)


def spawn(
    module: str, args: Sequence[str], stderr: Path, env: Mapping[str, str] | None = None, *, talks: bool = False
) -> subprocess.Popen[bytes]:
    """`python -m module args…` in a session of its own; what it says on stderr is kept, as evidence should it break.
    With `talks` its standard input and output are unbuffered pipes, and reading never waits."""
    pipe = subprocess.PIPE if talks else subprocess.DEVNULL
    with stderr.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=pipe,
            stdout=pipe,
            stderr=log,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
    if process.stdout is not None:
        os.set_blocking(process.stdout.fileno(), False)
    return process


def last_words(path: Path) -> str | None:
    """The last line that a child wrote to stderr."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return None
    return lines[-1][:500] if lines else None


class Talk:
    """Lines to and from a child that was spawned with `talks`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._rest = b""

    def heard(self) -> list[bytes]:
        """The complete lines since the last call; never waits."""
        assert self.process.stdout is not None
        data = self.process.stdout.read(READ_BYTES)
        *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
        self._rest = self._rest[-READ_BYTES:]
        return lines

    def tell(self, line: bytes) -> None:
        """A child that is gone hears nothing, which is no error: whoever watches it will see."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(line)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def end(children: Sequence[subprocess.Popen[Any]], wait_s: float) -> None:
    """SIGTERM to those that still run, `wait_s` for all of them together, then SIGKILL. Then they are left: a process
    in an uninterruptible wait (a driver that hangs) obeys no signal, and its `returncode` stays None."""
    for process in children:
        if process.poll() is None:
            process.terminate()
    _wait(children, wait_s)
    for process in children:
        if process.poll() is None:
            process.kill()
    _wait(children, KILLED_WAIT_S)


def _wait(children: Sequence[subprocess.Popen[Any]], seconds: float) -> None:
    until_ns = clock.now_ns() + round(seconds * 1e9)
    for process in children:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, (until_ns - clock.now_ns()) / 1e9))
