"""What is compiled ahead of time: calls of an operation with tensors that have shapes and no memory.

A call takes the same path as a launch on a device, so the compiled kernel is the one that the device asks for, down to
the arguments that Triton specialises as multiples of 16 and to the cache key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

GRID = (80, 86, 89, 90, 100, 120)
"""Every kind of GPU that the kernels run on. They differ most in their shared memory."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the compiled code of a kernel must look like."""

    sm_80: tuple[str, ...] = ()  # SASS mnemonics that must appear, for example ("HMMA", "LDGSTS")
    sm_90: tuple[str, ...] = ()  # for example ("HGMMA",)
    buffers: int | None = None  # pipelining buffers of K (ttgir local_alloc); None: not checked
    stack: int | None = 0  # bytes a thread may use, for spilled registers; None: any number


WIDE = Plan(sm_80=("LDG.E.128", "STG.E.128"), sm_90=("LDG.E.128", "STG.E.128"))
"""Each thread reads and writes 16 bytes at a time."""

NO_TENSOR_CORES = Plan(stack=None)
"""float32, whose products need more registers than there are. Only its shared memory is checked."""

FEW_BYTES = 128
"""A stack that costs little: values that are spilled outside the loop."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One use of an operation, with the types and shapes of a real model."""

    name: str  # "decode_attention bf16 16/8 D128"
    launch: Callable[[int], None]  # calls the operation for this number of rows, with tensors from `shaped`
    rows: tuple[int, ...] = (16, 1, 2, 5)  # all of these must launch the same kernels
    plans: Mapping[str, Plan]  # by the name of the launched kernel
    architecture: int = 80  # the lowest that can run it
    architectures: tuple[int, ...] = ()  # for which it is checked besides the default ones, for example `GRID`


def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of this shape without memory. Triton takes it as aligned, like torch's allocations."""
    return torch.empty(shape, dtype=dtype, device="meta")


def pages_shaped(
    pages: int, kv_heads: int, block_size: int, head_dim: int, value_dim: int, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Keys and values of pages that hold both: [pages, kv_heads, block_size, head_dim or value_dim]."""
    per_key, per_value = kv_heads * block_size * head_dim, kv_heads * block_size * value_dim
    whole = shaped(pages, per_key + per_value, dtype=dtype)
    keys, values = whole[:, :per_key], whole[:, per_key:]
    return keys.view(pages, kv_heads, block_size, head_dim), values.view(pages, kv_heads, block_size, value_dim)
