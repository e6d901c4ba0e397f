"""Random weights: gives a model's shapes, memory and speed without its checkpoint, for benchmarks."""

import torch
from torch import Tensor

_PERIOD = 1_048_573  # random numbers in use; a prime, so that the rows of a matrix that repeats them differ
_SPREAD = 0.02  # standard deviation, about that of trained projections


class Dummy:
    """Fills matrices with the same small random numbers each time, vectors with ones (norms) or zeros (biases)."""

    def __init__(self) -> None:
        self._numbers = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)) * _SPREAD
        self._offset = 0

    def fill(self, name: str, values: Tensor, *, is_vector: bool) -> None:
        if is_vector:
            values.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        cast = self._numbers.to(device=values.device, dtype=values.dtype)
        flat = values.view(-1)
        for start in range(0, flat.numel(), _PERIOD):
            part = flat[start : start + _PERIOD]
            part.copy_(cast.roll(-self._offset)[: part.numel()])
        self._offset += 7919  # so that no two matrices are equal
