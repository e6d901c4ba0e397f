"""A worker that offers several cache groups: what the core answers, over the fake worker."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fakes import EOS, VOCAB, FakeWorker, all_tokens, enqueue, expected_output
from msgspec.structs import replace

from pagewire.config.config import EngineConfig, MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.engine.core import trace
from pagewire.engine.core.groups import Groups
from pagewire.errors import ConfigError, StartError
from pagewire.ipc.messages import (
    CacheOffer,
    GroupShape,
    Message,
    OpenCache,
    Ping,
    Snapshot,
    StepPlan,
    StepResult,
    TokenBatch,
    bytes_to_ids,
)
from pagewire.procs.core import CoreActor

SHAPES = (GroupShape("full", 0, 2), GroupShape("window", 6, 3), GroupShape("state", 0, 4))


def config_of(**flags: Any) -> EngineConfig:
    model = ModelFacts(path="", name="m", max_position=100, vocab_size=VOCAB, eos_token_ids=(EOS,),
                       checkpoint_dtype="float32")  # fmt: skip
    config = resolve(make_config(max_num_batched_tokens=64, **flags), model, MachineFacts(num_cores=1))
    return replace(config, block_size=4, max_num_seqs=8)


def test_a_model_with_several_groups_is_served_and_its_trace_replays(tmp_path: Path) -> None:
    core = CoreActor(config_of(record_trace=str(tmp_path / "steps")))
    worker = FakeWorker(num_blocks=150, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, groups=Groups(SHAPES))
    results: list[StepResult] = []
    opened: list[OpenCache] = []
    output: dict[int, list[int]] = {}

    def post(receiver: str, message: Message) -> None:
        match message:
            case StepPlan():
                results.append(worker.run(message))
            case OpenCache():
                opened.append(message)
            case TokenBatch():
                for tokens in all_tokens(message):
                    output.setdefault(tokens.rid, []).extend(bytes_to_ids(tokens.ids))

    core.start(post)
    core.handle([CacheOffer(0, 0, page_bytes=64, num_pages=150, groups=SHAPES)])
    assert opened == [OpenCache(150)]
    prompts = [[*range(20), rid, rid + 1, rid] for rid in range(6)]
    for rid, prompt in enumerate(prompts):
        core.handle([enqueue(rid, prompt, max_tokens=20, seed=rid, ignore_eos=True)])
        while results and (rid % 2 or len(results) > 1):
            core.handle([results.pop(0)])
    while results:
        core.handle([results.pop(0)])
    for rid, prompt in enumerate(prompts):
        assert output[rid] == expected_output(prompt, 20, 100, rid, True, groups=Groups(SHAPES))
    assert core.scheduler.pool.num_held == 0 and core.scheduler.counters.num_cached_tokens > 0
    asyncio.run(core.stop(0.0))
    with (tmp_path / "steps").open("rb") as file:
        num_plans, difference = trace.replay(trace.read(file))
    assert num_plans > 20 and difference is None


def test_a_model_with_several_groups_is_refused_with_a_connector_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "examples"))
    core = CoreActor(config_of(kv_connector=("dict_connector:DictConnector",)))
    core.start(lambda receiver, message: None)
    sentence = (
        r"--kv-connector dict_connector:DictConnector stores the blocks of one group of full attention, and this "
        r"model's cache has 3 of the kinds full, window, state; start without this connector\."
    )
    with pytest.raises(ConfigError, match=sentence):
        core.handle([CacheOffer(0, 0, page_bytes=64, num_pages=150, groups=SHAPES)])


def test_pages_and_hits_are_reported_by_group() -> None:
    core = CoreActor(config_of(kv_connector=("host,size=1M",)))
    sent: list[Message] = []
    core.start(lambda receiver, message: sent.append(message))
    core.handle([CacheOffer(0, 64, block_bytes=64, page_bytes=64, num_pages=150, groups=SHAPES)])
    scheduler = core.scheduler
    worker = FakeWorker(
        num_blocks=150, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, groups=scheduler.pool.groups
    )
    for rid, prompt in ((1, range(30)), (2, range(30)), (3, range(24))):
        core.handle([enqueue(rid, list(prompt), max_tokens=3)])
        while plans := [message for message in sent if isinstance(message, StepPlan)]:
            sent.clear()
            core.handle([worker.run(plan) for plan in plans])
    full, window, state, none = scheduler.groups()
    assert [group.kind for group in (full, window, state, none)] == ["full", "window", "state", "none"]
    assert full.num_held == window.num_held == state.num_held == 0
    assert full.num_idle > 0 and window.num_idle > 0 and state.num_idle > 0
    assert full.num_idle + window.num_idle + state.num_idle == 150 - len(scheduler.pool._empty)
    assert state.num_lost_tokens > 0, "no state stands where the third prompt leaves the first"


def test_ranks_that_disagree_about_the_groups_are_refused() -> None:
    core = CoreActor(config_of(tensor_parallel_size=2))
    core.start(lambda receiver, message: None)
    core.handle([CacheOffer(0, 0, page_bytes=64, num_pages=150, groups=SHAPES)])
    with pytest.raises(StartError, match="disagree about the groups"):
        core.handle([CacheOffer(1, 0, page_bytes=32, num_pages=150, groups=SHAPES[:2])])


def test_the_kernels_that_failed_on_any_rank_are_reported() -> None:
    core = CoreActor(config_of(tensor_parallel_size=2))
    sent: list[Message] = []
    core.start(lambda receiver, message: sent.append(message))
    core.handle([CacheOffer(0, 64, failed_kernels=("rms_norm", "moe")), CacheOffer(1, 64, failed_kernels=("moe",))])
    core.handle([Ping()])
    (snapshot,) = [message for message in sent if isinstance(message, Snapshot)]
    assert snapshot.failed_kernels == ("rms_norm", "moe")
