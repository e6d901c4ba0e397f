"""Leaves layers of the model out, for all requests or for those that ask for it.

    PYTHONPATH=docs/examples pagewire serve MODEL --runner-plugin skip_layers:SkipLayers,layers=20-23

skips layers 20 to 23 unless a request says otherwise: `"vllm_xargs": {"skip_layers": [20, 21]}`, or `[]` for none.
Tokens are those of a model without these layers. A step saves their time if all of its requests skip them.
"""

from collections.abc import Collection, Mapping

from pagewire import RunnerPlugin
from pagewire.engine.plugin.base import Options
from pagewire.errors import ConfigError, RequestError


class SkipLayers(RunnerPlugin):
    api_version = 1
    shared_kv = "equal args"

    def __init__(self, options: Options) -> None:
        first, _, last = options.get("layers", "").partition("-")
        if options.keys() - {"layers"} or (options and not (first.isdigit() and (last or first).isdigit())):
            raise ConfigError("skip_layers takes one option, such as layers=20-23.")
        self._layers = range(int(first), int(last or first) + 1) if options else range(0)

    def layers_to_skip(self, args: Mapping[str, object]) -> Collection[int]:
        asked = args.get("skip_layers", self._layers)
        if not isinstance(asked, list | range):
            raise RequestError("invalid_request", "skip_layers must be a list of layers.")
        return asked
