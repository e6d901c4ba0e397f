"""The core's door for clients that speak token ids: sessions, their numbers, and how far each may fall behind.

Lives in the core's process and on its loop. The core hands it whatever the scheduler has to tell and gets back what is
the detokenizer's; what clients ask for comes out as the very messages that the tokenizer sends. Sequences of clients
have numbers of the engine's own from `CLIENT_RIDS` on, so no client can name what another one has.

Nobody is waited for. A session has a window: so many `News` may be on the way. Beyond it the news of each sequence is
put together until the client has acknowledged some; who takes nothing for `STALL_LIMIT_S`, or lets `MAX_BEHIND_BYTES`
pile up, is told goodbye. A connection that breaks is noticed with the next message for it, at the latest with the next
beat; what the session had open is cancelled.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Iterable
from typing import assert_never

import msgspec
from msgspec.structs import replace

from ..config.config import EngineConfig
from ..engine.core.output_buffer import Item
from ..errors import RequestError
from ..ipc.channel import ChannelFull
from ..ipc.client_messages import (
    MAX_CHOICES,
    PROTOCOL,
    Ack,
    Bye,
    Generate,
    Goodbye,
    Hello,
    News,
    ToClient,
    ToPort,
    Welcome,
    join_tokens,
)
from ..ipc.codec import DecodeError, Decoder, encode
from ..ipc.messages import (
    Accepted,
    Cancel,
    Enqueue,
    Failed,
    Opened,
    Snapshot,
    TextSpec,
    TokenBatch,
    Tokens,
    bytes_to_ids,
)
from ..ipc.zmq_channel import Keys, PeerGone, ZmqContext
from .checks import check_ids, check_min_tokens, check_parameters, check_task

CLIENT_RIDS = 1 << 62
"""The first rid of a client's sequence; those of api processes are smaller."""

MAX_CLIENTS = 1024
MAX_BEHIND_BYTES = 16 * 2**20
STALL_LIMIT_S = 60.0
_MAX_FRAMES = 256  # taken in before the core has its turn

log = logging.getLogger("pagewire.clients")


class _Session:
    """One connection."""

    def __init__(self, peer: bytes, hello: Hello) -> None:
        self.peer = peer
        self.hello = hello
        self.rids: dict[int, int] = {}  # the client's number → ours, of what has not ended
        self.num_sent = 0  # News
        self.num_acked = 0
        self.stalled_at: float | None = None  # since when nothing could be sent although there was something
        self.accepted: list[Accepted] = []
        self.plain: dict[int, bytes] = {}  # the client's number → ids; never one that is in `rich`
        self.rich: dict[int, Tokens] = {}
        self.failed: list[Failed] = []
        self.num_bytes = 0  # of all this

    def add(self, tokens: Tokens) -> None:
        """More of a sequence."""
        rid = tokens.rid
        self.num_bytes += len(tokens.ids) + 8
        for logprobs in (tokens.logprobs, tokens.prompt_logprobs):
            self.num_bytes += 0 if logprobs is None else len(logprobs.ids) + len(logprobs.values)
        before = self.rich.pop(rid, None)
        if before is None and rid in self.plain:
            before = Tokens(rid, self.plain.pop(rid))
        self.rich[rid] = tokens if before is None else join_tokens(before, tokens)

    def add_plain(self, rid: int, ids: bytes) -> None:
        """More tokens of a sequence and nothing else."""
        if rid in self.rich:
            self.add(Tokens(rid, ids))
        else:
            self.plain[rid] = self.plain.get(rid, b"") + ids
            self.num_bytes += len(ids) + 8

    def take(self) -> News:
        """All of it as the next message."""
        rids, counts = array("q", self.plain), array("i", [len(ids) // 4 for ids in self.plain.values()])
        ids = b"".join(self.plain.values())
        return News(
            self.num_sent + 1,
            tuple(self.accepted),
            rids.tobytes(),
            counts.tobytes(),
            ids,
            tuple(self.rich.values()),
            tuple(self.failed),
        )

    def sent(self) -> None:
        """What `take` gave is on its way."""
        self.num_sent += 1
        self.stalled_at = None
        self.accepted.clear()
        self.plain.clear()
        self.rich.clear()
        self.failed.clear()
        self.num_bytes = 0

    @property
    def has_news(self) -> bool:
        """There is something to send."""
        return bool(self.accepted or self.plain or self.rich or self.failed)


class ClientPort:
    """All sessions of one core. All calls come from the core's thread."""

    def __init__(
        self,
        config: EngineConfig,
        address: str,
        *,
        keys: Keys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds. Raises ConfigError if the address is none, is open to the network, or cannot be had."""
        self._config = config
        self._clock = clock
        self._context = ZmqContext(keys)
        try:
            self._socket = self._context.router(address)
        except BaseException:
            self._context.close()
            raise
        self._decoder: Decoder[ToPort] = Decoder(ToPort)
        self._sessions: dict[bytes, _Session] = {}
        # Our rid, of what the scheduler has not ended → whose, and the client's number; None: that client has left.
        self._owners: dict[int, tuple[_Session, int] | None] = {}
        self._next_rid = CLIENT_RIDS
        self._welcome: Welcome | None = None
        self._wake: Callable[[], object] | None = None

    # ── from clients ─────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, max_model_len: int, wake: Callable[[], None]) -> None:
        """The engine can serve. From now on `wake` is called on the running loop, if there is one, when `drain` may
        have something."""
        config = self._config
        self._welcome = Welcome(
            PROTOCOL,
            config.served_model_names[0],
            config.kv_model_key,
            config.model.vocab_size,
            max_model_len,
            config.model.eos_token_ids,
        )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # whoever runs the actors calls
            return
        self._socket.subscribe(loop, wake)
        self._wake = lambda: loop.call_soon(wake)

    def drain(self) -> list[Enqueue | Cancel]:
        """What clients ask of the engine, in order."""
        asked: list[Enqueue | Cancel] = []
        for _ in range(_MAX_FRAMES):
            frames = self._socket.receive()
            if frames is None:
                return asked
            self._take(frames, asked)
        if self._wake is not None:
            self._wake()  # others have waited long enough
        return asked

    def _take(self, frames: list[bytes], asked: list[Enqueue | Cancel]) -> None:
        peer = frames[0]
        session = self._sessions.get(peer)
        try:
            if len(frames) != 2:
                raise msgspec.ValidationError(f"{len(frames) - 1} frames where a message has one")
            message = self._decoder.decode(frames[1])
        except DecodeError as error:
            why = str(error) if isinstance(error, msgspec.ValidationError) else "it cannot be read"
            if session is None or len(frames) != 2 or not self._refuse(session, frames[1], why, asked):
                self._part(peer, f"That is no message of this protocol: {why}.", asked)
            return
        if isinstance(message, Hello):
            self._greet(peer, message, asked)
            return
        if session is None:
            self._part(peer, "There is no session: a connection begins with Hello.", asked)
            return
        match message:
            case Generate():
                self._generate(session, message, asked)
            case Cancel():
                if rids := tuple(session.rids[rid] for rid in message.rids if rid in session.rids):
                    asked.append(Cancel(rids))
            case Ack():
                if not session.num_acked <= message.seq <= session.num_sent:
                    self._part(peer, f"News {message.seq} was acknowledged and never sent.", asked)
                    return
                session.num_acked = message.seq
                self._flush(session, asked)
            case Bye():
                self._forget(session, asked)
            case _:
                assert_never(message)

    def _greet(self, peer: bytes, hello: Hello, asked: list[Enqueue | Cancel]) -> None:
        assert self._welcome is not None, "drained before it was opened"
        if hello.protocol != PROTOCOL:
            self._part(peer, f"This engine speaks protocol {PROTOCOL}, not {hello.protocol}.", asked)
        elif peer in self._sessions:
            self._part(peer, "Hello was said twice.", asked)
        elif len(self._sessions) >= MAX_CLIENTS:
            self._part(peer, f"There are {MAX_CLIENTS} clients already.", asked)
        elif self._send(peer, self._welcome):
            self._sessions[peer] = _Session(peer, hello)

    def _generate(self, session: _Session, message: Generate, asked: list[Enqueue | Cancel]) -> None:
        rids = range(message.rid, message.rid + message.n)
        if any(rid in session.rids for rid in rids):
            self._part(session.peer, f"Sequence {message.rid} is open already.", asked)
            return
        try:
            self._check(message)
        except RequestError as error:
            session.failed += [Failed(rid, error.kind, str(error), error.param, error.num_tokens) for rid in rids]
            self._flush(session, asked)
            return
        for i, rid in enumerate(rids):
            session.rids[rid] = self._next_rid + i
            self._owners[self._next_rid + i] = (session, rid)
        asked.append(
            Enqueue(
                self._next_rid,
                message.prompt_ids,
                message.sampling,
                message.limits,
                TextSpec(detokenize=False),
                message.priority,
                message.salt,
                message.tenant or session.hello.name,
                message.n,
                message.resume_ids,
                message.constraint,
            )
        )
        self._next_rid += message.n

    def _check(self, message: Generate) -> None:
        """What the tokenizer sees to for others. Raises RequestError."""
        vocab_size = self._config.model.vocab_size
        for field, data in (("prompt_ids", message.prompt_ids), ("resume_ids", message.resume_ids)):
            try:
                check_ids(vocab_size, field, bytes_to_ids(data))
            except ValueError as error:
                raise RequestError("invalid_request", f"{field} must be int32, four bytes each.") from error
        check_task(self._config.model.purpose, None)
        check_parameters(vocab_size, message.sampling, message.limits, message.constraint)
        check_min_tokens(self._config.model.eos_token_ids, message.sampling, message.limits)
        if message.resume_ids:
            room = self._room(message)
            if message.n > 1 or len(message.resume_ids) // 4 > max(0, room):
                raise RequestError("invalid_request", "resume_ids are the output of one sequence, within max_tokens.")

    def _room(self, message: Generate) -> int:
        """Most tokens of output."""
        assert self._welcome is not None
        room = self._welcome.max_model_len - len(message.prompt_ids) // 4
        return room if message.limits.max_tokens is None else min(room, message.limits.max_tokens)

    def _refuse(self, session: _Session, data: bytes, why: str, asked: list[Enqueue | Cancel]) -> bool:
        """Fails the request alone if `data` is one with a value out of bounds."""
        try:
            fields = msgspec.msgpack.decode(data)
        except DecodeError:
            return False
        match fields:
            case ["Generate", int(rid), int(n), *_] if 0 <= rid < 2**53 and 1 <= n <= MAX_CHOICES:
                rids = range(rid, rid + n)
                if any(rid in session.rids for rid in rids):
                    return False
                session.failed += [Failed(rid, "invalid_request", f"Generate: {why}.") for rid in rids]
                self._flush(session, asked)
                return True
        return False

    # ── to clients ───────────────────────────────────────────────────────────────────────────────────────────────────

    def reply(self, message: Accepted | Failed) -> None:
        """What the scheduler answers at once to a client's request."""
        owner = self._owners.get(message.rid)
        if isinstance(message, Failed):
            self._end(message.rid)
        if owner is None:
            return
        session, rid = owner
        if isinstance(message, Accepted):
            session.accepted.append(Accepted(rid, message.num_prompt))
        else:
            session.failed.append(replace(message, rid=rid))

    def sort(self, items: list[Item]) -> list[Item]:
        """Keeps what is the clients' for `flush`. Returns the others', in order."""
        if not self._owners:
            return items
        others: list[Item] = []
        for item in items:
            match item:
                case TokenBatch():
                    if batch := self._sort_batch(item):
                        others.append(batch)
                case Opened() | Failed() if item.rid < CLIENT_RIDS:
                    others.append(item)
                case Failed():
                    self.reply(item)
                case Opened():
                    pass
                case _:
                    assert_never(item)
        return others

    def _sort_batch(self, batch: TokenBatch) -> TokenBatch | None:
        """What is left of it for others."""
        rids, ids = array("q"), bytearray()
        for rid, data in batch.columns():
            if rid < CLIENT_RIDS:
                rids.extend((rid,) * (len(data) // 4))
                ids += data
            elif (owner := self._owners.get(rid)) is not None:
                owner[0].add_plain(owner[1], data)
        rest = []
        for tokens in batch.tokens:
            if tokens.rid < CLIENT_RIDS:
                rest.append(tokens)
            else:
                if (owner := self._owners.get(tokens.rid)) is not None:
                    owner[0].add(msgspec.structs.replace(tokens, rid=owner[1]))
                if tokens.finish is not None:
                    self._end(tokens.rid)
        return TokenBatch(tuple(rest), rids.tobytes(), bytes(ids)) if rest or rids else None

    def flush(self) -> list[Cancel]:
        """Sends what there is to everyone who has room. What is to be cancelled, as its client is gone."""
        asked: list[Enqueue | Cancel] = []
        for session in list(self._sessions.values()):
            if session.has_news:
                self._flush(session, asked)
        self._look_again()
        return [message for message in asked if isinstance(message, Cancel)]

    def beat(self, snapshot: Snapshot) -> list[Cancel]:
        """Tells everyone that the core is alive, and parts with those who are not. See `flush`."""
        asked: list[Enqueue | Cancel] = []
        now = self._clock()
        for session in list(self._sessions.values()):
            if session.stalled_at is not None and now - session.stalled_at > STALL_LIMIT_S:
                self._part(session.peer, f"No news was taken for {STALL_LIMIT_S:g} s.", asked)
            elif not self._send(session.peer, snapshot):
                self._forget(session, asked)
        return [*(m for m in asked if isinstance(m, Cancel)), *self.flush()]

    def _flush(self, session: _Session, asked: list[Enqueue | Cancel]) -> None:
        if not session.has_news:
            return
        if session.num_sent - session.num_acked < session.hello.window:
            try:
                self._socket.send(session.peer, encode(session.take()))
            except ChannelFull:
                pass
            except PeerGone:
                self._forget(session, asked)
                return
            else:
                session.sent()
                return
        if session.stalled_at is None:
            session.stalled_at = self._clock()
        if session.num_bytes > MAX_BEHIND_BYTES:
            self._part(session.peer, f"More than {MAX_BEHIND_BYTES} bytes of news wait to be taken.", asked)

    def _send(self, peer: bytes, message: ToClient) -> bool:
        """Whether the peer is still there. One whose queue is full goes without the message."""
        try:
            self._socket.send(peer, encode(message))
        except ChannelFull:
            pass
        except PeerGone:
            return False
        return True

    def begin_anew(self, lost: Iterable[int]) -> set[int]:
        """The engine has lost these of our rids, and others' that are of no concern here: parts with those who asked
        for them, who come back and go on where they were. What is to be cancelled with them."""
        sessions = {owner[0].peer: owner[0] for rid in lost if (owner := self._owners.get(rid)) is not None}
        asked: list[Enqueue | Cancel] = []
        for peer in sessions:
            self._part(peer, "A part of the engine has died and is replaced.", asked)
        return {rid for message in asked if isinstance(message, Cancel) for rid in message.rids}

    # ── sessions end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _part(self, peer: bytes, reason: str, asked: list[Enqueue | Cancel]) -> None:
        """Says goodbye, whether there is a session or not."""
        session = self._sessions.get(peer)
        if session is not None:
            log.warning("client %s is told goodbye: %s", session.hello.name or "without a name", reason)
            self._forget(session, asked)
        self._send(peer, Goodbye(reason))

    def _forget(self, session: _Session, asked: list[Enqueue | Cancel]) -> None:
        """The session is over; what it has open is to be cancelled."""
        del self._sessions[session.peer]
        if rids := tuple(session.rids.values()):
            self._owners.update(dict.fromkeys(rids))
            asked.append(Cancel(rids))

    def _end(self, rid: int) -> None:
        """A sequence has ended."""
        owner = self._owners.pop(rid)
        if owner is not None:
            del owner[0].rids[owner[1]]

    def _look_again(self) -> None:
        """Sending may have swallowed the word that something has arrived: the descriptor tells of changes only."""
        if self._wake is not None and self._socket.has_mail():
            self._wake()

    def close(self, reason: str) -> None:
        """Ends every session and frees the address."""
        for peer in list(self._sessions):
            self._part(peer, reason, [])
        self._socket.close()
        self._context.close()
