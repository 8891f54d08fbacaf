"""The selftest itself: the ladder of streams, two frozen processes, odd framing, Little's law, conservation.

Every check compares what loadgen reports with what a scripted server in a process of its own logged. It judges this
machine as well as this program: a machine too busy to measure on fails, and shall. Where the scripted server was the
bottleneck, its own log says so and the client is not blamed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson
import psutil
import uvloop

from loadgen import child, clock, plugins, strict
from loadgen.client import Client
from loadgen.record import Run, write_text
from loadgen.selftest import framing
from loadgen.selftest.drive import WORKLOAD, Driven, drive
from loadgen.selftest.server import MODEL
from loadgen.selftest.truth import Schedule, Served, late_ms, mean_open, rank, read_log
from loadgen.types import Json, Limits, Outcome, PhaseSpan, Request, Seconds, Target, UserError

Status = Literal["PASS", "FAIL"]

# The ladder. Two rounds a step: the cold start and one start on kept connections. One stream alone gets more, or its
# median would be one answer.
STEPS, QUICK_STEPS = (1, 16, 64, 128, 256, 512, 1000), (16, 64)
LADDER, QUICK_LADDER = Schedule(100, 20, 64), Schedule(100, 20, 32)
ROUNDS, LEAST_REQUESTS = 2, 4
# A step that misses is asked again: something else on the machine may have taken the core for a moment.
TRIES = 3
# Descriptors besides one for each stream.
SPARE_FILES = 64
# A step is accurate within these: what `make bench-accuracy` asks for, but for the rate, 97 % there, since the ramp
# weighs more in short steps.
ITL_SHARE, TTFT_P50_MS, TTFT_P99_MS, RATE_SHARE = 0.01, 0.5, 2.0, 0.95
# The gap of one chunk may be wrong by a twentieth of it.
GAP_ERROR_MS = 1.0
# This many streams must be accurate for a PASS: four times the seats of the largest scenario that we ship.
MUST_STREAMS = 16
# The scripted server is the bottleneck when it fills a core, or sends later than a whole gap after its schedule.
SERVER_CPU_SHARE = 0.9

# The frozen runs: answers of two lengths, so that the seats are in different places of theirs when the freeze comes.
SEATS, FROZEN_S, FREEZE_AFTER_S, MEASURE_S = 8, 2.0, 0.3, 4.0
SHORT_TOKENS, LONG_TOKENS = 10, 40
FREEZE_TRIES = 2
# A latency that holds the freeze is longer by nearly all of it; an undisturbed one takes 0.7 s here.
HELD_NS = int(0.9 * FROZEN_S * 1e9)
LITTLE_SHARE = 0.05
RUN_LIMIT_S, START_S, STOP_S = 60.0, 20.0, 5.0
ODD_LIMIT_S = 5.0

FREEZE_SCENARIO = f"""\
name: selftest
about: Two seconds of silence in the middle.
concurrency: {SEATS}
target: {{model: {MODEL}}}
classes:
  short: {{workload: {WORKLOAD}, weight: 2, options: {{max_tokens: {SHORT_TOKENS}}}}}
  long: {{workload: {WORKLOAD}, weight: 1, options: {{max_tokens: {LONG_TOKENS}}}}}
phases:
  - {{kind: measure, duration: {MEASURE_S:g}s, drain: 10s}}
monitors: {{host: {{}}}}
require: [generator]
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table; `numbers` are what the message is made of."""

    check: str
    status: Status
    message: str
    numbers: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    lines: tuple[Line, ...]
    took_s: float

    @property
    def overall(self) -> Status:
        return "PASS" if all(line.status == "PASS" for line in self.lines) else "FAIL"


def run(quick: bool, say: Callable[[str], None]) -> Report:
    """All checks, about a minute (a third of it if `quick`); `say` hears what is being done. Raises UserError where
    the server or a run does not start."""
    begun_ns = clock.now_ns()
    lines: list[Line] = []
    _most_files()  # before the server starts: it inherits the limit
    with scripted_server() as (url, _):
        lines += ladder(url, QUICK_STEPS if quick else STEPS, QUICK_LADDER if quick else LADDER, say)
        say("odd framing")
        lines += odd_framing(url)
    lines += frozen(say)
    return Report(tuple(lines), (clock.now_ns() - begun_ns) / 1e9)


def table(report: Report) -> str:
    """The report for people."""
    width = max(len(line.check) for line in report.lines)
    rows = [f"{line.status}  {line.check:<{width}}  {line.message}" for line in report.lines]
    return "\n".join([*rows, "", f"SELFTEST: {report.overall} ({report.took_s:.0f} s)"])


def as_json(report: Report) -> bytes:
    lines = [
        {"check": each.check, "status": each.status, "message": each.message, **each.numbers} for each in report.lines
    ]
    return orjson.dumps({"overall": report.overall, "took_s": round(report.took_s, 1), "lines": lines})


@contextmanager
def scripted_server() -> Iterator[tuple[str, int]]:
    """The scripted server as a process of its own: its address and pid."""
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen.selftest.server"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        word, _, url = process.stdout.readline().strip().partition(" ")
        if word != "listening":
            raise UserError(f"selftest: the scripted server did not start: {process.stderr.read()[-300:]}")
        yield url, process.pid
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)  # a stopped process would not hear the SIGTERM
        child.end([process], STOP_S)
        process.stdout.close()
        process.stderr.close()


# ---------------------------------------------------------------------------------------------------------------------
# How many streams stay accurate?


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the ladder, reported against true; `times` is where arrival times came from."""

    streams: int
    times: str
    ttft_p50_off_ms: float
    ttft_p99_off_ms: float
    itl_p99_ms: float
    itl_p99_true_ms: float
    gap_error_p99_ms: float
    inexact_share: float
    achieved: float
    rate_share: float
    unpaired: int
    server_late_p99_ms: float
    server_cpu_share: float
    cpu_share: float

    @property
    def wrong(self) -> list[str]:
        """What is not as it must be; empty where the step is accurate."""
        bounds = [
            (abs(self.ttft_p50_off_ms) > TTFT_P50_MS, f"TTFT p50 off by {self.ttft_p50_off_ms:.2f} ms"),
            (abs(self.ttft_p99_off_ms) > TTFT_P99_MS, f"TTFT p99 off by {self.ttft_p99_off_ms:.2f} ms"),
            (
                abs(self.itl_p99_ms - self.itl_p99_true_ms) > ITL_SHARE * self.itl_p99_true_ms,
                f"ITL p99 {self.itl_p99_ms:.2f} ms for {self.itl_p99_true_ms:.2f} ms",
            ),
            (self.gap_error_p99_ms > GAP_ERROR_MS, f"gap error p99 {self.gap_error_p99_ms:.2f} ms"),
            (self.rate_share < RATE_SHARE, f"{100 * self.rate_share:.1f} % of the offered rate"),
            (self.unpaired > 0, f"{self.unpaired} streams are in one log only"),
        ]
        return [what for broken, what in bounds if broken]

    @property
    def server_limited(self) -> bool:
        return self.server_cpu_share > SERVER_CPU_SHARE or self.server_late_p99_ms > LADDER.gap_ms

    @property
    def told(self) -> str:
        return (
            f"TTFT p50 {self.ttft_p50_off_ms:+.2f}, p99 {self.ttft_p99_off_ms:+.2f} ms off; "
            f"ITL p99 {self.itl_p99_ms:.2f} for {self.itl_p99_true_ms:.2f} ms; "
            f"gap error p99 {self.gap_error_p99_ms:.3f} ms; inexact {100 * self.inexact_share:.1f} %; "
            f"{self.achieved:.1f} streams open, {100 * self.rate_share:.1f} % of the rate; "
            f"our CPU {100 * self.cpu_share:.0f} %; times from {self.times}"
        )

    @property
    def server_told(self) -> str:
        return f"late by {self.server_late_p99_ms:.1f} ms at p99, {100 * self.server_cpu_share:.0f} % of a core"


def ladder(url: str, steps: tuple[int, ...], schedule: Schedule, say: Callable[[str], None]) -> list[Line]:
    """A line for each step that was reached, and one for the highest that is accurate."""
    lines: list[Line] = []
    best = 0
    end = f"the last step of {steps[-1]} included"
    for streams in steps:
        if streams + SPARE_FILES > _most_files():
            end = f"more need more than {_most_files()} open files (ulimit -n)"
            break
        say(f"{streams} streams of {schedule.stream_s:.1f} s")
        step, tries = _try(url, streams, schedule)
        again = f"; try {tries} of {TRIES}" if tries > 1 else ""
        numbers = {"tries": tries, **{name: _short(value) for name, value in strict.plain(step).items()}}
        if not step.wrong:
            best = streams
            lines.append(Line(f"{streams} streams", "PASS", step.told + again, numbers))
        elif step.server_limited:
            end = f"beyond, the scripted server is the bottleneck ({step.server_told}): no word on the client"
            break
        else:
            end = f"at {streams}: {'; '.join(step.wrong)} ({TRIES} tries; scripted server {step.server_told})"
            if streams <= MUST_STREAMS:
                lines.append(Line(f"{streams} streams", "FAIL", step.told + again, numbers))
            break
    status: Status = "PASS" if best >= MUST_STREAMS else "FAIL"
    lines.append(Line("accurate up to", status, f"{best} streams; {end}", {"streams": best}))
    return lines


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _try(url: str, streams: int, schedule: Schedule) -> tuple[Step, int]:
    """The first accurate try of a step, or the last; how many it took."""
    tries = 0
    while True:
        tries += 1
        step = judged(uvloop.run(drive(url, streams, max(LEAST_REQUESTS, ROUNDS * streams), schedule)))
        if not step.wrong or step.server_limited or tries == TRIES:
            return step, tries


def judged(driven: Driven) -> Step:
    """The figures of one load."""
    paired = driven.paired
    late = late_ms(driven.served, driven.schedule)
    begin = min(each.arrived_ns for each in driven.served)
    window_s = max(1e-9, (max(each.done_ns for each in driven.served) - begin) / 1e9)
    return Step(
        streams=driven.streams,
        times="+".join(sorted(driven.tape.times)),
        ttft_p50_off_ms=rank(paired.ttft, 0.5) - rank(paired.ttft_true, 0.5),
        ttft_p99_off_ms=rank(paired.ttft, 0.99) - rank(paired.ttft_true, 0.99),
        itl_p99_ms=rank(paired.gap, 0.99),
        itl_p99_true_ms=rank(paired.gap_true, 0.99),
        gap_error_p99_ms=rank(paired.gap_error, 0.99),
        inexact_share=paired.inexact_share,
        achieved=driven.achieved,
        rate_share=driven.rate_share,
        unpaired=paired.unpaired,
        server_late_p99_ms=rank(late, 0.99),
        server_cpu_share=float(driven.server.get("cpu_s", 0.0)) / window_s,
        cpu_share=driven.cpu_s / driven.wall_s,
    )


def _most_files() -> int:
    """How many descriptors we may have open; the soft limit is raised first, to what the ladder needs at most."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = STEPS[-1] + SPARE_FILES
    wanted = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a lower limit of its own, which it does not tell
        return soft
    return wanted


# ---------------------------------------------------------------------------------------------------------------------
# Odd framing


def odd_framing(url: str) -> list[Line]:
    """Each case asked once; one line for all of them."""
    wrong = [f"{name} ({case.about}): {why}" for name, case, why in uvloop.run(_ask_all(url)) if why]
    n = len(framing.CASES)
    if wrong:
        return [Line("odd framing", "FAIL", f"{len(wrong)} of {n} read wrong: {'; '.join(wrong)}", {"wrong": wrong})]
    about = "split UTF-8, CRLF, CR, comments, a 1 MiB event, no [DONE], truncation, an error under 200"
    return [Line("odd framing", "PASS", f"{n} of {n} read right: {about}, …", {"cases": n})]


async def _ask_all(url: str) -> list[tuple[str, framing.Case, str]]:
    limits = Limits(*[Seconds(ODD_LIMIT_S)] * 5)
    found = []
    for name, case in framing.CASES.items():
        target = Target(url, model="odd", endpoint=f"/odd/{name}")
        dialect = plugins.load("dialects", target.dialect)
        client = Client(target, limits, dialect, model="odd", headers={}, connections=1)
        request = Request(f"odd-{name}", "odd", [{"role": "user", "content": "Say it."}], max_tokens=16)
        try:
            outcome = await client.send(request, dialect.encode(request, "odd", {}))
        finally:
            await client.close()
        found.append((name, case, differs(case, outcome)))
    return found


def differs(case: framing.Case, outcome: Outcome) -> str:
    """What is wrong with the outcome of a case; empty where nothing is."""
    if case.text is None:
        if outcome.outcome == "ok":
            return "counted as a success"
        return "" if outcome.error_class == case.error_class else f"failed as {outcome.error_class}"
    if outcome.outcome != "ok":
        return f"failed: {outcome.error_class} {outcome.error_message or ''}".strip()
    if outcome.text != case.text:
        return f"other text: {outcome.text[:40]!r}"
    if case.flag is not None and case.flag not in outcome.flags:
        return f"not flagged {case.flag}"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Frozen for two seconds: the server, or we


@dataclass(frozen=True, slots=True)
class Frozen:
    """A whole `loadgen run` in which somebody was stopped from `stop_ns` to `cont_ns`."""

    exit_code: int
    run: Run
    served: list[Served]
    stop_ns: int
    cont_ns: int

    @property
    def phase(self) -> PhaseSpan:
        return next(phase for phase in self.run.phases if phase.kind == "measure")

    @property
    def verdict(self) -> str:
        summary: Json = orjson.loads((self.run.folder / "summary.json").read_bytes())
        return str(summary["verdict"]["overall"])

    def findings(self, scope: str) -> list[Json]:
        """The generator rule's findings of one scope."""
        found: list[Json] = orjson.loads((self.run.folder / "findings.json").read_bytes())["findings"]
        return [each for each in found if each["rule"] == "generator" and each["scope"] == scope]

    def status(self, scope: str) -> str:
        return ", ".join(str(each["status"]) for each in self.findings(scope)) or "not there"


def frozen(say: Callable[[str], None]) -> list[Line]:
    """Both runs at once, each against a server of its own; once more where something else took our core meanwhile."""
    tries = 0
    while True:
        tries += 1
        say(f"two runs of {MEASURE_S:g} s at once: one with a frozen server, one frozen itself")
        with tempfile.TemporaryDirectory(prefix="loadgen-selftest-") as folder:
            theirs, ours = asyncio.run(_both(Path(folder)))
            lines = [server_frozen(theirs), we_frozen(ours), littles_law(theirs), conservation(theirs)]
        if all(line.status == "PASS" for line in lines) or tries == FREEZE_TRIES:
            return lines


async def _both(folder: Path) -> tuple[Frozen, Frozen]:
    theirs, ours = await asyncio.gather(
        asyncio.to_thread(_run_and_freeze, folder / "theirs", False),
        asyncio.to_thread(_run_and_freeze, folder / "ours", True),
    )
    return theirs, ours


def _run_and_freeze(out: Path, ourselves: bool) -> Frozen:
    """`loadgen run` as a user starts it; its engine, or the server, is stopped for FROZEN_S in the middle."""
    out.mkdir()
    write_text(out, "selftest.yaml", FREEZE_SCENARIO)
    with scripted_server() as (url, server_pid):
        command = [sys.executable, "-m", "loadgen", "run", str(out / "selftest.yaml"), "--url", url,
                   "--out", str(out / "runs"), "--quiet"]  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        try:
            folder = _wait_for(process, lambda: _loading(out / "runs"))
            pid = _engine_pid(process.pid) if ourselves else server_pid
            time.sleep(FREEZE_AFTER_S)
            stop_ns, cont_ns = _freeze(pid)
            process.wait(RUN_LIMIT_S)
            served = uvloop.run(_log(url))
        except subprocess.TimeoutExpired:
            raise UserError(f"selftest: a run of {MEASURE_S:g} s took more than {RUN_LIMIT_S:g} s") from None
        finally:
            child.end([process], STOP_S)
            process.stderr.close()
    return Frozen(process.returncode, Run(folder), served, stop_ns, cont_ns)


def _loading(runs: Path) -> Path | None:
    """The run's folder, once its journal, which is written once a second, tells of the measuring phase."""
    for folder in runs.glob("*-selftest"):
        if Run(folder).events("phase_start"):
            return folder
    return None


def _engine_pid(supervisor: int) -> int:
    """The process that sends: the shard among the supervisor's children."""
    return next(each.pid for each in psutil.Process(supervisor).children() if "loadgen.shard" in each.cmdline())


def _wait_for(process: subprocess.Popen[str], look: Callable[[], Path | None]) -> Path:
    end_ns = clock.now_ns() + int(START_S * 1e9)
    while (found := look()) is None:
        if process.poll() is not None or clock.now_ns() > end_ns:
            assert process.stderr is not None
            child.end([process], STOP_S)
            raise UserError(f"selftest: the run did not start: {process.stderr.read()[-300:]}")
        time.sleep(0.05)
    return found


def _freeze(pid: int) -> tuple[int, int]:
    stop_ns = clock.now_ns()
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(FROZEN_S)
    finally:
        cont_ns = clock.now_ns()
        os.kill(pid, signal.SIGCONT)
    return stop_ns, cont_ns


async def _log(url: str) -> list[Served]:
    target = Target(url)
    dialect = plugins.load("dialects", target.dialect)
    client = Client(target, Limits(), dialect, model="", headers={}, connections=1)
    try:
        return read_log(await client.get_json("/log"))
    finally:
        await client.close()


def server_frozen(run: Frozen) -> Line:
    """Every request that the server's log says was held must be as long from `due` in the report."""
    held = [each for each in run.served if each.arrived_ns < run.stop_ns and each.done_ns > run.cont_ns]
    before_first = [each for each in held if len(each.sent_ns) and each.sent_ns[0] > run.cont_ns]
    ok = [each for each in run.run.outcomes() if each.outcome == "ok"]
    e2e = [each for each in ok if (each.last_ns or 0) - each.due_ns >= HELD_NS]
    ttft = [each for each in ok if (each.first_ns or 0) - each.due_ns >= HELD_NS]
    worst_s = max(((each.last_ns or 0) - each.due_ns for each in ok), default=0) / 1e9
    lag = run.status("loop lag")
    numbers = {"held": len(held), "e2e_due_held": len(e2e), "waiting": len(before_first), "ttft_due_held": len(ttft),
               "e2e_due_max_s": round(worst_s, 3), "loop_lag": lag, "verdict": run.verdict}  # fmt: skip
    message = (
        f"{len(held)} requests held: {len(e2e)} as long in e2e_due, {len(ttft)} of {len(before_first)} that waited in "
        f"ttft_due, worst {worst_s:.2f} s; the run itself {run.verdict}, our loop lag: {lag}"
    )
    # A seat that asked while the server was stopped is held too, but the server learns of it only afterwards.
    unknown = SEATS - len(held)
    right = 0 <= len(ttft) - len(before_first) <= unknown and len(e2e) == SEATS and unknown <= 1 and lag == "pass"
    return Line(f"server frozen {FROZEN_S:g} s", "PASS" if right else "FAIL", message, numbers)


def we_frozen(run: Frozen) -> Line:
    """Our own silence must not be told as the server's."""
    lag = run.findings("loop lag")
    said = str(lag[0]["message"]) if lag else "no finding on the loop lag"
    right = run.verdict == "INCONCLUSIVE" and run.exit_code == 2 and run.status("loop lag") == "fail"
    numbers = {"verdict": run.verdict, "exit_code": run.exit_code, "loop_lag": run.status("loop lag")}
    message = f"verdict {run.verdict} (exit code {run.exit_code}): {said}"
    return Line(f"we frozen {FROZEN_S:g} s", "PASS" if right else "FAIL", message, numbers)


def littles_law(run: Frozen) -> Line:
    """By the server's log and by our own record, while the phase issued."""
    begin, end = run.phase.start_ns, run.phase.end_ns or run.phase.start_ns
    inside = [
        Served(each.rid, max(begin, each.arrived_ns), min(end, each.done_ns), each.tokens, each.sent_ns)
        for each in run.served
        if begin <= each.arrived_ns < end
    ]
    theirs, ours = mean_open(inside), run.findings("littles law")
    share = float(ours[0]["number"]) if ours and ours[0]["number"] is not None else 0.0
    right = abs(theirs / SEATS - 1) <= LITTLE_SHARE and abs(share - 1) <= LITTLE_SHARE
    message = f"{SEATS} seats; {theirs:.2f} open by the server's log, {share * SEATS:.2f} by ours"
    numbers = {"seats": SEATS, "server": round(theirs, 3), "ours": round(share * SEATS, 3)}
    return Line("Little's law", "PASS" if right else "FAIL", message, numbers)


def conservation(run: Frozen) -> Line:
    """Requests and tokens, from the start of the phase on: preflight's own are before it."""
    served = [each for each in run.served if each.arrived_ns >= run.phase.start_ns]
    outcomes = [each for each in run.run.outcomes() if each.phase == run.phase.name]
    issued = sum(int(event["issued"]) for event in run.run.events("phase_drained"))
    ok = [each for each in outcomes if each.outcome == "ok"]
    theirs, ours = sum(each.tokens for each in served), sum(each.output_tokens or 0 for each in ok)
    right = issued == len(outcomes) == len(ok) == len(served) and theirs == ours
    message = (
        f"{issued} issued, {len(outcomes)} on record ({len(ok)} ok), {len(served)} served; "
        f"{ours} tokens counted, {theirs} sent"
    )
    numbers = {"issued": issued, "recorded": len(outcomes), "served": len(served), "tokens": ours,
               "tokens_sent": theirs}  # fmt: skip
    return Line("conservation", "PASS" if right else "FAIL", message, numbers)
