"""One of several models behind one port, as an api process sees it: whether it is loaded, and who needs it."""

from collections.abc import Callable

from ...ipc.messages import ModelState

Tell = Callable[[bool, float | None], None]
"""Tells the supervisor whether this process has requests for the model, and what they say of its stay (seconds)."""

_UNLOADED = ModelState("unloaded", 0.0, 0, False, float("inf"), 0.0, "")


class Residence:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.is_open = False  # this process has requests for it
        self._keep_alive_s: float | None = None
        self.state: ModelState = _UNLOADED  # as the supervisor has reported it last

    def use(self, is_open: bool) -> None:
        """This process has requests for the model from now on, or has no more."""
        self.is_open = is_open
        self._tell(is_open, self._keep_alive_s if is_open else None)
        self._keep_alive_s = None

    def keep(self, seconds: float) -> None:
        """How long the model stays after the last request, by a request that comes now. inf: until memory is short."""
        if self.is_open:
            self._tell(True, seconds)
        else:
            self._keep_alive_s = seconds

    def let_go(self) -> None:
        """The model need not stay when its last request has ended."""
        self._tell(self.is_open, 0.0)
