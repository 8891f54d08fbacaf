"""NVIDIA GPUs on a fake NVML: every `nvml` case, calls that hang, GPUs and drivers that go and come, events."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadgen import clock
from loadgen.record import Run
from loadgen.rules import gpu as gpu_rule
from loadgen.rules import thermal as thermal_rule
from loadgen.types import Sample
from monitors import nvidia
from monitors.nvidia import NS, SLOW_NS, Driver, Options
from tests import golden

DATA = Path(__file__).parent / "data/monitors"
NVML = {
    case["id"]: case for case in map(json.loads, (DATA / "nvml.jsonl").read_text(encoding="utf-8").splitlines()) if case
}
PATIENT_S = 30.0  # for a tick of `watch`: far beyond what a busy machine needs, and never waited for


def of(samples: list[Sample], metric: str) -> list[Sample]:
    return [s for s in samples if s.metric == metric]


def value(samples: list[Sample], metric: str) -> float | None:
    found = of(samples, metric)
    return found[-1].value if found else None


def watch(nvml: Any, root: str = "/") -> Iterator[list[Sample]]:
    return nvidia.watch(Options(root=root), nvml, PATIENT_S)


class Moved:
    """A driver and the clock that it lives by, which a test moves. Times of samples are relative to nothing."""

    def __init__(self, nvml: Any, root: Path = Path("/nowhere")) -> None:
        self.now = 1000 * NS
        self.driver = Driver(nvml, str(root), lambda: self.now)

    def look(self, after_s: float = 1.0) -> list[Sample]:
        self.now += round(after_s * NS)
        return self.driver.look()


CODES = {"NVMLError_NotSupported": 3, "NVMLError_NoPermission": 4, "NVMLError_GpuIsLost": 15}


class FakeNVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """Answers as the case says; calls it has no answer for are not supported. Counts what it was asked."""

    NVMLError = FakeNVMLError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def __init__(self, calls: dict[str, Any]) -> None:
        self.calls: dict[str, Any] = {"nvmlDeviceGetCount": 1, "nvmlDeviceGetName": "NVIDIA Test", **calls}
        self.asked: list[str] = []
        self.broken = 0  # the code with which every call fails
        self.refuses_init = 0
        self.begun = self.tried = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.tried += 1
        if self.refuses_init:
            raise FakeNVMLError(self.refuses_init)
        self.begun += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if self.broken:
            raise FakeNVMLError(self.broken)
        return f"gpu{index}"

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _handle: str, index: int) -> str:  # noqa: N802
        if index >= len(self.calls.get("mig_devices", [])):
            raise FakeNVMLError(6)
        return f"mig{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return str(self.calls["mig_devices"][int(handle[3:])]["uuid"])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.asked.append(name)
            if self.broken:
                raise FakeNVMLError(self.broken)
            if name == "nvmlDeviceGetMemoryInfo" and str(arguments[0]).startswith("mig"):
                memory = self.calls["mig_devices"][int(arguments[0][3:])]["memory"]
                return SimpleNamespace(free=memory["total"] - memory["used"], **memory)
            answer = self.calls.get(name, {"raise": "NVMLError_NotSupported"})
            if isinstance(answer, dict) and "raise" in answer:
                raise FakeNVMLError(CODES[answer["raise"]])
            if callable(answer):
                return answer(*arguments)
            return SimpleNamespace(**answer) if isinstance(answer, dict) else answer

        return call


def field(kind: int, number: int, code: int = 0) -> SimpleNamespace:
    value = SimpleNamespace(uiVal=number, ullVal=number)
    return SimpleNamespace(nvmlReturn=code, valueType=kind, value=value)


def judged_over(folder: Path, seconds: float, samples: list[Sample]) -> Run:
    """A run that serves on this host for so long, with these samples."""
    here = [golden.sample("process", "observed", 1, 0, text="")]
    spans = [golden.phase("measure", "measure", 0, seconds)]
    return golden.build(folder, outcomes=golden.steady(5), phases=spans, samples=[*here, *samples])


def test_unified_memory_is_recognised_and_the_hosts_figure_named(tmp_path: Path) -> None:
    case = NVML["nvml-gb10-memory-unsupported"]
    nvml = FakeNvml(case["input"]["calls"])
    root = tmp_path
    (root / "proc").mkdir()
    lines = (f"{key}: {kb} kB\n" for key, kb in case["input"]["meminfo_kb"].items())
    (root / "proc/meminfo").write_text("".join(lines))
    ticks = watch(nvml, str(root))
    first = next(ticks)
    asked = nvml.asked.count("nvmlDeviceGetMemoryInfo")
    second = next(ticks)
    expect = case["expect"]
    assert value(second, "host_memory_used_bytes") == expect["gpu_memory"]["used_kb_host"] * 1024
    assert value(second, "memory_used_bytes") is None
    assert value(second, "temperature_c") == expect["temperature_c"]
    assert value(second, "utilization_percent") == expect["utilization"]
    assert value(second, "power_w") == 31.0
    assert "shared with the host" in (first[0].text or "")
    assert nvml.asked.count("nvmlDeviceGetMemoryInfo") == asked, "the failing call is not repeated"


def test_unsupported_memory_of_an_ordinary_gpu_is_not_called_unified() -> None:
    nvml = FakeNvml({"nvmlDeviceGetTemperature": 40})
    samples = next(watch(nvml))
    assert value(samples, "unified_memory") is None
    assert value(samples, "memory_used_bytes") is None


@pytest.mark.parametrize(
    ("name", "code", "mig", "unified"),
    [
        ("NVIDIA GB10", 3, 0, True),
        ("Orin (nvgpu)", 3, 0, True),
        ("NVIDIA Thor", 3, 0, True),
        ("NVIDIA N1X", 3, 0, True),
        ("NVIDIA GB10", 999, 0, False),
        ("NVIDIA GB100", 3, 0, False),
        ("NVIDIA GB10", 3, 1, False),
        ("NVIDIA H200", 3, 0, False),
    ],
)
def test_unified_memory_needs_a_known_name_and_an_unsupported_call_and_no_partition(
    name: str, code: int, mig: int, unified: bool
) -> None:
    def refuse(_handle: str) -> None:
        raise FakeNVMLError(code)

    calls = {"nvmlDeviceGetName": name, "nvmlDeviceGetMemoryInfo": refuse, "nvmlDeviceGetMigMode": [mig, mig]}
    instance = {"uuid": "MIG-1", "memory": {"total": 1 << 30, "used": 0}}
    (gpu,) = nvidia.devices(FakeNvml({**calls, "mig_devices": [instance] * mig}))
    assert gpu.unified is unified


def test_lost_gpu_is_one_event_and_nothing_is_written_after_it() -> None:
    case = NVML["nvml-gpu-lost"]
    at_s = case["input"]["timeline"][0]
    nvml = FakeNvml(
        {"nvmlDeviceGetTemperature": at_s["temperature"], "nvmlDeviceGetPowerUsage": at_s["power_w"] * 1000}
    )
    moved = Moved(nvml)
    assert value(moved.look(), "temperature_c") == case["expect"]["last_temperature_c"]
    nvml.broken = 15
    assert [s.metric for s in moved.look()] == ["gpu_lost", "observed"]
    asked = len(nvml.asked)
    for _ in range(20):
        assert moved.look() == [], "zeros would look like idling"
    assert (len(nvml.asked), nvml.begun) == (asked, 1), "a lost GPU is not asked in a tight loop"


def test_lost_gpu_fails_the_run_at_its_second_and_keeps_its_last_values(tmp_path: Path) -> None:
    case = NVML["nvml-gpu-lost"]
    samples = [
        golden.sample("nvidia", "observed", 1, 0, text="one GPU"),
        golden.sample("nvidia", "temperature_c", 71, 100, gpu="0"),
        golden.sample("nvidia", "gpu_lost", 1, 101, text="GPU is lost", gpu="0"),
        golden.sample("nvidia", "observed", 0, 101, text="every GPU is lost"),
    ]
    run = judged_over(tmp_path, 110, samples)
    lost = [f for f in gpu_rule.check(run, gpu_rule.Options()) if f.status == "fail" and f.since_ns]
    assert {f.cause for f in lost} == {case["expect"]["verdict"]}
    assert {f.since_ns for f in lost} == {golden.at(case["expect"]["at_s"])}
    ((_, heat),) = run.series("nvidia", "temperature_c").items()
    assert list(heat.last) == [case["expect"]["last_temperature_c"]]


def test_lost_gpu_is_asked_again_at_growing_intervals_and_may_come_back() -> None:
    nvml = FakeNvml({"nvmlDeviceGetTemperature": 40})
    moved = Moved(nvml)
    moved.look()
    nvml.broken = 15
    moved.look()
    nvml.refuses_init = 999
    tries = []
    for second in range(1, 200):
        before = nvml.tried
        moved.look()
        tries += [second] * (nvml.tried - before)
    assert tries == [30, 90]
    nvml.broken = nvml.refuses_init = 0
    back = moved.look(after_s=100)
    assert [s.metric for s in back[:2]] == ["gpu_back", "observed"]
    assert value(back, "observed") == 1.0
    assert value(back, "temperature_c") == 40


def test_gpu_that_stays_lost_is_told_once() -> None:
    nvml = FakeNvml({"nvmlDeviceGetTemperature": 40})
    moved = Moved(nvml)
    moved.look()
    nvml.broken = 15
    told = [s.metric for _ in range(1000) for s in moved.look()]
    assert told == ["gpu_lost", "observed"]
    assert nvml.begun == 1 + 5, "again after 30, 90, 210, 510 and 810 s"


def test_one_lost_gpu_does_not_hide_another() -> None:
    class SecondIsLost(FakeNvml):
        def nvmlDeviceGetTemperature(self, handle: str, _kind: int) -> int:  # noqa: N802
            if handle == "gpu1":
                raise FakeNVMLError(15)
            return 50

    ticks = watch(SecondIsLost({"nvmlDeviceGetCount": 2}))
    assert [s.labels["gpu"] for s in of(next(ticks), "gpu_lost")] == ["1"]
    samples = next(ticks)
    assert of(samples, "gpu_lost") == []
    assert {s.labels["gpu"] for s in samples} == {"0"}


def test_memory_of_a_partitioned_gpu_is_that_of_its_instance() -> None:
    case = NVML["nvml-mig"]
    ticks = watch(FakeNvml(case["input"]["calls"]))
    samples = next(ticks)
    (used,) = of(samples, "memory_used_bytes")
    (total,) = of(samples, "memory_total_bytes")
    assert (used.value, total.value) == (case["expect"]["gpu_memory"]["used"], case["expect"]["gpu_memory"]["total"])
    assert used.labels["mig"].startswith("MIG-")
    assert value(samples, "utilization_percent") is case["expect"]["utilization"]


def test_call_that_is_not_supported_is_switched_off_and_said_once() -> None:
    nvml = FakeNvml({"nvmlDeviceGetTemperature": 40})
    moved = Moved(nvml)
    samples = [s for _ in range(200) for s in moved.look()]
    assert nvml.asked.count("nvmlDeviceGetPowerUsage") == nvidia.MAX_REFUSALS
    assert nvml.asked.count("nvmlDeviceGetTemperature") == 200
    refused = [s.labels["call"] for s in of(samples, "call_refused")]
    assert len(refused) == len(set(refused))
    assert {"power", "memory", "energy"} <= set(refused)
    assert "temperature" not in refused


def test_call_that_failed_for_a_while_is_asked_again() -> None:
    answers: list[Any] = [FakeNVMLError(10)] * 3 + [31_000] * 1000

    def power(_handle: str) -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    moved = Moved(FakeNvml({"nvmlDeviceGetPowerUsage": power}))
    seen = [value(moved.look(), "power_w") for _ in range(100)]
    assert seen == [None] * 62 + [31.0] * 38, "three refusals, 60 s of rest from the third"


def test_what_costs_milliseconds_is_asked_every_15_seconds_and_pcie_throughput_never() -> None:
    calls = {
        "nvmlDeviceGetTotalEnergyConsumption": 5_000_000, "nvmlDeviceGetPcieReplayCounter": 7,
        "nvmlDeviceGetRemappedRows": (0, 2, 1, 0), "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetFieldValues": lambda _gpu, ids: [field(3, 45 if ids == [82] else 27_600_000_000)],
    }  # fmt: skip
    nvml = FakeNvml(calls)
    moved = Moved(nvml)
    samples = [s for _ in range(60) for s in moved.look()]
    assert nvml.asked.count("nvmlDeviceGetTotalEnergyConsumption") == 60 * NS // SLOW_NS
    assert "nvmlDeviceGetPcieThroughput" not in nvml.asked
    assert value(samples, "energy_joules_total") == 5000
    assert value(samples, "memory_temperature_c") == 45
    assert value(samples, "sw_thermal_slowdown_s") == pytest.approx(27.6)
    assert (value(samples, "remap_pending"), value(samples, "remap_failed")) == (1.0, 0.0)
    assert value(samples, "pcie_replays_total") == 7


def test_field_without_an_answer_is_none_and_a_constant_zero_is_no_temperature() -> None:
    refuses = Moved(FakeNvml({"nvmlDeviceGetFieldValues": lambda _gpu, ids: [field(3, 0, code=3)]})).look()
    zero = Moved(FakeNvml({"nvmlDeviceGetFieldValues": lambda _gpu, ids: [field(3, 0)]})).look()
    assert value(refuses, "memory_temperature_c") is None
    assert value(refuses, "sw_thermal_slowdown_s") is None
    assert value(zero, "memory_temperature_c") is None


def test_process_whose_memory_is_not_told_is_counted_and_no_sum_is_made() -> None:
    told = [SimpleNamespace(usedGpuMemory=4 << 30), SimpleNamespace(usedGpuMemory=1 << 30)]
    samples = Moved(FakeNvml({"nvmlDeviceGetComputeRunningProcesses": told})).look()
    assert value(samples, "process_memory_bytes") == 5 << 30
    assert value(samples, "compute_processes_without_memory") is None
    told.append(SimpleNamespace(usedGpuMemory=None))
    samples = Moved(FakeNvml({"nvmlDeviceGetComputeRunningProcesses": told})).look()
    assert value(samples, "process_memory_bytes") is None
    assert (value(samples, "compute_processes"), value(samples, "compute_processes_without_memory")) == (3, 1)


# ---------------------------------------------------------------------------------------------------------------------
# A driver that hangs, goes, or is replaced


class Hanging(FakeNvml):
    """The power call returns when it is let go."""

    def __init__(self) -> None:
        super().__init__({"nvmlDeviceGetTemperature": 40})
        self.go, self.inside = threading.Event(), threading.Event()

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:  # noqa: N802
        self.inside.set()
        assert self.go.wait(PATIENT_S)
        return 31_000


def test_call_that_hangs_does_not_hold_the_tick_and_is_named_while_it_does_and_when_it_returns() -> None:
    nvml = Hanging()
    driver = Driver(nvml, "/nowhere")
    caller = nvidia.Caller(driver.look)
    signs = nvidia.Signs()
    assert caller.ask(0.01) == []
    assert nvml.inside.wait(PATIENT_S)
    call = driver.call
    assert call is not None
    assert (call.name, call.gpu) == ("power", "0")
    assert signs.of(call, call.since_ns + 4 * NS) == []
    first = signs.of(call, call.since_ns + 5 * NS)
    assert [s.metric for s in first] == ["call_pending", "call_pending_s"]
    assert first[0].labels == {"gpu": "0", "call": "power", "severity": "high"}
    assert [s.metric for s in signs.of(call, call.since_ns + 60 * NS)] == ["call_pending_s"]
    nvml.go.set()
    late = caller.ask(PATIENT_S)
    assert value(late, "power_w") == 31.0
    (end,) = signs.of(driver.call, call.since_ns + 491 * NS)
    assert (end.metric, end.labels["seconds"]) == ("call_returned", "491")
    caller.finish(driver.close)


def test_values_from_before_a_long_call_are_not_dated_after_it() -> None:
    moved = Moved(FakeNvml({"nvmlDeviceGetTemperature": 40, "nvmlDeviceGetClockInfo": 1980}))

    def long(_handle: str) -> int:
        moved.now += 60 * NS
        return 31_000

    moved.driver._given.calls["nvmlDeviceGetPowerUsage"] = long
    samples = moved.look()
    assert value(samples, "temperature_c") is None
    assert value(samples, "power_w") == 31.0
    assert value(samples, "sm_clock_mhz") == 1980


def test_lane_ends_while_a_call_hangs() -> None:
    nvml = Hanging()
    ticks = nvidia.watch(Options(), nvml, 0.01, 0.01)
    began = clock.now_ns()
    try:
        assert next(ticks)[0].metric == "observed"
        ticks.close()
        assert clock.now_ns() - began < PATIENT_S * NS
    finally:
        nvml.go.set()


def test_driver_that_was_replaced_is_said_and_found_again() -> None:
    nvml = FakeNvml({"nvmlDeviceGetTemperature": 40, "nvmlSystemGetDriverVersion": "580.95.05"})
    moved = Moved(nvml)
    moved.look()
    nvml.broken = nvml.refuses_init = nvidia.VERSION_MISMATCH
    gone = moved.look()
    assert [s.metric for s in gone] == ["driver_gone", "observed"]
    assert "upgraded" in (gone[0].text or "")
    assert [s for _ in range(60) for s in moved.look() if s.metric != "observed"] == []
    nvml.broken = nvml.refuses_init = 0
    nvml.calls["nvmlSystemGetDriverVersion"] = "590.10"
    back = moved.look(after_s=600)
    (changed,) = of(back, "driver_changed")
    assert (changed.labels["before"], changed.labels["after"]) == ("580.95.05", "590.10")
    assert value(back, "temperature_c") == 40


def test_driver_whose_files_were_replaced_under_us_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    maps = tmp_path / "proc/self/maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 7 /usr/lib/libnvidia-ml.so.580.95.05\n")
    moved = Moved(FakeNvml({"nvmlDeviceGetTemperature": 40}), tmp_path)
    assert of([s for _ in range(20) for s in moved.look()], "driver_replaced") == []
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 7 /usr/lib/libnvidia-ml.so.580.95.05 (deleted)\n")
    assert len(of([s for _ in range(60) for s in moved.look()], "driver_replaced")) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Events


class Telling(FakeNvml):
    """A driver that tells events, then times out."""

    def __init__(self, *events: tuple[int, int], supported: int = 0xFF9F) -> None:
        super().__init__({"nvmlDeviceGetTemperature": 40, "nvmlDeviceGetSupportedEventTypes": supported})
        self.calls |= {"nvmlEventSetCreate": "set", "nvmlEventSetFree": None, "nvmlDeviceRegisterEvents": self.register}
        self.calls |= {"nvmlDeviceGetIndex": 0}
        self.events = list(events)
        self.mask = 0
        self.told = threading.Event()

    def register(self, _gpu: str, mask: int, _waiting: str) -> None:
        self.mask = mask

    def nvmlEventSetWait_v2(self, _waiting: str, _ms: int) -> Any:  # noqa: N802
        if self.events:
            kind, data = self.events.pop(0)
            return SimpleNamespace(device="gpu0", eventType=kind, eventData=data)
        self.told.set()
        threading.Event().wait(0.01)
        raise FakeNVMLError(nvidia.TIMEOUT)


def told(nvml: Telling) -> list[Sample]:
    ticks = watch(nvml)
    samples = next(ticks)
    assert nvml.told.wait(PATIENT_S)
    samples += next(ticks)
    ticks.close()
    return samples


def test_driver_without_events_is_said_to_be_without_them() -> None:
    (seen,) = of(Moved(FakeNvml({"nvmlDeviceGetTemperature": 40})).look(), "observed")
    assert seen.value == 1.0
    assert "events (Xid, ECC) are not heard" in (seen.text or "")
    (seen,) = of(Moved(Telling(supported=0)).look(), "observed")
    assert "no device supports them" in (seen.text or "")


def test_wait_for_events_that_ends_is_a_happening_and_a_lost_gpu_is_left_to_the_other_thread() -> None:
    class Ending(Telling):
        code = 999

        def nvmlEventSetWait_v2(self, _waiting: str, _ms: int) -> Any:  # noqa: N802
            raise FakeNVMLError(self.code)

    for code, said in ((999, 1), (nvidia.GPU_IS_LOST, 0), (nvidia.VERSION_MISMATCH, 0)):
        nvml = Ending()
        nvml.code = code
        events = nvidia.Events()
        assert events.start(nvml, [nvidia.Gpu("gpu0", 0, "GPU", labels={"gpu": "0"})]) == ""
        assert events._thread is not None
        events._thread.join(PATIENT_S)
        assert [s.metric for s in events.taken()] == ["events_ended"] * said


def test_xid_of_the_driver_is_a_happening_with_group_and_severity() -> None:
    nvml = Telling((0x8, 31), (0x2, 0))
    samples = told(nvml)
    (xid,) = of(samples, "xid")
    assert xid.labels == {"gpu": "0", "xid": "31", "group": "application", "severity": "fail"}
    assert xid.text == "Xid 31 on GPU 0 (application)"
    assert len(of(samples, "ecc_double_bit")) == 1
    assert nvml.mask == sum(nvidia.EVENTS) & 0xFF9F


def test_storm_of_xids_is_twenty_and_a_count() -> None:
    found = of(told(Telling(*[(0x8, 13)] * 200)), "xid")
    assert len(found) == nvidia.MAX_SAME_EVENTS + 1
    assert sum(s.value for s in found) == 200
    assert found[-1].labels["burst"] == "200"


def test_device_without_events_is_watched_all_the_same() -> None:
    nvml = Telling((0x8, 31), supported=0)
    ticks = watch(nvml)
    assert value(next(ticks), "temperature_c") == 40
    assert nvml.events, "nobody waits for them"
    ticks.close()


def test_reasons_for_low_clocks_are_told_apart() -> None:
    nvml = FakeNvml({"nvmlDeviceGetCurrentClocksEventReasons": 0x24})
    samples = next(watch(nvml))
    assert value(samples, "clock_event_reasons") == 0x24
    assert (value(samples, "clock_sw_power_cap"), value(samples, "clock_sw_thermal")) == (1.0, 1.0)
    assert value(samples, "clock_hw_thermal") == 0.0


def test_machine_without_driver_is_not_observed_with_the_reason() -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise FakeNVMLError(12)

    ticks = watch(NoDriver({}))
    (sample,) = next(ticks)
    assert sample.value == 0.0
    assert "no NVIDIA driver" in (sample.text or "")
    assert next(ticks, None) is None


# ---------------------------------------------------------------------------------------------------------------------
# What becomes of it


def line(points: list[tuple[float, float]]) -> list[float]:
    """A value each second, on straight lines through (second, value)."""
    seconds, values = zip(*points, strict=True)
    return [float(v) for v in np.interp(np.arange(seconds[0], seconds[-1] + 1), seconds, values)]


def test_flat_figure_of_the_driver_does_not_clear_a_host_whose_shared_memory_grows(tmp_path: Path) -> None:
    case = NVML["nvml-managed-memory-undercount"]
    points = case["input"]["samples"]
    told = line([(p["t_s"], p["process_gpu_gib"] * 2**30) for p in points])
    host = line([(p["t_s"], p["host_used_gib"] * 2**30) for p in points])
    samples = [
        golden.sample("nvidia", "observed", 1, 0, text="NVIDIA GB10 (memory shared with the host)"),
        *golden.series("nvidia", "temperature_c", [60.0] * len(host), gpu="0"),
        *golden.series("nvidia", "process_memory_bytes", told, gpu="0"),
        *golden.series("nvidia", "host_memory_used_bytes", host, gpu="0"),
    ]
    run = judged_over(tmp_path, 600, samples)
    (growing,) = [f for f in gpu_rule.check(run, gpu_rule.Options()) if f.status == "fail"]
    assert growing.cause == case["expect"]["verdict"]
    assert f"{case['expect']['slope_gib_per_min']} GiB per minute" in growing.message
    assert "shared with the host" in growing.message
    both = {metric for metric in ("process_memory_bytes", "host_memory_used_bytes") if run.series("nvidia", metric)}
    assert len(both) == 2, "both figures are kept"


def test_heat_before_the_power_went_is_told_with_its_figures(tmp_path: Path) -> None:
    case = NVML["nvml-thermal-then-poweroff"]
    points = case["input"]["samples"]
    samples = [
        golden.sample("nvidia", "observed", 1, 0, text="one GPU"),
        *golden.series("nvidia", "temperature_c", line([(p["t_s"], p["temp_c"]) for p in points]), gpu="0"),
        *golden.series(
            "nvidia", "sw_thermal_slowdown_s", line([(p["t_s"], p["sw_thermal_slowdown_s"]) for p in points]), gpu="0"
        ),
    ]
    run = judged_over(tmp_path, 120, samples)
    said = thermal_rule.heat_before(run, golden.at(120.5))
    assert said == f"GPU 0 at {case['expect']['last_temperature_c']} °C, held down by heat for 27.6 s and rising"
    (finding,) = thermal_rule.check(run, thermal_rule.Options())
    assert (finding.status, finding.cause) == ("fail", case["expect"]["likely_cause"])
    assert "at most 91 °C" in finding.message
    assert thermal_rule.heat_before(run, golden.at(-1)) is None


def test_what_tools_print_where_there_is_no_value_is_none() -> None:
    """The tool's words never reach us: we ask NVML, where they are a refusal or a reserved value."""
    case = NVML["nvml-smi-na-fields"]
    columns = case["input"]["columns"]
    for printed, expect in zip(case["input"]["csv_lines"], case["expect"]["rows"], strict=True):
        row = dict(zip(columns, printed.split(", "), strict=True))
        samples = Moved(smi_row(row)).look()
        ours = {
            "memory_total": mib(value(samples, "memory_total_bytes")),
            "memory_used": mib(value(samples, "memory_used_bytes")),
            "utilization": value(samples, "utilization_percent"),
            "power_w": value(samples, "power_w"),
            "temperature_c": value(samples, "temperature_c"),
        }
        assert {key: ours[key] for key in expect} == expect


def smi_row(row: dict[str, str]) -> FakeNvml:
    """The driver of which a tool printed this row: a value that it could not print is all bits set, or refused."""
    number = {key: float(text) if text.replace(".", "").isdigit() else None for key, text in row.items()}
    memory = [number[f"memory.{word}"] for word in ("total", "used", "free")]
    total, used, free = (2**64 - 1 if n is None else round(n * 2**20) for n in memory)
    calls: dict[str, Any] = {"nvmlDeviceGetName": row["name"], "nvmlDeviceGetTemperature": int(row["temperature.gpu"])}
    if memory != [None] * 3:
        calls["nvmlDeviceGetMemoryInfo"] = {"total": total, "used": used, "free": free}
    if number["utilization.gpu"] is not None:
        calls["nvmlDeviceGetUtilizationRates"] = {"gpu": int(number["utilization.gpu"]), "memory": 0}
    milliwatts = 2**32 - 1 if number["power.draw"] is None else round(number["power.draw"] * 1000)
    return FakeNvml({**calls, "nvmlDeviceGetPowerUsage": milliwatts})


def mib(count: float | None) -> float | None:
    return None if count is None else count / 2**20


# ---------------------------------------------------------------------------------------------------------------------
# A real H200 (driver 580.159.04), recorded by tests/rig/gpu_record.py: idle, busy, out of memory, 4 GiB of managed
# memory, a store to address 16 and a misaligned one; every few seconds are kept


def recorded() -> list[Sample]:
    """The recording on the clock of the golden runs."""
    lines = [json.loads(each) for each in (DATA / "h200.jsonl").read_text(encoding="utf-8").splitlines()]
    began = lines[0]["at"]
    out: list[Sample] = []
    for entry in lines:
        at, labels = golden.BASE_NS + entry["at"] - began, entry.get("labels", {})
        if "metric" in entry:
            out.append(Sample(entry["monitor"], entry["metric"], entry["value"], at, labels, entry["text"]))
        for metric, number in entry.get("values", {}).items():
            out.append(Sample(entry["monitor"], metric, number, at, labels))
    return out


def test_real_xids_were_told_by_kernel_and_driver_and_are_one_finding_each(tmp_path: Path) -> None:
    samples = recorded()
    assert [(s.monitor, s.labels["xid"]) for s in samples if s.metric == "xid"] == [
        ("kernel", "31"), ("nvidia", "31"), ("kernel", "13"), ("nvidia", "13"),
    ]  # fmt: skip
    found = gpu_rule.check(judged_over(tmp_path, 60, samples), gpu_rule.Options())
    failed = [f for f in found if f.status == "fail"]
    assert [(f.scope, f.evidence, f.hard) for f in failed] == [
        ("xid 31", "samples: kernel", True), ("xid 13", "samples: kernel", True),
    ]  # fmt: skip


def test_real_managed_memory_is_in_the_devices_figure_and_not_in_the_process_figure() -> None:
    by_second: dict[int, dict[str, float]] = {}
    for s in recorded():
        if s.labels.get("gpu") == "0" and s.text is None:
            by_second.setdefault(s.at_ns, {})[s.metric] = s.value
    missing = [
        v["memory_used_bytes"] - v["process_memory_bytes"] for v in by_second.values() if "process_memory_bytes" in v
    ]
    assert max(missing) > 4 * 2**30 > 2**30 > min(missing)


def test_real_out_of_memory_shows_in_what_is_free() -> None:
    free = [s.value for s in recorded() if s.metric == "memory_free_bytes"]
    assert min(free) < 4 * 2**20
    assert max(free) > 139 * 2**30


def test_no_call_of_a_real_h200_was_refused_or_hung() -> None:
    assert {s.metric for s in recorded() if s.text is not None} == {"observed", "xid"}
