"""`--deterministic` on a CPU: a request's result does not depend on other requests, bit by bit."""

import random

import checkpoints
import pytest
from quantized_checkpoints import quantize_checkpoint
from runner_driver import Request, arrays

from pagewire.errors import ConfigError
from pagewire.ipc.messages import RowOpen, Sampling, StepPlan, ids_to_bytes
from pagewire.kernels.cpu import build

pytestmark = pytest.mark.usefixtures("c_kernels")
SCORING = Sampling(temperature=0, logprobs=5, prompt_logprobs=3)
FLAGS = {"max_num_batched_tokens": 256, "max_num_seqs": 64, "deterministic": True}


def _prompt(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("qwen3", {}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("mistral", {"quantization": "int8"}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"quantization": "int8"}),
        ("mixtral", {"quantization": "int4"}),
    ],
)
def test_a_request_gets_the_same_bits_in_any_batch(kind, flags, checkpoint, driver):
    _check_bits(driver(checkpoint(kind), num_blocks=600, **FLAGS, **flags))


@pytest.mark.parametrize(("family", "kind"), [("mixtral", "awq"), ("mixtral", "fp8-channel"), ("qwen3", "packed-8")])
def test_a_request_of_a_quantized_checkpoint_gets_the_same_bits_in_any_batch(
    family, kind, checkpoint, driver, tmp_path
):
    folder, _ = quantize_checkpoint(checkpoint(family), tmp_path, kind)
    _check_bits(driver(folder, num_blocks=600, **FLAGS))


def _check_bits(served):
    def results(lengths, chunk, seed):
        probe = Request(_prompt(0, 137), sampling=SCORING, max_new=6)
        sampled = Sampling(temperature=1)
        others = [Request(_prompt(1 + i, length), sampling=sampled, max_new=8) for i, length in enumerate(lengths)]
        requests = [*others, probe]
        random.Random(seed).shuffle(requests)
        served.run(requests, chunk=chunk, budget=256, rows=64, seed=seed)
        return probe.output, [
            values.tobytes() for part in (probe.logprobs, probe.prompt_logprobs) for values in arrays(part)
        ]

    alone = results([], 256, 0)
    assert results([], 16, 1) == alone, "in chunks"
    assert results([], 1, 1) == alone, "in chunks of one token"
    assert results([3, 5, 7, 9, 11, 13], 20, 2) == alone, "with six others, in chunks"
    assert results([1] * 63, 64, 3) == alone, "with 63 others"


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_cached_prefix_changes_no_bit(kind, checkpoint, driver):
    served = driver(checkpoint(kind), **FLAGS)
    prompt, blocks = _prompt(0, 137), ids_to_bytes(list(range(9)))
    results = []
    for row, hit in enumerate((0, 16, 96, 136)):
        opened = RowOpen(
            row=row,
            ids=ids_to_bytes(prompt),
            num_prompt=137,
            num_computed=hit,
            block_ids=blocks,
            sampling=Sampling(temperature=0, logprobs=5),
        )
        served.runner.launch(
            StepPlan(
                step=row,
                open=(opened,),
                grow_rows=b"",
                grow_blocks=b"",
                rows=ids_to_bytes([row]),
                counts=ids_to_bytes([137 - hit]),
                sample=b"\1",
            )
        )
        result = served.runner.collect()
        results.append((result.ids, result.logprobs))
    assert results[1:] == results[:1] * 3


def test_a_compiler_that_fails_is_reported_as_a_config_error(checkpoint, driver, monkeypatch):
    """`resolve` sees that a compiler exists; only the worker finds out that it fails."""

    def find(_):
        raise build.BuildError("cc failed: no such header")

    monkeypatch.setattr(build, "find", find)
    with pytest.raises(ConfigError, match="--deterministic excludes kernels of torch, because cc failed"):
        driver(checkpoint("qwen3"), **FLAGS)
