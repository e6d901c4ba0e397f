"""Faults of an engine's memory: a step has none, it is given back during a sleep, or blocks leak. Real models, in one
process."""

import mmap
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import vocabulary
from short_memory import ShortMemory

from pagewire import LLM, SamplingParams
from pagewire.cli import main
from pagewire.ipc.messages import Ping, Sleep, Wake

PROMPTS = [[random.Random(i).randrange(3, checkpoints.VOCAB_SIZE) for _ in range(4 + 9 * i)] for i in range(6)]
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8 * (i % 2), seed=i, logprobs=1 if i == 2 else None)
    for i in range(6)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    return folder


def engine(model: Path, **options: object) -> LLM:
    flags: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 128, "kv_cache_memory": "4M", **options}
    return LLM(str(model), **flags)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline_depth": 2},
        {"pipeline_depth": 2, "enable_prefix_caching": False},
        {"kv_connector": ["host,size=1M"]},
    ],
)
def test_steps_without_memory_change_no_token(
    model: Path, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_faults = {"extension": "short_memory:ShortMemory,every=23", "record_trace": str(tmp_path / "trace")}
    expected = tokens(engine(model, extension="short_memory:ShortMemory,every=1000000000"))
    ShortMemory.calls = 0
    llm = engine(model, **options, **with_faults)
    assert tokens(llm) == expected
    assert tokens(llm) == expected, "the prefix cache holds no bad blocks"
    scheduler = llm._engine.scheduler
    assert scheduler.counters.num_out_of_memory > 5
    assert scheduler.pool.num_free == scheduler.pool.num_pages
    llm.close()
    assert main(["replay", str(tmp_path / "trace")]) == 0, capsys.readouterr()


@pytest.mark.parametrize("options", [{"pipeline_depth": 2}, {"kv_connector": ["host,size=1M"]}])
def test_open_requests_continue_after_a_sleep(
    model: Path,
    options: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine sleeps twice with requests in progress. It computes nothing meanwhile, and no token changes."""
    expected = tokens(engine(model))
    llm = engine(model, record_trace=str(tmp_path / "trace"), **options)
    inline = llm._engine
    scheduler, run = inline.scheduler, inline.run

    def is_at(step: int) -> bool:
        return scheduler.step >= step

    def run_with_sleeps(*, until: Callable[[], bool] = lambda: False) -> None:
        for step in (7, 15):
            run(until=partial(is_at, step))
            inline.post("core", Sleep())
            run()
            assert scheduler.is_paused and scheduler.num_running == 0 and scheduler.num_waiting == len(PROMPTS)
            assert scheduler.pool.num_free == scheduler.pool.num_pages
            runner = inline._worker._runner
            assert runner is not None and runner._cache is not None
            kv, step_before = runner._cache.storage, scheduler.step
            assert kv.count_nonzero() * kv.itemsize < 2 * mmap.PAGESIZE, "only pages shared with other tensors are left"
            inline.post("core", Ping())
            run()
            assert scheduler.step == step_before
            inline.post("core", Wake())
        run(until=until)

    monkeypatch.setattr(inline, "run", run_with_sleeps)
    assert tokens(llm) == expected
    llm.close()
    assert main(["replay", str(tmp_path / "trace")]) == 0, capsys.readouterr()


def test_leaked_blocks_and_rows_are_found_while_the_engine_is_idle(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine checks at the second idle ping. A leak costs a log line and the prefix cache."""
    llm = engine(model)
    inline, scheduler = llm._engine, llm._engine.scheduler
    expected = tokens(llm)
    scheduler.pool.allocate(3)
    scheduler.table.free_rows.pop()
    for num_mended in (0, 1, 1):
        inline.post("core", Ping())
        inline.run()
        assert scheduler.counters.num_mended == num_mended
    assert "counted again: reference counts differ from the tables" in caplog.text
    assert scheduler.pool.num_free == scheduler.pool.num_pages and len(scheduler.table.free_rows) == 256
    assert tokens(llm) == expected
    for _ in range(3):
        inline.post("core", Ping())
        inline.run()
    assert scheduler.counters.num_mended == 1, "the leak is mended only once"
