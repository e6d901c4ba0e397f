"""Families with recurrent layers against transformers' own classes: tiny random models, chunked and batched."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from family_models import check_log_probabilities, make_model
from hybrid_kinds import FAMILIES
from runner_driver import Driver, Request, arrays, engine_config

from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Sampling

_EVERY_TIME = ("FalconH1Config", "JambaConfig", "Lfm2Config", "Mamba2Config", "Qwen3_5TextConfig")


def variants(kernels: tuple[str, ...]) -> list[Any]:
    """The first variant of some families with C kernels in each run, and the others in long runs."""
    found, seen = [], set()
    for number, (name, changes) in enumerate(FAMILIES):
        for kind in kernels:
            is_quick = kind == "auto" and name in _EVERY_TIME and name not in seen
            marks = () if is_quick else pytest.mark.long
            found.append(
                pytest.param(name, changes, kind, id=f"{name.removesuffix('Config')}-{number}-{kind}", marks=marks)
            )
        seen.add(name)
    return found


@pytest.mark.parametrize(("config_class", "changes", "kernels"), variants(("auto", "torch")))
def test_log_probabilities_equal_those_of_transformers(
    config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    check_log_probabilities(config_class, changes, kernels, tmp_path)


@pytest.mark.parametrize(("config_class", "changes", "kernels"), variants(("auto",)))
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    config_class: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    if config_class == "KimiLinearConfig":
        pytest.skip("torch computes its latent attention, whose sums depend on the number of queries")
    make_model(tmp_path, config_class, changes)
    rng = random.Random(config_class)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num)] for num in (61, 30)]
    runner = Runner.load(engine_config(tmp_path, cpu_kernels=kernels))
    runner.open_cache(64)
    found = []
    for chunk, budget in ((100, 200), (1, 1), (7, 11), (64, 40)):
        scoring = Sampling(temperature=0, prompt_logprobs=0)
        requests = [Request(prompt, sampling=scoring, max_new=3) for prompt in prompts]
        Driver(runner, 64).run(requests, chunk=chunk, budget=budget, rows=3, seed=chunk)
        found.append([(request.output, arrays(request.prompt_logprobs)[1]) for request in requests])
    for other in found[1:]:
        for (tokens, values), (expected_tokens, expected) in zip(other, found[0], strict=True):
            assert tokens == expected_tokens and np.array_equal(values, expected)
