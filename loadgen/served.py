"""The server as a process of this machine: its program, its arguments, its settings, its limits, and where it lives.

Found by its port, as the monitors find it. What is said of it may be passed on (`redact`): a digest stands for the
program, the last part of a path for a path.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from loadgen import clock, redact
from monitors import server

# A program of this size is read and hashed in a fifth of a second; larger ones carry a model or a whole runtime.
MAX_HASHED_BYTES = 128 << 20
HASH_BLOCK_BYTES = 1 << 20
LIMITS = {"Max open files": "open_files", "Max locked memory": "locked_memory_bytes", "Max processes": "processes"}

# How weights are stored, as their names say: Q4_K_M, IQ2_XS, MXFP4, FP8, AWQ.
QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])(I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|[BF]F?16|F32|MXFP[468]|NVFP4|FP[48]|AWQ|GPTQ|INT[48]|W\dA\d+)"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
# fact → flags that tell it, of vLLM, SGLang, llama.cpp and TGI
FLAGS = {
    "revision": ("--revision", "--model-revision"),
    "quantization": ("--quantization", "-q", "--quantize"),
    "dtype": ("--dtype",),
    "kv_cache_dtype": ("--kv-cache-dtype", "--cache-type-k", "-ctk"),
    "draft_model": ("--speculative-draft-model-path", "--model-draft", "-md", "--hf-repo-draft", "-hfd"),
}


@dataclass(frozen=True, slots=True)
class Served:
    """None and empty: could not be read. `arguments_sha256` is of the redacted list: two servers that were started
    alike have it in common, and nobody can try keys against it."""

    pid: int
    start_ticks: int
    name: str
    container: str | None = None
    container_engine: str | None = None
    unit: str | None = None
    own_cgroup: bool = False
    processes: int | None = None
    started: str | None = None
    executable: str | None = None
    executable_bytes: int | None = None
    executable_sha256: str | None = None
    arguments: tuple[str, ...] = ()
    arguments_sha256: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    oom_score_adj: int | None = None
    nice: int | None = None
    limits: dict[str, int] = field(default_factory=dict)
    not_read: dict[str, str] = field(default_factory=dict)


def find(url: str, root: Path = Path("/"), *, hashed: bool = True) -> tuple[Served | None, str]:
    """Who serves a URL, or why that cannot be said. With `hashed` the program itself is read."""
    port, why = server.port_of(url)
    if why:
        return None, why
    proc = server.tree(str(root)) / "proc"
    found = server.find(proc, port)
    return (about(proc, found.listener, hashed), "") if found.listener is not None else (None, found.why)


def about(proc: Path, listener: server.Stat, hashed: bool = True) -> Served:
    """One process. Of another user's most cannot be read, and `not_read` says so."""
    folder = proc / str(listener.pid)
    not_read: dict[str, str] = {}
    place = server.place(proc, listener.pid)

    def lines(name: str, fact: str) -> list[str]:
        try:
            return [part.decode("utf-8", "replace") for part in (folder / name).read_bytes().split(b"\0") if part]
        except OSError as error:
            not_read[fact] = f"{(error.strerror or '').lower()}: run as root" if error.errno == 13 else "it is gone"
            return []

    argv = lines("cmdline", "arguments")
    said = tuple(redact.words(argv))
    environ = lines("environ", "settings")
    program, size, digest = executable(folder / "exe", hashed, not_read)
    score = server.read(folder / "oom_score_adj")
    return Served(
        pid=listener.pid,
        start_ticks=listener.start,
        name=listener.name,
        container=place.container or None,
        container_engine=place.engine or None,
        unit=place.unit or None,
        own_cgroup=bool(place.path),
        started=started(proc, listener.start),
        executable=program,
        executable_bytes=size,
        executable_sha256=digest,
        arguments=said,
        arguments_sha256=hashlib.sha256("\0".join(said).encode()).hexdigest() if said else None,
        settings=redact.settings(environ),
        options=options(argv),
        oom_score_adj=int(score) if score and re.fullmatch(rb"-?\d+\s*", score) else None,
        nice=nice(folder),
        limits=limits((server.read(folder / "limits") or b"").decode("ascii", "replace")),
        not_read=not_read,
    )


def started(proc: Path, start_ticks: int) -> str | None:
    """When a process began, UTC: its start ticks count from the boot, whose time /proc/stat knows."""
    boot = re.search(rb"^btime (\d+)", server.read(proc / "stat") or b"", re.MULTILINE)
    return clock.utc(int(boot[1]) + start_ticks / os.sysconf("SC_CLK_TCK")) if boot else None


def executable(path: Path, hashed: bool, not_read: dict[str, str]) -> tuple[str | None, int | None, str | None]:
    """Name, size and SHA-256 of a program; it can be read even after it was replaced on the disk."""
    try:
        name = path.readlink().name.removesuffix(" (deleted)")
        size = path.stat().st_size
        if size > MAX_HASHED_BYTES or not hashed:
            if hashed:
                not_read["executable_sha256"] = f"{size >> 20} MiB; more than {MAX_HASHED_BYTES >> 20} MiB are not read"
            return name, size, None
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(HASH_BLOCK_BYTES):
                digest.update(block)
        return name, size, digest.hexdigest()
    except OSError as error:
        not_read["executable"] = f"{(error.strerror or '').lower()}: run as root" if error.errno == 13 else "it is gone"
        return None, None, None


def options(argv: list[str]) -> dict[str, str]:
    """What the command line tells of the model, under our names."""
    found: dict[str, str] = {}
    for fact, flags in FLAGS.items():
        for n, word in enumerate(argv):
            flag, equals, value = word.partition("=")
            if flag in flags and (equals or n + 1 < len(argv)):
                whole = value if equals else argv[n + 1]
                found[fact] = (
                    whole if fact == "revision" and re.fullmatch(r"[\w.-]{1,64}", whole) else redact.text(whole)
                )
    return found


def quantization(*names: str | None) -> str | None:
    """How a model's weights are stored, where its name says so: the last such word of the first name that has one."""
    for name in names:
        found = QUANTIZATION.findall(Path(name or "").name)
        if found:
            return str(found[-1]).upper()
    return None


def nice(folder: Path) -> int | None:
    tail = (server.read(folder / "stat") or b"").rpartition(b")")[2].split()
    return int(tail[16]) if len(tail) > 16 else None


def limits(text: str) -> dict[str, int]:
    """Soft limits; one that is unlimited is not there."""
    found = {}
    for words, name in LIMITS.items():
        line = re.search(rf"^{words}\s+(\d+)", text, re.MULTILINE)
        if line:
            found[name] = int(line[1])
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What listens on this machine


def listeners(root: Path = Path("/")) -> list[tuple[int, str, server.Stat]]:
    """Ports that can be reached by loopback and whose process we may see: port, loopback address, process."""
    proc = server.tree(str(root)) / "proc"
    reach = {"0100007F": "127.0.0.1", "00000000": "127.0.0.1"}
    if sys.byteorder == "big":
        reach["7F000001"] = "127.0.0.1"
    reach |= {"0" * 32: "127.0.0.1", "0" * 24 + ("01000000" if sys.byteorder == "little" else "00000001"): "[::1]"}
    found: dict[int, tuple[str, str]] = {}
    for table in ("tcp", "tcp6"):
        for line in (server.read(proc / "net" / table) or b"").decode("ascii", "replace").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == server.LISTEN:
                address, _, port = fields[1].partition(":")
                if address in reach:
                    found.setdefault(int(port, 16), (reach[address], fields[9]))
    by_inode = holders(proc, {inode for _, inode in found.values()})
    return [(port, host, by_inode[inode]) for port, (host, inode) in sorted(found.items()) if inode in by_inode]


def holders(proc: Path, inodes: set[str]) -> dict[str, server.Stat]:
    """Which process holds which socket, in one look at all of them."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[str, server.Stat] = {}
    for pid in server.pids(proc) if wanted else []:
        try:
            entries = os.listdir(proc / str(pid) / "fd")  # noqa: PTH208 - thousands of entries
        except OSError:
            continue
        for fd in entries:
            try:
                held = wanted.get(os.readlink(proc / str(pid) / "fd" / fd))  # noqa: PTH115
            except OSError:
                continue
            stat = server.stat_of(proc, pid) if held is not None else None
            if held is not None and stat is not None and (held not in found or stat.start < found[held].start):
                found[held] = stat
    return found
