"""The device's state of its rows: block tables, last sampled ids and sampling parameters; and how logits become tokens.

The host writes a row when a request takes it and never reads one. A bias and the history for penalties are written only
for requests that have them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import MAX_BIASES, RowOpen, Sampling
from ...kernels.triton.copy_pages import copy_pages
from ...kernels.triton.edit_logits import EditColumns, count_sampled, edit_logits
from ...kernels.triton.edit_rows import Edit, edit_rows
from ...kernels.triton.logprobs import MAX_BEST, logprobs, workspace_logprobs
from ...kernels.triton.open_rows import open_rows
from ...kernels.triton.prepare_step import accept_drafts, remember_sampled
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
_MAX_COUNT = 2**15 - 1


class RowState:
    """Tensors of `limits.rows` rows, and one more for padding samples: it is greedy and its ids are ignored."""

    def __init__(self, *, limits: Limits, vocab_size: int, device: torch.device) -> None:
        rows, part = limits.rows + 1, limits.part

        def column(dtype: torch.dtype, value: float = 0, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        self.last_ids = column(torch.int32)
        self.last_positions = column(torch.int32)  # of the last ids, in the output
        self.accepted = column(torch.int32)  # draft tokens of the row's last step that had some
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
        self._part = part
        self._workspace = workspace_sampling(max_picked=part, vocab_size=vocab_size, device=device)
        self._logprobs = workspace_logprobs(max_asking=limits.scored, vocab_size=vocab_size, device=device)
        self._edited = torch.empty((part, vocab_size), device=device)
        self.masks = torch.zeros((limits.rows, -(-vocab_size // 32)), dtype=torch.int32, device=device)  # of a step
        self.sample_positions = torch.zeros(
            limits.samples, dtype=torch.int32, device=device
        )  # of a step, in the output
        self.sampled = torch.zeros(limits.samples, dtype=torch.int32, device=device)
        self.best_ids = torch.zeros((limits.samples, 1 + MAX_BEST), dtype=torch.int32, device=device)
        self.best_values = torch.zeros((limits.samples, 1 + MAX_BEST), device=device)
        # Log-probabilities of prompt tokens. At fixed addresses, since Triton compiles kernels by alignment.
        self._every = torch.arange(limits.scored, dtype=torch.int32, device=device)
        self._targets = torch.zeros_like(self._every)
        self._scored_ids = torch.zeros((limits.scored, 1 + MAX_BEST), dtype=torch.int32, device=device)
        self._scored_values = torch.zeros((limits.scored, 1 + MAX_BEST), device=device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(vars(self).values()))

    def open(self, records: Tensor, num: int) -> None:
        """Takes in rows that a plan opens. records: on the device, from `write_opens`."""
        open_rows(records, num, self._sampling, self._edits)

    def edit(self, edits: Tensor, num: int) -> None:
        """Writes biases and histories for the next samples. edits: on the device, from `fill_edits`."""
        edit_rows(edits, num, self._edits)

    def sample(self, logits: Tensor, packet: Packet, first: int, shape: SampleShape) -> None:
        """Samples one part of the step's samples, which begins at `first`, and keeps the ids. logits: [samples, vocab]
        float32."""
        part = slice(first, first + shape.samples)
        own = packet.parts[first // self._part]
        picked, places = own.rows[: shape.samples], own.places[: shape.samples]
        sampled, positions = self.sampled[part], self.sample_positions[part]
        if shape.edits:
            masks = own.masks[: shape.samples]
            edit_logits(self._edited, logits, places, picked, self._edits, masks, self.masks)
        kind = KINDS[shape.kind]
        sample(sampled, logits, self._edited, places, picked, positions, self._sampling, self._workspace, kind=kind)
        remember_sampled(self.last_ids, self.last_positions, sampled, positions, picked)
        if shape.edits:
            count_sampled(sampled, picked, self._edits)
        if shape.logprobs:
            most = min(MAX_BEST, self._vocab_size)
            ids, values, asking = self.best_ids[part], self.best_values[part], own.asking[: shape.samples]
            logprobs(ids, values, logits, asking, sampled, self._logprobs, num_best=most)

    def sample_of_parts(
        self, vocabulary: Vocabulary, hidden: Tensor, packet: Packet, first: int, shape: SampleShape
    ) -> None:
        """`sample` for a shape without filters, edits and log-probabilities, of which the ranks exchange their best
        tokens instead of all logits. hidden: [samples, hidden size]."""
        part, own, kind = slice(first, first + shape.samples), packet.parts[first // self._part], KINDS[shape.kind]
        picked, places = own.rows[: shape.samples], own.places[: shape.samples]
        sampled, positions = self.sampled[part], self.sample_positions[part]
        found = best_of_part(
            vocabulary.part(hidden), places, picked, positions, self._sampling,
            first_token=vocabulary.first, largest_part=vocabulary.largest_part, kind=kind,
        )  # fmt: skip
        sample_of_parts(sampled, vocabulary.group.all_gather(found), picked, positions, self._sampling, kind=kind)
        remember_sampled(self.last_ids, self.last_positions, sampled, positions, picked)

    def score(self, logits: Tensor, targets: Tensor, ids: Tensor, values: Tensor) -> None:
        """Log-probabilities of the targets, then those of the best tokens, best first. logits: [n, vocab] float32, n at
        most `limits.scored`; targets: [n] int32; ids, values: [n, 1 + best tokens] int32 and float32, to be written."""
        num, width = ids.shape
        own_ids, own_values, own_targets = self._scored_ids[:num], self._scored_values[:num], self._targets[:num]
        own_targets.copy_(targets)
        logprobs(own_ids, own_values, logits, self._every[:num], own_targets, self._logprobs, num_best=width - 1)
        ids.copy_(own_ids[:, :width])
        values.copy_(own_values[:, :width])

    def accept(self, packet: Packet, ids: Tensor, *, rows: int, most: int) -> None:
        """Accepts draft tokens after all parts of a step are sampled. ids: [tokens] of the step, whose packet has
        `rows` rows; most: samples of a row."""
        accept_drafts(
            packet.step, ids, self.sampled, self.sample_positions, self.last_ids, self.last_positions, self.accepted,
            rows=rows, most=most,
        )  # fmt: skip

    def copy(self, memory: Tensor, copies: Tensor, num: int, *, between: int = 0) -> None:
        """Copies pages of the cache, some of them as `accept` has decided. The arguments are those of `copy_pages`."""
        copy_pages(memory, copies, num, self.accepted, between=between)


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


def bias_edit(row: int, bias: Mapping[int, float]) -> Edit:
    """bias: token id → what is added to its logit."""
    ids = np.array(list(bias), np.int64).clip(max=2**31 - 1).astype(np.int32)
    with np.errstate(over="ignore"):  # a greater number than float32 has becomes infinite
        values = np.array(list(bias.values()), np.float64).astype(np.float32)
    return Edit("bias", row, ids, values.view(np.int32))


def history_edits(row: RowOpen, vocab_size: int) -> list[Edit]:
    """What penalties need of the row's ids."""
    ids = np.frombuffer(row.ids, "<i4")
    seen = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    seen[ids[: row.num_prompt]] = True
    words = np.packbits(seen, bitorder="little").view("<i4")
    counts = np.bincount(ids[row.num_prompt :], minlength=vocab_size).clip(max=_MAX_COUNT).astype(np.int32)
    used, sampled = (np.flatnonzero(column).astype(np.int32) for column in (words, counts))
    return [Edit("prompt", row.row, used, words[used]), Edit("output", row.row, sampled, counts[sampled])]


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif is_dataclass(values):
        for field in fields(values):
            yield from _tensors(getattr(values, field.name))
    elif not isinstance(values, int):
        for value in values:  # type: ignore[attr-defined]
            yield from _tensors(value)
