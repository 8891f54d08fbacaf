"""The unit's monitor against a systemctl of our own: a script that answers, fails, or hangs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import golden
import pytest

from loadgen import plugins
from loadgen.types import Sample
from monitors import systemd

CALM = {
    "NRestarts": "0", "MemoryCurrent": "1073741824", "MemoryPeak": "2147483648", "MemoryMax": "infinity",
    "TasksCurrent": "18446744073709551615", "LoadState": "loaded", "ActiveState": "active", "SubState": "running",
    "Result": "success", "ExecMainCode": "0", "ExecMainStatus": "0", "MainPID": "4242", "InvocationID": "aa" * 16,
    "OOMPolicy": "stop", "Restart": "on-failure",
}  # fmt: skip
KILLED = CALM | {"ActiveState": "failed", "SubState": "failed", "Result": "oom-kill", "ExecMainCode": "2",
                 "ExecMainStatus": "9", "MainPID": "0", "MemoryCurrent": "[not set]"}  # fmt: skip


def systemctl(folder: Path, body: str) -> str:
    path = folder / "systemctl"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def answers(folder: Path, *looks: dict[str, str]) -> str:
    """A systemctl that gives one look after the other, the last one for ever."""
    for n, look in enumerate(looks):
        (folder / f"look{n}").write_text("".join(f"{key}={value}\n" for key, value in look.items()))
    (folder / "n").write_text("0")
    return systemctl(
        folder,
        f'cd {folder}; echo "$@" >>asked; n=$(cat n); cat look$n; [ -e look$((n+1)) ] && echo $((n+1)) >n; exit 0',
    )


def follow(ticks: int, **options: object) -> list[list[Sample]]:
    async def run() -> list[list[Sample]]:
        watch = systemd.watch(systemd.Options(**{"unit": "llm.service", **options}))  # type: ignore[arg-type]
        try:
            return [await anext(watch) for _ in range(ticks)]
        finally:
            await watch.aclose()  # type: ignore[attr-defined]

    return asyncio.run(run())


def told(samples: list[Sample], metric: str) -> list[Sample]:
    return [s for s in samples if s.metric == metric and s.text is not None]


def values(samples: list[Sample]) -> dict[str, float]:
    return {s.metric: s.value for s in samples if s.text is None}


def test_unit_is_read_and_what_is_not_set_is_not_there(tmp_path: Path) -> None:
    (samples,) = follow(1, command=answers(tmp_path, CALM))
    (observed,) = told(samples, "observed")
    assert observed.value == 1
    assert observed.text == "unit llm.service, active, Restart=on-failure, OOMPolicy=stop"
    read = values(samples)
    assert (read["restarts_total"], read["active"], read["main_pid"]) == (0, 1, 4242)
    assert read["memory_peak_bytes"] == 2 << 30
    assert {"tasks", "memory_max_bytes"} & read.keys() == set()
    assert "show --no-pager" in (tmp_path / "asked").read_text()
    assert (tmp_path / "asked").read_text().rstrip().endswith("-- llm.service")


def test_oom_kill_and_restart_are_told_with_how_the_process_ended(tmp_path: Path) -> None:
    again = CALM | {"NRestarts": "1", "InvocationID": "bb" * 16, "MainPID": "5000"}
    first, killed, back, calm = follow(4, command=answers(tmp_path, CALM, KILLED, again))
    (result,) = told(killed, "result")
    assert (result.labels["result"], result.labels["status"]) == ("oom-kill", "9")
    assert result.text == "unit llm.service: systemd calls it oom-kill, main process: signal 9"
    assert told(killed, "state")[0].labels["state"] == "failed"
    assert "memory_current_bytes" not in values(killed)
    assert "main_pid" not in values(killed)
    (restart,) = told(back, "restart")
    assert "restarted 1 times by systemd" in (restart.text or "")
    assert told(first, "restart") == told(calm, "restart") == []


def test_restart_by_hand_between_two_looks_shows_in_the_invocation(tmp_path: Path) -> None:
    _, samples = follow(2, command=answers(tmp_path, CALM, CALM | {"InvocationID": "cc" * 16}))
    assert "restarted by somebody" in (told(samples, "restart")[0].text or "")


def test_rules_read_the_units_words(tmp_path: Path) -> None:
    samples = [s for tick in follow(2, command=answers(tmp_path, CALM, KILLED)) for s in tick]
    moved = [Sample(s.monitor, s.metric, s.value, golden.at(44), s.labels, s.text) for s in samples]
    quiet = [golden.sample(m, "observed", 1.0, 0, text="") for m in ("kernel", "process")]
    run = golden.build(
        tmp_path / "run", outcomes=golden.steady(60), samples=[*quiet, *moved],
        phases=[golden.phase("measure", "measure", 0, 60)],
    )  # fmt: skip
    oom, restart = (plugins.load("rules", name) for name in ("oom", "restart"))
    (kill,) = oom.check(run, oom.Options())
    assert (kill.status, kill.hard, kill.cause) == ("fail", True, "oom_kill")
    assert "Result=oom-kill flag set, exit code 9" in kill.message
    (outage,) = restart.check(run, restart.Options())
    assert (outage.status, outage.evidence) == ("fail", "samples: systemd")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("echo 'System has not been booted with systemd' >&2; exit 1", "System has not been booted with systemd"),
        ("echo LoadState=not-found", "there is no unit llm.service"),
        ("exit 4", "ended with 4"),
    ],
)
def test_systemd_that_cannot_be_asked_is_one_line(tmp_path: Path, body: str, why: str) -> None:
    first, second = follow(2, command=systemctl(tmp_path, body))
    (observed,) = told(first, "observed")
    assert observed.value == 0
    assert why in (observed.text or "")
    assert told(second, "observed") == []


def test_missing_systemctl_is_one_line(tmp_path: Path) -> None:
    (samples,) = follow(1, command=str(tmp_path / "none"))
    assert told(samples, "observed")[0].text == f"{tmp_path / 'none'}: No such file or directory"


def test_systemctl_that_hangs_is_given_up_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "DEADLINE_S", 0.3)
    (samples,) = follow(1, command=systemctl(tmp_path, f"echo $$ >{tmp_path}/pid; exec sleep 600"))
    assert "no answer within 0.3 s" in (told(samples, "observed")[0].text or "")
    pid_file = tmp_path / "pid"
    if pid_file.exists():  # it may not have come that far on a busy machine
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


def test_outage_of_the_bus_is_told_once(tmp_path: Path) -> None:
    command = answers(tmp_path, CALM)

    async def run() -> list[Sample]:
        watch = systemd.watch(systemd.Options(unit="llm.service", command=command))
        out = await anext(watch)
        systemctl(tmp_path, "exit 1")
        for _ in range(3):
            out = out + await anext(watch)
        await watch.aclose()  # type: ignore[attr-defined]
        return out

    samples = asyncio.run(run())
    assert len(told(samples, "show_failed")) == 1
    assert values(samples)["shows_failed_total"] == 3


@pytest.mark.parametrize(
    ("text", "is_"), [("0", 0), ("[not set]", None), ("infinity", None), ("18446744073709551615", None), ("", None)]
)
def test_numbers_of_systemd(text: str, is_: float | None) -> None:
    assert systemd.number(text) == is_


def test_server_that_is_in_no_unit_is_said(tmp_path: Path) -> None:
    (samples,) = follow(1, unit="", target_url="http://192.0.2.7:8000")
    assert "target is not on this host" in (told(samples, "observed")[0].text or "")
