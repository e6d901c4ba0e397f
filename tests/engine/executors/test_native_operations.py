"""C computes what torch computes of a program: of each operation, and of a small model of every family."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import families
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagewire.engine.attention.base import AttentionBackend, AttentionStep
from pagewire.engine.attention.kv_cache import KvCache, KvShape, StateTile, Tile
from pagewire.engine.attention.native import NativePagedAttention
from pagewire.engine.attention.torch_paged import TorchPagedAttention
from pagewire.engine.executors.native import NativeModel, in_torch
from pagewire.engine.executors.reference import Reference, ReferenceModel
from pagewire.engine.executors.vocabulary import Vocabulary
from pagewire.engine.executors.weights import Options, Packing
from pagewire.engine.models.description import (
    Alibi,
    Aside,
    Attention,
    Block,
    Branch,
    Decoder,
    Embedding,
    Head,
    LatentAttention,
    LowRank,
    Mlp,
    Moe,
    Norm,
    Part,
    Reach,
    Rope,
    Router,
    Sublayer,
    Temperature,
    Weight,
)
from pagewire.engine.models.families import describe, pages
from pagewire.engine.models.fields import Fields, NotDescribedError
from pagewire.engine.models.lower import lower
from pagewire.engine.models.pieces import matrix, vector
from pagewire.engine.models.program import Tile as ProgramTile
from pagewire.engine.models.program import Vector
from pagewire.engine.parallel.collectives import Alone
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.ops import reference_ops

pytestmark = pytest.mark.usefixtures("c_kernels")
Score = Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"]
HIDDEN, HEADS, KV_HEADS, DIM, VOCAB, TOKENS = 40, 4, 2, 16, 50, 21


def norm(name: str, size: int, kind: str = "rms", *, total: int = 0) -> Norm:
    bias = vector(name + ".bias", total or size) if kind == "layer" else None
    return Norm(size, vector(name + ".weight", total or size), bias, "layer" if kind == "layer" else "rms")


ATTENTION = Attention(
    HEADS,
    KV_HEADS,
    DIM,
    DIM,
    DIM**-0.5,
    q=matrix("q", HEADS * DIM, HIDDEN),
    k=matrix("k", KV_HEADS * DIM, HIDDEN),
    v=matrix("v", KV_HEADS * DIM, HIDDEN),
    o=matrix("o", HIDDEN, HEADS * DIM),
    rope=Rope(DIM),
)
MLP = Mlp(48, gate=matrix("gate", 48, HIDDEN), up=matrix("up", 48, HIDDEN), down=matrix("down", HIDDEN, 48), act="silu")
PLAIN = replace(MLP, gate=None)
REGIME_LIMIT = 30
LONGROPE = Rope(DIM, kind="longrope", original=REGIME_LIMIT, divisors=(1.5,) * 8, long_divisors=(3.0,) * 8)


def low_rank(name: str, rows: int, columns: int) -> LowRank:
    return LowRank(matrix(name + ".down", 6, columns), matrix(name + ".up", rows, 6))


CASES: dict[str, Sublayer] = {
    "llama": Sublayer((Branch(ATTENTION),), norm("n", HIDDEN)),
    "biases": Sublayer((Branch(replace(ATTENTION, q=matrix("q", HEADS * DIM, HIDDEN, True))),), norm("n", HIDDEN)),
    "head norms": Sublayer((Branch(replace(ATTENTION, q_norm=norm("a", DIM), k_norm=norm("b", DIM))),)),
    "norms over all heads": Sublayer(
        (Branch(replace(ATTENTION, q_norm=norm("a", HEADS * DIM), k_norm=norm("b", KV_HEADS * DIM))),)
    ),
    "norms of each head": Sublayer(
        (
            Branch(
                replace(
                    ATTENTION,
                    q_norm=norm("a", DIM, "layer", total=HEADS * DIM),
                    k_norm=norm("b", DIM, "layer", total=KV_HEADS * DIM),
                )
            ),
        )
    ),
    "norm of values": Sublayer((Branch(replace(ATTENTION, v=None, v_norm=Norm(DIM))),)),
    "norms after the rotation": Sublayer(
        (Branch(replace(ATTENTION, norm_after_rope=True, q_norm=norm("a", DIM), k_norm=norm("b", DIM))),)
    ),
    "partial rope": Sublayer((Branch(replace(ATTENTION, rope=Rope(6))),)),
    "longrope": Sublayer((Branch(replace(ATTENTION, rope=LONGROPE)),)),
    "partial longrope": Sublayer(
        (Branch(replace(ATTENTION, rope=replace(LONGROPE, dims=6, divisors=(1.5,) * 3, long_divisors=(3.0,) * 3))),)
    ),
    "no rope": Sublayer((Branch(replace(ATTENTION, rope=None, temperature=Temperature(0.1, 4, 1))),)),
    "gate": Sublayer((Branch(replace(ATTENTION, gate=matrix("g", HEADS * DIM, HIDDEN))),)),
    "clip and scales": Sublayer((Branch(replace(ATTENTION, clip=0.05, key_scale=0.5, softcap=3.0)),)),
    "window": Sublayer((Branch(replace(ATTENTION, reach=Reach("window", 5))),)),
    "chunk": Sublayer((Branch(replace(ATTENTION, reach=Reach("chunk", 8))),)),
    "sinks": Sublayer((Branch(replace(ATTENTION, sinks=Part("sinks", HEADS))),)),
    "alibi": Sublayer((Branch(replace(ATTENTION, rope=None, alibi=Alibi((0.5, 0.25, 0.125, 0.0625)))),)),
    "layer norms": Sublayer((Branch(MLP),), norm("n", HIDDEN, "layer"), norm("m", HIDDEN, "layer")),
    "after": Sublayer((Branch(MLP),), after=norm("n", HIDDEN)),
    "normed stream": Sublayer((Branch(MLP),), norm("n", HIDDEN), keep="normed", alpha=0.7, beta=1.3),
    "parallel": Sublayer((Branch(ATTENTION), Branch(MLP)), norm("n", HIDDEN)),
    "branch": Sublayer((Branch(MLP, norm("a", HIDDEN), norm("b", HIDDEN), 0.5, 2.0),)),
    "gated gelu": Sublayer((Branch(replace(MLP, act="gelu_tanh", gate_scale=0.6, out_scale=1.5)),)),
    "clamped": Sublayer((Branch(replace(MLP, act="swiglu_clamped", limit=0.02)),)),
    **{
        act: Sublayer((Branch(replace(PLAIN, act=act)),))
        for act in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh")
    },
    "xielu": Sublayer(
        (Branch(replace(PLAIN, act="xielu", act_weights=Weight((Part("alpha_p", 1), Part("alpha_n", 1))))),)
    ),
}


def experts(score: Score = "softmax", *, gated: bool = True, bias: bool = False, **changes: Any) -> Sublayer:
    """Eight experts, three for a token. changes: of the router, and of the experts' act, limit and sharpness."""
    of_experts = {name: changes.pop(name) for name in ("act", "limit", "sharpness") if name in changes}
    mlp = Mlp(
        24, gate=matrix("e.gate", 24, HIDDEN, bias, experts=8) if gated else None,
        up=matrix("e.up", 24, HIDDEN, bias, experts=8), down=matrix("e.down", HIDDEN, 24, bias, experts=8),
        **of_experts,
    )  # fmt: skip
    router = Router(matrix("router", 8 + changes.get("zero_experts", 0), HIDDEN), 3, score, **changes)
    return Sublayer((Branch(Moe(8, router, mlp)),), norm("n", HIDDEN))


def latent(**changes: Any) -> Sublayer:
    body = LatentAttention(
        HEADS, nope_dim=12, rope_dim=6, value_dim=10, rank=20, scale=0.2, q=matrix("q", HEADS * 18, HIDDEN),
        kv_a=matrix("kv_a", 26, HIDDEN), kv_norm=norm("kv_norm", 20), kv_b=matrix("kv_b", HEADS * 22, 20),
        o=matrix("o", HIDDEN, HEADS * 10), rope=Rope(6),
    )  # fmt: skip
    return Sublayer((Branch(replace(body, **changes)),), norm("n", HIDDEN))


BESIDE = replace(
    ATTENTION, q=matrix("wide.q", HEADS * DIM, 2 * HIDDEN), k=matrix("wide.k", KV_HEADS * DIM, 2 * HIDDEN),
    v=matrix("wide.v", KV_HEADS * DIM, 2 * HIDDEN), o=matrix("wide.o", HIDDEN, HEADS * DIM),
)  # fmt: skip
LOW = (
    low_rank("low.q", HEADS * DIM, HIDDEN),
    low_rank("low.k", KV_HEADS * DIM, HIDDEN),
    low_rank("low.v", KV_HEADS * DIM, HIDDEN),
)
CASES |= {
    "values of another size": Sublayer(
        (
            Branch(
                replace(
                    ATTENTION, value_dim=32, v=matrix("v", KV_HEADS * 32, HIDDEN), o=matrix("o", HIDDEN, HEADS * 32)
                )
            ),
        )
    ),
    "projections of low rank": Sublayer(
        (
            Branch(replace(ATTENTION, low=LOW)),
            Branch(replace(MLP, low=(low_rank("low.gate", 48, HIDDEN), low_rank("low.up", 48, HIDDEN)))),
        )
    ),
    "a branch of low rank": Sublayer(
        (Branch(low_rank("low", HIDDEN, HIDDEN), post=norm("m", HIDDEN), adds_input=True),), norm("n", HIDDEN)
    ),
    "aside": Sublayer(
        (Branch(MLP),),
        norm("n", HIDDEN),
        aside=Aside(
            (Branch(BESIDE, norm("a", 2 * HIDDEN)), Branch(replace(PLAIN, act="gelu"), norm("b", HIDDEN))),
            matrix("aside.out", HIDDEN, HIDDEN),
        ),
    ),
    "alibi before the scale": Sublayer(
        (Branch(replace(ATTENTION, rope=None, alibi=Alibi((0.5, 0.25, 0.125, 0.0625), True, True))),)
    ),
    "sparse": Sublayer((Branch(replace(MLP, act="gelu_tanh", sparsity=0.5, gate_scale=0.7)),)),
    "clamped and scaled": Sublayer((Branch(replace(MLP, act="swiglu_clamped", limit=0.02, gate_scale=0.7)),)),
    "sharper": Sublayer((Branch(replace(MLP, act="swiglu_clamped", limit=0.5, sharpness=2.5)),)),
    "latent": latent(),
    "latent, adjacent pairs": latent(rope=Rope(6, pairs="adjacent"), temperature=Temperature(0.1, 4, 1), kv_scale=0.5),
    "latent of low rank": latent(
        q=LowRank(matrix("q_a", 14, HIDDEN), matrix("q_b", HEADS * 18, 14), norm("q_norm", 14)), rope=None, q_scale=2.0
    ),
    "experts": experts(),
    "experts, renormed": experts(renorm=True),
    "experts by a sigmoid": experts("sigmoid", scale=2.5, renorm=True, floor=0.1),
    "experts, corrected": experts("sigmoid", correction=Part("c", 8), renorm=True, floor=1.2, floor_by="max"),
    "experts, corrected softmax": experts(correction=Part("c", 8)),
    "experts in groups": experts("sigmoid", correction=Part("c", 8), groups=4, top_groups=2),
    "experts in groups by their best": experts(groups=4, top_groups=2, group_by="max", scale=3.0),
    "experts, softmax of chosen": experts("softmax_of_chosen", scale=0.5),
    "experts by sparsemixer": experts("sparsemixer", jitter=0.3),
    "experts of their own scales": experts(expert_scale=Part("s", 8)),
    "experts on scaled inputs": experts("sigmoid", on="input"),
    "experts that return their input": experts(zero_experts=4, scale=2.0),
    "experts with biases": experts(bias=True),
    "clamped experts": experts("softmax_of_chosen", bias=True, act="swiglu_clamped", limit=0.1, sharpness=1.5),
    "gelu experts on scaled inputs": experts(act="gelu", on="input", zero_experts=2),
    "experts without gates": experts(gated=False, act="relu2", bias=True),
}


class Pair:
    """A model with random weights in C, and the same in torch."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.program = decoder, lower(decoder)
        self.kernels, cpu = Kernels(build.find().load()), torch.device("cpu")
        tiles = tuple(_tile(tile) for tile in self.program.tiles) or (Tile(1, 16, 16),)
        states = tuple(StateTile(state.shape) for state in self.program.states)
        self.shape = KvShape(layers=tiles, dtype=torch.float32, states=states)
        self.ops = {"torch": reference_ops(), "c": native_ops(self.kernels)}
        self._models: dict[str, NativeModel | ReferenceModel] = {}
        for kind, ops in self.ops.items():
            options = Options(ops=ops, dtype=torch.float32, weight_dtype=torch.float32, device=cpu, keeps=False)
            packing, generator = Packing(options), torch.Generator().manual_seed(1)
            for target in self.program.targets:
                values = packing.begin(target)
                if isinstance(target, Vector):
                    values.copy_(torch.randn(values.shape, generator=generator) * 0.5 + 1)
                else:
                    values.copy_(torch.randn(values.shape, generator=generator) * target.columns**-0.5)
                packing.end(target, values)
            reference = Reference(
                self.program, packing.weights, max_len=64, dtype=torch.float32, weight_dtype=torch.float32,
                device=cpu, group=Alone(),
            )  # fmt: skip
            vocabulary = Vocabulary(self.program, packing.weights, Alone())
            is_in_c = kind == "c"
            self._models[kind] = (
                NativeModel(reference, vocabulary, self.shape, self.kernels)
                if is_in_c
                else ReferenceModel(reference, vocabulary, self.shape)
            )

    def opened(self, kind: str) -> "tuple[NativeModel | ReferenceModel, AttentionBackend]":
        """The model, and attention over an empty cache of five pages for each block table."""
        cache = KvCache(shape=self.shape, num_pages=200, block_size=16, device=torch.device("cpu"))
        cache.storage.zero_()
        model = self._models[kind]
        if isinstance(model, ReferenceModel):
            return model, TorchPagedAttention(cache=cache, ops=self.ops[kind], dtype=torch.float32)
        model._parts = None  # they hold the addresses of another cache
        return model, NativePagedAttention(cache=cache, ops=self.ops[kind], kernels=self.kernels)

    def states(self, kind: str, *cuts: int, company: int = 0) -> Tensor:
        """Of TOKENS tokens, cut into steps. company: the tokens of another row in every step. If there are regimes,
        the tokens are of regime 1 and the company of regime 0."""
        model, attention = self.opened(kind)
        tables, found = self.shape.groups(16).num_tables, []
        for first, last in pairwise((0, *cuts, TOKENS)):
            ranges = [(first, last), (0, company)] if company else [(first, last)]
            positions = np.concatenate([np.arange(*each) for each in ranges])
            rows = np.concatenate([np.full(end - begin, row) for row, (begin, end) in enumerate(ranges)])
            pages = np.array([[2, 0], [3, 1]], np.int32) + 4 * np.arange(tables, dtype=np.int32)[:, None, None]
            slots = pages[:, rows, positions // 16].astype(np.int64) * 16 + positions % 16
            attention.begin(
                AttentionStep(
                    num_decode=0,
                    context_lens=np.array([end for _, end in ranges]),
                    query_lens=np.array([end - begin for begin, end in ranges]),
                    tables=pages[:, : len(ranges)],
                    slots=torch.from_numpy(slots),
                    order=np.arange(len(ranges)),
                )
            )
            ids = torch.from_numpy((positions * 7 + rows * 3) % self.decoder.vocab)
            regimes = torch.from_numpy(1 - rows) if self.program.regime_limit is not None else None
            with torch.inference_mode():
                hidden = model.hidden(ids, torch.from_numpy(positions), attention, regimes)
                found.append(hidden[: last - first])
        return torch.cat(found)

    def check(self) -> None:
        ours, theirs = self.states("c"), self.states("torch")
        errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        assert ours.isfinite().all() and errors.max() < 2e-5, errors
        for cuts, company in (((), 9), ((1, 9, 20), 0), ((16,), 20)):
            assert torch.equal(self.states("c", *cuts, company=company), ours), (cuts, company)


def _tile(tile: ProgramTile) -> Tile:
    return Tile(tile.kv_heads, tile.head_dim, tile.value_dim)


@pytest.mark.parametrize("case", CASES)
def test_c_gives_what_torch_gives_and_the_same_bits_in_any_step(case: str) -> None:
    pair = Pair(
        Decoder(
            HIDDEN,
            VOCAB,
            Embedding(matrix("embed", VOCAB, HIDDEN), scale=2.5, positions=matrix("positions", 40, HIDDEN), offset=2),
            (Block((CASES[case],)), Block((CASES[case],), out_scale=Part("out", 1))),
            norm("last", HIDDEN),
            Head(),
            prefixes=("",),
            regime_limit=REGIME_LIMIT if "longrope" in case else None,
        )
    )
    model, attention = pair.opened("c")
    assert isinstance(model, NativeModel) and isinstance(attention, NativePagedAttention)
    assert in_torch(model, attention) == []
    pair.check()


_TYPES = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(name, str)}


@pytest.mark.parametrize("architecture", sorted(name for name in pages() if name in _TYPES))
def test_c_has_every_operation_of_every_family(architecture: str) -> None:
    raw = families.tiny_config(_TYPES[architecture])
    if isinstance(text := raw.get("text_config"), dict):
        raw["text_config"] = families.tiny_config(text["model_type"])
    try:
        decoder = describe(architecture, Fields(raw, Path("config.json")))
    except NotDescribedError as error:
        pytest.skip(error.why)
    pair = Pair(decoder)
    model, attention = pair.opened("c")
    assert isinstance(model, NativeModel) and isinstance(attention, NativePagedAttention)
    assert in_torch(model, attention) == []
    if not pair.program.states:  # those are tested with their states in test_mixer_families.py
        pair.check()
