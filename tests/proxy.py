"""A TCP connection between two programs that a test can hold back, in one direction or both, or cut."""

import contextlib
import socket
import threading
from typing import Self


class Proxy:
    """Passes bytes between clients of `port` and a port of this machine."""

    def __init__(self, target: int) -> None:
        self.target = target  # port, where a program may listen later
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.holds_up = self.holds_down = False  # to the target, from the target: bytes wait
        self.num_refused = 0  # connections, while it was cut
        self.num_held = 0  # pieces of data that wait now
        self.num_passed = 0  # pieces that have gone to the target
        self._changed = threading.Condition()
        self._is_cut = self._is_closed = False
        self._sockets: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def partition(self, *, up: bool = True, down: bool = True) -> None:
        """Holds back what is sent from now on; connections stay."""
        with self._changed:
            self.holds_up, self.holds_down = up, down
            self._changed.notify_all()

    def heal(self) -> None:
        self.partition(up=False, down=False)
        self._is_cut = False

    def cut(self) -> None:
        """Breaks all connections, and refuses new ones until `heal`."""
        self._is_cut = True
        self._break()

    def _break(self) -> None:
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError):
                client, _ = self._listener.accept()
                if self._is_cut:
                    self.num_refused += 1
                    client.close()
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._changed:
                    self.num_held += 1
                    self._changed.wait_for(lambda: not (self.holds_up if is_up else self.holds_down))
                    self.num_held -= 1
                sink.sendall(data)
                self.num_passed += is_up
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which else accepts one more connection
        self._acceptor.join()
        self._listener.close()
        self.heal()
        self._break()
