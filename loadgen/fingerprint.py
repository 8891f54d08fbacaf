"""What ran where: the facts without which a result can neither be compared nor believed (`environment.json`).

No host name, no path, no address, no key: a run folder is made to be passed on.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import psutil

from loadgen import __version__, clock, strict
from loadgen.preflight import Facts
from loadgen.types import Json

# The packages whose version can change what we measure.
PACKAGES = ("uvloop", "httptools", "aiohttp", "orjson", "numpy", "msgspec", "psutil", "nvidia-ml-py")
SYSCTLS = (
    "vm.swappiness",
    "vm.overcommit_memory",
    "vm.min_free_kbytes",
    "vm.watermark_scale_factor",
    "vm.panic_on_oom",
)


def environment(facts: Facts, argv: list[str]) -> Json:
    """Clocks, client, server and host, as they stand at the start of a run."""
    return {
        "schema": "loadgen.environment/1",
        "started": clock.reading(),
        "client": {
            "loadgen": __version__,
            "python": platform.python_version(),
            "packages": {name: metadata.version(name) for name in PACKAGES},
            "arguments": argv,
        },
        "server": strict.plain(facts),
        "host": host(),
    }


def host() -> Json:
    """The machine that the load comes from; usually the server's too."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "system": sys.platform,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_total_bytes": memory.total,
        "swap_total_bytes": swap.total,
        "sysctl": {name: value for name in SYSCTLS if (value := _sysctl(name)) is not None},
        "uptime_s": None if (up := clock.boottime_ns()) is None else up // 1_000_000_000,
        "cpu_governor": _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
    }


def _sysctl(name: str) -> str | None:
    return _read(Path("/proc/sys") / name.replace(".", "/"))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
