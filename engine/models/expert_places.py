"""Where a rank has the experts of a layer, by which experts all ranks have. No torch."""

from collections.abc import Sequence

from ..core.expert_placement import Slots
from .description import Place


def places(num_experts: int, slots: Slots, rank: int) -> tuple[Place, ...]:
    """Where a rank has each expert of a layer. The ranks that have the same expert take turns in their order."""
    holders: list[list[int]] = [[] for _ in range(num_experts)]
    for each, experts in enumerate(slots):
        for expert in experts:
            if expert >= 0:
                holders[expert].append(each)
    assert all(holders), f"no rank has expert {holders.index([])}"
    own = {expert: slot for slot, expert in enumerate(slots[rank]) if expert >= 0}
    return tuple(
        Place(own[expert], ranks.index(rank), len(ranks)) if expert in own else Place(-1)
        for expert, ranks in enumerate(holders)
    )


def table(places: Sequence[Place], num_slots: int, others: int) -> list[tuple[int, int, int]]:
    """Slot, turn, turns of each expert of a router, as kernels read them. others: experts without weights, which come
    last; their slots follow those of the matrices."""
    rows = [(place.slot, place.turn, place.turns) for place in places]
    return rows + [(num_slots + i, 0, 1) for i in range(others)]
