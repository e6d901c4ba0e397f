"""Steps of an encoder, which computes whole texts: a row takes one step, and nothing of it is kept."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...config.config import EngineConfig
from ...ipc.messages import PassReads, RowOpen, StepPlan, StepResult, bytes_to_ids
from ..attention.kv_cache import KvCache, KvShape
from ..executors.encoder import Encoder
from ..executors.experts import OwnExperts
from .base import ImmediateSteps
from .pooling import as_tensor, pool


@dataclass(frozen=True, kw_only=True)
class EncoderModel:
    """A model without KV. Its blocks have no bytes, so that one scheduler serves all models."""

    encoder: Encoder
    kv_shape: KvShape
    weights: int  # bytes
    workspace: int  # bytes, estimated
    note: str
    synchronize: Callable[[], None]
    graphs = 0
    head_major = False
    handover = queue = by_layer = None
    failed_kernels: tuple[str, ...] = ()
    own_experts: Mapping[int, OwnExperts] = field(default_factory=dict)
    replicas = None

    @property
    def reads(self) -> PassReads:
        """Of its weights, in each step."""
        return PassReads(self.weights)

    def steps(self, config: EngineConfig, cache: KvCache) -> "EncoderSteps":
        return EncoderSteps(self.encoder, synchronize=self.synchronize)


class EncoderSteps(ImmediateSteps):
    def __init__(self, encoder: Encoder, *, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self._encoder = encoder
        self._synchronize = synchronize
        self._rows: dict[int, RowOpen] = {}  # opened and not computed yet

    def launch(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        self._rows.update((row.row, row) for row in plan.open)
        rows = [self._rows.pop(row) for row in bytes_to_ids(plan.rows)]
        texts = [as_tensor(row.ids, "<i4") for row in rows]
        assert [len(text) for text in texts] == np.frombuffer(plan.counts, "<i4").tolist(), f"step {plan.step}: chunks"
        types = [as_tensor(row.type_ids or bytes(len(text)), "u1") for row, text in zip(rows, texts, strict=True)]
        vectors = {}
        for i, states in enumerate(self._encoder.states(texts, types)):
            pooling = rows[i].pooling
            assert pooling is not None, f"step {plan.step} would sample tokens from an encoder"
            vectors[i] = pool(states, pooling)
        self._synchronize()
        device_ms = (time.perf_counter() - started) * 1000
        self._results.append(StepResult(plan.step, b"", {}, {}, device_ms, vectors=vectors))
