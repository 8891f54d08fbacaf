"""Any number that somebody writes to a file: what no monitor here knows, from a script of the user's own.

`name{label="x"} 3.5` as Prometheus has it (what node_exporter's textfile collector reads), `name 3.5`, or a file that
holds a bare number and is called by its name. A value counts when the file was written, not again at every look: one
that nobody refreshes is not measured, and how old it is stands beside it. Write to a temporary file and rename it; one
that is read while it is being written is read again at the next look.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from loadgen import clock
from loadgen.types import Lane, Sample, Seconds
from monitors.prometheus import parse

LANE: Lane = "slow"
PERIOD_S = 1.0

MAX_FILES = 100  # that a pattern may match
MAX_FILE_BYTES = 1 << 20  # a page of metrics is 100 KB
SETTLED_S = 1.0  # a last line without an end may not be all of it: believed when nobody wrote for this long
MAX_SERIES = 1000  # of all files together, a look: each is a line a second in the run folder
MAX_LABELS = 16
MAX_LABEL_CHARS = 200
MAX_NAME_CHARS = 200
# Names that say something else in a run folder.
OURS = frozenset({"observed", "monitor_failed", "tick_lateness_ms", "missed_ticks_total", "age_s", "stale", "bad_lines",
                  "too_many_series", "file_gone"})  # fmt: skip

_NUMBER = re.compile(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[iI]nf|[nN]a[nN])\s*")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_:]")


@dataclass(frozen=True, slots=True)
class Options:
    """`path`: a file or a pattern (`/run/soak/*.prom`, `**` for all folders below). A file that was not written for
    longer than `stale` is said to be stale."""

    path: str = ""
    stale: Seconds = Seconds(60)
    period_s: Seconds = Seconds(1)


@dataclass(slots=True)
class File:
    """What is known of one file: its stamp (time of writing, size, inode) when last read, and what was said of it."""

    stamp: tuple[int, int, int] | None = None
    stale: bool = False
    told_bad: bool = False


@dataclass(slots=True)
class Look:
    """One look at all files: values by name and labels, in order of files."""

    values: list[tuple[str, dict[str, str], float]] = field(default_factory=list)
    notes: list[tuple[str, float, dict[str, str], str]] = field(default_factory=list)
    ages: list[tuple[str, float]] = field(default_factory=list)
    problem: str = ""
    found: int = 0


def numbers(text: str, name: str) -> tuple[list[tuple[str, dict[str, str], float]], int, str]:
    """The values of one file called `name`, how many of its lines are none, and the first of them."""
    bare = _NUMBER.fullmatch(text)
    if bare is not None:
        return [(_NOT_IN_NAMES.sub("_", name) or "value", {}, float(bare[1]))], 0, ""
    page = parse(text)
    out: list[tuple[str, dict[str, str], float]] = []
    bad, first = page.bad_lines, page.first_bad
    for metric, series in page.series.items():
        for pairs, value in series.items():
            labels = dict(pairs)
            if (
                metric in OURS
                or len(metric) > MAX_NAME_CHARS
                or len(labels) > MAX_LABELS
                or any(len(text) > MAX_LABEL_CHARS for text in labels.values())
            ):
                bad += 1
                first = first or metric[:MAX_NAME_CHARS]
            else:
                out.append((metric, labels, value))
    return out, bad, first


def look(pattern: str, known: dict[str, File], stale_s: float, wall_ns: int) -> Look:
    """Read what was written since the look before. `known` carries what was seen from look to look."""
    import glob

    out = Look()
    paths = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if len(paths) > MAX_FILES:
        out.problem = f"{pattern} matches {len(paths)} files, of which the first {MAX_FILES} are read"
    paths = paths[:MAX_FILES]
    for path in [path for path in known if path not in paths]:
        del known[path]
        out.notes.append(("file_gone", 1.0, {"file": os.path.basename(path)}, f"{path} is gone"))  # noqa: PTH119
    for path in paths:
        file = known.setdefault(path, File())
        name = os.path.basename(path)  # noqa: PTH119
        try:
            age_s = _read(path, name, file, out, wall_ns)
        except OSError as error:
            out.problem = out.problem or f"{path}: {error.strerror}"
            continue
        if age_s is None:
            continue
        out.found += 1
        out.ages.append((name, age_s))
        if age_s > stale_s and not file.stale:
            out.notes.append(("stale", age_s, {"file": name}, f"{path} was written {age_s:.0f} s ago"))
        file.stale = age_s > stale_s
    if len(out.values) > MAX_SERIES:
        text = f"{len(out.values)} series, of which the first {MAX_SERIES} are kept"
        out.notes.append(("too_many_series", float(len(out.values)), {}, text))
        del out.values[MAX_SERIES:]
    return out


def _read(path: str, name: str, file: File, out: Look, wall_ns: int) -> float | None:
    """How old the file is in seconds, or None for what is no file. Values and complaints go into `out`."""
    import stat

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            return None
        age_s = max(0.0, (wall_ns - before.st_mtime_ns) / 1e9)
        stamp = (before.st_mtime_ns, before.st_size, before.st_ino)
        if stamp == file.stamp:
            return age_s
        data = os.read(fd, MAX_FILE_BYTES + 1)
        after = os.fstat(fd)
    finally:
        os.close(fd)
    if (after.st_mtime_ns, after.st_size, after.st_ino) != stamp:
        return age_s  # it is being written: next time
    if not data.endswith(b"\n") and len(data) <= MAX_FILE_BYTES and age_s < SETTLED_S:
        return age_s
    file.stamp = stamp
    if len(data) > MAX_FILE_BYTES:
        out.notes.append(("bad_lines", 1.0, {"file": name}, f"{path} is longer than {MAX_FILE_BYTES >> 20} MiB"))
        return age_s
    values, bad, first = numbers(data.decode("utf-8", "replace"), os.path.splitext(name)[0])  # noqa: PTH122
    out.values += [(metric, {**labels, "file": name}, value) for metric, labels, value in values]
    if bad and not file.told_bad:
        file.told_bad = True
        out.notes.append(("bad_lines", float(bad), {"file": name}, f"{path}: {bad} bad lines, the first: {first}"))
    return age_s


async def watch(options: Options) -> AsyncIterator[list[Sample]]:
    """The files' numbers with the label `file`, `age_s` of each; happenings stale, bad_lines (once a file), file_gone,
    too_many_series."""
    import asyncio

    if not options.path:
        text = "say which files: monitors: {textfile: {path: /run/soak/*.prom}}"
        yield [Sample("textfile", "observed", 0.0, clock.now_ns(), text=text)]
        return
    known: dict[str, File] = {}
    told: str | None = None
    told_many = False
    while True:
        # in a thread: a network volume that hangs would stop the whole lane
        seen = await asyncio.to_thread(look, options.path, known, options.stale, clock.wall_ns())
        now = clock.now_ns()
        out: list[Sample] = []
        problem = seen.problem or ("" if seen.found else f"no file is called {options.path}")
        if problem != told:
            told = problem
            text = problem or f"{seen.found} files: {options.path}"
            out.append(Sample("textfile", "observed", float(seen.found > 0), now, text=text))
        for metric, value, labels, text in seen.notes:
            if metric != "too_many_series" or not told_many:
                out.append(Sample("textfile", metric, value, now, labels, text))
            told_many = told_many or metric == "too_many_series"
        out += [Sample("textfile", metric, value, now, labels) for metric, labels, value in seen.values]
        out += [Sample("textfile", "age_s", age_s, now, {"file": name}) for name, age_s in seen.ages]
        yield out
