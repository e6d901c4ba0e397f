"""The ASGI extension by which a stream writes to its connection without a task of its own."""

from collections.abc import Sequence
from typing import Protocol

DIRECT = "pagewire.direct"  # the ASGI extension that holds a request's `DirectWriter`


class DirectWriter(Protocol):
    """A connection whose response has begun and is sent in chunks."""

    def keeps_up(self) -> bool:
        """Its client takes what is sent to it."""

    def write_parts(self, parts: Sequence[bytes]) -> None:
        """More chunks of the response, at once. Only while its client keeps up."""
