"""Random weights: gives a model's shapes, memory and speed without its checkpoint, for benchmarks."""

from collections.abc import Mapping

import torch
from torch import Tensor

_PERIOD = 1_048_573  # random numbers in use; a prime, so that the rows of a matrix that repeats them differ
_SPREAD = 0.02  # standard deviation, about that of trained projections


def fill_dummy(parameters: Mapping[str, Tensor]) -> int:
    """Fills matrices with the same small random numbers each time, vectors with ones (norms) or zeros (biases). Returns
    the bytes of the parameters."""
    numbers = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)) * _SPREAD
    offset = total = 0
    with torch.no_grad():
        for name, parameter in parameters.items():
            total += parameter.nbytes
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            cast = numbers.to(device=parameter.device, dtype=parameter.dtype)
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), _PERIOD):
                part = flat[start : start + _PERIOD]
                part.copy_(cast.roll(-offset)[: part.numel()])
            offset += 7919  # so that no two matrices are equal
    return total
