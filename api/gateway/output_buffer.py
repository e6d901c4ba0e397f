"""The buffer between the gateway, which puts a request's chunks in, and the one reader that takes them out.

While the reader waits, its consumer may take chunks where they arrive: waking a task costs more than all else that is
done for a token. While the reader is busy with a client that does not keep up, the chunks of each choice are merged:
such a client gets fewer and larger events, and costs what its text does.
"""

import asyncio
from typing import Protocol

from msgspec.structs import replace

from ...ipc.messages import Chunk

MAX_UNREAD_BYTES = 256 << 10
"""What a busy reader may leave unread. As much may be on its way out, and all of it is longer once it is JSON."""

_LOGPROB_BYTES = 200  # of one candidate


class Consumer(Protocol):
    """Takes chunks for a reader that waits."""

    def take(self, index: int, chunk: Chunk) -> bool:
        """A chunk of a choice. False: it is left to the reader, and so is all that follows. An exception fails the
        request."""

    def flush(self) -> None:
        """Called once after a batch of messages in which chunks were taken. Must not raise."""


class OutputBuffer:
    """The chunks of one request that were not read yet, and what its reader waits for."""

    def __init__(self, unflushed: dict[Consumer, None]) -> None:
        """`unflushed` receives the consumer when it has taken a chunk."""
        self.is_admitted = False  # the engine has answered for every sequence
        self.is_complete = False  # no sequence is open, so no chunk follows those that are here
        self.error: Exception | None = None  # why the request has failed; no chunk is kept after that
        self._unflushed = unflushed
        self._chunks: list[tuple[int, Chunk]] = []
        self._merged: dict[int, int] = {}  # choice → the place in `_chunks` of the chunk that takes what follows
        self._num_merged_bytes = 0  # about
        self._waiter: asyncio.Future[None] | None = None
        self._consumer: Consumer | None = None  # only while the reader waits for chunks

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def put(self, index: int, chunk: Chunk) -> bool:
        """A chunk of a choice. False: the reader has left more than MAX_UNREAD_BYTES unread."""
        consumer = self._consumer
        if consumer is not None:
            try:
                if consumer.take(index, chunk):
                    self._unflushed[consumer] = None
                    return True
            except Exception as error:
                self.fail(error)
        if self.error is not None:
            return True
        place = self._merged.get(index)
        if place is not None:
            self._chunks[place] = (index, _merged(self._chunks[place][1], chunk))
        elif self._waiter is not None:
            self._chunks.append((index, chunk))
            self.wake()
            return True
        else:
            if not chunk.lengths:  # which would not hold for a merged chunk
                self._merged[index] = len(self._chunks)
            self._chunks.append((index, chunk))
        self._num_merged_bytes += len(chunk.text) + len(chunk.ids)
        if chunk.logprobs is not None:
            self._num_merged_bytes += _LOGPROB_BYTES * sum(1 + len(position.top) for position in chunk.logprobs)
        return self._num_merged_bytes <= MAX_UNREAD_BYTES

    def take(self) -> list[tuple[int, Chunk]]:
        """All chunks, as (choice, chunk)."""
        chunks, self._chunks = self._chunks, []
        self._merged.clear()
        self._num_merged_bytes = 0
        return chunks

    def fail(self, error: Exception) -> None:
        """No chunk follows those that are here. The first error stands."""
        if self.error is None:
            self.error = error
        self.wake()

    async def wait(self, consumer: Consumer | None = None) -> None:
        """Returns after `wake`, or when a chunk is here that `consumer` has not taken."""
        assert self._waiter is None, "a stream has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        self._consumer = consumer
        try:
            await self._waiter
        finally:
            self._waiter = self._consumer = None

    def wake(self) -> None:
        """Wakes the reader if it waits. Its consumer gets no more chunks: they would overtake those that are here."""
        self._consumer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merged(first: Chunk, then: Chunk) -> Chunk:
    """What only a choice's first chunk has is taken from `first`, what only its last one has from `then`."""
    logprobs = first.logprobs
    if then.logprobs is not None:
        logprobs = (logprobs or ()) + then.logprobs
    return replace(
        then,
        text=first.text + then.text,
        ids=first.ids + then.ids,
        logprobs=logprobs,
        prompt=first.prompt,
        prompt_end=first.prompt_end,
        times=first.times,
    )
