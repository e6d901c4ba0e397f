"""Compiles the C files of this folder once for each machine, and keeps the library in the user's cache folder.

The compiler targets the CPU that it runs on, so one source serves AVX-512, AVX2 and NEON. Without a compiler torch's
own operations are used instead; nothing else depends on this.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

_FLAGS = ("-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-w")
_TIMEOUT_S = 120.0


class BuildError(Exception):
    """The reason why the kernels are missing, in one sentence."""


def compiler() -> str | None:
    """The C compiler: $CC, or the first one on the path."""
    named = os.environ.get("CC")
    return next((found for name in (named, "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)


@cache
def load() -> ctypes.CDLL:
    """The library, compiled now unless this machine has it already. Call it after torch is imported, so that both share
    one pool of OpenMP threads. Raises BuildError."""
    cc = compiler()
    if cc is None:
        raise BuildError("there is no C compiler (cc, gcc or clang)")
    folder = Path(__file__).parent
    about = sha256("\0".join((*_FLAGS, _version(cc), _cpu())).encode())
    for source in sorted(folder.glob("*.[ch]")):
        about.update(source.name.encode() + source.read_bytes())
    name = f"cpu-{about.hexdigest()[:20]}.so"
    problem: Exception | str = "both cache folders belong to another user"
    for target in (_cache_folder(), Path(tempfile.gettempdir()) / f"pagewire-{os.getuid()}"):
        try:
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            if target.stat().st_uid != os.getuid():  # never load another user's library
                continue
            if not (target / name).exists():
                _compile(cc, folder, target / name)
            return ctypes.CDLL(str(target / name))
        except (OSError, subprocess.SubprocessError) as error:
            problem = error
    raise BuildError(f"the compiled kernels cannot be stored or loaded: {problem}")


def _compile(cc: str, folder: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        sources = sorted(folder.glob("*.c"))
        objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
        running = [
            subprocess.Popen([cc, *_FLAGS, "-c", str(source), "-o", out], stderr=subprocess.PIPE, text=True)
            for source, out in zip(sources, objects, strict=True)
        ]
        errors = [process.communicate(timeout=_TIMEOUT_S)[1] for process in running]
        for process, error in zip(running, errors, strict=True):
            if process.returncode:
                raise BuildError(f"{cc} failed: {error.strip()[-500:]}")
        library = str(Path(work) / target.name)
        done = subprocess.run(
            [cc, "-shared", "-fopenmp", *objects, "-lm", "-lpthread", "-o", library],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BuildError(f"{cc} failed: {done.stderr.strip()[-500:]}")
        os.replace(library, target)  # atomic: another worker never sees a part of it


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire"


def _version(cc: str) -> str:
    return subprocess.run([cc, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model", "cpu family", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in wanted}))
