"""The GPUs of several models: which of them each model gets, and waiting until they have room.

A model keeps its GPUs: those whose models need least in the plan. A load waits until as much memory is free there as
the plan says, because that of a process which has ended may come back later, and other programs may take some.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

FREE_WAIT_S = 30.0
_POLL_S = 0.2

Free = Callable[[Sequence[str]], Sequence[int] | None]
"""The bytes that are free on these GPUs now; None: unknown."""


def place(asked: Sequence[tuple[int, int]], num_gpus: int, pinned: Sequence[bool]) -> list[tuple[int, ...]]:
    """The GPUs of each model. `asked`: of each how many it takes, at most `num_gpus`, and its bytes on each. `pinned`:
    those that are always loaded choose first."""
    planned = [0] * num_gpus
    places: list[tuple[int, ...]] = [()] * len(asked)
    order = sorted(range(len(asked)), key=lambda model: (not pinned[model], -asked[model][1], model))
    for model in order:
        num, need = asked[model]
        places[model] = tuple(sorted(sorted(range(num_gpus), key=lambda gpu: (planned[gpu], gpu))[:num]))
        for gpu in places[model]:
            planned[gpu] += need
    return places


async def wait_for_room(needs: Mapping[str, int], free: Free, *, within_s: float = FREE_WAIT_S) -> str:
    """Returns when each of these GPUs has so many bytes free, or nobody knows: nothing; or after `within_s`: one
    sentence that says what is missing."""
    deadline = time.monotonic() + within_s
    while needs:
        found = await asyncio.to_thread(free, list(needs))
        if found is None:
            return ""
        short = [(name, need, has) for (name, need), has in zip(needs.items(), found, strict=True) if has < need]
        if not short:
            return ""
        if time.monotonic() >= deadline:
            name, need, has = short[0]
            return (
                f"{name} has {has / 1e9:.1f} GB free, and the model takes {need / 1e9:.1f} GB there: other programs, "
                "or other models beyond their plans, have taken the rest."
            )
        await asyncio.sleep(_POLL_S)
    return ""
