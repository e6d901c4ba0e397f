"""The compiled kernels, once for each level: a test that takes the fixture `level` runs on all of them. The conftest of
a folder whose tests use it imports both fixtures from here.

Levels of this CPU are called as a worker calls them; tiles are emulated in C; levels of another architecture run under
qemu (tests/remote_kernels.py).
"""

import platform
from collections import Counter
from collections.abc import Iterable, Iterator
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


def _params() -> list[object]:
    """The best level and emulated tiles in `make test`; the others in `make test-long`."""
    if build.compiler() is None:
        return [pytest.param("", marks=pytest.mark.skip(reason="no C compiler"))]
    best, *others = (level.name for level in levels.levels_here())
    params: list[object] = [best, levels.EMULATED, *(pytest.param(name, marks=pytest.mark.long) for name in others)]
    for level in _FOREIGN.values():
        reason = remote_kernels.missing(level)
        marks = [pytest.mark.long, pytest.mark.skipif(reason is not None, reason=reason or "")]
        params.append(pytest.param(level.name, marks=marks))
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
