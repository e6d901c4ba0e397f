"""A trial run of a model from transformers, with an attention that keeps keys and values as a paged cache does.

Two short requests of random tokens run side by side in chunks; later steps read the keys and values of earlier ones.
`Rehearsal` records how every layer calls attention, and rejects what a cache of one set of keys and values per layer
cannot serve. It needs no weights: on torch's meta device it shows the shapes before any weight is read.

With the weights, `compare` compares the log-probabilities with those that transformers computes for each request alone
with its own attention. That reveals what the calls do not: tokens that influence each other outside of attention,
positions that the model counts itself, and masks that are not causal. A trial costs as many passes over the weights as
it has steps, and two of transformers' own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median_low

import torch
from torch import Tensor

from ...errors import UnsupportedModel
from ...kernels.reference import attend
from ..attention.base import AttentionParameters, AttentionStep

# (request, tokens) in the order of a step. Each step swaps the requests, and each continues where it was cut.
STEPS = (((0, 13), (1, 5)), ((1, 21), (0, 3)), ((0, 16), (1, 6)))
NUM_TOKENS = 32  # of each request
# Limits of errors relative to the spread of log-probabilities. Roundings add up over layers like a random walk; random
# models of 3 layers show 4 to 17 roundings in all, in float32 and in bfloat16.
_ROUNDINGS = 16  # of the computation's type, for a model of one layer
_MAX_ROUNDINGS = 1 / 8  # beyond it, tokens are those of another model
_MAX_NOISE = 8  # times the difference between transformers' own attention implementations

Step = tuple[Tensor, Tensor]  # logits [tokens, vocab], and the request of each token


@dataclass(frozen=True)
class Call:
    """How a layer calls attention. It must be the same in every step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


class Rehearsal:
    """An `AttentionBackend` that records each layer's calls."""

    def __init__(self, name: str) -> None:
        self.calls: dict[int, Call] = {}  # by layer
        self._name = name
        self._requests = torch.empty(0, dtype=torch.int64)  # of this step's tokens
        self._positions = torch.empty(0, dtype=torch.int64)
        self._seen: set[int] = set()  # layers that this step has called
        self._num_steps = 0
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # layer → keys and values of all steps' tokens
        self._kept_requests = self._kept_positions = torch.empty(0, dtype=torch.int64)

    def begin(self, step: AttentionStep) -> None:
        raise AssertionError("use `step`")

    def step(self, rows: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
        """Begins a step. rows: of `STEPS`. Returns (request, position) of each token."""
        requests = torch.tensor([request for request, num in rows for _ in range(num)])
        positions = requests.new_empty(len(requests))
        for request, num in rows:
            positions[requests == request] = int((self._kept_requests == request).sum()) + torch.arange(num)
        self._requests, self._positions, self._seen = requests, positions, set()
        self._kept_requests = torch.cat([self._kept_requests, requests])
        self._kept_positions = torch.cat([self._kept_positions, positions])
        self._num_steps += 1
        return requests, positions

    def finish(self, num_layers: int) -> None:
        """Ends a step. Raises UnsupportedModel unless every layer has called attention."""
        layers = set(range(num_layers))
        if self._seen != layers:
            raise UnsupportedModel(
                self._name,
                f"it has {num_layers} layers, and {len(self._seen & layers)} of them use "
                "attention; pagewire serves only models in which all layers do",
            )

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        parameters: AttentionParameters,
    ) -> Tensor:
        assert key is not None and value is not None, "transformers' layers have keys and values of their own"
        if layer in self._seen:
            raise UnsupportedModel(
                self._name,
                f"it calls attention more than once in layer {layer}, and pagewire "
                "caches one set of keys and values per layer",
            )
        self._seen.add(layer)
        num = len(self._requests)
        if not query.shape[0] == key.shape[0] == value.shape[0] == num:
            raise UnsupportedModel(
                self._name,
                f"for {num} tokens layer {layer} computes {query.shape[0]} queries "
                f"and {key.shape[0]} keys, and pagewire's attention takes one of each per token",
            )
        reach = parameters.scale, parameters.window, parameters.softcap
        call = Call(query.shape[1], key.shape[1], key.shape[2], *reach)
        if self.calls.setdefault(layer, call) != call:
            raise UnsupportedModel(
                self._name,
                f"layer {layer} changes its scale, window or heads from one step to "
                "the next, and pagewire computes tokens of many steps at once",
            )
        if self._num_steps > 1:
            past_keys, past_values = self._kept[layer]
            key, value = torch.cat([past_keys, key]), torch.cat([past_values, value])
        self._kept[layer] = (key, value)
        return self._attend(query, key, value, call)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        distance = self._positions[:, None] - self._kept_positions[None]
        sees = (self._requests[:, None] == self._kept_requests[None]) & (distance >= 0)
        if call.window is not None:
            sees &= distance < call.window
        mask = torch.zeros(sees.shape, dtype=query.dtype).masked_fill_(~sees, -torch.inf).to(query.device)
        group = call.num_heads // call.num_kv_heads
        out = attend(
            query.transpose(0, 1)[None],
            key.repeat_interleave(group, 1).transpose(0, 1)[None],
            value.repeat_interleave(group, 1).transpose(0, 1)[None],
            mask,
            call.scale,
            call.softcap,
        )
        return out[0].transpose(0, 1).contiguous()


def rehearse(
    name: str, num_layers: int, device: torch.device, prompts: Tensor, run: Callable[..., Tensor]
) -> tuple[dict[int, Call], list[Step]]:
    """Runs `STEPS`. prompts: [2, NUM_TOKENS] ids. run: (ids, positions, attention) → logits [tokens, vocab]. Returns
    how each layer calls attention, and the steps' logits. Raises UnsupportedModel."""
    rehearsal = Rehearsal(name)
    steps = []
    for rows in STEPS:
        requests, positions = rehearsal.step(rows)
        logits = run(prompts[requests, positions].to(device), positions.to(device), rehearsal)
        rehearsal.finish(num_layers)
        steps.append((logits, requests))
    return rehearsal.calls, steps


def compare(
    name: str, steps: list[Step], expected: Tensor, again: Tensor, *, dtype: torch.dtype, num_layers: int, max_len: int
) -> None:
    """Compares the log-probabilities of the first `max_len` positions. steps: of `rehearse`. expected: logits [2,
    NUM_TOKENS, vocab] float32 of transformers' own attention. again: the same from another of its attention
    implementations, which shows the effect of rounding in this model. dtype: of the computation. Raises
    UnsupportedModel if they differ by more."""
    ours = torch.stack([torch.cat([logits[requests == request] for logits, requests in steps]) for request in range(2)])
    difference = _difference(ours, expected, max_len)
    roundings = _ROUNDINGS * math.sqrt(num_layers) * torch.finfo(dtype).eps
    if difference > max(min(roundings, _MAX_ROUNDINGS), _MAX_NOISE * _difference(again, expected, max_len)):
        other = ours.argmax(-1) != expected.argmax(-1)
        raise UnsupportedModel(
            name,
            f"it computes something that pagewire does not support: in a trial of {other[:, :max_len].numel()} random "
            f"positions {int(other[:, :max_len].sum())} tokens differ from those of its own forward pass in "
            f"transformers, and its log-probabilities by {difference:.2g} of their spread",
        )


def _difference(found: Tensor, expected: Tensor, max_len: int) -> float:
    """The error of the worst part of a request, relative to the spread of its tokens' expected log-probabilities. Both
    logits [2, NUM_TOKENS, vocab].

    A part is the tokens that one step computed; its error is the median over them, because rounding can send a single
    token to another expert, which changes its logits a lot."""
    worst = 0.0
    for request in range(2):
        errors = [_error(*logits) for logits in zip(found[request, :max_len], expected[request, :max_len], strict=True)]
        for first, end in pairwise([0, *accumulate(dict(rows).get(request, 0) for rows in STEPS)]):
            if part := [error for error in errors[first:end] if not math.isnan(error)]:
                worst = max(worst, median_low(part))
    return worst


def _error(found: Tensor, expected: Tensor) -> float:
    """Of one token's logits [vocab]. NaN: those of transformers overflow, so they are not compared."""
    if not expected.isfinite().all():
        return math.nan
    off = found.log_softmax(-1) - expected.log_softmax(-1)
    spread = expected - expected.mean()
    return float((off.norm() / spread.norm().clamp_min(1e-9)).nan_to_num(math.inf))
