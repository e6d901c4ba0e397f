"""Ranks with whole experts on the Triton kernels give the tokens of one rank."""

from pathlib import Path
from typing import Any

import families
import pytest
from runner_driver import GREEDY, Request
from thread_ranks import tokens_of

from pagewire.ipc.messages import Sampling


def requests() -> list[Request]:
    prompts = ([7, 40, 201, 13, 9], [5], [90, 17, 33, 210, 44, 45, 46, 47])
    return [
        Request(prompt, sampling, max_new=3) for prompt, sampling in zip(prompts, (GREEDY, SEEDED, GREEDY), strict=True)
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
