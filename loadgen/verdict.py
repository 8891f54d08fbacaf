"""From findings to one word that can be defended, and from a run folder to findings.

`verdict` is the table of verdicts, pure. `judge` runs every rule over a folder, offline, and writes what it found;
judging a folder twice with the same rules gives the same files.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from loadgen import plugins, record, report, summary
from loadgen.rules import ELSEWHERE, NOT_OBSERVED, not_evaluated
from loadgen.types import AXES, Axis, Finding, UserError, Verdict

FINDINGS_SCHEMA = "loadgen.findings/1"

# Which of several causes names the verdict: what brings the others about comes first.
ROOT_CAUSES = (
    "host_lost", "host_oom", "oom_kill", "gpu_lost", "gpu_error", "server_down", "restart", "hung", "failed",
    "degenerate_output", "wrong_answers", "lost_shard",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The table


def verdict(
    findings: Sequence[Finding], *, required: Collection[str], interrupted: str | None, guard_stopped: bool
) -> Verdict:
    """The rows of the table of verdicts, in the order in which one wins over the next.

    `required` are names of rules, `interrupted` the name of the signal that ended the run. A rule about classes
    (functional, performance) has answered when it did so for one of them; of other rules each finding counts.
    """
    failed = sorted((f for f in findings if f.status == "fail"), key=_weight)
    hard = [f for f in failed if f.hard]
    invalid = [f for f in failed if f.axis == "measurement" and not f.hard]
    soft = [f for f in failed if f.axis != "measurement" and not f.hard]
    missing = _missing(findings, required)
    warned = [f for f in findings if f.status == "warn"]
    reasons = tuple(dict.fromkeys(f.message for f in [*failed, *warned]))

    def say(overall: Any, exit_code: int, cause: str, why: tuple[str, ...] = reasons) -> Verdict:
        partial = _partial(findings) if overall == "PASS" else ()
        return Verdict(overall, exit_code, _axes(findings), cause, why, partial, interrupted is not None)

    if hard:
        return say("FAIL", 1, hard[0].cause)
    if interrupted:
        why = (f"interrupted by {interrupted}", *reasons)
        return say("INCONCLUSIVE", 128 + _number(interrupted), "interrupted", why)
    if invalid:
        why = tuple(dict.fromkeys(f.message for f in [*invalid, *soft, *warned]))
        return say("INCONCLUSIVE", 2, invalid[0].cause, why)
    if soft:
        return say("FAIL", 1, soft[0].cause)
    if guard_stopped:
        return say("INCONCLUSIVE", 2, "guard", ("a guard stopped the run", *reasons))
    if missing or not any(f.status != "not_evaluated" for f in findings):
        return say("INCONCLUSIVE", 2, "not_evaluated", (*(missing or ("nothing was judged",)), *reasons))
    return say("PASS", 0, "")


def _weight(finding: Finding) -> tuple[bool, int, bool, int]:
    """Hard first, root causes before what they bring about, then what began first."""
    rank = ROOT_CAUSES.index(finding.cause) if finding.cause in ROOT_CAUSES else len(ROOT_CAUSES)
    return (not finding.hard, rank, finding.since_ns is None, finding.since_ns or 0)


def _missing(findings: Sequence[Finding], required: Collection[str]) -> tuple[str, ...]:
    """What a required rule could not say."""
    why: list[str] = []
    for name in sorted(required):
        answers = [f for f in findings if f.rule == name]
        blind = [f for f in answers if f.status == "not_evaluated"]
        if not answers:
            why.append(f"required rule {name} did not run")
        elif per_class := [f for f in blind if f.axis in ("functional", "performance")]:
            if len(per_class) == len(answers):
                why += [f"required rule {name} not evaluated: {f.message}" for f in per_class[:1]]
        else:
            why += [f"required rule {name} not evaluated: {f.message}" for f in blind]
    return tuple(why)


def _partial(findings: Sequence[Finding]) -> tuple[str, ...]:
    """What a PASS does not cover, in few words: a monitor that could not see is said once, not by every rule."""
    blind = [f for f in findings if f.status == "not_evaluated"]
    names_monitor = any(f.rule == "blind" for f in blind)
    said: list[str] = []
    rules = dict.fromkeys(f.rule for f in blind if f.cause not in (ELSEWHERE, NOT_OBSERVED))
    said += [f"{f.scope} not observed" for f in blind if f.rule == "blind"]
    said += [f.message for f in blind if f.cause == ELSEWHERE]
    said += [f"{f.rule} not evaluated" for f in blind if f.cause == NOT_OBSERVED and not names_monitor]
    said += [f"{f.scope} left out" for f in blind if f.rule == "grades" and f.scope]
    for rule in rules:
        of = [f for f in findings if f.rule == rule]
        n = sum(f.status == "not_evaluated" for f in of)
        if rule != "blind" and not (rule == "grades" and all(f.scope for f in blind if f.rule == rule)):
            said.append(f"{rule} not evaluated" + (f" for {n} of {len(of)}" if n < len(of) else ""))
    return tuple(dict.fromkeys(said))


def _axes(findings: Sequence[Finding]) -> dict[Axis, str]:
    """One word per axis. MEASUREMENT is only valid or not."""
    words: dict[Axis, str] = {}
    for axis in AXES:
        found = {f.status for f in findings if f.axis == axis} - {"not_evaluated"}
        if not found:
            words[axis] = "NOT EVALUATED"
        elif axis == "measurement":
            words[axis] = "INVALID" if "fail" in found else "VALID"
        else:
            words[axis] = "FAIL" if "fail" in found else "WARN" if "warn" in found else "PASS"
    return words


def _number(name: str) -> int:
    """SIGINT → 2, SIGTERM → 15, so that the exit codes are 130 and 143; another name ends like SIGINT."""
    found = getattr(signal, name, signal.SIGINT)
    return int(found) if isinstance(found, signal.Signals) else int(signal.SIGINT)


# ---------------------------------------------------------------------------------------------------------------------
# A folder


def judge(folder: Path) -> Verdict:
    """Judges a run folder and writes findings.json, summary.json and report.md into it.

    Raises UserError where the folder's scenario cannot be read, or the judgement cannot be written (a full disk);
    whatever else is missing is in the findings.
    """
    run = record.Run(folder)
    names = summary.host_names(run)
    found, thresholds = apply_rules(run)
    required = frozenset(run.scenario.require)
    findings = [replace(f, required=f.rule in required) for f in summary.redacted(found, names)]
    guard = any(event["event"] == "guard" for event in run.journal)
    result = verdict(findings, required=required, interrupted=run.interrupted, guard_stopped=guard)
    numbers = summary.summarise(run, result, thresholds)
    try:
        record.write_json(folder, "findings.json", {"schema": FINDINGS_SCHEMA, "findings": findings})
        record.write_json(folder, "summary.json", numbers)
        record.write_text(folder, "report.md", report.markdown(numbers, findings))
    except OSError as error:
        why = f"the judgement, {result.line}, cannot be written ({error.strerror})"
        raise UserError(f"{folder}: {why}; make room, then: loadgen judge {folder}") from None
    return result


def apply_rules(run: record.Run) -> tuple[list[Finding], dict[str, Any]]:
    """The findings of every rule that is not skipped, and the options that each ran with. Third-party rules are those
    that the scenario gives options to by a dotted name."""
    scenario = run.scenario
    listed = [*plugins.names("rules"), *(name for name in scenario.rules if "." in name)]
    findings: list[Finding] = []
    thresholds: dict[str, Any] = {}
    for name in listed:
        if name in scenario.skip_rules:
            continue
        module = plugins.load("rules", name)
        options = plugins.options(module, scenario.rules.get(name, {}))
        thresholds[name] = options
        findings += run_rule(name, module, run, options)
    return findings, thresholds


def run_rule(name: str, module: ModuleType, run: record.Run, options: Any) -> list[Finding]:
    """A rule that breaks is our own fault and says so: its question stays open and the measurement is not sound."""
    try:
        return list(module.check(run, options))
    except Exception as error:  # any fault of one rule must not take the other findings with it
        frame = traceback.extract_tb(error.__traceback__)[-1]
        why = f"rule {name} broke: {type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
        broken = Finding(
            name, "measurement", "fail", why, "broken", evidence=f"{Path(frame.filename).name}:{frame.lineno}",
            cause="own_fault",
        )  # fmt: skip
        return [broken, not_evaluated(name, "measurement", why)]
