"""Which processes are the server: of a container, of a unit, of a shell; and their PSS while nothing is asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.types import Sample
from monitors import process, smaps

ID = "c0ffee" + "0" * 58
CONTAINER = f"/system.slice/docker-{ID}.scope"
MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
ROLLUP = "Rss:        4000 kB\nPss:        3000 kB\nPss_Anon:   2000 kB\nSwap:          8 kB\nSwapPss:       4 kB\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add(root: Path, pid: int, name: str, parent: int, lives: str, *, group: int | None = None, start: int = 1) -> None:
    group = group or pid
    write(
        root / f"proc/{pid}/stat",
        f"{pid} ({name}) S {parent} {group} {group} 0 -1 0 0 0 0 0 7 3 0 0 20 0 4 0 {start} 0 0\n",
    )
    write(root / f"proc/{pid}/status", f"VmRSS:\t{pid} kB\nRssAnon:\t{pid} kB\nVmSwap:\t1 kB\n")
    write(root / f"proc/{pid}/cgroup", f"0::{lives}\n")
    write(root / f"proc/{pid}/smaps_rollup", ROLLUP)
    (root / f"proc/{pid}/fd").mkdir(exist_ok=True)


def machine(root: Path, lives: str) -> Path:
    """tini (100) started the API server (110, listens), which started an engine core (120) in a group of its own; a
    health check (300) was sent in from outside; a shim (90) is the parent of both; a bystander (900) has nothing to do
    with it."""
    listens = f"h\n 0: 00000000:{8000:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 777 1\n"
    write(root / "proc/net/tcp", listens)
    write(root / "proc/self/mountinfo", MOUNT)
    write(root / "proc/self/cgroup", "0::/user.slice/user-0.slice/session-1.scope\n")
    add(root, 90, "containerd-shim", 1, "/system.slice/containerd.service")
    add(root, 100, "tini", 90, lives)
    add(root, 110, "python3", 100, lives)
    add(root, 120, "VLLM::EngineCor", 110, lives)
    add(root, 300, "curl", 90, lives)
    add(root, 900, "bystander", 1, "/system.slice/other.service")
    (root / "proc/110/fd/3").symlink_to("socket:[777]")
    write(root / f"sys/fs/cgroup{lives}/cgroup.procs", "100\n110\n300\n")
    write(root / f"sys/fs/cgroup{lives}/workers/cgroup.procs", "120\n")
    return root


def remove(root: Path, pid: int, lives: str) -> None:
    shutil.rmtree(root / f"proc/{pid}")
    procs = root / f"sys/fs/cgroup{lives}/cgroup.procs"
    procs.write_text("".join(line for line in procs.read_text().splitlines(keepends=True) if line != f"{pid}\n"))


class Ticks:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**9
        monkeypatch.setattr("loadgen.clock.now_ns", lambda: self.ns)
        self._watch = process.watch(process.Options(root=str(root), target_url="http://127.0.0.1:8000"))

    def next(self) -> list[Sample]:
        self.ns += 5_000_000_000  # the tree is looked at anew each time
        return next(self._watch)


@pytest.fixture
def ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ticks:
    return Ticks(tmp_path, monkeypatch)


def told(samples: list[Sample], metric: str) -> list[Sample]:
    return [s for s in samples if s.metric == metric and s.text is not None]


def total(samples: list[Sample], metric: str) -> float | None:
    return next((s.value for s in samples if s.metric == metric and not s.labels), None)


def test_everything_in_the_container_is_the_server(tmp_path: Path, ticks: Ticks) -> None:
    machine(tmp_path, CONTAINER)
    samples = ticks.next()
    (observed,) = told(samples, "observed")
    assert observed.text == (
        f"pid 110 (python3) serves the port in container c0ffee000000 (docker); "
        f"all processes of cgroup {CONTAINER} are the server"
    )
    assert observed.labels == {
        "pid": "110", "name": "python3", "start_ticks": "1", "container": ID, "engine": "docker", "cgroup": CONTAINER,
    }  # fmt: skip
    assert total(samples, "processes") == 4
    assert total(samples, "rss_anon_bytes") == (100 + 110 + 120 + 300) * 1024


def test_visitor_of_a_container_may_leave_without_a_word_and_a_worker_not(tmp_path: Path, ticks: Ticks) -> None:
    machine(tmp_path, CONTAINER)
    ticks.next()
    remove(tmp_path, 300, CONTAINER)
    shutil.rmtree(tmp_path / "proc/120")
    samples = ticks.next()
    (gone,) = told(samples, "process_gone")
    assert (gone.labels["pid"], gone.labels["role"], gone.labels["seen_s"]) == ("120", "member", "5.0")
    assert total(samples, "processes") == 2
    add(tmp_path, 301, "curl", 90, CONTAINER)
    write(tmp_path / f"sys/fs/cgroup{CONTAINER}/cgroup.procs", "100\n110\n301\n")
    samples = ticks.next()
    assert told(samples, "process_new") == []
    assert total(samples, "processes") == 3, "its memory counts all the same"


def test_everything_in_a_unit_is_the_server_whoever_its_parent_is(tmp_path: Path, ticks: Ticks) -> None:
    machine(tmp_path, "/system.slice/llm.service")
    samples = ticks.next()
    (observed,) = told(samples, "observed")
    assert observed.labels["unit"] == "llm.service"
    assert "in unit llm.service" in (observed.text or "")
    assert total(samples, "processes") == 4
    remove(tmp_path, 300, "/system.slice/llm.service")
    assert told(ticks.next(), "process_gone")[0].labels["pid"] == "300"


def test_session_is_not_the_server_and_its_tree_is_climbed(tmp_path: Path, ticks: Ticks) -> None:
    machine(tmp_path, "/user.slice/user-1000.slice/session-3.scope")
    samples = ticks.next()
    assert told(samples, "observed")[0].text == "pid 110 (python3) serves the port; its tree begins at pid 110"
    assert total(samples, "processes") == 2, "the listener and its child"


def test_cgroup_of_ours_is_not_the_servers_alone(tmp_path: Path, ticks: Ticks) -> None:
    machine(tmp_path, CONTAINER)
    write(tmp_path / "proc/self/cgroup", f"0::{CONTAINER}\n")
    samples = ticks.next()
    (observed,) = told(samples, "observed")
    assert observed.labels["container"] == ID, "it is in the container all the same"
    assert "cgroup" not in observed.labels
    assert total(samples, "processes") == 2


def test_container_that_comes_back_has_another_id(tmp_path: Path, ticks: Ticks) -> None:
    machine(tmp_path, CONTAINER)
    ticks.next()
    for name in ("proc", "sys"):
        shutil.rmtree(tmp_path / name)
    write(tmp_path / "proc/net/tcp", "")
    assert told(ticks.next(), "process_gone")[0].labels["role"]
    other = f"/system.slice/docker-{'ab' * 32}.scope"
    for name in ("proc", "sys"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    machine(tmp_path, other)
    samples = ticks.next()
    (restart,) = told(samples, "restart")
    assert restart.labels["container"] == "ab" * 32
    assert told(samples, "observed")[0].labels["cgroup"] == other


# ---------------------------------------------------------------------------------------------------------------------
# PSS, at its moments


@contextlib.contextmanager
def journal(folder: Path) -> Iterator[list[dict[str, object]]]:
    """What is appended here, the journal has at the end of the block."""
    lines: list[dict[str, object]] = []
    yield lines
    with (folder / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def event(name: str, phase: str, by: str = "shard-0") -> dict[str, object]:
    return {"at": 1, "by": by, "event": name, "phase": phase}


def moments(samples: list[Sample]) -> list[str]:
    return [s.labels["moment"] for s in samples if s.metric == "walk_ms"]


def pss(
    root: Path, folder: Path, steps: list[list[dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> list[list[Sample]]:
    """The monitor's ticks: one at the start, then one after each of the steps, 11 s apart."""
    ns = [10**9]
    monkeypatch.setattr("loadgen.clock.now_ns", lambda: ns[0])

    async def run() -> list[list[Sample]]:
        watch = smaps.watch(smaps.Options(root=str(root), target_url="http://127.0.0.1:8000", run_folder=str(folder)))
        out = [await anext(watch)]
        for step in steps:
            with journal(folder) as lines:
                lines += step
            ns[0] += 11_000_000_000
            out.append(await anext(watch))
        await watch.aclose()  # type: ignore[attr-defined]
        return out

    return asyncio.run(run())


def test_pss_is_read_at_the_start_and_when_no_request_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, CONTAINER)
    ticks = pss(tmp_path, tmp_path, [
        [event("phase_start", "warmup"), event("phase_start", "warmup", "shard-1")],
        [event("phase_end", "warmup"), event("phase_drained", "warmup")],
        [event("phase_drained", "warmup", "shard-1")],
        [event("phase_start", "measure"), event("phase_drained", "warmup")],
        [event("phase_drained", "measure")],
        [],
    ], monkeypatch)  # fmt: skip
    assert [moments(samples) for samples in ticks] == [["start"], [], [], ["warmup"], [], ["measure"], []]
    first = ticks[0]
    assert first[0].metric == "observed"
    sums = {s.metric: s.value for s in first if s.labels == {"moment": "start"}}
    assert sums["pss_bytes"] == 4 * 3000 * 1024
    assert sums["pss_anon_bytes"] == 4 * 2000 * 1024
    assert sums["swap_pss_bytes"] == 4 * 4 * 1024
    assert (sums["processes_read"], sums["processes_skipped"]) == (4, 0)


def test_process_that_would_take_too_long_is_left_out_and_there_is_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, CONTAINER)
    write(tmp_path / "proc/120/status", f"VmRSS:\t{100 << 20} kB\n")
    (samples,) = pss(tmp_path, tmp_path, [], monkeypatch)
    sums = {s.metric: s.value for s in samples if s.labels == {"moment": "start"}}
    assert (sums["processes_read"], sums["processes_skipped"]) == (3, 1)
    assert "pss_bytes" not in sums, "a sum without the largest is none"


def test_journal_that_is_torn_or_missing_costs_nothing(tmp_path: Path) -> None:
    phases = smaps.Phases()
    assert smaps.advance(phases, tmp_path / "journal.jsonl") == ""
    whole = json.dumps(event("phase_start", "a")) + "\n" + json.dumps(event("phase_drained", "a"))
    (tmp_path / "journal.jsonl").write_text('\0\0\n{torn "phase_\n' + whole)
    assert smaps.advance(phases, tmp_path / "journal.jsonl") == "", "its last line is not whole yet"
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write("\n")
    assert smaps.advance(phases, tmp_path / "journal.jsonl") == "a"


@pytest.mark.skipif(sys.platform != "linux", reason="smaps_rollup is Linux")
def test_real_pss_of_a_real_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = smaps.Options(target_url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        seen, why = smaps.sight(options)
        samples = smaps.measure(options, "start")
    if not seen:
        pytest.skip(why)
    # we serve ourselves here, and our own processes are never part of a server's tree: but for the listener
    found = {s.metric: s.value for s in samples if s.labels == {"moment": "start"}}
    assert found["pss_bytes"] > 1 << 20
    assert found["pss_bytes"] <= found["rss_bytes"]
