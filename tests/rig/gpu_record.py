"""What a real NVIDIA GPU looks like through our monitors: `python tests/rig/gpu_record.py OUT_DIR`, under two minutes.

It starts the gpu lane (and the fast lane for the kernel log) with OUT_DIR/run as run folder, and then makes happen what
they must see: a busy GPU, a real out-of-memory, managed memory, and real Xids from an illegal and a misaligned store.
OUT_DIR/phases.jsonl says when, on the lanes' clock; OUT_DIR/calls.jsonl what each NVML call answers and costs.

For people with a GPU of their own: it takes all of the GPU's memory for seconds and makes the driver report errors.
It needs the standard library, nvidia-ml-py and libcuda; kernels are PTX that the driver compiles. It changes no setting
of the GPU. Each step is a process of its own with a deadline, because an illegal store ends its CUDA context; a step
that fails is one line, and the rest go on.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from loadgen import clock  # noqa: E402 - the script must run from a bare checkout

GIB = 1 << 30
DEADLINE_S = 110.0  # all of it; the caller was promised two minutes
BUSY_OTHERS = 2 * GIB  # more than that in use before we begin: somebody works here, and we would take their memory
CALLS = 50  # of each NVML call, for its median
THREADS, BLOCKS = 256, 2048  # enough for every SM of today's devices
ROUNDS = 1 << 18  # of the loop below: some ten milliseconds a launch
LANE_STOP_S = 10.0

CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY = 0, 2
ATTRIBUTE_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED: the GPU shares the host's memory
MEM_ATTACH_GLOBAL = 1

# Turing and later first; a driver that no longer knows a target refuses the module, and the next is tried.
TARGETS = (("6.3", "sm_75"), ("6.0", "sm_52"))
PTX = """.version {version}
.target {target}
.address_size 64

.visible .entry burn(.param .u64 burn_out, .param .u32 burn_rounds)
{{
    .reg .pred %p<2>;
    .reg .f32 %f<12>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [burn_out];
    ld.param.u32 %r1, [burn_rounds];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mad.lo.s32 %r5, %r3, %r4, %r2;
    cvt.rn.f32.u32 %f1, %r5;
    mov.f32 %f2, 0f3F7FFFFE;
    mov.f32 %f3, 0f3A83126F;
    add.f32 %f4, %f1, %f3;
    add.f32 %f5, %f4, %f3;
    add.f32 %f6, %f5, %f3;
    add.f32 %f7, %f6, %f3;
    add.f32 %f8, %f7, %f3;
    add.f32 %f9, %f8, %f3;
    add.f32 %f10, %f9, %f3;
AGAIN:
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f4, %f4, %f2, %f3;
    fma.rn.f32 %f5, %f5, %f2, %f3;
    fma.rn.f32 %f6, %f6, %f2, %f3;
    fma.rn.f32 %f7, %f7, %f2, %f3;
    fma.rn.f32 %f8, %f8, %f2, %f3;
    fma.rn.f32 %f9, %f9, %f2, %f3;
    fma.rn.f32 %f10, %f10, %f2, %f3;
    add.s32 %r1, %r1, -1;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    add.f32 %f1, %f1, %f4;
    add.f32 %f1, %f1, %f5;
    add.f32 %f1, %f1, %f6;
    add.f32 %f1, %f1, %f7;
    add.f32 %f1, %f1, %f8;
    add.f32 %f1, %f1, %f9;
    add.f32 %f1, %f1, %f10;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.f32 [%rd4], %f1;
    ret;
}}

.visible .entry store(.param .u64 store_where)
{{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [store_where];
    mov.u32 %r1, 7;
    st.global.u32 [%rd1], %r1;
    ret;
}}
"""


# ---------------------------------------------------------------------------------------------------------------------
# CUDA through its driver API


class CudaError(Exception):
    """A call of the driver API that did not succeed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Cuda:
    """libcuda with the first device's primary context. Every call raises CudaError unless it succeeds."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != CUDA_SUCCESS:
            word = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(word))
            raise CudaError(name, code, (word.value or b"unknown").decode())

    def integrated(self) -> bool:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), ATTRIBUTE_INTEGRATED, self.device)
        return bool(value.value)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        where = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(where), ctypes.c_size_t(size))
        return where.value

    def kernel(self, name: str) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        for last, (version, target) in enumerate(TARGETS, 1):
            text = PTX.format(version=version, target=target).encode()
            try:
                self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text))
                break
            except CudaError:
                if last == len(TARGETS):
                    raise
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def launch(self, function: ctypes.c_void_p, blocks: int, threads: int, *arguments: Any) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        one = ctypes.c_uint(1)
        self.call(
            "cuLaunchKernel", function, ctypes.c_uint(blocks), one, one, ctypes.c_uint(threads), one, one,
            ctypes.c_uint(0), None, pointers, None,
        )  # fmt: skip

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")


# ---------------------------------------------------------------------------------------------------------------------
# The steps: each prints one JSON object of what it did


def busy(cuda: Cuda, seconds: float) -> dict[str, Any]:
    """Keep every SM multiplying."""
    function, out = cuda.kernel("burn"), ctypes.c_uint64(cuda.allocate(BLOCKS * THREADS * 4))
    until, launches = clock.now_ns() + round(seconds * 1e9), 0
    while clock.now_ns() < until:
        cuda.launch(function, BLOCKS, THREADS, out, ctypes.c_uint(ROUNDS))
        cuda.synchronize()
        launches += 1
    return {"launches": launches}


def oom(cuda: Cuda, seconds: float) -> dict[str, Any]:
    """Allocate until the driver refuses, and hold what was given. Where host and GPU share their memory, one request
    for more than there is must do: filling it would take the machine down."""
    free, total = cuda.memory()
    shared, size, held = cuda.integrated(), GIB, 0
    if not shared and total - free > BUSY_OTHERS:
        return {"left out": f"{(total - free) / GIB:.1f} GiB are in use by others"}
    if shared:
        size = 2 * total
    while True:
        try:
            cuda.allocate(size)
            held += size
        except CudaError as error:
            if error.code != CUDA_ERROR_OUT_OF_MEMORY:
                raise
            refusal = str(error)
            if shared or size <= 1 << 21:
                break
            size >>= 1  # down to the driver's 2 MiB pages
    left, _ = cuda.memory()
    time.sleep(seconds)
    return {"refused_with": refusal, "held_bytes": held, "free_bytes_then": left, "total_bytes": total}


def managed(cuda: Cuda, seconds: float) -> dict[str, Any]:
    """4 GiB of managed memory, written by the GPU: is it in NVML's figure of this process?"""
    size, where = 4 * GIB, ctypes.c_uint64()
    cuda.call("cuMemAllocManaged", ctypes.byref(where), ctypes.c_size_t(size), ctypes.c_uint(MEM_ATTACH_GLOBAL))
    cuda.call("cuMemsetD8_v2", where, ctypes.c_ubyte(1), ctypes.c_size_t(size))
    cuda.synchronize()
    time.sleep(seconds)
    return {"managed_bytes": size, "pid": os.getpid()}


def fault(cuda: Cuda, where: int) -> dict[str, Any]:
    """One store to an address that is not ours, or that is not aligned; the driver says which error it took it for."""
    function = cuda.kernel("store")
    try:
        cuda.launch(function, 1, 1, ctypes.c_uint64(where))
        cuda.synchronize()
    except CudaError as error:
        return {"error": str(error)}
    return {"error": None}


def calls() -> Iterator[dict[str, Any]]:
    """Each NVML call that a monitor could make of the first GPU: its first answer or refusal, median and maximum µs."""
    import pynvml  # type: ignore[import-untyped,unused-ignore]

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory_v2 = getattr(pynvml, "nvmlMemory_v2", None)
    asked: dict[str, Callable[[], Any]] = {
        "nvmlSystemGetDriverVersion": pynvml.nvmlSystemGetDriverVersion,
        "nvmlDeviceGetName": lambda: pynvml.nvmlDeviceGetName(gpu),
        "nvmlDeviceGetMigMode": lambda: pynvml.nvmlDeviceGetMigMode(gpu),
        "nvmlDeviceGetMemoryInfo": lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu),
        "nvmlDeviceGetMemoryInfo_v2": lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu, version=memory_v2),
        "nvmlDeviceGetUtilizationRates": lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu),
        "nvmlDeviceGetTemperature": lambda: pynvml.nvmlDeviceGetTemperature(gpu, 0),
        "nvmlDeviceGetPowerUsage": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu),
        "nvmlDeviceGetEnforcedPowerLimit": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu),
        "nvmlDeviceGetClockInfo sm": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "nvmlDeviceGetClockInfo mem": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
        "nvmlDeviceGetTotalEccErrors volatile": lambda: pynvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 0),
        "nvmlDeviceGetTotalEccErrors aggregate": lambda: pynvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 1),
        "nvmlDeviceGetRemappedRows": lambda: pynvml.nvmlDeviceGetRemappedRows(gpu),
        "nvmlDeviceGetPcieReplayCounter": lambda: pynvml.nvmlDeviceGetPcieReplayCounter(gpu),
        "nvmlDeviceGetTotalEnergyConsumption": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu),
        "nvmlDeviceGetViolationStatus thermal": lambda: pynvml.nvmlDeviceGetViolationStatus(gpu, 1),
        "nvmlDeviceGetFieldValues memory temperature": lambda: field(pynvml, gpu, 82),
        "nvmlDeviceGetFieldValues sw thermal ns": lambda: field(pynvml, gpu, 269),
        "nvmlDeviceGetFieldValues hw thermal ns": lambda: field(pynvml, gpu, 270),
        "nvmlDeviceGetComputeRunningProcesses": lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(gpu),
        "nvmlDeviceGetSupportedEventTypes": lambda: pynvml.nvmlDeviceGetSupportedEventTypes(gpu),
    }
    for name, call in asked.items():
        took, answer = [], None
        for _ in range(CALLS):
            began = clock.now_ns()
            try:
                answer = call()
            except Exception as error:  # a refusal is an answer here
                answer = error
            took.append((clock.now_ns() - began) / 1000)
            if isinstance(answer, Exception):
                break
        yield {
            "call": name, "answer": shown(answer), "us_first": round(took[0], 1),
            "us_median": round(statistics.median(took), 1), "us_max": round(max(took), 1),
        }  # fmt: skip


def field(nvml: Any, gpu: Any, number: int) -> Any:
    """One field value: its return code, its type and its integer."""
    (value,) = nvml.nvmlDeviceGetFieldValues(gpu, [number])
    return [value.nvmlReturn, value.valueType, value.value.ullVal]


def shown(answer: Any) -> Any:
    if isinstance(answer, Exception):
        return f"{type(answer).__name__}: {' '.join(str(answer).split())}"
    if isinstance(answer, bytes):
        return answer.decode("utf-8", "replace")
    if isinstance(answer, int | float | str) or answer is None:
        return answer
    if isinstance(answer, list | tuple):
        return [shown(each) for each in answer]
    fields = [name for name, *_ in getattr(answer, "_fields_", [])] or list(vars(answer))
    return {name: shown(getattr(answer, name)) for name in fields}


def child(step: str, libcuda: str, seconds: float) -> int:
    """One step in this process. 0: done (also where the driver reported the error that was wanted)."""
    try:
        if step == "calls":
            for line in calls():
                print(json.dumps(line))
            return 0
        cuda = Cuda(libcuda)
        done = {
            "busy": lambda: busy(cuda, seconds),
            "oom": lambda: oom(cuda, seconds),
            "managed": lambda: managed(cuda, seconds),
            "illegal": lambda: fault(cuda, 0x10),
            "misaligned": lambda: fault(cuda, cuda.allocate(4096) + 1),
        }[step]()
        print(json.dumps(done), flush=True)
        os._exit(0)  # a context after an illegal store cannot be torn down in order
    except (CudaError, OSError, AttributeError, ImportError) as error:
        print(json.dumps({"could not": " ".join(str(error).split())}), flush=True)
        return 1
    except Exception as error:  # NVML's own errors: the binding may be missing, so that they have no name here
        print(json.dumps({"could not": f"{type(error).__name__}: {' '.join(str(error).split())}"}), flush=True)
        return 1


# ---------------------------------------------------------------------------------------------------------------------
# The recording


@dataclass(frozen=True, slots=True)
class Step:
    """A phase of the recording: how long it is meant to take, and how long it may."""

    name: str
    seconds: float
    limit_s: float
    what: str


STEPS = (
    Step("idle", 5, 6, "nothing"),
    Step("calls", 0, 20, "every NVML call, timed"),
    Step("busy", 15, 30, "all SMs multiply"),
    Step("calls-busy", 0, 20, "every NVML call, timed, while busy"),
    Step("oom", 4, 20, "all memory, until the driver refuses"),
    Step("managed", 4, 20, "4 GiB of managed memory"),
    Step("illegal", 0, 20, "a store to address 16"),
    Step("misaligned", 0, 20, "a store to an odd address"),
    Step("after", 6, 7, "nothing"),
)


@contextmanager
def lane(name: str, folder: Path, monitors: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """One lane of monitors, ended with SIGTERM, or killed where it does not hear."""
    command = [sys.executable, "-m", "monitors.lane", name, str(folder), json.dumps({"monitors": monitors})]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(LANE_STOP_S)
        except subprocess.TimeoutExpired:
            print(f"the {name} lane did not stop within {LANE_STOP_S:.0f} s: killed", file=sys.stderr)
            process.kill()
            process.wait()


def run_step(step: Step, libcuda: str, left_s: float) -> list[dict[str, Any]]:
    """The lines that a step printed, or why there are none."""
    name = "calls" if step.name == "calls-busy" else step.name
    mine = [sys.executable, str(Path(__file__).resolve()), "--child"]
    beside = None
    if step.name == "calls-busy":
        beside = subprocess.Popen([*mine, "busy", "--libcuda", libcuda, "--seconds", "8"], stdout=subprocess.DEVNULL)
        time.sleep(3)  # a context and a compiled kernel take a second or two
    limit_s = max(1.0, min(step.limit_s, left_s))
    try:
        command = [*mine, name, "--libcuda", libcuda, "--seconds", str(step.seconds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return [{"could not": f"no end within {limit_s:.0f} s: killed"}]
    finally:
        if beside is not None:
            beside.kill()
            beside.wait()
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines or [{"could not": f"exit {done.returncode}: {' '.join(done.stderr.split())[-300:]}"}]


def cost(pid: int, since_ns: int) -> dict[str, Any]:
    """RSS, its high-water and CPU share of a process that still runs."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return {"ended": True}
    cpu_s = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    return {
        "rss_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "rss_peak_mib": round(int(status["VmHWM"].split()[0]) / 1024, 1),
        "cpu_percent": round(100e9 * cpu_s / max(1, clock.now_ns() - since_ns), 2),
    }


def record(out: Path, libcuda: str) -> int:
    """All steps with the lanes running; prints what they saw."""
    folder = out / "run"
    folder.mkdir(parents=True)
    began = clock.now_ns()
    with (
        (out / "phases.jsonl").open("w", encoding="utf-8") as phases,
        (out / "calls.jsonl").open("w", encoding="utf-8") as answers,
        lane("gpu", folder, {"nvidia": {}}) as gpu,
        lane("fast", folder, {"kernel": {}, "host": {}}),
    ):

        def note(**what: Any) -> None:
            line = json.dumps(what)
            print(line, flush=True)
            phases.write(line + "\n")
            phases.flush()

        for step in STEPS:
            left_s = DEADLINE_S - LANE_STOP_S - (clock.now_ns() - began) / 1e9
            if left_s < 2:
                note(phase=step.name, at_ns=clock.now_ns(), skipped="out of time")
                continue
            note(phase=step.name, at_ns=clock.now_ns(), what=step.what)
            if step.name in {"idle", "after"}:
                time.sleep(min(step.seconds, left_s))
                continue
            for line in run_step(step, libcuda, left_s):
                if "call" in line:
                    answers.write(json.dumps({"while": step.name, **line}) + "\n")
                else:
                    note(phase=step.name, at_ns=clock.now_ns(), result=line)
            time.sleep(min(2.0, left_s))  # the lane looks once a second
        note(lane="gpu", at_ns=clock.now_ns(), cost=cost(gpu.pid, began))
    show(out)
    return 0


def show(out: Path) -> None:
    """What the GPU's monitor wrote, and of the fast lane what the kernel said; the rest stays in the files."""
    for path in [*sorted((out / "run").glob("samples-*.jsonl")), out / "calls.jsonl"]:
        print(f"== {path.name}")
        for line in path.read_text(encoding="utf-8").splitlines():
            if path.name != "samples-fast.jsonl" or ('"kernel"' in line and '"text"' in line):
                print(line[:600])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, help="folder to make; it must not exist, or be empty")
    parser.add_argument("--libcuda", default="libcuda.so.1")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.child:
        return child(asked.child, asked.libcuda, asked.seconds)
    if asked.out is None:
        parser.error("OUT_DIR is missing")
    out = asked.out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        print(f"{out} is there already: name a folder that is not, or an empty one", file=sys.stderr)
        return 3
    try:
        ctypes.CDLL(asked.libcuda)
    except OSError as error:
        print(f"no CUDA driver here: {error}", file=sys.stderr)
        return 3
    return record(out, asked.libcuda)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
