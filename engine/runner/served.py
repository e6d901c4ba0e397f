"""Whether and how a checkpoint is served: the one answer of `serve`, `LLM`, `doctor`, `serve --explain` and the
documentation. It reads config.json and the headers of the weights, and loads nothing.

What only weights show is found after loading (`transformers_fallback.py`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from ...config.config import EngineConfig
from ...config.gpu import LEAST_CAPABILITY, check_fp8, show_capability
from ...config.machine import available_memory
from ...errors import ConfigError
from ...kernels.ops import Ops
from ..attention.cache_groups import CacheGroups, Lifetime
from ..attention.kv_cache import KvShape, StateTile, Tile
from ..checkpoint.spec import ModelSpec, check_options, is_native
from ..gpu import attention, rules
from ..gpu.rules import Target
from ..models.cut import cut, share
from ..models.description import LatentAttention, Reach
from ..models.families import pages
from ..models.in_c import operations_in_torch
from ..models.lower import lower
from ..models.program import (
    Activate,
    Add,
    AllReduce,
    Attend,
    AttendLatent,
    Embed,
    Glu,
    Heat,
    Keep,
    MeanSquares,
    Mixture,
    Multiply,
    Normalize,
    Op,
    Positions,
    Program,
    Rotate,
    Spread,
)
from ..weights.loader import Found, check_weights
from ..weights.open import open_checkpoint
from ..weights.reader import CheckpointReader
from .backend import Backend, choose_backend
from .memory import size

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}

Executor = Literal["Triton", "C", "torch", "transformers", "encoder"]


@dataclass(frozen=True, kw_only=True)
class Served:
    """How a checkpoint is served on a device. transformers: its model with pagewire's attention; encoder: its model as
    it is."""

    spec: ModelSpec
    executor: Executor
    backend: Backend | None  # None: an encoder has none
    dtype: torch.dtype  # of activations
    program: Program | None  # of one rank; None: transformers computes the model
    kv_shape: KvShape
    found: Found | None  # what the checkpoint has for the program; None: nothing is read
    is_kept: bool  # quantized matrices stay as they are stored
    is_certain: bool = True  # False: only the weights show the shape of the KV
    why: str = ""  # why a GPU does not use the Triton kernels
    unfused: str = ""  # why it does not use the one for products of few tokens
    attention: str = ""  # which attention is not that of the Triton kernels
    layers: str = ""  # which of the model's layers a stage has; empty: all

    @property
    def left_out(self) -> frozenset[str]:
        """GPU kernels that torch replaces because they do not fit the device."""
        return frozenset({"small_product"} if self.unfused else ())

    @property
    def has_narrow_inputs(self) -> bool:
        """The checkpoint was made for activations of 8 bits."""
        return self.spec.scheme is not None and self.spec.scheme.has_narrow_inputs

    @property
    def page(self) -> str:
        """The file that describes the family; empty if transformers computes the model."""
        if self.program is None:
            return ""
        return f"engine/models/families/{pages()[self.spec.architecture].__module__.rpartition('.')[2]}.py"

    @property
    def in_torch(self) -> tuple[str, ...]:
        """The operations of a C or Triton program that torch computes on the same memory."""
        match self.executor, self.program:
            case "C", Program() as program:
                return operations_in_torch(program)
            case "Triton", Program() as program:
                return names(rules.in_torch(program))
        return ()

    @property
    def note(self) -> str:
        """For the operator."""
        scheme, found, dtype = self.spec.scheme, self.found, str(self.dtype).removeprefix("torch.")
        if self.backend is None:
            return f"transformers' {self.spec.architecture}, {dtype}"
        parts = [self.layers] * bool(self.layers)
        parts.append(self.backend.note + (f", because {self.why}" if self.why else ""))
        if self.executor == "Triton":
            parts = [f"Triton kernels, {dtype}", *filter(None, [self.attention])]
        if self.in_torch:
            parts.append(f"torch computes {', '.join(self.in_torch)}")
        if self.unfused:
            parts.append(f"cuBLAS computes all products, because {self.unfused}")
        if shares := _expert_shares(self.program):
            parts.append(shares)
        if scheme is not None:
            parts.append(scheme.note + ("" if self.is_kept or self.executor == "Triton" else ", widened"))
        if found is not None and found.skipped:
            parts.append(f"{found.skipped:,} tensors that are not for text ({size(found.skipped_bytes)}) are not read")
        return "; ".join(parts)

    def lines(self, config: EngineConfig) -> list[str]:
        """What the operator may want to know before the start: who computes the model, and in which parts."""
        if self.program is not None:
            by = f"described in {self.page}"
        else:
            by = f"computed by transformers, because {self.spec.why_not_described}"
        found = [f"{self.spec.architecture}, {by}", self.note]
        if self.executor != "encoder" and self.kv_shape != no_kv(self.kv_shape.dtype):
            found.append(f"cache groups: {', '.join(group_names(self.kv_shape.groups(config.block_size)))}")
        return found


def how_served(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    *,
    has_triton: bool,
    rank: int = 0,
    capability: int | None = None,
    failed: str = "",
) -> Served:
    """has_triton: the device runs the Triton kernels. capability: of a GPU, 90 for 9.0; None: unknown. failed: why the
    Triton kernels cannot be used after all. Raises ConfigError and CheckpointError for a checkpoint that is
    not served."""
    check_options(
        spec,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        is_dummy=config.load_format == "dummy",
        quantization=config.quantization,
    )
    if spec.purpose.is_encoder:
        # Only here, since transformers takes seconds to import.
        from ..executors.encoder import encoder_config

        folder, dtype = Path(config.model.path), DTYPES[config.dtype]
        CheckpointReader(folder).close()  # raises for damaged and missing files
        encoder_config(spec, folder)
        return Served(
            spec=spec, executor="encoder", backend=None, dtype=dtype, program=None, kv_shape=no_kv(dtype), found=None,
            is_kept=False,
        )  # fmt: skip
    target = None if capability is None else Target(capability, config.dtype, config.kv_cache_dtype)
    if has_triton and not _too_old(capability):
        check_fp8(config.kv_cache_dtype, capability)
    why = _too_old(capability) or _why_not_triton(config, spec, target) or failed or None if has_triton else None
    is_triton = has_triton and why is None
    dtype = DTYPES[config.dtype if is_triton else config.activations]
    if is_triton:
        backend = Backend.reference(dtype)
    elif has_triton and config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {config.pipeline_parallel_size} on GPUs needs the Triton kernels, which cannot "
            f"be used: {why}."
        )
    elif config.attention_backend not in ("auto", "torch"):
        reason = why or "the device is no GPU"
        raise ConfigError(
            f"--attention-backend {config.attention_backend} needs the Triton kernels, which cannot be used: {reason}."
        )
    elif config.kv_cache_dtype == "fp8":
        reason = why or "the device is no GPU"
        raise ConfigError(f"--kv-cache-dtype fp8 needs the Triton kernels, which cannot be used: {reason}.")
    else:
        backend = choose_backend(config, device, spec.dtype)
    _check_deterministic(config, spec, backend, is_on_device=is_triton)
    if config.deterministic and is_triton and target is not None and (variant := rules.variant(target)):
        raise ConfigError(f"--deterministic: {variant}. Choose --dtype bfloat16.")
    check_positions(config, spec)
    if not is_native(spec):
        # Only here, since transformers takes seconds to import.
        from ..executors.transformers_fallback import outline

        folder = Path(config.model.path)
        shape = outline(spec, folder, num_numbers=_count_numbers(folder), max_len=config.max_model_len, dtype=dtype)
        heads, dim = spec.num_kv_heads, spec.head_dim
        likely = KvShape.uniform(num_layers=spec.num_layers, kv_heads=heads, head_dim=dim, dtype=dtype)
        return Served(
            spec=spec, executor="transformers", backend=backend, dtype=dtype, program=None,
            kv_shape=replace(shape or likely, dtype=DTYPES[config.kv_cache_dtype]), found=None, is_kept=False,
            is_certain=shape is not None, why=why or "",
        )  # fmt: skip
    program = program_of(
        spec, rank, config.tensor_parallel_size, deals_experts=config.enable_expert_parallel,
        num_replicas=config.expert_replicas, has_domains=config.kv_domains > 1, exchanges=config.exchanges_tokens,
    )  # fmt: skip
    return Served(
        spec=spec,
        executor="Triton" if is_triton else "C" if backend.is_compiled else "torch",
        backend=backend,
        dtype=dtype,
        program=program,
        kv_shape=kv_shape_of(config, program),
        found=_found(config, spec),
        is_kept=keeps_quantized(config, spec, None if is_triton else backend.ops, dtype),
        why=why or "",
        unfused=rules.unfused(program, target) if is_triton and target is not None else "",
        attention=attention.note(config.attention_backend, program, dtype, DTYPES[config.kv_cache_dtype])
        if is_triton
        else "",
    )


def _count_numbers(folder: Path) -> int:
    """The number of values in the checkpoint's tensors. Raises CheckpointError for damaged and missing files."""
    with CheckpointReader(folder) as reader:
        return sum(math.prod(reader.shape(name)) for name in reader.names())


def _found(config: EngineConfig, spec: ModelSpec) -> Found | None:
    """Reads the headers of the weights."""
    if config.load_format == "dummy":
        return None
    assert spec.decoder is not None
    with open_checkpoint(Path(config.model.path), config.model.adapter) as reader:
        return check_weights(reader, spec.decoder, spec.scheme)


_WORDS: dict[type, str] = {
    Activate: "activation",
    Add: "sum with factors",
    Glu: "gated activation",
    Heat: "temperature of queries",
    MeanSquares: "norm over ranks",
    Multiply: "gate",
}


def names(ops: Iterable[Op]) -> tuple[str, ...]:
    """In words, each once. What ranks exchange is left out: every executor has it."""
    return tuple(dict.fromkeys(operation_name(op) for op in ops if not isinstance(op.args, AllReduce | Spread | Keep)))


def operation_name(op: Op) -> str:
    """In the field's words."""
    args = op.args
    match args:
        case Attend():
            kinds = [f"{args.reach.kind} attention"] if args.reach.kind != "full" else ["attention"]
            kinds += ["ALiBi"] if args.alibi is not None else []
            return kinds[0] + (f" ({', '.join(kinds[1:])})" if kinds[1:] else "")
        case AttendLatent():
            return "multi-head latent attention (MLA)"
        case Mixture():
            return f"experts ({args.router.score.replace('_', ' ')} routing)"
        case Rotate():
            return "rotary embedding"
        case Positions():
            return "learned positions"
        case Normalize():
            return "layer norm" if args.norm.kind == "layer" else "RMS norm"
        case Embed():
            return "embedding"
    if (known := _WORDS.get(type(args))) is not None:
        return known
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(args).__name__)
    return words.strip()


def group_names(groups: CacheGroups) -> list[str]:
    """full, window of 1024, chunk of 8192, state."""
    lifetimes = [group.lifetime for group in groups.groups]
    return [each.kind + (f" of {each.span}" if each.span else "") for each in lifetimes]


def _expert_shares(program: Program | None) -> str:
    """How many whole experts this rank has; empty: it has all, or a part of each."""
    ops = () if program is None else program.ops
    found = [op.args for op in ops if isinstance(op.args, Mixture) and op.args.places]
    if not found:
        return ""
    shares = dict.fromkeys(f"{args.down.experts} of {args.num_experts}" for args in found)
    room = f", and room for {found[0].num_replicas} more" if found[0].num_replicas else ""
    return f"{' or '.join(shares)} experts of a layer on this rank, whole{room}"


def program_of(
    spec: ModelSpec, rank: int, size: int, *, deals_experts: bool = False, num_replicas: int = 0,
    has_domains: bool = False, exchanges: bool = False,
) -> Program:  # fmt: skip
    """A rank's part of a described model. Raises ConfigError if it cannot be divided."""
    assert spec.decoder is not None
    first_id = 0 if has_domains else share(spec.decoder.vocab, rank, size)[0]
    part = cut(
        spec.decoder, rank, size, deals_experts=deals_experts, num_replicas=num_replicas, has_domains=has_domains,
        exchanges=exchanges,
    )  # fmt: skip
    return lower(part, ranks=size, first_id=first_id, has_domains=has_domains)


def shape_of(program: Program, dtype: torch.dtype) -> KvShape:
    """The KV of a program."""
    lifetimes = [_lifetime(tile.reach) for tile in program.tiles]
    tiles = zip(program.tiles, lifetimes, strict=True)
    return KvShape(
        layers=tuple(Tile(tile.kv_heads, tile.head_dim, tile.value_dim, lifetime) for tile, lifetime in tiles),
        dtype=dtype,
        states=tuple(StateTile(state.shape) for state in program.states),
    )


def _lifetime(reach: Reach) -> Lifetime:
    assert reach.kind != "whole", "an encoder's own layers keep nothing"
    return Lifetime(reach.kind, reach.positions)


def kv_shape_of(config: EngineConfig, program: Program) -> KvShape:
    return shape_of(program, DTYPES[config.kv_cache_dtype])


def keeps_quantized(config: EngineConfig, spec: ModelSpec, ops: Ops | None, dtype: torch.dtype) -> bool:
    """Whether quantized projections stay as the checkpoint stores them. ops: None for the Triton kernels, which need
    activations of 16 bits. `--quantization` rounds widened weights."""
    if spec.scheme is None or config.load_format == "dummy":
        return False
    if ops is None:
        return dtype.itemsize == 2 and spec.scheme.has_kernels
    return ops.quantized is not None and config.quantization is None


def top_k(spec: ModelSpec) -> int:
    """How many experts a token has in each layer; 0: there are none, or transformers runs them."""
    if not is_native(spec):
        return 0
    return max((op.args.router.top_k for op in program_of(spec, 0, 1).ops if isinstance(op.args, Mixture)), default=0)


def _why_not_triton(config: EngineConfig, spec: ModelSpec, target: Target | None) -> str | None:
    """Why a model on a GPU cannot use the Triton kernels; None if it can."""
    if not is_native(spec):
        return f"{spec.architecture} runs in transformers"
    if config.extension is not None:
        return "--extension needs attention in torch"
    if config.runner_plugin is not None:
        return "--runner-plugin is called on the host, between layers"
    size, deals_experts = config.tensor_parallel_size, config.enable_expert_parallel
    return lacks_in_triton(program_of(spec, 0, size, deals_experts=deals_experts), target)


def _too_old(capability: int | None) -> str:
    """Why a GPU does not run the Triton kernels."""
    if capability is None or capability >= LEAST_CAPABILITY:
        return ""
    needed, found = show_capability(LEAST_CAPABILITY), show_capability(capability)
    return f"they need compute capability {needed}, and this GPU has {found}"


def lacks_in_triton(program: Program, target: Target | None = None) -> str | None:
    """Why the Triton kernels cannot run a program; None: they can. target: None: on a device for which all compile."""
    try:
        rules.in_torch(program, target)
    except rules.UnknownLayerError as error:
        return str(error)
    return None


def check_positions(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError if the rotary tables of a declared length would not fit into memory."""
    num = config.max_model_len + (config.model.regime_limit or 0)
    table = 6 * 4 * num * spec.head_dim  # cosines, sines and their intermediate tensors, on the host
    if table > (free := available_memory()):
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the rotary tables of that many positions take {size(table)} "
            f"while they are built, and {size(free)} are free. Choose a smaller length."
        )


def _check_deterministic(config: EngineConfig, spec: ModelSpec, backend: Backend, *, is_on_device: bool) -> None:
    """Checks what `resolve` could not know: whether Triton kernels serve the model, and whether the C kernels built."""
    if not config.deterministic:
        return
    for what, is_so in (
        ("a mixture of experts on a GPU", is_on_device and top_k(spec) > 0),
        ("a quantized checkpoint on a GPU", is_on_device and spec.scheme is not None),
        ("latent attention on a GPU", is_on_device and _has_latent(spec)),
        (backend.note, not is_on_device and not backend.is_compiled),
    ):
        if is_so:
            raise ConfigError(f"--deterministic excludes {what}, whose sums depend on what else is served.")


def _has_latent(spec: ModelSpec) -> bool:
    return spec.decoder is not None and any(isinstance(body, LatentAttention) for body in spec.decoder.bodies)


def no_kv(dtype: torch.dtype) -> KvShape:
    """The shape of a model without KV: its blocks have no bytes."""
    return KvShape(layers=(), dtype=dtype)
