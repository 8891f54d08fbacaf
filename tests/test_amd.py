"""AMD GPUs on trees of files as the driver shows them: a card, an APU, none."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from loadgen.rules import gpu as gpu_rule
from loadgen.types import Sample
from monitors import amd
from tests import golden

GIB = 1 << 30
CARD = {
    "vendor": "0x1002\n", "device": "0x744c\n", "product_name": "AMD Radeon PRO W7900\n", "gpu_busy_percent": "97\n",
    "mem_info_vram_used": f"{40 * GIB}\n", "mem_info_vram_total": f"{48 * GIB}\n", "mem_info_gtt_used": f"{GIB}\n",
    "mem_info_gtt_total": f"{64 * GIB}\n", "hwmon/hwmon3/temp1_input": "61000\n", "hwmon/hwmon3/temp2_input": "74000\n",
    "hwmon/hwmon3/temp3_input": "80000\n", "hwmon/hwmon3/power1_average": "241000000\n",
    "hwmon/hwmon3/power1_cap": "295000000\n", "hwmon/hwmon3/freq1_input": "2495000000\n",
}  # fmt: skip


def machine(root: Path, files: dict[str, str], *, metrics_format: int | None, card: int = 1) -> Path:
    device = root / f"sys/class/drm/card{card}/device"
    for name, text in files.items():
        (device / name).parent.mkdir(parents=True, exist_ok=True)
        (device / name).write_text(text)
    if metrics_format is not None:
        (device / "gpu_metrics").write_bytes(bytes([0x78, 0, metrics_format, 3]) + bytes(116))
    (root / f"sys/class/drm/card{card}-DP-1").mkdir()
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/meminfo").write_text("MemTotal:       131072000 kB\nMemAvailable:   100000000 kB\n")
    return root


def ticks(root: Path, n: int = 1, between: list[Path] | None = None) -> list[Sample]:
    """The samples of n ticks; `between` are folders that vanish after the first."""

    async def go() -> list[Sample]:
        watching = amd.watch(amd.Options(root=str(root)))
        out = await anext(watching)
        for path in between or []:
            shutil.rmtree(path)
        for _ in range(n - 1):
            out += await anext(watching)
        await watching.aclose()  # type: ignore[attr-defined]
        return out

    return asyncio.run(go())


def values(samples: list[Sample]) -> dict[str, float]:
    return {s.metric: s.value for s in samples if s.labels}


def test_card_has_memory_of_its_own(tmp_path: Path) -> None:
    samples = ticks(machine(tmp_path, CARD, metrics_format=1))
    assert (samples[0].metric, samples[0].value, samples[0].text) == ("observed", 1.0, "1: AMD Radeon PRO W7900")
    read = values(samples)
    assert (read["memory_used_bytes"], read["memory_free_bytes"], read["memory_total_bytes"]) == (
        40 * GIB, 8 * GIB, 48 * GIB,
    )  # fmt: skip
    assert (read["utilization_percent"], read["temperature_c"], read["junction_temperature_c"]) == (97, 61, 74)
    assert (read["power_w"], read["power_limit_w"], read["sm_clock_mhz"]) == (241, 295, 2495)
    assert "unified_memory" not in read
    assert {s.labels["gpu"] for s in samples if s.labels} == {"1"}


@pytest.mark.parametrize("metrics_format", [2, 3])
def test_apu_shares_the_hosts_memory_and_its_vram_is_not_taken_for_it(metrics_format: int, tmp_path: Path) -> None:
    small = {"mem_info_vram_used": f"{GIB // 4}\n", "mem_info_vram_total": f"{GIB // 2}\n", "mem_info_gtt_used": "12\n"}
    samples = ticks(machine(tmp_path, CARD | small, metrics_format=metrics_format))
    read = values(samples)
    assert "shared with the host" in (samples[0].text or "")
    assert read["host_memory_used_bytes"] == 31072000 * 1024
    assert "memory_used_bytes" not in read
    assert (read["gtt_used_bytes"], read["vram_used_bytes"]) == (12, GIB // 4), "kept, under their own names"


def test_sensor_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    read = values(ticks(machine(tmp_path, CARD | {"gpu_busy_percent": "\n"}, metrics_format=None)))
    assert "utilization_percent" not in read
    assert read["temperature_c"] == 61


def test_other_vendors_and_machines_without_a_gpu_are_quiet(tmp_path: Path) -> None:
    machine(tmp_path, CARD | {"vendor": "0x10de\n"}, metrics_format=None)
    (sample,) = ticks(tmp_path)
    assert (sample.metric, sample.value, sample.text) == ("observed", 0.0, "no AMD GPU")


def test_card_that_vanishes_is_lost_once(tmp_path: Path) -> None:
    root = machine(tmp_path, CARD, metrics_format=1)
    samples = ticks(root, 4, [root / "sys/class/drm/card1"])
    assert [s.metric for s in samples if s.text is not None] == ["observed", "gpu_lost"]
    assert sum(s.metric == "temperature_c" for s in samples) == 1


def test_growing_memory_of_an_amd_gpu_fails_as_that_of_any_other(tmp_path: Path) -> None:
    samples = [
        golden.sample("process", "observed", 1, 0, text=""),
        golden.sample("nvidia", "observed", 0, 0, text="there is no NVIDIA driver on this machine"),
        golden.sample("amd", "observed", 1, 0, text="1: AMD Radeon"),
        *golden.series("amd", "memory_used_bytes", [20 * GIB + k * (10 << 20) for k in range(91)], gpu="1"),
    ]
    phases = [golden.phase("measure", "measure", 0, 90)]
    run = golden.build(tmp_path, outcomes=golden.steady(5), phases=phases, samples=samples)
    (finding,) = gpu_rule.check(run, gpu_rule.Options())
    assert (finding.status, finding.cause, finding.evidence) == (
        "fail",
        "memory_growing",
        "samples: amd.memory_used_bytes",
    )
