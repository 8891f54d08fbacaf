"""NVIDIA GPUs through NVML: memory, load, temperature, power, clocks and why they are held down, errors and Xids.

While a driver is stuck its calls have been seen to block for minutes, so all of them are made by one thread, and the
monitor only looks at what that thread brought: a call that does not return is said after 5 s, by name, and again when
it does. A second thread waits for the driver's own events (Xid, ECC). Each call stands alone: one that the device does
not support is switched off, said once, and the rest go on. On machines whose GPU shares the host's memory the memory
call is unsupported; that is recognised, said, and the host's figures are named instead. A lost GPU and a driver that
was replaced under us are one happening; they are asked again at growing intervals, and nothing is written meanwhile:
zeros would look like idling.

What costs milliseconds is asked every 15 s (energy, memory temperature, PCIe replays). PCIe throughput never: it is a
blocking measurement of 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import queue
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds
from monitors.kernel import XIDS

LANE: Lane = "gpu"
PERIOD_S = 1.0
LIBRARY = "libnvidia-ml.so.1"
MAX_MIG = 8  # instances of one GPU that NVML gives out at most (seven on today's devices)

NS = 1_000_000_000
SLOW_NS = 15 * NS  # energy and memory temperature cost 3 ms each, p99 17 ms, on an H200: 0.04 % of a core at 15 s
PATIENCE_S = 0.5  # what a tick waits for its own readings, some 60 µs; later ones come with the next tick
START_S = 5.0  # the same for the first tick: initialising takes 12 ms on an idle machine, a second on a busy one
PENDING_NS = 5 * NS  # a call that takes that long is a sign by itself: nvidia-smi hung 491 to 737 s in one wedge
STALE_NS = NS  # what was read before a call that took longer than this is no longer now
CLOSE_S = 1.0  # for the threads to end by themselves; a thread inside the driver cannot be ended, only left
MAX_REFUSALS = 3  # in a row, before a call is switched off
REST_NS = 60 * NS  # or, where it failed otherwise (a time-out), before it is asked again
FOREVER_NS = 1 << 62
# After a lost GPU or driver: a reset takes half a minute, and each try costs an initialisation of 12 ms and more.
RETRY_S = (30, 60, 120, 300)  # the last repeats
EVENT_WAIT_MS = 500  # how long one wait for events lasts, hence how soon its thread hears that it shall end
MAX_EVENTS = 1000  # that may wait for the next tick: an Xid storm is hundreds a second
MAX_SAME_EVENTS = 20  # of one kind in a tick; more are one sample with their count, as in the kernel's log

# Names of GPUs that share the host's memory. The failing memory call alone does not prove it: a lost GPU and a slice
# of a partitioned one fail as well. Tegra's own driver says so itself.
UNIFIED = re.compile(r"\b(GB10|Orin|Thor|N1X?)\b|\(nvgpu\)", re.IGNORECASE)

# NVML return codes that we act upon; the names are NVML's.
UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, TIMEOUT = 1, 3, 4, 9, 10
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH = 12, 13, 15, 16, 18
LOST = frozenset({GPU_IS_LOST, RESET_REQUIRED})
GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, VERSION_MISMATCH})  # the driver itself, with all of its GPUs
UNSUPPORTED = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND})

# Bits of the clock event reasons that say more than "idle". SW power cap at full load is normal on limited cards.
REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}

# Bits of NVML's events that we wait for, where the device supports them.
EVENTS = {
    0x2: "ecc_double_bit",
    0x8: "xid",
    0x400: "row_retired",
    0x800: "row_retirement_failed",
    0x1000: "poison_contained",
    0x2000: "poison_fatal",
    0x4000: "gpu_unavailable",
    0x8000: "recovery_action",
}

INIT_HINTS = {
    UNINITIALIZED: "the NVIDIA driver was unloaded",
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    LIBRARY_NOT_FOUND: f"there is no NVIDIA driver on this machine ({LIBRARY})",
    VERSION_MISMATCH: "the driver was upgraded since it was loaded: reboot or reload it",
    NO_PERMISSION: "no permission for the device files (/dev/nvidia*)",
}
REPLACED = (
    "the driver's library was replaced on disk: what starts from now on may not find its GPU until the machine reboots"
)

_MEMINFO = re.compile(rb"^(MemTotal|MemAvailable): +(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Options:
    """`root` is where /proc/meminfo and the driver's version are read."""

    root: str = "/"
    period_s: Seconds = Seconds(1)


@dataclass(slots=True)
class Gpu:
    """One device: its handle, its label, and for each call how often in a row it was refused and how long it rests."""

    handle: Any
    index: int
    name: str
    unified: bool = False
    partitions: list[Gpu] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    rests_until_ns: dict[str, int] = field(default_factory=dict)
    slow_due_ns: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the thread is in."""

    name: str
    gpu: str
    since_ns: int


class LostError(Exception):
    """The driver says that the GPU is gone."""


class GoneError(Exception):
    """The driver itself is gone, or another one than the library is for."""


def text_of(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def watch(
    options: Options, nvml: Any = None, patience_s: float = PATIENCE_S, start_s: float = START_S
) -> Iterator[list[Sample]]:
    """Samples of all GPUs. `nvml` is the binding, or what stands in for it; None: pynvml. No tick waits longer than
    `patience_s` for the driver, the first no longer than `start_s`."""
    driver = Driver(nvml, options.root)
    caller = Caller(driver.look)
    signs = Signs()
    try:
        out = caller.ask(max(patience_s, start_s))
        if not out:
            text = f"the driver has not answered within {start_s:.0f} s"
            out.append(Sample("nvidia", "observed", 0.0, clock.now_ns(), text=text))
        while True:
            out += driver.events.taken()
            out += signs.of(driver.call, clock.now_ns())
            yield out
            if driver.over and not caller.busy:
                return
            out = caller.ask(patience_s)
    finally:
        driver.events.stop()
        caller.finish(driver.close)


# ---------------------------------------------------------------------------------------------------------------------
# Threads


class Caller:
    """A thread that does one piece of work at a time, for somebody who will not wait for it."""

    def __init__(self, work: Callable[[], list[Sample]]) -> None:
        self.busy = False
        self._work = work
        self._asked: queue.SimpleQueue[Callable[[], list[Sample]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[list[Sample] | Exception] = queue.SimpleQueue()
        # A daemon: the process must be able to end while the driver holds this thread.
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                self._done.put(work())
            except Exception as error:  # whatever it is belongs to the tick that asked; the lane reports it
                self._done.put(error)

    def ask(self, patience_s: float) -> list[Sample]:
        """The samples of a round that is asked for now, or was earlier, as soon as it ended; nothing until then."""
        if not self.busy:
            self.busy = True
            self._asked.put(self._work)
        try:
            done = self._done.get(timeout=patience_s)
        except queue.Empty:
            return []
        self.busy = False
        if isinstance(done, Exception):
            raise done
        return done

    def finish(self, last: Callable[[], list[Sample]]) -> None:
        """Some last work, if the thread can still do it, and its end."""
        self._asked.put(last)
        self._asked.put(None)
        self._thread.join(CLOSE_S)


class Signs:
    """What a call that does not return, and the one that did at last, are worth."""

    def __init__(self) -> None:
        self._said: Call | None = None

    def of(self, call: Call | None, now_ns: int) -> list[Sample]:
        out: list[Sample] = []
        said = self._said
        if said is not None and call != said:
            seconds = (now_ns - said.since_ns) / NS
            labels = {"gpu": said.gpu, "call": said.name, "seconds": f"{seconds:.0f}"}
            text = f"the driver returned from {said.name} after {seconds:.0f} s"
            out.append(Sample("nvidia", "call_returned", 1.0, now_ns, labels, text))
            self._said = None
        if call is not None and now_ns - call.since_ns >= PENDING_NS:
            labels = {"gpu": call.gpu, "call": call.name}
            seconds = (now_ns - call.since_ns) / NS
            if self._said is None:
                text = f"the driver has not answered {call.name} for {seconds:.0f} s"
                out.append(Sample("nvidia", "call_pending", 1.0, now_ns, {**labels, "severity": "high"}, text))
                self._said = call
            out.append(Sample("nvidia", "call_pending_s", seconds, now_ns, labels))
        return out


class Events:
    """The driver's own events, waited for in a thread of their own: a wait would hold up every other call."""

    def __init__(self) -> None:
        self._found: queue.Queue[tuple[str, dict[str, str], int]] = queue.Queue(MAX_EVENTS)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.unheard = 0  # that found the queue full

    def start(self, nvml: Any, gpus: list[Gpu]) -> str:
        """Registers what each device supports. "" or why nothing will be heard: a driver without events is no loss
        where the kernel log is read, but it must not look like a driver without errors."""
        self.stop()
        self._stop = threading.Event()
        try:
            waiting = nvml.nvmlEventSetCreate()
        except (nvml.NVMLError, AttributeError) as error:
            return f"its events (Xid, ECC) are not heard: {one_line(error)}"
        registered = 0
        for gpu in gpus:
            if gpu.handle is None:
                continue
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                mask = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & sum(EVENTS)
                if mask:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, mask, waiting)
                    registered += 1
        if not registered:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(waiting)
            return "its events (Xid, ECC) are not heard: no device supports them"
        arguments = (nvml, waiting, self._stop)
        self._thread = threading.Thread(target=self._wait, args=arguments, name="nvml events", daemon=True)
        self._thread.start()
        return ""

    def _wait(self, nvml: Any, waiting: Any, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                data = nvml.nvmlEventSetWait_v2(waiting, EVENT_WAIT_MS)
            except nvml.NVMLError as error:
                if error.value == TIMEOUT:
                    continue
                # a lost device or driver: the other thread says so, and starts us again when it is back
                if error.value not in LOST | GONE:
                    self._keep("events_ended", {"why": one_line(error)}, clock.now_ns())
                break
            self._put(nvml, data)
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlEventSetFree(waiting)

    def _put(self, nvml: Any, data: Any) -> None:
        at_ns = clock.now_ns()
        labels: dict[str, str] = {}
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            labels["gpu"] = str(nvml.nvmlDeviceGetIndex(data.device))
        name = EVENTS.get(int(data.eventType), f"event_{int(data.eventType):#x}")
        if name == "xid":
            code = int(data.eventData)
            group, severity = XIDS.get(code, ("unknown", "warn"))
            labels |= {"xid": str(code), "group": group, "severity": severity}
        self._keep(name, labels, at_ns)

    def _keep(self, name: str, labels: dict[str, str], at_ns: int) -> None:
        try:
            self._found.put_nowait((name, labels, at_ns))
        except queue.Full:
            self.unheard += 1

    def taken(self) -> list[Sample]:
        """What came since the last call: the first MAX_SAME_EVENTS of a kind, and how many more."""
        out: list[Sample] = []
        seen: dict[tuple[str, ...], int] = {}
        last: dict[tuple[str, ...], tuple[str, dict[str, str], int]] = {}
        for _ in range(MAX_EVENTS):
            try:
                name, labels, at_ns = self._found.get_nowait()
            except queue.Empty:
                break
            key = (name, *labels.values())
            seen[key] = seen.get(key, 0) + 1
            last[key] = (name, labels, at_ns)
            if seen[key] <= MAX_SAME_EVENTS:
                out.append(Sample("nvidia", name, 1.0, at_ns, labels, said_of(name, labels)))
        for key, n in seen.items():
            if n > MAX_SAME_EVENTS:
                name, labels, at_ns = last[key]
                more = n - MAX_SAME_EVENTS
                text = f"and {more} more like it"
                out.append(Sample("nvidia", name, float(more), at_ns, {**labels, "burst": str(n)}, text))
        return out

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(EVENT_WAIT_MS / 1000 + CLOSE_S)
            self._thread = None


def said_of(name: str, labels: dict[str, str]) -> str:
    """An event in words."""
    where = f" on GPU {labels['gpu']}" if "gpu" in labels else ""
    if name == "xid":
        return f"Xid {labels['xid']}{where} ({labels['group'].replace('_', ' ')})"
    if name == "events_ended":
        return f"the driver's events (Xid, ECC) are no longer heard: {labels['why']}"
    return f"{name.replace('_', ' ')}{where}"


# ---------------------------------------------------------------------------------------------------------------------
# The driver and its devices


class Driver:
    """All that talks to NVML. `look` is one round; `call` is what it is in, for whoever watches from another thread."""

    def __init__(self, nvml: Any, root: str, now_ns: Callable[[], int] = clock.now_ns) -> None:
        self.call: Call | None = None
        self.events = Events()
        self.over = False
        self._given = nvml
        self._nvml: Any = None
        self._root = root
        self._now_ns = now_ns
        self._gpus: list[Gpu] = []
        self._lost: set[int] = set()
        self._tries = 0
        self._retry_ns = 0
        self._why = ""
        self._version = ""
        self._replaced = False
        self._slow_due_ns = 0

    def look(self) -> list[Sample]:
        """One round over everything that is due. Raises only what no driver should."""
        now = self._now_ns()
        out: list[Sample] = []
        if self._nvml is None or (self._lost and now >= self._retry_ns):
            if now < self._retry_ns:
                return []
            out += self._begin(now)
            if self._nvml is None:
                return out
        try:
            for gpu in self._gpus:
                out += self._readings(gpu)
            if now >= self._slow_due_ns:
                self._slow_due_ns = now + SLOW_NS
                out += self._versions()
        except GoneError as error:
            self._forget()
            self._rest()
            self._why = str(error)
            text = f"the driver no longer answers: {error}"
            out.append(Sample("nvidia", "driver_gone", 1.0, self._now_ns(), {"severity": "high"}, text))
            out.append(Sample("nvidia", "observed", 0.0, self._now_ns(), text=text))
            return out
        return out

    def _begin(self, now: int) -> list[Sample]:
        """Load and ask for devices, for the first time or again."""
        again = bool(self._version)
        try:
            if self._nvml is not None:
                self._forget()
            self._nvml = self._load()
            with self._in("nvmlInit"):
                self._nvml.nvmlInit()
            with self._in("devices"):
                self._gpus = devices(self._nvml)
        except Exception as error:  # an import error, a missing library, a driver in any state: all mean "cannot see"
            self._nvml = None
            code = LIBRARY_NOT_FOUND if isinstance(error, OSError) else getattr(error, "value", 0)
            why = INIT_HINTS.get(code, one_line(error))
            # what is not installed will not come; a driver that is not loaded, or not permitted, may
            self.over = code == LIBRARY_NOT_FOUND or isinstance(error, ImportError)
            self._rest()
            if self._why:  # it is said already that nothing can be seen
                return []
            self._why = why
            return [Sample("nvidia", "observed", 0.0, now, text=why)]
        if not self._gpus and not again:
            self.over = True
            return [Sample("nvidia", "observed", 0.0, now, text="the NVIDIA driver has no GPU to show")]
        version = self._driver_version()
        out = self._back(now, version) if again else []
        self._version = version
        deaf = self.events.start(self._nvml, self._gpus)
        if any(gpu.index not in self._lost for gpu in self._gpus):
            if self._why or not again:
                text = "; ".join(filter(None, (about(version, self._gpus), deaf)))
                out.append(Sample("nvidia", "observed", 1.0, now, text=text))
            self._why = ""
        if self._lost:
            self._rest()
        else:
            self._tries = 0
        return out

    def _back(self, now: int, version: str) -> list[Sample]:
        """What came back since the last look."""
        out: list[Sample] = []
        for gpu in self._gpus:
            if gpu.index in self._lost and gpu.handle is not None:
                try:
                    with self._in("nvmlDeviceGetTemperature", gpu):
                        temperature(self._nvml, gpu.handle)
                except self._nvml.NVMLError as error:
                    if error.value in LOST:
                        gpu.lost = True
                        continue
                self._lost.discard(gpu.index)
                out.append(Sample("nvidia", "gpu_back", 1.0, now, gpu.labels, f"{gpu.name} answers again"))
        if version != self._version and self._version:
            labels = {"before": self._version, "after": version, "severity": "high"}
            text = f"the driver was replaced during the run: {self._version}, now {version}"
            out.append(Sample("nvidia", "driver_changed", 1.0, now, labels, text))
        return out

    def _load(self) -> Any:
        if self._given is not None:
            return self._given
        ctypes.CDLL(LIBRARY)  # without a driver the binding would only take its 17 MB to say so
        return importlib.import_module("pynvml")

    def _driver_version(self) -> str:
        try:
            with self._in("nvmlSystemGetDriverVersion"):
                return text_of(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return "unknown"

    def _rest(self) -> None:
        """Until the next try."""
        self._retry_ns = self._now_ns() + RETRY_S[min(self._tries, len(RETRY_S) - 1)] * NS
        self._tries += 1

    def _forget(self) -> None:
        """Everything that the driver gave us."""
        self.events.stop()
        with contextlib.suppress(self._nvml.NVMLError), self._in("nvmlShutdown"):
            self._nvml.nvmlShutdown()  # a driver that lost its device may refuse even this
        self._nvml, self._gpus = None, []

    def close(self) -> list[Sample]:
        if self._nvml is not None:
            self._forget()
        return []

    @contextlib.contextmanager
    def _in(self, name: str, gpu: Gpu | None = None) -> Iterator[None]:
        """Marks a call while it lasts."""
        self.call = Call(name, gpu.labels["gpu"] if gpu is not None else "", clock.now_ns())
        try:
            yield
        finally:
            self.call = None

    def _readings(self, gpu: Gpu) -> list[Sample]:
        """One look at one GPU. Each call has a reading function below; what it cannot answer is left out, never 0."""
        if gpu.lost:
            return []
        out: list[Sample] = []
        try:
            if gpu.handle is None:
                raise LostError(f"GPU {gpu.index} was lost before the run began")
            due = dict(READINGS)
            if self._now_ns() >= gpu.slow_due_ns:
                gpu.slow_due_ns = self._now_ns() + SLOW_NS
                due |= SLOW_READINGS
            values: dict[str, float] = {}
            for name, reading in due.items():
                if (gpu.unified or gpu.partitions) and name == "memory":
                    continue
                began = self._now_ns()
                new = self._asked(gpu, name, reading, out)
                if self._now_ns() - began > STALE_NS:
                    values.clear()
                values |= new
            if gpu.unified:
                values |= host_memory(self._root)
            at = self._now_ns()
            out += [Sample("nvidia", metric, value, at, gpu.labels) for metric, value in values.items()]
            for part in gpu.partitions:
                memory_of_part = self._asked(part, "memory", READINGS["memory"], out)
                out += [Sample("nvidia", metric, value, at, part.labels) for metric, value in memory_of_part.items()]
            return out
        except LostError as error:
            gpu.lost = True
            if gpu.index in self._lost:
                return out
            self._lost.add(gpu.index)
            self._rest()
            out.append(Sample("nvidia", "gpu_lost", 1.0, self._now_ns(), gpu.labels, f"{gpu.name}: {error}"))
            if all(each.lost for each in self._gpus):
                self._why = "every GPU is lost"
                out.append(Sample("nvidia", "observed", 0.0, self._now_ns(), text=self._why))
            return out

    def _asked(
        self, gpu: Gpu, name: str, reading: Callable[[Any, Any], dict[str, float]], out: list[Sample]
    ) -> dict[str, float]:
        """One call, unless it is known to be useless. What is switched off is said in `out`. Raises LostError,
        GoneError."""
        refused = gpu.refusals.get(name, 0)
        if refused >= MAX_REFUSALS and self._now_ns() < gpu.rests_until_ns[name]:
            return {}
        try:
            with self._in(name, gpu):
                values = reading(self._nvml, gpu.handle)
        except self._nvml.NVMLError as error:
            if error.value in LOST:
                raise LostError(one_line(error)) from None
            if error.value in GONE:
                raise GoneError(INIT_HINTS.get(error.value, one_line(error))) from None
            final, why = error.value in UNSUPPORTED, one_line(error)
        except AttributeError as error:  # a binding older than the call
            final, why = True, one_line(error)
        else:
            gpu.refusals[name] = 0
            return values
        gpu.refusals[name] = refused + 1
        gpu.rests_until_ns[name] = FOREVER_NS if final else self._now_ns() + REST_NS
        if refused + 1 == MAX_REFUSALS:
            text = f"{name} is not read: {why}" + ("" if final else f"; asked again in {REST_NS // NS} s")
            labels = {**gpu.labels, "call": name}
            out.append(Sample("nvidia", "call_refused", 1.0, self._now_ns(), labels, text))
        return {}

    def _versions(self) -> list[Sample]:
        """Whether the driver's files were replaced under us: the library that we hold then is deleted on disk."""
        if self._replaced:
            return []
        try:
            maps = (Path(self._root) / "proc/self/maps").read_text(errors="replace")
        except OSError:
            return []
        if not any("libnvidia-ml" in line and line.endswith("(deleted)") for line in maps.splitlines()):
            return []
        self._replaced = True
        return [Sample("nvidia", "driver_replaced", 1.0, self._now_ns(), {"severity": "high"}, REPLACED)]


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


def about(driver: str, gpus: list[Gpu]) -> str:
    """What there is, for the report."""
    words = []
    for gpu in gpus:
        note = " (memory shared with the host: see the host's figures)" if gpu.unified else ""
        note = f" ({len(gpu.partitions)} MIG instances)" if gpu.partitions else note
        words.append(f"{gpu.index}: {gpu.name}{note}")
    return f"driver {driver}; {'; '.join(words)}"


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


def known(**numbers: int) -> dict[str, float]:
    """Those that are numbers: NVML says "not available" within an answer by all bits set, and tools print it as [N/A],
    N/A, [Not Supported] or Unknown, depending on their version."""
    return {name: float(number) for name, number in numbers.items() if number not in NOT_AVAILABLE}


def memory(nvml: Any, handle: Any) -> dict[str, float]:
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    if not info.total:
        return {}
    return known(memory_used_bytes=info.used, memory_free_bytes=info.free, memory_total_bytes=info.total)


def utilization(nvml: Any, handle: Any) -> dict[str, float]:
    """The share of time in which any kernel ran: not load."""
    return known(utilization_percent=nvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def temperature(nvml: Any, handle: Any) -> dict[str, float]:
    return known(temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))


def power(nvml: Any, handle: Any) -> dict[str, float]:
    milliwatts = known(mw=nvml.nvmlDeviceGetPowerUsage(handle))
    return {"power_w": milliwatts["mw"] / 1000} if milliwatts else {}


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
    """Uncorrected errors since the driver was loaded."""
    return {"ecc_uncorrected_total": float(nvml.nvmlDeviceGetTotalEccErrors(handle, UNCORRECTED, VOLATILE))}


def processes(nvml: Any, handle: Any) -> dict[str, float]:
    """Memory of all compute processes. It has no managed or unified allocations: a flat line clears nobody. A process
    whose memory is not told is counted, and there is no sum then: it would look like little."""
    used = [process.usedGpuMemory for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    values = {"compute_processes": float(len(used))}
    if None in used:
        values["compute_processes_without_memory"] = float(used.count(None))
    elif used:
        values["process_memory_bytes"] = float(sum(used))
    return values


# ---------------------------------------------------------------------------------------------------------------------
# The slow calls, and what changes slowly


def power_limit(nvml: Any, handle: Any) -> dict[str, float]:
    return {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000}


def energy(nvml: Any, handle: Any) -> dict[str, float]:
    return {"energy_joules_total": nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000}


def ecc_history(nvml: Any, handle: Any) -> dict[str, float]:
    """Corrected errors since the driver was loaded, uncorrected ones of the board's whole life."""
    return {
        "ecc_corrected_total": float(nvml.nvmlDeviceGetTotalEccErrors(handle, CORRECTED, VOLATILE)),
        "ecc_uncorrected_lifetime_total": float(nvml.nvmlDeviceGetTotalEccErrors(handle, UNCORRECTED, AGGREGATE)),
    }


def remapped_rows(nvml: Any, handle: Any) -> dict[str, float]:
    """Rows of memory that were taken out of use; `remap_pending`: at the next reset; `remap_failed`: no spare left."""
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)[:4]
    return {
        "remapped_rows_corrected_total": float(corrected),
        "remapped_rows_uncorrected_total": float(uncorrected),
        "remap_pending": float(bool(pending)),
        "remap_failed": float(bool(failed)),
    }


def pcie_replays(nvml: Any, handle: Any) -> dict[str, float]:
    return {"pcie_replays_total": float(nvml.nvmlDeviceGetPcieReplayCounter(handle))}


def memory_temperature(nvml: Any, handle: Any) -> dict[str, float]:
    """Constant 0 is how boards without the sensor answer."""
    celsius = field_value(nvml, handle, FI_MEMORY_TEMPERATURE)
    return {"memory_temperature_c": celsius} if celsius else {}


def thermal_slowdown(nvml: Any, handle: Any) -> dict[str, float]:
    """How long heat has held the clocks down since the driver was loaded: what the ticks between two looks miss."""
    return {
        "sw_thermal_slowdown_s": field_value(nvml, handle, FI_SW_THERMAL_NS) / 1e9,
        "hw_thermal_slowdown_s": field_value(nvml, handle, FI_HW_THERMAL_NS) / 1e9,
    }


def field_value(nvml: Any, handle: Any, number: int) -> float:
    """A field by its number. Raises NVMLError where this field has no answer."""
    (found,) = nvml.nvmlDeviceGetFieldValues(handle, [number])
    if found.nvmlReturn:
        raise nvml.NVMLError(found.nvmlReturn)
    return float(getattr(found.value, VALUE_FIELDS[found.valueType]))


NOT_AVAILABLE = frozenset({(1 << 32) - 1, (1 << 64) - 1})
# NVML's numbers, as in its header: a binding may be older than the name.
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1
FI_MEMORY_TEMPERATURE, FI_SW_THERMAL_NS, FI_HW_THERMAL_NS = 82, 269, 270
VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t

READINGS: dict[str, Callable[[Any, Any], dict[str, float]]] = {
    "memory": memory,
    "utilization": utilization,
    "temperature": temperature,
    "power": power,
    "sm_clock": sm_clock,
    "memory_clock": memory_clock,
    "clock_event_reasons": clock_event_reasons,
    "ecc_errors": ecc_errors,
    "processes": processes,
}
SLOW_READINGS: dict[str, Callable[[Any, Any], dict[str, float]]] = {
    "power_limit": power_limit,
    "energy": energy,
    "ecc_history": ecc_history,
    "remapped_rows": remapped_rows,
    "pcie_replays": pcie_replays,
    "memory_temperature": memory_temperature,
    "thermal_slowdown": thermal_slowdown,
}
