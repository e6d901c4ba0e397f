"""Tells routers which KV this engine can find again, over ZeroMQ, in the form that vLLM's KV events have.

The core process owns one `KvEventPublisher` and hands it the scheduler's facts after each batch of messages. Sending
only puts them into a queue of ZeroMQ's. Replays are answered by a thread that sleeps until one is asked for.

Each batch is a multipart message of three frames on a PUB socket: an empty topic; a number, 8 bytes, big endian,
counting batches from 0; and msgpack. The msgpack is an array `[ts, events, data_parallel_rank]`: seconds since 1970,
the events in order, and 0, as there is one core. An event is an array that begins with its name:

    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

A hash is the last 8 bytes of the block's key as an unsigned number: enough to route by, not enough to read KV by. Both
fields about LoRA are nil. `medium` is "GPU" for the device's own pool, whatever the device, "CPU" for the host tier,
and for others the tier's name in capitals; tiers behind the device tell neither tokens (empty) nor parent (nil).

PUB drops what a subscriber does not take in time. Who sees a gap in the numbers asks the replay socket, a ROUTER, with
an empty frame and the number from which it wants them (8 bytes, big endian). It gets `[empty, number, msgpack]` for
each of them that is still among the last 10,000, and at the end the number -1 with an empty frame.
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
"""Batches that can be replayed; also how many one subscriber may be behind before it misses some."""

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


class _BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str


class _AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class KvEventPublisher:
    """The sockets. `publish` and `close` belong to one thread, the core's."""

    def __init__(self, *, address: str, replay: str | None = None) -> None:
        """Binds. Raises ConfigError if an address is none, is open to the network, or cannot be had."""
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
        """Sends these as one batch; none, no batch. Never blocks."""
        if events:
            batch = _encode((time.time(), [_as_sent(event) for event in events], 0))
            number = self._kept.add(batch)
            self._pub.send_multipart((b"", number.to_bytes(8, "big"), batch))

    def close(self) -> None:
        """Lets subscribers that are there take what is queued, for a moment, and frees the addresses."""
        self._pub.close()
        self._context.term()  # also ends the thread
        if self._replays is not None:
            self._replays.join()
        for path in self._paths:
            path.unlink(missing_ok=True)


class _Kept:
    """The last batches. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: deque[bytes] = deque(maxlen=NUM_KEPT)
        self._next = 0  # number of the next batch

    def add(self, batch: bytes) -> int:
        """Its number."""
        with self._lock:
            self._batches.append(batch)
            self._next += 1
            return self._next - 1

    def since(self, number: int) -> tuple[int, list[bytes]]:
        """(number of the first, the batches from `number` on that are left)."""
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
        # Room for two replays: ZeroMQ notices that a client reads only every half of it.
        _bind(self._router, address, 2 * (NUM_KEPT + 2), "--kv-events-replay")
        self.start()

    def run(self) -> None:
        """See `Thread`."""
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                self._answer(self._router.recv_multipart())
        self._router.close()

    def _answer(self, frames: list[bytes]) -> None:
        """One replay. What is no request gets no answer; a client that does not read loses the rest of it."""
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
            parent = None if event.parent is None else _hash(event.parent)
            medium = _medium(event.tier)
            return _BlockStored(
                list(map(_hash, event.keys)), parent, ids.tolist(), event.block_size, None, medium, None
            )
        case Removed():
            return _BlockRemoved(list(map(_hash, event.keys)), _medium(event.tier))
        case Cleared():
            return _AllBlocksCleared()


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def _medium(tier: str) -> str:
    return _MEDIUM.get(tier, tier.upper())


def _check(flag: str, address: str) -> None:
    """Raises ConfigError unless only this machine can reach `address`."""
    if address.startswith("ipc:///"):
        path = Path(address.removeprefix("ipc://"))
        if path.exists() and not path.is_socket():  # ZeroMQ would replace it
            raise ConfigError(f"{flag}: {path} exists and is no socket.")
        return
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError:  # a port beyond 65535, a bracket that is not closed
        host = port = None
    if not address.startswith("tcp://") or host is None or not port:
        raise ConfigError(f"{flag}: {address!r} is no address; write ipc:///path or tcp://127.0.0.1:port.")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(f"{flag}: {address} can be reached from outside, and events tell what users wrote.")


def _bind(socket: "zmq.SyncSocket", address: str, most_queued: int, flag: str) -> None:
    """`most_queued`: messages that wait for one peer; further ones are dropped. Raises ConfigError."""
    socket.linger = 200  # ms
    socket.set_hwm(most_queued)
    umask = os.umask(0o077)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"{flag}: cannot listen on {address}: {error}.") from error
    finally:
        os.umask(umask)
