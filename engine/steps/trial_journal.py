"""Remembers which kernel a process is trying, so that another process knows in which one it died.

A kernel that reads beyond its memory breaks the device for its process, and torch cannot be asked any more. So each
process writes the kernel's name to a file of its own before it runs, and locks the file. A file that nobody locks is
that of a process that has ended in its trial.
"""

import contextlib
import fcntl
import os
from pathlib import Path

_SIZE = 64  # of a name


class TrialJournal:
    """Of one process and one trial."""

    def __init__(self, folder: Path | None, key: str) -> None:
        """folder: None, or one that cannot be written to: nothing is remembered. key: of the device and the versions,
        since another device or version may not have the error."""
        self._folder, self._key = folder, key
        self._fd = -1
        self._path = Path()

    def crashed(self) -> dict[str, Path]:
        """Kernel → a file of the processes that died in it: two, since one may have been killed, or one that knew."""
        ended: dict[str, list[str]] = {}
        found = {}
        for path in [] if self._folder is None else sorted(self._folder.glob(f"trial-{self._key}-*")):
            with contextlib.suppress(OSError), path.open() as file:  # of a process that runs: it is locked
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                text = file.read()
                kernel = text[:_SIZE].strip()
                ended.setdefault(kernel, []).append(text[_SIZE:])
                if kernel and ("!" in ended[kernel] or len(ended[kernel]) > 1):
                    found[kernel] = path
        return found

    def begin(self, kernel: str) -> None:
        if self._fd < 0:
            self._open()
        if self._fd >= 0:
            os.pwrite(self._fd, kernel.ljust(_SIZE).encode(), 0)

    def confirm(self) -> None:
        """The kernel that began last has certainly broken this process."""
        if self._fd >= 0:
            os.pwrite(self._fd, b"!", _SIZE)

    def close(self) -> None:
        """The trial has ended, and this process with its device has not."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path = self._folder / f"trial-{self._key}-{os.getpid()}"
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_TRUNC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError:
            self._folder = None
