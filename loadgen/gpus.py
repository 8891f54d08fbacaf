"""What the NVIDIA driver says of its GPUs, asked by a child process that may be left behind: `python -m loadgen.gpus`.

A driver that is stuck blocks its callers for minutes, and not even SIGKILL ends them. So the child asks, prints one
JSON object, and the parent waits for a bounded time. What the monitor watches (temperature, clocks) is not asked
here; only what stays the same through a run, and who else is on the GPU before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadgen.types import Json

LIBRARY = "libnvidia-ml.so.1"
# The first call to a driver without persistence mode takes 1 to 3 s for each GPU; a run must not wait longer than this.
LIMIT_S = 5.0
KILLED_WAIT_S = 0.5
MAX_PROCESSES = 64


def ask(limit_s: float = LIMIT_S, command: tuple[str, ...] = (sys.executable, "-m", "loadgen.gpus")) -> Json:
    """`{"driver", "cuda", "gpus": [...]}`, or `{"not_read": why}`. Never waits longer than the limit and half a second;
    a child that cannot be killed is left to the kernel."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        return {"not_read": f"no process could be started ({error.strerror})"}
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=KILLED_WAIT_S)
        return {"not_read": f"the NVIDIA driver gave no answer within {limit_s:g} s"}
    try:
        answer = json.loads(said)
    except ValueError:
        return {"not_read": f"asking the NVIDIA driver ended with {child.returncode}"}
    return answer if isinstance(answer, dict) else {"not_read": "asking the NVIDIA driver gave no object"}


def read(nvml: Any = None) -> Json:
    """The same, asked in this process. `nvml` is the binding, or what stands in for it; None: pynvml."""
    try:
        if nvml is None:
            ctypes.CDLL(LIBRARY)
            nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except Exception as error:  # an import error, a missing library, a driver in any state: all mean "cannot see"
        missing = isinstance(error, OSError)
        why = "there is no NVIDIA driver on this machine" if missing else " ".join(str(error).split())
        return {"not_read": why or type(error).__name__}
    found: Json = {}
    put(found, "driver", lambda: words(nvml.nvmlSystemGetDriverVersion()))
    put(found, "cuda", lambda: cuda(nvml.nvmlSystemGetCudaDriverVersion_v2()))
    found["gpus"] = [device(nvml, index) for index in range(count)]
    return found


def device(nvml: Any, index: int) -> Json:
    """One GPU. Each figure is asked for by itself: a device that lacks one has the others."""
    found: Json = {"index": index}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:  # a lost card must not hide the others
        return found | {"not_read": " ".join(str(error).split())}
    put(found, "name", lambda: words(nvml.nvmlDeviceGetName(handle)))
    put(found, "uuid", lambda: words(nvml.nvmlDeviceGetUUID(handle)))
    put(found, "memory_total_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total or None)
    put(found, "memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used if "memory_total_bytes" in found
        else None)  # fmt: skip
    put(found, "power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    put(found, "power_limit_default_w", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000)
    put(found, "sm_clock_max_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    put(found, "memory_clock_max_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
    put(found, "sm_clock_application_mhz", lambda: nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM))
    put(found, "persistence", lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)))
    put(found, "ecc", lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]))
    put(found, "mig", lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
    put(found, "compute_capability", lambda: ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle))))
    put(found, "vbios", lambda: words(nvml.nvmlDeviceGetVbiosVersion(handle)))
    put(found, "processes", lambda: processes(nvml, handle))
    return found


def put(into: Json, name: str, call: Callable[[], Any]) -> None:
    """One figure, if the driver has it; else why not, in `refused`: not supported, no permission, an older binding."""
    try:
        value = call()
    except Exception as error:  # whatever one call raises, the others are asked all the same
        into.setdefault("refused", {})[name] = " ".join(str(error).split()) or type(error).__name__
        return
    if value is not None:
        into[name] = value


def processes(nvml: Any, handle: Any) -> list[Json]:
    """Who computes on it: pid and memory. In a container of its own pid namespace the list is empty."""
    listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [{"pid": each.pid, "memory_bytes": each.usedGpuMemory} for each in listed[:MAX_PROCESSES]]


def cuda(number: int) -> str:
    """13010 → 13.1."""
    return f"{number // 1000}.{number % 1000 // 10}"


def words(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def device_file(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA driver made its device file here; without it there is nothing to ask."""
    return (root / "dev/nvidiactl").exists() or (root / "dev/dxg").exists()  # the second is WSL's


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read()))
