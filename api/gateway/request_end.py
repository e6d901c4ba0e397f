"""What is told of a request when it has ended: a line in the log, and with `tracing` a span. No texts, no keys."""

import logging
from collections.abc import Callable, Sequence

from msgspec import Struct
from starlette.types import Scope

from ...ipc.messages import Submit
from .open_request import OpenRequest
from .timeline import Timeline

log = logging.getLogger("pagewire.requests")


class RequestEnd(Struct, frozen=True):
    """One HTTP request that the engine was asked to serve, over now."""

    request_id: str
    path: str
    headers: Sequence[tuple[bytes, bytes]]  # as they came
    submits: Sequence[Submit]
    outcomes: tuple[str, ...]  # why its sequences ended, each reason once
    num_prompt: int  # tokens of each prompt that was begun, counted once
    num_cached: int  # of them, those that were not computed
    num_output: int
    timeline: Timeline

    @property
    def num_sequences(self) -> int:
        return sum(order.n for order in self.submits)


Observer = Callable[[RequestEnd], None]


def request_end(scope: Scope, request: OpenRequest) -> RequestEnd:
    """Of a request all of whose sequences have ended."""
    usages = {ended.choice: ended.usage for ended in request.ended if ended.usage is not None}
    prompts = [usages[first] for first in request.firsts if first in usages]
    return RequestEnd(
        request_id=scope["state"]["request_id"],
        path=scope["path"],
        headers=scope["headers"],
        submits=request.submits,
        outcomes=tuple(dict.fromkeys(ended.outcome for ended in request.ended)),
        num_prompt=sum(usage.num_prompt for usage in prompts),
        num_cached=sum(usage.num_cached for usage in prompts),
        num_output=sum(usage.num_output for usage in usages.values()),
        timeline=request.timeline(),
    )


def log_request(end: RequestEnd) -> None:
    """One line of name=value: ids, counts, and the milliseconds of each part of its time."""
    parts = end.timeline.parts() | {"total": end.timeline.total}
    log.info(
        "request_id=%s path=%s ended=%s sequences=%d prompt=%d cached=%d output=%d %s",
        end.request_id,
        end.path,
        ",".join(end.outcomes),
        end.num_sequences,
        end.num_prompt,
        end.num_cached,
        end.num_output,
        " ".join(f"{part}_ms={1000 * seconds:.1f}" for part, seconds in parts.items()),
    )
