"""The driver does in its process what ctypes does in this one."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from remote_kernels import RemoteLibrary, missing

from pagewire.kernels.cpu import build, levels
from pagewire.kernels.cpu.dense import NativeMatrix
from pagewire.kernels.cpu.library import Kernels

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler")
SOURCE = """
#include <math.h>
typedef struct { float *numbers; long n; } List;
long pagewire_many(long a, int b, float c, long d, long e, long f, long g, long h, int i, float j, long k, float *at)
{
    *at = c - j;
    return ((((((((a * 3 + b) * 3 + d) * 3 + e) * 3 + f) * 3 + g) * 3 + h) * 3 + i) * 3) + k;
}
void pagewire_scale(List *lists, long n, float by)
{
    for (long i = 0; i < n; i++)
        for (long j = 0; j < lists[i].n; j++)
            lists[i].numbers[j] *= by;
}
float *pagewire_beyond(float *numbers) { numbers[1L << 44] = 1; return numbers; }
"""


class List(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_void_p), ("n", ctypes.c_long))


@pytest.fixture(params=["native", "under qemu"])
def library(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteLibrary]:
    """A library of SOURCE in a driver of this architecture, and of ARM64."""
    level = levels.levels_here()[-1] if request.param == "native" else levels.levels_of("aarch64")[-1]
    if reason := missing(level):
        pytest.skip(reason)
    (tmp_path / "source.c").write_text(SOURCE)
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._sources.cache_clear()
    found = RemoteLibrary(level)
    yield found
    found.close()
    build._sources.cache_clear()


def test_arguments_in_registers_and_on_the_stack(library: RemoteLibrary) -> None:
    many, pointer, long, float_ = library.pagewire_many, ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    many.argtypes = (long, ctypes.c_int, float_, long, long, long, long, long, ctypes.c_int, float_, long, pointer)
    many.restype = long
    out = torch.zeros(1)
    a, b, d, e, f, g, h, i, k = -5, 7, 1 << 40, 2, 3, 5, -7, -11, 13
    expected = ((((((((a * 3 + b) * 3 + d) * 3 + e) * 3 + f) * 3 + g) * 3 + h) * 3 + i) * 3) + k
    assert many(a, b, 2.5, d, e, f, g, h, i, 0.75, k, out.data_ptr()) == expected and out.item() == 1.75


def test_pointers_in_structures_over_many_pages(library: RemoteLibrary) -> None:
    scale = library.pagewire_scale
    scale.argtypes, scale.restype = (ctypes.c_void_p, ctypes.c_long, ctypes.c_float), None
    tensors = [torch.randn(n) for n in (1, 5000, 70_000)]
    expected = [tensor * 3 for tensor in tensors]
    lists = (List * 3)(*(List(tensor.data_ptr(), tensor.numel()) for tensor in tensors))
    for _ in range(2):  # what the driver remembers of the first call is not used in the second
        for tensor, before in zip(tensors, expected, strict=True):
            tensor.copy_(before / 3)
        copies = [tensor * 3 for tensor in tensors]
        assert scale(ctypes.addressof(lists), 3, 3.0) is None
        assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))


def test_a_kernel_that_leaves_its_memory_is_found(library: RemoteLibrary) -> None:
    library.pagewire_beyond.argtypes = (ctypes.c_void_p,)
    numbers = torch.zeros(4)
    with pytest.raises(AssertionError, match="touches memory that is not there"):
        library.pagewire_beyond(numbers.data_ptr())


def test_a_function_that_is_not_there(library: RemoteLibrary) -> None:
    with pytest.raises(AttributeError, match="has no function pagewire_nothing"):
        library.pagewire_nothing()


def test_bits_are_those_of_ctypes() -> None:
    """The best level of this machine, in this process and in a driver's."""
    torch.manual_seed(0)
    weight, x = torch.randn(129, 288), torch.randn(30, 288)
    found = build.find()
    here = NativeMatrix(Kernels(found.load()), weight).product(x, None)
    library = RemoteLibrary(found.level)
    assert torch.equal(NativeMatrix(Kernels(library.as_cdll()), weight).product(x, None), here)
    library.close()
