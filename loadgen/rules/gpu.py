"""The GPU: driver errors (Xid), a GPU that was lost, and memory that grows and goes on growing.

What: Xid lines by the severity that the kernel monitor gives their code (after NVIDIA's catalogue): hard or a warning.
A GPU that answered and then no longer did, or whose firmware stopped, is lost. Memory: the growth between the first
and the last of six blocks of measured time, if the last step still goes up by at least half of the average step, as a
plateau does not.
Why: engines allocate their pool at start, so that used memory is flat by design; growth that does not end is a leak.
Threshold: 200 MiB (published soaks: VRAM growth from the first clean session); on unified memory NVML reports none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.rules import NOT_OBSERVED, Needs, Readings, happenings, measured, not_evaluated, readings, unwatched, when
from loadgen.types import Digest, Finding

if TYPE_CHECKING:
    from loadgen.record import Run

MIB = 1 << 20
BLOCKS = 6
# Groups of Xids after which the GPU does not come back without a reset.
LOST_GROUPS = frozenset({"bus", "firmware"})


@dataclass(frozen=True, slots=True)
class Options:
    growth_mib: float = 200.0
    min_readings: int = 60


def needs(options: Options) -> Needs:
    return Needs(seconds=options.min_readings, monitors=("nvidia",))


def check(run: Run, options: Options) -> list[Finding]:
    if blind := unwatched(run, "gpu"):
        return blind
    findings = [_xid(run, line) for line in happenings(run, "kernel", "xid")]
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
    if not answered:
        return [*findings, not_evaluated("gpu", "stability", f"GPU not observed: {why}", cause=NOT_OBSERVED)]
    if not used:
        findings.append(
            not_evaluated("gpu", "stability", "the driver reports no GPU memory (unified memory)", "memory")
        )
    for labels in used:
        scope = f"gpu {dict(labels).get('gpu', '?')}"
        findings.append(
            _growth(readings(run, "nvidia", "memory_used_bytes", measured(run), tuple(labels)), scope, options)
        )
    return findings


def _growth(memory: Readings, scope: str, options: Options) -> Finding:
    if len(memory) < options.min_readings:
        why = f"{scope}: {len(memory)} readings of memory while measuring, needs {options.min_readings}"
        return not_evaluated("gpu", "stability", why, scope, len(memory))
    blocks = [float(np.median(block)) for block in np.array_split(memory.last, BLOCKS)]
    growth, last_step = blocks[-1] - blocks[0], blocks[-1] - blocks[-2]
    rising = last_step >= growth / (BLOCKS - 1) / 2
    fails = growth > options.growth_mib * MIB and rising
    message = f"{scope}: memory {growth / MIB:+.0f} MiB over the measured time" + (", still rising" if fails else "")
    return Finding(
        "gpu", "stability", "fail" if fails else "pass", message, scope, growth / MIB, options.growth_mib, "MiB",
        len(memory), "samples: nvidia.memory_used_bytes", int(memory.at_ns[0]) if fails else None,
        "memory_growing" if fails else "",
    )  # fmt: skip


def _xid(run: Run, line: Digest) -> Finding:
    code, group = line.labels.get("xid", "?"), line.labels.get("group", "unknown")
    message = f"at {when(run, line.at_ns)} the driver reported Xid {code} ({group.replace('_', ' ')})"
    if line.labels.get("severity") == "fail":
        cause = "gpu_lost" if group in LOST_GROUPS else "gpu_error"
        return _fail(message, f"xid {code}", line.at_ns, cause, "samples: kernel")
    return Finding(
        "gpu", "stability", "warn", message, f"xid {code}", evidence="samples: kernel", since_ns=line.at_ns,
        cause="gpu_error",
    )  # fmt: skip


def _fail(message: str, scope: str, since_ns: int | None, cause: str, evidence: str) -> Finding:
    return Finding(
        "gpu", "stability", "fail", message, scope, evidence=evidence, since_ns=since_ns, cause=cause, hard=True
    )
