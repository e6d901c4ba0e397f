"""Which kernels run on a device, and which type they want the weights in: chosen once, at start."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...config.config import EngineConfig
from ...kernels.cpu import build
from ...kernels.ops import Ops, reference_ops
from ..attention.base import AttentionBackend
from ..attention.kv_cache import KvCache, KvShape
from ..attention.torch_paged import TorchPagedAttention
from ..executors.base import Model
from ..executors.reference import Reference, ReferenceModel
from ..executors.vocabulary import Vocabulary


@dataclass(frozen=True)
class Backend:
    """The kernels of a model: operations, attention, and how a program runs."""

    ops: Ops
    weight_dtype: torch.dtype  # of matrices; other parameters have the activations' type
    attention: Callable[[KvCache], AttentionBackend]
    model: Callable[[Reference, Vocabulary, KvShape], Model]  # how a program runs
    note: str  # for the operator
    is_compiled: bool = False  # C kernels: with `--deterministic` a token has the same bits in any batch

    @classmethod
    def reference(cls, dtype: torch.dtype, *, quantization: str | None = None, why: str = "") -> "Backend":
        """Torch's own kernels."""
        ops = reference_ops(quantization=quantization)
        return cls(
            ops=ops,
            weight_dtype=dtype,
            attention=lambda cache: TorchPagedAttention(cache=cache, ops=ops, dtype=dtype),
            model=ReferenceModel,
            note=f"kernels of torch{'' if quantization is None else f', matrices as {quantization}'}{why}",
        )


def choose_backend(config: EngineConfig, device: torch.device, checkpoint_dtype: str) -> Backend:
    """The C kernels compute in float32 and widen bfloat16 weights as they read them, so a bfloat16 checkpoint keeps its
    type and loses nothing. Torch's kernels are used on other devices, for other types of activations, and where the C
    kernels cannot be compiled or are not wanted."""
    dtype = getattr(torch, config.activations)
    why = f", which are slower, because {config.no_cpu_level}" if config.no_cpu_level else ""
    if device.type == "cpu" and config.kernels == "compiled" and dtype == torch.float32:
        try:
            weights = "bfloat16" if "bfloat16" in (checkpoint_dtype, config.dtype) else "float32"
            rounds = config.runs_in_c and config.arithmetic == "bfloat16"
            library = build.find(config.cpu_level)
            return compiled(library, weights, quantization=config.quantization, rounds=rounds)
        except build.BuildError as error:
            why = f", because {error}; tokens may depend on what else is served where two are almost equally likely"
    return Backend.reference(dtype, quantization=config.quantization, why=why)


def compiled(library: build.Library, weights: str, *, quantization: str | None, rounds: bool) -> Backend:
    """rounds: the inputs of products are rounded to bfloat16."""
    from ...kernels.cpu.library import Kernels
    from ...kernels.cpu.operations import native_ops
    from ..attention.native import NativePagedAttention
    from ..executors.native import NativeModel

    kernels = Kernels(library.load())
    ops = native_ops(kernels, quantization=quantization, rounds=rounds)

    def attention(cache: KvCache) -> AttentionBackend:
        return NativePagedAttention(cache=cache, ops=ops, kernels=kernels, rounds=rounds)

    def model(reference: Reference, vocabulary: Vocabulary, kv_shape: KvShape) -> Model:
        return NativeModel(reference, vocabulary, kv_shape, kernels)

    return Backend(
        ops=ops,
        weight_dtype=torch.bfloat16 if weights == "bfloat16" else torch.float32,
        attention=attention,
        model=model,
        note=f"C kernels for {library.level.name}, {library.origin}: "
        + (
            f"{weights} weights, {'bfloat16' if rounds else 'float32'} arithmetic"
            if quantization is None
            else f"matrices as {quantization}"
        ),
        is_compiled=True,
    )
