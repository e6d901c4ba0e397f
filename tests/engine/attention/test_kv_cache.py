"""Layout and arithmetic of the cache."""

import torch

from pagewire.engine.attention.kv_cache import KvCache, KvShape


def _cache():
    shape = KvShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    return shape, KvCache(shape=shape, num_blocks=5, block_size=4, device=torch.device("cpu"))


def test_block_bytes_equals_the_size_of_the_pages():
    shape, cache = _cache()
    taken = sum(keys.nbytes + values.nbytes for keys, values in cache.pages)
    assert taken == shape.block_bytes(4) * (cache.num_blocks + 1)


def test_pages_are_token_major_and_do_not_overlap():
    _, cache = _cache()
    pages = [page for pair in cache.pages for page in pair]
    for i, page in enumerate(pages):
        assert page.shape == (6, 4, 2, 8)
        assert page.is_contiguous()
        page.fill_(i)
    assert all(bool((page == i).all()) for i, page in enumerate(pages))


def test_clear_zeroes_the_given_blocks_and_the_zero_block_is_zero():
    _, cache = _cache()
    for keys, values in cache.pages:
        assert not keys[cache.zero_block].any()
        assert not values[cache.zero_block].any()
        keys[:5], values[:5] = float("nan"), float("nan")
    cache.clear(torch.tensor([4, 1]))
    for pair in cache.pages:
        for page in pair:
            assert page[:5].isnan().all(-1).all(-1).all(-1).tolist() == [True, False, True, True, False]
            assert not page[[1, 4]].any()


def test_all_copies_are_read_before_any_is_written():
    _, cache = _cache()
    for layer, pair in enumerate(cache.pages):
        for part, page in enumerate(pair):
            for block in range(5):
                page[block] = 100 * layer + 10 * part + block
    cache.copy(torch.tensor([0, 1, 0]), torch.tensor([1, 0, 4]))
    for layer, pair in enumerate(cache.pages):
        for part, page in enumerate(pair):
            assert (page[:5, 0, 0, 0] - 100 * layer - 10 * part).tolist() == [1, 0, 2, 3, 0]
            assert not page[cache.zero_block].any()
