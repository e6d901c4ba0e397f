"""Two ranks of a model with recurrent layers keep the same states: cached, preempted and behind rejected draft tokens.
Real processes, on tiny random checkpoints in float32."""

import asyncio
import random
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import vocabulary

from pagewire import LLM, AsyncLLM, SamplingParams
from pagewire.engine.checkpoint.spec import read_spec
from pagewire.engine.runner.served import program_of, shape_of
from pagewire.ipc.messages import Snapshot

pytestmark = pytest.mark.slow

BLOCK, MAX_TOKENS = 16, 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
# The random model repeats itself now and then if it has few tokens to choose from.
FEW = SamplingParams(temperature=4.0, seed=3, max_tokens=60, ignore_eos=True, logit_bias={40: 100.0, 41: 100.0})


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in lengths]


def two_ranks(folder: Path, **options: Any) -> AsyncLLM:
    common = {"dtype": "float32", "max_model_len": 512, "threads": 1, "tensor_parallel_size": 2}
    return AsyncLLM(str(folder), **common, **options)


async def tokens(llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """All at once."""

    async def one(prompt: list[int]) -> list[int]:
        outputs = [output async for output in llm.generate(prompt, params)]
        return list(outputs[-1].outputs[0].token_ids)

    return list(await asyncio.gather(*map(one, prompts)))


@pytest.fixture(params=["jamba", pytest.param("minimax", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path, request.param))


def test_the_next_turn_and_draft_tokens(folder: Path) -> None:
    """A turn finds the state at the end of the one before; those behind rejected draft tokens are taken back."""
    prompts = random_prompts(4, 5, 40, 90)
    first = checkpoints.reference_greedy(folder, prompts, MAX_TOKENS)
    turns = [prompt + output + [7, 8, 9] for prompt, output in zip(prompts, first, strict=True)]
    second = checkpoints.reference_greedy(folder, turns, MAX_TOKENS)
    with LLM(str(folder), dtype="float32", max_model_len=512, threads=1) as alone:
        few = [list(output.outputs[0].token_ids) for output in alone.generate(prompts, FEW, use_tqdm=False)]

    async def served() -> Snapshot:
        async with two_ranks(folder, speculative="ngram,tokens=3") as llm:
            assert await tokens(llm, prompts) == first
            before = await llm.snapshot()
            assert await tokens(llm, turns) == second
            after = await llm.snapshot()
            assert after.num_cached_tokens - before.num_cached_tokens == sum(len(turn) - 4 for turn in turns)
            assert await tokens(llm, prompts, FEW) == few
            return await llm.snapshot()

    counters = asyncio.run(served())
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


def test_preempted_requests(folder: Path) -> None:
    prompts = random_prompts(2, *(8 + i % 9 for i in range(12)))
    expected = checkpoints.reference_greedy(folder, prompts, MAX_TOKENS)
    groups = shape_of(program_of(read_spec(folder), 0, 2), torch.float32).groups(BLOCK)
    num_pages = 9 * (groups.state_pages + 2)  # nine requests can begin, and each will need three blocks

    async def served() -> int:
        async with two_ranks(folder, kv_cache_memory=num_pages * groups.page_bytes) as llm:
            for _ in range(2):  # the second time with what the first has left in the prefix cache
                assert await tokens(llm, prompts) == expected
            return (await llm.snapshot()).num_preemptions

    assert asyncio.run(served()) > 0
