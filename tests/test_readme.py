"""Docs that cannot go stale: what a README names exists, and what exists is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from loadgen import cli, plugins, scenario, verdict
from loadgen.record import Run

ROOT = Path(__file__).parent.parent


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_module_of_loadgen_stands_in_its_readme() -> None:
    table = text("loadgen/README.md")
    for path in (ROOT / "loadgen").glob("*.py"):
        if not path.name.startswith("__"):
            assert f"`{path.name}`" in table, path.name


def test_every_file_that_the_readme_of_loadgen_names_exists() -> None:
    for name in re.findall(r"`([a-z_0-9]+\.py)`", text("loadgen/README.md")):
        assert (ROOT / "loadgen" / name).is_file(), name


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "loadgen/README.md", "runs/README.md"])
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text(name)):
        if "://" not in link:
            assert ((ROOT / name).parent / link).exists(), link


def test_the_front_page_quotes_the_checked_in_example_word_for_word() -> None:
    report = text("runs/example/report.md")
    block = report.split("```")[1].strip()
    assert block in text("README.md")


def test_the_example_is_judged_the_same_again(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "runs/example", tmp_path / "example")
    judged = verdict.judge(tmp_path / "example")
    assert judged.overall == "PASS"
    for name in ("findings.json", "summary.json", "report.md"):
        assert (tmp_path / "example" / name).read_text() == text(f"runs/example/{name}"), "run tests/real/example.py"


def test_the_example_is_whole_and_small() -> None:
    run = Run(ROOT / "runs/example")
    assert run.finished
    assert sum(1 for _ in run.outcomes()) > 100
    assert sum(path.stat().st_size for path in run.folder.iterdir()) < 2_000_000
    measured = [phase for phase in run.phases if phase.kind == "measure"]
    assert ((measured[0].end_ns or 0) - measured[0].start_ns) / 1e9 == pytest.approx(600, abs=1)


def test_every_command_and_scenario_stands_on_the_front_page() -> None:
    page = text("README.md")
    for command in cli.app.registered_commands:
        name = command.name or (command.callback.__name__ if command.callback else "")
        assert f"loadgen {name}" in page, name
    for name in scenario.names():
        assert f"`{name}`" in page
    for name in plugins.names("monitors"):
        assert name in page, name


def test_the_make_targets_of_the_front_page_exist() -> None:
    makefile = text("Makefile")
    for target in re.findall(r"(?:^    |`)make ([a-z][a-z-]+)", text("README.md"), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
