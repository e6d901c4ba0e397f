"""The compiled kernels, once for each level: a test that takes the fixture `level` runs on all of them."""

import pytest

from pagewire.kernels.cpu import build, levels
from pagewire.kernels.cpu.library import Kernels


def _params():
    """The best level and emulated tiles in `make test`; the others in `make test-long`."""
    if build.compiler() is None:
        return [pytest.param(None, marks=pytest.mark.skip(reason="no C compiler"))]
    best, *others = (level.name for level in levels.levels_here())
    return [best, levels.EMULATED, *(pytest.param(name, marks=pytest.mark.long) for name in others)]


@pytest.fixture(scope="session", params=_params())
def level(request):
    """The `Kernels` of a level, compiled if necessary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_used", [request.param])
        return Kernels()
