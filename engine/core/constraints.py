"""Constrained requests: what they sampled, for the grammar process, and the masks that it sends back.

The grammar process must read each token before it can say what may follow, so such a request samples one token at a
time: a plan samples from it only when the mask for that position has come (`Request.num_allowed`). Its prompt is
computed before.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping

from ...ipc.messages import Failed, Masks, Sampled, Tokens
from .request import Request


class Constraints:
    """Tokens and ends of constrained requests that were not sent to the grammar process yet."""

    def __init__(self) -> None:
        self._rids = array("q")
        self._ids = array("i")
        self._ended = array("q")

    def sampled(self, rid: int, token: int) -> None:
        """A constrained request goes on with this token."""
        self._rids.append(rid)
        self._ids.append(token)

    def end(self, rid: int) -> None:
        """It has ended, for whatever reason."""
        self._ended.append(rid)

    def take(self) -> Sampled | None:
        """Everything since the last call; None: nothing."""
        if not self._rids and not self._ended:
            return None
        sampled = Sampled(self._rids.tobytes(), self._ids.tobytes(), self._ended.tobytes())
        del self._rids[:], self._ids[:], self._ended[:]
        return sampled


def allow(message: Masks, requests: Mapping[int, Request]) -> Iterator[tuple[Request, Tokens | Failed]]:
    """Gives requests their masks. Yields those that end by it with their terminal messages. Requests that have ended
    meanwhile are skipped."""
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
    """Whether a mask allows one of these tokens; no tokens: all are allowed."""
    return not allowed or any(mask[token >> 3] >> (token & 7) & 1 for token in allowed)
