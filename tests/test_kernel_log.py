"""The kernel log: which lines are events of the run, what they say, and what is lost or hidden."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.rules import gpu, headroom, oom
from loadgen.rules import kernel as kernel_rule
from loadgen.types import Finding, Sample
from monitors import kernel
from tests import golden

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
    (tmp_path / "dev").mkdir(parents=True)
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


# ---------------------------------------------------------------------------------------------------------------------
# The journal: a journalctl of ours prints what the test wrote, then waits as the real one does with --follow


def journalctl(tmp_path: Path, lines: list[dict[str, Any]], then: str = "exec sleep 60") -> str:
    """The path of a program that prints these records, says on its first line how it was called, and stays."""
    (tmp_path / "var/log/journal").mkdir(parents=True, exist_ok=True)
    (tmp_path / "records").write_text("".join(json.dumps(line) + "\n" for line in lines))
    program = tmp_path / "journalctl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {tmp_path}/records\n{then}\n')
    program.chmod(0o755)
    return str(program)


def until(ticks: Iterator[list[Sample]], there: Callable[[list[Sample]], bool]) -> list[Sample]:
    """All samples up to the tick that has what we wait for."""
    out: list[Sample] = []
    for _ in range(3000):
        out += next(ticks)
        if there(out):
            return out
        time.sleep(0.01)
    raise AssertionError(out)


def journal_line(text: str, us: int, identifier: str = "kernel", **more: str) -> dict[str, Any]:
    transport = "kernel" if identifier == "kernel" else "syslog"
    fields = {"MESSAGE": text, "_TRANSPORT": transport, "SYSLOG_IDENTIFIER": identifier, "__CURSOR": f"s={us}"}
    return {**fields, "__MONOTONIC_TIMESTAMP": str(us), **more}


def test_log_that_may_not_be_read_is_followed_in_the_journal(tmp_path: Path) -> None:
    now_us = time.monotonic_ns() // 1000
    lines = [
        journal_line(LINES["oom_kill_global"], now_us - 9_000_000_000),
        journal_line(LINES["hung_task"], now_us + 60_000_000),
    ]
    ticks = kernel.watch(kernel.Options(root=str(tmp_path), journalctl=journalctl(tmp_path, lines)))
    samples = until(ticks, lambda seen: bool(named(seen, "hung_task")))
    ticks.close()  # type: ignore[attr-defined]
    observed = named(samples, "observed")
    assert [s.value for s in observed] == [0.0, 1.0], "first the reason, then that the journal shows something"
    assert "by the systemd journal" in (observed[-1].text or "")
    assert named(samples, "oom_kill_global") == [], "from before the run"
    assert [s.labels for s in named(samples, "before_run")] == [{"event": "oom_kill_global"}]
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--output=json" in call
    assert "short" not in call, "other formats carry dates in the system's language"
    assert "_TRANSPORT=kernel" in call


def test_user_space_killers_are_heard_beside_the_kernels_own_log(tmp_path: Path) -> None:
    now_us = time.monotonic_ns() // 1000 + 60_000_000
    lines = [
        *CASES["klog-oomd-userspace"]["input"]["records"],
        journal_line('sending SIGTERM to process 812 uid 1000 "python3": badness 812', now_us, "earlyoom"),
        journal_line("Implementing a corrective action:", now_us, "nohang"),
        journal_line("  Sending SIGKILL to the victim", now_us, "nohang"),
    ]
    for line in lines:
        line["__MONOTONIC_TIMESTAMP"] = str(now_us)
    root = machine(tmp_path)
    ticks = kernel.watch(kernel.Options(root=str(root), journalctl=journalctl(tmp_path, lines)))
    samples = until(ticks, lambda seen: len(named(seen, "userspace_oom_kill")) == 3)
    ticks.close()  # type: ignore[attr-defined]
    assert [s.value for s in named(samples, "observed")] == [1.0]
    kills = named(samples, "userspace_oom_kill")
    assert [s.labels["by"] for s in kills] == ["systemd-oomd", "earlyoom", "nohang"]
    assert kills[1].labels["pid"] == "812"
    call = (tmp_path / "calls").read_text()
    assert "_TRANSPORT=kernel" not in call, "a line of the kernel must not be told twice"
    assert "_SYSTEMD_UNIT=earlyoom.service" in call
    assert "--lines=0" in call


def test_machine_without_a_journal_says_that_killers_are_not_seen(tmp_path: Path) -> None:
    ticks = kernel.watch(kernel.Options(root=str(machine(tmp_path))))
    (observed,) = named(next(ticks), "observed")
    assert (observed.value, "user-space killers are not observed" in (observed.text or "")) == (1.0, True)
    ticks.close()  # type: ignore[attr-defined]


def test_journal_that_may_not_be_read_either_is_said_with_its_words(tmp_path: Path) -> None:
    refuses = journalctl(
        tmp_path, [], "echo 'No journal files were opened due to insufficient permissions.' >&2; exit 1"
    )
    ticks = kernel.watch(kernel.Options(root=str(tmp_path), journalctl=refuses))
    samples = until(ticks, lambda seen: len(named(seen, "observed")) == 2)
    last = named(samples, "observed")[-1]
    assert last.value == 0.0
    assert "insufficient permissions" in (last.text or "")
    assert "to allow it: " in (last.text or "")
    assert next(ticks, None) is None


def test_user_who_may_not_read_the_killers_journal_is_told_how_to(tmp_path: Path) -> None:
    hint = "echo 'Hint: You are currently not seeing messages from other users and the system.' >&2; exec sleep 60"
    root = machine(tmp_path)
    ticks = kernel.watch(kernel.Options(root=str(root), journalctl=journalctl(tmp_path, [], hint)))
    samples = until(ticks, lambda seen: bool(named(seen, "killers_unseen")))
    samples += [s for _ in range(5) for s in next(ticks)]
    ticks.close()  # type: ignore[attr-defined]
    (unseen,) = named(samples, "killers_unseen")
    assert "systemd-journal" in (unseen.text or "")


def test_journal_that_ends_is_followed_again_from_where_it_stood(tmp_path: Path) -> None:
    now_ns = time.monotonic_ns()
    line = journal_line(LINES["hung_task"], now_ns // 1000 + 60_000_000)
    options = kernel.Options(root=str(tmp_path), journalctl=journalctl(tmp_path, [line], "exit 0"))
    journal = kernel.journal_of(options, True, now_ns)
    assert isinstance(journal, kernel.Journal)
    side = kernel.Side(journal, Path("/dev/kmsg"), OSError(1, "no"))
    side.begin(now_ns)
    told: list[Sample] = []
    for _ in range(3000):
        told += side.tick(now_ns)[1]
        if named(told, "journal_ended"):
            break
        time.sleep(0.01)
    assert len(named(told, "journal_ended")) == 1
    assert side.tick(now_ns + kernel.RETRY_NS - 1) == ([], []), "not before 30 s"
    assert journal.pid == 0
    side.tick(now_ns + kernel.RETRY_NS)
    for _ in range(3000):
        if len((tmp_path / "calls").read_text().splitlines()) == 2:
            break
        time.sleep(0.01)
    side.end()
    assert f"--after-cursor={line['__CURSOR']}" in (tmp_path / "calls").read_text().splitlines()[1]


def test_journalctl_is_gone_when_the_monitor_is(tmp_path: Path) -> None:
    program = journalctl(tmp_path, [])
    journal = kernel.journal_of(kernel.Options(root=str(tmp_path), journalctl=program), True, 0)
    assert isinstance(journal, kernel.Journal)
    kernel.start(journal)
    pid = journal.pid
    assert pid > 0
    kernel.stop(journal)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---------------------------------------------------------------------------------------------------------------------
# The recorded cases, through the reader and into the rules


def judged(name: str, tmp_path: Path, *more: Sample) -> dict[str, list[Finding]]:
    """What the rules find in a run of 60 s in whose 30th second the log says what the case says, on a healthy host."""
    given_ = CASES[name]["input"]
    root = machine(tmp_path / "host")
    journal = given_["format"] == "journal"
    program = journalctl(root, given_["records"] if journal else [])
    if journal:  # the records' own times are another machine's: here they come after the start of the run
        text = re.sub(r'("__MONOTONIC_TIMESTAMP": )"\d+"', rf'\1"{time.monotonic_ns() // 1000 + 60_000_000}"',
                      (root / "records").read_text())  # fmt: skip
        (root / "records").write_text(text)
    ticks = kernel.watch(kernel.Options(root=str(root), journalctl=program if journal else ""))
    seen = next(ticks)
    with (root / "dev/kmsg").open("a") as log:
        log.writelines(f"{line}\n" for line in ([] if journal else given_.get("records") or given_["lines"]))
    last = {"klog-oomd-userspace": "userspace_oom_kill"}.get(name, "records_total")
    seen += until(ticks, lambda out: bool(named(out, last)))
    ticks.close()  # type: ignore[attr-defined]
    return findings_of(tmp_path / "run", [*(replace(s, at_ns=golden.at(30)) for s in seen), *more])


def findings_of(folder: Path, samples: list[Sample]) -> dict[str, list[Finding]]:
    server = golden.series("process", "rss_bytes", [float(1 << 30)] * 62, pid="4242", name="python3")
    host = [golden.sample("host", "observed", 1, 0, text="")]
    host += golden.series("host", "mem_available_bytes", [20.0 * 2**30] * 62)
    unit = CASES["klog-oomd-userspace"]["input"]["context"]["server"]["unit"]
    seen = [golden.sample("process", "observed", 1, 0, text="", unit=unit), *server, *host]
    phases = [golden.phase("measure", "measure", 0, 60)]
    run = golden.build(folder, outcomes=golden.steady(60), phases=phases, samples=[*seen, *samples])
    rules = {"oom": oom, "gpu": gpu, "headroom": headroom, "kernel": kernel_rule}
    return {name: rule.check(run, rule.Options()) for name, rule in rules.items()}


def failures(found: dict[str, list[Finding]]) -> dict[str, str]:
    """Rule and cause of what fails."""
    return {name: f.cause for name, findings in found.items() for f in findings if f.status == "fail"}


def test_verdict_on_a_kill_of_the_server_in_its_cgroup(tmp_path: Path) -> None:
    found = judged("klog-old-two-lines", tmp_path)
    assert failures(found) == {"oom": "oom_kill"}
    assert "4242 (python3), of the server" in found["oom"][0].message


def test_verdict_on_a_kill_of_a_bystander_is_the_hosts_memory(tmp_path: Path) -> None:
    found = judged("klog-global-wrong-victim", tmp_path)
    assert failures(found) == {"oom": CASES["klog-global-wrong-victim"]["expect"]["verdict"]}
    assert "not of the server" in found["oom"][0].message


def test_verdict_on_refusals_of_the_driver_in_a_healthy_run_is_a_warning(tmp_path: Path) -> None:
    found = judged("klog-nvrm-nomem-healthy", tmp_path)
    assert failures(found) == {}
    (warning,) = [f for f in found["headroom"] if f.status == "warn"]
    assert warning.number == CASES["klog-nvrm-nomem-healthy"]["expect"]["driver_alloc_warnings"]


def test_verdict_on_a_gpu_that_fell_off_the_bus_is_one_finding(tmp_path: Path) -> None:
    found = judged("klog-xid79-duplicates", tmp_path)
    failed = [f for f in found["gpu"] if f.status == "fail"]
    assert [f.cause for f in failed] == [CASES["klog-xid79-duplicates"]["expect"]["verdict"]]


def test_user_space_killer_is_found_with_its_source(tmp_path: Path) -> None:
    found, expect = judged("klog-oomd-userspace", tmp_path), CASES["klog-oomd-userspace"]["expect"]
    assert expect["is_server"]
    (kill,) = found["oom"]
    assert (kill.status, kill.cause, kill.hard) == ("fail", "oom_kill", True)
    assert f"a user-space OOM daemon killed all of {expect['unit']}, of the server" in kill.message


def test_user_space_kill_of_another_unit_is_a_bystanders(tmp_path: Path) -> None:
    labels = {"unit": "backup.service", "cgroup": "/system.slice/backup.service", "severity": "fail"}
    kill = golden.sample("kernel", "userspace_oom_kill", 1, 30, text="Killed", **labels)
    (found,) = findings_of(tmp_path, [golden.sample("kernel", "observed", 1, 0, text=""), kill])["oom"]
    assert (found.status, found.scope) == ("warn", "foreign")


def test_verdict_without_the_kernels_log_rests_on_the_counters_or_on_nothing(tmp_path: Path) -> None:
    blind = replace(kernel.not_observed(Path("/dev/kmsg"), OSError(1, "Operation not permitted")), at_ns=golden.at(0))
    assert "EPERM" in (blind.text or "")
    counter = golden.series("host", "oom_kill_total", [3.0] * 62)
    (counted,) = findings_of(tmp_path / "a", [blind, *counter])["oom"]
    assert counted.status == "pass"
    assert "by the host's counter" in counted.message
    (nothing,) = findings_of(tmp_path / "b", [blind])["oom"]
    assert nothing.status == CASES["klog-no-permission"]["expect"]["without_fallback"]
    assert "EPERM" in nothing.message


def test_verdict_on_kills_whose_dates_cannot_be_read_counts_both(tmp_path: Path) -> None:
    found = judged("klog-localized-dates", tmp_path)
    assert len(found["oom"]) == CASES["klog-localized-dates"]["expect"]["oom_kills"]
