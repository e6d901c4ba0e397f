"""Compares two stages of a pipeline, each a process with a device of its own, with one rank on the same plans: the same
greedy tokens in float32. NCCL has no two ranks on one device, so it needs two GPUs; a smoke run takes gloo."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import structs

from ...config.config import EngineConfig
from ...engine.parallel.rank import RankInfo
from ...engine.runner.runner import Runner
from ...ipc.messages import RowOpen, Sampling, StepPlan, ids_to_bytes
from .figures import Figure, SkippedError
from .ranks import DEPTH, from_tests, interpret_kernels, run_ranks, serve
from .setting import Setting

_STAGES = 2


def measure(setting: Setting) -> Iterator[Figure]:
    if not setting.smoke and (num := torch.cuda.device_count()) < _STAGES:
        raise SkippedError(f"two stages need two GPUs, because NCCL has no two ranks on one, and torch sees {num}")
    tests = from_tests("checkpoints")
    folder = tests.make_checkpoint(setting.scratch / "stages", "qwen3", num_hidden_layers=setting.choose(4, 2))
    plans = _plans(_config(setting, folder), tests.VOCAB_SIZE, num_new=setting.choose(32, 3))
    expected = serve(_load(setting, folder, None), plans)
    (setting.scratch / "plans").write_bytes(msgspec.msgpack.encode(plans))
    run_ranks(__name__, folder, setting, num=_STAGES)
    found = msgspec.msgpack.decode(_found(setting.scratch).read_bytes(), type=list[bytes])
    wrong = sum(ids != alone for ids, alone in zip(found, expected, strict=True))
    name = f"two stages, float32: steps of {len(expected)} with other tokens than one rank"
    yield Figure(name=name, value=wrong, unit="", most=0, is_proof=True)


def _config(setting: Setting, folder: Path) -> EngineConfig:
    driving = from_tests("runner_driver")
    config: EngineConfig = driving.engine_config(
        folder, max_num_batched_tokens=setting.choose(128, 32), max_num_seqs=4, pipeline_depth=DEPTH + 1,
        dtype="float32", device="cpu" if setting.smoke else "auto",
    )  # fmt: skip
    return config


def _load(setting: Setting, folder: Path, stage: int | None) -> Runner:
    """stage: None stands for all layers."""
    config, info = _config(setting, folder), RankInfo()
    if stage is not None:
        config = structs.replace(config, pipeline_parallel_size=_STAGES, pipeline_depth=DEPTH, kernels=None)
        here = tuple(range(_STAGES))
        info = RankInfo(stage, here, f"file://{setting.scratch}/ranks", stage=stage, first=stage)
    queue = setting.open_queue() if setting.smoke else None
    return Runner.load(config, rank_info=info, queue=queue, is_checked=False)


def _plans(config: EngineConfig, vocab_size: int, *, num_new: int) -> list[StepPlan]:
    """Two lanes of two rows: their prompts in chunks, then their tokens, a lane after the other."""
    rng, chunk, size = np.random.default_rng(0), config.max_num_batched_tokens // 2, config.block_size
    lanes = ((0, 1), (2, 3))
    prompts = [rng.integers(3, vocab_size, length).tolist() for length in (5, chunk, chunk + 9, 2 * chunk)]
    num_pages = -(-(2 * chunk + num_new) // size)
    plans: list[StepPlan] = []

    def add(rows: tuple[int, ...], counts: list[int], ends: list[int], opened: tuple[RowOpen, ...] = ()) -> None:
        plans.append(
            StepPlan(
                step=len(plans), open=opened, grow_rows=b"", grow_blocks=b"", rows=ids_to_bytes(list(rows)),
                counts=ids_to_bytes(counts), sample=bytes(ends),
            )
        )  # fmt: skip

    for rows in lanes:
        opened = [
            RowOpen(
                row, ids_to_bytes(prompts[row]), len(prompts[row]), 0,
                ids_to_bytes(list(range(num_pages * row, num_pages * (row + 1)))), Sampling(temperature=0),
            )
            for row in rows
        ]  # fmt: skip
        left = {row: len(prompts[row]) for row in rows}
        while left:
            counts = [min(chunk, num) for num in left.values()]
            add(tuple(left), counts, [int(num <= chunk) for num in left.values()], tuple(opened))
            left, opened = {row: num - chunk for row, num in left.items() if num > chunk}, []
    for _ in range(num_new):
        for rows in lanes:
            add(rows, [1, 1], [1, 1])
    return plans


def _found(scratch: Path) -> Path:
    return scratch / "found"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("scratch", type=Path)
    flags.add_argument("--rank", type=int, required=True)
    flags.add_argument("--smoke", action="store_true")
    given = flags.parse_args()
    if given.smoke:
        interpret_kernels()
    plans = msgspec.msgpack.decode((given.scratch / "plans").read_bytes(), type=list[StepPlan])
    ids = serve(_load(Setting(smoke=given.smoke, scratch=given.scratch), given.folder, given.rank), plans)
    if given.rank == _STAGES - 1:
        _found(given.scratch).write_bytes(msgspec.msgpack.encode(ids))


if __name__ == "__main__":
    main()
