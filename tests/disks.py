"""A disk so small that it fills up: a tmpfs of a few hundred KB, where we may mount one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tiny(at: Path, size_kb: int = 256, ballast_kb: int = 64) -> Iterator[Path]:
    """`ballast` is a file in it: removing it is how room comes back."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(at)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        (at / "ballast").write_bytes(bytes(ballast_kb * 1024))
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)
