"""The core half's connections to one peer: when it may be asked, and what is said to it.

Each rank of the peer is asked, because it sends its part of the blocks by itself: it has to know early who waits for
them, and only it knows which plans it has run. Where the ranks are is asked at the peer's address, before anything else
and again after anything has failed: a rank that was replaced may be on another machine.

Connections that last have no monitor, which somebody would have to read; why a peer cannot be asked is learned from an
attempt beside (`p2p_probe.py`).

A peer that failed is not asked for a while, each time longer. What only a change on the other side can mend, another
model or other keys, is one sentence at the start of the engine. Of a peer that comes later, and of everything else for
which a question was not answered, the log has each reason once, and again after an answer has come.
"""

import contextlib
import logging
import time
from collections.abc import Collection

import zmq

from ...errors import ConfigError
from ...ipc.zmq_channel import Keys
from .base import ConnectorFacts
from .p2p_probe import Probe
from .p2p_settings import rank_addresses, secure
from .p2p_wire import MALFORMED, MAX_REPLY_BYTES, Found, Hello, Layout, Lookup, Reply, Welcome, decode_reply, encode
from .pause import Pause

START_WAIT_S = 1.0  # for the answer of a peer that is there when the engine starts
_SEEK_S = 0.02  # between questions where the ranks are
_PROBE_S = 0.02  # for which it cannot be asked before a probe is made
_ATTEMPT_S = 1.0  # after which a probe that has no outcome has reached nobody
OTHER_KEYS = "it has other keys (give both the same key-file), or is no engine"
UNREACHED = "it cannot be reached"
SILENT = "it does not answer in time"
_MAX_TOLD = 16  # reasons of one connection that the log has

log = logging.getLogger("pagewire.kv_connector.p2p")


class Peer:
    """A peer and all of its ranks."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, facts: ConnectorFacts, keys: Keys | None
    ) -> None:
        """Raises ZMQError for an address that ZeroMQ does not take."""
        self.address = address
        self.pause = Pause()
        self.num_open = 0  # questions
        self.addresses = rank_addresses(address, facts.num_ranks, ())  # of its ranks, as it has said last
        self._context, self._facts, self._keys = context, facts, keys
        self._door = self._connect(address, 0)
        self._links: tuple[Link, ...] = ()  # to `addresses`; empty: it has not said any
        self._is_known = False  # it is where it has said; False: it is to be asked
        self._sought_at = float("-inf")

    @property
    def links(self) -> "tuple[Link, ...]":
        """To each rank, by rank; empty: it is not known where they are, and `seek` asks."""
        return self._links if self._is_known else ()

    def check(self) -> None:
        """Asks the peer, and each of its ranks that is known by then, as `Link.check` does. Raises ConfigError."""
        welcome = self._door.check()
        if welcome is not None:
            self._learn(welcome)
        for link in self._links:
            if link is not self._door:
                link.check()

    def seek(self, now: float) -> None:
        """Asks where the ranks are, unless it has just done so."""
        if now >= self._sought_at + _SEEK_S and self._door.ask_who():
            self._sought_at = now

    def give_up(self, answered: Collection[int]) -> None:
        """A question was not answered in time, but by these ranks. Tells the log why. The others may be elsewhere."""
        for link in [link for rank, link in enumerate(self.links) if rank not in answered] or [self._door]:
            if (reason := link.why()) is not None:
                link.warn(reason)
        self.lose()

    def answered(self) -> None:
        """All ranks have answered a question."""
        for link in (self._door, *self._links):
            link.mend()

    def lose(self) -> None:
        """Something has failed: the ranks may be elsewhere."""
        self._is_known = False

    def answers(self) -> list[tuple[int, Found]]:
        """What has arrived, with the ranks that it came from."""
        found: list[tuple[int, Found]] = []
        welcomes: list[Welcome] = []  # of the door; what they say may close links
        if self._door not in self._links:
            welcomes += [reply for reply in self._door.answers() if isinstance(reply, Welcome)]
        for rank, link in enumerate(self._links):
            for reply in link.answers():
                if isinstance(reply, Found):
                    found.append((rank, reply))
                elif isinstance(reply, Welcome) and link is self._door:
                    welcomes.append(reply)
                elif isinstance(reply, Welcome):
                    link.is_refused(reply)
        for welcome in welcomes:
            self._learn(welcome)
        return found

    def close(self) -> None:
        for link in (self._door, *self._links):
            link.close()

    def _connect(self, address: str, rank: int) -> "Link":
        return Link(self._context, address, Layout.of(self._facts.of_rank(rank)), self._keys)

    def _learn(self, reply: Welcome) -> None:
        """The peer has said where its ranks are. Connections to those that have not moved are kept."""
        if self._door.is_refused(reply):
            return
        before = {(rank, link.address): link for rank, link in enumerate(self._links)}
        before[0, self._door.address] = self._door
        links: list[Link] = []
        try:
            addresses = rank_addresses(self.address, self._facts.num_ranks, reply.ranks)
            for rank, address in enumerate(addresses):
                links.append(before.get((rank, address)) or self._connect(address, rank))
        except (ValueError, zmq.ZMQError) as error:
            for link in {*links} - {*before.values()}:
                link.close()
            self._door.refuse(f"its ranks cannot be found ({error})")
            return
        self._is_known = True
        if addresses == self.addresses and self._links:
            return
        for link in {*self._links} - {*links, self._door}:
            link.close()
        self.addresses, self._links = addresses, tuple(links)


class Link:
    """The connection to one rank."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, layout: Layout, keys: Keys | None
    ) -> None:
        """layout: of the same rank here. Raises ZMQError for an address that ZeroMQ does not take."""
        self.address = address
        self.digest = layout.digest
        self._layout = layout
        self._told: set[str] = set()  # why it is of no use, as the log has it
        self._refusal: str | None = None  # what it has said is of no use, a clause; None: nothing that is not
        self._context, self._keys = context, keys
        self._unsent_at: float | None = None  # monotonic s: since when it cannot be asked; None: it was
        self._num_broken_off = 0  # probes since then, one after the other
        self._probe: Probe | None = None  # under way
        self._trouble: str | None = None  # why it cannot be asked, a clause; None: it can, or the reason is not known
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.linger = 0
            self._socket.immediate = True  # messages are not queued for a peer that is not connected
            self._socket.maxmsgsize = MAX_REPLY_BYTES
            secure(self._socket, address, keys, is_server=False)
            self._socket.connect(address)
        except BaseException:
            self.close()
            raise

    def check(self) -> Welcome | None:
        """Asks a peer that is there whether its blocks are of use here, and returns its answer. One that is not there
        yet is asked later. Raises ConfigError with the reason if they are not."""
        until = time.monotonic() + START_WAIT_S
        is_asked = False
        while (left := until - time.monotonic()) > 0:
            is_asked = is_asked or self.ask_who()
            if self._trouble is not None:
                break
            if not self._socket.poll(int(min(left, 0.01) * 1000) + 1):
                continue
            if isinstance(reply := self._receive(), Welcome):
                if (difference := self._layout.difference(reply.layout)) is not None:
                    raise ConfigError(
                        f"--kv-connector p2p: the engine at {self.address} cannot serve this one: {difference}."
                    )
                return reply
        trouble = self._trouble
        self._forget_trouble()
        if trouble == OTHER_KEYS:
            raise ConfigError(
                f"--kv-connector p2p: the engine at {self.address} has other keys; give both the same key-file."
            )
        return None

    def ask_who(self) -> bool:
        """Sends `Hello`. False: as of `ask`."""
        return self._send(Hello(self._layout))

    def ask(self, question: Lookup) -> bool:
        """False: the peer is not connected, or its queue is full."""
        return self._send(question)

    def answers(self) -> list[Reply]:
        """What has arrived. Malformed answers are dropped, whose questions then time out."""
        found: list[Reply] = []
        while True:
            try:
                reply = self._receive()
            except zmq.Again:
                return found
            if reply is not None:
                found.append(reply)

    def close(self) -> None:
        self._end_probe()
        self._socket.close()

    def is_refused(self, reply: Welcome) -> bool:
        """Whether the peer has another layout, so that its blocks are of no use."""
        self.refuse(self._layout.difference(reply.layout))
        return self._refusal is not None

    def refuse(self, reason: str | None) -> None:
        """What it has said is of no use, for this reason; None: it is."""
        self._refusal = reason
        if reason is not None:
            self.warn(reason)

    def why(self) -> str | None:
        """Why it has not answered the last question, a clause. None: the next question will tell, until which a probe
        goes on, since a busy core asks once in a step. It may fail for another reason."""
        reason = self._refusal
        if reason is None and self._unsent_at is None:
            reason = SILENT
        elif reason is None:
            self._find_trouble()
            is_late = self._probe is not None and time.monotonic() > self._probe.began_at + _ATTEMPT_S
            reason = self._trouble or (UNREACHED if is_late else None)
        self._unsent_at, self._trouble = None, None
        return reason

    def warn(self, reason: str) -> None:
        """Says once why nothing is loaded from the peer."""
        if reason not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(reason)
            log.warning("the engine at %s cannot serve KV to this one: %s", self.address, reason)

    def mend(self) -> None:
        """It serves: what was wrong would be news."""
        self._told.clear()
        self._refusal = None

    def _send(self, request: Hello | Lookup) -> bool:
        try:
            self._socket.send(encode(request), zmq.DONTWAIT)
        except zmq.Again:
            self._find_trouble()
            return False
        self._forget_trouble()
        return True

    def _find_trouble(self) -> None:
        """It cannot be asked. Learns why, from one call to the next, if it goes on for longer than a connection
        takes."""
        now = time.monotonic()
        if self._unsent_at is None:
            self._unsent_at = now
        if self._trouble is not None or now < self._unsent_at + _PROBE_S:
            return
        if self._probe is None:
            with contextlib.suppress(zmq.ZMQError):  # too many sockets: the reason stays unknown
                self._probe = Probe(self._context, self.address, self._keys)
            return
        match self._probe.outcome():
            case None:
                return
            case "reached":
                self._reconnect()
            case "unreached":
                self._trouble = UNREACHED
            case "refused":
                self._trouble = OTHER_KEYS
            case "broken off":
                self._num_broken_off += 1  # the first time it may have died in that moment
                self._trouble = OTHER_KEYS if self._num_broken_off > 1 else None
        self._end_probe()
        self._unsent_at = now

    def _reconnect(self) -> None:
        """At once. ZeroMQ tries it up to a second later, and never if another program has answered before."""
        with contextlib.suppress(zmq.ZMQError):  # it does not try it any more
            self._socket.disconnect(self.address)
        self._socket.connect(self.address)

    def _forget_trouble(self) -> None:
        self._end_probe()
        self._unsent_at, self._num_broken_off, self._trouble = None, 0, None

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _receive(self) -> Reply | None:
        """None: it is malformed. Raises zmq.Again if nothing has arrived."""
        frames = self._socket.recv_multipart(zmq.DONTWAIT)
        try:
            reply: Reply = decode_reply(frames[0])
        except MALFORMED:
            return None
        return reply
