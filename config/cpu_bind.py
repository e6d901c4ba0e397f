"""`--cpu-bind`: the CPUs of each rank.

A rank that is bound to the CPUs of a NUMA node has its weights and its KV on that node, because Linux takes a page from
the node of the CPU that first writes to it.
"""

from itertools import pairwise

from ..errors import ConfigError
from .config import MachineFacts
from .cpus import parse_cpus, show_cpus

CpuSets = tuple[tuple[int, ...], ...]


def bind_ranks(text: str, num_ranks: int, machine: MachineFacts) -> CpuSets:
    """The CPUs of each rank of this machine; empty: ranks are not bound. Raises ConfigError."""
    match text.strip():
        case "none":
            return ()
        case "auto":
            return _share(num_ranks, machine) if num_ranks > 1 else ()
        case listed:
            return _read(listed, num_ranks, machine)


def num_threads(sets: CpuSets, num_ranks: int, machine: MachineFacts) -> int:
    """Threads of each rank: one for each core of the smallest set, since ranks wait for each other at every sum, and
    together no more than the cores whose time the quota grants."""
    share = max(1, machine.num_cores // num_ranks)
    return min([share, *(_num_cores(cpus, machine) for cpus in sets)])


def _num_cores(cpus: tuple[int, ...], machine: MachineFacts) -> int:
    return sum(not set(core).isdisjoint(cpus) for node in machine.numa_nodes for core in node.cores)


def _share(num_ranks: int, machine: MachineFacts) -> CpuSets:
    """Whole nodes if their number is a multiple of the ranks', else equal shares of the cores in the order of the
    nodes. Nothing if there are fewer cores than ranks: then Linux moves the ranks about."""
    cores = [core for node in machine.numa_nodes for core in node.cores]
    if len(cores) < num_ranks:
        return ()
    parts, rest = divmod(len(machine.numa_nodes), num_ranks)
    if parts and not rest:
        nodes = machine.numa_nodes
        shares = [[c for node in nodes[i * parts : (i + 1) * parts] for c in node.cores] for i in range(num_ranks)]
    else:
        bounds = [len(cores) * i // num_ranks for i in range(num_ranks + 1)]
        shares = [cores[low:high] for low, high in pairwise(bounds)]
    return tuple(tuple(sorted(cpu for core in share for cpu in core)) for share in shares)


def _read(text: str, num_ranks: int, machine: MachineFacts) -> CpuSets:
    try:
        sets = tuple(parse_cpus(part) for part in text.split("|"))
    except ValueError as error:
        raise ConfigError(
            f"--cpu-bind {text}: {error}; write auto, none, or CPUs for each rank, such as 0-3,8|4-7,9."
        ) from None
    if len(sets) != num_ranks:
        raise ConfigError(
            f"--cpu-bind {text} has {len(sets)} set{'s' * (len(sets) != 1)} of CPUs, but there are {num_ranks} "
            f"rank{'s' * (num_ranks != 1)}; write one set for each rank, separated by |."
        )
    named = {cpu for cpus in sets for cpu in cpus}
    if unknown := named - set(machine.online_cpus):
        raise ConfigError(
            f"--cpu-bind {text}: there is no CPU {show_cpus(unknown)}; this machine has "
            f"{show_cpus(machine.online_cpus)}."
        )
    allowed = {cpu for node in machine.numa_nodes for core in node.cores for cpu in core}
    if refused := named - allowed:
        raise ConfigError(
            f"--cpu-bind {text}: this process may not use CPU {show_cpus(refused)}; taskset or the container's cpuset "
            f"allow it {show_cpus(allowed)}."
        )
    return sets
