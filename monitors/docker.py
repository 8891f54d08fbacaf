"""The server's container as its engine knows it: state, exit code, OOM flag, restarts, health; Docker or Podman.

Opt-in, because whoever may use that socket is as good as root on the host; this monitor only reads. The stream of
events is the primary source (an auto-restarted container shows its new life a moment later), inspect every few seconds
the second. What the engine says proves nothing alone: `OOMKilled` is missing after real OOM kills and true after
survived ones, and 137 is any SIGKILL. So the flag, the code and who sent a signal are reported side by side, and the
rules hold them against the kernel's word. Of environment variables only known settings of engines show their value.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from loadgen import clock
from loadgen.types import Json, Lane, Sample, Seconds
from monitors import server

if TYPE_CHECKING:
    import aiohttp

LANE: Lane = "slow"
PERIOD_S = 1.0
DEADLINE_S = 2.0  # the engine answers in milliseconds; four calls in a row must fit into a tick of the lane
RETRY_S = 15.0  # an engine that is not there, or that we may not ask, is asked again this often, and told once
RECONNECT_S = 1.0  # pause before the stream of events is opened again
MAX_BODY_BYTES = 8 << 20  # a listing of a thousand containers has 2 MiB
MAX_EVENT_BYTES = 1 << 16  # of one event; labels make them long, 4 KiB is much
MAX_WAITING = 256  # events between two ticks; health checks of a busy host make some dozens
SIGNAL_COUNTS_NS = 60_000_000_000  # a container that ends this long after a signal ended of something else
EVENT_WAIT_NS = 1_000_000_000  # what inspect shows waits this long for the event that tells it better
MAX_HAPPENINGS = 20  # a tick; the flood of a crash loop says nothing new
OUR_API = (1, 44)  # the fields that we read are older; Docker 29 refuses to speak anything below
NEVER = "0001-01-01"  # Go's zero time: it did not happen
PERMISSION = "the socket is as good as root: run as root, or `sudo usermod -aG docker $USER` and log in again"

# action of an event → happening; Podman calls the end of a container `died`
ACTIONS = {
    "oom": "oom",
    "die": "exited",
    "died": "exited",
    "kill": "killed",
    "start": "started",
    "restart": "restarted",
    "health_status": "health",
    "pause": "paused",
    "unpause": "unpaused",
    "destroy": "removed",
    "remove": "removed",
}
SIGNALS = {"1": "SIGHUP", "2": "SIGINT", "3": "SIGQUIT", "6": "SIGABRT", "9": "SIGKILL", "15": "SIGTERM"}
# Settings of engines whose values explain a speed; what looks like a secret or a path is left out even here.
SETTINGS = re.compile(r"^(?:VLLM|SGLANG|SGL|LLAMA_ARG|NCCL|CUDA|NVIDIA|TORCH|PYTORCH|OMP|FLASHINFER|HSA|ROCR|HIP)_")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|COOKIE", re.IGNORECASE)
PLAIN = re.compile(r"[\w.,:+=-]{1,64}")
MAX_SETTINGS = 40


@dataclass(frozen=True, slots=True)
class Options:
    """`socket`: the engine's Unix socket, "" for the usual places; `container`: id or name; `project` and `service`:
    the labels of Docker Compose. Without any of them the container is the one that serves the target's port.
    `required`: a run that may not ask the engine does not begin."""

    root: str = "/"
    target_url: str = ""
    socket: str = ""
    container: str = ""
    project: str = ""
    service: str = ""
    inspect_every: Seconds = Seconds(5)
    required: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """One inspect. `exit_code` is None while it runs: the engine shows 0 there, which nobody measured; a limit is None
    where there is none."""

    id: str
    name: str
    status: str
    running: bool
    restarting: bool
    oom_killed: bool
    exit_code: int | None
    error: str
    pid: int | None
    started_at: str | None
    finished_at: str | None
    restart_count: int | None
    health: str
    failing_streak: int | None
    restart_policy: str
    image: str
    image_id: str
    project: str
    service: str
    limits: dict[str, float]
    env: str

    @property
    def never_started(self) -> bool:
        """Made, and failed before its first instruction."""
        return self.started_at is None and not self.running and (bool(self.error) or bool(self.exit_code))

    def labels(self) -> dict[str, str]:
        return {"container": self.id, "name": self.name}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine answered; status 0 and why where it did not. `denied`: we may not ask."""

    status: int
    body: Any = None
    why: str = ""
    denied: bool = False


@dataclass(slots=True)
class Stream:
    """Events that nobody has looked at yet. `up`: somebody listens; `last_ns`: wall time of the last one."""

    waiting: deque[Json] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    up: bool = False
    last_ns: int = 0


@dataclass(slots=True)
class Known:
    """What has been said so far. `heard`: when events brought each happening last; `unheard`: what only inspect showed
    and since when, which waits for its event; `inspected_ns`: when the last inspect was asked for."""

    look: Look | None = None
    heard: dict[str, int] = field(default_factory=dict)
    unheard: list[tuple[int, Sample]] = field(default_factory=list)
    inspected_ns: int = 0
    signal: str = ""
    signal_ns: int = 0
    health: str = ""
    failed: int = 0
    failing: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# What the engine says, in our words


def look_of(inspect: Json) -> Look:
    """An inspect, whatever is missing in it: Podman and old engines leave things out."""

    def part(of: Any, key: str) -> Json:
        found = of.get(key) if isinstance(of, dict) else None
        return found if isinstance(found, dict) else {}

    state, host, config = part(inspect, "State"), part(inspect, "HostConfig"), part(inspect, "Config")
    health = part(state, "Health") or part(state, "Healthcheck")
    labels = part(config, "Labels")
    running = bool(state.get("Running"))
    status = str(state.get("Status") or ("running" if running else "exited"))
    policy = part(host, "RestartPolicy")
    tries = whole(policy.get("MaximumRetryCount"))
    cpus = whole(host.get("NanoCpus"))
    limits = {
        "memory_limit_bytes": whole(host.get("Memory")),
        "memory_swap_limit_bytes": whole(host.get("MemorySwap")),
        "shm_size_bytes": whole(host.get("ShmSize")),
        "pids_limit": whole(host.get("PidsLimit")),
        "cpus_limit": cpus / 1e9 if cpus else None,
    }
    return Look(
        id=str(inspect.get("Id", "")),
        name=str(inspect.get("Name", "")).lstrip("/"),
        status=status,
        running=running,
        restarting=bool(state.get("Restarting")),
        oom_killed=bool(state.get("OOMKilled")),
        exit_code=None if running else whole(state.get("ExitCode")),
        error=" ".join(str(state.get("Error") or "").split())[:300],
        pid=whole(state.get("Pid")) or None,
        started_at=moment(state.get("StartedAt")),
        finished_at=moment(state.get("FinishedAt")),
        restart_count=whole(inspect.get("RestartCount")),
        health=str(health.get("Status") or ""),
        failing_streak=whole(health.get("FailingStreak")),
        restart_policy=f"{policy.get('Name') or 'no'}{f':{tries}' if tries else ''}",
        image=str(config.get("Image") or ""),
        image_id=str(inspect.get("Image") or ""),
        project=str(labels.get("com.docker.compose.project") or ""),
        service=str(labels.get("com.docker.compose.service") or ""),
        # 0 and -1 say "no limit"
        limits={name: float(limit) for name, limit in limits.items() if limit is not None and limit > 0},
        env=settings(config.get("Env")),
    )


def whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def moment(value: Any) -> str | None:
    """A time as the engine writes it; None for Go's zero."""
    return None if not isinstance(value, str) or not value or value.startswith(NEVER) else value


def settings(env: Any) -> str:
    """Environment variables that may be passed on: values of engine settings, of all others the name alone."""
    said = []
    for entry in sorted(map(str, env)) if isinstance(env, list) else ():
        name, _, value = entry.partition("=")
        open_ = SETTINGS.match(name) and not SECRET.search(name) and PLAIN.fullmatch(value)
        said.append(f"{name}={value if open_ else '…'}")
    return " ".join(said[:MAX_SETTINGS])


def about(look: Look, digest: str, engine: str) -> str:
    """Which container it is, for the report."""
    image = f"{look.image}{f' ({digest})' if digest else ''}" or look.image_id
    said = [f"container {look.name} ({look.id[:12]})", f"image {image}", f"restart policy {look.restart_policy}"]
    if look.started_at:
        said.append(f"started {look.started_at[:19]}Z")
    if look.oom_killed:
        said.append("OOMKilled already true")
    return ", ".join([*said, engine])


def facts(look: Look, digest: str) -> dict[str, str]:
    """The same as labels."""
    known = {
        "pid": str(look.pid or ""), "image": look.image, "image_digest": digest or look.image_id,
        "restart_policy": look.restart_policy, "started_at": look.started_at or "", "status": look.status,
        "project": look.project, "service": look.service, "env": look.env,
    }  # fmt: skip
    return {**look.labels(), **{key: value for key, value in known.items() if value}}


def figures(look: Look, now: int) -> list[Sample]:
    """An inspect as numbers."""
    values: dict[str, float | None] = {
        "running": float(look.running),
        "restarting": float(look.restarting),
        "oom_killed": float(look.oom_killed),
        "exit_code": None if look.exit_code is None or look.started_at is None else float(look.exit_code),
        "main_pid": None if look.pid is None else float(look.pid),
        "restart_count": None if look.restart_count is None else float(look.restart_count),
        "healthy": None if look.health not in ("healthy", "unhealthy") else float(look.health == "healthy"),
        "health_failing_streak": None if look.failing_streak is None else float(look.failing_streak),
        **look.limits,
    }
    return [Sample("docker", name, value, now) for name, value in values.items() if value is not None]


def differences(before: Look | None, look: Look, now: int) -> list[Sample]:
    """What happened between two looks, or before the first."""
    out: list[Sample] = []
    if look.never_started and (before is None or not before.never_started):
        text = f"container {look.name} never started: {look.error or 'no reason given'} (exit code {look.exit_code})"
        return [happening("never_started", look, now, text, exit_code=str(look.exit_code))]
    if before is None:  # what it went through before we looked is no event of this run
        return out
    again = look.started_at is not None and (look.started_at, look.id) != (before.started_at, before.id)
    if before.running and (not look.running or again):
        seen = None if again else look
        out.append(happening("exited", look, now, ended(look, seen), **end_labels(seen)))
    if again:
        out.append(happening("started", look, now, f"container {look.name} started anew at {look.started_at}"))
    if (look.restart_count or 0) > (before.restart_count or 0):
        text = f"the engine restarted container {look.name} ({look.restart_count} times so far)"
        out.append(happening("restarted", look, now, text, restart_count=str(look.restart_count)))
    if look.oom_killed and not before.oom_killed:
        still = "and it still runs" if look.running else f"exit code {look.exit_code}"
        out.append(happening("oom_flag", look, now, f"OOMKilled of container {look.name} turned true, {still}"))
    if look.health and before.health and look.health != before.health:
        out.append(happening("health", look, now, f"container {look.name} is {look.health}", status=look.health))
    return out


def ended(look: Look, seen: Look | None) -> str:
    """How a container ended, by an inspect of the dead one; None where its next life is all that we saw."""
    if seen is None:
        return f"container {look.name} exited (exit code and OOMKilled unknown: it runs again)"
    error = f", error: {seen.error}" if seen.error else ""
    return f"container {look.name} exited (exit code {seen.exit_code}, OOMKilled {str(seen.oom_killed).lower()}{error})"


def end_labels(seen: Look | None) -> dict[str, str]:
    if seen is None:
        return {}
    code = {} if seen.exit_code is None else {"exit_code": str(seen.exit_code)}
    return {**code, "oom_killed": str(seen.oom_killed).lower()}


def happening(metric: str, look: Look, now: int, text: str, source: str = "inspect", **more: str) -> Sample:
    return Sample("docker", metric, 1.0, now, {**look.labels(), "source": source, **more}, text)


# ---------------------------------------------------------------------------------------------------------------------
# Events


def concerns(event: Json, look: Look) -> bool:
    """Whether an event is about the server: its container, or the one that takes its name or its place in Compose."""
    actor = event.get("Actor")
    if event.get("Type", "container") != "container" or not isinstance(actor, dict):
        return False
    said = actor.get("Attributes")
    attributes = said if isinstance(said, dict) else {}
    if look.id and actor.get("ID") == look.id:
        return True
    if look.name and attributes.get("name") == look.name:
        return True
    label = "com.docker.compose."
    return bool(look.project and look.service) and (
        (attributes.get(f"{label}project"), attributes.get(f"{label}service")) == (look.project, look.service)
    )


def told(event: Json, look: Look, known: Known, now_ns: int, wall_ns: int) -> Sample | None:
    """An event as a happening, at its own time; None for those that say nothing of the server's life."""
    action, _, rest = str(event.get("Action") or event.get("status") or "").partition(":")
    name = ACTIONS.get(action.strip())
    if name is None:
        return None
    attributes: Json = (event.get("Actor") or {}).get("Attributes") or {}
    at = now_ns - max(0, wall_ns - stamp(event))
    labels: dict[str, str] = {}
    who = f"container {look.name}"
    text = f"{who}: {action}"
    if name == "killed":
        number = str(attributes.get("signal") or "")
        known.signal = labels["signal"] = SIGNALS.get(number, number)
        known.signal_ns = at
        text = f"{known.signal or 'a signal'} was sent to {who} through the engine"
    elif name == "exited":
        code = str(attributes.get("exitCode") or attributes.get("containerExitCode") or "")
        signal = known.signal if at - known.signal_ns < SIGNAL_COUNTS_NS else ""
        labels = {"exit_code": code, "signal": signal}
        text = f"{who} exited (exit code {code or 'unknown'})"
        text += f" after {signal} was sent through the engine" if signal else ""
        known.signal = ""
    elif name == "health":
        labels["status"] = rest.strip() or str(attributes.get("health_status") or event.get("HealthStatus") or "")
        if labels["status"] == known.health:  # Podman tells the result of every check
            return None
        known.health = labels["status"]
        text = f"{who} is {labels['status'] or 'in an unknown state'}"
    elif name == "oom":
        text = f"{who} is out of memory, says its engine"
    labels = {key: value for key, value in labels.items() if value}
    return happening(name, look, at, text, "events", **labels)


def stamp(event: Json) -> int:
    """When it happened, in wall nanoseconds; 0 where the event does not say."""
    nanos, seconds = whole(event.get("timeNano")), whole(event.get("time"))
    return nanos or (seconds or 0) * 1_000_000_000


async def follow(session: aiohttp.ClientSession, base: str, stream: Stream) -> None:
    """Keep the stream of events open; after a break it goes on where it ended. Ends only when cancelled."""
    import aiohttp

    while True:
        query = {"filters": json.dumps({"type": ["container"]})}
        if stream.last_ns:
            after_ns = stream.last_ns + 1
            query["since"] = f"{after_ns // 10**9}.{after_ns % 10**9:09d}"
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            limit = aiohttp.ClientTimeout(total=None, sock_connect=DEADLINE_S)
            async with session.get(f"{base}/events", params=query, timeout=limit) as response:
                if response.status == 200:
                    stream.up = True
                    rest = b""
                    async for data in response.content.iter_any():
                        *whole_lines, rest = (rest + data).split(b"\n")
                        rest = rest if len(rest) < MAX_EVENT_BYTES else b""
                        for line in whole_lines:
                            heard(stream, line)
        stream.up = False
        await asyncio.sleep(RECONNECT_S)


def heard(stream: Stream, line: bytes) -> None:
    """One line of the stream. What is no event is passed over: inspect sees what it may have meant."""
    try:
        event = json.loads(line)
    except ValueError:
        return
    if isinstance(event, dict):
        stream.last_ns = max(stream.last_ns, stamp(event))
        stream.waiting.append(event)


# ---------------------------------------------------------------------------------------------------------------------
# Asking


def sockets(options: Options) -> list[str]:
    """Where the engine may listen, likeliest first."""
    if options.socket:
        return [options.socket.removeprefix("unix://")]
    host = os.environ.get("DOCKER_HOST", "")
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    usual = ["var/run/docker.sock", "run/podman/podman.sock"]
    usual += [f"{own.lstrip('/')}/{name}" for name in ("docker.sock", "podman/podman.sock") if own]
    given = [host.removeprefix("unix://")] if host.startswith("unix://") else []
    return given + [str(Path(options.root) / path) for path in usual]


async def ask(session: aiohttp.ClientSession, path: str, **query: str) -> Answer:
    """One GET. Never raises for what the engine does."""
    import aiohttp

    try:
        async with session.get(path, params=query) as response:
            data = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    return Answer(response.status, why=f"more than {MAX_BODY_BYTES >> 20} MiB")
            try:
                body = json.loads(data)
            except ValueError:
                return Answer(response.status, why="its answer is no JSON")
            said = body.get("message", "") if isinstance(body, dict) and response.status >= 400 else ""
            return Answer(
                response.status, body, f"HTTP {response.status} {said}".strip(), response.status in (401, 403)
            )
    except TimeoutError:
        return Answer(0, why=f"no answer within {DEADLINE_S:g} s")
    except aiohttp.ClientConnectorError as error:
        denied = isinstance(error.os_error, PermissionError)
        return Answer(0, why=error.os_error.strerror or str(error.os_error), denied=denied)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Answer(0, why=" ".join(str(error).split()) or type(error).__name__)


def version_of(said: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def agreed(version: Json) -> str:
    """The version of the API that both sides speak: the engine's, but no newer than ours unless it insists."""
    theirs = version_of(str(version.get("ApiVersion", ""))) or OUR_API
    least = version_of(str(version.get("MinAPIVersion", ""))) or (0, 0)
    major, minor = max(min(theirs, OUR_API), least)
    return f"v{major}.{minor}"


def engine_of(version: Json, api: str) -> str:
    """`Docker 28.2.2, API v1.44`."""
    parts = version.get("Components")
    named = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    podman = any("podman" in str(part.get("Name", "")).lower() for part in named)
    return f"{'Podman' if podman else 'Docker'} {version.get('Version', '?')}, API {api}"


async def which(session: aiohttp.ClientSession, base: str, options: Options) -> tuple[Look | None, str]:
    """The server's container, or why it cannot be told."""
    if options.container:
        answer = await ask(session, f"{base}/containers/{quote(options.container, safe='')}/json")
        if answer.status == 200 and isinstance(answer.body, dict):
            return look_of(answer.body), ""
        return None, f"no container {options.container}: {answer.why}"
    if options.project or options.service:
        labels = [f"com.docker.compose.{key}={value}" for key, value in
                  (("project", options.project), ("service", options.service)) if value]  # fmt: skip
        answer = await ask(session, f"{base}/containers/json", all="1", filters=json.dumps({"label": labels}))
        return await newest(session, base, answer, f"no container with the labels {', '.join(labels)}")
    port, why = server.port_of(options.target_url)
    if why:
        return None, why
    root = server.tree(options.root)
    found = await asyncio.to_thread(server.find, root / "proc", port)
    container = server.place(root / "proc", found.listener.pid).container if found.listener else ""
    if container:
        answer = await ask(session, f"{base}/containers/{container}/json")
        if answer.status == 200 and isinstance(answer.body, dict):
            return look_of(answer.body), ""
    # a port that the engine publishes is told by the engine, where we may not look into processes
    answer = await ask(session, f"{base}/containers/json")
    return await newest(
        session, base, answer, f"no container serves port {port} ({found.why or 'a plain process does'})", port
    )


async def newest(
    session: aiohttp.ClientSession, base: str, answer: Answer, why: str, port: int = 0
) -> tuple[Look | None, str]:
    """Of the containers of a listing (that publish a port) a running one, else the one made last."""
    if answer.status != 200 or not isinstance(answer.body, list):
        return None, f"{why}: {answer.why}"
    listed = [each for each in answer.body if isinstance(each, dict) and each.get("Id")]
    if port:
        listed = [
            each for each in listed
            if any(isinstance(p, dict) and p.get("PublicPort") == port for p in each.get("Ports") or [])
        ]  # fmt: skip
    if not listed:
        return None, why
    best = max(listed, key=lambda each: (each.get("State") == "running", whole(each.get("Created")) or 0))
    inspect = await ask(session, f"{base}/containers/{best['Id']}/json")
    if inspect.status != 200 or not isinstance(inspect.body, dict):
        return None, f"{why}: {inspect.why}"
    return look_of(inspect.body), ""


async def digest_of(session: aiohttp.ClientSession, base: str, look: Look) -> str:
    """The image's digest in its registry; "" where it was built here."""
    answer = await ask(session, f"{base}/images/{look.image_id or look.image}/json")
    digests = answer.body.get("RepoDigests") if answer.status == 200 and isinstance(answer.body, dict) else None
    return str(digests[0]).rpartition("@")[2] if isinstance(digests, list) and digests else ""


# ---------------------------------------------------------------------------------------------------------------------
# Watching


@contextlib.asynccontextmanager
async def connected(path: str) -> AsyncIterator[aiohttp.ClientSession]:
    import aiohttp

    connector = aiohttp.UnixConnector(path=path, limit=4)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession("http://localhost", connector=connector, timeout=timeout) as session:
        yield session


async def reach(options: Options) -> tuple[str, str, str]:
    """The first socket behind which an engine answers, the API's path and the engine's name; or "", "" and why not."""
    tried: list[str] = []
    denied = False
    for path in sockets(options):
        async with connected(path) as session:
            answer = await ask(session, "/version")
        if answer.status == 200 and isinstance(answer.body, dict):
            api = agreed(answer.body)
            return path, f"/{api}", engine_of(answer.body, api)
        denied = denied or answer.denied
        tried.append(f"{path}: {answer.why}")
    return "", "", f"{'; '.join(tried)}{f' ({PERMISSION})' if denied else ''}"


async def preflight(options: Options) -> str | None:
    """Why no load should be sent: the engine may not be asked though the run requires it, or the container never
    started. None where nothing speaks against it."""
    path, base, why = await reach(options)
    if not path:
        return f"the container engine cannot be asked: {why}" if options.required else None
    async with connected(path) as session:
        look, why = await which(session, base, options)
    if look is None:
        return why if options.required else None
    if look.never_started:
        return f"container {look.name} never started: {look.error or 'no reason given'} (exit code {look.exit_code})"
    return None


async def watch(options: Options) -> AsyncIterator[list[Sample]]:
    """Figures of the container; happenings oom, oom_flag, exited, killed, started, restarted, health, paused, unpaused,
    removed, never_started, inspect_failed."""
    said: str | None = None
    retry_ns = 0
    while True:
        out: list[Sample] = []
        now = clock.now_ns()
        if now >= retry_ns:
            path, base, engine = await reach(options)
            why = engine
            if path:
                async with (
                    connected(path) as session,
                    contextlib.aclosing(attend(session, base, engine, options, said)) as attended,
                ):
                    async for samples in attended:
                        if samples and samples[0].metric == "observed":
                            said = samples[0].text
                        yield samples
                why = "the container engine went away"
            retry_ns = clock.now_ns() + round(RETRY_S * 1e9)
            if said is None or (path and said != why):
                said = why
                out.append(Sample("docker", "observed", 0.0, clock.now_ns(), text=why))
        yield out


async def attend(
    session: aiohttp.ClientSession, base: str, engine: str, options: Options, said: str | None
) -> AsyncGenerator[list[Sample], None]:
    """Follow one engine until it stops answering."""
    stream, known = Stream(last_ns=clock.wall_ns()), Known()
    follower = asyncio.create_task(follow(session, base, stream))
    inspect_ns = 0
    misses = 0
    try:
        while True:
            out: list[Sample] = []
            now = clock.now_ns()
            wall = clock.wall_ns()
            if known.look is None:
                if now >= inspect_ns:
                    look, why = await which(session, base, options)
                    inspect_ns = clock.now_ns() + round(options.inspect_every * 1e9)
                    if look is not None:
                        digest = await digest_of(session, base, look)
                        at = clock.now_ns()
                        why = about(look, digest, engine)
                        out += [Sample("docker", "observed", 1.0, at, facts(look, digest), why), *figures(look, at)]
                        out += differences(None, look, at)
                        known.look = look
                        said = why
                    elif said is None or (said != why and server.NOBODY in said):
                        said = why
                        out.append(Sample("docker", "observed", 0.0, clock.now_ns(), text=why))
                yield out
                continue
            events = [event for event in drained(stream) if concerns(event, known.look)]
            happened = [s for event in events if (s := told(event, known.look, known, now, wall)) is not None]
            known.heard |= {sample.metric: now for sample in happened}
            if happened or now >= inspect_ns:
                alive, samples = await inspected(session, base, options, known, happened)
                inspect_ns = clock.now_ns() + round(options.inspect_every * 1e9)
                misses = 0 if alive else misses + 1
                out += samples
            out += happened[:MAX_HAPPENINGS]
            if not stream.waiting:
                out += ripe(known, clock.now_ns() - (EVENT_WAIT_NS if stream.up else 0))
            yield out
            if misses >= 3 and not stream.up:
                return
    finally:
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower


def ripe(known: Known, before_ns: int) -> list[Sample]:
    """What inspect showed, waited long enough for its event, and waited in vain."""
    waiting = [(since, s) for since, s in known.unheard if known.heard.get(s.metric, -1) < since]
    known.unheard = [(since, s) for since, s in waiting if s.at_ns > before_ns]
    return [s for _, s in waiting if s.at_ns <= before_ns]


def drained(stream: Stream) -> list[Json]:
    found = list(stream.waiting)
    stream.waiting.clear()
    return found


async def inspected(
    session: aiohttp.ClientSession, base: str, options: Options, known: Known, happened: list[Sample]
) -> tuple[bool, list[Sample]]:
    """One inspect: whether the engine answered, and what is new in it. The flag of a container that has just ended is
    written to its end: a moment later its next life may show another."""
    look = known.look
    assert look is not None
    before_ns, since_ns = clock.now_ns(), known.inspected_ns
    known.inspected_ns = before_ns
    answer = await ask(session, f"{base}/containers/{look.id}/json")
    now = clock.now_ns()
    out: list[Sample] = []
    new: list[Sample] = []
    if answer.status == 200 and isinstance(answer.body, dict):
        fresh = look_of(answer.body)
        for sample in happened:
            if sample.metric == "exited" and not fresh.running:
                sample.labels["oom_killed"] = str(fresh.oom_killed).lower()
                sample.text = f"{sample.text}, OOMKilled {str(fresh.oom_killed).lower()}"
        out += figures(fresh, now)
        new = differences(look, fresh, now)
        known.look, known.failing = fresh, False
    elif answer.status == 404:  # removed; the next one has its name, its labels or its port
        found, _ = await which(session, base, options)
        if found is not None:
            out += figures(found, now)
            new = differences(look, found, now)
            known.look, known.failing = found, False
        elif look.running:
            new = [happening("removed", look, now, f"container {look.name} is gone")]
            known.look = replace(look, status="removed", running=False, pid=None)
    else:
        known.failed += 1
        if not known.failing:
            known.failing = True
            out.append(happening("inspect_failed", look, now, f"inspect of container {look.name}: {answer.why}"))
    # of what events tell as well, the event has the better time; it may be on its way
    out += [sample for sample in new if sample.metric not in ACTIONS.values()]
    known.unheard += [(since_ns, sample) for sample in new if sample.metric in ACTIONS.values()]
    out.append(Sample("docker", "inspect_ms", (now - before_ns) / 1e6, now))
    out.append(Sample("docker", "inspects_failed_total", float(known.failed), now))
    return answer.status != 0, out
