"""Several stages compute the tokens of one rank, whatever is chunked, cached, preempted, guessed or lost. The whole
engine except HTTP and sockets, with all stages in one process, on tiny random checkpoints in float32."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import family_kinds
import numpy as np
import pytest
import torch
import vocabulary
from short_memory import ShortAttention, ShortMemory

from pagewire import LLM, SamplingParams, StructuredOutputsParams
from pagewire.cli import main
from pagewire.engine.core.loads import Loads
from pagewire.engine.parallel.shared_memory import make_memory
from pagewire.engine.parallel.stage_memory import StageMemory
from pagewire.errors import ConfigError
from pagewire.ipc.messages import Cancel, Hidden, Message, Sleep, Wake

pytestmark = pytest.mark.slow

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, frequency_penalty=0.4, max_tokens=MAX_TOKENS, logprobs=2)
# The random model repeats itself now and then if it has few tokens to choose from.
FEW = SamplingParams(temperature=4.0, seed=3, max_tokens=60, ignore_eos=True, logit_bias={40: 100.0, 41: 100.0})
# Experts, windows beside full attention, latents, recurrent layers; the embedding and what a layer leaves for a later
# one; several streams, an input for each layer, and keys of another layer.
LONG = ["qwen3_moe", "gemma3", "DeepseekV3Config", "jamba", "lfm2", "zamba2", "Gemma3nTextConfig", "Gemma4TextConfig"]


def make(folder: Path, kind: str) -> Path:
    if kind in checkpoints.KINDS:
        checkpoints.make_checkpoint(folder, kind)
    else:
        config_class, changes = next(each for each in family_kinds.DENSE + family_kinds.EXPERTS if each[0] == kind)
        family_kinds.make_kind(folder, config_class, changes)
    return vocabulary.add_tokenizer(folder)


def make_prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in lengths]


PROMPTS = make_prompts(1, 5, 17, 40, 90, 3, 64)


def engine(folder: Path, stages: int, **options: Any) -> LLM:
    common = {"dtype": "float32", "max_model_len": 256, "threads": 1, "pipeline_parallel_size": stages}
    return LLM(str(folder), **common | options)


def tokens(llm: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with engine(folder, 1) as llm:
        yield llm


def check_tokens(alone: LLM, llm: LLM) -> None:
    """Of new prompts, and again of cached ones."""
    for params in (GREEDY, SEEDED):
        expected = tokens(alone, params)
        assert tokens(llm, params) == expected
        assert tokens(llm, params) == expected
    scheduler = llm._engine.scheduler
    assert scheduler.counters.num_cached_tokens > 0 and scheduler.pool.num_free == scheduler.pool.num_pages


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 32}, {"pipeline_depth": 4, "cpu_kernels": "torch"}])
def test_stages_compute_the_tokens_of_one_rank(alone: LLM, folder: Path, options: dict[str, Any]) -> None:
    with engine(folder, 3, **options) as llm:
        check_tokens(alone, llm)


@pytest.mark.long
@pytest.mark.parametrize("kind", LONG)
def test_stages_of_other_families(kind: str, tmp_path: Path) -> None:
    """Two stages, and as many as the family's layers can be dealt to."""
    make(tmp_path, kind)
    options = {"max_num_batched_tokens": 48, "pipeline_depth": 3}
    with engine(tmp_path, 1) as alone:
        for stages in (2, 3):
            try:
                llm = engine(tmp_path, stages, **options)
            except ConfigError as error:
                assert stages == 3 and "enough for 2 stages at most" in str(error)
                continue
            with llm:
                check_tokens(alone, llm)


def test_preempted_requests(alone: LLM, folder: Path) -> None:
    prompts = make_prompts(2, *(8 + i % 9 for i in range(12)))
    expected = tokens(alone, GREEDY, prompts)
    with engine(folder, 2, kv_cache_memory="64K", pipeline_depth=3) as llm:
        for _ in range(2):
            assert tokens(llm, GREEDY, prompts) == expected
        assert llm._engine.scheduler.counters.num_preemptions > 0


def test_the_trace_of_three_stages_replays(
    alone: LLM, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "trace")
    with engine(folder, 3, record_trace=path, kv_cache_memory="64K", speculative="ngram", pipeline_depth=3) as llm:
        for params in (FEW, SEEDED):
            assert tokens(llm, params) == tokens(alone, params)
        assert llm._engine.scheduler.counters.num_preemptions > 0
    assert main(["replay", path]) == 0, capsys.readouterr()


def test_draft_tokens(alone: LLM, folder: Path) -> None:
    """The first stage proposes them, and the last one accepts or rejects them."""
    expected = tokens(alone, FEW)
    with engine(folder, 3, speculative="ngram,tokens=3", pipeline_depth=3) as llm:
        for _ in range(2):
            assert tokens(llm, FEW) == expected
        assert tokens(llm, GREEDY) == tokens(alone, GREEDY)
        counters = llm._engine.scheduler.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


def test_prompt_log_probabilities_and_embeddings(alone: LLM, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, logprobs=1)
    with engine(folder, 2, max_num_batched_tokens=24) as llm:
        for ours, wanted in zip(
            *(each.generate(PROMPTS, params, use_tqdm=False) for each in (llm, alone)), strict=True
        ):
            assert ours.prompt_logprobs == wanted.prompt_logprobs
            assert ours.outputs[0].logprobs == wanted.outputs[0].logprobs
        for ours, wanted in zip(*(each.embed(PROMPTS, use_tqdm=False) for each in (llm, alone)), strict=True):
            assert np.array_equal(ours.outputs.embedding, wanted.outputs.embedding)


class TwiceShort(ShortAttention):
    """Out of memory in every Nth call, and in the next one as well."""

    def forward(self, *arguments: Any) -> torch.Tensor:
        if ShortMemory.calls and ShortMemory.calls % self._every == 0:
            ShortMemory.calls += 1
            raise MemoryError
        return super().forward(*arguments)


@pytest.mark.parametrize("short", ["worker", "worker-1", "worker-2"])
def test_a_stage_without_memory_changes_no_token(short: str, folder: Path) -> None:
    """Later stages skip such a step, and earlier ones compute in vain until the core knows. Every second fault is that
    of the plan that tells of the first."""
    with engine(folder, 1, extension="short_memory:ShortMemory,every=1000000000") as llm:
        expected = tokens(llm, SEEDED)
    with engine(folder, 3, pipeline_depth=3) as llm:
        runner = llm._engine._workers[short]._runner
        assert runner is not None and runner._cache is not None
        steps: Any = runner._steps
        attention = TwiceShort(steps._attention, every=7, cache=runner._cache)
        ShortMemory.calls = 0
        steps._attention = attention
        assert runner._stage_steps is not None
        runner._stage_steps._attention = attention
        for _ in range(2):
            assert tokens(llm, SEEDED) == expected
        scheduler = llm._engine.scheduler
        assert scheduler.counters.num_out_of_memory > 3
        assert scheduler.pool.num_free == scheduler.pool.num_pages


@pytest.mark.parametrize("num_tokens", [512, 8])
def test_results_are_handed_on_in_shared_memory(alone: LLM, folder: Path, num_tokens: int) -> None:
    """What does not fit into a slot is part of the message."""
    handed: list[tuple[bool, int]] = []
    with engine(folder, 2, pipeline_depth=3) as llm:
        first, last = llm._engine._workers.values()
        sender, receiver, fd, post = first._runner, last._runner, make_memory("pagewire-stages"), first._post
        assert sender is not None and receiver is not None
        slots = {"num_slots": 5, "slot_bytes": num_tokens * 64 * 4}
        sender._output, receiver._input = StageMemory(os.dup(fd), **slots), StageMemory(fd, **slots)

        def note(name: str, message: Message) -> None:
            if isinstance(message, Hidden):
                handed.append((bool(message.data), message.num_tokens))
            post(name, message)

        first._post = note
        for params in (GREEDY, SEEDED):
            assert tokens(llm, params) == tokens(alone, params)
    assert {is_sent for is_sent, num in handed if not num} == ({True} if num_tokens == 8 else set())
    assert 0 < max(num for _, num in handed) <= num_tokens


def test_open_requests_continue_after_a_sleep(alone: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(alone, SEEDED)
    with engine(folder, 2, pipeline_depth=3) as llm:
        inline = llm._engine
        scheduler, run = inline.scheduler, inline.run

        def run_with_sleep(*, until: Callable[[], bool] = lambda: False) -> None:
            run(until=partial(lambda step: scheduler.step >= step, 9))
            inline.post("core", Sleep())
            run()
            assert scheduler.is_paused and scheduler.num_waiting == len(PROMPTS)
            inline.post("core", Wake())
            run(until=until)

        monkeypatch.setattr(inline, "run", run_with_sleep)
        assert tokens(llm, SEEDED) == expected


def test_tiers_of_kv(alone: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage keeps its layers of each block."""
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    expected, others = tokens(alone, GREEDY), make_prompts(3, *[60] * 12)
    disk = f"disk,path={tmp_path},size=4M"
    for connectors in (["host,size=2M", disk], [disk]):
        with engine(folder, 2, kv_connector=connectors, kv_cache_memory="64K", pipeline_depth=3) as llm:
            for prompts in (PROMPTS, others, PROMPTS):
                assert tokens(llm, GREEDY, prompts) == (
                    expected if prompts is PROMPTS else tokens(alone, GREEDY, others)
                )
            scheduler = llm._engine.scheduler
            assert scheduler.connector is not None
            assert scheduler.connector.tiers()[0].num_hit_tokens > 0
            assert scheduler.pool.num_free == scheduler.pool.num_pages
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]


def test_kv_of_another_engine(alone: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage loads its layers from the same stage of the other one."""
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    with tempfile.TemporaryDirectory(prefix="pw-") as sockets:  # they need short paths
        asks = f"p2p,peer={sockets}/kv,timeout_ms=20000,wait_ms=20000,fetch_timeout_ms=20000"
        with (
            engine(folder, 2, kv_connector=[f"p2p,serve={sockets}/kv,size=4M"]) as serves,
            engine(folder, 2, kv_connector=[asks], max_num_seqs=1, pipeline_depth=3) as llm,
        ):
            expected = tokens(alone, GREEDY)
            assert tokens(serves, GREEDY) == expected
            assert tokens(llm, GREEDY) == expected
            scheduler = llm._engine.scheduler
            assert scheduler.connector is not None
            (found,) = scheduler.connector.tiers()
            assert found.num_hit_tokens == sum((len(ids) - 1) // 16 * 16 for ids in PROMPTS)
            assert not found.num_failed and scheduler.pool.num_free == scheduler.pool.num_pages


def test_constrained_and_cancelled_requests(alone: LLM, folder: Path) -> None:
    """Masks matter in the last stage only. What others cancel does not delay a row that goes on."""
    params = SamplingParams(
        temperature=1, seed=5, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-d]{3,20}")
    )
    with engine(folder, 2, pipeline_depth=3) as llm:
        assert tokens(llm, params) == tokens(alone, params)
        inline = llm._engine
        scheduler, run = inline.scheduler, inline.run

        def run_and_cancel(*, until: Callable[[], bool] = lambda: False) -> None:
            last = scheduler.step + 6
            run(until=lambda: scheduler.step >= last)
            assert scheduler.num_running == len(PROMPTS)
            inline.post("tokenizer", Cancel(tuple(sorted(scheduler.table.requests)[2:])))
            run(until=until)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inline, "run", run_and_cancel)
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        expected = tokens(alone, GREEDY)
        assert [list(output.outputs[0].token_ids) for output in outputs[:2]] == expected[:2]
        assert {output.outputs[0].finish_reason for output in outputs[2:]} == {"abort"}
        assert scheduler.pool.num_free == scheduler.pool.num_pages


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pipeline_parallel_size": 4}, "the model has 3 layers, enough for 3 stages at most"),
        ({"pipeline_layers": "2,2"}, "give 2 numbers of at least 1 that add up to the model's 3 layers"),
        ({"pipeline_layers": "2;1"}, "write the number of layers of each stage"),
        ({"pipeline_layers": "3", "pipeline_parallel_size": 1}, "give --pipeline-parallel-size as well"),
    ],
)
def test_what_stages_cannot_do_is_refused(options: dict[str, Any], why: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        engine(folder, 2, **options)


def test_layers_are_dealt_as_asked(alone: LLM, folder: Path) -> None:
    with engine(folder, 2, pipeline_layers="1,2") as llm:
        shapes = [worker._runner._model.kv_shape for worker in llm._engine._workers.values()]  # type: ignore[union-attr]
        assert [len(shape.layers) for shape in shapes] == [1, 2]
        assert tokens(llm, GREEDY) == tokens(alone, GREEDY)
