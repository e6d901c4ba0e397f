"""Where the ranks have the experts of a layer, by which experts all of them have. No torch."""

from collections.abc import Sequence
from itertools import chain

from ..core.expert_placement import Slots, deal
from .description import Place


def places(num_experts: int, slots: Slots, rank: int) -> tuple[Place, ...]:
    """Where a rank has each expert of a layer. The ranks that have the same expert take turns in their order."""
    found = []
    for holders in _holders(num_experts, slots):
        ranks = [each for each, _ in holders]
        is_own = rank in ranks
        found.append(Place(dict(holders)[rank], ranks.index(rank), len(ranks)) if is_own else Place(-1))
    return tuple(found)


def _holders(num_experts: int, slots: Slots) -> list[list[tuple[int, int]]]:
    """The ranks that have each expert of a layer, in their order, and its slot there."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
    for rank, experts in enumerate(slots):
        for slot, expert in enumerate(experts):
            if expert >= 0:
                found[expert].append((rank, slot))
    assert all(found), f"no rank has expert {found.index([])}"
    return found


def table(places: Sequence[Place], num_slots: int, others: int) -> list[tuple[int, int, int]]:
    """Slot, turn, turns of each expert of a router, as kernels read them. others: experts without weights, which come
    last; their slots follow those of the matrices."""
    rows = [(place.slot, place.turn, place.turns) for place in places]
    return rows + [(num_slots + i, 0, 1) for i in range(others)]


def holder_table(num_experts: int, slots: Slots, others: int) -> list[list[int]]:
    """Of each expert of a router how many ranks have it, and the rank and slot of each, as kernels read them. others:
    experts without weights, which come last."""
    rows = [[len(holders), *chain(*holders)] for holders in _holders(num_experts, slots)]
    width = 1 + 2 * len(slots)
    return [row + [0] * (width - len(row)) for row in [*rows, *[[0]] * others]]


def dealt_holders(num_experts: int, ranks: int, others: int) -> list[list[int]]:
    """The `holder_table` of ranks that have what is dealt at start."""
    return holder_table(num_experts, deal(num_experts, ranks), others)
