"""Publishes which KV blocks this engine's prefix cache holds, over ZeroMQ, in the format of vLLM's KV events.

The core process owns one `KvEventPublisher` and passes it the scheduler's events after each batch of messages. Sending
only puts them into a ZeroMQ queue. A separate thread answers replay requests.

Each batch is a multipart message of three frames on a PUB socket: an empty topic; a number, 8 bytes, big endian,
counting batches from 0; and msgpack. The msgpack is an array `[ts, events, data_parallel_rank]`: seconds since 1970,
the events in order, and 0, because there is one core. An event is an array that begins with its name:

    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

Events about another group of the cache than that of full attention, and about recurrent states, end in one more field:
the group's number. A router that wants to know where a prefix is does not need them. Their hashes are others, so that
it does not take them for blocks of full attention: the highest byte is changed by XOR with the number plus one.

A hash is the last 8 bytes of the block's key as an unsigned number: enough for routing, not enough to read KV. Both
LoRA fields are nil. `medium` is "GPU" for the device's own pool (also on a CPU), "CPU" for the host tier, and the
tier's name in capitals for others. Events of tiers have no token_ids (empty) and no parent (nil).

PUB drops messages for a subscriber that is too slow. A subscriber that sees a gap in the numbers sends the replay
socket, a ROUTER, an empty frame and the first number that it wants (8 bytes, big endian). It gets
`[empty, number, msgpack]` for each of these batches that is among the last 10,000, then the number -1 with an empty
frame.
"""

import contextlib
import ipaddress
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from ..engine.core.kv_events import DEVICE, Cleared, KvCacheEvent, Removed, Stored
from ..errors import ConfigError

NUM_KEPT = 10_000
"""Batches that can be replayed; also how many are queued for one subscriber before further ones are dropped."""

END = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""

_MEDIUM = {DEVICE: "GPU", "host": "CPU"}
_encode = msgspec.msgpack.Encoder().encode


class _BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None


class _GroupBlockStored(_BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    group: int


class _BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str


class _GroupBlockRemoved(_BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    group: int


class _AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class KvEventPublisher:
    """Owns the sockets. Only the core's thread calls `publish` and `close`."""

    def __init__(self, *, address: str, replay: str | None = None) -> None:
        """Binds. Raises ConfigError if an address is invalid, reachable from the network, or not available."""
        _check("--kv-events", address)
        if replay is not None:
            _check("--kv-events-replay", replay)
        self._paths = [Path(a.removeprefix("ipc://")) for a in (address, replay) if a is not None and a[0] == "i"]
        self._kept = _Kept()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replays: _Replays | None = None
        try:
            _bind(self._pub, address, NUM_KEPT, "--kv-events")
            if replay is not None:
                self._replays = _Replays(self._context, replay, self._kept)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: Sequence[KvCacheEvent]) -> None:
        """Sends the events as one batch, or nothing if there are none. Never blocks."""
        if events:
            batch = _encode((time.time(), [_as_sent(event) for event in events], 0))
            number = self._kept.add(batch)
            self._pub.send_multipart((b"", number.to_bytes(8, "big"), batch))

    def close(self) -> None:
        """Gives connected subscribers 200 ms to receive what is queued, and frees the addresses."""
        self._pub.close()
        self._context.term()  # also ends the thread
        if self._replays is not None:
            self._replays.join()
        for path in self._paths:
            path.unlink(missing_ok=True)


class _Kept:
    """The last batches. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: deque[bytes] = deque(maxlen=NUM_KEPT)
        self._next = 0  # number of the next batch

    def add(self, batch: bytes) -> int:
        """Returns the number of the batch."""
        with self._lock:
            self._batches.append(batch)
            self._next += 1
            return self._next - 1

    def since(self, number: int) -> tuple[int, list[bytes]]:
        """The batches from `number` on that are still kept, and the number of the first of them."""
        with self._lock:
            oldest = self._next - len(self._batches)
            first = min(max(number, oldest), self._next)
            return first, list(islice(self._batches, first - oldest, None))


class _Replays(threading.Thread):
    """Answers the replay socket until the context is terminated."""

    def __init__(self, context: "zmq.Context[zmq.SyncSocket]", address: str, kept: _Kept) -> None:
        super().__init__(name="kv-events-replay", daemon=True)
        self._kept = kept
        self._router = context.socket(zmq.ROUTER)
        # Space for two replays, because ZeroMQ updates how far a client has read only after each half of the queue.
        _bind(self._router, address, 2 * (NUM_KEPT + 2), "--kv-events-replay")
        self.start()

    def run(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                self._answer(self._router.recv_multipart())
        self._router.close()

    def _answer(self, frames: list[bytes]) -> None:
        """Sends one replay. An invalid request gets no answer; a client that does not read loses the rest."""
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return
        first, batches = self._kept.since(int.from_bytes(frames[2], "big"))
        for number, batch in enumerate(batches, first):
            self._router.send_multipart((frames[0], b"", number.to_bytes(8, "big"), batch))
        self._router.send_multipart((frames[0], b"", END, b""))


def _as_sent(event: KvCacheEvent) -> _BlockStored | _BlockRemoved | _AllBlocksCleared:
    match event:
        case Stored():
            ids = array("i")
            ids.frombytes(event.ids)
            group, medium = event.group, _medium(event.tier)
            hashes = [_hash(key, group) for key in event.keys]
            parent = None if event.parent is None else _hash(event.parent, group)
            if group is None:
                return _BlockStored(hashes, parent, ids.tolist(), event.block_size, None, medium, None)
            return _GroupBlockStored(hashes, parent, ids.tolist(), event.block_size, None, medium, None, group)
        case Removed():
            group, medium = event.group, _medium(event.tier)
            hashes = [_hash(key, group) for key in event.keys]
            return _BlockRemoved(hashes, medium) if group is None else _GroupBlockRemoved(hashes, medium, group)
        case Cleared():
            return _AllBlocksCleared()


def _hash(key: bytes, group: int | None) -> int:
    number = int.from_bytes(key[-8:], "big")
    return number if group is None else number ^ (group + 1) << 56


def _medium(tier: str) -> str:
    return _MEDIUM.get(tier, tier.upper())


def _check(flag: str, address: str) -> None:
    """Raises ConfigError unless only this machine can reach `address`."""
    if address.startswith("ipc:///"):
        path = Path(address.removeprefix("ipc://"))
        if path.exists() and not path.is_socket():  # ZeroMQ would replace it
            raise ConfigError(f"{flag}: {path} exists and is not a socket; choose another path.")
        return
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError:  # a port beyond 65535, a bracket that is not closed
        host = port = None
    if not address.startswith("tcp://") or host is None or not port:
        raise ConfigError(f"{flag}: {address!r} is not an address; write ipc:///path or tcp://127.0.0.1:port.")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            f"{flag}: {address} can be reached from outside, and events contain what users wrote; use 127.0.0.1."
        )


def _bind(socket: "zmq.SyncSocket", address: str, max_queued: int, flag: str) -> None:
    """`max_queued`: messages that wait for one peer; further ones are dropped. Raises ConfigError."""
    socket.linger = 200  # ms
    socket.set_hwm(max_queued)
    umask = os.umask(0o077)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"{flag}: cannot listen on {address}: {error}.") from error
    finally:
        os.umask(umask)
