"""Finds the library of a level: compiled in the wheel, or compiled here once and kept in the user's cache folder.

A library's name has a digest of the sources and flags that it was made of, so a stale one is never found. Without a
library torch's own operations are used instead; nothing else depends on this.
"""

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from . import levels
from .levels import Level

_FOLDER = Path(__file__).parent
SHIPPED = _FOLDER / "compiled"
"""Where a wheel has its libraries. A checkout has no such folder."""
_FIRST = str(_FOLDER / "glibc.h")
_FLAGS = ("-O2", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread", "-w")
_LIBRARIES = ("-Wl,--as-needed", "-lm", "-lpthread")
_TIMEOUT_S = 120.0


class BuildError(Exception):
    """The reason why the kernels are missing, in one sentence."""


@dataclass(frozen=True)
class Library:
    """A compiled level on disk."""

    level: Level
    path: Path
    origin: str  # for the operator: "from the wheel", "compiled in 2.5 s", "compiled before"

    def load(self) -> ctypes.CDLL:
        """Its functions, and its pool of threads, which all callers in this process share."""
        return ctypes.CDLL(str(self.path))


def find(name: str | None = None) -> Library:
    """The library of a level; None: of the best that works here. It is compiled now if that was not done before. Raises
    BuildError."""
    return _find(name or levels.levels_here()[0].name)


@cache
def _find(name: str) -> Library:
    level = _level(name)
    if level.has_tiles and not levels.request_tiles():
        raise BuildError("the system does not let this process use tiles")
    if (path := shipped(level)).exists():
        return Library(level, path, "from the wheel")
    cc = compiler()
    if cc is None:
        raise BuildError("there is no C compiler (cc, gcc or clang)")
    return compile_into_cache(cc, level)


def compile_into_cache(cc: str, level: Level) -> Library:
    """Compiles a level of any architecture, unless the user's cache folder has its library. Raises BuildError."""
    file, problem = f"{level.name}-{_digest(level, _version(cc))}.so", "both cache folders belong to another user"
    for target in (_cache_folder(), Path(tempfile.gettempdir()) / f"pagewire-{os.getuid()}"):
        try:
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            if target.stat().st_uid != os.getuid():  # never load another user's library
                continue
            start = time.monotonic()
            if _compile_once(cc, level, target / file):
                return Library(level, target / file, f"compiled in {time.monotonic() - start:.1f} s")
            return Library(level, target / file, "compiled before")
        except (OSError, subprocess.SubprocessError) as error:
            problem = str(error)
    raise BuildError(f"the compiled kernels cannot be stored: {problem}")


def compiler() -> str | None:
    """The C compiler: $CC, or the first one on the path."""
    named = os.environ.get("CC")
    return next((found for name in (named, "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)


def shipped(level: Level) -> Path:
    """The file that a wheel has for the level, whether it is there or not."""
    return SHIPPED / f"{level.name}-{_digest(level)}.so"


def shipped_levels() -> tuple[str, ...]:
    """The levels of this architecture whose libraries are in the installation and fit the sources."""
    return tuple(level.name for level in levels.levels_of(platform.machine()) if shipped(level).exists())


def compile_levels(cc: str, targets: Sequence[tuple[Level, Path]], *, stripped: bool = False) -> None:
    """Compiles the sources for several levels at once, in as many processes as there are cores. A target appears when
    it is complete. stripped: without names that only debuggers and profilers read. Raises BuildError."""
    with tempfile.TemporaryDirectory(dir=targets[0][1].parent) as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = sorted(_FOLDER.glob("*.c"))
        objects = [Path(work) / level.name / f"{source.stem}.o" for level, _ in targets for source in sources]
        commands = []
        for (level, _), source, out in zip(
            [target for target in targets for _ in sources], [*sources] * len(targets), objects, strict=True
        ):
            out.parent.mkdir(exist_ok=True)
            commands.append([cc, *_FLAGS, *level.flags, "-include", _FIRST, "-c", str(source), "-o", str(out)])
        list(pool.map(_run, commands))
        libraries = [Path(work) / f"{level.name}.so" for level, _ in targets]
        links = [
            [cc, "-shared", *(["-s"] * stripped), *map(str, sorted((Path(work) / level.name).glob("*.o"))),
             *_LIBRARIES, "-o", str(library)]
            for (level, _), library in zip(targets, libraries, strict=True)
        ]  # fmt: skip
        list(pool.map(_run, links))
        for (_, target), library in zip(targets, libraries, strict=True):
            os.replace(library, target)  # atomic: another process never sees a part of it


def _compile_once(cc: str, level: Level, target: Path) -> bool:
    """Returns whether it was compiled now. Processes that need the same library wait for the first of them."""
    if target.exists():
        return False
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return False
        compile_levels(cc, [(level, target)])
    return True


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"{command[0]} took longer than {_TIMEOUT_S:g} s for one file, as it may on a busy machine: start again "
            "when it is less busy, or install a wheel of pagewire, which has the kernels compiled"
        ) from None
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")


def _level(name: str) -> Level:
    if name == levels.EMULATED:
        return levels.emulated()
    found = next((level for level in levels.levels_here() if level.name == name), None)
    if found is None:
        works = ", ".join(level.name for level in levels.levels_here())
        raise BuildError(f"this CPU cannot run kernels of the level {name}, only {works}")
    return found


def _digest(level: Level, *more: str) -> str:
    """Of all that decides what is in the library."""
    about = sha256("\0".join((level.machine, *_FLAGS, *level.flags, *_LIBRARIES, *more)).encode())
    for name, content in _sources():
        about.update(name.encode() + b"\0" + content)
    return about.hexdigest()[:20]


@cache
def _sources() -> tuple[tuple[str, bytes], ...]:
    return tuple((source.name, source.read_bytes()) for source in sorted(_FOLDER.glob("*.[ch]")))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire"


def _version(cc: str) -> str:
    return subprocess.run([cc, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]
