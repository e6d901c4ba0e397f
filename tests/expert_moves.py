"""Moves experts between steps, as a core has all ranks do."""

from waiting import until

from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import PlaceExperts, ReadExperts


def move_experts(runner: Runner, layer: int, slots: tuple[tuple[int, ...], ...]) -> bool:
    """This rank reads what it lacks, and switches with the others. False: one of them could not read."""
    runner.read_experts(ReadExperts(1, layer, slots))
    until(lambda: runner.experts_read, "the rank has read its experts", timeout_s=100)
    return runner.place_experts(PlaceExperts(layer, slots))
