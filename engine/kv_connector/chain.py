"""Several connectors as one, nearest first: each is asked about what those before it lack.

The parts may be any connectors. A request's load is over when all parts involved are done, and so is the sending of an
ended request whose blocks several parts hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, msgpack

from ...ipc.messages import TierSnapshot, Transferred, bytes_to_ids, ids_to_bytes
from ..core.kv_connector import ChunkConnector, DomainTier, Evicted, Held, Item, KvEvent, KvRequest, TierConnector
from .base import LayerConnector, WorkerConnector

if TYPE_CHECKING:
    from ..attention.kv_cache import KvCache

_MAX_MATCHES = 1024  # limit of waiting requests whose match is remembered


class ChainLoad(Struct, frozen=True, array_like=True):
    """One request's load: how many parts take part in it, and the blocks that they fill."""

    rid: int
    num_parts: int
    blocks: bytes  # int32, pages


class ChainMeta(Struct, frozen=True, array_like=True):
    """The metadata for the worker half."""

    parts: tuple[bytes, ...]  # the metadata of each part; empty: none
    loads: tuple[ChainLoad, ...]
    kept: tuple[tuple[int, int], ...]  # ended rids, and how many parts still need their blocks


class ChainCore:
    def __init__(self, parts: Sequence[TierConnector]) -> None:
        self._parts = tuple(parts)
        self._own = [part for part in parts if isinstance(part, DomainTier)]
        self._listeners = [part for part in parts if isinstance(part, ChunkConnector) and part.wants_chunks]
        self._owners: dict[int, dict[bytes, int]] = {}  # rid → item that was asked about → the nearest part that has it
        self._loads: list[ChainLoad] = []  # of the plan being made
        self._kept: list[tuple[int, int]] = []  # of the plan being made

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        """Each part is asked about what those before it lack."""
        owners = self._owners.setdefault(request.rid, {})
        left: Sequence[Item] = items
        for number, part in enumerate(self._parts):
            answer = part.available(request, left)
            if answer is None:
                return None
            has = [*answer, *[False] * (len(left) - len(answer))]
            owners.update((item.name, number) for item, ok in zip(left, has, strict=True) if ok)
            left = [item for item, ok in zip(left, has, strict=True) if not ok]
        for item in left:
            owners.pop(item.name, None)
        while len(self._owners) > _MAX_MATCHES:
            del self._owners[next(iter(self._owners))]
        lacking = {item.name for item in left}
        return [item.name not in lacking for item in items]

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        found: dict[bytes, int] = {}
        owners = self._owners.setdefault(request.rid, {})
        for number, part in reversed(list(enumerate(self._parts))):
            for key, num in part.standing(request, behind, place).items():
                found[key] = num
                owners[_state(key)] = number
        return found

    def num_kept(self, names: Sequence[bytes]) -> int:
        """What any of the parts has."""
        num = 0
        while num < len(names) and (more := max((part.num_kept(names[num:]) for part in self._own), default=0)):
            num += more
        return num

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        """Each part loads what it has; what no part has any more goes to the last one, which reports it as failed."""
        owners = self._owners.pop(request.rid, {})
        shares: list[list[Held]] = [[] for _ in self._parts]
        for one in held:
            number = owners.get(one.item.name, owners.get(_state(one.item.key), len(shares) - 1))
            shares[number].append(one)
        for part, share in zip(self._parts, shares, strict=True):
            if share:
                part.load(request, share)
        pages = [page for one in held for page in one.pages]
        self._loads.append(ChainLoad(request.rid, sum(map(bool, shares)), ids_to_bytes(pages)))

    def build_connector_meta(self) -> bytes:
        parts = tuple(part.build_connector_meta() for part in self._parts)
        if not any(parts):
            assert not self._loads and not self._kept, "a part of a load has no metadata"
            return b""
        meta = ChainMeta(parts, tuple(self._loads), tuple(self._kept))
        self._loads.clear()
        self._kept.clear()
        return msgpack.encode(meta)

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        self._owners.pop(request.rid, None)
        num = sum([part.ended(request, held) for part in self._parts])
        if num:
            self._kept.append((request.rid, num))
        return num > 0

    @property
    def wants_chunks(self) -> bool:
        return bool(self._listeners)

    def filled(self, request: KvRequest, held: Sequence[Held]) -> None:
        for part in self._listeners:
            part.filled(request, held)

    def filling(self, request: KvRequest, held: Sequence[Held]) -> None:
        for part in self._listeners:
            part.filling(request, held)

    def spoiled(self, request: KvRequest) -> None:
        for part in self._listeners:
            part.spoiled(request)

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        for part in self._parts:
            part.blocks_evicted(evicted)

    def update_connector_output(self, output: Transferred) -> None:
        """Each part recognises its own requests and blocks."""
        for part in self._parts:
            part.update_connector_output(output)

    def take_events(self) -> list[KvEvent]:
        return [event for part in self._parts for event in part.take_events()]

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return tuple(tier for part in self._parts for tier in part.tiers())

    def reset(self) -> None:
        self._owners.clear()
        self._loads.clear()
        self._kept.clear()
        for part in self._parts:
            part.reset()

    @property
    def parts(self) -> Sequence[TierConnector]:
        """Nearest first."""
        return self._parts

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _state(key: bytes) -> bytes:
    """The name of a state among those of items, whose group this file does not know."""
    return b"state" + key


class ChainWorker:
    def __init__(self, parts: Sequence[WorkerConnector]) -> None:
        self._parts = tuple(parts)
        self._decoder = msgpack.Decoder(ChainMeta)
        self._active: list[WorkerConnector] = []  # parts with metadata in the plan
        self._left: dict[int, int] = {}  # rid → parts that still load for it
        self._rid_of: dict[int, int] = {}  # block that is being filled → its request
        self._blocks_of: dict[int, array[int]] = {}  # rid → its blocks in `_rid_of`
        self._bad: dict[int, set[int]] = {}  # rid → its blocks that failed
        self._kept: dict[int, int] = {}  # ended rid → parts that still need its blocks
        self._failed_of_named: set[int] = set()

    @property
    def num_pending(self) -> int:
        return sum(part.num_pending for part in self._parts)

    def register_kv_caches(self, cache: KvCache) -> None:
        for part in self._parts:
            part.register_kv_caches(cache)

    def bind_connector_metadata(self, metadata: bytes) -> None:
        meta = self._decoder.decode(metadata)
        self._active = []
        for part, data in zip(self._parts, meta.parts, strict=True):
            if data:
                part.bind_connector_metadata(data)
                self._active.append(part)
        for load in meta.loads:
            self._left[load.rid] = load.num_parts
            self._blocks_of[load.rid] = blocks = bytes_to_ids(load.blocks)
            self._rid_of.update(dict.fromkeys(blocks, load.rid))
        self._kept.update(meta.kept)

    def start_load_kv(self) -> None:
        """No part writes before all parts have read the blocks that they save."""
        for part in self._active:
            part.start_load_kv()

    def wait_for_layer_load(self, layer: int) -> None:
        for part in self._active:
            part.wait_for_layer_load(layer)

    @property
    def layer_stops(self) -> Sequence[int]:
        return sorted({stop for part in self._active if isinstance(part, LayerConnector) for stop in part.layer_stops})

    def save_kv_layer(self, layer: int) -> None:
        for part in self._active:
            part.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        for part in self._active:
            part.wait_for_save()

    def get_finished(self) -> tuple[set[int], set[int]]:
        sent, loaded = set(), set()
        self._failed_of_named = set()
        for part in self._parts:
            part_sent, part_loaded = part.get_finished()
            for block in part.get_block_ids_with_load_errors():
                if (owner := self._rid_of.get(block)) is not None:
                    self._bad.setdefault(owner, set()).add(block)
            for rid in part_loaded:
                self._left[rid] -= 1
                if self._left[rid] == 0:
                    loaded.add(rid)
            for rid in part_sent:
                self._kept[rid] -= 1
                if self._kept[rid] == 0:
                    del self._kept[rid]
                    sent.add(rid)
        for rid in loaded:
            del self._left[rid]
            for block in self._blocks_of.pop(rid):
                del self._rid_of[block]
            self._failed_of_named |= self._bad.pop(rid, set())
        return sent, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_of_named = self._failed_of_named, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        costs = [part.take_load_cost() for part in self._parts]
        return sum(num for num, _ in costs), sum(ms for _, ms in costs)

    def close(self) -> None:
        for part in self._parts:
            part.close()
