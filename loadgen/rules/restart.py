"""Restarts and crashes of the server, by whatever sign there is.

What: its process vanished, or its port is served by another one; its container or unit ended or was started again, by
the word of the container engine or of systemd; its cgroup vanished; the engine's counters began again; or it refused
connections three times in a row with no answer in between. Signs of one outage make one finding, which says when it
began, how long it lasted and how many requests were lost. A container that never started is told as what it is.
Why: `restart: unless-stopped` hides crashes from everyone who looks only at `/health` afterwards.
Threshold: any listener that vanished; three refusals, since one may be a full backlog. A worker that ends is a crash
only together with a lost request, a kill or another sign: servers also have compilers and probes among their children.
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
# A worker's death breaks the requests that it served; an engine notices within some seconds.
TOGETHER_NS = 10 * SECOND
# A child that was seen for less than this came and went: a compiler, a probe.
PASSING_S = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    refused: int = 3


def needs(options: Options) -> Needs:
    return Needs()


def check(run: Run, options: Options) -> list[Finding]:
    ok, lost, refused = _stamps(run)
    if unborn := _never_started(run):
        return [unborn]
    signs = _signs(run)
    for at_ns, count in _streaks(ok, refused, options.refused):
        signs.append((at_ns, f"{count} connections were refused in a row", "outcomes: connect_refused"))
    lone = []
    members = [d for d in happenings(run, "process", "process_gone") if d.labels.get("role") == "member"]
    kills = {d.labels.get("pid") for d in happenings(run, "kernel", "oom_kill_memcg", "oom_kill_global")}
    alone = list(signs)
    for d in members:
        together = any(abs(at_ns - d.at_ns) < TOGETHER_NS for at_ns, _, _ in alone)
        if together or d.labels.get("pid") in kills or bool((np.abs(lost - d.at_ns) < TOGETHER_NS).any()):
            signs.append((d.at_ns, _say(d), "samples: process"))
        elif float(d.labels.get("seen_s", PASSING_S)) >= PASSING_S:
            lone.append(d)
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
    if lone:
        findings.append(_quiet_end(run, lone))
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


def _signs(run: Run) -> list[tuple[int, str, str]]:
    """What the monitors say of ends and beginnings: when, in words, and which monitor."""
    signs = [
        (d.at_ns, _say(d), "samples: process")
        for d in happenings(run, "process", "process_gone", "restart")
        if d.labels.get("role") != "member"
    ]
    signs += [
        (d.at_ns, "the engine's counters began again", "samples: engine")
        for d in happenings(run, "engine", "counter_reset")
    ]
    signs += [
        (d.at_ns, d.text or d.metric, "samples: docker")
        for d in happenings(run, "docker", "exited", "started", "restarted", "removed")
    ]
    signs += [
        (d.at_ns, d.text or d.metric, "samples: systemd")
        for d in happenings(run, "systemd", "restart", "result", "state")
        if d.metric != "state" or d.labels.get("state") in ("failed", "inactive")
    ]
    signs += [
        (d.at_ns, "its cgroup vanished", "samples: cgroup")
        for d in happenings(run, "cgroup", "cgroup_gone")
        if "shared" not in d.labels
    ]
    return signs


def _never_started(run: Run) -> Finding | None:
    """A container that was made and failed before its first instruction."""
    told = happenings(run, "docker", "never_started")
    if not told:
        return None
    first = told[0]
    code = first.labels.get("exit_code", "")
    return Finding(
        "restart", "stability", "fail", first.text or "the container never started", "container",
        float(code) if code.isdigit() else None, 0, "exit code", None, "samples: docker", first.at_ns, "never_started",
        hard=True,
    )  # fmt: skip


def _quiet_end(run: Run, lone: list[Digest]) -> Finding:
    """Workers that ended and were not missed: for somebody to look at, no verdict."""
    names = ", ".join(sorted({d.labels.get("name", "?") for d in lone}))
    message = (
        f"from {when(run, lone[0].at_ns)} on {len(lone)} processes of the server ended ({names}), no request was lost"
    )
    return Finding(
        "restart", "stability", "warn", message, "members", len(lone), 0, "processes", None, "samples: process",
        lone[0].at_ns, "member_gone",
    )  # fmt: skip


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
