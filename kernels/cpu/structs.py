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


class Columns(ctypes.Structure):
    """`Columns` of program.c."""

    _fields_ = tuple((name, _L) for name in ("offset", "first", "stride"))


class Operation(ctypes.Structure):
    """`Operation` of program.c."""

    _fields_ = (
        *((name, _L) for name in ("kind", "epilogue")),
        *((name, Columns) for name in ("in_", "in2", "out")),
        *((name, _L) for name in ("width", "heads", "kv_heads", "dim", "table")),
        *((name, _P) for name in ("matrix", "experts", "weight", "weight2", "cos", "sin", "pages")),
        ("eps", _F),
    )


class StepFields(ctypes.Structure):
    """`Step` of program.c."""

    _fields_ = (
        *((name, _P) for name in ("ids", "positions", "slots", "tables", "contexts", "counts")),
        *((name, _L) for name in ("tokens", "rows", "table_stride")),
        ("work", _P),
    )
