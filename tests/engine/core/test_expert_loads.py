"""How evenly the ranks' experts are used."""

from array import array

from pagewire.engine.core.expert_loads import ExpertLoads
from pagewire.ipc.messages import ExpertLoad


def test_bytes_are_added_up() -> None:
    loads = ExpertLoads(2)
    assert not loads.sent_bytes
    for rank, num in ((1, 5), (0, 2), (1, 4)):
        loads.take(ExpertLoad(rank, 1000, {}, num))
    assert loads.sent_bytes == (2, 9)


def report(rank: int, num_steps: int, *layers: list[int]) -> ExpertLoad:
    return ExpertLoad(rank, num_steps, {2 * i: array("q", tokens).tobytes() for i, tokens in enumerate(layers)})


def test_windows_of_all_ranks_are_compared() -> None:
    loads = ExpertLoads(2)
    assert not loads.tokens and not loads.imbalance
    loads.take(report(0, 1000, [30, 10, 0, 0], [5, 5, 0, 0]))
    assert loads.tokens == (50, 0) and loads.imbalance == {}, "the other rank has not reported yet"
    loads.take(report(1, 1000, [0, 0, 10, 30], [0, 0, 20, 10]))
    assert loads.tokens == (50, 70)
    assert loads.imbalance == {0: 1.0, 2: 1.5}
    assert loads.of_experts(2) == [5, 5, 20, 10]


def test_windows_of_other_steps_wait() -> None:
    loads = ExpertLoads(2)
    for rank in range(2):
        loads.take(report(rank, 1000, [8, 8]))
    loads.take(report(0, 2000, [3, 1]))
    assert loads.imbalance == {0: 1.0}
    loads.take(report(1, 2000, [12, 0]))
    assert loads.imbalance == {0: 1.5}, "a window begins where the one before ended"
    assert loads.of_experts(0) == [15, 1]


def test_a_layer_that_no_token_has_passed_is_left_out() -> None:
    loads = ExpertLoads(1)
    loads.take(report(0, 1, [0, 0], [1, 0]))
    assert loads.imbalance == {2: 1.0}


def test_the_ranks_of_a_stage_share_its_layers() -> None:
    loads = ExpertLoads(4, 2)
    for rank, tokens in ((0, [30, 0]), (3, [0, 5]), (1, [0, 10]), (2, [5, 0])):
        layer = 0 if rank < 2 else 7
        loads.take(ExpertLoad(rank, 1000, {layer: array("q", tokens).tobytes()}))
    assert loads.tokens == (30, 10, 5, 5) and loads.imbalance == {0: 1.5, 7: 1.0}
