"""Layout and arithmetic of the cache."""

import pytest
import torch

from pagewire.engine.attention.cache_groups import Lifetime
from pagewire.engine.attention.kv_cache import KvCache, KvShape, StateTile, Tile


def _cache(*, head_major=False):
    shape = KvShape.uniform(num_layers=3, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    cache = KvCache(shape=shape, num_pages=5, block_size=4, device=torch.device("cpu"), head_major=head_major)
    return shape, cache


def test_a_page_of_equal_layers_holds_a_block_of_all_layers():
    shape, cache = _cache()
    taken = sum(keys.nbytes + values.nbytes for keys, values in cache.pages)
    assert taken == shape.groups(4).page_bytes * (cache.num_pages + 1) == cache.storage.nbytes
    assert shape.groups(4).num_tables == 1


@pytest.mark.parametrize("head_major", [False, True])
def test_pages_do_not_overlap_and_each_is_contiguous(head_major):
    _, cache = _cache(head_major=head_major)
    pages = [page for pair in cache.pages for page in pair]
    for i, page in enumerate(pages):
        assert page.shape == ((6, 2, 4, 8) if head_major else (6, 4, 2, 8))
        assert page[0].is_contiguous() and page.stride(0) * page.element_size() == cache.groups.page_bytes
        page.fill_(i)
    assert all(bool((page == i).all()) for i, page in enumerate(pages))


def test_clear_zeroes_the_given_pages_and_the_zero_page_is_zero():
    _, cache = _cache()
    for keys, values in cache.pages:
        assert not keys[cache.zero_page].any()
        assert not values[cache.zero_page].any()
        keys[:5], values[:5] = float("nan"), float("nan")
    cache.clear(torch.tensor([4, 1]))
    for pair in cache.pages:
        for page in pair:
            assert page[:5].isnan().all(-1).all(-1).all(-1).tolist() == [True, False, True, True, False]
            assert not page[[1, 4]].any()


@pytest.mark.parametrize("head_major", [False, True])
def test_clear_rest_zeroes_the_end_of_a_block(head_major):
    _, cache = _cache(head_major=head_major)
    for keys, values in cache.pages:
        keys[:5], values[:5] = 1.0, 1.0
    cache.clear_rest(0, 2, 3)
    for pair in cache.pages:
        for page in pair:
            by_position = page.sum(1 if head_major else 2)[..., 0]
            assert by_position[2].tolist() == [2, 2, 2, 0] and bool((by_position[[0, 1, 3, 4]] == 2).all())


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
            assert not page[cache.zero_page].any()


def test_tiles_of_one_table_do_not_overlap():
    """Tiles of different tables may share bytes of a page: a page is in one table at a time."""
    layers = (Tile(2, 16, 16), Tile(1, 24, 8), Tile(2, 16, 16, Lifetime("window", 8)), Tile(1, 40, 0))
    states = (StateTile((1, 3, 5)), StateTile((2, 4, 4)), StateTile((2, 4, 4)))
    shape = KvShape(layers=layers, dtype=torch.bfloat16, states=states)
    cache = KvCache(shape=shape, num_pages=4, block_size=4, device=torch.device("cpu"))
    assert [tuple(part.shape) for part in cache.pages[3]] == [(5, 4, 1, 40), (5, 4, 1, 0)]
    views = [(table, part) for table, pair in zip(cache.tables, cache.pages, strict=True) for part in pair]
    for table in range(cache.groups.num_tables - cache.groups.groups[-1].pages):
        own = [part for of, part in views if of == table and part.numel()]
        for i, part in enumerate(own):
            part[:4] = i + 1
        assert own and all(bool((part[:4] == i + 1).all()) for i, part in enumerate(own))


def test_states_lie_apart_in_the_pages_of_a_row():
    states = (StateTile((1, 3, 5)), StateTile((2, 40, 4)), StateTile((2, 40, 4)))
    shape = KvShape(layers=(Tile(1, 16, 16),), dtype=torch.bfloat16, states=states)
    cache = KvCache(shape=shape, num_pages=4, block_size=4, device=torch.device("cpu"))
    assert cache.groups.groups[-1].pages == 2
    first, second = cache.state_tiles(0, 1, per_tile=1), cache.state_tiles(1, 2, per_tile=2)
    assert cache.state_tiles(1, 2, per_tile=2) is second
    values = torch.randn(1, 3, 5), torch.randn(4, 40, 4)
    for tiles, value in zip((first, second), values, strict=True):
        tiles.store(cache.storage, [3, 1], value)
    for tiles, value in zip((first, second), values, strict=True):
        assert torch.equal(tiles.load(cache.storage, [3, 1], tuple(value.shape)), value)
    assert not second.load(cache.storage, [-1, -1], (4, 40, 4)).any(), "no page stands for zeros"
