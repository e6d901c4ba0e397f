"""Who keeps a folder of blocks in order: its one user, or all of them together.

Both are called by the thread that writes, except for the constructors.
"""

import fcntl
import os
import time
from typing import Protocol

from ...errors import ConfigError
from .block_files import BlockFiles, is_part

_RESCAN_S = 10.0  # others write too, so what is known of the folder ages
_PART_AGE_S = 600.0  # a file that has been in the making for so long has lost its writer


class Room(Protocol):
    """What the writer asks of it."""

    def tidy(self) -> None:
        """Once, before anything is written."""

    def before_write(self, num_bytes: int) -> None:
        """So many bytes are going to be added."""

    def close(self) -> None:
        """Nothing more is going to be written."""


class FolderLock:
    """The folder belongs to one engine, whose core half says what goes."""

    def __init__(self, files: BlockFiles) -> None:
        """Raises ConfigError if another engine has it. The lock ends with the process at the latest."""
        self._files = files
        self._lock = open(os.path.join(files.path, ".lock"), "ab")  # noqa: SIM115 (`close` closes it)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(
                f"--kv-connector disk,path={files.path}: another engine uses this folder; give each its own, or use "
                f"the connector `shared`."
            ) from None

    def tidy(self) -> None:
        """Removes what killed writers left."""
        for found in self._files.scan():
            if is_part(found.name):
                self._files.remove(found.name)

    def before_write(self, num_bytes: int) -> None:
        """The core half has made room."""

    def close(self) -> None:
        """Lets others have the folder."""
        self._lock.close()


class SharedRoom:
    """Every engine adds files and counts what it added; it looks again before it passes the bound, after each 32nd part
    of it, and when some seconds have gone by, and then removes what was used longest ago, down to 15/16."""

    def __init__(self, files: BlockFiles, size: int) -> None:
        self._files = files
        self._size = size
        self._bytes = size  # in the folder when it was scanned, and written by this engine since; at first unknown
        self._written = 0  # since it was scanned
        self._scanned_s = 0.0

    def tidy(self) -> None:
        """Brings the folder below the bound."""
        self._trim(0)

    def before_write(self, num_bytes: int) -> None:
        """Makes room."""
        is_late = time.monotonic() - self._scanned_s > _RESCAN_S
        if is_late or self._bytes + num_bytes > self._size or self._written >= self._size // 32:
            self._trim(num_bytes)
        self._bytes += num_bytes
        self._written += num_bytes

    def close(self) -> None:
        """Nothing was opened."""

    def _trim(self, num_bytes: int) -> None:
        now_ns = time.time_ns()
        all_found = []
        for found in self._files.scan():
            if is_part(found.name) and now_ns - found.used_ns > _PART_AGE_S * 1e9:
                self._files.remove(found.name)
            else:
                all_found.append(found)
        total = sum(found.size for found in all_found)
        if total + num_bytes > self._size:
            bound = max(self._size - self._size // 16 - num_bytes, 0)
            for found in sorted(all_found, key=lambda found: (found.used_ns, -found.place)):
                if total <= bound:
                    break
                if not is_part(found.name):
                    self._files.remove(found.name)
                    total -= found.size
        self._bytes = total
        self._written = 0
        self._scanned_s = time.monotonic()
