"""Constrained requests: what they sampled, for the grammar process, and the masks that it sends back.

The grammar process must read each token before it can say what may follow. A plan carries the masks that have come
(`Request.num_allowed`). A plan may also compute a request whose mask has not come: the row is late, its pass runs, and
the worker samples when `LateMasks` has come. Each late row gets an answer: its mask, or, once its token does not count
any more, leave to sample anything.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping

from ...ipc.messages import Failed, LateMasks, Masks, Sampled, Tokens, ids_to_bytes
from .request import Request


class Constraints:
    """Tokens and ends of constrained requests that were not sent to the grammar process yet."""

    def __init__(self) -> None:
        self._rids = array("q")
        self._ids = array("i")
        self._ended = array("q")
        self._late: dict[int, list[tuple[int, bytes]]] = {}  # step → row and mask of late rows; empty: any token

    def sampled(self, rid: int, token: int) -> None:
        """A constrained request goes on with this token."""
        self._rids.append(rid)
        self._ids.append(token)

    def end(self, rid: int) -> None:
        """It has ended, for whatever reason."""
        self._ended.append(rid)

    def answer(self, request: Request, mask: bytes) -> None:
        """The mask of its next token has come. If a plan waits for it, the worker gets it."""
        request.allow(mask)
        if (step := request.take_late()) is not None:
            self._late.setdefault(step, []).append((request.row, mask))

    def free(self, request: Request) -> None:
        """What plans in flight sample of it does not count any more, so none of them must wait for its masks."""
        for step in request.drop_late():
            self._late.setdefault(step, []).append((request.row, b""))

    def forget_late(self) -> None:
        """The worker was replaced, and nothing is in flight."""
        self._late.clear()

    def take_late(self) -> list[LateMasks]:
        """The answers for late rows since the last call, by step."""
        late, self._late = self._late, {}
        return [_late_masks(step, late[step]) for step in sorted(late)]

    def take(self) -> Sampled | None:
        """Everything since the last call; None: nothing."""
        if not self._rids and not self._ended:
            return None
        sampled = Sampled(self._rids.tobytes(), self._ids.tobytes(), self._ended.tobytes())
        del self._rids[:], self._ids[:], self._ended[:]
        return sampled


def _late_masks(step: int, answers: list[tuple[int, bytes]]) -> LateMasks:
    masked = [(row, mask) for row, mask in answers if mask]
    return LateMasks(
        step,
        ids_to_bytes([row for row, _ in masked]),
        b"".join([mask for _, mask in masked]),
        ids_to_bytes([row for row, mask in answers if not mask]),
    )


def allow(
    message: Masks, requests: Mapping[int, Request], constraints: Constraints
) -> Iterator[tuple[Request, Tokens | Failed]]:
    """Gives requests their masks. Yields those that end by it with their terminal messages. Requests that have ended
    meanwhile are skipped."""
    rids = memoryview(message.rids).cast("q")
    size = len(message.bits) // len(rids) if rids else 0
    for i, rid in enumerate(rids):
        if (request := requests.get(rid)) is not None:
            mask = message.bits[i * size : (i + 1) * size]
            if _leaves_any(mask, request.asked.sampling.allowed_token_ids):
                constraints.answer(request, mask)
            else:
                detail = "allowed_token_ids leaves no token that the format or bad_words allow."
                yield request, Failed(rid, "invalid_request", detail)
    for rid in memoryview(message.free).cast("q"):
        if (request := requests.get(rid)) is not None:
            constraints.answer(request, b"")
    for rid in memoryview(message.complete).cast("q"):
        if (request := requests.get(rid)) is not None:
            yield request, request.terminal("stop")
    for rid, kind, detail in message.failed:
        if (request := requests.get(rid)) is not None:
            yield request, Failed(rid, kind, detail)


def _leaves_any(mask: bytes, allowed: Collection[int]) -> bool:
    """Whether a mask allows one of these tokens; no tokens: all are allowed."""
    return not allowed or any(mask[token >> 3] >> (token & 7) & 1 for token in allowed)
