"""The part of a recurrent mixer that one rank holds: some of its heads or channels, with their states."""

from collections.abc import Callable
from dataclasses import replace

from ...errors import ConfigError
from .description import Conv, DeltaNet, Lightning, LowRank, Mamba1, Mamba2, Norm, ShortConv, Weight
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


def cut_mamba1(m: Mamba1, evenly: Evenly, *, is_first: bool) -> Mamba1:
    """By channels. Time steps, B and C need all of them: `x` is a sum over the ranks."""
    part = evenly(m.channels, "channels of Mamba")
    return replace(
        m,
        channels=part[1] - part[0],
        xz=_some(m.xz, part, _plus(part, m.channels)),
        conv=_conv(m.conv, part),
        x=columns(m.x, *part, is_first=is_first),
        dt=rows(m.dt, *part),
        a_log=rows(m.a_log, *part),
        d=rows(m.d, *part),
        out=columns(m.out, *part, is_first=is_first),
    )


def cut_mamba2(m: Mamba2, evenly: Evenly, rank: int, size: int) -> Mamba2:
    """By heads, with their groups. Several ranks may share a group: each has its B and C, and a norm over the group's
    heads is one over these ranks."""
    part = first, last = evenly(m.heads, "heads of Mamba")
    groups = _groups(m.groups, rank, size)
    inner, of_groups = m.heads * m.head_dim, m.groups * m.state_dim
    x, b = _times(part, m.head_dim), _times(groups, m.state_dim)
    mixed = x, _plus(b, inner), _plus(b, inner + of_groups)
    z_and_mixed = x, *(_plus(each, inner) for each in mixed)
    return replace(
        m,
        heads=last - first,
        groups=groups[1] - groups[0],
        zxbcdt=_some(m.zxbcdt, *z_and_mixed, _plus(part, 2 * (inner + of_groups))),
        conv=_conv(m.conv, *mixed),
        a_log=rows(m.a_log, *part),
        d=rows(m.d, *part),
        dt_bias=rows(m.dt_bias, *part),
        norm=None if m.norm is None else _norm(m.norm, x, inner, rank, size),
        out=columns(m.out, *x, is_first=rank == 0),
    )


def _groups(num: int, rank: int, size: int) -> tuple[int, int]:
    if num % size and size % num:
        raise ConfigError(
            f"--tensor-parallel-size {size} and the model's {num} groups of Mamba: one must divide the other."
        )
    first = rank * num // size
    return first, first + max(1, num // size)


def cut_short_conv(s: ShortConv, evenly: Evenly, *, is_first: bool) -> ShortConv:
    channels = s.conv.channels
    part = evenly(channels, "channels of short convolutions")
    return replace(
        s,
        bcx=_some(s.bcx, part, _plus(part, channels), _plus(part, 2 * channels)),
        conv=_conv(s.conv, part),
        out=columns(s.out, *part, is_first=is_first),
    )


def cut_lightning(n: Lightning, evenly: Evenly, rank: int, size: int) -> Lightning:
    """By heads."""
    part = first, last = evenly(n.heads, "heads of lightning attention")
    width, of_heads = n.heads * n.head_dim, _times(part, n.head_dim)
    return replace(
        n,
        heads=last - first,
        qkv=_some(n.qkv, of_heads, _plus(of_heads, width), _plus(of_heads, 2 * width)),
        decay=n.decay[first:last],
        norm=_norm(n.norm, of_heads, width, rank, size),
        gate=rows(n.gate, *of_heads),
        out=columns(n.out, *of_heads, is_first=rank == 0),
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


def _norm(norm: Norm, part: Range, width: int, rank: int, size: int) -> Norm:
    """Of the columns `part` of `width`, which are some of its groups, or a part of one."""
    first, last = part
    groups = width // norm.size
    is_own = norm.weight is not None and norm.weight.rows == width
    weight = rows(norm.weight, first, last) if is_own else norm.weight
    if groups % size == 0:
        return replace(norm, weight=weight)
    if size % groups:
        raise ConfigError(
            f"--tensor-parallel-size {size} and the {groups} groups of the model's norms over recurrent layers: one "
            "must divide the other."
        )
    assert is_own or norm.weight is None, "a weight that the groups share, of which this rank would need a part"
    return replace(
        norm, size=last - first, weight=weight, ranks=size // groups, group=rank * groups // size, groups=groups
    )
