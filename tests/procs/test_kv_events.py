"""KV events as a router gets them: real sockets, real batches, and replay of missed batches."""

import asyncio
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fakes import EOS, FakeWorker, enqueue
from kv_routers import RECORDED, LlmD, read_aibrix, read_dynamo
from msgspec.structs import replace
from waiting import until

from pagewire.config.config import EngineConfig, MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.engine.core.block_hash import block_key, root_key
from pagewire.engine.core.kv_events import Cleared, KvCacheEvent, Removed, Stored
from pagewire.engine.core.scheduler import Scheduler
from pagewire.errors import ConfigError
from pagewire.ipc.messages import CacheOffer, GroupShape, Message, StepPlan, StepResult
from pagewire.ipc.zmq_channel import Keys, read_keys
from pagewire.procs import kv_events
from pagewire.procs.core import CoreActor
from pagewire.procs.kv_events import END, NUM_KEPT, KvEventPublisher
from pagewire.procs.topology import workers
from pagewire.tools.servers import free_port

KEY = bytes(range(32))
TOPIC = "kv@pod-7@m"


def stored(number: int) -> Stored:
    return Stored((number.to_bytes(32, "big"),), None, array("i", [number] * 4).tobytes(), 4)


class Router:
    """A subscriber and a client of the replay socket."""

    def __init__(
        self, context: "zmq.Context[zmq.SyncSocket]", address: str | None, replay: str, keys: Keys | None = None
    ) -> None:
        """`address`: None: it does not subscribe."""
        self._events = context.socket(zmq.SUB)
        self._events.subscribe(b"kv@")
        self._replay = context.socket(zmq.DEALER)
        for socket, where in ((self._events, address), (self._replay, replay)):
            socket.linger = 0
            socket.rcvtimeo = 30_000
            if keys is not None:
                socket.curve_serverkey = socket.curve_publickey = keys.public.encode()
                socket.curve_secretkey = keys.secret.encode()
            if where is not None:
                socket.connect(where)

    def frames(self) -> list[bytes]:
        return self._events.recv_multipart()

    def receive(self) -> tuple[int, Any]:
        topic, number, batch = self.frames()
        assert topic == TOPIC.encode()
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)

    def ask(self, start: int) -> list[list[bytes]]:
        """The frames of a replay, the end included."""
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))
        found = [self._replay.recv_multipart()]
        while found[-1][2] != END:
            found.append(self._replay.recv_multipart())
        return found

    def replay(self, start: int) -> Iterator[tuple[int, Any]]:
        *found, end = self.ask(start)
        assert end == [b"", b"", END, b""]
        for expected, (empty, topic, number, batch) in enumerate(found, start):
            assert (empty, topic, int.from_bytes(number, "big")) == (b"", TOPIC.encode(), expected)
            yield expected, msgspec.msgpack.decode(batch)

    def send_nonsense(self) -> None:
        for frames in ([b"x"], [b"", b""], [b"", b"x" * 9], [b"x", bytes(8)], [b"", b"", bytes(8)]):
            self._replay.send_multipart(frames)

    def waits(self, timeout_ms: int) -> bool:
        return bool(self._events.poll(timeout_ms))

    def close(self) -> None:
        self._events.close()
        self._replay.close()


@contextmanager
def router(folder: str, *, subscribes: bool = True) -> Iterator[Router]:
    context = zmq.Context()
    subscriber = Router(context, f"ipc://{folder}/events" if subscribes else None, f"ipc://{folder}/replay")
    try:
        yield subscriber
    finally:
        subscriber.close()
        context.term()


@contextmanager
def publishing(num_domains: int = 1) -> Iterator[tuple[str, Callable[..., None]]]:
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        publisher = KvEventPublisher(
            address=f"ipc://{folder}/events", replay=f"ipc://{folder}/replay", topic=TOPIC, engine=1,
            num_domains=num_domains,
        )  # fmt: skip
        try:
            yield folder, publisher.publish
        finally:
            publisher.close()
        assert list(Path(folder).iterdir()) == []


def until_sent(folder: str, number: int) -> None:
    """Waits for the publisher's thread to send this batch, so that a later subscriber gets it in a snapshot alone."""
    with router(folder, subscribes=False) as reader:
        until(lambda: len(reader.ask(number)) > 1, f"batch {number} is sent", 30)


def connected(subscriber: Router, publish: Callable[[list[KvCacheEvent]], None], *, has_replay: bool = True) -> int:
    """Publish until the subscription is established and its snapshot came; return the number of the next batch."""
    publish([Cleared()])  # or there is nothing to tell
    number, (_, events, _) = subscriber.receive()
    while events[0] != ["AllBlocksCleared"]:
        number, (_, events, _) = subscriber.receive()
    for _ in range(2 if has_replay else 0):  # that may have been no snapshot: one follows before the second answer
        subscriber.ask(2**40)
    mark = [number + 1] * 4
    publish([Stored((b"mark" * 8,), None, array("i", mark).tobytes(), 4)])
    while events[-1][0] != "BlockStored" or events[-1][3] != mark:
        number, (_, events, _) = subscriber.receive()
    return number + 1


def test_batches_have_the_documented_format() -> None:
    with publishing() as (folder, publish), router(folder) as subscriber:
        first = connected(subscriber, publish)
        ids = array("i", [5, -1, 2**31 - 1, 0])
        publish([Stored((KEY, KEY[::-1]), bytes(32), ids.tobytes(), 2), Removed((KEY,), "host"), Cleared()])
        publish([])
        publish(
            [
                Stored((KEY, KEY[::-1]), None, bytes(16), 2, salt="alice"),
                Stored((KEY,), None, b"", 16, "disk"),
                Stored((KEY,), None, b"", 16, group=1, shape=GroupShape("window", 128, 1)),
                Removed((KEY,), group=1),
                Removed((KEY,), "mine"),
            ]
        )
        number, (ts, events, rank) = subscriber.receive()
        low, high = int.from_bytes(KEY[-8:], "big"), int.from_bytes(bytes(range(8))[::-1], "big")
        assert (number, rank) == (first, 1)
        assert ts > 1.7e9
        assert events == [
            ["BlockStored", [low, high], 0, ids.tolist(), 2, None, "GPU", None, [None, None]],
            ["BlockRemoved", [low], "CPU"],
            ["AllBlocksCleared"],
        ]
        number, (_, events, _) = subscriber.receive()
        assert number == first + 1  # no events, no batch
        other = low ^ 2 << 56
        assert events == [
            ["BlockStored", [low, high], None, [0] * 4, 2, None, "GPU", None, [["alice"], None]],
            ["BlockStored", [low], None, [], 16, None, "DISK", None, [None]],
            ["BlockStored", [other], None, [], 16, None, "GPU", None, [None], 1, "sliding_window", 128],
            ["BlockRemoved", [other], "GPU", 1],
            ["BlockRemoved", [low], "EXTERNAL"],
        ]


def test_missed_batches_can_be_replayed() -> None:
    with publishing() as (folder, publish):
        for number in range(50):
            publish([stored(number)])
        until_sent(folder, 49)
        with router(folder) as late:
            number = connected(late, publish)
            replayed = list(late.replay(20))
            assert replayed[-1][0] == number - 1
            assert [number for number, _ in replayed[:30]] == list(range(20, 50))
            assert [batch[1][0][1] for _, batch in replayed[:30]] == [[number] for number in range(20, 50)]
            assert list(late.replay(10**6)) == []
            late.send_nonsense()
            assert next(late.replay(0))[0] == 0


def test_only_the_last_batches_are_kept_and_a_slow_subscriber_is_not_awaited() -> None:
    with publishing() as (folder, publish), router(folder) as subscriber:
        first = connected(subscriber, publish)
        for number in range(NUM_KEPT + 2):  # the subscriber reads none of them meanwhile
            publish([stored(number % 100)])
        until(lambda: len(list(subscriber.replay(first + NUM_KEPT + 1))) > 0, "all batches are sent", 60)
        for _ in range(2):  # the first replay does not use up the second
            assert len(list(subscriber.replay(first + 2))) == NUM_KEPT
        # A run that begins later would be worse than nothing. All blocks follow, after which less of the past is kept.
        assert list(subscriber.replay(0)) == [] and list(subscriber.replay(first + 1)) == []


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://*:5557", "can be reached from outside"),
        ("tcp://0.0.0.0:5557", "can be reached from outside"),
        ("tcp://10.0.0.1:5557", "can be reached from outside"),
        ("tcp://127.0.0.1", "is not an address"),
        ("tcp://127.0.0.1:0", "is not an address"),
        ("tcp://127.0.0.1:99999", "is not an address"),
        ("tcp://[::1:80", "is not an address"),
        ("inproc://here", "is not an address"),
        ("ipc://", "is not an address"),
        ("", "is not an address"),
        ("ipc:///no/such/folder/events", "cannot listen"),
        ("ipc:///tmp/" + "x" * 200, "cannot listen"),
        ("ipc:///etc/passwd", "is not a socket"),
    ],
)
def test_invalid_addresses_are_refused(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        KvEventPublisher(address=address)
    assert str(refused.value).startswith("--kv-events: ")


def test_an_address_in_use_is_refused() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with tempfile.TemporaryDirectory(prefix="pw-") as folder, pytest.raises(ConfigError, match="-replay: cannot"):
            KvEventPublisher(address=f"ipc://{folder}/events", replay=f"tcp://127.0.0.1:{port}")


def engine_config(**flags: Any) -> EngineConfig:
    model = ModelFacts(
        path="", name="m", max_position=48, vocab_size=50, eos_token_ids=(EOS,), checkpoint_dtype="float32"
    )
    return resolve(make_config(max_num_batched_tokens=64, **flags), model, MachineFacts(num_cores=1))


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_events_replay": "ipc:///tmp/x"},
        {"kv_events_insecure": True},
        {"kv_events": "ipc:///tmp/x", "enable_prefix_caching": False},
        {"kv_events": "ipc:///tmp/x", "kv_events_insecure": True, "kv_events_key_file": "k"},
        {"kv_events": "ipc:///tmp/x", "kv_events_host": "a@b"},
        {"kv_events": "ipc:///tmp/x", "served_model_name": ("a@b",)},
    ],
)
def test_flags_that_exclude_each_other_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--kv-events"):
        engine_config(**flags)


def test_the_events_of_the_core_describe_its_prefix_cache() -> None:
    """The real core over a fake worker: a router that follows the events knows the blocks that the pool finds."""
    size, num_blocks = 4, 12
    with tempfile.TemporaryDirectory(prefix="pw-") as folder, router(folder) as subscriber:
        config = replace(
            engine_config(
                kv_events=f"ipc://{folder}/events", kv_events_replay=f"ipc://{folder}/replay", kv_events_host="pod-7"
            ),
            block_size=size,
        )
        worker = FakeWorker(num_blocks=num_blocks, block_size=size, max_num_seqs=8, max_num_batched_tokens=64)
        plans: list[StepPlan] = []

        def post(receiver: str, message: Message) -> None:
            if isinstance(message, StepPlan):
                plans.append(message)

        core = CoreActor(config)
        core.start(post)
        core.handle([CacheOffer(0, num_blocks)])
        assert isinstance(core.scheduler, Scheduler)
        prompts = [[n] * 9 + [n + 1] * 10 for n in (1, 2, 3, 1)]
        for rid, prompt in enumerate(prompts):  # more blocks than the pool has
            core.handle([replace(enqueue(rid, prompt, max_tokens=3), cache_salt=f"salt-{rid % 3}")])
            while plans:
                core.handle([worker.run(plans.pop(0))])
        prefixes: dict[int, tuple[int, ...]] = {}  # hash → all tokens up to the end of its block, of what can be found
        root = root_key(config.kv_model_key, b"")
        for prompt in prompts:
            key = root
            for start in range(0, len(prompt) - size + 1, size):
                key = block_key(key, array("i", prompt[start : start + size]).tobytes())
                if core.scheduler.pool.find(key) is not None:
                    prefixes[int.from_bytes(key[-8:], "big")] = tuple(prompt[: start + size])

        def known() -> dict[int, tuple[int, ...]]:
            """What a router knows of these prompts that follows every event from the first on."""
            seen = LlmD(subscriber.ask)
            seen.connected()
            asked = [prompt[: i + size] for prompt in prompts for i in range(0, len(prompt) - size + 1, size)]
            found = {key: seen.tokens[key] for _, _, key in +seen.blocks}
            return {key: tokens for key, tokens in found.items() if list(tokens) in asked}

        until(lambda: known() == prefixes, "the publisher's thread has sent all")
        assert 0 < len(prefixes) < len({tuple(p[:i]) for p in prompts for i in range(size, len(p) + 1, size)})
        asyncio.run(core.stop(0.0))


class ByRank:
    """Which hashes the caches of an engine have, by the third element of the batches, as Dynamo counts them."""

    def __init__(self) -> None:
        self.hashes: dict[int, set[int]] = {}
        self.numbers: list[int] = []

    def take(self, number: bytes, payload: bytes) -> None:
        self.numbers.append(int.from_bytes(number, "big"))
        own = self.hashes.setdefault(msgspec.msgpack.decode(payload)[2], set())
        for event, hashes in read_dynamo(payload):
            if event == "BlockStored":
                own.update(hashes)
            elif event == "BlockRemoved":
                own.difference_update(hashes)
            else:  # it forgets the worker, whichever of its caches is cleared
                for each in self.hashes.values():
                    each.clear()


def test_the_events_of_each_domain_carry_its_number() -> None:
    """The real core of an engine with two domains: a router that tells them apart knows the pool of each, and one that
    does not knows what any of them has."""
    size = 4
    with tempfile.TemporaryDirectory(prefix="pw-") as folder, router(folder) as subscriber:
        config = replace(
            engine_config(
                kv_events=f"ipc://{folder}/events", kv_events_replay=f"ipc://{folder}/replay", kv_events_host="pod-7",
                tensor_parallel_size=2, kv_domains=2,
            ),
            block_size=size, engine_number=3,
        )  # fmt: skip
        ranks = [
            FakeWorker(num_blocks=12, block_size=size, max_num_seqs=8, max_num_batched_tokens=64) for _ in range(2)
        ]
        plans: list[tuple[int, StepPlan]] = []

        def post(receiver: str, message: Message) -> None:
            if isinstance(message, StepPlan):
                plans.append((core_ranks.index(receiver), message))

        core_ranks = workers(2)
        core = CoreActor(config)
        core.start(post)
        core.handle([CacheOffer(rank, 12) for rank in range(2)])
        common = list(range(1, 9))
        prompts = [[*common, *([n] * 11)] for n in (11, 12, 13, 14, 11, 15)]
        for rid, prompt in enumerate(prompts):  # two at a time: the beginning is in both domains
            core.handle([enqueue(2 * rid + i, [*prompt, i], max_tokens=3) for i in range(2)])
            while plans:
                rank, plan = plans.pop(0)
                if plan.rows:
                    result = ranks[rank].run(plan)
                else:
                    result, ranks[rank].last_step = StepResult(plan.step, b"", {}, {}, 1.0), plan.step
                core.handle([replace(result, domain=rank)])
        pools = [scheduler.pool for scheduler in core.scheduler.schedulers]
        key, keys = root_key(config.kv_model_key, b""), list[bytes]()
        for start in range(0, len(common), size):
            keys.append(key := block_key(key, array("i", common[start : start + size]).tobytes()))
        assert all(pool.find(key) is not None for pool in pools for key in keys), "both have the beginning"

        def seen() -> ByRank:
            found = ByRank()
            *batches, _ = subscriber.ask(0)
            for _, _, number, payload in batches:
                found.take(number, payload)
            return found

        items = [[pool.item(block) for block in range(12)] for pool in pools]
        held = [{int.from_bytes(item.key[-8:], "big") for item in own if item is not None} for own in items]
        until(lambda: list(seen().hashes.values()) == held, "the publisher's thread has sent all")
        assert list(seen().hashes) == [6, 7], "two domains of the fourth engine"
        assert seen().numbers == list(range(len(seen().numbers))), "they are numbered together"
        assert held[0] != held[1] and held[0] & held[1]
        one = LlmD(subscriber.ask)
        one.connected()
        assert {hashed for _, _, hashed in +one.blocks} == held[0] | held[1]
        asyncio.run(core.stop(0.0))


def test_a_late_subscriber_is_told_the_blocks_of_all_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that takes the engine for one cache: nothing is cleared behind what was told."""
    monkeypatch.setattr(kv_events, "_SNAPSHOT_BLOCKS", 2)
    with publishing(3) as (folder, publish):
        for domain in range(3):
            publish([Cleared(), *(stored(number) for number in range(domain, 5))], domain)
        publish([Removed(stored(4).keys)], 1)
        publish([Removed(stored(i).keys) for i in range(2, 5)], 2)
        until_sent(folder, 4)
        with router(folder) as late:
            by_rank, one = ByRank(), LlmD(late.ask)
            wanted = {3: {0, 1, 2, 3, 4}, 4: {1, 2, 3}, 5: set[int]()}
            while by_rank.hashes != wanted or sum(one.blocks.values()) < 8:
                frames = late.frames()
                by_rank.take(*frames[1:])
                one.last = int.from_bytes(frames[1], "big") - 1
                one.live(frames)
            assert +one.blocks == {("gpu", -1, i): num for i, num in enumerate((1, 2, 2, 2, 1))}
            publish([Removed(stored(3).keys)], 0)
            one.live(late.frames())
            assert one.blocks["gpu", -1, 3] == 1, "another domain has it still"


def test_what_is_published_is_read_by_every_router() -> None:
    """Their decoders' rules, on events of their own tests and on ours."""
    theirs = {name.partition(" ")[0]: events for name, events in RECORDED.items()}
    reader = LlmD(lambda start: [])
    for event in theirs["llm-d"]:
        reader.apply(event)
    payload = msgspec.msgpack.encode([1.5, theirs["aibrix"], 0])
    assert len(list(read_aibrix(payload))) == len(theirs["aibrix"])
    payload = msgspec.msgpack.encode([1.5, theirs["dynamo"], None])
    assert len(list(read_dynamo(payload))) == len(theirs["dynamo"])
    window, other = GroupShape("window", 128, 1), KEY[::-1]
    events: list[KvCacheEvent] = [
        Cleared(),
        Stored((KEY, other), None, bytes(16), 2, salt="alice"),
        Stored((KEY,), None, b"", 2, "host"),
        Stored((KEY,), None, bytes(8), 2, group=1, shape=window),
        Removed((KEY,), group=1),
        Removed((other,)),
    ]
    with publishing() as (folder, publish), router(folder) as subscriber:
        first = connected(subscriber, publish)
        publish(events)
        seen = LlmD(subscriber.ask)
        seen.last = first - 1
        seen.live(frames := subscriber.frames())
    low, high = (int.from_bytes(key[-8:], "big") for key in (KEY, other))
    assert +seen.blocks == {("gpu", -1, low): 1, ("cpu", -1, low): 1}
    assert (seen.model, seen.salts) == ("m", {low: ["alice"]})
    kinds = ["AllBlocksCleared", "BlockStored", "BlockStored", "BlockStored", "BlockRemoved", "BlockRemoved"]
    assert [kind for kind, _ in read_aibrix(frames[2])] == kinds
    dynamo = list(read_dynamo(frames[2]))
    stored_hashes = [hashes for kind, hashes in dynamo if kind == "BlockStored"]
    assert stored_hashes == [[low, high], [low]]  # it leaves out the group


def test_a_late_subscriber_is_told_all_blocks_with_parents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_SNAPSHOT_BLOCKS", 10)
    chain = [number.to_bytes(32, "big") for number in range(35)]

    def block(i: int) -> Stored:
        return Stored((chain[i],), chain[i - 1] if i else None, array("i", [i] * 4).tobytes(), 4)

    with publishing() as (folder, publish):
        publish([Cleared(), *(block(i) for i in range(35))])
        publish([Removed((chain[3], chain[34]))])
        publish([block(3)])  # its children are older now
        until_sent(folder, 2)
        with router(folder) as late:
            seen = LlmD(late.ask)
            wanted = {("gpu", -1, i): 1 for i in range(34)}
            while +seen.blocks != wanted:  # live batches alone, as without a replay socket
                seen.last = None
                frames = late.frames()
                seen.last = int.from_bytes(frames[1], "big") - 1
                seen.live(frames)
            assert seen.tokens[33][-4:] == (33,) * 4 and len(seen.tokens[33]) == 34 * 4


def test_a_subscriber_whose_batches_are_gone_goes_on_with_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is no longer kept: the end alone, then live batches, which llm-d takes at once."""
    monkeypatch.setattr(kv_events, "NUM_KEPT", 20)
    monkeypatch.setattr(kv_events, "_SNAPSHOT_PAUSE_S", 0.01)
    with publishing() as (folder, publish), router(folder) as reader:
        for number in range(50):
            publish([stored(number)])
        until(lambda: reader.ask(0) == [[b"", b"", END, b""]], "the publisher's thread has seen them")
        seen = LlmD(reader.ask)
        seen.connected()  # replays from 0, which is gone
        while len(seen.tokens) < 50:
            seen.live(reader.frames())
        assert seen.num_resets == 0
        assert len(+seen.blocks) == 50
        assert seen.last is not None
        for number in range(50, 75):  # it misses so many that the first of them is gone as well
            publish([stored(number)])
        missed = seen.last
        last = missed
        while last < missed + 25:
            last, _ = reader.receive()
        publish([stored(75)])
        seen.live(reader.frames())
        assert seen.num_resets == 1  # it forgets, and after its cooldown the snapshot of a replay tells it all again
        seen.cooled_down()
        publish([stored(76)])
        while len(+seen.blocks) < 77:
            seen.live(reader.frames())
        assert seen.num_resets == 1


def test_other_machines_need_keys_or_the_operators_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, other = read_keys(tmp_path / "own"), read_keys(tmp_path / "other")
    port = free_port(2)
    events, replay = f"tcp://*:{port}", f"tcp://127.0.0.1:{port + 1}"
    flags = {"kv_events": events, "kv_events_host": "pod-7"}
    config = engine_config(**flags, kv_events_key_file=str(tmp_path / "own"))
    publisher = KvEventPublisher.of(config, events, None)
    with zmq.Context() as context:
        stranger = Router(context, f"tcp://127.0.0.1:{port}", replay, keys=other)
        plain = Router(context, f"tcp://127.0.0.1:{port}", replay)
        friend = Router(context, f"tcp://127.0.0.1:{port}", replay, keys=own)
        try:
            connected(friend, publisher.publish, has_replay=False)
            assert not stranger.waits(1) and not plain.waits(1)
        finally:
            for one in (stranger, plain, friend):
                one.close()
            publisher.close()
    assert caplog.text == ""
    publisher = KvEventPublisher.of(engine_config(**flags), events, own)  # a launch on several machines has keys
    with zmq.Context() as context:
        plain, friend = (Router(context, f"tcp://127.0.0.1:{port}", replay, keys=keys) for keys in (None, own))
        try:
            connected(friend, publisher.publish, has_replay=False)
            assert not plain.waits(1)
        finally:
            plain.close()
            friend.close()
            publisher.close()
    publisher = KvEventPublisher.of(engine_config(**flags, kv_events_insecure=True), events, own)
    with zmq.Context() as context:
        plain = Router(context, f"tcp://127.0.0.1:{port}", replay)
        try:
            connected(plain, publisher.publish, has_replay=False)
        finally:
            plain.close()
            publisher.close()
    assert "whoever connects there reads prompts" in caplog.text
