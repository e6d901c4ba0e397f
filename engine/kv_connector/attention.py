"""Calls the worker half of the KV connector at every layer of a pass, without the model knowing."""

from torch import Tensor

from ...kernels.states import StateRows, Tiles
from ..attention.base import AttentionBackend, AttentionParameters, AttentionStep
from .base import WorkerConnector


class ConnectorAttention:
    """Wraps an attention backend. The runner sets `is_active` for the steps that carry metadata."""

    def __init__(self, inner: AttentionBackend, connector: WorkerConnector) -> None:
        self.is_active = False
        self._inner = inner
        self._connector = connector

    @property
    def states(self) -> StateRows | None:
        return self._inner.states

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        return self._inner.state_tiles(first, count, per_tile)

    def begin(self, step: AttentionStep) -> None:
        self._inner.begin(step)

    def forward(
        self, tile: int, query: Tensor, key: Tensor | None, value: Tensor | None, parameters: AttentionParameters
    ) -> Tensor:
        if not self.is_active:
            return self._inner.forward(tile, query, key, value, parameters)
        self._connector.wait_for_layer_load(tile)
        out = self._inner.forward(tile, query, key, value, parameters)
        if key is not None:
            self._connector.save_kv_layer(tile)
        return out
