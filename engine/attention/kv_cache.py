"""The paged KV cache: its layout, its size, and the views that attention reads and writes.

The core assigns blocks to requests. This file keeps one rule: memory that no request has written is never read as a
number. Attention masks the keys beyond a row's context, but a masked NaN still spoils the sum. Therefore

- a block is cleared when a row begins to fill it (`clear`),
- the rest of a block is cleared when a row begins in its middle, behind copied positions or what a dropped step left
  (`clear_rest`), and
- one more block, `zero_block`, is never written and pads block tables.
"""

import ctypes
import mmap
import sys
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KvShape:
    """The size of one position of one request."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: keys and values of all layers for `block_size` positions."""
        return 2 * self.num_layers * block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """`num_blocks` blocks of `block_size` positions.

    `pages[layer]` is (keys, values), each [num_blocks + 1, block_size, kv_heads, head_dim], or if `head_major`
    [num_blocks + 1, kv_heads, block_size, head_dim], so that a head's keys in a block are contiguous. A position's
    slot is block · block_size + offset.
    """

    def __init__(
        self, *, shape: KvShape, num_blocks: int, block_size: int, device: torch.device, head_major: bool = False
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.zero_block = num_blocks
        self._is_head_major = head_major
        inner = (shape.num_kv_heads, block_size) if head_major else (block_size, shape.num_kv_heads)
        size = (shape.num_layers, 2, num_blocks + 1, *inner, shape.head_dim)
        # Not zeroed, so that the system provides memory only as blocks come into use.
        storage = torch.empty(size, dtype=shape.dtype, device=device)
        storage[:, :, self.zero_block].zero_()
        self.storage = storage  # of all pages
        self._num_bytes = storage.nbytes
        self.pages: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in storage]

    def drop(self) -> None:
        """Frees the memory. The cache may not be used until `restore`; tensors of its pages stay valid objects.

        On a CPU the addresses stay, because the C kernels hold them, and the system takes the memory behind them. On a
        GPU the addresses change."""
        storage = self.storage.untyped_storage()
        if storage.device.type == "cpu":
            _give_back(storage.data_ptr(), storage.nbytes())
        else:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocates the memory again, with undefined contents. Raises torch.OutOfMemoryError."""
        storage = self.storage.untyped_storage()
        if storage.device.type != "cpu":
            storage.resize_(self._num_bytes)
        self.storage[:, :, self.zero_block].zero_()

    def clear(self, blocks: Tensor) -> None:
        """Zeroes these blocks in every layer. blocks: [n] int64."""
        for keys, values in self.pages:
            keys.index_fill_(0, blocks, 0)
            values.index_fill_(0, blocks, 0)

    def clear_rest(self, block: int, first: int) -> None:
        """Zeroes the positions of the block from `first` on, in every layer."""
        pages = self.storage[:, :, block]
        (pages[..., first:, :] if self._is_head_major else pages[:, :, first:]).zero_()

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole blocks in every layer; all reads precede all writes. sources, targets: [n] int64."""
        self.storage.index_copy_(2, targets, self.storage.index_select(2, sources))


def _give_back(address: int, num_bytes: int) -> None:
    """Returns the whole memory pages in this range to the system; they read as zero afterwards. Does nothing except on
    Linux."""
    if sys.platform != "linux":
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
