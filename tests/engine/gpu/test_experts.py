"""Ranks with whole experts on the Triton kernels give the tokens of one rank. The ranks are threads."""

from functools import partial
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from expert_moves import move_experts
from runner_driver import GREEDY, Request
from thread_ranks import tokens_of

from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Sampling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted")


def requests(max_new: int = 3) -> list[Request]:
    prompts = ([7, 40, 201, 13, 9], [5], [90, 17, 33, 210, 44, 45, 46, 47])
    return [
        Request(prompt, sampling, max_new=max_new)
        for prompt, sampling in zip(prompts, (GREEDY, SEEDED, GREEDY), strict=True)
    ]


SEEDED = Sampling(temperature=1.0, seed=5)


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",  # the kernel chooses
        pytest.param("longcat_flash", marks=pytest.mark.long),  # torch does, and some experts return their input
    ],
)
def test_two_ranks_of_a_family(family: str, tmp_path: Path) -> None:
    folder = families.make_family(tmp_path, family)
    flags: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 256}
    expected = tokens_of(folder, requests, in_triton=True, **flags)
    assert tokens_of(folder, requests, size=2, in_triton=True, enable_expert_parallel=True, **flags) == expected


# Of two steps of a run of two ranks with four experts: what they have from then on.
MOVES = {2: ((0, 1, 3), (2, 3, 0)), 3: ((0, 1, 2), (2, 3, 1))}


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("longcat_flash", marks=pytest.mark.long)])
def test_replicas_that_move_under_running_requests_change_no_token(family: str, tmp_path: Path) -> None:
    """Biases of experts move with them. A slot gets another expert."""
    folder = families.make_family(tmp_path, family)
    flags: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 256}
    longer = partial(requests, 8)
    expected = tokens_of(folder, longer, in_triton=True, **flags)
    counts: list[int] = []

    def move(runner: Runner, step: int) -> None:
        if step in MOVES:
            for layer in runner.take_expert_load():
                assert move_experts(runner, layer, MOVES[step])

    def count(runner: Runner) -> None:
        loads = [np.frombuffer(load, np.int64)[1] for load in runner.take_expert_load().values()]
        counts.append(sum(loads))

    found = tokens_of(
        folder, longer, size=2, in_triton=True, between=move, at_end=count, enable_expert_parallel=True,
        expert_replicas=1, **flags,
    )  # fmt: skip
    assert found == expected
    assert all(counts), "both ranks have computed expert 1 since the last move"
