"""Monitors on machines made of files, and the conformance that every monitor file must meet."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import plugins
from loadgen.types import Sample
from monitors import disk, host, process, server, thermal

DATA = Path(__file__).parent / "data/monitors"
MONITORS = Path(host.__file__).parent
NAMES = plugins.names("monitors")


def cases(kind: str) -> dict[str, dict[str, Any]]:
    lines = (DATA / f"{kind}.jsonl").read_text(encoding="utf-8").split("\n")
    return {case["id"]: case for case in map(json.loads, filter(None, lines))}


HOST = cases("host")


def of(samples: list[Sample], metric: str) -> list[Sample]:
    return [s for s in samples if s.metric == metric]


def value(samples: list[Sample], metric: str) -> float | None:
    found = of(samples, metric)
    return found[-1].value if found else None


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(kb: dict[str, int]) -> str:
    return "".join(f"{key + ':':<16}{number:>8} kB\n" for key, number in kb.items())


# ---------------------------------------------------------------------------------------------------------------------
# Every monitor


@pytest.mark.parametrize("name", NAMES)
def test_every_monitor_has_lane_period_options_and_says_first_whether_it_sees(name: str, tmp_path: Path) -> None:
    module = plugins.load("monitors", name)
    assert module.LANE in {"fast", "gpu", "slow"}
    assert 0.05 <= module.PERIOD_S <= 60
    assert plugins.about("monitors", name)
    for option in fields(module.Options):
        assert option.default is not MISSING or option.default_factory is not MISSING
    samples = first_tick(module, module.Options(**{"root": str(tmp_path)} if has_root(module) else {}))
    assert samples[0].metric == "observed"
    assert samples[0].text is not None
    assert {s.monitor for s in samples} == {name}


def has_root(module: ModuleType) -> bool:
    return "root" in {option.name for option in fields(module.Options)}


def first_tick(module: ModuleType, options: object) -> list[Sample]:
    watch = module.watch(options)
    if module.LANE != "slow":
        samples = next(cast("Iterator[list[Sample]]", watch))
        watch.close()
        return samples

    async def run() -> list[Sample]:
        samples = await anext(cast("AsyncIterator[list[Sample]]", watch))
        await watch.aclose()
        return samples

    return asyncio.run(run())


@pytest.mark.parametrize("name", [n for n in NAMES if plugins.load("monitors", n).LANE == "fast"])
def test_fast_lane_imports_the_standard_library_only(name: str) -> None:
    for node in ast.walk(ast.parse((MONITORS / f"{name}.py").read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        allowed = {*sys.stdlib_module_names, "loadgen", "monitors"}  # what `monitors` imports: tests/test_invariants.py
        for module in modules:
            assert module.partition(".")[0] in allowed, f"{name} imports {module}"


def test_readme_lists_each_monitor_as_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\d.]+) s \|", (MONITORS / "README.md").read_text(), re.MULTILINE)
    code = {n: plugins.load("monitors", n) for n in NAMES}
    assert {(n, lane, float(period)) for n, lane, period in rows} == {
        (n, module.LANE, module.PERIOD_S) for n, module in code.items()
    }


def test_readme_names_every_happening_and_every_metric_of_the_tables() -> None:
    readme = (MONITORS / "README.md").read_text()
    from monitors import engine, kernel

    wanted = {s.name for s in (*kernel.SIGNALS, *kernel.USER_SIGNALS)}
    wanted |= {*host.MEMINFO.values(), *host.VMSTAT_RATES.values(), *host.VMSTAT_TOTALS.values()}
    wanted |= {*engine.COUNTERS, *engine.SUMMED_GAUGES, *engine.WORST_GAUGES, *engine.LABEL_FACTS}
    for name in NAMES:
        source = (MONITORS / f"{name}.py").read_text()
        wanted |= set(re.findall(rf'Sample\(\s*"{name}", "(\w+)"', source))
        wanted |= set(re.findall(r'happening\(\s*"(\w+)"', source))
    assert [metric for metric in sorted(wanted) if f"`{metric}`" not in readme] == []


# ---------------------------------------------------------------------------------------------------------------------
# host


def host_ticks(root: Path, n: int = 1, between: Callable[[], object] = lambda: None) -> list[list[Sample]]:
    watch = host.watch(host.Options(root=str(root)))
    out = [next(watch)]
    for _ in range(n - 1):
        between()
        out.append(next(watch))
    watch.close()  # type: ignore[attr-defined]
    return out


def test_machine_without_swap_has_swap_zero_and_no_swap_rates(tmp_path: Path) -> None:
    given_, expect = HOST["host-no-swap"]["input"], HOST["host-no-swap"]["expect"]
    root = tree(tmp_path, {"proc/meminfo": meminfo({"MemTotal": 1, **given_["meminfo_kb"]}), "proc/vmstat": ""})
    first, second = host_ticks(root, 2)
    assert value(first, "swap_total_bytes") == expect["swap_total"]
    assert value(second, "pswpin_pages_per_s") is expect["swap_io"]
    assert "swap rates" in (first[0].text or "")


def test_headroom_is_available_not_free(tmp_path: Path) -> None:
    given_, expect = HOST["host-free-is-not-available"]["input"], HOST["host-free-is-not-available"]["expect"]
    (samples,) = host_ticks(tree(tmp_path, {"proc/meminfo": meminfo(given_["meminfo_kb"])}))
    available = value(samples, "mem_available_bytes")
    assert available is not None
    assert round(available / 2**30, 1) == expect["headroom_gib"]
    assert value(samples, "mem_free_bytes") == given_["meminfo_kb"]["MemFree"] * 1024


def test_kernel_without_pressure_files_has_no_pressure_and_says_so(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": meminfo({"MemTotal": 9, "MemAvailable": 5}), "proc/vmstat": "oom_kill 3\n"})
    first, second = host_ticks(root, 2)
    assert [s for s in first + second if s.metric.startswith("psi_")] == []
    assert first[0].value == 1.0
    assert "pressure of memory" in (first[0].text or "")
    assert value(first, "oom_kill_total") == 3


def test_machine_without_meminfo_is_not_observed(tmp_path: Path) -> None:
    (samples,) = host_ticks(tmp_path)
    assert [(s.metric, s.value) for s in samples] == [("observed", 0.0)]


def test_machine_whose_files_come_later_is_observed_from_then_on(tmp_path: Path) -> None:
    files = {"proc/meminfo": meminfo({"MemTotal": 9, "MemFree": 5})}
    first, second = host_ticks(tmp_path, 2, lambda: tree(tmp_path, files))
    assert of(first, "observed")[0].value == 0.0
    assert of(second, "observed")[0].value == 1.0


def test_counters_become_rates_over_the_time_between_ticks() -> None:
    before = {"pswpin": 100, "pgmajfault": 5, "psi_memory_some": 1_000_000}
    now = {"pswpin": 400, "pgmajfault": 5, "psi_memory_some": 1_050_000, "pswpout": 7}
    assert host.rates(before, now, 100_000_000) == {
        "pswpin_pages_per_s": 3000.0,
        "pgmajfault_per_s": 0.0,
        "psi_memory_some_percent": 50.0,
    }


def test_counter_that_falls_has_no_rate() -> None:
    assert host.rates({"pswpin": 9, "psi_io_some": 9}, {"pswpin": 1, "psi_io_some": 1}, 10**8) == {}


def test_stall_of_one_tick_never_exceeds_all_of_it() -> None:
    assert host.rates({"psi_io_full": 0}, {"psi_io_full": 10**6}, 10**8) == {"psi_io_full_percent": 100.0}


def test_driver_residual_is_what_the_kernels_books_do_not_explain(tmp_path: Path) -> None:
    kb = {"MemTotal": 1000, "MemFree": 100, "MemAvailable": 200, "Active": 50, "Inactive": 60, "Unevictable": 5}
    (without,) = host_ticks(tree(tmp_path / "a", {"proc/meminfo": meminfo(kb)}))
    assert value(without, "driver_residual_bytes") is None, "a missing term is no zero"
    (samples,) = host_ticks(
        tree(tmp_path / "b", {"proc/meminfo": meminfo({**kb, "Slab": 20, "PageTables": 10, "CmaFree": 7})})
    )
    assert value(samples, "driver_residual_bytes") == (1000 - 100 - 50 - 60 - 20 - 10 - 5) * 1024
    assert value(samples, "cma_free_bytes") == 7 * 1024


def numa(root: Path, sizes: dict[int, int]) -> None:
    for node, kib in sizes.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        text = f"MemTotal: {kib} kB\nNode {node} MemFree: {kib // 4} kB\nNode {node} MemUsed: {kib - kib // 4} kB\n"
        (folder / "meminfo").write_text(
            f"Node {node} {text}Node {node} FilePages: 8 kB\nNode {node} AnonPages: 16 kB\n"
        )


def node_samples(root: Path) -> list[Sample]:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 500 kB\n")
    return [s for s in next(host.watch(host.Options(root=str(root)))) if s.metric.startswith("node_")]


def test_each_node_with_memory_has_figures_where_there_are_several(tmp_path: Path) -> None:
    # GH200: the CPU's memory is node 0, the GPU's node 1; nodes 2 to 8 are kept for its partitions and empty
    numa(tmp_path, {0: 480 << 20, 1: 96 << 20, **dict.fromkeys(range(2, 9), 0)})
    found = {(s.labels["node"], s.metric): s.value for s in node_samples(tmp_path)}
    assert {node for node, _ in found} == {"0", "1"}
    assert found["1", "node_total_bytes"] == 96 << 30
    assert found["1", "node_free_bytes"] == 24 << 30
    assert found["1", "node_used_bytes"] == 72 << 30


def test_machine_whose_memory_is_one_node_has_no_figures_of_nodes(tmp_path: Path) -> None:
    numa(tmp_path, {0: 1000, 1: 0})
    assert node_samples(tmp_path) == []


def test_file_that_a_simulated_machine_replaces_is_read_anew(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": meminfo({"MemTotal": 9, "MemFree": 5})})

    def replaced() -> None:
        tree(tmp_path, {"proc/new": meminfo({"MemTotal": 9, "MemFree": 1})})
        (tmp_path / "proc/new").rename(tmp_path / "proc/meminfo")

    _, second = host_ticks(root, 2, replaced)
    assert value(second, "mem_free_bytes") == 1024


def test_zones_are_added_up() -> None:
    seen = host.vmstat(
        b"allocstall_dma 1\nallocstall_normal 2\nallocstall_movable 4\npgscan_direct_throttle 9\npswpin 1  \n"
    )
    assert seen == {"allocstall_*": 7, "pswpin": 1}
    text = b"Node 0, zone      DMA  1 1 1 1 1 1 1 1 2 1 3\nNode 0, zone   Normal  9 9 9 9 9 9 9 9 9 9 10\n"
    assert host.buddyinfo(text) == {"buddy_order8_blocks": 2 + 1 + 3 + 9 + 9 + 10, "buddy_order10_blocks": 13}


@given(st.binary())
def test_no_bytes_break_the_parsers_of_the_host(data: bytes) -> None:
    host.meminfo(data)
    host.vmstat(data)
    host.pressure(data)
    host.buddyinfo(data)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_this_machine_is_observed() -> None:
    first, second = host_ticks(Path("/"), 2)
    assert first[0].value == 1.0
    total, available = value(first, "mem_total_bytes"), value(first, "mem_available_bytes")
    assert total is not None
    assert available is not None
    assert 0 < available <= total
    assert value(second, "pgmajfault_per_s") is not None


# ---------------------------------------------------------------------------------------------------------------------
# process


def stat(pid: int, name: str, parent: int, *, state: str = "S", group: int = 100, start: int = 1000) -> str:
    return f"{pid} ({name}) {state} {parent} {group} 100 0 -1 0 0 0 0 0 7 3 0 0 20 0 4 0 {start} 0 0\n"


def status(anon_kb: int, swap_kb: int = 0) -> str:
    return f"VmRSS:\t{anon_kb} kB\nRssAnon:\t{anon_kb} kB\nRssFile:\t0 kB\nVmSwap:\t{swap_kb} kB\nThreads:\t4\n"


def machine(root: Path, port: int = 8000) -> Path:
    """A start script (100), an API server (110, listens), an engine core (120), a worker (130); a shell (50) above."""
    tree(
        root,
        {
            "proc/net/tcp": "  sl  local_address rem_address   st\n"
            f"   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1\n",
            "proc/50/stat": stat(50, "bash", 1, group=50),
            "proc/100/stat": stat(100, "start (v2).sh", 50),
            "proc/110/stat": stat(110, "python3", 100, start=1001),
            "proc/120/stat": stat(120, "VLLM::EngineCor", 110, start=1002),
            "proc/130/stat": stat(130, "VLLM::Worker", 120, start=1003),
            "proc/900/stat": stat(900, "bystander", 1, group=900),
        },
    )
    for pid in (50, 100, 110, 120, 130, 900):
        tree(root, {f"proc/{pid}/status": status(pid, swap_kb=1), f"proc/{pid}/cgroup": "0::/user.slice\n"})
        (root / f"proc/{pid}/fd").mkdir(exist_ok=True)
    (root / "proc/110/fd/3").symlink_to("socket:[777]")
    return root


def remove(root: Path, pid: int) -> None:
    for name in ("stat", "status", "cgroup"):
        (root / f"proc/{pid}/{name}").unlink(missing_ok=True)
    for link in (root / f"proc/{pid}/fd").iterdir():
        link.unlink()
    (root / f"proc/{pid}/fd").rmdir()
    (root / f"proc/{pid}").rmdir()


def follow(root: Path, url: str = "http://127.0.0.1:8000/v1") -> Iterator[list[Sample]]:
    return process.watch(process.Options(root=str(root), target_url=url))


def test_tree_is_found_by_the_port_from_script_to_worker(tmp_path: Path) -> None:
    samples = next(follow(machine(tmp_path)))
    assert of(samples, "observed")[0].text == "pid 110 (python3) serves the port; its tree begins at pid 100"
    sums = {s.metric: s.value for s in samples if not s.labels}
    assert sums["processes"] == 4
    assert sums["rss_anon_bytes"] == (100 + 110 + 120 + 130) * 1024
    assert sums["vm_swap_bytes"] == 4 * 1024
    assert {s.labels["name"] for s in samples if s.labels} == {
        "start (v2).sh",
        "python3",
        "VLLM::EngineCor",
        "VLLM::Worker",
    }


def test_worker_that_vanishes_is_named_and_the_sum_goes_on(tmp_path: Path) -> None:
    ticks = follow(machine(tmp_path))
    next(ticks)
    remove(tmp_path, 130)
    samples = next(ticks)
    (gone,) = of(samples, "process_gone")
    assert (gone.labels["pid"], gone.labels["role"]) == ("130", "member")
    assert {s.metric: s.value for s in samples if not s.labels}["rss_anon_bytes"] == (100 + 110 + 120) * 1024


def test_child_that_ends_between_listing_and_reading_costs_only_itself(tmp_path: Path) -> None:
    case = HOST["host-nosuchprocess-race"]
    rss = {100: case["input"]["psutil"]["parent_rss"], 110: case["input"]["psutil"]["memory_info"]["11"]["rss"]}
    ticks = follow(machine(tmp_path))
    next(ticks)
    for pid, kb in rss.items():
        tree(tmp_path, {f"proc/{pid}/status": status(kb)})
    (tmp_path / "proc/120/stat").unlink()
    remove(tmp_path, 130)
    samples = next(ticks)
    assert {s.metric: s.value for s in samples if not s.labels}["rss_bytes"] == case["expect"]["tree_rss"] * 1024
    assert len(of(samples, "process_gone")) == case["expect"]["gone"]
    assert value(next(ticks), "processes") == 2


def test_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    ticks = follow(machine(tmp_path))
    next(ticks)
    tree(tmp_path, {"proc/130/stat": stat(130, "cron", 1, group=9, start=99999)})
    assert [s.labels["pid"] for s in of(next(ticks), "process_gone")] == ["130"]


def test_zombie_is_gone(tmp_path: Path) -> None:
    ticks = follow(machine(tmp_path))
    next(ticks)
    tree(tmp_path, {"proc/130/stat": stat(130, "VLLM::Worker", 120, state="Z", start=1003)})
    (gone,) = of(next(ticks), "process_gone")
    assert "zombie" in (gone.text or "")


def test_listener_that_comes_back_under_a_new_pid_is_a_restart(tmp_path: Path) -> None:
    ticks = follow(machine(tmp_path))
    next(ticks)
    table = (tmp_path / "proc/net/tcp").read_text()
    (tmp_path / "proc/net/tcp").write_text("")
    remove(tmp_path, 110)
    gone = of(next(ticks), "process_gone")
    assert [s.labels["role"] for s in gone] == ["listener"]
    tree(tmp_path, {"proc/210/stat": stat(210, "python3", 100, start=5000), "proc/210/status": status(1)})
    tree(tmp_path, {"proc/210/cgroup": "0::/user.slice\n"})
    (tmp_path / "proc/210/fd").mkdir()
    (tmp_path / "proc/210/fd/3").symlink_to("socket:[777]")
    (tmp_path / "proc/net/tcp").write_text(table)
    samples = next(ticks)
    (restart,) = of(samples, "restart")
    assert restart.labels["pid"] == "210"
    assert float(restart.labels["down_s"]) >= 0


def test_state_that_lasts_is_named_and_its_end_too(tmp_path: Path) -> None:
    ticks = follow(machine(tmp_path))
    next(ticks)
    tree(tmp_path, {"proc/120/stat": stat(120, "VLLM::EngineCor", 110, state="D", start=1002)})
    assert of(next(ticks), "process_state") == []
    (stuck,) = of(next(ticks), "process_state")
    assert (stuck.labels["pid"], stuck.labels["state"]) == ("120", "D")
    tree(tmp_path, {"proc/120/stat": stat(120, "VLLM::EngineCor", 110, start=1002)})
    (again,) = of(next(ticks), "process_state")
    assert again.labels["state"] == "S"


def test_port_that_docker_forwards_is_followed_into_the_container(tmp_path: Path) -> None:
    root = machine(tmp_path)
    listens = "h\n   0: 00000000:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 888 1\n"
    (root / "proc/110/fd/3").unlink()
    tree(
        root,
        {
            "proc/600/stat": stat(600, "docker-proxy", 1, group=600),
            "proc/600/cmdline": "\0".join(
                ["docker-proxy", "-container-ip", "172.17.0.2", "-container-port", "8001", ""]
            ),
            "proc/110/net/tcp": listens,
            "proc/110/net/fib_trie": "Local:\n  +-- 0.0.0.0/0\n        |-- 172.17.0.2\n           /32 host LOCAL\n",
        },
    )
    for pid, link in ((600, "socket:[777]"), (110, "socket:[888]")):
        (root / f"proc/{pid}/fd").mkdir(exist_ok=True)
        (root / f"proc/{pid}/fd/3").symlink_to(link)
    for name, space in (("self", 1), ("600", 1), ("110", 2), ("120", 2)):
        (root / f"proc/{name}/ns").mkdir(parents=True)
        (root / f"proc/{name}/ns/net").symlink_to(f"net:[{space}]")
    samples = next(follow(root))
    assert "pid 110" in (of(samples, "observed")[0].text or "")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://192.0.2.7:8000", "target is not on this host"),
        ("", "no target_url"),
        ("http://127.0.0.1:8001", "nobody listens on port 8001"),
    ],
)
def test_server_that_cannot_be_seen_is_said(tmp_path: Path, url: str, why: str) -> None:
    samples = next(follow(machine(tmp_path), url))
    assert samples[0].value == 0.0
    assert why in (samples[0].text or "")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_real_server_is_found_and_its_death_seen() -> None:
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        ticks = follow(Path("/"), f"http://localhost:{int(server.stdout.readline())}")
        samples = next(ticks)
        assert of(samples, "observed")[0].value == 1.0
        assert {s.labels["pid"] for s in samples if s.labels} == {str(server.pid)}, (
            "the test that started it is not part"
        )
        server.kill()
        server.wait()
        (gone,) = of(next(ticks), "process_gone")
    assert gone.labels["pid"] == str(server.pid)


def test_own_address_is_here_and_a_reserved_one_is_not() -> None:
    assert server.is_here("127.0.0.1")
    assert server.is_here(socket.gethostbyname("localhost"))
    assert not server.is_here("192.0.2.7")


# ---------------------------------------------------------------------------------------------------------------------
# thermal, disk


def test_sensors_are_named_by_chip_and_label(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "sys/class/hwmon/hwmon0/name": "nvme\n",
            "sys/class/hwmon/hwmon0/temp1_input": "41850\n",
            "sys/class/hwmon/hwmon0/temp1_label": "Composite\n",
            "sys/class/hwmon/hwmon0/fan1_input": "none\n",
            "sys/class/thermal/thermal_zone0/type": "acpitz\n",
            "sys/class/thermal/thermal_zone0/temp": "50000\n",
        },
    )
    samples = next(thermal.watch(thermal.Options(root=str(root))))
    read = {(s.labels["chip"], s.metric): s.value for s in samples if s.labels}
    assert read == {("nvme", "temperature_c"): 41.85, ("acpitz", "temperature_c"): 50.0}


def test_sensor_at_its_critical_temperature_is_a_happening_until_it_has_cooled(tmp_path: Path) -> None:
    device = "sys/class/hwmon/hwmon0"
    root = tree(
        tmp_path, {f"{device}/name": "nvme\n", f"{device}/temp1_crit": "84850\n", f"{device}/temp1_input": "70000\n"}
    )
    ticks = thermal.watch(thermal.Options(root=str(root)))
    crossed = []
    for celsius in (70, 85, 84, 86, 79, 85):
        (root / device / "temp1_input").write_text(f"{celsius}000\n")
        crossed += [celsius] * len(of(next(ticks), "critical_temperature"))
    assert crossed == [85, 85], "84 is no cooling down, 79 is"


def test_limit_of_all_bits_set_is_no_limit(tmp_path: Path) -> None:
    device = "sys/class/hwmon/hwmon0"
    root = tree(
        tmp_path, {f"{device}/name": "nvme\n", f"{device}/temp2_crit": "65261850\n", f"{device}/temp2_input": "40000\n"}
    )
    (sensor,) = thermal.sensors(root)
    assert sensor.crit is None


def test_cores_coolers_and_clocks_of_a_server_are_few_figures(tmp_path: Path) -> None:
    device = "sys/class/hwmon/hwmon1"
    files = {f"{device}/name": "coretemp\n", f"{device}/power1_average": "9000000\n", f"{device}/power1_input": "8\n"}
    for n, label in enumerate(["Package id 0", *(f"Core {n}" for n in range(64))], 1):
        files |= {f"{device}/temp{n}_label": label + "\n", f"{device}/temp{n}_input": "50000\n"}
    for n in range(64):
        files[f"sys/class/thermal/cooling_device{n}/type"] = "Processor\n"
        files[f"sys/class/thermal/cooling_device{n}/cur_state"] = f"{int(n == 9)}\n"
        files[f"sys/devices/system/cpu/cpufreq/policy{n}/scaling_cur_freq"] = "2400000\n"
    samples = next(thermal.watch(thermal.Options(root=str(tree(tmp_path, files)))))
    assert [(s.metric, s.value) for s in samples] == [
        ("observed", 1.0), ("temperature_c", 50.0), ("power_w", 9.0), ("cooling_level", 1.0), ("cpu_clock_mhz", 2400.0),
    ]  # fmt: skip


def test_machine_without_sensors_says_so_once(tmp_path: Path) -> None:
    ticks = thermal.watch(thermal.Options(root=str(tmp_path)))
    assert next(ticks)[0].value == 0.0
    assert next(ticks, None) is None


def test_free_space_of_the_run_folder_and_a_volume_that_is_not_there(tmp_path: Path) -> None:
    samples = first_tick(disk, disk.Options(run_folder=str(tmp_path), volumes=(str(tmp_path / "none"),)))
    found = os.statvfs(tmp_path)
    assert value(samples, "total_bytes") == found.f_blocks * found.f_frsize
    assert [s.labels["path"] for s in of(samples, "unreadable")] == [str(tmp_path / "none")]
