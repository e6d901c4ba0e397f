"""The ASGI extension that lets a stream write to its connection without waking a task."""

from collections.abc import Sequence
from typing import Protocol

DIRECT = "pagewire.direct"  # the ASGI extension that holds a request's `DirectWriter`


class DirectWriter(Protocol):
    """A connection whose response has begun, with chunked encoding."""

    def keeps_up(self) -> bool:
        """Whether the connection takes more data without buffering beyond its limit."""

    def write_parts(self, parts: Sequence[bytes]) -> None:
        """Sends `parts` as HTTP chunks in one write. Only while `keeps_up`."""
