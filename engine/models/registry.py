"""Builds the models of native architectures. All others go to `transformers_fallback`."""

import importlib
from collections.abc import Collection
from typing import Protocol, cast

import torch
from torch import nn

from ...kernels.ops import Ops
from ..checkpoint.purpose import NATIVE
from ..checkpoint.spec import ModelSpec, is_native
from ..layers.linear import Weight
from ..layers.moe import MoeMlp
from ..parallel.collectives import Group
from .decoder import Decoder


class _Page(Protocol):
    """A family's module."""

    def build(
        self, spec: ModelSpec, *, max_len: int, dtype: torch.dtype, device: torch.device, group: Group, ops: Ops
    ) -> Decoder: ...


def build_native(
    spec: ModelSpec,
    *,
    max_len: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    group: Group,
    ops: Ops,
) -> Decoder | None:
    """This rank's part of a model: matrices of `weight_dtype`, everything else of `dtype`, without memory until
    `allocate`. None if the model is not native."""
    if not is_native(spec):
        return None
    page = cast(_Page, importlib.import_module(f".{NATIVE[spec.architecture]}", __package__))
    with torch.device("meta"):
        model = page.build(spec, max_len=max_len, dtype=dtype, device=device, group=group, ops=ops)
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, Weight) and module.weight is not None:
            module.weight.data = module.weight.data.to(weight_dtype)
        elif isinstance(module, MoeMlp):
            for stack in module.parameters(recurse=False):
                stack.data = stack.data.to(weight_dtype)
    return model


def allocate(model: Decoder, device: torch.device, *, without: Collection[str] = ()) -> None:
    """Gives memory to the parameters except those named in `without`."""
    # Not `empty_like`, which imports sympy for a tensor without memory: a second of every start.
    for path, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if f"{path}.{leaf}" not in without:
                memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                setattr(module, leaf, nn.Parameter(memory, requires_grad=False))
