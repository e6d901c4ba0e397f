"""Which levels a CPU can run, and that every one of them computes."""

import torch

from pagewire.kernels import reference
from pagewire.kernels.cpu.native import NativeMatrix, native_ops


def test_each_level_computes(level):
    torch.manual_seed(0)
    weight, x = torch.randn(100, 34), torch.randn(13, 34)
    torch.testing.assert_close(NativeMatrix(level, weight).product(x, None), x @ weight.t(), atol=2e-4, rtol=1e-5)
    norm = torch.randn(34)
    torch.testing.assert_close(native_ops(level).rms_norm(x, norm, 1e-5), reference.rms_norm(x, norm, 1e-5))
