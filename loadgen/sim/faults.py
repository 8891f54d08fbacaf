"""What can be made to go wrong, when, and how a script or the admin endpoint says so. Nothing happens here.

Times are seconds of the engine, so one script works at any time scale. A script is YAML:

    faults:
      - {at: 300s, kind: crash, restart_after: 20s}
      - {after_requests: 50, kind: corrupt, how: loop, requests: 3}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from loadgen import strict
from loadgen.sim.config import read_yaml
from loadgen.types import Seconds, UserError

Corruption = Literal["exclaim", "loop", "wrong_answer", "swapped", "cut_json", "reasoning_only", "jumbled", "empty"]


@dataclass(frozen=True, slots=True)
class Crash:
    """The process dies at once. Under `--supervised` the port comes back, with a new pid, after `restart_after`."""

    restart_after: Seconds | None = None
    how: Literal["kill", "exit"] = "kill"


@dataclass(frozen=True, slots=True)
class Restart:
    """An orderly end, as by SIGTERM: running requests are cut. The port comes back after `restart_after`."""

    restart_after: Seconds = Seconds(5)


@dataclass(frozen=True, slots=True)
class Hang:
    """Requests are accepted and nothing leaves; `/health` says 200. None: for good."""

    duration: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """All streams pause once."""

    duration: Seconds = Seconds(5)


@dataclass(frozen=True, slots=True)
class SlowDown:
    """Every step takes `factor` times as long. None: for good."""

    factor: float = 2.0
    duration: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Leak:
    """From now on each finished request leaves so much claimed memory behind."""

    bytes_per_request: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Wrong answers with status 200: `requests` of them (None: all), with at least `min_prompt_tokens`."""

    how: Corruption = "exclaim"
    requests: int | None = None
    min_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error event inside a stream that began with status 200."""

    requests: int | None = 1
    after_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Truncate:
    """The stream just ends: cut off mid-body, or (`clean`) in good order but without finish reason and `[DONE]`."""

    requests: int | None = 1
    after_tokens: int = 1
    clean: bool = False


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Status 503 (or 429), with Retry-After where `retry_after` is given."""

    requests: int | None = None
    duration: Seconds | None = None
    retry_after: Seconds | None = None
    status: Literal[429, 503] = 503


@dataclass(frozen=True, slots=True)
class Oom:
    """Memory is taken in steps until somebody ends it: a memory cgroup's limit, or `up_to_mib`."""

    step_mib: int = 64
    period: Seconds = Seconds(0.1)
    up_to_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Wedge:
    """On the fixture machine MemFree collapses while MemAvailable stays, the driver complains, then all is silent;
    after `reboot_after` (None: never) the process dies and the machine has a new boot id."""

    collapse: Seconds = Seconds(2)
    available_gib: float = 12.0
    driver_lines: int = 40
    reboot_after: Seconds | None = Seconds(30)
    restart_after: Seconds | None = None


Action: TypeAlias = (
    Crash | Restart | Hang | Stall | SlowDown | Leak | Corrupt | StreamError | Truncate | Unavailable | Oom | Wedge
)

KINDS: dict[str, type[Action]] = {
    "crash": Crash, "restart": Restart, "hang": Hang, "stall": Stall, "slow_down": SlowDown, "leak": Leak,
    "corrupt": Corrupt, "stream_error": StreamError, "truncate": Truncate, "unavailable": Unavailable, "oom": Oom,
    "wedge": Wedge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One action and when it is due: at a time since the start, or when so many requests have ended."""

    action: Action
    at_s: float | None = None
    after_requests: int | None = None

    @property
    def kind(self) -> str:
        return next(name for name, kind in KINDS.items() if isinstance(self.action, kind))


def load_script(path: Path) -> tuple[Fault, ...]:
    """The faults of a YAML script, or one line that says what is wrong with it."""
    document = read_yaml(path)
    for key in document:
        if key != "faults":
            raise UserError(f'{path}: unknown key "{key}"{strict.nearest(str(key), ["faults"])}')
    entries = document.get("faults") or []
    if not isinstance(entries, list):
        raise UserError(f"{path}: faults: expected a list")
    return tuple(fault(entry, f"{path}: faults.{index}") for index, entry in enumerate(entries))


def fault(entry: object, where: str) -> Fault:
    """One entry of a script: `at` or `after_requests` (neither: at once), `kind`, and the kind's own options."""
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: expected a mapping with kind")
    options = dict(entry)
    name = options.pop("kind", None)
    at, after = options.pop("at", None), options.pop("after_requests", None)
    if not isinstance(name, str) or name not in KINDS:
        raise UserError(f'{where}: unknown kind "{name}"{strict.nearest(str(name), KINDS)}')
    if at is not None and after is not None:
        raise UserError(f"{where}: at and after_requests exclude each other")
    if after is not None and (isinstance(after, bool) or not isinstance(after, int) or after < 0):
        raise UserError(f"{where}: after_requests: expected a number of requests, got {after!r}")
    try:
        at_s = None if at is None else float(strict.seconds(at))
        action = strict.build(KINDS[name], options)
    except ValueError as error:
        raise UserError(f"{where}: at: {error}") from None
    except strict.StrictError as error:
        raise strict.as_user_error(error, where) from None
    if isinstance(action, SlowDown) and not action.factor > 0:
        raise UserError(f"{where}: factor: expected a number above 0, got {action.factor}")
    if isinstance(action, Oom) and (action.step_mib < 1 or action.period <= 0):
        raise UserError(f"{where}: step_mib and period must be above 0")
    return Fault(action, 0.0 if at_s is None and after is None else at_s, after)
