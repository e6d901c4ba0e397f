"""A KV connector that records the calls of its worker half and moves no KV; `explode` makes one of the calls fail."""

from typing import ClassVar

from pagewire.engine.attention.kv_cache import KvCache
from pagewire.engine.kv_connector.base import ConnectorFacts, Options
from pagewire.engine.kv_connector.guard import GuardedCore


class Recording:
    """Connector `recording_connector:Recording`; its worker halves are in `workers`, the newest last."""

    workers: ClassVar[list["RecordingWorker"]] = []

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> GuardedCore:
        raise NotImplementedError("it has a worker half only")

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> "RecordingWorker":
        Recording.workers.append(RecordingWorker(facts))
        return Recording.workers[-1]


class RecordingWorker:
    def __init__(self, facts: ConnectorFacts) -> None:
        self.facts = facts
        self.calls: list[object] = []
        self.explode = ""  # name of the call that is to fail
        self.finished: tuple[set[int], set[int]] = (set(), set())
        self.failed: set[int] = set()
        self.keep_pending = 0  # until something is finished

    def _note(self, *call: object) -> None:
        self.calls.append(call if len(call) > 1 else call[0])
        if call[0] == self.explode:
            raise RuntimeError("it exploded")

    @property
    def num_pending(self) -> int:
        return self.keep_pending + len(self.finished[0]) + len(self.finished[1])

    def register_kv_caches(self, cache: KvCache) -> None:
        self.cache = cache
        self._note("register", cache.num_pages)

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._note("bind", metadata)

    def start_load_kv(self) -> None:
        self._note("start")

    def wait_for_layer_load(self, layer: int) -> None:
        self._note("wait", layer)

    def save_kv_layer(self, layer: int) -> None:
        self._note("save", layer)

    def wait_for_save(self) -> None:
        self._note("wait for save")

    def get_finished(self) -> tuple[set[int], set[int]]:
        if self.explode == "finished":
            raise RuntimeError("it exploded")
        finished, self.finished = self.finished, (set(), set())
        if any(finished):
            self.keep_pending = 0
        return finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        return 2, 1.5

    def close(self) -> None:
        self._note("close")
