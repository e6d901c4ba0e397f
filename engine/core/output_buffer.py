"""The messages for the detokenizer, collected in order.

Most output of a step is tokens and nothing else: it is sent in two columns, without an object for each token. All other
output of the step follows in `TokenBatch.tokens`; a request is never in both.
"""

from array import array

from ...ipc.messages import Failed, Opened, TokenBatch, Tokens

Item = Opened | TokenBatch | Failed


class OutputBuffer:
    """A batch under construction, and everything before it."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._tokens: list[Tokens] = []
        self._rids = b""
        self._ids = b""

    def set_columns(self, rids: "array[int]", ids: "array[int]") -> None:
        """Tokens of requests, for the batch under construction; `rids[i]` sampled `ids[i]`, and several tokens of a
        request are adjacent. rids: int64; ids: int32."""
        assert not self._rids, "a batch has the columns of one step"
        self._rids, self._ids = rids.tobytes(), ids.tobytes()

    def add(self, tokens: Tokens) -> None:
        """Any other output of a request whose `Opened` was added."""
        self._tokens.append(tokens)

    def add_item(self, item: Opened | Failed) -> None:
        """Adds a message after everything so far."""
        self.close_batch()
        self._items.append(item)

    def close_batch(self) -> None:
        """Ends the batch under construction: what follows may be about the same requests again."""
        if self._tokens or self._rids:
            self._items.append(TokenBatch(tuple(self._tokens), self._rids, self._ids))
            self._tokens.clear()
            self._rids = self._ids = b""

    def take(self) -> list[Item]:
        """The messages since the last call."""
        self.close_batch()
        items, self._items = self._items, []
        return items
