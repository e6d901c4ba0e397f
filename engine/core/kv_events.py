"""The scheduler's events for routers: which KV blocks can be found in a cache, and which no longer can.

`procs/kv_events.py` gives them the format in which they leave the engine. Keys are those of the prefix cache
(`block_hash.py`): 32 bytes that name a block and everything before it, the request's salt and the model included, so
equal keys mean equal KV.
"""

from msgspec import Struct

from ...ipc.messages import GroupShape
from .kv_connector import KvEvent

DEVICE = "device"
"""The tier of blocks that are in the device's own pool."""


class Stored(Struct, frozen=True):
    """Consecutive full blocks of one sequence can now be found."""

    keys: tuple[bytes, ...]  # in the order of the sequence
    parent: bytes | None  # key of the block before the first; None: there is none, or it is not known
    ids: bytes  # int32 of all their tokens, `len(keys) * block_size` of them; b"" where the tier knows keys only
    block_size: int  # tokens of one block
    tier: str = DEVICE
    group: int | None = None  # of the cache; None: the full group, which says enough for a router
    shape: GroupShape | None = None  # of that group
    salt: str = ""  # names the salt of a sequence, if its first block is the first of these; empty: none


class Removed(Struct, frozen=True):
    """These blocks can no longer be found in the tier."""

    keys: tuple[bytes, ...]
    tier: str = DEVICE
    group: int | None = None


class Cleared(Struct, frozen=True):
    """All events before this one are void: the engine has just started, with an empty device."""


KvCacheEvent = Stored | Removed | Cleared


def event_of_tier(block_size: int, event: KvEvent, group: int | None, shape: GroupShape | None) -> KvCacheEvent:
    """The event for a connector's event about a tier behind the device. `group`, `shape`: as in `Stored`."""
    if event.stored:
        return Stored(event.keys, None, b"", block_size, event.tier, group, shape)
    return Removed(event.keys, event.tier, group)
