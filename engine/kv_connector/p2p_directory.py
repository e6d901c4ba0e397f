"""Says peers where the ranks of an engine on several machines are.

The core half answers at the engine's address, because the core stays where it is when a rank moves to another machine.
It is replaced whenever one does, since it sends to all of them, so what it says holds for its life.
"""

from ...ipc.zmq_channel import Keys
from .base import ConnectorFacts
from .p2p_listener import Listener
from .p2p_settings import told_addresses
from .p2p_wire import MALFORMED, Hello, Layout, Lookup, Welcome, decode_request, encode


class Directory:
    def __init__(self, address: str, facts: ConnectorFacts, keys: Keys | None) -> None:
        """facts: with hosts. Raises ConfigError if the address cannot be bound."""
        self._answer = encode(Welcome(Layout.of(facts), told_addresses(address, facts)))
        self._listener = Listener(address, keys)
        self._listener.start(self._run, "p2p directory")

    def close(self) -> None:
        """Ends the thread. A second call does nothing."""
        self._listener.close()

    def _run(self) -> None:
        socket = self._listener.socket
        while (has_message := self._listener.wait()) is not None:
            if not has_message:
                continue
            sender, *frames = socket.recv_multipart()
            if _is_question(frames):
                socket.send_multipart([sender, self._answer])  # a ROUTER drops it if the asker has left


def _is_question(frames: list[bytes]) -> bool:
    """`Hello`, or `Lookup`: a peer that has not noticed that the first rank has moved sends it to the old address."""
    try:
        return len(frames) == 1 and isinstance(decode_request(frames[0]), Hello | Lookup)
    except MALFORMED:
        return False
