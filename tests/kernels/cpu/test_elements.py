"""Functions of each number, over all sizes of numbers."""

import ctypes

import torch

from pagewire.kernels.cpu import build

_ACT, _GELU = 3, 4  # of `MapKind`, and of the activations in elements.h


class _Numbers(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("stride", ctypes.c_long))


class _Map(ctypes.Structure):
    _fields_ = (
        *((name, _Numbers) for name in ("x", "y", "out")),
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("kind", "width", "size", "act")),
        *((name, ctypes.c_float) for name in ("alpha", "beta", "limit")),
    )


def test_gelu_has_the_accuracy_of_float32() -> None:
    """It computes the error function in vectors: 0.5 · x times an error of at most 5e-7."""
    small = torch.logspace(-30, 0, 3001)
    x = torch.cat((torch.linspace(-12, 12, 100_003), small, -small, torch.tensor([0.0, torch.nan, -1e30, 1e30])))
    found, width = torch.empty_like(x), len(x)
    numbers = _Numbers(x.data_ptr(), width), _Numbers(), _Numbers(found.data_ptr(), width)
    of_map = _Map(*numbers, kind=_ACT, width=width, act=_GELU)
    function = build.find(None).load().pagewire_map
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_long), None
    function(ctypes.addressof(of_map), 1)
    expected = torch.nn.functional.gelu(x.double())
    is_number = ~x.isnan()
    off = (found.double() - expected).abs()[is_number]
    assert (off <= 4e-7 * x.abs()[is_number]).all(), (off / x.abs()[is_number]).nan_to_num().max()
    assert found[~is_number].isnan().all() and found[x == 0] == 0
    assert found[x > 6].equal(x[x > 6]) and not found[x < -6].any()
