"""KV domains on the GPU's steps sample the tokens of one rank. The kernels run in Triton's interpreter; the ranks are
threads, each one plan ahead of its results."""

import random
from pathlib import Path
from typing import Any

import checkpoints
import families
import numpy as np
import pytest
import torch
from domain_ranks import DomainRanks
from engine_loop import Loop
from expert_moves import move_experts
from fakes import enqueue
from family_kinds import FEW_EXPERTS, LATENT_ON_GPU, make_kind
from msgspec.structs import replace

from pagewire.engine.core.loads import Loads
from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.gpu import shapes
from pagewire.engine.gpu.device_steps import DeviceSteps
from pagewire.engine.gpu.exchange import ExpertExchange
from pagewire.engine.gpu.packet import Packet
from pagewire.engine.gpu.shapes import StepShape
from pagewire.engine.gpu.state import RowState
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import Enqueue, Sampling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted")
SMALL: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 64}
DEALT: dict[str, Any] = {"enable_expert_parallel": True}
TO_ALL: dict[str, Any] = {**DEALT, "all2all_backend": "allgather_reducescatter"}
ZERO: dict[str, Any] = {
    "num_layers": 1, "num_hidden_layers": 2, "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 48, "n_routed_experts": 4,
}  # fmt: skip


def make(folder: Path, name: str) -> Path:
    if name == "latents":  # a dense layer, then one of experts with a shared one
        return make_kind(folder, "DeepseekV3Config", LATENT_ON_GPU | FEW_EXPERTS | {"num_hidden_layers": 2})
    if name == "zero experts":
        return make_kind(folder, "LongcatFlashConfig", LATENT_ON_GPU | ZERO)
    if name in ("qwen3", "qwen3_moe"):
        return checkpoints.make_checkpoint(folder, name, num_hidden_layers=1)
    return families.make_family(folder, name)


def wave(first: int, *lengths: int) -> list[Enqueue]:
    """Greedy if its number is even."""
    rng = random.Random(first)
    found = []
    for rid, length in enumerate(lengths, first):
        prompt = [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)]
        sampling = Sampling(temperature=0.0) if rid % 2 == 0 else Sampling(temperature=1.0, seed=rid)
        found.append(replace(enqueue(rid, prompt, max_tokens=2, ignore_eos=True), sampling=sampling))
    return found


WAVES = (wave(0, 3, 34, 7), wave(100, 4))  # a prompt in two chunks beside decode rows; one request for two domains


class Ranks(DomainRanks):
    """Notes the shapes that each rank runs."""

    def __init__(self, folder: Path, num_domains: int, **flags: Any) -> None:
        super().__init__(folder, num_domains, in_triton=True, between=self._watch, **SMALL, **flags)
        self.shapes: dict[int, list[StepShape]] = {}
        self.moves: dict[int, tuple[tuple[int, ...], ...]] = {}  # step → the experts that the ranks have from then on
        self.loads: dict[int, int] = {}  # rank → tokens of its replicas since the last move

    def _watch(self, runner: Runner, step: int) -> None:
        steps = runner._steps
        assert isinstance(steps, DeviceSteps), runner.notes
        for layer, load in (runner.take_expert_load() if self.moves else {}).items():
            dealt = np.array_split(np.frombuffer(load, np.int64), 2)
            self.loads[runner._rank] = self.loads.get(runner._rank, 0) + int(dealt[1 - runner._rank].sum())
            if step in self.moves:
                self.loads[runner._rank] = 0
                assert move_experts(runner, layer, self.moves[step])
        if runner._rank in self.shapes:
            return
        seen = self.shapes[runner._rank] = []
        run = steps._decoder.run

        def watched(packet: Packet, state: RowState, shape: StepShape) -> None:
            seen.append(shape)
            run(packet, state, shape)

        steps._decoder.run = watched


def check(
    folder: Path, how: dict[str, Any], num: int = 2, moves: dict[int, tuple[tuple[int, ...], ...]] | None = None
) -> None:
    ranks = Ranks(folder, num, **how)
    ranks.moves = moves or {}
    alone = Loop(folder, queue=EagerQueue(torch.device("cpu")), **SMALL)
    assert ranks.serve(*WAVES) == alone.serve([each for wave in WAVES for each in wave])
    assert len(set.union(*ranks.domain_of.values())) == min(num, len(WAVES[0])), "as many as possible had requests"
    assert all(ranks.num_idle[domain] for domain in range(1, num)), "the second wave has one request"
    first, *others = ranks.shapes.values()
    assert len(others) == num - 1 and all(other == first for other in others), "NCCL exchanges equal shapes only"
    assert {shape.tile_rows > 0 for shape in first} == {True, False}
    assert len(ranks.loads) == (num if moves else 0)
    assert all(ranks.loads.values()), "each rank has used its replicas since the last move"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen3", {}),
        ("qwen3_moe", DEALT),
        ("qwen3_moe", TO_ALL),
        ("latents", DEALT),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.long),
        *(pytest.param(each, DEALT, marks=pytest.mark.long) for each in ("zero experts", "jamba")),
    ],
)
def test_domains_sample_the_tokens_of_one_rank(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    check(make(tmp_path, name), how)


@pytest.mark.parametrize(
    ("name", "num"),
    [
        ("qwen3_moe", 2),
        pytest.param("qwen3_moe", 4, marks=pytest.mark.long),
        *(pytest.param(each, 2, marks=pytest.mark.long) for each in ("zero experts", "llama4_text")),
    ],
)
def test_large_steps_send_tokens_to_the_ranks_of_their_experts(
    name: str, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of more than four tokens are large here. At times more tokens come than a rank computes at once."""
    monkeypatch.setattr(shapes, "MAX_RECORDED", 4)
    nums: list[int] = []
    send = ExpertExchange.send

    def sent(self: ExpertExchange, x: torch.Tensor, *args: torch.Tensor) -> None:
        nums.append(len(x))
        send(self, x, *args)

    monkeypatch.setattr(ExpertExchange, "send", sent)
    check(make(tmp_path, name), DEALT, num)
    assert nums and min(nums) > 4


@pytest.mark.parametrize(
    ("name", "how", "most"),
    [
        ("gpt_oss", DEALT, 32),  # biases of experts move with them
        ("qwen3_moe", DEALT, 4),  # steps of more than four tokens send them to the ranks of their experts
        pytest.param("gpt_oss", TO_ALL, 32, marks=pytest.mark.long),
        *(pytest.param("zero experts", DEALT, most, marks=pytest.mark.long) for most in (32, 4)),
    ],
)
def test_replicas_that_move_between_domains_change_no_token(
    name: str, how: dict[str, Any], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "MAX_RECORDED", most)
    folder = make(tmp_path, name)
    first, second = ((0, 1, 2, 3), (4, 5, 6, 7)) if name == "qwen3_moe" else ((0, 1), (2, 3))
    moves = {1: ((*first, second[0]), (*second, 0)), 2: ((*first, second[1]), (*second, 1))}
    check(folder, how | {"expert_replicas": 1}, moves=moves)


def test_each_domain_loads_what_its_host_tier_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other prompts take the device's memory in between. Steps that only move KV have no tokens in any domain."""
    monkeypatch.setattr(Loads, "_pays", lambda *_: True)
    folder = make(tmp_path, "qwen3")
    waves = (wave(0, 34, 35), wave(100, 50, 51), [replace(each, rid=each.rid + 1000) for each in wave(0, 34, 35)])
    alone = Loop(folder, queue=EagerQueue(torch.device("cpu")), **SMALL)
    ranks = DomainRanks(folder, 2, num_pages=4, in_triton=True, kv_connector=("host,size=1M",), **SMALL)
    assert ranks.serve(*waves) == alone.serve([each for wave in waves for each in wave])
    tiers = [tier for scheduler in ranks.core.schedulers for tier in scheduler.tiers()]
    assert [(tier.num_hit_tokens, tier.num_failed) for tier in tiers] == [(32, 0)] * 2
