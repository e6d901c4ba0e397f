"""A process on another machine, as far as the lead's supervisor handles it like one of its own."""

import asyncio
import signal


class RemoteProcess:
    """A follower starts and ends it. `end` is called when the follower reports its end or is lost itself."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self.pid = 0
        self.returncode: int | None = None

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """The lead no longer counts on it. Its follower ends it when it carries out the next `Begin`."""
        self.end(-signal.SIGKILL)

    def send_signal(self, signum: int) -> None:
        """Does nothing: a follower has a hanging process print its stacks itself."""

    def end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._ended.set()
