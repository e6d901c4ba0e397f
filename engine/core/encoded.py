"""What an encoder makes of one request's prompt: the blocks of the group `cross` that hold it, and their keys.

The encoder reads the whole prompt, before the first pass of a row. Its result is of use only as a whole: a request
either finds all of its blocks, or has the encoder read the prompt again.
"""

from hashlib import sha256

from ...ipc.messages import bytes_to_ids


class Encoded:
    """Without an encoder it is empty, and stays so."""

    __slots__ = ("_keys", "blocks", "ids", "is_there", "was_found")

    def __init__(self, prompt_ids: bytes = b"") -> None:
        self.ids = bytes_to_ids(prompt_ids)  # what the encoder reads
        self.blocks: list[int] = []  # none while the request waits
        self.is_there = False  # the blocks hold the result, or do once the plans in flight have run
        self.was_found = False  # others had computed it when the request was last admitted
        self._keys: list[bytes] = []  # of the blocks, once they were needed

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)

    def give(self, blocks: list[int], *, is_there: bool) -> None:
        """Blocks for the result. `is_there`: others have computed it."""
        self.blocks, self.is_there, self.was_found = blocks, is_there, is_there

    def told(self) -> None:
        """The worker is told to compute it, if it is not there."""
        self.is_there = len(self) > 0

    def lose(self) -> None:
        """The plan that was to compute it was dropped, or may have been."""
        self.is_there = False

    def leave(self) -> None:
        """The blocks are given back."""
        self.blocks, self.is_there = [], False

    def keys(self, root: bytes, block_size: int) -> list[bytes]:
        """Of the blocks. `root`: the request's parent key, which depends on the whole prompt."""
        if not self._keys:
            num = -(-len(self) // block_size)
            self._keys = [sha256(b"cross" + place.to_bytes(4, "little") + root).digest() for place in range(num)]
        return self._keys


NOTHING = Encoded()
