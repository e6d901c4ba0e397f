"""The content that every key of the prefix cache must name, computed from the clients' requests alone."""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from fakes import KV_BYTES, kv_of

from pagewire.engine.core.block_hash import root_key


class Oracle:
    """Maps each key to the KV with which a block of this key begins."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kv: dict[bytes, bytes] = {}

    def learn(self, ids: Sequence[int], salt: bytes) -> None:
        """Adds the keys of a sequence with this salt: of its full blocks, and of every beginning of a block."""
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
        """Asserts that this content matches the key."""
        kv = self._kv.get(key)
        assert kv is not None, "a key of tokens that no request has"
        assert content[: len(kv)] == kv, "the content of a block does not match its key"
