"""The C kernels as functions of tensors. Each computes what its namesake in `kernels.reference` specifies.

Activations are float32 and dense in their last dimension; weights and pages may be bfloat16, which is widened exactly.
Pointers are passed as integers. A call costs a few microseconds besides its work.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..ops import Ops
from . import build

LANES = 16
"""Floats in a vector: the head dimension must be a multiple of it."""
MAX_ROWS = 12
"""At least the MR of product.h."""

Call = Callable[..., None]
_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_ARGUMENTS: dict[str, Sequence[type]] = {
    "linear": (_P, _P, _P, _P, _P, _L, _L, _L, _L, _I),
    "pack": (_P, _P, _L, _L, _I),
    "linear_greedy": (_P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _I),
    "lookup": (_P, _P, _P, _L, _L, _I),
    "linear_int8": (_P, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L),
    "linear_greedy_int8": (_P, _P, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L),
    "pack_int8": (_P, _P, _P, _P, _L, _L, _I),
    "lookup_int8": (_P, _P, _P, _P, _L, _L),
    "decode": (_P, _P, _L, _P, _L, _P, _P, _P, _L, _L),
    "extend": (_P, _P, _L, _P, _L, _P, _P, _P, _P, _L, _L, _L),
    "rms_norm": (_P, _P, _P, _F, _P, _P, _L, _L),
    "silu_mul": (_P, _P, _L, _L),
    "rotary": (_P, _L, _P, _P, _F, _P, _P, _P, _L, _L, _L, _L),
    "decoder": (_P, _P, _P),
    "write_kv": (_P, _L, _P, _L, _P, _P, _P, _L, _L, _I),
    "greedy": (_P, _P, _P, _L, _L),
}


class Pages(ctypes.Structure):
    """`Pages` of attention.c: one layer's keys and values, and the parameters of its attention."""

    _fields_ = (
        *((name, _P) for name in ("keys", "values")),
        *((name, _L) for name in ("heads", "kv_heads", "dim", "block_size", "window")),
        *((name, _F) for name in ("scale", "softcap")),
        ("bf16", _I),
    )


class MatrixFields(ctypes.Structure):
    """`Matrix` of decoder.c."""

    _fields_ = (*((name, _P) for name in ("w", "scales", "sums", "bias")), *((name, _L) for name in ("n", "k", "kind")))


class LayerFields(ctypes.Structure):
    """`Layer` of decoder.c."""

    _fields_ = (
        *((name, MatrixFields) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _P) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("pages", Pages),
    )


class DecoderFields(ctypes.Structure):
    """`Decoder` of decoder.c."""

    _fields_ = (
        ("embed", MatrixFields),
        *((name, _P) for name in ("layers", "norm", "cos", "sin")),
        *((name, _L) for name in ("num_layers", "hidden", "intermediate")),
        ("eps", _F),
    )


class StepFields(ctypes.Structure):
    """`Step` of decoder.c."""

    _fields_ = (
        *((name, _P) for name in ("ids", "positions", "slots", "table", "contexts", "counts")),
        *(
            (name, _L)
            for name in ("tokens", "rows", "num_decode", "table_stride", "score_stride", "work_stride", "num_works")
        ),
        *((name, _P) for name in ("work", "panels", "attention")),
    )


class Kernels:
    """The compiled functions, with the arguments of the C files. Raises `build.BuildError`."""

    def __init__(self) -> None:
        library = build.load()

        def function(name: str) -> Call:
            found = getattr(library, f"pagewire_{name}")
            found.argtypes, found.restype = _ARGUMENTS[name], None
            call: Call = found
            return call

        self._threads = library.pagewire_threads
        self._threads.argtypes, self._threads.restype = (_I,), _I
        self.linear = function("linear")
        self.linear_greedy = function("linear_greedy")
        self.pack = function("pack")
        self.lookup = function("lookup")
        self.linear_int8 = function("linear_int8")
        self.linear_greedy_int8 = function("linear_greedy_int8")
        self.pack_int8 = function("pack_int8")
        self.lookup_int8 = function("lookup_int8")
        self.decode = function("decode")
        self.extend = function("extend")
        self.rms_norm = function("rms_norm")
        self.silu_mul = function("silu_mul")
        self.rotary = function("rotary")
        self.decoder = function("decoder")
        self.write_kv = function("write_kv")
        self.greedy = function("greedy")

    def threads(self) -> int:
        """Makes the functions use torch's number of threads, from the calling thread on. Returns their maximum
        number."""
        threads: int = self._threads(torch.get_num_threads())
        return threads


class NativeMatrix:
    """A packed weight [n, k], bfloat16 or float32."""

    def __init__(self, kernels: Kernels, weight: Tensor) -> None:
        if weight.dtype != torch.bfloat16 or weight.shape[1] % 2:  # bfloat16 is packed in pairs
            weight = weight.float()
        self._kernels = kernels
        self._n, self._k = weight.shape
        self._bf16 = int(weight.dtype == torch.bfloat16)
        self._packed = torch.empty(-(-self._n // LANES) * LANES * self._k, dtype=weight.dtype)
        self._at = self._packed.data_ptr()
        kernels.pack(weight.contiguous().data_ptr(), self._at, self._n, self._k, self._bf16)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def fields(self, bias: Tensor | None) -> MatrixFields:
        """The matrix for the C decoder; valid as long as this object."""
        return MatrixFields(self._at, 0, 0, 0 if bias is None else bias.data_ptr(), self._n, self._k, self._bf16)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        m = x.shape[0]
        out = torch.empty((m, self._n))
        panels = torch.empty(m * self._k) if m > 1 else out
        self._kernels.linear(
            x.data_ptr(), self._at, 0 if bias is None else bias.data_ptr(), out.data_ptr(), panels.data_ptr(),
            m, self._n, self._k, x.stride(0), self._bf16,
        )  # fmt: skip
        return out

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        m = x.shape[0]
        panels, best, most, ids = torch.empty(m * self._k), *_best(self._kernels, m)
        self._kernels.linear_greedy(
            x.data_ptr(), self._at, panels.data_ptr(), best.data_ptr(), ids.data_ptr(), most.data_ptr(),
            m, self._n, self._k, x.stride(0), self._bf16,
        )  # fmt: skip
        return most, ids

    def lookup(self, ids: Tensor) -> Tensor:
        out = torch.empty((ids.shape[0], self._k))
        self._kernels.lookup(self._at, ids.data_ptr(), out.data_ptr(), ids.shape[0], self._k, self._bf16)
        return out


class NativeInt8Matrix:
    """A weight [n, k] of 8 bits with a scale per column."""

    def __init__(self, kernels: Kernels, weight: Tensor) -> None:
        if weight.dtype != torch.bfloat16:
            weight = weight.float()
        self._kernels = kernels
        self._n, self._k = weight.shape
        columns = -(-self._n // LANES) * LANES
        self._words = -(-self._k // 4)
        self._packed = torch.empty(columns * self._words, dtype=torch.int32)
        self._scales, self._sums = torch.empty(columns), torch.empty(columns, dtype=torch.int32)
        self._at = self._packed.data_ptr(), self._scales.data_ptr(), self._sums.data_ptr()
        kernels.pack_int8(
            weight.contiguous().data_ptr(), *self._at, self._n, self._k, int(weight.dtype == torch.bfloat16)
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes + self._sums.nbytes

    def fields(self, bias: Tensor | None) -> MatrixFields:
        """The matrix for the C decoder; valid as long as this object."""
        return MatrixFields(*self._at, 0 if bias is None else bias.data_ptr(), self._n, self._k, 2)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        m = x.shape[0]
        out = torch.empty((m, self._n))
        work = torch.empty(m * (self._words + 1))
        self._kernels.linear_int8(
            x.data_ptr(), *self._at, 0 if bias is None else bias.data_ptr(), out.data_ptr(), work.data_ptr(),
            m, self._n, self._k, x.stride(0),
        )  # fmt: skip
        return out

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        m = x.shape[0]
        work, best, most, ids = torch.empty(m * (self._words + 1)), *_best(self._kernels, m)
        self._kernels.linear_greedy_int8(
            x.data_ptr(), *self._at, work.data_ptr(), best.data_ptr(), ids.data_ptr(), most.data_ptr(),
            m, self._n, self._k, x.stride(0),
        )  # fmt: skip
        return most, ids

    def lookup(self, ids: Tensor) -> Tensor:
        out = torch.empty((ids.shape[0], self._k))
        packed, scales, _ = self._at
        self._kernels.lookup_int8(packed, scales, ids.data_ptr(), out.data_ptr(), ids.shape[0], self._k)
        return out


def _best(kernels: Kernels, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the `Best` of product.h of every thread, and for the results: greatest values and ids."""
    return torch.empty(kernels.threads() * m * 3 * LANES), torch.empty(m), torch.empty(m, dtype=torch.int64)


def native_ops(kernels: Kernels, *, int8: bool = False) -> Ops:
    """The table for float32 activations on a CPU."""
    matrix = partial(NativeInt8Matrix if int8 else NativeMatrix, kernels)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        n = x.shape[-1]
        kernels.rms_norm(x.data_ptr(), 0, weight.data_ptr(), eps, 0, out.data_ptr(), x.numel() // n, n)
        return out

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        m, n = x.shape
        total, out = torch.empty_like(x), torch.empty_like(x)
        kernels.rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, total.data_ptr(), out.data_ptr(), m, n
        )  # fmt: skip
        return out, total

    def silu_mul(gate_up: Tensor) -> Tensor:
        m, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((m, n))
        kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), m, n)
        return out

    def norm_rotary(
        states: Tensor, heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        m, both, dim = states.shape
        kernels.rotary(
            states.data_ptr(), states.stride(0),
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(), eps,
            cos.data_ptr(), sin.data_ptr(), 0, m, heads, both - heads, dim,
        )  # fmt: skip
        return states

    def write_kv(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        key, value = dense(key), dense(value)
        kernels.write_kv(
            key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
            k_pages.data_ptr(), v_pages.data_ptr(), slots.data_ptr(),
            key.shape[0], key.shape[1] * key.shape[2], int(k_pages.dtype == torch.bfloat16),
        )  # fmt: skip

    def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
        m, n = logits.shape
        most, ids = torch.empty(m), torch.empty(m, dtype=torch.int64)
        kernels.greedy(logits.data_ptr(), ids.data_ptr(), most.data_ptr(), m, n)
        return most, ids

    return Ops(
        matrix=matrix,
        table=matrix,
        router=partial(NativeMatrix, kernels),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
        norm_rotary=norm_rotary,
        write_kv=write_kv,
        greedy=greedy,
    )


def dense(states: Tensor) -> Tensor:
    """[tokens, heads, dim] with each token's values contiguous; copies only if they are not."""
    return states if states.stride(1) == states.shape[2] and states.stride(2) == 1 else states.contiguous()
