"""`--deterministic`: a request's result does not depend on other requests, bit by bit."""

import random

import checkpoints
import pytest
from family_kinds import KINDS, make_kind
from runner_driver import Request, arrays

from pagewire.errors import ConfigError
from pagewire.ipc.messages import RowOpen, Sampling, StepPlan, ids_to_bytes

SCORING = Sampling(temperature=0, logprobs=5, prompt_logprobs=3)
FLAGS = {"max_num_batched_tokens": 128, "max_num_seqs": 64, "deterministic": True}


def _prompt(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)]


def _logprob_bytes(request):
    return [values.tobytes() for part in (request.logprobs, request.prompt_logprobs) for values in arrays(part)]


def test_a_request_gets_the_same_bits_in_any_batch(checkpoint, driver):
    folder = checkpoint("qwen3", num_hidden_layers=1)
    served = driver(folder, dtype="float32", **FLAGS)

    def results(lengths, chunk, seed, max_new=3):
        probe = Request(_prompt(0, 21), sampling=SCORING, max_new=2)
        sampled = Sampling(temperature=1)
        others = [
            Request(_prompt(1 + i, length), sampling=sampled, max_new=max_new) for i, length in enumerate(lengths)
        ]
        requests = [*others, probe]
        random.Random(seed).shuffle(requests)
        served.run(requests, chunk=chunk, budget=128, rows=64, seed=seed)
        return probe.output, _logprob_bytes(probe)

    alone = results([], 64, 0)
    assert results([], 16, 1) == alone, "in chunks"
    assert results([3, 5, 7, 9, 11, 13], 20, 2) == alone, "with six others, in chunks"
    assert results([1] * 63, 64, 3, max_new=1) == alone, "with 63 others"


def test_a_cached_prefix_changes_no_bit(checkpoint, driver):
    folder = checkpoint("qwen3", num_hidden_layers=1)
    served = driver(folder, dtype="bfloat16", **FLAGS)
    prompt, blocks = _prompt(0, 37), ids_to_bytes([4, 2, 9])
    scoring = Sampling(temperature=0, logprobs=5)

    def step(number, row, num_computed):
        opened = RowOpen(
            row=row,
            ids=ids_to_bytes(prompt),
            num_prompt=len(prompt),
            num_computed=num_computed,
            block_ids=blocks,
            sampling=scoring,
        )
        served.runner.launch(
            StepPlan(
                step=number,
                open=(opened,),
                grow_rows=b"",
                grow_blocks=b"",
                rows=ids_to_bytes([row]),
                counts=ids_to_bytes([len(prompt) - num_computed]),
                sample=b"\1",
            )
        )
        return served.runner.collect()

    whole = step(0, 0, 0)
    for number, hit in enumerate((16, 32, 36), start=1):
        again = step(number, number, hit)
        assert (again.ids, again.logprobs) == (whole.ids, whole.logprobs), f"{hit} positions from the cache"


def test_without_the_flag_chunking_may_change_bits(checkpoint, driver):
    """So that the tests above can fail: a single token and a chunk of many take different kernels."""
    folder = checkpoint("qwen3", num_hidden_layers=1)
    served = driver(folder, dtype="float32", **(FLAGS | {"deterministic": False}))

    def logprobs(chunk):
        probe = Request(_prompt(0, 12), sampling=SCORING, max_new=1)
        served.run([probe], chunk=chunk, budget=64, rows=8)
        return arrays(probe.prompt_logprobs)[1]

    assert (logprobs(64) != logprobs(1)).any()


def test_deterministic_is_refused_for_models_that_exclude_it(checkpoint, driver):
    with pytest.raises(ConfigError, match="--deterministic excludes"):
        driver(checkpoint("mixtral"), **FLAGS)


def test_deterministic_is_refused_for_latent_attention(tmp_path, driver):
    name, changes = KINDS["MiniCPM3-0"]
    folder = make_kind(tmp_path, name, {**changes, "qk_rope_head_dim": 16})
    with pytest.raises(ConfigError, match="--deterministic excludes latent attention on a GPU"):
        driver(folder, **FLAGS)
