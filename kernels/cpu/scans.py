"""The operations of recurrent mixers by the C kernels, with the arguments and results of `reference_scans`."""

import ctypes

import torch
from torch import Tensor

from ..lanes import LANES
from ..reference_scans import Act
from ..states import StateRows, Tiles
from .library import Call, Kernels
from .structs import (
    ConvFields,
    GatedNormFields,
    ScanDeltaFields,
    ScanLightningFields,
    ScanMamba1Fields,
    ScanMamba2Fields,
    StateRowsFields,
    TilesFields,
    ViewFields,
)

ACTS: dict[Act, int] = {"none": 0, "silu": 1, "sigmoid": 2}
"""Of scans.h."""


class NativeScans:
    """All tensors are float32 and on the CPU. Columns of a wider tensor are read in place; other views are copied."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, act: Act, rows: StateRows, tiles: Tiles) -> Tensor:
        x, out = packed(x), torch.empty(x.shape)
        fields = conv_fields(weight, bias, act, tiles, x=view(x), out=view(out))
        _call(self._kernels.conv, fields, rows)
        return out

    def scan_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        decay: Tensor,
        a: Tensor,
        dt_bias: Tensor,
        rows: StateRows,
        tiles: Tiles,
        beta_scale: float = 1.0,
    ) -> Tensor:
        q, k, v, beta, decay = (packed(part) for part in (q, k, v, beta, decay))
        out = torch.empty(v.shape)
        sizes = q.shape[1], v.shape[1], q.shape[2], v.shape[2]
        views = {"q": view(q), "k": view(k), "v": view(v), "out": view(out), "beta": view(beta), "decay": view(decay)}
        fields = delta_fields(a, dt_bias, sizes, decay.dim() == 3, tiles, beta_scale, **views)
        _call(self._kernels.scan_delta, fields, rows)
        return out

    def scan_mamba1(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        dt_bias: Tensor | None,
        d: Tensor | None,
        rows: StateRows,
        tiles: Tiles,
    ) -> Tensor:
        assert a.shape == (-(-x.shape[1] // LANES), b.shape[1], LANES), f"a of {tuple(a.shape)} is not `grouped`"
        x, dt, b, c = (packed(part) for part in (x, dt, b, c))
        out = torch.empty(x.shape)
        views = {"x": view(x), "dt": view(dt), "out": view(out), "b": view(b), "c": view(c)}
        sizes = x.shape[1], b.shape[1]
        _call(self._kernels.scan_mamba1, mamba1_fields(a, dt_bias, d, sizes, tiles, **views), rows)
        return out

    def scan_mamba2(
        self,
        x: Tensor,
        b: Tensor,
        c: Tensor,
        dt: Tensor,
        a: Tensor,
        dt_bias: Tensor | None,
        d: Tensor | None,
        dt_limits: tuple[float, float],
        rows: StateRows,
        tiles: Tiles,
    ) -> Tensor:
        x, b, c, dt = (packed(part) for part in (x, b, c, dt))
        out = torch.empty(x.shape)
        views = {"x": view(x), "out": view(out), "b": view(b), "c": view(c), "dt": view(dt)}
        sizes = x.shape[1], x.shape[2], b.shape[2], b.shape[1]
        _call(self._kernels.scan_mamba2, mamba2_fields(a, dt_bias, d, dt_limits, sizes, tiles, **views), rows)
        return out

    def scan_lightning(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rows: StateRows, tiles: Tiles) -> Tensor:
        q, k, v = (packed(part) for part in (q, k, v))
        out = torch.empty(v.shape)
        views = {"q": view(q), "k": view(k), "v": view(v), "out": view(out)}
        _call(self._kernels.scan_lightning, lightning_fields(decay, v.shape[2], tiles, **views), rows)
        return out

    def gated_norm(
        self, x: Tensor, z: Tensor, weight: Tensor | None, size: int, eps: float, act: Act, gate_first: bool
    ) -> Tensor:
        x, z = packed(x), packed(z)
        out = torch.empty(x.shape)
        views = {"x": view(x), "z": view(z), "out": view(out)}
        fields = norm_fields(weight, x.shape[1], size, eps, act, gate_first, **views)
        self._kernels.gated_norm(ctypes.addressof(fields), x.shape[0])
        return out


# The arguments of the kernels. views: those of activations, which a program fills in for each step. The structures are
# valid as long as the tensors.


def conv_fields(weight: Tensor, bias: Tensor | None, act: Act, tiles: Tiles, **views: ViewFields) -> ConvFields:
    taps, channels = weight.shape
    return ConvFields(
        **views, weight=weight.data_ptr(), bias=_address(bias), channels=channels, taps=taps, act=ACTS[act],
        tiles=tiles_fields(tiles),
    )  # fmt: skip


def delta_fields(
    a: Tensor,
    dt_bias: Tensor,
    sizes: tuple[int, int, int, int],
    per_channel: bool,
    tiles: Tiles,
    beta_scale: float,
    **views: ViewFields,
) -> ScanDeltaFields:
    """sizes: key heads, value heads, key dim, value dim."""
    key_heads, value_heads, key_dim, value_dim = sizes
    return ScanDeltaFields(
        **views, a=a.data_ptr(), dt_bias=dt_bias.data_ptr(), key_heads=key_heads, value_heads=value_heads,
        key_dim=key_dim, value_dim=value_dim, per_channel=per_channel, tiles=tiles_fields(tiles),
        beta_scale=beta_scale,
    )  # fmt: skip


def mamba1_fields(
    a: Tensor, dt_bias: Tensor | None, d: Tensor | None, sizes: tuple[int, int], tiles: Tiles, **views: ViewFields
) -> ScanMamba1Fields:
    """sizes: channels, state dim."""
    return ScanMamba1Fields(
        **views, a=a.data_ptr(), dt_bias=_address(dt_bias), d=_address(d), channels=sizes[0], state_dim=sizes[1],
        tiles=tiles_fields(tiles),
    )  # fmt: skip


def mamba2_fields(
    a: Tensor,
    dt_bias: Tensor | None,
    d: Tensor | None,
    dt_limits: tuple[float, float],
    sizes: tuple[int, int, int, int],
    tiles: Tiles,
    **views: ViewFields,
) -> ScanMamba2Fields:
    """sizes: heads, head dim, state dim, groups."""
    heads, head_dim, state_dim, groups = sizes
    return ScanMamba2Fields(
        **views, a=a.data_ptr(), dt_bias=_address(dt_bias), d=_address(d), heads=heads, head_dim=head_dim,
        state_dim=state_dim, groups=groups, dt_min=dt_limits[0], dt_max=dt_limits[1], tiles=tiles_fields(tiles),
    )  # fmt: skip


def lightning_fields(decay: Tensor, head_dim: int, tiles: Tiles, **views: ViewFields) -> ScanLightningFields:
    return ScanLightningFields(
        **views, decay=decay.data_ptr(), heads=decay.numel(), head_dim=head_dim, tiles=tiles_fields(tiles)
    )


def norm_fields(
    weight: Tensor | None, width: int, size: int, eps: float, act: Act, gate_first: bool, **views: ViewFields
) -> GatedNormFields:
    return GatedNormFields(
        **views, weight=_address(weight), num_weights=0 if weight is None else weight.numel(), width=width, size=size,
        act=ACTS[act], gate_first=gate_first, eps=eps,
    )  # fmt: skip


def _call(function: Call, fields: ctypes.Structure, rows: StateRows) -> None:
    step = rows_fields(rows)
    function(ctypes.addressof(fields), ctypes.addressof(step))


def packed(x: Tensor) -> Tensor:
    """[tokens, …] float32 with each token's numbers contiguous; copied only if they are not."""
    assert x.dtype == torch.float32, f"activations are {x.dtype}, not float32"
    return x if x[:1].is_contiguous() else x.contiguous()


def view(x: Tensor) -> ViewFields:
    return ViewFields(x.data_ptr(), x.stride(0))


def tiles_fields(tiles: Tiles) -> TilesFields:
    """Valid as long as the tiles."""
    return TilesFields(tiles.shelves.data_ptr(), tiles.offsets.data_ptr(), tiles.per_tile)


def rows_fields(rows: StateRows) -> StateRowsFields:
    """Valid as long as the rows."""
    return StateRowsFields(
        memory=rows.memory.data_ptr(), counts=rows.counts.data_ptr(), read=rows.read.data_ptr(),
        written=rows.written.data_ptr(), keep_rows=rows.keep_rows.data_ptr(),
        keep_counts=rows.keep_counts.data_ptr(), keep_pages=rows.keep_pages.data_ptr(),
        page_bytes=rows.memory.stride(0) * rows.memory.element_size(), rows=rows.counts.shape[0],
        pages=rows.read.shape[1], keeps=rows.keep_rows.shape[0],
    )  # fmt: skip


def _address(weight: Tensor | None) -> int:
    return 0 if weight is None else weight.data_ptr()
