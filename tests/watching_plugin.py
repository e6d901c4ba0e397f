"""A runner plugin that watches every point and changes nothing: `watching_plugin:Watching`."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from pagewire import RunnerPlugin
from pagewire.engine.plugin.base import LogitsRow, Options, PluginModel, PluginStep


class Watching(RunnerPlugin):
    api_version = 1
    shared_kv = "equal args"
    last: ClassVar["Watching"]

    def __init__(self, options: Options) -> None:
        Watching.last = self
        self.seen: Counter[str] = Counter()
        self.weights: dict[str, list[int]] = {}  # shapes
        self.tokens: dict[int, list[int]] = {}  # rid → output

    def on_load(self, model: PluginModel) -> None:
        self.weights = {name: [*tensor.shape] for name, tensor in model.weights.items()}

    def layers_to_skip(self, args: Mapping[str, object]) -> Collection[int]:
        self.seen["layers_to_skip"] += 1
        return ()

    def before_step(self, step: PluginStep) -> None:
        self.seen["before_step"] += 1

    def after_layer(self, layer: int, hidden: Tensor, step: PluginStep) -> None:
        assert len(hidden) == len(step.ids) == step.rows[-1].last
        self.seen["after_layer"] += 1

    def on_logits(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        assert len(logits) == len(rows)
        self.seen["on_logits"] += 1

    def after_step(self, step: PluginStep, sampled: Sequence[Sequence[int]]) -> None:
        self.seen["after_step"] += 1
        for row, ids in zip(step.rows, sampled, strict=True):
            self.tokens.setdefault(row.rid, []).extend(ids)

    def close(self) -> None:
        self.seen["close"] += 1
