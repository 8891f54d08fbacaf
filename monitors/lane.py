"""One lane of monitors in a process of its own: `python -m monitors.lane LANE RUN_FOLDER CONFIG_JSON`.

It starts every monitor of its lane, asks each for samples when its next tick is due, and writes them to
`samples-<lane>.jsonl` until SIGTERM or the death of its parent. Three lanes, because each can be hurt differently:
*fast* must keep its 10 Hz while memory runs out (standard library only), *gpu* calls a driver that may block for
minutes, *slow* waits for other people's HTTP. A monitor that raises is named in the samples, tried again a bounded
number of times, then switched off; its neighbours never notice.

The fast lane carries the guard (`loadgen.guard`) where CONFIG_JSON has `guards`: its standard input says `load` when
the load begins and `served NS` when the server last gave a good answer, its standard output says a line of JSON for
each level that the load must heed, after the reason was written and synced.

CONFIG_JSON is `{"monitors": {"host": {...options}}, "root": "/", "target_url": "http://…", "headers_env": "NAME"}`.
Every key besides `monitors` is offered to each monitor whose Options has a field of that name. Secrets stay out of it:
`headers_env` names the environment variable that holds the request headers as a JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from loadgen import clock
from loadgen.types import Json, Lane, Sample

if TYPE_CHECKING:
    from types import ModuleType

    from loadgen.guard import Guard
    from loadgen.journal import SampleWriter

LANES: tuple[Lane, ...] = ("fast", "gpu", "slow")

RETRY_NS = 5_000_000_000  # a monitor that raised is started again after 5 s: what it reads may come back
MAX_FAILURES = 5  # then it is switched off: a monitor that always fails says nothing new, and its errors fill the file
FORGIVE_NS = 600_000_000_000  # ten clean minutes wipe the slate, so that a night of rare hiccups keeps its monitor
MIN_PERIOD_S = 0.05  # 20 Hz: at 100 Hz the sampler itself takes 8.5 % of a core and 2 % of its ticks come late
MAX_NAP_S = 0.2  # how long a stop signal or the parent's death may go unnoticed
SLOW_TICK_LIMIT_S = 10.0  # a slow-lane monitor that takes longer hangs; each has shorter limits of its own
CLOSE_LIMIT_S = 1.0  # what a slow-lane monitor may take to clean up

# When the server last gave a good answer. A line that two reads tear apart is lost: another follows within a second.
SERVED = re.compile(rb"^served (\d+)$", re.MULTILINE)
# A guard's reason is on the disk before it acts; but a disk that hangs, as it does on a dying host, holds up no guard.
REASON_SYNC_S = 0.2
HEAR_BYTES = 4096
CLOCK_EVERY_NS = 1_000_000_000

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(slots=True)
class Watched:
    """One monitor and where it stands. `iterator` None: to be started at `due_ns`; `over`: it ended or was given up."""

    name: str
    module: ModuleType
    options: object
    period_ns: int
    due_ns: int
    iterator: Iterator[list[Sample]] | AsyncIterator[list[Sample]] | None = None
    failures: int = 0
    failed_ns: int = 0
    missed: int = 0
    over: bool = False


def load(lane: Lane, config: Json, at_ns: int) -> tuple[list[Watched], list[Sample]]:
    """The lane's monitors, ready to start at `at_ns`, and what to report of those that could not be loaded."""
    shared = {key: value for key, value in config.items() if key != "monitors"}
    watched: list[Watched] = []
    complaints: list[Sample] = []
    for name, given in config.get("monitors", {}).items():
        try:
            module = importlib.import_module(name if "." in name else f"monitors.{name}")
            if lane != module.LANE:
                continue
            known = {key: value for key, value in shared.items() if key in module.Options.__dataclass_fields__}
            options = module.Options(**{**known, **(given or {})})
            period_s = max(float(getattr(options, "period_s", module.PERIOD_S)), MIN_PERIOD_S)
            watched.append(Watched(name, module, options, round(period_s * 1e9), at_ns))
        except Exception as error:  # whatever a foreign file does on import: this monitor is lost, the lane is not
            complaints += switched_off(name, error, at_ns)
    return watched, complaints


def one_line(error: BaseException) -> str:
    """What went wrong and where, on one line."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


def switched_off(name: str, error: BaseException, at_ns: int) -> list[Sample]:
    """The last words on a monitor that is given up."""
    text = one_line(error)
    return [
        Sample(name, "monitor_failed", 1.0, at_ns, text=text),
        Sample(name, "observed", 0.0, at_ns, text=f"switched off: {text}"),
    ]


def plan(m: Watched, now_ns: int) -> list[Sample]:
    """Note how late this tick is and put the next one on the grid: ticks that were slept through are counted, never
    made up for (a burst of readings of one moment would look like data). The tick that starts a monitor has no due
    time to be held to: imports and a first look round take as long as they take."""
    if m.iterator is None:
        return []
    late_ns = now_ns - m.due_ns
    skipped = max(0, late_ns // m.period_ns)
    m.missed += skipped
    m.due_ns += (skipped + 1) * m.period_ns
    return [
        Sample(m.name, "tick_lateness_ms", late_ns / 1e6, now_ns),
        Sample(m.name, "missed_ticks_total", float(m.missed), now_ns),
    ]


def failed(m: Watched, error: BaseException, now_ns: int) -> list[Sample]:
    """A tick raised: report it, and try again later or switch the monitor off."""
    if now_ns - m.failed_ns > FORGIVE_NS:
        m.failures = 0
    m.failures += 1
    m.failed_ns = now_ns
    m.iterator = None
    m.due_ns = now_ns + RETRY_NS
    if m.failures >= MAX_FAILURES:
        m.over = True
        return switched_off(m.name, error, now_ns)
    return [Sample(m.name, "monitor_failed", 1.0, now_ns, text=one_line(error))]


def tick(m: Watched, now_ns: Callable[[], int] = clock.now_ns) -> list[Sample]:
    """One tick of a synchronous monitor, due or late: never raises."""
    timing = plan(m, now_ns())
    starting = m.iterator is None
    try:
        if starting:
            m.iterator = m.module.watch(m.options)
        samples = next(cast("Iterator[list[Sample]]", m.iterator))
        if starting:
            m.due_ns = now_ns() + m.period_ns
        return samples + timing
    except StopIteration:
        m.over = True
        return []
    except Exception as error:  # a monitor reads what others write: whatever it stumbles over stays with it
        return failed(m, error, now_ns())


def close(m: Watched) -> None:
    """Let the monitor's `finally` run. Its last errors have nobody left to read them."""
    iterator, m.iterator = m.iterator, None
    if iterator is None or not hasattr(iterator, "close"):
        return
    try:
        iterator.close()
    except Exception as error:
        print(f"{m.name}: {one_line(error)}", file=sys.stderr)


def run_ticks(
    watched: list[Watched],
    write: Callable[[list[Sample]], None],
    stopped: Callable[[], bool],
    now_ns: Callable[[], int] = clock.now_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """The loop of the fast and the gpu lane: absolute deadlines, so that the cost of a tick does not shift the next."""
    try:
        while not stopped():
            live = [m for m in watched if not m.over]
            now = now_ns()
            wait_ns = min((m.due_ns for m in live), default=now + round(MAX_NAP_S * 1e9)) - now
            if wait_ns > 0:
                sleep(min(wait_ns / 1e9, MAX_NAP_S))
                continue
            for m in live:
                if m.due_ns <= now_ns():
                    write(tick(m, now_ns))
    finally:
        for m in watched:
            close(m)


async def keep(
    m: Watched,
    write: Callable[[list[Sample]], None],
    now_ns: Callable[[], int] = clock.now_ns,
    limit_s: float = SLOW_TICK_LIMIT_S,
) -> None:
    """The slow lane's loop for one monitor, until it is over or cancelled."""
    import asyncio

    try:
        while not m.over:
            now = now_ns()
            if m.due_ns > now:
                await asyncio.sleep((m.due_ns - now) / 1e9)
                continue
            timing = plan(m, now)
            try:
                starting = m.iterator is None
                if starting:
                    m.iterator = m.module.watch(m.options)
                async with asyncio.timeout(limit_s):
                    samples = await anext(cast("AsyncIterator[list[Sample]]", m.iterator))
                if starting:
                    m.due_ns = now_ns() + m.period_ns
                write(samples + timing)
            except StopAsyncIteration:
                m.over = True
            except Exception as error:  # as in tick(): it stays with this monitor
                await aclose(m)
                write(failed(m, error, now_ns()))
    finally:
        await aclose(m)


async def aclose(m: Watched) -> None:
    """close() for the slow lane, bounded in time."""
    import asyncio

    iterator, m.iterator = m.iterator, None
    if iterator is None or not hasattr(iterator, "aclose"):
        return
    try:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await iterator.aclose()
    except Exception as error:
        print(f"{m.name}: {one_line(error)}", file=sys.stderr)


async def run_tasks(watched: list[Watched], write: Callable[[list[Sample]], None], stopped: Callable[[], bool]) -> None:
    """The slow lane: one task a monitor, all cancelled when it is time to stop."""
    import asyncio

    tasks = [asyncio.create_task(keep(m, write), name=m.name) for m in watched]
    while not stopped():  # noqa: ASYNC110 - the signal handler of all lanes sets a flag; one look per nap is enough
        await asyncio.sleep(MAX_NAP_S)
    for task in tasks:
        task.cancel()
    for task, result in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
        if isinstance(result, Exception):
            print(f"{task.get_name()}: {one_line(result)}", file=sys.stderr)


def guarded(
    writer: SampleWriter,
    guard: Guard,
    heard: Callable[[], bytes],
    say: Callable[[bytes], object],
    now_ns: Callable[[], int] = clock.now_ns,
) -> Callable[[list[Sample]], None]:
    """A `write` for the fast lane that lets the guard see every tick. A reason is written and synced before it is
    said; near a guard every reading is kept."""

    def write(samples: list[Sample]) -> None:
        if told := heard():
            if (baseline := guard.arm(now_ns())) is not None:
                writer.write([baseline])
            for served in SERVED.findall(told):
                guard.served(int(served))
        decision = guard.look(samples)
        writer.near_guard(guard.level != "calm")
        writer.write(samples)
        if decision is not None:
            writer.write([decision.sample()])
            if decision.level == "warn":  # it asks nothing of anybody
                writer.sync_soon()
                return
            synced = writer.sync_soon(REASON_SYNC_S)
            fields = {"guard": decision.level, "at_ns": decision.at_ns, "why": decision.why, "synced": synced}
            say(json.dumps(fields).encode() + b"\n")

    return write


def timed(
    write: Callable[[list[Sample]], None],
    lane: Lane,
    root: Path,
    reading: Callable[[Path], dict[str, int | str | None]] = clock.reading,
    now_ns: Callable[[], int] = clock.now_ns,
) -> Callable[[list[Sample]], None]:
    """A `write` that notes all clocks with the samples, once a second: how far the wall's and the boot's clock ran away
    from MONOTONIC since the lane began, and each new boot id. So starvation, sleep, a clock that was set and a reboot
    can be told apart (`clock.between`). Small numbers that stand still: what changes from line to line fills a disk."""
    first: dict[str, int] = {}
    labels: dict[str, str] = {"lane": lane}
    due_ns = 0
    boot_id: object = None

    def noted(samples: list[Sample]) -> None:
        nonlocal due_ns, boot_id
        now = now_ns()
        if now >= due_ns:
            due_ns = now + CLOCK_EVERY_NS
            read = reading(root)
            at = int(read["mono_ns"] or now)
            if isinstance(read["boot_id"], str) and read["boot_id"] != boot_id:
                boot_id = read["boot_id"]
                samples = [*samples, Sample("clock", "boot_id", 1.0, at, labels, read["boot_id"])]
            for metric, name in (("wall_ahead_ms", "wall_ns"), ("suspended_ms", "boottime_ns")):
                if (value := read[name]) is not None:
                    ahead_ns = int(value) - at
                    # tenths: less is the time between the readings
                    ms = round((ahead_ns - first.setdefault(metric, ahead_ns)) / 1e6, 1)
                    samples = [*samples, Sample("clock", metric, ms, at, labels)]
        write(samples)

    return noted


def hear() -> bytes:
    """What the supervisor said since the last call; never waits."""
    try:
        return os.read(0, HEAR_BYTES)
    except OSError:  # nothing there
        return b""


def say(line: bytes) -> None:
    """To the supervisor. Levels are few: the pipe takes them, or nobody listens any more."""
    with suppress(OSError):
        os.write(1, line)


def die_with_parent() -> None:
    """Ask Linux for a SIGTERM when the parent is gone; elsewhere the loop's look at getppid() has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def main(argv: list[str]) -> int:
    """Run one lane until told to stop. 0 after SIGTERM or the parent's death; 3 where it was called wrongly."""
    if len(argv) != 3 or argv[0] not in LANES:
        print(f"usage: python -m monitors.lane {'|'.join(LANES)} RUN_FOLDER CONFIG_JSON", file=sys.stderr)
        return 3
    lane, folder, config = argv[0], Path(argv[1]), json.loads(argv[2])
    guards, wanted = config.pop("guards", None), config.pop("harden", False)

    stop_asked = False

    def on_term(_number: int, _frame: Any) -> None:
        nonlocal stop_asked
        stop_asked = True

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the drain must still be watched
    parent = int(config.pop("parent_pid", os.getppid()))
    die_with_parent()

    def stopped() -> bool:
        return stop_asked or os.getppid() != parent

    from loadgen.journal import SEGMENT_BYTES, SampleWriter

    try:
        writer = SampleWriter(folder, lane, segment_bytes=SEGMENT_BYTES)
    except OSError as error:
        print(f"the {lane} lane cannot write into {folder}: {error.strerror}", file=sys.stderr)
        return 3
    try:
        watched, complaints = load(lane, {"run_folder": str(folder), **config}, clock.now_ns())
        if wanted:
            from monitors import harden

            granted = harden.harden(lane)
            complaints.append(Sample(f"{lane} lane", "observed", 1.0, clock.now_ns(), text=granted))
        if complaints:
            writer.write(complaints)
        gc.freeze()  # what is loaded stays loaded: no collection needs to walk it again
        write = timed(writer.write, lane, Path(config.get("root", "/")))
        if lane == "slow":
            import asyncio

            asyncio.run(run_tasks(watched, write, stopped))
        elif guards is not None:
            from loadgen.guard import Guard
            from loadgen.types import Guards

            os.set_blocking(0, False)
            see = guarded(writer, Guard(Guards(**guards)), hear, say)
            run_ticks(watched, timed(see, lane, Path(config.get("root", "/"))), stopped)
        else:
            run_ticks(watched, write, stopped)
    finally:
        writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
