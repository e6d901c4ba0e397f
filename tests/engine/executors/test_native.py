"""The C program gives the hidden states of the reference, however many operations it has in C."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import checkpoints
import decoders
import numpy as np
import pytest
import torch
from rank_processes import run_ranks, this_part
from tensor_files import load_tensors, save_tensors
from torch import Tensor

from pagewire.bench.engine.step import opened, plan
from pagewire.config.flags import make_config
from pagewire.engine.attention.base import AttentionStep
from pagewire.engine.attention.kv_cache import KvCache, KvShape, Tile
from pagewire.engine.attention.native import NativePagedAttention
from pagewire.engine.executors import native
from pagewire.engine.executors.native import NativeModel
from pagewire.engine.executors.reference import Reference, ReferenceModel
from pagewire.engine.executors.vocabulary import Vocabulary
from pagewire.engine.executors.weights import Options, Packing
from pagewire.engine.models.cut import cut, share
from pagewire.engine.models.description import (
    Alibi,
    Attention,
    Body,
    Decoder,
    LatentAttention,
    LowRank,
    Mlp,
    Moe,
    Norm,
    Reach,
    Rope,
    Router,
)
from pagewire.engine.models.lower import lower
from pagewire.engine.models.pieces import matrix, mlp, vector
from pagewire.engine.models.program import Matrix, Vector
from pagewire.engine.parallel.collectives import Alone, Group, join
from pagewire.engine.runner.runner import Runner
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.procs.prepare import prepare

pytestmark = pytest.mark.usefixtures("c_kernels")

MODELS = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe-sparse", "mixtral"]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_c_call_gives_the_states_of_the_reference(kind, options, dtype, tmp_path):
    folder = checkpoints.make_checkpoint(tmp_path, kind, dtype=dtype, **({"num_hidden_layers": 1} if options else {}))
    config = prepare(
        make_config(model=str(folder), dtype="float32", max_model_len=96, kv_cache_memory=1 << 22, **options)
    )
    hidden_states: dict[bool, list[Tensor]] = {}
    for in_c in (True, False):
        runner = Runner.load(config)
        runner.open_cache(runner.offer())
        model = runner._steps._model
        assert isinstance(model, NativeModel)
        inner = model if in_c else model._alone
        outputs = hidden_states[in_c] = []

        class Recorder:
            kv_shape = model.kv_shape
            logits, greedy = staticmethod(inner.logits), staticmethod(inner.greedy)

            @staticmethod
            def hidden(
                ids, positions, attention, regimes=None, inner: NativeModel | ReferenceModel = inner, to=outputs
            ):
                to.append(inner.hidden(ids, positions, attention, regimes))
                return to[-1]

        runner._steps._model = Recorder()
        opens = tuple(opened(row, 40 + row, 96, config.model.vocab_size) for row in range(3))
        steps = [plan(1, [0, 1], [40, 41], opens), plan(2, [0, 2, 1], [1, 42, 1]), plan(3, [2, 1, 0], [1, 1, 1])]
        for step in steps:
            runner.launch(step)
            assert min(torch.tensor(bytearray(runner.collect().ids))) >= 0
        if in_c:
            assert [type(part).__name__ for part in model._parts] == ["_InC"], "one call"
    assert len(hidden_states[True]) == 3
    for ours, theirs in zip(hidden_states[True], hidden_states[False], strict=True):
        errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        # A number between two roundings, of 8-bit activations or of 16-bit keys, may fall to the other side, which
        # changes the rows after it, too. `test_fused_operations_give_the_bits_of_single_ones` is exact.
        assert errors.max() < (0.05 if options else 1e-5), errors


# Programs that no checkpoint has, by hand.


def decoder(change: Callable[[Body], Body] = lambda body: body, **fields: object) -> Decoder:
    """A small Llama, with changes to the bodies of its first layer."""
    found = decoders.llama(tie_word_embeddings=True, **fields)
    first, *others = found.blocks
    sublayers = tuple(
        replace(sub, branches=tuple(replace(branch, body=change(branch.body)) for branch in sub.branches))
        for sub in first.sublayers
    )
    return replace(found, blocks=(replace(first, sublayers=sublayers), *others))


def filled(target: Matrix | Vector, values: Tensor) -> Tensor:
    """Random numbers that depend on the rows' place in the checkpoint, so that ranks get parts of one model."""
    rows = []
    for weight in target.weights:
        for part in weight.parts:
            for turn in range(part.times):
                for row in range(part.count):
                    seed = f"{part.name} {part.first + turn * part.every + row}"
                    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
                    if isinstance(target, Vector):
                        rows.append(1 + 0.2 * torch.randn(1, generator=generator)[0])
                    else:
                        whole = torch.randn(128, generator=generator) / 7
                        rows.append(whole[weight.first_column : weight.first_column + weight.columns])
    return values.copy_(torch.stack(rows))


class Engine:
    """A model of this rank, and a cache of three pages of 16 positions for each of two rows."""

    def __init__(self, whole: Decoder, group: Group | None = None, quantization: str | None = None) -> None:
        group = group or Alone()
        first, _ = share(whole.vocab, group.rank, group.size)
        self.program = lower(cut(whole, group.rank, group.size), ranks=group.size, first_id=first)
        self.kernels = Kernels(build.find().load())
        self.ops = native_ops(self.kernels, quantization=quantization)
        cpu, float32 = torch.device("cpu"), torch.float32
        packing = Packing(Options(ops=self.ops, dtype=float32, weight_dtype=float32, device=cpu, keeps=False))
        for target in self.program.targets:
            packing.end(target, filled(target, packing.begin(target)))
        reference = Reference(
            self.program, packing.weights, max_len=64, dtype=float32, weight_dtype=float32, device=cpu, group=group
        )
        vocabulary = Vocabulary(self.program, packing.weights, group)
        tiles = tuple(Tile(tile.kv_heads, tile.head_dim, tile.value_dim) for tile in self.program.tiles)
        self.model = NativeModel(reference, vocabulary, KvShape(layers=tiles, dtype=float32), self.kernels)

    def states(self, *, in_c: bool) -> list[Tensor]:
        """Of a step with 20 and 7 tokens, and one with a token of each row."""
        cache = KvCache(shape=self.model.kv_shape, num_pages=6, block_size=16, device=torch.device("cpu"))
        cache.clear(torch.arange(6))
        attention = NativePagedAttention(cache=cache, ops=self.ops, kernels=self.kernels)
        if in_c:
            self.model._parts = None  # they hold the addresses of another cache
        found = []
        for firsts, counts in (((0, 0), (20, 7)), ((20, 7), (1, 1))):
            positions = [first + i for first, count in zip(firsts, counts, strict=True) for i in range(count)]
            rows = [row for row, count in enumerate(counts) for _ in range(count)]
            slots = [
                (3 * row + position // 16) * 16 + position % 16 for row, position in zip(rows, positions, strict=True)
            ]
            order = np.arange(2)
            if counts == (1, 1):  # decode rows come in ascending order of context
                positions, rows, slots, order = positions[::-1], rows[::-1], slots[::-1], order[::-1]
            step = AttentionStep(
                num_decode=2 if counts == (1, 1) else 0,
                context_lens=np.array([firsts[row] + counts[row] for row in order]),
                query_lens=np.array(counts),
                tables=np.arange(6, dtype=np.int32).reshape(2, 3)[None, order],
                slots=torch.tensor([slots]),
                order=order,
            )
            ids = torch.tensor([(7 * position + 31 * row) % 90 for position, row in zip(positions, rows, strict=True)])
            attention.begin(step)
            model = self.model if in_c else self.model._alone
            found.append(model.hidden(ids, torch.tensor(positions), attention))
        return found

    @property
    def parts(self) -> str:
        """C for a call, and the names of operations in torch."""
        assert self.model._parts is not None
        names = ["C" if isinstance(part, native._InC) else type(part.op.args).__name__ for part in self.model._parts]
        return " ".join(names)


def check(engine: Engine) -> list[Tensor]:
    """The states in C are those of the reference."""
    ours = engine.states(in_c=True)
    for found, expected in zip(ours, engine.states(in_c=False), strict=True):
        assert found.isfinite().all() and 0.1 < float(found.std()) < 10
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    return ours


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_fused_operations_give_the_bits_of_single_ones(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = Engine(decoder(), quantization=quantization)
    monkeypatch.setattr(native._Compiler, "_is_added", lambda *_: False)
    single = Engine(decoder(), quantization=quantization)
    if quantization is None:
        check(single)
    monkeypatch.undo()
    states = fused.states(in_c=True)
    monkeypatch.setattr(native._Compiler, "_is_added", lambda *_: False)
    for ours, theirs in zip(single.states(in_c=True), states, strict=True):
        assert torch.equal(ours, theirs)
    assert num_operations(single) == len(single.program.ops) - 2, "two rotations are one"
    assert num_operations(fused) == num_operations(single) - 4, "products add to the stream"


def num_operations(engine: Engine) -> int:
    """In C."""
    return sum(len(part.operations) for part in engine.model._parts or () if isinstance(part, native._InC))


@pytest.mark.parametrize("head_dim", [16, 24])
def test_a_pass_that_is_followed_has_the_same_bits_in_more_calls(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention over heads of 24 numbers runs in torch."""
    engine = Engine(decoder(head_dim=head_dim))
    by_layer, program, num_calls = engine.model._reference.by_layer, engine.kernels.program, 0

    def counted(*arguments: int) -> None:
        nonlocal num_calls
        num_calls += 1
        program(*arguments)

    monkeypatch.setattr(engine.kernels, "program", counted)
    at_once = engine.states(in_c=True)
    num_at_once, num_calls = num_calls, 0
    told: list[int] = []
    by_layer.listen([0, 1], told.append)
    followed = engine.states(in_c=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(followed, at_once, strict=True))
    assert told == [0, 1] and by_layer.end() == 2, "of the second pass nobody hears again"
    assert num_at_once == (2 if head_dim == 16 else 6)
    assert num_calls == num_at_once + (4 if head_dim == 16 else 0), "a call for each stop of both passes"


def on_attention(**changes: object) -> Callable[[Body], Body]:
    return lambda body: replace(body, **changes) if isinstance(body, Attention) else body


CHANGES: dict[str, Callable[[Body], Body]] = {
    "clipped projections": on_attention(clip=0.5),
    "positions that change scores": on_attention(alibi=Alibi((0.5, 0.25, 0.125, 0.0625))),
    "positions in chunks": on_attention(reach=Reach("chunk", 8)),
    "sparse gates": lambda body: replace(body, sparsity=0.75) if isinstance(body, Mlp) else body,
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_layer_that_differs_is_part_of_the_one_call(name: str) -> None:
    engine = Engine(decoder(CHANGES[name]))
    changed = check(engine)
    assert engine.parts == "C"
    assert not torch.allclose(changed[0], Engine(decoder()).states(in_c=False)[0], atol=1e-3)


def test_operations_that_c_lacks_run_between_those_that_it_has() -> None:
    engine = Engine(decoder(head_dim=24))
    check(engine)
    assert engine.parts == "C Attend C Attend C"


def as_latent(body: Body) -> Body:
    if not isinstance(body, Attention):
        return body
    return LatentAttention(
        heads=4, nope_dim=12, rope_dim=6, value_dim=10, rank=20, scale=0.2, q=matrix("q", 4 * 18, 48),
        kv_a=matrix("kv_a", 26, 48), kv_norm=Norm(20, vector("kv_norm", 20)), kv_b=matrix("kv_b", 4 * 22, 20),
        o=matrix("o", 48, 40), rope=Rope(6),
    )  # fmt: skip


def as_experts(body: Body) -> Body:
    """Two of five experts return their input: one rank adds it."""
    if not isinstance(body, Mlp):
        return body
    router = Router(matrix("router", 5, 48), 3, zero_experts=2)
    return Moe(3, router, mlp("experts.{e}.", 48, 32, experts=3))


def with_low_ranks(body: Body) -> Body:
    def low(name: str, rows: int) -> LowRank:
        return LowRank(matrix(name + ".down", 6, 48), matrix(name + ".up", rows, 6))

    if isinstance(body, Attention):
        return replace(body, low=(low("low.q", body.q.rows), low("low.k", 32), low("low.v", 32)))
    assert isinstance(body, Mlp)
    return replace(body, low=(low("low.gate", body.width), low("low.up", body.width)))


def with_wide_norms(body: Body) -> Body:
    """Over the heads of all ranks."""
    if not isinstance(body, Attention):
        return body
    return replace(body, q_norm=Norm(64, vector("q_norm", 64)), k_norm=Norm(32, vector("k_norm", 32)))


# A change of each body, and the parts of the program. The sparsity of a gate is that of all of its columns, which the
# ranks exchange.
DIVIDED: dict[str, tuple[Callable[[Body], Body], str]] = {
    "heads with keys": (lambda body: body, "C"),
    "latent heads": (as_latent, "C"),
    "norms over all heads": (with_wide_norms, "C"),
    "experts that return their input": (as_experts, "C"),
    "projections of low rank": (with_low_ranks, "C"),
    "sparse gates": (CHANGES["sparse gates"], "C Glu C"),
}


def take_part() -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    part = this_part()
    with torch.inference_mode():
        group = join(part.info, part.size, torch.device("cpu"))
        found = []
        for change, parts in DIVIDED.values():
            engine = Engine(decoder(change), group)
            states = check(engine)
            found += [*states, *(engine.model.logits(state) for state in states)]
            assert engine.parts == parts
    save_tensors(found, part.folder / f"rank-{part.info.rank}.safetensors")


def test_two_ranks_have_the_states_of_one(tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path)
    expected = []
    for change, _ in DIVIDED.values():
        whole = Engine(decoder(change))
        states = whole.states(in_c=True)
        expected += [*states, *(whole.model.logits(state) for state in states)]
    for rank in range(2):
        for ours, theirs in zip(load_tensors(tmp_path / f"rank-{rank}.safetensors"), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    take_part()
