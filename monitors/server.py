"""Where the server is on this machine: from its port to its socket, its process, its cgroup, its container or unit.

Never by name. Several monitors ask the same question, and the two of the fast lane must ask it without any package; so
it stands here and not in a plug-in. What a process tells of itself (its command line, its title) is not asked: the port
leads to a socket, the socket to the process that holds it, and the process's cgroup says what it was started as.
"""

# ruff: noqa: PTH115, PTH208 - a Path for each of thousands of directory entries triples the cost of a scan
from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
UNIFIED = ""  # the controller's name of cgroup v2 in /proc/PID/cgroup, on a hybrid machine too
# Where a process lives is asked in this order: v2 knows best, systemd's own v1 hierarchy next, then what limits memory.
ASKED_FIRST = (UNIFIED, "name=systemd", "memory", "pids", "cpu")
NOBODY = "nobody listens on port"  # a reason that may give way to a better one later
MAX_CGROUPS = 64  # directories below the server's cgroup that are looked into; a container has one or two

# 64 hex digits are a container, after a prefix (`docker-ID.scope`), a colon (containerd without delegation) or alone.
_CONTAINER = re.compile(r"(?:^|([a-z][a-z-]*)[-:]|:)([0-9a-f]{64})(?:\.scope)?$")
# prefix of the scope → who runs it
ENGINES = {
    "docker": "docker",
    "libpod": "podman",
    "libpod-payload": "podman",
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "cri-o",
}
# without a prefix the folder above tells
PARENTS = {"docker": "docker", "libpod_parent": "podman", "default": "containerd", "ecs": "docker"}
# Scopes that somebody made for one job. All others (session-3.scope, app-terminal-12.scope) hold what a person does.
_JOB_SCOPE = re.compile(r"^(?:run-|machine-).*\.scope$")
_USER_SERVICE = re.compile(r"^user@\d+\.service$")


@dataclass(frozen=True, slots=True)
class Stat:
    """What we need of /proc/PID/stat."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    threads: int
    start: int


@dataclass(frozen=True, slots=True)
class Found:
    """Who listens, or why that cannot be said."""

    listener: Stat | None
    why: str = ""
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process lives. `paths`: its cgroup by controller. `path`: the cgroup that is the server's own, of the
    hierarchy `controller`; empty where it shares one with a session or with us. `container` is the full id."""

    paths: dict[str, str] = field(default_factory=dict)
    controller: str = UNIFIED
    path: str = ""
    container: str = ""
    engine: str = ""
    unit: str = ""

    def labels(self) -> dict[str, str]:
        """What is known of it, for a sample."""
        known = {"container": self.container, "engine": self.engine, "unit": self.unit, "cgroup": self.path}
        return {key: value for key, value in known.items() if value}

    def about(self) -> str:
        """The same for people: `in container c0ffee000000 (docker)`."""
        if self.container:
            return f"in container {self.container[:12]}{f' ({self.engine})' if self.engine else ''}"
        return f"in unit {self.unit}" if self.unit else f"in cgroup {self.path}" if self.path else ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted cgroup hierarchy: which controllers, where, and which cgroup stands at its top."""

    controllers: frozenset[str]
    point: str
    top: str


def tree(root: str) -> Path:
    """The file tree to look at: a simulated machine without a process table stands for this one's processes."""
    return Path(root) if (Path(root) / "proc/net").exists() else Path("/")


# ---------------------------------------------------------------------------------------------------------------------
# Reading /proc


def read(path: Path) -> bytes | None:
    """A file, or None: a process may end between any two reads."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def stat_of(proc: Path, pid: int | str) -> Stat | None:
    """One process, or None where it is gone. Its name may hold blanks and parentheses."""
    data = read(proc / str(pid) / "stat")
    if data is None:
        return None
    head, _, tail = data.decode("utf-8", "replace").rpartition(")")
    number, _, name = head.partition(" (")
    f = tail.split()
    try:
        return Stat(
            int(number), name, f[0], int(f[1]), int(f[2]), int(f[3]), int(f[11]) + int(f[12]), int(f[17]), int(f[19])
        )
    except (ValueError, IndexError):
        return None


def pids(proc: Path) -> list[int]:
    """All processes, as far as this user may see them."""
    try:
        return [int(name) for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return []


def listening(net: Path, port: int) -> set[str]:
    """Inodes of the sockets that listen on a port, in the network namespace whose tables these are."""
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in (read(net / table) or b"").decode("ascii", "replace").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == LISTEN and fields[1].endswith(f":{port:04X}"):
                inodes.add(fields[9])
    return inodes


def holders(proc: Path, inodes: set[str]) -> tuple[list[Stat], int]:
    """The processes that hold one of these sockets, oldest first, and how many could not be looked into."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found: list[Stat] = []
    hidden = 0
    for pid in pids(proc) if wanted else []:
        folder = proc / str(pid) / "fd"
        try:
            for fd in os.listdir(folder):
                try:
                    held = os.readlink(folder / fd) in wanted
                except OSError:
                    continue
                if held:
                    stat = stat_of(proc, pid)
                    found += [stat] if stat else []
                    break
        except PermissionError:
            hidden += 1
        except OSError:
            continue
    return sorted(found, key=lambda s: (s.start, s.pid)), hidden


def forwards(proc: Path, pid: int) -> tuple[str, int] | None:
    """Where Docker's port forwarder hands connections on to: the container's address and port."""
    words = (read(proc / str(pid) / "cmdline") or b"").decode("utf-8", "replace").split("\0")
    options = dict(pairwise(words))
    port = options.get("-container-port", "")
    return (options.get("-container-ip", ""), int(port)) if port.isdigit() else None


def in_containers(proc: Path, address: str | None, port: int) -> set[str]:
    """Inodes of listeners in other network namespaces. `address` None: whichever, if there is only one that listens."""
    own = namespace(proc, "self")
    seen: set[str] = set()
    found: list[set[str]] = []
    for pid in pids(proc):
        name = namespace(proc, str(pid))
        if name is None or name == own or name in seen:
            continue
        net = proc / str(pid) / "net"
        if read(net / "tcp") is None:  # it ended meanwhile: the next process of the namespace will do
            continue
        seen.add(name)
        inodes = listening(net, port)
        if not inodes:
            continue
        if address is None:
            found.append(inodes)
        elif f"|-- {address}\n".encode() in (read(net / "fib_trie") or b""):
            return inodes
    return found[0] if len(found) == 1 else set()


def namespace(proc: Path, pid: str) -> str | None:
    try:
        return os.readlink(proc / pid / "ns/net")
    except OSError:
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Finding the server


def find(proc: Path, port: int) -> Found:
    """Who listens on the port, here or in a container that the port is forwarded to."""
    inodes = listening(proc / "net", port)
    found, hidden = holders(proc, inodes)
    forwarded = forwards(proc, found[0].pid) if found else None
    if forwarded is not None:
        found, hidden = holders(proc, in_containers(proc, *forwarded))
    elif not inodes:
        found, hidden = holders(proc, in_containers(proc, None, port))
    if found:
        return Found(found[0])
    if inodes or forwarded:
        return Found(None, f"port {port} is served by a process of another user ({hidden} hidden): run as root", True)
    return Found(None, f"{NOBODY} {port}")


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a name that cannot be resolved, or that is none
        return False
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False


def port_of(url: str) -> tuple[int, str]:
    """The port that a server of this machine has; 0 and why where the address names none here."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    if not port or not parts.hostname:
        return 0, "no target_url to take the port from"
    if not is_here(parts.hostname):
        return 0, f"target is not on this host ({parts.hostname})"
    return port, ""


def named(proc: Path, pid: int) -> Found:
    """The process that the user named."""
    stat = stat_of(proc, pid)
    return Found(stat, "" if stat else f"there is no process {pid}")


# ---------------------------------------------------------------------------------------------------------------------
# Its cgroup, container and unit


def cgroups(data: bytes) -> dict[str, str]:
    """/proc/PID/cgroup by controller: `4:memory:/x` → memory, `0::/x` → UNIFIED, `3:cpu,cpuacct:/x` → both."""
    found: dict[str, str] = {}
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path.startswith("/"):
            path = path.removesuffix(" (deleted)")
            found.update(dict.fromkeys(controllers.split(",") if number != "0" else [UNIFIED], path))
    return found


def mounts(data: bytes) -> list[Mount]:
    """The cgroup hierarchies of a mountinfo."""
    found: list[Mount] = []
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        fields, what = left.split(), right.split()
        if len(fields) < 5 or len(what) < 3 or what[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = [UNIFIED] if what[0] == "cgroup2" else what[2].split(",")
        top, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), field) for field in fields[3:5])
        found.append(Mount(frozenset(controllers), point, top))
    return found


def directory(root: Path, mounted: list[Mount], controller: str, path: str) -> Path | None:
    """The directory of a cgroup, or None where no mount shows it. In a container the mount's top is the container's own
    cgroup, and what lies outside of it begins with `/..`."""
    best: tuple[int, Path] | None = None
    for mount in mounted:
        inside = PurePosixPath(path)
        if controller not in mount.controllers or not inside.is_relative_to(mount.top):
            continue
        below = inside.relative_to(mount.top)
        if ".." not in below.parts and (best is None or len(mount.top) < best[0]):
            best = len(mount.top), root / mount.point.lstrip("/") / below
    return best[1] if best else None


def container_of(path: str) -> tuple[str, str, str]:
    """Container id, engine and the part of the path that is the container's; empty where there is none. In nested
    containers the innermost. The monitors of podman and CRI-O (conmon) sit beside their containers and are none."""
    parts = path.split("/")
    for n in range(len(parts) - 1, 0, -1):
        found = _CONTAINER.search(parts[n])
        if found is None or (found[1] or "").endswith("conmon"):
            continue
        above = parts[n - 1]
        engine = ENGINES.get(found[1] or "") or PARENTS.get(above, "")
        if not engine and any(part.startswith("kubepods") for part in parts[:n]):
            engine = "kubernetes"
        return found[2], engine, "/".join(parts[: n + 1])
    return "", "", ""


def unit_of(path: str) -> tuple[str, str]:
    """The systemd unit of a job, and the part of the path that is its own. What a person does in a session, a desktop
    or a terminal is no job: other things are in there too."""
    parts = path.split("/")
    for n in range(len(parts) - 1, 0, -1):
        name = parts[n]
        if (name.endswith(".service") and not _USER_SERVICE.match(name)) or _JOB_SCOPE.match(name):
            return name, "/".join(parts[: n + 1])
    return "", ""


def own_part(path: str) -> str:
    """The cgroup that belongs to one job: a container's, a unit's, or one that somebody made by hand."""
    own = container_of(path)[2] or unit_of(path)[1]
    if own:
        return own
    parts = path.split("/")
    shared = any(part == ".." or part.endswith((".slice", ".scope", ".service")) for part in parts)
    return "" if shared or path == "/" else path


def place(proc: Path, pid: int) -> Place:
    """Where a process lives. A cgroup in which we are as well is never the server's own."""
    theirs = cgroups(read(proc / str(pid) / "cgroup") or b"")
    ours = cgroups(read(proc / "self/cgroup") or b"")
    order = [c for c in ASKED_FIRST if c in theirs] + sorted(theirs.keys() - set(ASKED_FIRST))
    container = engine = unit = ""
    for controller in order:
        if not container:
            container, engine, _ = container_of(theirs[controller])
        unit = unit or unit_of(theirs[controller])[0]
    for controller in order:
        own = own_part(theirs[controller])
        if container and container_of(theirs[controller])[0] != container:
            continue
        if own and not f"{ours.get(controller, '')}/".startswith(f"{own}/"):
            return Place(theirs, controller, own, container, engine, unit)
    return Place(theirs, container=container, engine=engine, unit=unit)


def members(folder: Path) -> set[int] | None:
    """The processes of a cgroup and of those below it; None where it is gone. Of another pid namespace they are 0."""
    if (data := read(folder / "cgroup.procs")) is None:
        return None
    found = {int(word) for word in data.split() if word.isdigit()}
    todo, seen = [folder], 0
    while todo and (seen := seen + 1) < MAX_CGROUPS:
        above = todo.pop()
        try:
            below = [Path(entry.path) for entry in os.scandir(above) if entry.is_dir(follow_symlinks=False)]
        except OSError:  # it went away under us
            continue
        for each in below:
            found |= {int(word) for word in (read(each / "cgroup.procs") or b"").split() if word.isdigit()}
        todo += below
    return found - {0}
