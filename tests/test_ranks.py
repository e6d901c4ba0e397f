"""Two tensor-parallel ranks do what one does: tiers of KV, extensions, sleep, draft tokens, deterministic mode, and
steps without memory. The first rank is in this process, the other one in a process of its own."""

import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import vocabulary
from kv_instance import wait_until_written
from redis_server import needs_redis, redis_server
from short_memory import ShortMemory
from waiting import SLOW_DISK_S, until

from pagewire import LLM, SamplingParams
from pagewire.config.machine import machine_facts
from pagewire.engine.core.loads import Loads
from pagewire.errors import ConfigError, StartError
from pagewire.ipc.messages import Sleep, TierSnapshot, Wake

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not machine_facts().has_compiler, reason="ranks with torch's kernels share no memory"),
]

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.9, seed=7, frequency_penalty=0.4, max_tokens=MAX_TOKENS, ignore_eos=True
)
# The random model repeats itself now and then if it has few tokens to choose from.
FEW = SamplingParams(temperature=4.0, seed=3, max_tokens=60, ignore_eos=True, logit_bias={40: 100.0, 41: 100.0})


def make_prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in lengths]


PROMPTS = make_prompts(1, 5, 17, 40, 90, 3, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    checkpoints.make_checkpoint(folder, "qwen3")
    return vocabulary.add_tokenizer(folder)


def engine(folder: Path, ranks: int = 2, **options: Any) -> LLM:
    common = {"dtype": "float32", "max_model_len": 256, "threads": 1, "tensor_parallel_size": ranks}
    return LLM(str(folder), **common | options)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with engine(folder, 1) as llm:
        yield llm


def tokens(llm: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def tier(llm: LLM, name: str) -> TierSnapshot:
    connector = llm._engine.scheduler.connector
    assert connector is not None
    return next(tier for tier in connector.tiers() if tier.name == name)


def blocks_of_ranks(path: Path) -> list[frozenset[Path]]:
    """The files that each rank has written, by rank."""
    return [
        frozenset(file.relative_to(rank) for file in rank.rglob("*.*") if file.name[0] != ".")
        for rank in sorted(path.iterdir())
    ]


def sleep_in_between(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    """The engine sleeps and wakes up while it generates."""
    inline = llm._engine
    scheduler, run = inline.scheduler, inline.run

    def run_with_sleep(*, until: Callable[[], bool] = lambda: False) -> None:
        run(until=partial(lambda step: scheduler.step >= step, scheduler.step + 9))
        inline.post("core", Sleep())
        run()
        assert scheduler.is_paused and scheduler.num_waiting == len(PROMPTS)
        inline.post("core", Wake())
        run(until=until)

    patch.setattr(inline, "run", run_with_sleep)


def test_tiers_of_kv_in_deterministic_mode_and_across_a_sleep(
    alone: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the KV of each block is on each rank, in each tier."""
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    expected, others = tokens(alone, GREEDY), make_prompts(3, *[60] * 12)
    disk = f"disk,path={tmp_path},size=4M"
    flags: dict[str, Any] = {"kv_cache_memory": "64K", "deterministic": True}
    with engine(folder, kv_connector=["host,size=2M", disk], **flags) as llm:
        assert tokens(llm, GREEDY) == expected
        tokens(llm, GREEDY, others)  # they take the memory of the KV
        assert tokens(llm, GREEDY) == expected
        assert tier(llm, "host").num_hit_tokens > 0
        with pytest.MonkeyPatch.context() as patch:
            sleep_in_between(llm, patch)
            assert tokens(llm, SEEDED) == tokens(alone, SEEDED)
        scheduler = llm._engine.scheduler
        assert scheduler.pool.num_free == scheduler.pool.num_pages
        runner = llm._engine._worker._runner
        assert runner is not None and runner._connector is not None
        wait_until_written(runner._connector)
        until(lambda: len({*blocks_of_ranks(tmp_path)}) == 1, "the other rank has written the same", SLOW_DISK_S)
    first, second = blocks_of_ranks(tmp_path)
    assert first == second and len(first) > 8
    for damaged in (tmp_path / "rank-1-of-2").rglob("*.1"):  # every second block of a prompt
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with engine(folder, kv_connector=[disk], **flags) as llm:
        assert tokens(llm, GREEDY) == expected
        found = tier(llm, "disk")
        assert found.num_hit_tokens > 0 and found.num_failed > 0  # of what the other rank could not read


@needs_redis
def test_a_redis_server_has_the_part_of_each_rank(alone: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    expected = tokens(alone, GREEDY)
    with redis_server() as server:
        spec = [f"redis,url={server.url},size=8M,timeout_ms=20000,fetch_timeout_ms=20000"]
        for is_second in (False, True):
            with engine(folder, kv_connector=spec) as llm:
                assert tokens(llm, GREEDY) == expected
                assert (tier(llm, "redis").num_hit_tokens > 0) is is_second
        ranks = [server.names(f"*:{rank}-of-2:*") for rank in range(2)]
        assert len(ranks[0]) == len(ranks[1]) > 8
        for name in ranks[1][::2]:
            server.call("SETRANGE", name, 100, b"another")
        with engine(folder, kv_connector=spec) as llm:
            assert tokens(llm, GREEDY) == expected
            assert tier(llm, "redis").num_failed > 0


def test_a_folder_that_engines_share_and_draft_tokens(
    alone: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    options: dict[str, Any] = {"kv_connector": [f"shared,path={tmp_path},size=2M"], "speculative": "ngram,tokens=3"}
    for is_second in (False, True):
        with engine(folder, **options) as llm:
            for params in (FEW, GREEDY):
                assert tokens(llm, params) == tokens(alone, params)
            counters = llm._engine.scheduler.counters
            assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
            assert (tier(llm, "shared").num_hit_tokens > 0) is is_second


@pytest.mark.parametrize("lost", ["nothing", "a rank of the peer"])
def test_kv_of_another_engine(lost: str, alone: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r of one engine loads from rank r of the other; what one of them cannot get is computed on both."""
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    with tempfile.TemporaryDirectory(prefix="pw-") as sockets:  # they need short paths
        limits = "timeout_ms=500,fetch_timeout_ms=2000"
        if lost == "nothing":
            limits = "timeout_ms=20000,wait_ms=20000,fetch_timeout_ms=60000"
        asks = f"p2p,peer={sockets}/kv,{limits}"
        serves = engine(folder, kv_connector=[f"p2p,serve={sockets}/kv,size=4M"])
        with engine(folder, kv_connector=[asks], max_num_seqs=1) as llm:
            with serves:
                tokens(serves, GREEDY)
                if lost != "nothing":
                    ranks = serves._engine._ranks
                    assert ranks is not None
                    ranks._processes["worker-1"].kill()
                    ranks._processes["worker-1"].wait()
                assert tokens(llm, GREEDY) == tokens(alone, GREEDY)
                found = tier(llm, "p2p")
            if lost == "nothing":
                assert found.num_hit_tokens == sum((len(ids) - 1) // 16 * 16 for ids in PROMPTS)
                assert not found.num_failed
            else:
                assert not found.num_hit_tokens, "what one rank cannot say it has, none loads"
            scheduler = llm._engine.scheduler
            assert scheduler.pool.num_free == scheduler.pool.num_pages


@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}]
)
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_kv_of_several_groups_of_another_engine(
    kind: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of a stage may have no layer of a group. The other engine asks while the first one computes, and again
    when it has ended."""
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    checkpoints.make_checkpoint(tmp_path, kind)
    folder = vocabulary.add_tokenizer(tmp_path)
    prompts = make_prompts(5, 90, 200, 170)
    with engine(folder, 1) as llm:
        expected = tokens(llm, GREEDY, prompts)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with tempfile.TemporaryDirectory(prefix="pw-") as sockets:  # they need short paths
        asks = f"p2p,peer={sockets}/kv,timeout_ms=20000,wait_ms=20000,fetch_timeout_ms=20000"
        with (
            engine(
                folder, kv_connector=[f"p2p,serve={sockets}/kv,size=32M"], max_num_batched_tokens=64, **sizes
            ) as llm,
            engine(folder, kv_connector=[asks], max_num_seqs=2, **sizes) as other,
        ):
            prefill = threading.Thread(target=lambda: tokens(llm, one, prompts))
            prefill.start()
            assert tokens(other, GREEDY, prompts) == expected
            prefill.join()
            assert not tier(other, "p2p").num_failed
            other._engine.scheduler.empty()  # it finds nothing on its device
            assert tokens(other, GREEDY, prompts) == expected
            found = tier(other, "p2p")
            assert found.num_hit_tokens >= sum((len(ids) - 1) // 16 * 16 for ids in prompts) and not found.num_failed


@pytest.mark.parametrize("short", ["worker", "worker-1"])
def test_a_rank_without_memory_changes_no_token(short: str, folder: Path) -> None:
    """Both ranks give the step up, whichever of them lacks memory, and an extension runs on both of them."""
    with engine(folder, 1, extension="short_memory:ShortMemory,every=1000000000") as llm:
        expected = tokens(llm, SEEDED)
    with engine(folder, extension=f"short_memory:ShortMemory,every=7,where={short}") as llm:
        ShortMemory.calls = 0
        for _ in range(2):
            assert tokens(llm, SEEDED) == expected
        assert ShortMemory.calls > 100
        scheduler = llm._engine.scheduler
        assert scheduler.counters.num_out_of_memory > 3
        assert scheduler.pool.num_free == scheduler.pool.num_pages


def test_a_rank_that_cannot_start_or_ends_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rank-1-of-2").write_text("not a folder")
    with pytest.raises(ConfigError, match="path="):
        engine(folder, kv_connector=[f"disk,path={tmp_path},size=2M"])
    with engine(folder) as llm:
        ranks = llm._engine._ranks
        assert ranks is not None
        ranks._processes["worker-1"].kill()
        with pytest.raises(StartError, match="worker-1 has ended with code -9"):
            tokens(llm, GREEDY)


def test_what_llm_cannot_do_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="LLM has stages of one rank each"):
        engine(folder, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="LLM has no KV domains"):
        engine(folder, kv_domains=2)
