"""What every key of the prefix cache must stand for, worked out from what clients ask for and nothing else."""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from fakes import KV_BYTES, kv_of

from pagewire.engine.core.block_hash import root_key


class Oracle:
    """Key → the KV that a block with this key begins with."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kv: dict[bytes, bytes] = {}

    def learn(self, ids: Sequence[int], salt: bytes) -> None:
        """These ids may be computed for an owner with this salt: all blocks of them, and all beginnings of blocks."""
        size, known = self._block_size, self._kv
        kv, data = kv_of(ids), array("i", ids).tobytes()
        parent = root_key(b"", salt)
        for start in range(0, len(ids), size):
            digest = sha256(parent)
            for end in range(start + 1, min(start + size, len(ids)) + 1):
                digest.update(data[4 * end - 4 : 4 * end])
                known[digest.digest()] = kv[start * KV_BYTES : end * KV_BYTES]
            parent = digest.digest()

    def expect(self, key: bytes, content: bytes) -> None:
        """Asserts that a block with this content may have this key."""
        kv = self._kv.get(key)
        assert kv is not None, "a key that names nothing that anybody asked for"
        assert content[: len(kv)] == kv, "a block does not hold what its key names"
