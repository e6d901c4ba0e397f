"""What is compiled ahead of time: uses of an operation, by calls of it with tensors that have shapes and no memory.

A call goes through everything that a launch on a device goes through, so what is compiled is what the device asks for,
down to the arguments that Triton takes for multiples of 16, and to the key under which it looks for a compiled kernel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the compiled code of a kernel must look like."""

    sm_80: tuple[str, ...] = ()  # SASS mnemonics that must appear, for example ("HMMA", "LDGSTS")
    sm_90: tuple[str, ...] = ()  # for example ("HGMMA",)
    buffers: int | None = None  # pipelining buffers of K (ttgir local_alloc); None: not checked


WIDE = Plan(sm_80=("LDG.E.128", "STG.E.128"), sm_90=("LDG.E.128", "STG.E.128"))
"""Memory is read and written 16 bytes a thread."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One use of an operation, with the types and shapes of some model."""

    name: str  # "decode_attention bf16 16/8 D128"
    launch: Callable[[int], None]  # calls the operation for so many rows, with tensors from `shaped`
    rows: tuple[int, ...] = (16, 1, 2, 5)  # all of these must launch the very same kernels
    plans: Mapping[str, Plan]  # by the names of the kernels that are launched
    architecture: int = 80  # the first that can run it


def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of this shape without memory; it counts as aligned, as what torch allocates is."""
    return torch.empty(shape, dtype=dtype, device="meta")
