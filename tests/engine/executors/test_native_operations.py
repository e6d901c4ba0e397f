"""What C computes of a program equals what torch computes, for every operation that C has."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagewire.engine.attention.base import AttentionStep
from pagewire.engine.attention.kv_cache import KvCache, KvShape, Tile
from pagewire.engine.attention.native import NativePagedAttention
from pagewire.engine.attention.torch_paged import TorchPagedAttention
from pagewire.engine.executors.native import NativeModel, in_torch
from pagewire.engine.executors.reference import Reference, ReferenceModel
from pagewire.engine.executors.vocabulary import Vocabulary
from pagewire.engine.executors.weights import Options, Packing, fill_dummy
from pagewire.engine.models.description import (
    Alibi,
    Attention,
    Block,
    Branch,
    Decoder,
    Embedding,
    Head,
    Mlp,
    Norm,
    Part,
    Reach,
    Rope,
    Sublayer,
    Temperature,
)
from pagewire.engine.models.lower import lower
from pagewire.engine.models.pieces import matrix, vector
from pagewire.engine.models.program import Vector
from pagewire.engine.parallel.collectives import Alone
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.ops import reference_ops

pytestmark = pytest.mark.usefixtures("c_kernels")
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
CASES = {
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
    "sparse": Sublayer((Branch(replace(MLP, act="gelu_tanh", sparsity=0.5)),)),
    **{
        act: Sublayer((Branch(replace(PLAIN, act=act)),))
        for act in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")
    },
}
IN_TORCH = {"chunk": ["Attend"], "alibi": ["Attend"], "sparse": ["Glu"]}


@pytest.mark.parametrize("case", CASES)
def test_c_gives_what_torch_gives(case: str) -> None:
    decoder = Decoder(
        HIDDEN,
        VOCAB,
        Embedding(matrix("embed", VOCAB, HIDDEN), scale=2.5),
        (Block((CASES[case],)), Block((CASES[case],), out_scale=Part("out", 1))),
        norm("last", HIDDEN),
        Head(),
        prefixes=("",),
    )
    program = lower(decoder)
    kernels = Kernels(build.find().load())
    cpu = torch.device("cpu")
    tiles = tuple(Tile(tile.kv_heads, tile.head_dim, tile.value_dim) for tile in program.tiles) or (Tile(1, 16, 16),)
    shape = KvShape(layers=tiles, dtype=torch.float32)
    hidden = {}
    for kind, ops in (("torch", reference_ops()), ("c", native_ops(kernels))):
        packing = Packing(Options(ops=ops, dtype=torch.float32, weight_dtype=torch.float32, device=cpu, keeps=False))
        fill_dummy(program, packing)
        generator = torch.Generator().manual_seed(1)
        for target in program.targets:
            if isinstance(target, Vector):  # dummy weights are ones and zeros
                values = packing.weights.vectors[target.key]
                values.copy_(torch.randn(values.shape, generator=generator) + 1)
        reference = Reference(
            program,
            packing.weights,
            max_len=64,
            dtype=torch.float32,
            weight_dtype=torch.float32,
            device=cpu,
            group=Alone(),
        )
        vocabulary = Vocabulary(program, packing.weights, Alone())
        cache = KvCache(shape=shape, num_pages=4, block_size=16, device=cpu)
        cache.storage.zero_()
        attention: NativePagedAttention | TorchPagedAttention
        model: NativeModel | ReferenceModel
        if kind == "c":
            attention = NativePagedAttention(cache=cache, ops=ops, kernels=kernels)
            model = NativeModel(reference, vocabulary, shape, kernels)
            assert [type(op.args).__name__ for op in in_torch(model, attention)] == 2 * IN_TORCH.get(case, [])
        else:
            attention = TorchPagedAttention(cache=cache, ops=ops, dtype=torch.float32)
            model = ReferenceModel(reference, vocabulary, shape)
        with torch.inference_mode():
            attention.begin(_step())
            hidden[kind] = model.hidden(torch.arange(TOKENS) * 7 % VOCAB, torch.arange(TOKENS), attention)
    assert hidden["c"].isfinite().all()
    torch.testing.assert_close(hidden["c"], hidden["torch"], rtol=2e-5, atol=2e-5)


def _step() -> AttentionStep:
    """One row of TOKENS tokens in the pages 2 and 0."""
    positions = np.arange(TOKENS)
    pages = np.array([2, 0], np.int32)
    return AttentionStep(
        num_decode=0,
        context_lens=np.array([TOKENS]),
        query_lens=np.array([TOKENS]),
        tables=pages[None, None],
        slots=torch.from_numpy(pages[positions // 16].astype(np.int64) * 16 + positions % 16)[None],
        order=np.array([0]),
    )
