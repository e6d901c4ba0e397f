"""A trial of a model that transformers computes, with an attention that keeps keys and values as a paged cache does.

Two short requests run side by side in two steps, the second of which reads the keys and values of the first.
`Rehearsal` notes how every layer calls attention, and refuses what a cache of one set of keys and values a layer cannot
answer. It needs no weights: on torch's meta device it shows the shapes before anything is read.

With the weights, `compare` holds the logits against those that transformers computes for each request alone with its
own attention. That shows what no call can show: tokens that influence each other outside of attention, positions that
the model counts by itself, and masks that are not causal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UnsupportedModel
from ...kernels.reference import attend
from ..attention.base import AttentionStep

# (request, tokens) in the order of a step. The requests change places, and each goes on where it was cut.
STEPS = (((0, 4), (1, 3)), ((1, 4), (0, 3)))
NUM_TOKENS = 7  # of each request
_MAX_ERROR = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}  # of logits, beside their spread
_MAX_NOISE = 8  # times what transformers' own attentions differ among themselves

Step = tuple[Tensor, Tensor]  # logits [tokens, vocab], and the request of each token


@dataclass(frozen=True)
class Call:
    """How a layer calls attention, which no step may change."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


class Rehearsal:
    """An `AttentionBackend` that records each layer's calls. `step` begins a step and gives the positions."""

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
        raise AssertionError("a rehearsal has steps of its own")

    def step(self, rows: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
        """rows: of `STEPS`. Returns (request, position) of each token."""
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
        """Every layer must have called in this step."""
        layers = set(range(num_layers))
        if self._seen != layers:
            raise UnsupportedModel(
                self._name,
                f"it has {num_layers} layers, and {len(self._seen & layers)} of them use "
                "attention; pagewire serves models whose every layer does",
            )

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if layer in self._seen:
            raise UnsupportedModel(
                self._name,
                f"it calls attention more than once in layer {layer}, and pagewire "
                "caches one set of keys and values a layer",
            )
        self._seen.add(layer)
        num = len(self._requests)
        if not query.shape[0] == key.shape[0] == value.shape[0] == num:
            raise UnsupportedModel(
                self._name,
                f"for {num} tokens layer {layer} computes {query.shape[0]} queries "
                f"and {key.shape[0]} keys, and pagewire's attention takes one of each a token",
            )
        call = Call(query.shape[1], key.shape[1], key.shape[2], scale, window, softcap)
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
    """prompts: [2, NUM_TOKENS] ids. run: (ids, positions, attention) → logits [tokens,
    vocab]. Returns how each layer calls attention, and the steps. Raises UnsupportedModel."""
    rehearsal = Rehearsal(name)
    steps = []
    for rows in STEPS:
        requests, positions = rehearsal.step(rows)
        logits = run(prompts[requests, positions].to(device), positions.to(device), rehearsal)
        rehearsal.finish(num_layers)
        steps.append((logits, requests))
    return rehearsal.calls, steps


def compare(name: str, steps: list[Step], expected: Tensor, again: Tensor | None, dtype: torch.dtype) -> None:
    """steps: of `rehearse`. expected: logits [2, NUM_TOKENS, vocab] float32, by transformers' own attention. again: the
    same by another of its attentions, which shows what rounding does to this model; None: in float32 that is known.
    dtype: that all were computed in. Raises UnsupportedModel if ours are of another model."""
    ours = [torch.cat([logits[requests == request] for logits, requests in steps]) for request in range(2)]
    noise = 0.0 if again is None else _difference(again, expected)
    difference = _difference(torch.stack(ours), expected)
    if not difference <= max(_MAX_ERROR[dtype], _MAX_NOISE * noise):
        raise UnsupportedModel(
            name,
            f"its logits with pagewire's attention differ by {difference:.0%} from those with transformers' own, so it "
            "does something that pagewire does not know",
        )


def _difference(found: Tensor, expected: Tensor) -> float:
    """Beside the spread of a token's expected logits, of the worst part of a request. Both [2, NUM_TOKENS, vocab].

    A part are the tokens that one step computed. Of these the one in the middle decides: rounding can send a token to
    another expert, and then its logits differ much."""
    # Without the mean: no token is likelier if all logits are larger.
    off, spread = (logits - logits.mean(dim=-1, keepdim=True) for logits in (found - expected, expected))
    error = (off.norm(dim=-1) / spread.norm(dim=-1).clamp_min(1e-9)).nan_to_num(math.inf)
    error[~expected.isfinite().all(dim=-1)] = 0.0  # a model whose numbers overflow in transformers too says nothing
    parts = [
        part
        for request, errors in enumerate(error)
        for part in errors.split([num for rows in STEPS for row, num in rows if row == request])
    ]
    return max(float(part.median()) for part in parts)
