"""Pools the hidden states of a prompt into one vector. A chunked prompt gives its states in several steps."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import Pooling, RowOpen

Vector = NDArray[np.float32]
_LEAST_NORM = 1e-12  # as in torch.nn.functional.normalize


class RowPooler:
    """The rows that want a vector instead of tokens. States are summed in float32, whatever the model's type."""

    def __init__(self, *, num_rows: int) -> None:
        self._poolings: list[Pooling | None] = [None] * num_rows
        self._parts: list[list[Vector]] = [[] for _ in range(num_rows)]  # states computed so far
        self._num = 0  # rows that want a vector; 0 makes `take` free

    def open(self, row: RowOpen) -> None:
        """Replaces what the row held."""
        self._num += (row.pooling is not None) - (self._poolings[row.row] is not None)
        self._poolings[row.row] = row.pooling
        self._parts[row.row] = []

    def take(
        self,
        picked: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        order: NDArray[np.int64],
        num_prompt: NDArray[np.int64],
        hidden_of: Callable[[int, int], Tensor],
    ) -> dict[int, bytes]:
        """The vectors that a step completes, by the row's index into the plan's rows.

        picked: [rows] in step order; starts, counts: [rows] the positions each computes; order: [rows] step order →
        index into the plan's rows; num_prompt: by row; hidden_of: (first, last) token of the step → states.
        """
        vectors: dict[int, bytes] = {}
        if not self._num:
            return vectors
        ends = np.cumsum(counts)
        for place, row in enumerate(picked.tolist()):
            pooling = self._poolings[row]
            if pooling is None:
                continue
            first, last, start = int(ends[place] - counts[place]), int(ends[place]), int(starts[place])
            is_done = start + counts[place] == num_prompt[row]
            parts = self._parts[row]
            match pooling.how:
                case "last":
                    first = last - 1 if is_done else last
                case "cls":
                    last = first + 1 if start == 0 else first
            if last > first:
                states = hidden_of(first, last).float()
                parts.append((states.sum(0, keepdim=True) if pooling.how == "mean" else states).cpu().numpy())
            if is_done:
                states_of_row = np.concatenate(parts)
                whole = states_of_row.sum(0) / num_prompt[row] if pooling.how == "mean" else states_of_row
                vectors[int(order[place])] = finish(whole, pooling)
                self._parts[row], self._poolings[row] = [], None
                self._num -= 1
        return vectors


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
