"""Real deaths, in small: a memory cgroup's OOM kill, a stall without a kill, swapping, a frozen and a killed monitor.

Each test says why it is skipped where it is not permitted, takes at most 256 MiB of memory and 256 MiB of disk, and
removes what it made. They wait for what they count, so that other work on the machine makes them slow and not wrong.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import disks
import pytest
from test_lane import lines, process, wait_for

from loadgen import clock
from loadgen.journal import expand
from loadgen.record import Run
from loadgen.types import Json, Sample
from monitors import kernel
from monitors import process as process_monitor

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(sys.platform != "linux", reason="cgroups, /dev/kmsg and namespaces are Linux"),
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root"),
]

LIMIT_BYTES = 64 << 20
SWAP_BYTES = 256 << 20
RUN_LIMIT_S = 100

# Listens, says where, then waits for one word: `self` takes memory itself, `worker` lets a child take it.
SERVER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
worker = os.fork()
if worker == 0:
    listener.close()
else:
    print(listener.getsockname()[1], worker, flush=True)
word = os.read(int(sys.argv[1 if worker else 2]), 6)
hoard = []
while word:
    hoard.append(bytearray(os.urandom(1)) * (4 << 20))
"""


def memory_cgroup() -> Path:
    """Where memory cgroups of this machine are made; skips where they cannot be."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, _, what = line.partition(" - ")
        mount, kind, options = Path(where.split()[4]), what.split()[0], what.split()[-1].split(",")
        if kind == "cgroup" and "memory" in options and os.access(mount, os.W_OK):
            return mount
        if kind == "cgroup2" and os.access(mount / "cgroup.subtree_control", os.W_OK):
            enabled = (mount / "cgroup.subtree_control").read_text().split()
            if "memory" in enabled:
                return mount
    pytest.skip("no memory cgroup that can be written is mounted")


@contextlib.contextmanager
def limited(swap: bool = False) -> Iterator[Path]:
    """A memory cgroup of 64 MiB, without swap unless it is wanted; removed at the end."""
    folder = memory_cgroup() / f"loadgen-test-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made: {error.strerror}")
    try:
        names = ("memory.limit_in_bytes", "memory.max", *(() if swap else ("memory.memsw.limit_in_bytes",)))
        for name in names:
            with contextlib.suppress(OSError):
                if (folder / name).exists():
                    (folder / name).write_text(str(LIMIT_BYTES))
        with contextlib.suppress(OSError):
            if not swap and (folder / "memory.swap.max").exists():
                (folder / "memory.swap.max").write_text("0")
        yield folder
    finally:
        remove(folder)


def remove(cgroup: Path) -> None:
    """The kernel takes a moment to let go of the last process."""

    def gone() -> bool:
        try:
            cgroup.rmdir()
        except OSError as error:
            return error.errno != errno.EBUSY
        return True

    wait_for(gone, f"{cgroup} can be removed")


def state(pid: int) -> str:
    """The letter of a process: D waits for the kernel and cannot be interrupted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "gone"


def status_kb(pid: int, field: str) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0])


@contextlib.contextmanager
def started(cgroups: list[Path], code: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that is in these cgroups from its first instruction on."""
    enter = "".join(f'echo $$ > "{cgroup}/cgroup.procs"; ' for cgroup in cgroups)
    command = ["/bin/sh", "-c", f'{enter}exec "$@"', "sh", sys.executable, "-c", code, *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def log_can_be_read() -> None:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be read: {error.strerror}")


def happened(folder: Path, monitor: str, metric: str) -> list[Json]:
    return [line for line in lines(folder) if (line["monitor"], line.get("metric")) == (monitor, metric)]


def killed(folder: Path) -> float:
    """By how much the host's counter of OOM kills rose."""
    totals = readings(folder, "host", "oom_kill_total")
    return totals[-1] - totals[0] if totals else 0


@pytest.mark.parametrize("victim", ["server", "worker"])
def test_real_oom_kill_is_seen_with_victim_and_time(tmp_path: Path, victim: str) -> None:
    log_can_be_read()
    with limited() as cgroup, contextlib.ExitStack() as pipes:
        ends = [os.pipe(), os.pipe()]
        for end in (end for pipe in ends for end in pipe):
            pipes.callback(os.close, end)
        reads = [ends[0][0], ends[1][0]]
        with subprocess.Popen(
            ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(cgroup), sys.executable, "-c", SERVER]
            + [str(fd) for fd in reads],
            stdout=subprocess.PIPE,
            pass_fds=reads,
            start_new_session=True,
        ) as server:
            worker = 0
            try:
                assert server.stdout is not None
                port, worker = map(int, server.stdout.readline().split())
                target = server.pid if victim == "server" else worker
                config = {
                    "monitors": {"host": {}, "kernel": {}, "cgroup": {}, "process": {"period_s": 0.1}},
                    "target_url": f"http://127.0.0.1:{port}",
                }
                with process(tmp_path, "fast", config) as lane:
                    wait_for(lambda: len(happened(tmp_path, "process", "observed")) > 0, "the server is found")
                    wait_for(lambda: len(happened(tmp_path, "kernel", "observed")) > 0, "the log is open")
                    wait_for(lambda: len(readings(tmp_path, "host", "oom_kill_total")) > 0, "kills before are counted")
                    began = clock.now_ns()
                    os.write(ends[0 if victim == "server" else 1][1], b"hoard")
                    wait_for(lambda: len(happened(tmp_path, "kernel", "oom_kill_memcg")) > 0, "the kill is seen")
                    wait_for(lambda: len(happened(tmp_path, "process", "process_gone")) > 0, "the death is seen")
                    ended = clock.now_ns()
                    wait_for(lambda: killed(tmp_path) >= 1, "the counter of the host is written")
                    wait_for(lambda: len(happened(tmp_path, "cgroup", "oom_kill")) > 0, "the cgroup counted it")
                    lane.terminate()
                    assert lane.wait(20) == 0
                if victim == "server":
                    assert server.wait(20) == -9
                else:
                    assert server.poll() is None, "the exit code of the parent says nothing of its worker"
            finally:
                server.kill()
                server.wait()
                if worker:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker, 9)
                    wait_for(lambda: not (cgroup / "cgroup.procs").read_text(), "an empty cgroup")

    (kill,) = [k for k in happened(tmp_path, "kernel", "oom_kill_memcg") if k["labels"]["pid"] == str(target)]
    assert kill["labels"]["constraint"] == "CONSTRAINT_MEMCG"
    assert cgroup.name in kill["labels"]["task_memcg"]
    assert int(kill["labels"]["anon_rss_kb"]) > LIMIT_BYTES // 2048
    assert began <= kill["at"] <= ended
    (gone,) = [g for g in happened(tmp_path, "process", "process_gone") if g["labels"]["pid"] == str(target)]
    assert gone["labels"]["role"] == ("listener" if victim == "server" else "member")
    assert killed(tmp_path) >= 1
    (counted,) = happened(tmp_path, "cgroup", "oom_kill")
    assert counted["labels"]["n"] == "1"
    assert 0 <= counted["at"] - kill["at"] < 20 * 10**9


HOARDER = """
import os, sys
size, again = int(sys.argv[1]) << 20, sys.argv[2] == "again"
print("ready", flush=True)
sys.stdin.buffer.read(1)
hoard = bytearray(size)
for at in range(0, size, 4096):
    hoard[at] = 1 + at % 251
while again:
    for at in range(0, size, 4096):
        hoard[at] ^= 1
print("done", flush=True)
sys.stdin.buffer.read()
"""


def go(child: subprocess.Popen[bytes]) -> None:
    """Let a HOARDER begin."""
    assert child.stdin is not None
    child.stdin.write(b"x")
    child.stdin.flush()


def ready(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"


def readings(folder: Path, monitor: str, metric: str) -> list[float]:
    """The highest value of each second."""
    values = (line["values"].get(metric) for line in lines(folder) if line["monitor"] == monitor and "values" in line)
    return [expand(value)[1] for value in values if value is not None]


def test_stall_without_a_kill_is_seen_although_pressure_is_quiet(tmp_path: Path) -> None:
    """What a wedge on unified memory looks like: everything in D, no kill, no line in the log."""
    with limited() as cgroup:
        control = cgroup / "memory.oom_control"
        if not control.exists():
            pytest.skip("only v1 memory cgroups can switch the OOM killer off")
        control.write_text("1")
        with started([cgroup], HOARDER, "80", "once") as child:
            ready(child)
            config = {"monitors": {"process": {"period_s": 0.1, "pid": child.pid}, "cgroup": {"pid": child.pid}}}
            with process(tmp_path, "fast", config) as lane:
                wait_for(lambda: len(happened(tmp_path, "process", "observed")) > 0, "the process is found")
                wait_for(lambda: len(happened(tmp_path, "cgroup", "observed")) > 0, "the cgroup is found")
                go(child)
                wait_for(lambda: state(child.pid) == "D", "the child waits for memory")
                waits_in = Path(f"/proc/{child.pid}/wchan").read_text()
                wait_for(lambda: len(happened(tmp_path, "process", "process_state")) > 0, "the D is told")
                wait_for(lambda: len(happened(tmp_path, "cgroup", "stalled")) > 0, "the stall is told")
                wait_for(lambda: max(readings(tmp_path, "process", "threads_blocked"), default=0) >= 1, "the D counts")
                before_kb = status_kb(child.pid, "VmRSS")
                assert child.poll() is None, "nobody was killed"
                assert re.search(r"^oom_kill 0$", control.read_text(), re.MULTILINE)
                for name in ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes"):
                    with contextlib.suppress(OSError):
                        (cgroup / name).write_text(str(2 * LIMIT_BYTES))
                assert child.stdout is not None
                assert child.stdout.readline() == b"done\n", "with more memory it goes on as if nothing had been"
                assert status_kb(child.pid, "VmRSS") > before_kb
                wait_for(lambda: len(happened(tmp_path, "cgroup", "stall_over")) > 0, "its end is told")
                lane.terminate()
                assert lane.wait(20) == 0
    assert waits_in in {"mem_cgroup_oom_synchronize", "0"}  # 0: a kernel that does not tell
    assert happened(tmp_path, "cgroup", "oom_kill") == []


@contextlib.contextmanager
def swap_file(folder: Path) -> Iterator[None]:
    """SWAP_BYTES more swap, switched off and removed at the end."""
    if shutil.which("mkswap") is None or shutil.which("swapon") is None:
        pytest.skip("mkswap and swapon are not installed")
    path = folder / "swap"
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, SWAP_BYTES)
        path.chmod(0o600)
        subprocess.run(["mkswap", str(path)], capture_output=True, check=True)
        on = subprocess.run(["swapon", str(path)], capture_output=True, text=True, check=False)
        if on.returncode != 0:
            pytest.skip(f"swap may not be switched on here: {on.stderr.strip()}")
        try:
            yield
        finally:
            subprocess.run(["swapoff", str(path)], capture_output=True, check=True)
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def v2_cgroup() -> Iterator[Path | None]:
    """A child of the cgroup2 hierarchy that stands beside v1 (pressure needs no controller); None where there is
    none to be made, or where v2 is all there is."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, _, what = line.partition(" - ")
        if what.split()[0] == "cgroup2" and "memory" not in _controllers(Path(where.split()[4])):
            folder = Path(where.split()[4]) / f"loadgen-test-{uuid.uuid4().hex[:12]}"
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                yield folder
            finally:
                remove(folder)
            return
    yield None


def _controllers(mount: Path) -> list[str]:
    try:
        return (mount / "cgroup.controllers").read_text().split()
    except OSError:
        return []


def test_real_swapping_is_seen_as_rates_and_pressure_of_host_and_cgroup(tmp_path: Path) -> None:
    with (
        swap_file(tmp_path),
        limited(swap=True) as cgroup,
        v2_cgroup() as beside,
        started([cgroup, *([beside] if beside else [])], HOARDER, "160", "again") as child,
    ):
        ready(child)
        config = {"monitors": {"host": {}, "kernel": {}, "cgroup": {"pid": child.pid}}}
        with process(tmp_path, "fast", config) as lane:
            wait_for(lambda: len(happened(tmp_path, "cgroup", "observed")) > 0, "the cgroup is found")
            go(child)
            for metric in ("pswpin_pages_per_s", "pswpout_pages_per_s"):
                wait_for(
                    lambda metric=metric: max(readings(tmp_path, "host", metric), default=0) > 500,  # type: ignore[misc]
                    f"{metric} of the host",
                )
            for monitor, metric in (
                ("host", "psi_memory_some_percent"),
                ("host", "pgmajfault_per_s"),
                *([("cgroup", "psi_memory_some_percent")] if beside or _has(cgroup, "memory.pressure") else []),
            ):
                wait_for(
                    lambda m=monitor, metric=metric: max(readings(tmp_path, m, metric), default=0) > 1,  # type: ignore[misc]
                    f"{metric} of {monitor}",
                )
            assert child.poll() is None
            assert status_kb(child.pid, "VmSwap") > 32 << 10
            lane.terminate()
            assert lane.wait(20) == 0
    killed_pids = {k["labels"]["pid"] for k in happened(tmp_path, "kernel", "oom_kill_memcg")}
    assert str(child.pid) not in killed_pids, "it swapped, it was not killed"
    assert max(readings(tmp_path, "cgroup", "memory_current_bytes")) <= 1.1 * LIMIT_BYTES


def _has(cgroup: Path, name: str) -> bool:
    """Some kernels list pressure files that cannot be read."""
    try:
        return bool((cgroup / name).read_text())
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs that are hurt

HURT = """\
name: hurt
classes:
  chat_short: {weight: 1, options: {max_tokens: 24}}
phases:
  - {kind: measure, duration: %ds, drain: 5s}
monitors: {host: {}, process: {}, engine: {}, disk: {period_s: 1}}
require: [errors]
"""


@contextlib.contextmanager
def run(folder: Path, out: Path, seconds: int) -> Iterator[subprocess.Popen[str]]:
    """`loadgen run` against a simulator of its own, in a session of its own, which is ended whatever happens."""
    scenario = folder / "hurt.yaml"
    scenario.write_text(HURT % seconds)
    command = [sys.executable, "-m", "loadgen", "run", str(scenario), "--sim", "tiny", "--out", str(out), "--quiet"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(20)
                child.kill()


def measuring(out: Path) -> bool:
    """Whether answers of the measuring phase come in."""
    found = [path.read_text(errors="replace") for path in out.glob("*/outcomes-0.jsonl")]
    return bool(found) and '"measure"' in found[0]


def lanes(out: Path) -> dict[str, int]:
    """Pids of the run's lanes."""
    found: dict[str, int] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if "monitors.lane" in words and any(str(out) in word for word in words):
                found[words[words.index("monitors.lane") + 1]] = int(path.parent.name)
    return found


def test_monitor_that_was_frozen_and_one_that_was_killed_make_the_verdict_say_blind_and_when(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    out.mkdir()
    with run(tmp_path, out, 14) as child:  # far longer than the freeze: a busy machine may be late to see it measure
        wait_for(lambda: measuring(out), "answers come in")
        pids = lanes(out)
        os.kill(pids["slow"], signal.SIGSTOP)
        os.kill(pids["fast"], signal.SIGKILL)
        frozen_at = clock.now_ns()
        try:
            time.sleep(5)  # of 14 s of load: more than any rule lets pass
        finally:
            os.kill(pids["slow"], signal.SIGCONT)
        thawed_at = clock.now_ns()
        said, _ = child.communicate(timeout=RUN_LIMIT_S)
    assert child.returncode == 2, said
    assert "VERDICT: INCONCLUSIVE" in said
    (folder,) = out.iterdir()
    blind = [f for f in findings(folder) if f["rule"] == "blind" and f["status"] == "fail"]
    of_frozen = [f for f in blind if f["scope"] == "engine"]
    assert of_frozen, blind
    hole = re.search(r"(?:since|from|hole from) (\d+):(\d\d)", of_frozen[0]["message"])
    assert hole is not None, of_frozen
    began = min(record["at"] for record in Run(folder).journal)
    since_s = int(hole[1]) * 60 + int(hole[2])
    assert abs(since_s - (frozen_at - began) / 1e9) < 4, "and the hole is where it was"
    dead = [f for f in blind if f["scope"] == "lane fast"]
    assert dead, blind
    assert abs(dead[0]["since_ns"] - frozen_at) < 4 * 10**9
    stamps = [line["at"] for line in lines(folder, "slow") if line["monitor"] == "engine" and "values" in line]
    assert not [at for at in stamps if frozen_at + 2 * 10**9 < at < thawed_at - 10**9], "nothing was made up afterwards"


def findings(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "findings.json").read_text())["findings"]
    return found


def test_disk_that_fills_under_a_run_is_named_and_nothing_passes(tmp_path: Path) -> None:
    with disks.tiny(tmp_path / "disk", size_kb=80 << 10, ballast_kb=1 << 10) as out:
        with run(tmp_path, out, 3) as child:
            wait_for(lambda: measuring(out), "answers come in")
            with contextlib.suppress(OSError), (out / "ballast").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            said, _ = child.communicate(timeout=RUN_LIMIT_S)
        assert "Traceback" not in said, said
        assert child.returncode in {2, 3}, said
        assert "No space left" in said
        (out / "ballast").unlink()
        (folder,) = out.iterdir()
        again = subprocess.run(
            [sys.executable, "-m", "loadgen", "judge", str(folder)], capture_output=True, text=True, timeout=RUN_LIMIT_S
        )
        assert again.returncode == 2, again.stdout + again.stderr
        assert "VERDICT: INCONCLUSIVE" in again.stdout
        blind = [f for f in findings(folder) if f["rule"] == "blind" and f["status"] == "fail"]
        assert "damaged_records" in {f["cause"] for f in blind}, "and what is missing is named"


def test_line_that_root_wrote_into_the_real_log_is_believed_only_on_request() -> None:
    log_can_be_read()
    if not os.access("/dev/kmsg", os.W_OK):
        pytest.skip("/dev/kmsg cannot be written")
    mark = f"loadgen-test-{uuid.uuid4().hex}"
    careful, believing = kernel.watch(kernel.Options()), kernel.watch(kernel.Options(any_facility=True))
    next(careful), next(believing)
    # Without the newline the record stays invisible until the next one comes.
    Path("/dev/kmsg").write_bytes(f"<4>NVRM: synthetic {mark} NV_ERR_NO_MEMORY\n".encode())
    seen: list[Sample] = []

    def arrived() -> bool:
        seen.extend(s for s in next(believing) if mark in (s.text or ""))
        return bool(seen)

    wait_for(arrived, "the line")
    (line,) = seen
    assert line.metric == "nv_no_memory"
    assert [s for s in next(careful) if mark in (s.text or "")] == []
    careful.close()  # type: ignore[attr-defined]
    believing.close()  # type: ignore[attr-defined]


def test_server_in_another_network_namespace_is_found_by_its_port() -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("util-linux's unshare is not installed")
    if subprocess.run([unshare, "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces may not be made here")
    code = (
        "import socket, sys; s = socket.create_server(('0.0.0.0', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [unshare, "-n", sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            ticks = process_monitor.watch(process_monitor.Options(target_url=f"http://127.0.0.1:{port}"))
            (observed,) = [s for s in next(ticks) if s.metric == "observed"]
        finally:
            server.kill()
            server.wait()
    assert observed.value == 1.0
    assert f"pid {server.pid} " in (observed.text or "")
