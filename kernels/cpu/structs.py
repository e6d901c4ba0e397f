"""The structures of the C files, as ctypes passes them. Fields and their order are those of C."""

import ctypes

_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


class Pages(ctypes.Structure):
    """`Pages` of product.h: one layer's keys and values, and the parameters of its attention."""

    _fields_ = (
        *((name, _P) for name in ("keys", "values")),
        *((name, _L) for name in ("heads", "kv_heads", "dim", "block_size", "window", "chunk")),
        *((name, _F) for name in ("scale", "softcap")),
        *((name, _I) for name in ("bf16", "rounds")),
        ("sinks", _P),
        ("page_stride", _L),
        ("slopes", _P),
        ("slope_scale", _F),
        ("rounds_slopes", _I),
        ("value_dim", _L),
    )


class MatrixFields(ctypes.Structure):
    """`Matrix` of matrix.h."""

    _fields_ = (
        *((name, _P) for name in ("w", "scales", "offsets", "table", "order", "bias", "parts")),
        *((name, _L) for name in ("n", "k", "kind", "bits", "group", "num_parts", "is_gated")),
        *((name, _L) for name in ("scale_type", "offset_type", "zero")),
    )


class RouterFields(ctypes.Structure):
    """`Router` of experts.h."""

    _fields_ = (
        *((name, _P) for name in ("correction", "expert_scale")),
        *((name, _L) for name in ("num", "top_k", "score", "groups", "top_groups")),
        *((name, _L) for name in ("by_two", "renormalize", "adds_floor")),
        *((name, _F) for name in ("floor", "scale", "jitter")),
    )


class ExpertsFields(ctypes.Structure):
    """`Experts` of experts.h."""

    _fields_ = (
        *((name, _P) for name in ("gate_up", "down")),
        ("router", RouterFields),
        *((name, _L) for name in ("num_experts", "scales_input", "map", "act")),
        *((name, _F) for name in ("alpha", "limit", "zero_scale")),
        *((name, _P) for name in ("places", "load", "holders")),
        ("num_ranks", _L),
    )


class Columns(ctypes.Structure):
    """`Columns` of program.c."""

    _fields_ = tuple((name, _L) for name in ("offset", "first", "stride"))


class Operation(ctypes.Structure):
    """`Operation` of program.c."""

    _fields_ = (
        *((name, _L) for name in ("kind", "epilogue")),
        *((name, Columns) for name in ("x", "x2", "x3", "out")),
        *((name, _L) for name in ("width", "size", "heads", "kv_heads", "dim", "dims", "table", "map", "act")),
        *((name, _L) for name in ("every", "shift", "is_whole", "is_shared")),
        *((name, _P) for name in ("matrix", "experts", "latent", "weight", "weight2", "cos", "sin")),
        *((name, _P) for name in ("pages", "sum", "mixer")),
        *((name, _F) for name in ("eps", "alpha", "beta", "limit")),
    )


class StepFields(ctypes.Structure):
    """`Step` of program.c."""

    _fields_ = (
        *((name, _P) for name in ("ids", "positions", "places", "slots", "tables", "contexts", "counts")),
        *((name, _L) for name in ("tokens", "rows", "table_stride")),
        *((name, _P) for name in ("work", "states")),
        *((name, _L) for name in ("capacity", "first")),
        ("shared", _P),
    )


class StateRowsFields(ctypes.Structure):
    """`StateRows` of scans.h."""

    _fields_ = (
        *((name, _P) for name in ("memory", "counts", "read", "written", "keep_rows", "keep_counts", "keep_pages")),
        *((name, _L) for name in ("page_bytes", "rows", "pages", "keeps")),
    )


class TilesFields(ctypes.Structure):
    """`Tiles` of scans.h."""

    _fields_ = (*((name, _P) for name in ("shelves", "offsets")), ("per_tile", _L))


class ViewFields(ctypes.Structure):
    """`View` of scans.h."""

    _fields_ = (("x", _P), ("stride", _L))


class ConvFields(ctypes.Structure):
    """`Conv` of scans.h."""

    _fields_ = (
        *((name, ViewFields) for name in ("x", "out")),
        *((name, _P) for name in ("weight", "bias")),
        *((name, _L) for name in ("channels", "taps", "act")),
        ("tiles", TilesFields),
    )


class ScanDeltaFields(ctypes.Structure):
    """`ScanDelta` of scans.h."""

    _fields_ = (
        *((name, ViewFields) for name in ("q", "k", "v", "out", "beta", "decay")),
        *((name, _P) for name in ("a", "dt_bias")),
        *((name, _L) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "per_channel")),
        ("tiles", TilesFields),
        ("beta_scale", _F),
    )


class ScanMamba1Fields(ctypes.Structure):
    """`ScanMamba1` of scans.h."""

    _fields_ = (
        *((name, ViewFields) for name in ("x", "dt", "out", "b", "c")),
        *((name, _P) for name in ("a", "dt_bias", "d")),
        *((name, _L) for name in ("channels", "state_dim")),
        ("tiles", TilesFields),
    )


class ScanMamba2Fields(ctypes.Structure):
    """`ScanMamba2` of scans.h."""

    _fields_ = (
        *((name, ViewFields) for name in ("x", "out", "b", "c", "dt")),
        *((name, _P) for name in ("a", "dt_bias", "d")),
        *((name, _L) for name in ("heads", "head_dim", "state_dim", "groups")),
        *((name, _F) for name in ("dt_min", "dt_max")),
        ("tiles", TilesFields),
    )


class ScanLightningFields(ctypes.Structure):
    """`ScanLightning` of scans.h."""

    _fields_ = (
        *((name, ViewFields) for name in ("q", "k", "v", "out")),
        ("decay", _P),
        *((name, _L) for name in ("heads", "head_dim")),
        ("tiles", TilesFields),
    )


class GatedNormFields(ctypes.Structure):
    """`GatedNorm` of scans.h."""

    _fields_ = (
        *((name, ViewFields) for name in ("x", "z", "out")),
        ("weight", _P),
        *((name, _L) for name in ("num_weights", "width", "size", "act", "gate_first")),
        ("eps", _F),
    )


class MixerFields(ctypes.Structure):
    """`Mixer` of program.c."""

    class About(ctypes.Union):
        _fields_ = (
            ("conv", ConvFields),
            ("delta", ScanDeltaFields),
            ("mamba1", ScanMamba1Fields),
            ("mamba2", ScanMamba2Fields),
            ("lightning", ScanLightningFields),
            ("norm", GatedNormFields),
        )

    _fields_ = (
        *((name, _L) for name in ("kind", "num_views")),
        ("columns", Columns * 6),
        ("about", About),
    )


class LatentFields(ctypes.Structure):
    """`Latent` of latent.h."""

    _fields_ = (
        *((name, _P) for name in ("keys", "values")),
        *((name, _L) for name in ("heads", "nope", "rope", "rank", "value", "width")),
    )
