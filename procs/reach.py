"""Whether mailboxes of other machines can be reached from this one.

An actor whose messages cannot leave starts like any other, and waits for answers. So its supervisor connects to each of
these addresses as soon as it knows them, and now and then again, and says which of them do not answer. A mailbox
listens before its process starts. A connection that nobody has accepted yet stays open, since a closed one would keep
its place among those that wait there, and soon no other one would find a place. What is done about a machine that is
lost is decided elsewhere (`leases.py`).
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from msgspec import Struct


class ReachTimes(Struct, frozen=True):
    """Durations."""

    patience_s: float = 3.0  # until an address counts as one that cannot be reached
    loss_s: float = 10.0  # the same if it was reached before: a machine that is lost is told by its lease
    attempt_s: float = 2.0  # for one connection
    pause_s: float = 0.5  # between attempts
    recheck_s: float = 5.0  # between connections that were accepted
    silence_s: float = 5.0  # without a sign of life, until a connection that nobody has accepted counts as lost


class _Mailbox(Struct):
    """A mailbox on another machine."""

    address: str
    since: float  # when the last connection ended, or the first attempt began (monotonic s)
    was_reached: bool = False
    problem: str = ""  # of the last attempt; empty: it was a success, or there was none
    task: "asyncio.Task[None] | None" = None


class Reach:
    """The mailboxes that this machine sends to. All calls come from the loop's thread."""

    def __init__(self, here: str, times: ReachTimes | None = None) -> None:
        """`here`: this machine, for messages."""
        self._here = here
        self._times = times or ReachTimes()
        self._mailboxes: dict[str, _Mailbox] = {}  # by actor

    def seek(self, addresses: Mapping[str, str]) -> None:
        """From now on connects to these mailboxes (actor → tcp://host:port), and to no others any more."""
        for name in [name for name, mailbox in self._mailboxes.items() if addresses.get(name) != mailbox.address]:
            mailbox = self._mailboxes.pop(name)
            assert mailbox.task is not None
            mailbox.task.cancel()
        for name, address in addresses.items():
            if name not in self._mailboxes:
                mailbox = self._mailboxes[name] = _Mailbox(address, time.monotonic())
                mailbox.task = asyncio.ensure_future(self._check(mailbox))

    @property
    def is_complete(self) -> bool:
        """Whether the last attempt to reach each of them was a success, and that connection has not been lost."""
        return all(mailbox.was_reached and not mailbox.problem for mailbox in self._mailboxes.values())

    @property
    def unreached(self) -> dict[str, str]:
        """The mailboxes that have not been reached for long: actor → address."""
        now = time.monotonic()
        return {
            name: mailbox.address
            for name, mailbox in self._mailboxes.items()
            if mailbox.problem
            and now > mailbox.since + (self._times.loss_s if mailbox.was_reached else self._times.patience_s)
        }

    @property
    def problem(self) -> str:
        """Which mailboxes have not been reached for long and what to do, a sentence without its full stop; empty: there
        are none."""
        late = [
            f"{address.removeprefix('tcp://')}, the mailbox of {name}, cannot be reached from {self._here} "
            f"({self._mailboxes[name].problem})"
            for name, address in self.unreached.items()
        ]
        if not late:
            return ""
        remedy = "open the ports of that machine to this one, or give it another --host (a lead: --join-address)"
        return f"{'; '.join(late)}: {remedy}"

    async def _check(self, mailbox: _Mailbox) -> None:
        url = urlsplit(mailbox.address)
        loop = asyncio.get_running_loop()
        while True:
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
                    connection.setblocking(False)
                    async with asyncio.timeout(self._times.attempt_s):
                        await loop.sock_connect(connection, (url.hostname, url.port))
                    mailbox.since, mailbox.was_reached, mailbox.problem = time.monotonic(), True, ""
                    watch_peer(connection, self._times.silence_s)
                    try:
                        await loop.sock_recv(connection, 1)  # ZeroMQ greets when it accepts
                    finally:
                        mailbox.since = time.monotonic()
            except TimeoutError:
                mailbox.problem = "no answer"
            except OSError as error:
                mailbox.problem = os.strerror(error.errno) if error.errno else str(error)
            await asyncio.sleep(self._times.pause_s if mailbox.problem else self._times.recheck_s)

    def close(self) -> None:
        self.seek({})


def watch_peer(connection: socket.socket, silence_s: float) -> None:
    """Has the system end a connection on which it has heard nothing of the other machine for about so long."""
    probe_s = max(1, round(silence_s / 5))
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)  # its name on macOS
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if idle is not None:
        connection.setsockopt(socket.IPPROTO_TCP, idle, 2 * probe_s)
    for name, value in (("TCP_KEEPINTVL", probe_s), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
