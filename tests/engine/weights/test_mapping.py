"""Which rows and columns of which tensors fill a matrix or vector."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagewire.engine.models.description import Decoder, Embedding, Head, Part, Weight
from pagewire.engine.models.pieces import matrix, rows_of, vector
from pagewire.engine.models.program import Matrix, Vector
from pagewire.engine.weights.mapping import Names, Source, shapes_of


def decoder(prefixes: tuple[str, ...] = ("model.", ""), ignored: tuple[str, ...] = ()) -> Decoder:
    return Decoder(8, 10, Embedding(matrix("embed", 10, 8)), (), None, Head(), prefixes, ignored)


def names(*present: str, prefixes: tuple[str, ...] = ("model.", "")) -> Names:
    return Names(decoder(prefixes), set(present))


def filled(target: Matrix | Vector, found: list[Source], tensors: dict[str, Tensor]) -> Tensor:
    """The target with the sources' parts of tensors [rows, columns], [columns, rows], [experts, …] or [rows]."""
    weight = target.weights[0]
    rows = sum(weight.rows for weight in target.weights)
    size = (rows, target.columns) if isinstance(target, Matrix) else (rows,)
    out = torch.full((weight.experts, *size) if weight.experts else size, torch.nan)
    for source in found:
        values = tensors[source.tensor]
        if source.columns[1]:
            values = (values.transpose(-1, -2) if source.is_transposed else values)[..., slice(*source.columns)]
            values = values[..., source.indices(), :]
        else:
            values = values[..., source.indices()]
        place = out if source.expert is None else out[source.expert]
        if source.num_experts:
            place[:, slice(*source.to)] = values
        else:
            place[slice(*source.to)] = values
    return out


def test_weights_follow_each_other_in_a_matrix() -> None:
    target = Matrix("qkv", (matrix("q", 4, 8), matrix("k", 2, 8), matrix("v", 2, 8)))
    found = names("model.embed.weight").sources(target)
    assert [(source.tensor, source.to, source.run) for source in found] == [
        ("model.q.weight", (0, 4), (0, 4)),
        ("model.k.weight", (4, 6), (0, 2)),
        ("model.v.weight", (6, 8), (0, 2)),
    ]
    tensors = {source.tensor: torch.randn(source.end, 8) for source in found}
    assert torch.equal(filled(target, found, tensors), torch.cat(list(tensors.values())))


def test_runs_and_strided_parts_of_one_tensor() -> None:
    """A tensor in which queries, keys and values alternate by head: 3 heads of 2 rows."""
    whole = torch.randn(18, 8)
    for first in (0, 2, 4):
        target = Matrix("m", (rows_of("qkv", 2, 8, first=first, every=6, times=3),))
        (source,) = names("model.embed.weight").sources(target)
        assert source.run is None and source.end == 14 + first
        expected = torch.cat([whole[6 * head + first : 6 * head + first + 2] for head in range(3)])
        assert torch.equal(filled(target, [source], {"model.qkv.weight": whole}), expected)
    target = Matrix("m", (rows_of("qkv", 6, 8, first=6, every=6, times=2),))
    (source,) = names("model.embed.weight").sources(target)
    assert source.run == (6, 18) and source.indices() == list(range(6, 18)), "adjacent turns are one run"


def test_rows_that_are_apart_are_within_a_span_at_which_stored_matrices_can_be_cut() -> None:
    for first, span in ((0, (0, 128)), (127, (0, 256)), (300, (256, 400))):
        target = Matrix("m", (rows_of("q", 1, 8, first=first, every=5, times=18),))
        (source,) = names("model.embed.weight").sources(target)
        assert source.run is None and source.span(400) == span
        assert span[0] % 128 == 0 and span[0] <= min(source.indices()) and max(source.indices()) < span[1]


def test_parts_of_two_tensors_in_one_weight() -> None:
    weight = Weight((Part("a", 2, 1), Part("a", 1, 5), Part("b", 3)), 8)
    found = names().sources(Matrix("m", (weight,)))
    assert [(source.tensor, source.to, source.indices()) for source in found] == [
        ("model.a", (0, 3), [1, 2, 5]),
        ("model.b", (3, 6), [0, 1, 2]),
    ]


def test_columns_of_a_rank() -> None:
    target = Matrix("m", (replace(matrix("o", 8, 3), first_column=4),))
    (source,) = names().sources(target)
    assert source.columns == (4, 7)
    whole = torch.randn(8, 9)
    assert torch.equal(filled(target, [source], {"model.o.weight": whole}), whole[:, 4:7])


def test_a_tensor_for_each_expert() -> None:
    target = Matrix("m", (matrix("e.{e}.gate", 2, 8, experts=3), matrix("e.{e}.up", 2, 8, experts=3)))
    found = names().sources(target)
    assert [(source.tensor, source.expert, source.to, source.num_experts) for source in found] == [
        *((f"model.e.{expert}.gate.weight", expert, (0, 2), 0) for expert in range(3)),
        *((f"model.e.{expert}.up.weight", expert, (2, 4), 0) for expert in range(3)),
    ]
    tensors = {source.tensor: torch.randn(2, 8) for source in found}
    expected = [
        torch.cat([tensors[f"model.e.{expert}.{name}.weight"] for name in ("gate", "up")]) for expert in range(3)
    ]
    assert torch.equal(filled(target, found, tensors), torch.stack(expected))


def test_a_tensor_of_all_experts_that_is_transposed() -> None:
    """As gpt-oss: [experts, columns, 2 · rows], gates and ups in turn."""
    gate, up = (Weight((Part("gate_up", 1, first, 2, 4),), 8, experts=3, is_transposed=True) for first in (0, 1))
    target = Matrix("m", (gate, up))
    found = names().sources(target)
    assert shapes_of(found) == {"model.gate_up": (3, 8, 8)}
    whole = torch.randn(3, 8, 8)
    expected = torch.cat((whole.transpose(1, 2)[:, 0::2], whole.transpose(1, 2)[:, 1::2]), dim=1)
    assert torch.equal(filled(target, found, {"model.gate_up": whole}), expected)


def test_vectors() -> None:
    target = Vector("bias", (vector("a", 4), vector("b", 2, "plus_one")))
    found = names().sources(target)
    assert [(source.tensor, source.columns, source.map) for source in found] == [
        ("model.a", (0, 0), ""),
        ("model.b", (0, 0), "plus_one"),
    ]
    assert shapes_of(found) == {"model.a": (4,), "model.b": (2,)}


def test_the_other_weight_is_taken_if_the_tensors_are_not_there() -> None:
    fused = rows_of("qkv", 4, 8, first=4)
    weight = replace(matrix("k", 4, 8), other=replace(fused, other=matrix("third", 4, 8)))
    target = Matrix("m", (weight,))
    for present, taken in (
        (("model.k.weight", "model.qkv.weight"), "model.k.weight"),
        (("model.qkv.weight",), "model.qkv.weight"),
        (("model.third.weight",), "model.third.weight"),
        ((), "model.third.weight"),
    ):
        (source,) = names(*present).sources(target)
        assert source.tensor == taken
    expert = Weight((Part("e.{e}.up", 4),), 8, experts=2, other=Weight((Part("up", 4),), 8, experts=2))
    assert len(names("model.e.0.up").sources(Matrix("m", (expert,)))) == 2
    assert len(names("model.up").sources(Matrix("m", (expert,)))) == 1


@pytest.mark.parametrize(
    ("present", "prefix"),
    [
        ("model.embed.weight", "model."),
        ("embed.weight", ""),
        ("model.language_model.embed.weight", "model.language_model."),
    ],
)
def test_the_prefix_is_the_first_under_which_the_embedding_is(present: str, prefix: str) -> None:
    found = names(present, prefixes=("model.", "model.language_model.", ""))
    assert found.of("layers.0.w") == f"{prefix}layers.0.w"


def test_without_an_embedding_names_have_the_first_prefix() -> None:
    assert names("nothing").of("w") == "model.w"


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_names_at_the_root_are_found_under_wrappers(head: str) -> None:
    assert names("model.embed.weight", head).of("/lm_head.weight") == head
    assert names("model.embed.weight").of("/lm_head.weight") == "lm_head.weight", "for the error message"


def test_ignored_names_are_those_of_the_page_and_derived_buffers() -> None:
    found = Names(decoder(ignored=(r"(.*\.)?visual\..*",)), set())
    assert found.is_ignored("model.visual.w") and found.is_ignored("visual.w")
    assert found.is_ignored("model.layers.0.self_attn.rotary_emb.inv_freq") and found.is_ignored("rotary_emb.inv_freq")
    assert not found.is_ignored("model.visualize.w") and not found.is_ignored("model.layers.0.w")
    assert not found.is_ignored("rotary_emb.inv_freq.w")


def test_shapes_are_those_of_all_parts_of_a_tensor() -> None:
    parts = [rows_of("qkv", 2, 8, first=first, every=6, times=3) for first in (0, 2, 4)]
    sources = [source for part in parts for source in names().sources(Matrix("m", (part,)))]
    assert shapes_of(sources) == {"model.qkv.weight": (18, 8)}
    assert shapes_of(sources[:1]) == {"model.qkv.weight": (14, 8)}
    assert shapes_of(names().sources(Matrix("m", (matrix("w", 3, 5, is_transposed=True),)))) == {
        "model.w.weight": (5, 3)
    }
