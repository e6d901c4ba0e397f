"""A sum over the ranks of one machine, and an all-to-all: through shared memory, and through gloo, which ranks of
several machines use.

`python -m pagewire.bench.engine.sums` starts two ranks, first bound to their shares of the CPUs as `--cpu-bind auto`
does, then not bound. They sum float32 tensors of several sizes in both ways in turn, and give each other an equal part
of the tensor's rows. On a machine with one socket this shows the cost of the exchange itself, not that of memory on
another node.
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from ...config.cpu_bind import CpuSets, bind_ranks
from ...config.machine import machine_facts
from ...engine.parallel.collectives import GlooGroup, Group, SharedMemoryGroup, join
from ...engine.parallel.rank import RankInfo
from ...engine.parallel.shared_memory import make_memory
from ...procs import interpreter
from ..report import Row, machine, print_table, write_json

_KB = (4, 64, 1024)


def measure(exchange: Callable[[], object], num: int) -> float:
    """Microseconds of an exchange, the mean of `num`."""
    exchange()  # the ranks begin together
    started = time.perf_counter()
    for _ in range(num):
        exchange()
    return (time.perf_counter() - started) / num * 1e6


def exchanges(group: Group, name: str, kb: int) -> dict[str, Callable[[], object]]:
    """By column: a sum and an all-to-all of a tensor."""
    x = torch.zeros((kb, 256))
    counts = [(rank + 1) * kb // group.size - rank * kb // group.size for rank in range(group.size)]
    return {
        f"{name}_us": lambda: group.all_reduce(x),
        f"{name}_all_to_all_us": lambda: group.all_to_all(x, counts, group.size * kb),
    }


def be_rank(rank_info: RankInfo, size: int, repeat: int) -> list[Row]:
    """Runs all measurements together with the other ranks."""
    shared = join(rank_info, size, torch.device("cpu"))
    if not isinstance(shared, SharedMemoryGroup):
        raise SystemExit("The C kernels cannot be loaded, so there is only gloo; `pagewire doctor` says why.")
    gloo = GlooGroup(rank_info, size)
    rows = []
    for kb in _KB:
        row = Row(f"{kb} kB")
        num = max(20, 2000 // kb)
        both = exchanges(shared, "shared", kb) | exchanges(gloo, "gloo", kb)
        for _ in range(repeat):
            row.add(**{column: measure(exchange, num) for column, exchange in both.items()})
        rows.append(row)
    torch.distributed.destroy_process_group()  # gloo's
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes that sum")
    parser.add_argument("--repeat", type=int, default=15, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/sums.json"), help="where to write")
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "FD", "FOLDER"), help="be one of the ranks (internal)")
    arguments = parser.parse_args(argv)
    size = arguments.ranks
    if arguments.rank is not None:
        rank, fd, folder = int(arguments.rank[0]), int(arguments.rank[1]), Path(arguments.rank[2])
        info = RankInfo(rank, tuple(range(size)), f"file://{folder}/ranks", fd)
        (folder / f"rows-{rank}.json").write_bytes(msgspec.json.encode(be_rank(info, size, arguments.repeat)))
        return
    facts = machine()
    bound = bind_ranks("auto", size, machine_facts())
    rows = []
    for cpu_sets, name in ((bound, "bound"), ((), "not bound")):
        rows += [Row(f"{row.name}, {name}", row.figures) for row in run_ranks(size, arguments.repeat, cpu_sets)]
    print_table(rows)
    settings = {"ranks": size, "repeat": arguments.repeat, "bound": bound}
    write_json(arguments.json, "A sum between ranks on CPUs", rows, facts, settings)


def run_ranks(size: int, repeat: int, cpu_sets: CpuSets) -> list[Row]:
    """What the first of these ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        fd = make_memory()
        command = [*interpreter.COMMAND, "pagewire.bench.engine.sums", "--ranks", str(size), "--repeat", str(repeat)]
        environment = interpreter.environment() | {"GLOO_SOCKET_IFNAME": "lo"}
        processes = []
        for rank in range(size):
            own = [*command, "--rank", str(rank), str(fd), folder]
            processes.append(subprocess.Popen(own, pass_fds=[fd], env=environment))
            if cpu_sets:
                os.sched_setaffinity(processes[-1].pid, cpu_sets[rank])  # before it has threads
        os.close(fd)
        if any([process.wait() for process in processes]):
            raise SystemExit("A rank has failed.")
        return msgspec.json.decode((Path(folder) / "rows-0.json").read_bytes(), type=list[Row])


if __name__ == "__main__":
    main()
