"""Loads blocks from peers in a thread of its own, and on a GPU in a stream of its own, many loads at once.

A load is a want at its peer. Pieces are verified and written into the pages of requests that compute nothing until
their load is named as over. An item is there once all of its parts have come, of a block the last layers among them. A
load ends when all of its items are there, when the peer says that the rest is gone, when no piece came for
`fetch_timeout_s`, or when the peer breaks the protocol; what is not there then has failed, and is computed instead. If
the connection breaks, it is made again, and the want repeated with what is there.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from ...ipc.messages import bytes_to_ids
from ...ipc.zmq_channel import Keys
from .base import ConnectorFacts
from .block_copy import BlockCopier
from .p2p_meta import P2pLoad
from .p2p_nixl import Read, Reader
from .p2p_settings import secure
from .p2p_wire import (
    CREDIT_BYTES,
    KEY_BYTES,
    LEASE_MS,
    MALFORMED,
    MAX_REPLY_BYTES,
    PIECE_BYTES,
    Coming,
    Credit,
    Done,
    Found,
    Gone,
    Have,
    Layout,
    Piece,
    Request,
    Want,
    Welcome,
    bitmap,
    checksum,
    decode_reply,
    encode,
    split_keys,
)

_CREDIT_STEP = CREDIT_BYTES // 8  # that was read before the server is told
_MAX_STALLS = 30  # the longest load, in times of `fetch_timeout_s`
_RENEW_S = LEASE_MS / 4000
_MAX_RESUMES = 3  # of a load, over new connections
_MAX_PEERS = 64  # connections that are kept while nothing is loaded over them

log = logging.getLogger("pagewire.kv_connector.p2p")


class _PeerFailed(Exception):
    """The reason why a peer's loads ended early."""


@dataclass
class Fetched:
    """A load that is over."""

    rid: int
    failed_pages: list[int]
    num_pages: int  # written first, of what the peer had when it was asked: what `ms` is about
    ms: float  # until these were there


@dataclass
class _Load:
    id: int
    rid: int
    names: list[bytes]
    counts: list[int]  # pages of each
    starts: list[int]  # its first place in `pages`
    pages: Sequence[int]
    deadline: float  # monotonic s
    last: float  # it is never extended beyond
    is_sent: bool = False
    have: set[int] = field(default_factory=set)  # numbers of items that are written
    parts: dict[int, int] = field(default_factory=dict)  # number of an item that has begun to come → its bytes so far
    began_at: float = 0.0
    num_there: int = -1  # items that the peer had at first; -1: it has not answered
    ms: float = 0.0
    num_timed: int = 0  # pages that came in these ms
    num_resumes: int = 0


@dataclass
class _Peer:
    address: str
    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    loads: dict[int, _Load] = field(default_factory=dict)
    num_read: int = 0  # bytes that the server was not told of
    has_credit: bool = False  # the first want has given it
    renewed_at: float = 0.0
    agent: bytes = b""  # of NIXL, as the peer has described it
    agent_name: str = ""
    behind: "deque[_Arrived]" = field(default_factory=deque)  # answers that wait for those before them to be read


@dataclass
class _Arrived:
    reply: Piece | Gone
    content: bytes | None  # None: it is read from the peer's memory
    read: Read | None = None  # under way


class Fetcher:
    def __init__(
        self, timeout_s: float, facts: ConnectorFacts, keys: Keys | None, reader: Reader | None = None
    ) -> None:
        """reader: of pieces that peers do not send, but let this instance read."""
        self._reader = reader
        self._timeout_s = timeout_s
        self._facts = facts
        self._digest = Layout.of(facts).digest
        self._keys = keys
        self._context = zmq.Context()
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[P2pLoad | None] = queue.SimpleQueue()  # None: stop
        self._done: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._peers: dict[str, _Peer] = {}
        self._warned: set[str] = set()  # addresses
        self._num_loads = 0
        self._copier: BlockCopier | None = None
        self._stream: torch.cuda.Stream | None = None  # of the thread, on a GPU
        self.may_write = threading.Event()  # set once other connectors have read the old contents of the blocks
        self.may_write.set()

    def start(self, copier: BlockCopier) -> None:
        """Starts the thread. Called once."""
        self._copier = copier
        if copier.device.type == "cuda":
            self._stream = torch.cuda.Stream(copier.device)  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="p2p fetcher", daemon=True)
        self._thread.start()

    def fetch(self, load: P2pLoad) -> None:
        self._queue.put(load)
        os.write(self._wake, b"x")

    def take_done(self) -> list[Fetched]:
        """The loads that ended since the last call."""
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                done.append(self._done.get_nowait())
        return done

    def close(self) -> None:
        """Ends the thread, even in the middle of a load. A second call does nothing."""
        if self._context.closed:
            return
        self.may_write.set()
        self._queue.put(None)
        os.write(self._wake, b"x")
        if self._thread is not None:
            self._thread.join()
        self._context.term()
        os.close(self._wake)
        os.close(self._woken)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)  # a thread begins on GPU 0
            torch.cuda.set_stream(self._stream)
        try:
            while self._take_new():
                self._wait()
                now = time.monotonic()
                for peer in list(self._peers.values()):
                    try:
                        self._attend(peer, now)
                    except Exception as error:  # after any error, blocks that are not filled are computed instead
                        self._fail(peer, error)
                self._forget_idle()
        finally:
            for peer in self._peers.values():
                self._drop_reads(peer)
                _close(peer)
            if self._reader is not None:
                self._reader.close()

    def _take_new(self) -> bool:
        """Begins the loads that were queued. False: the thread is to end."""
        with contextlib.suppress(queue.Empty):
            while True:
                asked = self._queue.get_nowait()
                if asked is None:
                    return False
                self._begin(asked)
        return True

    def _begin(self, asked: P2pLoad) -> None:
        now = time.monotonic()
        counts = pages_of(asked)
        starts = [0, *accumulate(counts)]
        self._num_loads += 1
        load = _Load(
            self._num_loads, asked.rid, split_keys(asked.keys), counts, starts, bytes_to_ids(asked.blocks),
            now + self._timeout_s, now + _MAX_STALLS * self._timeout_s, began_at=now,
        )  # fmt: skip
        address = asked.peers[self._facts.rank]
        peer = self._peers.get(address)
        if peer is None:
            try:
                peer = self._peers[address] = self._connect(address)
            except Exception as error:  # an address that ZeroMQ does not take
                self._warn(address, error)
                self._finish(load)
                return
        peer.loads[load.id] = load

    def _wait(self) -> None:
        """Until something can be done."""
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        due = []
        for peer in self._peers.values():
            has_unsent = any(not load.is_sent for load in peer.loads.values())
            poller.register(peer.socket, zmq.POLLIN | (zmq.POLLOUT if has_unsent else 0))
            poller.register(peer.monitor, zmq.POLLIN)
            due += [load.deadline for load in peer.loads.values()]
            if peer.loads:
                due.append(peer.renewed_at + _RENEW_S)
        timeout = max(0, int((min(due) - time.monotonic()) * 1000) + 1) if due else None
        if any(peer.behind for peer in self._peers.values()):
            timeout = 1  # no descriptor announces the end of a read
        ready = dict(poller.poll(timeout))
        if self._woken in ready:
            os.read(self._woken, 4096)

    def _attend(self, peer: _Peer, now: float) -> None:
        """Raises _PeerFailed."""
        if self._has_broken(peer):
            self._resume(peer)
        for load in list(peer.loads.values()):
            if not load.is_sent:
                self._ask(peer, load)
        with contextlib.suppress(zmq.Again):
            while True:
                frames = peer.socket.recv_multipart(zmq.DONTWAIT)
                self._hear(peer, frames)
                self._pay(peer, _CREDIT_STEP)
        self._advance(peer)
        self._pay(peer, _CREDIT_STEP)
        now = time.monotonic()
        if any(now >= load.deadline for load in peer.loads.values()):
            raise _PeerFailed("the peer did not answer in time")
        if peer.loads and now >= peer.renewed_at + _RENEW_S:
            peer.renewed_at = now
            for load in peer.loads.values():
                self._tell(peer, Have(load.id))

    def _connect(self, address: str) -> _Peer:
        socket = self._context.socket(zmq.DEALER)
        monitor: zmq.Socket[bytes] | None = None
        try:
            socket.linger = 0
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.immediate = True  # messages are not queued for a peer that is not connected
            socket.maxmsgsize = MAX_REPLY_BYTES
            secure(socket, address, self._keys, is_server=False)
            socket.connect(address)
        except BaseException:
            socket.disable_monitor()
            if monitor is not None:
                monitor.close()
            socket.close()
            raise
        return _Peer(address, socket, monitor, renewed_at=time.monotonic())

    def _has_broken(self, peer: _Peer) -> bool:
        has_broken = False
        while peer.monitor.poll(0):
            has_broken |= recv_monitor_message(peer.monitor)["event"] == zmq.EVENT_DISCONNECTED
        return has_broken

    def _resume(self, peer: _Peer) -> None:
        """Repeats all wants over a new connection, which the server knows by another name. Where none was sent yet,
        ZeroMQ connects again by itself, and the loads' deadlines bound it. Raises _PeerFailed."""
        self._drop_reads(peer)
        peer.has_credit, peer.num_read = False, 0
        lost = [load for load in peer.loads.values() if load.is_sent]
        if not lost:
            return
        new = self._connect(peer.address)  # may fail, after which the old one is closed
        _close(peer)
        peer.socket, peer.monitor = new.socket, new.monitor
        for load in lost:
            load.is_sent = False
            load.parts.clear()  # the server may have to compute their blocks again
            load.num_resumes += 1
            if load.num_resumes > _MAX_RESUMES:
                raise _PeerFailed("the connection broke again and again")

    def _ask(self, peer: _Peer, load: _Load) -> None:
        names = b"".join(load.names)
        have = bitmap(load.have, len(load.names)) if load.have else b""
        credit = 0 if peer.has_credit else CREDIT_BYTES
        load.is_sent = self._tell(peer, Want(load.id, self._digest, names, have, credit, LEASE_MS, self._reads))
        peer.has_credit |= load.is_sent

    def _tell(self, peer: _Peer, request: Request) -> bool:
        """False: the peer is not connected, or its queue is full."""
        try:
            peer.socket.send(encode(request), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _pay(self, peer: _Peer, least: int) -> None:
        """Gives the server the credit of what was read."""
        if peer.num_read >= least and self._tell(peer, Credit(peer.num_read)):
            peer.num_read = 0

    def _hear(self, peer: _Peer, frames: list[bytes]) -> None:
        """Raises _PeerFailed."""
        try:
            reply = decode_reply(frames[0])
        except MALFORMED as error:
            raise _PeerFailed("the peer's answer is malformed") from error
        if len(frames) != (2 if isinstance(reply, Piece) and not reply.places else 1):
            raise _PeerFailed("the peer's answer is malformed")
        match reply:
            case Piece():
                peer.behind.append(_Arrived(reply, None if reply.places else frames[1]))
                self._advance(peer)
            case Coming(number, num_there, _, agent):
                self._know(peer, agent)
                if (load := peer.loads.get(number)) is not None:
                    load.num_there = num_there if load.num_there < 0 else load.num_there
                    load.deadline = min(load.last, time.monotonic() + self._timeout_s)
            case Gone():
                peer.behind.append(_Arrived(reply, None))
                self._advance(peer)
            case Welcome(layout):
                difference = Layout.of(self._facts).difference(layout)
                raise _PeerFailed(f"the peer cannot serve this instance: {difference}")
            case Found():
                raise _PeerFailed("the peer's answer belongs to another question")

    def _advance(self, peer: _Peer) -> None:
        """Begins reads, and handles what has arrived or was read, in the order of the answers. Raises _PeerFailed."""
        for arrived in peer.behind:
            if arrived.content is None and arrived.read is None and isinstance(arrived.reply, Piece):
                arrived.read = self._read(peer, arrived.reply)
                if arrived.read is None:
                    break
        while peer.behind:
            arrived = peer.behind[0]
            if isinstance(arrived.reply, Gone):
                if (load := peer.loads.pop(arrived.reply.id, None)) is not None:
                    self._finish(load)
            else:
                content = arrived.content
                if content is None:
                    if arrived.read is None or (content := self._reader_of(peer).take(arrived.read)) is None:
                        return
                    arrived.read = None
                peer.num_read += len(content)
                if (load := peer.loads.get(arrived.reply.id)) is not None:  # else it was given up
                    self._take(peer, load, arrived.reply, content)
            peer.behind.popleft()

    def _read(self, peer: _Peer, piece: Piece) -> Read | None:
        """Begins to read a piece. None: as many as possible are under way. Raises _PeerFailed."""
        sizes = [size for _, size in piece.places]
        if min(sizes) <= 0 or sum(sizes) > PIECE_BYTES:
            raise _PeerFailed("the peer named places of another size")
        return self._reader_of(peer).begin(peer.agent_name, piece.places)

    def _reader_of(self, peer: _Peer) -> Reader:
        if self._reader is None or not peer.agent_name:
            raise _PeerFailed("the peer named places in memory that is not known here")
        return self._reader

    def _know(self, peer: _Peer, agent: bytes) -> None:
        """Notes by which agent the peer's memory is read. Another one: it was restarted."""
        if agent and agent != peer.agent and self._reader is not None:
            if peer.agent_name:
                self._reader.forget(peer.agent_name)
            peer.agent, peer.agent_name = agent, self._reader.know(agent)

    @property
    def _reads(self) -> bool:
        return self._reader is not None and self._reader.can_read

    def _drop_reads(self, peer: _Peer) -> None:
        """Forgets what has arrived and was not handled: the connection is given up."""
        if self._reader is not None:
            for arrived in peer.behind:
                if arrived.read is not None:
                    self._reader.drop(arrived.read)
            if peer.agent_name:
                self._reader.forget(peer.agent_name)
        peer.agent, peer.agent_name = b"", ""
        peer.behind.clear()

    def _take(self, peer: _Peer, load: _Load, piece: Piece, content: bytes) -> None:
        """Writes a verified piece. Raises _PeerFailed."""
        numbers = range(piece.first, piece.first + piece.num)
        if not (piece.first >= 0 and 0 < piece.num <= len(load.names) - piece.first):
            raise _PeerFailed("the peer sent blocks that were not asked for")
        if not load.have.isdisjoint(numbers):
            raise _PeerFailed("the peer sent blocks twice")
        sizes = [load.counts[i] * self._facts.block_bytes for i in numbers]
        is_part = len(content) < sum(sizes)
        if not is_part and (len(content) != sum(sizes) or piece.offset):
            raise _PeerFailed("the peer sent blocks of another size")
        names = b"".join(load.names[i] for i in numbers)
        if not 0 <= piece.offset < 1 << 63 or checksum(names, piece.offset, content) != piece.checksum:
            if not piece.places:
                raise _PeerFailed("the peer sent damaged blocks")
            del peer.loads[load.id]  # the peer gave its memory to other blocks before it was read
            self._tell(peer, Done(load.id))
            self._finish(load)
            return
        if is_part:
            size, rest = divmod(len(content), piece.num)
            if not size or rest or len({*sizes}) > 1 or piece.offset + size > sizes[0]:
                raise _PeerFailed("the peer sent blocks of another size")
            if piece.offset and any(load.parts.get(i, 0) != piece.offset for i in numbers):
                raise _PeerFailed("the peer sent parts of a block in another order")
            self._write(load, numbers, content, piece.offset)
            load.parts.update(dict.fromkeys(numbers, piece.offset + size))
            if piece.offset + size < sizes[0]:
                load.deadline = min(load.last, time.monotonic() + self._timeout_s)
                return
        else:
            self._write(load, numbers, content)
        for i in numbers:
            load.parts.pop(i, None)
        now = time.monotonic()
        load.deadline = min(load.last, now + self._timeout_s)
        load.have.update(numbers)
        if len(load.have) <= load.num_there:
            load.ms = (now - load.began_at) * 1000
            load.num_timed = sum(load.counts[i] for i in load.have)
        if len(load.have) == len(load.names):
            del peer.loads[load.id]
            self._tell(peer, Done(load.id))
            self._finish(load)

    def _write(self, load: _Load, numbers: range, content: bytes, offset: int | None = None) -> None:
        """offset: of these parts in each item; None: the items are whole."""
        copier, page_bytes = self._copier, self._facts.block_bytes
        assert copier is not None, "started with one"
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pages = load.pages[load.starts[numbers[0]] : load.starts[numbers[-1] + 1]]
        self.may_write.wait()
        if offset is None:
            copier.write(pages, data.view(-1, page_bytes))
        else:
            of_items, num_pages = data.view(len(numbers), -1), len(pages) // len(numbers)
            last = offset + of_items.shape[1]
            for i in range(offset // page_bytes, -(-last // page_bytes)):
                begin, end = max(offset, i * page_bytes), min(last, (i + 1) * page_bytes)
                part = of_items[:, begin - offset : end - offset].contiguous()
                copier.write(pages[i::num_pages], part, begin - i * page_bytes)
        if self._stream is not None:  # what reads the pages is launched after the load was named as over
            self._stream.synchronize()  # not the device: it may have a stream that records

    def _finish(self, load: _Load) -> None:
        failed = [
            page
            for i in range(len(load.names))
            if i not in load.have
            for page in load.pages[load.starts[i] : load.starts[i + 1]]
        ]
        self._done.put(Fetched(load.rid, failed, load.num_timed, load.ms))

    def _fail(self, peer: _Peer, error: Exception) -> None:
        """Ends all loads of the peer, and the connection, whose late answers are not wanted."""
        self._warn(peer.address, error)
        del self._peers[peer.address]
        self._drop_reads(peer)
        _close(peer)
        for load in peer.loads.values():
            self._finish(load)

    def _warn(self, address: str, error: Exception) -> None:
        if address not in self._warned and len(self._warned) < _MAX_PEERS:
            self._warned.add(address)
            log.warning("KV was not fetched from %s (%r); further failures are only counted", address, error)

    def _forget_idle(self) -> None:
        for address, peer in list(self._peers.items()):
            if len(self._peers) <= _MAX_PEERS:
                return
            if not peer.loads:
                del self._peers[address]
                self._drop_reads(peer)
                _close(peer)


def pages_of(load: P2pLoad) -> list[int]:
    """How many pages each item of a load has."""
    return list(bytes_to_ids(load.pages)) if load.pages else [1] * (len(load.keys) // KEY_BYTES)


def _close(peer: _Peer) -> None:
    peer.socket.disable_monitor()
    peer.monitor.close()
    peer.socket.close()
