"""Token embeddings."""

from torch import Tensor

from .linear import Weight


class Embedding(Weight):
    """ids: [tokens] int64 → [tokens, hidden_size]. Its matrix may serve as the head, too."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.matrix.lookup(ids)
