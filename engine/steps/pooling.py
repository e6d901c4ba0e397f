"""Pools the hidden states of a prompt into one vector. A chunked prompt gives its states in several steps."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import Pooling, RowOpen

Vector = NDArray[np.float32]
_LEAST_NORM = 1e-12  # as in torch.nn.functional.normalize


@dataclass
class _Pooled:
    """A row that wants a vector."""

    pooling: Pooling
    parts: list[Vector] = field(default_factory=list)  # states taken so far


@dataclass(frozen=True)
class PooledStates:
    """What a step computes of one row's states."""

    index: int  # of the row in the plan's rows
    states: Tensor | None  # [n, hidden] float32, on the device; None: the step computes nothing that the vector needs
    num_prompt: int  # 0: a later step goes on
    _row: _Pooled

    def take(self, states: Vector | None) -> bytes | None:
        """Takes `states` on the host, step after step; they are not copied. Returns the vector if it is complete."""
        row = self._row
        if states is not None:
            row.parts.append(states)
        if not self.num_prompt:
            return None
        whole = np.concatenate(row.parts)
        return finish(whole.sum(0) / self.num_prompt if row.pooling.how == "mean" else whole, row.pooling)


class RowPooler:
    """The rows that want a vector instead of tokens. States are summed in float32, whatever the model's type."""

    def __init__(self, *, num_rows: int) -> None:
        self._rows: list[_Pooled | None] = [None] * num_rows
        self._num = 0  # rows that want a vector; 0 makes `states` free

    def open(self, row: RowOpen) -> None:
        """Replaces what the row held."""
        self._num += (row.pooling is not None) - (self._rows[row.row] is not None)
        self._rows[row.row] = None if row.pooling is None else _Pooled(row.pooling)

    def states(
        self,
        picked: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        order: NDArray[np.int64],
        num_prompt: NDArray[np.int64],
        hidden_of: Callable[[int, int], Tensor],
    ) -> list[PooledStates]:
        """What a step computes for vectors, for which this does not wait.

        picked: [rows] in step order; starts, counts: [rows] the positions each computes; order: [rows] step order →
        index into the plan's rows; num_prompt: by row; hidden_of: (first, last) token of the step → states.
        """
        found: list[PooledStates] = []
        if not self._num:
            return found
        ends = np.cumsum(counts)
        for place, row in enumerate(picked.tolist()):
            pooled = self._rows[row]
            if pooled is None:
                continue
            first, last, start = int(ends[place] - counts[place]), int(ends[place]), int(starts[place])
            is_done = bool(start + counts[place] == num_prompt[row])
            match pooled.pooling.how:
                case "last":
                    first = last - 1 if is_done else last
                case "cls":
                    last = first + 1 if start == 0 else first
            states = None
            if last > first:
                states = hidden_of(first, last).float()
                if pooled.pooling.how == "mean":
                    states = states.sum(0, keepdim=True)
            found.append(PooledStates(int(order[place]), states, int(num_prompt[row]) if is_done else 0, pooled))
            if is_done:
                self._rows[row] = None
                self._num -= 1
        return found


def pool(states: Tensor, pooling: Pooling) -> bytes:
    """Pools a whole prompt at once. states: [tokens, hidden_size]."""
    states = states.float()
    match pooling.how:
        case "last":
            states = states[-1]
        case "cls":
            states = states[0]
        case "mean":
            states = states.mean(0)
    return finish(states.cpu().numpy(), pooling)


def finish(vector: NDArray[np.floating], pooling: Pooling) -> bytes:
    """The float32 bytes of one vector, or of several in a row. Empty if a number is not finite."""
    if not np.isfinite(vector).all():
        return b""
    vector = vector[..., : pooling.dimensions]
    if pooling.is_normalized:
        vector = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), _LEAST_NORM)
    return vector.astype("<f4").tobytes()


def as_tensor(ids: bytes, dtype: str) -> Tensor:
    """A column of a message as int64."""
    return torch.from_numpy(np.frombuffer(ids, dtype).astype(np.int64))
