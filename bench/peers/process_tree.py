"""The CPU time and memory of a process and its descendants."""

import contextlib
import subprocess
import threading

import psutil

_SAMPLE_S = 1.0  # a sample walks the page tables of the whole tree


class ProcessTree:
    """Samples the memory of a tree of processes on a thread."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._root = psutil.Process(process.pid)
        self._peak = 0
        self._ended = threading.Event()
        self.seen: set[psutil.Process] = set()  # all processes that were ever in the tree
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def cpu_seconds(self) -> float:
        """CPU time of all living processes, and of those that they have waited for."""
        total = 0.0
        for process in self._members():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def peak_bytes(self) -> int:
        """The largest sample so far, including one taken now."""
        self._sample()
        return self._peak

    def close(self) -> None:
        """Stops sampling, and updates `seen` a last time, because orphans cannot be found afterwards."""
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
