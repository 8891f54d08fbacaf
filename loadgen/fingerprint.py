"""What ran where: the facts without which a result can neither be compared nor believed (`environment.json`).

No host name, no path, no address, no key: a run folder is made to be passed on. What could not be read is absent, and
`not_read` says why. It is read by threads while preflight asks the server, because some of it is slow (the GPU's
driver, the container engine, two looks at who is busy): a run starts no later for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from loadgen import __version__, clock, gpus, machine, plugins, redact, served, strict
from loadgen.preflight import Facts
from loadgen.types import Json, Sample
from monitors import server

# The packages whose version can change what we measure.
PACKAGES = ("uvloop", "httptools", "aiohttp", "orjson", "numpy", "msgspec", "psutil", "nvidia-ml-py")
# After preflight the thread gets this long, and the run begins without what it has not told by then.
WAIT_S = 1.0
# Between two looks at who is busy: shorter than a preflight, and 50 ticks of a CPU's account.
BUSY_S = 0.5
BUSY_PERCENT = 10.0  # of one core
MAX_BUSY = 5
# What one tick of a monitor of the slow lane may take.
TICK_S = 3.0
# Their first tick costs some milliseconds and needs no right that the run would not need.
ASKED = ("process", "cgroup")
# Asked only where the scenario has them: they are opt-in.
ASKED_IF_WATCHED = ("docker", "systemd")
# Of the cgroup what limits it; what it holds is watched.
LIMITS = frozenset({
    "memory_max_bytes", "memory_high_bytes", "memory_limit_bytes", "swap_max_bytes", "memsw_max_bytes", "pids_max",
})  # fmt: skip
CONTAINER_LIMITS = frozenset({
    "memory_limit_bytes", "memory_swap_limit_bytes", "shm_size_bytes", "pids_limit", "cpus_limit",
})  # fmt: skip


@dataclass(slots=True)
class Gathered:
    """What the thread has found so far. `left`: what it has not come to; each fact is complete or absent."""

    machine: Json = field(default_factory=dict)
    gpus: Json = field(default_factory=dict)
    server: Json = field(default_factory=dict)
    others: list[Json] | None = None
    not_read: dict[str, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=lambda: {"machine", "gpus", "server", "others"})
    threads: list[threading.Thread] = field(default_factory=list)


def begin(
    url: str, monitors: Mapping[str, Json], root: str = "/", headers: Mapping[str, str] | None = None
) -> Gathered:
    """Begin to read; returns at once. Daemon threads: one that a stuck driver or disk holds never keeps a run from
    ending."""
    found = Gathered()
    secrets = [
        part for value in (headers or {}).values() for part in (value, value.rpartition(" ")[2]) if len(part) > 5
    ]
    jobs = {
        "machine": lambda: _machine(found, root),
        "gpus": lambda: _gpus(found, root),
        "server": lambda: _server(found, url, monitors, root, secrets),
        "others": lambda: _others(found, url, root),
    }
    for name, job in jobs.items():
        found.threads.append(threading.Thread(target=_run, args=(found, name, job), name=f"read {name}", daemon=True))
        found.threads[-1].start()
    return found


def environment(facts: Facts, argv: list[str], found: Gathered | None = None) -> Json:
    """Clocks, client, server and host, as they stand at the start of a run. Waits at most WAIT_S for `found`; without
    it the machine alone is read, here."""
    if found is None:
        found = Gathered(left=set())
        _machine(found, "/")
    end_ns = clock.now_ns() + round(WAIT_S * 1e9)
    for thread in found.threads:
        thread.join(max(0.0, (end_ns - clock.now_ns()) / 1e9))
    not_read = dict(found.not_read)
    for name in sorted(found.left):
        not_read[name] = "not read in time"
    told = strict.plain(facts)
    if isinstance(told.get("model"), str) and told["model"].startswith(("/", "~", ".")):
        told["model"] = redact.text(told["model"])
    options = found.server.get("options", {})
    model = {
        "revision": facts.revision or options.get("revision"),
        "quantization": facts.quantization or options.get("quantization") or served.quantization(facts.model),
        "dtype": facts.dtype or options.get("dtype"),
        "kv_cache_dtype": options.get("kv_cache_dtype"),
        "draft_model": options.get("draft_model"),
    }
    return {
        "schema": "loadgen.environment/1",
        "started": clock.reading(),
        "client": {
            "loadgen": __version__,
            "python": platform.python_version(),
            "packages": _packages(),
            "arguments": argv,
        },
        "server": {
            **_known(told),
            **_known(model),
            **{key: value for key, value in found.server.items() if key != "options"},
        },
        "host": {
            **found.machine,
            **({"gpu_driver": found.gpus} if found.gpus else {}),
            **({"others": found.others} if found.others is not None else {}),
        },
        "not_read": not_read,
    }


def _run(found: Gathered, name: str, job: Any) -> None:
    try:
        job()
    except Exception as error:  # whatever a foreign tree or driver does: the run goes on without this fact
        found.not_read[name] = redact.text(f"{type(error).__name__}: {error}")
    found.left.discard(name)


def _machine(found: Gathered, root: str) -> None:
    """The machine that the load comes from; usually the server's too."""
    read = machine.read(Path(root))
    plain = strict.plain(read)
    found.not_read |= plain.pop("not_read")
    plain["killers"] = [killer.name for killer in read.killers]
    if root == "/" and read.memory_total_bytes is None:  # a system without /proc
        plain["memory_total_bytes"] = psutil.virtual_memory().total
        plain["swap_total_bytes"] = psutil.swap_memory().total
        found.not_read.pop("memory", None)
    found.machine = _known(plain)


def _gpus(found: Gathered, root: str) -> None:
    if root != "/":
        found.not_read["gpus"] = "the file tree is not this machine's"
        return
    if not gpus.device_file(Path(root)):
        found.not_read["gpus"] = "there is no NVIDIA driver on this machine"
        return
    said = gpus.ask()
    if "not_read" in said:
        found.not_read["gpus"] = redact.text(said["not_read"])
        return
    for device in said.get("gpus", []):  # pids say nothing to a reader elsewhere
        device["processes"] = len(device.get("processes", ()))
    found.gpus = said


def _server(found: Gathered, url: str, monitors: Mapping[str, Json], root: str, secrets: list[str]) -> None:
    """The server's process, its limits and, where its monitors are asked for, its container or unit."""
    process, why = served.find(url, Path(root))
    if process is None:
        found.not_read["server process"] = redact.text(why)
        return
    plain = strict.plain(process)
    found.not_read |= {f"server {name}": why for name, why in plain.pop("not_read").items()}
    for word in ("pid", "start_ticks"):
        plain.pop(word)
    options = plain.pop("options")
    about: Json = {"process": _known(plain), "options": options}
    for name in (*ASKED, *(name for name in ASKED_IF_WATCHED if name in monitors)):
        if name not in ASKED:
            found.server = _without(about, secrets)  # what is slow must not take with it what is known
        given = dict(monitors.get(name) or {})
        for sample in first(name, {"root": root, "target_url": url, **given}):
            if sample.metric == "observed" and sample.value == 0:
                found.not_read[name] = redact.text(sample.text or "")
            elif sample.metric == "observed" and name == "docker":
                about["container"] = _container(sample.labels)
            elif sample.metric == "observed" and name == "systemd":
                about["unit"] = _words(sample.text or "")
            elif name == "cgroup" and sample.metric in LIMITS and not sample.labels:
                about.setdefault("cgroup_limits", {})[sample.metric] = int(sample.value)
            elif name == "docker" and sample.metric in CONTAINER_LIMITS:
                about.setdefault("container_limits", {})[sample.metric] = sample.value
            elif name == "process" and sample.metric == "processes":
                about["process"]["processes"] = int(sample.value)
    for name in ASKED_IF_WATCHED:
        if name not in monitors and (process.container if name == "docker" else process.unit):
            found.not_read[name] = f"opt-in: monitors: {{{name}: {{}}}}"
    found.server = _without(about, secrets)


def _container(labels: Mapping[str, str]) -> Json:
    """Image and digest, policy, project: what makes two containers comparable. A registry may be an address."""
    kept: Json = {
        key: labels[key]
        for key in ("image_digest", "restart_policy", "started_at", "project", "service")
        if key in labels
    }
    if "image" in labels:
        kept["image"] = labels["image"].rpartition("/")[2]
    if "env" in labels:
        kept["settings"] = redact.settings(word for word in labels["env"].split(" ") if "…" not in word)
    return kept


def _words(text: str) -> dict[str, str]:
    """`unit x.service, active, Restart=always, OOMPolicy=stop` → the settings in it, and the unit's name."""
    found = {key: value for part in text.split(", ") for key, is_, value in [part.partition("=")] if is_}
    unit = text.partition(",")[0].removeprefix("unit ")
    return {"name": unit, **found}


def _others(found: Gathered, url: str, root: str) -> None:
    """Who else is at work before the load begins, besides the server's process and ourselves."""
    proc = server.tree(root) / "proc"
    process, _ = served.find(url, Path(root), hashed=False)
    before, began_ns = machine.ticks(proc), clock.now_ns()
    time.sleep(BUSY_S)
    elapsed_s = (clock.now_ns() - began_ns) / 1e9
    after = machine.ticks(proc)
    own = os.getpid()
    ours = {own} | {pid for pid in server.pids(proc) if (stat := server.stat_of(proc, pid)) and stat.parent == own}
    leave_out = ours | (_family(root, process.pid) if process else set())
    busy = machine.busiest(before, after, elapsed_s, leave_out)
    found.others = [
        {"name": redact.text(each.name), "cpu_percent": round(each.cpu_percent)}
        for each in busy[:MAX_BUSY]
        if each.cpu_percent > BUSY_PERCENT
    ]


def _family(root: str, pid: int) -> set[int]:
    samples = first("process", {"root": root, "pid": pid})
    return {pid} | {int(sample.labels["pid"]) for sample in samples if "pid" in sample.labels}


def first(name: str, given: Json) -> list[Sample]:
    """The first tick of a monitor, in this process: for those that read files or ask with a limit of their own."""
    module = plugins.load("monitors", name)
    known = {key: value for key, value in given.items() if key in module.Options.__dataclass_fields__}
    ticks = module.watch(module.Options(**known))
    if not hasattr(ticks, "__anext__"):
        with contextlib.closing(ticks):
            return list(next(ticks, []))

    async def once() -> list[Sample]:
        async with contextlib.aclosing(ticks):
            try:
                async with asyncio.timeout(TICK_S):
                    return list(await anext(ticks, []))
            except TimeoutError:
                return [Sample(name, "observed", 0.0, clock.now_ns(), text=f"no answer within {TICK_S:g} s")]

    return asyncio.run(once())


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):  # a distribution may leave one out
            found[name] = metadata.version(name)
    return found


def _known(found: Json) -> Json:
    """Without what is not known: None, empty words, lists and tables."""
    return {key: value for key, value in found.items() if value is not None and value not in ("", [], {}, ())}


def _without(value: Any, secrets: list[str]) -> Any:
    """The same with our own keys blacked out, wherever the server repeats them."""
    if isinstance(value, dict):
        return {key: _without(each, secrets) for key, each in value.items()}
    if isinstance(value, list):
        return [_without(each, secrets) for each in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, redact.HIDDEN)
    return value
