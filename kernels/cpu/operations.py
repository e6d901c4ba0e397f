"""The table of operations for float32 activations on a CPU, by the C kernels."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..grouped_weight import GroupedWeight, form
from ..ops import Matrix, Ops, Storage, use_one_thread
from ..quantized_weight import StoredWeight, concatenate
from ..stored import OWN_MEMORY, Memory, Stored
from ..superblock_weight import SuperblockWeight
from .dense import NativeMatrix, PackedMatrix
from .library import Kernels
from .quantized import MatrixStack, NativeFp8Matrix, NativeGroupedMatrix, NativeSuperblockMatrix, quantize


def native_ops(
    kernels: Kernels, *, quantization: str | None = None, rounds: bool = False, memory: Memory = OWN_MEMORY
) -> Ops:
    """The table for float32 activations on a CPU. quantization: matrices of 8 or 4 bits. rounds: products with bfloat16
    weights round their inputs. memory: where matrices are packed to."""

    def matrix(weight: Tensor, *, is_gated: bool = False, quantization: str | None = quantization) -> Matrix:
        if quantization is None:
            return NativeMatrix(kernels, weight, rounds=rounds, is_gated=is_gated, memory=memory)
        grouped = quantize(kernels, weight, *form(quantization, weight.shape[1]))
        return NativeGroupedMatrix(kernels, grouped, is_gated=is_gated, memory=memory)

    def kept(weight: StoredWeight, is_gated: bool) -> PackedMatrix:
        if isinstance(weight, GroupedWeight):
            return NativeGroupedMatrix(kernels, weight, is_gated=is_gated, memory=memory)
        if isinstance(weight, SuperblockWeight):
            return NativeSuperblockMatrix(kernels, weight, is_gated=is_gated)
        return NativeFp8Matrix(kernels, weight, rounds=rounds, is_gated=is_gated, memory=memory)

    def quantized(parts: Sequence[StoredWeight], is_gated: bool) -> Matrix:
        if len(parts) == 1:
            return kept(parts[0], is_gated)
        return MatrixStack(kernels, [kept(part, False) for part in _runs(parts)], is_gated=is_gated)

    def write_kv(key: Tensor, value: Tensor | None, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        if value is None:  # the keys are the values, too; the kernel writes them twice to the same place
            value, v_pages = key, k_pages
        key, value = dense(key), dense(value)
        kernels.write_kv(
            key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
            k_pages.data_ptr(), v_pages.data_ptr(), slots.data_ptr(),
            key.shape[0], key.shape[1] * key.shape[2], value.shape[1] * value.shape[2],
            k_pages.shape[1], page_stride(k_pages),
            int(k_pages.dtype == torch.bfloat16),
        )  # fmt: skip

    def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
        m, n = logits.shape
        most, ids = torch.empty(m), torch.empty(m, dtype=torch.int64)
        kernels.greedy(logits.data_ptr(), ids.data_ptr(), most.data_ptr(), m, n)
        return most, ids

    classes: dict[str, type[PackedMatrix]] = {
        kind.__name__: kind
        for kind in (NativeMatrix, NativeGroupedMatrix, NativeSuperblockMatrix, NativeFp8Matrix, MatrixStack)
    }

    def restored(parts: Stored) -> Matrix:
        return classes[parts.kind].restored(kernels, parts)

    def compute_alone() -> None:
        use_one_thread()
        kernels.threads()

    return Ops(
        matrix=matrix,
        gated=partial(matrix, is_gated=True),
        table=partial(matrix, quantization=None if quantization is None else "int8"),
        router=partial(NativeMatrix, kernels, memory=memory),
        quantized=quantized,
        write_kv=write_kv,
        greedy=greedy,
        storage=Storage(
            layout=kernels.name,
            restored=restored,
            ops_into=lambda memory: native_ops(kernels, quantization=quantization, rounds=rounds, memory=memory),
        ),
        compute_alone=compute_alone,
    )


def _runs(parts: Sequence[StoredWeight]) -> list[StoredWeight]:
    """Neighbours that are quantized in the same way, as one."""
    runs = [parts[0]]
    for part in parts[1:]:
        try:
            runs[-1] = concatenate([runs[-1], part])
        except ValueError:
            runs.append(part)
    return runs


def page_stride(pages: Tensor) -> int:
    """Bytes from a page to the next. pages: [pages, block_size, kv_heads, dim], each page contiguous."""
    assert pages[0].is_contiguous(), pages.stride()
    return pages.stride(0) * pages.element_size()


def dense(states: Tensor) -> Tensor:
    """[tokens, heads, dim] with each token's values contiguous; copies only if they are not."""
    return states if states.stride(1) == states.shape[2] and states.stride(2) == 1 else states.contiguous()
