"""What there is to work with on this machine: the facts by which `config.resolve` decides."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .config import MachineFacts


def machine_facts() -> MachineFacts:
    """What there is to work with."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else {"bf16"}
    return MachineFacts(
        num_cores=_num_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        # A torch for CPUs alone says so in its version; asking torch itself would take seconds.
        has_gpu=Path("/dev/nvidiactl").exists() and not _version("torch").endswith("+cpu"),
        has_bfloat16=bool(flags & {"amx_bf16", "avx512_bf16", "bf16"}),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _num_cores() -> int:
    """Cores that this process may use; the hardware threads of a core share what a product needs, and count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return max(1, min(len(cores), cpu_quota(Path("/sys/fs/cgroup"))))


def cpu_quota(group: Path) -> int:
    """Whole CPUs whose time a control group grants (cpu.max: microseconds, of so many), as `docker run --cpus` sets it:
    threads beyond them would stand still with those they wait for. A large number where nothing is set."""
    try:
        granted, period = (group / "cpu.max").read_text().split()
        return max(1, int(granted) // int(period))
    except (OSError, ValueError):  # no such group, or "max"
        return 1 << 16
