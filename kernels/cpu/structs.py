"""The structures of the C files, as ctypes passes them. Fields and their order are those of C."""

import ctypes

_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


class Pages(ctypes.Structure):
    """`Pages` of product.h: one layer's keys and values, and the parameters of its attention."""

    _fields_ = (
        *((name, _P) for name in ("keys", "values")),
        *((name, _L) for name in ("heads", "kv_heads", "dim", "block_size", "window")),
        *((name, _F) for name in ("scale", "softcap")),
        *((name, _I) for name in ("bf16", "rounds")),
        ("sinks", _P),
        ("page_stride", _L),
    )


class MatrixFields(ctypes.Structure):
    """`Matrix` of matrix.h."""

    _fields_ = (
        *((name, _P) for name in ("w", "scales", "offsets", "table", "order", "bias")),
        *((name, _L) for name in ("n", "k", "kind", "bits", "group", "is_gated")),
        *((name, _L) for name in ("scale_type", "offset_type", "zero")),
    )


class ExpertsFields(ctypes.Structure):
    """`Experts` of experts.h."""

    _fields_ = (
        *((name, _P) for name in ("gate_up", "down")),
        *((name, _L) for name in ("num_experts", "top_k", "renormalize")),
    )


class LayerFields(ctypes.Structure):
    """`Layer` of decoder.c."""

    _fields_ = (
        *((name, MatrixFields) for name in ("qkv", "o", "gate_up", "down", "router")),
        *((name, _P) for name in ("experts", "input_norm", "post_norm", "q_norm", "k_norm")),
        ("pages", Pages),
    )


class DecoderFields(ctypes.Structure):
    """`Decoder` of decoder.c."""

    _fields_ = (
        ("embed", MatrixFields),
        *((name, _P) for name in ("layers", "norm", "cos", "sin")),
        *((name, _L) for name in ("num_layers", "hidden")),
        ("eps", _F),
    )


class StepFields(ctypes.Structure):
    """`Step` of decoder.c."""

    _fields_ = (
        *((name, _P) for name in ("ids", "positions", "slots", "table", "contexts", "counts")),
        *((name, _L) for name in ("tokens", "rows", "table_stride")),
        ("work", _P),
    )
