"""Vectors of prompts, whose states reach the host after later steps were launched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from runner_driver import GREEDY, Driver, engine_config

from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Pooling, RowOpen, StepPlan, StepResult, ids_to_bytes

POOLINGS = [Pooling("mean"), Pooling("last", is_normalized=True), Pooling("all"), Pooling("cls", dimensions=8)]
SMALL: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "dtype": "float32"}


def _plan(step: int, counts: list[int], opens: tuple[RowOpen, ...] = ()) -> StepPlan:
    rows = list(range(len(counts)))
    return StepPlan(step, opens, b"", b"", ids_to_bytes(rows), ids_to_bytes(counts), bytes(len(counts)))


def _open(row: int, prompt: list[int]) -> RowOpen:
    blocks = ids_to_bytes([2 * row, 2 * row + 1])
    return RowOpen(row, ids_to_bytes(prompt), len(prompt), 0, blocks, GREEDY, pooling=POOLINGS[row])


def _vectors(runner: Runner) -> dict[int, bytes]:
    """Of four prompts in two chunks, after their rows have begun with others that were aborted."""
    first = tuple(_open(row, list(range(30, 50))) for row in range(4))
    opens = tuple(_open(row, list(range(3 + row, 23 + row))) for row in range(4))
    plans = [_plan(0, [9] * 4, first), _plan(1, [12, 7, 10, 5], opens), _plan(2, [8, 13, 10, 15])]
    results: list[StepResult] = []
    for plan in plans:
        runner.launch(plan)
        if runner.num_pending == 2:
            results.append(runner.collect())
    while runner.num_pending:
        results.append(runner.collect())
    assert [len(result.vectors) for result in results] == [0, 0, 4]
    return results[-1].vectors


def test_vectors_are_those_of_the_cpu_runner(checkpoint: Callable[..., Path], driver: Callable[..., Driver]) -> None:
    folder = checkpoint("llama", num_hidden_layers=1)
    theirs = Runner.load(engine_config(folder, device="cpu", **SMALL))
    theirs.open_cache(16)
    ours, expected = _vectors(driver(folder, **SMALL).runner), _vectors(theirs)
    for row in range(4):
        mine, other = (np.frombuffer(vectors[row], "<f4") for vectors in (ours, expected))
        assert len(mine) == len(other) > 1
        np.testing.assert_allclose(mine, other, atol=1e-4)
