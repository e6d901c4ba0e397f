"""The requests that follow a grammar, as the scheduler sees them: what they drew, and the masks that came back.

The grammar process reads each token before it says what may come next, so such a request draws one token at a time:
it is planned to draw only once the mask for that very position is here (`Request.num_allowed`). Prompts go ahead.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping

from ...ipc.messages import Failed, Masks, Sampled, Tokens
from .request import Request


class Constraints:
    """What the grammar process has not been told yet."""

    def __init__(self) -> None:
        self._rids = array("q")
        self._ids = array("i")
        self._ended = array("q")

    def draw(self, rid: int, token: int) -> None:
        """A constrained request goes on with this token."""
        self._rids.append(rid)
        self._ids.append(token)

    def end(self, rid: int) -> None:
        """It is over, whatever the reason."""
        self._ended.append(rid)

    def take(self) -> Sampled | None:
        """Everything since the last call, if there is anything."""
        if not self._rids and not self._ended:
            return None
        sampled = Sampled(self._rids.tobytes(), self._ids.tobytes(), self._ended.tobytes())
        del self._rids[:], self._ids[:], self._ended[:]
        return sampled


def allow(message: Masks, requests: Mapping[int, Request]) -> Iterator[tuple[Request, Tokens | Failed]]:
    """Gives requests their masks. Those that end by it, and how. Whoever has ended meanwhile needs no mask."""
    rids = memoryview(message.rids).cast("q")
    size = len(message.bits) // len(rids) if rids else 0
    for i, rid in enumerate(rids):
        if (request := requests.get(rid)) is not None:
            mask = message.bits[i * size : (i + 1) * size]
            if _leaves_any(mask, request.asked.sampling.allowed_token_ids):
                request.allow(mask)
            else:
                detail = "allowed_token_ids leaves no token that the format or bad_words allow."
                yield request, Failed(rid, "invalid_request", detail)
    for rid in memoryview(message.free).cast("q"):
        if (request := requests.get(rid)) is not None:
            request.allow(b"")
    for rid in memoryview(message.complete).cast("q"):
        if (request := requests.get(rid)) is not None:
            yield request, request.terminal("stop")
    for rid, kind, detail in message.failed:
        if (request := requests.get(rid)) is not None:
            yield request, Failed(rid, kind, detail)


def _leaves_any(mask: bytes, allowed: Collection[int]) -> bool:
    """Whether a mask has one of these tokens; without any of them everything is allowed."""
    return not allowed or any(mask[token >> 3] >> (token & 7) & 1 for token in allowed)
