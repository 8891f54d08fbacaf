"""Temperatures, fans and cooling from hwmon and the thermal zones: what explains a slow or a switched-off machine.

Virtual machines have none of them; that is said once and costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds

LANE: Lane = "fast"
PERIOD_S = 2.0
MAX_SENSORS = 64  # a server board has dozens; each is a read of up to some milliseconds over its bus

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


def word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def sensors(root: Path) -> list[Sensor]:
    """What this machine has, named by driver and label (`nvme Composite`, `coretemp Package id 0`)."""
    found: list[Sensor] = []
    for device in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        chip = word(device / "name") or device.name
        for pattern, (metric, per_unit) in HWMON.items():
            for path in sorted(device.glob(pattern)):
                stem = path.name.partition("_")[0]
                labels = {"chip": chip, "sensor": word(device / f"{stem}_label") or stem, "device": device.name}
                found.append(Sensor(path, metric, per_unit, labels))
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        labels = {"chip": word(zone / "type") or zone.name, "device": zone.name}
        found.append(Sensor(zone / "temp", "temperature_c", 1000.0, labels))
    for device in sorted((root / "sys/class/thermal").glob("cooling_device*")):
        labels = {"chip": word(device / "type") or device.name, "device": device.name}
        found.append(Sensor(device / "cur_state", "cooling_level", 1.0, labels))
    return found[:MAX_SENSORS]


def watch(options: Options) -> Iterator[list[Sample]]:
    """One sample a sensor; a sensor that cannot be read in a tick is left out of it."""
    found = sensors(Path(options.root))
    now = clock.now_ns()
    if not found:
        yield [Sample("thermal", "observed", 0.0, now, text="this machine has no sensors (a virtual machine?)")]
        return
    out = [Sample("thermal", "observed", 1.0, now, text=f"{len(found)} sensors")]
    while True:
        for sensor in found:
            try:
                value = int(sensor.path.read_text()) / sensor.per_unit
            except (OSError, ValueError):  # drivers answer EAGAIN or ENODATA while a device sleeps
                continue
            out.append(Sample("thermal", sensor.metric, value, clock.now_ns(), sensor.labels))
        yield out
        out = []
