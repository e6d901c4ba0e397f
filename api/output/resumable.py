"""What another engine needs to continue a stream of typed events, as /v1/responses and /v1/messages send.

The events of chat and completions have a field for token ids; here the ids come in comments, which clients skip. The
ids of an answer's parts are derived from the answer's id, so that another engine gives them the same ids.
"""

from collections.abc import Sequence

import msgspec

from ...ipc.messages import Chunk
from ..gateway.timeline import Timeline
from ..http.http_error import HttpError
from .reply import Reply, id_list

TOKEN_IDS = b": token_ids "  # begins the comment before the events of these tokens
FAILED = b": failed "  # begins the comment before an error's event; the error's code follows


def part_id(prefix: str, whole: str, index: int) -> str:
    """The id of a part of the answer whose id is `whole`; unique among all answers."""
    return f"{prefix}{whole.partition('_')[2]}{index:02x}"


class WithTokenIds(Reply):
    """Adds these comments to the stream of another reply."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def admitted(self, nums_prompt: Sequence[int]) -> None:
        self._reply.admitted(nums_prompt)

    def ended(self, timeline: Timeline) -> None:
        self._reply.ended(timeline)

    async def settle(self) -> None:
        await self._reply.settle()

    def opening(self) -> list[bytes]:
        return self._reply.opening()

    def take(self, index: int, chunk: Chunk) -> list[bytes]:
        """One write: a client that has an event has the ids before it."""
        events = b"".join(self._reply.take(index, chunk))
        if not chunk.ids:
            return [events] if events else []
        return [TOKEN_IDS + msgspec.json.encode(id_list(chunk.ids)) + b"\n\n" + events]

    def closing(self) -> list[bytes]:
        return self._reply.closing()

    def ending(self) -> bytes:
        return self._reply.ending()

    def failure(self, error: HttpError) -> bytes:
        return FAILED + (error.code or str(error.status)).encode() + b"\n\n" + self._reply.failure(error)

    def body(self) -> bytes:
        return self._reply.body()
