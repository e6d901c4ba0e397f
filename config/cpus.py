"""The CPUs of this machine that this process may use, their cores and NUMA nodes, and the CPU time that it is granted.

A CPU is what Linux numbers: a hardware thread. Those of one core share its vector units, so threads are counted by
cores. What a process may use is its affinity, which `taskset`, a container's cpuset and systemd set alike. How much of
it is the quota of its control groups, which `docker run --cpus` and systemd's CPUQuota= set.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

from .config import NumaNode

SYSTEM = Path("/sys/devices/system")
GROUPS = Path("/sys/fs/cgroup")


def parse_cpus(text: str) -> tuple[int, ...]:
    """`0-3,8` → (0, 1, 2, 3, 8), as the kernel writes lists of CPUs. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise ValueError(f"{part!r} is no CPU or range of CPUs")
        low, high = int(first), int(last) if dash else int(first)
        if not low <= high < 1 << 16:  # Linux numbers 8,192 CPUs at most
            raise ValueError(f"{part!r} is no range of CPUs")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def show_cpus(cpus: Iterable[int]) -> str:
    """(0, 1, 2, 3, 8) → `0-3,8`."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def online_cpus(allowed: Collection[int], system: Path = SYSTEM) -> tuple[int, ...]:
    """All CPUs of the machine; `allowed` where the system does not say."""
    return _cpus_of(system / "cpu/online") or tuple(sorted(allowed))


def num_sockets(allowed: Collection[int], system: Path = SYSTEM) -> int:
    """Sockets of these CPUs."""
    return len({_text(system / f"cpu/cpu{cpu}/topology/physical_package_id") or "0" for cpu in allowed})


def numa_nodes(allowed: Collection[int], system: Path = SYSTEM) -> tuple[NumaNode, ...]:
    """The NUMA nodes that have some of these CPUs, with their cores. Without NUMA there is one node."""
    folders = {int(path.name[4:]): path for path in (system / "node").glob("node[0-9]*") if path.name[4:].isdecimal()}
    cpus_of = {number: {*_cpus_of(folders[number] / "cpulist")} & {*allowed} for number in sorted(folders)}
    elsewhere = set(allowed).difference(*cpus_of.values())
    if elsewhere:
        cpus_of[min(cpus_of, default=0)] = cpus_of.get(min(cpus_of, default=0), set()) | elsewhere
    return tuple(NumaNode(number, _cores(cpus, system)) for number, cpus in cpus_of.items() if cpus)


def _cores(cpus: Collection[int], system: Path) -> tuple[tuple[int, ...], ...]:
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = _text(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or str(cpu), []).append(cpu)
    return tuple(map(tuple, cores.values()))


def cpu_quota(membership: str, groups: Path = GROUPS) -> int | None:
    """Whole CPUs whose time a process's control groups grant it, at least 1; None: no limit. With more threads, all of
    them would be stopped at times while others wait for them.

    membership: /proc/self/cgroup, a line `number:controllers:path` for each hierarchy. Each ancestor of a group limits
    it as well. In a container the path may be the host's, which is not there: the container then sees its own group
    where the hierarchy is mounted."""
    granted = [cpus for folder in _folders(membership, groups) if (cpus := _granted(folder)) is not None]
    return max(1, int(min(granted))) if granted else None


def _folders(membership: str, groups: Path) -> Iterator[Path]:
    """The folders of the groups that may limit the CPU time, of cgroup v2 and v1."""
    for line in ("0::/", *membership.splitlines()):
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            mounts = [groups, groups / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [groups / controllers, groups / "cpu"]
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:  # outside of what this container sees
            inner = PurePosixPath()
        for mount in mounts:
            yield from (mount / part for part in (inner, *inner.parents))
    yield from (groups / "cpu", groups / "cpu,cpuacct")


def _granted(folder: Path) -> float | None:
    """CPUs: microseconds of each period, in the files of v2 or v1; None: no such files, or no limit (max, -1)."""
    values = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us"),
        _text(folder / "cpu.cfs_period_us"),
    ]
    if len(values) != 2 or not all(value.isdecimal() for value in values) or int(values[1]) == 0:
        return None
    return int(values[0]) / int(values[1])


def _cpus_of(file: Path) -> tuple[int, ...]:
    try:
        return parse_cpus(_text(file))
    except ValueError:  # no such file, or empty: a node without CPUs
        return ()


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
