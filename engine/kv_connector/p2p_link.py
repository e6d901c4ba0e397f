"""The core half's connections to one peer: when it may be asked, and what is said to it.

Each rank of the peer is asked, because it sends its part of the blocks by itself: it has to know early who waits for
them, and only it knows which plans it has run.

A peer that failed is not asked for a while, each time longer. What only a change on the other side can mend, another
model or other keys, is one sentence at the start of the engine, or a line in the log if the peer comes later.
"""

import logging
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...errors import ConfigError
from ...ipc.zmq_channel import Keys
from .base import ConnectorFacts
from .p2p_settings import rank_address, secure
from .p2p_wire import MALFORMED, MAX_REPLY_BYTES, Hello, Layout, Lookup, Reply, Welcome, decode_reply, encode
from .pause import Pause

START_WAIT_S = 1.0  # for the answer of a peer that is there when the engine starts

log = logging.getLogger("pagewire.kv_connector.p2p")


class Peer:
    """All ranks of one peer, by rank."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, facts: ConnectorFacts, keys: Keys | None
    ) -> None:
        """address: of its first rank. Raises ZMQError for one that ZeroMQ does not take."""
        self.address = address
        self.pause = Pause()
        self.num_open = 0  # questions
        self.links: list[Link] = []
        try:
            for rank in range(facts.num_ranks):
                layout = Layout.of(facts.of_rank(rank))
                self.links.append(Link(context, rank_address(address, rank), layout, keys))
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """As `Link.check`, of each rank."""
        for link in self.links:
            link.check()

    def stop_watching(self) -> None:
        for link in self.links:
            link.stop_watching()

    def answers(self) -> list[tuple[int, Reply]]:
        """What has arrived, with the ranks that it came from."""
        return [(rank, reply) for rank, link in enumerate(self.links) for reply in link.answers()]

    def close(self) -> None:
        for link in self.links:
            link.close()


class Link:
    """The connection to one rank."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, layout: Layout, keys: Keys | None
    ) -> None:
        """layout: of the same rank here. Raises ZMQError for an address that ZeroMQ does not take."""
        self.address = address
        self.digest = layout.digest
        self._layout = layout
        self._has_warned = False
        self._socket = context.socket(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket()
        try:
            self._socket.linger = 0
            self._socket.immediate = True  # messages are not queued for a peer that is not connected
            self._socket.maxmsgsize = MAX_REPLY_BYTES
            secure(self._socket, address, keys, is_server=False)
            self._socket.connect(address)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Asks a peer that is there whether its blocks are of use here. One that is not there yet is asked later.
        Raises ConfigError with the reason if they are not."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        until = time.monotonic() + START_WAIT_S
        num_failed, is_asked = 0, False
        while (left := until - time.monotonic()) > 0:
            if not is_asked:
                is_asked = self._send(Hello(self._layout))
            ready = dict(poller.poll(int(min(left, 0.05) * 1000) + 1))
            if self._monitor in ready:
                event = recv_monitor_message(self._monitor)["event"]
                if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    num_failed += 2
                num_failed += event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # it may also have died meanwhile
                if num_failed > 1:
                    raise ConfigError(
                        f"--kv-connector p2p: the engine at {self.address} has other keys; give both the same key-file."
                    )
                if event == zmq.EVENT_CONNECT_RETRIED and not num_failed:
                    break  # nobody is there
            if self._socket in ready and isinstance(reply := self._receive(), Welcome):
                if (difference := self._layout.difference(reply.layout)) is not None:
                    raise ConfigError(
                        f"--kv-connector p2p: the engine at {self.address} cannot serve this one: {difference}."
                    )
                break
        self.stop_watching()

    def stop_watching(self) -> None:
        if not self._monitor.closed:
            self._socket.disable_monitor()
            self._monitor.close()

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
            if isinstance(reply, Welcome):
                self._refuse(reply)
            elif reply is not None:
                found.append(reply)

    def close(self) -> None:
        self.stop_watching()
        self._socket.close()

    def _refuse(self, reply: Welcome) -> None:
        """The peer has another layout: its blocks are of no use."""
        difference = self._layout.difference(reply.layout)
        if difference is not None and not self._has_warned:
            self._has_warned = True
            log.warning("the engine at %s cannot serve KV to this one: %s", self.address, difference)

    def _send(self, request: Hello | Lookup) -> bool:
        try:
            self._socket.send(encode(request), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> Reply | None:
        """None: it is malformed. Raises zmq.Again if nothing has arrived."""
        frames = self._socket.recv_multipart(zmq.DONTWAIT)
        try:
            reply: Reply = decode_reply(frames[0])
        except MALFORMED:
            return None
        return reply
