"""Longrope beyond the original length: greedy tokens equal transformers' `generate` for short and long prompts, and for
some that get long. The whole engine except HTTP and sockets, on a tiny random Phi-3 in float32."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import vocabulary
from family_kinds import LONGROPE, make_kind

from pagewire import LLM, SamplingParams
from pagewire.engine.core.cost import CAUTIOUS, CostModel

pytestmark = pytest.mark.slow

ORIGINAL, LONGEST = 64, 256
LENGTHS = (50, 63, 64, 65, 100, 200)
MAX_TOKENS = 40
BLOCK = 16


@dataclass
class Case:
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


Load = Callable[..., LLM]


def some(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("phi3")
    lengths = {"max_position_embeddings": LONGEST, "original_max_position_embeddings": ORIGINAL}
    make_kind(folder, "Phi3Config", {**LONGROPE, **lengths, "sliding_window": None})
    vocabulary.add_tokenizer(folder)
    rng = random.Random(5)
    prompts = [some(rng, num) for num in LENGTHS]
    return Case(folder, prompts, checkpoints.reference_greedy(folder, prompts, MAX_TOKENS))


@pytest.fixture
def load(case: Case) -> Iterator[Load]:
    """Flags → an engine."""
    opened: list[LLM] = []

    def start(**flags: object) -> LLM:
        opened.append(LLM(str(case.folder), **{"dtype": "float32", "threads": 1, **flags}))
        return opened[-1]

    yield start
    for llm in opened:
        llm.close()


def tokens(llm: LLM, prompts: list[list[int]], max_tokens: int = MAX_TOKENS, **more: Any) -> list[list[int]]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more})
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def num_cached(llm: LLM) -> int:
    return llm._engine.scheduler.counters.num_cached_tokens


def num_changes(llm: LLM) -> int:
    return llm._engine.scheduler.counters.num_regime_changes


def test_the_long_factors_matter(case: Case) -> None:
    """With the short factors at all positions, transformers itself gives other tokens."""

    def stay_short(model: Any) -> None:
        rotary = model.model.rotary_emb
        rotary.long_inv_freq = rotary.original_inv_freq

    short = checkpoints.reference_greedy(case.folder, case.prompts, MAX_TOKENS, change=stay_short)
    assert all(a != b for a, b in zip(short, case.expected, strict=True))


def test_one_request_at_a_time(case: Case, load: Load) -> None:
    llm = load(enable_prefix_caching=False)
    assert [tokens(llm, [prompt])[0] for prompt in case.prompts] == case.expected
    assert num_changes(llm) == sum(num <= ORIGINAL for num in LENGTHS)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("chunk", [16, 2048])
def test_all_requests_at_once(case: Case, load: Load, chunk: int, kernels: str) -> None:
    llm = load(max_num_batched_tokens=chunk, pipeline_depth=2, cpu_kernels=kernels)
    for _ in range(2):  # the second time with what the first has left in the prefix cache
        assert tokens(llm, case.prompts) == case.expected
    pool = llm._engine.scheduler.pool
    assert pool.num_held == 0 and pool.num_free == pool.num_pages


def test_draft_tokens_end_at_the_limit(case: Case, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostModel, "break_even", lambda self, work: CAUTIOUS)  # whatever they cost on this machine
    # The random model repeats itself now and then if it has few tokens to choose from.
    few = {"logit_bias": {40: 100.0, 41: 100.0}, "temperature": 4.0, "seed": 3}
    plain, drafting = load(), load(speculative="ngram,tokens=3", pipeline_depth=2)
    prompts = case.prompts[:5] * 3
    assert tokens(drafting, prompts, 50, **few) == tokens(plain, prompts, 50, **few)
    counters = drafting._engine.scheduler.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens and counters.num_regime_changes == 9
    assert tokens(drafting, case.prompts) == case.expected


def test_with_so_little_memory_that_requests_are_preempted(case: Case, load: Load) -> None:
    runner = load()._engine._worker._runner
    assert runner is not None
    rng = random.Random(1)
    prompts = [some(rng, rng.randint(40, 60)) for _ in range(8)]
    expected = checkpoints.reference_greedy(case.folder, prompts, MAX_TOKENS)
    llm = load(kv_cache_memory=18 * runner.block_bytes, pipeline_depth=2)
    assert tokens(llm, prompts) == expected
    assert llm._engine.scheduler.counters.num_preemptions > num_changes(llm) > 0


def test_a_conversation_that_grows_beyond_the_limit(case: Case, load: Load) -> None:
    """Each turn finds what the last one left in its own regime, and nothing of the other."""
    rng, llm = random.Random(9), load(pipeline_depth=2)

    def turn(text: list[int], max_tokens: int) -> tuple[list[int], int]:
        """The answer, and how many tokens of the text were found."""
        before = num_cached(llm)
        (answer,) = tokens(llm, [text], max_tokens)
        assert [answer] == checkpoints.reference_greedy(case.folder, [text], max_tokens)
        return answer, num_cached(llm) - before

    text = some(rng, 24)
    answer, found = turn(text, 8)
    assert found == 0
    text += answer + some(rng, 10)
    answer, found = turn(text, 8)  # 42 tokens; the last answer is found but for its last token
    assert found == 31
    text += answer + some(rng, 4)
    short, (answer, found) = list(text), turn(text, 30)  # 54 tokens, 84 at the end
    assert found == 49
    text += answer + some(rng, 10)
    answer, found = turn(text, 8)  # 94 tokens: what the last request has computed beyond the limit
    assert found == 83
    _, found = turn(text + answer + some(rng, 1), 8)
    assert found == 101
    _, found = turn(short, 8)  # blocks of the first regime are still there
    assert found >= 48


def test_a_long_prompt_leaves_nothing_for_its_beginning(case: Case, load: Load) -> None:
    llm = load()
    text = case.prompts[-1]
    assert tokens(llm, [text]) == case.expected[-1:]
    assert tokens(llm, [text[:50]]) == checkpoints.reference_greedy(case.folder, [text[:50]], MAX_TOKENS)
    assert num_cached(llm) == 0
    assert tokens(llm, [text]) == case.expected[-1:]
    assert num_cached(llm) >= 192  # its full blocks


@pytest.mark.parametrize("limit", [ORIGINAL, ORIGINAL - 1])
def test_a_declared_length_within_the_original_one(case: Case, load: Load, limit: int) -> None:
    llm = load(max_model_len=limit)
    assert tokens(llm, [case.prompts[0]], limit - LENGTHS[0]) == [case.expected[0][: limit - LENGTHS[0]]]
    assert num_changes(llm) == 0
