"""Which CPUs a rank is bound to, and how many threads it has there."""

import pytest

from pagewire.config.config import MachineFacts, NumaNode
from pagewire.config.cpu_bind import bind_ranks, num_threads
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.errors import ConfigError

from .test_config import MODEL


def machine(*nodes: list[tuple[int, ...]], quota: int | None = None, num_online: int = 64) -> MachineFacts:
    num_cores = sum(map(len, nodes))
    return MachineFacts(
        num_cores=num_cores if quota is None else min(num_cores, quota),
        online_cpus=tuple(range(num_online)),
        numa_nodes=tuple(NumaNode(i, tuple(cores)) for i, cores in enumerate(nodes)),
        cpu_quota=quota,
    )


def cores(*cpus: int) -> list[tuple[int, ...]]:
    return [(cpu,) for cpu in cpus]


TWO_NODES = machine(cores(0, 2, 4, 6), cores(1, 3, 5, 7))
TWO_THREADS = machine([(0, 4), (1, 5)], [(2, 6), (3, 7)])
FOUR_NODES = machine(cores(0), cores(1), cores(2), cores(3))


@pytest.mark.parametrize(
    ("facts", "num_ranks", "sets", "threads"),
    [
        (TWO_NODES, 1, (), 8),
        (TWO_NODES, 2, ((0, 2, 4, 6), (1, 3, 5, 7)), 4),
        (TWO_NODES, 4, ((0, 2), (4, 6), (1, 3), (5, 7)), 2),
        (TWO_NODES, 3, ((0, 2), (1, 4, 6), (3, 5, 7)), 2),
        (TWO_NODES, 9, (), 1),  # more ranks than cores
        (TWO_THREADS, 2, ((0, 1, 4, 5), (2, 3, 6, 7)), 2),  # a thread for each core, wherever Linux runs it
        (TWO_THREADS, 4, ((0, 4), (1, 5), (2, 6), (3, 7)), 1),
        (FOUR_NODES, 2, ((0, 1), (2, 3)), 2),
        (FOUR_NODES, 3, ((0,), (1,), (2, 3)), 1),
        (machine(cores(0, 1, 2, 3)), 2, ((0, 1), (2, 3)), 2),
        (machine(cores(0, 1, 2, 3), cores(4)), 2, ((0, 1, 2, 3), (4,)), 1),  # a cpuset that cuts through a node
        (machine(cores(*range(8)), cores(*range(8, 16)), quota=4), 2, (tuple(range(8)), tuple(range(8, 16))), 2),
        (machine(cores(0, 1), cores(2, 3), quota=1), 2, ((0, 1), (2, 3)), 1),
        (MachineFacts(num_cores=4), 2, (), 2),  # a system that shows no nodes
    ],
)
def test_auto(facts: MachineFacts, num_ranks: int, sets: tuple[tuple[int, ...], ...], threads: int) -> None:
    assert bind_ranks("auto", num_ranks, facts) == sets
    assert num_threads(sets, num_ranks, facts) == threads
    assert bind_ranks("none", num_ranks, facts) == ()


@pytest.mark.parametrize(
    ("text", "num_ranks", "sets", "threads"),
    [
        ("0-3", 1, ((0, 1, 2, 3),), 4),
        ("0-3|4-7", 2, ((0, 1, 2, 3), (4, 5, 6, 7)), 4),
        (" 0, 2 | 1,3 ", 2, ((0, 2), (1, 3)), 2),
        ("0-5|6", 2, (tuple(range(6)), (6,)), 1),  # the ranks wait for each other
        ("0-7|0-7", 2, (tuple(range(8)), tuple(range(8))), 4),  # no more threads than cores
    ],
)
def test_lists(text: str, num_ranks: int, sets: tuple[tuple[int, ...], ...], threads: int) -> None:
    assert bind_ranks(text, num_ranks, TWO_NODES) == sets
    assert num_threads(sets, num_ranks, TWO_NODES) == threads


@pytest.mark.parametrize(
    ("text", "num_ranks", "sentence"),
    [
        ("0-3", 2, "--cpu-bind 0-3 has 1 set of CPUs, but there are 2 ranks; write one set for each rank, sep"),
        ("0|1|2", 2, "--cpu-bind 0|1|2 has 3 sets of CPUs, but there are 2 ranks"),
        ("0|1", 1, "--cpu-bind 0|1 has 2 sets of CPUs, but there are 1 rank"),
        ("0-3|4-99", 2, "--cpu-bind 0-3|4-99: there is no CPU 64-99; this machine has 0-63."),
        ("0,40|1,50", 2, "this process may not use CPU 40,50; taskset or the container's cpuset allow it 0-7."),
        ("0-3|", 2, "'' is no CPU or range of CPUs; write auto, none, or CPUs for each rank, such as 0-3,8|4-7,9."),
        ("3-0", 1, "'3-0' is no range of CPUs"),
        ("automatic", 1, "'automatic' is no CPU or range of CPUs"),
        ("", 1, "'' is no CPU or range of CPUs"),
    ],
)  # fmt: skip
def test_wrong_lists_give_one_sentence(text: str, num_ranks: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        bind_ranks(text, num_ranks, TWO_NODES)
    assert sentence in str(error.value)


def test_every_rank_of_every_engine_has_its_set() -> None:
    config = make_config(device="cpu", tensor_parallel_size=2, data_parallel_size=2)
    engine = resolve(config, MODEL, TWO_NODES)
    assert engine.cpu_sets == ((0, 2), (4, 6), (1, 3), (5, 7)) and engine.num_threads == 2
    engine = resolve(make_config(device="cpu", cpu_bind="1-2", threads=7), MODEL, TWO_NODES)
    assert engine.cpu_sets == ((1, 2),) and engine.num_threads == 7


def test_a_gpu_has_no_use_for_a_list() -> None:
    assert resolve(make_config(device="cuda", tensor_parallel_size=2), MODEL, TWO_NODES).cpu_sets == ()
    with pytest.raises(ConfigError, match="--cpu-bind is for --device cpu"):
        resolve(make_config(device="cuda", cpu_bind="0-3"), MODEL, TWO_NODES)
