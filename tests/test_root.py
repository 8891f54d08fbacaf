"""Real deaths, in small: a memory cgroup's OOM kill, a driver line in the kernel log, a server in another namespace.

Each test says why it is skipped where it is not permitted, takes at most 128 MiB and removes what it made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_lane import lines, process, wait_for

from loadgen import clock
from loadgen.journal import expand
from loadgen.types import Json, Sample
from monitors import kernel
from monitors import process as process_monitor

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(sys.platform != "linux", reason="cgroups, /dev/kmsg and namespaces are Linux"),
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root"),
]

LIMIT_BYTES = 64 << 20

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
def limited() -> Iterator[Path]:
    """A memory cgroup of 64 MiB without swap, removed at the end."""
    folder = memory_cgroup() / f"loadgen-test-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made: {error.strerror}")
    try:
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"):
            with contextlib.suppress(OSError):
                if (folder / name).exists():
                    (folder / name).write_text(str(LIMIT_BYTES))
        with contextlib.suppress(OSError):
            if (folder / "memory.swap.max").exists():
                (folder / "memory.swap.max").write_text("0")
        yield folder
    finally:
        folder.rmdir()


def log_can_be_read() -> None:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be read: {error.strerror}")


def happened(folder: Path, monitor: str, metric: str) -> list[Json]:
    return [line for line in lines(folder) if (line["monitor"], line.get("metric")) == (monitor, metric)]


def killed(folder: Path) -> float:
    """By how much the host's counter of OOM kills rose."""
    totals = [expand(x["values"]["oom_kill_total"]) for x in lines(folder) if "oom_kill_total" in x.get("values", {})]
    return totals[-1][2] - totals[0][0] if totals else 0


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
                    "monitors": {"host": {}, "kernel": {}, "process": {"period_s": 0.1}},
                    "target_url": f"http://127.0.0.1:{port}",
                }
                with process(tmp_path, "fast", config) as lane:
                    wait_for(lambda: len(happened(tmp_path, "process", "observed")) > 0, "the server is found")
                    wait_for(lambda: len(happened(tmp_path, "kernel", "observed")) > 0, "the log is open")
                    began = clock.now_ns()
                    os.write(ends[0 if victim == "server" else 1][1], b"hoard")
                    wait_for(lambda: len(happened(tmp_path, "kernel", "oom_kill_memcg")) > 0, "the kill is seen")
                    wait_for(lambda: len(happened(tmp_path, "process", "process_gone")) > 0, "the death is seen")
                    ended = clock.now_ns()
                    wait_for(lambda: killed(tmp_path) >= 1, "the counter of the host is written")
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
