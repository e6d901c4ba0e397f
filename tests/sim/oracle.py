"""The content that every key of the prefix cache must name, computed from the clients' requests alone."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from fakes import KV_BYTES, Content, encoded_kv, regime_of, shelved

from pagewire.engine.core.block_hash import block_key, regime_key, root_key
from pagewire.engine.core.groups import Groups


class Oracle:
    """Maps each key to what a block of this key begins with, in each group."""

    def __init__(self, groups: Groups, block_size: int, regime_limit: int | None = None) -> None:
        self.groups = groups
        self.regime_limit = sys.maxsize if regime_limit is None else regime_limit
        self._block_size = block_size
        self._cross: dict[bytes, bytes] = {}  # key of a block of an encoder's result → its values
        self._known: dict[bytes, tuple[Content, int, int]] = {}  # key → a sequence, and its positions from … to

    def learn(self, ids: Sequence[int], salt: bytes, encoded: Sequence[int] = ()) -> None:
        """Adds the keys of a sequence with this salt: of its full blocks, and of every beginning of a block. `encoded`:
        what an encoder reads of it."""
        if encoded:
            root = block_key(root_key(b"", salt), array("i", encoded).tobytes())
            values, size = encoded_kv(encoded), KV_BYTES * self._block_size
            for place in range(-(-len(encoded) // self._block_size)):
                key = sha256(b"cross" + place.to_bytes(4, "little") + root).digest()
                self._cross[key] = values[place * size : (place + 1) * size]
            self._learn_from(root, Content(self.groups, ids, regime_of(self.groups, encoded)), ids)
            return
        self._learn(ids[: self.regime_limit], salt, 0)
        if len(ids) > self.regime_limit:
            self._learn(ids, salt, 1)

    def _learn(self, ids: Sequence[int], salt: bytes, regime: int) -> None:
        self._learn_from(regime_key(root_key(b"", salt), regime), Content(self.groups, ids, regime), ids)

    def _learn_from(self, parent: bytes, content: Content, ids: Sequence[int]) -> None:
        """`parent`: the root."""
        size, known, data = self._block_size, self._known, array("i", ids).tobytes()
        for start in range(0, len(ids), size):
            digest = sha256(parent)
            for end in range(start + 1, min(start + size, len(ids)) + 1):
                digest.update(data[4 * end - 4 : 4 * end])
                known[digest.digest()] = content, start, end
            parent = digest.digest()

    def expect(self, key: bytes, *pages: bytes, group: int = 0, stage: int = 0) -> None:
        """Asserts that the pages of a block of a stage match its key."""
        if group == self.groups.cross:
            parts = shelved(self._cross[key], self.groups.sizes[group])
            for page, part in zip(pages, parts, strict=True):
                assert page[: len(part)] == part, "a block of an encoder's result does not match its key"
            return
        assert key in self._known, "a key of tokens that no request has"
        content, start, end = self._known[key]
        for _ in range(stage):
            assert content.next_stage is not None, "there are fewer stages"
            content = content.next_stage
        if group < self.groups.num_tables:
            values = bytes(content.values[group][start * KV_BYTES : end * KV_BYTES])
        else:
            values = content.states[end].to_bytes(KV_BYTES, "little")
        for page, part in zip(pages, shelved(values, self.groups.sizes[group]), strict=True):
            assert page[: len(part)] == part, f"a block of group {group} does not match its key"
