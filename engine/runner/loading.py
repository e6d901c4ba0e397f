"""From a checkpoint to a model that runs plans: chooses the model's class and kernels, and accounts for memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...config.config import EngineConfig
from ...errors import ConfigError
from ...kernels.ops import Ops
from ..attention.cache_groups import CacheGroups, Lifetime
from ..attention.kv_cache import KvShape, StateTile, Tile
from ..checkpoint.spec import ModelSpec, check_options, is_native
from ..device.base import Device
from ..device.cpu import available_memory
from ..device.queue import Queue
from ..executors.base import Model
from ..executors.reference import Reference
from ..executors.vocabulary import Vocabulary
from ..executors.weights import Options, Packing, fill_dummy
from ..gpu.layers import UnknownLayerError, layers_of
from ..models.cut import cut, share
from ..models.lower import lower
from ..models.program import Mixture, Program
from ..parallel.collectives import Group
from ..weights.loader import Sink, check_weights, load_weights
from ..weights.reader import CheckpointReader, open_checkpoint
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
_LEFT_STATES = 7  # of a request: one at its end, and those that its prompt keeps
_SPARE_STATES = 4  # of a row: the default number of draft tokens
_SPARE_SHARE = 8  # spare states take at most 1/8 as much memory as the pages that the core assigns
_GRAPH_BYTES = 4 << 20  # per recorded step; an assumption, not measured
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
    kv_dtype = DTYPES[config.kv_cache_dtype]
    if is_native(spec):
        ops = None if why is None else backend.ops
        is_kept = keeps_quantized(config, spec, ops, dtype)
        program = program_of(spec, group.rank, group.size)
        kv_shape = kv_shape_of(config, program)
        if why is None:
            assert queue is not None
            return _on_device(config, spec, program, kv_shape, queue, group, progress, is_kept=is_kept)
        options = Options(
            ops=backend.ops, dtype=dtype, weight_dtype=backend.weight_dtype, device=torch_device, keeps=is_kept
        )
        fill = partial(_fill, config, spec, program, progress)
        packing = Packing(options)
        if shared is not None and backend.ops.storage is not None:
            loaded = shared.load(config, group.rank, packing, backend.ops, fill)
        else:
            fill(packing)
            loaded = packing.weights
        reference = Reference(
            program, loaded, max_len=config.max_model_len, dtype=dtype, weight_dtype=backend.weight_dtype,
            device=torch_device, group=group,
        )  # fmt: skip
        weights = loaded.num_bytes
        model = backend.model(reference, Vocabulary(program, loaded, group), kv_shape)
    else:
        is_kept = False
        model, weights = _load_fallback(config, spec, torch_device, dtype, group)
        model.kv_shape = replace(model.kv_shape, dtype=kv_dtype)
    if queue is not None:
        backend = replace(backend, note=f"{backend.note}, because {why}")
    if spec.scheme is not None:
        backend = replace(backend, note=f"{backend.note}; {spec.scheme.note}{'' if is_kept else ', widened'}")
    if is_native(spec):
        backend = replace(backend, note=backend.note + _unread(config, spec))
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
    from ..executors.encoder import load_encoder
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
        num_experts_per_tok=_top_k(spec),
        vocab_size=spec.vocab_size,
        itemsize=DTYPES[config.activations].itemsize,
        cache_bytes=config.max_num_seqs * -(-config.max_model_len // config.block_size) * per_layer,
    )


def _top_k(spec: ModelSpec) -> int:
    """How many experts a token has in each layer; 0: there are none, or transformers runs them."""
    if not is_native(spec):
        return 0
    return max((op.args.router.top_k for op in program_of(spec, 0, 1).ops if isinstance(op.args, Mixture)), default=0)


def pages_needed(config: EngineConfig, kv_shape: KvShape) -> int:
    """Pages for `max_num_seqs` requests of the greatest length, and the recurrent states that they leave behind."""
    groups = kv_shape.groups(config.block_size)
    of_request = groups.pages(config.max_model_len, block_size=config.block_size) + _LEFT_STATES * groups.state_pages
    return config.max_num_seqs * of_request


def num_spare_states(config: EngineConfig, groups: CacheGroups, num_pages: int) -> int:
    """How many states the worker has for draft tokens beside `num_pages` pages. More would take memory from requests;
    with fewer than a row's draft tokens there is no speculation."""
    if config.speculative is None or not groups.state_pages:
        return 0
    return min(_SPARE_STATES * config.max_num_seqs, num_pages // (_SPARE_SHARE * groups.state_pages))


def offered_pages(config: EngineConfig, groups: CacheGroups, num_pages: int) -> int:
    """How many of `num_pages` pages the core may assign."""
    return num_pages - num_spare_states(config, groups, num_pages) * groups.state_pages


def _why_not_triton(config: EngineConfig, spec: ModelSpec) -> str | None:
    """Why a model on a GPU cannot use the Triton kernels; None if it can."""
    if not is_native(spec):
        return f"{spec.architecture} runs in transformers"
    if config.extension is not None:
        return "--extension needs attention in torch"
    try:
        layers_of(program_of(spec, 0, config.tensor_parallel_size))
    except UnknownLayerError as error:
        return str(error)
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
        ("a mixture of experts on a GPU", is_on_device and _top_k(spec) > 0),
        ("a quantized checkpoint on a GPU", is_on_device and spec.scheme is not None),
        (backend.note, not is_on_device and not backend.is_invariant),
    ):
        if is_so:
            raise ConfigError(f"--deterministic excludes {what}, whose sums depend on what else is served.")


def _on_device(
    config: EngineConfig,
    spec: ModelSpec,
    program: Program,
    shape: KvShape,
    queue: Queue,
    group: Group,
    progress: Callable[[int, int], None] | None,
    *,
    is_kept: bool,
) -> "DeviceModel":
    # Only here, since Triton comes with torch for GPUs alone.
    from ..gpu.decoder import TritonDecoder
    from ..gpu.device_steps import DeviceModel, limits_of, num_draft_tokens, num_graphs
    from ..gpu.state import RowState
    from ..gpu.weights import Loaded

    if config.max_num_seqs > _MAX_ROWS:
        raise ConfigError(f"--max-num-seqs {config.max_num_seqs}: a GPU runs at most {_MAX_ROWS} requests at once.")
    tile = shape.layers[0]
    dtype = DTYPES[config.dtype]
    loaded = Loaded(dtype=dtype, device=queue.device, keeps=is_kept)
    _fill(config, spec, program, progress, loaded)
    heads = program.attention[0].heads
    limits = limits_of(
        config,
        group=heads // tile.kv_heads,
        draft_tokens=num_draft_tokens(config),
        tables=shape.groups(config.block_size).num_tables,
    )
    triton = TritonDecoder(
        program,
        loaded,
        shape=shape,
        group=group,
        max_len=config.max_model_len,
        limits=limits,
        dtype=dtype,
        num_programs=queue.num_programs(tile.head_dim),
        is_deterministic=config.deterministic,
    )
    state = RowState(limits=limits, vocab_size=config.model.vocab_size, device=queue.device)
    # A step's temporary memory, in the graphs' pool: the states of a layer, and logits twice.
    width = (2 * heads + 2 * tile.kv_heads) * tile.head_dim + 3 * spec.intermediate_size // group.size
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


def _unread(config: EngineConfig, spec: ModelSpec) -> str:
    """What the start says of tensors that are not for text. Reads headers only."""
    assert spec.decoder is not None
    if not spec.decoder.ignored or config.load_format == "dummy":
        return ""
    with open_checkpoint(Path(config.model.path)) as reader:
        found = check_weights(reader, spec.decoder, spec.scheme)
    if not found.skipped:
        return ""
    return f"; {found.skipped:,} tensors that are not for text ({size(found.skipped_bytes)}) are not read"


def program_of(spec: ModelSpec, rank: int, size: int) -> Program:
    """A rank's part of a described model. Raises ConfigError if it cannot be divided."""
    assert spec.decoder is not None
    first_id, _ = share(spec.decoder.vocab, rank, size)
    return lower(cut(spec.decoder, rank, size), ranks=size, first_id=first_id)


def shape_of(program: Program, dtype: torch.dtype) -> KvShape:
    """The KV of a program."""
    lifetimes = [Lifetime(tile.reach.kind, tile.reach.positions) for tile in program.tiles]
    tiles = zip(program.tiles, lifetimes, strict=True)
    return KvShape(
        layers=tuple(Tile(tile.kv_heads, tile.head_dim, tile.value_dim, lifetime) for tile, lifetime in tiles),
        dtype=dtype,
        states=tuple(StateTile(state.shape) for state in program.states),
    )


def kv_shape_of(config: EngineConfig, program: Program) -> KvShape:
    return shape_of(program, DTYPES[config.kv_cache_dtype])


def _fill(
    config: EngineConfig,
    spec: ModelSpec,
    program: Program,
    progress: Callable[[int, int], None] | None,
    sink: Sink,
) -> None:
    """Gives a program's weights to the sink."""
    if config.load_format == "dummy":
        fill_dummy(program, sink)
        return
    assert spec.decoder is not None
    with open_checkpoint(Path(config.model.path)) as reader:
        found = check_weights(reader, spec.decoder, spec.scheme)
        load_weights(reader, program, found, sink, scheme=spec.scheme, progress=progress)


def _load_fallback(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, group: Group
) -> tuple[Model, int]:
    check_options(
        spec,
        tensor_parallel_size=group.size,
        is_dummy=config.load_format == "dummy",
        quantization=config.quantization,
    )
    from ..executors.transformers_fallback import load_fallback

    folder = Path(config.model.path)
    return load_fallback(
        spec, folder, num_numbers=count_numbers(folder), max_len=config.max_model_len, dtype=dtype, device=device
    )


def count_numbers(folder: Path) -> int:
    """The number of values in the checkpoint's tensors. Raises CheckpointError for damaged and missing files."""
    with CheckpointReader(folder) as reader:
        return sum(math.prod(reader.shape(name)) for name in reader.names())
