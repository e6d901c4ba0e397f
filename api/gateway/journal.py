"""What has been delivered of each sequence, so that an engine that has lost it can go on where its client is.

The api process is the journal of the engine: everything behind it may die. A sequence is submitted again with the ids
that were delivered and how much of their text; noise is keyed by seed and position, so what follows is what would have.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from ...ipc.messages import Chunk, Submit


class Entry:
    """One sequence. `order` is its own: n = 1, with its own seed."""

    __slots__ = ("has_told", "ids", "num_chars", "order")

    def __init__(self, order: Submit) -> None:
        self.order = order
        # int32; what the engine is asked to tell again comes as news
        self.ids = bytearray(order.resume_ids if order.resume_chars >= 0 else b"")
        self.num_chars = max(0, order.resume_chars)
        self.has_told = False  # what only the first chunk holds was delivered

    def note(self, chunk: Chunk) -> None:
        """It was delivered."""
        self.has_told = True
        self.ids += chunk.ids
        self.num_chars += len(chunk.text)

    def resumed(self, rid: int) -> Submit:
        """The order for the rest of it."""
        order = self.order
        if not self.has_told:
            return replace(order, rid=rid, attempt=order.attempt + 1)
        return replace(
            order,
            rid=rid,
            sampling=replace(order.sampling, prompt_logprobs=None),
            text=replace(order.text, prompt=False, prompt_end=False),
            resume_ids=bytes(self.ids),
            resume_chars=self.num_chars,
            attempt=order.attempt + 1,
        )


def entries(submits: Sequence[Submit]) -> list[Entry]:
    """An entry for each sequence of the orders, in order."""
    return [Entry(one) for order in submits for one in _apart(order)]


def _apart(order: Submit) -> Iterator[Submit]:
    if order.n == 1:
        yield order
        return
    for choice in range(order.n):  # the core gives a choice the seed that it has here
        sampling = replace(order.sampling, seed=(order.sampling.seed + choice) % 2**63)
        yield replace(order, n=1, sampling=sampling)


def fingerprint(submits: Sequence[Submit]) -> bytes:
    """The same for requests that ask the same, whenever they come and whatever their noise."""
    same = [replace(o, rid=0, sampling=replace(o.sampling, seed=0), resume_ids=b"", attempt=0) for o in submits]
    return sha256(msgspec.msgpack.encode(same)).digest()
