"""The protocol in which two pagewire instances exchange KV blocks, over a ZeroMQ ipc:// socket.

One asks (DEALER), the other answers from the blocks that it keeps (ROUTER). Blocks are identified by their keys alone,
so an answer is right for every asker with equal keys, and there is no session. Messages are msgpack arrays; keys are
concatenated, 32 bytes each. An answer covers a prefix of the blocks asked for, without gaps. If the cache has several
groups, `Lookup` asks with the keys of blocks and `Found` answers for all groups; `Fetch` names what it wants by the
names of items (`engine/core/kv_connector.py`), which are the keys if there is one group.
"""

import os
import socket
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ...errors import ConfigError
from .base import Options
from .options import check_names, num_blocks_of, size_of

KEY_BYTES = 32
CHECKSUM_BYTES = 16
MAX_KEYS = 1 << 16  # in one message: a prompt of a million tokens
MAX_REQUEST_BYTES = MAX_KEYS * KEY_BYTES + 4096
MAX_WAIT_MS = 600_000
MAX_REPLY_BYTES = 8 << 20  # limit of the blocks in one message; a single block may be larger
_MAX_PATH_BYTES = 107  # of a socket's path, unix(7)


class Lookup(Struct, frozen=True, array_like=True, tag=True):
    """Asks how many of these blocks the peer has."""

    id: int
    model_key: bytes
    block_bytes: int
    keys: bytes
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)]  # how long to wait for blocks that are being computed
    behind: bytes = b""  # the key before the first of `keys`, or the root, if states are asked for
    is_expected: bool = False  # the peer is about to compute the blocks, if it does not already


class Fetch(Struct, frozen=True, array_like=True, tag=True):
    """Asks for these blocks, or items of several groups."""

    id: int
    model_key: bytes
    block_bytes: int
    keys: bytes


class Found(Struct, frozen=True, array_like=True, tag=True):
    """Answers `Lookup`: the peer has the first `num` blocks. With `is_coming` the next one is being computed, and
    another answer follows within `wait_ms`."""

    id: int
    num: int
    is_coming: bool = False
    names: bytes = b""  # of the items of other groups that it has, if there are some, and of beginnings of blocks
    states: tuple[tuple[bytes, bytes, int], ...] = ()  # key that it stands behind, its key, positions between


class Blocks(Struct, frozen=True, array_like=True, tag=True):
    """Answers `Fetch` with the first of the blocks, as many as fit into one message."""

    id: int
    checksums: bytes  # of each block, see `checksum`
    content: bytes  # whole blocks, concatenated


Request = Lookup | Fetch
Reply = Found | Blocks
encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def checksum(key: bytes, content: bytes | memoryview) -> bytes:
    """BLAKE2b over a block's key and bytes, which detects damaged and mistaken blocks."""
    digest = blake2b(key, digest_size=CHECKSUM_BYTES)
    digest.update(content)
    return digest.digest()


def split_keys(keys: bytes) -> list[bytes]:
    """The keys of a message. Raises ValueError if the length is no multiple of a key's."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no whole number of keys")
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


class Settings(Struct, frozen=True, kw_only=True):
    """The values of the options."""

    serve: str | None  # address on which this instance answers
    capacity: int  # blocks that it keeps to serve
    peer: str | None  # address at which this instance asks
    timeout_s: float  # how long a request waits for the answer to `Lookup`
    wait_s: float  # how much longer if the peer is computing the blocks
    fetch_timeout_s: float  # how long a request waits for its blocks


_NAMES = ("serve", "size", "peer", "timeout_ms", "wait_ms", "fetch_timeout_ms")


def read_settings(options: Options, block_bytes: int = 1) -> Settings:
    """Opens nothing. Raises ConfigError."""
    check_names("p2p", options, required=(), optional=_NAMES)
    if "serve" not in options and "peer" not in options:
        raise ConfigError("--kv-connector p2p needs serve=PATH, peer=PATH, or both.")
    if "size" in options and "serve" not in options:
        raise ConfigError("--kv-connector p2p: size is the memory for serve=PATH; give serve as well.")
    size = size_of("p2p", {"size": "1G", **options})
    return Settings(
        serve=_address("serve", options["serve"]) if "serve" in options else None,
        capacity=num_blocks_of("p2p", size, block_bytes) if "serve" in options else 0,
        peer=_address("peer", options["peer"]) if "peer" in options else None,
        timeout_s=_milliseconds("timeout_ms", options.get("timeout_ms", "100")) / 1000,
        wait_s=_milliseconds("wait_ms", options.get("wait_ms", "500")) / 1000,
        fetch_timeout_s=_milliseconds("fetch_timeout_ms", options.get("fetch_timeout_ms", "2000")) / 1000,
    )


def check_free(address: str) -> None:
    """Raises ConfigError if a socket cannot be bound there: the folder is missing or not writable, the path is another
    file, or another instance answers there. The socket of a dead instance is no obstacle."""
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


def _address(option: str, text: str) -> str:
    if not text or "://" in text:
        raise ConfigError(f"--kv-connector p2p: {option}={text} should be the path of a socket on this machine.")
    path = os.path.abspath(text)
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"--kv-connector p2p: {path} is too long; a socket's path has at most {_MAX_PATH_BYTES} bytes."
        )
    return f"ipc://{path}"


def _milliseconds(option: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_WAIT_MS:
        raise ConfigError(f"--kv-connector p2p: {option}={text} should be a number of milliseconds, 1 to 600000.")
    return int(text)
