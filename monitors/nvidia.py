"""NVIDIA GPUs through NVML: memory, utilization, temperature, power, clocks and why they are held down.

In a lane of its own: while a driver is stuck, its calls have been seen to block for minutes. Each call stands alone:
one that the device does not support is switched off for good, the rest go on. On machines whose GPU shares the host's
memory the memory call is unsupported; that is recognised, said, and the host's figures are named instead. A lost GPU
is reported once and never asked again: zeros would look like idling.

Left out for their cost: PCIe throughput (a 20 ms blocking measurement) and energy (3 ms).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds

LANE: Lane = "gpu"
PERIOD_S = 1.0
LIBRARY = "libnvidia-ml.so.1"
MAX_REFUSALS = 3  # a call that raises something else than "not supported" may work again; three in a row is enough
MAX_MIG = 8  # instances of one GPU that NVML gives out at most (seven on today's devices)

# Names of GPUs that share the host's memory. The failing memory call alone does not prove it: a lost GPU and a slice
# of a partitioned one fail as well.
UNIFIED = re.compile(r"\b(GB10|Orin|Thor|N1X?)\b", re.IGNORECASE)

# NVML return codes that we act upon; the names are NVML's.
NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, RESET_REQUIRED = 3, 4, 15, 16
LOST = frozenset({GPU_IS_LOST, RESET_REQUIRED})

# Bits of the clock event reasons that say more than "idle". SW power cap at full load is normal on limited cards.
REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}

INIT_HINTS = {
    9: "the NVIDIA driver is not loaded",  # NVML_ERROR_DRIVER_NOT_LOADED
    12: f"there is no NVIDIA driver on this machine ({LIBRARY})",  # NVML_ERROR_LIBRARY_NOT_FOUND
    18: "the driver was upgraded since it was loaded: reboot or reload it",  # NVML_ERROR_LIB_RM_VERSION_MISMATCH
    NO_PERMISSION: "no permission for the device files (/dev/nvidia*)",
}

_MEMINFO = re.compile(rb"^(MemTotal|MemAvailable): +(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Options:
    """`root` is where /proc/meminfo is read on machines whose GPU shares the host's memory."""

    root: str = "/"
    period_s: Seconds = Seconds(1)


@dataclass(slots=True)
class Gpu:
    """One device: its handle, its label, and the calls that are still worth making with their refusals in a row."""

    handle: Any
    index: int
    name: str
    unified: bool = False
    partitions: list[Gpu] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    lost: bool = False


class LostError(Exception):
    """The driver says that the GPU is gone."""


def text_of(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def watch(options: Options, nvml: Any = None) -> Iterator[list[Sample]]:
    """Samples of all GPUs. `nvml` is the binding, or what stands in for it; None: pynvml."""
    now = clock.now_ns()
    try:
        if nvml is None:
            ctypes.CDLL(LIBRARY)  # without a driver the binding would only take its 17 MB to say so
            nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # an import error, a missing library, a driver in any state: all mean "cannot see"
        code = 12 if isinstance(error, OSError) else getattr(error, "value", 0)
        why = INIT_HINTS.get(code, " ".join(str(error).split()) or type(error).__name__)
        yield [Sample("nvidia", "observed", 0.0, now, text=why)]
        return
    try:
        gpus = devices(nvml)
        if not gpus:
            yield [Sample("nvidia", "observed", 0.0, now, text="the NVIDIA driver has no GPU to show")]
            return
        out = [Sample("nvidia", "observed", 1.0, now, text=about(nvml, gpus))]
        while True:
            for gpu in gpus:
                out += readings(nvml, gpu, options.root)
            if all(gpu.lost for gpu in gpus):
                out.append(Sample("nvidia", "observed", 0.0, clock.now_ns(), text="every GPU is lost"))
                yield out
                return
            yield out
            out = []
    finally:
        with contextlib.suppress(nvml.NVMLError):  # a driver that lost its device may refuse even this
            nvml.nvmlShutdown()


def devices(nvml: Any) -> list[Gpu]:
    """All GPUs that the driver shows, partitions below their parents."""
    gpus: list[Gpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = text_of(nvml.nvmlDeviceGetName(handle))
        except nvml.NVMLError as error:
            if error.value in LOST:  # one dead card must not hide the others
                gpus.append(Gpu(None, index, "lost GPU", labels={"gpu": str(index)}))
            continue
        gpu = Gpu(handle, index, name, labels={"gpu": str(index)})
        gpu.partitions = partitions(nvml, gpu)
        gpu.unified = UNIFIED.search(name) is not None and not gpu.partitions and not has_memory(nvml, handle)
        gpus.append(gpu)
    return gpus


def has_memory(nvml: Any, handle: Any) -> bool:
    """Whether the device has a memory figure of its own. Zeros count as none: some drivers answer so."""
    try:
        return bool(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        return bool(error.value != NOT_SUPPORTED)


def partitions(nvml: Any, gpu: Gpu) -> list[Gpu]:
    """MIG instances that this process can see. Their parent's figures are not the server's."""
    found: list[Gpu] = []
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(gpu.handle)
    except nvml.NVMLError:
        return found
    if not current:
        return found
    for n in range(MAX_MIG):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, n)
            uuid = text_of(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError:
            continue
        found.append(Gpu(handle, gpu.index, gpu.name, labels={"gpu": str(gpu.index), "mig": uuid}))
    return found


def about(nvml: Any, gpus: list[Gpu]) -> str:
    """What there is, for the report."""
    try:
        driver = text_of(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        driver = "unknown"
    words = []
    for gpu in gpus:
        note = " (memory shared with the host: see the host's figures)" if gpu.unified else ""
        note = f" ({len(gpu.partitions)} MIG instances)" if gpu.partitions else note
        words.append(f"{gpu.index}: {gpu.name}{note}")
    return f"driver {driver}; {'; '.join(words)}"


def readings(nvml: Any, gpu: Gpu, root: str) -> list[Sample]:
    """One tick of one GPU. Each call has a reading function below; what it cannot answer is left out, never 0."""
    if gpu.lost:
        return []
    at = clock.now_ns()
    try:
        if gpu.handle is None:
            raise LostError(f"GPU {gpu.index} was lost before the run began")
        values: dict[str, float] = {}
        for name, reading in READINGS.items():
            if (gpu.unified or gpu.partitions) and name == "memory":
                continue
            values.update(asked(nvml, gpu, name, reading))
        if gpu.unified:
            values.update(host_memory(root))
        out = [Sample("nvidia", metric, value, at, gpu.labels) for metric, value in values.items()]
        for part in gpu.partitions:
            memory = asked(nvml, part, "memory", READINGS["memory"])
            out += [Sample("nvidia", metric, value, at, part.labels) for metric, value in memory.items()]
        return out
    except LostError as error:
        gpu.lost = True
        return [Sample("nvidia", "gpu_lost", 1.0, at, gpu.labels, text=f"{gpu.name}: {error}")]


def asked(nvml: Any, gpu: Gpu, name: str, reading: Callable[[Any, Any], dict[str, float]]) -> dict[str, float]:
    """One call, unless it is known to be useless. Raises LostError."""
    refused = gpu.refusals.get(name, 0)
    if refused >= MAX_REFUSALS:
        return {}
    try:
        values = reading(nvml, gpu.handle)
    except nvml.NVMLError as error:
        if error.value in LOST:
            raise LostError(" ".join(str(error).split())) from None
        gpu.refusals[name] = MAX_REFUSALS if error.value in {NOT_SUPPORTED, NO_PERMISSION} else refused + 1
        return {}
    except AttributeError:  # a binding older than the call
        gpu.refusals[name] = MAX_REFUSALS
        return {}
    gpu.refusals[name] = 0
    return values


def host_memory(root: str) -> dict[str, float]:
    """Where GPU and host share their memory: what is in use of it, under a name that says whose figure it is."""
    try:
        found = {k: int(v) * 1024 for k, v in _MEMINFO.findall((Path(root) / "proc/meminfo").read_bytes())}
    except OSError:
        found = {}
    if len(found) < 2:
        return {"unified_memory": 1.0}
    return {"unified_memory": 1.0, "host_memory_used_bytes": float(found[b"MemTotal"] - found[b"MemAvailable"])}


# ---------------------------------------------------------------------------------------------------------------------
# The calls


def memory(nvml: Any, handle: Any) -> dict[str, float]:
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    if not info.total:
        return {}
    return {
        "memory_used_bytes": float(info.used),
        "memory_free_bytes": float(info.free),
        "memory_total_bytes": float(info.total),
    }


def utilization(nvml: Any, handle: Any) -> dict[str, float]:
    """The share of time in which any kernel ran: not load."""
    return {"utilization_percent": float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)}


def temperature(nvml: Any, handle: Any) -> dict[str, float]:
    return {"temperature_c": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))}


def power(nvml: Any, handle: Any) -> dict[str, float]:
    return {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def power_limit(nvml: Any, handle: Any) -> dict[str, float]:
    return {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000}


def sm_clock(nvml: Any, handle: Any) -> dict[str, float]:
    return {"sm_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))}


def memory_clock(nvml: Any, handle: Any) -> dict[str, float]:
    return {"memory_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))}


def clock_event_reasons(nvml: Any, handle: Any) -> dict[str, float]:
    """The bit mask, and each reason by itself as 0 or 1, so that its share of time can be told from digests."""
    call = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    bits = int((call or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))  # the name before driver 535
    held = {f"clock_{name}": float(bool(bits & bit)) for bit, name in REASONS.items()}
    return {"clock_event_reasons": float(bits), **held}


def ecc_errors(nvml: Any, handle: Any) -> dict[str, float]:
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return {"ecc_uncorrected_total": float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))}


def processes(nvml: Any, handle: Any) -> dict[str, float]:
    """Memory of all compute processes. It has no managed or unified allocations: a flat line clears nobody."""
    found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    used = [process.usedGpuMemory for process in found]
    values = {"compute_processes": float(len(found))}
    if used and None not in used:
        values["process_memory_bytes"] = float(sum(used))
    return values


READINGS: dict[str, Callable[[Any, Any], dict[str, float]]] = {
    "memory": memory,
    "utilization": utilization,
    "temperature": temperature,
    "power": power,
    "power_limit": power_limit,
    "sm_clock": sm_clock,
    "memory_clock": memory_clock,
    "clock_event_reasons": clock_event_reasons,
    "ecc_errors": ecc_errors,
    "processes": processes,
}
