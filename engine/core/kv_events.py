"""What the scheduler tells routers about cached KV: which blocks have become findable, and which no longer are.

Facts in the engine's own words. `procs/kv_events.py` gives them the shape in which they leave the engine. Keys are
those of the prefix cache (`block_hash.py`): 32 bytes that name a block and everything before it, the request's salt and
the model included, so equal keys mean equal KV.
"""

from msgspec import Struct

from .kv_connector import KvEvent

DEVICE = "device"
"""The tier of blocks that are in the device's own pool."""


class Stored(Struct, frozen=True):
    """Consecutive full blocks of one sequence can now be found."""

    keys: tuple[bytes, ...]  # in the order of the sequence
    parent: bytes | None  # key of the block before the first; None: the sequence starts here, or it is not known
    ids: bytes  # int32 of all their tokens, `len(keys) * block_size` of them; b"" where the tier knows keys only
    block_size: int  # tokens of one block
    tier: str = DEVICE


class Removed(Struct, frozen=True):
    """These blocks can no longer be found in that tier."""

    keys: tuple[bytes, ...]
    tier: str = DEVICE


class Cleared(Struct, frozen=True):
    """Everything that was told before is to be forgotten: the engine has just started, with an empty device."""


KvCacheEvent = Stored | Removed | Cleared


def event_of_tier(block_size: int, event: KvEvent) -> KvCacheEvent:
    """What a connector tells of a tier behind the device."""
    if event.stored:
        return Stored(event.keys, None, b"", block_size, event.tier)
    return Removed(event.keys, event.tier)
