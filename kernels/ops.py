"""The table of kernels: chosen once in the worker and passed down, so that layers do not know their device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import reference
from .grouped_weight import form, quantize
from .quantized_weight import StoredWeight
from .stored import Memory, Stored


class Matrix(Protocol):
    """A weight [n, k] in its kernel's layout. The tensor it was made from is no longer needed."""

    @property
    def nbytes(self) -> int: ...

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · weightᵀ + bias. x: [tokens, k] → [tokens, n]."""

    def silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`reference.silu_mul` of the product: [tokens, n / 2]. Only of a matrix that `Ops.gated` made."""

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`reference.greedy` of the product without a bias; the product itself need not be stored."""

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of the weight. ids: [tokens] int64 → [tokens, k], of the activations' type."""


class StoredMatrix(Matrix, Protocol):
    """A matrix of a table with a `storage`."""

    def stored(self) -> Stored: ...


@dataclass(frozen=True)
class Storage:
    """What a table of operations can do with the parts of its matrices."""

    layout: str  # differs if the parts of equal weights may differ
    restored: Callable[[Stored], Matrix]
    ops_into: "Callable[[Memory], Ops]"  # the same table; its matrices are packed to that memory


def use_one_thread() -> None:
    """Torch's functions use no other thread if this one calls them. Nor do they in threads that begin later, until some
    thread sets another number."""
    torch.get_num_threads()  # a thread's first call takes the number that was set last, by whichever thread
    torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class Ops:
    """One implementation of every operation. `reference.py` specifies what each computes."""

    matrix: Callable[[Tensor], Matrix]  # only for products
    gated: Callable[[Tensor], Matrix]  # only for `silu_mul`: the first half of the rows are gates, the second ups
    table: Callable[[Tensor], Matrix]  # of the vocabulary: for lookups, and for the head's products
    router: Callable[[Tensor], Matrix]  # for products that keep the weight's precision
    quantized: Callable[[Sequence[StoredWeight], bool], Matrix] | None
    """Keeps a quantized weight; its parts follow one another. The second argument says if it is gated."""
    write_kv: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], None]
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]]
    storage: Storage | None = None  # None: its matrices cannot be stored
    compute_alone: Callable[[], None] = use_one_thread
    """From now on the calls of this thread do not wait for those of others, and share their work with none."""


def reference_ops(*, quantization: str | None = None) -> Ops:
    """Plain torch, on any device. quantization: weights of 8 or 4 bits, for float32 activations."""

    def matrix(weight: Tensor) -> Matrix:
        if quantization is None:
            return reference.TorchMatrix(weight)
        return reference.TorchGroupedMatrix(quantize(weight, *form(quantization, weight.shape[1])))

    def table(weight: Tensor) -> Matrix:
        if quantization is None:
            return reference.TorchMatrix(weight)
        return reference.TorchGroupedMatrix(quantize(weight, *form("int8", weight.shape[1])))

    return Ops(
        matrix=matrix,
        gated=matrix,
        table=table,
        router=reference.TorchMatrix,
        quantized=None,
        write_kv=reference.write_kv,
        greedy=reference.greedy,
    )
