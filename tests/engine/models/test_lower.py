"""The operations of descriptions: their order, and what holds for every program."""

from dataclasses import replace

import pytest
from decoders import bodies, decoders, llama
from hypothesis import HealthCheck, given, settings

from pagewire.engine.models.cut import cut
from pagewire.engine.models.description import (
    AltUp,
    Aside,
    Attention,
    Block,
    Branch,
    Decoder,
    Embedding,
    Head,
    LowRank,
    Mlp,
    Moe,
    Norm,
    Part,
    Rope,
    Router,
    Streams,
    Sublayer,
    Temperature,
    Weight,
)
from pagewire.engine.models.lower import lower
from pagewire.engine.models.pieces import layer_norm, mamba2, matrix, mlp, qkvo, rms, rows_of
from pagewire.engine.models.program import (
    AllReduce,
    Matrix,
    MeanSquares,
    Normalize,
    Program,
    Tile,
    Vector,
    View,
    layout,
)

ATTENTION = Attention(4, 2, 4, 4, 0.5, **qkvo("", 16, 4, 2, 4), rope=Rope(4))


def of(*sublayers: Sublayer, **changes: object) -> Decoder:
    """One layer of these sublayers."""
    plain = Decoder(
        16, 20, Embedding(matrix("embed", 20, 16)), (Block(sublayers),), rms("norm", 16, 1e-6), Head(), ("",)
    )
    return replace(plain, **changes)


def listed(program: Program) -> list[str]:
    """A line for each operation: outputs = name(inputs) of its weights. Registers are letters, with a view's columns if
    they are not all."""

    def view(register: int, first: int, width: int) -> str:
        letter = chr(ord("a") + register)
        return letter if width == program.widths[register] else f"{letter}[{first}:{first + width}]"

    lines = []
    for op in program.ops:
        keys = [value.key for value in vars(op.args).values() if isinstance(value, Matrix | Vector)]
        outs, ins = (", ".join(view(v.register, v.first, v.width) for v in views) for views in (op.outs, op.ins))
        lines.append(f"{outs} = {type(op.args).__name__}({ins}) {' '.join(keys)}".rstrip())
    return lines


def test_llama() -> None:
    program = lower(llama(num_hidden_layers=1))
    assert listed(program) == [
        "a = Embed() embedding",
        "b = Normalize(a) 0.0.norm",
        "c[0:64], c[64:96], c[96:128] = Product(b) 0.0.qkv",
        "c[0:64] = Rotate(c[0:64])",
        "c[64:96] = Rotate(c[64:96])",
        "d = Attend(c[0:64], c[64:96], c[96:128])",
        "e = Product(d) 0.0.o",
        "a = Add(a, e)",
        "f = Normalize(a) 0.1.norm",
        "g = GatedProduct(f) 0.1.gate_up",
        "h = Product(g) 0.1.down",
        "a = Add(a, h)",
        "i = Normalize(a) norm",
    ]
    assert [op.layer for op in program.ops] == [-1, *[0] * 11, 1]
    assert program.tiles == (Tile(2, 16, 16, next(b for b in bodies(llama()) if isinstance(b, Attention)).reach),)
    assert program.head.key == "head" and (program.result.register, program.result.width) == (8, 48)
    assert lower(llama(tie_word_embeddings=True)).head.key == "embedding"


def test_each_rank_sums_after_every_sublayer_and_the_embedding() -> None:
    program = lower(llama(num_hidden_layers=1), ranks=2, first_id=45)
    names = [line.partition("(")[0] for line in listed(program)]
    assert names[:2] == ["a = Embed", "a = AllReduce"] and names.count("e = AllReduce") == 1
    assert [name.partition("= ")[2] for name in names].count("AllReduce") == 3
    (embed, *_) = program.ops
    assert vars(embed.args)["first_id"] == 45


def test_domains_share_what_follows_attention() -> None:
    whole = llama(num_hidden_layers=1)
    part = cut(whole, 1, 2, has_domains=True)
    program = lower(part, ranks=2, has_domains=True)
    assert listed(program) == [
        "a = Embed() embedding",
        "b = Normalize(a) 0.0.norm",
        "c[0:64], c[64:96], c[96:128] = Product(b) 0.0.qkv",
        "c[0:64] = Rotate(c[0:64])",
        "c[64:96] = Rotate(c[64:96])",
        "d = Attend(c[0:64], c[64:96], c[96:128])",
        "e = Product(d) 0.0.o",
        "a = Add(a, e)",
        "f = Normalize(a) 0.1.norm",
        "g = Spread(f)",
        "g = AllReduce(g)",
        "h = GatedProduct(g) 0.1.gate_up",
        "i = Product(h) 0.1.down",
        "i = AllReduce(i)",
        "j = Keep(i)",
        "a = Add(a, j)",
        "k = Normalize(a) norm",
    ]
    assert program.shared == {6, 7, 8} and not lower(whole).shared
    assert program.head == lower(whole).head and program.tiles == lower(whole).tiles, "a domain has all of them"
    widths = [body.width for body in bodies(part) if isinstance(body, Mlp)]
    assert [2 * width for width in widths] == [body.width for body in bodies(whole) if isinstance(body, Mlp)]


def test_domains_that_exchange_tokens_divide_the_experts_alone() -> None:
    moe = Moe(5, Router(matrix("router", 5, 16), 2), mlp("experts.{e}.", 16, 8, experts=5), mlp("shared.", 16, 12))
    whole = of(Sublayer((Branch(moe),)), Sublayer((Branch(mlp("mlp.", 16, 32)),)))
    for rank, own in enumerate(((0, 1, 2), (3, 4))):
        part = cut(whole, rank, 2, deals_experts=True, has_domains=True, exchanges=True)
        found, dense = bodies(part)
        assert isinstance(found, Moe) and isinstance(dense, Mlp)
        assert found.experts.down.only == own and found.shared == moe.shared and dense.width == 16
        program = lower(part, ranks=2, has_domains=True)
        ops = [type(op.args).__name__ for op in program.ops]
        mixture = ops.index("Mixture")
        assert ops[: mixture + 5] == ["Embed", "Product", "Mixture", "GatedProduct", "Product", "Add", "Add"]
        assert ops[mixture + 5 :] == [
            "Spread",
            "AllReduce",
            "GatedProduct",
            "Product",
            "AllReduce",
            "Keep",
            "Add",
            "Normalize",
        ]
        assert not program.shared & {view.register for op in program.ops[: mixture + 5] for view in op.outs}


def test_norms_over_the_heads_of_all_ranks_share_a_sum() -> None:
    norms = {"q_norm": rms("q_norm", 16, 1e-6), "k_norm": rms("k_norm", 8, 1e-6)}
    whole = of(Sublayer((Branch(replace(ATTENTION, rope=None, **norms)),)))
    assert listed(lower(cut(whole, 1, 2), ranks=2, first_id=10))[2:8] == [
        "b[0:8], b[8:12], b[12:16] = Product(a) 0.0.qkv",
        "c[0:1] = MeanSquares(b[0:8])",
        "c[1:2] = MeanSquares(b[8:12])",
        "c = AllReduce(c)",
        "b[0:8] = Normalize(b[0:8], c[0:1]) 0.0.q_norm",
        "b[8:12] = Normalize(b[8:12], c[1:2]) 0.0.k_norm",
    ]


def test_ranks_that_share_a_group_of_a_norm_have_a_column_of_its_sum() -> None:
    """Four ranks, two groups."""
    mixer = mamba2("", 16, 4, 2, 3, 2, 4, norm=rms("norm", 4, 1e-6, total=8))
    for rank in range(4):
        program = lower(cut(of(Sublayer((Branch(mixer),))), rank, 4), ranks=4)
        squares, total, last = (
            next(op for op in program.ops if isinstance(op.args, kind) and op.layer == 0)
            for kind in (MeanSquares, AllReduce, Normalize)
        )
        assert squares.args == MeanSquares(4, group=rank // 2, groups=2)
        assert squares.outs == total.ins == (View(squares.outs[0].register, 0, 2),)
        assert last.ins[1] == View(squares.outs[0].register, rank // 2, 1)


def test_biased_and_unbiased_projections_are_two_products() -> None:
    """Queries, keys and values have biases and the gate has none, so they are two products."""
    biased = replace(ATTENTION, **qkvo("", 16, 4, 2, 4, True, out_bias=False), gate=matrix("gate", 16, 16), rope=None)
    assert listed(lower(of(Sublayer((Branch(biased),)))))[1:] == [
        "b = Product(a) 0.0.gate",
        "c[0:16], c[16:24], c[24:32] = Product(a) 0.0.qkv 0.0.qkv.bias",
        "d = Attend(c[0:16], c[16:24], c[24:32])",
        "d = Multiply(d, b)",
        "e = Product(d) 0.0.o",
        "a = Add(a, e)",
        "f = Normalize(a) norm",
    ]


def test_the_order_within_attention() -> None:
    q_norm, k_norm = rms("q_norm", 4, 1e-6), rms("k_norm", 4, 1e-6)
    everything = replace(
        ATTENTION, q_norm=q_norm, k_norm=k_norm, v_norm=Norm(4), clip=2.0, key_scale=0.5, sinks=Part("sinks", 4),
        temperature=Temperature(0.1, 8),
    )  # fmt: skip
    found = listed(lower(of(Sublayer((Branch(everything),)))))
    assert found[1:-2] == [
        "b[0:16], b[16:24], b[24:32] = Product(a) 0.0.qkv",
        "b[0:16] = Clip(b[0:16])",
        "b[16:24] = Clip(b[16:24])",
        "b[24:32] = Clip(b[24:32])",
        "b[24:32] = Normalize(b[24:32])",
        "b[16:24] = Scale(b[16:24])",
        "b[0:16] = Normalize(b[0:16]) 0.0.q_norm",
        "b[16:24] = Normalize(b[16:24]) 0.0.k_norm",
        "b[0:16] = Rotate(b[0:16])",
        "b[16:24] = Rotate(b[16:24])",
        "b[0:16] = Heat(b[0:16])",
        "c = Attend(b[0:16], b[16:24], b[24:32]) 0.0.sinks",
        "d = Product(c) 0.0.o",
    ]
    after = listed(lower(of(Sublayer((Branch(replace(everything, norm_after_rope=True)),)))))
    assert after[7:11] == [found[9], found[10], found[7], found[8]]


def test_layers_that_share_keys_and_values_have_one_tile() -> None:
    shared = replace(ATTENTION, k=None, v=None, shared=0)
    decoder = of(Sublayer((Branch(ATTENTION),)))
    program = lower(replace(decoder, blocks=(*decoder.blocks, Block((Sublayer((Branch(shared),)),)))))
    assert [(args.layer, args.tile) for args in program.attention] == [(0, 0), (1, 0)] and len(program.tiles) == 1
    assert any(line.endswith("= Attend(e)") for line in listed(program)), listed(program)


def test_keys_are_also_values() -> None:
    found = listed(lower(of(Sublayer((Branch(replace(ATTENTION, v=None)),)))))
    assert found[1:6] == [
        "b[0:16], b[16:24] = Product(a) 0.0.qk",
        "c = Scale(b[16:24])",
        "b[0:16] = Rotate(b[0:16])",
        "b[16:24] = Rotate(b[16:24])",
        "d = Attend(b[0:16], b[16:24], c)",
    ]


def test_parallel_branches_and_norms_around_them() -> None:
    sublayer = Sublayer(
        (
            Branch(ATTENTION, post=rms("p", 16, 1e-6)),
            Branch(Mlp(8, matrix("up", 8, 16), matrix("down", 16, 8), act="gelu"), in_scale=2.0, out_scale=0.5),
        ),
        norm=layer_norm("n", 16, 1e-5),
        post=rms("post", 16, 1e-6),
        after=rms("after", 16, 1e-6),
        alpha=2.0,
    )
    assert listed(lower(of(sublayer)))[1:] == [
        "b = Normalize(a) 0.0.norm 0.0.norm.bias",
        "c[0:16], c[16:24], c[24:32] = Product(b) 0.0.qkv",
        "c[0:16] = Rotate(c[0:16])",
        "c[16:24] = Rotate(c[16:24])",
        "d = Attend(c[0:16], c[16:24], c[24:32])",
        "e = Product(d) 0.0.o",
        "f = Normalize(e) 0.0.branch_norm",
        "g = Scale(b)",
        "h = Product(g) 0.0.1.up",
        "h = Activate(h)",
        "i = Product(h) 0.0.1.down",
        "i = Scale(i)",
        "f = Add(f, i)",
        "j = Normalize(f) 0.0.post_norm",
        "a = Add(a, j)",
        "k = Normalize(a) 0.0.after_norm",
        "l = Normalize(k) norm",
    ]


def test_a_delayed_branch_is_added_to_a_later_sublayer() -> None:
    """The result of a branch with a delay is added one sublayer later (LongCat)."""
    dense = mlp("m.", 16, 8)
    first = Sublayer((Branch(dense), Branch(mlp("slow.", 16, 8), delay=1)))
    found = listed(lower(of(first, Sublayer((Branch(dense),)))))
    adds = [line for line in found if "Add" in line]
    assert adds == ["a = Add(a, c)", "a = Add(a, g)", "a = Add(a, e)"]


def test_a_shared_block_beside_the_stream() -> None:
    """What reads the stream and the embedding is added to what a mixer reads, but not to the stream (Zamba 2). Both
    layers use the same matrices of it."""
    beside = replace(
        ATTENTION,
        **{name: matrix(f"wide.{name}", rows, 32) for name, rows in (("q", 16), ("k", 8), ("v", 8))},
        rope=None,
    )
    dense = Mlp(8, matrix("shared.up", 8, 16), matrix("shared.down", 16, 8), act="gelu")

    def block(layer: int) -> Block:
        parts = (Branch(beside, rms("n", 32, 1e-6)), Branch(dense))
        aside = Aside(parts, matrix(f"{layer}.linear", 16, 16))
        return Block((Sublayer((Branch(mlp(f"{layer}.m.", 16, 8)),), rms(f"{layer}.n", 16, 1e-6), aside=aside),))

    program = lower(replace(of(), blocks=(block(0), block(1))))
    assert listed(program)[:15] == [
        "a = Embed() embedding",
        "b[16:32] = Scale(a)",
        "b[0:16] = Scale(a)",
        "c = Normalize(b) 0.0.aside.0.pre_norm",
        "d[0:16], d[16:24], d[24:32] = Product(c) 0.0.aside.0.qkv",
        "e = Attend(d[0:16], d[16:24], d[24:32])",
        "f = Product(e) 0.0.aside.0.o",
        "g = Product(f) 0.0.aside.1.up",
        "g = Activate(g)",
        "h = Product(g) 0.0.aside.1.down",
        "i = Product(h) 0.0.aside.out",
        "j = Add(a, i)",
        "k = Normalize(j) 0.0.norm",
        "l = GatedProduct(k) 0.0.gate_up",
        "m = Product(l) 0.0.down",
    ]
    assert listed(program)[15] == "a = Add(a, m)"
    assert [line.split()[-1] for line in listed(program)[16:] if "Product" in line] == [
        "0.0.aside.0.qkv", "0.0.aside.0.o", "0.0.aside.1.up", "0.0.aside.1.down", "1.0.aside.out", "1.0.gate_up",
        "1.0.down",
    ]  # fmt: skip


def test_projections_of_low_rank() -> None:
    """Those of the gate and the ups share their first matrix."""

    def low(name: str, rows: int) -> LowRank:
        return LowRank(matrix(name + ".down", 2, 16), matrix(name + ".up", rows, 2))

    attention = replace(ATTENTION, low=(low("q", 16), low("k", 8), low("v", 8)), rope=None)
    down = matrix("down", 2, 16)
    both = LowRank(down, matrix("g.up", 8, 2)), LowRank(down, matrix("u.up", 8, 2))
    dense = replace(mlp("m.", 16, 8), low=both)
    assert listed(lower(of(Sublayer((Branch(attention), Branch(dense))))))[1:17] == [
        "b[0:16], b[16:24], b[24:32] = Product(a) 0.0.qkv",
        "c[0:2], c[2:4], c[4:6] = Product(a) 0.0.low.down",
        "d = Product(c[0:2]) 0.0.low.0.up",
        "b[0:16] = Add(b[0:16], d)",
        "e = Product(c[2:4]) 0.0.low.1.up",
        "b[16:24] = Add(b[16:24], e)",
        "f = Product(c[4:6]) 0.0.low.2.up",
        "b[24:32] = Add(b[24:32], f)",
        "g = Attend(b[0:16], b[16:24], b[24:32])",
        "h = Product(g) 0.0.o",
        "i[0:8], i[8:16] = Product(a) 0.0.1.gate_up",
        "j = Product(a) 0.0.1.low.down",
        "k = Product(j) 0.0.1.low.0.up",
        "i[0:8] = Add(i[0:8], k)",
        "l = Product(j) 0.0.1.low.1.up",
        "i[8:16] = Add(i[8:16], l)",
    ]


def test_several_streams() -> None:
    """Of three streams the second goes through the layer, whose last branch also adds what it reads (Gemma 3n)."""
    altup = AltUp(
        1, matrix("router", 3, 16), rms("rn", 16, 1e-6), 0.25, matrix("predict", 9, 3), matrix("correct", 3, 3)
    )
    laurel = Branch(LowRank(matrix("left", 2, 16), matrix("right", 16, 2)), post=rms("ln", 16, 1e-6), adds_input=True)
    streams = Streams((matrix("s0", 16, 16), matrix("s1", 16, 16)), (matrix("j0", 16, 16), matrix("j1", 16, 16)))
    decoder = replace(of(), blocks=(Block((Sublayer((laurel,)),), altup=altup),), streams=streams)
    assert listed(lower(decoder)) == [
        "a = Embed() embedding",
        "b[0:16] = Scale(a)",
        "c[0:16], c[16:32] = Product(a) streams.split",
        "b[16:32] = MatchMagnitude(c[0:16], a)",
        "b[32:48] = MatchMagnitude(c[16:32], a)",
        "e = Normalize(b[16:32]) 0.altup.norm",
        "f = Product(e) 0.altup.router",
        "f = Scale(f)",
        "f = Activate(f)",
        "g = Product(f) 0.altup.predict",
        "d = MixStreams(b, b, g)",
        "h = Scale(d[16:32])",
        "i = Product(h) 0.0.low_rank.down",
        "j = Product(i) 0.0.low_rank.up",
        "k = Normalize(j) 0.0.branch_norm",
        "k = Add(k, h)",
        "h = Add(h, k)",
        "l = Normalize(h) 0.altup.norm",
        "m = Product(l) 0.altup.router",
        "m = Scale(m)",
        "m = Activate(m)",
        "n = Product(m) 0.altup.correct",
        "h = Add(h, d[16:32])",
        "d = MixStreams(d, h, n)",
        "o = Scale(d[0:16])",
        "p = Product(d[16:32]) streams.0.join",
        "p = MatchMagnitude(p, d[0:16])",
        "o = Add(o, p)",
        "q = Product(d[32:48]) streams.1.join",
        "q = MatchMagnitude(q, d[0:16])",
        "o = Add(o, q)",
        "o = Scale(o)",
        "r = Normalize(o) norm",
    ]


def test_experts_with_shared_ones() -> None:
    moe = Moe(
        3, Router(matrix("router", 3, 16), 2), mlp("e.{e}.", 16, 8, experts=3), mlp("s.", 16, 4),
        matrix("shared_gate", 1, 16),
    )  # fmt: skip
    assert listed(lower(of(Sublayer((Branch(moe),), rms("n", 16, 1e-6)))))[2:-1] == [
        "c = Product(b) 0.0.router",
        "d = Mixture(b, c) 0.0.experts.gate_up 0.0.experts.down",
        "e = GatedProduct(b) 0.0.shared.gate_up",
        "f = Product(e) 0.0.shared.down",
        "g = Product(b) 0.0.shared_gate",
        "f = Multiply(f, g)",
        "d = Add(d, f)",
        "a = Add(a, d)",
    ]
    reads = replace(moe, router=replace(moe.router, reads_stream=True, norm=Norm(16), scale_in=0.5), shared=None)
    assert listed(lower(of(Sublayer((Branch(reads),), rms("n", 16, 1e-6)))))[2:6] == [
        "c = Normalize(a)",
        "d = Scale(c)",
        "e = Product(d) 0.0.router",
        "f = Mixture(b, e) 0.0.experts.gate_up 0.0.experts.down",
    ]


def test_uses_of_matrices() -> None:
    moe = Moe(3, Router(matrix("router", 3, 16), 2), mlp("e.{e}.", 16, 8, experts=3))
    program = lower(of(Sublayer((Branch(moe),)), Sublayer((Branch(mlp("m.", 16, 8)),))))
    assert {matrix.key: matrix.use for matrix in program.matrices} == {
        "embedding": "table",
        "0.0.router": "router",
        "0.0.experts.gate_up": "gated experts",
        "0.0.experts.down": "experts",
        "0.1.gate_up": "gated",
        "0.1.down": "product",
    }


def test_adjacent_pairs_become_halves_of_reordered_rows() -> None:
    adjacent = replace(ATTENTION, rope=Rope(4, pairs="adjacent"))
    (qkv,) = [matrix for matrix in lower(of(Sublayer((Branch(adjacent),)))).matrices if matrix.key == "0.0.qkv"]
    q, k, v = qkv.weights
    assert q.parts[:2] == (Part("q_proj.weight", 1, 0, 2, 2), Part("q_proj.weight", 1, 1, 2, 2))
    assert len(k.parts) == 4 and v == ATTENTION.v


def test_embeddings() -> None:
    embedding = Embedding(
        matrix("embed", 20, 8), 3.0, norm=rms("n", 16, 1e-6), project=matrix("project", 16, 8),
        positions=matrix("positions", 30, 16), offset=2,
    )  # fmt: skip
    head = Head(project=matrix("out", 8, 16), softcap=5.0, scale=0.5)
    program = lower(of(Sublayer((Branch(mlp("m.", 16, 8)),)), embedding=embedding, head=head))
    assert listed(program)[:4] == [
        "a = Embed() embedding",
        "b = Product(a) embedding.project",
        "b = Positions() positions",
        "c = Normalize(b) embedding.norm",
    ]
    assert (program.head_scale, program.head_softcap) == (0.5, 5.0)
    assert program.head_project is not None and program.head_project in program.matrices


def check_program(program: Program) -> None:
    """Every number that is read has been written; operations write only where their docstrings allow."""
    written: list[set[int]] = [set() for _ in program.widths]
    for op in program.ops:
        reads = (*op.ins, *op.outs) if type(op.args).__name__ == "Positions" else op.ins
        for view in reads:
            assert written[view.register] >= set(range(view.first, view.first + view.width)), op
        for view in op.outs:
            assert 0 <= view.first < view.first + view.width <= program.widths[view.register], op
            written[view.register] |= set(range(view.first, view.first + view.width))
        touched = [view for view in op.outs if view.register in {each.register for each in op.ins}]
        for view in touched:
            others = [each for each in op.ins[1:] if each.register == view.register]
            assert op.ins[0] == view and not others, op
    result = program.result
    assert written[result.register] == set(range(program.widths[result.register])) and result.first == 0


def check_layout(program: Program) -> None:
    """Registers that are in use at the same time have places of their own, and the result's stays its own."""
    places = layout(program)
    first: dict[int, int] = {}
    last: dict[int, int] = {program.result.register: len(program.ops)}
    for number, op in enumerate(program.ops):
        for view in (*op.ins, *op.outs):
            first.setdefault(view.register, number)
            last[view.register] = max(number, last.get(view.register, 0))
    for a in first:
        begin = places.offsets[a], places.offsets[a] + program.widths[a]
        assert begin[0] >= 0 and begin[1] <= places.size
        for b in first:
            if a < b and first[a] <= last[b] and first[b] <= last[a]:
                other = places.offsets[b], places.offsets[b] + program.widths[b]
                assert begin[1] <= other[0] or other[1] <= begin[0], (a, b)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(decoders())
def test_programs_of_random_decoders(decoder: Decoder) -> None:
    for ranks in (1, 2):
        program = lower(decoder, ranks=ranks)
        check_program(program)
        check_layout(program)
        keys = [target.key for target in program.targets]
        assert len(keys) == len({*keys}), "a key for each matrix and vector"


def test_layout_uses_places_again() -> None:
    """A model's registers take what a few layers of it need, not all."""
    few, many = (lower(llama(num_hidden_layers=count)) for count in (2, 20))
    assert layout(few).size == layout(many).size < sum(few.widths)


@pytest.mark.parametrize("strided", [False, True])
def test_vectors_are_those_of_all_weights_in_a_product(strided: bool) -> None:
    every = 16 if strided else 0
    parts = [rows_of("qkv", 8, 16, first=first, every=every, times=2 if strided else 1, bias=True) for first in (0, 8)]
    wide = replace(ATTENTION, q=matrix("q", 16, 16, True), k=parts[0], v=parts[1], o=matrix("o", 16, 16))
    if strided:
        wide = replace(wide, kv_heads=4)
    program = lower(of(Sublayer((Branch(replace(wide, rope=None)),))))
    (bias,) = [vector for vector in program.vectors if vector.key == "0.0.qkv.bias"]
    assert sum(weight.rows for weight in bias.weights) == sum(weight.rows for weight in (wide.q, *parts))
    assert bias.weights[1] == Weight(parts[0].bias)
