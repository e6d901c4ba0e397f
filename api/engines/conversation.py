"""Which conversation a prompt belongs to, or which others have the same beginning."""

import msgspec
from msgspec import Raw, Struct

from .choice import Conversation
from .prefixes import BLOCK_BYTES
from .stable_hash import stable_hash


class _Message(Struct):
    """The field of a message, or of an item of Responses, that is read."""

    role: str | None = None


def conversation_of(system: bytes, turns: bytes, root: bytes, cache_key: str | None = None) -> Conversation | None:
    """That of its `cache_key`, or of all prompts that begin with the same messages up to the first one of the user, if
    those fill a block. `system`, `turns`: JSON; `turns` is a text or an array of messages. `root`: what else the
    prompts must have in common. Raises MsgspecError."""
    first = system
    if turns.startswith(b"["):
        messages: list[Raw] = msgspec.json.decode(turns, type=list[Raw])
        opening = next((raw for raw in messages if msgspec.json.decode(raw, type=_Message).role == "user"), None)
        if opening is None:
            return None
        first += turns[: turns.find(bytes(opening)) + len(bytes(opening))]
    elif turns:
        first += turns
    if cache_key is None and len(first) < BLOCK_BYTES:
        return None
    name = first if cache_key is None else cache_key.encode()
    return Conversation(stable_hash(root + name), len(first) // BLOCK_BYTES)


def key_of_beginning(root: bytes, text: bytes, num_blocks: int) -> int:
    """A number below 2**64 for all prompts of the same `root` that begin with these blocks of `text`, the same in every
    router."""
    return stable_hash(root + text[: num_blocks * BLOCK_BYTES])
