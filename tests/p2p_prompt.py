"""A prompt on a real model with the halves of the p2p connector, whose layers are asked for before it is computed."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from p2p_instance import prompt
from waiting import until

from pagewire.engine.core.kv_connector import Held, Item
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.p2p import P2pConnector
from pagewire.engine.kv_connector.p2p_store import BlockStore
from pagewire.engine.kv_connector.p2p_wire import Coming, Layout, Piece, Want, decode_reply, encode
from pagewire.engine.kv_connector.p2p_worker import P2pWorker
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import RowOpen, Sampling, StepPlan, ids_to_bytes

PAGES = [4, 5, 6]


@contextmanager
def socket_address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:  # sockets need short paths
        yield f"{folder}/kv"


def followed_prompt(engine: Runner, address: str) -> list[bool]:
    """Runs a prompt of two blocks and a position in one step of a model of three layers that serves on `address`. All
    layers but the last arrive at a bare socket before the step's result is known to be good, and the last one then.
    Returns for each of these layers whether it was given to the server before the step had ended."""
    facts = ConnectorFacts.of(engine._config, (engine.block_bytes,), ())
    core = P2pConnector.core({"serve": address, "size": "1M"}, facts)
    connector, cache = engine._connector, engine._cache
    assert isinstance(connector, P2pWorker) and connector._server is not None and cache is not None
    server, synchronize, grow = connector._server, engine._device.synchronize, BlockStore.grow
    during: list[bool] = []
    num_waits = 0

    def waited() -> None:
        nonlocal num_waits
        num_waits += 1
        synchronize()

    def grown(self: BlockStore, *args: object) -> None:
        during.append(num_waits == 1)  # the runner waits for the device before a pass and behind it
        grow(self, *args)  # type: ignore[arg-type]  # as they came

    request = prompt(1, length_for(engine))
    keys = request.block_keys(2, engine._config.block_size)
    core.available(request, [])
    engine.launch(empty_plan(1, core.build_connector_meta()))
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.linger = 0
        asker.connect(f"ipc://{address}")
        asker.send(encode(Want(1, Layout.of(facts).digest, b"".join(keys), b"", 1 << 20, 60_000)))
        assert decode_reply(asker.recv()) == Coming(1, 0, 2)
        until(lambda: server.awaits(keys), "the server knows who waits", 60.0)
        held = [Held(Item(key, i), (PAGES[i],)) for i, key in enumerate(keys)]
        core.filling(request, held)
        engine._device.synchronize, BlockStore.grow = waited, grown  # type: ignore[assignment,method-assign]
        try:
            engine.launch(prompt_plan(2, engine, core.build_connector_meta()))
        finally:
            engine._device.synchronize, BlockStore.grow = synchronize, grow  # type: ignore[method-assign]
        got = [bytearray(), bytearray()]

        def take(num_bytes: int) -> None:
            while min(map(len, got)) < num_bytes:
                frames = asker.recv_multipart()
                head = decode_reply(frames[0])
                assert isinstance(head, Piece)
                size = len(frames[1]) // head.num
                for i in range(head.num):
                    assert head.offset == len(got[head.first + i])
                    got[head.first + i] += frames[1][i * size : (i + 1) * size]

        take(2 * facts.block_bytes // 3)
        assert [len(one) for one in got] == [2 * facts.block_bytes // 3] * 2, "the last layer waits for the result"
        core.filled(request, held)
        engine.launch(empty_plan(3, core.build_connector_meta()))
        take(facts.block_bytes)
        assert [bytes(one) for one in got] == [page.numpy().tobytes() for page in cache.storage[PAGES[:2]].cpu()]
    core.close()
    *before, last = during
    assert not last
    return before


def length_for(engine: Runner) -> int:
    """Two blocks and a position."""
    return 2 * engine._config.block_size + 1


def prompt_plan(step: int, engine: Runner, kv: bytes = b"") -> StepPlan:
    """Computes the prompt."""
    length = length_for(engine)
    ids = ids_to_bytes(list(range(5, 5 + length)))
    opened = RowOpen(0, ids, length, 0, ids_to_bytes(PAGES), Sampling(temperature=0))
    return StepPlan(step, (opened,), b"", b"", ids_to_bytes([0]), ids_to_bytes([length]), b"\1", kv=kv)


def empty_plan(step: int, kv: bytes) -> StepPlan:
    return StepPlan(step, (), b"", b"", b"", b"", b"", kv=kv)
