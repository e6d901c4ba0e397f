"""Token embeddings."""

from collections.abc import Callable

from torch import Tensor

from ...kernels.ops import Matrix, Ops
from .linear import Weight


class Embedding(Weight):
    """ids: [tokens] int64 → [tokens, hidden_size]. Its matrix may serve as the head, too."""

    def layout(self, ops: Ops) -> Callable[[Tensor], Matrix]:
        return ops.table

    def forward(self, ids: Tensor) -> Tensor:
        return self.matrix.lookup(ids)
