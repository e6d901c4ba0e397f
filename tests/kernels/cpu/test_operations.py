"""The C kernels against the reference, over odd shapes. At every level that runs here."""

import ctypes

import pytest
import torch
import torch.nn.functional as F

from pagewire.kernels import reference
from pagewire.kernels.cpu.dense import NativeMatrix
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.cpu.structs import Columns, Operation, StepFields

NORM = 6  # of `OpKind` in program.c


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (16, 48), (100, 34), (129, 288), (640, 1024), (48, 7)])
@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 30, 150])
def test_products(level, dtype, shape, rows):
    weight = torch.randn(shape, dtype=dtype)
    x = torch.randn(rows, 2 * shape[1])[:, : shape[1]]  # rows need not be contiguous
    matrix = NativeMatrix(level, weight)
    for bias in (None, torch.randn(shape[0])):
        expected = x.double() @ weight.double().t() + (0 if bias is None else bias)
        torch.testing.assert_close(matrix.product(x, bias).double(), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(level, dtype):
    """Bit for bit, so that a request's tokens do not depend on its batch."""
    matrix = NativeMatrix(level, torch.randn(200, 96, dtype=dtype))
    x = torch.randn(40, 96)
    together = matrix.product(x, None)
    for first, count in ((0, 1), (3, 2), (7, 5), (20, 13)):
        assert torch.equal(matrix.product(x[first : first + count], None), together[first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ids", [1, 3, 40])
def test_lookup_returns_rows_of_the_packed_weight(level, dtype, num_ids):
    weight = torch.randn(70, 36, dtype=dtype)
    ids = torch.randint(0, 70, (num_ids,))
    assert torch.equal(NativeMatrix(level, weight).lookup(ids), weight[ids].float())


@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("weights", ["none", "of a group", "of all"])
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (7, 50), (300, 1024)])
def test_norms(level, rows, size, weights, groups, is_layer):
    """Of columns between others, into other columns of the same array."""
    width, stride = groups * size, 2 * groups * size + 5
    work = torch.randn(rows, stride) * 50
    x, before = work[:, 2 : 2 + width].clone(), work.clone()
    num = {"none": 0, "of a group": size, "of all": width}[weights]
    weight, bias = torch.randn(num), torch.randn(num)
    normalize = Operation(
        kind=NORM, x=Columns(0, 2, stride), out=Columns(0, 2 + width, stride), width=width, size=size, dims=num,
        act=is_layer, weight=weight.data_ptr() if num else 0, weight2=bias.data_ptr() if num and is_layer else 0,
        eps=1e-5,
    )  # fmt: skip
    step = StepFields(tokens=rows, work=work.data_ptr())
    level.program(ctypes.addressof(normalize), 1, ctypes.addressof(step))
    norm = F.layer_norm if is_layer else F.rms_norm
    expected = norm(x.view(rows, groups, size), (size,), eps=1e-5).flatten(1)
    if num:
        expected = expected * weight.repeat(width // num) + (bias.repeat(width // num) if is_layer else 0)
    torch.testing.assert_close(work[:, 2 + width : 2 + 2 * width], expected, atol=1e-5, rtol=1e-4)
    others = [column for column in range(stride) if not 2 + width <= column < 2 + 2 * width]
    assert torch.equal(work[:, others], before[:, others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 16), (6, 70), (100, 34), (640, 512)])
@pytest.mark.parametrize("rows", [1, 5, 13, 90])
def test_the_epilogue_of_a_gated_matrix_is_silu_mul(level, dtype, shape, rows):
    weight, x = torch.randn(shape, dtype=dtype), torch.randn(rows, shape[1])
    x[0] *= 10
    matrix = NativeMatrix(level, weight, is_gated=True)
    for bias in (None, torch.randn(shape[0])):
        expected = reference.silu_mul(x.double() @ weight.double().t() + (0 if bias is None else bias.double()))
        torch.testing.assert_close(matrix.silu_mul(x, bias).double(), expected, atol=2e-2, rtol=1e-4)


@pytest.mark.parametrize("shape", [(16, 48), (100, 33), (129, 288), (640, 1024), (48, 7)])
@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 17, 32, 150])
def test_products_of_rounded_activations(level, shape, rows):
    weight, x = torch.randn(shape, dtype=torch.bfloat16), torch.randn(rows, shape[1])
    matrix = NativeMatrix(level, weight, rounds=True)
    expected = x.bfloat16().double() @ weight.double().t()
    together = matrix.product(x, None)
    torch.testing.assert_close(together.double(), expected, atol=2e-4, rtol=1e-5)
    for first, count in ((0, 1), (rows // 2, rows - rows // 2)):
        assert torch.equal(matrix.product(x[first : first + count], None), together[first : first + count])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(1, 2, 1, 16), (5, 4, 4, 48), (130, 6, 2, 64)])
def test_norm_rotary(level, normed, tokens, heads, kv_heads, dim):
    states = torch.randn(tokens, heads + 2 * kv_heads, dim)
    angles = torch.randn(tokens, 1, dim // 2)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    norms = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    values = states[:, heads + kv_heads :].clone()
    expected = reference.norm_rotary(states[:, : heads + kv_heads].clone(), heads, *norms, 1e-6, cos, sin)
    level.rotary(
        states.data_ptr(), states.stride(0), *(0 if norm is None else norm.data_ptr() for norm in norms), 1e-6,
        cos.data_ptr(), sin.data_ptr(), 0, tokens, heads, kv_heads, dim,
    )  # fmt: skip
    torch.testing.assert_close(states[:, : heads + kv_heads], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(states[:, heads + kv_heads :], values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv(level, dtype):
    pages = torch.zeros(3, 4, 4, 2, 16, dtype=dtype).transpose(0, 1)  # keys and values share pages
    states = torch.randn(5, 3, 2, 16)
    states[0, 0, 0, 0] = float("nan")
    slots = torch.tensor([11, 0, 6, 7, 3])
    native_ops(level).write_kv(states[:, 1], states[:, 0], pages[0], pages[1], slots)
    reference.write_kv(states[:, 1].to(dtype), states[:, 0].to(dtype), pages[2], pages[3], slots)
    assert torch.equal(pages[:2].nan_to_num(7), pages[2:].nan_to_num(7))


@pytest.mark.parametrize("vocab", [1, 15, 16, 1000])
def test_greedy(level, vocab):
    logits = torch.randn(9, vocab)
    logits[2, vocab // 2] = float("nan")
    logits[3] = 1.0  # equal logits: the first one counts
    logits[4, -1] = float("inf")
    logits[5] = float("-inf")
    maxima, ids = native_ops(level).greedy(logits)
    expected, expected_ids = reference.greedy(logits)
    torch.testing.assert_close(maxima, expected, equal_nan=True, atol=0, rtol=0)
    finite = ~expected.isnan()
    assert torch.equal(ids[finite], expected_ids[finite]) and ids[2] == -1 and ids[3] == 0


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("n", [1, 15, 16, 33, 1000])
@pytest.mark.parametrize("rows", [1, 3, 12, 40])
def test_greedy_equals_the_argmax_of_the_product(level, quantization, n, rows):
    weight, x = torch.randn(n, 64), torch.randn(rows, 64)
    weight[n // 3 :: 7] = weight[n // 3].clone()  # equal rows: the first one counts
    x[rows // 2] = weight[n // 3] * 3
    matrix = native_ops(level, quantization=quantization).matrix(weight)
    maxima, ids = matrix.greedy(x)
    expected, expected_ids = reference.greedy(matrix.product(x, None))
    assert torch.equal(maxima, expected) and torch.equal(ids, expected_ids) and ids[rows // 2] == n // 3
    x[0, 5] = float("nan")
    maxima, ids = matrix.greedy(x)
    assert maxima[0].isnan() and ids[0] == -1 and torch.equal(ids[1:], expected_ids[1:])
