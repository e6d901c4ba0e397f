"""KV from another instance: prefill there, decode here.

`p2p,serve=ADDRESS,size=1G` keeps the full blocks of requests in host memory and answers on ADDRESS; `p2p,peer=ADDRESS`
asks there, and `p2p,peer=named` where a request says. An address is the path of a socket on this machine, or
tcp://HOST:PORT with `key-file=FILE`. Blocks are identified by their keys, so the instances need not know each other's
requests: a proxy in front of them sends a prompt to the prefill instance with max_tokens = 1, and at the same time or
after its answer the same prompt to the decode instance, which finds the blocks. The prefill instance announces the
blocks of each request that it admits and keeps them as soon as a chunk has filled them, so they are sent while the rest
of the prompt is still computed, and their first layers while the chunk is: a lookup of announced blocks waits for up to
`wait_ms` until half of them exist. A peer that is dead, slow or wrong costs time, bounded by `timeout_ms` and
`fetch_timeout_ms`, and never changes a token.

If the instances have several ranks, as many on both sides, rank r serves its part of each block to rank r, each at an
address of its own (`rank_address`). All ranks of the peer are asked what there is: so each knows who waits for the
blocks that it computes, and what counts is what all of them have. If the ranks are not all on the core's machine, each
serves on its own machine, and at ADDRESS the core half says where they are (`p2p_directory.py`).

This is the core half. It decides what the instance keeps (the worker half's memory holds exactly the blocks in `_kept`
once the plans sent so far have run; the first of them empties it, because a worker of one rank outlives its core) and
asks the peer what it has, without waiting for the answer.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import zmq
from msgspec import Struct

from ...errors import ConfigError
from ...ipc.messages import TierSnapshot, Transferred, bytes_to_ids, ids_to_bytes
from ..core.groups import PLAIN, Groups
from ..core.kv_connector import Evicted, Held, Item, KvEvent, KvRequest, item_name
from .base import ConnectorFacts, Options
from .ledger import tail_first
from .p2p_directory import Directory
from .p2p_link import Link, Peer
from .p2p_meta import P2pComing, P2pFill, P2pLoad, P2pPlan
from .p2p_settings import Settings, has_directory, keys_of, rank_addresses, read_settings
from .p2p_wire import KEY_BYTES, MAX_KEYS, Found, Layout, Lookup, split_keys
from .states import StateIndex

if TYPE_CHECKING:
    from .p2p_worker import P2pWorker

_MAX_QUESTIONS = 1024  # remembered at once; without `size` requests that end while they wait are never named again
_MAX_EXPECTED = 4096  # announced requests that have not ended
_ANSWER_AGE_S = 5.0  # after this an answer is asked for again: the peer's blocks may have changed
_MAX_PEERS = 64  # that are connected because requests name them; the one that was used longest ago goes first


class P2pConnector:
    """`p2p,serve=ADDRESS[,size=1G]`, `p2p,peer=ADDRESS`, or both."""

    @staticmethod
    def check(options: Options) -> None:
        """Makes the key file if there is none."""
        keys_of(read_settings(options))

    @staticmethod
    def core(options: Options, facts: ConnectorFacts) -> P2pCore:
        return P2pCore(read_settings(options, facts), facts)

    @staticmethod
    def worker(options: Options, facts: ConnectorFacts) -> P2pWorker:
        from .p2p_worker import P2pWorker

        return P2pWorker(read_settings(options, facts), facts)


class _Question(Struct):
    """A lookup at the peer for one request."""

    first: int  # first block that is asked for
    num_asked: int
    deadline: float  # monotonic s
    id: int
    peer: Peer
    links: tuple[Link, ...] = ()  # over which the ranks are asked
    unasked: set[int] = set()  # ranks of the peer to which it was not sent yet
    replies: dict[int, Found] = {}  # rank → its final answer, until all have answered
    is_coming: bool = False  # the peer is computing the missing blocks
    num_found: int | None = None  # on all ranks; None: not all have answered
    names: frozenset[bytes] = frozenset()  # of items of other groups, and of beginnings, that were found
    states: StateIndex | None = None  # that were found
    answered_at: float = 0.0


class _Expected(Struct):
    """An announced request."""

    first: tuple[int, ...]  # of each group with blocks: the first block that others need of it
    num_kept: int = 0  # its leading blocks, as far as others need them, are kept


class P2pCore:
    def __init__(self, settings: Settings, facts: ConnectorFacts) -> None:
        self._settings = settings
        self._facts = facts
        self._kept: OrderedDict[bytes, Item] = OrderedDict()  # what it serves, by name; the first is evicted next
        self._num_pages = 0  # of all that is kept
        self._keep: dict[bytes, Held] = {}  # of these, the ones that the next plan saves
        self._drop: list[bytes] = []
        self._groups = Groups(facts.groups) if facts.groups else PLAIN
        self._expected: OrderedDict[int, _Expected] = OrderedDict()  # by rid: what is announced to the worker half
        self._coming: list[P2pComing] = []
        self._over: list[int] = []
        self._loads: list[P2pLoad] = []  # for the next plan
        self._fills: list[P2pFill] = []
        self._spoiled: list[int] = []
        self._is_first = True  # no plan was built yet
        self._loading: dict[int, tuple[str, Sequence[Held]]] = {}  # rid → where from what is fetched for it
        self._questions: OrderedDict[int, _Question] = OrderedDict()  # by rid
        self._rids: dict[int, int] = {}  # id of an unanswered question → its rid
        self._num_questions = 0
        self._num_hit_tokens = self._num_stored = self._num_evicted = self._num_failed = self._num_bytes = 0
        self._peers: OrderedDict[str, Peer] = OrderedDict()  # by address
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._directory: Directory | None = None
        self._keys = keys_of(settings)
        public = b"" if self._keys is None else self._keys.public.encode()
        self._kv_digest = sha256(Layout.of(facts).digest + public).hexdigest()
        if has_directory(settings, facts):
            assert settings.serve is not None, "a directory without an address"
            self._directory = Directory(settings.serve, facts, self._keys)
        if settings.asks:
            self._context = zmq.Context()
            if settings.peer is not None:
                self._check(settings.peer)

    @property
    def wants_chunks(self) -> bool:
        """Whether `filling` and `filled` are to be called."""
        return bool(self._settings.capacity)

    def filling(self, request: KvRequest, held: Sequence[Held]) -> None:
        """The layers of these blocks can go to peers while the next plan computes them."""
        if (expected := self._expected.get(request.rid)) is None:
            return
        for group, first in enumerate(expected.first):
            own = [one for one in held if one.item.group == group and one.item.place >= first]
            names, blocks, _ = _columns([one for one in own if one.item.name not in self._kept])
            if names:
                self._fills.append(P2pFill(request.rid, group, names, blocks))

    def filled(self, request: KvRequest, held: Sequence[Held]) -> None:
        """A chunk of an announced request was computed: the blocks that it has filled can go to peers."""
        if held and (expected := self._expected.get(request.rid)) is not None:
            num, expected.num_kept = expected.num_kept, held[-1].item.place + 1
            self._retain([one for one in held if one.item.place >= max(num, expected.first[one.item.group])])

    def spoiled(self, request: KvRequest) -> None:
        """Nothing more comes of what was announced, and no answer is awaited."""
        self._forget(request.rid)
        if request.rid in self._expected:
            del self._expected[request.rid]
            # The worker half withdraws announcements before it reads new ones, so it must not hear of this one.
            told = [one for one in self._coming if one.rid != request.rid]
            if len(told) == len(self._coming):
                self._spoiled.append(request.rid)
            self._coming = told
        self._fills = [one for one in self._fills if one.rid != request.rid]

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        """The first call about a request asks the peer about all groups; the others are answered from its answer."""
        facts = self._facts
        is_first = all(item.group == facts.full and not item.num for item in items)
        if not is_first:
            question = self._questions.get(request.rid)
            names = question.names if question is not None else ()
            return [item.name in names for item in items]
        self._expect(request)
        last = min((len(request.ids) - 1) // facts.block_size, (items[0].place if items else 0) + MAX_KEYS)
        first = items[0].place if items else last
        if (facts.num_groups > 1 or facts.full is None) and last <= MAX_KEYS:
            first = 0  # it may lack blocks of other groups
        if self._context is None or last <= first:
            return ()
        num = self._match(request, first, last)
        if num is None:
            return None
        return [item.place < first + num for item in items]

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        question = self._questions.get(request.rid)
        return {} if question is None or question.states is None else question.states.behind(behind)

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        question = self._questions.get(request.rid)
        address = question.peer.address if question is not None else request.kv_peer or self._settings.peer or ""
        self._forget(request.rid)
        self._loading[request.rid] = (address, held)
        names, blocks, pages = _columns(held)
        peer = self._peers.get(address)
        ranks = rank_addresses(address, self._facts.num_ranks, ()) if peer is None else peer.addresses
        self._loads.append(P2pLoad(request.rid, names, blocks, pages, ranks))

    def build_connector_meta(self) -> bytes:
        if not (self._coming or self._drop or self._keep or self._over or self._loads or self._fills or self._spoiled):
            return b""
        names, blocks, pages = _columns(list(self._keep.values()))
        kept = [item for item, _ in self._keep.values() if item.group == self._facts.state]
        plan = P2pPlan(
            coming=tuple(self._coming),
            drop=b"".join(self._drop),
            keep_keys=names,
            keep_blocks=blocks,
            over=tuple(self._over),
            loads=tuple(self._loads),
            keep_pages=pages,
            states=tuple((item.parent or b"", item.key, item.num) for item in kept),
            spoiled=tuple(self._spoiled),
            fills=tuple(self._fills),
            is_first=self._is_first,
        )
        self._is_first = False
        for part in (self._coming, self._drop, self._keep, self._over, self._loads, self._spoiled, self._fills):
            part.clear()
        return msgspec.msgpack.encode(plan)

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        """Keeps what it holds; the worker half copies it with the next plan."""
        self._forget(request.rid)
        if request.rid in self._expected:
            del self._expected[request.rid]
            self._over.append(request.rid)
        if self._settings.capacity:
            self._retain(held)
        return False

    def _retain(self, held: Sequence[Held]) -> None:
        """Keeps these items, and what was kept before as far as there is room."""
        for one in tail_first(held):
            name = one.item.name
            if name in self._kept:
                self._kept.move_to_end(name)
            else:
                self._kept[name] = one.item
                self._num_pages += len(one.pages)
                self._keep[name] = one
                self._num_stored += 1
        while self._num_pages > self._settings.capacity:
            name, item = self._kept.popitem(last=False)
            self._num_pages -= self._facts.pages_of(item.group)
            self._num_evicted += 1
            if self._keep.pop(name, None) is None:
                self._drop.append(name)

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        """Does nothing: blocks to serve are copied when their request ends."""

    def update_connector_output(self, output: Transferred) -> None:
        """Ignores the loads of other tiers."""
        failed = set(bytes_to_ids(output.failed_blocks))
        for rid in output.loaded:
            loading = self._loading.pop(rid, None)
            if loading is None:
                continue
            address, held = loading
            loaded = [one for one in held if failed.isdisjoint(one.pages)]
            good = Counter(item.group for item, _ in loaded if not item.num)
            num_failed = len(held) - len(loaded)
            num_pages = sum(len(pages) for _, pages in loaded)
            self._num_bytes += num_pages * self._facts.of_engine(self._facts.block_bytes)
            self._num_failed += num_failed
            self._num_hit_tokens += max(good.values(), default=0) * self._facts.block_size
            if (peer := self._peers.get(address)) is not None:
                if num_failed:
                    peer.pause.fail(time.monotonic())
                    peer.lose()
                else:
                    peer.pause.succeed()

    def take_events(self) -> list[KvEvent]:
        """None: the blocks are for other instances, so a router has no use for the events."""
        return []

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return (
            TierSnapshot(
                name="p2p",
                num_blocks=self._num_pages,
                capacity=self._settings.capacity,
                num_hit_tokens=self._num_hit_tokens,
                num_stored=self._num_stored,
                num_evicted=self._num_evicted,
                num_failed=self._num_failed,
                num_loaded_bytes=self._num_bytes,
                kv_digest=self._kv_digest,
            ),
        )

    def reset(self) -> None:
        for columns in (self._coming, self._drop, self._over, self._loads, self._spoiled, self._fills):
            columns.clear()
        for mapping in (self._kept, self._keep, self._expected, self._loading):
            mapping.clear()
        for rid in list(self._questions):
            self._forget(rid)
        self._num_pages = 0

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()
        if self._context is not None:
            for peer in self._peers.values():
                peer.close()
            self._context.destroy(linger=0)
            self._context = None

    def _expect(self, request: KvRequest) -> None:
        """Announces to the worker half what a request that is about to be admitted will leave behind, as far as one
        with the same prompt needs it: blocks behind a window are released before the prompt ends."""
        facts, size = self._facts, self._facts.block_size
        num = len(request.ids) // size
        if not self._settings.capacity or not num or request.rid in self._expected:
            return
        if len(self._expected) == _MAX_EXPECTED:
            self._over.append(self._expected.popitem(last=False)[0])
        place, rest = divmod(request.num_prompt - 1, size)
        first = tuple(self._groups.need_from(group, place * size) // size for group in facts.tables)
        self._expected[request.rid] = _Expected(first)
        keys = request.block_keys(num, size)
        names = [item_name(key, group) for group in facts.tables for key in keys[first[group] :]]
        states: tuple[tuple[bytes, bytes, int], ...] = ()
        if facts.state is not None and request.keeps_before_last and request.num_prompt > 1:
            behind = keys[place - 1] if place else request.root
            key = request.partial_keys(place, rest, size)[-1] if rest else behind
            states = ((behind, key, rest),)
            names += [item_name(key, group) for group in (*(facts.tables if rest else ()), facts.state)]
        self._coming.append(P2pComing(request.rid, b"".join(names), states))

    def _match(self, request: KvRequest, first: int, last: int) -> int | None:
        """How many of the request's blocks from `first` to before `last` its peer has, or is computing. None: not known
        yet."""
        peer = self._peer(request.kv_peer)
        if peer is None:
            return 0
        self._hear(peer)
        now = time.monotonic()
        if now < peer.pause.until:
            self._forget(request.rid)
            return 0
        question = self._questions.get(request.rid)
        if question is not None and question.num_found is not None:
            end = question.first + question.num_found
            if first >= question.first and now < question.answered_at + _ANSWER_AGE_S:
                return max(0, min(end, last) - first)
            self._forget(request.rid)
            question = None
        if question is None or question.first > first:
            question = self._ask(peer, request.rid, first, last, question.deadline if question else None)
        if now >= question.deadline:
            self._forget(request.rid)
            peer.pause.fail(now)
            peer.give_up(question.replies)
            return 0
        links = peer.links
        if links and question.links is not links:  # a rank is elsewhere, and what another one has said may be old
            question.links, question.unasked, question.replies = links, set(range(len(links))), {}
        if links and question.unasked:
            keys = request.block_keys(question.first + question.num_asked, self._facts.block_size)
            behind = b""
            if self._facts.state is not None:
                behind = keys[question.first - 1] if question.first else request.root
            wait_ms = int(self._settings.wait_s * 1000)
            wanted = b"".join(keys[question.first :])
            for rank in list(question.unasked):
                link = links[rank]
                if link.ask(Lookup(question.id, link.digest, wanted, wait_ms, behind, request.awaits_kv)):
                    question.unasked.remove(rank)
        if not links or question.unasked:
            peer.seek(now)
        return None

    def _check(self, address: str) -> None:
        """Asks the operator's peer who it is. Raises ConfigError."""
        assert self._context is not None
        try:
            peer = self._peers[address] = Peer(self._context, address, self._facts, self._keys)
            if self._facts.may_refuse:
                peer.check()
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--kv-connector p2p: peer={address} cannot be used: {error}.") from error
        except ConfigError:
            self.close()
            raise

    def _peer(self, named: str) -> Peer | None:
        """The peer that a request names, or the operator's; None: there is none."""
        address = named or self._settings.peer
        if address is None or self._context is None:
            return None
        peer = self._peers.get(address)
        if peer is None:
            while len(self._peers) >= _MAX_PEERS:
                idle = next((one for one in self._peers.values() if not one.num_open), None)
                if idle is None:
                    return None
                del self._peers[idle.address]
                idle.close()
            try:
                peer = self._peers[address] = Peer(self._context, address, self._facts, self._keys)
            except zmq.ZMQError:
                return None
        self._peers.move_to_end(address)
        return peer

    def _ask(self, peer: Peer, rid: int, first: int, last: int, deadline: float | None) -> _Question:
        """Creates a question about blocks [first, last). deadline: of the question that it replaces."""
        self._forget(rid)
        while len(self._questions) >= _MAX_QUESTIONS:
            self._forget(next(iter(self._questions)))
        self._num_questions += 1
        until = time.monotonic() + self._settings.timeout_s if deadline is None else deadline
        question = self._questions[rid] = _Question(first, last - first, until, self._num_questions, peer)
        self._rids[question.id] = rid
        peer.num_open += 1
        return question

    def _hear(self, peer: Peer) -> None:
        """Receives the answers that have arrived. Drops answers to questions that were dropped, or asked of others."""
        for rank, reply in peer.answers():
            if (rid := self._rids.get(reply.id)) is None:
                continue
            question = self._questions[rid]
            if question.peer is not peer:
                continue
            if reply.is_coming:
                if not question.is_coming:  # the deadline is extended once
                    question.is_coming = True
                    question.deadline += self._settings.wait_s
                continue
            question.replies[rank] = reply
            if len(question.replies) == self._facts.num_ranks:
                del self._rids[reply.id]
                self._conclude(question)

    def _conclude(self, question: _Question) -> None:
        """All ranks have answered. What one of them lacks is of no use on the others."""
        replies = question.replies.values()
        num = min(reply.num + max(0, reply.num_coming) for reply in replies)
        question.num_found = max(0, min(num, question.num_asked))
        question.names = frozenset.intersection(*(_names(reply) for reply in replies))
        question.states = StateIndex(self._facts.state)
        for parent, key, num in set[tuple[bytes, bytes, int]].intersection(*(set(reply.states) for reply in replies)):
            if len(parent) == len(key) == KEY_BYTES and 0 <= num < self._facts.block_size:
                question.states.add(Item(key, 0, parent, self._facts.state or 0, num))
        question.replies = {}
        question.peer.answered()
        question.answered_at = time.monotonic()

    def _forget(self, rid: int) -> None:
        question = self._questions.pop(rid, None)
        if question is not None:
            question.peer.num_open -= 1
            self._rids.pop(question.id, None)


def _names(reply: Found) -> frozenset[bytes]:
    return frozenset(split_keys(reply.names[: len(reply.names) // KEY_BYTES * KEY_BYTES]))


def _columns(held: Sequence[Held]) -> tuple[bytes, bytes, bytes]:
    """(names, pages, how many pages each has) as `P2pLoad` has them."""
    names = b"".join([item.name for item, _ in held])
    blocks = ids_to_bytes([page for _, pages in held for page in pages])
    return names, blocks, ids_to_bytes([len(pages) for _, pages in held])
