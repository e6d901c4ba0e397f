"""Requests whose numbers are not finite.

Nobody else is to find what they computed. But somebody may have found it before a result told: attention lets a number
that is none spread backwards within a chunk, so even the beginning that two requests share is not to be trusted. So who
comes to such numbers and has found a part of its KV, here or behind the device, starts again and finds nothing. It
fails if that does not help: then the numbers are its own.
"""

from .block_pool import BlockPool
from .loads import Loads
from .request import Request, State
from .request_table import RequestTable


def poison(request: Request, pool: BlockPool, loads: Loads | None, table: RequestTable) -> None:
    """A step has shown it. Whoever calls ends the request unless it `starts_again`."""
    request.is_poisoned = True
    pool.forget(request.blocks)
    if loads is not None:
        loads.refuse(request)
    if (request.num_found or request.num_loading) and request.state is not State.ENDED:
        request.wants_all = True
        table.start_again(request)
