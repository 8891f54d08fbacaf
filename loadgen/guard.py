"""The guard over the server's host: samples in, levels out, so that a load stops before the host dies of it.

calm → warn → stop (issue nothing more) → abort (cut our own requests as well). A pure state machine: time is that of
the samples, it reads no clock and no file, so a recorded death is replayed in a test as it happened. It runs in the
fast lane, which has the memory ten times a second and survives longest. Standard library only. Until it is armed it
learns what MemAvailable is while the server idles (the baseline B); it judges nothing then.

A server that went away and boots again takes far more memory than when it serves, with driver lines that mean nothing:
a normal start has been seen to dip to 10 GiB of 121.7. Until it has answered again nothing but a warning is said.

Floors are relative, for absolute ones do not port between machines: 6 GiB killed healthy servers, and some serve for
days at 1.5 GiB of 121.7. `lines` turns B into the three floors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from loadgen.types import Guards, Sample

Level: TypeAlias = Literal["calm", "warn", "stop", "abort"]
Word: TypeAlias = Literal["hold", "release", "abort"]

GIB = 1 << 30
S = 1_000_000_000
MONITOR = "guard"

# What a level asks of the load. `warn` asks nothing: the journal becomes denser.
WORDS: dict[Level, Word] = {"calm": "release", "stop": "hold", "abort": "abort"}
# A slope over less than this is noise: MemAvailable moves by some 100 MB from tick to tick while a cache is refilled.
SLOPE_LEAST_NS = S
# A fall that has come to rest is no forecast: in the last half second it must go on at a quarter of the slope or more.
STILL_NS, STILL_SHARE = S // 2, 0.25
# MemAvailable must come this far over the warning line before all is calm again: no level flaps at its line.
CALM_FACTOR = 1.05
# Idle readings kept for the baseline: ten minutes at 10 Hz. The newest count.
MAX_IDLE = 6000


@dataclass(frozen=True, slots=True)
class Lines:
    """MemAvailable in bytes: warn below, stop below, and the depth that a fall must not reach."""

    warn: float
    stop: float
    reach: float


def lines(options: Guards, baseline: float) -> Lines:
    """The floors for a server that idles at `baseline` bytes: shares of it, at least the absolute floors; but never
    more than `most` of it, or a server that idles below a floor would be condemned before its first request."""
    warn_most, stop_most, reach_most = options.most
    return Lines(
        min(max(options.warn_gib * GIB, options.warn_share * baseline), warn_most * baseline),
        min(max(options.stop_gib * GIB, options.stop_share * baseline), stop_most * baseline),
        min(options.reach_gib * GIB, reach_most * baseline),
    )


def low(values: Iterable[float]) -> float | None:
    """The 5th percentile, a value that was seen; None of nothing."""
    ordered = sorted(values)
    return ordered[int(0.05 * (len(ordered) - 1))] if ordered else None


@dataclass(frozen=True, slots=True)
class Decision:
    """A level that was entered, when, and why; `memory` is MemAvailable in bytes at that moment."""

    level: Level
    at_ns: int
    why: str
    memory: float

    def sample(self) -> Sample:
        """As it stands in the samples: `stop` with its reason."""
        return Sample(MONITOR, self.level, self.memory, self.at_ns, text=self.why)


class Guard:
    """Feed every tick's samples to `look`; it says when the level changes. `arm` when the load begins."""

    def __init__(self, options: Guards) -> None:
        self.options = options
        self.level: Level = "calm"
        self.baseline: float | None = None
        self.lines: Lines | None = None
        self._idle: deque[float] = deque(maxlen=MAX_IDLE)
        self._memory: deque[tuple[int, float]] = deque()
        self._stalled: deque[tuple[int, float]] = deque()
        self._swapped: deque[tuple[int, float]] = deque()
        self._refused: tuple[int, str] | None = None
        self._restarts: list[int] = []
        self._looping = False
        self._boot_ns: int | None = None
        self._below_ns: int | None = None
        self._bad_ns: int | None = None
        self._good_ns: int | None = None

    def arm(self, at_ns: int) -> Sample | None:
        """From now on it judges. The baseline, for the samples; None where memory was never seen, and then no guard
        stands."""
        if self.lines is not None:
            return None
        self.baseline = low(self._idle)
        if self.baseline is None:
            return None
        self.lines = lines(self.options, self.baseline)
        self._idle.clear()
        text = (
            f"MemAvailable of the idle server {_gib(self.baseline)}: warn below {_gib(self.lines.warn)}, stop issuing "
            f"below {_gib(self.lines.stop)}"
        )
        return Sample(MONITOR, "baseline", self.baseline, at_ns, text=text)

    def look(self, samples: Iterable[Sample]) -> Decision | None:
        """Takes in what the lane has read; the new level, if it changed."""
        memory: Sample | None = None
        back: Sample | None = None
        for sample in samples:
            if sample.monitor == "host" and sample.text is None:
                if sample.metric == "mem_available_bytes":
                    memory = sample
                elif sample.metric == "psi_memory_full_percent":
                    _keep(self._stalled, sample, self.options.psi_over)
                elif sample.metric == "pswpout_pages_per_s":
                    _keep(self._swapped, sample, self.options.psi_over)
            elif sample.monitor == "kernel" and sample.metric == "nv_no_memory":
                self._refused = (sample.at_ns, sample.text or "")
            elif sample.monitor == "process" and sample.metric == "restart":
                back = sample
                self._boot_ns = sample.at_ns
            elif (sample.monitor, sample.metric, sample.labels.get("role")) == ("process", "process_gone", "listener"):
                self._boot_ns = sample.at_ns
        if back is not None and self.lines is not None and (looping := self._restarted(back)) is not None:
            return looping
        if memory is None:
            return None
        if self.lines is None:
            self._idle.append(memory.value)
            return None
        _keep(self._memory, memory, self.options.slope_over)
        return self._judge(memory.at_ns, memory.value, self.lines)

    def served(self, at_ns: int) -> None:
        """The server gave a good answer at this moment: a boot that began before is over, and time under a floor counts
        from now on."""
        if self._boot_ns is not None and at_ns > self._boot_ns:
            self._boot_ns = self._below_ns = self._bad_ns = None

    def _judge(self, now: int, available: float, at: Lines) -> Decision | None:
        before = self.level
        if before == "abort":  # the load is gone: nothing is left to decide
            return None
        if available >= at.stop:
            self._below_ns = None
        elif self._below_ns is None:
            self._below_ns = now
        falling = self._falling(now, available, at.reach)
        if self._below_ns is None and falling is None:
            self._bad_ns = None
        elif self._bad_ns is None:
            self._bad_ns = now
        if available < at.warn * CALM_FACTOR or falling is not None:
            self._good_ns = None
        elif self._good_ns is None:
            self._good_ns = now

        if self._looping:
            return None
        if before == "stop":
            if self._bad_ns is not None and now - self._bad_ns >= self.options.abort_after * S:
                if self._boot_ns is None and (sign := self._second_sign(now)):
                    why = f"MemAvailable {_gib(available)} for {(now - self._bad_ns) / S:.1f} s, and {sign}"
                    return self._enter("abort", now, why, available)
            elif self._good_ns is not None and now - self._good_ns >= self.options.release_after * S:
                why = f"MemAvailable {_gib(available)} for {self.options.release_after:g} s"
                return self._enter("calm", now, why, available)
            return None
        if self._boot_ns is not None:
            if before == "calm" and (available < at.warn or falling is not None):
                why = f"MemAvailable {_gib(available)} while the server boots, which is recorded only"
                return self._enter("warn", now, why, available)
        elif self._below_ns is not None and now - self._below_ns >= self.options.stop_for * S:
            why = f"MemAvailable {_gib(available)} is below {_gib(at.stop)} for {self.options.stop_for:g} s"
            return self._enter("stop", now, why, available)
        elif falling is not None:
            return self._enter("stop", now, falling, available)
        if before == "calm" and available < at.warn:
            return self._enter("warn", now, f"MemAvailable {_gib(available)} is below {_gib(at.warn)}", available)
        if before == "warn" and self._good_ns is not None:
            return self._enter("calm", now, f"MemAvailable {_gib(available)}", available)
        return None

    def _restarted(self, sample: Sample) -> Decision | None:
        """A server that comes back again and again is let be: on unified memory each death may leave memory behind, and
        a container that restarts by itself has done so until the host was gone. Such a stop is never released."""
        since = sample.at_ns - round(self.options.loop_within * S)
        self._restarts = [*(at for at in self._restarts if at > since), sample.at_ns]
        if self._looping or self.level == "abort" or len(self._restarts) < self.options.loop_restarts:
            return None
        self._looping = True
        stop = "stop whatever starts it again"
        container, engine = sample.labels.get("container"), sample.labels.get("engine", "docker")
        if container and engine in ("docker", "podman"):
            stop = f"`{engine} stop {container[:12]}` ends it"
        elif unit := sample.labels.get("unit"):
            stop = f"`systemctl stop {unit}` ends it"
        times = f"{len(self._restarts)} times within {self.options.loop_within / 60:g} minutes"
        memory = self._memory[-1][1] if self._memory else 0.0
        return self._enter("stop", sample.at_ns, f"the server came back {times}, a crash loop: {stop}", memory)

    def _enter(self, level: Level, now: int, why: str, available: float) -> Decision:
        self.level = level
        return Decision(level, now, why, available)

    def _falling(self, now: int, available: float, reach: float) -> str | None:
        """Whether memory falls so fast that it is at `reach` before long, in words."""
        then_ns, then = self._memory[0]
        if now - then_ns < SLOPE_LEAST_NS:
            return None
        per_s = (then - available) * S / (now - then_ns)
        recent_ns, recent = next((ns, v) for ns, v in reversed(self._memory) if now - ns >= STILL_NS or ns == then_ns)
        if per_s <= 0 or (recent - available) * S / (now - recent_ns) < STILL_SHARE * per_s:
            return None
        left_s = max(0.0, available - reach) / per_s
        if left_s > self.options.reach_within:
            return None
        fall = f"MemAvailable {_gib(available)} falls by {_gib(per_s)} a second"
        return f"{fall}: {_gib(reach)} are reached in {left_s:.1f} s"

    def _second_sign(self, now: int) -> str | None:
        """What else says that this is a death and no server that lives close to its limit."""
        assert self._bad_ns is not None
        if self._refused is not None and self._refused[0] >= self._bad_ns - self.options.abort_after * S:
            return "the driver refused memory"
        since = now - round(self.options.psi_over * S)
        stalled = [value for ns, value in self._stalled if ns > since]
        if stalled and (mean := sum(stalled) / len(stalled)) > self.options.psi_full_percent:
            return f"all tasks stalled on memory {mean:.0f} % of the time"
        pages = max((value for ns, value in self._swapped if ns > since), default=0.0)
        if pages > self.options.swap_out_pages_per_s:
            return f"{pages:.0f} pages/s were swapped out"
        return None


def _keep(readings: deque[tuple[int, float]], sample: Sample, seconds: float) -> None:
    """Adds a reading and drops those that are older than `seconds`, but for the last: after a hole in the readings the
    slope is taken over the hole."""
    readings.append((sample.at_ns, sample.value))
    since = sample.at_ns - round(seconds * S)
    while len(readings) > 2 and readings[1][0] <= since:
        readings.popleft()


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"
