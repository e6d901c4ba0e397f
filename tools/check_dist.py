"""Checks the output of `make dist`: the sdist has the files of a release, and this machine's wheel, installed into an
empty virtual environment outside of the checkout, serves the demo model to a real client with the kernels that are in
the wheel: there is no compiler on its path.

`python -m pagewire.tools.check_dist dist` downloads all dependencies of the wheel, so it takes a minute or two.
"""

import argparse
import os
import platform
import socket
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

from . import smoke

_SDIST_HOLDS = {"LICENSE", "CHANGELOG.md", "README.md", "SECURITY.md", "pyproject.toml"}
_STOP_S = 30.0


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if all checks pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="the folder with a wheel for this machine and one sdist")
    folder = parser.parse_args(argv).dist.resolve()
    (wheel,), (sdist,) = folder.glob(f"*_{platform.machine()}.whl"), folder.glob("*.tar.gz")
    if missing := _SDIST_HOLDS - names_at_the_top(sdist):
        print(f"{sdist.name} lacks {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as empty:
        return serve_from(wheel, Path(empty))


def names_at_the_top(sdist: Path) -> set[str]:
    """The names of the files directly in the sdist's top folder."""
    with tarfile.open(sdist) as archive:
        paths = [name.split("/") for name in archive.getnames()]
    return {path[1] for path in paths if len(path) == 2}


def serve_from(wheel: Path, empty: Path) -> int:
    """Installs the wheel in an empty folder, starts its server and runs the smoke test. Returns 0 if it passes."""
    venv.create(empty / "venv", with_pip=True)
    python = empty / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, str(wheel)], cwd=empty, env=environment, check=True)
    where = subprocess.run(
        [python, "-c", "import pagewire; print(pagewire.__file__)"],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    print(f"installed: {where}")
    if not Path(where).is_relative_to(empty.resolve()):
        print(f"pagewire comes from {where}, which is not the wheel's", file=sys.stderr)
        return 1
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment |= {"PATH": str(empty / "venv" / "bin"), "XDG_CACHE_HOME": str(empty / "cache")}
    environment.pop("CC", None)
    command = [str(empty / "venv" / "bin" / "pagewire"), "serve", "--port", str(port)]
    with (empty / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=empty, env=environment, stderr=log)
    try:
        failed = smoke.main(["--url", f"http://127.0.0.1:{port}"])
    finally:
        server.terminate()
        code = server.wait(_STOP_S)
    if failed or code:
        print((empty / "log").read_text(), f"the server ended with {code}", sep="\n", file=sys.stderr)
        return 1
    log_text = (empty / "log").read_text()
    note = next((line.strip() for line in log_text.splitlines() if "kernels" in line), "")
    print(f"it served with: {note}")
    if "from the wheel" not in note:
        print(log_text, "the server did not use the kernels of the wheel", sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
