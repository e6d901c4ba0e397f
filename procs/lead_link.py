"""A follower's connection to its lead: a thread that beats, and that ends the follower's processes with their lease.

It has a thread of its own because starting and watching processes must not delay it.
"""

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping

from ..ipc.channel import ChannelFull
from ..ipc.codec import DecodeError, Decoder
from ..ipc.control_messages import Assign, Beat, Begin, ChildState, Gone, Join, Joined, Refused, ToFollower, ToLead
from ..ipc.zmq_channel import Keys, ZmqContext
from .leases import Lease, LeaseTimes, lease_times

_JOIN_S = 0.5  # between attempts to join


def sleepless_clock() -> float:
    """Seconds that also pass while the machine sleeps: a lease ends meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LeadLink:
    """One incarnation of a follower, from its first `Join` to the end of its lease."""

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        join: Callable[[int], Join],
        *,
        on_message: Callable[[ToFollower], None],
        kill: Callable[[], None],
    ) -> None:
        """`join`: the message to send, given its number. `on_message`: called on the loop with everything but answers
        to beats, and with `Gone` when the lease has run out. `kill`: called on the thread before that; it ends the
        follower's processes at once."""
        self.incarnation = b"\1" + os.urandom(8)  # ZeroMQ's own names begin with 0
        self._context = ZmqContext(keys)
        self._dealer = self._context.dealer(address, self.incarnation)
        self._decoder: Decoder[ToFollower] = Decoder(ToFollower)
        self._join = join
        self._on_message = on_message
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._lease = Lease()
        self._times: LeaseTimes | None = None  # once joined
        self._echo = 0  # number of the lead's latest message
        self._epoch = 0
        self._children: tuple[ChildState, ...] = ()
        self._problem, self._unreached = "", dict[str, str]()
        self._outgoing: queue.SimpleQueue[ToLead] = queue.SimpleQueue()
        self._wake_fd, self._waker = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(self._waker, False)
        self._is_closed = False
        self._is_due = True  # something is to be said at once
        self.num_answers = 0  # messages of the lead
        self._thread = threading.Thread(target=self._run, name="lead", daemon=True)
        self._thread.start()

    # ── called on the loop ───────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: ToLead) -> None:
        self._outgoing.put(message)
        self._wake()

    def report(self, epoch: int, children: tuple[ChildState, ...], problem: str, unreached: Mapping[str, str]) -> None:
        """What the next beats say. They say it at once if it is new."""
        before = (self._epoch, self._children, self._problem, self._unreached)
        if (epoch, children, problem, unreached) != before:
            self._epoch, self._children, self._problem, self._unreached = epoch, children, problem, dict(unreached)
            self._is_due = True
            self._wake()

    def close(self) -> None:
        """Ends the connection after a moment for queued messages."""
        self._is_closed = True
        self._wake()
        self._thread.join()
        os.close(self._wake_fd)
        os.close(self._waker)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._waker, b"x")

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        next_at = 0.0
        while not self._is_closed:
            now = sleepless_clock()
            if self._lease.has_run_out(now):
                self._kill()
                self._tell(Gone())
                break
            if now >= next_at or self._is_due:
                self._is_due = False
                next_at = now + (_JOIN_S if self._times is None else self._times.beat_s)
                self._say(now)
            until = next_at if self._lease.ends_at is None else min(next_at, self._lease.ends_at)
            self._dealer.wait(until - sleepless_clock() + 0.001, self._wake_fd)
            self._clear()
            self._send_queued()
            while (data := self._dealer.receive()) is not None:
                try:
                    self._heard(self._decoder.decode(data))
                except DecodeError:  # of another version; `Join` finds out which
                    continue
        self._send_queued()
        self._dealer.close()
        self._context.close()

    def _clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_fd, 4096)

    def _say(self, now: float) -> None:
        number = self._lease.send(now)
        if self._times is None:
            self._send(self._join(number))
        else:
            self._send(Beat(number, self._echo, self._epoch, self._children, self._problem, self._unreached))

    def _send_queued(self) -> None:
        while not self._outgoing.empty():
            self._send(self._outgoing.get())

    def _send(self, message: ToLead) -> None:
        with contextlib.suppress(ChannelFull):  # there is no lead: what is queued already says the same
            self._dealer.send(message)

    def _heard(self, message: ToFollower) -> None:
        self.num_answers += 1
        match message:
            case Beat():
                self._echo = message.number
                self._lease.confirm(message.echo)
                return
            case Joined() if self._times is not None:  # of a later `Join`
                self._lease.confirm(message.number)
                return
            case Joined():
                times = lease_times(message.hang_timeout_s)
                if not self._lease.begin(message.number, times.lease_s, sleepless_clock()):
                    return
                self._times = times
                self._is_due = True  # the time of the next beat was that of the next `Join`
            case Refused():
                self._is_closed = True
            case Assign() | Begin() | Gone() if self._times is None:
                return  # of a `Joined` that came too late; what is still true is repeated
        self._tell(message)

    def _tell(self, message: ToFollower) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_message, message)
