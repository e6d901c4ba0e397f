"""The compiled kernels, once for each level: a test that takes the fixture `level` runs on all of them.

Levels of this CPU are called as a worker calls them; tiles are emulated in C; levels of another architecture run under
qemu (tests/remote_kernels.py).
"""

import platform
from collections.abc import Iterator

import pytest
import remote_kernels

from pagewire.kernels.cpu import build, levels
from pagewire.kernels.cpu.native import Kernels

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
def level(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The `Kernels` of a level, compiled if necessary."""
    library = remote_kernels.RemoteLibrary(_FOREIGN[request.param]) if request.param in _FOREIGN else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_used", [request.param])
        if library is not None:
            patch.setattr(build, "load", lambda *_: library)
        kernels = Kernels()
    yield kernels
    if library is not None:
        library.close()


@pytest.fixture(autouse=True)
def _noted(request: pytest.FixtureRequest) -> None:
    """For the summary of tests/conftest.py."""
    if "level" in request.fixturenames:
        request.node.user_properties.append(("level of C kernels", _how(request.node.callspec.params["level"])))
