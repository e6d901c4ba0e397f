"""What the detokenizer is to be told, collected in order.

Nearly all news is tokens of a request and nothing else: it travels in two columns, without an object a token. All
other news of a step follows in `TokenBatch.tokens`; a request is never in both.
"""

from array import array

from ...ipc.messages import Failed, Opened, TokenBatch, Tokens

Item = Opened | TokenBatch | Failed


class OutputBuffer:
    """A batch being filled, and everything before it."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._tokens: list[Tokens] = []
        self._rids = b""
        self._ids = b""

    def set_columns(self, rids: "array[int]", ids: "array[int]") -> None:
        """The tokens of these requests, in the batch that `close_batch` began; who has several stands there as often,
        in a row. rids: int64; ids: int32."""
        assert not self._rids, "a batch has the columns of one step"
        self._rids, self._ids = rids.tobytes(), ids.tobytes()

    def add(self, tokens: Tokens) -> None:
        """Any other news of one request that was opened."""
        self._tokens.append(tokens)

    def add_item(self, item: Opened | Failed) -> None:
        """After everything so far."""
        self.close_batch()
        self._items.append(item)

    def close_batch(self) -> None:
        """What follows may be about the same requests again."""
        if self._tokens or self._rids:
            self._items.append(TokenBatch(tuple(self._tokens), self._rids, self._ids))
            self._tokens.clear()
            self._rids = self._ids = b""

    def take(self) -> list[Item]:
        """Everything since the last call."""
        self.close_batch()
        items, self._items = self._items, []
        return items
