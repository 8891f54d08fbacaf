"""The kernel log: which lines are events of the run, what they say, and what is lost or hidden."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.types import Sample
from monitors import kernel

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent / "data/monitors/kernel-log.jsonl").read_text().splitlines())
}


def told(lines: list[str | dict[str, Any]]) -> list[kernel.Event]:
    records = [kernel.parse(line if isinstance(line, str) else json.dumps(line)) for line in lines]
    assert None not in records
    return kernel.events([r for r in records if r is not None], kernel.Memory())


def case(name: str) -> tuple[list[kernel.Event], dict[str, Any]]:
    given_, expect = CASES[name]["input"], CASES[name]["expect"]
    return told(given_.get("records") or given_["lines"]), expect


def kills(events: list[kernel.Event]) -> list[kernel.Event]:
    return [e for e in events if e.name in {"oom_kill_memcg", "oom_kill_global"}]


def machine(tmp_path: Path, text: str = "") -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text(text)
    return tmp_path


def named(samples: list[Sample], metric: str) -> list[Sample]:
    return [s for s in samples if s.metric == metric]


KILL = "3,{seq},{us},-;Out of memory: Killed process 77 (python3) total-vm:1000kB, anon-rss:900kB, file-rss:0kB\n"


# ---------------------------------------------------------------------------------------------------------------------
# The recorded cases


def test_two_lines_of_an_old_kernel_are_one_kill() -> None:
    events, expect = case("klog-old-two-lines")
    (kill,) = kills(events)
    assert kill.name == "oom_kill_memcg"
    assert int(kill.labels["pid"]) == expect["victim_pid"]
    assert int(kill.labels["anon_rss_kb"]) == expect["anon_rss_kb"]


def test_global_kill_names_victim_and_who_asked_for_memory() -> None:
    events, expect = case("klog-global-wrong-victim")
    (kill,) = events
    assert kill.name == "oom_kill_global"
    assert int(kill.labels["pid"]) == expect["victim_pid"]
    assert kill.labels["comm"] == "browser-tab"
    assert kill.labels["invoked_by"] == expect["invoked_by"]
    assert kill.labels["constraint"] == "CONSTRAINT_NONE"


def test_driver_out_of_memory_lines_are_no_kills() -> None:
    events, expect = case("klog-nvrm-nomem-healthy")
    assert kills(events) == []
    assert [e.name for e in events] == ["nv_no_memory"] * expect["driver_alloc_warnings"]
    assert {e.labels["severity"] for e in events} == {"warn"}


def test_follow_up_lines_of_a_lost_gpu_are_attached_to_one_event() -> None:
    events, expect = case("klog-xid79-duplicates")
    (event,) = events
    (wanted,) = expect["gpu_events"]
    assert int(event.labels["xid"]) == wanted["xid"]
    assert event.labels["pci"] == wanted["pci"]
    assert event.labels["group"] == "bus"
    assert event.labels["severity"] == "fail"
    assert event.lines == wanted["lines"]


def test_user_space_killer_is_one_kill_of_a_unit() -> None:
    events, expect = case("klog-oomd-userspace")
    (event,) = events
    assert event.name == "userspace_oom_kill"
    assert event.labels["unit"] == expect["unit"]
    assert int(event.labels["processes"]) == expect["processes"]
    assert event.labels["percent"] == "71.07"
    assert event.labels["by"] == "systemd-oomd"


def test_kill_from_before_the_run_is_history(tmp_path: Path) -> None:
    records, expect = (
        CASES["klog-old-records-replayed"]["input"]["records"],
        CASES["klog-old-records-replayed"]["expect"],
    )
    root = machine(tmp_path, records[0] + "\n")
    ticks = kernel.watch(kernel.Options(root=str(root)))
    first = next(ticks)
    (before,) = named(first, "before_run")
    assert before.value == expect["oom_kills_before_run"]
    assert before.labels == {"event": "oom_kill_global"}
    with (root / "dev/kmsg").open("a") as log:
        log.write(records[1] + "\n")
    assert {s.metric for s in next(ticks) if s.text is not None} == {"messages_lost"}, "numbers 101 to 1599 are missing"
    ticks.close()  # type: ignore[attr-defined]


def test_dates_in_any_language_do_not_hide_a_kill() -> None:
    events, expect = case("klog-localized-dates")
    assert len(kills(events)) == expect["oom_kills"]
    assert [e.us is not None for e in events] == expect["times_known"]
    samples = kernel.samples(events, 5_000_000_000)
    assert {s.labels["time"] for s in samples} == {"unknown"}


@pytest.mark.parametrize(("code", "how"), [(1, "dmesg_restrict"), (13, "chmod"), (2, "--device /dev/kmsg")])
def test_log_that_may_not_be_read_is_said_with_the_command_that_allows_it(code: int, how: str) -> None:
    sample = kernel.not_observed(Path("/dev/kmsg"), OSError(code, os.strerror(code)))
    assert (sample.metric, sample.value) == ("observed", 0.0)
    assert sample.text is not None
    assert how in sample.text


def test_missing_log_ends_the_monitor_and_nothing_else(tmp_path: Path) -> None:
    ticks = kernel.watch(kernel.Options(root=str(tmp_path)))
    (sample,) = next(ticks)
    assert (sample.metric, sample.value) == ("observed", 0.0)
    assert next(ticks, None) is None


# ---------------------------------------------------------------------------------------------------------------------
# The signal table

LINES = {
    "oom_kill_memcg": "Memory cgroup out of memory: Killed process 612 (a (b) c) total-vm:9kB, anon-rss:5kB",
    "oom_kill_global": "Out of memory: Killed process 613 (node) total-vm:9kB, anon-rss:5kB",
    "oom_reaper_failed": "oom_reaper: unable to reap pid:614 (python3)",
    "oom_deadlock": "Kernel panic - not syncing: System is deadlocked on memory",
    "xid": "NVRM: Xid (PCI:000f:01:00): 31, pid=99, name=python3, Ch 00000008, intr 00000000. MMU Fault",
    "gsp_dead": "NVRM: GPU0 _kgspIsHeartbeatTimedOut: Heartbeat timed out",
    "iova_no_memory": "NVRM: _iovaspaceCreateMappingDataFromMemDesc: failed to allocate 0x180010",
    "nv_no_memory": "NVRM: nvAssertOkFailedNoLog: Assertion failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)",
    "hung_task": "INFO: task nvidia-smi:4711 blocked for more than 120 seconds.",
    "soft_lockup": "watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [kworker/3:1:77]",
    "rcu_stall": "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
    "page_allocation_failure": "kworker/u8:1: page allocation failure: order:4, mode:0x40dc0(GFP_KERNEL|__GFP_COMP)",
    "pcie_error": "nvme 0000:01:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
    "thermal_critical": "thermal thermal_zone0: critical temperature reached (110 C), shutting down",
    "thermal_throttle": "CPU2: Core temperature above threshold, cpu clock throttled (total events = 12)",
    "storage_error": "blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x1:(WRITE)",
    "machine_check": "mce: [Hardware Error]: Machine check events logged",
}


def test_each_signal_has_a_line_here() -> None:
    assert {signal.name for signal in kernel.SIGNALS} == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_line_is_told_as_its_own_signal_and_no_other(name: str) -> None:
    (event,) = told([f"4,1,1000,-;{LINES[name]}"])
    assert event.name == name
    patterns = {signal.name for signal in kernel.SIGNALS if signal.pattern.search(LINES[name])}
    assert patterns == {name}


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("swapper/0: page allocation failure: order:0, mode:0x40a20(GFP_ATOMIC|__GFP_COMP)", "fail"),
        (LINES["page_allocation_failure"], "warn"),
        ("pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer", "fail"),
        ("pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0", "warn"),
        ("pcieport 0000:00:01.0: AER: Uncorrectable (Non-Fatal) error message received from 0000:01:00.0", "fail"),
        ("NVRM: Xid (PCI:0000:06:00): 63, Row Remapper: New row marked for remapping", "warn"),
        ("NVRM: Xid (PCI:0000:06:00): 119, Timeout after 6s of waiting for RPC response from GSP!", "fail"),
        ("NVRM: Xid (PCI:0000:06:00): 999, something new", "warn"),
    ],
)
def test_severity_depends_on_order_link_and_code(line: str, severity: str) -> None:
    (event,) = told([f"4,1,1000,-;{line}"])
    assert event.labels["severity"] == severity


def test_real_xid_of_an_illegal_access_is_one_event_of_the_application() -> None:
    """As an H200 logged it under driver 580.159.04 (serial number and UUID changed)."""
    lines: list[str | dict[str, Any]] = [
        "5,581,75286601,-;NVRM: GPU at PCI:0000:00:06: GPU-00000000-ffd2-c19e-f49c-000000000000",
        "5,582,75286612,-;NVRM: GPU Board Serial Number: 1234567890123",
        "5,583,75286614,-;NVRM: Xid (PCI:0000:00:06): 31, pid=568, name=python3, channel 0x0000000a, intr 00000000. "
        "MMU Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_8 faulted @ 0x82ff_bbe00000. "
        "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
    ]
    (event,) = told(lines)
    assert event.labels == {"pci": "0000:00:06", "xid": "31", "group": "application", "severity": "fail"}


def test_name_with_parentheses_is_kept_whole() -> None:
    (event,) = told([f"4,1,1000,-;{LINES['oom_kill_memcg']}"])
    assert event.labels["comm"] == "a (b) c"


def test_details_of_a_kill_do_not_reach_the_next_victim() -> None:
    lines: list[str | dict[str, Any]] = [
        "4,1,1000,-;python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "6,2,1001,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
        "oom_memcg=/docker/4f1c,task_memcg=/docker/4f1c,task=python3,pid=10,uid=0",
        "3,3,1002,-;Memory cgroup out of memory: Killed process 10 (python3) total-vm:1kB, anon-rss:1kB",
        "3,4,1003,-;Memory cgroup out of memory: Killed process 11 (helper) total-vm:1kB, anon-rss:1kB",
    ]
    first, second = told(lines)
    assert first.labels["task_memcg"] == "/docker/4f1c"
    assert first.labels["invoked_by"] == "python3"
    assert "task_memcg" not in second.labels
    assert second.labels["pid"] == "11"


def test_line_that_user_space_wrote_is_ignored_unless_asked_for() -> None:
    fake = kernel.parse("12,5,1000,-;NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.")
    assert fake is not None
    assert fake.facility == 1
    assert kernel.events([fake], kernel.Memory()) == []
    assert len(kernel.events([fake], kernel.Memory(), any_facility=True)) == 1


def test_journal_line_of_a_program_cannot_speak_for_the_kernel() -> None:
    line = {"_TRANSPORT": "stdout", "SYSLOG_IDENTIFIER": "app", "MESSAGE": LINES["oom_kill_global"]}
    assert told([line]) == []


@given(st.text())
def test_no_line_breaks_the_parser(line: str) -> None:
    record = kernel.parse(line)
    if record is not None:
        kernel.events([record], kernel.Memory())


@given(st.lists(st.sampled_from(sorted(LINES.values())), max_size=20), st.integers(1, 5))
def test_cutting_the_log_into_batches_changes_no_event(lines: list[str], size: int) -> None:
    records = [r for n, line in enumerate(lines) if (r := kernel.parse(f"4,{n},{n * 1000},-;{line}"))]
    whole = kernel.events(records, kernel.Memory())
    memory = kernel.Memory()
    cut = [e for at in range(0, len(records), size) for e in kernel.events(records[at : at + size], memory)]
    assert [(e.name, e.text, e.labels) for e in cut] == [(e.name, e.text, e.labels) for e in whole]


# ---------------------------------------------------------------------------------------------------------------------
# Following


def test_event_of_the_run_is_a_happening(tmp_path: Path) -> None:
    root = machine(tmp_path)
    ticks = kernel.watch(kernel.Options(root=str(root)))
    assert next(ticks)[0].value == 1.0
    with (root / "dev/kmsg").open("a") as log:
        log.write(KILL.format(seq=7, us=1)[:30])
        log.flush()
        assert [s for s in next(ticks) if s.text is not None] == [], "a line without its end is not read"
        log.write(KILL.format(seq=7, us=1)[30:])
        log.flush()
        (kill,) = named(next(ticks), "oom_kill_global")
    assert kill.labels["pid"] == "77"
    ticks.close()  # type: ignore[attr-defined]


def test_gap_in_sequence_numbers_is_reported_as_loss(tmp_path: Path) -> None:
    root = machine(tmp_path)
    ticks = kernel.watch(kernel.Options(root=str(root)))
    next(ticks)
    with (root / "dev/kmsg").open("a") as log:
        log.write("6,10,1,-;one\n6,15,2,-;two\n")
    samples = next(ticks)
    assert [s.value for s in named(samples, "messages_lost")] == [4.0]
    assert [s.value for s in named(samples, "lost_total")] == [4.0]
    assert named(next(ticks), "messages_lost") == []
    ticks.close()  # type: ignore[attr-defined]


def test_log_that_begins_anew_is_read_from_its_start(tmp_path: Path) -> None:
    root = machine(tmp_path, "6,1,1,-;a long line of the boot before this one, long enough to be longer\n" * 5)
    ticks = kernel.watch(kernel.Options(root=str(root)))
    next(ticks)
    (root / "dev/kmsg").write_text(KILL.format(seq=1, us=1))
    assert len(named(next(ticks), "oom_kill_global")) == 1
    ticks.close()  # type: ignore[attr-defined]


def test_burst_becomes_single_events_and_one_count(tmp_path: Path) -> None:
    events = told([f"4,{n},{n},-;{LINES['nv_no_memory']}" for n in range(198)])
    samples = kernel.samples(events, 10**12)
    assert len(samples) == kernel.MAX_SAME_EVENTS + 1
    assert sum(s.value for s in samples) == 198


def test_own_time_of_a_record_is_used_when_it_is_near() -> None:
    events = told([f"4,1,999999500,-;{LINES['hung_task']}", f"4,2,5,-;{LINES['soft_lockup']}"])
    near, far = kernel.samples(events, 1_000_000_000_000)
    assert near.at_ns == 999_999_500_000
    assert far.at_ns == 1_000_000_000_000, "log time drifts from the monotonic clock: not trusted when far"


def test_each_pattern_names_only_labels_that_are_words() -> None:
    for signal in (*kernel.SIGNALS, *kernel.USER_SIGNALS):
        assert re.fullmatch(r"[a-z_]+", signal.name)
        assert signal.meaning
