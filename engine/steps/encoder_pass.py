"""The pass of an encoder over the prompts of rows that a plan opens, before the decoder's pass: whole prompts at once.
What the decoder's layers read of it lies in the cache afterwards."""

import numpy as np
import torch

from ...ipc.messages import StepPlan
from ...kernels.ops import Ops
from ..attention.kv_cache import KvCache
from ..attention.whole_text import WholeTextAttention
from ..executors.base import Model
from .rows import Rows


class EncoderPass:
    def __init__(self, model: Model, cache: KvCache, ops: Ops) -> None:
        """model: the encoder."""
        self._model, self._cache, self._ops = model, cache, ops

    def run(self, plan: StepPlan, rows: Rows) -> None:
        """rows: with those that the plan opens."""
        opened = [row for row in plan.open if row.encoder_ids]
        if not opened:
            return
        size, device = self._cache.block_size, self._cache.device
        texts = [np.frombuffer(row.encoder_ids, "<i4").astype(np.int64) for row in opened]
        lengths = [len(text) for text in texts]
        positions = np.concatenate([np.arange(length) for length in lengths])
        row_of_token = np.repeat([row.row for row in opened], lengths)
        pages = rows.cross[:, row_of_token, positions // size].astype(np.int64)
        slots = torch.from_numpy(pages * size + positions % size).to(device)
        # A page that is not filled still holds the values of its previous owner.
        last = [rows.cross[:, row.row, length // size] for row, length in zip(opened, lengths, strict=True)
                if length % size]  # fmt: skip
        if last:
            self._cache.clear(torch.from_numpy(np.concatenate(last).astype(np.int64)).to(device))
        attention = WholeTextAttention(self._cache, self._ops, lengths, dict(enumerate(slots, start=len(rows.tables))))
        ids = torch.from_numpy(np.concatenate(texts)).to(device)
        self._model.hidden(ids, torch.from_numpy(positions).to(device), attention)
