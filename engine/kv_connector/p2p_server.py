"""Answers peers in a thread of its own: what there is, and the pieces that they want, as far as they have given credit.

A want is served in the order of its names as far as they are there, and blocks that a pass is computing layer group by
layer group. An item that is neither there nor being computed is left out, and the asker is told at the end. Nothing of
an asker outlives its leases.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
from msgspec.structs import replace

from ...ipc.zmq_channel import Keys
from ..core.kv_connector import item_name
from .base import ConnectorFacts
from .p2p_listener import Listener
from .p2p_store import BlockStore, Part, There
from .p2p_wire import (
    CREDIT_BYTES,
    KEY_BYTES,
    MALFORMED,
    PIECE_BYTES,
    Coming,
    Credit,
    Done,
    Gone,
    Have,
    Hello,
    Layout,
    Lookup,
    Piece,
    Reply,
    Request,
    Want,
    Welcome,
    checksum,
    decode_request,
    encode,
    has_bit,
    split_keys,
)

_MAX_WAITING = 4096  # limit of lookups that wait for blocks; further ones time out at the asker
_MAX_ASKERS = 1024  # with wants; the one that was heard of longest ago is forgotten
_MAX_WANTS = 256  # of an asker; further ones are answered with `Gone`
_MAX_CREDIT = 2 * CREDIT_BYTES  # of an asker, whatever it gives
_PROMISE_S = 1.0  # after the end of its lookup, within which one that was told that blocks are coming asks for them
_SWEEP_S = 1.0  # between looks for leases that have ended


@dataclass
class _Waiting:
    """A lookup that was answered with `is_coming`."""

    sender: bytes
    question: Lookup
    until: float  # monotonic s
    num_changes: int  # of the store at the last check
    num_at_first: int  # bytes that were there when it came
    names: frozenset[bytes]


@dataclass
class _Want:
    """What is left to send of one want."""

    names: list[bytes]
    wanted: frozenset[bytes]  # names
    left: list[int]  # numbers of items, in order
    until: float  # monotonic s, of its lease
    lease_s: float
    reads: bool
    num_changes: int = -1  # of the store, when all that was there was sent
    sent: dict[int, Part] = field(default_factory=dict)  # number of an item of which the first bytes were sent → these
    lacks_some: bool = False

    def num_sent(self, number: int, there: There) -> int:
        """Bytes of an item that need not be sent again: those of the computation that is there."""
        part = self.sent.get(number)
        return part.size if part is not None and part.origin == there.origin else 0


@dataclass
class _Asker:
    credit: int = 0  # bytes
    wants: OrderedDict[int, _Want] = field(default_factory=OrderedDict)


class Server:
    """Serves on one address."""

    def __init__(
        self, address: str, store: BlockStore, facts: ConnectorFacts, keys: Keys | None, agent: bytes = b""
    ) -> None:
        """agent: by which peers read the store's memory. Raises ConfigError if the address cannot be bound."""
        self._store = store
        self._agent = agent
        self._facts, self._layout = facts, Layout.of(facts)
        self._digest = self._layout.digest
        self._askers: OrderedDict[bytes, _Asker] = OrderedDict()
        self._waiting: list[_Waiting] = []
        self._promised: list[tuple[float, frozenset[bytes]]] = []  # until when (monotonic s), names that are coming
        self._awaited: tuple[frozenset[bytes], ...] = ()  # names that peers wait for
        self._swept_at = time.monotonic()
        self.address = address
        self._listener = Listener(address, keys)
        self._socket = self._listener.socket
        self._socket.router_mandatory = True  # so that what an asker that has left wanted is forgotten at once
        self._listener.start(self._run, "p2p server")

    def close(self) -> None:
        """Ends the thread and removes the socket. A second call does nothing."""
        self._listener.close()

    def awaits(self, names: Sequence[bytes]) -> bool:
        """Whether a peer has asked for one of these items and is still waiting. Any thread may call."""
        return any(not wanted.isdisjoint(names) for wanted in self._awaited)

    def _run(self) -> None:
        while True:
            num_changes = self._store.num_changes
            is_waiting = bool(self._awaited)
            has_message = self._listener.wait(1 if is_waiting else None)
            if has_message is None:
                return
            if has_message:
                sender, *frames = self._socket.recv_multipart()
                if (request := _read(frames)) is not None:
                    self._hear(sender, request, num_changes)
            self._waiting = [one for one in self._waiting if not self._settle(one)]
            for sender in list(self._askers):
                self._serve(sender)
            self._sweep()
            self._note_awaited()

    def _note_awaited(self) -> None:
        now = time.monotonic()
        self._promised = [one for one in self._promised if now < one[0]]
        awaited = [one.names for one in self._waiting] + [names for _, names in self._promised]
        awaited += [want.wanted for asker in self._askers.values() for want in asker.wants.values()]
        self._awaited = tuple(awaited)

    # ── what askers say ──────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, sender: bytes, request: Request, num_changes: int) -> None:
        match request:
            case Hello():
                self._send(sender, Welcome(self._layout))
            case Lookup(layout=layout) | Want(layout=layout) if layout != self._digest:
                self._send(sender, Welcome(self._layout))
            case Lookup():
                self._answer(sender, request, num_changes)
            case Want():
                self._begin(sender, request)
            case Credit(num_bytes):
                if (asker := self._askers.get(sender)) is not None:
                    asker.credit = min(_MAX_CREDIT, asker.credit + num_bytes)
                    for want in asker.wants.values():
                        want.until = time.monotonic() + want.lease_s
            case Have(number):
                if (asker := self._askers.get(sender)) is not None and (held := asker.wants.get(number)) is not None:
                    held.until = time.monotonic() + held.lease_s
            case Done(number):
                if (asker := self._askers.get(sender)) is not None:
                    asker.wants.pop(number, None)

    def _answer(self, sender: bytes, question: Lookup, num_changes: int) -> None:
        answer = self._store.look_up(question)
        # Until progress is seen, what is announced does not count.
        self._send(sender, replace(answer.there, is_coming=answer.is_coming))
        if answer.is_coming and len(self._waiting) < _MAX_WAITING:
            until = time.monotonic() + question.wait_ms / 1000
            names = [item_name(key, group) for group in self._facts.tables for key in split_keys(question.keys)]
            self._waiting.append(_Waiting(sender, question, until, num_changes, answer.num_bytes, frozenset(names)))

    def _settle(self, one: _Waiting) -> bool:
        """Sends the final answer if the blocks are there, or half of their bytes are and the others come, or the time
        is up. Returns whether it did."""
        num_changes = self._store.num_changes
        is_late = time.monotonic() >= one.until
        if num_changes == one.num_changes and not is_late:
            return False
        one.num_changes = num_changes
        answer = self._store.look_up(one.question)
        promises = answer.promised != answer.there and answer.num_bytes > one.num_at_first
        is_half = promises and 2 * answer.num_bytes >= answer.num_promised
        if answer.is_coming and not is_late and not is_half:
            return False
        if promises:
            self._promised.append((one.until + _PROMISE_S, one.names))  # it also waits for its peer's other ranks
        self._send(one.sender, answer.promised if promises else answer.there)
        return True

    def _begin(self, sender: bytes, want: Want) -> None:
        asker = self._askers.get(sender)
        if asker is None:
            while len(self._askers) >= _MAX_ASKERS:
                self._askers.popitem(last=False)
            asker = self._askers[sender] = _Asker()
        self._askers.move_to_end(sender)
        asker.credit = min(_MAX_CREDIT, asker.credit + want.credit)
        if len(asker.wants) >= _MAX_WANTS and want.id not in asker.wants:
            self._send(sender, Gone(want.id))
            return
        names = split_keys(want.names)
        left = [i for i in range(len(names)) if not has_bit(want.have, i)]
        num_there = sum(names[i] in self._store for i in left)
        num_coming = sum(self._store.is_coming(names[i]) for i in left if names[i] not in self._store)
        lease_s = want.lease_ms / 1000
        now = time.monotonic()
        asker.wants[want.id] = _Want(
            names, frozenset(names), left, now + lease_s, lease_s, want.reads and bool(self._agent)
        )
        self._send(sender, Coming(want.id, num_there, num_coming, self._agent if want.reads else b""))

    # ── what they get ────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, sender: bytes) -> None:
        """Sends what its credit allows. Wants are served in turn, but none waits for one that lacks blocks."""
        asker = self._askers[sender]
        for number, want in list(asker.wants.items()):
            num_changes = self._store.num_changes
            if num_changes == want.num_changes:
                continue
            if not self._send_pieces(sender, asker, number, want):
                return
            want.num_changes = num_changes
            if not want.left:
                del asker.wants[number]
                if want.lacks_some:
                    self._send(sender, Gone(number))

    def _send_pieces(self, sender: bytes, asker: _Asker, number: int, want: _Want) -> bool:
        """False: its credit is used up, or it has left."""
        at = 0  # in `left`; of those before, all that is there was sent
        while at < len(want.left):
            first = want.left[at]
            is_coming = self._store.is_coming(want.names[first])  # asked first: it is kept before it stops to come
            there = self._store.there(want.names[first])
            if there is None or there.num <= want.num_sent(first, there):
                if there is None and not is_coming:
                    del want.left[at]
                    want.lacks_some = True
                else:
                    at += 1
                continue
            num, part = self._next(want, at, there)
            named = want.names[first : first + num]
            piece = self._store.read(named, part)
            if piece is None:
                continue  # the store has changed
            if asker.credit < len(piece):
                return False
            offset = 0 if part is None else part.offset
            sum_of_piece = checksum(b"".join(named), offset, piece)
            places = self._store.places(named, part) if want.reads else ()
            head = Piece(number, first, num, offset, sum_of_piece, places)
            if not self._send(sender, head, None if places else piece):
                return False
            asker.credit -= len(piece)
            if part is None or offset + part.size == there.size:
                del want.left[at : at + num]
            else:
                now = Part(0, offset + part.size, there.origin)
                want.sent.update(dict.fromkeys(range(first, first + num), now))
        return True

    def _next(self, want: _Want, at: int, there: There) -> tuple[int, Part | None]:
        """What fits into one piece, from the item at this place of those that are left: so many items next to each
        other, whole (None), or this part of each."""
        first, sent = want.left[at], want.num_sent(want.left[at], there)
        is_whole = not sent and there.num == there.size <= PIECE_BYTES
        num, room = 1, PIECE_BYTES - (there.num - sent)
        for place in range(at + 1, len(want.left)):
            follower = want.left[place]
            if follower != first + num or (more := self._store.there(want.names[follower])) is None:
                break
            is_equal = more.num == more.size if is_whole else more == there
            room -= more.num - sent
            if not is_equal or want.num_sent(follower, more) != sent or room < 0:
                break
            num += 1
        return num, None if is_whole else Part(sent, min(there.num - sent, PIECE_BYTES), there.origin)

    def _sweep(self) -> None:
        """Forgets wants whose lease has ended."""
        now = time.monotonic()
        if now < self._swept_at + _SWEEP_S:
            return
        self._swept_at = now
        for asker in self._askers.values():
            for number, want in list(asker.wants.items()):
                if now > want.until:
                    del asker.wants[number]

    def _send(self, receiver: bytes, reply: Reply, content: bytes | None = None) -> bool:
        """False: the receiver has left, and is forgotten, or its queue is full."""
        frames = [receiver, encode(reply)]
        try:
            if content is None:
                self._socket.send_multipart(frames, zmq.DONTWAIT)
            else:
                self._socket.send_multipart([*frames, content], zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._askers.pop(receiver, None)
            return False
        return True


def _read(frames: list[bytes]) -> Request | None:
    """The message of a peer; None if it is malformed."""
    try:
        request = decode_request(frames[0])
    except MALFORMED:
        return None
    keys = request.keys if isinstance(request, Lookup) else request.names if isinstance(request, Want) else b""
    return request if len(frames) == 1 and len(keys) % KEY_BYTES == 0 else None
