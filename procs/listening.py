"""The socket that clients connect to. The supervisor binds it before anything is loaded; the api process listens on it
when every actor is ready. Until then connections are refused.
"""

import contextlib
import os
import socket
import stat
from pathlib import Path

from ..config.config import ListenOptions
from ..errors import ConfigError


class Listening:
    """The bound socket."""

    def __init__(self, options: ListenOptions) -> None:
        """A port or, with `uds`, a file that only its owner may connect to. Raises ConfigError."""
        self._path = None if options.uds is None else Path(options.uds).absolute()
        self._socket = _port(options.host, options.port) if self._path is None else _file(self._path)
        self._inode = None if self._path is None else self._path.stat().st_ino

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Frees the port, and removes the file unless another server has replaced it."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
        self._socket.close()


def shown_address(options: ListenOptions, sock: socket.socket) -> str:
    """The URL of the server for clients on this machine."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
    return f"http{'' if options.ssl_certfile is None else 's'}://{shown}:{port}"


def _port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}.") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # With SO_REUSEADDR two sockets may be bound to a port while neither listens: listen, to see if another does.
        sock.listen(1)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --port, or end the program that has it."
        ) from error
    sock.close()
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    return sock


def _file(path: Path) -> socket.socket:
    try:
        if stat.S_ISSOCK(path.lstat().st_mode) and not _is_in_use(path):
            path.unlink()  # of a server that was killed
    except FileNotFoundError:
        pass
    sock = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise ConfigError(f"Cannot listen on --uds {path}: {error.strerror or error}.") from error
    finally:
        os.umask(before)
    return sock


def _is_in_use(path: Path) -> bool:
    """Whether a server listens there, or has bound the socket and does not listen yet."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            return True
        except ConnectionRefusedError:
            bound = Path("/proc/net/unix")
            return bound.exists() and any(line.endswith(f" {path}") for line in bound.read_text().splitlines())
        except OSError:  # such as a socket of another user
            return True
