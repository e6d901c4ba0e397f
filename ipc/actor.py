"""What every process of the pipeline is: an actor with one mailbox.

An actor is started once, then handed everything that was waiting in its mailbox, in order, as one list: tokenizer, core
and detokenizer get their batches from that. It tells others things through `Post` and shares no state with anyone.
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
        """Loads and connects. May be slow; raises a PagewireError with one sentence if it cannot."""

    def handle(self, messages: list[M]) -> None:
        """Everything that was waiting, in order. Raising ends the process."""

    async def stop(self, grace_s: float) -> None:
        """Ends in order within `grace_s` seconds."""
