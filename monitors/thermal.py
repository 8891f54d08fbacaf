"""Temperatures, fans, power, cooling and CPU clock: what explains a slow or a switched-off machine.

From hwmon (NVMe disks stand there under the driver `nvme`), the thermal zones and cpufreq. A sensor that reaches the
critical temperature of its own driver is a happening, once, until it has cooled by 5 °C. Virtual machines have none of
all this; that is said once and costs nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds

LANE: Lane = "fast"
PERIOD_S = 2.0
MAX_SENSORS = 64  # a server board has dozens; each is a read of up to some milliseconds over its bus
MAX_CLOCKS = 16  # clock domains of the CPU that are averaged: laptops have one a core, servers hundreds
COOLED_C = 5.0  # below its critical temperature a sensor may cross it anew

# Sensors that another one stands for: the package is as hot as its hottest core.
REDUNDANT = re.compile(r"^Core \d+$")

# file name pattern below a hwmon device → (metric, what one unit of the metric is in the file's unit)
HWMON = {
    "temp*_input": ("temperature_c", 1000.0),
    "fan*_input": ("fan_rpm", 1.0),
    "power*_average": ("power_w", 1e6),
    "power*_input": ("power_w", 1e6),
}


@dataclass(frozen=True, slots=True)
class Options:
    root: str = "/"
    period_s: Seconds = Seconds(2)


@dataclass(frozen=True, slots=True)
class Sensor:
    """One file with one number."""

    path: Path
    metric: str
    per_unit: float
    labels: dict[str, str]
    crit: float | None = None  # the temperature that its driver calls critical, in °C


def word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path, per_unit: float = 1.0) -> float | None:
    """A file's number, or None: drivers answer EAGAIN or ENODATA while a device sleeps."""
    try:
        return int(path.read_text()) / per_unit
    except (OSError, ValueError):
        return None


def sensors(root: Path) -> list[Sensor]:
    """What this machine has, named by driver and label (`nvme Composite`, `coretemp Package id 0`)."""
    found: list[Sensor] = []
    for device in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        chip = word(device / "name") or device.name
        stems: set[tuple[str, str]] = set()
        for pattern, (metric, per_unit) in HWMON.items():
            for path in sorted(device.glob(pattern)):
                stem = path.name.partition("_")[0]
                label = word(device / f"{stem}_label") or stem
                if (metric, stem) in stems or REDUNDANT.match(label):  # power as average and at once is one sensor
                    continue
                stems.add((metric, stem))
                crit = number(device / f"{stem}_crit", per_unit) if metric == "temperature_c" else None
                labels = {"chip": chip, "sensor": label, "device": device.name}
                # 0 and 65261.85 °C (all bits set) are how NVMe disks say that they have no limit
                found.append(Sensor(path, metric, per_unit, labels, crit if crit and crit < 1000 else None))
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        labels = {"chip": word(zone / "type") or zone.name, "device": zone.name}
        found.append(Sensor(zone / "temp", "temperature_c", 1000.0, labels))
    return found


def cooling(root: Path) -> dict[str, list[Path]]:
    """Cooling devices by type: there is one `Processor` for each CPU, and one that works tells as much as all."""
    found: dict[str, list[Path]] = {}
    for device in sorted((root / "sys/class/thermal").glob("cooling_device*")):
        found.setdefault(word(device / "type") or device.name, []).append(device / "cur_state")
    return {kind: paths[:MAX_SENSORS] for kind, paths in found.items()}


def watch(options: Options) -> Iterator[list[Sample]]:
    """One sample a sensor; a sensor that cannot be read in a tick is left out of it."""
    root = Path(options.root)
    everything = sensors(root)
    found, coolers = everything[:MAX_SENSORS], cooling(root)
    clocks = sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*/scaling_cur_freq"))[:MAX_CLOCKS]
    now = clock.now_ns()
    if not (found or coolers):
        yield [Sample("thermal", "observed", 0.0, now, text="this machine has no sensors (a virtual machine?)")]
        return
    left = f", {len(everything) - len(found)} more are not read" if len(everything) > len(found) else ""
    out = [Sample("thermal", "observed", 1.0, now, text=f"{len(found)} sensors{left}")]
    hot: set[Path] = set()
    while True:
        for sensor in found:
            value = number(sensor.path, sensor.per_unit)
            if value is None:
                continue
            at = clock.now_ns()
            out.append(Sample("thermal", sensor.metric, value, at, sensor.labels))
            if sensor.crit is None:
                continue
            if value >= sensor.crit and sensor.path not in hot:
                hot.add(sensor.path)
                what = f"{sensor.labels['chip']} {sensor.labels['sensor']}"
                text = f"{what} at {value:.0f} °C, critical is {sensor.crit:.0f} °C"
                out.append(Sample("thermal", "critical_temperature", 1.0, at, sensor.labels, text))
            elif value < sensor.crit - COOLED_C:
                hot.discard(sensor.path)
        for kind, paths in coolers.items():
            levels = [level for path in paths if (level := number(path)) is not None]
            if levels:
                out.append(Sample("thermal", "cooling_level", max(levels), clock.now_ns(), {"chip": kind}))
        speeds = [khz for path in clocks if (khz := number(path)) is not None]
        if speeds:
            out.append(Sample("thermal", "cpu_clock_mhz", sum(speeds) / len(speeds) / 1000, clock.now_ns()))
        yield out
        out = []
