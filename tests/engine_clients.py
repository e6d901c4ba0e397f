"""The real core with a fake worker and a client port, on a test's event loop; and a client that sends raw messages."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from fakes import EOS, VOCAB, FakeWorker, allowed_by_row
from msgspec.structs import replace

from pagewire.config.config import MachineFacts, ModelFacts
from pagewire.config.flags import make_config
from pagewire.config.resolve import resolve
from pagewire.ipc.client_messages import ToClient, ToPort
from pagewire.ipc.codec import encode
from pagewire.ipc.messages import CacheOffer, LateMasks, Message, Ping, Snapshot, StepPlan, ToCore, bytes_to_ids
from pagewire.ipc.zmq_channel import Keys
from pagewire.procs.core import CoreActor

MAX_LEN = 512
BEAT_S = 0.05


class Engine:
    """A core, its worker, and its messages to other actors."""

    def __init__(self, address: str, keys: Keys | None = None, **flags: Any) -> None:
        model = ModelFacts(
            path=flags.pop("path", ""),
            name="m",
            max_position=MAX_LEN,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            checkpoint_dtype="float32",
        )
        config = resolve(
            make_config(max_num_batched_tokens=64, client_address=address, **flags), model, MachineFacts(num_cores=1)
        )
        self.config = replace(config, block_size=4, max_num_seqs=16)
        self.worker = FakeWorker(num_blocks=512, block_size=4, max_num_seqs=16, max_num_batched_tokens=64)
        self.core = CoreActor(self.config, keys=keys)
        self.sent: list[tuple[str, Message]] = []  # (receiver, message) to all actors except the worker
        self.num_steps = 0
        self.held = False  # while True, the worker answers no plan
        self.hold_at = -1  # the number of steps after which it answers none
        self._plans: list[StepPlan] = []
        self._late: list[LateMasks] = []

    async def __aenter__(self) -> "Engine":
        self.core.start(self._post)
        self.core.handle([CacheOffer(0, 512)])
        self._beating = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if not self._beating.done():
            self._beating.cancel()
            await self.core.stop(0.0)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.core.handle([Ping()])

    def handle(self, *messages: ToCore) -> None:
        self.core.handle(list(messages))

    @property
    def num_open(self) -> int:
        return len(self.core.scheduler.requests)

    def _post(self, receiver: str, message: Message) -> None:
        if isinstance(message, StepPlan):
            self._plans.append(message)
            asyncio.get_running_loop().call_later(0.0005, self._step)
        elif isinstance(message, LateMasks):
            self._late.append(message)
        elif not isinstance(message, Snapshot):
            self.sent.append((receiver, message))

    def _step(self) -> None:
        if self.held or self.num_steps == self.hold_at:
            asyncio.get_running_loop().call_later(0.005, self._step)
        elif self._plans and not self._beating.done():
            plan, late = self._plans[0], dict[int, list[int] | None]()
            for message in (message for message in self._late if message.step == plan.step):
                late |= allowed_by_row(bytes_to_ids(message.rows), message.bits)
                late |= dict.fromkeys(bytes_to_ids(message.free))
            if late.keys() < set(bytes_to_ids(plan.late_rows)):
                asyncio.get_running_loop().call_later(0.001, self._step)
                return
            self._late = [message for message in self._late if message.step > plan.step]
            self.num_steps += 1
            self.core.handle([self.worker.run(self._plans.pop(0), late)])


class Peer:
    """The socket of a client that is not `EngineClient`."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)

    async def say(self, *messages: ToPort) -> None:
        for message in messages:
            await self._socket.send(encode(message))

    async def say_frames(self, *frames: bytes) -> None:
        await self._socket.send_multipart(list(frames))

    async def hear(self, *, beats: bool = False) -> ToClient:
        """The next message. Snapshots are skipped unless `beats`."""
        while True:
            data = await asyncio.wait_for(self._socket.recv(), 30)
            message: ToClient = msgspec.msgpack.decode(data, type=ToClient)
            if beats or not isinstance(message, Snapshot):
                return message

    async def silence(self, seconds: float) -> bool:
        """Whether only snapshots arrive for that long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (left := deadline - loop.time()) > 0:
            if await self._socket.poll(int(1000 * left)) and not isinstance(await self.hear(beats=True), Snapshot):
                return False
        return True

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.asynccontextmanager
async def peer(address: str) -> AsyncIterator[Peer]:
    client = Peer(address)
    try:
        yield client
    finally:
        client.close()


def address_in(folder: Path) -> str:
    return f"ipc://{folder}/engine"
