"""The actors of this engine that run in other launches: which are connected, which are lost, and which end first.

Supervisors have no connection to each other. Each watches the mailboxes of the other launches' actors whose addresses
it was given, and sends its `Leave` to them. Not every launch knows every address, but every launch knows the core's or
runs the core, the core's launch knows all receivers of the core, and the api's knows the tokenizer. So every launch
learns that another one ends.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping

from ..ipc.messages import Leave
from ..ipc.watch import ZmqWatch
from ..ipc.zmq_channel import ZmqContext
from .topology import ACTORS, RENDEZVOUS, kind

_DEPTHS = {name: depth for depth, name in enumerate(reversed(ACTORS))}  # in the order of stopping: 0 is the api


class Elsewhere:
    """The actors of the engine that run in other launches, watched by this launch's supervisor."""

    def __init__(self, here: Iterable[str], addresses: Mapping[str, str], *, hang_timeout_s: float) -> None:
        """`here`: the actors of this launch. `addresses`: the known addresses, by actor. An actor that does not answer
        for `hang_timeout_s` seconds is lost."""
        self._here = tuple(here)
        self._addresses = {name: at for name, at in addresses.items() if name not in (*self._here, RENDEZVOUS)}
        self._hang_timeout_s = hang_timeout_s
        self._watches: dict[str, ZmqWatch] = {}
        self._depth = min((_DEPTHS[kind(name)] for name in self._here), default=0)
        self.is_leaving = False  # another launch of this engine ends in order, so all of them end

    def __bool__(self) -> bool:
        """Whether other launches have actors with known addresses."""
        return bool(self._addresses)

    def watch(self, context: ZmqContext, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Connects to them, and calls `wake` on the loop whenever `look` may have something to do."""
        for name, address in self._addresses.items():
            self._watches[name] = context.watch(address, self._hang_timeout_s)
            self._watches[name].subscribe(loop, wake)

    def look(self) -> None:
        """Handles the events of the connections."""
        for watch in self._watches.values():
            watch.look()

    def leave(self) -> None:
        """Tells the other launches that this one ends in order."""
        for watch in self._watches.values():
            if watch.is_up:
                watch.send(Leave(self._here))

    def heard(self, message: Leave, *, is_news: bool) -> None:
        """Another launch ends in order. `is_news`: this launch was not ending."""
        if is_news:
            print(
                f"pagewire: the launch of {', '.join(message.names)} ends, and with it the engine.",
                file=sys.stderr,
                flush=True,
            )
        self.is_leaving = True

    @property
    def is_awaited(self) -> bool:
        """Whether actors of other launches that stop before those of this launch are still connected."""
        return any(watch.is_up for name, watch in self._watches.items() if self._is_outside(name))

    def complaint(self, *, in_order: bool = False) -> str | None:
        """Which actors are lost, in a sentence. `in_order`: the engine is stopping, so actors that stop before those
        of this launch are not reported."""
        lost = [
            name for name, watch in self._watches.items() if watch.is_lost and not (in_order and self._is_outside(name))
        ]
        if not lost:
            return None
        parts = ", ".join(f"{name} ({self._addresses[name]})" for name in lost)
        return (
            f"{parts} of another launch {'has' if len(lost) == 1 else 'have'} ended, "
            f"or not answered for {self._hang_timeout_s:g} s (see --hang-timeout-s)."
        )

    def _is_outside(self, name: str) -> bool:
        return _DEPTHS[kind(name)] < self._depth

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
