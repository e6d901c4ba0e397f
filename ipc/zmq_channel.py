"""Mailboxes over ZeroMQ: the receiver binds a PULL socket, every sender connects a PUSH socket.

Senders may start first; their messages wait for the receiver. The receiver's descriptor is registered with the event
loop and drained until EAGAIN, which costs a twentieth of zmq.asyncio's time per message.

Addresses are `ipc://` paths in a folder that only its owner may enter, or `tcp://`. TCP outside loopback is refused
without keys: with `Keys`, both ends use CURVE (RFC 26/ZeroMQ) and must hold the same secret.
"""

import asyncio
import contextlib
import os
import socket as unix_socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import zmq
import zmq.auth
from msgspec import Struct, structs
from zmq.auth.thread import ThreadAuthenticator

from ..errors import ConfigError
from .channel import ChannelFull, Decoding
from .client_messages import ToPort
from .codec import encode
from .control_messages import ToLead
from .epochs import HEADER_BYTES, Epochs, Link
from .file_messages import ToShare
from .gaps import Gaps, Numbers, OnGap, fail
from .hosts import is_loopback
from .messages import Hidden, Message, Reset
from .refusals import EVENTS as REFUSAL_EVENTS
from .refusals import ZmqRefusals
from .watch import EVENTS, ZmqWatch

M = TypeVar("M")

# ZeroMQ closes the connection of a peer that sends more, without an error. Our own processes send far less: the largest
# body (`--max-body-size`) becomes at most seven times as large. Types bound the messages of clients of the core.
_MAX_MESSAGE_BYTES = 2**30
_MAX_CLIENT_MESSAGE_BYTES = 64 * 2**20
_MAX_PATH_BYTES = 107  # of a socket's path, unix(7)
_HIGH_WATER_MARK = 100_000  # messages; the engine's own bounds are far below
_LINGER_MS = 500  # how long closing waits for queued messages to be sent
_BEATS = 4  # heartbeats of a watched connection within its `silence_s`
_RETRY_MS = 10  # between attempts to reach a mailbox that is watched


class Keys(Struct, frozen=True):
    """One CURVE key pair that all actors of an engine share (Z85 text)."""

    public: str
    secret: str


def read_keys(path: Path) -> Keys:
    """Reads a key file, or creates it. Of several processes that do so at once, one creates it. Raises ConfigError if
    other users may read it, OSError if it cannot be created."""
    if not path.exists():
        _create_keys(path)
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} may be read by other users; run chmod 600 on it.")
    lines = path.read_text().split()
    if len(lines) != 2 or any(len(line) != 40 for line in lines):
        raise ConfigError(f"{path} is not a key file: it should hold two lines of 40 characters.")
    return Keys(*lines)


def _create_keys(path: Path) -> None:
    """The file gets its name when it is complete, so nobody reads a part of it."""
    public, secret = zmq.curve_keypair()
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{public.decode()}\n{secret.decode()}\n")
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(part, path)
    finally:
        os.unlink(part)


def make_run_folder() -> Path:
    """A new folder for `ipc://` addresses, mode 0700, named after this process. Removes folders of killed launchers."""
    candidates = [
        Path(folder) for folder in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp") if folder
    ]
    name_bytes = len(f"/pagewire-{os.getpid()}-________/detokenizer")
    usable = [c for c in candidates if os.access(c, os.W_OK) and len(os.fsencode(c)) + name_bytes <= _MAX_PATH_BYTES]
    if not usable:
        raise ConfigError(
            f"None of {', '.join(map(str, candidates))} can hold sockets: not writable, or too long a path."
        )
    base = usable[0]
    for old in base.glob("pagewire-*-*"):
        pid = old.name.split("-")[1]
        if old.is_dir() and old.stat().st_uid == os.getuid() and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove_run_folder(old)
    return Path(tempfile.mkdtemp(prefix=f"pagewire-{os.getpid()}-", dir=base))


def remove_run_folder(folder: Path) -> None:
    """Removes a run folder and its sockets, if they exist."""
    for path in folder.glob("*"):
        path.unlink(missing_ok=True)
    if folder.exists():
        folder.rmdir()


def check_address(address: str, keys: Keys | None) -> None:
    """Raises ConfigError if `address` is not valid, or open to the network without keys."""
    if address.startswith("ipc://"):
        if len(os.fsencode(address.removeprefix("ipc://"))) > _MAX_PATH_BYTES:
            raise ConfigError(f"{address} is too long: a socket's path has at most {_MAX_PATH_BYTES} bytes.")
        return
    url = urlsplit(address)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise ConfigError(f"{address!r} is no address; write ipc:///path or tcp://host:port.")
    if keys is None and not is_loopback(url.hostname):
        raise ConfigError(f"{address} can be reached from outside; give every machine the same --key-file.")


def _may_lose_frames(address: str) -> bool:
    """Whether connections to it may break although both processes live."""
    return address.startswith("tcp://")


def _bind(socket: "zmq.SyncSocket", address: str) -> None:
    umask = os.umask(0o077)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"Cannot listen on {address}: {error}.") from error
    finally:
        os.umask(umask)


def admit_only(context: "zmq.Context[zmq.SyncSocket]", keys: Keys) -> ThreadAuthenticator:
    """Lets the CURVE servers of a context admit only peers that hold these keys, until it is stopped."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=_OneKey(keys.public.encode()))
    return authenticator


def _is_listening(path: Path) -> bool:
    with unix_socket.socket(unix_socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _find_dead_peers(socket: "zmq.SyncSocket") -> None:
    """Turns heartbeats on, for peers on other machines. On this one the kernel reports a peer's end at once."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = 2_000, 10_000  # ms
    socket.reconnect_ivl_max = 1_000  # ms


class ZmqContext:
    """The sockets of one process."""

    def __init__(self, keys: Keys | None = None, epochs: Epochs | None = None) -> None:
        self._context = zmq.Context()
        self._epochs = epochs or Epochs()
        self._keys = keys
        self._sockets: list[zmq.SyncSocket] = []
        self._authenticator: ThreadAuthenticator | None = None

    def _socket(self, kind: int, address: str) -> "zmq.SyncSocket":
        check_address(address, self._keys)
        socket = self._context.socket(kind)
        socket.linger = _LINGER_MS
        socket.set_hwm(_HIGH_WATER_MARK)
        socket.maxmsgsize = _MAX_CLIENT_MESSAGE_BYTES if kind in (zmq.ROUTER, zmq.DEALER) else _MAX_MESSAGE_BYTES
        if self._keys is not None and address.startswith("tcp://"):
            socket.curve_publickey = self._keys.public.encode()
            socket.curve_secretkey = self._keys.secret.encode()
            if kind in (zmq.PULL, zmq.ROUTER):
                self._authenticate()
                socket.curve_server = True
            else:
                socket.curve_serverkey = self._keys.public.encode()
        self._sockets.append(socket)
        return socket

    def _authenticate(self) -> None:
        """Admits only peers that hold our key."""
        if self._authenticator is None and self._keys is not None:
            self._authenticator = admit_only(self._context, self._keys)

    def outbox(
        self, address: str, link: Link = Link.CHAIN, *, engine: int | None = None, sender: str = ""
    ) -> "ZmqOutbox":
        """Connects to a mailbox, which need not exist yet. `engine`: of its process, if it is not the own one.
        `sender`: by which the receiver knows this outbox, unlike all others of the mailbox (default: random)."""
        socket = self._socket(zmq.PUSH, address)
        numbers = None
        if _may_lose_frames(address) and link is not Link.CONTROL:
            numbers = Numbers(sender or os.urandom(8).hex())
            _find_dead_peers(socket)
        socket.connect(address)
        return ZmqOutbox(socket, address, self._epochs, link, engine, numbers)

    def inbox(self, address: str, accepts: object, *, fd: int = -1, on_gap: OnGap = fail) -> "ZmqInbox[M]":
        """Binds a mailbox. `fd`: a socket that listens on this tcp:// address already, which this object closes.
        `on_gap`: called by `drain` when frames of a sender were lost. Raises ConfigError if the address cannot be
        had."""
        socket = self._socket(zmq.PULL, address)
        if fd >= 0:
            socket.setsockopt(zmq.USE_FD, fd)
        _bind(socket, address)
        return ZmqInbox(socket, accepts, self._epochs, Gaps(on_gap) if _may_lose_frames(address) else None)

    def watch(self, address: str, silence_s: float) -> ZmqWatch:
        """Connects to a mailbox, which need not exist yet, to notice when its process ends or is silent for
        `silence_s` seconds."""
        socket = self._socket(zmq.PUSH, address)
        beat_ms = max(1, int(1000 * silence_s / _BEATS))
        socket.heartbeat_ivl, socket.heartbeat_timeout = beat_ms, (_BEATS - 1) * beat_ms
        # A process that ends before it was reached is not missed, and it may be ready a moment after it binds.
        socket.reconnect_ivl = _RETRY_MS
        monitor = socket.get_monitor_socket(EVENTS)
        self._sockets.append(monitor)
        socket.connect(address)
        return ZmqWatch(socket, monitor, self._epochs.header(Link.CONTROL))

    def router(self, address: str) -> "ZmqRouter":
        """Binds an address for many clients. Raises ConfigError if it cannot be bound, or if another process listens
        there: a second one would take its clients."""
        path = Path(address.removeprefix("ipc://"))
        if address.startswith("ipc://") and path.exists() and (not path.is_socket() or _is_listening(path)):
            raise ConfigError(f"Cannot listen on {address}: another process does, or {path} is not a socket.")
        socket = self._socket(zmq.ROUTER, address)
        socket.router_mandatory = True  # else messages to unknown peers are dropped without an error
        socket.router_handover = True  # a peer with a name of its own that connects again goes on under it
        _find_dead_peers(socket)
        _bind(socket, address)
        return ZmqRouter(socket, path if address.startswith("ipc://") else None)

    def dealer(self, address: str, name: bytes = b"") -> "ZmqDealer":
        """Connects to a router, which need not exist yet. `name`: by which the router knows it, also after the
        connection broke and was made again; empty: each connection gets another name."""
        socket = self._socket(zmq.DEALER, address)
        if name:
            socket.routing_id = name
        _find_dead_peers(socket)
        socket.connect(address)
        return ZmqDealer(socket)

    def close(self) -> None:
        """Closes all sockets after a moment for queued messages."""
        for socket in self._sockets:
            socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


class _OneKey:
    """Admits exactly one public key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator with a peer's key (Z85)."""
        return key == self._public


class ZmqOutbox:
    def __init__(
        self,
        socket: "zmq.SyncSocket",
        address: str,
        epochs: Epochs,
        link: Link,
        engine: int | None = None,
        numbers: Numbers | None = None,
    ) -> None:
        """`numbers`: of its frames, if some may be lost."""
        self._socket = socket
        self._address = address
        self._epochs = epochs
        self._link = link
        self._engine = engine
        self._numbers = numbers

    def send(self, message: Message) -> None:
        """Raises ChannelFull."""
        header = self._epochs.header(self._link, self._engine)
        head = header if self._numbers is None else self._numbers.head(header)
        if isinstance(message, Hidden) and message.data:
            self._send([head + encode(structs.replace(message, data=b"")), message.data])
        else:
            self._send([head + encode(message)])
        if self._numbers is not None:
            self._numbers.count()

    def send_bytes(self, data: bytes) -> None:
        """Raises ChannelFull."""
        self._send([data])

    def mark(self) -> None:
        """Has the receiver find out whether the last messages have arrived, if frames to it may be lost."""
        if self._numbers is None:
            return
        frame = self._numbers.mark(self._epochs.header(self._link, self._engine))
        if frame is not None:
            with contextlib.suppress(ChannelFull):  # then the next one does it
                self._send([frame])

    def _send(self, frames: list[bytes]) -> None:
        for data in frames:
            assert len(data) <= _MAX_MESSAGE_BYTES, f"a message of {len(data)} bytes for {self._address}"
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again as error:
            raise ChannelFull(f"{self._address} has not taken {_HIGH_WATER_MARK} messages") from error

    def close(self) -> None:
        self._socket.close()


class PeerGone(Exception):
    """The connection does not exist, or has been closed."""


def _wait(socket: "zmq.SyncSocket", timeout_s: float, fd: int | None) -> None:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    if fd is not None:
        poller.register(fd, zmq.POLLIN)
    poller.poll(max(0, int(timeout_s * 1000)))


class ZmqRouter:
    """A bound ROUTER socket. ZeroMQ names each connection by bytes of its own choice."""

    def __init__(self, socket: "zmq.SyncSocket", path: Path | None) -> None:
        """`path`: the socket's file, which `close` removes."""
        self._socket = socket
        self._path = path
        self._refusals: ZmqRefusals | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def refusals(self) -> ZmqRefusals:
        """From now on says who is refused because its keys differ. Called once."""
        self._refusals = ZmqRefusals(self._socket.get_monitor_socket(REFUSAL_EVENTS))
        return self._refusals

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Calls `wake` on the loop when a message may be waiting. After a send, ask `has_mail`: the descriptor may not
        report a message that arrived meanwhile."""
        self._loop = loop
        loop.add_reader(int(self._socket.fd), wake)
        loop.call_soon(wake)

    @property
    def address(self) -> str:
        """Where it listens; of port 0 with the port that it got."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def wait(self, timeout_s: float, fd: int) -> None:
        """Blocks until a message may be waiting or `fd` can be read, for at most `timeout_s` seconds."""
        _wait(self._socket, timeout_s, fd)

    def has_mail(self) -> bool:
        """Whether a message is waiting."""
        return bool(self._socket.poll(0))

    def receive(self) -> list[bytes] | None:
        """The peer's name and the frames of the next message; None: no message is waiting."""
        try:
            return self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def send(self, peer: bytes, data: bytes) -> None:
        """Queues one frame for `peer`. Raises ChannelFull, PeerGone."""
        try:
            self._socket.send_multipart((peer, data), zmq.DONTWAIT)
        except zmq.Again as error:
            raise ChannelFull("a client does not read its messages") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGone from error

    def close(self) -> None:
        """Frees the address after a moment for queued messages."""
        if self._loop is not None:
            self._loop.remove_reader(int(self._socket.fd))
        if self._refusals is not None:
            self._socket.disable_monitor()
            self._refusals.close()
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class ZmqDealer:
    """A connected DEALER socket."""

    def __init__(self, socket: "zmq.SyncSocket") -> None:
        self._socket = socket
        self._loop: asyncio.AbstractEventLoop | None = None

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Calls `wake` on the loop when a message may be waiting. After a send, call `wake`: the descriptor may not
        report a message that arrived meanwhile."""
        self._loop = loop
        loop.add_reader(int(self._socket.fd), wake)
        loop.call_soon(wake)

    def receive(self) -> bytes | None:
        """The next message; None: no message is waiting."""
        try:
            return self._socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def wait(self, timeout_s: float, fd: int | None = None) -> None:
        """Blocks until a message may be waiting or `fd` can be read, for at most `timeout_s` seconds."""
        _wait(self._socket, timeout_s, fd)

    def send(self, message: ToPort | ToLead | ToShare) -> None:
        """Raises ChannelFull."""
        try:
            self._socket.send(encode(message), zmq.DONTWAIT)
        except zmq.Again as error:
            raise ChannelFull("the engine does not read its messages") from error

    def close(self) -> None:
        """Closes after a moment for queued messages."""
        if self._loop is not None:
            self._loop.remove_reader(int(self._socket.fd))
            self._loop = None
        self._socket.close()


class ZmqInbox(Decoding[M]):
    def __init__(self, socket: "zmq.SyncSocket", accepts: object, epochs: Epochs, gaps: Gaps | None = None) -> None:
        """`gaps`: between its frames, if some may be lost."""
        super().__init__(accepts)
        self._socket = socket
        self._gaps = gaps
        self._fd = int(socket.fd)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._epochs = epochs
        self._early: list[tuple[bytes, bytes]] = []  # messages of later epochs; only a `Reset` begins one
        self._reset: M | None = None  # received after messages of the epoch that it ends: handed out next
        self.has_more = False

    def drain(self) -> list[M]:
        """Reads until EAGAIN, because the descriptor is edge-triggered."""
        if self._reset is not None:
            return self._begin(self._reset)
        self.has_more = False
        messages: list[M] = []
        receive, age = self._socket.recv, self._epochs.age
        while True:
            try:
                frame = receive(zmq.DONTWAIT)
            except zmq.Again:
                return messages
            try:
                old = age(frame)
            except ValueError as error:
                self.undecodable(frame, error)
                continue
            data = b""
            if frame[0] == Link.DEVICE and self._socket.getsockopt(zmq.RCVMORE):
                data = receive()  # frames of a message arrive together
            if old > 0:
                self._epochs.num_stale += 1
                continue
            if old < 0 and frame[0] != Link.CONTROL:
                self._early.append((frame, data))
                continue
            message = self._message(frame, data)
            if message is None:
                continue
            if not isinstance(message, Reset):
                messages.append(message)
            elif messages:  # of the epoch that ends, like the messages that their receiver will send because of them
                self._reset = message
                self.has_more = True
                return messages
            else:
                return self._begin(message)

    def _begin(self, reset: M) -> list[M]:
        """Enters the new epoch; the frames that waited for it follow."""
        self._reset = None
        assert isinstance(reset, Reset)
        if not self._epochs.advance(reset):
            return self.drain()
        self.has_more = True
        early, self._early = self._early, []
        messages: list[M] = [reset]
        for frame, data in early:
            if (old := self._epochs.age(frame)) < 0:
                self._early.append((frame, data))
            elif old > 0:
                self._epochs.num_stale += 1
            elif (message := self._message(frame, data)) is not None:
                messages.append(message)
        return messages

    def _message(self, frame: bytes, data: bytes) -> M | None:
        """data: the second frame that `ZmqOutbox.send` makes of a `Hidden`."""
        start: int | None = HEADER_BYTES
        if self._gaps is not None and frame[0] != Link.CONTROL:
            try:
                start = self._gaps.begin_of_message(frame)
            except ValueError as error:
                self.undecodable(frame, error)
                return None
        message = None if start is None else self.decode(memoryview(frame)[start:])
        return structs.replace(message, data=data) if isinstance(message, Hidden) and data else message

    def wait(self, timeout_s: float) -> bool:
        return self.has_more or bool(self._socket.poll(int(timeout_s * 1000)))

    def subscribe(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        loop.add_reader(self._fd, wake)
        loop.call_soon(wake)  # a frame that came before gives no event

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
        self._socket.close()
