"""Runs a program once for each rank of a group that shares memory."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pagewire.engine.parallel.rank import RankInfo
from pagewire.engine.parallel.shared_memory import make_memory


@dataclass(frozen=True)
class Part:
    """What a rank's program is told."""

    info: RankInfo
    size: int
    folder: Path  # of all ranks


def run_ranks(program: str, size: int, folder: Path, *, timeout_s: float = 300.0) -> None:
    """Waits until the processes of all ranks have ended well. program: a file that calls `this_part`. folder: not used
    by other groups before."""
    fd = make_memory()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    commands = [[sys.executable, program, str(rank), str(size), str(fd), str(folder)] for rank in range(size)]
    ranks = [subprocess.Popen(command, pass_fds=[fd], env=environment) for command in commands]
    os.close(fd)
    try:
        assert [rank.wait(timeout_s) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def this_part() -> Part:
    """Of the process that calls it."""
    rank, size, fd = map(int, sys.argv[1:4])
    folder = Path(sys.argv[4])
    return Part(RankInfo(rank, tuple(range(size)), f"file://{folder}/ranks", fd), size, folder)
