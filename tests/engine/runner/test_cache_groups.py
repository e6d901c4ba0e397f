"""A model whose layers with a window are a cache group of their own: its tokens are those of transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import vocabulary

from pagewire import LLM, SamplingParams

MAX_TOKENS = 24
PROMPTS = [np.random.default_rng(n).integers(3, checkpoints.VOCAB_SIZE, n).tolist() for n in (1, 15, 16, 40, 70, 129)]
Load = Callable[..., LLM]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Flags → an engine, whose model has one layer of full attention and two with a window of 24."""
    checkpoints.make_checkpoint(tmp_path, "qwen2-sliding")
    vocabulary.add_tokenizer(tmp_path)
    opened: list[LLM] = []

    def start(**flags: object) -> LLM:
        opened.append(LLM(str(tmp_path), **{"dtype": "float32", "max_model_len": 192, "threads": 1, **flags}))
        return opened[-1]

    yield start
    for llm in opened:
        llm.close()


def _tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_tokens_are_those_of_transformers(load: Load, tmp_path: Path, kernels: str) -> None:
    expected = checkpoints.reference_greedy(tmp_path, PROMPTS, MAX_TOKENS)
    llm = load(cpu_kernels=kernels, max_num_batched_tokens=32, pipeline_depth=2)
    scheduler = llm._engine.scheduler
    assert _tokens(llm, PROMPTS) == expected
    before = scheduler.counters.num_cached_tokens
    assert _tokens(llm, PROMPTS) == expected, "with prefix hits"
    assert scheduler.counters.num_cached_tokens > before
    assert scheduler.pool.num_held == 0


@pytest.mark.slow
def test_tokens_are_the_same_with_so_little_memory_that_requests_are_preempted(load: Load, tmp_path: Path) -> None:
    prompts = [prompt[:length] for prompt in PROMPTS[3:] for length in (14, 15, 31, 30, 16)]
    expected = checkpoints.reference_greedy(tmp_path, prompts, MAX_TOKENS)
    page_bytes = load()._engine._worker._runner.block_bytes
    llm = load(kv_cache_memory=40 * page_bytes, pipeline_depth=2, enable_prefix_caching=False)
    assert _tokens(llm, prompts) == expected
    scheduler = llm._engine.scheduler
    assert scheduler.counters.num_preemptions > 0 and scheduler.pool.num_held == 0
