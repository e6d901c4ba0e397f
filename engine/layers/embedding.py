"""Token embeddings, and the head, which may share their matrix. Each rank holds a part of the vocabulary's rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.ops import Matrix, Ops
from ..parallel.collectives import Group
from ..parallel.shard import part
from .linear import Weight


class Vocabulary(Weight):
    """A matrix with a row for each of `vocab_size` tokens: the embedding, the head, or both."""

    def __init__(self, vocab_size: int, hidden_size: int, *, group: Group) -> None:
        self._first, last = part(vocab_size, group.rank, group.size)
        super().__init__(last - self._first, hidden_size)
        self._num, self._most = last - self._first, part(vocab_size, 0, group.size)[1]
        self._vocab_size = vocab_size
        self._group = group

    def layout(self, ops: Ops) -> Callable[[Tensor], Matrix]:
        return ops.table

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [tokens] int64 → [tokens, hidden_size]."""
        if self._group.size == 1:
            return self.matrix.lookup(ids)
        local = ids - self._first
        is_elsewhere = (local < 0) | (local >= self._num)
        out = self.matrix.lookup(local.clamp(0, self._num - 1)).masked_fill_(is_elsewhere[:, None], 0)
        self._group.all_reduce(out)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [positions, hidden_size] → float32 [positions, vocab_size], on every rank."""
        out = self.matrix.product(hidden, None).float()
        if self._group.size == 1:
            return out
        padded = torch.nn.functional.pad(out, (0, self._most - self._num))
        whole = self._group.all_gather(padded).transpose(0, 1).reshape(hidden.shape[0], -1)
        return whole[:, : self._vocab_size].contiguous()  # kernels need contiguous rows

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(greatest logit, its id): float32 [positions], int64 [positions]. The greatest is NaN if any logit is NaN."""
        most, ids = self.matrix.greedy(hidden)
        if self._group.size == 1:
            return most, ids
        found = self._group.all_gather(torch.stack((most.double(), (ids + self._first).double())))
        most, ids = found[:, 0], found[:, 1]
        best = most.amax(dim=0)  # NaN if any rank's is NaN
        ids = ids.masked_fill(most != best, self._vocab_size).amin(dim=0)  # the first of equal logits
        return best.float(), ids.long()
