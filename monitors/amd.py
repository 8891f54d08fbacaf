"""AMD GPUs through sysfs: load, memory of the device and of the host that it maps, temperature, power, clock.

No library: the driver shows its figures as files. An APU has no memory of its own but a piece of the host's, so that
what its files call VRAM says little; it is recognised by the format of its metrics table (1.x is a card, 2.x and 3.x an
APU), and the host's figure is named instead: on one stack GTT stood near 0 while 52 GiB were loaded.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds

LANE: Lane = "slow"
PERIOD_S = 1.0

VENDOR = "0x1002"  # AMD, in the PCI list of vendors
MAX_CARDS = 16  # a server holds eight; each is a dozen small reads
APU_FORMATS = frozenset({2, 3})  # of gpu_metrics, byte 2 of its header (amdgpu's kgd_pp_interface.h)

# file of the device → (metric, what one unit of the metric is in the file's unit)
FILES = {
    "gpu_busy_percent": ("utilization_percent", 1.0),
    "mem_info_vram_used": ("vram_used_bytes", 1.0),
    "mem_info_vram_total": ("vram_total_bytes", 1.0),
    "mem_info_gtt_used": ("gtt_used_bytes", 1.0),
    "mem_info_gtt_total": ("gtt_total_bytes", 1.0),
}
# the same below its hwmon folder; temp1 is the edge, the others are told by their label (junction, mem)
HWMON = {
    "temp1_input": ("temperature_c", 1000.0),
    "temp2_input": ("junction_temperature_c", 1000.0),
    "temp3_input": ("memory_temperature_c", 1000.0),
    "power1_average": ("power_w", 1e6),
    "power1_input": ("power_w", 1e6),
    "power1_cap": ("power_limit_w", 1e6),
    "freq1_input": ("sm_clock_mhz", 1e6),
    "freq2_input": ("memory_clock_mhz", 1e6),
}

_CARD = re.compile(r"^card(\d+)$")  # card1-DP-1 is one of its connectors
_MEMINFO = re.compile(r"^(MemTotal|MemAvailable): +(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Options:
    root: str = "/"
    period_s: Seconds = Seconds(1)


@dataclass(frozen=True, slots=True)
class Card:
    """One device, its label, and the files that it has. `apu` None: its driver does not say."""

    name: str
    labels: dict[str, str]
    files: tuple[tuple[Path, str, float], ...]
    apu: bool | None


def word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def cards(root: Path) -> list[Card]:
    """The AMD GPUs of this machine, numbered as the kernel numbers its cards."""
    found: list[Card] = []
    for folder in sorted((root / "sys/class/drm").glob("card*")):
        number = _CARD.match(folder.name)
        device = folder / "device"
        if number is None or word(device / "vendor").lower() != VENDOR:
            continue
        files = [(device / name, *what) for name, what in FILES.items()]
        for hwmon in sorted((device / "hwmon").glob("hwmon*"))[:1]:
            files += [(hwmon / name, *what) for name, what in HWMON.items()]
        name = word(device / "product_name") or f"AMD GPU {word(device / 'device') or folder.name}"
        there = tuple(one for one in files if one[0].exists())
        found.append(Card(name, {"gpu": number[1]}, there, is_apu(device)))
    return found[:MAX_CARDS]


def is_apu(device: Path) -> bool | None:
    """Whether the GPU is part of the processor and shares the host's memory."""
    try:
        with (device / "gpu_metrics").open("rb") as table:
            header = table.read(4)
    except OSError:
        return None
    return header[2] in APU_FORMATS if len(header) == 4 else None


def readings(card: Card, root: Path) -> dict[str, float]:
    """What can be read now; a sleeping device answers its sensors with errors, and is then left out, never 0."""
    values: dict[str, float] = {}
    for path, metric, per_unit in card.files:
        try:
            values.setdefault(metric, int(path.read_text()) / per_unit)
        except (OSError, ValueError):
            continue
    if card.apu:
        values["unified_memory"] = 1.0
        kb = {key: int(number) for key, number in _MEMINFO.findall(word(root / "proc/meminfo"))}
        if len(kb) == 2:
            values["host_memory_used_bytes"] = float((kb["MemTotal"] - kb["MemAvailable"]) * 1024)
    elif "vram_used_bytes" in values and values.get("vram_total_bytes"):
        values["memory_used_bytes"] = values["vram_used_bytes"]
        values["memory_total_bytes"] = values["vram_total_bytes"]
        values["memory_free_bytes"] = values["vram_total_bytes"] - values["vram_used_bytes"]
    return values


async def watch(options: Options) -> AsyncIterator[list[Sample]]:
    """One set of readings a card and tick. A card that vanishes is said once."""
    root = Path(options.root)
    found = cards(root)
    now = clock.now_ns()
    if not found:
        yield [Sample("amd", "observed", 0.0, now, text="no AMD GPU")]
        return
    notes = {True: " (memory shared with the host: see the host's figures)", None: " (card or APU: not told)"}
    text = "; ".join(f"{card.labels['gpu']}: {card.name}{notes.get(card.apu, '')}" for card in found)
    out = [Sample("amd", "observed", 1.0, now, text=text)]
    gone: set[str] = set()
    while True:
        for card in found:
            values = readings(card, root)
            at = clock.now_ns()
            out += [Sample("amd", metric, value, at, card.labels) for metric, value in values.items()]
            number = card.labels["gpu"]
            if number not in gone and not (root / "sys/class/drm" / f"card{number}" / "device").exists():
                gone.add(number)
                out.append(Sample("amd", "gpu_lost", 1.0, at, card.labels, f"{card.name} is no longer there"))
        yield out
        out = []
