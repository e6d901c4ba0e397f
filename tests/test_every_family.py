"""Every described family through the whole engine: greedy tokens in float32 are those of transformers, alone, all at
once, in chunks, with preemption, prefix hits, swapped to the host tier and back, and with two and three ranks."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import every_family
import pytest
import torch
import vocabulary
from every_family import MAX_LEN, MAX_TOKENS, greedy_of, make_prompts
from family_kinds import KINDS, load_kind, make_kind
from hybrid_kinds import BY_THREE, RECURRENT
from rank_processes import run_ranks
from ties import are_equal, first_tie

from pagewire import LLM, SamplingParams
from pagewire.engine.core.groups import Groups

pytestmark = pytest.mark.slow

# Of each kind of layer one; the others are for `make test-long`.
EVERY_TIME = ("Gemma4Text-0", "GptOss-0", "Llama4Text-0", "Mistral4-1", "Olmo2-1")
FEW = ("DeepseekV3-0", "Gemma4Text-2", "Jamba-0", "MiniMax-0", "MiniMaxM2-1", "Olmo3-0", "Olmoe-0")  # for two ranks
NUM_PROMPTS = 64
NUM_PROMPTS_OF_VARIANTS = 24  # of families of which another variant has all prompts
NUM_ALONE = 12
NUM_LONG = 24


@dataclass
class Case:
    folder: Path
    model: Any
    prompts: list[list[int]]
    expected: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # (max_tokens, *prompt) → output

    def check(self, llm: LLM, *, alone: bool = False, is_long: bool = False) -> None:
        """is_long: longer outputs of fewer prompts."""
        max_tokens = MAX_TOKENS if is_long else MAX_TOKENS // 4
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompts = self.prompts[: NUM_ALONE if alone else NUM_LONG if is_long else None]
        if alone:
            found = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        else:
            found = llm.generate(prompts, params, use_tqdm=False)
        for number, (prompt, output) in enumerate(zip(prompts, found, strict=True)):
            tokens = list(output.outputs[0].token_ids)
            key = (max_tokens, *prompt)
            if key not in self.expected:
                self.expected[key] = greedy_of(self.model, prompt, tokens)
            if tokens == self.expected[key]:
                continue
            same = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, self.expected[key], strict=True))
            )
            before, both = prompt + tokens[:same], (tokens[same], self.expected[key][same])
            is_tie = are_equal(self.model, before, both) or first_tie(self.model, before) < len(before)
            assert is_tie, f"prompt {number} of {len(prompt)} tokens, token {same}"

    def load(self, **options: object) -> LLM:
        common = {"dtype": "float32", "max_model_len": min(MAX_LEN, self.longest), "threads": 1, "pipeline_depth": 2}
        return LLM(str(self.folder), **{**common, **options})

    @property
    def longest(self) -> int:
        return max(len(prompt) for prompt in self.prompts) + MAX_TOKENS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_case(name: str, folder: Path, num: int) -> Case:
    kind = {**KINDS, **RECURRENT, **BY_THREE}[name]
    made = make_kind(folder / name, *kind)
    vocabulary.add_tokenizer(made)
    return Case(made, load_kind(made, *kind), make_prompts(made, num))


@pytest.mark.parametrize(
    "name", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.long) for name in KINDS]
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine never trusts its measured costs, and without them it loads whatever is stored.
    monkeypatch.setattr("pagewire.engine.core.cost._MIN_OBSERVED", sys.maxsize)
    is_first = name.endswith("-0")
    has_all = is_first and name not in EVERY_TIME
    case = make_case(name, tmp_path, NUM_PROMPTS if has_all else NUM_PROMPTS_OF_VARIANTS)
    if is_first:
        case.check(case.load(enable_prefix_caching=False), alone=True)
    for chunk in (16, 64) if is_first else (16,):
        llm = case.load(enable_prefix_caching=False, max_num_batched_tokens=chunk)
        case.check(llm)
        assert llm._engine.scheduler.counters.num_preemptions == 0
    llm = case.load(max_num_batched_tokens=2048)
    case.check(llm)
    scheduler = llm._engine.scheduler
    before = scheduler.counters.num_cached_tokens
    case.check(llm)
    assert scheduler.counters.num_cached_tokens > before, "no prefix hits"
    with little_memory(case, scheduler.pool.groups) as llm:
        case.check(llm, is_long=True)
        case.check(llm, is_long=True)
        scheduler = llm._engine.scheduler
        assert scheduler.counters.num_preemptions > 0 and scheduler.pool.num_held == 0
        assert scheduler.connector is not None
        (host,) = scheduler.connector.tiers()
        assert host.num_stored > 0 and host.num_hit_tokens > 0 and host.num_failed == 0


def little_memory(case: Case, groups: Groups) -> LLM:
    """An engine whose memory holds little more than the longest request, with a host tier."""
    size = 16 * 2**20
    page_bytes = size // case.load(kv_cache_memory=size)._engine.scheduler.pool.num_pages
    num_pages = groups.num_pages(0, case.longest, 32, 16) + 6 * groups.unit
    return case.load(
        kv_cache_memory=num_pages * page_bytes, max_num_batched_tokens=32, kv_connector=("host,size=16M,eviction=lru",)
    )


@pytest.mark.parametrize(
    ("names", "size"),
    [
        pytest.param(FEW, 2, id="some"),
        pytest.param(tuple(KINDS), 2, id="all", marks=pytest.mark.long),
        pytest.param(tuple(RECURRENT), 2, id="recurrent", marks=pytest.mark.long),
        pytest.param(tuple(BY_THREE), 3, id="three", marks=pytest.mark.long),
    ],
)
def test_ranks_give_the_tokens_of_transformers(names: tuple[str, ...], size: int, tmp_path: Path) -> None:
    cases = [make_case(name, tmp_path, 12) for name in names]
    jobs = {str(case.folder): case.prompts for case in cases}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(every_family.__file__, size, tmp_path, timeout_s=900.0)
    first, *others = (json.loads((tmp_path / f"outputs-{rank}.json").read_text()) for rank in range(size))
    assert all(outputs == first for outputs in others)
    for name, case in zip(names, cases, strict=True):
        limit = getattr(case.model.config, "original_max_position_embeddings", MAX_LEN)
        for prompt, output in zip(case.prompts, first[str(case.folder)], strict=True):
            if len(prompt) <= limit < len(prompt) + len(output):
                continue  # the driver does not change the regime of a request
            assert output == greedy_of(case.model, prompt, output), f"{name}, prompt of {len(prompt)} tokens"
