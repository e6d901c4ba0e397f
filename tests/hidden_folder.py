"""Runs a program that sees an empty folder where others see its files, as on a machine that lacks them."""

import os
import subprocess
from functools import cache
from pathlib import Path

from pagewire.config.machine import cache_folder

_UNSHARE = ("unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",)))


@cache
def can_hide() -> bool:
    """Whether this user may mount something in a namespace of its own."""
    command = (*_UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt")
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def hiding(folder: Path) -> tuple[str, ...]:
    """What goes before a command; the process stays the same."""
    return (*_UNSHARE, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder))


def own_cache(home: Path) -> Path:
    """Makes `home` the cache of another machine, which has this one's compiled kernels. For XDG_CACHE_HOME."""
    there = home / "pagewire"
    there.mkdir(parents=True)
    for path in cache_folder().glob("*"):
        if path.is_file():
            (there / path.name).symlink_to(path)
    return home
