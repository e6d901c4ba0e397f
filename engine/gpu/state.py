"""The device's state of its rows: block tables, last sampled ids and sampling parameters; and how logits become tokens.

The host writes a row when a request takes it and never reads one. A bias and the history for penalties are written only
for requests that have them.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import MAX_BIASES, RowOpen, Sampling
from ...kernels.triton.edit_logits import EditColumns, count_sampled, edit_logits
from ...kernels.triton.logprobs import MAX_BEST, logprobs, workspace_logprobs
from ...kernels.triton.open_rows import open_rows
from ...kernels.triton.prepare_step import remember_sampled
from ...kernels.triton.sampling import (
    Kind,
    SamplingColumns,
    best_of_part,
    sample,
    sample_of_parts,
    workspace_sampling,
)
from ..executors.vocabulary import Vocabulary
from .packet import Limits, Packet
from .shapes import SampleShape

KINDS: tuple[Kind, ...] = ("greedy", "sampled", "filtered")


class RowState:
    """Tensors of `limits.rows` rows, and one more for padding samples: it is greedy and its ids are ignored."""

    def __init__(self, *, limits: Limits, vocab_size: int, device: torch.device) -> None:
        rows, part = limits.rows + 1, limits.part

        def column(dtype: torch.dtype, value: float = 0, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        self.last_ids = column(torch.int32)
        self.tables = torch.zeros((limits.tables, rows, limits.blocks), dtype=torch.int32, device=device)
        self._sampling = SamplingColumns(
            temperature=column(torch.float32),
            top_k=column(torch.int32),
            top_p=column(torch.float32, 1),
            min_p=column(torch.float32),
            seed=column(torch.int64),
        )
        self._edits = EditColumns(
            repetition_penalty=column(torch.float32, 1),
            presence_penalty=column(torch.float32),
            frequency_penalty=column(torch.float32),
            history=column(torch.int32, -1),
            prompt_bits=column(torch.int32, 0, -(-vocab_size // 32)),
            output_counts=column(torch.int16, 0, vocab_size),
            bias_first=torch.arange(rows, dtype=torch.int32, device=device) * MAX_BIASES,
            bias_len=column(torch.int32),
            bias_ids=torch.zeros(rows * MAX_BIASES, dtype=torch.int32, device=device),
            bias_values=torch.zeros(rows * MAX_BIASES, device=device),
        )
        self._vocab_size = vocab_size
        self._workspace = workspace_sampling(max_picked=part, vocab_size=vocab_size, device=device)
        self._logprobs = workspace_logprobs(max_asking=part, vocab_size=vocab_size, device=device)
        self._edited = torch.empty((part, vocab_size), device=device)
        self.masks = torch.zeros((limits.rows, -(-vocab_size // 32)), dtype=torch.int32, device=device)  # of a step
        self.sampled = torch.zeros(limits.samples, dtype=torch.int32, device=device)
        self.best_ids = torch.zeros((limits.samples, 1 + MAX_BEST), dtype=torch.int32, device=device)
        self.best_values = torch.zeros((limits.samples, 1 + MAX_BEST), device=device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(vars(self).values()))

    def open(self, opens: tuple[RowOpen, ...], packet: Packet) -> None:
        """Takes in the rows that a plan opens. `write_opens` has filled their records, and the queue has sent them."""
        open_rows(packet.opens, len(opens), self._sampling, self._edits)
        for row in opens:
            if has_penalties(row.sampling):
                self._write_history(row)
            if bias := _bias(row):
                self._write_bias(row.row, bias)

    def change_bias(self, row: int, bias: dict[int, float]) -> None:
        """Replaces the row's bias for the next tokens."""
        self._write_bias(row, bias)
        self._edits.bias_len[row] = len(bias)

    def sample(self, logits: Tensor, packet: Packet, first: int, shape: SampleShape) -> None:
        """Samples one part of the step's samples, which begins at `first`, and keeps the ids. logits: [samples, vocab]
        float32."""
        part = slice(first, first + shape.samples)
        picked, places, sampled = packet.sample_rows[part], packet.places[part], self.sampled[part]
        if shape.edits:
            edit_logits(self._edited, logits, places, picked, self._edits, packet.masks[part], self.masks)
        positions = packet.sample_positions[part]
        kind = KINDS[shape.kind]
        sample(sampled, logits, self._edited, places, picked, positions, self._sampling, self._workspace, kind=kind)
        remember_sampled(self.last_ids, sampled, picked)
        if shape.edits:
            count_sampled(sampled, picked, self._edits)
        if shape.logprobs:
            most = min(MAX_BEST, self._vocab_size)
            ids, values, asking = self.best_ids[part], self.best_values[part], packet.asking[part]
            logprobs(ids, values, logits, asking, sampled, self._logprobs, num_best=most)

    def sample_of_parts(
        self, vocabulary: Vocabulary, hidden: Tensor, packet: Packet, first: int, shape: SampleShape
    ) -> None:
        """`sample` for a shape without filters, edits and log-probabilities, of which the ranks exchange their best
        tokens instead of all logits. hidden: [samples, hidden size]."""
        part, kind = slice(first, first + shape.samples), KINDS[shape.kind]
        picked, positions, sampled = packet.sample_rows[part], packet.sample_positions[part], self.sampled[part]
        found = best_of_part(
            vocabulary.part(hidden), packet.places[part], picked, positions, self._sampling,
            first_token=vocabulary.first, largest_part=vocabulary.largest_part, kind=kind,
        )  # fmt: skip
        sample_of_parts(sampled, vocabulary.group.all_gather(found), picked, positions, self._sampling, kind=kind)
        remember_sampled(self.last_ids, sampled, picked)

    def _write_history(self, row: RowOpen) -> None:
        ids = np.frombuffer(row.ids, "<i4")
        seen = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        seen[ids[: row.num_prompt]] = True
        bits = np.packbits(seen, bitorder="little").view("<i4")
        counts = np.bincount(ids[row.num_prompt :], minlength=self._vocab_size).clip(max=32767).astype(np.int16)
        self._edits.prompt_bits[row.row].copy_(torch.from_numpy(bits))
        self._edits.output_counts[row.row].copy_(torch.from_numpy(counts))

    def _write_bias(self, row: int, bias: dict[int, float]) -> None:
        entries = slice(row * MAX_BIASES, row * MAX_BIASES + len(bias))
        ids = torch.tensor(list(bias), dtype=torch.int64).clamp_(max=2**31 - 1)
        self._edits.bias_ids[entries].copy_(ids.to(torch.int32))
        self._edits.bias_values[entries].copy_(torch.tensor(list(bias.values()), dtype=torch.float64).float())


def has_penalties(sampling: Sampling) -> bool:
    """Whether the row's logits depend on its earlier output."""
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)


def write_opens(opens: tuple[RowOpen, ...], target: NDArray[np.int32]) -> None:
    """Writes the records of `kernels/triton/open_rows.py`. target: [rows, FIELDS]."""
    floats = target.view(np.float32)
    for i, row in enumerate(opens):
        sampling = row.sampling
        target[i, 0] = row.row
        floats[i, 1] = sampling.temperature
        target[i, 2] = sampling.top_k
        floats[i, 3] = sampling.top_p
        floats[i, 4] = sampling.min_p
        target[i, 5:7] = np.array([sampling.seed], "<i8").view("<i4")
        floats[i, 7] = sampling.repetition_penalty
        floats[i, 8] = sampling.presence_penalty
        floats[i, 9] = sampling.frequency_penalty
        target[i, 10] = row.row if has_penalties(sampling) else -1
        target[i, 11] = len(_bias(row))


def _bias(row: RowOpen) -> dict[int, float]:
    """The row's first bias: its own, and -inf for the end tokens until `min_len`."""
    ends = np.frombuffer(row.ends, "<i4") if row.min_len else ()
    return {**(row.sampling.logit_bias or {}), **dict.fromkeys(map(int, ends), -math.inf)}


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif is_dataclass(values):
        for field in fields(values):
            yield from _tensors(getattr(values, field.name))
    elif not isinstance(values, int):
        for value in values:  # type: ignore[attr-defined]
            yield from _tensors(value)
