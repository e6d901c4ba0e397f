"""The facts about this machine by which `resolve` decides: cores, memory, GPU, C compiler, the CPU's instructions, and
the levels of the C kernels that it can run.

The environment variable PAGEWIRE_MACHINE replaces some of them, such as `{"has_compiler": false, "num_cores": 1}`, so
that the defaults of one machine can be tested on another.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from ..errors import ConfigError
from ..kernels.cpu.build import compiler, shipped_levels
from ..kernels.cpu.levels import cpu_features, levels_here
from .config import ATTENTION_PACKAGES, MachineFacts, NumaNode
from .cpus import cpu_quota, num_sockets, numa_nodes, online_cpus
from .gpu import lowest_capability, visible_gpus

OVERRIDES = "PAGEWIRE_MACHINE"
_HAS_AFFINITY = hasattr(os, "sched_getaffinity")  # Linux


def cache_folder() -> Path:
    """Where this user's processes keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire"


def machine_facts(environment: Mapping[str, str] = os.environ) -> MachineFacts:
    """The facts, as far as `environment` does not replace them. Raises ConfigError for a wrong replacement."""
    found = _look(environment)
    text = environment.get("PAGEWIRE_MACHINE")
    if text is None:
        return found
    try:
        changes = msgspec.json.decode(text, type=dict[str, object])
        if unknown := sorted(changes.keys() - set(MachineFacts.__struct_fields__)):
            known = ", ".join(MachineFacts.__struct_fields__)
            raise ConfigError(f"{OVERRIDES} names {unknown[0]}, which is none of the facts: {known}.")
        return msgspec.convert(msgspec.structs.asdict(found) | changes, MachineFacts)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{OVERRIDES} must be a JSON object of facts about the machine: {error}.") from None


def usable_cores() -> int:
    """The number of cores that this process may use, and whose time it is granted."""
    cpus = _own_cpus()
    return _granted(numa_nodes(cpus) if _HAS_AFFINITY else (), cpus, cpu_quota(_own_groups()))


def _own_cpus() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0))) if _HAS_AFFINITY else tuple(range(os.cpu_count() or 1))


def _granted(nodes: Sequence[NumaNode], cpus: Sequence[int], quota: int | None) -> int:
    num_cores = sum(len(node.cores) for node in nodes) or len(cpus)
    return num_cores if quota is None else min(num_cores, quota)


def _look(environment: Mapping[str, str]) -> MachineFacts:
    cpus = _own_cpus()
    nodes = numa_nodes(cpus) if _HAS_AFFINITY else ()
    quota = cpu_quota(_own_groups())
    flags = cpu_features(Path("/proc/cpuinfo"))
    # The version tells a torch that is for CPUs only; importing torch would take seconds.
    has_gpu = (
        Path("/dev/nvidiactl").exists()
        and not _version("torch").endswith("+cpu")
        and environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    )
    return MachineFacts(
        num_cores=_granted(nodes, cpus, quota),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        has_gpu=has_gpu,
        gpu_capability=lowest_capability(environment) if has_gpu else None,
        has_compiler=compiler() is not None,
        cpu_levels=tuple(level.name for level in levels_here()),
        shipped_levels=shipped_levels(),
        has_bfloat16=bool(flags & {"amx_bf16", "avx512_bf16", "bf16"}),
        has_amx="amx_tile" in flags,
        online_cpus=online_cpus(cpus),
        numa_nodes=nodes,
        num_sockets=num_sockets(cpus),
        attention_packages=tuple(name for name, package in ATTENTION_PACKAGES.items() if _version(package)),
        cpu_quota=quota,
        gpus=visible_gpus(environment) if has_gpu else (),
    )


def _own_groups() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def available_memory() -> int:
    """Bytes: the lesser of the machine's free memory and what the process's cgroup still allows."""
    limits = [_machine_free(Path("/proc/meminfo"))]
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and used is not None:
        limits.append(limit - used)
    return max(0, min(limits))


def _machine_free(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30  # no Linux: free memory is unknown, so assume little


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None
