"""Which experts the ranks have: dealt, and copied where many tokens go."""

import random
from array import array
from collections.abc import Callable

import pytest

from pagewire.engine.core.expert_loads import ExpertLoads
from pagewire.engine.core.expert_placement import Balancer, Slots, deal, place
from pagewire.ipc.messages import ExpertLoad, ExpertsRead, PlaceExperts, ReadExperts


@pytest.mark.parametrize(("num", "ranks"), [(8, 3), (4, 4), (7, 2), (60, 8), (5, 1)])
def test_each_expert_is_dealt_to_one_rank_and_the_first_ranks_have_most(num: int, ranks: int) -> None:
    slots = deal(num, ranks)
    assert [expert for own in slots for expert in own] == list(range(num))
    sizes = [len(own) for own in slots]
    assert max(sizes) == sizes[0] and max(sizes) - min(sizes) <= 1 <= min(sizes)


def busiest(load: list[int], slots: Slots) -> float:
    """Tokens of the busiest rank, whose experts' tokens are shared among those that have them."""
    copies = [sum(expert in own for own in slots) for expert in range(len(load))]
    return max(sum(load[expert] / copies[expert] for expert in own if expert >= 0) for own in slots)


def test_the_hottest_expert_is_copied_to_the_least_busy_rank() -> None:
    load = [90, 10, 10, 10, 40, 20]
    assert place(load, deal(6, 3), 1) == ((0, 1, 2), (2, 3, 0), (4, 5)), "60 tokens for each rank"
    assert place(load, deal(6, 3), 0) == deal(6, 3)
    assert place([5, 5, 5, 5], deal(4, 2), 2) == deal(4, 2), "nothing helps ranks that are even"


@pytest.mark.parametrize("seed", range(40))
def test_replicas_relieve_the_busiest_rank(seed: int) -> None:
    rng = random.Random(seed)
    num, ranks, spares = rng.randrange(4, 64), rng.randrange(2, 5), rng.randrange(1, 4)
    load = [int(1000 * rng.paretovariate(1.1)) for _ in range(num)]
    base = deal(num, ranks)
    slots = place(load, base, spares)
    assert slots == place(load, base, spares), "deterministic"
    for own, more in zip(base, slots, strict=True):
        assert more[: len(own)] == own and len(set(more)) == len(more) <= len(own) + spares
    mean = sum(load) / ranks
    assert mean - 1e-6 <= busiest(load, slots) <= busiest(load, base)
    if slots != base:
        assert busiest(load, slots) < busiest(load, base)


def test_a_skewed_load_becomes_nearly_even() -> None:
    load = [int(10_000 / (rank + 1)) for rank in range(64)]
    before, after = deal(64, 8), place(load, deal(64, 8), 2)
    mean = sum(load) / 8
    assert busiest(load, before) > 4 * mean and busiest(load, after) < 1.7 * mean


def loads_of(*windows: list[list[int]]) -> ExpertLoads:
    """windows: layers, each the tokens of its experts, all counted on rank 0 of two."""
    loads = ExpertLoads(2)
    for number, layers in enumerate(windows):
        take(loads, number, layers)
    return loads


def take(loads: ExpertLoads, number: int, layers: list[list[int]]) -> None:
    for rank in range(2):
        half = [tokens[: len(tokens) // 2] + [0] * (len(tokens) // 2) for tokens in layers]
        rest = [[0] * (len(tokens) // 2) + tokens[len(tokens) // 2 :] for tokens in layers]
        tokens = (half, rest)[rank]
        loads.take(ExpertLoad(rank, number, {i: array("q", each).tobytes() for i, each in enumerate(tokens)}))


def begin(balancer: Balancer, loads: ExpertLoads, now: float = 0.0, *, is_quiet: bool = True) -> ReadExperts | None:
    return balancer.next(loads, now, is_quiet=is_quiet)


def move(balancer: Balancer, loads: ExpertLoads) -> PlaceExperts | None:
    """At a quiet moment, and both ranks read it."""
    if (read := begin(balancer, loads)) is None:
        return None
    assert balancer.hear(0, ExpertsRead(read.number)) is None
    placed = balancer.hear(1, ExpertsRead(read.number))
    assert placed == PlaceExperts(read.layer, read.slots)
    return placed


def test_one_layer_after_the_other_and_once_in_a_window() -> None:
    balancer = Balancer(2, 1)
    loads = loads_of([[400, 20, 20, 20], [100, 100, 100, 100], [300, 300, 20, 20]])
    first, second = PlaceExperts(0, ((0, 1, 2), (2, 3, 0))), PlaceExperts(2, ((0, 1, -1), (2, 3, 0)))
    assert [move(balancer, loads) for _ in range(3)] == [second, first, None]
    take(loads, 1, [[400, 20, 20, 20], [100, 100, 100, 100], [20, 300, 20, 20]])
    assert move(balancer, loads) == PlaceExperts(2, ((0, 1, 2), (2, 3, 1))), "what is hot now"
    assert move(balancer, loads) is None, "the other layer has what is best"
    balancer.forget()
    take(loads, 2, [[400, 20, 20, 20], [100, 100, 100, 100], [100, 100, 100, 100]])
    assert move(balancer, loads) == first


def test_a_rank_has_no_more_slots_than_experts_that_it_lacks() -> None:
    expected = PlaceExperts(0, ((0, 1, 2, -1), (2, 3, 0, -1)))
    assert move(Balancer(2, 9), loads_of([[400, 20, 20, 20]])) == expected


def test_few_tokens_and_small_gains_change_nothing() -> None:
    assert begin(Balancer(2, 1), loads_of([[40, 0, 0, 0]])) is None
    assert begin(Balancer(2, 1), loads_of([[110, 100, 90, 80]])) is None
    assert begin(Balancer(2, 0), loads_of([[400, 20, 20, 20]])) is None


TWO_LAYERS = [[400, 20, 20, 20], [300, 20, 20, 20]]


def test_the_ranks_of_all_stages_have_read_before_any_switches_and_no_other_move_is_under_way() -> None:
    balancer, loads = Balancer(2, 1, num_stages=2), loads_of(TWO_LAYERS)
    read = begin(balancer, loads)
    assert read is not None
    for rank in (3, 1, 1, 0):
        assert balancer.hear(rank, ExpertsRead(read.number)) is None and begin(balancer, loads) is None
    assert balancer.hear(2, ExpertsRead(read.number)) == PlaceExperts(read.layer, read.slots)
    assert balancer.hear(2, ExpertsRead(read.number)) is None, "ranks repeat it"
    after = begin(balancer, loads)
    assert after is not None and after.layer == 1 and after.number > read.number
    assert balancer.hear(2, ExpertsRead(read.number)) is None, "of the move before"


def test_a_move_that_a_rank_cannot_read_is_dropped_until_the_next_window() -> None:
    balancer, loads = Balancer(2, 1), loads_of(TWO_LAYERS)
    read = begin(balancer, loads)
    assert read is not None and read.layer == 0
    assert balancer.hear(0, ExpertsRead(read.number)) is None
    assert balancer.hear(1, ExpertsRead(read.number, "The disk is gone.")) is None
    assert balancer.hear(1, ExpertsRead(read.number)) is None, "it is over"
    other = move(balancer, loads)
    assert other is not None and other.layer == 1 and begin(balancer, loads) is None
    take(loads, 1, TWO_LAYERS)
    assert move(balancer, loads) == PlaceExperts(read.layer, read.slots), "the ranks still have what was dealt"


@pytest.mark.parametrize("how", [Balancer.drop, Balancer.forget])
def test_what_was_read_before_the_move_was_given_up_does_not_count(how: Callable[[Balancer], None]) -> None:
    balancer, loads = Balancer(2, 1), loads_of(TWO_LAYERS)
    read = begin(balancer, loads)
    assert read is not None and balancer.hear(0, ExpertsRead(read.number)) is None
    how(balancer)
    assert balancer.hear(1, ExpertsRead(read.number)) is None
    take(loads, 1, TWO_LAYERS)
    again = begin(balancer, loads)
    assert again is not None and (again.layer, again.slots) == (read.layer, read.slots)
    assert balancer.hear(1, ExpertsRead(again.number)) is None, "rank 0 has not read it again"


def test_a_move_waits_for_a_quiet_moment_but_not_for_ever() -> None:
    balancer, loads = Balancer(2, 1), loads_of(TWO_LAYERS)
    assert all(begin(balancer, loads, now, is_quiet=False) is None for now in (100.0, 105.0))
    assert Balancer(2, 1).next(loads, 105.0, is_quiet=True) is not None
    read = begin(balancer, loads, 110.0, is_quiet=False)
    assert read is not None, "it was patient for ten seconds"
    for rank in range(2):
        balancer.hear(rank, ExpertsRead(read.number))
    assert begin(balancer, loads, 115.0, is_quiet=False) is None, "each move is"
    take(loads, 1, [[100, 100, 100, 100]] * 2)
    assert begin(balancer, loads, 118.0) is None, "a quiet moment, and nothing to do"
    take(loads, 2, TWO_LAYERS)
    assert begin(balancer, loads, 127.0, is_quiet=False) is None and begin(balancer, loads, 128.0, is_quiet=False)
