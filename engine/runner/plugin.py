"""Opens the runner plugin of a worker, and refuses what it cannot have with this model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...config.config import EngineConfig
from ...errors import ConfigError, PagewireError
from ..models.layers import LayerSpan, NoHiddenStatesError, layer_spans
from ..parallel.collectives import Group
from ..plugin.base import PluginModel, RunnerPlugin
from ..plugin.guard import LAYER_POINTS, PluginGuard, points_of
from ..plugin.registry import FLAG, load_plugin
from ..weights.open import Reader, open_checkpoint
from .served import Served


@dataclass(frozen=True)
class OpenPlugin:
    plugin: RunnerPlugin
    name: str
    guard: PluginGuard
    spans: tuple[LayerSpan, ...]  # empty: it is not called between layers

    @property
    def note(self) -> str:
        """For the operator."""
        return f"; runner plugin {self.name}{', a call for each layer' if self.spans else ''}"


def open_plugin(config: EngineConfig, served: Served, device: torch.device, group: Group) -> OpenPlugin | None:
    """The plugin of `--runner-plugin`, which has not been told of the model. Raises ConfigError."""
    if config.runner_plugin is None:
        return None
    plugin, name = load_plugin(config.runner_plugin), config.runner_plugin.partition(",")[0]
    points = points_of(plugin)
    if plugin.shared_kv == "none" and config.enable_prefix_caching:
        raise ConfigError(
            f"{FLAG} {name}: its requests cannot share cached KV; give --no-enable-prefix-caching as well."
        )
    if plugin.shared_kv == "all" and "layers_to_skip" in points:
        raise ConfigError(f'{FLAG} {name} skips layers, so its shared_kv must be "equal args" or "none".')
    spans = _spans(served, name) if points & LAYER_POINTS else ()
    return OpenPlugin(plugin, name, PluginGuard(plugin, name, group=group, spans=spans, device=device), spans)


def _spans(served: Served, name: str) -> tuple[LayerSpan, ...]:
    spec = served.spec
    if served.program is None or spec.decoder is None:
        raise ConfigError(
            f"{FLAG} {name} is called between layers, and transformers computes {spec.architecture} as a whole; use "
            "a plugin without after_layer and layers_to_skip."
        )
    try:
        return layer_spans(served.program, len(spec.decoder.blocks))
    except NoHiddenStatesError as error:
        raise ConfigError(
            f"{FLAG} {name} is called between layers, but {spec.architecture} has none: {error}."
        ) from None


def tell_model(opened: OpenPlugin, config: EngineConfig, served: Served, device: torch.device, group: Group) -> None:
    """The model is loaded. Raises ConfigError."""
    spec = served.spec
    reader = None
    if config.load_format != "dummy":
        reader = open_checkpoint(Path(config.model.path), config.model.adapter)
    try:
        model = PluginModel(
            architecture=spec.architecture, num_layers=spec.num_layers, hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size, dtype=served.dtype, device=device, rank=group.rank, num_ranks=group.size,
            weights={} if reader is None else _Tensors(reader),
        )  # fmt: skip
        opened.plugin.on_load(model)
    except PagewireError:
        raise
    except Exception as error:  # the operator's code may raise anything
        raise ConfigError(f"{FLAG} {opened.name}: on_load failed ({type(error).__name__}: {error}).") from error
    finally:
        if reader is not None:
            reader.close()


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint that is open."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._reader:
            raise KeyError(name)
        return self._reader.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.names())

    def __len__(self) -> int:
        return len(self._reader.names())
