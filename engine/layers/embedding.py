"""Token embeddings."""

import torch.nn.functional as F
from torch import Tensor, nn

from .linear import parameter


class Embedding(nn.Module):
    """ids: [tokens] int64 → [tokens, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
