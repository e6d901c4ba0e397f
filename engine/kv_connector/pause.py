"""When something beyond this engine that has failed may be asked again."""

FIRST_PAUSE_S = 1.0  # doubled by each further failure
LONGEST_PAUSE_S = 8.0


class Pause:
    def __init__(self) -> None:
        self.until = 0.0  # monotonic s: it is not asked before
        self._next_s = FIRST_PAUSE_S

    def fail(self, now: float) -> None:
        """It is not asked for a while, each time longer. What fails meanwhile has the same reason."""
        if now < self.until:
            return
        self.until = now + self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_PAUSE_S)

    def succeed(self) -> None:
        self._next_s = FIRST_PAUSE_S
