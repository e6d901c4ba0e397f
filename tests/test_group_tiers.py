"""Models with several cache groups and a KV connector: tokens equal transformers' `generate`, whatever comes from host
memory, from a disk after a restart, from a shared folder or from another instance.

The whole engine except HTTP and sockets, on tiny random checkpoints in float32: windows beside full attention, and
recurrent states beside full attention.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random

import checkpoints
import pytest
import vocabulary
from redis_server import needs_redis, redis_server
from waiting import until

from pagewire import LLM, SamplingParams
from pagewire.ipc.messages import TierSnapshot

pytestmark = pytest.mark.slow

WINDOWS, HYBRIDS = ["gemma2", "gemma3"], ["qwen3_5", "lfm2"]
MAX_TOKENS = 12
BLOCK = 16


@dataclass
class Case:
    """A checkpoint, prompts with shared beginnings, and the outputs of transformers."""

    kind: str
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]

    @property
    def is_hybrid(self) -> bool:
        return self.kind in HYBRIDS


@pytest.fixture(scope="module", params=[*WINDOWS, HYBRIDS[0], pytest.param(HYBRIDS[1], marks=pytest.mark.long)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoints.make_checkpoint(folder, request.param)
    vocabulary.add_tokenizer(folder)
    rng = Random(request.param)
    stem = ids(rng, 100)
    prompts = [ids(rng, n) for n in (1, 16, 33, 90, 170)]
    prompts += [stem[: rng.choice([40, 64, 100])] + ids(rng, rng.randint(1, 60)) for _ in range(7)]
    return Case(request.param, folder, prompts, checkpoints.reference_greedy(folder, prompts, MAX_TOKENS))


def ids(rng: Random, num: int) -> list[int]:
    return [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)]


Load = Callable[..., LLM]


@pytest.fixture
def load(case: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Flags → an engine, which loads whatever is stored: on a busy machine computing may be measured to be cheaper.
    With `num_pages`, so much cache memory, for which another engine must have been started."""
    monkeypatch.setattr("pagewire.engine.core.cost._MIN_OBSERVED", sys.maxsize)
    opened: list[LLM] = []

    def start(num_pages: int = 0, **flags: object) -> LLM:
        if num_pages:
            flags["kv_cache_memory"] = num_pages * page_bytes(opened[0])
        opened.append(LLM(str(case.folder), **{"dtype": "float32", "max_model_len": 256, "threads": 1, **flags}))
        assert len(opened[-1]._engine.scheduler.pool.groups.shapes) == 2
        return opened[-1]

    yield start
    for llm in opened:
        llm.close()


def page_bytes(llm: LLM) -> int:
    runner = llm._engine._worker._runner
    assert runner is not None
    return runner.block_bytes


def tokens(llm: LLM, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    asked = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, asked, use_tqdm=False)]
    pool = llm._engine.scheduler.pool
    assert pool.num_held == 0 and pool.num_free == pool.num_pages
    return outputs


def num_cached(llm: LLM, prompt: list[int]) -> int:
    asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    (output,) = llm.generate([prompt], asked, use_tqdm=False)
    return output.num_cached_tokens


def tier(llm: LLM, name: str) -> TierSnapshot:
    connector = llm._engine.scheduler.connector
    assert connector is not None
    return next(tier for tier in connector.tiers() if tier.name == name)


def evict_all(llm: LLM) -> None:
    """Other prompts take all of the device's memory."""
    pool, rng = llm._engine.scheduler.pool, Random(5)
    for _ in range(12):
        tokens(llm, [ids(rng, 200)], max_tokens=1)
    assert pool.num_free == pool.num_pages


def test_rows_that_are_preempted_swap_to_host_memory(case: Case, load: Load) -> None:
    rng = Random(2)
    prompts = [ids(rng, rng.randint(17, 31)) for _ in range(12)]
    expected = checkpoints.reference_greedy(case.folder, prompts, 40)
    groups = load()._engine.scheduler.pool.groups
    num_pages = 6 * (2 * groups.unit + groups.state_pages)  # six can begin, and each needs four or five blocks
    llm = load(num_pages, kv_connector=("host,size=32M",), pipeline_depth=2)
    for _ in range(2):
        assert tokens(llm, prompts, max_tokens=40) == expected
    assert llm._engine.scheduler.counters.num_preemptions > 0
    host = tier(llm, "host")
    assert host.num_stored > 0 and host.num_hit_tokens > 0 and host.num_failed == 0


def test_the_next_turn_finds_its_history_in_host_memory(case: Case, load: Load) -> None:
    """All of it that is needed: of a window its blocks, of recurrent layers the state at the very end of the turn."""
    num_pages = load()._engine.scheduler.pool.groups.num_pages(0, 256, 256, BLOCK)
    llm = load(num_pages, kv_connector=("host,size=64M",))
    prompt, expected = case.prompts[4], case.expected[4]
    assert tokens(llm, [prompt]) == [expected]
    evict_all(llm)
    before = tier(llm, "host").num_hit_tokens
    turn = [*prompt, *expected, *ids(Random(1), 20)]
    found = len(prompt) + MAX_TOKENS - 1  # all but the last token was fed
    assert num_cached(llm, turn) == (found if case.is_hybrid else found // BLOCK * BLOCK)
    assert tier(llm, "host").num_hit_tokens > before and tier(llm, "host").num_failed == 0
    evict_all(llm)
    assert tokens(llm, [turn]) == checkpoints.reference_greedy(case.folder, [turn], MAX_TOKENS)


@pytest.mark.usefixtures("writes_all")
@pytest.mark.parametrize("name", ["disk", "shared", pytest.param("redis", marks=needs_redis)])
def test_what_is_stored_is_used_by_the_next_engine(case: Case, load: Load, tmp_path: Path, name: str) -> None:
    with redis_server() if name == "redis" else nullcontext() as server:
        place = (
            "path=" + str(tmp_path) if server is None else f"url={server.url},timeout_ms=20000,fetch_timeout_ms=60000"
        )
        stored_and_used(case, load, (f"{name},{place},size=256M",), name)


def stored_and_used(case: Case, load: Load, spec: tuple[str, ...], name: str) -> None:
    first = load(kv_connector=spec, pipeline_depth=2)
    assert tokens(first, case.prompts) == case.expected
    first.close()
    second = load(kv_connector=spec, pipeline_depth=2)
    turns = [[*prompt, *output, 7, 8] for prompt, output in zip(case.prompts, case.expected, strict=True)]
    assert tokens(second, turns) == checkpoints.reference_greedy(case.folder, turns, MAX_TOKENS)
    files = tier(second, name)
    assert files.num_hit_tokens > 0 and files.num_failed == 0
    if case.is_hybrid:
        assert num_cached(second, [*turns[4][:-1], 9]) == len(turns[4]) - 3, "the state at the very end of the turn"


@pytest.mark.usefixtures("writes_all")
def test_damaged_files_are_computed_again(case: Case, load: Load, tmp_path: Path) -> None:
    spec = (f"disk,path={tmp_path},size=256M",)
    first = load(kv_connector=spec)
    assert tokens(first, case.prompts) == case.expected
    first.close()
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 100)
    for i, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[100 + i % 50] ^= 1 << i % 8
        if i % 3 == 0:
            path.write_bytes(data)
    second = load(kv_connector=spec, pipeline_depth=2)
    assert tokens(second, case.prompts) == case.expected
    assert tokens(second, case.prompts) == case.expected
    assert tier(second, "disk").num_failed > 0


@pytest.fixture
def socket_path() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="pw-")  # sockets need short paths
    yield f"{folder}/kv"
    shutil.rmtree(folder)


def test_prefill_and_decode_on_two_instances(case: Case, load: Load, socket_path: str) -> None:
    prefill = load(kv_connector=(f"p2p,serve={socket_path},size=64M",))
    decode = load(kv_connector=(f"p2p,peer={socket_path},timeout_ms=10000,fetch_timeout_ms=60000",), pipeline_depth=2)
    assert tokens(prefill, case.prompts, max_tokens=1) == [output[:1] for output in case.expected]
    until(lambda: not prefill._engine.scheduler.is_busy, "what is to be served is kept")
    assert tokens(decode, case.prompts) == case.expected
    p2p = tier(decode, "p2p")
    assert p2p.num_hit_tokens > 0 and p2p.num_failed == 0


def test_a_host_tier_in_front_of_a_disk(case: Case, load: Load, tmp_path: Path) -> None:
    plain = load()
    num_pages = plain._engine.scheduler.pool.groups.num_pages(0, 256, 256, BLOCK)
    specs = (f"host,size={8 * page_bytes(plain)}", f"disk,path={tmp_path},size=256M")
    llm = load(num_pages, kv_connector=specs, pipeline_depth=2)
    for _ in range(2):
        assert tokens(llm, case.prompts) == case.expected
    assert tier(llm, "disk").num_hit_tokens > 0 and tier(llm, "host").num_stored > 0
