"""One HTTP request's output, as its reader sees it: admission, chunks as they come, and the end."""

from collections.abc import Callable
from typing import Self

from ...ipc.messages import Chunk
from ..http.exchange import ClientGone
from .open_request import OpenRequest
from .output_buffer import Consumer


class Stream:
    """Iterates over lists of (choice, chunk), in order; a list is empty after `wake`. Has one reader.

    `async for` ends when every sequence has ended. It raises RequestError when the request has failed, and ClientGone
    after `cancel`."""

    def __init__(self, request: OpenRequest, end: Callable[[OpenRequest, Exception], None]) -> None:
        """`end` ends what is open of the request in the engine."""
        self.request = request  # counts and times are for reading
        self.consumer: Consumer | None = None  # offered all chunks that arrive while `async for` waits
        self._buffer = request.buffer
        self._end = end
        self.wake = self._buffer.wake  # makes `async for` go round once

    @property
    def finished(self) -> bool:
        """Every sequence has ended well and everything has been read."""
        return self._buffer.is_complete and not self._buffer and self._buffer.error is None

    async def admitted(self) -> None:
        """Returns once the engine has taken every sequence. Raises RequestError if it refused one, ClientGone."""
        while not self._buffer.is_admitted and self._buffer.error is None:
            await self._buffer.wait()
        if self._buffer.error is not None:
            raise self._buffer.error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, Chunk]]:
        if self.finished:
            raise StopAsyncIteration
        buffer = self._buffer
        if not buffer and buffer.error is None:
            await buffer.wait(self.consumer)
        if not buffer and buffer.error is not None:
            raise buffer.error
        return buffer.take()

    def cancel(self) -> None:
        """The reader leaves. The engine is told of what is still open, once."""
        self.end(ClientGone())

    def end(self, error: Exception) -> None:
        """Cuts it off: the reader gets `error`, and nothing of what it has not read yet."""
        self._buffer.take()
        self._end(self.request, error)
