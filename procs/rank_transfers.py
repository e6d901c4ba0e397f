"""Which KV transfers have ended on all ranks. Each rank moves its part of a block, at its own pace."""

from dataclasses import dataclass, field

from ..ipc.messages import Transferred, bytes_to_ids, ids_to_bytes


@dataclass
class _Ended:
    """What was reported of one request."""

    ranks: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)  # blocks that a rank could not fill
    num_moved: int = 0  # blocks; the most that a rank reported with it
    load_ms: float = 0.0


class RankTransfers:
    """A transfer is over when every rank has reported it, and has failed if it has on any of them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loads: dict[int, _Ended] = {}  # by rid
        self._sends: dict[int, _Ended] = {}

    def add(self, message: Transferred) -> Transferred | None:
        """Takes a rank's report. What is over by it; None: nothing."""
        if self._num_ranks == 1:
            return message
        failed = set(bytes_to_ids(message.failed_blocks))
        for number, rid in enumerate(message.loaded):
            load = self._loads.setdefault(rid, _Ended())
            load.ranks.add(message.rank)
            load.failed |= failed
            if number == 0:  # the cost is that of all loads of the message
                load.num_moved = max(load.num_moved, message.num_blocks)
                load.load_ms = max(load.load_ms, message.load_ms)
        for rid in message.sent:
            self._sends.setdefault(rid, _Ended()).ranks.add(message.rank)
        loads, sends = self._take(self._loads), self._take(self._sends)
        if not loads and not sends:
            return None
        over = loads.values()
        return Transferred(
            tuple(sorted(loads)),
            ids_to_bytes(sorted(set[int]().union(*(load.failed for load in over)))),
            tuple(sorted(sends)),
            sum(load.num_moved for load in over),
            sum(load.load_ms for load in over),
        )

    @property
    def is_partial(self) -> bool:
        """Whether something has ended on some ranks and not on others."""
        return bool(self._loads or self._sends)

    def forget(self) -> None:
        """The workers were replaced."""
        self._loads.clear()
        self._sends.clear()

    def _take(self, ended: dict[int, _Ended]) -> dict[int, _Ended]:
        over = {rid: one for rid, one in ended.items() if len(one.ranks) == self._num_ranks}
        for rid in over:
            del ended[rid]
        return over
