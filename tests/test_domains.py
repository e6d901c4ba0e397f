"""KV domains (`--kv-domains`) give the tokens of one rank: requests are divided among domains, and each step is one of
all domains, whichever of them have tokens."""

import random
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import checkpoints
import families
import numpy as np
import pytest
from domain_ranks import DomainRanks
from engine_loop import Loop
from expert_moves import move_experts
from fakes import enqueue
from msgspec.structs import replace
from redis_server import needs_redis, redis_server
from waiting import SLOW_DISK_S, until

from pagewire.engine.core.loads import Loads
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Enqueue, Sampling, bytes_to_ids

pytestmark = pytest.mark.slow

DEALT: dict[str, Any] = {"enable_expert_parallel": True}
TO_ALL: dict[str, Any] = {**DEALT, "all2all_backend": "allgather_reducescatter"}  # each rank gets all tokens


def request(rid: int, prompt: list[int], max_tokens: int = 10) -> Enqueue:
    """Greedy if its number is even."""
    sampling = Sampling(temperature=0.0) if rid % 2 == 0 else Sampling(temperature=1.0, seed=rid)
    return replace(enqueue(rid, prompt, max_tokens=max_tokens, ignore_eos=True), sampling=sampling)


def wave(first: int, *lengths: int) -> list[Enqueue]:
    rng = random.Random(first)
    prompts = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in lengths]
    return [request(first + i, prompt, max_tokens=4 + 3 * i) for i, prompt in enumerate(prompts)]


WAVES = (wave(0, 1, 7, 40, 18, 90, 33), wave(100, 5), wave(200, 60, 2, 17))


def expected_of(folder: Path, **flags: Any) -> dict[int, Any]:
    return Loop(folder, **flags).serve([each for wave in WAVES for each in wave])


@pytest.mark.parametrize(
    ("kind", "num", "flags"),
    [
        ("qwen3_moe", 2, DEALT),
        ("qwen3_moe", 2, {"cpu_kernels": "torch", **DEALT}),
        ("qwen3_moe", 2, TO_ALL),
        ("qwen3", 2, {"max_num_batched_tokens": 32}),
        *(pytest.param("qwen3_moe", 4, flags, marks=pytest.mark.long) for flags in ({}, DEALT)),
    ],
)
def test_domains_compute_the_tokens_of_one_rank(kind: str, num: int, flags: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoints.make_checkpoint(tmp_path, kind)
    flags = {"dtype": "float32", **flags}
    alone = {name: value for name, value in flags.items() if name not in TO_ALL}
    ranks = DomainRanks(folder, num, **flags)
    assert ranks.serve(*WAVES) == expected_of(folder, **alone)
    assert all(len(domains) == 1 for domains in ranks.domain_of.values())
    assert set.union(*ranks.domain_of.values()) == set(range(num)), "every domain had requests"
    assert all(ranks.num_idle[domain] for domain in range(1, num)), "the second wave has one request"


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("deepseek_v3", DEALT),
        *(pytest.param(each, DEALT, marks=pytest.mark.long) for each in ("llama4_text", "jamba", "longcat_flash")),
        pytest.param("deepseek_v3", TO_ALL, marks=pytest.mark.long),
    ],
)
def test_families(family: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Latent attention with shared experts; weights of the input, or a router that reads the stream; recurrent layers;
    experts that return their input."""
    folder = families.make_family(tmp_path, family)
    flags: dict[str, Any] = {"dtype": "float32"}
    assert DomainRanks(folder, 2, **flags, **how).serve(*WAVES) == expected_of(folder, **flags)


def again(wave: list[Enqueue], first: int) -> list[Enqueue]:
    """The same prompts in requests of other numbers, as many later."""
    return [replace(each, rid=each.rid + first) for each in wave]


GROWING = [request(each.rid, bytes_to_ids(each.prompt_ids).tolist(), 60) for each in wave(0, *range(17, 33, 2))]
SWAPPED = (GROWING, wave(100, *[100] * 6), again(GROWING, 1000))


@pytest.mark.parametrize(
    ("family", "num_pages", "tiers"),
    [
        ("deepseek_v3", 14, ("host,size=2M",)),
        ("deepseek_v3", 14, ("host,size=64K", "disk,path={},size=2M")),
        ("gemma3", 26, ("host,size=4M",)),
        pytest.param("qwen3_5", 22, ("host,size=4M",), marks=pytest.mark.long),
        pytest.param("deepseek_v3", 14, ("shared,path={},size=2M",), marks=pytest.mark.long),
    ],
)
def test_tiers_behind_domains(
    family: str, num_pages: int, tiers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are preempted, other prompts take their memory, and they come again."""
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    folder = (families.make_family if family == "deepseek_v3" else checkpoints.make_checkpoint)(tmp_path, family)
    flags: dict[str, Any] = {"dtype": "float32"}
    expected = Loop(folder, **flags).serve([each for wave in SWAPPED for each in wave])
    specs = tuple(each.format(tmp_path / "kv") for each in tiers)
    ranks = DomainRanks(folder, 2, num_pages=num_pages, kv_connector=specs, **flags)
    assert ranks.serve(*SWAPPED) == expected
    assert ranks.core.counters.num_preemptions > 0
    for own in (scheduler.tiers() for scheduler in ranks.core.schedulers):
        assert all(tier.num_hit_tokens > 0 and not tier.num_failed for tier in own), own
    assert [tier.name for tier in ranks.core.tiers()] == [spec.partition(",")[0] for spec in tiers]


@pytest.mark.parametrize("name", ["shared", pytest.param("redis", marks=needs_redis)])
def test_a_domain_reads_what_another_one_has_shared(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the next engine; keys and folder say nothing of the domain that has computed a block."""
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    folder = families.make_family(tmp_path, "deepseek_v3")
    (first,) = wave(0, 90)
    busy, second = request(50, [7] * 150), replace(first, rid=51)
    expected = Loop(folder, dtype="float32").serve([first, busy, second])
    num_saved = [0, 5, 14, 14]  # blocks that ended requests had filled before each wave
    with redis_server() if name == "redis" else nullcontext() as server:
        where = (
            f"path={tmp_path / 'kv'}" if server is None else f"url={server.url},timeout_ms=60000,fetch_timeout_ms=60000"
        )

        def names() -> list[str]:
            if server is not None:
                return list(map(str, cast(list[bytes], server.call("KEYS", "*.[0-9]*"))))
            return [str(path) for path in (tmp_path / "kv").rglob("*.[0-9]*") if path.name[0] != "."]

        def wait_for_blocks() -> None:
            num = num_saved.pop(0)
            until(lambda: len(names()) == num, f"{num} blocks are saved", SLOW_DISK_S)

        for is_again in (False, True):
            connector = (f"{name},{where},size=2M",)
            ranks = DomainRanks(folder, 2, before_wave=wait_for_blocks, dtype="float32", kv_connector=connector)
            assert ranks.serve([first], [busy, second]) == expected
            assert ranks.domain_of == {0: {0}, 50: {0}, 51: {1}}
            nums = [tier.num_hit_tokens for scheduler in ranks.core.schedulers for tier in scheduler.tiers()]
            assert nums == [80 + 144 if is_again else 0, 80]
            (tier,) = ranks.core.tiers()
            assert 0 < tier.num_blocks <= len(names()) and tier.is_common
        assert not any("-of-2" in each for each in names())


def test_each_domain_has_an_extension_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One whose attention reads a part of the blocks, as many as the core half says of the rows of a plan."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "docs" / "examples"))
    request.addfinalizer(lambda: [sys.modules.pop(name, None) for name in ("topk_blocks", "topk_attention")])
    folder = checkpoints.make_checkpoint(tmp_path, "qwen3")
    flags: dict[str, Any] = {"dtype": "float32", "extension": "topk_blocks:TopkBlocks,share=0.01,least=2"}
    found = DomainRanks(folder, 2, **flags).serve(*WAVES)
    assert found == expected_of(folder, **flags)
    assert found != expected_of(folder, dtype="float32")


@pytest.mark.parametrize("how", [DEALT, pytest.param(TO_ALL, marks=pytest.mark.long)])
def test_replicas_that_move_between_domains_change_no_token(how: dict[str, Any], tmp_path: Path) -> None:
    """Biases of experts move with them."""
    folder = families.make_family(tmp_path, "gpt_oss")
    flags: dict[str, Any] = {"dtype": "float32"}
    moves = {3: ((0, 1, 3), (2, 3, 0)), 6: ((0, 1, -1), (2, 3, 1))}
    loads: Counter[int] = Counter()

    def move(runner: Runner, step: int) -> None:
        if step in moves:
            for layer in runner.take_expert_load():
                assert move_experts(runner, layer, moves[step])
        if step == 12:
            load = next(iter(runner.take_expert_load().values()))
            loads[len(loads)] = np.frombuffer(load, np.int64)[1]

    found = DomainRanks(folder, 2, between=move, expert_replicas=1, **flags, **how).serve(*WAVES)
    assert found == expected_of(folder, **flags)
    assert len(loads) == 2 and all(loads.values()), "both ranks have computed expert 1 since the last move"
