"""What a worker would find at start, without reading the weights: whether the model can be served, and how it would
share out the memory.

For `pagewire doctor` and `pagewire serve --explain`. It asks the questions of `loading.py` by the same functions,
except those that only weights answer. What the start measures is calculated here, and a test compares the two.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ...config.config import EngineConfig
from ...kernels.grouped_weight import form
from ..attention.kv_cache import KvShape
from ..checkpoint.spec import ModelSpec, read_spec
from ..device.base import choose_device
from ..layers.embedding import Vocabulary
from ..layers.linear import Weight
from ..layers.moe import MoeMlp, Router
from ..models import registry
from ..parallel.collectives import Alone
from ..parallel.rank import RankInfo
from ..weights.quantized import packed_bytes
from ..weights.reader import CheckpointReader, open_checkpoint
from .backend import Backend, choose_backend
from .loading import (
    DTYPES,
    check_positions,
    count_numbers,
    find_targets,
    host_workspace,
    keeps_quantized,
    kept_parameters,
    no_kv,
    pages_needed,
)
from .memory import MemoryPlan


def forecast(config: EngineConfig) -> tuple[MemoryPlan, int]:
    """The memory of one rank, and how many pages of KV it would offer, without that of recorded steps on a GPU. Raises
    ConfigError and CheckpointError for a model that cannot be served."""
    spec = read_spec(Path(config.model.path))
    if not spec.purpose.is_encoder:
        check_positions(config, spec)
    device = choose_device(config, rank_info=RankInfo(ranks_here=tuple(range(config.tensor_parallel_size))))
    weights, shape = _model(config, spec, device.torch_device)
    plan = MemoryPlan(
        weights=weights,
        workspace=host_workspace(config, spec, shape),
        groups=shape.groups(config.block_size),
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        num_sharers=config.data_parallel_size if config.runs_in_c else 1,
    )
    if not plan.page_bytes:
        return plan, pages_needed(config, shape)
    if config.kv_cache_memory is not None:
        return plan, plan.num_pages(config.kv_cache_memory)
    num_pages = plan.num_pages(device.cache_memory(taken=plan.weights + plan.workspace))
    return plan, min(num_pages, pages_needed(config, shape))


class _Imagined(Alone):
    """Rank 0 of a group of `size` ranks that is not running."""

    def __init__(self, size: int) -> None:
        self.size = size


def _model(config: EngineConfig, spec: ModelSpec, device: torch.device) -> tuple[int, KvShape]:
    """Bytes of one rank's weights, and the shape of its KV."""
    dtype, kv_dtype = DTYPES[config.activations], DTYPES[config.kv_cache_dtype]
    files = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    if spec.purpose.is_encoder:
        from ..models.encoder import encoder_config

        CheckpointReader(Path(config.model.path)).close()  # raises for damaged and missing files
        encoder_config(spec, Path(config.model.path))
        return files * dtype.itemsize // DTYPES[spec.dtype].itemsize, no_kv(dtype)
    is_gpu = device.type == "cuda"
    backend = Backend.reference(dtype) if is_gpu else choose_backend(config, device, spec.dtype)
    outline = registry.build_native(
        spec,
        max_len=1,  # the rotary table is no weight
        dtype=dtype,
        weight_dtype=backend.weight_dtype,
        device=torch.device("meta"),
        group=_Imagined(config.tensor_parallel_size),
        ops=backend.ops,
    )
    if outline is None:
        return files * dtype.itemsize // DTYPES[spec.dtype].itemsize, _fallback_shape(config, spec, kv_dtype)
    kept: list[str] = []
    if config.load_format != "dummy":
        with open_checkpoint(Path(config.model.path)) as reader:
            targets = find_targets(reader, outline, spec)
            if not is_gpu and keeps_quantized(config, spec, backend.ops, dtype):
                kept = kept_parameters(reader, targets, spec, outline, is_on_device=False)
    shape = replace(outline.kv_shape, dtype=kv_dtype)
    if is_gpu and spec.scheme is not None and spec.scheme.has_kernels and dtype.itemsize == 2:
        return files // config.tensor_parallel_size, shape  # quantized weights are kept as stored
    weights = sum(parameter.nbytes for parameter in outline.parameters())
    for name in kept:
        assert spec.scheme is not None
        parameter = outline.get_parameter(name)
        num = math.prod(parameter.shape[:-2])
        weights += num * packed_bytes(spec.scheme, *parameter.shape[-2:]) - parameter.nbytes
    if config.quantization is not None:
        for module in outline.modules():
            if isinstance(module, MoeMlp):
                for stack in module.parameters(recurse=False):
                    weights += stack.shape[0] * _made_bytes(config, module, *stack.shape[1:]) - stack.nbytes
            elif isinstance(module, Weight) and module.weight is not None and not isinstance(module, Router):
                weights += _made_bytes(config, module, *module.weight.shape) - module.weight.nbytes
    return weights, shape


def _made_bytes(config: EngineConfig, module: nn.Module, n: int, k: int) -> int:
    """About the bytes of a matrix [n, k] that is quantized at load."""
    assert config.quantization is not None
    bits, group = form("int8" if isinstance(module, Vocabulary) else config.quantization, k)
    if config.kernels != "compiled":
        return n * (k + 9 * (k // group))
    return n * (k * bits // 8 + (4 if bits == 8 else 3) * (k // group))


def _fallback_shape(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> KvShape:
    # Only here, since transformers takes seconds to import.
    from ..models.transformers_fallback import outline

    folder = Path(config.model.path)
    shape = outline(spec, folder, num_numbers=count_numbers(folder), max_len=config.max_model_len, dtype=dtype)
    if shape is not None:
        return shape
    return KvShape.uniform(num_layers=spec.num_layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype)
