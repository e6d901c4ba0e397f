"""What a worker would find at start, without reading the weights: whether the model can be served, and how it would
share out the memory.

For `pagewire doctor` and `pagewire serve --explain`. It asks the questions of `loading.py` by the same functions,
except those that only weights answer. What the start measures is calculated here, and a test compares the two.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from ...config.config import EngineConfig
from ...kernels.grouped_weight import form
from ..attention.kv_cache import KvShape
from ..checkpoint.quantization import GgufScheme, Scheme
from ..checkpoint.spec import ModelSpec, is_native, read_spec
from ..device.base import choose_device
from ..executors.weights import shape_of as shape_of_target
from ..models.program import Matrix
from ..parallel.rank import RankInfo
from ..weights.loader import Found, check_weights, kept_matrices
from ..weights.quantized import packed_bytes
from ..weights.reader import CheckpointReader, Reader, open_checkpoint
from .backend import Backend, choose_backend
from .loading import (
    DTYPES,
    check_positions,
    count_numbers,
    host_workspace,
    keeps_quantized,
    kv_shape_of,
    no_kv,
    offered_pages,
    pages_needed,
    program_of,
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
        num_pages = plan.num_pages(config.kv_cache_memory)
    else:
        num_pages = plan.num_pages(device.cache_memory(taken=plan.weights + plan.workspace))
        num_pages = min(num_pages, pages_needed(config, shape))
    return plan, offered_pages(config, plan.groups, num_pages)


def _model(config: EngineConfig, spec: ModelSpec, device: torch.device) -> tuple[int, KvShape]:
    """Bytes of one rank's weights, and the shape of its KV."""
    dtype, kv_dtype = DTYPES[config.activations], DTYPES[config.kv_cache_dtype]
    files = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    if spec.purpose.is_encoder:
        from ..executors.encoder import encoder_config

        CheckpointReader(Path(config.model.path)).close()  # raises for damaged and missing files
        encoder_config(spec, Path(config.model.path))
        return files * dtype.itemsize // DTYPES[spec.dtype].itemsize, no_kv(dtype)
    is_gpu = device.type == "cuda"
    backend = Backend.reference(dtype) if is_gpu else choose_backend(config, device, spec.dtype)
    if not is_native(spec):
        return files * dtype.itemsize // DTYPES[spec.dtype].itemsize, _fallback_shape(config, spec, kv_dtype)
    program = program_of(spec, 0, config.tensor_parallel_size)
    shape = kv_shape_of(config, program)
    kept: dict[str, int] = {}
    if config.load_format != "dummy":
        assert spec.decoder is not None
        with open_checkpoint(Path(config.model.path)) as reader:
            found = check_weights(reader, spec.decoder, spec.scheme)
            if not is_gpu and keeps_quantized(config, spec, backend.ops, dtype):
                keys = kept_matrices(program, found)
                matrices = [matrix for matrix in program.matrices if matrix.key in keys]
                kept = {matrix.key: _kept_bytes(matrix, spec.scheme, reader, found, backend) for matrix in matrices}
    if is_gpu and spec.scheme is not None and spec.scheme.has_kernels and dtype.itemsize == 2:
        return files // config.tensor_parallel_size, shape  # quantized weights are kept as stored
    vectors = sum(math.prod(shape_of_target(vector)) for vector in program.vectors) * dtype.itemsize
    return vectors + sum(_matrix_bytes(config, backend, matrix, kept) for matrix in program.matrices), shape


def _kept_bytes(matrix: Matrix, scheme: Scheme | None, reader: Reader, found: Found, backend: Backend) -> int:
    """About the bytes of a matrix that stays quantized."""
    assert scheme is not None
    is_gguf = isinstance(scheme, GgufScheme)
    sources = [(source, reader.dtype(source.tensor) if is_gguf else "") for source in found.names.sources(matrix)]
    if matrix.experts and len({kind for _, kind in sources}) > 1:
        return matrix.experts * matrix.rows * matrix.columns * backend.weight_dtype.itemsize  # they are widened
    return sum(
        packed_bytes(scheme, kind, source.to[1] - source.to[0], source.columns[1] - source.columns[0])
        for source, kind in sources
    )


def _matrix_bytes(config: EngineConfig, backend: Backend, matrix: Matrix, kept: Mapping[str, int]) -> int:
    """About the bytes of a matrix as it is packed. kept: those of the matrices that stay quantized."""
    count, n, k = max(1, matrix.experts), matrix.rows, matrix.columns
    if matrix.use != "router" and matrix.key in kept:
        return kept[matrix.key]
    if matrix.use == "router" or config.quantization is None:
        return count * n * k * backend.weight_dtype.itemsize
    assert config.quantization is not None
    bits, group = form("int8" if matrix.use == "table" else config.quantization, k)
    if config.kernels != "compiled":
        return count * n * (k + 9 * (k // group))
    return count * n * (k * bits // 8 + (4 if bits == 8 else 3) * (k // group))


def _fallback_shape(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> KvShape:
    # Only here, since transformers takes seconds to import.
    from ..executors.transformers_fallback import outline

    folder = Path(config.model.path)
    shape = outline(spec, folder, num_numbers=count_numbers(folder), max_len=config.max_model_len, dtype=dtype)
    if shape is not None:
        return shape
    return KvShape.uniform(num_layers=spec.num_layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype)
