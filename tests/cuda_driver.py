"""A CUDA driver without a device (`cuda_driver.c`), for processes that are started with its environment."""

import os
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import mkdtemp

import pytest

KIND = "cuda:3"
_SOURCE = Path(__file__).with_suffix(".c")


def _header() -> Path | None:
    """The folder of NVIDIA's cuda.h, which Triton brings along."""
    found = find_spec("triton")
    places = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    folders = [place / "backends/nvidia/include" for place in places]
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)


needs_driver = pytest.mark.skipif(
    which("gcc") is None or _header() is None or not hasattr(os, "memfd_create"), reason="no gcc, cuda.h or memfd"
)


@cache
def environment() -> dict[str, str]:
    """With the driver, and the folders of the tests for imports."""
    folder = mkdtemp(prefix="cuda-driver-")
    target = f"{folder}/libcuda.so.1"
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{_header()}", "-o", target, str(_SOURCE)]
    subprocess.run(command, check=True)
    import sys

    return os.environ | {"LD_LIBRARY_PATH": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
