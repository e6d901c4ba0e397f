"""Runner plugins that raise errors for requests with `{"fails": POINT}`: `faulty_plugin:Faulty`, and on the second rank
only `faulty_plugin:OnOneRank`."""

from collections.abc import Sequence

from torch import Tensor

from pagewire import RunnerPlugin
from pagewire.engine.plugin.base import LogitsRow, PluginModel, PluginRow, PluginStep


class Faulty(RunnerPlugin):
    api_version = 1
    shared_kv = "equal args"

    def on_load(self, model: PluginModel) -> None:
        self.fails = True

    def before_step(self, step: PluginStep) -> None:
        self._raise("before_step", step.rows)

    def after_layer(self, layer: int, hidden: Tensor, step: PluginStep) -> None:
        if layer == 1:
            self._raise("after_layer", step.rows)

    def on_logits(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        logits += 1
        self._raise("on_logits", [each.row for each in rows if len(each.output_ids) == 2])

    def after_step(self, step: PluginStep, sampled: Sequence[Sequence[int]]) -> None:
        self._raise("after_step", step.rows)

    def _raise(self, point: str, rows: Sequence[PluginRow]) -> None:
        for row in rows:
            if self.fails and row.args.get("fails") == point:
                raise ZeroDivisionError


class OnOneRank(Faulty):
    def on_load(self, model: PluginModel) -> None:
        self.fails = model.rank == 1
