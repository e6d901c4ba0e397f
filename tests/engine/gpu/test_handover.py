"""Stages of a pipeline on the GPU's steps: they sample the tokens of one rank. The kernels run in Triton's interpreter;
the ranks are threads, or processes with gloo."""

import random
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from engine_loop import Loop
from fakes import enqueue
from family_kinds import FEW_EXPERTS, LATENT_ON_GPU, make_kind
from msgspec import structs
from runner_driver import engine_config
from thread_ranks import of_stages

from pagewire.config.config import EngineConfig
from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.gpu.device_steps import DeviceModel
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Enqueue, Sampling, StageSeconds, StepPlan, StepResult

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted")
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "max_model_len": 128,
}


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)] for length in lengths]


def ask(rid: int, prompt: list[int], max_tokens: int, **sampling: Any) -> Enqueue:
    message = enqueue(rid, prompt, max_tokens=max_tokens, ignore_eos=True)
    return structs.replace(message, sampling=Sampling(**{"temperature": 0, **sampling}))


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.2, "top_k": 7, "top_p": 0.8, "seed": 11},
    {"repetition_penalty": 1.8, "presence_penalty": 1.0, "logprobs": 3, "prompt_logprobs": 2},
    {},
]


def of_gpus(folder: Path, stages: int, ranks: int, **flags: Any) -> EngineConfig:
    """The configuration that an engine with GPUs would have, on a CPU."""
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    config = engine_config(folder, pipeline_depth=2, **sizes, **SMALL, **flags)
    of_gpu: EngineConfig = structs.replace(config, kernels=None)
    return of_gpu


def calls_of(loop: Loop, requests: list[Enqueue]) -> tuple[list[StepPlan | None], list[StepResult]]:
    """The calls of one rank's runner that serves them, None for `collect`, and its results."""
    calls: list[StepPlan | None] = []
    results: list[StepResult] = []
    launch, collect = loop.runner.launch, loop.runner.collect

    def launched(plan: StepPlan) -> None:
        calls.append(plan)
        launch(plan)

    def collected() -> StepResult:
        calls.append(None)
        results.append(collect())
        return results[-1]

    loop.runner.launch, loop.runner.collect = launched, collected  # of this one
    loop.serve(requests)
    return calls, results


def replay(runner: Runner, calls: list[StepPlan | None], num_pages: int) -> list[StepResult]:
    """The results of a stage's runner."""
    runner.open_cache(num_pages)
    results = []
    for plan in calls:
        if plan is None:
            results.append(runner.collect())
        else:
            runner.launch(plan)
    return results


def told(result: StepResult) -> tuple[object, ...]:
    """What does not depend on time, and of numbers what does not depend on the order of sums."""
    known = {place: row.ids for place, row in result.logprobs.items()}
    prompt = {place: row.ids for place, row in result.prompt_logprobs.items()}
    return result.step, result.ids, result.num_sampled, known, prompt, result.fault


@pytest.mark.parametrize(
    ("stages", "ranks"),
    [(2, 1), pytest.param(3, 1, marks=pytest.mark.long), pytest.param(2, 2, marks=pytest.mark.long)],
)
def test_stages_sample_the_tokens_of_one_rank(stages: int, ranks: int, checkpoint: Any) -> None:
    check_tokens(checkpoint("qwen3", num_hidden_layers=stages), stages, ranks)


@pytest.mark.long
@pytest.mark.parametrize("flags", [{}, {"enable_expert_parallel": True}])
def test_stages_with_latents_and_experts_on_several_ranks(flags: dict[str, Any], tmp_path: Path) -> None:
    changes = LATENT_ON_GPU | FEW_EXPERTS | {"num_hidden_layers": 2}
    check_tokens(make_kind(tmp_path, "DeepseekV3Config", changes), 2, 2, **flags)


def check_tokens(folder: Path, stages: int, ranks: int, **flags: Any) -> None:
    """Of a prompt in chunks beside decode rows. `test_order.py` has recorded steps."""
    num_pages = 24
    loop = Loop(folder, queue=EagerQueue(torch.device("cpu")), num_pages=num_pages, num_stages=stages, **SMALL)
    requests = [ask(rid, prompt, 3, **SAMPLINGS[rid]) for rid, prompt in enumerate(prompts_of(1, 3, 40, 9))]
    calls, expected = calls_of(loop, requests)
    config = of_gpus(folder, stages, ranks, **flags)
    seconds: dict[int, StageSeconds] = {}

    def serve(runner: Runner) -> list[StepResult]:
        results = replay(runner, calls, num_pages)
        spent = runner.take_stage_seconds()
        assert spent is not None and runner.take_stage_seconds() == StageSeconds(0.0), "it was taken"
        assert spent.busy > 0
        seconds[runner._rank] = spent
        return results

    *before, last = of_stages(config, serve)[::ranks]
    assert [told(result) for result in last] == [told(result) for result in expected]
    assert all(not result.ids for results in before for result in results)
    # The threads run in turn, so each stage waits for the one before, and the first one for ids.
    assert [(spent.input > 0, spent.ids > 0) for _, spent in sorted(seconds.items())] == [
        (rank >= ranks, rank < ranks) for rank in range(stages * ranks)
    ]


def test_a_stage_has_the_memory_of_its_layers(checkpoint: Any) -> None:
    """Only the last one has the head and what samples; each counts what it hands over."""
    folder = checkpoint("qwen3", num_hidden_layers=2, tie_word_embeddings=False)
    first, last = of_stages(of_gpus(folder, 2, 1), lambda runner: runner._model)
    assert isinstance(first, DeviceModel) and isinstance(last, DeviceModel)
    assert first.handover is not None and last.handover is not None
    tokens, samples = first.limits.tokens, first.limits.samples
    states = first.handover.nbytes - 4 * 3 * 3 * samples  # ids, rows and positions of three plans
    assert states == last.handover.nbytes - 4 * samples == 4 * tokens * 64
    assert last.state.nbytes > first.state.nbytes and last.graphs > first.graphs
