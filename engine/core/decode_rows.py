"""Decode rows in bulk: rows that compute one position, need no block for it, and sample a plain token.

Nearly every row of nearly every step is one. These functions plan and apply all decode rows of a step with one loop
each, where `Planner` and `Scheduler` treat other rows one by one. They are a shortcut and nothing else: each function
returns the rows that it leaves out, and if it leaves out all of them, every plan, output and counter is the same.
`tests/engine/core/test_decode_rows.py` plays random histories both ways and compares them.
"""

from array import array
from collections.abc import Collection, Sequence
from itertools import compress

from .request import Request

Left = list[tuple[Request, "array[int]"]]
"""Requests that a function left out, with the tokens that they sampled."""


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


def apply(requests: Sequence[Request], tokens: "array[int]") -> Left:
    """Applies one position and token of each request where the token is to be stored and nothing else. None is
    negative; more tokens may follow."""
    return Request.apply_each(requests, tokens)


def apply_drafted(requests: Sequence[Request], nums: "array[int]", most: int, tokens: "array[int]") -> Left:
    """Applies the tokens of rows with draft tokens, where they are to be stored and nothing else. Each row sampled the
    next `nums` of the tokens where `most` were planned; the rest is rolled back in all of them."""
    return Request.apply_drafted(requests, nums, most, tokens)


def columns(
    requests: Sequence[Request], nums: "array[int]", tokens: "array[int]", odd: Collection[int]
) -> "tuple[array[int], array[int]]":
    """(the rid of each token, the tokens) of these rows but those of the `odd` rids. The first rows sampled `nums` of
    the tokens, the others one each; more tokens may follow. rids: int64; tokens: int32."""
    rids = [request.rid for request in requests]
    if nums and max(nums) > 1:
        rids[: len(nums)] = [rid for rid, num in zip(rids, nums, strict=False) for _ in range(num)]
    if odd:
        plain = [rid not in odd for rid in rids]
        return array("q", compress(rids, plain)), array("i", compress(tokens, plain))
    return array("q", rids), tokens[: len(rids)]
