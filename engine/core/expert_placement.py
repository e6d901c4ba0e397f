"""Which experts the ranks have: dealt at start, and further copies of those that many tokens choose.

Pure arithmetic on counts. `Balancer` looks at the ranks' reports and says which layer to change next: the ranks read
the weights while steps go on, and switch between two plans (`engine/executors/expert_replicas.py`).
"""

from collections.abc import Sequence

from ...ipc.messages import ExpertsRead, PlaceExperts, ReadExperts
from .expert_loads import ExpertLoads

Slots = tuple[tuple[int, ...], ...]
"""The experts of a layer that each rank has, in the order of its matrices; -1: a slot without an expert."""

_LEAST_IMBALANCE = 1.3  # of the busiest rank to the mean, from which replicas are worth their weights
_LEAST_GAIN = 0.05  # of the busiest rank's tokens
_LEAST_TOKENS = 32  # for each expert of a layer in a window; fewer say little
_PATIENCE_S = 10.0  # after which a read begins without a quiet moment


def deal(num_experts: int, ranks: int) -> Slots:
    """Each expert to one rank, in order; the first ranks have one more if the number does not divide. At least one for
    each of up to `num_experts` ranks."""
    ends = [-(-rank * num_experts // ranks) for rank in range(ranks + 1)]
    return tuple(tuple(range(ends[rank], ends[rank + 1])) for rank in range(ranks))


def room(num_experts: int, own: Sequence[int], num_spares: int) -> int:
    """Slots for replicas of a rank that was dealt `own`: no more than there are experts that it lacks."""
    return min(num_spares, num_experts - len(own))


def place(load: Sequence[int], base: Slots, num_spares: int) -> Slots:
    """The experts of `base`, and for each rank up to `num_spares` replicas that relieve the busiest rank. load: tokens
    of each expert. A replica takes an equal share of them. The same input gives the same result."""
    slots = [list(own) for own in base]
    while True:
        totals = _totals(load, slots)
        busiest = max(range(len(slots)), key=lambda rank: (totals[rank], -rank))
        found = _relief(load, base, num_spares, slots, totals, busiest)
        if found is None:
            return tuple(tuple(own) for own in slots)
        expert, rank = found
        slots[rank].append(expert)


def _relief(
    load: Sequence[int], base: Slots, num_spares: int, slots: list[list[int]], totals: list[float], busiest: int
) -> tuple[int, int] | None:
    """(expert of the busiest rank, rank that gets a replica of it), so that both have fewer tokens than the busiest
    has, and as few as possible; None: nothing helps."""
    best: tuple[float, int, int] | None = None
    for expert in slots[busiest]:
        copies = sum(expert in own for own in slots)
        share, later = load[expert] / copies, load[expert] / (copies + 1)
        for rank, own in enumerate(slots):
            if expert in own or len(own) - len(base[rank]) == num_spares:
                continue
            after = max(totals[busiest] - share + later, totals[rank] + later)
            if after < totals[busiest] and (best is None or after < best[0]):
                best = after, expert, rank
    return None if best is None else (best[1], best[2])


def _totals(load: Sequence[int], slots: Sequence[Sequence[int]]) -> list[float]:
    """Tokens of each rank, if those with the same expert share them equally."""
    copies = [sum(expert in own for own in slots) for expert in range(len(load))]
    return [sum(load[expert] / copies[expert] for expert in own if expert >= 0) for own in slots]


class Balancer:
    """What the ranks have now, what they should have, and the move between, of one layer at a time."""

    def __init__(self, num_ranks: int, num_spares: int, num_stages: int = 1) -> None:
        """num_ranks: of a stage. num_spares: slots for replicas, of each rank and layer."""
        self._num_ranks, self._num_spares = num_ranks, num_spares
        self._num_all = num_ranks * num_stages
        self._slots: dict[int, Slots] = {}  # by layer, those that differ from what was dealt
        self._seen: dict[int, int] = {}  # layer → the window that was looked at last
        self._number = 0  # of the last move
        self._move: ReadExperts | None = None  # under way: the ranks read
        self._ready: set[int] = set()  # ranks that have read it
        self._waits_since: float | None = None  # the last quiet moment, or the last move's beginning (monotonic s)

    def forget(self) -> None:
        """The ranks were replaced: they have what is dealt, and no move is under way."""
        self._slots.clear()
        self.drop()

    def drop(self) -> None:
        """Gives up the move under way, if there is one: the ranks do not switch. Its layer has its next turn in the
        next window."""
        self._move = None
        self._ready.clear()

    def next(self, loads: ExpertLoads, now: float, *, is_quiet: bool) -> ReadExperts | None:
        """Begins to change the next layer, of those that are used least evenly; each is looked at once in a window. It
        waits for a quiet moment, but not for ever: call it about twice a second, with a monotonic clock. None: nothing
        is to be changed now, or a move is under way."""
        if is_quiet or self._waits_since is None:
            self._waits_since = now
        if self._move is not None or not (is_quiet or now - self._waits_since >= _PATIENCE_S):
            return None
        for layer, imbalance in sorted(loads.imbalance.items(), key=lambda item: (-item[1], item[0])):
            if not self._num_spares or imbalance < _LEAST_IMBALANCE:
                return None
            if self._seen.get(layer) == loads.num_windows:
                continue
            self._seen[layer] = loads.num_windows
            if (slots := self._better(layer, loads.of_experts(layer))) is not None:
                self._waits_since = now
                self._number += 1
                self._move = ReadExperts(self._number, layer, slots)
                return self._move
        return None

    def hear(self, rank: int, read: ExpertsRead) -> PlaceExperts | None:
        """What a rank, of whichever stage, has come to with a move. Returns the switch once all of them have read the
        one under way. If one could not, the move is dropped."""
        move = self._move
        if move is None or read.number != move.number:
            return None
        if read.problem:
            self.drop()
            return None
        self._ready.add(rank)
        if len(self._ready) < self._num_all:
            return None
        self.drop()
        self._slots[move.layer] = move.slots
        return PlaceExperts(move.layer, move.slots)

    def _better(self, layer: int, load: list[int]) -> Slots | None:
        """None: the ranks have what is best, or nearly."""
        if sum(load) < _LEAST_TOKENS * len(load):
            return None
        base = deal(len(load), self._num_ranks)
        now = self._slots.get(layer, tuple((*own, *[-1] * room(len(load), own, self._num_spares)) for own in base))
        wanted = place(load, base, self._num_spares)
        if max(_totals(load, wanted)) > (1 - _LEAST_GAIN) * max(_totals(load, now)):
            return None
        return tuple(_kept_in_place(len(own), held, after) for own, held, after in zip(base, now, wanted, strict=True))


def _kept_in_place(num_own: int, held: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """The wanted experts of a rank; those that it holds stay in their slots, so that nothing is read again."""
    new = [expert for expert in wanted if expert not in held]
    return tuple(
        expert if slot < num_own or expert in wanted else (new.pop(0) if new else -1)
        for slot, expert in enumerate(held)
    )
