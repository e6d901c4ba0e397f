"""The metadata that the core halves of `disk` and `shared` send their worker half, and how they collect it."""

from array import array
from collections.abc import Sequence

from msgspec import Struct, msgpack

from ...ipc.messages import ids_to_bytes

KEY_BYTES = 32


class BlockColumns(Struct, frozen=True, array_like=True):
    """Blocks of the cache and their files, as columns."""

    blocks: bytes  # int32
    keys: bytes  # 32 bytes each
    places: bytes  # int32

    def files(self) -> list[tuple[bytes, int]]:
        """(key, place) of each file."""
        keys = [self.keys[i : i + KEY_BYTES] for i in range(0, len(self.keys), KEY_BYTES)]
        return list(zip(keys, array("i", self.places), strict=True))


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


def columns(blocks: Sequence[int], keys: Sequence[bytes], places: Sequence[int]) -> BlockColumns:
    return BlockColumns(ids_to_bytes(list(blocks)), b"".join(keys), ids_to_bytes(list(places)))


class FilePlan:
    """Collects the work for the next plan."""

    def __init__(self) -> None:
        self.remove: list[str] = []
        self.save: dict[bytes, tuple[int, int]] = {}  # key → block, place
        self.loads: list[FileLoad] = []
        self.used: dict[bytes, int] = {}  # key → place

    def load(self, rid: int, blocks: Sequence[int], keys: Sequence[bytes], first_place: int) -> None:
        """Adds a load of consecutive blocks of a request."""
        places = range(first_place, first_place + len(blocks))
        self.loads.append(FileLoad(rid, columns(blocks, keys, places)))

    def take(self) -> bytes:
        """The encoded work, empty if there is none; clears it."""
        if not self.remove and not self.save and not self.loads and not self.used:
            return b""
        save = columns([b for b, _ in self.save.values()], list(self.save), [p for _, p in self.save.values()])
        used = columns([], list(self.used), list(self.used.values()))
        meta = FileMeta(tuple(self.remove), save, tuple(self.loads), used)
        self.clear()
        return msgpack.encode(meta)

    def clear(self) -> None:
        self.remove.clear()
        self.save.clear()
        self.loads.clear()
        self.used.clear()
