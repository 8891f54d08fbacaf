"""The server's cgroup: where it is found, what its files say on v1, v2 and both, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_lane import lines, process, wait_for

from loadgen.journal import expand
from loadgen.types import Json, Sample
from monitors import cgroup, server
from monitors.server import UNIFIED

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent / "data/monitors/host.jsonl").read_text().splitlines())
}
ID = "c0ffee" + "0" * 58
OTHER = "deadbeef" + "1" * 56
MIB = 1 << 20

# What /proc/PID/cgroup says: (path, container, engine, unit, the part that is one job's own)
PATHS = [
    (f"/system.slice/docker-{ID}.scope", ID, "docker", "", f"/system.slice/docker-{ID}.scope"),
    (f"/docker/{ID}", ID, "docker", "", f"/docker/{ID}"),
    (f"/docker/{ID}/init.scope", ID, "docker", "", f"/docker/{ID}"),
    (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container", ID, "podman", "",
     f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"),
    (f"/machine.slice/libpod-{ID}.scope", ID, "podman", "", f"/machine.slice/libpod-{ID}.scope"),
    (f"/system.slice/llm.service/libpod-payload-{ID}", ID, "podman", "llm.service",
     f"/system.slice/llm.service/libpod-payload-{ID}"),
    (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12.slice/cri-containerd-{ID}.scope", ID,
     "containerd", "",
     f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12.slice/cri-containerd-{ID}.scope"),
    (f"/kubepods/besteffort/pod0aa/{ID}", ID, "kubernetes", "", f"/kubepods/besteffort/pod0aa/{ID}"),
    (f"/kubepods.slice/kubepods-pod12.slice/crio-{ID}.scope", ID, "cri-o", "",
     f"/kubepods.slice/kubepods-pod12.slice/crio-{ID}.scope"),
    (f"/system.slice/containerd.service/kubepods-burstable-pod12.slice:cri-containerd:{ID}", ID, "containerd",
     "containerd.service", f"/system.slice/containerd.service/kubepods-burstable-pod12.slice:cri-containerd:{ID}"),
    (f"/docker/{OTHER}/kubelet/kubepods/p1/{ID}", ID, "kubernetes", "", f"/docker/{OTHER}/kubelet/kubepods/p1/{ID}"),
    (f"/machine.slice/libpod-conmon-{ID}.scope", "", "", "", ""),
    ("/system.slice/vllm@0.service", "", "", "vllm@0.service", "/system.slice/vllm@0.service"),
    ("/user.slice/user-1000.slice/user@1000.service/app.slice/llm.service", "", "", "llm.service",
     "/user.slice/user-1000.slice/user@1000.service/app.slice/llm.service"),
    ("/system.slice/run-u42.scope", "", "", "run-u42.scope", "/system.slice/run-u42.scope"),
    ("/user.slice/user-1000.slice/session-3.scope", "", "", "", ""),
    ("/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome\\x2dterminal-9.scope", "", "", "", ""),
    ("/slurm/uid_1000/job_7/step_0", "", "", "", "/slurm/uid_1000/job_7/step_0"),
    ("/user.slice", "", "", "", ""),
    ("/init.scope", "", "", "", ""),
    ("/", "", "", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("path", "container", "engine", "unit", "own"), PATHS, ids=[p[0][:60] for p in PATHS])
def test_path_names_container_engine_unit_and_what_is_its_own(
    path: str, container: str, engine: str, unit: str, own: str
) -> None:
    assert server.container_of(path)[:2] == (container, engine)
    assert server.unit_of(path)[0] == unit
    assert server.own_part(path) == own


def test_hierarchies_of_v1_v2_and_both_are_read() -> None:
    assert server.cgroups(b"0::/a\n") == {UNIFIED: "/a"}
    assert server.cgroups(b"4:memory:/m\n3:cpu,cpuacct:/c\n1:name=systemd:/s\n0::/\n") == {
        "memory": "/m", "cpu": "/c", "cpuacct": "/c", "name=systemd": "/s", UNIFIED: "/",
    }  # fmt: skip
    assert server.cgroups(b"0::/gone (deleted)\n") == {UNIFIED: "/gone"}
    assert server.cgroups(b"nonsense\n\n") == {}


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parsers(data: bytes) -> None:
    server.cgroups(data), server.mounts(data), cgroup.table(data), cgroup.stalls(data), cgroup.number(data)


def test_directory_comes_from_the_mount_table_and_respects_what_a_container_sees() -> None:
    def found(top: str, path: str) -> Path | None:
        table = f"31 23 0:28 {top} /sys/fs/my\\040cgroup rw - cgroup2 cgroup2 rw\n"
        return server.directory(Path("/"), server.mounts(table.encode()), UNIFIED, path)

    assert found("/", "/a/b") == Path("/sys/fs/my cgroup/a/b")
    assert found("/docker/x", "/docker/x/sub") == Path("/sys/fs/my cgroup/sub")
    assert found("/docker/x", "/docker/xy") is None
    assert found("/", "/../outside") is None
    assert found("/..", "/../outside") == Path("/sys/fs/my cgroup/outside")


# ---------------------------------------------------------------------------------------------------------------------
# On trees of files

PSI_TEXT = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
V2_FILES = {
    "memory.current": "104857600\n", "memory.peak": "209715200\n", "memory.max": "268435456\n", "memory.high": "max\n",
    "memory.swap.current": "4096\n", "memory.swap.max": "0\n",
    "memory.events": "low 0\nhigh 2\nmax 3\noom 0\noom_kill 0\noom_group_kill 0\n",
    "memory.stat": "anon 90000000\nfile 10000000\nshmem 0\nkernel 4857600\npgmajfault 7\nworkingset_refault_anon 5\n",
    "memory.pressure": PSI_TEXT.format(1000, 500), "io.pressure": PSI_TEXT.format(0, 0),
    "cpu.pressure": PSI_TEXT.format(0, 0),
    "cpu.stat": "usage_usec 1000\nnr_periods 10\nnr_throttled 3\nthrottled_usec 2000\n",
    "pids.current": "17\n", "pids.max": "max\n", "cgroup.procs": "110\n120\n",
}  # fmt: skip
V1_MEMORY = {
    "memory.usage_in_bytes": "104857600\n", "memory.max_usage_in_bytes": "209715200\n",
    "memory.limit_in_bytes": "268435456\n", "memory.memsw.usage_in_bytes": "104857600\n",
    "memory.memsw.limit_in_bytes": "9223372036854771712\n", "memory.failcnt": "9\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    "memory.stat": "cache 1\ntotal_rss 90000000\ntotal_cache 10000000\ntotal_swap 8192\n"
    "hierarchical_memory_limit 268435456\n",
    "cgroup.procs": "110\n",
}  # fmt: skip
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
HYBRID_MOUNTS = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def machine(root: Path, lives: str, mounts: str, start: int = 1001) -> Path:
    """A machine on which pid 110 listens on port 8000 and lives in these cgroups."""
    listens = f"h\n   0: 00000000:{8000:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 777 1\n"
    write(root / "proc/net", {"tcp": listens})
    write(root / "proc/self", {"mountinfo": mounts, "cgroup": "0::/user.slice/user-0.slice/session-1.scope\n"})
    stat = f"110 (python3) S 1 110 110 0 -1 0 0 0 0 0 7 3 0 0 20 0 4 0 {start} 0 0\n"
    write(root / "proc/110", {"stat": stat, "cgroup": lives})
    (root / "proc/110/fd").mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (root / "proc/110/fd/3").symlink_to("socket:[777]")
    return root


def v2_machine(root: Path, files: dict[str, str] = V2_FILES, path: str = f"/system.slice/docker-{ID}.scope") -> Path:
    write(root / f"sys/fs/cgroup{path}", files)
    return machine(root, f"0::{path}\n", V2_MOUNT)


class Ticks:
    """The monitor on a tree, with a clock that a test moves."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**9
        monkeypatch.setattr("loadgen.clock.now_ns", lambda: self.ns)
        self._watch = cgroup.watch(cgroup.Options(root=str(root), target_url="http://127.0.0.1:8000"))

    def next(self, after_s: float = 1.0) -> list[Sample]:
        self.ns += round(after_s * 1e9)
        return next(self._watch)


@pytest.fixture
def ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ticks:
    return Ticks(tmp_path, monkeypatch)


def values(samples: list[Sample]) -> dict[str, float]:
    return {s.metric: s.value for s in samples if s.text is None}


def of(samples: list[Sample], metric: str) -> list[Sample]:
    return [s for s in samples if s.metric == metric and s.text is not None]


def test_v2_container_is_read_whole(tmp_path: Path, ticks: Ticks) -> None:
    v2_machine(tmp_path)
    samples = ticks.next()
    (observed,) = of(samples, "observed")
    assert observed.text == f"memory cgroup v2 /system.slice/docker-{ID}.scope"
    assert (observed.labels["container"], observed.labels["engine"]) == (ID, "docker")
    read = values(samples)
    assert read["memory_current_bytes"] == 100 * MIB
    assert read["memory_peak_bytes"] == 200 * MIB
    assert read["memory_max_bytes"] == read["memory_limit_bytes"] == 256 * MIB
    assert read["memory_used_ratio"] == pytest.approx(100 / 256)
    assert read["swap_max_bytes"] == 0
    assert (read["high_total"], read["max_total"], read["oom_kill_total"]) == (2, 3, 0)
    assert (read["anon_bytes"], read["kernel_bytes"]) == (90_000_000, 4_857_600)
    assert read["pids_current"] == 17
    assert read["own"] == 1
    assert {"memory_high_bytes", "pids_max"} & read.keys() == set(), "max is no number"


def test_word_max_is_no_limit_and_no_percentage(tmp_path: Path, ticks: Ticks) -> None:
    case = CASES["host-cgroup2-unlimited"]
    v2_machine(tmp_path, case["input"]["files"])
    read = values(ticks.next())
    assert read.get("memory_max_bytes") == read.get("memory_limit_bytes") == case["expect"]["limit"]
    assert read["memory_current_bytes"] == case["expect"]["used"]
    assert read.get("memory_used_ratio") == case["expect"]["percent"]
    assert read["swap_max_bytes"] == case["expect"]["swap_limit"]


def test_limit_of_a_slice_above_is_the_one_that_counts(tmp_path: Path, ticks: Ticks) -> None:
    v2_machine(tmp_path, V2_FILES | {"memory.max": "max\n"})
    write(tmp_path / "sys/fs/cgroup/system.slice", {"memory.max": "134217728\n"})
    read = values(ticks.next())
    assert "memory_max_bytes" not in read
    assert read["memory_limit_bytes"] == 128 * MIB


def test_rates_are_taken_from_totals(tmp_path: Path, ticks: Ticks) -> None:
    folder = tmp_path / f"sys/fs/cgroup/system.slice/docker-{ID}.scope"
    v2_machine(tmp_path)
    assert "psi_memory_some_percent" not in values(ticks.next()), "one look is no rate"
    write(folder, {
        "memory.pressure": PSI_TEXT.format(501_000, 250_500),
        "cpu.stat": "usage_usec 501000\nnr_throttled 13\nthrottled_usec 302000\n",
        "memory.stat": "pgmajfault 1007\nworkingset_refault_anon 5\n",
    })  # fmt: skip
    read = values(ticks.next(2.0))
    assert read["psi_memory_some_percent"] == pytest.approx(25)
    assert read["psi_memory_full_percent"] == pytest.approx(12.5)
    assert read["throttled_periods_per_s"] == pytest.approx(5)
    assert read["throttled_percent"] == pytest.approx(15)
    assert read["cpu_percent"] == pytest.approx(25)
    assert read["pgmajfault_per_s"] == pytest.approx(500)
    assert read["refault_anon_pages_per_s"] == 0


def test_v1_memory_with_v2_pressure_is_one_cgroup(tmp_path: Path, ticks: Ticks) -> None:
    write(tmp_path / f"sys/fs/cgroup/memory/docker/{ID}", V1_MEMORY)
    write(tmp_path / f"sys/fs/cgroup/unified/docker/{ID}", {"memory.pressure": PSI_TEXT.format(0, 0)})
    machine(tmp_path, f"4:memory:/docker/{ID}\n0::/docker/{ID}\n", HYBRID_MOUNTS)
    samples = ticks.next()
    assert (of(samples, "observed")[0].text or "").startswith("memory cgroup v1 /docker/")
    read = values(samples)
    assert read["memory_limit_bytes"] == 256 * MIB
    assert read["swap_current_bytes"] == 8192
    assert (read["failcnt_total"], read["under_oom"], read["oom_kill_total"]) == (9, 0, 0)
    assert "memsw_max_bytes" not in read, "the largest number is no limit"
    write(tmp_path / f"sys/fs/cgroup/unified/docker/{ID}", {"memory.pressure": PSI_TEXT.format(300_000, 0)})
    assert values(ticks.next())["psi_memory_some_percent"] == pytest.approx(30)


def test_kill_is_a_happening_with_the_state_at_that_moment(tmp_path: Path, ticks: Ticks) -> None:
    v2_machine(tmp_path)
    ticks.next()
    folder = tmp_path / f"sys/fs/cgroup/system.slice/docker-{ID}.scope"
    write(folder, {"memory.events": "max 9\noom 1\noom_kill 2\n"})
    samples = ticks.next(0.1)
    (kill,) = of(samples, "oom_kill")
    assert kill.labels["container"] == ID
    assert kill.labels["n"] == "2"
    assert kill.text == (
        f"out of memory: 2 processes of the server's cgroup killed (held {100 * MIB} bytes of {256 * MIB} just before)"
    )
    assert of(ticks.next(0.1), "oom_kill") == []


def test_stall_with_the_killer_off_is_told_and_a_blink_is_not(tmp_path: Path, ticks: Ticks) -> None:
    folder = write(tmp_path / "sys/fs/cgroup/memory/job", V1_MEMORY)
    machine(tmp_path, "4:memory:/job\n0::/\n", HYBRID_MOUNTS)
    ticks.next()
    stuck = {"memory.oom_control": "oom_kill_disable 1\nunder_oom 1\noom_kill 0\n"}
    calm = {"memory.oom_control": V1_MEMORY["memory.oom_control"]}
    write(folder, stuck)
    assert of(ticks.next(), "stalled") == []
    write(folder, calm)
    assert of(ticks.next(), "stall_over") == []
    write(folder, stuck)
    ticks.next()
    (told,) = of(ticks.next(), "stalled")
    assert "its OOM killer is off" in (told.text or "")
    write(folder, calm)
    assert len(of(ticks.next(), "stall_over")) == 1


def test_limit_that_is_set_meanwhile_is_told(tmp_path: Path, ticks: Ticks) -> None:
    v2_machine(tmp_path)
    ticks.next()
    write(tmp_path / f"sys/fs/cgroup/system.slice/docker-{ID}.scope", {"memory.max": "max\n"})
    (told,) = of(ticks.next(), "limit_changed")
    assert told.text == f"memory_max_bytes: {256 * MIB} → unlimited"


def test_directory_that_vanishes_leaves_its_last_counters_and_the_next_one_is_found(
    tmp_path: Path, ticks: Ticks
) -> None:
    v2_machine(tmp_path, V2_FILES | {"memory.events": "oom 1\noom_kill 1\n"})
    ticks.next()
    shutil.rmtree(tmp_path / f"sys/fs/cgroup/system.slice/docker-{ID}.scope")
    shutil.rmtree(tmp_path / "proc/110")
    samples = ticks.next()
    (gone,) = of(samples, "cgroup_gone")
    assert gone.labels["oom_kill_total"] == "1"
    assert gone.labels["memory_peak_bytes"] == str(200 * MIB)
    assert gone.labels["container"] == ID
    assert of(ticks.next(), "observed") == [], "a server that is away for a moment does not make us blind"
    v2_machine(tmp_path, path=f"/system.slice/docker-{OTHER}.scope")
    samples = ticks.next()
    (new,) = of(samples, "cgroup_new")
    assert new.labels["container"] == OTHER
    assert values(samples)["oom_kill_total"] == 0


def test_container_that_restarts_under_the_same_name_is_another_cgroup(tmp_path: Path, ticks: Ticks) -> None:
    v2_machine(tmp_path)
    ticks.next()
    folder = tmp_path / f"sys/fs/cgroup/system.slice/docker-{ID}.scope"
    folder.rename(tmp_path / "kept-so-that-its-inode-is-not-used-again")
    v2_machine(tmp_path, V2_FILES | {"memory.current": "1\n"})
    assert len(of(ticks.next(), "cgroup_gone")) == 1
    samples = ticks.next()
    assert len(of(samples, "cgroup_new")) == 1
    assert values(samples)["memory_current_bytes"] == 1


def test_cgroup_in_which_we_are_too_is_watched_and_called_shared(tmp_path: Path, ticks: Ticks) -> None:
    session = "/user.slice/user-0.slice/session-1.scope"
    v2_machine(tmp_path, path=session)
    samples = ticks.next()
    assert of(samples, "observed")[0].text == f"memory cgroup v2 {session}, shared with others"
    assert values(samples)["own"] == 0


def test_memory_that_only_a_slice_counts_is_taken_from_there(tmp_path: Path, ticks: Ticks) -> None:
    v2_machine(tmp_path, {"memory.pressure": PSI_TEXT.format(0, 0), "cgroup.procs": "110\n"}, "/a.slice/llm.service")
    write(tmp_path / "sys/fs/cgroup/a.slice", {"memory.current": "77\n"})
    samples = ticks.next()
    assert of(samples, "observed")[0].text == "memory cgroup v2 /a.slice, shared with others"
    assert values(samples)["memory_current_bytes"] == 77


def test_root_that_a_container_sees_is_its_own_cgroup(tmp_path: Path, ticks: Ticks) -> None:
    write(tmp_path / "sys/fs/cgroup", V2_FILES)
    machine(tmp_path, "0::/\n", V2_MOUNT)
    samples = ticks.next()
    assert of(samples, "observed")[0].text == "memory cgroup v2 /, shared with others"
    assert values(samples)["memory_limit_bytes"] == 256 * MIB


@pytest.mark.parametrize(
    ("lives", "mounts", "why"),
    [("0::/\n", V2_MOUNT, "root cgroup"), ("0::/../x\n", V2_MOUNT, "can be found in the mount table")],
)
def test_server_without_a_cgroup_is_said(tmp_path: Path, ticks: Ticks, lives: str, mounts: str, why: str) -> None:
    write(tmp_path / "sys/fs/cgroup", {})
    machine(tmp_path, lives, mounts)
    (observed,) = of(ticks.next(), "observed")
    assert observed.value == 0
    assert why in (observed.text or "")


# ---------------------------------------------------------------------------------------------------------------------
# On this machine

SERVER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
hoard = []
for word in iter(lambda: sys.stdin.readline().strip(), ""):
    if word == "fork":
        if os.fork() == 0:
            while True: hoard.append(bytearray(os.urandom(1)) * (4 << 20))
    else:
        for _ in range(int(word) // 4): hoard.append(bytearray(os.urandom(1)) * (4 << 20))
        print("held", flush=True)
"""


@contextlib.contextmanager
def limited(limit_mib: int) -> Iterator[tuple[Path, Path | None]]:
    """A memory cgroup without swap, and beside it one of v2 on a hybrid machine; both removed at the end."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("memory cgroups are made by root on Linux")
    memory, unified = None, None
    name = f"loadgen-test-{uuid.uuid4().hex[:12]}"
    for mount in server.mounts(Path("/proc/self/mountinfo").read_bytes()):
        if "memory" in mount.controllers:
            memory = Path(mount.point) / name
        if UNIFIED in mount.controllers:
            unified = Path(mount.point) / name
            enabled = Path(mount.point) / "cgroup.subtree_control"
            if memory is None and enabled.exists() and "memory" in enabled.read_text().split():
                memory = unified
    if memory is None:
        pytest.skip("no memory cgroup hierarchy is mounted")
    folders = [memory] if unified in (None, memory) else [memory, Path(str(unified))]
    made: list[Path] = []
    try:
        for folder in folders:
            try:
                folder.mkdir()
            except OSError as error:
                pytest.skip(f"a cgroup cannot be made: {error.strerror}")
            made.append(folder)
        for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"):
            if (memory / file).exists():
                (memory / file).write_text(str(limit_mib * MIB))
        if (memory / "memory.swap.max").exists():
            (memory / "memory.swap.max").write_text("0")
        yield memory, unified if unified != memory else None
    finally:
        for folder in made:
            if folder.exists():
                wait_for(lambda folder=folder: not (folder / "cgroup.procs").read_text(), "an empty cgroup")  # type: ignore[misc]
                folder.rmdir()


@contextlib.contextmanager
def serving_in(*folders: Path | None) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that lives in these cgroups from its first instruction on."""
    enter = "".join(f'echo $$ > "{folder}/cgroup.procs"; ' for folder in folders if folder)
    with subprocess.Popen(
        ["/bin/sh", "-c", f'{enter}exec "$@"', "sh", sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process_:  # fmt: skip
        try:
            assert process_.stdout is not None
            yield process_, int(process_.stdout.readline())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process_.pid, 9)
            process_.wait()


def happened(folder: Path, metric: str) -> list[Json]:
    return [line for line in lines(folder) if line["monitor"] == "cgroup" and line.get("metric") == metric]


def readings(folder: Path, metric: str) -> list[float]:
    said = [line for line in lines(folder) if line["monitor"] == "cgroup" and metric in line.get("values", {})]
    return [expand(line["values"][metric])[2] for line in said]


def say(to: subprocess.Popen[str], word: str) -> None:
    assert to.stdin is not None
    to.stdin.write(f"{word}\n")
    to.stdin.flush()


@pytest.mark.root
def test_real_cgroup_is_found_its_kill_counted_and_its_end_seen(tmp_path: Path) -> None:
    with limited(64) as (memory, unified), contextlib.ExitStack() as lane_is_up:
        with serving_in(memory, unified) as (child, port):
            config = {"monitors": {"cgroup": {}}, "target_url": f"http://127.0.0.1:{port}"}
            lane = lane_is_up.enter_context(process(tmp_path, "fast", config))
            wait_for(lambda: len(happened(tmp_path, "observed")) > 0, "the cgroup is found")
            (observed,) = happened(tmp_path, "observed")
            assert observed["value"] == 1, observed
            assert observed["labels"]["cgroup"] == f"/{memory.name}"
            say(child, "32")
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            wait_for(lambda: max(readings(tmp_path, "memory_current_bytes"), default=0) > 32 * MIB, "memory is counted")
            assert set(readings(tmp_path, "memory_max_bytes")) == {64 * MIB}
            assert readings(tmp_path, "own")[-1] == 1
            if (memory / "memory.pressure").exists() or unified is not None:
                assert "without pressure" not in observed["text"]
            say(child, "fork")
            wait_for(lambda: len(happened(tmp_path, "oom_kill")) > 0, "the kill is counted")
            assert child.poll() is None, "the victim is the child that asked for memory, not the server"
        wait_for(lambda: not (memory / "cgroup.procs").read_text(), "nobody is left")
        memory.rmdir()
        wait_for(lambda: len(happened(tmp_path, "cgroup_gone")) > 0, "the end is seen")
        lane.terminate()
        assert lane.wait(20) == 0
    (gone,) = happened(tmp_path, "cgroup_gone")
    assert int(gone["labels"]["oom_kill_total"]) >= 1
    assert int(gone["labels"]["memory_peak_bytes"]) > 60 * MIB


@pytest.mark.root
def test_real_pressure_of_a_v2_cgroup_is_seen_beside_v1_memory(tmp_path: Path) -> None:
    with limited(64) as (memory, unified), serving_in(memory, unified) as (child, port):
        ticks = cgroup.watch(cgroup.Options(target_url=f"http://127.0.0.1:{port}"))
        assert of(next(ticks), "observed")[0].value == 1
        pressed: list[Sample] = []

        def tasks_waited() -> bool:
            pressed.extend(s for s in next(ticks) if s.metric == "psi_cpu_some_percent" and s.value > 1)
            return bool(pressed)

        hogs = [
            subprocess.Popen(
                ["/bin/sh", "-c", f'echo $$ > "{unified or memory}/cgroup.procs"; while :; do :; done'],
            )
            for _ in range(2 * (os.cpu_count() or 1))
        ]
        try:
            wait_for(tasks_waited, "tasks of the cgroup waited for a CPU")
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
            ticks.close()  # type: ignore[attr-defined]
        assert child.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_server_beside_us_is_observed_on_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        samples = next(cgroup.watch(cgroup.Options(target_url=f"http://127.0.0.1:{listener.getsockname()[1]}")))
    (observed,) = of(samples, "observed")
    if observed.value == 0:
        pytest.skip(f"this machine has no cgroup to watch: {observed.text}")
    assert "shared with others" in (observed.text or "")
    assert values(samples)["memory_current_bytes"] > 0
