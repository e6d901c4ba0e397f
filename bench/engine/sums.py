"""A sum over the ranks of one machine: through shared memory, and through gloo, which ranks of several machines use.

`python -m pagewire.bench.engine.sums` starts two ranks, first bound to their shares of the CPUs as `--cpu-bind auto`
does, then not bound. They sum float32 tensors of several sizes in both ways in turn. On a machine with one socket this
shows the cost of the exchange itself, not that of memory on another node.
"""

import argparse
import os
import subprocess
import tempfile
import time
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


def measure(group: Group, x: torch.Tensor, num: int) -> float:
    """Microseconds of a sum, the mean of `num`."""
    group.all_reduce(x)  # the ranks begin together
    started = time.perf_counter()
    for _ in range(num):
        group.all_reduce(x)
    return (time.perf_counter() - started) / num * 1e6


def be_rank(rank_info: RankInfo, size: int, repeat: int) -> list[Row]:
    """Runs all measurements together with the other ranks."""
    shared = join(rank_info, size, torch.device("cpu"))
    if not isinstance(shared, SharedMemoryGroup):
        raise SystemExit("The C kernels cannot be loaded, so there is only gloo; `pagewire doctor` says why.")
    gloo = GlooGroup(rank_info, size)
    rows = []
    for kb in _KB:
        x = torch.zeros(kb * 256)
        row = Row(f"{kb} kB")
        num = max(20, 2000 // kb)
        for _ in range(repeat):
            row.add(shared_us=measure(shared, x, num), gloo_us=measure(gloo, x, num))
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
