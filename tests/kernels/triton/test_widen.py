"""Widened weights, against `dequantize`."""

import pytest
import torch
from narrow_weights import KINDS, make_weight

from pagewire.kernels.quantized_weight import E2M1, Fp8Weight, Int8Weight, fp4_weight, int4_weight
from pagewire.kernels.triton.widen import widen

DTYPES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_widened_weight_is_that_of_dequantize(device, kind, dtype):
    for shape in ((96, 256), (84, 152 if kind in ("fp8 row", "fp8 block", "int8 row") else 192)):
        weight = make_weight(kind, shape, device)
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        widen(weight, out)
        assert torch.equal(out, weight.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_8_bits_is_widened_exactly(device, dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(1, 256).repeat(16, 1)
    out = torch.empty(16, 256, dtype=dtype, device=device)
    widen(Int8Weight(codes.view(torch.int8), torch.ones(1, 16, device=device)), out)
    assert torch.equal(out, codes.view(torch.int8).to(dtype))
    codes[:, [0x7F, 0xFF]] = 0  # NaN
    values = codes.view(torch.float8_e4m3fn)
    widen(Fp8Weight(values, torch.ones(16, device=device)), out)
    assert torch.equal(out, values.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_4_bits_is_widened_exactly(device, dtype):
    """int4 with each zero point; the codes of e2m1 with each finite scale of NVFP4 that is not zero."""
    numbers = torch.arange(16, dtype=torch.uint8).repeat(32, 2)
    zeros = torch.arange(32, dtype=torch.uint8)[None, :] % 17
    out = torch.empty(32, 32, dtype=dtype, device=device)
    widen(int4_weight(numbers, torch.ones(1, 32).half(), zeros).to(torch.device(device)), out)
    assert torch.equal(out.cpu(), (numbers.float() - zeros[0].float()[:, None]).to(dtype))

    scales = torch.arange(128, dtype=torch.uint8)[:127].view(torch.float8_e4m3fn)
    weight = fp4_weight(torch.arange(16, dtype=torch.uint8).repeat(127, 2), scales.repeat(2, 1), torch.ones(127))
    out = torch.empty(127, 32, dtype=dtype, device=device)
    widen(weight.to(torch.device(device)), out)
    assert torch.equal(out.cpu().double(), scales.double()[:, None] * torch.tensor(E2M1 * 2).double())
