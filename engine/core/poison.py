"""Requests whose numbers are not finite.

No other request may find what they computed. But the request may itself have found such KV before a result showed it:
attention spreads a NaN backwards within a chunk, so even the beginning that two requests share is not to be trusted. A
request with such numbers that found a part of its KV, on the device or behind it, therefore starts again and finds
nothing. If that does not help, the numbers are its own, and it fails.
"""

from .block_pool import BlockPool
from .loads import Loads
from .request import Request
from .request_table import RequestTable


def poison(request: Request, pool: BlockPool, loads: Loads | None, table: RequestTable) -> None:
    """A step has shown it. The caller ends the request unless it `starts_again`."""
    may_recover = request.poison()
    pool.forget(request.held)
    for group, entry in enumerate(request.tables):
        for key in request.keys[: entry.first]:  # of the blocks that it has released behind a window
            pool.drop(key, group)
    if pool.groups.state is not None:
        for key in request.snapshots:
            pool.drop(key, pool.groups.state)
    if table.chunks is not None:
        table.chunks.spoiled(request)
    if loads is not None:
        loads.refuse(request)
    if may_recover:
        table.start_again(request)
