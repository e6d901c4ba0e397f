"""Copies whole blocks out of the KV cache and into it.

Outside the cache a block is the bytes of its page: for each layer the keys and then the values, [position][head][dim],
on a GPU [head][position][dim]. Both directions work in chunks, so that they take at most `_CHUNK_BYTES` of device
memory beside the cache, on each stream that copies.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..attention.kv_cache import KvCache

_CHUNK_BYTES = 32 << 20


class BlockCopier:
    """Copies blocks of one cache. It has no state, so any thread may write blocks that nothing else reads or writes."""

    def __init__(self, cache: KvCache) -> None:
        self._words, self._bytes = cache.words, cache.storage
        self._num_blocks = cache.num_pages
        self.device = cache.device
        self.block_bytes = cache.groups.page_bytes
        self.chunk = max(1, _CHUNK_BYTES // self.block_bytes)  # blocks per chunk

    def read(self, blocks: Sequence[int]) -> Iterator[Tensor]:
        """The bytes of these blocks in order, chunk by chunk: uint8 [n, block_bytes] on the CPU, each a new tensor."""
        for start in range(0, len(blocks), self.chunk):
            yield self.read_part(blocks[start : start + self.chunk], 0, self.block_bytes)

    def read_part(self, blocks: Sequence[int], first: int, last: int) -> Tensor:
        """The bytes [first, last) of each of these blocks: a new uint8 [len(blocks), last - first] on the CPU."""
        self._check(blocks)
        columns, size = self._columns(first, last), max(1, _CHUNK_BYTES // (last - first))
        chunks = []
        for start in range(0, max(1, len(blocks)), size):
            ids = torch.tensor(blocks[start : start + size], dtype=torch.int64, device=self.device)
            chunks.append(columns.index_select(0, ids).cpu())
        return (chunks[0] if len(chunks) == 1 else torch.cat(chunks)).view(torch.uint8)

    def write(self, blocks: Sequence[int], rows: Tensor, first: int = 0) -> None:
        """Fills these blocks, each at most once, from byte `first` on. rows: uint8 [len(blocks), bytes] on the CPU."""
        last = first + rows.shape[1]
        assert len(rows) == len(blocks) and 0 <= first <= last <= self.block_bytes, (rows.shape, len(blocks), first)
        self._check(blocks)
        columns = self._columns(first, last)
        for start in range(0, len(blocks), self.chunk):
            ids = torch.tensor(blocks[start : start + self.chunk], dtype=torch.int64, device=self.device)
            chunk = rows[start : start + self.chunk].view(columns.dtype).to(self.device)
            columns.index_copy_(0, ids, chunk)

    def _columns(self, first: int, last: int) -> Tensor:
        """These bytes of all blocks, as words if they are whole ones."""
        if first % 8 or last % 8:
            return self._bytes[:, first:last]
        return self._words[:, first // 8 : last // 8]

    def _check(self, blocks: Sequence[int]) -> None:
        """Raises ValueError for an index out of range, which on some devices would end the process."""
        if blocks and not (min(blocks) >= 0 and max(blocks) < self._num_blocks):
            raise ValueError(f"blocks {min(blocks)} … {max(blocks)} of a cache of {self._num_blocks}")
