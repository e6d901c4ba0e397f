"""Samples the next token of each row.

The order is vLLM's: bias and penalties change the raw logits, masked tokens become -inf, temperature divides the
logits, min_p, top_k and top_p filter the tokens, and one token is sampled from the rest. Sampling uses the Gumbel-max
trick: the token with the greatest logit + Gumbel noise is a sample of the softmax. The noise of a token is a hash of
(request seed, output position, token id), so a request samples the same tokens alone, in any batch, in any row, and
after it was moved or resumed.

The hash is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the
constants are those of Vigna's splitmix64.c). Its generator adds a constant and mixes the state, so the n-th number of
the generator that starts at `key` is mix(key + n · step), without computing the numbers before it.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import Sampling
from ...kernels.ops import Ops
from .rows import Rows

_STEP = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
_COLDEST = 1e-5  # temperatures below count as this one: float32 could not tell them apart
_GREATEST = 1e30  # limit of an edited logit, so that differences and quotients stay finite
_FIRST_BEST = 256  # best tokens to sort at first; eightfold while top_p needs more


class Sampler:
    """Samples from logits of `vocab_size` tokens. Keeps no state between steps."""

    def __init__(self, *, vocab_size: int, device: torch.device, ops: Ops) -> None:
        self._greedy = ops.greedy
        self._steps = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(_STEP)

    def greedy(self, most: Tensor, best: Tensor) -> NDArray[np.int64]:
        """The ids `best` where the logits `most` are finite, else -1. Both [rows]."""
        return np.where(torch.isfinite(most).cpu().numpy(), best.cpu().numpy(), -1)

    def sample(
        self, logits: Tensor, rows: Rows, picked: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """One id for each of the rows `picked`, at its position `ends`; the ids before it are in `rows.ids`. -1 where
        logits are not finite, or a mask allows no token. A row may be picked for several positions.

        logits: [picked, vocab] float32, left unchanged.
        """
        ids = self.greedy(*self._greedy(logits))
        finite = ids >= 0
        sampled = finite & (rows.temperature[picked] > 0)
        special = np.flatnonzero(sampled | (finite & (rows.edits_logits | rows.is_masked)[picked]))
        if len(special):
            edited = logits[torch.from_numpy(special).to(logits.device)]
            for i in np.flatnonzero(rows.edits_logits[picked[special]]).tolist():
                row, end = int(picked[special[i]]), int(ends[special[i]])
                _edit(edited[i], rows.sampling[row], rows.bias(row), rows.ids[row, :end], int(rows.num_prompt[row]))
            for i in np.flatnonzero(rows.is_masked[picked[special]]).tolist():
                _forbid(edited[i], rows.masks[int(picked[special[i]])])
            ids[special] = self.greedy(*self._greedy(edited))
            sampled &= ids >= 0
            if sampled.any():
                among = np.flatnonzero(sampled[special])
                if len(among) < len(special):
                    edited = edited[torch.from_numpy(among).to(logits.device)]
                ids[sampled] = self._sample(edited, rows, picked[sampled], ends[sampled]).cpu().numpy()
        return ids

    def _sample(self, logits: Tensor, rows: Rows, picked: NDArray[np.int64], ends: NDArray[np.int64]) -> Tensor:
        """ids: [picked] int64. logits: [picked, vocab] float32, changed in place."""

        def column(values: NDArray[np.float32] | NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(values).to(logits.device)[:, None]

        temperature = np.maximum(rows.temperature[picked], np.float32(_COLDEST))
        scaled = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(column(temperature))
        keys = torch.from_numpy(_keys(rows.seed[picked], ends - rows.num_prompt[picked]))
        keys = keys.to(logits.device)
        top_k, top_p, min_p = rows.top_k[picked], rows.top_p[picked], rows.min_p[picked]
        if not ((top_k > 0) | (top_p < 1) | (min_p > 0)).any():
            return scaled.sub_(_exponential(keys[:, None] + self._steps).log_()).argmax(dim=-1)
        # Only the tokens that pass the filters need noise, usually few of a large vocabulary.
        left = scaled >= _floors(scaled, column(top_k), column(top_p), column(min_p))
        row, token = left.nonzero(as_tuple=True)
        scores = torch.full_like(scaled, -math.inf)
        scores[row, token] = scaled[row, token] - _exponential(keys[row] + self._steps[token]).log_()
        return scores.argmax(dim=-1)


def _edit(logits: Tensor, sampling: Sampling, bias: dict[int, float], ids: NDArray[np.int32], num_prompt: int) -> None:
    """Adds the bias, then applies the penalties. logits: [vocab], changed in place; ids: prompt and output."""

    def tensor(values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(logits.device)

    if bias:
        known = {token: value for token, value in bias.items() if token < logits.shape[0]}
        tokens = torch.tensor(list(known), dtype=torch.int64, device=logits.device)
        logits.index_add_(0, tokens, torch.tensor(list(known.values()), dtype=logits.dtype, device=logits.device))
    if sampling.repetition_penalty != 1:
        seen = tensor(np.unique(ids))
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        written, counts = np.unique(ids[num_prompt:], return_counts=True)
        logits[tensor(written)] -= sampling.frequency_penalty * tensor(counts) + sampling.presence_penalty
    # A finite bias such as 1e300 overflows. The request gets finite logits instead of failing the batch.
    logits.nan_to_num_(nan=-_GREATEST, posinf=_GREATEST, neginf=-_GREATEST)


def _forbid(logits: Tensor, mask: NDArray[np.int32]) -> None:
    """logits: [vocab], changed in place; mask: [⌈vocab / 32⌉], a set bit allows its token."""
    allowed = np.unpackbits(mask.view(np.uint8), count=logits.shape[0], bitorder="little")
    logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -math.inf)


def _floors(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least logit that may be sampled, [rows, 1]. scaled: [rows, vocab] with a maximum of 0; the others [rows, 1].

    Logits equal to the least one pass as well, so the result does not depend on the order of equal logits.
    """
    vocab = scaled.shape[1]
    min_p_floor = min_p.log()  # the best token's logit is 0; min_p 0 gives -inf
    k = torch.where((top_k == 0) | (top_k > vocab), vocab, top_k)
    limited = k < vocab
    look_at = min(vocab, max(_FIRST_BEST, int(torch.where(limited, k, 0).amax())))
    while True:
        best = torch.topk(scaled, look_at, dim=-1).values
        kth = best.gather(1, (k - 1).clamp(max=look_at - 1))
        floor = torch.where(limited, torch.maximum(kth, min_p_floor), min_p_floor)
        if bool((top_p >= 1).all()):
            return floor
        total = scaled.masked_fill(scaled < floor, -math.inf).logsumexp(dim=-1, keepdim=True)
        probs = (best - total).exp().masked_fill_(best < floor, 0)
        before = probs.cumsum(dim=-1) - probs
        num_inside = (before < top_p).sum(dim=-1, keepdim=True)
        settled = (num_inside < look_at) | (top_p >= 1) | (best[:, -1:] < floor)
        if look_at == vocab or bool(settled.all()):
            least_inside = best.gather(1, (num_inside - 1).clamp(min=0))
            return torch.where(top_p < 1, torch.maximum(floor, least_inside), floor)
        look_at = min(vocab, 8 * look_at)


def _exponential(state: Tensor) -> Tensor:
    """Exponentially distributed float32 for each hash state (int64, changed in place); -log of it is Gumbel noise.

    The uniform number u has 31 bits and is used as -log(1 - u), which is precise for small values, and these decide
    which token wins.
    """
    state ^= (state >> 30) & 0x3FFFFFFFF
    state *= _signed(_MULTIPLY_1)
    state ^= (state >> 27) & 0x1FFFFFFFFF
    state *= _signed(_MULTIPLY_2)
    # The last step of the mix, z ^ z >> 31, leaves the 31 highest bits alone, and only those are used.
    uniform = ((state >> 33) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The state in which each row's generator starts: a hash of the request's seed and the output position."""
    with np.errstate(over="ignore"):
        of_seed = _mix(seeds + np.uint64(_STEP))
        return _mix(of_seed + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)).view(np.int64)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MULTIPLY_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MULTIPLY_2)
    return z ^ (z >> np.uint64(31))


def _signed(constant: int) -> int:
    """The same 64 bits as a signed int: torch multiplies int64 and wraps."""
    return constant - (1 << 64) if constant >> 63 else constant
