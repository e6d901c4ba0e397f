"""The table of operations for float32 activations on a CPU, by the C kernels."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..ops import Matrix, Ops, Storage
from ..stored import Stored
from .dense import NativeMatrix
from .library import Kernels
from .quantized import NativeInt8Matrix


def native_ops(kernels: Kernels, *, int8: bool = False, rounds: bool = False) -> Ops:
    """The table for float32 activations on a CPU. rounds: products with bfloat16 weights round their inputs."""
    matrix: Callable[[Tensor], Matrix] = (
        partial(NativeInt8Matrix, kernels) if int8 else partial(NativeMatrix, kernels, rounds=rounds)
    )
    gated: Callable[[Tensor], Matrix] = matrix if int8 else partial(NativeMatrix, kernels, rounds=rounds, is_gated=True)

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

    classes = {kind.__name__: kind for kind in (NativeMatrix, NativeInt8Matrix)}

    def restored(parts: Stored) -> Matrix:
        return classes[parts.kind].restored(kernels, parts)

    return Ops(
        matrix=matrix,
        gated=gated,
        table=matrix,
        router=partial(NativeMatrix, kernels),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        norm_rotary=norm_rotary,
        write_kv=write_kv,
        greedy=greedy,
        storage=Storage(layout=kernels.name, restored=restored),
    )


def dense(states: Tensor) -> Tensor:
    """[tokens, heads, dim] with each token's values contiguous; copies only if they are not."""
    return states if states.stride(1) == states.shape[2] and states.stride(2) == 1 else states.contiguous()
