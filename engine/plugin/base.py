"""The interface of runner plugins, `--runner-plugin module:Class,option=value`.

A plugin is a subclass of `RunnerPlugin`, made once in each worker process. It overrides the points that it needs, and
only those cost anything:

    on_load         once, when the model is loaded
    layers_to_skip  for each request, when it gets a row
    before_step     before the pass of a step
    after_layer     after each layer of the pass
    on_logits       on the logits of the tokens that are sampled next
    after_step      when these tokens are sampled
    close           when the worker ends

All calls come from one thread. With tensor parallelism each rank has a plugin of its own, which is called with the same
rows, hidden states and logits as the others and must do the same: ranks sample by themselves.

A call that raises fails its requests and no others: if it was about several rows, it is repeated for each row alone,
and those for which it raises again fail. So a plugin must be able to take the same rows of a step twice. An
`errors.RequestError("invalid_request", …)` is the client's error, with status 400 and its own sentence; all others are
the plugin's, with status 500, and their tracebacks are in the log.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config.plugins import Options as Options

API_VERSION = 1
"""Grows when a plugin that was written before would no longer do what it says."""

SharedKv = Literal["all", "equal args", "none"]


@dataclass(frozen=True, kw_only=True)
class PluginModel:
    """What `on_load` is told of the model and of this worker."""

    architecture: str  # as config.json names it
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype  # of hidden states
    device: torch.device
    rank: int  # of the worker
    num_ranks: int
    # The checkpoint's tensors by their names, whole and as they are stored, read when they are looked up. Those with
    # which the model computes are packed for its kernels. Empty with `--load-format dummy`.
    weights: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PluginRow:
    """One request in one step."""

    rid: int  # of the sequence; a request that is resumed after a process died has another
    args: Mapping[str, object]  # `vllm_xargs` or `extra_args` of the request
    first: int  # of its tokens in the step, which are [first, last)
    last: int
    start: int  # the position of the first of them
    num_prompt: int  # tokens of the prompt
    ids: NDArray[np.int32]  # read-only: prompt, output so far, and draft tokens of this step


@dataclass(frozen=True, kw_only=True)
class PluginStep:
    """The tokens of a step, row after row."""

    number: int
    rows: tuple[PluginRow, ...]
    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64


@dataclass(frozen=True, kw_only=True)
class LogitsRow:
    """What a row of logits is for."""

    row: PluginRow
    position: int  # of the token that is sampled from them

    @property
    def ids(self) -> NDArray[np.int32]:
        """All tokens before it."""
        return self.row.ids[: self.position]

    @property
    def output_ids(self) -> NDArray[np.int32]:
        """The output before it."""
        return self.row.ids[self.row.num_prompt : self.position]


class RunnerPlugin:
    """Points that do nothing. A subclass sets `api_version` to the number of the interface that it was written for."""

    api_version: ClassVar[int]
    shared_kv: ClassVar[SharedKv] = "all"
    """Which requests may share cached KV. `all`: nothing here changes hidden states. `equal args`: they depend on a
    request's tokens and `args` alone, or each of its positions must be computed for these `args`. `none`: on anything
    else, which needs `--no-enable-prefix-caching`."""

    def __init__(self, options: Options) -> None:
        """options: those behind the class on the command line. Raises ConfigError for any that make no sense."""

    def on_load(self, model: PluginModel) -> None:
        """The model is loaded. An error ends the start. The weights can be read only during this call."""

    def layers_to_skip(self, args: Mapping[str, object]) -> Collection[int]:
        """The layers, from 0, that requests with these `args` skip at all their positions. A layer that all rows of a
        step skip is not computed. Needs `shared_kv` other than `all`."""
        return ()

    def before_step(self, step: PluginStep) -> None:
        """Its pass is about to begin."""

    def after_layer(self, layer: int, hidden: Tensor, step: PluginStep) -> Tensor | None:
        """hidden: [tokens, hidden_size], what the layer has computed, before any final norm; valid during this call,
        and not to be changed. A tensor that is returned takes its place, which needs `shared_kv` other than `all`. Not
        called for layers that all rows skip."""
        return None

    def on_logits(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        """Changes logits in place: float32 [rows, vocab_size], the model's own. Bias, penalties, masks, temperature and
        filters follow; log-probabilities are those of the logits before."""

    def after_step(self, step: PluginStep, sampled: Sequence[Sequence[int]]) -> None:
        """sampled: parallel to `step.rows`, the tokens that were appended to each row."""

    def close(self) -> None:
        """The worker ends. Not called if its process is killed."""
