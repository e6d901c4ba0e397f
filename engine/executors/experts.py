"""A mixture of experts in torch: which experts a token has, and the sum of their results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.description import Router
from ..models.expert_places import dealt_holders, table
from ..models.program import Mixture
from ..parallel.collectives import Group
from .functions import activate, glu
from .weights import Weights


def route(router: Router, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights, experts) of each token, best first: float32 and int64 [tokens, top_k]. logits: [tokens, experts]."""
    logits = logits.float()
    if router.score == "sparsemixer":
        return _sparsemixer(logits, router.top_k, router.jitter)
    if router.score == "softmax_of_chosen":
        best, chosen = logits.topk(router.top_k, dim=-1)
        return torch.softmax(best, dim=-1) * router.scale, chosen
    scores = torch.sigmoid(logits) if router.score == "sigmoid" else torch.softmax(logits, dim=-1)
    ranked = scores if correction is None else scores + correction.view(-1)
    if router.groups > 1:
        groups = ranked.view(ranked.shape[0], router.groups, -1)
        best = groups.amax(-1) if router.group_by == "max" else groups.topk(2, dim=-1).values.sum(-1)
        best_groups = best.topk(router.top_groups, dim=-1).indices
        is_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, best_groups, False)
        ranked = groups.masked_fill(is_out[:, :, None], -torch.inf).flatten(1)
    chosen = ranked.topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if router.renorm:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + router.floor if router.floor_by == "add" else total.clamp(min=router.floor))
    return weights * router.scale, chosen


def _sparsemixer(logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """The best expert, then the best of the others; each is weighted by a softmax over those within 2 · jitter of it
    (arXiv 2409.12136). Distances are relative to the greater of the best and the size of the other."""
    weights, chosen, left = [], [], logits
    for _ in range(top_k):
        best, index = left.max(dim=-1, keepdim=True)
        distance = (best - logits) / logits.abs().clamp(min=best)
        near = left.masked_fill(distance > 2 * jitter, -torch.inf)
        weights.append(torch.softmax(near, dim=-1).gather(1, index))
        chosen.append(index)
        left = left.scatter(1, index, -torch.inf)
    return torch.cat(weights, dim=1), torch.cat(chosen, dim=1)


@dataclass(frozen=True)
class OwnExperts:
    """The experts of a layer that this rank has, if ranks share them out."""

    places: Tensor  # [all experts of the router, 3] int32: slot, turn and turns
    load: Tensor  # [slots] int64: how many assignments each has had since they were taken
    experts: list[int]  # of the slots; -1: the slot is empty
    moved: Tensor  # [experts] int64: the same of experts that have left their slots since
    holders: Tensor | None = None  # if ranks exchange tokens: `holder_table` of all experts of the router, int32

    def place(self, chosen: Tensor, positions: Tensor) -> Tensor:
        """The slots of chosen experts; -1: another rank computes them. chosen: [tokens, top_k]; positions: [tokens]."""
        slots, turn, turns = self.places[chosen].unbind(-1)
        return slots.where(positions[:, None] % turns == turn, -1)

    def take_load(self) -> Tensor:
        """[experts] int64 on the CPU: how many assignments each has had on this rank since the last call, in all
        steps that have been launched: on a GPU it is behind them in their stream, and so waits for them."""
        self.flush_load()
        found = self.moved.cpu().clone()
        self.moved.zero_()
        return found

    def flush_load(self) -> None:
        """Before slots get other experts."""
        index = torch.tensor(self.experts, device=self.load.device)
        self.moved.index_add_(0, index.clamp(min=0), self.load.where(index >= 0, 0))
        self.load.zero_()


def own_experts(args: Mixture, device: torch.device, *, num_domains: int = 1) -> OwnExperts | None:
    """None: every rank has all experts of the layer, or a part of each."""
    if not args.places:
        return None
    rows = table(args.places, args.num_slots, args.router.zero_experts)
    places = torch.tensor(rows, dtype=torch.int32, device=device)
    (stack,) = {weight.only for weight in args.down.weights}
    load, moved = (torch.zeros(num, dtype=torch.int64, device=device) for num in (args.num_slots, args.num_experts))
    holders: Tensor | None = None
    if args.is_exchanged and num_domains > 1:
        dealt = dealt_holders(args.num_experts, num_domains, args.router.zero_experts)
        holders = torch.tensor(dealt, dtype=torch.int32, device=device)
    return OwnExperts(places, load, [*stack, *[-1] * args.num_replicas], moved, holders)


@dataclass(frozen=True)
class _Results:
    """What experts give for assignments; an assignment is a token and one of its experts."""

    values: Tensor  # [assignments + 1, hidden]; the last are zeros, of all that other ranks compute
    places: Tensor  # [tokens, top_k] int64: the row of each choice


def mixture(
    args: Mixture, weights: Weights, x: Tensor, logits: Tensor, own: OwnExperts | None = None,
    positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x: [tokens, hidden]; logits: the router's product; positions: [tokens], of the tokens in their sequences, needed
    where ranks share out the experts."""
    scales, chosen = _choose(args, weights, x, logits)
    slots = chosen
    if own is not None:
        assert positions is not None, "experts of several ranks take turns by the tokens' positions"
        slots = own.place(chosen, positions)
    return _total(args, _compute(args, weights, x, slots, scales, own), scales, x.dtype)


def exchanged_mixture(
    args: Mixture, weights: Weights, x: Tensor, logits: Tensor, own: OwnExperts, positions: Tensor, group: Group,
    most: int,
) -> Tensor:  # fmt: skip
    """The sum over all experts, if each rank has tokens of its own, or none: it sends them to the ranks that have their
    experts, which send the result of each one back. So the results are added as `mixture` with all experts adds them,
    whichever ranks have computed them. positions: as there. most: tokens of all ranks."""
    scales, chosen = _choose(args, weights, x, logits)
    assert own.holders is not None, "nobody knows which rank has an expert"
    holders = own.holders[chosen].long()
    num = holders[..., 0]
    turn = 1 + 2 * (positions[:, None] % num.clamp(min=1))
    ranks, slots = (holders.gather(2, (turn + i)[..., None]).squeeze(2) for i in (0, 1))
    # Those without weights are computed where the token is.
    ranks, slots = ranks.where(num > 0, group.rank), slots.where(num > 0, args.num_slots + chosen - args.num_experts)
    parts: list[Tensor] = []
    for rank in range(group.size):
        slots_there = slots.where(ranks == rank, -1)
        tokens = (ranks == rank).any(1).nonzero().squeeze(1)
        parts.append(_bytes(x[tokens], slots_there[tokens].int(), scales[tokens].float()))
    got, counts = group.all_to_all(torch.cat(parts), [len(part) for part in parts], most)
    widths = [x.shape[1] * x.itemsize, 4 * args.router.top_k, 4 * args.router.top_k]
    states, own_slots, own_scales = (
        part.contiguous().view(dtype)
        for part, dtype in zip(torch.split(got, widths, dim=1), (x.dtype, torch.int32, torch.float32), strict=True)
    )
    found = _compute(args, weights, states, own_slots.long(), own_scales, own)
    is_own = own_slots >= 0
    num_results = [int(part.sum()) for part in torch.split(is_own, counts)]
    values, _ = group.all_to_all(found.values[found.places[is_own]], num_results, ranks.numel())
    places = torch.empty(ranks.numel(), dtype=torch.int64, device=x.device)
    places[ranks.view(-1).argsort(stable=True)] = torch.arange(ranks.numel(), device=x.device)
    return _total(args, _Results(values, places.view_as(ranks)), scales, x.dtype)


def _bytes(*columns: Tensor) -> Tensor:
    """Tensors [n, …] beside each other."""
    return torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)


def _choose(args: Mixture, weights: Weights, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, experts) of each token, best first, as those of `route`."""
    if not len(x):
        none = torch.empty((0, args.router.top_k), device=x.device)
        return none, none.long()
    scales, chosen = route(args.router, logits, weights.vector(args.correction))
    if (expert_scale := weights.vector(args.expert_scale)) is not None:
        scales = scales * expert_scale.float()[chosen]
    return (scales.to(x.dtype) if args.router.rounds_weights else scales), chosen


def _compute(
    args: Mixture, weights: Weights, x: Tensor, slots: Tensor, scales: Tensor, own: OwnExperts | None
) -> _Results:
    """slots: [tokens, top_k]; -1: another rank computes the choice."""
    # `order` sorts the assignments of this rank by expert.
    num_elsewhere, *counts = (slots.view(-1) + 1).bincount(minlength=args.num_slots + 1).tolist()
    order = slots.view(-1).argsort(stable=True)[num_elsewhere:]
    if own is not None:
        own.load.add_(torch.tensor(counts[: args.num_slots], device=own.load.device))
    states = x.index_select(0, order // args.router.top_k)
    if args.router.on == "input":
        states = states * scales.reshape(-1)[order, None].to(x.dtype)
    results = torch.empty((len(order) + 1, args.down.rows), dtype=x.dtype, device=x.device)
    results[-1] = 0
    first = 0
    for expert, count in enumerate(counts):
        if count:
            some = states[first : first + count]
            has_weights = expert < args.num_slots
            result = _expert(args, weights, expert, some) if has_weights else some * args.router.zero_scale
            results[first : first + count] = result
            first += count
    places = torch.full((slots.numel(),), len(order), device=x.device)
    places[order] = torch.arange(len(order), device=x.device)
    return _Results(results, places.view(-1, args.router.top_k))


def _total(args: Mixture, found: _Results, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Added one choice after another, the best first, in float32 as transformers does, so that a token's bits do not
    depend on the batch."""
    total = torch.zeros((len(scales), args.down.rows), dtype=torch.float32, device=scales.device)
    for choice in range(args.router.top_k):
        part = found.values[found.places[:, choice]]
        part = part if args.router.on == "input" else part * scales[:, choice, None]
        total = part.float() if not choice else total + part
    return total.to(dtype)


def _expert(args: Mixture, weights: Weights, expert: int, x: Tensor) -> Tensor:
    gate_up, down = weights.matrices[args.gate_up.key][expert], weights.matrices[args.down.key][expert]
    biases = (weights.vector(args.gate_up_bias), weights.vector(args.down_bias))
    gate_up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
    if args.gate_up.use == "gated experts":
        inner = gate_up.silu_mul(x, gate_up_bias)
    elif args.has_gate:
        gate, up = gate_up.product(x, gate_up_bias).chunk(2, dim=-1)
        inner = glu(gate, up, args.act, limit=args.limit, sharpness=args.sharpness)
    else:
        inner = activate(gate_up.product(x, gate_up_bias), args.act)
    return down.product(inner, down_bias)
