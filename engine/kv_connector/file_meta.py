"""The metadata that the core halves of `disk` and `shared` send their worker half, and how they collect it."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec import Struct, msgpack

from ...ipc.messages import ids_to_bytes
from ..core.kv_connector import Held, Item, item_name
from .base import ConnectorFacts

KEY_BYTES = 32


class BlockColumns(Struct, frozen=True, array_like=True):
    """Items, the pages of the cache that hold them, and what names their files, as columns."""

    blocks: bytes  # int32: the pages of each item in turn
    names: bytes  # 32 bytes each
    places: bytes  # int32
    # Empty: all are full blocks of the first group.
    groups: bytes = b""  # 1 byte each
    nums: bytes = b""  # int32: see `Item`
    parents: bytes = b""  # 32 bytes each, only zeros if there is none

    def items(self) -> list[Item]:
        places = array("i", self.places)
        groups, nums = self.groups or bytes(len(places)), array("i", self.nums or bytes(4 * len(places)))
        items = []
        for i, (place, group, num) in enumerate(zip(places, groups, nums, strict=True)):
            name, parent = (part[i * KEY_BYTES : (i + 1) * KEY_BYTES] for part in (self.names, self.parents))
            items.append(Item(item_name(name, group), place, parent if any(parent) else None, group, num))
        return items

    def held(self, facts: ConnectorFacts) -> list[Held]:
        """The items with their pages."""
        pages = iter(array("i", self.blocks))
        return [Held(item, tuple(islice(pages, facts.pages_of(item.group)))) for item in self.items()]


class FileLoad(Struct, frozen=True, array_like=True):
    """One request's load."""

    rid: int
    columns: BlockColumns


class FileMeta(Struct, frozen=True, array_like=True):
    """The worker half's work for a plan: removals, then saves, in this order; loads at any time."""

    remove: tuple[str, ...]  # names relative to the folder
    save: BlockColumns
    loads: tuple[FileLoad, ...]
    used: BlockColumns  # files that requests used, which may be missing; `blocks` is empty


def columns(held: Sequence[Held]) -> BlockColumns:
    items = [item for item, _ in held]
    blocks = ids_to_bytes([page for _, pages in held for page in pages])
    names, places = b"".join([item.name for item in items]), ids_to_bytes([item.place for item in items])
    if not any(item.group or item.num for item in items):
        return BlockColumns(blocks, names, places)
    parents = b"".join([item.parent or bytes(KEY_BYTES) for item in items])
    groups, nums = bytes(item.group for item in items), ids_to_bytes([item.num for item in items])
    return BlockColumns(blocks, names, places, groups, nums, parents)


class FilePlan:
    """Collects the work for the next plan."""

    def __init__(self) -> None:
        self.remove: list[str] = []
        self.save: dict[bytes, Held] = {}  # by name
        self.loads: list[FileLoad] = []
        self.used: dict[bytes, Item] = {}  # by name

    def load(self, rid: int, held: Sequence[Held]) -> None:
        """Adds a load of a request."""
        self.loads.append(FileLoad(rid, columns(held)))

    def use(self, items: Iterable[Item]) -> None:
        """Records that a request used these."""
        self.used.update((item.name, item) for item in items)

    def take(self) -> bytes:
        """The encoded work, empty if there is none; clears it."""
        if not self.remove and not self.save and not self.loads and not self.used:
            return b""
        used = columns([Held(item, ()) for item in self.used.values()])
        meta = FileMeta(tuple(self.remove), columns(list(self.save.values())), tuple(self.loads), used)
        self.clear()
        return msgpack.encode(meta)

    def clear(self) -> None:
        self.remove.clear()
        self.save.clear()
        self.loads.clear()
        self.used.clear()
