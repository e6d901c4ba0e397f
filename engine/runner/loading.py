"""From a checkpoint to a model that runs plans: chooses the model's class and kernels, and accounts for memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ...config.config import EngineConfig
from ...errors import CheckpointError, ConfigError
from ...kernels.grouped_weight import GroupedWeight
from ...kernels.ops import Ops
from ...kernels.quantized_weight import StoredWeight, concatenate, int4_of
from ..attention.kv_cache import KvShape
from ..checkpoint.spec import ModelSpec, check_options, is_native
from ..device.base import Device
from ..device.cpu import available_memory
from ..device.queue import Queue
from ..layers.linear import Linear, Weight
from ..layers.moe import MoeMlp, Router, Stack
from ..models import registry
from ..models.decoder import Decoder, Model
from ..parallel.collectives import Group
from ..weights.dummy import fill_dummy
from ..weights.loader import Consumer, check_weights, load_weights, quantized_parameters
from ..weights.mapping import Target, checkpoint_targets
from ..weights.reader import CheckpointReader, Reader, open_checkpoint
from .backend import Backend, choose_backend
from .memory import size, workspace_bytes
from .shared_weights import SharedWeights

if TYPE_CHECKING:
    from ..gpu.device_steps import DeviceModel
    from ..steps.encoder_steps import EncoderModel

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
_GRAPH_BYTES = 4 << 20  # per recorded step; an assumption, not measured
_DIMS = (16, 32, 64, 128, 256)  # head dimensions that the Triton kernels support
_MAX_GROUP = 16  # query heads per kv head that the Triton kernels support
_MAX_ROWS = 2048  # that `plan_decode` handles in one program; more would overflow 32-bit offsets of partial sums


@dataclass(frozen=True, kw_only=True)
class HostModel:
    """A model whose steps run one at a time: on a CPU, and on a GPU where the Triton kernels do not support it."""

    model: Model
    backend: Backend
    kv_shape: KvShape
    weights: int  # bytes
    workspace: int  # bytes, estimated
    graphs = 0
    head_major = False

    @property
    def note(self) -> str:
        return self.backend.note


def load_model(
    config: EngineConfig,
    spec: ModelSpec,
    device: Device,
    queue: Queue | None,
    group: Group,
    progress: Callable[[int, int], None] | None,
    shared: SharedWeights | None = None,
) -> "HostModel | DeviceModel | EncoderModel":
    """Reads this rank's part of the checkpoint. queue: of a device with Triton kernels, else None. shared: where the C
    kernels' weights are packed, if they are packed. Raises ConfigError, CheckpointError."""
    torch_device = device.torch_device
    if spec.purpose.is_encoder:
        return _load_encoder(config, spec, device)
    why = "the device is no GPU" if queue is None else _why_not_triton(config, spec)
    dtype = DTYPES[config.dtype if why is None else config.activations]  # of activations
    if why is None:
        backend = Backend.reference(dtype)
    elif config.kv_cache_dtype == "fp8":
        raise ConfigError(f"--kv-cache-dtype fp8 needs the Triton kernels, which cannot be used: {why}.")
    else:
        backend = choose_backend(config, torch_device, spec.dtype)
    _check_deterministic(config, spec, backend, is_on_device=why is None)
    check_positions(config, spec)
    decoder = registry.build_native(
        spec,
        max_len=config.max_model_len,
        dtype=dtype,
        weight_dtype=backend.weight_dtype,
        device=torch_device,
        group=group,
        ops=backend.ops,
    )
    kv_dtype = DTYPES[config.kv_cache_dtype]
    if decoder is not None:
        ops = None if why is None else backend.ops
        is_kept = keeps_quantized(config, spec, ops, dtype)
        fill = partial(_fill, config, spec, decoder, torch_device, progress, is_kept=is_kept, ops=ops)
        decoder.kv_shape = replace(decoder.kv_shape, dtype=kv_dtype)
        if why is None:
            assert queue is not None
            fill()
            return _on_device(config, spec, decoder, queue)
        if shared is not None and backend.ops.storage is not None:
            weights = shared.load(config, group.rank, decoder, backend.ops, fill)
        else:
            fill()
            weights = decoder.pack(backend.ops)
        # `NativeDecoder` runs all layers in one call, and ranks exchange between the layers.
        model = backend.model(decoder) if group.size == 1 else decoder
    else:
        is_kept = False
        model, weights = _load_fallback(config, spec, torch_device, dtype, group)
        model.kv_shape = replace(model.kv_shape, dtype=kv_dtype)
    if queue is not None:
        backend = replace(backend, note=f"{backend.note}, because {why}")
    if spec.scheme is not None:
        backend = replace(backend, note=f"{backend.note}; {spec.scheme.note}{'' if is_kept else ', widened'}")
    return HostModel(
        model=model,
        backend=backend,
        kv_shape=model.kv_shape,
        weights=weights,
        workspace=host_workspace(config, spec, model.kv_shape),
    )


def keeps_quantized(config: EngineConfig, spec: ModelSpec, ops: Ops | None, dtype: torch.dtype) -> bool:
    """Whether quantized projections stay as the checkpoint stores them. ops: None for the Triton kernels, which need
    activations of 16 bits. `--quantization` rounds widened weights."""
    if spec.scheme is None or config.load_format == "dummy":
        return False
    if ops is None:
        return dtype.itemsize == 2 and spec.scheme.has_kernels
    return ops.quantized is not None and config.quantization is None


def _load_encoder(config: EngineConfig, spec: ModelSpec, device: Device) -> "EncoderModel":
    # Only here, since transformers takes seconds to import.
    from ..models.encoder import load_encoder
    from ..steps.encoder_steps import EncoderModel

    folder, dtype = Path(config.model.path), DTYPES[config.dtype]
    CheckpointReader(folder).close()  # raises our own error for damaged and missing files
    encoder = load_encoder(spec, folder, dtype=dtype, device=device.torch_device)
    shape = no_kv(dtype)
    return EncoderModel(
        encoder=encoder,
        kv_shape=shape,
        weights=encoder.weights,
        workspace=host_workspace(config, spec, shape),
        note=f"transformers' {spec.architecture}, {config.dtype}",
        synchronize=device.synchronize,
    )


def no_kv(dtype: torch.dtype) -> KvShape:
    """The shape of a model without KV: its blocks have no bytes."""
    return KvShape(layers=(), dtype=dtype)


def host_workspace(config: EngineConfig, spec: ModelSpec, kv_shape: KvShape) -> int:
    """Bytes that a step of a `HostModel` may take besides weights and KV, estimated."""
    per_layer = max((kv_shape.tile_bytes(tile, config.block_size) for tile in kv_shape.layers), default=0)
    return workspace_bytes(
        tokens=config.max_num_batched_tokens,
        rows=config.max_num_seqs,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size // config.tensor_parallel_size,
        num_experts_per_tok=0 if spec.moe is None else spec.moe.num_experts_per_tok,
        vocab_size=spec.vocab_size,
        itemsize=DTYPES[config.activations].itemsize,
        cache_bytes=config.max_num_seqs * -(-config.max_model_len // config.block_size) * per_layer,
    )


def pages_needed(config: EngineConfig, kv_shape: KvShape) -> int:
    """Pages for `max_num_seqs` requests of the greatest length."""
    groups = kv_shape.groups(config.block_size)
    return config.max_num_seqs * groups.pages(config.max_model_len, block_size=config.block_size)


def _why_not_triton(config: EngineConfig, spec: ModelSpec) -> str | None:
    """Why a model on a GPU cannot use the Triton kernels; None if it can."""
    if not is_native(spec):
        return f"{spec.architecture} has no native implementation"
    if config.extension is not None:
        return "--extension needs attention in torch"
    if spec.head_dim not in _DIMS:
        return f"the kernels do not support a head dimension of {spec.head_dim}"
    if spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
        return f"the kernels support at most {_MAX_GROUP} query heads per key/value head"
    inner = 0 if spec.moe is None else spec.moe.intermediate_size // config.tensor_parallel_size
    if spec.moe is not None and (inner % 32 or spec.hidden_size % 32):
        return "the kernels need experts whose sizes are multiples of 32"
    return None


def check_positions(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError if the rotary tables of a declared length would not fit into memory."""
    table = 6 * 4 * config.max_model_len * spec.head_dim  # cosines, sines and their intermediate tensors, on the host
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
        ("a mixture of experts on a GPU", is_on_device and spec.moe is not None),
        ("a quantized checkpoint on a GPU", is_on_device and spec.scheme is not None),
        (backend.note, not is_on_device and not backend.is_invariant),
    ):
        if is_so:
            raise ConfigError(f"--deterministic excludes {what}, whose sums depend on what else is served.")


def _on_device(config: EngineConfig, spec: ModelSpec, decoder: Decoder, queue: Queue) -> "DeviceModel":
    # Only here, since Triton comes with torch for GPUs alone.
    from ..gpu.decoder import TritonDecoder
    from ..gpu.device_steps import DeviceModel, limits_of, num_draft_tokens, num_graphs
    from ..gpu.state import RowState

    if config.max_num_seqs > _MAX_ROWS:
        raise ConfigError(f"--max-num-seqs {config.max_num_seqs}: a GPU runs at most {_MAX_ROWS} requests at once.")
    shape = decoder.kv_shape
    tile = shape.layers[0]
    group = decoder.num_heads // tile.kv_heads
    tables = shape.groups(config.block_size).num_tables
    limits = limits_of(config, group=group, draft_tokens=num_draft_tokens(config), tables=tables)
    dtype = DTYPES[config.dtype]
    triton = TritonDecoder(
        decoder,
        limits=limits,
        dtype=dtype,
        num_programs=queue.num_programs(tile.head_dim),
        is_deterministic=config.deterministic,
    )
    state = RowState(limits=limits, vocab_size=config.model.vocab_size, device=queue.device)
    # A step's temporary memory, in the graphs' pool: the states of a layer, and logits twice.
    width = (2 * decoder.num_heads + 2 * tile.kv_heads) * tile.head_dim + 3 * decoder.intermediate_size
    steps = limits.tokens * (width + 4 * spec.hidden_size) * dtype.itemsize
    logits = limits.part * spec.vocab_size * (4 + dtype.itemsize)
    graphs = num_graphs(limits) * _GRAPH_BYTES
    return DeviceModel(
        decoder=triton,
        state=state,
        limits=limits,
        queue=queue,
        kv_shape=shape,
        weights=triton.weights,
        workspace=triton.nbytes + state.nbytes + steps + logits,
        graphs=graphs,
        note=f"Triton kernels, {config.dtype}" + ("" if spec.scheme is None else f"; {spec.scheme.note}"),
    )


def _fill(
    config: EngineConfig,
    spec: ModelSpec,
    decoder: Decoder,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
    consumer: Consumer | None = None,
    *,
    is_kept: bool,
    ops: Ops | None,
) -> None:
    """decoder: an outline without memory. consumer: takes its matrices as soon as they are filled. is_kept: quantized
    projections stay as the checkpoint stores them. ops: those that take them; None: the Triton kernels."""
    if config.load_format == "dummy":
        registry.allocate(decoder, device)
        fill_dummy(dict(decoder.named_parameters()))
        return
    with open_checkpoint(Path(config.model.path)) as reader:
        targets = find_targets(reader, decoder, spec)
        keep: dict[str, Callable[[int, Sequence[StoredWeight]], None]] = {}
        if is_kept:
            for name in kept_parameters(reader, targets, spec, decoder, is_on_device=ops is None):
                keep[name] = partial(_keep, name, decoder, device) if ops is None else _packs(name, decoder, ops)
        taken = () if consumer is None else consumer.names
        registry.allocate(decoder, device, without={*keep, *taken})
        load_weights(
            reader,
            dict(decoder.named_parameters()),
            targets,
            scheme=spec.scheme,
            keep=keep,
            redundant=decoder.redundant,
            progress=progress,
            consumer=consumer,
        )


def find_targets(reader: Reader, decoder: Decoder, spec: ModelSpec) -> dict[str, Target]:
    """Maps each tensor of the checkpoint to a parameter. decoder: may be an outline. Raises CheckpointError for
    missing, left-over and misshapen tensors."""
    parameters = dict(decoder.named_parameters())
    targets = checkpoint_targets(parameters, decoder.fused, decoder.cuts, decoder.renamed)
    if "embed_tokens.weight" in reader:  # saved without the head, as embedding models are
        targets = {name.removeprefix("model."): target for name, target in targets.items()}
    check_weights(reader, parameters, targets, scheme=spec.scheme, redundant=decoder.redundant)
    return targets


def kept_parameters(
    reader: Reader, targets: Mapping[str, Target], spec: ModelSpec, decoder: Decoder, *, is_on_device: bool
) -> list[str]:
    """The parameters whose matrices stay as the checkpoint stores them. is_on_device: for the Triton kernels, which
    take no quantized experts."""
    assert spec.scheme is not None
    kept = quantized_parameters(reader, targets, spec.scheme, wholly=not is_on_device)

    def takes(module: torch.nn.Module) -> bool:
        if is_on_device:
            return isinstance(module, Linear)
        return isinstance(module, Weight | MoeMlp) and not isinstance(module, Router)

    return [
        f"{path}.{leaf}"
        for path, module in decoder.named_modules()
        if takes(module)
        for leaf, _ in module.named_parameters(recurse=False)
        if f"{path}.{leaf}" in kept
    ]


def _keep(name: str, decoder: Decoder, device: torch.device, _: int, parts: Sequence[StoredWeight]) -> None:
    """Keeps a weight for the Triton kernels."""
    module = cast(Weight, decoder.get_submodule(name.rpartition(".")[0]))
    try:
        weight = concatenate(parts)
        module.replace((int4_of(weight) if isinstance(weight, GroupedWeight) else weight).to(device))
    except ValueError as e:
        raise CheckpointError(f"The parts of {name} cannot be fused: {e}.") from None


def _packs(name: str, decoder: Decoder, ops: Ops) -> Callable[[int, Sequence[StoredWeight]], None]:
    """Keeps a parameter's matrices for the C kernels."""
    path, _, leaf = name.rpartition(".")
    module = decoder.get_submodule(path)
    if isinstance(module, MoeMlp):
        return partial(module.pack_quantized, ops, cast(Stack, leaf))
    weight = cast(Weight, module)
    return lambda _, parts: weight.pack_quantized(ops, parts)


def _load_fallback(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, group: Group
) -> tuple[Model, int]:
    check_options(
        spec,
        tensor_parallel_size=group.size,
        is_dummy=config.load_format == "dummy",
        quantization=config.quantization,
    )
    from ..models.transformers_fallback import load_fallback

    folder = Path(config.model.path)
    return load_fallback(
        spec, folder, num_numbers=count_numbers(folder), max_len=config.max_model_len, dtype=dtype, device=device
    )


def count_numbers(folder: Path) -> int:
    """The number of values in the checkpoint's tensors. Raises CheckpointError for damaged and missing files."""
    with CheckpointReader(folder) as reader:
        return sum(math.prod(reader.shape(name)) for name in reader.names())
