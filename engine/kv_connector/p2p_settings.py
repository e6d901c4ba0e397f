"""The options of the p2p connector: addresses, keys, times."""

import os
import socket
import stat
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from msgspec import Struct

from ...errors import ConfigError
from ...ipc.zmq_channel import Keys, read_keys
from .base import ConnectorFacts, Options
from .options import DEFAULT_SIZE, check_names, milliseconds_of, num_blocks_of, size_of

NAMED = "named"
"""The value of `peer` with which requests name their peers."""

_MAX_PATH_BYTES = 107  # of a socket's path, unix(7)
_LAST_PORT = 65535
_NAMES = ("serve", "size", "peer", "key-file", "role", "transport", "timeout_ms", "wait_ms", "fetch_timeout_ms")
_ROLES = ("prefill", "decode", "both")
_TRANSPORTS = ("zmq", "nixl")


class Settings(Struct, frozen=True, kw_only=True):
    """The values of the options."""

    serve: str | None  # address of this instance; `serving_address` says where each rank answers
    capacity: int  # blocks that it keeps to serve
    peer: str | None  # address at which this instance asks for requests that name none
    asks: bool  # it asks peers: `peer`, or those that requests name
    key_file: str | None
    role: str
    uses_nixl: bool  # blocks are read from memory, from and by instances that do so as well
    timeout_s: float  # how long a request waits for the answer to `Lookup`
    wait_s: float  # how much longer if the peer is computing the blocks
    fetch_timeout_s: float  # how long a load waits for its next piece


def read_settings(options: Options, facts: ConnectorFacts | None = None) -> Settings:
    """Opens nothing. facts: None before they are known. Raises ConfigError."""
    check_names("p2p", options, required=(), optional=_NAMES)
    if "serve" not in options and "peer" not in options:
        raise ConfigError("--kv-connector p2p needs serve=PATH or tcp://HOST:PORT, peer=…, or both.")
    if "size" in options and "serve" not in options:
        raise ConfigError("--kv-connector p2p: size is the memory for serve=…; give serve as well.")
    role = options.get("role", "both")
    if role not in _ROLES:
        raise ConfigError(f"--kv-connector p2p: role={role} should be one of {', '.join(_ROLES)}.")
    transport = options.get("transport", "zmq")
    if transport not in _TRANSPORTS:
        raise ConfigError(f"--kv-connector p2p: transport={transport} should be one of {', '.join(_TRANSPORTS)}.")
    if transport == "nixl" and find_spec("nixl") is None:
        raise ConfigError("--kv-connector p2p: transport=nixl needs the package nixl: pip install 'pagewire[nixl]'.")
    needs = {"prefill": "serve", "decode": "peer"}.get(role)
    if needs is not None and needs not in options:
        raise ConfigError(f"--kv-connector p2p: role={role} needs {needs}=…, by which the KV travels.")
    size = size_of("p2p", {"size": DEFAULT_SIZE, **options})
    key_file = options.get("key-file")
    peer = options.get("peer")
    if key_file is not None and not key_file:
        raise ConfigError("--kv-connector p2p: key-file= should be the path of a file with keys.")
    num_ranks = 1 if facts is None else facts.num_ranks
    num_ports = num_ranks + 1 if facts is not None and facts.hosts else num_ranks
    of_block = 1 if facts is None else facts.of_engine(facts.block_bytes)
    return Settings(
        serve=_address("serve", options["serve"], key_file, num_ports) if "serve" in options else None,
        capacity=num_blocks_of("p2p", size, of_block) if "serve" in options else 0,
        peer=None if peer is None else _peer(peer, key_file, num_ranks),
        asks=peer is not None,
        key_file=key_file,
        role=role,
        uses_nixl=transport == "nixl",
        timeout_s=milliseconds_of("p2p", "timeout_ms", options.get("timeout_ms", "100")) / 1000,
        wait_s=milliseconds_of("p2p", "wait_ms", options.get("wait_ms", "500")) / 1000,
        fetch_timeout_s=milliseconds_of("p2p", "fetch_timeout_ms", options.get("fetch_timeout_ms", "2000")) / 1000,
    )


def rank_address(address: str, rank: int) -> str:
    """Where this rank of the instance at `address` answers, if its ranks are on one machine: ports follow each other,
    paths get an ending."""
    if not rank:
        return address
    if not address.startswith("tcp://"):
        return f"{address}.{rank}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"


def has_directory(settings: Settings, facts: ConnectorFacts) -> bool:
    """Whether the core half answers at `serve` and says where the ranks are (`p2p_directory.py`)."""
    return bool(facts.hosts) and settings.serve is not None and settings.serve.startswith("tcp://")


def serving_address(settings: Settings, facts: ConnectorFacts) -> str | None:
    """Where this rank answers; None: it serves nothing."""
    if settings.serve is None or not has_directory(settings, facts):
        return settings.serve and rank_address(settings.serve, facts.rank)
    return _on_host(settings.serve, told_addresses(settings.serve, facts)[facts.rank])


def told_addresses(serve: str, facts: ConnectorFacts) -> tuple[str, ...]:
    """Where the ranks are, as `Welcome.ranks` has it: each at a port of its own, wherever it is."""
    port = int(serve.rpartition(":")[2])
    return tuple(f"{host}:{port + 1 + rank}" for rank, host in enumerate(facts.hosts))


def rank_addresses(address: str, num_ranks: int, told: tuple[str, ...]) -> tuple[str, ...]:
    """Where the ranks of the instance at `address` are. told: `Welcome.ranks`. Raises ValueError if that makes no
    sense."""
    if not told:
        return tuple(rank_address(address, rank) for rank in range(num_ranks))
    ports = [one.rpartition(":")[2] for one in told]
    if len(told) != num_ranks or not all(port.isdigit() and 0 < int(port) <= _LAST_PORT for port in ports):
        raise ValueError(f"{len(told)} addresses for {num_ranks} ranks, or no HOST:PORT")
    if not address.startswith("tcp://") or not all(map(_is_plain, told)):
        raise ValueError("addresses of other kinds")
    return tuple(_on_host(address, one) for one in told)


def _on_host(address: str, told: str) -> str:
    """The address of a rank. told: HOST:PORT, where an empty HOST is that of `address`."""
    host, _, port = told.rpartition(":")
    return f"tcp://{host}:{port}" if host else f"{address.rpartition(':')[0]}:{port}"


def keys_of(settings: Settings) -> Keys | None:
    """The keys of TCP connections. Makes the file if there is none. Raises ConfigError."""
    if settings.key_file is None:
        return None
    try:
        return read_keys(Path(settings.key_file))
    except OSError as error:
        raise ConfigError(
            f"--kv-connector p2p: key-file={settings.key_file} cannot be used: {error.strerror or error}."
        ) from error


def secure(socket: "zmq.Socket[bytes]", address: str, keys: Keys | None, *, is_server: bool) -> None:
    """Gives a TCP socket its keys and heartbeats, by which it notices a lost machine."""
    if not address.startswith("tcp://"):
        return
    assert keys is not None, "checked with the options"
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    if is_server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = keys.public.encode()
    socket.ipv6 = True
    socket.heartbeat_ivl, socket.heartbeat_timeout = 2_000, 10_000  # ms
    socket.reconnect_ivl_max = 1_000  # ms


def check_free(address: str) -> None:
    """Raises ConfigError if an ipc socket cannot be bound there: the folder is missing or not writable, the path is
    another file, or another instance answers there. The socket of a dead instance is no obstacle."""
    if not address.startswith("ipc://"):
        return
    path = Path(address.removeprefix("ipc://"))
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--kv-connector p2p: {path.parent} is not a folder in which a socket can be created.")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"--kv-connector p2p: {path} exists and is not a socket; choose another path.")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConfigError(f"--kv-connector p2p: another instance serves on {path}; choose another path.")


def _peer(text: str, key_file: str | None, num_ranks: int) -> str | None:
    if text != NAMED:
        return _address("peer", text, key_file, num_ranks)
    if key_file is None:
        raise ConfigError("--kv-connector p2p: peer=named reaches engines over TCP; give key-file=FILE as well.")
    return None


def _address(option: str, text: str, key_file: str | None, num_ports: int) -> str:
    if text.startswith("tcp://"):
        return _tcp(option, text, key_file, num_ports)
    if not text or "://" in text:
        raise ConfigError(
            f"--kv-connector p2p: {option}={text} should be the path of a socket on this machine, or tcp://HOST:PORT."
        )
    path = os.path.abspath(text)
    if len(os.fsencode(rank_address(path, num_ports - 1))) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"--kv-connector p2p: {path} is too long; a socket's path has at most {_MAX_PATH_BYTES} bytes."
        )
    return f"ipc://{path}"


def _tcp(option: str, text: str, key_file: str | None, num_ports: int) -> str:
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    rest = text.removeprefix("tcp://")
    if not host or not port or not _is_plain(rest) or (host == "*" and option == "peer"):
        raise ConfigError(f"--kv-connector p2p: {option}={text} should be tcp://HOST:PORT with a port of 1 to 65535.")
    if port + num_ports - 1 > _LAST_PORT:
        raise ConfigError(
            f"--kv-connector p2p: {option}={text} leaves no room for the ranks, which use {num_ports} ports from there "
            f"on; choose a port up to {_LAST_PORT + 1 - num_ports}."
        )
    if key_file is None:
        raise ConfigError(
            f"--kv-connector p2p: {option}={text} can be reached by others; give key-file=FILE, the same file on both "
            "ends (it is made if there is none)."
        )
    return text


def _is_plain(text: str) -> bool:
    """ZeroMQ gives some characters of an address a meaning."""
    return text.isascii() and all(char.isalnum() or char in "-._:[]*%" for char in text)
