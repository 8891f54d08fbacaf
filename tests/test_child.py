"""Child processes are ended in bounded time, whatever they do."""

from __future__ import annotations

import signal
import subprocess
import sys

from loadgen import child, clock

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"


class Stuck:
    """Stands in for a process in an uninterruptible wait, which a test cannot make: no signal ends it."""

    returncode = None

    def __init__(self) -> None:
        self.heard: list[str] = []

    def poll(self) -> None:
        return None

    def terminate(self) -> None:
        self.heard.append("term")

    def kill(self) -> None:
        self.heard.append("kill")

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "a wait without a limit would never end"
        raise subprocess.TimeoutExpired("stuck", timeout)


def deaf() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_those_that_ignore_sigterm_are_killed_after_one_wait_for_all_of_them() -> None:
    processes = [deaf() for _ in range(3)]
    begun_ns = clock.now_ns()
    child.end(processes, 2.0)
    took_s = (clock.now_ns() - begun_ns) / 1e9
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3
    assert 2.0 <= took_s < 3 * 2.0


def test_one_that_no_signal_ends_is_left_and_the_others_are_ended() -> None:
    stuck, other = Stuck(), deaf()
    child.end([stuck, other], 0.1)  # type: ignore[list-item]
    assert stuck.heard == ["term", "kill"]
    assert other.returncode == -signal.SIGKILL
