"""The news that a stream's reader has not taken, because its client does not take what was sent to it before.

They are put together, a chunk for each choice: a client that falls behind gets fewer and larger events, and costs what
its text does.
"""

from msgspec.structs import replace

from ...ipc.messages import Chunk

MAX_BACKLOG_BYTES = 256 << 10
"""What one stream may leave unread. As much may be on its way out, and all of it is longer once it is JSON."""

_LOGPROB_BYTES = 200  # of one candidate


class StreamBacklog:
    """One stream's."""

    def __init__(self) -> None:
        self._chunks: dict[int, Chunk] = {}  # choice → all its news
        self.num_bytes = 0  # about

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add(self, index: int, chunk: Chunk) -> None:
        """News of a choice, after those that are here."""
        self.num_bytes += len(chunk.text) + len(chunk.ids)
        if chunk.logprobs is not None:
            self.num_bytes += _LOGPROB_BYTES * sum(1 + len(position.top) for position in chunk.logprobs)
        before = self._chunks.get(index)
        self._chunks[index] = chunk if before is None else _together(before, chunk)

    def take(self) -> list[tuple[int, Chunk]]:
        """All of it, as (choice, chunk)."""
        taken = list(self._chunks.items())
        self.clear()
        return taken

    def clear(self) -> None:
        """Nobody will read it."""
        self._chunks.clear()
        self.num_bytes = 0


def _together(first: Chunk, then: Chunk) -> Chunk:
    """What comes with a choice's first chunk is in the first, what comes with its last one in the other."""
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
