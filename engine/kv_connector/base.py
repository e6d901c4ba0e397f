"""The interface of KV connectors: two halves that communicate through the plan.

The core half (`engine.core.kv_connector.CoreConnector`, no torch) runs beside the scheduler and decides; the worker
half runs beside the model and moves tensors. The core half's `build_connector_meta` travels with a plan as bytes, and
the worker half's `get_finished` travels back as a `Transferred` message. For each plan with metadata the runner calls,
in this order:

    bind_connector_metadata(metadata)
    start_load_kv()                      reads every block to be saved, begins to load
    for each layer: wait_for_layer_load(layer), attention, save_kv_layer(layer)      if the plan has rows
    wait_for_save()

and after every step, and every millisecond while `num_pending` is not 0, `get_finished` and
`get_block_ids_with_load_errors`.

The forward pass that follows may write to a block that is to be saved, so the block is read before `start_load_kv`
returns (a copy in the connector's own memory is enough). A block to be loaded belongs to a request that computes
nothing until `get_finished` names it, so any thread may write it until then; but not before `wait_for_save` was called,
because another connector of the chain may still have to read its old contents.

A connector is named on the command line by an entry point of the group `pagewire.kv_connectors` or as `module:Class`;
either is a class with the two static methods of `KVConnector`, and optionally that of `HasCheck`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from ...config.plugins import Options as Options
from ..core.kv_connector import CoreConnector

if TYPE_CHECKING:
    from ..attention.kv_cache import KvCache


class ConnectorFacts(Struct, frozen=True, kw_only=True):
    """What both halves get to know of the engine."""

    block_size: int  # positions
    block_bytes: int  # of one block, all layers
    model_key: bytes  # 32 bytes that identify the model: KV of equal block keys is equal only under an equal one


class WorkerConnector(Protocol):
    """The worker half. Only the runner's thread calls it; the head of the file gives the order."""

    @property
    def num_pending(self) -> int:
        """Loads and sends under way that `get_finished` has not named yet."""

    def register_kv_caches(self, cache: KvCache) -> None:
        """Called once, when the cache is open."""

    def bind_connector_metadata(self, metadata: bytes) -> None:
        """Gives the core half's instructions for this plan. The bytes are not validated yet."""

    def start_load_kv(self) -> None:
        """Reads the blocks to be saved and begins the loads."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Called before the attention of a layer. Loads never belong to the rows of the plan; most do nothing here."""

    def save_kv_layer(self, layer: int) -> None:
        """Called after the attention of a layer, when this pass has written that layer's pages."""

    def wait_for_save(self) -> None:
        """Called after the forward pass. When it returns, the core may reuse blocks."""

    def get_finished(self) -> tuple[set[int], set[int]]:
        """(ended rids whose blocks are no longer needed, rids whose load is over), each named once."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be filled, of the loads that `get_finished` named last. Each is named once."""

    def take_load_cost(self) -> tuple[int, float]:
        """(blocks loaded, milliseconds of loading) since the last call."""

    def close(self) -> None:
        """Ends threads; closes files and sockets."""


class KVConnector(Protocol):
    """A named connector. Each method is called in one process only, so `core` must not need torch."""

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> CoreConnector:
        """The core half. Raises ConfigError for options that make no sense."""

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        """The worker half. Raises ConfigError."""


@runtime_checkable
class HasCheck(Protocol):
    """A connector that can check its options before any process starts."""

    @staticmethod
    def check(options: Options) -> None:
        """Opens nothing. Raises ConfigError."""
