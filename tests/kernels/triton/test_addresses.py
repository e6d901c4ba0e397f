"""Kernels address more than 2^31 numbers of one tensor. The tensors are virtual: the system gives memory only to the
pages that are written, so gigabytes take kilobytes. The same numbers in a small tensor give the same bits."""

import mmap

import pytest
import torch
from torch import Tensor
from triton_schedules import scheduled

from pagewire.kernels.triton.decode_attention import decode_attention, plan_decode, workspace_decode
from pagewire.kernels.triton.extend_attention import extend_attention, extend_work, tile_tokens
from pagewire.kernels.triton.moe import product, workspace_moe
from pagewire.kernels.triton.norm_rotary_write import norm_rotary_write, rotary_table
from pagewire.kernels.triton.small_product import small_product, tiling, workspace_small_product

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="virtual memory is the host's")
_MAP_NORESERVE = 0x4000  # of Linux; the module has its name from Python 3.13 on
MANY = 2**31
HEADS, KV_HEADS, DIM, BLOCK = 2, 1, 16, 16


def virtual(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Zeros."""
    size = torch.Size(shape).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        pytest.skip(f"the system reserves no {size >> 30} GiB: {error}")
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def pools() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], list[int]]:
    """(small pages of keys and values, large ones with the same numbers, where the large ones have them)."""
    num = 2 * MANY // (2 * KV_HEADS * BLOCK * DIM) + 9
    small = torch.randn(5, 2, KV_HEADS, BLOCK, DIM).half()
    large = virtual(num, 2, KV_HEADS, BLOCK, DIM)
    places = [num - 1, 3, num // 2 + 1, num - 2, num // 2]
    assert large[places[0]].storage_offset() > 2 * MANY and large[places[2]].storage_offset() > MANY
    for number, place in enumerate(places):
        large[place] = small[number]
    return (small[:, 0], small[:, 1]), (large[:, 0], large[:, 1]), places


def test_decode_attention_reads_pages_beyond_2_31_numbers() -> None:
    small, large, places = pools()
    query, lens = torch.randn(2, HEADS, DIM).half(), [40, 30]
    outs = []
    for pages, ids in ((small, list(range(5))), (large, places)):
        table = torch.tensor([ids[:3], [*ids[3:], 0]], dtype=torch.int32)
        workspace = workspace_decode(
            rows=2,
            max_context=64,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            num_programs=3,
            chunk=BLOCK,
            device="cpu",
        )
        plan_decode(torch.tensor(lens, dtype=torch.int32), workspace)
        out = torch.full_like(query, torch.nan)
        decode_attention(out, query, *pages, table, workspace, scale=0.25)
        outs.append(out)
    assert not outs[0].isnan().any() and torch.equal(*outs)


def test_attention_of_prompts_reads_pages_beyond_2_31_numbers() -> None:
    small, large, places = pools()
    query, lens = torch.randn(70, HEADS, DIM).half(), torch.tensor([40, 30])
    outs = []
    for pages, ids in ((small, list(range(5))), (large, places)):
        table = torch.tensor([ids[:3], [*ids[3:], 0]], dtype=torch.int32)
        work = torch.from_numpy(extend_work(lens.numpy(), lens.numpy(), tile_tokens(HEADS // KV_HEADS, 16)))
        out = torch.full_like(query, torch.nan)
        extend_attention(out, query, *pages, table, lens.int(), work, scale=0.25, num_programs=3, tile_rows=16)
        outs.append(out)
    assert not outs[0].isnan().any() and torch.equal(*outs)


@pytest.mark.parametrize("rope", [0, 16])
def test_attention_of_prompts_reads_and_writes_tokens_beyond_2_31_numbers(rope: int) -> None:
    """Latent attention with 128 heads of 512 numbers has 2^31 numbers in 32,768 tokens. rope: numbers of a query beside
    those of the latent, or none."""
    apart = 1 << 20  # numbers from a token to the next
    first = MANY // apart - 20  # of the tokens that are computed, which lie on both sides
    lens = torch.tensor([40, 30])
    num = int(lens.sum())
    width = DIM + rope
    pages = torch.randn(5, 2, KV_HEADS, BLOCK, width).half()
    k_pages, v_pages = pages[:, 0], None if rope else pages[:, 1]
    table = torch.tensor([[0, 1, 2], [3, 4, 0]], dtype=torch.int32)
    work = torch.from_numpy(extend_work(lens.numpy(), lens.numpy(), tile_tokens(HEADS // KV_HEADS, 16)))
    query, query_rope = torch.randn(num, HEADS, DIM).half(), torch.randn(num, HEADS, rope).half()

    def spread(values: Tensor) -> Tensor:
        """The same numbers, from the token `first` on. There is memory where offsets of 32 bits would lead."""
        numbers = virtual(MANY + (first + num) * apart)
        found = numbers.as_strided((first + num, *values.shape[1:]), (apart, values.shape[2], 1), MANY)
        found[first:] = values
        return found

    outs = []
    for is_far in (False, True):
        out = torch.full_like(query, torch.nan)
        far = spread(out) if is_far else out
        extend_attention(
            far, spread(query) if is_far else query, k_pages, v_pages, table, lens.int(), work,
            scale=0.25, num_programs=3, tile_rows=16,
            query_rope=None if not rope else spread(query_rope) if is_far else query_rope,
        )  # fmt: skip
        outs.append(far[-num:].clone())
        work[1:, 1] += first
    assert not outs[0].isnan().any() and torch.equal(*outs)


def test_keys_and_values_are_written_beyond_2_31_numbers() -> None:
    small, large, places = pools()
    states = torch.randn(3, (HEADS + 2 * KV_HEADS) * DIM).half()
    rotary, positions = rotary_table(torch.ones(DIM // 2), 1.0, 8), torch.arange(3, dtype=torch.int32)
    for pages, ids in ((small, [0, 2, 4]), (large, [places[0], places[2], places[4]])):
        slots = torch.tensor([ids[i] * BLOCK + 5 for i in range(3)], dtype=torch.int32)
        query = torch.empty(3, HEADS, DIM).half()
        norm_rotary_write(states, None, 0.0, rotary, positions, slots, query, *pages)
    for part in range(2):
        assert torch.equal(small[part], large[part][places])


def test_the_last_rows_of_a_matrix_beyond_2_31_numbers_are_multiplied() -> None:
    """Only the last program runs."""
    k = 4096
    n = MANY // k + 4096
    tiles = tiling(n, k)
    assert tiles.splits == 1 and n % tiles.block_n == 0
    weight = virtual(n, k)
    weight[-tiles.block_n :] = torch.randn(tiles.block_n, k).half()
    x, out = torch.randn(1, k).half(), torch.zeros(1, n).half()
    with scheduled(0, only=lambda index: index[1] == n // tiles.block_n - 1):
        small_product(x, weight, out, workspace_small_product([], "cpu"))
    expected = x.double() @ weight[-tiles.block_n :].double().t()
    torch.testing.assert_close(out[:, -tiles.block_n :].double(), expected, atol=0.1, rtol=1e-2)
    assert not out[:, : -tiles.block_n].any()


def test_the_last_experts_of_a_stack_beyond_2_31_numbers_are_multiplied() -> None:
    n = k = 64
    stack = virtual(MANY // (n * k) + 3, n, k)
    last = len(stack) - 1
    stack[last] = torch.randn(n, k).half()
    workspace = workspace_moe(
        max_tokens=2, num_experts=32, top_k=1, hidden=k, inter=n, dtype=torch.float16, device="cpu"
    )
    workspace.assignments.fill_(2)
    workspace.assignments[:2] = torch.arange(2, dtype=torch.int32)
    workspace.block_experts.fill_(last)
    workspace.num_blocks.fill_(1)
    x, out = torch.randn(2, k).half(), torch.full((2, n), torch.nan).half()
    product(out, x, stack, None, None, workspace, num_assigned=2, per=1)
    torch.testing.assert_close(out.double(), x.double() @ stack[last].double().t(), atol=0.05, rtol=1e-2)
