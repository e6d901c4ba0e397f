"""What a process and all that come of it take."""

import contextlib
import subprocess
import threading

import psutil

_SAMPLE_S = 1.0  # a sample walks the page tables of the whole tree


class ProcessTree:
    """Watches the memory of a process's tree on a thread of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._root = psutil.Process(process.pid)
        self._peak = 0
        self._ended = threading.Event()
        self.seen: set[psutil.Process] = set()  # everyone that ever was in the tree
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

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

    def close(self) -> None:
        """Looks for the last time at who is there, since orphans cannot be found afterwards."""
        self._ended.set()
        self._thread.join()
        self._members()

    def _members(self) -> list[psutil.Process]:
        try:
            found = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []
        self.seen |= set(found)
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
