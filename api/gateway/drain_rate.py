"""How fast the engine gets its work done, and so when it pays to come again.

Counts sequences that have come to their end against the time in which there was any to work on, and forgets both with
that time: an idle hour says nothing of the speed. Knows no clock but the one it is given.
"""

import math

_MEMORY_S = 10.0  # of busy time
_LEAST_S, _MAX_S = 1, 60  # what a client is told


class DrainRate:
    """The ends of sequences in the time that went by while some were open."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._is_busy = False
        self._num_ended = 0.0  # both fade at the same pace
        self._busy_s = 0.0

    def note(self, now: float, *, is_busy: bool, num_ended: int = 0) -> None:
        """So many sequences have just ended; `is_busy`: others are open from now on."""
        if self._is_busy:
            past_s = now - self._at
            kept = math.exp(-past_s / _MEMORY_S)
            self._num_ended *= kept
            self._busy_s = self._busy_s * kept + past_s
        self._at, self._is_busy = now, is_busy
        self._num_ended += num_ended

    def retry_after_s(self, num_ahead: int) -> int:
        """Until so many sequences will have ended at this speed; a minute at most, a second if nothing is known."""
        if self._num_ended < 1 or self._busy_s <= 0:
            return _LEAST_S
        return max(_LEAST_S, min(_MAX_S, math.ceil(num_ahead * self._busy_s / self._num_ended)))
