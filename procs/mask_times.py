"""How long the grammar process takes for masks, beside how long a step takes: whether plans may wait for masks.

A plan with late rows runs its pass while their masks are made. Only if the masks take longer than the pass do its other
rows wait. So the slowest of the last masks is compared with the fastest of the last steps: a single slow one counts for
some time.
"""

import math
from collections.abc import Iterable

LIMIT_S = 0.2
"""A step waits for masks about so long; then their requests are preempted, and the step goes on without them."""

_FORGETTING = 0.9  # of what was measured before, with each new measurement
_WAYS_S = 0.0003  # of a result to the core and of masks to the worker, about


class MaskTimes:
    """Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}  # rid → since when its next mask is due
        self._begun: dict[int, float] = {}  # rid → since when its first mask is due, which is no measure of others
        self._mask_s = math.inf  # the longest of late
        self._step_s = math.inf  # the shortest of late

    @property
    def are_quick(self) -> bool:
        """Masks take less than a step."""
        return self._mask_s + _WAYS_S < self._step_s < math.inf

    def stepped(self, device_s: float) -> None:
        """The worker has computed a step."""
        before = device_s if self._step_s == math.inf else self._step_s
        self._step_s = min(device_s, _FORGETTING * before + (1 - _FORGETTING) * device_s)

    def began(self, rids: Iterable[int], now: float) -> None:
        """The grammar process has compiled their grammar, and sends the first masks."""
        self._begun.update(dict.fromkeys(rids, now))

    def asked(self, rids: Iterable[int], now: float) -> None:
        """The grammar process was told what these sequences go on with."""
        self._asked.update(dict.fromkeys(rids, now))

    def came(self, rids: Iterable[int], now: float) -> None:
        """It has answered for these."""
        rids = tuple(rids)
        for rid in rids if self._begun else ():
            self._begun.pop(rid, None)
        asked = [since for rid in rids if (since := self._asked.pop(rid, None)) is not None]
        if asked:
            mask_s = now - min(asked)
            before = mask_s if self._mask_s == math.inf else self._mask_s
            self._mask_s = max(mask_s, _FORGETTING * before + (1 - _FORGETTING) * mask_s)

    def ended(self, rids: Iterable[int]) -> None:
        """It is asked no more for these."""
        for rid in rids:
            self._asked.pop(rid, None)
            self._begun.pop(rid, None)

    def overdue(self, now: float) -> set[int]:
        """The sequences whose mask is due for longer than `LIMIT_S`."""
        return {rid for due in (self._asked, self._begun) for rid, since in due.items() if now - since > LIMIT_S}

    def forget(self) -> None:
        """The grammar process has begun anew."""
        self._asked.clear()
        self._begun.clear()
        self._mask_s = math.inf
