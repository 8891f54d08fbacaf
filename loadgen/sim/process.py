"""The simulated server as a process: its socket, its signals, and (`supervised`) the parent that starts it again.

A supervised server dies as a real one does: the port refuses connections while it is gone, and it comes back with
another pid. So the parent holds no socket; it passes on what the next life must know.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from loadgen.sim import config, faults
from loadgen.types import Json, UserError

if TYPE_CHECKING:
    from loadgen.sim.server import Server

BACKLOG = 512
SHUTDOWN_S = 0.2  # running requests are cut, not drained: SIGTERM must end the process within a second
RESTART_S = 5.0  # after a death that no fault announced (the OOM killer's work), as container runtimes do
TERM_S = 1.0
ORPHAN_QUIET_S = 1.0  # after SIGHUP: nothing served for so long means that nobody is left who will ask
ORPHAN_LOOK_S = 0.1
ORPHAN_S = 300.0  # and at most so long: an orphaned run drains its requests for no longer


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; None leaves it to the preset."""

    preset: str = "tiny"
    host: str = "127.0.0.1"
    port: int = 8000
    time_scale: float | None = None
    memory_scale: float | None = None
    memory_limit_mib: int | None = None
    faults: Path | None = None
    truth: Path | None = None
    host_root: Path | None = None
    seed: int = 0
    api_key_env: str | None = None
    supervised: bool = False
    ready_fd: int | None = None
    life: str | None = None
    """For the parent of a supervised server only: the descriptor to talk to it, and what former lives have done."""


def run(options: Options) -> int:
    """Serve until told to end; the exit code. UserError for what the user can mend."""
    preset, script, api_key = _checked(options)
    if options.supervised and options.life is None:
        return _supervise(options)
    with _listen(options.host, options.port) as listener:
        return _serve(options, preset, script, api_key, listener)


def _checked(options: Options) -> tuple[config.Preset, tuple[faults.Fault, ...], str | None]:
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port {options.port}: expected 0 to 65535 (0 takes any free one)")
    preset = config.load_preset(options.preset)
    for name in ("time_scale", "memory_scale"):
        value = getattr(options, name)
        if value is not None:
            config.check_scale(f"--{name.replace('_', '-')}", value)
            preset = dataclasses.replace(preset, **{name: value})
    if options.memory_limit_mib is not None:
        preset = dataclasses.replace(preset, memory_limit_mib=options.memory_limit_mib)
    script = () if options.faults is None else faults.load_script(options.faults)
    api_key = None
    if options.api_key_env is not None:
        api_key = os.environ.get(options.api_key_env)
        if not api_key:
            raise UserError(f"--api-key-env {options.api_key_env}: no such variable in the environment, or it is empty")
    return preset, script, api_key


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0 takes any free one)"
        ) from None
    return listener


def _serve(
    options: Options,
    preset: config.Preset,
    script: tuple[faults.Fault, ...],
    api_key: str | None,
    listener: socket.socket,
) -> int:
    import uvloop

    from loadgen.sim.server import Server, Settings

    life: Json = json.loads(options.life) if options.life else {}
    parent = socket.socket(fileno=life["fd"]) if life else None

    def tell(message: Json) -> None:
        if parent is not None:
            with contextlib.suppress(OSError):  # a parent that is gone wants to know nothing
                parent.sendall(json.dumps(message).encode() + b"\n")

    settings = Settings(
        preset=preset,
        seed=options.seed,
        faults=script,
        truth=options.truth,
        host_root=options.host_root,
        api_key=api_key,
        start_ns=life.get("start_ns"),
        ended=life.get("ended", 0),
        fired=frozenset(life.get("fired", ())),
    )

    async def serve() -> None:
        from aiohttp import web

        loop = asyncio.get_running_loop()
        server = Server(settings, tell)
        runner = web.AppRunner(
            server.app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, handle_signals=False
        )
        try:
            server.start()
            await runner.setup()
            await web.SockSite(runner, listener, backlog=BACKLOG).start()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, server.leaving.set)
            orphaned: set[asyncio.Task[None]] = set()
            loop.add_signal_handler(signal.SIGHUP, lambda: orphaned.add(loop.create_task(_leave_when_idle(server))))
            if parent is not None:
                loop.add_reader(parent, server.leaving.set)  # it never speaks: readable means that it is gone
            gc.collect()
            gc.freeze()  # what is here now stays: no later collection walks over it
            _announce(options, listener)
            tell({"port": listener.getsockname()[1], "start_ns": server.start_ns})
            await server.leaving.wait()
            if parent is not None:
                loop.remove_reader(parent)
        finally:
            server.close()
            await runner.cleanup()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    finally:
        if parent is not None:
            parent.close()
    return 0


async def _leave_when_idle(server: Server) -> None:
    waited_s = quiet_s = 0.0
    while quiet_s < ORPHAN_QUIET_S and waited_s < ORPHAN_S:
        await asyncio.sleep(ORPHAN_LOOK_S)
        waited_s += ORPHAN_LOOK_S
        quiet_s = 0.0 if server.busy else quiet_s + ORPHAN_LOOK_S
    server.leaving.set()


def _announce(options: Options, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    line = f"listening on http://{f'[{host}]' if ':' in host else host}:{port} (pid {os.getpid()})\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    if options.ready_fd is not None:
        os.write(options.ready_fd, line.encode())
        os.close(options.ready_fd)


# -- the parent


class _Told(Exception):  # noqa: N818 - a signal, no error
    """SIGTERM or SIGINT has come."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Told


class _Life:
    """The life that runs now, for the signal that is passed on to it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def hang_up(self, number: int, frame: FrameType | None) -> None:
        """The run that we serve was killed. Its engines may still drain: a server that went first would cut them."""
        if self.process is None or self.process.poll() is not None:
            raise _Told
        self.process.send_signal(signal.SIGHUP)


def _supervise(options: Options) -> int:
    """Start lives until one ends in order, or by a fault that wants no other."""
    port = options.port
    start_ns: int | None = None  # when the first life was ready: faults at a time count from there
    ended = 0
    fired: list[int] = []
    ready_fd = options.ready_fd
    life = _Life()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    signal.signal(signal.SIGHUP, life.hang_up)
    try:
        while True:
            ours, theirs = socket.socketpair()
            with ours:
                past = {"fd": theirs.fileno(), "start_ns": start_ns, "ended": ended, "fired": fired}
                life.process = child = _start(options, port, ready_fd, past)
                theirs.close()
                if ready_fd is not None:
                    os.close(ready_fd)
                    ready_fd = None
                ready = False
                ending: Json | None = None
                for message in _messages(ours):
                    ready = ready or "port" in message
                    port = message.get("port", port)
                    start_ns = message.get("start_ns", start_ns)
                    fired += [message["fired"]] if "fired" in message else []
                    ending = message if "ending" in message else ending
                code = child.wait()
            if not ready or (code == 0 and ending is None):
                return code if code >= 0 else 128 - code
            pause_s = RESTART_S if ending is None else ending["restart_after"]
            if pause_s is None:
                return code if code >= 0 else 128 - code
            ended = ended if ending is None else ending["ended"]
            time.sleep(pause_s)
    except _Told:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        last = life.process
        if last is not None and last.poll() is None:
            last.terminate()
            try:
                last.wait(TERM_S)
            except subprocess.TimeoutExpired:
                last.kill()
                last.wait()
        return 0


def _start(options: Options, port: int, ready_fd: int | None, life: Json) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "loadgen.sim", "--supervised", "--life", json.dumps(life), "--port", str(port)]
    for name, value in dataclasses.asdict(options).items():
        if value is not None and name not in ("supervised", "life", "port", "ready_fd"):
            command += [f"--{name.replace('_', '-')}", str(value)]
    passed = [life["fd"]]
    if ready_fd is not None:
        command += ["--ready-fd", str(ready_fd)]
        passed.append(ready_fd)
    return subprocess.Popen(command, pass_fds=passed)


def _messages(ours: socket.socket) -> Iterator[Json]:
    """What a life says, line by line, until it is dead."""
    with ours.makefile("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)
