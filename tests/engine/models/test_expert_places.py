"""Where a rank has the experts of a layer."""

from itertools import product

from pagewire.engine.core.expert_placement import deal
from pagewire.engine.models.description import Place
from pagewire.engine.models.expert_places import holder_table, places, table


def test_ranks_with_the_same_expert_take_turns() -> None:
    slots = ((0, 1), (2, 1), (1,))
    assert places(3, slots, 0) == (Place(0), Place(1, 0, 3), Place(-1))
    assert places(3, slots, 1) == (Place(-1), Place(1, 1, 3), Place(0))
    assert places(3, slots, 2) == (Place(-1), Place(0, 2, 3), Place(-1))
    assert places(2, ((0, -1), (1, 0)), 0) == (Place(0, 0, 2), Place(-1)), "an empty slot"
    for expert, position in product(range(3), range(7)):
        found = [places(3, slots, rank)[expert] for rank in range(3)]
        assert sum(each.slot >= 0 and position % each.turns == each.turn for each in found) == 1


def test_experts_without_weights_follow_those_of_the_rank() -> None:
    assert table(places(3, deal(3, 2), 1), 1, 2) == [(-1, 0, 1), (-1, 0, 1), (0, 0, 1), (1, 0, 1), (2, 0, 1)]


def test_holders_are_those_that_take_turns() -> None:
    slots = ((0, 1), (2, 1), (1, -1))
    assert holder_table(3, slots, 1) == [
        [1, 0, 0, 0, 0, 0, 0],
        [3, 0, 1, 1, 1, 2, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    for expert, (num, *holders) in enumerate(holder_table(3, slots, 0)):
        for turn in range(num):
            place = places(3, slots, holders[2 * turn])[expert]
            assert (place.slot, place.turn, place.turns) == (holders[2 * turn + 1], turn, num)
