"""Shards on a real Ray cluster: one node, then two in network namespaces of their own, one of which dies."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from loadgen import cli
from loadgen.hist import Hist, merged
from loadgen.record import Run
from loadgen.stats import durations_us

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra `ray`)")

# A node starts for 20 s where no name server answers.
NODE_S = 90
PORT, SIM_PORT = 6399, 8111
HEAD, OTHER = "10.77.0.1", "10.77.0.2"
SCENE = """\
name: away
concurrency: 4
classes: {chat_short: {weight: 2, options: {max_tokens: 24}}, arithmetic: {weight: 1}}
phases:
  - {kind: functional, count: 1}
  - {kind: measure, duration: %s, drain: 10s}
monitors: {process: {}}
"""


def run_command(tmp_path: Path, duration: str, *args: str) -> list[str]:
    scene = tmp_path / "scene.yaml"
    scene.write_text(SCENE % duration, encoding="utf-8")
    return [sys.executable, "-m", "loadgen", "run", str(scene), "--out", str(tmp_path / "runs"), *args]


def only_run(tmp_path: Path) -> Run:
    [folder] = (tmp_path / "runs").iterdir()
    return Run(folder)


def wait_for(what: Callable[[], bool], limit_s: float, why: Callable[[], str]) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end, why()
        time.sleep(0.2)


def clocks_are_known(run: Run) -> None:
    """All processes of a machine share its monotonic clock: the truth is 0."""
    clocks = run.events("shard_clock")
    assert {e["shard"] for e in clocks} == {0, 1}
    for e in clocks:
        assert abs(e["ahead_ns"]) <= e["error_ns"]


def test_without_ray_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # what an import finds where there is none
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "smoke", "--url", "http://127.0.0.1:1", "--ray", "local", "--out", str(tmp_path)])
    assert ended.value.code == 3
    assert capsys.readouterr().err.endswith("pip install 'loadgen-soak[ray]', on every node\n")


@needs_ray
def test_an_address_where_no_cluster_is_takes_one_line(tmp_path: Path, free_port: int) -> None:
    command = run_command(tmp_path, "4s", "--sim", "tiny", "--ray", f"127.0.0.1:{free_port}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "no Ray there" in done.stderr


@needs_ray
def test_two_shards_on_one_node_give_one_run(tmp_path: Path) -> None:
    short = Path(tempfile.mkdtemp(prefix="t-"))  # Ray's sockets have paths of at most 107 characters
    try:
        done = subprocess.run(
            run_command(tmp_path, "5s", "--sim", "tiny", "--shards", "2", "--ray", "local"),
            capture_output=True, text=True, timeout=200, env={**os.environ, "TMPDIR": str(short)},
        )  # fmt: skip
        assert done.returncode in (0, 2), done.stdout + done.stderr
        assert not list(short.iterdir()), "no folder is left behind"
    finally:
        shutil.rmtree(short)
    assert not processes_that_name(str(short))
    run = only_run(tmp_path)
    assert [e["rc"] for e in run.events("shard_exit")] == [0, 0]
    assert not {what for what in run.damage if "environment" not in what}
    clocks_are_known(run)
    for told in run.events("start"):
        assert told["at_ns"] - told["at"] >= 1.9e9
    begun = [e["at"] for e in run.events("phase_start") if e["phase"] == "measure"]
    assert len(begun) == 2
    assert max(begun) - min(begun) < 0.5e9
    outcomes = list(run.outcomes())
    assert {o.seat for o in outcomes} == {0, 1, 2, 3}
    assert sum(e["issued"] for e in run.events("phase_drained")) == len(outcomes)
    concatenated = Hist()
    for o in outcomes:
        concatenated.record(us for metric, us in durations_us(o) if metric == "e2e")
    assert merged(line.hist for line in run.windows() if line.tag.metric == "e2e") == concatenated


def processes_that_name(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


# -- two machines, as far as the network can tell ----------------------------------------------------------------------


class Host:
    """A network namespace; whatever runs in it is ours and ends with it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.started: list[subprocess.Popen[str]] = []
        folder.mkdir()
        # a token of the cluster's own: Ray asks for one
        self.env = {**os.environ, "TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}

    def start(self, log: str, *command: str) -> subprocess.Popen[str]:
        with (self.folder / log).open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                text=True, env=self.env, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def said(self, log: str) -> str:
        return (self.folder / log).read_text(errors="replace")

    def kill(self) -> None:
        """All of its processes at once: what pulling the plug does."""
        for _ in range(20):
            pids = ip("netns", "pids", self.name).split()
            if not pids:
                break
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        for process in self.started:
            process.wait(10)


def ip(*args: str) -> str:
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    names = [f"lg{os.getpid()}{letter}" for letter in "ab"]
    hosts = []
    try:
        for name in names:
            ip("netns", "add", name)
            hosts.append(Host(name, folder / name[-1]))
        ip("link", "add", "eth", "netns", names[0], "type", "veth", "peer", "name", "eth", "netns", names[1])
        token = secrets.token_hex(16)
        for host, address in zip(hosts, (HEAD, OTHER), strict=True):
            ip("-n", host.name, "addr", "add", f"{address}/24", "dev", "eth")
            for device in ("lo", "eth"):
                ip("-n", host.name, "link", "set", device, "up")
            host.env["RAY_AUTH_TOKEN"] = token
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.kill()
            ip("netns", "del", host.name)
        shutil.rmtree(folder, ignore_errors=True)


def start_ray(host: Host, address: str, *args: str) -> None:
    """A Ray node with room for one shard."""
    ray = str(Path(sys.executable).with_name("ray"))
    host.start(
        "ray.log", ray, "start", *args, f"--node-ip-address={address}", "--num-cpus=1",
        f"--object-store-memory={80 << 20}", "--block",
    )  # fmt: skip
    wait_for(lambda: "runtime started" in host.said("ray.log"), NODE_S, lambda: host.said("ray.log"))


@needs_ray
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_a_node_that_dies_is_named_and_the_other_goes_on(tmp_path: Path) -> None:
    with two_hosts() as (head, other):
        folder = f"--temp-dir={head.folder}"
        start_ray(head, HEAD, "--head", f"--port={PORT}", "--include-dashboard=false", folder)
        start_ray(other, OTHER, f"--address={HEAD}:{PORT}")
        sim = ["-m", "loadgen.sim", "--preset", "tiny", "--host", HEAD, "--port", str(SIM_PORT)]
        head.start("sim.log", sys.executable, *sim)
        wait_for(lambda: "listening" in head.said("sim.log"), 30, lambda: head.said("sim.log"))
        lost = head.start(
            "lost.log",
            *run_command(
                tmp_path, "4s", "--url", f"http://127.0.0.1:{SIM_PORT}", "--shards", "2", "--ray", f"{HEAD}:{PORT}"
            ),
        )
        assert lost.wait(60) == 3, head.said("lost.log")
        assert "is another machine on each of 2 nodes" in head.said("lost.log")
        process = head.start(
            "run.log",
            *run_command(
                tmp_path, "20s", "--url", f"http://{HEAD}:{SIM_PORT}", "--shards", "2", "--ray", f"{HEAD}:{PORT}"
            ),
        )

        def measuring() -> bool:
            folders = list((tmp_path / "runs").glob("*/journal.jsonl"))
            return bool(folders) and folders[0].read_text(errors="replace").count('"kind":"measure"') == 2

        wait_for(measuring, 120, lambda: head.said("run.log"))
        time.sleep(3)
        where = {e["shard"]: e["where"] for e in only_run(tmp_path).events("shard_start")}
        assert len(set(where.values())) == 2, "one shard a node"
        killed_ns = time.monotonic_ns()
        other.kill()
        assert process.wait(90) == 2, head.said("run.log")
        said = head.said("run.log")
    assert "VERDICT: INCONCLUSIVE (lost_shard)" in said
    run = only_run(tmp_path)
    clocks_are_known(run)
    [lost] = [e for e in run.events("shard_exit") if e["rc"] != 0]
    assert lost["rc"] is None
    assert lost["text"] == "its node or its actor died"
    outcomes = list(run.outcomes())
    gone, stays = ({o.seat for o in outcomes if o.seat % 2 == k} for k in (lost["shard"], 1 - lost["shard"]))
    assert gone, "what came home before counts"
    after = {o.seat for o in outcomes if o.due_ns > killed_ns}
    assert after == stays, "its load was not moved"
    [end] = run.events("phase_end")[-1:]
    assert end["at"] > killed_ns + 5e9
