"""The GPU: driver errors (Xid, ECC), a GPU or a driver that was lost, and memory that grows and goes on growing.

What: Xids by the severity of their code (after NVIDIA's catalogue): hard or a warning; the kernel's line and the
driver's event of one Xid are one. Uncorrected ECC errors during the run fail, corrected ones, rows that wait to be
remapped and PCIe replays warn. A GPU that answered and then no longer did, or whose firmware stopped, is lost. A driver
call that never returned fails, one that took 5 s warns. Memory: the growth between the first and the last of six blocks
of measured time, if the last step still goes up by at least half of the average step, as a plateau does not. Where the
GPU shares the host's memory, it is the host's use that must not grow: the driver's figure per process has no managed
allocations, and a flat line there clears nobody.
Why: engines allocate their pool at start, so that used memory is flat by design; growth that does not end is a leak.
Threshold: 200 MiB (published soaks: VRAM growth from the first clean session); 1 GiB for a whole host, where others
live too. 100 PCIe replays an hour fail: a link that bad slows down whatever crosses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.rules import NOT_OBSERVED, SECOND, Needs, happenings, measured, not_evaluated, readings, unwatched, when
from loadgen.types import Digest, Finding, FindingStatus

if TYPE_CHECKING:
    from loadgen.record import Run

MIB, GIB = 1 << 20, 1 << 30
BLOCKS = 6
SAME_XID_NS = 10 * SECOND  # the driver's event and the kernel's line of one Xid came within milliseconds
# Counters of the nvidia monitor that must not grow during the run.
COUNTERS: dict[str, tuple[FindingStatus, str]] = {
    "ecc_uncorrected_total": ("fail", "uncorrected ECC errors"),
    "ecc_corrected_total": ("warn", "corrected ECC errors"),
    "remap_failed": ("fail", "failures to remap a row of memory"),
    "remap_pending": ("warn", "rows of memory that wait for a reset to be remapped"),
    "remapped_rows_uncorrected_total": ("fail", "rows of memory remapped for uncorrected errors"),
}
# Events of the driver besides Xids, by what they mean for the verdict.
EVENTS: dict[str, FindingStatus] = {
    "ecc_double_bit": "fail", "row_retired": "warn", "row_retirement_failed": "fail", "poison_contained": "fail",
    "poison_fatal": "fail", "gpu_unavailable": "fail", "driver_gone": "fail", "driver_changed": "warn",
    "driver_replaced": "warn", "recovery_action": "warn",
}  # fmt: skip
# Groups of Xids after which the GPU does not come back without a reset.
LOST_GROUPS = frozenset({"bus", "firmware"})


@dataclass(frozen=True, slots=True)
class Options:
    growth_mib: float = 200.0
    unified_growth_mib: float = 1024.0
    replays_per_h: float = 100.0
    min_readings: int = 60


def needs(options: Options) -> Needs:
    return Needs(seconds=options.min_readings, monitors=("nvidia",))


def check(run: Run, options: Options) -> list[Finding]:
    if blind := unwatched(run, "gpu"):
        return blind
    findings = [_xid(run, line) for line in xids(run)]
    findings += [_event(run, event) for event in happenings(run, "nvidia", *EVENTS)]
    findings += _pending(run)
    findings += _counters(run)
    findings += _replays(run, options)
    seen, why = run.observed().get("nvidia", (False, "no NVIDIA GPU was watched"))
    used = run.series("nvidia", "memory_used_bytes")
    answered = bool(used or run.series("nvidia", "temperature_c"))
    if answered and not seen:
        findings.append(_fail(f"the GPU no longer answers: {why}", "lost", None, "gpu_lost", "samples: nvidia"))
    dead = [(d, "samples: nvidia") for d in happenings(run, "nvidia", "gpu_lost")]
    dead += [(d, "samples: kernel") for d in happenings(run, "kernel", "gsp_dead")]
    for event, where in dead:
        what = "a GPU was lost" if event.metric == "gpu_lost" else "the GPU's firmware stopped"
        findings.append(_fail(f"at {when(run, event.at_ns)} {what}", event.metric, event.at_ns, "gpu_lost", where))
    amd, _ = run.observed().get("amd", (False, ""))
    for event in happenings(run, "amd", "gpu_lost"):
        message = f"at {when(run, event.at_ns)} a GPU was lost"
        findings.append(_fail(message, "gpu_lost", event.at_ns, "gpu_lost", "samples: amd"))
    if not answered and not amd:
        return [*findings, not_evaluated("gpu", "stability", f"GPU not observed: {why}", cause=NOT_OBSERVED)]
    for monitor in (["nvidia"] if answered else []) + (["amd"] if amd else []):
        findings += _memory(run, monitor, options)
    return findings


def _memory(run: Run, monitor: str, options: Options) -> list[Finding]:
    """The growth of each GPU's memory, or of the host's where they share it."""
    for metric in ("memory_used_bytes", "host_memory_used_bytes"):
        found = run.series(monitor, metric)
        if found:
            return [_growth(run, monitor, metric, tuple(labels), options) for labels in found]
    why = "the driver reports no GPU memory (unified memory)"
    return [not_evaluated("gpu", "stability", why, "memory")]


def _growth(run: Run, monitor: str, metric: str, labels: tuple[tuple[str, str], ...], options: Options) -> Finding:
    scope = f"gpu {dict(labels).get('gpu', '?')}"
    memory = readings(run, monitor, metric, measured(run), labels)
    shared = metric.startswith("host")
    bound = options.unified_growth_mib if shared else options.growth_mib
    if len(memory) < options.min_readings:
        why = f"{scope}: {len(memory)} readings of memory while measuring, needs {options.min_readings}"
        return not_evaluated("gpu", "stability", why, scope, len(memory))
    blocks = [float(np.median(block)) for block in np.array_split(memory.last, BLOCKS)]
    growth, last_step = blocks[-1] - blocks[0], blocks[-1] - blocks[-2]
    rising = last_step >= growth / (BLOCKS - 1) / 2
    fails = growth > bound * MIB and rising
    what = "memory shared with the host" if shared else "memory"
    message = f"{scope}: {what} {growth / MIB:+.0f} MiB over the measured time"
    if fails:
        # six blocks: their middles are 5/6 of the time apart
        minutes = (int(memory.at_ns[-1]) - int(memory.at_ns[0])) * (BLOCKS - 1) / BLOCKS / (60 * SECOND)
        message += f", still rising ({growth / GIB / max(minutes, 1e-9):.2g} GiB per minute)"
    return Finding(
        "gpu", "stability", "fail" if fails else "pass", message, scope, growth / MIB, bound, "MiB",
        len(memory), f"samples: {monitor}.{metric}", int(memory.at_ns[0]) if fails else None,
        "memory_growing" if fails else "",
    )  # fmt: skip


def xids(run: Run) -> list[Digest]:
    """Each Xid once: what the kernel logged, and what only the driver's own events told (a container without the
    kernel log)."""
    logged = happenings(run, "kernel", "xid")
    heard: list[Digest] = []
    for event in happenings(run, "nvidia", "xid"):
        known = (e for e in [*logged, *heard] if e.labels.get("xid") == event.labels.get("xid"))
        if not any(abs(e.at_ns - event.at_ns) <= SAME_XID_NS for e in known):
            heard.append(event)
    return sorted([*logged, *heard], key=lambda e: e.at_ns)


def _xid(run: Run, line: Digest) -> Finding:
    code, group = line.labels.get("xid", "?"), line.labels.get("group", "unknown")
    message = f"at {when(run, line.at_ns)} the driver reported Xid {code} ({group.replace('_', ' ')})"
    if line.labels.get("severity") == "fail":
        cause = "gpu_lost" if group in LOST_GROUPS else "gpu_error"
        return _fail(message, f"xid {code}", line.at_ns, cause, f"samples: {line.monitor}")
    return Finding(
        "gpu", "stability", "warn", message, f"xid {code}", evidence=f"samples: {line.monitor}", since_ns=line.at_ns,
        cause="gpu_error",
    )  # fmt: skip


def _event(run: Run, event: Digest) -> Finding:
    message = f"at {when(run, event.at_ns)} {event.text}"
    return _of(EVENTS[event.metric], message, event.metric, event.at_ns, "samples: nvidia")


def _pending(run: Run) -> list[Finding]:
    """Calls that the driver held: returned after a while, or never."""
    findings = []
    back = happenings(run, "nvidia", "call_returned")
    for held in happenings(run, "nvidia", "call_pending"):
        call = held.labels.get("call", "?")
        ends = [b for b in back if b.labels.get("call") == call and b.at_ns >= held.at_ns]
        message = f"at {when(run, held.at_ns)} the driver had held a call ({call}) for 5 s"
        if ends:
            message += f"; it returned after {ends[0].labels.get('seconds', '?')} s"
            findings.append(_of("warn", message, f"call {call}", held.at_ns, "samples: nvidia"))
        else:
            findings.append(_of("fail", f"{message} and never returned", f"call {call}", held.at_ns, "samples: nvidia"))
    return findings


def _counters(run: Run) -> list[Finding]:
    findings = []
    for metric, (status, what) in COUNTERS.items():
        for labels in run.series("nvidia", metric):
            count = readings(run, "nvidia", metric, None, tuple(labels))
            grown = np.flatnonzero(count.max > count.min[0])
            if len(grown):
                scope = f"gpu {dict(labels).get('gpu', '?')}"
                n = count.max.max() - count.min[0]
                message = f"{scope}: {n:.0f} {what} during the run"
                evidence = f"samples: nvidia.{metric}"
                findings.append(_of(status, message, f"{scope} {metric}", int(count.at_ns[grown[0]]), evidence))
    return findings


def _replays(run: Run, options: Options) -> list[Finding]:
    findings = []
    for labels in run.series("nvidia", "pcie_replays_total"):
        count = readings(run, "nvidia", "pcie_replays_total", None, tuple(labels))
        n = float(count.last[-1] - count.min[0])
        if n <= 0:
            continue
        hours = max((int(count.at_ns[-1]) - int(count.at_ns[0])) / (3600 * SECOND), 1.0)  # one burst is no rate yet
        status: FindingStatus = "fail" if n / hours > options.replays_per_h else "warn"
        scope = f"gpu {dict(labels).get('gpu', '?')}"
        message, what = f"{scope}: {n:.0f} PCIe replays: the link is not clean", f"{scope} pcie_replays_total"
        bad = Finding(
            "gpu", "stability", status, message, what, n / hours, options.replays_per_h, "per h", len(count),
            "samples: nvidia.pcie_replays_total", int(count.at_ns[0]), "gpu_error",
        )  # fmt: skip
        findings.append(bad)
    return findings


def _of(status: FindingStatus, message: str, scope: str, since_ns: int, evidence: str) -> Finding:
    if status == "fail":
        return _fail(message, scope, since_ns, "gpu_error", evidence)
    return Finding("gpu", "stability", status, message, scope, evidence=evidence, since_ns=since_ns, cause="gpu_error")


def _fail(message: str, scope: str, since_ns: int | None, cause: str, evidence: str) -> Finding:
    return Finding(
        "gpu", "stability", "fail", message, scope, evidence=evidence, since_ns=since_ns, cause=cause, hard=True
    )
