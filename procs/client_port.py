"""The core's socket for clients that use token ids (`EngineClient`): one session for each connection.

It runs in the core's process, on its event loop. The core passes it the scheduler's outputs and gets back those for the
detokenizer; requests of clients become the same messages that the tokenizer sends. The engine numbers the sequences of
clients itself, from `CLIENT_RIDS` on, so that no client can name a sequence of another.

Sending never blocks. A session has a window: the number of `News` that may be unacknowledged. Beyond it the output of
each sequence is merged until the client acknowledges. A client that takes nothing for `STALL_LIMIT_S`, or lets more
than `MAX_BEHIND_BYTES` accumulate, gets `Goodbye`. A broken connection is noticed when the next message is sent, at the
latest with the next snapshot. When a session ends, its open sequences are cancelled.
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
"""The first rid of a client's sequence; rids of api processes are smaller."""

MAX_CLIENTS = 1024
MAX_BEHIND_BYTES = 16 * 2**20
STALL_LIMIT_S = 60.0
_MAX_FRAMES = 256  # messages that one `drain` reads, so that the core's other work is not delayed

log = logging.getLogger("pagewire.clients")


class _Session:
    """One connection."""

    def __init__(self, peer: bytes, hello: Hello) -> None:
        self.peer = peer
        self.hello = hello
        self.rids: dict[int, int] = {}  # the client's rid → ours, of open sequences
        self.num_sent = 0  # `News` messages
        self.num_acked = 0
        self.stalled_at: float | None = None  # when sending first became impossible with output waiting
        # Output not sent yet, by the client's rid. A rid is in `plain` (only ids) or in `rich`, never in both.
        self.accepted: list[Accepted] = []
        self.plain: dict[int, bytes] = {}
        self.rich: dict[int, Tokens] = {}
        self.failed: list[Failed] = []
        self.num_bytes = 0  # of this output, approximately

    def add(self, tokens: Tokens) -> None:
        """More output of a sequence, with the client's rid."""
        rid = tokens.rid
        self.num_bytes += len(tokens.ids) + 8
        for logprobs in (tokens.logprobs, tokens.prompt_logprobs):
            self.num_bytes += 0 if logprobs is None else len(logprobs.ids) + len(logprobs.values)
        before = self.rich.pop(rid, None)
        if before is None and rid in self.plain:
            before = Tokens(rid, self.plain.pop(rid))
        self.rich[rid] = tokens if before is None else join_tokens(before, tokens)

    def add_plain(self, rid: int, ids: bytes) -> None:
        """More token ids of a sequence, without log-probabilities or an end."""
        if rid in self.rich:
            self.add(Tokens(rid, ids))
        else:
            self.plain[rid] = self.plain.get(rid, b"") + ids
            self.num_bytes += len(ids) + 8

    def take(self) -> News:
        """The next message, with all output that has not been sent."""
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
        """The message of `take` was sent."""
        self.num_sent += 1
        self.stalled_at = None
        self.accepted.clear()
        self.plain.clear()
        self.rich.clear()
        self.failed.clear()
        self.num_bytes = 0

    @property
    def has_output(self) -> bool:
        return bool(self.accepted or self.plain or self.rich or self.failed)


class ClientPort:
    """All sessions of one core. Only the core's thread calls it."""

    def __init__(
        self,
        config: EngineConfig,
        address: str,
        *,
        keys: Keys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds. Raises ConfigError if the address is invalid, reachable from the network, or not available."""
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
        # Our rid of an open sequence → its session and the client's rid; None: the session has ended.
        self._owners: dict[int, tuple[_Session, int] | None] = {}
        self._asked: list[Enqueue | Cancel] = []  # for the scheduler; each public method returns and empties it
        self._next_rid = CLIENT_RIDS
        self._welcome: Welcome | None = None
        self._wake: Callable[[], object] | None = None

    # ── from clients ─────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, max_model_len: int, wake: Callable[[], None]) -> None:
        """The engine is ready: begins to accept sessions. From now on `wake` is called on the running loop, if there
        is one, when a message may have arrived for `drain`."""
        config = self._config
        self._welcome = Welcome(
            PROTOCOL,
            config.served_model_names[0],
            config.kv_model_key,
            config.model.vocab_size,
            max_model_len,
            config.model.eos_token_ids,
            config.block_size,
        )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no loop: the caller calls `drain` itself
            return
        self._socket.subscribe(loop, wake)
        self._wake = lambda: loop.call_soon(wake)

    def drain(self) -> list[Enqueue | Cancel]:
        """Reads up to `_MAX_FRAMES` messages. Returns what clients request of the engine, in order."""
        for _ in range(_MAX_FRAMES):
            frames = self._socket.receive()
            if frames is None:
                return self._take_asked()
            self._take(frames)
        if self._wake is not None:
            self._wake()  # there may be more
        return self._take_asked()

    def _take_asked(self) -> list[Enqueue | Cancel]:
        asked, self._asked = self._asked, []
        return asked

    def _take_cancels(self) -> list[Cancel]:
        return [message for message in self._take_asked() if isinstance(message, Cancel)]

    def _take(self, frames: list[bytes]) -> None:
        peer = frames[0]
        session = self._sessions.get(peer)
        try:
            if len(frames) != 2:
                raise msgspec.ValidationError(f"it has {len(frames) - 1} frames instead of one")
            message = self._decoder.decode(frames[1])
        except DecodeError as error:
            why = str(error) if isinstance(error, msgspec.ValidationError) else "it cannot be read"
            if session is None or len(frames) != 2 or not self._refuse(session, frames[1], why):
                self._end_session(peer, f"The message is invalid: {why}.")
            return
        if isinstance(message, Hello):
            self._begin_session(peer, message)
            return
        if session is None:
            self._end_session(peer, "There is no session: send Hello first.")
            return
        match message:
            case Generate():
                self._generate(session, message)
            case Cancel():
                if rids := tuple(session.rids[rid] for rid in message.rids if rid in session.rids):
                    self._asked.append(Cancel(rids))
            case Ack():
                if not session.num_acked <= message.seq <= session.num_sent:
                    self._end_session(peer, f"News {message.seq} was acknowledged and never sent.")
                    return
                session.num_acked = message.seq
                self._flush(session)
            case Bye():
                self._forget(session)
            case _:
                assert_never(message)

    def _begin_session(self, peer: bytes, hello: Hello) -> None:
        assert self._welcome is not None, "drained before it was opened"
        if hello.protocol != PROTOCOL:
            self._end_session(peer, f"This engine speaks protocol {PROTOCOL}, not {hello.protocol}.")
        elif peer in self._sessions:
            self._end_session(peer, "Hello was sent twice.")
        elif len(self._sessions) >= MAX_CLIENTS:
            self._end_session(peer, f"{MAX_CLIENTS} clients are connected, the most allowed; connect again later.")
        elif self._send(peer, self._welcome):
            self._sessions[peer] = _Session(peer, hello)

    def _generate(self, session: _Session, message: Generate) -> None:
        rids = range(message.rid, message.rid + message.n)
        if any(rid in session.rids for rid in rids):
            self._end_session(session.peer, f"Sequence {message.rid} is open already.")
            return
        try:
            self._check(message)
        except RequestError as error:
            session.failed += [Failed(rid, error.kind, str(error), error.param, error.num_tokens) for rid in rids]
            self._flush(session)
            return
        for i, rid in enumerate(rids):
            session.rids[rid] = self._next_rid + i
            self._owners[self._next_rid + i] = (session, rid)
        self._asked.append(
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
        """The checks that the tokenizer does for requests of the api. Raises RequestError."""
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
            assert self._welcome is not None
            longest = self._welcome.max_model_len - len(message.prompt_ids) // 4
            if message.limits.max_tokens is not None:
                longest = min(longest, message.limits.max_tokens)
            if message.n > 1 or len(message.resume_ids) // 4 > max(0, longest):
                raise RequestError("invalid_request", "resume_ids are the output of one sequence, within max_tokens.")

    def _refuse(self, session: _Session, data: bytes, why: str) -> bool:
        """If `data` is a Generate with a value out of bounds, fails only this request and returns True."""
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
                self._flush(session)
                return True
        return False

    # ── to clients ───────────────────────────────────────────────────────────────────────────────────────────────────

    def reply(self, message: Accepted | Failed) -> None:
        """Sends a client the scheduler's answer to its request."""
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
        """Keeps the outputs of clients' sequences for `flush`. Returns the others, in order."""
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
        """The rest of the batch for the detokenizer; None: nothing is left."""
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
        """Sends the output of all sessions whose windows allow it. Returns the cancellations for sessions that ended
        because their client is gone or too slow."""
        for session in list(self._sessions.values()):
            self._flush(session)
        # Sending may consume ZeroMQ's edge-triggered event for a message that has arrived.
        if self._wake is not None and self._socket.has_mail():
            self._wake()
        return self._take_cancels()

    def beat(self, snapshot: Snapshot) -> list[Cancel]:
        """Sends every client a snapshot, which also shows that the core is alive, and ends the sessions of clients that
        are gone or stalled. Then flushes; returns what `flush` does."""
        now = self._clock()
        for session in list(self._sessions.values()):
            if session.stalled_at is not None and now - session.stalled_at > STALL_LIMIT_S:
                self._end_session(session.peer, f"The client has taken no output for {STALL_LIMIT_S:g} s.")
            elif not self._send(session.peer, snapshot):
                self._forget(session)
        return self.flush()

    def _flush(self, session: _Session) -> None:
        if not session.has_output:
            return
        if session.num_sent - session.num_acked < session.hello.window:
            try:
                self._socket.send(session.peer, encode(session.take()))
            except ChannelFull:
                pass
            except PeerGone:
                self._forget(session)
                return
            else:
                session.sent()
                return
        if session.stalled_at is None:
            session.stalled_at = self._clock()
        if session.num_bytes > MAX_BEHIND_BYTES:
            self._end_session(session.peer, f"The client is more than {MAX_BEHIND_BYTES} bytes of output behind.")

    def _send(self, peer: bytes, message: ToClient) -> bool:
        """Sends a message, or drops it if the peer's queue is full. False: the peer is gone."""
        try:
            self._socket.send(peer, encode(message))
        except ChannelFull:
            pass
        except PeerGone:
            return False
        return True

    def begin_anew(self, lost: Iterable[int]) -> set[int]:
        """The engine has lost the sequences `lost`, some of which may be the api's. Ends the sessions of the clients'
        ones: these clients connect again and resume. Returns the rids to cancel."""
        for peer in {owner[0].peer: None for rid in lost if (owner := self._owners.get(rid)) is not None}:
            self._end_session(peer, "A part of the engine has died and is replaced.")
        return {rid for message in self._take_cancels() for rid in message.rids}

    # ── sessions end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_session(self, peer: bytes, reason: str) -> None:
        """Sends `Goodbye` and ends the session, if there is one."""
        session = self._sessions.get(peer)
        if session is not None:
            log.warning("the session of client %s ends: %s", session.hello.name or "without a name", reason)
            self._forget(session)
        self._send(peer, Goodbye(reason))

    def _forget(self, session: _Session) -> None:
        """Removes the session and cancels its open sequences."""
        del self._sessions[session.peer]
        if rids := tuple(session.rids.values()):
            self._owners.update(dict.fromkeys(rids))
            self._asked.append(Cancel(rids))

    def _end(self, rid: int) -> None:
        """A sequence has ended."""
        owner = self._owners.pop(rid)
        if owner is not None:
            del owner[0].rids[owner[1]]

    def close(self, reason: str) -> None:
        """Ends every session and frees the address."""
        for peer in list(self._sessions):
            self._end_session(peer, reason)
        self._socket.close()
        self._context.close()
