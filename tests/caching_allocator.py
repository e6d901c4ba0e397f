"""A model of torch's caching allocator for CUDA, with the private pools of CUDA graphs.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (`round_size`, `get_allocation_size`, `should_split`,
`get_free_block`, `try_merge_blocks`, `beginAllocateToPool`, `releasePool`), with the default settings: no expandable
segments, no limit of splitting, no rounding to powers of two. The constants are those of c10/core/AllocatorConfig.h,
which the installed torch has as a header; `test_graph_memory.py` compares them. Streams, events and devices are left
out: the engine's steps have one of each. Addresses are (segment, offset), with segments in the order of cudaMalloc.
"""

import bisect
from dataclasses import dataclass, field

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_BUFFER = 2 << 20
LARGE_BUFFER = 20 << 20
MIN_LARGE_ALLOC = 10 << 20
ROUND_LARGE = 2 << 20


class OutOfMemory(Exception):
    """cudaMalloc refuses, also after the free segments were given back."""


@dataclass(eq=False)
class Block:
    pool: "Pool"
    segment: int
    offset: int
    size: int
    is_allocated: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def key(self) -> tuple[int, int, int]:
        """The order in which free blocks are searched: by size, then by address."""
        return self.size, self.segment, self.offset


@dataclass(eq=False)
class Pool:
    """The free blocks of one kind."""

    is_small: bool
    free: list[tuple[tuple[int, int, int], Block]] = field(default_factory=list)

    def insert(self, block: Block) -> None:
        bisect.insort(self.free, (block.key, block), key=lambda entry: entry[0])

    def remove(self, block: Block) -> None:
        at = bisect.bisect_left(self.free, block.key, key=lambda entry: entry[0])
        assert self.free[at][1] is block
        del self.free[at]

    def take(self, size: int) -> Block | None:
        """The smallest free block of at least this size, and among equal ones that with the lowest address."""
        at = bisect.bisect_left(self.free, (size, -1, -1), key=lambda entry: entry[0])
        return self.free.pop(at)[1] if at < len(self.free) else None


class PrivatePool:
    def __init__(self) -> None:
        self.small, self.large = Pool(True), Pool(False)
        self.num_graphs = 0
        self.num_segments = 0


class CachingAllocator:
    def __init__(self, capacity: int = 1 << 62) -> None:
        """capacity: bytes that cudaMalloc gives."""
        self.capacity = capacity
        self.reserved = 0  # bytes that cudaMalloc has given
        self.num_mallocs = 0
        self._public = PrivatePool()
        self._private: dict[object, PrivatePool] = {}
        self._capturing: object | None = None
        self._segments: dict[int, tuple[int, PrivatePool]] = {}  # number → bytes and owner

    def reserved_by(self, pool: object | None) -> int:
        """Bytes of the segments of a graph pool, or of all other memory."""
        owner = self._public if pool is None else self._private.get(pool)
        return sum(size for size, of in self._segments.values() if of is owner)

    def begin_capture(self, pool: object) -> None:
        assert self._capturing is None
        if pool in self._private:
            assert self._private[pool].num_graphs > 0, "a pool all of whose graphs are gone"
        self._private.setdefault(pool, PrivatePool()).num_graphs += 1
        self._capturing = pool

    def end_capture(self) -> None:
        self._capturing = None

    def release(self, pool: object) -> None:
        """A graph of the pool is destroyed."""
        self._private[pool].num_graphs -= 1

    def malloc(self, num_bytes: int) -> Block:
        size = round_size(num_bytes)
        owner = self._public if self._capturing is None else self._private[self._capturing]
        pool = owner.small if size <= SMALL_SIZE else owner.large
        block = pool.take(size) or self._segment(owner, pool, allocation_size(size))
        left = block.size - size
        if left >= MIN_BLOCK if pool.is_small else left > SMALL_SIZE:
            rest = Block(pool, block.segment, block.offset + size, left, False, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            pool.insert(rest)
        block.is_allocated = True
        return block

    def free(self, block: Block) -> None:
        assert block.is_allocated, "freed twice"
        block.is_allocated = False
        for other in (block.before, block.after):
            if other is None or other.is_allocated:
                continue
            block.pool.remove(other)
            if other is block.before:
                block.offset, block.before = other.offset, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
            block.size += other.size
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Gives back the segments that are free as a whole, but none of a pool one of whose graphs lives."""
        owners = [self._public, *(owner for owner in self._private.values() if not owner.num_graphs)]
        for owner in owners:
            for pool in (owner.small, owner.large):
                for _, block in list(pool.free):
                    if block.before is None and block.after is None:
                        pool.remove(block)
                        self.reserved -= self._segments.pop(block.segment)[0]
                        owner.num_segments -= 1
        self._private = {name: owner for name, owner in self._private.items() if owner.num_graphs or owner.num_segments}

    def _segment(self, owner: PrivatePool, pool: Pool, size: int) -> Block:
        if self.reserved + size > self.capacity and self._capturing is None:
            self.empty_cache()
        if self.reserved + size > self.capacity:
            raise OutOfMemory(f"{size} bytes beside {self.reserved} of {self.capacity}")
        number = self.num_mallocs
        self.num_mallocs += 1
        self.reserved += size
        self._segments[number] = size, owner
        owner.num_segments += 1
        return Block(pool, number, 0, size)


def round_size(num_bytes: int) -> int:
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def allocation_size(size: int) -> int:
    """Bytes of the segment that is allocated where no free block suffices."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE
