"""Writes the hidden states of a prompt to a safetensors file, for requests that ask for it.

    PYTHONPATH=docs/examples pagewire serve MODEL --runner-plugin capture_activations:Capture,folder=/tmp/activations

A request with `"vllm_xargs": {"capture": "my-prompt", "layers": [0, 5]}` leaves my-prompt.safetensors in the folder:
`layer.0` and `layer.5` [positions, hidden_size], what these layers have computed, and `token_ids` [positions]. Each
position must be computed for it, so requests share cached KV only with equal arguments: a second one with the same name
is refused.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pagewire import RunnerPlugin
from pagewire.engine.plugin.base import Options, PluginModel, PluginRow, PluginStep
from pagewire.errors import ConfigError, RequestError

_MOST = 64  # captures under way


class Capture(RunnerPlugin):
    api_version = 1
    shared_kv = "equal args"

    def __init__(self, options: Options) -> None:
        if options.keys() != {"folder"}:
            raise ConfigError("capture_activations takes one option, folder=PATH.")
        self._folder = Path(options["folder"])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._kept: dict[int, dict[tuple[int, int], Tensor]] = {}  # rid → (layer, first position) → states
        self._written: dict[int, None] = {}  # rids, which may come again after a preemption

    def on_load(self, model: PluginModel) -> None:
        """Every rank has the same hidden states; one of them writes."""
        self._is_writer, self._num_layers = model.rank == 0, model.num_layers

    def before_step(self, step: PluginStep) -> None:
        for row in step.rows:
            name, layers = row.args.get("capture"), row.args.get("layers", [])
            if name is None or row.start >= row.num_prompt or row.rid in self._written:
                continue
            if not isinstance(name, str) or not name.replace("-", "").isalnum():
                raise RequestError("invalid_request", "capture must be a name of letters, digits and -.")
            if not isinstance(layers, list) or any(layer not in range(self._num_layers) for layer in layers):
                raise RequestError("invalid_request", f"layers must be a list of numbers below {self._num_layers}.")
            if self._file(row).exists():
                raise RequestError("invalid_request", f"{name} was captured before; choose another name.")
            if row.start == 0:
                self._kept.pop(row.rid, None)  # it begins again

    def after_layer(self, layer: int, hidden: Tensor, step: PluginStep) -> None:
        for row in step.rows:
            if layer in self._asked(row):
                end = min(row.last, row.first + row.num_prompt - row.start)
                self._kept.setdefault(row.rid, {})[layer, row.start] = hidden[row.first : end].clone()
        while len(self._kept) > _MOST:  # of requests that were cancelled
            del self._kept[next(iter(self._kept))]

    def after_step(self, step: PluginStep, sampled: Sequence[Sequence[int]]) -> None:
        for row in step.rows:
            if row.start + row.last - row.first >= row.num_prompt and (layers := self._asked(row)):
                parts = self._kept.pop(row.rid, {})
                tensors = {f"layer.{layer}": _joined(parts, layer, row.num_prompt) for layer in layers}
                tensors["token_ids"] = torch.from_numpy(row.ids[: row.num_prompt].astype("int64"))
                if self._is_writer:
                    save_file(tensors, self._file(row))
                self._written[row.rid] = None
        while len(self._written) > 100 * _MOST:
            del self._written[next(iter(self._written))]

    def _asked(self, row: PluginRow) -> list[int]:
        """The layers to keep of what this step computes."""
        layers = row.args.get("layers", [])
        is_asked = "capture" in row.args and row.start < row.num_prompt and row.rid not in self._written
        return layers if is_asked and isinstance(layers, list) else []

    def _file(self, row: PluginRow) -> Path:
        return self._folder / f"{row.args['capture']}.safetensors"


def _joined(parts: dict[tuple[int, int], Tensor], layer: int, num: int) -> Tensor:
    """[num, hidden_size] of the steps' parts, which overlap after a preemption. Raises RequestError if some lack."""
    own = {start: states for (of, start), states in parts.items() if of == layer}
    covered = {position for start, states in own.items() for position in range(start, start + len(states))}
    if len(covered) < num:
        raise RequestError("invalid_request", "a part of the prompt was found in the cache; choose another name.")
    whole = torch.empty(num, own[0].shape[1], dtype=own[0].dtype)
    for start, states in sorted(own.items()):
        whole[start : start + len(states)] = states
    return whole
