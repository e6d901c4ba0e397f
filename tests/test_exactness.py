"""Greedy tokens equal transformers' `generate` with batching, chunked prefill, preemption and prefix cache hits.

The whole engine except HTTP and sockets (`LLM` runs the real actors in one process), on tiny random checkpoints in
float32: the native architectures, and two that only the transformers fallback knows.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import checkpoints
import pytest
import vocabulary

from pagewire import LLM, SamplingParams

pytestmark = pytest.mark.slow

NATIVE = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
FALLBACK = ["persimmon"]
EVERY_TIME = ["llama", "qwen3", "persimmon"]  # the others run with `make test-long`
NUM_PROMPTS = 64
MAX_TOKENS = 36
MAX_LEN = 640


@dataclass
class Case:
    """A checkpoint, its prompts, and the outputs of transformers."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def make_prompts(seed: int) -> list[list[int]]:
    """64 prompts of 1 to 600 tokens. A fourth of them share a prefix with another."""
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 600] + [rng.randint(1, 120) for _ in range(45)]
    lengths += [rng.randint(121, 600) for _ in range(NUM_PROMPTS - len(lengths))]
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in lengths]
    for i in range(0, NUM_PROMPTS, 4):
        other = prompts[rng.randrange(NUM_PROMPTS)]
        keep = rng.randint(0, len(other))
        prompts[i] = (other[:keep] + prompts[i])[: max(1, lengths[i])]
    return prompts


@pytest.fixture(
    scope="module",
    params=[
        *EVERY_TIME,
        *(pytest.param(kind, marks=pytest.mark.long) for kind in NATIVE + FALLBACK if kind not in EVERY_TIME),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoints.make_checkpoint(folder, request.param)
    vocabulary.add_tokenizer(folder)
    prompts = make_prompts(len(request.param))
    return Case(folder, prompts, checkpoints.reference_greedy(folder, prompts, MAX_TOKENS))


def load(case: Case, **options: object) -> LLM:
    return LLM(str(case.folder), **{"dtype": "float32", "max_model_len": MAX_LEN, "threads": 1, **options})


def check(case: Case, llm: LLM, *, alone: bool = False) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    if alone:
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in case.prompts]
    else:
        outputs = llm.generate(case.prompts, params, use_tqdm=False)
    for i, (output, expected) in enumerate(zip(outputs, case.expected, strict=True)):
        assert output.outputs[0].token_ids == expected, f"prompt {i} of {len(case.prompts[i])} tokens"


def test_one_request_at_a_time(case: Case) -> None:
    check(case, load(case, enable_prefix_caching=False), alone=True)


@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_all_requests_at_once_with_chunked_prefill(case: Case, chunk: int) -> None:
    llm = load(case, enable_prefix_caching=False, max_num_batched_tokens=chunk, pipeline_depth=2)
    check(case, llm)
    assert llm._engine.scheduler.counters.num_preemptions == 0


def test_with_so_little_memory_that_requests_are_preempted(case: Case) -> None:
    # A row whose layers all have windows holds five blocks at most if it computes a block at a time.
    has_windows_only = load(case)._engine.scheduler.pool.groups.full is None
    num_blocks, step = (10, 16) if has_windows_only else (70, 2048)
    memory = num_blocks * _block_bytes(case)
    llm = load(case, kv_cache_memory=memory, max_num_batched_tokens=step, pipeline_depth=2)
    check(case, llm)
    assert llm._engine.scheduler.counters.num_preemptions > 0
    assert llm._engine.scheduler.pool.num_held == 0


def test_with_prefix_hits(case: Case) -> None:
    llm = load(case)
    check(case, llm)
    before = llm._engine.scheduler.counters.num_cached_tokens
    check(case, llm)
    hits = llm._engine.scheduler.counters.num_cached_tokens - before
    assert hits >= sum((len(prompt) - 1) // 16 * 16 for prompt in case.prompts), "all full blocks are cached"


def _block_bytes(case: Case) -> int:
    """Bytes of one block, from the number of blocks that the engine gets from 16 MiB."""
    size = 16 * 2**20
    return size // load(case, kv_cache_memory=size)._engine.scheduler.pool.num_pages
