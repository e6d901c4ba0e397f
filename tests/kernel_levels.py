"""The compiled kernels, once for each level: a test that takes the fixture `level` runs on all of them. The conftest of
a folder whose tests use it imports both fixtures from here.

Levels of this CPU are called as a worker calls them; tiles are emulated in C; levels of another architecture run under
qemu (tests/remote_kernels.py).

`make test` has the best level and emulated tiles. `make test-long` adds two of the lower ones and one of the other
architecture; which ones, follows from the sources. With ALL_LEVELS=1 it adds all.
"""

import os
import platform
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest
import remote_kernels

from pagewire.kernels.cpu import build, levels

if TYPE_CHECKING:
    from pagewire.kernels.cpu.library import Kernels  # imports torch

LEVEL = "level of C kernels"
"""The property of a test that ran on a level: its name, and how it ran."""
_OTHER = "aarch64" if platform.machine() == "x86_64" else "x86_64"
_FOREIGN = {level.name: level for level in levels.levels_of(_OTHER) if not level.has_tiles and "512" not in level.name}


def _some(names: Sequence[str], num: int) -> list[str]:
    """`num` of these, which change with the kernels' sources; all with ALL_LEVELS."""
    if os.environ.get("ALL_LEVELS") or len(names) <= num:
        return list(names)
    first = zlib.crc32(b"".join(text for _, text in build._sources()))
    return [names[(first + i) % len(names)] for i in range(num)]


def _params() -> list[object]:
    if build.compiler() is None:
        return [pytest.param("", marks=pytest.mark.skip(reason="no C compiler"))]
    best, *others = (level.name for level in levels.levels_here())
    params: list[object] = [
        best,
        levels.EMULATED,
        *(pytest.param(name, marks=pytest.mark.long) for name in _some(others, 2)),
    ]
    for name in _some(list(_FOREIGN), 1):
        reason = remote_kernels.missing(_FOREIGN[name])
        marks = [pytest.mark.long, pytest.mark.skipif(reason is not None, reason=reason or "")]
        params.append(pytest.param(name, marks=marks))
    return params


def _how(name: str) -> str:
    if name in _FOREIGN:
        return f"{name} under qemu-{_OTHER}"
    return f"{name} with tiles in C" if name == levels.EMULATED else f"{name} native"


@pytest.fixture(scope="session", params=_params())
def kernels_of_level(request: pytest.FixtureRequest) -> Iterator[tuple[str, "Kernels"]]:
    """A level's name, and its kernels, compiled if necessary."""
    from pagewire.kernels.cpu.library import Kernels

    if request.param not in _FOREIGN:
        yield request.param, Kernels(build.find(request.param).load())
        return
    library = remote_kernels.RemoteLibrary(_FOREIGN[request.param])
    yield request.param, Kernels(library.as_cdll())
    library.close()


@pytest.fixture
def level(request: pytest.FixtureRequest, kernels_of_level: tuple[str, "Kernels"]) -> "Kernels":
    """The `Kernels` of a level, noted for `summary`."""
    name, kernels = kernels_of_level
    request.node.user_properties.append((LEVEL, _how(name)))
    return kernels


def summary(reports: Iterable[pytest.TestReport]) -> str | None:
    """Which levels ran, and how; None if none did."""
    counts = Counter(str(value) for report in reports for name, value in report.user_properties if name == LEVEL)
    told = ", ".join(f"{level} {num}" for level, num in sorted(counts.items()))
    ran = {level.split()[0] for level in counts}
    missed = ", ".join(name for name in (*levels.NAMES, levels.EMULATED) if name not in ran)
    return f"tests of C kernels by level: {told}; not run: {missed or 'none'}" if counts else None
