"""Groups of tiles: the size of a page, and where each tile lies."""

import random
from itertools import pairwise

import pytest

from pagewire.engine.attention.cache_groups import ALIGNMENT, CacheGroups, Lifetime

KIB = 1024
FULL, STATE = Lifetime(), Lifetime("state")


def tile(heads: int, dim: int, *, block_size: int = 64) -> int:
    """Bytes of bfloat16 keys and values."""
    return 2 * block_size * heads * dim * 2


def alternating(num_layers: int, every: int, full: int, other: tuple[Lifetime, int]) -> list[tuple[Lifetime, int]]:
    """Every n-th layer has full attention."""
    return [(FULL, full) if (layer + 1) % every == 0 else other for layer in range(num_layers)]


def delta_net() -> list[tuple[Lifetime, int]]:
    """Three of four layers have a state: 32 heads of 128 x 128 float32, and that of the convolution."""
    layer = [(STATE, 64 * KIB)] * 32 + [(STATE, 96 * KIB)]
    return [t for _ in range(8) for t in (layer * 3 + [(FULL, tile(4, 256))])]


MODELS = {
    "llama": ([(FULL, tile(8, 128))] * 32, 32 * 256, [1]),
    "gemma-3-4b": (alternating(34, 6, tile(4, 256), (Lifetime("window", 1024), tile(4, 256))), 1280, [6, 1]),
    "gemma-3-27b": (alternating(62, 6, tile(16, 128), (Lifetime("window", 1024), tile(16, 128))), 1024, [26, 5]),
    "gpt-oss-20b": (alternating(24, 2, tile(8, 64), (Lifetime("window", 128), tile(8, 64))), 1536, [1, 1]),
    "llama-4-scout": (alternating(48, 4, tile(8, 128), (Lifetime("chunk", 8192), tile(8, 128))), 3072, [3, 1]),
    "delta-net": (delta_net(), 2144, [1, 24]),
    "lfm2-1.2b": (([(STATE, 16 * KIB)] * 10 + [(FULL, tile(8, 64))] * 6), 768, [1, 1]),
    "mamba": ([(STATE, 64 * KIB)] * 48, 48 * 64, [1]),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_pages_of_real_models(name):
    tiles, page_kib, pages = MODELS[name]
    groups = CacheGroups.of(tiles, block_size=64)
    assert (groups.page_bytes / KIB, [group.pages for group in groups.groups]) == (page_kib, pages)


def test_a_model_without_tiles_has_one_group_without_bytes():
    groups = CacheGroups.of([], block_size=16)
    assert (groups.page_bytes, groups.num_tables, [group.pages for group in groups.groups]) == (0, 1, [1])
    assert groups.pages(33, block_size=16) == 3


def _bytes_of_row(groups: CacheGroups, block_size: int) -> int:
    """Of 4,096 positions and two states."""
    states = sum(group.pages for group in groups.groups if group.lifetime == STATE)
    return groups.page_bytes * (groups.pages(4096, block_size=block_size) + states)


@pytest.mark.parametrize("seed", range(40))
def test_tiles_lie_in_their_pages_without_overlap(seed):
    rng = random.Random(seed)
    lifetimes = rng.sample([FULL, Lifetime("window", 700), Lifetime("chunk", 512), STATE], rng.randint(1, 4))
    sizes = {lifetime: [rng.choice((100, 128, 640, 4000)) for _ in range(2)] for lifetime in lifetimes}
    tiles = [(lifetime, rng.choice(sizes[lifetime])) for lifetime in rng.choices(lifetimes, k=rng.randint(1, 60))]
    groups = CacheGroups.of(tiles, block_size=16)
    taken = set()
    for (lifetime, size), place in zip(tiles, groups.places, strict=True):
        assert groups.groups[place.group].lifetime == lifetime
        assert place.offset % ALIGNMENT == 0 and place.offset + size <= groups.page_bytes
        assert place.table == groups.tables(place.group)[place.shelf]
        cells = {
            (place.table, cell) for cell in range(place.offset // ALIGNMENT, -(-(place.offset + size) // ALIGNMENT))
        }
        assert not cells & taken, "two tiles overlap"
        taken |= cells
    assert {table for table, _ in taken} == set(range(groups.num_tables)), "a shelf is empty"
    kinds = [group.lifetime for group in groups.groups]
    assert kinds == sorted(dict.fromkeys(kind for kind, _ in tiles), key=lambda kind: kind == STATE), "states are last"
    if len(groups.groups) == 1:
        assert groups.num_tables == 1, "a model with one group has one page a block"
    # No page size of one group's first tiles saves more than 3 %.
    for lifetime in lifetimes:
        of_group = [-(-size // ALIGNMENT) * ALIGNMENT for kind, size in tiles if kind == lifetime]
        for number in range(1, len(of_group) + 1):
            page_bytes = sum(of_group[:number])
            if page_bytes >= max(-(-size // ALIGNMENT) * ALIGNMENT for _, size in tiles):
                assert _bytes_of_row(groups, 16) <= 1.03 * _first_fit_bytes(tiles, page_bytes)


def _first_fit_bytes(tiles: list[tuple[Lifetime, int]], page_bytes: int) -> int:
    total = 0
    for lifetime in dict.fromkeys(kind for kind, _ in tiles):
        shelves: list[int] = []
        for size in (-(-size // ALIGNMENT) * ALIGNMENT for kind, size in tiles if kind == lifetime):
            for shelf, used in enumerate(shelves):
                if used + size <= page_bytes:
                    shelves[shelf] += size
                    break
            else:
                shelves.append(size)
        total += len(shelves) * (2 if lifetime == STATE else lifetime.blocks(4096, 16))
    return total * page_bytes


@pytest.mark.parametrize(
    ("lifetime", "reads"),
    [
        (FULL, {0: 0, 5: 0, 100: 0}),
        (Lifetime("window", 4), {0: 0, 3: 0, 4: 1, 100: 97}),
        (Lifetime("chunk", 4), {0: 0, 3: 0, 4: 4, 101: 100}),
    ],
)
def test_the_first_position_that_is_read(lifetime, reads):
    assert {position: lifetime.needed_from(position) for position in reads} == reads


@pytest.mark.parametrize(
    "lifetime", [FULL, Lifetime("window", 37), Lifetime("window", 1), Lifetime("chunk", 48), Lifetime("chunk", 50)]
)
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_blocks_of_a_row_are_enough_at_every_position(lifetime, block_size):
    most = 0
    for position in range(300):
        needed = position // block_size - lifetime.needed_from(position) // block_size + 1
        most = max(most, needed)
        assert needed <= lifetime.blocks(position + 1, block_size)
    assert most == lifetime.blocks(300, block_size), "and no more than that"


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_the_tiles_has_the_groups_of_all(name: str) -> None:
    """Whatever layers a stage has, a block is as many pages as in the other stages; only their size differs."""
    tiles, _, pages = MODELS[name]
    whole = CacheGroups.of(tiles, block_size=64)
    for num_stages in (2, 3, 4):
        bounds = [round(stage * len(tiles) / num_stages) for stage in range(num_stages + 1)]
        total = 0
        for first, last in pairwise(bounds):
            part = CacheGroups.within(tiles[first:last], whole)
            assert [group.pages for group in part.groups] == pages and part.groups == whole.groups
            used: dict[int, list[tuple[int, int]]] = {}
            for (lifetime, size), place in zip(tiles[first:last], part.places, strict=True):
                assert part.groups[place.group].lifetime == lifetime
                assert place.table == part.tables(place.group)[place.shelf] and place.offset % ALIGNMENT == 0
                used.setdefault(place.table, []).append((place.offset, place.offset + size))
            for spans in used.values():
                spans.sort()
                assert all(before[1] <= after[0] for before, after in pairwise(spans))
                assert spans[-1][1] <= part.page_bytes
            total += part.page_bytes
        assert total <= 1.6 * whole.page_bytes + 4 * max(size for _, size in tiles)
    assert CacheGroups.within([], whole).page_bytes == 0 and CacheGroups.within(tiles, whole) == whole
