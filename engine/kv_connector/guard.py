"""Keeps a third-party connector from ending the engine.

Everything that a connector stores can be computed again, so every error of a connector can be answered that way. After
the first exception of a half, that half is no longer called: the core half then matches nothing, and the worker half
reports each load as over with all of its blocks failed. For this the core's side sends the worker's side what is under
way, beside the connector's own metadata. A call that never returns cannot be handled.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec
from msgspec import Struct

from ...errors import ConfigError
from ...ipc.messages import TierSnapshot, Transferred, bytes_to_ids, ids_to_bytes
from ..core.kv_connector import CoreConnector, Evicted, Held, Item, KvEvent, KvRequest, TierConnector
from .base import ConnectorFacts, KVConnector, Options, WorkerConnector
from .one_group import OneGroup

if TYPE_CHECKING:
    from ..attention.kv_cache import KvCache

log = logging.getLogger("pagewire.kv_connector")

LOAD_TIMEOUT_S = 60.0
"""A connector with loads under way that ends none for this long is no longer used."""

P = ParamSpec("P")
R = TypeVar("R")


class UnderWay(Struct, frozen=True, array_like=True):
    """The metadata for the worker's side."""

    loads: tuple[tuple[int, bytes], ...]  # rid, and the first page (int32) of each item to be filled
    held: tuple[int, ...]  # ended rids whose blocks wait for `Transferred.sent`
    metadata: bytes  # the connector's own


def tier_connector(core: CoreConnector | TierConnector, name: str, facts: ConnectorFacts) -> TierConnector:
    """A core half as the scheduler calls it. Raises ConfigError if it cannot store what the model keeps."""
    if isinstance(core, TierConnector):
        return core
    if facts.groups:
        core.close()
        kinds = ", ".join(group.kind for group in facts.groups)
        raise ConfigError(
            f"--kv-connector {name} stores the blocks of one group of full attention, and this model's cache has "
            f"{facts.num_groups} of the kinds {kinds}; start without this connector."
        )
    return OneGroup(core, block_size=facts.block_size)


class Guarded:
    """The factories of a connector, whose halves are guarded."""

    def __init__(self, connector: type[KVConnector], name: str) -> None:
        """name: for the operator."""
        self._connector = connector
        self._name = name

    def check(self, options: Options) -> None:
        if (check := getattr(self._connector, "check", None)) is not None:
            check(options)

    def core(self, options: Options, facts: ConnectorFacts) -> TierConnector:
        inner = tier_connector(self._connector.core(options, facts), self._name, facts)
        return GuardedCore(inner, self._name, facts.num_groups)

    def worker(self, options: Options, facts: ConnectorFacts) -> WorkerConnector:
        return GuardedWorker(self._connector.worker(options, facts), self._name)


class _Half:
    """Calls methods until the first exception."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_broken = False

    def _call(self, otherwise: R, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self.is_broken:
            return otherwise
        try:
            return method(*args, **kwargs)
        except Exception:  # third-party code: logged once, and its blocks are computed instead
            self.is_broken = True
            log.exception("the KV connector %s has failed and is no longer used", self._name)
            return otherwise


class GuardedCore(_Half):
    def __init__(self, inner: TierConnector, name: str, num_groups: int) -> None:
        """`num_groups`: of the cache."""
        super().__init__(name)
        self._inner = inner
        self._num_groups = num_groups
        self._has_warned = False  # that events were left out
        self._loads: list[tuple[int, bytes]] = []  # for the next plan
        self._held: list[int] = []

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        def answer() -> Sequence[bool] | None:
            answer: object = self._inner.available(request, items)
            if answer is None:
                return None
            if not isinstance(answer, Sequence) or len(answer) > len(items):
                raise ValueError(f"{answer!r} is no answer about {len(items)} items")
            return [bool(one) for one in answer]

        return self._call((), answer)

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        return self._call({}, self._inner.standing, request, behind, place)

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        self._loads.append((request.rid, ids_to_bytes([one.pages[0] for one in held])))
        self._call(None, self._inner.load, request, held)

    def build_connector_meta(self) -> bytes:
        def build() -> bytes:
            metadata: object = self._inner.build_connector_meta()
            if not isinstance(metadata, bytes):
                raise TypeError(f"metadata must be bytes, not {type(metadata).__name__}")
            return metadata

        metadata = self._call(b"", build)
        if not metadata and not self._loads and not self._held:
            return b""
        under_way = UnderWay(tuple(self._loads), tuple(self._held), metadata)
        self._loads.clear()
        self._held.clear()
        return msgspec.msgpack.encode(under_way)

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        holds = self._call(False, self._inner.ended, request, held)
        if holds:
            self._held.append(request.rid)
        return holds

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        self._call(None, self._inner.blocks_evicted, evicted)

    def update_connector_output(self, output: Transferred) -> None:
        self._call(None, self._inner.update_connector_output, output)

    def take_events(self) -> list[KvEvent]:
        def told() -> list[KvEvent]:
            events = self._inner.take_events()
            valid = [event for event in events if event.keys and 0 <= event.group < self._num_groups]
            if len(valid) < len(events) and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the KV connector %s tells events without keys, or of groups that this cache of %d does not have; "
                    "they are left out",
                    self._name,
                    self._num_groups,
                )
            return valid

        return self._call([], told)

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return self._call((), self._inner.tiers)

    def reset(self) -> None:
        self._loads.clear()
        self._held.clear()
        self._call(None, self._inner.reset)

    def close(self) -> None:
        """Closes a broken half as well."""
        self.is_broken = False
        self._call(None, self._inner.close)


class GuardedWorker(_Half):
    def __init__(self, inner: WorkerConnector, name: str) -> None:
        super().__init__(name)
        self._inner = inner
        self._loads: dict[int, bytes] = {}  # under way
        self._held: set[int] = set()
        self._failed: set[int] = set()  # failed blocks of the loads that `get_finished` named last
        self._metadata = b""
        self._is_closed = False
        self._heard_at = 0.0  # when a load last ended, or the first one began

    @property
    def num_pending(self) -> int:
        return len(self._loads) + len(self._held)

    def register_kv_caches(self, cache: "KvCache") -> None:
        self._call(None, self._inner.register_kv_caches, cache)

    def bind_connector_metadata(self, metadata: bytes) -> None:
        under_way = msgspec.msgpack.decode(metadata, type=UnderWay)
        if not self._loads:
            self._heard_at = time.monotonic()
        self._loads.update(under_way.loads)
        self._held.update(under_way.held)
        self._metadata = under_way.metadata
        if self._metadata:
            self._call(None, self._inner.bind_connector_metadata, self._metadata)

    def start_load_kv(self) -> None:
        if self._metadata:
            self._call(None, self._inner.start_load_kv)

    def wait_for_layer_load(self, layer: int) -> None:
        if self._metadata:
            self._call(None, self._inner.wait_for_layer_load, layer)

    def save_kv_layer(self, layer: int) -> None:
        if self._metadata:
            self._call(None, self._inner.save_kv_layer, layer)

    def wait_for_save(self) -> None:
        if self._metadata:
            self._call(None, self._inner.wait_for_save)

    def get_finished(self) -> tuple[set[int], set[int]]:
        """Requests that were not under way are left out."""

        def finished() -> tuple[set[int], set[int]]:
            sent, loaded = self._inner.get_finished()
            return set(sent or ()), set(loaded or ())  # vLLM's connectors may return None

        sent, loaded = self._call((set(), set()), finished)
        now = time.monotonic()
        if loaded or not self._loads:
            self._heard_at = now
        elif now - self._heard_at > LOAD_TIMEOUT_S and not self.is_broken:
            log.error("the KV connector %s has ended no load in %g s and is not used now", self._name, LOAD_TIMEOUT_S)
            self.is_broken = True
        failed = self._call(set(), self._inner.get_block_ids_with_load_errors) if loaded else set()
        if self.is_broken:  # also if it broke just now: all loads that it has not ended fail
            self.close()  # its threads must not write to blocks that are computed instead
            sent, loaded = set(self._held), set(self._loads)
            failed = {block for blocks in self._loads.values() for block in bytes_to_ids(blocks)}
        sent, loaded = sent & self._held, loaded & self._loads.keys()
        self._held -= sent
        for rid in loaded:
            del self._loads[rid]
        self._failed = failed
        return sent, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        return self._call((0, 0.0), self._inner.take_load_cost)

    def close(self) -> None:
        """Closes a broken half as well; once."""
        if not self._is_closed:
            self._is_closed = True
            was_broken, self.is_broken = self.is_broken, False
            self._call(None, self._inner.close)
            self.is_broken |= was_broken
