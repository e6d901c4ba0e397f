"""Products by oneDNN on weights in its own layout, for CPUs whose bfloat16 instructions are faster than our kernels,
and for those without a compiler."""

import torch
from torch import Tensor

from . import reference

_ROWS = 16  # the number of rows that the layout is chosen for: many streams, or a small chunk of a prompt


def is_available(dtype: torch.dtype) -> bool:
    """Whether oneDNN is present and computes in `dtype`."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and (dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class OneDnnMatrix:
    """A weight [n, k] in oneDNN's layout, which only oneDNN can read."""

    def __init__(self, weight: Tensor) -> None:
        self.nbytes = weight.nbytes  # the layout pads a little; torch does not say how much
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._packed, bias, "none", [], "")
        return out

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return reference.greedy(self.product(x, None).float())

    def lookup(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("lookups need the matrix of `Ops.table`")
