"""Where the recurrent states of a tier stand."""

from collections.abc import Mapping

from ..core.kv_connector import Item

_NONE: Mapping[bytes, int] = {}


class StateIndex:
    """The states among a tier's items."""

    def __init__(self, group: int | None) -> None:
        """`group`: that of states; None: the model has none."""
        self._group = group
        self._standing: dict[bytes, dict[bytes, int]] = {}  # key of the block before, or root → state's key → positions
        self._behind: dict[bytes, tuple[bytes, bytes]] = {}  # name → (key of the block before, state's key)

    def add(self, item: Item) -> None:
        """The tier has this item now, perhaps a state."""
        if item.group == self._group and item.parent is not None:
            self._standing.setdefault(item.parent, {})[item.key] = item.num
            self._behind[item.name] = item.parent, item.key

    def remove(self, name: bytes) -> None:
        """The tier no longer has the item of this name."""
        if (found := self._behind.pop(name, None)) is not None:
            behind, key = found
            del self._standing[behind][key]
            if not self._standing[behind]:
                del self._standing[behind]

    def clear(self) -> None:
        self._standing.clear()
        self._behind.clear()

    def behind(self, key: bytes) -> Mapping[bytes, int]:
        """The states behind a block: key → positions between."""
        return self._standing.get(key, _NONE)
