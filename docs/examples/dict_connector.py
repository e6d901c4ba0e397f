"""The smallest useful KV connector: blocks of ended requests are kept in a dictionary of the worker process.

    PYTHONPATH=docs/examples pagewire serve MODEL --kv-connector dict_connector:DictConnector,blocks=1000

The core half tracks which keys are stored and which is evicted next; the worker half carries out the plans. Plans run
in order, so the core half may rely on a block as soon as a plan saves it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pagewire.engine.core.kv_connector import Evicted, KvEvent, KvRequest
from pagewire.engine.kv_connector.base import ConnectorFacts, Options
from pagewire.errors import ConfigError
from pagewire.ipc.messages import TierSnapshot, Transferred

if TYPE_CHECKING:
    from torch import Tensor

    from pagewire.engine.attention.kv_cache import KvCache


class Todo(msgspec.Struct):
    """The metadata of a plan: first the blocks in `keep` are read, then those in `load` written, then `drop`
    removed."""

    keep: dict[bytes, int] = {}  # key → block
    drop: list[bytes] = []
    load: dict[int, dict[int, bytes]] = {}  # rid → block → key


class DictConnector:
    """The factories of the core half and the worker half."""

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> DictCore:
        if options.keys() - {"blocks"} or not options.get("blocks", "1000").isdigit():
            raise ConfigError("dict_connector takes one option, blocks=N.")
        return DictCore(int(options.get("blocks", "1000")), facts.block_size)

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> DictWorker:
        return DictWorker()


class DictCore:
    """The core half: decides which blocks are stored and loaded."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # the first is evicted next
        self._todo = Todo()
        self._num_hit_tokens = 0

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The longest run of known keys after the device's, without the request's last position."""
        first = num_computed_tokens // self._block_size
        keys = request.block_keys((len(request.ids) - 1) // self._block_size, self._block_size)
        num = next((i for i, key in enumerate(keys[first:]) if key not in self._keys), len(keys[first:]))
        return num * self._block_size, False

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        num = num_external_tokens // self._block_size
        keys = request.block_keys(len(block_ids), self._block_size)
        self._todo.load[request.rid] = dict(zip(block_ids[-num:], keys[-num:], strict=True))
        self._num_hit_tokens += num_external_tokens

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        """Keeps the request's full blocks. The tail is evicted first."""
        num = min(request.num_computed, len(request.ids)) // self._block_size
        for key, block in zip(
            reversed(request.block_keys(num, self._block_size)), reversed(block_ids[:num]), strict=True
        ):
            if key in self._todo.drop:
                self._todo.drop.remove(key)  # the worker still has it
            elif key not in self._keys:
                self._todo.keep[key] = block
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_blocks:
            dropped, _ = self._keys.popitem(last=False)
            if self._todo.keep.pop(dropped, None) is None:
                self._todo.drop.append(dropped)
        return False  # the next plan runs before the blocks are reused

    def build_connector_meta(self) -> bytes:
        todo, self._todo = self._todo, Todo()
        return msgspec.msgpack.encode(todo) if todo != Todo() else b""

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        """Does nothing: the blocks were kept when their request ended."""

    def update_connector_output(self, output: Transferred) -> None:
        """Does nothing: loads do not fail here."""

    def take_events(self) -> list[KvEvent]:
        """None: routers are told nothing of this tier."""
        return []

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return (TierSnapshot("dict", len(self._keys), self._num_blocks, self._num_hit_tokens, 0, 0, 0),)

    def reset(self) -> None:
        """Forgets all keys: a new worker has an empty dictionary."""
        self._keys.clear()
        self._todo = Todo()

    def close(self) -> None:
        """Does nothing: nothing is open."""


class DictWorker:
    """Does all its work in `start_load_kv`."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Tensor] = {}  # key → uint8 [block_bytes]
        self._todo = Todo()
        self._loaded: set[int] = set()

    @property
    def num_pending(self) -> int:
        return len(self._loaded)

    def register_kv_caches(self, cache: KvCache) -> None:
        from pagewire.engine.kv_connector.block_copy import BlockCopier

        self._copier = BlockCopier(cache)

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._todo = msgspec.msgpack.decode(metadata, type=Todo)

    def start_load_kv(self) -> None:
        """Reads before it writes: a block to be kept may be one that a load overwrites."""
        import torch

        todo = self._todo
        rows = (row for part in self._copier.read(list(todo.keep.values())) for row in part)
        self._blocks.update(zip(todo.keep, rows, strict=True))
        for load in todo.load.values():
            self._copier.write(list(load), torch.stack([self._blocks[key] for key in load.values()]))
        for key in todo.drop:
            del self._blocks[key]
        self._loaded |= todo.load.keys()

    def wait_for_layer_load(self, layer: int) -> None:
        """Does nothing: the load is over."""

    def save_kv_layer(self, layer: int) -> None:
        """Does nothing: whole blocks are kept when their request has ended."""

    def wait_for_save(self) -> None:
        """Does nothing: the copies are made."""

    def get_finished(self) -> tuple[set[int], set[int]]:
        """Loads end at once, and no blocks are held."""
        loaded, self._loaded = self._loaded, set()
        return set(), loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def take_load_cost(self) -> tuple[int, float]:
        """Not measured."""
        return 0, 0.0

    def close(self) -> None:
        """Does nothing: nothing is open."""
