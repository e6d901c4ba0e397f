"""The head: logits of hidden states, and the greatest of them. Each rank has a part of the vocabulary's rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels import reference
from ...kernels.ops import Matrix
from ..models.cut import share
from ..models.program import Program
from ..parallel.collectives import Group
from .weights import Weights

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Memory of this shape."""


class Vocabulary:
    def __init__(self, program: Program, weights: Weights, group: Group) -> None:
        """program: this rank's. Without a head, as of a stage before the last one, nothing else may be called."""
        self._program, self.group = program, group
        head = [program.head, program.head_project] if program.has_head else [None, None]
        self._head, self._project = (None if each is None else weights.matrix(each) for each in head)
        self._bias = weights.vector(program.head_bias) if program.has_head else None
        self.first, _ = share(program.vocab, group.rank, group.size)
        _, self.largest_part = share(program.vocab, 0, group.size)

    @property
    def _matrix(self) -> Matrix:
        assert self._head is not None, "the head is the last stage's"
        return self._head

    def part(self, hidden: Tensor, take: Take | None = None) -> Tensor:
        """hidden: [positions, hidden_size] → the logits of this rank's part of the vocabulary, from `first` on: float32
        [positions, at most `largest_part`]. take: gives the memory for results, with matrices of torch; None: they have
        new memory."""
        if take is None:
            out = self._matrix.product(self._projected(hidden), self._bias).float()
        else:
            x = hidden if self._project is None else _written(self._project, hidden, None, take)
            product = _written(self._matrix, x, self._bias, take)
            if product.dtype == torch.float32:
                out = product
            else:
                out = take(tuple(product.shape), torch.float32).copy_(product)
        if self._program.head_scale != 1.0:
            out.mul_(self._program.head_scale)
        if cap := self._program.head_softcap:
            out.div_(cap).tanh_().mul_(cap)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [positions, hidden_size] → float32 [positions, vocab_size], on every rank."""
        return self.logits_in(hidden, None)

    def logits_in(self, hidden: Tensor, take: Take | None) -> Tensor:
        """`logits`. take: see `part`."""
        out = self.part(hidden, take)
        if self.group.size == 1:
            return out
        padded = torch.nn.functional.pad(out, (0, self.largest_part - self._program.head.rows))
        whole = self.group.all_gather(padded).transpose(0, 1).reshape(hidden.shape[0], -1)
        return whole[:, : self._program.vocab].contiguous()  # kernels need contiguous rows

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(greatest logit, its id): float32 [positions], int64 [positions]. The greatest is NaN if any logit is NaN."""
        if self._program.head_scale != 1.0 or self._program.head_softcap or self._bias is not None:
            return reference.greedy(self.logits(hidden))
        most, ids = self._matrix.greedy(self._projected(hidden))
        if self.group.size == 1:
            return most, ids
        found = self.group.all_gather(torch.stack((most.double(), (ids + self.first).double())))
        most, ids = found[:, 0], found[:, 1]
        best = most.amax(dim=0)  # NaN if any rank's is NaN
        ids = ids.masked_fill(most != best, self._program.vocab).amin(dim=0)  # the first of equal logits
        return best.float(), ids.long()

    def _projected(self, hidden: Tensor) -> Tensor:
        return hidden if self._project is None else self._project.product(hidden, None)


def _written(matrix: Matrix, x: Tensor, bias: Tensor | None, take: Take) -> Tensor:
    assert isinstance(matrix, reference.TorchMatrix)
    return matrix.product(x, bias, take((x.shape[0], matrix.weight.shape[0]), matrix.result_dtype(x)))
