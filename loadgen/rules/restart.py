"""Restarts and crashes of the server, by whatever sign there is.

What: its process vanished, or its port is served by another one; the engine's counters began again; or it refused
connections three times in a row with no answer in between. Signs of one outage make one finding, which says when it
began, how long it lasted and how many requests were lost.
Why: `restart: unless-stopped` hides crashes from everyone who looks only at `/health` afterwards.
Threshold: any vanished process; three refusals, since one may be a full backlog.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.rules import SECOND, Ints, Needs, elsewhere, end_ns, happenings, loaded, not_evaluated, when
from loadgen.types import OUR_ERRORS, Digest, Finding

if TYPE_CHECKING:
    from loadgen.record import Run

# A monitor ticks once a second: the connections broke this much earlier than it saw why.
TICK_NS = 2 * SECOND


@dataclass(frozen=True, slots=True)
class Options:
    refused: int = 3


def needs(options: Options) -> Needs:
    return Needs()


def check(run: Run, options: Options) -> list[Finding]:
    ok, lost, refused = _stamps(run)
    signs = [(d.at_ns, _say(d), "samples: process") for d in happenings(run, "process", "process_gone", "restart")]
    signs += [
        (d.at_ns, "the engine's counters began again", "samples: engine")
        for d in happenings(run, "engine", "counter_reset")
    ]
    for at_ns, count in _streaks(ok, refused, options.refused):
        signs.append((at_ns, f"{count} connections were refused in a row", "outcomes: connect_refused"))
    n = len(ok) + len(lost)
    findings: list[Finding] = []
    said: list[tuple[int, str, str]] = []
    for sign in sorted(signs):
        if said and sign[0] > _back(ok, said[0][0], run) + TICK_NS:
            findings.append(_outage(run, said, ok, lost, n))
            said = []
        said.append(sign)
    if said:
        findings.append(_outage(run, said, ok, lost, n))
    if findings:
        return findings
    if not n:
        return [not_evaluated("restart", "stability", "no request under load came to an end", n=0)]
    seen, why = run.observed().get("process", (False, "not watched"))
    signs_of_life = "its process stayed the same" if seen else "no connection was refused in a row"
    blind = "" if seen else f" ({elsewhere(run) or f'process not observed: {why}'})"
    message = f"no restart: {signs_of_life}{blind}"
    return [Finding("restart", "stability", "pass", message, number=0, bound=0, unit="restarts", n=n)]


def _stamps(run: Run) -> tuple[Ints, Ints, Ints]:
    """When requests under load ended, in order: well, failed by the server's doing, and refused among those."""
    labels = {p.name for p in loaded(run)}
    ok, lost, refused = array("q"), array("q"), array("q")
    for outcome in run.outcomes():
        at = outcome.done_ns or outcome.due_ns
        if outcome.phase not in labels:
            continue
        if outcome.outcome == "ok":
            ok.append(at)
        elif outcome.outcome == "failed" and outcome.error_class not in OUR_ERRORS:
            lost.append(at)
            if outcome.error_class == "connect_refused":
                refused.append(at)
    a, b, c = (np.sort(np.asarray(x, dtype=np.int64)) for x in (ok, lost, refused))
    return a, b, c


def _say(event: Digest) -> str:
    who = event.labels.get("name") or "the server's process"
    if event.metric == "restart":
        return f"{who} serves again as another process"
    return f"{who} is gone" if event.labels.get("role") != "member" else f"{who}, a process of the server, is gone"


def _streaks(ok: Ints, refused: Ints, at_least: int) -> list[tuple[int, int]]:
    """The number of good answers before a refusal tells which streak it belongs to."""
    group = np.searchsorted(ok, refused)
    _, starts, counts = np.unique(group, return_index=True, return_counts=True)
    return [(int(refused[i]), int(n)) for i, n in zip(starts, counts, strict=True) if n >= at_least]


def _back(ok: Ints, at_ns: int, run: Run) -> int:
    """The first good answer after the outage began, or the end of the run."""
    i = int(np.searchsorted(ok, at_ns, side="right"))
    return int(ok[i]) if i < len(ok) else end_ns(run)


def _outage(run: Run, signs: list[tuple[int, str, str]], ok: Ints, lost: Ints, n: int) -> Finding:
    at_ns, back_ns = signs[0][0], _back(ok, signs[0][0], run)
    back = bool(len(ok)) and int(ok[-1]) > at_ns
    missed = int(((lost >= at_ns - TICK_NS) & (lost <= back_ns)).sum())
    what = "; ".join(dict.fromkeys(sign[1] for sign in signs))
    until = f"answers again after {(back_ns - at_ns) / SECOND:.1f} s" if back else "no answer since"
    message = f"at {when(run, at_ns)} the server went down, {missed} requests lost, {until}: {what}"
    evidence = ", ".join(dict.fromkeys(sign[2] for sign in signs))
    return Finding(
        "restart", "stability", "fail", message, when(run, at_ns), missed, 0, "requests lost", n, evidence, at_ns,
        "restart" if back else "server_down", hard=True,
    )  # fmt: skip
