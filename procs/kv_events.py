"""Publishes which KV blocks this engine's prefix cache holds, over ZeroMQ, in the form of vLLM's KV events that llm-d,
AIBrix and Dynamo all read.

The core process owns one `KvEventPublisher` and passes it the scheduler's events after each batch of messages. A thread
of the publisher encodes and sends them, answers replay requests, and tells late subscribers what they have missed; the
core waits for none of it.

Each batch is a message of three frames on an XPUB socket: the topic `kv@HOST@MODEL`; a number, 8 bytes, big endian,
counting batches from 0; and msgpack. The msgpack is an array `[ts, events, data_parallel_rank]`: seconds since 1970,
the events in order, and the number of the KV domain whose cache they are about, counted over all engines: without
domains the number of the engine. An event is an array that begins with its name:

    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

Events about another group of the cache than that of full attention, and about recurrent states, go on with the group's
number; those of blocks that are stored also with what the group is (vLLM's `kv_cache_spec_kind`) and, of a window, its
positions. A router that wants to know where a prefix is does not need them. Their hashes are others, so that it does
not take them for blocks of full attention: the highest byte is changed by XOR with the number plus one.

A hash is the last 8 bytes of the block's key as an unsigned number: enough for routing, not enough to read KV. Both
LoRA fields are nil. `medium` is "GPU" for the device's own pool (also on a CPU), "CPU" for the host tier, "DISK" and
"SHARED" for those tiers and "EXTERNAL" for all others. `extra_keys` has an entry for each hash: `[name]` for the first
block of a sequence with a salt (the client's `cache_salt`, or a name that says nothing of the API key's salt), else
nil. Events of tiers have no token_ids (empty) and no parent (nil).

ZeroMQ drops messages for a subscriber that is too slow. A subscriber that sees a gap in the numbers sends the replay
socket, a ROUTER, an empty frame and the first number that it wants (8 bytes, big endian). It gets
`[empty, topic, number, msgpack]` for each batch from that number on, without a gap, then `[empty, empty, -1, empty]`.
If the batch that it asked for is no longer kept, it gets the end alone, because a reader of a run that begins later
would drop all that it knows, again and again.

A subscriber that comes late, or that asked for a batch that is no longer kept, is told all blocks that can be found
now: live batches for all subscribers, the first of which begins with `AllBlocksCleared`, so that nobody counts a block
twice. All domains are cleared before any block is told: llm-d and AIBrix take the events of an engine for those of one
cache. llm-d counts how many domains have a block.
"""

import contextlib
import logging
import os
import socket
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

from ..config.config import EngineConfig
from ..engine.core.kv_events import DEVICE, Cleared, KvCacheEvent, Removed, Stored
from ..errors import ConfigError
from ..ipc.hosts import is_loopback
from ..ipc.zmq_channel import Keys, admit_only, read_keys
from .kv_mirror import KvMirror

log = logging.getLogger("pagewire")

NUM_KEPT = 10_000
"""Batches that can be replayed."""

_MAX_QUEUED = 10_000  # batches that wait for one subscriber; further ones are dropped

END = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""

_MAX_KEPT_BYTES = 256 << 20  # of the batches that can be replayed
_SNAPSHOT_BLOCKS = 1_000  # blocks in one batch of a snapshot
_SNAPSHOT_PAUSE_S = 5.0  # between snapshots: subscribers that come and go must not fill the network
_MEDIUM = {DEVICE: "GPU", "host": "CPU", "disk": "DISK", "shared": "SHARED"}
_KINDS = {"window": "sliding_window", "chunk": "chunked_local_attention", "state": "mamba"}
_WAKE = "inproc://wake"
_SUBSCRIBED = b"\x01"  # the first byte of what XPUB receives
_encode = msgspec.msgpack.Encoder().encode

_Batch = tuple[int, Sequence[KvCacheEvent]]
"""Events of a KV domain; none: the end."""


class _BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None]


class _GroupBlockStored(_BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    group_idx: int
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None


class _BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str


class _GroupBlockRemoved(_BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    group_idx: int


class _AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class KvEventPublisher:
    """Owns the sockets. Only the core's thread calls `publish` and `close`."""

    def __init__(
        self,
        *,
        address: str,
        replay: str | None = None,
        topic: str = "kv@pagewire@model",
        keys: Keys | None = None,
        is_insecure: bool = False,
        engine: int = 0,
        num_domains: int = 1,
    ) -> None:
        """Binds. `engine`: its number. `num_domains`: its KV domains. `keys`: subscribers must have the same; None:
        they need none. `is_insecure`: other machines may connect without keys. Raises ConfigError if an address is
        invalid, not available, or open by mistake."""
        addresses = {"--kv-events": address} | ({} if replay is None else {"--kv-events-replay": replay})
        for flag, where in addresses.items():
            if _is_open(flag, where) and keys is None:
                if not is_insecure:
                    raise ConfigError(
                        f"{flag}: {where} can be reached from outside, and events contain what users wrote; use "
                        "127.0.0.1, give subscribers keys with --kv-events-key-file, or write --kv-events-insecure: "
                        "whoever connects then reads prompts."
                    )
                log.warning("KV events on %s contain what users wrote: whoever connects there reads prompts", where)
        self._paths = [Path(a.removeprefix("ipc://")) for a in addresses.values() if a[0] == "i"]
        self._batches: deque[_Batch] = deque()
        self._context = zmq.Context()
        self._authenticator = None if keys is None else admit_only(self._context, keys)
        try:
            self._thread = _Sender(
                self._context, address, replay, topic.encode(), keys, self._batches, engine * num_domains, num_domains
            )
        except ConfigError:
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=0)
            raise
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.connect(_WAKE)
        self._thread.start()

    @classmethod
    def of(cls, config: EngineConfig, address: str, keys: Keys | None) -> "KvEventPublisher":
        """The publisher that the flags ask for. `keys`: those that all actors of the engine share, if it has some:
        subscribers from other machines need them, unless there are keys for events or none are wanted. Raises
        ConfigError."""
        own = config.kv_events_key_file
        addresses = {"--kv-events": address, "--kv-events-replay": config.kv_events_replay}
        is_open = any(where is not None and _is_open(flag, where) for flag, where in addresses.items())
        shared = keys if is_open and not config.kv_events_insecure else None
        host = config.kv_events_host or socket.gethostname()
        return cls(
            address=address,
            replay=config.kv_events_replay,
            topic=f"kv@{host}@{config.served_model_names[0]}",
            keys=shared if own is None else read_keys(Path(own)),
            is_insecure=config.kv_events_insecure,
            engine=config.engine_number,
            num_domains=config.kv_domains,
        )

    def publish(self, events: Sequence[KvCacheEvent], domain: int = 0) -> None:
        """Sends the events of a KV domain as one batch, or nothing if there are none. Never blocks."""
        if events:
            self._batches.append((domain, events))
            self._rouse()

    def close(self) -> None:
        """Gives connected subscribers 200 ms to receive what is queued, and frees the addresses."""
        self._batches.append((0, ()))
        self._rouse()
        self._thread.join()
        self._wake.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _rouse(self) -> None:
        with contextlib.suppress(zmq.Again):  # a thousand calls wait already
            self._wake.send(b"", zmq.DONTWAIT)


class _Kept:
    """The last batches."""

    def __init__(self) -> None:
        self._batches: deque[bytes] = deque()
        self._num_bytes = 0
        self.next = 0  # number of the next batch

    def add(self, batch: bytes) -> int:
        """Returns the number of the batch."""
        self._batches.append(batch)
        self._num_bytes += len(batch)
        while len(self._batches) > NUM_KEPT or (self._num_bytes > _MAX_KEPT_BYTES and len(self._batches) > 1):
            self._num_bytes -= len(self._batches.popleft())
        self.next += 1
        return self.next - 1

    def since(self, number: int) -> list[bytes] | None:
        """The batches from `number` on. None: that one is no longer kept."""
        oldest = self.next - len(self._batches)
        return None if number < oldest else list(islice(self._batches, number - oldest, None))


class _Sender(threading.Thread):
    """The publisher's thread: it alone uses the sockets, the mirror and what is kept."""

    def __init__(
        self,
        context: "zmq.Context[zmq.SyncSocket]",
        address: str,
        replay: str | None,
        topic: bytes,
        keys: Keys | None,
        batches: deque[_Batch],
        first: int,
        num_domains: int,
    ) -> None:
        """Binds. `batches`: to be sent, in order; an empty one ends the thread. `first`: the number of the engine's
        first domain. Raises ConfigError."""
        super().__init__(name="kv-events", daemon=True)
        self._topic = topic
        self._batches = batches
        self._first = first
        self._kept = _Kept()
        self._mirrors = [KvMirror() for _ in range(num_domains)]
        self._wants_snapshot = False
        self._next_snapshot = 0.0  # monotonic s
        self._wake = context.socket(zmq.PAIR)
        self._wake.bind(_WAKE)
        self._pub = context.socket(zmq.XPUB)
        self._pub.xpub_verbose = True  # each subscriber is heard, also one of a topic that others have
        _bind(self._pub, address, _MAX_QUEUED, "--kv-events", keys)
        self._router: zmq.SyncSocket | None = None
        if replay is not None:
            self._router = context.socket(zmq.ROUTER)
            # Space for two replays, because ZeroMQ updates how far a client has read only after each half of the queue.
            _bind(self._router, replay, 2 * (_MAX_QUEUED + 2), "--kv-events-replay", keys)

    def run(self) -> None:
        poller = zmq.Poller()
        sockets = [one for one in (self._wake, self._pub, self._router) if one is not None]
        for one in sockets:
            poller.register(one, zmq.POLLIN)
        is_over = False
        while not is_over:
            ready = dict(poller.poll(self._wait_ms()))
            if self._pub in ready:
                self._hear(self._pub.recv())
            if self._router is not None and self._router in ready:
                self._answer(self._router, self._router.recv_multipart())
            if self._wake in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._wake.recv(zmq.DONTWAIT)
            is_over = self._publish()
            if self._wants_snapshot and time.monotonic() >= self._next_snapshot:
                self._tell_all()
        for one in sockets:
            one.close()

    def _wait_ms(self) -> int | None:
        if not self._wants_snapshot:
            return None
        return max(1, int((self._next_snapshot - time.monotonic()) * 1000) + 1)

    def _publish(self) -> bool:
        """Sends what the core has given. Returns whether that was all."""
        while self._batches:
            domain, events = self._batches.popleft()
            if not events:
                return True
            for event in events:
                self._mirrors[domain].apply(event)
            self._send(domain, [_as_sent(event) for event in events])
        return False

    def _send(self, domain: int, events: Sequence[_BlockStored | _BlockRemoved | _AllBlocksCleared]) -> None:
        batch = _encode((time.time(), events, self._first + domain))
        number = self._kept.add(batch)
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), batch))

    def _hear(self, message: bytes) -> None:
        """A subscriber has come or gone."""
        if message[:1] == _SUBSCRIBED and self._topic.startswith(message[1:]) and self._kept.next:
            self._wants_snapshot = True

    def _tell_all(self) -> None:
        """Sends all blocks. Events that the core gives meanwhile wait, so that they follow what they refer to."""
        self._wants_snapshot = False
        self._next_snapshot = time.monotonic() + _SNAPSHOT_PAUSE_S
        for domain in range(len(self._mirrors) - 1, 0, -1):
            self._send(domain, [_AllBlocksCleared()])
        head = [_AllBlocksCleared()]
        for domain, mirror in enumerate(self._mirrors):
            blocks = mirror.blocks()
            for start in range(0, max(len(head), len(blocks)), _SNAPSHOT_BLOCKS):
                self._send(domain, [*head, *map(_as_sent, blocks[start : start + _SNAPSHOT_BLOCKS])])
                head = []
                time.sleep(0)  # lets the core's thread run

    def _answer(self, router: "zmq.SyncSocket", frames: list[bytes]) -> None:
        """Sends one replay. An invalid request gets no answer; a client that does not read loses the rest."""
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return
        first = int.from_bytes(frames[2], "big")
        batches = self._kept.since(first)
        if batches is None:
            self._wants_snapshot = True
        for number, batch in enumerate(batches or (), first):
            router.send_multipart((frames[0], b"", self._topic, number.to_bytes(8, "big"), batch))
        router.send_multipart((frames[0], b"", b"", END, b""))


def _as_sent(event: KvCacheEvent) -> _BlockStored | _BlockRemoved | _AllBlocksCleared:
    match event:
        case Stored():
            ids = array("i")
            ids.frombytes(event.ids)
            group, medium, shape = event.group, _medium(event.tier), event.shape
            hashes = [_hash(key, group) for key in event.keys]
            parent = None if event.parent is None else _hash(event.parent, group)
            extra: list[list[str] | None] = [None] * len(hashes)
            if event.salt and hashes:
                extra[0] = [event.salt]
            head = hashes, parent, ids.tolist(), event.block_size, None, medium, None, extra
            if group is None:
                return _BlockStored(*head)
            kind = None if shape is None else _KINDS.get(shape.kind)
            window = shape.span if shape is not None and shape.kind == "window" else None
            return _GroupBlockStored(*head, group, kind, window)
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
    return _MEDIUM.get(tier, "EXTERNAL")  # routers take a name that they do not know for the device


def _is_open(flag: str, address: str) -> bool:
    """Whether other machines can reach `address`. Raises ConfigError if it is none."""
    if address.startswith("ipc:///"):
        path = Path(address.removeprefix("ipc://"))
        if path.exists() and not path.is_socket():  # ZeroMQ would replace it
            raise ConfigError(f"{flag}: {path} exists and is not a socket; choose another path.")
        return False
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError:  # a port beyond 65535, a bracket that is not closed
        host = port = None
    if not address.startswith("tcp://") or host is None or not port:
        raise ConfigError(f"{flag}: {address!r} is not an address; write ipc:///path or tcp://127.0.0.1:port.")
    return not is_loopback(host)


def _bind(socket: "zmq.SyncSocket", address: str, max_queued: int, flag: str, keys: Keys | None) -> None:
    """`max_queued`: messages that wait for one peer; further ones are dropped. Raises ConfigError."""
    socket.linger = 200  # ms
    socket.set_hwm(max_queued)
    if keys is not None and address.startswith("tcp://"):
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    umask = os.umask(0o077)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"{flag}: cannot listen on {address}: {error}.") from error
    finally:
        os.umask(umask)
