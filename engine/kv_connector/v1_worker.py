"""The worker half of a `KVConnectorBase_V1`: runs the steps that `v1_core.py` has made, each as vLLM's worker would.

Steps that save run before the forward pass, while the blocks of ended requests still hold their KV. Steps that load run
after it, when all other connectors have read what the loads overwrite.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor

from ...ipc.messages import bytes_to_ids
from ..attention.kv_cache import KvCache
from .block_copy import BlockCopier
from .v1_meta import V1Plan, V1Step, decode_metadata
from .v1_names import AttentionLayer, AttentionMetadata, ForwardContext, V1Connector

_decode_plan = msgspec.msgpack.Decoder(V1Plan).decode


class LayerKv(Tensor):
    """The KV of a layer in pages. What is written to a copy of it would be lost, so `reshape` and `flatten` do not make
    one. The results of other operations are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def reshape(self, *shape: Any) -> Tensor:
        """Raises RuntimeError if it is not a view."""
        return self.view(*shape)

    def flatten(self, *dims: Any) -> Tensor:
        raise RuntimeError("the KV of a layer lies in pages with those of other layers; index its blocks instead")


class V1Worker:
    def __init__(self, connector: V1Connector) -> None:
        self._connector = connector
        self._plan: V1Plan | None = None
        self._done: set[int] = set()  # rids whose load is over and was not named yet
        self._receiving: set[int] = set()  # rids of asynchronous loads
        self._held: set[int] = set()  # ended rids whose blocks stay
        self._finished: set[str] = set()  # ended requests that the connector's `get_finished` has not been told of
        self._failed: set[int] = set()  # blocks that were not reported yet

    @property
    def num_pending(self) -> int:
        return len(self._done) + len(self._receiving) + len(self._held)

    def register_kv_caches(self, cache: KvCache) -> None:
        """Raises ValueError for a cache whose keys and values have different sizes."""
        self._copier = BlockCopier(cache)
        layers = {f"model.layers.{i}.self_attn.attn": layer_of(cache, i) for i in range(len(cache.pages))}
        self._layers = layers
        self._context = ForwardContext(
            no_compile_layers={name: AttentionLayer(layer) for name, layer in layers.items()},
            attn_metadata={name: AttentionMetadata() for name in layers},
        )
        self._connector.register_kv_caches(layers)

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._plan = _decode_plan(metadata)
        self._held.update(self._plan.held)

    def start_load_kv(self) -> None:
        assert self._plan is not None, "start_load_kv before metadata"
        for step in self._plan.before:
            self._run(step)

    def wait_for_layer_load(self, layer: int) -> None:
        """Does nothing: loads begin after the forward pass."""

    def save_kv_layer(self, layer: int) -> None:
        """Does nothing: what is saved was computed by earlier plans."""

    def wait_for_save(self) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None, "wait_for_save before metadata"
        for step in plan.after:
            self._run(step)

    def get_finished(self) -> tuple[set[int], set[int]]:
        finished, self._finished = self._finished, set()
        sent, received = self._connector.get_finished(finished)
        freed = {int(one) for one in sent or ()} & self._held
        loaded = {int(one) for one in received or ()} & self._receiving
        self._held -= freed
        self._receiving -= loaded
        loaded |= self._done
        self._done = set()
        self._failed |= set(self._connector.get_block_ids_with_load_errors())
        return freed, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        """Not measured: what is found is loaded."""
        return 0, 0.0

    def close(self) -> None:
        self._connector.shutdown()

    def _run(self, step: V1Step) -> None:
        """A step. Blocks that the device had are as before afterwards, even if the connector loads them, too."""
        connector = self._connector
        kept = sorted({block for load in step.loads if not load.is_async for block in bytes_to_ids(load.kept)})
        before = list(self._copier.read(kept))
        connector.bind_connector_metadata(decode_metadata(step.metadata))
        connector.start_load_kv(self._context)
        for name in self._layers:
            connector.wait_for_layer_load(name)
        if kept:
            self._copier.write(kept, torch.cat(before))
        for name, layer in self._layers.items():
            connector.save_kv_layer(name, layer, self._context.attn_metadata[name])
        connector.wait_for_save()
        connector.clear_connector_metadata()
        self._finished.update(step.finished)
        for load in step.loads:
            (self._receiving if load.is_async else self._done).add(load.rid)


def layer_of(cache: KvCache, tile: int) -> LayerKv:
    """The KV of a layer: [blocks, heads, positions, 2, head_dim], or without values [blocks, heads, positions, dim].
    Raises ValueError if keys and values have different sizes."""
    keys, values = (part[: cache.num_pages] for part in cache.heads(tile))
    if values.numel() and keys.shape != values.shape:
        raise ValueError(f"keys of {keys.shape[-1]} and values of {values.shape[-1]} numbers cannot be one tensor")
    view = keys
    if values.numel():
        between = values.storage_offset() - keys.storage_offset()
        size, strides = list(keys.shape), list(keys.stride())
        view = keys.as_strided([*size[:3], 2, size[3]], [*strides[:3], between, strides[3]])
    return view.as_subclass(LayerKv)
