"""Models with an encoder: greedy tokens equal transformers' `generate`, whatever is cached, preempted or guessed, and
beside whatever else. The whole engine except HTTP and sockets, on tiny random checkpoints in float32."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import vocabulary
from safetensors.torch import load_file, save_file

from pagewire import LLM, SamplingParams
from pagewire.cli import main
from pagewire.errors import ConfigError
from pagewire.ipc.messages import Sleep, Wake

EVERY_TIME = ["t5", "bart"]
LONG = [kind for kind in checkpoints.ENCODER_DECODERS if kind not in EVERY_TIME]
MAX_TOKENS = 40
MAX_LEN = 256


@dataclass
class Case:
    """A checkpoint, its prompts, and the outputs of transformers."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    lengths = [1, 2, 15, 16, 17, 32, 33, 48, 64, 100, 180, MAX_LEN]
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=[*EVERY_TIME, *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_folder(tmp_path_factory.mktemp(request.param), request.param)
    prompts = make_prompts()
    return Case(folder, prompts, checkpoints.reference_greedy(folder, prompts, MAX_TOKENS))


def make_folder(folder: Path, kind: str, **changes: Any) -> Path:
    return vocabulary.add_tokenizer(checkpoints.make_checkpoint(folder, kind, **changes))


Load = Callable[..., LLM]


@pytest.fixture
def load() -> Iterator[Load]:
    """Folder and flags → an engine."""
    opened: list[LLM] = []

    def start(folder: Path, **flags: object) -> LLM:
        opened.append(LLM(str(folder), **{"dtype": "float32", "max_model_len": MAX_LEN, "threads": 1, **flags}))
        return opened[-1]

    yield start
    for llm in opened:
        llm.close()


def tokens(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    asked = SamplingParams(**{"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **params})
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def check_is_free(llm: LLM) -> None:
    pool = llm._engine.scheduler.pool
    assert pool.num_held == 0 and pool.num_free == pool.num_pages


def test_one_request_at_a_time_and_all_at_once(case: Case, load: Load) -> None:
    llm = load(case.folder, enable_prefix_caching=False)
    assert [tokens(llm, [prompt])[0] for prompt in case.prompts] == case.expected
    assert tokens(llm, case.prompts) == case.expected
    check_is_free(llm)


def test_outputs_depend_on_the_whole_prompt(case: Case) -> None:
    """So that the other tests could fail: the prompts' outputs differ."""
    assert len({tuple(output) for output in case.expected}) > len(case.expected) // 2


def test_kernels_of_torch(case: Case, load: Load) -> None:
    assert tokens(load(case.folder, cpu_kernels="torch"), case.prompts) == case.expected


def test_several_steps_in_flight_and_draft_tokens(case: Case, load: Load) -> None:
    llm = load(case.folder, speculative="ngram", pipeline_depth=3, max_num_seqs=5)
    assert tokens(llm, case.prompts) == case.expected
    assert llm._engine.scheduler.counters.num_draft_tokens > 0


def test_preempted_requests_have_their_prompts_read_again(case: Case, load: Load) -> None:
    pool = load(case.folder, kv_cache_memory=2**24)._engine.scheduler.pool
    page_bytes, groups = 2**24 // pool.num_pages, pool.groups
    fewest = groups.num_pages(0, MAX_LEN, 1, 16) + groups.cross_pages(MAX_LEN, 16)
    for caching in (True, False):
        llm = load(case.folder, kv_cache_memory=fewest * page_bytes, enable_prefix_caching=caching, pipeline_depth=2)
        assert tokens(llm, case.prompts) == case.expected
        assert llm._engine.scheduler.counters.num_preemptions > 0
        check_is_free(llm)


def test_a_prompt_is_read_once_for_all_who_ask_it(case: Case, load: Load) -> None:
    llm = load(case.folder)
    prompt, expected = case.prompts[8], case.expected[8]
    assert tokens(llm, [prompt], n=3) == [expected] * 3
    counters = llm._engine.scheduler.counters
    assert counters.num_cached_tokens == 2 * len(prompt), "the second and third choice find what the first has read"
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert output.num_cached_tokens == len(prompt) == len(output.prompt_token_ids)
    other = [*prompt[:-1], prompt[-1] ^ 1]
    before = counters.num_cached_tokens
    tokens(llm, [other])
    assert counters.num_cached_tokens == before, "the encoder reads a prompt as a whole"
    check_is_free(llm)


def test_open_requests_continue_after_a_sleep(
    case: Case, load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the cache is given back while requests are in progress. The trace of all of it can be replayed."""
    llm = load(case.folder, record_trace=str(tmp_path / "trace"))
    inline, run = llm._engine, llm._engine.run
    scheduler = inline.scheduler

    def run_with_sleeps(*, until: Callable[[], bool] = lambda: False) -> None:
        for step in (5, 17):
            run(until=lambda step=step: scheduler.step >= step)  # type: ignore[misc]  # its default is not seen
            inline.post("core", Sleep())
            run()
            assert scheduler.num_running == 0 and scheduler.num_waiting == len(case.prompts)
            check_is_free(llm)
            inline.post("core", Wake())
        run(until=until)

    monkeypatch.setattr(inline, "run", run_with_sleeps)
    assert tokens(llm, case.prompts) == case.expected
    llm.close()
    assert main(["replay", str(tmp_path / "trace")]) == 0, capsys.readouterr()


def test_a_head_of_its_own(tmp_path: Path, load: Load) -> None:
    """Later T5 models have one, whatever transformers writes into their config."""
    folder = make_folder(tmp_path, "t5-gated")
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    head = torch.randn(weights["shared.weight"].shape, generator=torch.Generator().manual_seed(5))
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    prompts = make_prompts()[:6]
    expected = checkpoints.reference_greedy(folder, prompts, MAX_TOKENS)
    assert tokens(load(folder), prompts) == expected


def test_distances_beyond_the_exact_buckets(tmp_path: Path, load: Load) -> None:
    """With T5's own numbers, prompts and outputs are longer than the farthest bucket begins."""
    changes = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    folder = make_folder(tmp_path, "t5", **changes)
    prompts = make_prompts()[-2:]
    expected = checkpoints.reference_greedy(folder, prompts, 200)
    assert tokens(load(folder), prompts, max_tokens=200) == expected


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"kv_connector": ["host,size=1M"]},
        {"runner_plugin": "watching_plugin:Watching"},
        {"max_num_batched_tokens": MAX_LEN - 1},
    ],
)
def test_what_is_not_there_is_refused_at_start(case: Case, load: Load, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"has an encoder; leave|encoder cannot be divided|reads at once"):
        load(case.folder, **flags)
