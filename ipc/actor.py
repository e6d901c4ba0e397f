"""An actor: one process of the pipeline, with one mailbox.

An actor is started once and is then given all waiting messages of its mailbox, in order, as one list; that is where
tokenizer, core and detokenizer get their batches. It sends messages with `Post` and shares no state.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from .messages import Facts, Message

M = TypeVar("M")

Post = Callable[[str, Message], None]
"""`post(receiver, message)`: puts a message into the mailbox of the actor of that name. Never blocks."""


class Actor(Protocol[M]):
    """One stage of the pipeline. All calls come from one thread."""

    def start(self, post: Post) -> Facts:
        """Loads and connects; may be slow. Raises a PagewireError with one sentence."""

    def handle(self, messages: list[M]) -> None:
        """Handles all waiting messages, in order. An exception ends the process."""

    async def stop(self, grace_s: float) -> None:
        """Shuts down within `grace_s` seconds."""
