"""Every kind of mixer, of odd sizes, in torch and in C, over rows that begin, continue and keep their states."""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_processes import run_ranks, this_part
from tensor_files import load_tensors, save_tensors
from torch import Tensor

from pagewire.engine.attention.base import AttentionBackend, AttentionStep
from pagewire.engine.attention.kv_cache import KvCache
from pagewire.engine.attention.native import NativePagedAttention
from pagewire.engine.attention.torch_paged import TorchPagedAttention
from pagewire.engine.executors.native import NativeModel, in_torch
from pagewire.engine.executors.reference import Reference, ReferenceModel
from pagewire.engine.executors.vocabulary import Vocabulary
from pagewire.engine.executors.weights import Options, Packing
from pagewire.engine.models.cut import cut, share
from pagewire.engine.models.description import (
    Block,
    Body,
    Branch,
    Decoder,
    DeltaNet,
    Embedding,
    Head,
    Lightning,
    LowRank,
    Mamba2,
    Norm,
    ShortConv,
    Sublayer,
    Weight,
)
from pagewire.engine.models.lower import lower
from pagewire.engine.models.pieces import conv, mamba1, mamba2, matrix, rms, vector
from pagewire.engine.models.program import State, Vector
from pagewire.engine.parallel.collectives import Alone, Group, join
from pagewire.engine.runner.served import shape_of
from pagewire.errors import ConfigError
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.ops import reference_ops
from pagewire.kernels.states import StateRows

HIDDEN = 24
CPU, FLOAT32 = torch.device("cpu"), torch.float32


def delta(heads: int) -> DeltaNet:
    """heads: of keys."""
    return DeltaNet(
        heads, 3 * heads, 11, 5,
        qkv=matrix("qkv", 37 * heads, HIDDEN), conv=conv("conv", 37 * heads, 4), beta=matrix("beta", 3 * heads, HIDDEN),
        decay=matrix("decay", 3 * heads, HIDDEN), a_log=vector("a", 3 * heads, "neg_exp"),
        dt_bias=vector("dt", 3 * heads), gate=matrix("gate", 15 * heads, HIDDEN), norm=rms("norm", 5, 1e-6),
        o=matrix("o", HIDDEN, 15 * heads),
    )  # fmt: skip


def by_channel(heads: int) -> DeltaNet:
    return replace(
        delta(heads),
        decay=LowRank(matrix("down", 4, HIDDEN), matrix("up", 33 * heads, 4)),
        gate=LowRank(matrix("down", 4, HIDDEN), matrix("up", 15 * heads, 4)),
        dt_bias=vector("dt", 33 * heads),
        decay_per="channel",
        gate_act="sigmoid",
    )


def lightning(heads: int) -> Lightning:
    return Lightning(
        heads, 10,
        qkv=matrix("qkv", 30 * heads, HIDDEN), decay=tuple(0.9 / (1 + head) for head in range(heads)),
        norm=rms("norm", 10 * heads, 1e-6), gate=matrix("gate", 10 * heads, HIDDEN),
        out=matrix("out", HIDDEN, 10 * heads),
    )  # fmt: skip


_DELTA = delta(2)
_MAMBA2 = mamba2("", HIDDEN, 6, 7, 9, 3, 4, norm=rms("norm", 14, 1e-6, total=42), bias=True, limits=(0.3, 1.5))
_NORMS = (rms("n", 3, 1e-6), Norm(5), None)
BODIES: dict[str, Body] = {
    "delta": _DELTA,
    "delta by channel": by_channel(2),
    "delta without a weight of its norm": replace(_DELTA, norm=Norm(5)),
    "mamba1": mamba1("", HIDDEN, 37, 5, 3, 4, norms=(None, None, None)),
    "mamba1 normed": mamba1("", HIDDEN, 48, 5, 3, 3, norms=_NORMS, bias=True, conv_bias=False),
    "mamba2": _MAMBA2,
    "mamba2 normed first": replace(_MAMBA2, norm_first=True, scales=(0.5, 2.0, 0.7, 1.2, 1.1)),
    "mamba2 without a norm": replace(_MAMBA2, norm=None),
    "short convolution": ShortConv(
        matrix("bcx", 3 * HIDDEN, HIDDEN, True),
        conv("conv", HIDDEN, 3, bias=True, act=""),
        matrix("out", HIDDEN, HIDDEN),
    ),
    "lightning": lightning(3),
}


def decoder(body: Body) -> Decoder:
    """One layer, whose result is added to the embeddings."""
    sublayer = Sublayer((Branch(body),), rms("in", HIDDEN, 1e-6))
    table = Embedding(matrix("t", 40, HIDDEN))
    return Decoder(HIDDEN, 40, table, (Block((sublayer,)),), None, Head(), ("",))


def numbers(weight: Weight) -> Iterator[Tensor]:
    """Random numbers for each row, which depend on its place in the file, so that ranks get parts of one model."""
    for part in weight.parts:
        for turn in range(part.times):
            for row in range(part.count):
                seed = zlib.crc32(f"{part.name} {part.first + turn * part.every + row}".encode())
                whole = torch.randn(600, generator=torch.Generator().manual_seed(seed)) / 4
                yield whole[weight.first_column : weight.first_column + max(1, weight.columns)]


class Engine:
    """One layer with a mixer, over two rows."""

    def __init__(self, body: Body, *, native: bool, group: Group | None = None) -> None:
        """group: of whose ranks this one has a part of the mixer."""
        group = group or Alone()
        whole = decoder(body)
        first_id, _ = share(whole.vocab, group.rank, group.size)
        program = lower(cut(whole, group.rank, group.size), ranks=group.size, first_id=first_id)
        kernels = Kernels(build.find().load())
        ops = native_ops(kernels) if native else reference_ops()
        packing = Packing(Options(ops=ops, dtype=FLOAT32, weight_dtype=FLOAT32, device=CPU, keeps=False))
        for target in program.targets:
            values = packing.begin(target)
            values.copy_(torch.cat([part for weight in target.weights for part in numbers(weight)]).view(values.shape))
            if isinstance(target, Vector):
                values.add_(1)
            packing.end(target, -values.abs() if target.weights[0].map == "neg_exp" else values)
        reference = Reference(
            program, packing.weights, max_len=64, dtype=FLOAT32, weight_dtype=FLOAT32, device=CPU, group=group
        )
        self.cache = KvCache(shape=shape_of(program, FLOAT32), num_pages=20, block_size=16, device=CPU)
        vocabulary = Vocabulary(program, packing.weights, group)
        self.model: ReferenceModel | NativeModel = ReferenceModel(reference, vocabulary, self.cache.shape)
        self.attention: AttentionBackend = TorchPagedAttention(cache=self.cache, ops=ops, dtype=FLOAT32)
        if native:
            self.model = NativeModel(reference, vocabulary, self.cache.shape, kernels)
            self.attention = NativePagedAttention(cache=self.cache, ops=ops, kernels=kernels)
            assert not in_torch(self.model, self.attention), "C has every mixer"

    def step(self, ids: list[int], states: StateRows) -> Tensor:
        counts = states.counts.numpy()
        self.attention.begin(
            AttentionStep(
                num_decode=0,
                context_lens=counts,
                query_lens=counts,
                tables=np.zeros((0, len(counts), 0), np.int32),
                slots=torch.zeros((0, len(ids)), dtype=torch.int64),
                order=np.arange(len(counts)),
                states=states,
            )
        )
        return self.model.hidden(torch.tensor(ids), torch.arange(len(ids)), self.attention)

    def pages(self, first: int) -> list[int]:
        """Those of one state."""
        return list(range(first, first + self.cache.groups.groups[-1].pages))

    def run(self) -> list[Tensor]:
        """Both rows begin; one keeps its state after three of five tokens; one continues from its end and the other
        from what was kept."""
        none, a, b, kept = [-1] * len(self.pages(0)), self.pages(0), self.pages(5), self.pages(10)
        memory = self.cache.storage
        first = self.step([3, 9, 1, 7, 7, 2, 8], StateRows.of(memory, [5, 2], [none, none], [a, b], [(0, 3, kept)]))
        second = self.step([7, 7, 30], StateRows.of(memory, [2, 1], [kept, b], [self.pages(15), b]))
        return [first, second]


@pytest.mark.parametrize("kind", BODIES)
def test_c_and_torch_agree_and_states_continue(kind: str) -> None:
    c, reference = Engine(BODIES[kind], native=True).run(), Engine(BODIES[kind], native=False).run()
    for ours, expected in zip(c, reference, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    first, second = c
    assert torch.equal(first[3:5], second[:2]), "the same tokens after the state that was kept"
    assert not torch.equal(first[0], first[5])


def shared_by(size: int) -> dict[str, Body]:
    """Mixers of which each of `size` ranks has a part."""
    wide = 14 * size

    def with_groups(groups: int) -> Mamba2:
        norm = rms("norm", wide // groups, 1e-6, total=wide)
        return mamba2("", HIDDEN, 2 * size, 7, 9, groups, 4, norm=norm, bias=True, limits=(0.3, 1.5))

    return {
        "delta": delta(size),
        "delta by channel": by_channel(size),
        "mamba1": mamba1("", HIDDEN, 13 * size, 5, 3, 4, norms=(None, None, None)),
        "mamba1 normed": mamba1("", HIDDEN, 24 * size, 5, 3, 3, norms=_NORMS, bias=True, conv_bias=False),
        **{f"mamba2 in {groups} groups": with_groups(groups) for groups in (1, size // 2, size) if groups},
        "mamba2 normed first": replace(with_groups(1), norm_first=True, scales=(0.5, 2.0, 0.7, 1.2, 1.1)),
        "mamba2 without a norm": replace(with_groups(1), norm=None),
        "short convolution": BODIES["short convolution"],
        "lightning": lightning(2 * size),
    }


def take_part() -> None:
    """A rank's process: the states of each mixer, by C and by torch."""
    torch.set_num_threads(1)
    part = this_part()
    with torch.inference_mode():
        group = join(part.info, part.size, CPU)
        bodies = shared_by(part.size).values()
        found = [Engine(body, native=native, group=group).run() for body in bodies for native in (True, False)]
    save_tensors([states for each in found for states in each], part.folder / f"rank-{part.info.rank}.safetensors")


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_have_the_states_of_one(size: int, tmp_path: Path) -> None:
    """Four ranks share two groups of a norm, too."""
    run_ranks(__file__, size, tmp_path)
    found = [load_tensors(tmp_path / f"rank-{rank}.safetensors") for rank in range(size)]
    for number, (kind, body) in enumerate(shared_by(size).items()):
        expected = Engine(body, native=True).run() * 2
        for rank in range(size):
            for ours, theirs in zip(found[rank][4 * number : 4 * number + 4], expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=f"{kind}, rank {rank}")
            assert torch.equal(found[rank][4 * number], found[0][4 * number]), f"{kind}: ranks differ in bits"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (_MAMBA2, "and the model's 3 groups of Mamba: one must divide the other"),
        (replace(_MAMBA2, groups=1), "and the 3 groups of the model's norms over recurrent layers: one must divide"),
        (replace(_MAMBA2, heads=9), "the model's 9 heads of Mamba cannot be divided evenly; choose a divisor"),
        (replace(_DELTA, key_heads=3, value_heads=6), "the model's 3 key heads of the delta rule cannot be divided"),
        (BODIES["mamba1"], "the model's 37 channels of Mamba cannot be divided evenly; choose a divisor"),
        (BODIES["lightning"], "the model's 3 heads of lightning attention cannot be divided evenly; choose a divisor"),
    ],
)
def test_mixers_that_two_ranks_cannot_share(body: Body, reason: str) -> None:
    for rank in range(2):
        with pytest.raises(ConfigError, match=f"--tensor-parallel-size 2.*{reason}"):
            cut(decoder(body), rank, 2)


def test_states_are_tiles_of_some_units() -> None:
    """A state of 128 x 128 numbers is a tile of its own; small ones share tiles, of which the last has the rest."""
    large = replace(_DELTA, key_heads=1, value_heads=3, key_dim=128, value_dim=128, qkv=matrix("qkv", 640, HIDDEN))
    large = replace(large, conv=conv("conv", 640, 4), gate=matrix("gate", 384, HIDDEN), o=matrix("o", HIDDEN, 384))
    small = mamba2("", HIDDEN, 20, 16, 32, 1, 4, norm=None)
    sublayers = tuple(Sublayer((Branch(body),)) for body in (large, small))
    program = lower(Decoder(HIDDEN, 40, Embedding(matrix("t", 40, HIDDEN)), (Block(sublayers),), None, Head(), ("",)))
    shapes = [(1, 3, 640), *[(1, 128, 128)] * 3, (1, 3, 384), (16, 32, 16), (4, 32, 16)]
    assert program.states == tuple(map(State, shapes))
    found = [op.args.states for op in program.ops if hasattr(op.args, "states")]
    assert [(each.first, each.count, each.per_tile) for each in found] == [(0, 1, 1), (1, 3, 1), (4, 1, 1), (5, 2, 16)]


def test_a_branch_that_is_delayed_too_far_is_not_dropped() -> None:
    sublayer = Sublayer((Branch(_MAMBA2), Branch(_MAMBA2, delay=1)))
    blocks = (Block((sublayer,)),)
    with pytest.raises(AssertionError, match="1 branches are delayed beyond the last sublayer"):
        lower(Decoder(HIDDEN, 40, Embedding(matrix("t", 40, HIDDEN)), blocks, None, Head(), ("",)))


if __name__ == "__main__":
    take_part()
