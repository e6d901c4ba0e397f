"""From a checkpoint to a model that runs plans: chooses the model's class and kernels, and accounts for memory."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.config import EngineConfig
from ...errors import ConfigError
from ...ipc.messages import PassReads
from ..attention.cache_groups import CacheGroups
from ..attention.kv_cache import KvShape
from ..checkpoint.spec import ModelSpec
from ..device.base import Device
from ..device.queue import Queue
from ..executors.base import Model
from ..executors.by_layer import ByLayer
from ..executors.expert_replicas import ExpertReplicas, HostSlots, Wanted
from ..executors.experts import OwnExperts
from ..executors.native import NativeModel
from ..executors.reference import Reference, ReferenceModel
from ..executors.vocabulary import Vocabulary
from ..executors.weights import Options, Packing, fill_dummy
from ..gpu.rules import largest_group
from ..parallel.collectives import Alone, Group
from ..parallel.domains import Domain
from ..parallel.rank import RankInfo
from ..parallel.ring import Ring
from ..plugin.guard import PluginGuard
from ..weights.loader import Sink, load_targets, load_weights
from ..weights.open import open_checkpoint
from .backend import Backend
from .kept_weights import KeptWeights
from .kernel_checks import Checked, check_kernels
from .memory import workspace_bytes
from .plugin import open_plugin, tell_model
from .reads import reads_of
from .served import DTYPES, Served, how_served, top_k
from .shared_weights import SharedWeights, segment_key
from .stages import part_of_stage

if TYPE_CHECKING:
    from ..gpu.device_steps import DeviceModel
    from ..steps.encoder_steps import EncoderModel
    from .scripted import ScriptedModel

_ALONE = RankInfo()
_LEFT_STATES = 7  # of a request: one at its end, and those that its prompt keeps
_SPARE_STATES = 4  # of a row: the default number of draft tokens
_SPARE_SHARE = 8  # spare states take at most 1/8 as much memory as the pages that the core assigns
_GRAPH_BYTES = 4 << 20  # per recorded step; an assumption, not measured
_SEGMENT = 2 << 20  # torch's allocator takes memory in multiples of it,
_LARGE = 10 << 20  # in pieces of exactly what is asked for from this size on,
_SMALL_SEGMENTS = 3  # and for tensors of up to 1 MB by themselves: as many as steps need
_MAX_ROWS = 2048  # that `plan_decode` handles in one program; more would overflow 32-bit offsets of partial sums


@dataclass(frozen=True, kw_only=True)
class HostModel:
    """A model whose steps run one at a time: on a CPU, and on a GPU where the Triton kernels do not support it."""

    model: Model
    backend: Backend
    kv_shape: KvShape
    weights: int  # bytes
    reads: PassReads  # of its weights, in each step
    workspace: int  # bytes, estimated
    note: str  # for the operator
    failed_kernels: tuple[str, ...] = ()  # that torch, or a lower level of the C kernels, replaces
    received_width: int = 0  # of a stage: columns that it is sent,
    sent_width: int = 0  # and those that it sends
    own_experts: Mapping[int, OwnExperts] = field(default_factory=dict)  # by layer, if ranks share them out
    replicas: ExpertReplicas | None = None  # of these experts, if there is room for some
    domain: Domain | None = None  # of this rank; None: there is one domain
    plugin: PluginGuard | None = None  # the runner plugin
    by_layer: ByLayer | None = None  # who is told of layers during a pass; None: this model runs as a whole
    encoder: Model | None = None  # that the model reads
    queue: Queue | None = None  # its work is done when a call returns
    graphs = 0
    head_major = False
    handover = None


def load_model(
    config: EngineConfig,
    spec: ModelSpec,
    device: Device,
    queue: Queue | None,
    group: Group,
    progress: Callable[[int, int], None] | None,
    shared: SharedWeights | None = None,
    kept: KeptWeights | None = None,
    *,
    rank_info: RankInfo = _ALONE,
    is_checked: bool = True,
    broken_kernels: Collection[str] = (),
    ring: Ring | None = None,
) -> "HostModel | DeviceModel | EncoderModel | ScriptedModel":
    """Reads this rank's part of the checkpoint. queue: of a device with Triton kernels, else None. shared: where the C
    kernels' weights are packed, if they are packed. kept: where those of the Triton kernels are kept. is_checked:
    kernels are tried before they serve, but not `broken_kernels`. ring: of stages that hand tensors from device to
    device. Raises ConfigError, CheckpointError, BrokenDeviceError, and StartError with `--strict-kernels`."""
    if config.scripted is not None:
        return _load_script(config)
    torch_device = device.torch_device
    served = how_served(
        config, spec, torch_device, has_triton=queue is not None, rank=group.rank, capability=device.capability
    )
    checked = Checked(served, config)
    if is_checked:
        checked = check_kernels(config, spec, served, device, queue, group, broken_kernels, rank_info.rank)
        served, config = checked.served, checked.config
    if config.pipeline_parallel_size > 1:
        served = part_of_stage(config, served, rank_info.stage)
        checked = replace(checked, served=served)
    if served.backend is None:
        return _load_encoder(config, served, device)
    fill = partial(_fill, config, served, progress)
    if served.executor == "Triton":
        assert queue is not None
        return _on_device(config, checked, queue, group, fill, kept, rank_info, ring)
    backend, dtype = served.backend, served.dtype
    opened = open_plugin(config, served, torch_device, group)
    own_experts: Mapping[int, OwnExperts] = {}
    slots: HostSlots | None = None
    replicas: ExpertReplicas | None = None
    by_layer: ByLayer | None = None
    domain = Domain(group.rank) if config.kv_domains > 1 else None
    encoder: Model | None = None
    if served.program is not None:
        options = Options(
            ops=backend.ops, dtype=dtype, weight_dtype=backend.weight_dtype, device=torch_device, keeps=served.is_kept
        )
        packing = Packing(options)
        if shared is not None and backend.ops.storage is not None:
            loaded = shared.load(config, rank_info.rank, packing, backend.ops, fill)
        else:
            fill(packing)
            loaded = packing.weights
        spans, hook = (opened.spans, opened.guard) if opened is not None and opened.spans else ((), None)
        by_layer = ByLayer(served.program, spans, hook)
        reference = Reference(
            served.program, loaded, max_len=config.max_model_len, dtype=dtype, weight_dtype=backend.weight_dtype,
            device=torch_device, group=group, domain=domain, by_layer=by_layer,
        )  # fmt: skip
        own_experts = reference.own_experts
        if config.expert_replicas:
            slots = HostSlots(served.program, loaded, options)
            replicas = ExpertReplicas(served.program, slots, own_experts, group, partial(_read, config, served))
        weights = loaded.num_bytes
        reads = reads_of(served.program, loaded.bytes_of, sum(vector.nbytes for vector in loaded.vectors.values()))
        # A domain has a whole head, and samples by itself.
        vocabulary = Vocabulary(served.program, loaded, group if domain is None else Alone())
        model = backend.model(reference, vocabulary, served.kv_shape)
        if (whole := served.program.encoder) is not None:
            reading = Reference(
                whole, loaded, max_len=config.max_model_len, dtype=dtype, weight_dtype=backend.weight_dtype,
                device=torch_device, group=group,
            )  # fmt: skip
            encoder = ReferenceModel(reading, vocabulary, served.kv_shape)
        if slots is not None and isinstance(model, NativeModel):
            slots.native = model
    else:
        # Only here, since transformers takes seconds to import.
        from ..executors.transformers_fallback import load_fallback

        model, weights = load_fallback(
            spec, Path(config.model.path), max_len=config.max_model_len, dtype=dtype, device=torch_device,
            is_certain=served.is_certain,
        )  # fmt: skip
        model.kv_shape = replace(model.kv_shape, dtype=DTYPES[config.kv_cache_dtype])
        reads = PassReads(weights)
    if opened is not None:
        tell_model(opened, config, served, torch_device, group)
    return HostModel(
        model=model,
        backend=backend,
        kv_shape=model.kv_shape,
        weights=weights,
        note=served.note + ("" if opened is None else opened.note),
        failed_kernels=checked.failed,
        received_width=0 if served.program is None else served.program.received_width,
        sent_width=0 if served.program is None else served.program.sent_width,
        own_experts=own_experts,
        replicas=replicas,
        domain=domain,
        plugin=None if opened is None else opened.guard,
        by_layer=by_layer,
        reads=reads,
        encoder=encoder,
        workspace=host_workspace(config, spec, model.kv_shape),
    )


def _load_script(config: EngineConfig) -> "ScriptedModel":
    # Only here, since nobody else needs a tokenizer.
    from .scripted import ScriptedModel

    return ScriptedModel.load(config)


def _load_encoder(config: EngineConfig, served: Served, device: Device) -> "EncoderModel":
    # Only here, since transformers takes seconds to import.
    from ..executors.encoder import load_encoder
    from ..steps.encoder_steps import EncoderModel

    spec, shape = served.spec, served.kv_shape
    encoder = load_encoder(spec, Path(config.model.path), dtype=served.dtype, device=device.torch_device)
    return EncoderModel(
        encoder=encoder,
        kv_shape=shape,
        weights=encoder.weights,
        workspace=host_workspace(config, spec, shape),
        note=served.note,
        synchronize=device.synchronize,
    )


def host_workspace(config: EngineConfig, spec: ModelSpec, kv_shape: KvShape) -> int:
    """Bytes that a step of a `HostModel` may take besides weights and KV, estimated."""
    # A rank with whole experts computes all of a step's tokens with them at most.
    share = 1 if config.enable_expert_parallel else config.tensor_parallel_size
    per_layer = max((kv_shape.tile_bytes(tile, config.block_size) for tile in kv_shape.layers), default=0)
    return workspace_bytes(
        tokens=config.max_num_batched_tokens * config.kv_domains,  # of all domains
        rows=config.max_num_seqs,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size // share,
        num_experts_per_tok=top_k(spec),
        vocab_size=spec.vocab_size,
        itemsize=DTYPES[config.activations].itemsize,
        cache_bytes=config.max_num_seqs * -(-config.max_model_len // config.block_size) * per_layer,
    )


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


def _on_device(
    config: EngineConfig,
    checked: Checked,
    queue: Queue,
    group: Group,
    fill: Callable[[Sink], None],
    kept: KeptWeights | None,
    rank_info: RankInfo,
    ring: Ring | None,
) -> "DeviceModel":
    # Only here, since Triton comes with torch for GPUs alone.
    from ..gpu.attention import host_attention
    from ..gpu.decoder import TritonDecoder
    from ..gpu.device_steps import DeviceModel, limits_of, num_draft_tokens, num_graphs
    from ..gpu.experts import DeviceSlots
    from ..gpu.handover import Handover
    from ..gpu.packet import size_of
    from ..gpu.state import RowState
    from ..gpu.weights import Loaded, room_of

    if config.max_num_seqs > _MAX_ROWS:
        raise ConfigError(f"--max-num-seqs {config.max_num_seqs}: a GPU runs at most {_MAX_ROWS} requests at once.")
    served = checked.served
    assert served.program is not None
    program, shape, dtype = served.program, served.kv_shape, served.dtype
    loaded = Loaded(
        dtype=dtype, device=queue.device, keeps=served.is_kept, has_narrow_inputs=served.has_narrow_inputs,
        room=room_of(program),
    )  # fmt: skip
    if kept is None:
        fill(loaded)
    else:
        kept.load(segment_key(config, rank_info.rank, f"Triton, {dtype}, {served.is_kept}"), loaded, fill)
    reads = reads_of(program, loaded.bytes_of, sum(vector.nbytes for vector in loaded.vectors.values()))
    groups = shape.groups(config.block_size)
    limits = limits_of(
        config,
        group=largest_group(program),
        draft_tokens=num_draft_tokens(config),
        tables=groups.num_tables - groups.state_pages,
        state_pages=groups.state_pages,
    )
    attention = host_attention(
        config.attention_backend, dtype=dtype, kv_dtype=shape.dtype, device=queue.device, depth=config.num_in_flight
    )
    triton = TritonDecoder(
        program,
        loaded,
        shape=shape,
        group=group,
        max_len=config.max_model_len,
        limits=limits,
        dtype=dtype,
        num_programs=queue.num_programs,
        is_deterministic=config.deterministic,
        attention=attention,
        without=checked.without | served.left_out,
        num_domains=config.kv_domains,
        by_layer=(by_layer := ByLayer(program)),
    )
    replicas = None
    if config.expert_replicas:
        slots = DeviceSlots(triton.experts, dtype)
        replicas = ExpertReplicas(program, slots, triton.own_experts, group, partial(_read, config, served))
    # Only the last stage samples, and so has counts and bits for each token of the vocabulary.
    state = RowState(limits=limits, vocab_size=config.model.vocab_size if triton.is_last else 1, device=queue.device)
    handover = None
    if ring is not None:
        handover = Handover(
            ring, queue=queue, decoder=triton, state=state, limits=limits, dtype=dtype,
            is_first=rank_info.stage == 0, num_in_flight=config.num_in_flight,
        )  # fmt: skip
    # What torch's functions take in a step is taken twice: once by steps that are not recorded, and once, in a pool of
    # their own, by all recorded ones together.
    temporary = left = 0
    if triton.left_to_torch:
        temporary = -(-max(triton.left_to_torch, _LARGE) // _SEGMENT) * _SEGMENT
        left = temporary + _SMALL_SEGMENTS * _SEGMENT
    packet = size_of(limits) * 4
    return DeviceModel(
        decoder=triton,
        state=state,
        limits=limits,
        queue=queue,
        kv_shape=shape,
        weights=triton.weights + (kept.num_padding if kept is not None else 0),
        workspace=triton.nbytes
        + state.nbytes
        + packet
        + left
        + queue.blas_workspace
        + (handover.nbytes if handover is not None else 0),
        graphs=left + num_graphs(limits, samples=triton.is_last) * _GRAPH_BYTES,
        temporary=temporary,
        attention=attention,
        handover=handover,
        replicas=replicas,
        domain=Domain(group.rank) if config.kv_domains > 1 else None,
        by_layer=by_layer,
        reads=reads,
        note=served.note + (kept.note if kept is not None else ""),
        failed_kernels=checked.failed,
    )


def _read(config: EngineConfig, served: Served, wanted: Iterable[Wanted]) -> None:
    """Gives some weights of the checkpoint to sinks."""
    assert served.found is not None
    with open_checkpoint(Path(config.model.path), config.model.adapter) as reader:
        for targets, sink in wanted:
            load_targets(reader, targets, served.found, sink, scheme=served.spec.scheme)


def _fill(config: EngineConfig, served: Served, progress: Callable[[int, int], None] | None, sink: Sink) -> None:
    """Gives a program's weights to the sink."""
    assert served.program is not None
    if config.load_format == "dummy":
        fill_dummy(served.program, sink)
        return
    assert served.found is not None
    with open_checkpoint(Path(config.model.path), config.model.adapter) as reader:
        load_weights(reader, served.program, served.found, sink, scheme=served.spec.scheme, progress=progress)
