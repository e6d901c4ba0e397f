"""Turns the wheel that `python -m build` made into one for each architecture, with the C kernels compiled for all of
its levels, so that an installation needs no compiler.

`python -m pagewire.tools.wheels dist x86_64 aarch64` replaces the wheel in dist. Another architecture than this
machine's needs a cross compiler, such as Debian's gcc-aarch64-linux-gnu.
"""

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ..kernels.cpu import build, levels

GLIBC = (2, 28)
"""The oldest glibc that must load the libraries: that of torch's wheels."""
_CROSS = {
    "aarch64": "aarch64-linux-gnu-gcc (Debian's gcc-aarch64-linux-gnu)",
    "x86_64": "x86_64-linux-gnu-gcc (Debian's gcc-x86-64-linux-gnu)",
}


class WheelError(Exception):
    """Why a wheel cannot be made, in one sentence."""


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if all wheels were made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="the folder with a wheel for any platform")
    parser.add_argument("machines", nargs="+", choices=sorted(_CROSS), help="the architectures")
    given = parser.parse_args(argv)
    (pure,) = given.dist.resolve().glob("*-none-any.whl")
    try:
        compilers = {machine: compiler_for(machine) for machine in given.machines}
        for machine, cc in compilers.items():
            print(f"{make_wheel(pure, machine, cc)}")
    except (WheelError, build.BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    pure.unlink()
    return 0


def compiler_for(machine: str) -> str:
    """The command that compiles for the architecture. Raises WheelError."""
    is_here = machine == platform.machine()
    cc = build.compiler() if is_here else shutil.which(f"{machine}-linux-gnu-gcc")
    if cc is None:
        wanted = "a C compiler (gcc or clang)" if is_here else _CROSS[machine]
        raise WheelError(f"Kernels for {machine} need {wanted}; install it.")
    return cc


def make_wheel(pure: Path, machine: str, cc: str) -> str:
    """Writes the wheel of the architecture beside `pure`. Returns a line with its name, levels and sizes. Raises
    WheelError and BuildError."""
    compiled = levels.levels_of(machine)
    with tempfile.TemporaryDirectory() as work:
        _run("wheel", "unpack", str(pure), "--dest", work)
        (top,) = Path(work).iterdir()
        folder = top / "pagewire" / "kernels" / "cpu" / build.SHIPPED.name
        folder.mkdir()
        build.compile_levels(cc, [(level, folder / build.shipped(level).name) for level in compiled], stripped=True)
        num_bytes = sum(library.stat().st_size for library in folder.iterdir())
        (about,) = top.glob("*.dist-info/WHEEL")
        text = about.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
        about.write_text(text.replace("Tag: py3-none-any", f"Tag: py3-none-{tag}"))
        _run("wheel", "pack", str(top), "--dest-dir", str(pure.parent))
    wheel = pure.with_name(pure.name.replace("-none-any.whl", f"-none-{tag}.whl"))
    try:
        check_wheel(wheel)
    except WheelError:
        wheel.unlink()
        raise
    names = ", ".join(level.name for level in compiled)
    added = (wheel.stat().st_size - pure.stat().st_size) / 1e6
    return f"{wheel.name}: {names}; {num_bytes / 1e6:.1f} MB of libraries add {added:.1f} MB to the wheel"


def check_wheel(wheel: Path) -> None:
    """Raises WheelError if auditwheel finds that the libraries need a newer glibc than GLIBC, or other libraries."""
    told = " ".join(_run("auditwheel", "show", str(wheel)).split())
    found = re.search(r'consistent with the following platform tag: "manylinux_(\d+)_(\d+)_', told)
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        raise WheelError(f"{wheel.name} does not work with glibc {GLIBC[0]}.{GLIBC[1]}: {told}")


def _run(module: str, *arguments: str) -> str:
    """What `python -m module` prints. Raises WheelError."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"{module} failed: {done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
