"""Stages that are real processes and exchange tensors with gloo."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from pagewire.engine.parallel.rank import RankInfo
from pagewire.engine.parallel.ring import join_stages

NUM = 3  # tensors on their way at once


def take_part(stage: int, num_stages: int, folder: Path) -> None:
    """A stage's process: tells the next one and hears from the one before, each tensor of another size."""
    info = RankInfo(stage, tuple(range(num_stages)), f"file://{folder}/ranks", stage=stage, first=stage)
    group, ring = join_stages(info, 1, num_stages, torch.device("cpu"))
    assert (group.rank, group.size) == (0, 1)
    sent = [torch.full((1 + number, 5), 10.0 * stage + number, dtype=torch.bfloat16) for number in range(NUM)]
    heard = [torch.zeros_like(x) for x in sent]
    transfers = [ring.send(x) for x in sent] + [ring.receive(x) for x in heard]
    for transfer in transfers[::-1]:
        transfer.wait()
    before = (stage - 1) % num_stages
    assert [x.unique().tolist() for x in heard] == [[10.0 * before + number] for number in range(NUM)]


def test_each_stage_hears_the_one_before_it(tmp_path: Path) -> None:
    """Two stages, which send each other tensors at the same time."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, __file__, str(stage), "2", str(tmp_path)] for stage in range(2)]
    stages = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        assert [stage.wait(300) for stage in stages] == [0, 0]
    finally:
        for process in stages:
            process.kill()
            process.wait()


if __name__ == "__main__":
    take_part(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
