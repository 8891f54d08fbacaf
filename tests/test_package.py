"""What we ship: the wheel's content, and that it runs where nothing but its declared dependencies is installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"loadgen", "workloads", "monitors"}
UV = Path(sys.executable).parent / "uv"


def run(*command: str | Path, cwd: Path = ROOT, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the locked hatchling itself: no isolated environment, so no network."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheels_top_level_is_the_three_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert len(tops) == len(PACKAGES) + 1


def test_the_wheel_holds_every_tracked_kind_of_file(wheel: Path) -> None:
    """Code, scenarios, presets, schemas, READMEs and the markers of typed packages: whatever lies in the packages."""
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == ours
    assert {f"{package}/py.typed" for package in PACKAGES} <= shipped
    assert "loadgen/summary.schema.json" in shipped
    assert any(name.startswith("workloads/scenarios/") and name.endswith(".yaml") for name in shipped)
    assert any(name.startswith("loadgen/sim/presets/") and name.endswith(".yaml") for name in shipped)


def test_the_wheel_carries_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
        commands = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "Apache License" in licence
    assert "Version 2.0" in licence
    assert "loadgen = loadgen.cli:main" in commands
    assert "Requires-Python: >=3.11" in metadata


IMPORT_ALL = """
import importlib, pkgutil
for package in ("loadgen", "workloads", "monitors"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


@pytest.mark.timeout(300)
def test_the_wheel_runs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """Only what the wheel declares is installed, at the locked versions, out of uv's cache where `make setup` has
    filled it: a module that needs a development tool does not import."""
    venv = tmp_path / "venv"
    assert run(UV, "venv", "--quiet", "--python", sys.executable, venv).returncode == 0
    pins = tmp_path / "pins.txt"  # the lock without its hashes, which constraints may not carry
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    pins.write_text("".join(f"{line.rstrip(' ' + chr(92))}\n" for line in lock if "==" in line and line[0] != " "))
    install: list[str | Path] = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        venv / "bin/python",
        "--constraint",
        pins,
        wheel,
    ]
    installed = run(*install, "--offline")
    if installed.returncode != 0:
        installed = run(*install, timeout_s=200)
    if installed.returncode != 0 and "error sending request" in installed.stderr:
        pytest.skip("the dependencies are not in uv's cache, and no package registry is reached")
    assert installed.returncode == 0, installed.stderr

    helped = run(venv / "bin/loadgen", "--help", cwd=tmp_path)
    assert helped.returncode == 0, helped.stderr
    assert "Exit codes" in helped.stdout
    listed = run(venv / "bin/loadgen", "list", "scenarios", cwd=tmp_path)
    assert "soak-600s" in listed.stdout, listed.stderr
    imported = run(venv / "bin/python", "-W", "error", "-c", IMPORT_ALL, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
