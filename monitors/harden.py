"""Makes a lane of monitors hard to kill, to swap out and to starve, as far as we are allowed; its own process alone.

The lanes must outlive the death that they are there to see: the OOM killer takes others first, no page of the fast lane
waits for a swap device, and it gets its ten turns a second from a machine that thrashes. What is denied is said and
costs nothing else. Nobody else's values are touched, the server's least of all. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from loadgen.types import Lane

OOM_ADJ = Path("/proc/self/oom_score_adj")
# -1000 is never chosen; -500 takes half of the machine's memory off the score. Less than ours at start needs
# CAP_SYS_RESOURCE.
OOM_SCORES = (-1000, -500)
NICE = -15
FIFO_PRIORITY = 1  # the least real-time priority is above every ordinary task; more would outrank the kernel's own

MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4  # <sys/mman.h>, x86 and arm64
CAP_IPC_LOCK = 14  # <linux/capability.h>


def oom_score(path: Path = OOM_ADJ) -> str:
    """Asks for the lowest score that is granted; what stands there then."""
    before = _read(path)
    for score in OOM_SCORES:
        try:
            # one write of its own: a buffered file reports EACCES at close, and then not always
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, str(score).encode())
            finally:
                os.close(fd)
        except OSError:
            continue
        if _read(path) == score:
            return f"oom_score_adj {score}"
    return f"oom_score_adj stays {before} (denied)" if before is not None else "no oom_score_adj here"


def _read(path: Path) -> int | None:
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return None


def may_lock(status: Path = Path("/proc/self/status")) -> bool:
    """Whether our memory may be locked without a limit. Under a limit mlockall may succeed now and let an allocation
    fail later, which is worse than being swapped."""
    import resource

    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        return True
    try:
        text = status.read_text()
    except OSError:
        return False
    return bool(int(text.partition("CapEff:")[2].split()[0], 16) >> CAP_IPC_LOCK & 1) if "CapEff:" in text else False


def lock_memory() -> str:
    """Locks what is and will be resident. On fault, not at once: locking whole mappings of libraries of which a tenth
    is used costs 11 MB that a dying host could use."""
    if not may_lock():
        return "memory not locked (RLIMIT_MEMLOCK)"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) != 0:
        return f"memory not locked ({os.strerror(ctypes.get_errno())})"
    return "memory locked"


def priority() -> str:
    """Real time where that is granted, else a better nice value; what is in force then. Not inherited by children."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(FIFO_PRIORITY))
        if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO:
            return f"SCHED_FIFO {FIFO_PRIORITY}"
    except OSError:
        pass  # no CAP_SYS_NICE, or a container's real-time budget is 0
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    except OSError:
        return f"nice {os.getpriority(os.PRIO_PROCESS, 0)} (denied)"
    return f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"


def harden(lane: Lane) -> str:
    """All that is wanted of a lane, in words that say what was granted. Linux only; elsewhere nothing is tried."""
    if not hasattr(os, "SCHED_FIFO") or not OOM_ADJ.exists():
        return "not hardened (Linux only)"
    steps: list[Callable[[], str]] = [oom_score]
    if lane == "fast":
        steps += [lock_memory, priority]
    return ", ".join(step() for step in steps)
