"""The server's systemd unit: restarts, how its main process ended, what systemd called it, peak memory.

Opt-in: most servers are containers. `systemctl show` is asked every 15 s, because each call is a process of its own; a
restart in between is not lost, since NRestarts and the invocation id tell of it. `Result=oom-kill` is systemd's reading
of the unit's own cgroup.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds
from monitors import server

LANE: Lane = "slow"
PERIOD_S = 15.0
DEADLINE_S = 5.0  # the bus of a host that swaps answers late; a tick of the lane may take 10 s
KILL_WAIT_S = 1.0  # for a systemctl that did not answer and was killed
MAX_OUTPUT_BYTES = 1 << 16  # our dozen properties have 500 bytes
UNSET = (1 << 64) - 1  # how systemd says "no limit" and "not known" in a number

# property → metric
NUMBERS = {
    "NRestarts": "restarts_total",
    "MemoryCurrent": "memory_current_bytes",
    "MemoryPeak": "memory_peak_bytes",
    "MemoryMax": "memory_max_bytes",
    "TasksCurrent": "tasks",
}
WORDS = ("LoadState", "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "MainPID", "InvocationID",
         "OOMPolicy", "Restart")  # fmt: skip
# ExecMainCode is a waitid code: only after these there is a status of a process that ended.
ENDED = {"1": "exit status", "2": "signal", "3": "signal (core dumped)"}


@dataclass(frozen=True, slots=True)
class Options:
    """`unit`: which one; "" for the unit of the process that serves the target's port. `user`: of the user's own
    systemd. `command`: another systemctl."""

    root: str = "/"
    target_url: str = ""
    unit: str = ""
    user: bool = False
    command: str = "systemctl"
    period_s: Seconds = Seconds(15)


def properties(text: str) -> dict[str, str]:
    """`KEY=value` lines."""
    return {key: value for key, is_, value in (line.partition("=") for line in text.splitlines()) if is_}


def number(text: str) -> float | None:
    """A property that is a number; None for `[not set]`, `infinity` and for systemd's way to say so."""
    return float(text) if text.isdigit() and int(text) != UNSET else None


def figures(found: dict[str, str], now: int) -> list[Sample]:
    values = {metric: number(found.get(key, "")) for key, metric in NUMBERS.items()}
    values["active"] = float(found.get("ActiveState") == "active")
    values["main_pid"] = number(found.get("MainPID", "")) or None
    return [Sample("systemd", metric, value, now) for metric, value in values.items() if value is not None]


def ending(found: dict[str, str]) -> str:
    """How the main process ended, as far as it did."""
    how = ENDED.get(found.get("ExecMainCode", ""))
    return f", main process: {how} {found.get('ExecMainStatus')}" if how else ""


def differences(unit: str, before: dict[str, str], found: dict[str, str], now: int) -> list[Sample]:
    """What happened between two looks."""
    out: list[Sample] = []
    labels = {"unit": unit, "result": found.get("Result", ""), "status": found.get("ExecMainStatus", "")}
    was, is_ = number(before.get("NRestarts", "")) or 0, number(found.get("NRestarts", "")) or 0
    again = bool(before.get("InvocationID")) and before.get("InvocationID") != found.get("InvocationID")
    if is_ > was or (again and found.get("ActiveState") in ("active", "activating")):
        how = f"{is_ - was:.0f} times by systemd" if is_ > was else "by somebody"
        text = f"unit {unit} was restarted {how}{ending(found)}"
        out.append(Sample("systemd", "restart", 1.0, now, labels | {"restarts": f"{is_:.0f}"}, text))
    if found.get("Result") not in ("success", "", before.get("Result")):
        text = f"systemd calls it {found['Result']}{ending(found)}"
        out.append(Sample("systemd", "result", 1.0, now, labels, f"unit {unit}: {text}"))
    if found.get("ActiveState") != before.get("ActiveState"):
        text = f"unit {unit} is {found.get('ActiveState')} ({found.get('SubState')}){ending(found)}"
        out.append(Sample("systemd", "state", 1.0, now, labels | {"state": found.get("ActiveState", "")}, text))
    return out


async def show(options: Options, unit: str) -> tuple[dict[str, str] | None, str]:
    """The unit's properties, or why they are not to be had. Never leaves a process behind."""
    arguments = ["--user"] if options.user else []
    wanted = f"--property={','.join((*NUMBERS, *WORDS))}"
    try:
        process = await asyncio.create_subprocess_exec(
            options.command, *arguments, "show", "--no-pager", wanted, "--", unit,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            limit=MAX_OUTPUT_BYTES,
        )  # fmt: skip
    except OSError as error:
        return None, f"{options.command}: {error.strerror}"
    try:
        async with asyncio.timeout(DEADLINE_S):
            said, complained = await process.communicate()
    except TimeoutError:
        return None, f"{options.command} gave no answer within {DEADLINE_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            async with asyncio.timeout(KILL_WAIT_S):
                await process.wait()
    if process.returncode:
        why = " ".join(complained.decode("utf-8", "replace").split())[:300]
        return None, why or f"{options.command} ended with {process.returncode}"
    return properties(said[:MAX_OUTPUT_BYTES].decode("utf-8", "replace")), ""


async def unit_of(options: Options) -> tuple[str, str]:
    """The server's unit, or why there is none."""
    if options.unit:
        return options.unit, ""
    port, why = server.port_of(options.target_url)
    if why:
        return "", why
    proc = server.tree(options.root) / "proc"
    found = await asyncio.to_thread(server.find, proc, port)
    if found.listener is None:
        return "", found.why
    unit = server.place(proc, found.listener.pid).unit
    return unit, "" if unit else f"pid {found.listener.pid} ({found.listener.name}) is not in a unit of its own"


async def watch(options: Options) -> AsyncIterator[list[Sample]]:
    """Figures of the unit; happenings restart, result, state, and show_failed once an outage."""
    unit, told = "", None
    before: dict[str, str] | None = None
    failed = 0
    failing = False
    while True:
        out: list[Sample] = []
        found: dict[str, str] | None = None
        why = ""
        if not unit:
            unit, why = await unit_of(options)
        if unit:
            found, why = await show(options, unit)
        if found is not None and found.get("LoadState") == "not-found":
            found, why = None, f"there is no unit {unit}"
        now = clock.now_ns()
        if found is not None:
            if before is None:
                text = f"unit {unit}, {found.get('ActiveState')}, Restart={found.get('Restart')}, "
                text += f"OOMPolicy={found.get('OOMPolicy')}"
                labels = {"unit": unit, "pid": found.get("MainPID", ""), "invocation": found.get("InvocationID", "")}
                out.append(Sample("systemd", "observed", 1.0, now, labels, text))
                told = text
            else:
                out += differences(unit, before, found, now)
            out += figures(found, now)
            before, failing = found, False
        elif before is None:
            if told is None or (told != why and told.startswith(server.NOBODY)):
                told = why
                out.append(Sample("systemd", "observed", 0.0, now, text=why))
        else:
            failed += 1
            if not failing:
                failing = True
                out.append(Sample("systemd", "show_failed", 1.0, now, {"unit": unit}, why))
        out.append(Sample("systemd", "shows_failed_total", float(failed), now))
        yield out
