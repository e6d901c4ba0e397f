"""What is compiled ahead of time of a kernel, and what the compiled code must look like."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One specialisation of a kernel, to be compiled ahead of time."""

    name: str  # "decode_attention bf16 D128 G4"
    kernel: Any  # the @triton.jit function
    signature: dict[str, str]  # every argument that is not a constexpr: "*bf16", "i32", "fp32", …
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    divisible: tuple[str, ...] = ()  # arguments (pointers, strides) that are multiples of 16
    sm_80: tuple[str, ...] = ()  # SASS mnemonics that must appear, for example ("HMMA", "LDGSTS")
    sm_90: tuple[str, ...] = ()  # for example ("HGMMA",)
    buffers: int | None = None  # planned pipelining buffers of K (ttgir local_alloc); None: not checked
