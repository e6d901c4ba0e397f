"""Decode rows in bulk: rows that compute one position, need no block for it, and sample a plain token.

Nearly every row of nearly every step is one. These functions plan and apply all of a step's decode rows with a few list
operations, where `Planner` and `Scheduler` treat other rows one by one. They are a shortcut and nothing else: each
returns the rows that it left out, and if it leaves out all of them, every plan, output and counter is the same.
`tests/engine/core/test_decode_rows.py` plays random histories both ways and compares them.
"""

from array import array
from collections.abc import Sequence
from itertools import compress

from .request import Request


def plan(running: Sequence[Request], limit: int) -> tuple[list[Request], list[Request]]:
    """Plans the next position of the first `limit` decode rows. Returns them, and the other requests."""
    decodes: list[Request] = []
    others: list[Request] = []
    take = decodes.append
    for request in running:
        position = request.num_planned
        if position < request.fast_limit and position + 1 == request.num_total:
            take(request)
        else:
            others.append(request)
    others += decodes[limit:]
    del decodes[limit:]
    Request.plan_each(decodes)
    return decodes, others


def apply(requests: Sequence[Request], tokens: "array[int]") -> Sequence[int]:
    """Applies one position and token of each request, where a token is to be stored and nothing else. No token is
    negative; more of them may follow. Returns the indexes of the other requests."""
    return Request.apply_each(requests, tokens)


def apply_drafted(request: Request, tokens: "array[int]") -> bool:
    """Applies the tokens of a row with draft tokens, if they are to be stored and nothing else. Returns whether."""
    is_plain = (
        request.num_computed + len(tokens) < request.next_check and tokens[-1] >= 0 and request.stops.isdisjoint(tokens)
    )
    if is_plain:
        request.apply(len(tokens), tokens)
    return is_plain
