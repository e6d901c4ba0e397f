"""The interface of KV connectors: two halves that communicate through the plan.

The core half (`engine.core.kv_connector.CoreConnector`, no torch) runs beside the scheduler and decides; the worker
half runs beside the model and moves tensors. The core half's `build_connector_meta` travels with a plan as bytes, and
the worker half's `get_finished` travels back as a `Transferred` message. For each plan with metadata the runner calls,
in this order:

    bind_connector_metadata(metadata)
    start_load_kv()                      reads every block to be saved, begins to load
    wait_for_layer_load(layer) for each layer
    the forward pass                     if the plan has rows
    save_kv_layer(layer) for each layer  a `LayerConnector` may have it called during the pass
    wait_for_save()

and after every step, and every millisecond while `num_pending` is not 0, `get_finished` and
`get_block_ids_with_load_errors`.

The forward pass that follows may write to a block that is to be saved, so the block is read before `start_load_kv`
returns (a copy in the connector's own memory is enough). A block to be loaded belongs to a request that computes
nothing until `get_finished` names it, so any thread may write it until then; but not before `wait_for_save` was called,
because another connector of the chain may still have to read its old contents.

What is saved and loaded is whole pages of the cache. An item of a group is `ConnectorFacts.pages_of` pages, in the
order in which the core half is told of them; an item that could not be loaded is reported by at least one of them.

A connector is named on the command line by an entry point of the group `pagewire.kv_connectors` or as `module:Class`;
either is a class with the two static methods of `KVConnector`, and optionally that of `HasCheck`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct, msgpack
from msgspec.structs import replace

from ...config.config import EngineConfig
from ...config.plugins import Options as Options
from ...ipc.messages import GroupShape
from ..core.kv_connector import CoreConnector, TierConnector

if TYPE_CHECKING:
    from ..attention.kv_cache import KvCache


class ConnectorFacts(Struct, frozen=True, kw_only=True):
    """What both halves get to know of the engine. For them each KV domain is an engine of one rank: it has both halves
    of its own."""

    block_size: int  # positions
    block_bytes: int  # of one page; if the cache has one group of full attention, of one block, all layers
    model_key: bytes  # 32 bytes that identify the model: KV of equal block keys is equal only under an equal one
    groups: tuple[GroupShape, ...] = ()  # of the cache; empty: one group of full attention, whose blocks are pages
    rank: int = 0  # of the worker half, which has this rank's part of each page; the core half acts as rank 0 does
    rank_bytes: tuple[int, ...] = ()  # `block_bytes` of each rank, by rank; empty: there is one
    may_refuse: bool = True  # the engine is starting: what the operator must mend may end it
    hosts: tuple[str, ...] = ()  # of each rank, by rank; "": the core's machine; empty: all ranks are there

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        rank_bytes: tuple[int, ...],
        groups: tuple[GroupShape, ...],
        *,
        rank: int = 0,
        may_refuse: bool = True,
        hosts: tuple[str, ...] = (),
    ) -> ConnectorFacts:
        """rank_bytes: of a page on each rank. rank: also the number of its KV domain, if there are several. The model's
        key covers how groups and ranks share out the layers; it is the same on every rank."""
        key = config.kv_model_key
        if len(rank_bytes) > 1:
            sizes: tuple[int, ...] = (
                config.pipeline_parallel_size, config.tensor_parallel_size, config.enable_expert_parallel
            )  # fmt: skip
            if config.kv_domains > 1:
                sizes += (config.kv_domains, config.exchanges_tokens)
            key = sha256(key + msgpack.encode((sizes, rank_bytes, groups))).digest()
        elif groups:
            key = sha256(key + msgpack.encode((rank_bytes[0], groups))).digest()
        if config.kv_domains > 1:  # a rank has whole blocks
            rank_bytes, rank = (rank_bytes[rank],), 0
        return cls(
            block_size=config.block_size, block_bytes=rank_bytes[rank], model_key=key, groups=groups, rank=rank,
            rank_bytes=rank_bytes if len(rank_bytes) > 1 else (), may_refuse=may_refuse, hosts=hosts,
        )  # fmt: skip

    def of_rank(self, rank: int) -> ConnectorFacts:
        """What the worker half of this rank gets to know."""
        return replace(self, rank=rank, block_bytes=self.rank_bytes[rank]) if self.rank_bytes else self

    @property
    def num_ranks(self) -> int:
        return len(self.rank_bytes) or 1

    def share_of(self, num_bytes: int) -> int:
        """This rank's part of memory that the operator gives to the engine. So many pages fit into it on each rank."""
        return num_bytes * self.block_bytes // sum(self.rank_bytes) if self.rank_bytes else num_bytes

    def of_engine(self, num_bytes: int) -> int:
        """What all ranks need where this one needs so many bytes: the inverse of `share_of`."""
        return -(-num_bytes * sum(self.rank_bytes) // self.block_bytes) if self.rank_bytes else num_bytes

    @property
    def full(self) -> int | None:
        """The group of full attention."""
        return next((g for g, group in enumerate(self.groups) if group.kind == "full"), None if self.groups else 0)

    @property
    def state(self) -> int | None:
        """The group of recurrent states."""
        return next((g for g, group in enumerate(self.groups) if group.kind == "state"), None)

    @property
    def tables(self) -> Sequence[int]:
        """The groups that hold blocks."""
        return [group for group in range(self.num_groups) if group != self.state]

    @property
    def num_groups(self) -> int:
        return len(self.groups) or 1

    def pages_of(self, group: int) -> int:
        """The pages of a block or state of this group."""
        return self.groups[group].pages if self.groups else 1

    def bytes_of(self, group: int) -> int:
        """The bytes of a block or state of this group."""
        return self.pages_of(group) * self.block_bytes


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
        """Called for each layer before the forward pass. Loads never belong to the rows of the plan."""

    def save_kv_layer(self, layer: int) -> None:
        """Called for each layer once the forward pass has written that layer's pages: after the pass, or as a
        `LayerConnector` says. Not called for what a pass without memory has not written."""

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


@runtime_checkable
class LayerConnector(Protocol):
    """A worker half that may pass on the layers of a block while the pass computes those behind them."""

    @property
    def layer_stops(self) -> Sequence[int]:
        """Asked after `start_load_kv`: the layers after which `save_kv_layer` of all layers up to there is to be called
        during the pass over this plan, if it can. A CPU stops for these calls. A GPU goes on, and what a call launches
        there, on torch's current stream, comes after these layers. The other layers follow after the pass, and all of
        them where it is launched as a whole."""


class KVConnector(Protocol):
    """A named connector. Each method is called in one process only, so `core` must not need torch."""

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> CoreConnector | TierConnector:
        """The core half: a `CoreConnector` serves models with one group of full attention only. Raises ConfigError for
        options that make no sense."""

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> WorkerConnector:
        """The worker half. Raises ConfigError."""


@runtime_checkable
class Resizable(Protocol):
    """A core half whose tier may take less room, and again as much as at the start, while requests are served."""

    def resize(self, size: int) -> None:
        """In bytes, at most the option `size` of the start."""


@runtime_checkable
class HasCheck(Protocol):
    """A connector that can check its options before any process starts."""

    @staticmethod
    def check(options: Options) -> None:
        """Opens nothing. Raises ConfigError."""
