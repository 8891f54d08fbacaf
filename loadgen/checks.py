"""What `loadgen doctor` makes of what it found: each fact a check, graded. Pure.

A *problem* would make the verdict of a run partial or impossible, or stop it before it begins: what a PASS needs cannot
be seen, the server does not answer, the machine is busy with others, the run's files have no room. A *note* is what a
reader of the verdict should know, and what can be done. Everything else is *ok*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from loadgen.look import Seen
from loadgen.machine import KILLERS, Busy, Machine, Volume
from loadgen.preflight import Facts
from loadgen.rules import BUSIER_PERCENT
from loadgen.served import Served
from loadgen.supervise import DEFAULT_MONITORS
from loadgen.types import Json

Grade: TypeAlias = Literal["problem", "note", "ok"]
GRADES: tuple[Grade, ...] = ("problem", "note", "ok")

GIB = 1 << 30
MIB = 1 << 20
BUSY_PERCENT = 10.0  # of one core: less is what any machine does by itself
MAX_NAMED = 3  # of those who are busy
LOW_MEMORY_SHARE = 0.1  # less than this is left: the first long prompt decides
# The kernel's own choice is at most 256 MiB (mm/page_alloc.c), with huge pages some more; what is above was set by hand
# and is taken off MemAvailable.
RAISED_MIN_FREE_BYTES = GIB
NO_ROOM_BYTES = GIB  # a night of a busy soak takes some hundred MB
LITTLE_ROOM_BYTES = 5 * GIB
FEW_FILES = 1024  # one descriptor a stream and some dozens of our own
TOO_FEW_FILES = 256
FEW_PORTS = 5000  # each new connection keeps its port for a minute after it was closed
SLOW_CLOCKSOURCES = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies"})  # a reading costs µs instead of ns
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"})
LOOPING = frozenset({"always", "unless-stopped", "on-failure", "on-abnormal", "on-abort"})

GPU_MONITORS = {"nvidia": "NVIDIA", "amd": "AMD"}
# Without one of these a verdict is partial. The GPU's own counts where there is such a GPU.
NEEDED = tuple(name for name in DEFAULT_MONITORS if name not in GPU_MONITORS)
# What the fast lane says of a right that it lacks → that right.
RIGHTS = {
    r"oom_score_adj stays": "CAP_SYS_RESOURCE",
    r"memory not locked": "CAP_IPC_LOCK or `ulimit -l unlimited`",
    r"nice .*denied": "CAP_SYS_NICE",
}
# Of these there is nothing to see until they are told where.
OPT_IN = frozenset({"docker", "systemd", "logs", "textfile"})

# The rows that are not a monitor's, in the order in which they are asked.
ROWS = (
    "server", "load", "found", "restart policy", "machine", "memory", "swap", "memory killers", "sysctls", "huge pages",
    "pressure", "gpu", "others on gpu", "others on cpu", "clock", "clock source", "run folder", "limits", "hardening",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """One row: what it is about, how it stands, what was found, and what to do where something can be done."""

    name: str
    grade: Grade
    text: str
    remedy: str | None = None


# ---------------------------------------------------------------------------------------------------------------------
# The server


def server(facts: Facts | None, why: str) -> Check:
    """What serves, by its own words and a tiny generation; `why` it did not answer."""
    if facts is None:
        return Check("server", "problem", why, "start it, or give another URL; `loadgen probe URL` shows one request")
    said = [f"{' '.join(filter(None, (facts.engine or 'a server', facts.version)))} serves {facts.model}"]
    said.append(f"context {facts.context_tokens}" if facts.context_tokens else "context not told")
    if facts.slots:
        said.append(f"{facts.slots} slots")
    if capacity := facts.figures.get("kv_capacity_tokens"):
        said.append(f"KV cache {capacity:.0f} tokens")
    if facts.quantization:
        said.append(facts.quantization)
    if facts.solo_ttft_ms is not None:
        said.append(f"first token after {facts.solo_ttft_ms:.0f} ms")
    return Check("server", "ok", ", ".join(said))


def load(facts: Facts | None) -> Check | None:
    """Whether others ask it."""
    if facts is None:
        return None
    if facts.foreign_requests is None:
        return Check("load", "note", "the server does not tell whether others use it", "see the monitor engine")
    if facts.foreign_requests:
        said = f"{facts.foreign_requests} requests of others are running: a run would not begin"
        return Check("load", "problem", said, "wait until it is quiet, or `loadgen run --allow-busy`")
    return Check("load", "ok", "no requests of others")


def found(served: Served | None, why: str) -> Check:
    """The server as a process of this machine."""
    if served is None:
        remote = "not on this host" in why
        why, how = split(why)
        remedy = "run loadgen on the server's machine, or the verdict knows the wire only" if remote else how
        return Check("found", "problem", f"the server's process is not seen: {why}", remedy)
    where = (
        f"in container {served.container[:12]}{f' ({served.container_engine})' if served.container_engine else ''}"
        if served.container
        else f"in unit {served.unit}" if served.unit
        else "in a cgroup of its own" if served.own_cgroup else "in no container, unit or cgroup of its own"
    )  # fmt: skip
    said = f"by its port: pid {served.pid} ({served.name}) {where}"
    said += f", since {served.started}" if served.started else ""
    if served.oom_score_adj is not None and served.oom_score_adj <= -900:
        said += f"; oom_score_adj {served.oom_score_adj}: the kernel will kill others for it"
        return Check("found", "note", said, "start it without that score, or the OOM killer takes a bystander")
    return Check("found", "ok", said)


def restart_policy(served: Served | None, seen: Mapping[str, Seen]) -> Check | None:
    """Who starts it again. A loop of crashes eats memory that a freeze of the machine gives back."""
    if served is None:
        return None
    policy = who = ""
    docker, systemd = seen.get("docker"), seen.get("systemd")
    if docker is not None and docker.observed:
        policy, who = docker.labels.get("restart_policy", ""), "the container engine"
    elif systemd is not None and systemd.observed:
        policy, who = systemd.text.partition("Restart=")[2].partition(",")[0], "systemd"
    if policy.partition(":")[0] in LOOPING:
        return Check("restart policy", "note", f"{policy}: {who} starts it again, for ever if it must",
                     "a crash loop is seen as restarts; `no` for the time of a boundary search")  # fmt: skip
    if policy:
        return Check("restart policy", "ok", f"{policy} ({who})")
    if served.container or served.unit:
        asked = "docker" if served.container else "systemd"
        return Check("restart policy", "note", f"not known: {asked} could not be asked", f"see the monitor {asked}")
    return Check("restart policy", "ok", "a plain process: nobody starts it again, as far as can be seen")


# ---------------------------------------------------------------------------------------------------------------------
# Monitors


def monitors(seen: Mapping[str, Seen], machine: Machine) -> list[Check]:
    """Each monitor by its own words."""
    return [monitor(name, one, machine) for name, one in sorted(seen.items())]


def monitor(name: str, seen: Seen, machine: Machine) -> Check:
    """Observed, or why not. The command that would allow it is part of what the monitor says."""
    if seen.observed:
        return Check(name, "ok", f"observed{f': {seen.text}' if seen.text else ''}")
    why, remedy = split(seen.text or "no answer")
    if name in GPU_MONITORS:
        needed = GPU_MONITORS[name] in machine.gpus or (name == "nvidia" and machine.nvidia_driver is not None)
    else:
        needed = name in NEEDED
    grade: Grade = "problem" if needed or seen.observed is None else "note"
    prefix = "opt-in, not observed" if name in OPT_IN and seen.observed is not None else "not observed"
    return Check(name, grade, f"{prefix}: {why}", remedy)


def split(said: str) -> tuple[str, str | None]:
    """What a monitor says when it cannot see, as the reason and what would allow it; both are its own words."""
    for sign in ("; to allow it: ", ": run as root"):
        why, found, how = said.partition(sign)
        if found:
            return why, f"run as root{how}" if "root" in sign else how
    return said, None


# ---------------------------------------------------------------------------------------------------------------------
# The machine


def machine_(machine: Machine) -> Check:
    said = [machine.product, machine.cpu, f"{machine.cpus} CPUs" if machine.cpus else None, machine.distribution,
            f"kernel {machine.kernel}" if machine.kernel else None, machine.architecture,
            "a virtual machine" if machine.virtual else None]  # fmt: skip
    return Check("machine", "ok", ", ".join(word for word in said if word) or "nothing is known of it")


def memory(machine: Machine) -> Check:
    total, available = machine.memory_total_bytes, machine.memory_available_bytes
    if total is None or available is None:
        return Check("memory", "problem", "/proc/meminfo cannot be read")
    said = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if machine.cgroup:
        said += f", cgroup {machine.cgroup}"
    if available < LOW_MEMORY_SHARE * total:
        return Check("memory", "note", f"only {said}", "who holds it? `ps aux --sort=-rss | head`")
    return Check("memory", "ok", said)


def swap(machine: Machine) -> Check:
    if not machine.swaps:
        if machine.swap_total_bytes:
            return Check("swap", "ok", f"{machine.swap_total_bytes / GIB:.1f} GiB")
        return Check("swap", "ok", "none")
    said = ", ".join(f"{s.kind} {s.size_bytes / GIB:.1f} GiB ({s.used_bytes / GIB:.1f} used)" for s in machine.swaps)
    said += ", zswap on" if machine.zswap else ""
    if any(s.kind == "zram" for s in machine.swaps):
        return Check(
            "swap", "note", f"{said}: zram is memory, it fills what it frees", "judge it by rates, not by stock"
        )
    return Check("swap", "ok", said)


def memory_killers(machine: Machine) -> Check:
    if not machine.killers:
        return Check("memory killers", "ok", "none runs (earlyoom, systemd-oomd, nohang)")
    said = "; ".join(f"{each.name} (pid {each.pid}) {KILLERS[each.name]}" for each in machine.killers)
    name = machine.killers[0].name
    remedy = f"its kill looks like a crash; `sudo systemctl stop {name}` for the run, or exempt the server"
    return Check("memory killers", "note", said, remedy)


def sysctls(machine: Machine) -> Check:
    """Settings that have spoilt runs of others. They are reported, never changed."""
    value = machine.sysctl
    traps, remedies, worst = [], [], False
    if value.get("vm.panic_on_oom", "0") != "0":
        worst = True
        traps.append("vm.panic_on_oom: the machine panics where it should kill")
        remedies.append("sudo sysctl -w vm.panic_on_oom=0")
    if value.get("vm.swappiness") == "0":
        traps.append(
            "vm.swappiness=0: caches are dropped to the last page before anything is swapped; wedges were seen"
        )
        remedies.append("sudo sysctl -w vm.swappiness=10")
    kept = int(value.get("vm.min_free_kbytes", "0")) * 1024
    if kept > RAISED_MIN_FREE_BYTES:
        traps.append(f"vm.min_free_kbytes keeps {kept / GIB:.1f} GiB away from MemAvailable")
        remedies.append("sudo sysctl -w vm.min_free_kbytes=262144")
    if value.get("vm.overcommit_memory") == "2":
        traps.append("vm.overcommit_memory=2: large reservations fail while memory is free")
        remedies.append("sudo sysctl -w vm.overcommit_memory=0")
    if value.get("vm.oom_kill_allocating_task", "0") != "0":
        traps.append("vm.oom_kill_allocating_task: whoever asks is killed, not who holds")
        remedies.append("sudo sysctl -w vm.oom_kill_allocating_task=0")
    if value.get("vm.zone_reclaim_mode", "0") != "0":
        traps.append("vm.zone_reclaim_mode: reclaims on one node while another has room")
        remedies.append("sudo sysctl -w vm.zone_reclaim_mode=0")
    if not traps:
        return Check("sysctls", "ok", f"no known trap; vm.swappiness={value.get('vm.swappiness', 'unknown')}")
    return Check("sysctls", "problem" if worst else "note", "; ".join(traps), "; ".join(remedies))


def huge_pages(machine: Machine) -> Check:
    if machine.transparent_hugepages is None:
        return Check("huge pages", "ok", "this kernel has no transparent huge pages")
    defrag = f", defrag {machine.thp_defrag}" if machine.thp_defrag else ""
    return Check("huge pages", "ok", f"transparent: {machine.transparent_hugepages}{defrag}")


def pressure(machine: Machine) -> Check:
    if machine.pressure_stalls:
        return Check("pressure", "ok", "PSI is on: stalls for memory, I/O and CPU are seen")
    return Check("pressure", "note", "PSI is off: a stall shows in nothing but latency",
                 "boot with psi=1 (needs a kernel with CONFIG_PSI)")  # fmt: skip


def gpu(gpus: Json, machine: Machine) -> Check:
    devices = gpus.get("gpus") or []
    if devices:
        said = [f"driver {gpus.get('driver', 'unknown')}", f"CUDA {gpus['cuda']}" if gpus.get("cuda") else ""]
        for each in devices:
            size = each.get("memory_total_bytes")
            limit, usual = each.get("power_limit_w"), each.get("power_limit_default_w")
            capped = f", capped at {limit:.0f} of {usual:.0f} W" if limit and usual and limit < usual - 1 else ""
            held = f" {size / GIB:.0f} GiB" if size else " (no memory of its own)"
            said.append(f"{each.get('index')}: {each.get('name', each.get('not_read', '?'))}{held}{capped}")
        lost = any("not_read" in each for each in devices)
        return Check("gpu", "problem" if lost else "ok", ", ".join(filter(None, said)))
    if machine.gpus:
        return Check("gpu", "ok", f"on the bus: {', '.join(machine.gpus)}")
    return Check("gpu", "ok", "none")


def others_on_gpu(gpus: Json, ours: set[int]) -> Check | None:
    """Who else computes on the GPUs, besides the server's tree."""
    if not gpus.get("gpus"):
        return None
    held: dict[int, int] = {}
    for each in gpus["gpus"]:
        for process in each.get("processes", []):
            held[process["pid"]] = held.get(process["pid"], 0) + (process.get("memory_bytes") or 0)
    others = {pid: size for pid, size in held.items() if pid not in ours}
    if not others:
        return Check(
            "others on gpu", "ok", "nobody besides the server" if held else "nobody, as far as this user may see"
        )
    said = ", ".join(f"pid {pid} {size / MIB:.0f} MiB" for pid, size in sorted(others.items(), key=lambda e: -e[1])[:4])
    return Check("others on gpu", "note", f"{said}: besides the server", "their memory and time count in every figure")


def others_on_cpu(busy: Sequence[Busy], cpus: int | None) -> Check:
    """Who takes more than a tenth of a core, besides the server and ourselves."""
    named = [each for each in busy if each.cpu_percent > BUSY_PERCENT]
    total = sum(each.cpu_percent for each in busy)
    if not named and total <= BUSIER_PERCENT * (cpus or 1):
        return Check("others on cpu", "ok", f"nobody takes more than {BUSY_PERCENT:.0f} % of a core")
    said = ", ".join(f"{each.name} (pid {each.pid}) {each.cpu_percent:.0f} %" for each in named[:MAX_NAMED])
    said += f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    said = f"{said or 'many small ones'}; all others together {total:.0f} % of a core"
    if total > BUSIER_PERCENT * (cpus or 1):
        return Check("others on cpu", "problem", f"{said}: a busy machine spoils every latency", "wait, or stop them")
    return Check("others on cpu", "note", said, "their work is in every latency; a run notices if it grows")


def clock(machine: Machine, steps: int) -> Check:
    if steps:
        return Check(
            "clock", "note", "the clock was set while we looked", "durations are safe (monotonic); wall times jump"
        )
    if machine.clock is None:
        return Check("clock", "note", "whether it is kept right cannot be asked")
    if not machine.clock.synchronized:
        return Check("clock", "note", "nobody keeps it right: wall times of two machines cannot be compared",
                     "sudo timedatectl set-ntp true (or start chrony)")  # fmt: skip
    return Check("clock", "ok", f"kept right, within {machine.clock.max_error_us / 1000:.0f} ms by its own account")


def clock_source(machine: Machine) -> Check:
    source = machine.clocksource or "unknown"
    if source in SLOW_CLOCKSOURCES:
        others = [name for name in machine.clocksources if name != source]
        said = f"{source}: each reading costs microseconds, and the generator reads often"
        return Check("clock source", "note", said, f"available: {', '.join(others)}" if others else None)
    return Check("clock source", "ok", source)


def run_folder(volume: Volume | None) -> Check:
    """Where runs go."""
    if volume is None:
        return Check("run folder", "problem", "the folder for runs cannot be looked at", "say another with --out")
    said = f"{volume.free_bytes / GIB:.1f} GiB free on {volume.file_system or 'an unknown file system'}"
    if volume.read_only:
        return Check("run folder", "problem", f"{said}, mounted read-only", "say another with --out")
    if volume.free_bytes < NO_ROOM_BYTES or volume.free_files == 0:
        return Check("run folder", "problem", f"only {said}", "make room, or say another with --out")
    if volume.in_memory:
        return Check("run folder", "note", f"{said}: a run there dies with the machine, and takes its memory",
                     "say a folder on a disk with --out")  # fmt: skip
    if volume.file_system in NETWORK_FILE_SYSTEMS:
        return Check(
            "run folder", "note", f"{said}: when the network hangs the journal hangs", "a local disk is better"
        )
    if volume.free_bytes < LITTLE_ROOM_BYTES:
        return Check("run folder", "note", f"only {said}", "enough for a night; make room for a week")
    return Check("run folder", "ok", said)


def limits(open_files: int, ports: int | None) -> Check:
    """Of this user: descriptors, and ports for connections."""
    said = f"{open_files} open files, {ports if ports is not None else 'unknown'} ports for connections"
    if open_files < TOO_FEW_FILES:
        return Check("limits", "problem", said, f"ulimit -n {FEW_FILES * 4}")
    if open_files < FEW_FILES:
        return Check("limits", "note", f"{said}: a stream takes one file", f"ulimit -n {FEW_FILES * 4}")
    if ports is not None and ports < FEW_PORTS:
        return Check("limits", "note", f"{said}: a closed connection keeps its port for a minute",
                     'sudo sysctl -w net.ipv4.ip_local_port_range="32768 60999"')  # fmt: skip
    return Check("limits", "ok", said)


def hardening(seen: Seen | None) -> Check:
    """What the fast lane was granted so that it outlives what it watches, in its own words."""
    if seen is None or not seen.observed:
        return Check("hardening", "note", "the fast lane did not say what it was granted")
    if "denied" not in seen.text and "not " not in seen.text:
        return Check("hardening", "ok", seen.text)
    needs = ", ".join(right for word, right in RIGHTS.items() if re.search(word, seen.text))
    remedy = f"needs {needs} (root has them, outside of containers); without it a monitor may die before it has told"
    return Check("hardening", "note", seen.text, remedy)
