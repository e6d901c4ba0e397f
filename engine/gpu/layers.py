"""Recognizes the layers that the Triton kernels have in a program: attention and a gated feed-forward part or experts,
each after a norm and added to the stream."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..models.description import Rope
from ..models.program import (
    Add,
    AllReduce,
    Args,
    Attend,
    Embed,
    GatedProduct,
    Mixture,
    Normalize,
    Op,
    Product,
    Program,
    Rotate,
)

_DIMS = (16, 32, 64, 128, 256)  # head dimensions that the kernels support
_MAX_GROUP = 16  # query heads per kv head that the kernels support


@dataclass(frozen=True)
class Gated:
    gate_up: GatedProduct
    down: Product


@dataclass(frozen=True)
class Chosen:
    router: Product
    experts: Mixture


@dataclass(frozen=True)
class Layer:
    input_norm: Normalize
    qkv: Product
    head_norms: tuple[Normalize, Normalize] | None
    rope: Rope
    attend: Attend
    out: Product
    post_norm: Normalize
    feed_forward: Gated | Chosen


class UnknownLayerError(Exception):
    """The kernels cannot compute a program. The text says why."""


def layers_of(program: Program) -> list[Layer]:
    """Raises UnknownLayerError."""
    if program.states:
        raise UnknownLayerError("the kernels have no recurrent layers")
    count = len(program.tiles)
    by_layer: list[list[Op]] = [[] for _ in range(count + 2)]
    for op in program.ops:
        if not isinstance(op.args, AllReduce):
            by_layer[min(op.layer, count) + 1].append(op)
    first, *rest, last = by_layer
    kinds = [type(op.args) for op in (*first, *last)]
    embed = program.ops[0].args
    is_plain = kinds == [Embed, Normalize] and isinstance(embed, Embed) and embed.scale == 1.0
    if not is_plain or program.head_scale != 1.0 or program.head_softcap or program.head_project or program.head_bias:
        raise UnknownLayerError("the kernels have no such embedding or head")
    layers = [_layer(ops) for ops in rest]
    if len({(layer.rope, layer.attend.heads, layer.attend.kv_heads, layer.attend.head_dim) for layer in layers}) > 1:
        raise UnknownLayerError("the kernels have one size of heads and one rotary embedding for all layers")
    return layers


def _layer(ops: list[Op]) -> Layer:
    args = [op.args for op in ops]
    where = next((i for i, each in enumerate(args) if isinstance(each, Attend)), 0)
    match args[:2], args[where : where + 4], args[-1:]:
        case (
            [Normalize() as input_norm, Product() as qkv],
            [Attend() as attend, Product() as out, Add() as add, Normalize() as post_norm],
            [Add() as last_add],
        ):
            turns, feed_forward = args[2:where], args[where + 4 : -1]
        case _:
            raise UnknownLayerError("the kernels have no layers of this kind")
    norms = [turn for turn in turns if isinstance(turn, Normalize)]
    rotations = [turn for turn in turns if isinstance(turn, Rotate)]
    if len(norms) + len(rotations) < len(turns) or len(rotations) != 2 or len(norms) not in (0, 2):
        raise UnknownLayerError("the kernels have no attention of this kind")
    if {add, last_add} != {Add()} or list(turns[: len(norms)]) != norms:
        raise UnknownLayerError("the kernels have no residual of this kind")
    _check(attend, rotations[0].rope)
    for norm in (input_norm, post_norm, *norms):
        if norm.norm.kind != "rms" or norm.weight is None or norm.bias is not None or norm.weight.is_float32:
            raise UnknownLayerError("the kernels have no norm of this kind")
    if any(norm.norm.size != attend.head_dim or norm.norm.ranks > 1 for norm in norms):
        raise UnknownLayerError("the kernels have no norm over all heads")
    pair = (norms[0], norms[1]) if norms else None
    return Layer(input_norm, qkv, pair, rotations[0].rope, attend, out, post_norm, _feed_forward(feed_forward))


def _check(attend: Attend, rope: Rope) -> None:
    if attend.head_dim not in _DIMS or attend.value_dim != attend.head_dim or rope.dims != attend.head_dim:
        raise UnknownLayerError(f"the kernels do not support a head dimension of {attend.head_dim}")
    if attend.heads // attend.kv_heads > _MAX_GROUP:
        raise UnknownLayerError(f"the kernels support at most {_MAX_GROUP} query heads per key/value head")
    if attend.softcap or attend.sinks is not None or attend.alibi is not None or attend.reach.kind == "chunk":
        raise UnknownLayerError("the kernels have no attention of this kind")


def _feed_forward(args: Sequence[Args]) -> Gated | Chosen:
    match args:
        case [GatedProduct() as gate_up, Product() as down]:
            return Gated(gate_up, down)
        case [Product() as router, Mixture() as experts]:
            how = experts.router
            rest = (experts.correction, experts.expert_scale, experts.gate_up_bias, experts.down_bias)
            is_known = how.score == "softmax" and how.groups == 1 and how.scale == 1.0 and how.on == "output"
            if not is_known or any(rest) or experts.act != "silu" or not experts.has_gate or how.zero_experts:
                raise UnknownLayerError("the kernels have no experts of this kind")
            if experts.down.columns % 32 or experts.down.rows % 32:
                raise UnknownLayerError("the kernels need experts whose sizes are multiples of 32")
            return Chosen(router, experts)
    raise UnknownLayerError("the kernels have no feed-forward part of this kind")
