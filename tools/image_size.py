"""How large the CPU image of deploy/Dockerfile is, computed from the packages that are installed here.

`python -m pagewire.tools.image_size` prints the size of each package that pagewire needs, without the extras and
without `UNUSED`, and fails if all of it is above `--most-mb`. The Dockerfile calls it with `--remove`, which deletes
`UNUSED`. The base image is not here, so its size is an estimate.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

BUDGET_MB = 1200
BASE_MB = 135  # an estimate of python:3.11-slim on x86-64 with tini, unpacked
UNUSED = re.compile(  # headers for C++ extensions, and programs and data of tests
    r"torch/(include/|test/|bin/(?!torch_shm_manager)|lib/[^/]*test)|(numpy|sympy|networkx|mpmath)/(.*/)?tests/"
)


def packages(root: str = "pagewire") -> dict[str, int]:
    """Name → bytes, of the package and all that it needs on this machine, without extras."""
    found: dict[str, int] = {}
    waiting = [root]
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # needed on other systems only
        found[name] = _size(package)
        needed = (text for text in package.requires or () if "extra ==" not in text)
        waiting += [re.split(r"[ ;<>=!~\[(]", text, maxsplit=1)[0] for text in needed]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _size(package: Distribution) -> int:
    """Bytes on disk, with the compiled modules."""
    used = (file for file in package.files or () if not UNUSED.match(str(file)))
    paths = (Path(str(package.locate_file(file))) for file in used)
    return sum(os.stat(path).st_size for path in paths if path.is_file())


def remove_unused(names: Iterable[str]) -> None:
    """Deletes the files of these packages that `UNUSED` matches."""
    for name in names:
        package = distribution(name)
        for file in package.files or ():
            if UNUSED.match(str(file)):
                Path(str(package.locate_file(file))).unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remove", action="store_true", help="delete UNUSED from this environment")
    parser.add_argument(
        "--most-mb", type=float, default=BUDGET_MB, help="what the image may have (default: %(default)s)"
    )
    given = parser.parse_args()
    sizes = packages()
    if given.remove:
        remove_unused(sizes)
    for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        print(f"{size / 1e6:8.1f} MB  {name}")
    total = BASE_MB + sum(sizes.values()) / 1e6
    print(f"{total:8.1f} MB  with the base image of {BASE_MB} MB; the budget is {BUDGET_MB} MB", flush=True)
    if total > given.most_mb:
        sys.exit(
            f"The image would have {total:,.0f} MB, and may have {given.most_mb:,.0f}: give docker build "
            "--build-arg PIP_FLAGS='--extra-index-url ADDRESS' with the address of torch's CPU builds, which the page "
            '"Get started" of PyTorch\'s site shows for CPU; or --build-arg MOST_MB=20000 for an image with CUDA.'
        )


if __name__ == "__main__":
    main()
