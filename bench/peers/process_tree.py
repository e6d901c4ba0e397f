"""A command, all processes that come of it, what they take, and their end."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from .base import PeerError

_SAMPLE_S = 1.0  # a sample walks the page tables of the whole tree
_GRACE_S = 15.0  # from SIGTERM to SIGKILL
_TAIL = 1500  # characters of its log that an error quotes


class ProcessTree:
    """Starts `command` with its output in `log` and watches the memory of its tree on a thread of its own.

    With `pipes`, its standard input and output are `to` and `back`; otherwise it has no input. It gets a session of its
    own, so that an interrupt at the terminal reaches only who must stop it.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None, pipes: bool = False
    ) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._root = psutil.Process(self._process.pid)
        self._seen: dict[int, psutil.Process] = {}  # pid → everyone that ever was in the tree
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def to(self) -> IO[bytes]:
        """Its standard input."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def back(self) -> IO[bytes]:
        """Its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout

    def check_alive(self) -> None:
        """Raises PeerError with the end of its log when it has ended."""
        code = self._process.poll()
        if code is not None:
            raise PeerError(f"it ended with exit code {code}; {self.log_tail()}")

    def log_tail(self) -> str:
        """Where its log is and how it ends, for an error."""
        text = self._log.read_text(errors="replace").strip()
        return f"its log is {self._log}" + (f" and ends:\n{text[-_TAIL:]}" if text else ", and empty")

    def cpu_seconds(self) -> float:
        """Of everyone alive, and of those that they have waited for."""
        total = 0.0
        for process in self._members():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def peak_bytes(self) -> int:
        """The largest sample so far, and one taken now."""
        self._sample()
        return self._peak

    def end(self) -> None:
        """SIGTERM to the first process; SIGKILL, by pid, to all that are left of the tree after a grace."""
        self._ended.set()
        self._thread.join()
        self._members()  # remembers who is there, since orphans cannot be found afterwards
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        others = [process for pid, process in self._seen.items() if pid != self._process.pid]
        _, left = psutil.wait_procs(others, timeout=1.0)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()  # refuses a pid that another process has got
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(left, timeout=5.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _members(self) -> list[psutil.Process]:
        try:
            found = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []
        self._seen |= {process.pid: process for process in found}
        return found

    def _sample(self) -> None:
        total = 0
        for process in self._members():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.rss)  # pss: a shared page counts once over all who share it
        self._peak = max(self._peak, total)

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._sample()
