"""Host memory left while serving, and the driver's refusals to allocate.

What: the low-water of MemAvailable under load against the idle baseline B, its 5th percentile in the first idle
minute. It warns below max(4 GiB, 0.35 B). Below max(2.5 GiB, 0.2 B) it fails, if a second sign stands beside it within
5 s: a driver line NV_ERR_NO_MEMORY, PSI memory full above 10 %, or more than 2,000 pages/s swapped out. Driver lines
alone warn.
Why: on unified memory the host's memory is the GPU's; the usual death is a driver that refuses, then a wedge, with no
OOM kill anywhere. Fixed floors do not port between machines, and a single number has killed many healthy servers.
Threshold: shares between the 1.5 GiB at which some boxes of 121.7 GiB still served and the 6 GiB at which guards
killed healthy ones; absolute floors for small hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.rules import (
    GIB,
    NOT_OBSERVED,
    SECOND,
    Ints,
    Needs,
    happenings,
    loaded,
    not_evaluated,
    readings,
    serving,
    unwatched,
    when,
)
from loadgen.types import Finding, FindingStatus, Seconds

if TYPE_CHECKING:
    from loadgen.record import Run

# A baseline of fewer idle seconds than this is none; then the first minute of the run stands in.
IDLE_MIN_S = 10
SIGN_REACH_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    warn_gib: float = 4.0
    warn_share: float = 0.35
    fail_gib: float = 2.5
    fail_share: float = 0.2
    baseline: Seconds = Seconds(60)
    psi_full_percent: float = 10.0
    swap_out_pages_per_s: float = 2000.0


def needs(options: Options) -> Needs:
    return Needs(monitors=("host",))


def check(run: Run, options: Options) -> list[Finding]:
    if blind := unwatched(run, "headroom"):
        return blind
    span = serving(run)
    under_load = readings(run, "host", "mem_available_bytes", span)
    if span is None or not len(under_load):
        seen, why = run.observed().get("host", (False, "MemAvailable was not watched"))
        cause = "" if seen else NOT_OBSERVED
        why = "no reading of MemAvailable under load" if seen else why
        return [not_evaluated("headroom", "stability", why, n=0, cause=cause)]
    baseline = _baseline(run, options)
    warn_below = max(options.warn_gib * GIB, options.warn_share * baseline)
    fail_below = max(options.fail_gib * GIB, options.fail_share * baseline)
    i = int(under_load.min.argmin())
    low, low_at = float(under_load.min[i]), int(under_load.at_ns[i])
    low_seconds = under_load.at_ns[under_load.min < fail_below]
    sign = _second_sign(run, low_seconds, options) if len(low_seconds) else None
    status: FindingStatus = "fail" if sign else "warn" if low < warn_below else "pass"
    message = (
        f"MemAvailable low-water {low / GIB:.1f} GiB at {when(run, low_at)}, idle baseline {baseline / GIB:.1f} GiB"
    )
    message += f"; {sign}" if sign else "; below the stop line without a second sign" if len(low_seconds) else ""
    findings = [
        Finding(
            "headroom", "stability", status, message, "", low / GIB, (fail_below if sign else warn_below) / GIB, "GiB",
            len(under_load), "samples: host.mem_available_bytes", low_at, "memory_low" if status != "pass" else "",
        )
    ]  # fmt: skip
    lines = [d for d in happenings(run, "kernel", "nv_no_memory") if span[0] <= d.at_ns <= span[1]]
    count = sum(d.last for d in lines)
    if lines:
        message = f"the driver refused {count:.0f} allocations while serving, first at {when(run, lines[0].at_ns)}"
        findings.append(
            Finding(
                "headroom", "stability", "warn", message, "driver", count, 0, "lines", None, "samples: kernel",
                lines[0].at_ns, "driver_no_memory",
            )
        )  # fmt: skip
    return findings


def _baseline(run: Run, options: Options) -> float:
    """The guard's, where one stood: 5th percentile of MemAvailable of the idle server. Else that of at most a minute
    before the load began, or over the run's first minute where that was too short."""
    if learnt := happenings(run, "guard", "baseline"):
        return learnt[0].last
    available = readings(run, "host", "mem_available_bytes", None)
    begin = int(available.at_ns[0])
    idle_end = min(begin + options.baseline * SECOND, loaded(run)[0].start_ns)
    idle = available.min[available.at_ns < idle_end]
    if len(idle) < IDLE_MIN_S:
        idle = available.min[available.at_ns <= begin + options.baseline * SECOND]
    return float(np.quantile(idle, 0.05, method="lower"))


def _second_sign(run: Run, seconds: Ints, options: Options) -> str | None:
    """The first of these seconds that another sign stands beside."""
    refused = np.array([d.at_ns for d in happenings(run, "kernel", "nv_no_memory")], dtype=np.int64)
    full = readings(run, "host", "psi_memory_full_percent", None)
    out = readings(run, "host", "pswpout_pages_per_s", None)
    for at_ns in seconds.tolist():
        if (np.abs(refused - at_ns) <= SIGN_REACH_S * SECOND).any():
            return f"the driver refused memory at {when(run, at_ns)}"
        stalled = full.around(at_ns, SIGN_REACH_S).last
        if len(stalled) and stalled.mean() > options.psi_full_percent:
            return f"all tasks stalled on memory {stalled.mean():.0f} % of the time at {when(run, at_ns)}"
        pages = out.around(at_ns, SIGN_REACH_S).max
        if len(pages) and pages.max() > options.swap_out_pages_per_s:
            return f"{pages.max():.0f} pages/s were swapped out at {when(run, at_ns)}"
    return None
