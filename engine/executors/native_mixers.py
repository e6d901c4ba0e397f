"""Compiles the operations of recurrent mixers for the C program."""

from collections.abc import Callable

from torch import Tensor

from ...kernels.cpu import scans
from ...kernels.cpu.structs import Columns, MixerFields
from ...kernels.states import StateRows, Tiles
from ..attention.native import NativePagedAttention
from ..models.program import (
    Convolve,
    GatedNormalize,
    Op,
    ScanDelta,
    ScanLightning,
    ScanMamba1,
    ScanMamba2,
    States,
    Vector,
    View,
)
from .mixers import Mixer, Mixers

_KINDS = "conv", "delta", "mamba1", "mamba2", "lightning", "norm"  # `MixerKind` of program.c


def mixer_fields(
    args: Mixer, op: Op, mixers: Mixers[StateRows], attention: NativePagedAttention, columns: Callable[[View], Columns]
) -> MixerFields:
    """Valid as long as the mixers and the attention's cache. columns: where a view lies."""
    ins, out = op.ins, op.outs[0]

    def tiles(states: States) -> Tiles:
        return attention.state_tiles(states.first, states.count, states.per_tile)

    def vector(name: Vector) -> Tensor:
        return mixers.vector(name)

    fields: object
    match args:
        case Convolve():
            kind, views = "conv", (*ins, out)
            bias = None if args.bias is None else vector(args.bias)
            fields = scans.conv_fields(mixers.taps(args.weight), bias, args.act, tiles(args.states))
        case ScanDelta():
            kind, views = "delta", (*ins[:3], out, *ins[3:])
            sizes = args.key_heads, args.value_heads, args.key_dim, args.value_dim
            is_per_channel = args.decay_per == "channel"
            weights = vector(args.a), vector(args.dt_bias)
            fields = scans.delta_fields(*weights, sizes, is_per_channel, tiles(args.states), args.beta_scale)
        case ScanMamba1():
            kind, views = "mamba1", (*ins[:2], out, *ins[2:])
            bias = None if args.dt_bias is None else vector(args.dt_bias)
            of_channels = args.channels, args.state_dim
            fields = scans.mamba1_fields(mixers.groups(args.a), bias, vector(args.d), of_channels, tiles(args.states))
        case ScanMamba2():
            kind, views = "mamba2", (ins[0], out, *ins[1:])
            sizes = args.heads, args.head_dim, args.state_dim, args.groups
            three = vector(args.a), vector(args.dt_bias), vector(args.d)
            fields = scans.mamba2_fields(*three, args.dt_limits, sizes, tiles(args.states))
        case ScanLightning():
            kind, views = "lightning", (*ins, out)
            fields = scans.lightning_fields(mixers.decays(args), args.head_dim, tiles(args.states))
        case GatedNormalize():
            kind, views = "norm", (*ins, out)
            weight, size, eps = mixers.norm(args, out.width)
            fields = scans.norm_fields(weight, out.width, size, eps, args.act, args.gate_first)
    found = MixerFields(kind=_KINDS.index(kind), num_views=len(views))
    for number, view in enumerate(views):
        found.columns[number] = columns(view)
    setattr(found.about, kind, fields)
    return found
