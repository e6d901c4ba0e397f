"""What a router would know that has followed all KV events: it is told to routers that subscribe late.

The publisher's thread owns one and gives it each event that it sends (`kv_events.py`). Its memory grows with the blocks
that can be found, some hundred bytes each, so an engine has one only if it publishes events.
"""

from collections.abc import Iterator

from ..engine.core.kv_events import Cleared, KvCacheEvent, Removed, Stored

_Name = tuple[str, int | None, bytes]  # tier, group, key


class KvMirror:
    def __init__(self) -> None:
        self._blocks: dict[_Name, Stored] = {}  # each with one block, the oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: KvCacheEvent) -> None:
        """Follows one event."""
        match event:
            case Stored():
                for one in _single(event):
                    self._blocks[event.tier, event.group, one.keys[0]] = one
            case Removed():
                for key in event.keys:
                    self._blocks.pop((event.tier, event.group, key), None)
            case Cleared():
                self._blocks.clear()

    def blocks(self) -> list[Stored]:
        """Each block that can be found, its parent before it: the parent may be younger, if it was evicted and computed
        again."""
        ordered: dict[_Name, Stored] = {}
        for name in self._blocks:
            chain: list[_Name] = []
            at: _Name | None = name
            while at is not None and at not in ordered and (one := self._blocks.get(at)) is not None:
                chain.append(at)
                at = None if one.parent is None else (one.tier, one.group, one.parent)
            for member in reversed(chain):
                ordered[member] = self._blocks[member]
        return list(ordered.values())


def _single(event: Stored) -> Iterator[Stored]:
    """The event as one for each block."""
    if len(event.keys) == 1:
        yield event
        return
    num_bytes = len(event.ids) // len(event.keys)
    parent = event.parent
    for i, key in enumerate(event.keys):
        ids = event.ids[i * num_bytes : (i + 1) * num_bytes]
        salt = "" if i else event.salt
        yield Stored((key,), parent, ids, event.block_size, event.tier, event.group, event.shape, salt)
        parent = key if event.ids else None  # a tier names blocks of any sequences
