"""Blocks are copied bit by bit, whole and in part, at any byte."""

import random

import pytest
import torch
from kv_instance import BLOCK_BYTES, SHAPE, SIZE

from pagewire.engine.attention.kv_cache import KvCache
from pagewire.engine.kv_connector import block_copy
from pagewire.engine.kv_connector.block_copy import BlockCopier


@pytest.fixture
def cache() -> KvCache:
    cache = KvCache(shape=SHAPE, num_pages=12, block_size=SIZE, device=torch.device("cpu"))
    cache.storage.copy_(torch.randint(256, cache.storage.shape, dtype=torch.uint8))
    return cache


def test_parts_are_read_and_written(cache: KvCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "_CHUNK_BYTES", 3 * BLOCK_BYTES)  # several chunks
    copier, rng = BlockCopier(cache), random.Random(1)
    parts = [(0, BLOCK_BYTES), (0, 8), (16, BLOCK_BYTES), (1, 9), (8, 13), (BLOCK_BYTES - 1, BLOCK_BYTES)]
    for first, last in parts:
        blocks = rng.sample(range(12), 7)
        expected = cache.storage.clone()
        assert torch.equal(copier.read_part(blocks, first, last), expected[blocks, first:last])
        rows = torch.randint(256, (7, last - first), dtype=torch.uint8)
        copier.write(blocks, rows, first)
        expected[blocks, first:last] = rows
        assert torch.equal(cache.storage, expected)
        assert torch.equal(torch.cat(list(copier.read(blocks))), expected[blocks])


@pytest.mark.parametrize("blocks", [[3, 12], [-1]])
def test_blocks_beyond_the_cache_are_refused(blocks: list[int], cache: KvCache) -> None:
    copier = BlockCopier(cache)
    with pytest.raises(ValueError, match="of a cache of 12"):
        copier.read_part(blocks, 0, 8)
    with pytest.raises(ValueError, match="of a cache of 12"):
        copier.write(blocks, torch.zeros(len(blocks), 8, dtype=torch.uint8))
