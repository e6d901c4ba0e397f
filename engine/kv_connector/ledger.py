"""The bookkeeping of a tier's core half, whatever the tier stores in: loads under way, counts and events."""

from collections.abc import Callable, Iterable, Sequence

from ...ipc.messages import TierSnapshot, Transferred, bytes_to_ids
from ..core.kv_connector import KvEvent, KvRequest

_KEYS_PER_EVENT = 256


def num_matched(request: KvRequest, num_computed: int, block_size: int, has: Callable[[bytes, int], bool]) -> int:
    """How many blocks after the first `num_computed` positions a tier has. has: of (key, index in the sequence).

    The request's last position is left to be computed.
    """
    first = num_computed // block_size
    keys = request.block_keys((len(request.ids) - 1) // block_size, block_size)
    last = first
    while last < len(keys) and has(keys[last], last):
        last += 1
    return last - first


class Ledger:
    """The bookkeeping of one tier."""

    def __init__(self, name: str, block_size: int) -> None:
        self.name = name
        self._block_size = block_size
        self._loading: dict[int, dict[int, bytes]] = {}  # rid → block to be filled → key
        self._events: list[KvEvent] = []
        self._open: list[bytes] = []  # keys of the event being built
        self._open_stored = True
        self._num_hit_tokens = 0
        self._num_stored = 0
        self._num_evicted = 0
        self._num_failed = 0

    def begin_load(self, rid: int, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Records that these blocks of a request are to be filled. It has no other load of this tier under way."""
        assert rid not in self._loading, rid
        self._loading[rid] = dict(zip(blocks, keys, strict=True))

    def end_loads(self, output: Transferred) -> tuple[list[bytes], list[bytes]]:
        """(keys of the blocks whose loads ended, those of them that could not be filled)."""
        failed = set(bytes_to_ids(output.failed_blocks))
        over: list[bytes] = []
        bad: list[bytes] = []
        for rid in output.loaded:
            blocks = self._loading.pop(rid, {})
            over += blocks.values()
            bad += [key for block, key in blocks.items() if block in failed]
        self._num_failed += len(bad)
        self._num_hit_tokens += (len(over) - len(bad)) * self._block_size
        return over, bad

    def forget_loads(self) -> list[bytes]:
        """Drops the loads under way, whose ends will not be reported. Returns their keys."""
        keys = [key for blocks in self._loading.values() for key in blocks.values()]
        self._loading.clear()
        return keys

    def stored(self, keys: Sequence[bytes]) -> None:
        """Records that the tier has added these."""
        self._num_stored += len(keys)
        self.found(keys)

    def found(self, keys: Sequence[bytes]) -> None:
        """Records that the tier had these when the engine started."""
        self._note(True, keys)

    def evicted(self, key: bytes) -> None:
        """Records that the tier removed this to make room."""
        self._num_evicted += 1
        self.removed([key])

    def removed(self, keys: Iterable[bytes]) -> None:
        """Records that the tier no longer has these."""
        self._note(False, keys)

    def take_events(self) -> list[KvEvent]:
        """The events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def snapshot(self, num_blocks: int, capacity: int) -> TierSnapshot:
        return TierSnapshot(
            self.name,
            num_blocks,
            capacity,
            self._num_hit_tokens,
            self._num_stored,
            self._num_evicted,
            self._num_failed,
        )

    def _note(self, stored: bool, keys: Iterable[bytes]) -> None:
        """Adds to the open event. Events keep their order: the tier may remove at once what it has just stored."""
        if stored != self._open_stored:
            self._flush()
            self._open_stored = stored
        self._open += keys
        if len(self._open) >= _KEYS_PER_EVENT:
            self._flush()

    def _flush(self) -> None:
        if self._open:
            self._events.append(KvEvent(self._open_stored, tuple(self._open), self.name))
            self._open = []
