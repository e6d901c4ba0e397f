"""The part of a recurrent mixer that one rank holds: some of its heads or channels, with their states."""

from collections.abc import Callable
from dataclasses import replace

from ...errors import ConfigError
from .description import Conv, DeltaNet, LowRank, Mamba2, Norm, ShortConv, Weight
from .parts import columns, rows

Evenly = Callable[[int, str], tuple[int, int]]
"""(number, of what) → [first, last) of this rank. Raises ConfigError if they cannot be divided evenly."""


def cut_delta_net(d: DeltaNet, evenly: Evenly, *, is_first: bool) -> DeltaNet:
    """By key heads, with the value heads that they serve. is_first: of the ranks."""
    first, last = evenly(d.key_heads, "key heads of the delta rule")
    share, keys = d.value_heads // d.key_heads, d.key_heads * d.key_dim
    heads = first * share, last * share
    of_keys, of_values = _times((first, last), d.key_dim), _times(heads, d.value_dim)
    qkv = of_keys, _plus(of_keys, keys), _plus(of_values, 2 * keys)
    decays = _times(heads, d.key_dim if d.decay_per == "channel" else 1)
    return replace(
        d,
        key_heads=last - first,
        value_heads=heads[1] - heads[0],
        qkv=_some(d.qkv, *qkv),
        conv=_conv(d.conv, *qkv),
        beta=rows(d.beta, *heads),
        decay=_outputs(d.decay, *decays),
        a_log=rows(d.a_log, *heads),
        dt_bias=rows(d.dt_bias, *decays),
        gate=_outputs(d.gate, *of_values),
        o=columns(d.o, *of_values, is_first=is_first),
    )


def cut_mamba2(m: Mamba2, evenly: Evenly, rank: int, size: int) -> Mamba2:
    """By groups, with their heads. A group that several ranks share is repeated, if no norm goes over its heads."""
    first, last = evenly(m.heads, "heads of Mamba")
    if m.groups % size == 0:
        groups = evenly(m.groups, "groups of Mamba")
    elif m.norm is not None:
        raise ConfigError(
            f"--tensor-parallel-size {size}: the model's norms over the heads of {m.groups} groups of Mamba cannot be "
            f"divided among ranks."
        )
    elif size % m.groups:
        raise ConfigError(
            f"--tensor-parallel-size {size} and the model's {m.groups} groups of Mamba: one must divide the other."
        )
    else:
        groups = rank * m.groups // size, rank * m.groups // size + 1
    inner, of_groups = m.heads * m.head_dim, m.groups * m.state_dim
    x, b, dt = _times((first, last), m.head_dim), _times(groups, m.state_dim), (first, last)
    mixed = x, _plus(b, inner), _plus(b, inner + of_groups)
    z_and_mixed = x, *(_plus(part, inner) for part in mixed)
    return replace(
        m,
        heads=last - first,
        groups=groups[1] - groups[0],
        zxbcdt=_some(m.zxbcdt, *z_and_mixed, _plus(dt, 2 * (inner + of_groups))),
        conv=_conv(m.conv, *mixed),
        a_log=rows(m.a_log, *dt),
        d=rows(m.d, *dt),
        dt_bias=rows(m.dt_bias, *dt),
        norm=_norm(m.norm, *x),
        out=columns(m.out, *x, is_first=rank == 0),
    )


def cut_short_conv(s: ShortConv, evenly: Evenly, *, is_first: bool) -> ShortConv:
    channels = s.conv.channels
    part = evenly(channels, "channels of short convolutions")
    return replace(
        s,
        bcx=_some(s.bcx, part, _plus(part, channels), _plus(part, 2 * channels)),
        conv=_conv(s.conv, part),
        out=columns(s.out, *part, is_first=is_first),
    )


Range = tuple[int, int]


def _times(some: Range, factor: int) -> Range:
    return some[0] * factor, some[1] * factor


def _plus(some: Range, offset: int) -> Range:
    return some[0] + offset, some[1] + offset


def _some(weight: Weight, *ranges: Range) -> Weight:
    """The rows of several ranges, one after the other."""
    assert weight.other is None, "ranges of a weight with two layouts"
    parts = [rows(weight, *each) for each in ranges]
    return replace(
        weight,
        parts=tuple(part for each in parts for part in each.parts),
        bias=tuple(part for each in parts for part in each.bias),
    )


def _conv(conv: Conv, *ranges: Range) -> Conv:
    bias = None if conv.bias is None else _some(conv.bias, *ranges)
    return replace(conv, weight=_some(conv.weight, *ranges), bias=bias, channels=sum(b - a for a, b in ranges))


def _outputs(weight: Weight | LowRank, first: int, last: int) -> Weight | LowRank:
    return (
        replace(weight, up=rows(weight.up, first, last)) if isinstance(weight, LowRank) else rows(weight, first, last)
    )


def _norm(norm: Norm | None, first: int, last: int) -> Norm | None:
    """Of whole groups, each with weights of its own."""
    return None if norm is None else replace(norm, weight=rows(norm.weight, first, last))
