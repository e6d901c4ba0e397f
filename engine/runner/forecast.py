"""What a worker would find at start, without reading the weights: how the model is served (`served.py`), and how it
would share out the memory.

For `pagewire doctor` and `pagewire serve --explain`. What the start measures is calculated here, and a test compares
the two.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import Struct

from ...config.config import EngineConfig
from ...kernels.grouped_weight import form
from ..checkpoint.quantization import GgufScheme, Scheme
from ..checkpoint.spec import read_spec
from ..device.base import Device, choose_device
from ..executors.weights import shape_of as shape_of_target
from ..gpu.weights import may_stay
from ..models.program import Matrix, Mixture
from ..parallel.rank import RankInfo
from ..weights.loader import Found, kept_matrices
from ..weights.open import Reader, open_checkpoint
from ..weights.quantized import packed_bytes
from .backend import Backend
from .loading import host_workspace, offered_pages, pages_needed
from .memory import MemoryPlan
from .served import DTYPES, Served, how_served
from .stages import part_of_stage


@dataclass(frozen=True)
class Forecast:
    served: Served
    memory: MemoryPlan  # of one rank, of the first stage if there are several, without that of recorded steps on a GPU
    num_pages: int  # of KV that it would offer


class PlannedGpu(Struct, frozen=True):
    """A GPU before it is opened."""

    num_bytes: int  # that the engine may take
    capability: int | None  # as of a `Device`

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda")

    def cache_memory(self, *, taken: int, found: int = 0) -> int:
        return max(0, self.num_bytes + found - taken)


def forecast(config: EngineConfig, gpu: PlannedGpu | None = None) -> Forecast:
    """`gpu`: instead of the device that the worker would open. Raises ConfigError and CheckpointError for a model that
    is not served."""
    spec = read_spec(Path(config.model.path))
    device: Device | PlannedGpu
    device = gpu or choose_device(config, rank_info=RankInfo(ranks_here=tuple(range(config.num_ranks))))
    served = how_served(
        config, spec, device.torch_device, has_triton=device.torch_device.type == "cuda", capability=device.capability
    )
    if config.pipeline_parallel_size > 1:
        served = part_of_stage(config, served, 0)
    shape = served.kv_shape
    plan = MemoryPlan(
        weights=_weight_bytes(config, served),
        workspace=host_workspace(config, spec, shape),
        groups=shape.groups(config.block_size),
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        num_sharers=config.data_parallel_size if config.runs_in_c else 1,
    )
    if not plan.page_bytes:
        return Forecast(served, plan, pages_needed(config, shape))
    if config.kv_cache_memory is not None:
        num_pages = plan.num_pages(config.kv_cache_memory)
    else:
        num_pages = plan.num_pages(device.cache_memory(taken=plan.weights + plan.workspace))
        num_pages = min(num_pages, pages_needed(config, shape))
    return Forecast(served, plan, offered_pages(config, plan.groups, num_pages))


def _weight_bytes(config: EngineConfig, served: Served) -> int:
    """Of one rank, about."""
    spec, program, backend, dtype = served.spec, served.program, served.backend, served.dtype
    files = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    if program is None or backend is None:
        return files * dtype.itemsize // DTYPES[spec.dtype].itemsize
    mixtures = [op.args for op in program.ops if isinstance(op.args, Mixture)]
    is_triton = served.executor == "Triton"
    if is_triton and served.is_kept and not mixtures:
        return files // config.tensor_parallel_size
    kept: dict[str, int] = {}
    if served.is_kept and served.found is not None:
        keys = kept_matrices(program, served.found)
        matrices = [each for each in program.matrices if each.key in keys and (may_stay(each) or not is_triton)]
        with open_checkpoint(Path(config.model.path), config.model.adapter) as reader:
            kept = {each.key: _kept_bytes(each, spec.scheme, reader, served.found, backend) for each in matrices}
    vectors = sum(math.prod(shape_of_target(vector)) for vector in program.vectors) * dtype.itemsize
    total = vectors + sum(_matrix_bytes(config, backend, matrix, kept) for matrix in program.matrices)
    replicas = sum(
        _matrix_bytes(config, backend, matrix, kept) * args.num_replicas // matrix.experts
        for args in mixtures
        for matrix in (args.gate_up, args.down)
    )
    return total + replicas


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
