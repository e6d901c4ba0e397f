"""The paged KV cache: its layout, its size, and the views that attention and scans read and write.

Memory is an array of equal pages. A block of positions is one page, or one page for each shelf of its group (see
`cache_groups.py`), and holds the tiles of all layers of the group; so blocks are copied, cleared and stored as whole
pages. The core assigns pages to requests. This file keeps one rule: memory that no request has written is never read
as a number. Attention masks the keys beyond a row's context, but a masked NaN still spoils the sum. Therefore

- a page is cleared when a row begins to fill it (`clear`),
- the rest of a block is cleared when a row begins in its middle, behind copied positions or what a dropped step left
  (`clear_rest`), and
- one more page, `zero_page`, is never written and pads block tables.
"""

import copy
import ctypes
import math
import mmap
import sys
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.states import Tiles
from .cache_groups import FULL, CacheGroups, Lifetime

_DONTNEED = 4  # Linux: the system takes the memory, which then reads as zero
_HUGEPAGE = 14  # Linux: memory comes in pages of 2 MB; attention was up to 6 % faster with them


@dataclass(frozen=True)
class Tile:
    """Keys and values of one layer. A layer that reads those of another layer has none."""

    kv_heads: int
    head_dim: int  # of keys
    value_dim: int  # 0: the layer's values are part of its keys
    lifetime: Lifetime = FULL


@dataclass(frozen=True)
class StateTile:
    """A state of one recurrent layer, or of one head of it: one for each row."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class KvShape:
    """What the layers of a model keep."""

    layers: tuple[Tile, ...]
    dtype: torch.dtype  # of keys and values
    states: tuple[StateTile, ...] = ()
    whole: "KvShape | None" = None  # of a stage: what the layers of all stages keep, which decides the groups

    @classmethod
    def uniform(cls, *, num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> "KvShape":
        return cls(layers=(Tile(kv_heads, head_dim, head_dim),) * num_layers, dtype=dtype)

    def tile_bytes(self, tile: Tile, block_size: int) -> int:
        """Bytes of a layer's keys and values of one block."""
        return block_size * tile.kv_heads * (tile.head_dim + tile.value_dim) * self.dtype.itemsize

    def groups(self, block_size: int) -> CacheGroups:
        """The tiles of `layers`, then those of `states`."""
        return _groups(self, block_size)


@cache
def _groups(shape: KvShape, block_size: int) -> CacheGroups:
    tiles = [(tile.lifetime, shape.tile_bytes(tile, block_size)) for tile in shape.layers]
    tiles += [(Lifetime("state"), state.nbytes) for state in shape.states]
    if shape.whole is not None:
        return CacheGroups.within(tiles, shape.whole.groups(block_size))
    return CacheGroups.of(tiles, block_size=block_size)


class KvCache:
    """`num_pages` pages that the core assigns, `num_spares` states besides, and the zero page.

    `pages[tile]` is (keys, values) of a layer: [pages, block_size, kv_heads, dim], or if `head_major`
    [pages, kv_heads, block_size, dim], so that a head's keys in a block are contiguous. Pages are
    `groups.page_bytes` apart; within a page keys and values are each contiguous. A position's slot is
    page · block_size + offset. A tile's entries are its own only in the pages of its block table, `tables[tile]`.
    `state_tiles` says where states are.
    """

    def __init__(
        self,
        *,
        shape: KvShape,
        num_pages: int,
        block_size: int,
        device: torch.device,
        head_major: bool = False,
        num_spares: int = 0,
    ) -> None:
        """num_spares: states that steps with draft tokens use."""
        self.shape = shape
        self.groups = groups = shape.groups(block_size)
        self.block_size = block_size
        self.num_pages = num_pages
        spares = np.arange(num_spares * groups.state_pages, dtype=np.int32) + num_pages
        self.spare_states: NDArray[np.int32] = spares.reshape(num_spares, groups.state_pages)  # pages
        self.zero_page = num_pages + len(spares)
        self.device = device
        self._is_head_major = head_major
        # Not zeroed, so that the system provides memory only as pages come into use.
        self.storage = torch.empty((self.zero_page + 1, groups.page_bytes), dtype=torch.uint8, device=device)
        if device.type == "cpu":
            advise(self.storage, _HUGEPAGE)
        self.storage[self.zero_page].zero_()
        self._num_bytes = self.storage.nbytes
        # Copying words is several times as fast as copying bytes.
        self.words = self.storage.view(torch.int64) if groups.page_bytes else self.storage
        self.pages: list[tuple[Tensor, Tensor]] = []
        self.tables = tuple(place.table for place in groups.places[: len(shape.layers)])
        self._state_tiles: dict[tuple[int, int, int], Tiles] = {}
        for tile, place in zip(shape.layers, groups.places, strict=False):
            inner = (tile.kv_heads, block_size) if head_major else (block_size, tile.kv_heads)
            keys = self._view(place.offset, (*inner, tile.head_dim), shape.dtype)
            after_keys = place.offset + keys[0].numel() * keys.element_size()
            self.pages.append((keys, self._view(after_keys, (*inner, tile.value_dim), shape.dtype)))

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        """Where the states of a layer lie: see `AttentionBackend.state_tiles`."""
        key = first, count, per_tile
        if key not in self._state_tiles:
            begin = len(self.shape.layers) + first
            places = self.groups.places[begin : begin + count]
            assert len(places) == count, (key, len(self.shape.states))
            self._state_tiles[key] = Tiles(
                shelves=torch.tensor([place.shelf for place in places], dtype=torch.int32),
                offsets=torch.tensor([place.offset for place in places], dtype=torch.int64),
                per_tile=per_tile,
            )
        return self._state_tiles[key]

    def _view(self, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Numbers of this size in every page, `offset` bytes from its beginning."""
        last = offset + math.prod(size) * dtype.itemsize
        return self.storage[:, offset:last].view(dtype).view(self.zero_page + 1, *size)

    def by_position(self) -> "KvCache":
        """The same memory, if it is head-major, with pages [pages, block_size, kv_heads, dim] of other strides."""
        assert self._is_head_major, "the pages are by position"
        other = copy.copy(self)
        other._is_head_major = False
        other.pages = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in self.pages]
        return other

    def heads(self, tile: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer: [pages, kv_heads, block_size, dim], whatever their order in memory."""
        keys, values = self.pages[tile]
        return (keys, values) if self._is_head_major else (keys.transpose(1, 2), values.transpose(1, 2))

    def drop(self) -> None:
        """Frees the memory. The cache may not be used until `restore`; tensors of its pages stay valid objects.

        On a CPU the addresses stay, because the C kernels hold them, and the system takes the memory behind them. On a
        GPU the addresses change."""
        if self.device.type == "cpu":
            advise(self.storage, _DONTNEED)
        else:
            self.storage.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocates the memory again, with undefined contents. Raises torch.OutOfMemoryError."""
        if self.device.type != "cpu":
            self.storage.untyped_storage().resize_(self._num_bytes)
        self.storage[self.zero_page].zero_()

    def clear(self, pages: Tensor) -> None:
        """Zeroes these pages. pages: [n] int64."""
        self.words.index_fill_(0, pages, 0)

    def clear_rest(self, table: int, page: int, first: int) -> None:
        """Zeroes the positions of a page from `first` on. table: whose page it is."""
        for own, pair in zip(self.tables, self.pages, strict=True):
            for part in pair if own == table else ():
                (part[page, :, first:] if self._is_head_major else part[page, first:]).zero_()

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole pages; all reads precede all writes. sources, targets: [n] int64."""
        self.words.index_copy_(0, targets, self.words.index_select(0, sources))


def advise(storage: Tensor, advice: int) -> None:
    """Tells the system how the whole system pages in this tensor are used. Does nothing except on Linux."""
    if sys.platform != "linux":
        return
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)
