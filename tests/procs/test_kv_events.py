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
from msgspec.structs import replace

from pagewire.config.config import EngineConfig, MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.engine.core.block_hash import block_key, root_key
from pagewire.engine.core.kv_events import Cleared, KvCacheEvent, Removed, Stored
from pagewire.errors import ConfigError
from pagewire.ipc.messages import CacheOffer, Message, StepPlan
from pagewire.procs.core import CoreActor
from pagewire.procs.kv_events import END, NUM_KEPT, KvEventPublisher

KEY = bytes(range(32))


def stored(number: int) -> Stored:
    return Stored((number.to_bytes(32, "big"),), None, array("i", [number] * 4).tobytes(), 4)


class Router:
    """A subscriber and a client of the replay socket."""

    def __init__(self, context: "zmq.Context[zmq.SyncSocket]", address: str, replay: str) -> None:
        self._events = context.socket(zmq.SUB)
        self._events.subscribe(b"")
        self._replay = context.socket(zmq.DEALER)
        for socket, where in ((self._events, address), (self._replay, replay)):
            socket.linger = 0
            socket.rcvtimeo = 10_000
            socket.connect(where)

    def receive(self) -> tuple[int, Any]:
        topic, number, batch = self._events.recv_multipart()
        assert topic == b""
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)

    def replay(self, start: int) -> Iterator[tuple[int, Any]]:
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            empty, number, batch = self._replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert batch == b""
                return
            yield int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)

    def send_nonsense(self) -> None:
        for frames in ([b"x"], [b"", b""], [b"", b"x" * 9], [b"x", bytes(8)], [b"", b"", bytes(8)]):
            self._replay.send_multipart(frames)

    def waits(self, timeout_ms: int) -> bool:
        return bool(self._events.poll(timeout_ms))

    def close(self) -> None:
        self._events.close()
        self._replay.close()


@contextmanager
def router(folder: str) -> Iterator[Router]:
    context = zmq.Context()
    subscriber = Router(context, f"ipc://{folder}/events", f"ipc://{folder}/replay")
    try:
        yield subscriber
    finally:
        subscriber.close()
        context.term()


@contextmanager
def publishing() -> Iterator[tuple[str, Callable[[list[KvCacheEvent]], None]]]:
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        publisher = KvEventPublisher(address=f"ipc://{folder}/events", replay=f"ipc://{folder}/replay")
        try:
            yield folder, publisher.publish
        finally:
            publisher.close()
        assert list(Path(folder).iterdir()) == []


def connected(subscriber: Router, publish: Callable[[list[KvCacheEvent]], None]) -> int:
    """Publish until the subscription is established; return how many batches that took."""
    for number in range(100_000):
        publish([Cleared()])
        if subscriber.waits(1):
            last, _ = subscriber.receive()
            while last < number:
                last, _ = subscriber.receive()
            return number + 1
    raise AssertionError("nothing arrives")


def test_batches_have_the_documented_format() -> None:
    with publishing() as (folder, publish), router(folder) as subscriber:
        first = connected(subscriber, publish)
        ids = array("i", [5, -1, 2**31 - 1, 0])
        publish([Stored((KEY, KEY[::-1]), bytes(32), ids.tobytes(), 2), Removed((KEY,), "host"), Cleared()])
        publish([])
        publish(
            [Stored((KEY,), None, b"", 16, "disk"), Stored((KEY,), None, b"", 16, group=1), Removed((KEY,), group=1)]
        )
        number, (ts, events, rank) = subscriber.receive()
        low, high = int.from_bytes(KEY[-8:], "big"), int.from_bytes(bytes(range(8))[::-1], "big")
        assert (number, rank) == (first, 0)
        assert ts > 1.7e9
        assert events == [
            ["BlockStored", [low, high], 0, ids.tolist(), 2, None, "GPU", None],
            ["BlockRemoved", [low], "CPU"],
            ["AllBlocksCleared"],
        ]
        number, (_, events, _) = subscriber.receive()
        assert number == first + 1  # no events, no batch
        other = low ^ 2 << 56
        assert events == [
            ["BlockStored", [low], None, [], 16, None, "DISK", None],
            ["BlockStored", [other], None, [], 16, None, "GPU", None, 1],
            ["BlockRemoved", [other], "GPU", 1],
        ]


def test_missed_batches_can_be_replayed() -> None:
    with publishing() as (folder, publish):
        for number in range(50):
            publish([stored(number)])
        with router(folder) as late:
            connected(late, publish)
            replayed = list(late.replay(20))
            assert [number for number, _ in replayed[:30]] == list(range(20, 50))
            assert [batch[1][0][1] for _, batch in replayed[:30]] == [[number] for number in range(20, 50)]
            assert list(late.replay(10**6)) == []
            late.send_nonsense()
            assert next(late.replay(0))[0] == 0


def test_only_the_last_batches_are_kept_and_a_slow_subscriber_is_not_awaited() -> None:
    with publishing() as (folder, publish), router(folder) as subscriber:
        connected(subscriber, publish)
        for number in range(NUM_KEPT + 2):  # the subscriber reads none of them meanwhile
            publish([stored(number)])
        for _ in range(2):  # the first replay does not use up the second
            numbers = [number for number, _ in subscriber.replay(0)]
            assert numbers == list(range(numbers[0], numbers[0] + NUM_KEPT))
            assert numbers[0] > 0


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
    "flags", [{"kv_events_replay": "ipc:///tmp/x"}, {"kv_events": "ipc:///tmp/x", "enable_prefix_caching": False}]
)
def test_flags_that_exclude_each_other_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--kv-events"):
        engine_config(**flags)


def test_the_events_of_the_core_describe_its_prefix_cache() -> None:
    """The real core over a fake worker: a router that follows the events knows the blocks that the pool finds."""
    size, num_blocks = 4, 12
    with tempfile.TemporaryDirectory(prefix="pw-") as folder, router(folder) as subscriber:
        config = replace(
            engine_config(kv_events=f"ipc://{folder}/events", kv_events_replay=f"ipc://{folder}/replay"),
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
        prompts = [[n] * 9 + [n + 1] * 10 for n in (1, 2, 3, 1)]
        for rid, prompt in enumerate(prompts):  # more blocks than the pool has
            core.handle([enqueue(rid, prompt, max_tokens=3)])
            while plans:
                core.handle([worker.run(plans.pop(0))])

        known: dict[int, list[int]] = {}  # hash → all tokens up to the end of its block
        num_removed = 0
        for _, (_, events, _) in subscriber.replay(0):
            for kind, *fields in events:
                hashes, *rest = fields or [[]]
                if kind == "BlockStored":
                    parent, ids, block_size = rest[:3]
                    assert (block_size, len(ids)) == (size, size)
                    known[hashes[0]] = (known[parent] if parent is not None else []) + ids
                elif kind == "AllBlocksCleared":
                    known.clear()
                else:
                    assert kind == "BlockRemoved"
                    num_removed += len(hashes)
                    for key in hashes:
                        known.pop(key, None)
        assert num_removed > 0
        root = root_key(config.kv_model_key, b"")
        for prompt in prompts:
            key = root
            for start in range(0, len(prompt) - size + 1, size):
                key = block_key(key, array("i", prompt[start : start + size]).tobytes())
                tokens = known.get(int.from_bytes(key[-8:], "big"))
                assert tokens == (None if core.scheduler.pool.find(key) is None else prompt[: start + size])
        asyncio.run(core.stop(0.0))
