"""Products of GGUF's K types in C: the bits of the reference, near the products of the weights as floats, on every
level; and matrices whose parts have different types."""

import gguf
import gguf_files
import numpy as np
import pytest
import torch

from pagewire.kernels import reference
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.cpu.quantized import MatrixStack, NativeSuperblockMatrix
from pagewire.kernels.grouped_weight import GroupedWeight, quantize
from pagewire.kernels.superblock_weight import FORMS, SuperblockWeight, packed_bytes

if build.compiler() is None:
    pytest.skip("no C compiler", allow_module_level=True)

ROWS = (1, 2, 3, 4, 5, 12, 13, 33)
MOST = 33


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make(kind: str, n: int, k: int) -> SuperblockWeight:
    """Any bits but for the float16 factors."""
    return SuperblockWeight(kind, torch.from_numpy(gguf_files.random_blocks(kind, (n, k), n + k)))


@pytest.mark.parametrize(("n", "k"), [(100, 256), (33, 768)])
@pytest.mark.parametrize("kind", FORMS)
def test_products_have_the_bits_of_the_reference(level: Kernels, kind: str, n: int, k: int) -> None:
    """So a row's bits do not depend on other rows, on the number of threads or on the level."""
    weight = make(kind, n, k)
    ours, theirs = NativeSuperblockMatrix(level, weight), reference.TorchSuperblockMatrix(weight)
    x = torch.randn(MOST, 2 * k)[:, :k]  # rows need not follow one another
    x[0] *= 1000
    bias = torch.randn(n)
    expected = theirs.product(x, None)
    for rows in ROWS:
        for first in {0, MOST - rows}:
            part = slice(first, first + rows)
            assert torch.equal(ours.product(x[part], None), expected[part]), (rows, first)
            assert torch.equal(ours.product(x[part], bias), expected[part] + bias)
    most, ids = ours.greedy(x)
    assert torch.equal(most, expected.amax(dim=1)) and torch.equal(ids, expected.argmax(dim=1))


@pytest.mark.parametrize("kind", FORMS)
def test_sums_of_the_largest_numbers_do_not_overflow(level: Kernels, kind: str) -> None:
    """All bits of numbers, scales and minima set, and the least scale of Q6_K."""
    weight = make(kind, 16, 256)
    blocks = weight.blocks.clone()
    factors = [blocks[:, at : at + 2].clone() for at in weight.form.factors]
    blocks[:] = 255
    if kind == "Q6_K":
        blocks[:, 192:208] = 128
    for at, factor in zip(weight.form.factors, factors, strict=True):
        blocks[:, at : at + 2] = factor
    weight = SuperblockWeight(kind, blocks)
    for x in (torch.ones(5, 256), -torch.ones(5, 256)):
        expected = reference.TorchSuperblockMatrix(weight).product(x, None)
        assert torch.equal(NativeSuperblockMatrix(level, weight).product(x, None), expected)
        torch.testing.assert_close(expected, x @ weight.dequantize(torch.float32).t(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", FORMS)
def test_products_are_near_those_of_floats(level: Kernels, kind: str) -> None:
    """Half a step of each activation at most, times the weight."""
    weight = make(kind, 40, 512)
    dense = weight.dequantize(torch.float64)
    x = torch.randn(7, 512)
    half_step = x.unflatten(1, (-1, 256)).abs().amax(dim=2).double() / 254
    bound = half_step @ dense.abs().unflatten(1, (-1, 256)).sum(dim=2).t() * 1.001 + 1e-4
    assert ((NativeSuperblockMatrix(level, weight).product(x, None) - x.double() @ dense.t()).abs() <= bound).all()


@pytest.mark.parametrize("kind", FORMS)
def test_rows_are_those_of_the_gguf_package(level: Kernels, kind: str) -> None:
    weight = make(kind, 37, 512)
    expected = gguf.dequantize(weight.blocks.numpy(), gguf.GGMLQuantizationType[kind]).reshape(37, 512)
    ids = torch.tensor([36, 0, 17, 17, 5])
    found = NativeSuperblockMatrix(level, weight).lookup(ids)
    assert torch.equal(found, torch.from_numpy(expected)[ids]) and np.isfinite(expected).all()


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_gates_and_ups(level: Kernels, kind: str, rows: int) -> None:
    weight = make(kind, 84, 256)
    gated, plain = NativeSuperblockMatrix(level, weight, is_gated=True), NativeSuperblockMatrix(level, weight)
    x, bias = torch.randn(rows, 256), torch.randn(84)
    for each in (None, bias):
        expected = reference.silu_mul(plain.product(x, each))
        torch.testing.assert_close(gated.silu_mul(x, each), expected, atol=1e-5, rtol=1e-5)
    ids = torch.arange(84)
    assert torch.equal(gated.lookup(ids), plain.lookup(ids))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_row_that_is_not_finite_is_nan_alone(level: Kernels, kind: str) -> None:
    weight = make(kind, 48, 512)
    matrix = NativeSuperblockMatrix(level, weight)
    for rows in (3, 40):
        x = torch.randn(rows, 512)
        x[0, :256] = 0
        expected = matrix.product(x, None)
        assert torch.equal(expected, reference.TorchSuperblockMatrix(weight).product(x, None))
        x[1, 100] = float("inf")
        x[2, 300] = float("nan")
        out = matrix.product(x, None)
        assert out[1:3].isnan().all() and torch.equal(out[3:], expected[3:]) and torch.equal(out[0], expected[0])


@pytest.mark.parametrize(("kind", "more"), [("Q4_K", 0.03), ("Q5_K", 0.03), ("Q6_K", 0.01), ("Q3_K", 0.06)])
def test_bytes_are_nearly_those_of_the_file(level: Kernels, kind: str, more: float) -> None:
    weight = make(kind, 64, 1024)
    nbytes = NativeSuperblockMatrix(level, weight).nbytes
    assert weight.nbytes < nbytes == packed_bytes(kind, 64, 1024) < (1 + more) * weight.nbytes


def parts_of(k: int) -> list[GroupedWeight | SuperblockWeight]:
    return [make("Q4_K", 40, k), make("Q4_K", 8, k), quantize(torch.randn(20, k), 8, 32), make("Q6_K", 28, k)]


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_matrix_whose_parts_have_different_types(level: Kernels, rows: int) -> None:
    """The bits of the products one by one. Neighbours of one type are one part."""
    ops = native_ops(level)
    assert ops.quantized is not None and ops.storage is not None
    parts = parts_of(512)
    stack = ops.quantized(parts, False)
    assert isinstance(stack, MatrixStack) and stack.shape == (96, 512)
    x, bias = torch.randn(rows, 512), torch.randn(96)
    expected = torch.cat([reference.quantized_matrix(part).product(x, None) for part in parts], dim=1)
    stored = stack.stored()
    assert [kind for kind in stored.fields if isinstance(kind, str)] == [
        "NativeSuperblockMatrix", "NativeGroupedMatrix", "NativeSuperblockMatrix",
    ]  # fmt: skip
    for matrix in (stack, ops.storage.restored(stored)):
        assert torch.equal(matrix.product(x, None), expected)
        assert torch.equal(matrix.product(x, bias), expected + bias)
    assert stack.nbytes == sum(tensor.nbytes for tensor in stored.tensors if tensor is not None)


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_gates_and_ups_of_different_types(level: Kernels, rows: int) -> None:
    ops = native_ops(level)
    assert ops.quantized is not None
    gate, up = make("Q4_K", 70, 256), make("Q6_K", 70, 256)
    x, bias = torch.randn(rows, 256), torch.randn(140)
    gated = ops.quantized([gate, up], True)
    both = torch.cat([reference.quantized_matrix(part).product(x, None) for part in (gate, up)], dim=1)
    for each, sums in ((None, both), (bias, both + bias)):
        torch.testing.assert_close(gated.silu_mul(x, each), reference.silu_mul(sums), atol=1e-5, rtol=1e-5)
