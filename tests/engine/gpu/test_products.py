"""Products of many rows with weights of 8 and 4 bits, and of the vocabulary."""

import pytest
import torch
from narrow_weights import KINDS, make_weight

from pagewire.engine.gpu import products
from pagewire.engine.gpu.products import (
    MAX_NARROW_ROWS,
    DenseProduct,
    InvariantProduct,
    ProductMatrix,
    QuantizedProduct,
    fresh,
    narrow_product,
)
from pagewire.engine.gpu.scratch import Scratch
from pagewire.kernels.quantized_weight import Int4Weight, int4_weight
from pagewire.kernels.reference import round_activations
from pagewire.kernels.triton.small_product import workspace_small_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N, K = 64, 192
MANY = MAX_NARROW_ROWS + 1
NONE = workspace_small_product([], DEVICE)


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


def many_rows():
    return (torch.randn(MANY, K, device=DEVICE) / 8).bfloat16()


def gated(product):
    return torch.nn.functional.silu(product[:, ::2]) * product[:, 1::2]


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_take_the_widened_weight(kind):
    weight = make_weight(kind, (N, K), DEVICE.type, (16, 32))
    bias = torch.randn(N, device=DEVICE).bfloat16()
    for is_gated, width in ((False, N), (True, N // 2)):
        of_product, scratch = weight.interleave() if is_gated else weight, Scratch(DEVICE)
        product = QuantizedProduct(of_product, bias, NONE, scratch.take, dtype=torch.bfloat16)
        assert product.taken(16, 2, is_gated=is_gated) == ()
        scratch.expect(*product.taken(MANY, 2, is_gated=is_gated))
        scratch.allocate(registers=0, least=0)
        scratch.begin()
        x, out = many_rows(), torch.empty(MANY, width, dtype=torch.bfloat16, device=DEVICE)
        product(x, out, is_gated=is_gated)
        exact = x.double() @ of_product.dequantize(torch.bfloat16).double().t() + bias.double()
        assert error(out, gated(exact) if is_gated else exact) < 6e-3


def test_many_rows_follow_the_order_of_the_weight():
    numbers, zeros = (torch.randint(0, 16, shape, dtype=torch.uint8) for shape in ((N, K), (K // 64, N)))
    weight = int4_weight(numbers, torch.rand(K // 64, N).half(), zeros, torch.randperm(K).int()).to(DEVICE)
    assert isinstance(weight, Int4Weight)
    scratch = Scratch(DEVICE)
    product = QuantizedProduct(weight, None, NONE, scratch.take, dtype=torch.bfloat16)
    scratch.expect(*product.taken(MANY, 2, is_gated=False))
    scratch.allocate(registers=0, least=0)
    scratch.begin()
    x, out = many_rows(), torch.empty(MANY, N, dtype=torch.bfloat16, device=DEVICE)
    product(x, out)
    assert error(out, x.double() @ weight.dequantize(torch.bfloat16).double().t()) < 4e-3


@pytest.mark.parametrize("kind", ["int8 row", "fp8 row"])
def test_many_rows_of_8_bits_multiply_weights_of_8_bits(kind):
    """With a checkpoint that was made for it. The result is that of the rounded rows."""
    weight = make_weight(kind, (N, K), DEVICE.type)
    bias = torch.randn(N, device=DEVICE).bfloat16()
    if narrow_product(weight, bias, torch.bfloat16) is None:
        pytest.skip(f"torch multiplies no {kind} on {DEVICE}")
    for is_gated, width in ((False, N), (True, N // 2)):
        product = QuantizedProduct(weight, bias, NONE, fresh(DEVICE), dtype=torch.bfloat16, has_narrow_inputs=True)
        assert not product.taken(MANY, 2, is_gated=is_gated)
        x, out = many_rows(), torch.empty(MANY, width, dtype=torch.bfloat16, device=DEVICE)
        product(x, out, is_gated=is_gated)
        if kind == "int8 row":
            codes, scales = round_activations(x.cpu(), K, None)
            rounded = (codes.double() * scales.double()).to(DEVICE)
        else:
            scales = x.float().abs().amax(dim=1, keepdim=True) / 448
            rounded = ((x.float() / scales).to(torch.float8_e4m3fn).float() * scales).double()
        exact = rounded @ weight.dequantize(torch.float64).t() + bias.double()
        assert error(out, gated(exact) if is_gated else exact) < 1e-2
        assert error(rounded, x.double()) < 0.04, "and that is near the rows"


def test_weights_that_a_library_cannot_multiply_are_widened():
    for kind in ("fp8 block", "int8 64", "int4 64", "nvfp4"):
        assert narrow_product(make_weight(kind, (N, K), DEVICE.type), None, torch.bfloat16) is None
    assert narrow_product(make_weight("int8 row", (N + 8, K), DEVICE.type), None, torch.bfloat16) is None


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("rows", [3, 40])
def test_logits_are_never_rounded(rows, is_deterministic):
    weight = (torch.randn(N, K, device=DEVICE) / 8).bfloat16()
    workspace = workspace_small_product([(N, K)], DEVICE)
    taken = DenseProduct(weight, None, workspace, fresh(DEVICE))
    product = InvariantProduct(weight, None) if is_deterministic else taken
    if rows > 16 and not is_deterministic and not products._sums_wide(DEVICE, torch.bfloat16):
        pytest.skip(f"torch sums no bfloat16 to float32 on {DEVICE}")
    x, bias = torch.randn(rows, K, device=DEVICE).bfloat16(), torch.randn(N, device=DEVICE).bfloat16()
    logits = ProductMatrix(weight, product, torch.float32).product(x, bias)
    assert logits.dtype == torch.float32 and error(logits, x.double() @ weight.double().t() + bias.double()) < 1e-6


def test_logits_are_widened_where_torch_only_sums_to_the_type_of_activations(monkeypatch):
    monkeypatch.setattr(products, "_sums_wide", lambda device, dtype: False)
    weight = (torch.randn(N, K, device=DEVICE) / 8).bfloat16()
    x = torch.randn(40, K, device=DEVICE).bfloat16()
    matrix = ProductMatrix(weight, DenseProduct(weight, None, NONE, fresh(DEVICE)), torch.float32)
    assert torch.equal(matrix.product(x, None), (x @ weight.t()).float())
