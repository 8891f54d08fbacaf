"""Could we see? Monitors that missed ticks, fell silent or never saw anything, and records that were damaged.

What: per monitor the share of the loaded time without readings (holes longer than three of its own periods); a lane
that ended before the run; damage in the run's own files. Each monitor that said it cannot observe is not evaluated,
with its reason, and so makes a PASS partial.
Why: a blind monitor may not pass anything. Silence of one lane is blindness, never the loss of a host.
Threshold: missing 1 % warns, 5 % makes the measurement invalid: three minutes of an hour can hold any death. A torn
last line is what a killed run looks like: it warns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from loadgen import clock, plugins
from loadgen.rules import SECOND, Ints, Needs, clocks, end_ns, not_evaluated, readings, serving, start_ns, when
from loadgen.types import Finding, FindingStatus, Json, UserError

if TYPE_CHECKING:
    from loadgen.record import Run

# The engine samples itself and is judged by the rule `generator`; a lane says once what it was granted.
NOT_A_MONITOR = frozenset({"client", "fast lane", "gpu lane", "slow lane"})
# A hole is longer than this many periods.
HOLE_PERIODS = 3.0


@dataclass(frozen=True, slots=True)
class Options:
    warn_share: float = 0.01
    fail_share: float = 0.05


def needs(options: Options) -> Needs:
    return Needs()


def check(run: Run, options: Options) -> list[Finding]:
    return [*_unseen(run), *_holes(run, options), *_lanes(run), *_clocks(run), *_damage(run)]


def _unseen(run: Run) -> list[Finding]:
    """Monitors that said they cannot see, and those that were asked for and said nothing at all."""
    said = run.observed()
    findings = [
        not_evaluated("blind", "measurement", f"{name} not observed: {why}", scope=name)
        for name, (seen, why) in sorted(said.items())
        if not seen
    ]
    silent = sorted(set(run.scenario.monitors) - set(said))
    return findings + [not_evaluated("blind", "measurement", f"{name} said nothing", scope=name) for name in silent]


def _holes(run: Run, options: Options) -> list[Finding]:
    span = serving(run)
    if span is None or span[1] <= span[0]:
        return []
    findings = []
    for monitor, (seen, _) in sorted(run.observed().items()):
        if not seen or monitor in NOT_A_MONITOR:
            continue
        stamps = _ticks(run, monitor, span)
        if monitor == "kernel" and not len(stamps):
            continue  # a quiet log is no hole, and this lane did not say when it looked
        if len(stamps) < 2 and span[1] - span[0] < 2 * _period_ns(run, monitor):
            continue  # a run of a few seconds has no second reading of the slow ones, and nothing was missed
        if len(stamps) < 2:
            findings.append(
                _finding("fail", f"{monitor}: {len(stamps)} readings under load", monitor, 1.0, options, len(stamps))
            )
            continue
        edges = np.concatenate([[span[0]], stamps, [span[1]]])
        gaps, period = np.diff(edges), max(float(np.median(np.diff(stamps))), SECOND)
        holes = gaps > HOLE_PERIODS * period
        missing = float((gaps[holes] - period).sum() / (span[1] - span[0]))
        status: FindingStatus = (
            "fail" if missing > options.fail_share else "warn" if missing > options.warn_share else "pass"
        )
        message = f"{monitor}: {len(stamps)} readings under load, {100 * missing:.1f} % of the time missing"
        if status != "pass":
            i = int(gaps.argmax())
            message += f", longest hole from {when(run, int(edges[i]))} for {gaps.max() / SECOND:.0f} s"
            message += _why(run, int(edges[i]), int(edges[i + 1]))
        findings.append(_finding(status, message, monitor, missing, options, len(stamps)))
    return findings


def _why(run: Run, since_ns: int, until_ns: int) -> str:
    """What the clocks say of a hole: whether the host slept, or the lane got no time while the host went on."""
    kinds = {
        gap.kind
        for seen in clocks(run).values()
        for before, after in pairwise(seen)
        if before.mono_ns < until_ns and after.mono_ns > since_ns
        for gap in clock.between(before, after, SECOND)
    }
    words = {"suspend": "the host slept", "reboot": "the host booted anew", "starved": "a lane was starved"}
    said = [text for kind, text in words.items() if kind in kinds]
    return f" ({', '.join(said)})" if said else ""


def _clocks(run: Run) -> list[Finding]:
    """A host that slept, and a wall clock that was set, while the run went on: said once, by the first lane that
    saw it. No duration of ours is of the wall's clock, so neither is more than a warning."""
    begin, found = start_ns(run), []
    for lane, seen in sorted(clocks(run).items()):
        for before, after in pairwise(seen):
            for gap in clock.between(before, after, SECOND):
                if gap.kind not in ("suspend", "clock_step") or gap.seconds is None or after.mono_ns < begin:
                    continue
                what = f"the host slept for {gap.seconds:.1f} s"
                if gap.kind == "clock_step":
                    what = (
                        f"the wall clock was set by {gap.seconds:+.1f} s: match logs of the wall's time on both sides"
                    )
                found.append(
                    Finding(
                        "blind", "measurement", "warn", f"at {when(run, after.mono_ns)} {what}", gap.kind, gap.seconds,
                        None, "s", None, f"samples: clock ({lane} lane)", after.mono_ns, gap.kind,
                    )
                )  # fmt: skip
        if found:
            break
    return found


def _period_ns(run: Run, monitor: str) -> float:
    """How often a monitor looks, as the scenario or its file says; where that file is not here: a second."""
    try:
        period_s = plugins.load("monitors", monitor).PERIOD_S
    except UserError:
        period_s = 1.0
    own = (run.scenario.monitors.get(monitor) or {}).get("period_s", period_s)
    return float(own) * SECOND if isinstance(own, int | float) else float(period_s) * SECOND


def _ticks(run: Run, monitor: str, span: tuple[int, int]) -> Ints:
    """The seconds in which a monitor read something: each lane says with every tick how late it was."""
    said = readings(run, monitor, "tick_lateness_ms", span).at_ns
    if not len(said):  # a lane of somebody else's
        # happenings come when they come, and `observed` once: neither is a tick
        said = np.array([d.at_ns for d in run.digests(monitor) if d.text is None and span[0] <= d.at_ns <= span[1]])
    return np.unique(said.astype(np.int64))


def _finding(status: FindingStatus, message: str, scope: str, share: float, options: Options, n: int) -> Finding:
    return Finding(
        "blind", "measurement", status, message, scope, share, options.fail_share, "share", n, f"samples: {scope}",
        None, "" if status == "pass" else "blind",
    )  # fmt: skip


def _lanes(run: Run) -> list[Finding]:
    """A lane that ended before the last load was over; a shard that did not end by itself."""
    span = serving(run)
    over = span[1] if span is not None else end_ns(run)
    # a signal, and the end, reach the lanes too
    over = min([over, *(int(r["at"]) for r in run.journal if r["event"] in ("signal", "run_end"))])
    return [
        Finding(
            "blind", "measurement", "fail", f"at {when(run, int(r['at']))} {what} {_end(r)}", what,
            evidence="journal.jsonl", since_ns=int(r["at"]), cause="lane_died" if kind == "lane" else "lost_shard",
        )
        for kind in ("lane", "shard")
        for r in run.journal
        if r["event"] == f"{kind}_exit" and (r.get("rc") != 0 if kind == "shard" else int(r["at"]) < over)
        for what in [f"{kind} {r.get(kind, '?')}"]
    ]  # fmt: skip


def _end(record: Json) -> str:
    """A shard of another machine may end without a code."""
    if "shard" not in record:
        return f"ended (exit {record.get('rc')})"
    why = f"exit {record['rc']}" if record.get("rc") is not None else record.get("text") or "no word"
    return f"was lost ({why}); its load was not moved to others"


def _damage(run: Run) -> list[Finding]:
    for _ in run.outcomes():
        pass  # damage is counted while reading
    found = {what: count for what, count in sorted(run.damage.items()) if count}
    for record in run.journal:
        if record["event"] in ("records_lost", "records_failed", "recorder_failed"):
            found[str(record["event"])] = found.get(str(record["event"]), 0) + int(record.get("n", 1))
    if not found:
        return [Finding("blind", "measurement", "pass", "all records readable", "records", 0, 0, "records")]
    said = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in found.items())
    status: FindingStatus = "fail" if run.finished else "warn"
    total = sum(found.values())
    return [
        Finding(
            "blind", "measurement", status, f"damaged records: {said}", "records", total, 0, "records",
            evidence="run folder", cause="damaged_records",
        )
    ]  # fmt: skip
