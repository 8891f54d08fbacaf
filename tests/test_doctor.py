"""`loadgen doctor`: what it reads off a machine, how it grades it, and that it never tells a secret."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import serving
from rich.console import Console

from loadgen import checks, cli, clock, doctor, gpus, machine, plugins, served
from loadgen.checks import Check
from loadgen.look import Seen, look
from loadgen.machine import Busy, ClockState, Machine, Swap, Volume
from loadgen.preflight import Facts
from loadgen.types import Target

ROOT = Path(__file__).parents[1]
PATIENCE_S = 30.0
# Planted where servers keep theirs; none looks like a key of a known maker, so only its place can give it away.
KEYS = {name: f"planted{name}zq" for name in ("argument", "joined", "second", "environment", "password", "known")}

GB10_CPUINFO = "".join(
    f"processor\t: {n}\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU part\t: {part}\n\n"
    for n, part in enumerate(["0xd85"] * 10 + ["0xd87"] * 10)
)
MEMINFO = "MemTotal:  127600000 kB\nMemFree:  9000000 kB\nMemAvailable:  {available} kB\nSwapTotal:  16777212 kB\n"


@pytest.fixture
def spark(tmp_path: Path) -> Path:
    """The file tree of a small unified-memory machine whose owner has turned some knobs."""
    files = {
        "proc/meminfo": MEMINFO.format(available=100_000_000),
        "proc/cpuinfo": GB10_CPUINFO,
        "proc/swaps": "Filename Type Size Used Priority\n/swap.img file 16777212 1024 -2\n"
        "/dev/zram0 partition 8388604 0 100\n",
        "proc/uptime": "5000.12 90000.00\n",
        "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.126.09  Release\n",
        "proc/sys/kernel/osrelease": "6.14.0-1013-nvidia\n",
        "proc/sys/kernel/arch": "aarch64\n",
        "proc/sys/kernel/random/boot_id": "11111111-2222-3333-4444-555555555555\n",
        "proc/sys/vm/swappiness": "0\n",
        "proc/sys/vm/min_free_kbytes": "6291456\n",
        "proc/sys/vm/panic_on_oom": "0\n",
        "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
        "proc/77/comm": "earlyoom\n",
        "proc/self/mountinfo": "30 1 8:1 / / rw - ext4 /dev/x rw\n31 30 0:25 / /sys/fs/cgroup rw - cgroup2 x rw\n",
        "etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
        "sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n",
        "sys/class/dmi/id/board_name": "To be filled by O.E.M.\n",
        "sys/class/dmi/id/product_serial": "SERIAL-42\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "arch_sys_counter\n",
        "sys/bus/pci/devices/000f:01:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/000f:01:00.0/vendor": "0x10de\n",
    }
    for name, text in files.items():
        path = tmp_path / "spark" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "spark"


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def test_machine_is_read_off_its_files(spark: Path) -> None:
    found = machine.read(spark)
    assert found.product == "NVIDIA_DGX_Spark"
    assert found.board is None, "the firmware says that nobody filled it"
    assert found.cpu == "10 × Cortex-X925, 10 × Cortex-A725"
    assert (found.cpus, found.architecture, found.kernel) == (20, "aarch64", "6.14.0-1013-nvidia")
    assert found.distribution == "Ubuntu 24.04.3 LTS"
    assert found.memory_total_bytes == 127_600_000 * 1024
    assert found.swaps == (Swap("file", 16777212 << 10, 1 << 20, -2), Swap("zram", 8388604 << 10, 0, 100))
    assert found.killers == (machine.Killer("earlyoom", 77),)
    assert (found.nvidia_driver, found.gpus) == ("580.126.09", ("NVIDIA",))
    assert (found.transparent_hugepages, found.cgroup, found.clocksource) == ("madvise", "v2", "arch_sys_counter")
    assert found.sysctl["net.ipv4.ip_local_port_range"] == "32768 60999"
    assert found.clock is None, "the tree's clock is not this machine's"
    assert "SERIAL-42" not in repr(found)


def test_empty_tree_is_read_as_nothing_and_says_why(tmp_path: Path) -> None:
    found = machine.read(tmp_path)
    assert (found.cpu, found.memory_total_bytes, found.swaps, found.boot_id) == (None, None, (), None)
    assert found.pressure_stalls is None, "unknown is not off"
    assert found.not_read["memory"] == "no such file or directory"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_is_read_whole() -> None:
    found = machine.read()
    assert found.memory_total_bytes
    assert found.cpus
    assert found.kernel
    assert found.boot_id == clock.boot_id()
    assert found.clock is None or found.clock.max_error_us >= 0
    assert socket.gethostname() not in repr(found) or len(socket.gethostname()) < 4


def test_file_system_is_that_of_the_deepest_mount() -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / /mnt/a\\040b rw shared:1 - nfs4 h:/x rw\n"
        "3 1 0:9 / /mnt rw - tmpfs t rw\n"
    )
    assert machine.file_system(mounts, "/home/x") == "ext4"
    assert machine.file_system(mounts, "/mnt/a b/runs") == "nfs4"
    assert machine.file_system(mounts, "/mnt/x") == "tmpfs"
    assert machine.file_system(mounts, "/mntx") == "ext4"


def test_volume_of_a_folder_that_does_not_exist_yet_is_the_one_above_it(tmp_path: Path) -> None:
    found = machine.volume(tmp_path / "not" / "yet")
    assert found is not None
    assert found.total_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_busy_processes_are_told_apart_from_a_pid_used_again() -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    before = {(1, 10): ("a", 5 * hertz), (2, 10): ("b", 0)}
    after = {(1, 99): ("a", hertz), (2, 10): ("b", hertz // 2), (3, 1): ("ours", hertz)}
    found = machine.busiest(before, after, 1.0, {3})
    assert [(each.name, round(each.cpu_percent)) for each in found] == [("a", 100), ("b", 50)]


def test_driver_that_hangs_is_left_behind_in_time() -> None:
    begin_ns = clock.now_ns()
    found = gpus.ask(0.2, (sys.executable, "-c", "import time; time.sleep(600)"))
    assert found == {"not_read": "the NVIDIA driver gave no answer within 0.2 s"}
    assert (clock.now_ns() - begin_ns) / 1e9 < PATIENCE_S


def test_child_that_dies_is_no_answer() -> None:
    assert gpus.ask(PATIENCE_S, (sys.executable, "-c", "raise SystemExit(7)")) == {
        "not_read": "asking the NVIDIA driver ended with 7"
    }


class Nvml:
    """A driver of a GPU that shares the host's memory: half of the calls are refused, as on GB10."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None, "nvmlSystemGetDriverVersion": b"580.126.09", "nvmlSystemGetCudaDriverVersion_v2": 13010,
            "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": object(), "nvmlDeviceGetName": "NVIDIA GB10",
            "nvmlDeviceGetUUID": "GPU-1", "nvmlDeviceGetCudaComputeCapability": (12, 1),
            "nvmlDeviceGetPersistenceMode": 0,
        }  # fmt: skip

        def call(*_: object) -> Any:
            if name not in answers:
                raise RuntimeError("Not Supported")
            return answers[name]

        return call


def test_gpu_that_refuses_half_of_the_calls_is_told_by_the_other_half() -> None:
    found = gpus.read(Nvml())
    refused = found["gpus"][0].pop("refused")
    assert {"memory_total_bytes", "power_limit_w", "ecc", "processes"} <= set(refused)
    assert set(refused.values()) == {"Not Supported"}
    assert found == {
        "driver": "580.126.09", "cuda": "13.1",
        "gpus": [{"index": 0, "name": "NVIDIA GB10", "uuid": "GPU-1", "persistence": False,
                  "compute_capability": "12.1"}],
    }  # fmt: skip


def test_driver_that_cannot_count_its_gpus_is_no_machine_without_one() -> None:
    class Stuck(Nvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise RuntimeError("Unknown Error")

    assert gpus.read(Stuck()) == {"not_read": "Unknown Error"}


# ---------------------------------------------------------------------------------------------------------------------
# Grading


def graded(found: list[Check] | Check | None) -> dict[str, str]:
    each = found if isinstance(found, list) else [found]
    return {check.name: check.grade for check in each if check is not None}


@pytest.mark.parametrize(
    ("name", "value", "grade"),
    [("vm.swappiness", "0", "note"), ("vm.swappiness", "10", "ok"), ("vm.min_free_kbytes", "6291456", "note"),
     ("vm.min_free_kbytes", "262144", "ok"), ("vm.panic_on_oom", "1", "problem"), ("vm.panic_on_oom", "0", "ok"),
     ("vm.overcommit_memory", "2", "note"), ("vm.oom_kill_allocating_task", "1", "note"),
     ("vm.zone_reclaim_mode", "1", "note")],
)  # fmt: skip
def test_setting_that_spoilt_runs_of_others_is_told_with_its_remedy(name: str, value: str, grade: str) -> None:
    found = checks.sysctls(Machine("linux", sysctl={name: value}))
    assert found.grade == grade
    if grade != "ok":
        assert found.remedy is not None
        assert f"sysctl -w {name}=" in found.remedy


def test_not_observed_is_a_problem_only_where_a_verdict_needs_it() -> None:
    seen = {
        "host": Seen(False, "/proc/meminfo: EACCES"), "nvidia": Seen(False, "there is no NVIDIA driver"),
        "kernel": Seen(False, "/dev/kmsg: EPERM (x); to allow it: sudo y"), "docker": Seen(False, "no socket"),
        "thermal": Seen(False, "none"), "process": Seen(True, "pid 1"), "disk": Seen(None, "no answer within 6 s"),
    }  # fmt: skip
    without = graded(checks.monitors(seen, Machine("linux")))
    assert without == {
        "host": "problem", "kernel": "problem", "nvidia": "note", "docker": "note", "thermal": "note", "process": "ok",
        "disk": "problem",
    }  # fmt: skip
    with_gpu = graded(checks.monitors(seen, Machine("linux", gpus=("NVIDIA",))))
    assert with_gpu["nvidia"] == "problem"
    kernel = checks.monitor("kernel", seen["kernel"], Machine("linux"))
    assert (kernel.text, kernel.remedy) == ("not observed: /dev/kmsg: EPERM (x)", "sudo y")


@pytest.mark.parametrize(
    ("found", "grade"),
    [
        (checks.memory(Machine("linux")), "problem"),
        (checks.memory(Machine("linux", memory_total_bytes=100, memory_available_bytes=5)), "note"),
        (checks.swap(Machine("linux", swaps=(Swap("zram", 1 << 30, 0, 5),))), "note"),
        (checks.swap(Machine("linux", swaps=(Swap("partition", 1 << 30, 0, 5),))), "ok"),
        (checks.memory_killers(Machine("linux", killers=(machine.Killer("systemd-oomd", 7),))), "note"),
        (checks.pressure(Machine("linux", pressure_stalls=False)), "note"),
        (checks.clock(Machine("linux", clock=ClockState(True, 900, 10)), 0), "ok"),
        (checks.clock(Machine("linux", clock=ClockState(True, 900, 10)), 1), "note"),
        (checks.clock(Machine("linux", clock=ClockState(False, 16_000_000, 16_000_000)), 0), "note"),
        (checks.clock_source(Machine("linux", clocksource="hpet", clocksources=("tsc", "hpet"))), "note"),
        (checks.run_folder(None), "problem"),
        (checks.run_folder(Volume("ext4", 1 << 20, 1 << 40, 5, False, False)), "problem"),
        (checks.run_folder(Volume("ext4", 1 << 40, 1 << 40, 0, False, False)), "problem"),
        (checks.run_folder(Volume("ext4", 1 << 40, 1 << 40, 5, False, True)), "problem"),
        (checks.run_folder(Volume("tmpfs", 1 << 40, 1 << 40, 5, True, False)), "note"),
        (checks.run_folder(Volume("nfs4", 1 << 40, 1 << 40, None, False, False)), "note"),
        (checks.run_folder(Volume("ext4", 1 << 40, 1 << 40, 5, False, False)), "ok"),
        (checks.limits(64, 28000), "problem"),
        (checks.limits(1000, 28000), "note"),
        (checks.limits(4096, 100), "note"),
        (checks.limits(4096, None), "ok"),
        (checks.hardening(Seen(True, "oom_score_adj -500, memory locked, SCHED_FIFO 1")), "ok"),
        (checks.hardening(Seen(True, "oom_score_adj stays 0 (denied), memory locked, SCHED_FIFO 1")), "note"),
        (checks.hardening(Seen(True, "oom_score_adj -500, memory not locked (RLIMIT_MEMLOCK), SCHED_FIFO 1")), "note"),
        (checks.hardening(None), "note"),
        (checks.others_on_cpu([Busy("cc1plus", 7, 99.0)], 64), "note"),
        (checks.others_on_cpu([Busy("cc1plus", 7, 99.0)], 2), "problem"),
        (checks.others_on_cpu([Busy("sshd", 7, 2.0)], 2), "ok"),
        (checks.server(None, "connection refused"), "problem"),
        (checks.server(Facts(engine="vLLM", model="m"), ""), "ok"),
        (checks.load(Facts(foreign_requests=2)), "problem"),
        (checks.load(Facts(foreign_requests=0)), "ok"),
        (checks.load(Facts()), "note"),
        (checks.found(None, "target is not on this host (10.0.0.1)"), "problem"),
        (checks.gpu({"gpus": [{"index": 0, "not_read": "GPU is lost"}]}, Machine("linux")), "problem"),
    ],
)  # fmt: skip
def test_fact_has_its_grade_and_what_can_be_done_is_said(found: Check, grade: str) -> None:
    assert found.grade == grade
    assert found.name in checks.ROWS
    assert "\n" not in found.text


def test_who_else_computes_on_the_gpu_is_told_and_the_server_is_not() -> None:
    listed = [{"pid": 5, "memory_bytes": 3 << 30}, {"pid": 6, "memory_bytes": None}]
    driver = {"gpus": [{"index": 0, "processes": listed}]}
    found = checks.others_on_gpu(driver, {6})
    assert found is not None
    assert (found.grade, found.text) == ("note", "pid 5 3072 MiB: besides the server")
    alone = checks.others_on_gpu(driver, {5, 6})
    assert alone is not None
    assert alone.grade == "ok"
    assert checks.others_on_gpu({}, set()) is None


@pytest.mark.parametrize(
    ("labels", "grade", "word"),
    [({"restart_policy": "unless-stopped"}, "note", "unless-stopped"), ({"restart_policy": "no"}, "ok", "no"),
     ({"restart_policy": "on-failure:5"}, "note", "on-failure:5")],
)  # fmt: skip
def test_restart_policy_is_the_containers(labels: dict[str, str], grade: str, word: str) -> None:
    process = served.Served(1, 1, "vllm", container="c" * 64)
    found = checks.restart_policy(process, {"docker": Seen(True, "", labels)})
    assert found is not None
    assert (found.grade, found.text.startswith(word)) == (grade, True)
    unknown = checks.restart_policy(process, {"docker": Seen(False, "no socket")})
    assert unknown is not None
    assert unknown.grade == "note"


def test_restart_policy_of_a_unit_is_systemds() -> None:
    seen = {"systemd": Seen(True, "unit llm.service, active, Restart=always, OOMPolicy=stop")}
    found = checks.restart_policy(served.Served(1, 1, "vllm", unit="llm.service"), seen)
    assert found is not None
    assert (found.grade, found.text.partition(":")[0]) == ("note", "always")


# ---------------------------------------------------------------------------------------------------------------------
# Looking


def test_monitor_that_hangs_is_named_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stuck").mkdir()
    (tmp_path / "stuck/driver.py").write_text(
        '"""Hangs."""\nimport time\nfrom dataclasses import dataclass\nLANE = "gpu"\nPERIOD_S = 1.0\n\n\n'
        "@dataclass(frozen=True, slots=True)\nclass Options:\n    root: str = '/'\n\n\n"
        "def watch(options):\n    time.sleep(600)\n    yield []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    begin_ns = clock.now_ns()
    while True:  # on a busy machine the other lane may need longer
        seen = look({"host": {}, "stuck.driver": {}}, "", {}, limit_s=2.5)
        if seen["host"].observed is not None or clock.now_ns() - begin_ns > PATIENCE_S * 1e9:
            break
    assert (seen["stuck.driver"].observed, seen["stuck.driver"].text) == (None, "no answer within 2.5 s")
    assert seen["host"].observed is True


def row(found: doctor.Diagnosis, name: str) -> Check:
    return next(check for check in found.checks if check.name == name)


@pytest.fixture(scope="module")
def server_with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """A simulated server that was started as people start theirs: keys in its arguments and its environment."""
    folder = tmp_path_factory.mktemp("served")
    script = folder / "serve.py"
    script.write_text(
        "import runpy, sys\nsys.argv = ['sim', '--preset', 'tiny', '--port', '0']\n"
        "runpy.run_module('loadgen.sim', run_name='__main__')\n"
    )
    argv = [
        "--model", "/srv/private/models/Qwen3-8B-FP8", "--api-key", KEYS["argument"], KEYS["second"],
        f"--hf-token={KEYS['joined']}", "--otlp-traces-endpoint", f"http://u:{KEYS['password']}@collector.lan:4317",
        "--max-model-len", "32768",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEYS["environment"])
        patch.setenv("HF_TOKEN", KEYS["environment"])
        patch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
        with serving(script, *argv, log=folder / "log") as url:
            yield url, [*KEYS.values(), "collector.lan", "/srv/private"]


@pytest.fixture(scope="module")
def diagnosis(server_with_keys: tuple[str, list[str]]) -> doctor.Diagnosis:
    url, _ = server_with_keys
    return doctor.examine(Target(url), {"Authorization": f"Bearer {KEYS['known']}"}, out=ROOT / "runs")


def test_server_is_told_by_its_words_and_found_by_its_port(diagnosis: doctor.Diagnosis) -> None:
    assert "serves sim-tiny, context 32768, KV cache 131072 tokens" in row(diagnosis, "server").text
    assert row(diagnosis, "load").grade == "ok"
    assert row(diagnosis, "found").text.startswith("by its port: pid ")
    assert diagnosis.served is not None
    assert diagnosis.served.arguments[2:4] == ("--model", "…/Qwen3-8B-FP8")
    assert diagnosis.served.settings["VLLM_ATTENTION_BACKEND"] == "FLASHINFER"
    assert diagnosis.served.not_read == {}


def test_every_monitor_has_its_row_and_those_of_a_run_are_observed(diagnosis: doctor.Diagnosis) -> None:
    names = {check.name for check in diagnosis.checks}
    assert set(plugins.names("monitors")) <= names
    for name in ("host", "process", "engine", "disk"):
        assert row(diagnosis, name).grade == "ok", name


def test_exit_code_says_whether_there_is_a_problem_and_problems_come_first(diagnosis: doctor.Diagnosis) -> None:
    grades = [check.grade for check in diagnosis.checks]
    assert grades == sorted(grades, key=checks.GRADES.index)
    assert diagnosis.exit_code == int("problem" in grades)
    quiet = replace(diagnosis, checks=tuple(c for c in diagnosis.checks if c.grade != "problem"))
    assert quiet.exit_code == 0


@pytest.mark.parametrize("width", [80, 100, 120])
def test_screen_is_one_screen_and_no_line_is_too_long(diagnosis: doctor.Diagnosis, width: int) -> None:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(doctor.screen(diagnosis, width))
    lines = captured.get().splitlines()
    assert lines[0].startswith(f"loadgen doctor · {diagnosis.url} · ")
    assert max(len(line.rstrip()) for line in lines) <= width
    assert len(lines) <= 3 * len(diagnosis.checks)


def test_document_has_its_schema_and_the_same_rows(diagnosis: doctor.Diagnosis) -> None:
    found = json.loads(json.dumps(doctor.document(diagnosis)))
    assert found["schema"] == "loadgen.doctor/1"
    assert set(found) >= {"at", "checks", "counts", "exit_code", "gpus", "machine", "monitors", "process", "run_folder",
                          "schema", "server", "url"}  # fmt: skip
    assert [check["name"] for check in found["checks"]] == [check.name for check in diagnosis.checks]
    assert all(set(check) <= {"name", "grade", "text", "remedy"} for check in found["checks"])
    assert sum(found["counts"].values()) == len(found["checks"])
    assert found["server"]["model"] == "sim-tiny"
    assert "listeners" not in found, "nobody searched"


def test_no_secret_is_in_the_screen_or_the_document(
    diagnosis: doctor.Diagnosis, server_with_keys: tuple[str, list[str]]
) -> None:
    console = Console(width=300, color_system=None)
    with console.capture() as captured:
        console.print(doctor.screen(diagnosis, 300))
    everything = captured.get() + json.dumps(doctor.document(diagnosis)) + repr(diagnosis)
    for secret in server_with_keys[1]:
        assert secret not in everything, secret


def test_server_that_nobody_named_is_found_on_loopback(server_with_keys: tuple[str, list[str]]) -> None:
    url, _ = server_with_keys
    deadline_ns = clock.now_ns() + round(PATIENCE_S * 1e9)
    while True:  # half a second is short on a busy machine
        found = doctor.examine(None, {})
        mine = [each for each in found.listeners or () if each.url == url]
        if mine or clock.now_ns() > deadline_ns:
            break
        time.sleep(0.1)
    assert mine[0].models == ("sim-tiny",)
    assert not {"server", "found", "engine", "process"} & {check.name for check in found.checks}


def test_password_in_the_address_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "http://user:planted@127.0.0.1:1/v1", "--json"])
    told = capsys.readouterr()
    assert "planted" not in told.out + told.err


def test_other_machines_tree_is_looked_at(spark: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--root", str(spark), "--json", "--out", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    rows = {check["name"]: check for check in found["checks"]}
    assert found["machine"]["product"] == "NVIDIA_DGX_Spark"
    assert rows["sysctls"]["grade"] == "note"
    assert "vm.swappiness=0" in rows["sysctls"]["text"]
    assert "6.0 GiB" in rows["sysctls"]["text"]
    assert rows["memory killers"]["text"].startswith("earlyoom (pid 77)")
    assert rows["swap"]["grade"] == "note"
    assert rows["gpu"]["text"] == "on the bus: NVIDIA"
    assert ended.value.code == found["exit_code"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["localhost:8000"], "not a URL of a server"),
        (["--root", "/nonexistent"], "not a file tree of a machine"),
        (["--model", "x"], "give its URL"),
        (["http://127.0.0.1:9", "--api-key-env", "LOADGEN_NO_SUCH_KEY"], "LOADGEN_NO_SUCH_KEY is not set"),
        (["http://127.0.0.1:9", "--dialect", "opnai_chat"], 'no dialect is called "opnai_chat"'),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_code_3(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *argv])
    assert ended.value.code == 3
    told = capsys.readouterr()
    assert said in told.err
    assert (told.err.strip().count("\n"), told.out) == (0, "")


def test_model_that_is_not_served_is_one_line(
    server_with_keys: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", server_with_keys[0], "--model", "sim-tinny"])
    assert ended.value.code == 3
    assert 'the model "sim-tinny" is not served' in capsys.readouterr().err


def test_nobody_there_is_a_problem_and_the_machine_is_told_all_the_same(
    free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", f"http://127.0.0.1:{free_port}", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {check["name"]: check["grade"] for check in found["checks"]}
    assert ended.value.code == 1
    assert (rows["server"], rows["found"], rows["process"]) == ("problem", "problem", "problem")
    assert "memory" in rows


def test_real_llama_cpp_is_told(llamacpp_url: str) -> None:
    found = doctor.examine(Target(llamacpp_url), {}, out=ROOT / "runs")
    said = row(found, "server").text
    assert said.startswith("llama.cpp ")
    assert "4 slots" in said
    assert "Q4_1" in said
    assert found.facts is not None
    assert found.facts.chat_template_sha256 is not None
    assert row(found, "found").grade == "ok"


# ---------------------------------------------------------------------------------------------------------------------
# The front page


def test_front_page_shows_the_screen_with_the_rows_of_the_code() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    block = page[page.index("```\nloadgen doctor · ") :].split("```")[1]
    marks = re.escape("".join(mark for mark, _ in doctor.MARKS.values()))
    shown = re.findall(rf"^[{marks}] (.{{{doctor.NAME_COLUMNS}}}) ", block, re.MULTILINE)
    names = [name.strip() for name in shown]
    known = {*checks.ROWS, *plugins.names("monitors")}
    assert names
    assert set(names) <= known
    assert {*checks.NEEDED, *checks.ROWS} - {"others on gpu"} <= set(names), "run it again, on a machine without a GPU"
