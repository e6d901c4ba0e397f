"""The worker half of the p2p connector: the blocks that this instance serves, and the thread that fetches from a peer.

There are three threads. The runner's thread stores blocks and queues loads. The server's answers peers from the stored
blocks. The fetcher's asks a peer and writes verified blocks into the pages of requests that compute nothing until
`get_finished` has named them. Every error in the last two ends in blocks that are reported as failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
import torch
import zmq

from ...errors import ConfigError
from ...ipc.messages import bytes_to_ids
from ..attention.kv_cache import KvCache
from ..core.kv_connector import Item, item_name
from .base import ConnectorFacts
from .block_copy import BlockCopier
from .p2p_meta import P2pLoad, P2pPlan
from .p2p_wire import (
    CHECKSUM_BYTES,
    KEY_BYTES,
    MAX_KEYS,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    Blocks,
    Fetch,
    Found,
    Lookup,
    Reply,
    Request,
    Settings,
    check_free,
    checksum,
    decode_reply,
    decode_request,
    encode,
    split_keys,
)
from .states import StateIndex

_MAX_WAITING = 4096  # limit of lookups that wait for blocks; further ones time out at the asker

log = logging.getLogger("pagewire.kv_connector.p2p")

_decode_plan = msgspec.msgpack.Decoder(P2pPlan).decode


class P2pWorker:
    def __init__(self, settings: Settings, facts: ConnectorFacts) -> None:
        """Raises ConfigError if the socket cannot be bound."""
        self._store = BlockStore(facts)
        self._server = None if settings.serve is None else Server(settings.serve, self._store)
        self._fetcher = None if settings.peer is None else Fetcher(settings.peer, settings.fetch_timeout_s, facts)
        self._copier: BlockCopier | None = None
        self._plan: P2pPlan | None = None
        self._num_under_way = 0
        self._failed: set[int] = set()  # failed blocks of the loads that `get_finished` named last
        self._num_loaded = 0
        self._load_ms = 0.0

    @property
    def num_pending(self) -> int:
        return self._num_under_way

    def register_kv_caches(self, cache: KvCache) -> None:
        self._copier = BlockCopier(cache)
        if self._fetcher is not None:
            self._fetcher.start(BlockCopier(cache))

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self._plan = _decode_plan(metadata)

    def start_load_kv(self) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None and self._copier is not None, "start_load_kv before metadata or cache"
        self._store.expect([(rid, split_keys(keys)) for rid, keys in plan.coming])
        self._store.drop(split_keys(plan.drop))
        if plan.keep_keys:
            names = split_keys(plan.keep_keys)
            parts = self._copier.read(bytes_to_ids(plan.keep_blocks))
            pages = iter([page.tobytes() for part in parts for page in part.numpy()])
            counts = bytes_to_ids(plan.keep_pages) if plan.keep_pages else [1] * len(names)
            self._store.keep(names, [b"".join(islice(pages, num)) for num in counts], plan.states)
        self._store.give_up(plan.over)
        for load in plan.loads:
            assert self._fetcher is not None, "a load without a peer"
            self._fetcher.may_write.clear()
            self._num_under_way += 1
            self._fetcher.fetch(load)

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> None:
        if self._fetcher is not None:
            self._fetcher.may_write.set()

    def get_finished(self) -> tuple[set[int], set[int]]:
        done = set()
        for load, num_good, ms in [] if self._fetcher is None else self._fetcher.take_done():
            done.add(load.rid)
            pages = bytes_to_ids(load.blocks)
            num_pages = sum(_pages_of(load)[:num_good])
            self._failed.update(pages[num_pages:])
            self._num_loaded += num_pages
            self._load_ms += ms
        self._num_under_way -= len(done)
        return set(), done

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        cost = self._num_loaded, self._load_ms
        self._num_loaded, self._load_ms = 0, 0.0
        return cost

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._fetcher is not None:
            self._fetcher.close()


class BlockStore:
    """Blocks in host memory by key. The core half decides what it holds; any thread may call."""

    def __init__(self, facts: ConnectorFacts) -> None:
        self._facts = facts
        self._blocks: dict[bytes, bytes] = {}
        self._states = StateIndex(facts.state)
        self._coming: dict[int, list[bytes]] = {}  # rid → the keys of the blocks that it computes
        self._num_coming: Counter[bytes] = Counter()  # key → how many of these requests compute it
        self._lock = threading.Lock()
        self.num_changes = 0  # of the contents that answers depend on

    def keep(
        self, keys: Sequence[bytes], blocks: Sequence[bytes], states: Sequence[tuple[bytes, bytes, int]] = ()
    ) -> None:
        with self._lock:
            self.num_changes += 1
            self._blocks.update(zip(keys, blocks, strict=True))
            for behind, key, num in states:
                self._states.add(Item(key, 0, behind, self._facts.state or 0, num))

    def drop(self, keys: Sequence[bytes]) -> None:
        """Removes blocks; all of them must be present."""
        with self._lock:
            for key in keys:
                del self._blocks[key]
                self._states.remove(key)

    def expect(self, coming: Sequence[tuple[int, list[bytes]]]) -> None:
        """Announces the blocks of requests that are being computed."""
        with self._lock:
            for rid, keys in coming:
                self._coming[rid] = keys
                self._num_coming.update(keys)

    def give_up(self, rids: Sequence[int]) -> None:
        """Withdraws the announcements of these requests; all of them must be announced."""
        with self._lock:
            self.num_changes += 1
            for rid in rids:
                for key in self._coming.pop(rid):
                    self._num_coming[key] -= 1
                    if not self._num_coming[key]:
                        del self._num_coming[key]

    def answer(self, request: Request) -> Reply:
        """The answer to a peer's message."""
        keys = split_keys(request.keys)
        is_ours = (request.model_key, request.block_bytes) == (self._facts.model_key, self._facts.block_bytes)
        if isinstance(request, Lookup):
            with self._lock:
                return self._look_up(request, keys[:MAX_KEYS]) if is_ours else Found(request.id, 0)
        found: list[bytes] = []
        room = MAX_REPLY_BYTES
        with self._lock:
            for key in keys if is_ours else ():
                if (block := self._blocks.get(key)) is None or (found and len(block) > room):
                    break
                found.append(block)
                room -= len(block)
        checksums = b"".join(checksum(key, block) for key, block in zip(keys, found, strict=False))
        return Blocks(request.id, checksums, b"".join(found))

    def _look_up(self, request: Lookup, keys: list[bytes]) -> Found:
        facts, blocks = self._facts, self._blocks
        full = facts.full
        run = len(keys)
        if full is not None:
            run = next((i for i, key in enumerate(keys) if item_name(key, full) not in blocks), len(keys))
        is_coming = False
        if full is not None and run < len(keys):
            is_coming = request.is_expected or item_name(keys[run], full) in self._num_coming
        others = [group for group in range(facts.num_groups) if group not in (full, facts.state)]
        names = [item_name(key, group) for group in others for key in keys[:run]]
        behind = [request.behind, *keys[:run]] if facts.state is not None else ()
        states = [(before, key, num) for before in behind for key, num in self._states.behind(before).items()]
        tables = [group for group in range(facts.num_groups) if group != facts.state]
        names += [item_name(key, group) for _, key, num in states if num for group in tables]
        return Found(request.id, run, is_coming, b"".join([name for name in names if name in blocks]), tuple(states))


class Server:
    """Answers peers in a thread of its own."""

    def __init__(self, address: str, store: BlockStore) -> None:
        """Raises ConfigError if the address cannot be bound."""
        check_free(address)
        self._path = Path(address.removeprefix("ipc://"))
        self._store = store
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_REQUEST_BYTES
        self._socket.sndhwm = 4  # unread answers per peer: they may be large, and a peer asks one at a time
        umask = os.umask(0o177)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"--kv-connector p2p: cannot serve on {address}: {error}.") from error
        finally:
            os.umask(umask)
        self._thread = threading.Thread(target=self._run, name="p2p server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and removes the socket. A second call does nothing."""
        if not self._context.closed:
            self._context.term()  # wakes the thread
            self._thread.join()
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        waiting: list[_Waiting] = []
        with self._socket as socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                if socket.poll(1 if waiting else None):
                    sender, *frames = socket.recv_multipart()
                    num_changes = self._store.num_changes
                    if (question := _read(frames)) is not None:
                        reply = self._store.answer(question)
                        _send(socket, sender, reply)
                        waits = isinstance(question, Lookup) and isinstance(reply, Found) and reply.is_coming
                        if waits and isinstance(question, Lookup) and len(waiting) < _MAX_WAITING:
                            until = time.monotonic() + question.wait_ms / 1000
                            waiting.append(_Waiting(sender, question, until, num_changes))
                waiting = [one for one in waiting if not self._settle(socket, one)]

    def _settle(self, socket: zmq.Socket[bytes], one: _Waiting) -> bool:
        """Sends the final answer if the blocks are there or the time is up. Returns whether it did."""
        num_changes = self._store.num_changes
        is_late = time.monotonic() >= one.until
        if num_changes == one.num_changes and not is_late:
            return False
        one.num_changes = num_changes
        reply = self._store.answer(one.question)
        assert isinstance(reply, Found), reply
        if reply.is_coming and not is_late:
            return False
        _send(socket, one.sender, Found(reply.id, reply.num))
        return True


@dataclass
class _Waiting:
    """A lookup that was answered with `is_coming`."""

    sender: bytes
    question: Lookup
    until: float  # monotonic s
    num_changes: int  # of the store at the last check


def _read(frames: list[bytes]) -> Request | None:
    """The message of a peer; None if it is malformed."""
    try:
        question = decode_request(frames[0])
    except (msgspec.MsgspecError, ValueError, RecursionError):  # the last two: bad UTF-8, deep nesting
        return None
    return question if len(frames) == 1 and len(question.keys) % KEY_BYTES == 0 else None


def _send(socket: zmq.Socket[bytes], receiver: bytes, reply: Reply) -> None:
    """Sends an answer; it is dropped if the receiver is not connected."""
    socket.send_multipart([receiver, encode(reply)], zmq.DONTWAIT)


class _PeerFailed(Exception):
    """The reason why a fetch ended early."""


class Fetcher:
    """Fetches blocks from a peer in a thread of its own, one load after another."""

    def __init__(self, address: str, timeout_s: float, facts: ConnectorFacts) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._facts = facts
        self._context = zmq.Context()
        self._thread: threading.Thread | None = None
        self._loads: queue.SimpleQueue[tuple[P2pLoad, float] | None] = queue.SimpleQueue()  # None: stop
        self._done: queue.SimpleQueue[tuple[P2pLoad, int, float]] = queue.SimpleQueue()
        self._failed_at = 0.0  # monotonic s: loads queued before a failure fail with it
        self._has_warned = False
        self._num_requests = 0
        self.may_write = threading.Event()  # set once other connectors have read the old contents of the blocks
        self.may_write.set()

    def start(self, copier: BlockCopier) -> None:
        """Starts the thread. Called once."""
        self._thread = threading.Thread(target=self._run, args=(copier,), name="p2p fetcher", daemon=True)
        self._thread.start()

    def fetch(self, load: P2pLoad) -> None:
        self._loads.put((load, time.monotonic()))

    def take_done(self) -> list[tuple[P2pLoad, int, float]]:
        """The loads that ended: load, number of blocks filled from the first on, milliseconds."""
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                done.append(self._done.get_nowait())
        return done

    def close(self) -> None:
        """Ends the thread, even in the middle of a load."""
        self._loads.put(None)
        self.may_write.set()
        self._context.term()
        if self._thread is not None:
            self._thread.join()

    def _run(self, copier: BlockCopier) -> None:
        socket: zmq.Socket[bytes] | None = None
        try:
            while (item := self._loads.get()) is not None:
                load, queued_at = item
                started = time.monotonic()
                filled: list[int] = []  # blocks filled by each reply
                try:
                    if queued_at >= self._failed_at:
                        socket = socket or self._connect()
                        self._fill(socket, copier, load, queued_at, filled)
                except zmq.ContextTerminated:
                    return
                except Exception as error:  # after any error, blocks that are not filled are computed instead
                    self._failed_at = time.monotonic()
                    if not self._has_warned:
                        log.warning(
                            "KV was not fetched from %s (%r); further failures are only counted", self._address, error
                        )
                        self._has_warned = True
                    if socket is not None:  # drops late replies
                        socket.close()
                        socket = None
                self._done.put((load, sum(filled), (time.monotonic() - started) * 1000))
        finally:
            if socket is not None:
                socket.close()

    def _connect(self) -> zmq.Socket[bytes]:
        """Raises ContextTerminated, with no socket left, which `close` would wait for."""
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.linger = 0
            socket.immediate = True
            largest = max(map(self._facts.bytes_of, range(self._facts.num_groups)))
            socket.maxmsgsize = max(MAX_REPLY_BYTES, largest) + MAX_REQUEST_BYTES
            socket.connect(self._address)
        except BaseException:
            socket.close()
            raise
        return socket

    def _fill(
        self, socket: zmq.Socket[bytes], copier: BlockCopier, load: P2pLoad, queued_at: float, filled: list[int]
    ) -> None:
        """Fetches, verifies and writes the blocks, one reply at a time. Raises _PeerFailed."""
        deadline = queued_at + self._timeout_s
        names, counts = split_keys(load.keys), _pages_of(load)
        blocks = bytes_to_ids(load.blocks)
        at_once = max(1, MAX_REPLY_BYTES // self._facts.block_bytes)
        first = first_page = 0
        while first < len(names):
            wanted = dict(zip(names[first : first + at_once], counts[first : first + at_once], strict=True))
            self._num_requests += 1
            request = Fetch(self._num_requests, self._facts.model_key, self._facts.block_bytes, b"".join(wanted))
            _wait(socket, zmq.POLLOUT, deadline)
            socket.send(encode(request), zmq.DONTWAIT)
            _wait(socket, zmq.POLLIN, deadline)
            content, num = self._verified(socket.recv_multipart()[0], request.id, wanted)
            rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, self._facts.block_bytes)
            self.may_write.wait()
            copier.write(blocks[first_page : first_page + len(rows)], rows)
            first_page += len(rows)
            if copier.device.type == "cuda":
                torch.cuda.synchronize(copier.device)
            filled.append(num)
            first += num

    def _verified(self, message: bytes, number: int, wanted: dict[bytes, int]) -> tuple[bytearray, int]:
        """The items of a reply, which are the first of those asked for, and how many. wanted: the pages of each. Raises
        _PeerFailed."""
        try:
            reply = decode_reply(message)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _PeerFailed("the peer's answer is malformed") from error
        if not isinstance(reply, Blocks) or reply.id != number:
            raise _PeerFailed("the peer's answer belongs to another request")
        if not reply.content:
            raise _PeerFailed("the peer no longer has the blocks")
        view, sums, end = memoryview(reply.content), b"", 0
        num = len(reply.checksums) // CHECKSUM_BYTES
        for name, pages in islice(wanted.items(), num):
            start, end = end, end + pages * self._facts.block_bytes
            sums += checksum(name, view[start:end])
        if num > len(wanted) or end != len(reply.content) or len(sums) != len(reply.checksums):
            raise _PeerFailed("the peer sent blocks of another size")
        if sums != reply.checksums:
            raise _PeerFailed("the peer sent damaged blocks")
        return bytearray(reply.content), num


def _pages_of(load: P2pLoad) -> list[int]:
    """How many pages each item of a load has."""
    return list(bytes_to_ids(load.pages)) if load.pages else [1] * (len(load.keys) // KEY_BYTES)


def _wait(socket: zmq.Socket[bytes], event: int, deadline: float) -> None:
    """Waits until the socket is ready. Raises _PeerFailed at the deadline."""
    if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000)), event):
        raise _PeerFailed("the peer did not answer in time")
