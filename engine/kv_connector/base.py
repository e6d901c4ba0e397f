"""What a KV connector is: two halves that talk through the plan.

The core half (`engine.core.kv_connector.CoreConnector`, no torch) lives with the scheduler and decides; the worker half
lives beside the model and moves tensors. The core half's `build_connector_meta` travels with a plan as bytes, and the
worker half's `get_finished` travels back as a `Transferred` message. For each plan that carries metadata the runner
calls, in this order:

    bind_connector_metadata(metadata)
    start_load_kv()                      reads every block it is to keep, begins to load
    for each layer: wait_for_layer_load(layer), attention, save_kv_layer(layer)      if the plan has rows
    wait_for_save()

and after every step, and every millisecond while `num_pending` is not 0, `get_finished` and
`get_block_ids_with_load_errors`.

A block that the connector is to keep may be written by the pass that follows, so it is read before `start_load_kv`
returns (a copy in the connector's own memory is enough). A block that is loaded belongs to a request that computes
nothing until `get_finished` names it, so it may be written at any time until then, from any thread; but not before
`wait_for_save` was called, because until then it may hold what another connector of the chain is still to read.

A connector is named on the command line by an entry point of the group `pagewire.kv_connectors` or as `module:Class`;
either is a class with the two static methods of `KVConnector`, and perhaps that of `HasCheck`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from ...config.plugins import Options as Options
from ..core.kv_connector import CoreConnector

if TYPE_CHECKING:
    from ..attention.kv_cache import KvCache


class ConnectorFacts(Struct, frozen=True, kw_only=True):
    """What both halves are told of the engine."""

    block_size: int  # positions
    block_bytes: int  # of one block, all layers
    model_key: bytes  # 32 bytes: who the model is; KV of equal block keys is interchangeable only under equal ones


class WorkerConnector(Protocol):
    """The worker half. One thread calls it, the runner's; see the head of the file for the order."""

    @property
    def num_pending(self) -> int:
        """Loads and sends under way that `get_finished` has not named yet."""

    def register_kv_caches(self, cache: KvCache) -> None:
        """Once, when the cache is open."""

    def bind_connector_metadata(self, metadata: bytes) -> None:
        """What the core half wants done with this plan. Bytes of our own core half, still to be checked for sense."""

    def start_load_kv(self) -> None:
        """See the head of the file."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Before the attention of a layer. Loads never belong to the rows of the plan, so most have nothing to do."""

    def save_kv_layer(self, layer: int) -> None:
        """After the attention of a layer: what this pass wrote to that layer's pages is there."""

    def wait_for_save(self) -> None:
        """After the pass: when this returns, blocks may be given to others."""

    def get_finished(self) -> tuple[set[int], set[int]]:
        """(ended rids whose blocks are no longer needed, rids whose load is over), each named once."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of the loads that `get_finished` named last, the blocks that could not be filled. Each is named once."""

    def take_load_cost(self) -> tuple[int, float]:
        """(blocks loaded, milliseconds that took) since the last call."""

    def close(self) -> None:
        """Ends threads, closes files and sockets."""


class KVConnector(Protocol):
    """What a name stands for. Neither method is called in the other's process, so `core` must not need torch."""

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> CoreConnector:
        """The core half. Raises ConfigError for options that make no sense."""

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        """The worker half. Raises ConfigError."""


@runtime_checkable
class HasCheck(Protocol):
    """A connector that can say before any process starts what is wrong with its options."""

    @staticmethod
    def check(options: Options) -> None:
        """Opens nothing. Raises ConfigError."""
