"""The record of a request that has ended, for the log and for `tracing`. It holds no texts and no keys."""

import logging
from collections.abc import Callable, Sequence

from msgspec import Struct
from starlette.types import Scope

from ...ipc.messages import Submit
from .open_request import OpenRequest
from .timeline import Timeline

log = logging.getLogger("pagewire.requests")


class RequestEnd(Struct, frozen=True):
    """One HTTP request whose sequences have all ended."""

    request_id: str
    path: str
    headers: Sequence[tuple[bytes, bytes]]  # of the HTTP request, unchanged
    submits: Sequence[Submit]
    outcomes: tuple[str, ...]  # the distinct reasons why its sequences ended
    num_prompt: int  # tokens of each prompt that was started, counted once
    num_cached: int  # those of them that the prefix cache had
    num_output: int
    timeline: Timeline

    @property
    def num_sequences(self) -> int:
        return sum(submit.n for submit in self.submits)


Observer = Callable[[RequestEnd], None]


def request_end(scope: Scope, request: OpenRequest) -> RequestEnd:
    """The record of a request all of whose sequences have ended."""
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
    """Logs one line of name=value: ids, counts, and the milliseconds of each part of the request's time."""
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
