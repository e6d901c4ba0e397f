"""Which ranks share memory."""

import os
from pathlib import Path

from checkpoints import make_checkpoint
from runner_driver import engine_config

from pagewire.procs.rank_memory import RankMemory


def test_a_rank_shares_memory_with_its_stage_and_with_its_neighbours(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    config = engine_config(folder, tensor_parallel_size=2, pipeline_parallel_size=3)
    memory = RankMemory(config, are_alone=True)
    fields = [memory.fields(rank) for rank in range(6)]
    sums = [each["memory_fd"] for each in fields]
    assert (sums[0], sums[2], sums[4]) == (sums[1], sums[3], sums[5]) and len({*sums}) == 3
    for rank in range(4):
        assert fields[rank]["output_fd"] == fields[rank + 2]["input_fd"] >= 0
    assert [each["input_fd"] for each in fields[:2]] == [each["output_fd"] for each in fields[4:]] == [-1, -1]
    fds = {fd for each in fields for fd in each.values() if fd >= 0}
    assert len(fds) == 3 + 4 and all(os.fstat(fd) for fd in fds)
    memory.close()
    for apart in (RankMemory(config, are_alone=False), RankMemory(engine_config(folder), are_alone=True)):
        assert {*apart.fields(0).values()} == {-1}
        apart.close()
