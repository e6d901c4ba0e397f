"""An encoder's attention against torch's, text by text, and what it stores for the decoder."""

import pytest
import torch

from pagewire.engine.attention.base import AttentionParameters, AttentionStep
from pagewire.engine.attention.cache_groups import FULL, Lifetime
from pagewire.engine.attention.kv_cache import KvCache, KvShape, Tile
from pagewire.engine.attention.torch_paged import TorchPagedAttention
from pagewire.engine.attention.whole_text import WholeTextAttention
from pagewire.kernels.ops import reference_ops
from pagewire.kernels.reference import RelativeBias, relative_bias

SIZE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
LENGTHS = (1, 5, 4)
SCALE = 0.3


def cache_of() -> KvCache:
    shape = KvShape(
        layers=(Tile(KV_HEADS, DIM, DIM, FULL), Tile(KV_HEADS, DIM, DIM, Lifetime("cross"))), dtype=torch.float32
    )
    return KvCache(shape=shape, num_pages=12, block_size=SIZE, device=torch.device("cpu"))


def random(heads: int) -> torch.Tensor:
    return torch.randn(sum(LENGTHS), heads, DIM)


@pytest.mark.parametrize("relative", [None, RelativeBias(torch.randn(8, HEADS), 16, True)])
def test_each_text_sees_all_of_itself_and_nothing_else(relative: RelativeBias | None) -> None:
    attention = WholeTextAttention(cache_of(), reference_ops(), LENGTHS, {})
    q, k, v = random(HEADS), random(KV_HEADS), random(KV_HEADS)
    found = attention.forward(-1, q, k, v, AttentionParameters(scale=SCALE, relative=relative))
    first = 0
    for length in LENGTHS:
        own = slice(first, first + length)
        keys, values = (each[own].repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) * SCALE
        if relative is not None:
            places = torch.arange(length)
            scores = scores + relative_bias(relative, places, places[:, None])
        torch.testing.assert_close(found[own], torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        first += length


def test_a_decoder_reads_what_was_stored_of_its_prompt() -> None:
    """Through the tables of the group `cross`, from the first to the last position, whatever is in other pages."""
    cache = cache_of()
    cache.storage.view(torch.float32)[: cache.num_pages] = float("nan")
    (table,) = {cache.tables[1]} - {cache.tables[0]}
    pages = [[7], [3, 9], [5]]  # of each text
    slots = [pages[text][p // SIZE] * SIZE + p % SIZE for text, length in enumerate(LENGTHS) for p in range(length)]
    cache.clear(torch.tensor([7, 9]))  # which are not filled
    k, v = random(KV_HEADS), random(KV_HEADS)
    WholeTextAttention(cache, reference_ops(), LENGTHS, {table: torch.tensor(slots)}).store(1, k, v)
    order = [2, 0, 1, 1]  # the text of each token
    tables = torch.zeros(2, len(order), 2, dtype=torch.int32)
    for token, text in enumerate(order):
        tables[table, token, : len(pages[text])] = torch.tensor(pages[text], dtype=torch.int32)
    lengths = torch.tensor([LENGTHS[text] for text in order])
    none = torch.zeros(2, len(order), dtype=torch.int64)
    cross = AttentionStep(
        num_decode=len(order), context_lens=lengths.numpy(), query_lens=torch.ones_like(lengths).numpy(),
        tables=tables.numpy(), slots=none, order=lengths.numpy(),
    )  # fmt: skip
    attention = TorchPagedAttention(cache=cache, ops=reference_ops(), dtype=torch.float32)
    attention.begin(AttentionStep(
        num_decode=len(order), context_lens=lengths.numpy(), query_lens=torch.ones_like(lengths).numpy(),
        tables=tables.numpy(), slots=none, order=lengths.numpy(), cross=cross,
    ))  # fmt: skip
    q = torch.randn(len(order), HEADS, DIM)
    found = attention.cross.forward(1, q, None, None, AttentionParameters(scale=SCALE))
    for token, text in enumerate(order):
        own = slice(sum(LENGTHS[:text]), sum(LENGTHS[: text + 1]))
        keys, values = (each[own].repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        weights = (torch.einsum("hd,khd->hk", q[token], keys) * SCALE).softmax(-1)
        torch.testing.assert_close(found[token], torch.einsum("hk,khd->hd", weights, values))
