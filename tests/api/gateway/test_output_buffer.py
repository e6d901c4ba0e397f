"""The buffer between gateway and reader: consumer and reader together get each choice's text complete and in order."""

import asyncio
import random

import pytest
from harness import run

from pagewire.api.gateway.output_buffer import Consumer, OutputBuffer
from pagewire.ipc.messages import Chunk, ids_to_bytes


class Taker:
    """A consumer that takes chunks at random."""

    def __init__(self, rng: random.Random, texts: list[str]) -> None:
        self._rng = rng
        self._texts = texts

    def take(self, index: int, chunk: Chunk) -> bool:
        takes = self._rng.random() < 0.7
        if takes:
            self._texts[index] += chunk.text
        return takes

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(30))
def test_text_arrives_complete_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    put, read = ["", ""], ["", ""]

    async def work() -> None:
        unflushed: dict[Consumer, None] = {}
        buffer = OutputBuffer(unflushed)
        taker = Taker(rng, read)

        async def admitted_and_read() -> None:
            while not buffer.is_admitted:
                await buffer.wait()
            for _ in range(3):  # busy with the head of the response
                await asyncio.sleep(0)
            while not buffer.is_complete or buffer:
                if not buffer:
                    await buffer.wait(taker)
                for index, chunk in buffer.take():
                    read[index] += chunk.text
                    if rng.random() < 0.3:  # busy
                        await asyncio.sleep(0)

        reader = asyncio.create_task(admitted_and_read())
        for step in range(200):
            buffer.is_admitted = step > 20
            if rng.random() < 0.1:
                buffer.wake()
            for _ in range(rng.choice((0, 1, 1, 3))):
                index, text = rng.randrange(2), f"{step} "
                put[index] += text
                assert buffer.put(index, Chunk(index, text, b""))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            assert set(unflushed) <= {taker}
        buffer.is_complete = True
        buffer.wake()
        await reader

    run(work())
    assert read == put, seed


def test_a_replayed_chunk_is_not_merged() -> None:
    """`lengths` describes the replayed ids only, and a merged chunk has no place for it."""
    buffer = OutputBuffer({})
    lengths = ids_to_bytes([1, 1])
    buffer.put(0, Chunk(0, "ab", ids_to_bytes([1, 2]), lengths=lengths))
    for text in "cd":
        buffer.put(0, Chunk(0, text, ids_to_bytes([3])))
    assert [(chunk.text, chunk.lengths) for _, chunk in buffer.take()] == [("ab", lengths), ("cd", b"")]


def test_a_consumer_that_raises_fails_the_request() -> None:
    class Broken(Taker):
        def take(self, index: int, chunk: Chunk) -> bool:
            raise KeyError(chunk.text)

    async def work() -> None:
        buffer = OutputBuffer({})
        waiting = asyncio.create_task(buffer.wait(Broken(random.Random(), [])))
        await asyncio.sleep(0)
        assert buffer.put(0, Chunk(0, "a", b"")) and buffer.put(0, Chunk(0, "b", b""))
        await waiting
        assert isinstance(buffer.error, KeyError) and buffer.error.args == ("a",) and not buffer

    run(work())
