"""Keeps a storage within its bounds: a folder for its only user, or what several engines share.

Except for the constructors, only the thread that writes blocks calls these.
"""

import fcntl
import os
import time
from typing import Protocol

from ...errors import ConfigError
from .block_files import BlockFiles, is_part
from .block_storage import Storage

_RESCAN_S = 10.0  # other engines write too, so the count of bytes gets stale
_PART_AGE_S = 600.0  # a partial file this old has lost its writer


class Room(Protocol):
    """What the writer calls."""

    def tidy(self) -> None:
        """Called once, before anything is written."""

    def before_write(self, num_bytes: int) -> None:
        """Called before so many bytes are added."""

    def close(self) -> None:
        """Called when nothing more will be written."""


class FolderLock:
    """For a folder that belongs to one engine, whose core half decides what is removed."""

    def __init__(self, files: BlockFiles) -> None:
        """Raises ConfigError if another engine holds the folder. The lock ends with the process at the latest."""
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
        """Removes partial files of killed writers."""
        for found in self._files.scan():
            if is_part(found.name):
                self._files.remove(found.name)

    def before_write(self, num_bytes: int) -> None:
        """Does nothing: the core half has made room."""

    def close(self) -> None:
        self._lock.close()


class SharedRoom:
    """For a storage that several engines write to. Each counts what it adds. It scans the storage before it exceeds the
    limit, after every 1/32 of the limit and after some seconds, and then removes the least recently used items down to
    15/16 of the limit."""

    def __init__(self, files: Storage, size: int) -> None:
        self._files = files
        self._size = size
        self._bytes = size  # in the storage at the last scan, and written by this engine since; at first unknown
        self._written = 0  # bytes since the last scan
        self._scanned_s = 0.0

    def tidy(self) -> None:
        """Brings the storage below the limit."""
        self._trim(0)

    def before_write(self, num_bytes: int) -> None:
        """Makes room if necessary."""
        is_late = time.monotonic() - self._scanned_s > _RESCAN_S
        if is_late or self._bytes + num_bytes > self._size or self._written >= self._size // 32:
            self._trim(num_bytes)
        self._bytes += num_bytes
        self._written += num_bytes

    def close(self) -> None:
        """Does nothing: nothing was opened."""

    def _trim(self, num_bytes: int) -> None:
        now_ns = time.time_ns()
        all_found, surplus = [], []
        for found in self._files.scan():
            if is_part(found.name) and now_ns - found.used_ns > _PART_AGE_S * 1e9:
                surplus.append(found.name)
            else:
                all_found.append(found)
        total = sum(found.size for found in all_found)
        if total + num_bytes > self._size:
            bound = max(self._size - self._size // 16 - num_bytes, 0)
            for found in sorted(all_found, key=lambda found: (found.used_ns, -found.place)):
                if total <= bound:
                    break
                if not is_part(found.name):
                    surplus.append(found.name)
                    total -= found.size
        self._files.remove_all(surplus)
        self._bytes = total
        self._written = 0
        self._scanned_s = time.monotonic()
