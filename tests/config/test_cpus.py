"""CPUs, cores, NUMA nodes and quotas, read from the trees of /sys of several machines and containers."""

from pathlib import Path

import pytest

from pagewire.config.config import NumaNode
from pagewire.config.cpus import cpu_quota, num_sockets, numa_nodes, online_cpus, parse_cpus, show_cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def machine(root: Path, nodes: dict[int, str], *, threads_apart: int | None = None, packages: int = 1) -> Path:
    """A fake /sys/devices/system. nodes: node → its CPUs. CPU i and i + threads_apart are threads of one core."""
    cpus = sorted(cpu for text in nodes.values() if text for cpu in parse_cpus(text))
    files = {f"node/node{number}/cpulist": text for number, text in nodes.items()}
    files["cpu/online"] = show_cpus(cpus)
    files["node/online"] = show_cpus(nodes)
    for cpu in cpus:
        of_core = [cpu] if threads_apart is None else [cpu % threads_apart, cpu % threads_apart + threads_apart]
        files[f"cpu/cpu{cpu}/topology/thread_siblings_list"] = ",".join(map(str, of_core))
        files[f"cpu/cpu{cpu}/topology/physical_package_id"] = str(of_core[0] * packages // (threads_apart or len(cpus)))
    return write(root, files)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("3,1-2,2", (1, 2, 3)), ("5-5\n", (5,)), ("0 - 1", (0, 1))],
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus
    assert parse_cpus(show_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "1,,2", "0-99999999999", "1.5", "0x3", "²"])
def test_what_is_no_list_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match="CPU"):
        parse_cpus(text)


def test_lists_are_shown_as_ranges() -> None:
    assert show_cpus([8, 3, 2, 1, 0]) == "0-3,8" and show_cpus(range(4, 6)) == "4-5" and show_cpus(()) == ""


def test_two_sockets_with_two_threads_a_core(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, threads_apart=8, packages=2)
    everything = range(16)
    assert online_cpus(everything, system) == tuple(everything)
    assert num_sockets(everything, system) == 2
    assert numa_nodes(everything, system) == (
        NumaNode(0, ((0, 8), (1, 9), (2, 10), (3, 11))),
        NumaNode(1, ((4, 12), (5, 13), (6, 14), (7, 15))),
    )


def test_only_allowed_cpus_count(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, threads_apart=8, packages=2)
    allowed = (0, 8, 1)
    assert online_cpus(allowed, system) == tuple(range(16))
    assert num_sockets(allowed, system) == 1
    assert numa_nodes(allowed, system) == (NumaNode(0, ((0, 8), (1,))),)


def test_nodes_without_cpus_are_left_out(tmp_path: Path) -> None:
    """Such as memory on a device of its own."""
    system = machine(tmp_path, {0: "0-1", 1: "", 10: "2-3"})
    assert [node.number for node in numa_nodes(range(4), system)] == [0, 10]


def test_a_system_without_numa_has_one_node(tmp_path: Path) -> None:
    assert numa_nodes((0, 1, 5), tmp_path) == (NumaNode(0, ((0,), (1,), (5,))),)
    assert online_cpus((5, 0), tmp_path) == (0, 5) and num_sockets((0, 5), tmp_path) == 1


V1 = "5:cpu,cpuacct:{path}\n4:memory:/elsewhere\n1:name=systemd:/elsewhere\n0::/"


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/", {}, None),
        ("", {"cpu.max": "200000 100000"}, 2),  # no /proc
        # cgroup v2: `docker run --cpus 2.5`, whose container sees its own group as the root
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "nonsense"}, None),
        ("0::/", {"cpu.max": "100000 0"}, None),
        # cgroup v2: a service of systemd, and a limit of a group above it
        ("0::/system.slice/a.service", {"system.slice/a.service/cpu.max": "300000 100000"}, 3),
        (
            "0::/a/b",
            {"a/b/cpu.max": "900000 100000", "a/cpu.max": "400000 100000", "c/cpu.max": "100000 100000"},
            4,
        ),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4),
        # A group outside of what the container sees
        ("0::/../../a", {"cpu.max": "400000 100000", "a/cpu.max": "100000 100000"}, 4),
        # cgroup v1: a container without a namespace of its own has the host's path
        (
            V1.format(path="/docker/abc"),
            {"cpu,cpuacct/cpu.cfs_quota_us": "350000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3,
        ),
        (
            V1.format(path="/a"),
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/cpu.cfs_period_us": "50000"},
            4,
        ),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "200000"}, None),
        ("3:cpuset:/a", {"cpuset/a/cpu.cfs_quota_us": "200000", "cpuset/a/cpu.cfs_period_us": "100000"}, None),
        # Both: the CPU controller is in v1, and v2 is mounted beside it
        (
            "3:cpu:/a\n0::/b",
            {
                "cpu/a/cpu.cfs_quota_us": "500000",
                "cpu/a/cpu.cfs_period_us": "100000",
                "unified/b/cpu.max": "max 100000",
            },
            5,
        ),
    ],
)
def test_the_quota_of_control_groups(membership: str, files: dict[str, str], quota: int | None, tmp_path: Path) -> None:
    assert cpu_quota(membership, write(tmp_path, files)) == quota
