"""How fast sequences end, from which a refused client is told when to retry.

Counts ended sequences and the time in which any were open. Both decay with that time only, because an idle hour says
nothing about the speed. The clock is the caller's.
"""

import math

_MEMORY_S = 10.0  # of busy time
_MIN_S, _MAX_S = 1, 60  # bounds of what a client is told


class DrainRate:
    """Ended sequences per second of busy time."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._is_busy = False
        self._num_ended = 0.0  # this and `_busy_s` decay at the same rate
        self._busy_s = 0.0

    def note(self, now: float, *, is_busy: bool, num_ended: int = 0) -> None:
        """`num_ended` sequences have just ended. `is_busy`: some are open from now on."""
        if self._is_busy:
            past_s = now - self._at
            kept = math.exp(-past_s / _MEMORY_S)
            self._num_ended *= kept
            self._busy_s = self._busy_s * kept + past_s
        self._at, self._is_busy = now, is_busy
        self._num_ended += num_ended

    def retry_after_s(self, num_ahead: int) -> int:
        """Seconds until `num_ahead` sequences will have ended at this rate: 1 to 60, and 1 if the rate is unknown."""
        if self._num_ended < 1 or self._busy_s <= 0:
            return _MIN_S
        return max(_MIN_S, min(_MAX_S, math.ceil(num_ahead * self._busy_s / self._num_ended)))
