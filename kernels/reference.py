"""The operations of a decoder in plain torch: the specification that every faster kernel is tested against.

Called through the table in `ops.py`. Takes tensors only, never a model, a config or a request.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .grouped_weight import GroupedWeight, zero_points
from .superblock_weight import COLUMNS, SuperblockWeight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension, computed in float32. x: [..., dim], weight: [dim], result as x."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up. gate_up: [tokens, 2 · dim], the gates first; result [tokens, dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def norm_rotary(
    states: Tensor, heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Norms the heads (if q_norm and k_norm [dim] are given) and rotates each of their pairs (x[i], x[i + dim/2]).

    states: [tokens, heads + kv_heads, dim], queries first, and may be changed; cos, sin: [tokens, 1, dim]. The first
    half of `sin` is negated, so that the rotation is two products without a negation. Result as states.
    """
    if q_norm is not None and k_norm is not None:
        normed = rms_norm(states[:, :heads], q_norm, eps), rms_norm(states[:, heads:], k_norm, eps)
        states = torch.cat(normed, dim=1)
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(greatest logit, its first index) of each row. logits: [rows, vocab] float32 → [rows] float32, [rows] int64. If a
    row holds a NaN, its greatest is NaN and its index undefined."""
    most, best = logits.max(dim=-1)
    return most, best


class TorchMatrix:
    """The weight as it is, multiplied by torch."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def result_dtype(self, x: Tensor) -> torch.dtype:
        """Of `product`."""
        return x.dtype

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """out: memory for the result [rows, n]; None: new memory."""
        if out is None:
            return F.linear(x, self.weight, bias)
        weight = self.weight.t()
        return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)

    def silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return silu_mul(self.product(x, bias))

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return greedy(self.product(x, None).float())

    def lookup(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class TorchGroupedMatrix:
    """A weight of 8 or 4 bits. Activations are rounded to 8 bits with a scale for each row and group of columns, so
    that no row depends on another. Sums within a group are exact; the groups are added in ascending order."""

    def __init__(self, weight: GroupedWeight) -> None:
        values = weight.numbers.int()
        if weight.table is not None:
            values = torch.tensor(weight.table, dtype=torch.int32)[weight.numbers.long()]
        self._values = (values - 128).to(torch.int8)  # `_int_mm` takes signed numbers only
        self._group, self._order = weight.group_size, weight.order
        self._scales, self._offsets, self._zeros = weight.scales, weight.offsets, zero_points(weight)

    @property
    def nbytes(self) -> int:
        tensors = (self._values, self._scales, self._offsets, self._zeros, self._order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        numbers, scales = round_activations(x, self._group, self._order)
        out = torch.zeros(x.shape[0], self._values.shape[0])
        for group in range(scales.shape[1]):
            columns = slice(group * self._group, (group + 1) * self._group)
            part = numbers[:, columns].contiguous()
            total = part.sum(dim=1, dtype=torch.int32)[:, None]
            sums = torch._int_mm(part, self._values[:, columns].t().contiguous()) + 128 * total
            if self._zeros is not None:
                term = (sums - self._zeros[group].int() * total).float() * self._scales[group]
            else:
                term = sums.float() * self._scales[group] - self._offsets[group] * total.float()
            out = out + term * scales[:, group, None] if group else term * scales[:, group, None]
        return out if bias is None else out + bias

    def silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return silu_mul(self.product(x, bias))

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return greedy(self.product(x, None).float())

    def lookup(self, ids: Tensor) -> Tensor:
        values = self._values[ids].float().add_(128).view(ids.shape[0], -1, self._group)
        scales = self._scales.t()[ids][:, :, None]
        if self._zeros is not None:
            rows = (values - self._zeros.t()[ids].float()[:, :, None]) * scales
        else:
            rows = values * scales - self._offsets.t()[ids][:, :, None]
        rows = rows.view(ids.shape[0], -1)
        if self._order is None:
            return rows
        return torch.empty_like(rows).index_copy_(1, self._order.long(), rows)


class TorchSuperblockMatrix:
    """A weight in superblocks. Activations are rounded to 8 bits with a scale for each row and superblock. Sums within
    a superblock are exact, with the scales of the groups; the superblocks are added in ascending order."""

    def __init__(self, weight: SuperblockWeight) -> None:
        self._weight, self._values = weight, weight.values()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._values if tensor is not None)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        values, zero, size = self._values, self._weight.form.zero, self._weight.group_size
        n, k = self._weight.shape
        numbers, scales = round_activations(x, COLUMNS, None)
        q = numbers.double().view(len(x), -1, COLUMNS)  # exact, like all sums below
        scaled = (values.numbers.double() - zero).view(n, -1, size) * values.scales.double()[:, :, None]
        scaled = scaled.view(n, -1, COLUMNS)
        totals = q.view(len(x), k // COLUMNS, -1, size).sum(dim=3)
        out = torch.zeros(len(x), n)
        for block in range(k // COLUMNS):
            term = (q[:, block] @ scaled[:, block].t()).float() * values.factors[:, block]
            if values.minima is not None and values.min_factors is not None:
                minima = values.minima.double().view(n, k // COLUMNS, -1)[:, block]
                term = term - (totals[:, block] @ minima.t()).float() * values.min_factors[:, block]
            term = term * scales[:, block, None]
            out = out + term if block else term
        return out if bias is None else out + bias

    def silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return silu_mul(self.product(x, bias))

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return greedy(self.product(x, None))

    def lookup(self, ids: Tensor) -> Tensor:
        return self._weight.rows(ids).dequantize(torch.float32)


def quantized_matrix(weight: GroupedWeight | SuperblockWeight) -> TorchGroupedMatrix | TorchSuperblockMatrix:
    """A weight that the C kernels multiply as integers."""
    return TorchGroupedMatrix(weight) if isinstance(weight, GroupedWeight) else TorchSuperblockMatrix(weight)


def round_activations(x: Tensor, group: int, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [rows, k] → (int8 [rows, k], float32 scales [rows, k / group]): x · (127 / max |x|), ties to even, and
    max |x| / 127, in groups of adjacent columns after they are ordered. Groups below 1e-30 count as zero. The scales of
    a row with a number that is not finite are NaN, and its numbers 0."""
    x = x.float() if order is None else x.float()[:, order.long()]
    is_finite = x.isfinite().all(dim=1, keepdim=True)
    grouped = x.masked_fill(~is_finite, 0).view(x.shape[0], -1, group)
    most = grouped.abs().amax(dim=-1)
    numbers = (grouped * torch.where(most > 1e-30, torch.tensor(127.0) / most, 0)[:, :, None]).round_().to(torch.int8)
    return numbers.flatten(1), torch.where(is_finite, most / 127, torch.nan)


def write_kv(key: Tensor, value: Tensor | None, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Writes the keys and values of a step's tokens to the cache.

    key, value: [tokens, kv_heads, dim], without a value only keys; k_pages, v_pages: [pages, block_size, kv_heads,
    dim], pages of any stride, changed in place; slots: [tokens] int64, page · block_size + offset. Values are rounded
    to the pages' type.
    """
    at = (slots // k_pages.shape[1], slots % k_pages.shape[1])
    k_pages.index_put_(at, key.to(k_pages.dtype))
    if value is not None:
        v_pages.index_put_(at, value.to(v_pages.dtype))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(query · keyᵀ · scale + mask) · value. All [batch, heads, positions, dim] (key and value may be expanded).

    mask: broadcasts to [batch, heads, queries, keys], in query's dtype, -inf for what is not seen. Masked keys and
    values must be finite too: 0 · NaN is NaN. With `softcap` c the scores become c · tanh(scores / c) before the mask.
    sinks: broadcasts to [batch, heads, queries, 1]; a logit that takes part in the softmax and has no value.
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, key.transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : key.shape[-2]]
    return torch.matmul(weights.to(value.dtype), value)


def alibi_bias(slopes: Tensor, keys: Tensor, queries: Tensor, rounded: bool) -> Tensor:
    """What ALiBi adds to the scores: slope · (key position - query position), or with `rounded` slope · key position in
    bfloat16. slopes: [heads]; keys, queries: positions, which broadcast to [..., queries, keys]. Result float32
    [..., heads, queries, keys]."""
    if rounded:
        return (slopes.bfloat16()[:, None, None] * keys.unsqueeze(-3).bfloat16()).float()
    return slopes.float()[:, None, None] * (keys - queries).unsqueeze(-3).float()


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A number for each head and bucket of distances; see `Relative` in `engine/models/description.py`."""

    table: Tensor  # [buckets, heads] float32
    longest: int
    is_two_sided: bool = False


def relative_bias(bias: RelativeBias, keys: Tensor, queries: Tensor) -> Tensor:
    """What relative positions add to the scores. keys, queries: positions, which broadcast to [..., queries, keys].
    Result float32 [..., heads, queries, keys]."""
    behind = keys - queries
    num = bias.table.shape[0]
    if bias.is_two_sided:
        num //= 2
        first, distance = (behind > 0).long() * num, behind.abs()
    else:
        first, distance = torch.zeros_like(behind), (-behind).clamp(min=0)
    exact = num // 2
    # In the order of transformers' operations: a rounding may send a distance to another bucket.
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(bias.longest / exact)
    far = (exact + (share * (num - exact)).long()).clamp(max=num - 1)
    return bias.table[first + torch.where(distance < exact, distance, far)].movedim(-1, -3)


def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    before_scale: bool = False,
    rounded: bool = False,
) -> Tensor:
    """Causal attention of several rows over paged KV, one query at a time: the specification of attention backends.

    query: [tokens, heads, dim], row after row; k_pages, v_pages: [pages, block_size, kv_heads, dim] (values may have
    another dim); block_table: [rows, max blocks]; context_lens: [rows], keys of each row, whose last query_lens keys
    are those of its queries. With `window` w a query sees itself and the w - 1 positions before it; with `chunk` n the
    positions before it since a multiple of n. sinks, slopes: [heads]; see `attend` and `alibi_bias`; before_scale: the
    bias is multiplied by the scale. Result [tokens, heads, dim of values] in query's type, computed in float32.
    """
    kv_heads, value_dim = v_pages.shape[2:]
    group = query.shape[1] // kv_heads
    out = query.new_empty((*query.shape[:2], value_dim))
    token = 0
    for row, (context, count) in enumerate(zip(context_lens.tolist(), query_lens.tolist(), strict=True)):
        blocks = block_table[row, : -(-context // k_pages.shape[1])].long()
        keys, values = (
            pages[blocks].flatten(0, 1).float().repeat_interleave(group, dim=1) for pages in (k_pages, v_pages)
        )
        for position in range(context - count, context):
            first = 0 if window is None else max(0, position + 1 - window)
            first = first if chunk is None else position - position % chunk
            seen = slice(first, position + 1)
            scores = torch.einsum("hd,khd->hk", query[token].float(), keys[seen]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                at = torch.arange(first, position + 1)[None]
                bias = alibi_bias(slopes, at, torch.tensor([[position]]), rounded)[:, 0]
                scores = scores + bias * (scale if before_scale else 1.0)
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None].float()), dim=1)
            weights = scores.softmax(dim=-1)[:, : position + 1 - first]
            out[token] = torch.einsum("hk,khd->hd", weights, values[seen]).to(out.dtype)
            token += 1
    return out


def route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(weights, experts) of each token: the softmax over all experts at the best `top_k`, best first; with
    `renormalize` divided by their sum. router_logits: [tokens, experts] → [tokens, top_k] float32 and int64."""
    weights, experts = torch.softmax(router_logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def moe(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The sum over each token's experts of weight · down(silu(gate) · up).

    x: [tokens, hidden]; weights, experts: [tokens, top_k] from `route`; gate_up: [experts, 2 · inter, hidden], the
    gates first; down: [experts, hidden, inter]. Result as x.
    """
    out = torch.zeros_like(x)
    for expert in sorted(set(experts.flatten().tolist())):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        result = F.linear(silu_mul(F.linear(x[token], gate_up[expert])), down[expert])
        out.index_add_(0, token, result * weights[token, choice, None].to(x.dtype))
    return out
