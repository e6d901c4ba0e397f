"""Tokens do not depend on the source of the KV: shared, copied, swapped, read from a disk, fetched from another
instance, or computed again because the stored KV is damaged.

The whole engine except HTTP and sockets, on a tiny random checkpoint in float32, against transformers' `generate`. The
engine loads or computes depending on the measured costs of both. Tests that require hits of a tier use `always_loads`.
"""

import importlib
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import checkpoints
import pytest
import vocabulary
from redis_server import needs_redis, redis_server

from pagewire.config.flags import make_config
from pagewire.ipc.messages import (
    Chunk,
    Failed,
    IdsPrompt,
    Limits,
    Sampling,
    Submit,
    TextSpec,
    TierSnapshot,
    bytes_to_ids,
    ids_to_bytes,
)
from pagewire.procs.inline import Inline
from pagewire.procs.prepare import prepare

pytestmark = pytest.mark.slow

MAX_TOKENS = 20
MAX_LEN = 512
BLOCK_BYTES = 12_288  # of the checkpoint below: 3 layers, 2 key heads of 16, 16 positions, float32
GREEDY = Sampling(temperature=0)
EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


@dataclass
class Case:
    """A checkpoint, its prompts, and the outputs of transformers."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def make_prompts(rng: random.Random, num: int) -> list[list[int]]:
    """Prompts of 1 to 300 tokens. Half of them share a prefix with another."""
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 300] + [rng.randint(1, 160) for _ in range(num - 11)]
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)] for n in lengths]
    for i in range(0, num, 2):
        other = prompts[rng.randrange(num)]
        prompts[i] = (other[: rng.randint(0, len(other))] + prompts[i])[: max(1, lengths[i])]
    return prompts


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("llama")
    checkpoints.make_checkpoint(folder, "llama")
    vocabulary.add_tokenizer(folder)
    prompts = make_prompts(random.Random(11), 128)
    return Case(folder, prompts, checkpoints.reference_greedy(folder, prompts, MAX_TOKENS))


@dataclass
class Engine:
    """All actors in this process. The caller takes the part of the API."""

    folder: Path
    flags: dict[str, object]
    outputs: dict[int, list[int]] = field(default_factory=dict)  # rid → its ids
    num_submitted: int = 0

    def __post_init__(self) -> None:
        options = {"dtype": "float32", "max_model_len": MAX_LEN, "threads": 1, **self.flags}
        config = prepare(make_config(model=str(self.folder), **options))
        self.inline = Inline(config, on_chunk=self._on_chunk, on_failed=self._on_failed)

    def run(
        self,
        prompts: Sequence[list[int]],
        samplings: Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        priorities: Sequence[int] = (),
        tenants: Sequence[str] = (),
    ) -> list[list[int]]:
        """The outputs; the choices of instance prompt are adjacent."""
        first = self.num_submitted
        for i, prompt in enumerate(prompts):
            submit = Submit(
                first + i * n,
                n,
                IdsPrompt(ids_to_bytes(prompt)),
                samplings[i] if samplings else GREEDY,
                Limits(max_tokens=MAX_TOKENS, ignore_eos=True),
                TextSpec(detokenize=False),
                priorities[i] if priorities else 0,
                tenant=tenants[i] if tenants else "",
            )
            self.inline.post("tokenizer", submit)
        self.num_submitted += n * len(prompts)
        self.inline.run()
        assert self.inline.scheduler.pool.num_held == 0
        return [self.outputs[rid] for rid in range(first, self.num_submitted)]

    def tier(self, name: str) -> TierSnapshot:
        connector = self.inline.scheduler.connector
        assert connector is not None
        return next(tier for tier in connector.tiers() if tier.name == name)

    def _on_chunk(self, chunk: Chunk) -> None:
        self.outputs.setdefault(chunk.rid, []).extend(bytes_to_ids(chunk.ids))

    def _on_failed(self, failed: Failed) -> None:
        raise AssertionError(failed)


@pytest.fixture
def engine(case: Case) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(**flags: object) -> Engine:
        started.append(Engine(case.folder, flags))
        return started[-1]

    yield start
    for instance in started:
        instance.inline.close()


@pytest.fixture
def always_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine never trusts its measured costs, and without them it loads whatever is stored. On a busy machine
    computing may be measured to be cheaper."""
    monkeypatch.setattr("pagewire.engine.core.cost._MIN_OBSERVED", sys.maxsize)


def check(case: Case, outputs: list[list[int]], prompts: range = range(128)) -> None:
    for i, output in zip(prompts, outputs, strict=True):
        assert output == case.expected[i], f"prompt {i} of {len(case.prompts[i])} tokens"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_every_policy_gives_the_reference_outputs(policy: str, case: Case, engine: Callable[..., Engine]) -> None:
    served = engine(scheduling_policy=policy, kv_cache_memory=60 * BLOCK_BYTES, pipeline_depth=2)
    rng = random.Random(policy)
    priorities = [rng.randrange(3) for _ in case.prompts]
    tenants = [rng.choice("abc") for _ in case.prompts]
    check(case, served.run(case.prompts, priorities=priorities, tenants=tenants))
    assert served.inline.scheduler.counters.num_preemptions > 0
    assert served.inline.scheduler.counters.num_cached_tokens > 0


@pytest.mark.parametrize("blocks", [60, 4000])
def test_choices_share_their_prompt(blocks: int, case: Case, engine: Callable[..., Engine]) -> None:
    served = engine(kv_cache_memory=blocks * BLOCK_BYTES, pipeline_depth=2)
    outputs = served.run(case.prompts[:40], n=4)
    for i in range(40):
        assert outputs[4 * i : 4 * i + 4] == [case.expected[i]] * 4, f"prompt {i} of {len(case.prompts[i])} tokens"
    if blocks == 4000:
        shared = sum(3 * (len(prompt) - 1) for prompt in case.prompts[:40])
        # Full blocks are shared, and the last partial block is copied.
        assert served.inline.scheduler.counters.num_cached_tokens >= shared


def test_each_choice_is_sampled_with_its_own_seed(case: Case, engine: Callable[..., Engine]) -> None:
    served = engine(pipeline_depth=2)
    prompts = case.prompts[8:24]
    samplings = [Sampling(temperature=1.5, seed=100 * i) for i in range(16)]
    outputs = served.run(prompts, samplings, n=4)
    single = [
        served.run([prompt], [Sampling(temperature=1.5, seed=100 * i + choice)])[0]
        for i, prompt in enumerate(prompts)
        for choice in range(4)
    ]
    assert outputs == single
    assert len({tuple(output) for output in outputs}) > 60, "the choices differ"


def test_seeded_sampling_does_not_depend_on_the_batch(case: Case, engine: Callable[..., Engine]) -> None:
    prompts = case.prompts[:64]
    samplings = [
        Sampling(temperature=0.5 + i % 3, seed=i, top_p=0.9 if i % 2 else 1.0, frequency_penalty=0.3 * (i % 4))
        for i in range(64)
    ]
    together = engine(pipeline_depth=2, max_num_batched_tokens=256).run(prompts, samplings)
    alone = engine(pipeline_depth=1, enable_prefix_caching=False)
    assert [alone.run([prompt], [sampling])[0] for prompt, sampling in zip(prompts, samplings, strict=True)] == together


@pytest.mark.usefixtures("always_loads")
@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_preempted_requests_swap_to_host_memory(eviction: str, case: Case, engine: Callable[..., Engine]) -> None:
    """There are so few blocks that requests are preempted. Their KV is found in host memory."""
    served = engine(
        kv_cache_memory=60 * BLOCK_BYTES, kv_connector=(f"host,size=16M,eviction={eviction}",), pipeline_depth=2
    )
    check(case, served.run(case.prompts))
    check(case, served.run(case.prompts))
    host = served.tier("host")
    assert served.inline.scheduler.counters.num_preemptions > 0
    assert host.num_stored > 0 and host.num_hit_tokens > 0 and host.num_failed == 0


@pytest.mark.usefixtures("always_loads")
def test_kv_on_disk_is_used_by_the_next_engine(case: Case, engine: Callable[..., Engine], tmp_path: Path) -> None:
    spec = (f"disk,path={tmp_path},size=64M",)
    first = engine(kv_connector=spec, pipeline_depth=2)
    check(case, first.run(case.prompts))
    first.inline.close()
    assert first.tier("disk").num_stored > 0
    second = engine(kv_connector=spec, pipeline_depth=2)
    check(case, second.run(case.prompts))
    disk = second.tier("disk")
    assert disk.num_hit_tokens > 0 and disk.num_failed == 0


@pytest.mark.usefixtures("always_loads", "writes_all")
def test_damaged_blocks_are_computed_again(case: Case, engine: Callable[..., Engine], tmp_path: Path) -> None:
    spec = (f"disk,path={tmp_path},size=64M",)
    first = engine(kv_connector=spec)
    check(case, first.run(case.prompts[:40]), range(40))
    first.inline.close()
    rng = random.Random(7)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > BLOCK_BYTES)
    assert len(files) > 50
    for path in files[::3]:
        data = bytearray(path.read_bytes())
        kind = rng.randrange(3)
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data = data[: rng.randrange(len(data))]
        else:
            data = bytearray(rng.choice(files[1::3]).read_bytes())  # the undamaged content of another block
        path.write_bytes(data)
    second = engine(kv_connector=spec, pipeline_depth=2)
    check(case, second.run(case.prompts[:40]), range(40))
    disk = second.tier("disk")
    assert disk.num_hit_tokens > 0 and disk.num_failed > 0


@pytest.mark.usefixtures("always_loads")
def test_a_host_tier_in_front_of_a_shared_tier(case: Case, engine: Callable[..., Engine], tmp_path: Path) -> None:
    spec = (f"host,size={100 * BLOCK_BYTES}", f"shared,path={tmp_path},size=64M")
    first = engine(kv_cache_memory=60 * BLOCK_BYTES, kv_connector=spec, pipeline_depth=2)
    check(case, first.run(case.prompts))
    # The first engine is still open.
    second = engine(kv_cache_memory=60 * BLOCK_BYTES, kv_connector=spec, pipeline_depth=2)
    check(case, second.run(case.prompts))
    assert second.tier("shared").num_hit_tokens > 0
    assert second.tier("host").num_hit_tokens > 0


@pytest.fixture
def socket_path() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="pw-")  # sockets need short paths
    yield f"{folder}/kv"
    shutil.rmtree(folder)


@pytest.mark.usefixtures("always_loads")
def test_prefill_and_decode_on_two_instances(case: Case, engine: Callable[..., Engine], socket_path: str) -> None:
    """A proxy sends every prompt to the prefill instance first, and then to the decode instance."""
    prefill = engine(kv_connector=(f"p2p,serve={socket_path},size=64M",))
    decode = engine(kv_connector=(f"p2p,peer={socket_path},timeout_ms=10000,fetch_timeout_ms=60000",), pipeline_depth=2)
    check(case, prefill.run(case.prompts))
    check(case, decode.run(case.prompts))
    tier = decode.tier("p2p")
    assert tier.num_hit_tokens > 0 and tier.num_failed == 0


def test_decode_goes_on_when_its_peer_closes(case: Case, engine: Callable[..., Engine], socket_path: str) -> None:
    prefill = engine(kv_connector=(f"p2p,serve={socket_path},size=64M",))
    decode = engine(kv_connector=(f"p2p,peer={socket_path},timeout_ms=50,fetch_timeout_ms=300",), pipeline_depth=2)
    check(case, prefill.run(case.prompts[:64]), range(64))
    check(case, decode.run(case.prompts[:20]), range(20))
    prefill.inline.close()
    check(case, decode.run(case.prompts[20:64]), range(20, 64))


@needs_redis
@pytest.mark.usefixtures("always_loads")
def test_engines_that_share_a_redis_server_outlive_it(case: Case, engine: Callable[..., Engine]) -> None:
    with redis_server() as server:
        spec = (f"redis,url={server.url},size=64M,timeout_ms=20000,fetch_timeout_ms=20000",)
        small = {"kv_cache_memory": 60 * BLOCK_BYTES, "kv_connector": spec, "pipeline_depth": 2}
        check(case, engine(**small).run(case.prompts[:64]), range(64))
        second = engine(**small)
        check(case, second.run(case.prompts[:40]), range(40))
        tier = second.tier("redis")
        assert tier.num_hit_tokens > 0 and tier.num_failed == 0
        damaged = server.names()[::3]
        for name in damaged:
            server.call("SETRANGE", name, 200, b"another")
        check(case, second.run(case.prompts[:64]), range(64))
        assert second.tier("redis").num_failed > 0
        server.kill()
        check(case, second.run(case.prompts[:64]), range(64))


@pytest.mark.usefixtures("always_loads")
def test_the_example_connector(case: Case, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    served = engine(
        kv_cache_memory=60 * BLOCK_BYTES, kv_connector=("dict_connector:DictConnector,blocks=500",), pipeline_depth=2
    )
    check(case, served.run(case.prompts))
    check(case, served.run(case.prompts))
    assert served.tier("dict").num_hit_tokens > 0
    del sys.modules["dict_connector"]


@pytest.mark.usefixtures("always_loads")
def test_a_connector_with_vllms_names_keeps_kv_in_a_folder(
    case: Case, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = (f"v1_folder:FolderConnector,shared_storage_path={tmp_path}",)
    small = {"kv_cache_memory": 60 * BLOCK_BYTES, "kv_connector": spec, "pipeline_depth": 2}
    check(case, engine(**small).run(case.prompts[:48]), range(48))
    second = engine(**small)
    check(case, second.run(case.prompts[:48]), range(48))
    tier = second.tier("FolderConnector")
    assert tier.num_hit_tokens > 0 and tier.num_failed == 0
    del sys.modules["v1_folder"]


@pytest.mark.usefixtures("always_loads")
def test_a_connector_with_vllms_names_streams_kv(
    case: Case, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, socket_path: str
) -> None:
    """The store goes away in between."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    v1_stream = importlib.import_module("v1_stream")
    small = {
        "kv_cache_memory": 60 * BLOCK_BYTES,
        "kv_connector": (f"v1_stream:StreamConnector,store={socket_path}",),
        "pipeline_depth": 2,
    }
    with v1_stream.Store(socket_path) as store:
        Thread(target=store.serve_forever, daemon=True).start()
        first, second = engine(**small), engine(**small)
        check(case, first.run(case.prompts[:48]), range(48))
        check(case, second.run(case.prompts[:48]), range(48))
        tier = second.tier("StreamConnector")
        assert tier.num_hit_tokens > 0 and tier.num_failed == 0
        damaged = list(store.blocks)[::3]
        for name in damaged:
            del store.blocks[name]
        check(case, second.run(case.prompts[:16]), range(16))
        store.shutdown()
    check(case, second.run(case.prompts[40:56]), range(40, 56))
    del sys.modules["v1_stream"]
