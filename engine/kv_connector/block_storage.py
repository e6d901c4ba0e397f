"""Where tiers keep items beyond memory: the interface of a storage, the names of items in it, and their checksums.

An item is stored with a header, whose checksum covers the rest of the header, the item's name and its bytes. So what is
torn, damaged, of another model or under another name is detected.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import Struct as Layout
from typing import NamedTuple, Protocol

from ..core.kv_connector import Item, item_name

_MAGIC = b"pwkvblk1"
_LENGTH = Layout("<Q")
_DIGEST_BYTES = 32
HEADER_BYTES = len(_MAGIC) + _LENGTH.size + 32 + _DIGEST_BYTES
"""Magic, length of the item in bytes, model key, BLAKE2b."""

_DIGITS = set("0123456789abcdef")

Filled = tuple[Item, memoryview]
"""An item and its bytes, or the memory for them."""


class BadBlock(Exception):
    """A storage does not hold the item that a name stands for."""


class Found(NamedTuple):
    """What a storage has under one name, of any model."""

    name: str  # as `Storage.remove_all` takes it
    size: int
    used_ns: int  # time of the last write or read
    item: Item | None  # None: not one of this model

    @property
    def place(self) -> int:
        return 0 if self.item is None else self.item.place


class Storage(Protocol):
    """Any thread may call the methods. They raise OSError if the storage does not answer."""

    batch_bytes: int  # how many bytes are best read or written at once; 0: one item at a time

    def file_bytes(self, group: int = 0) -> int:
        """What an item of this group takes."""

    def has_all(self, items: Sequence[Item]) -> list[bool]:
        """Which of these are there, as far as that can be known without reading them."""

    def read_all(self, wanted: Sequence[Filled]) -> list[str]:
        """Fills the memory. Returns for each item what is wrong; empty: nothing, else its memory holds garbage. What is
        damaged is removed, so that a good item can take its name."""

    def write_all(self, items: Sequence[Filled]) -> None:
        """Stores these items."""

    def touch_all(self, items: Sequence[Item], used_ns: int) -> None:
        """Records when these items were used last, as far as they exist."""

    def remove_all(self, names: Sequence[str]) -> None:
        """Removes what is there under these names."""

    def scan(self) -> Iterator[Found]:
        """Everything that is there. It may change meanwhile."""

    def close(self) -> None:
        """Ends connections; what still waits for one fails."""


def header_of(model_key: bytes, item: Item, data: memoryview) -> bytes:
    """The `HEADER_BYTES` that stand before an item's bytes. model_key: 32 bytes."""
    head = _MAGIC + _LENGTH.pack(len(data)) + model_key
    digest = blake2b(head + item.name, digest_size=_DIGEST_BYTES)
    digest.update(data)
    return head + digest.digest()


def label_of(item: Item, state_group: int | None) -> str:
    """What names an item in a storage of its model."""
    digits = item.name.hex()
    if item.group == state_group and item.parent is not None:
        return f"{digits}.{item.place}.{item.group}.{item.num}.{item.parent.hex()}"
    return f"{digits}.{item.place}.{item.group}.{item.num}" if item.group or item.num else f"{digits}.{item.place}"


def item_of(label: str) -> Item | None:
    """The item that a label names; None: it is no label."""
    digits, *numbers = label.split(".")
    parent: bytes | None = None
    if len(numbers) == 4:
        behind = numbers.pop()
        if len(behind) != 64 or not set(behind) <= _DIGITS:
            return None
        parent = bytes.fromhex(behind)
    if len(digits) != 64 or not set(digits) <= _DIGITS or len(numbers) not in (1, 3):
        return None
    if not all(number.isdecimal() and number.isascii() for number in numbers):
        return None
    place, group, num = (*map(int, numbers), 0, 0)[:3]
    return Item(item_name(bytes.fromhex(digits), group), place, parent, group, num) if group < 256 else None
