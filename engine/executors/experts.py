"""A mixture of experts in torch: which experts a token has, and the sum of their results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.description import Router
from ..models.expert_places import table
from ..models.program import Mixture
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

    def place(self, chosen: Tensor, positions: Tensor) -> Tensor:
        """The slots of chosen experts; -1: another rank computes them. chosen: [tokens, top_k]; positions: [tokens]."""
        slots, turn, turns = self.places[chosen].unbind(-1)
        return slots.where(positions[:, None] % turns == turn, -1)

    def take_load(self) -> Tensor:
        """[experts] int64 on the CPU: how many assignments each has had on this rank since the last call. A GPU ends
        the step that runs first; what it counts meanwhile may be lost."""
        self.flush_load()
        found = self.moved.cpu().clone()
        self.moved.zero_()
        return found

    def flush_load(self) -> None:
        """Before slots get other experts."""
        index = torch.tensor(self.experts, device=self.load.device)
        self.moved.index_add_(0, index.clamp(min=0), self.load.where(index >= 0, 0))
        self.load.zero_()


def own_experts(args: Mixture, device: torch.device) -> OwnExperts | None:
    """None: every rank has all experts of the layer, or a part of each."""
    if not args.places:
        return None
    rows = table(args.places, args.num_slots, args.router.zero_experts)
    places = torch.tensor(rows, dtype=torch.int32, device=device)
    (stack,) = {weight.only for weight in args.down.weights}
    load, moved = (torch.zeros(num, dtype=torch.int64, device=device) for num in (args.num_slots, args.num_experts))
    return OwnExperts(places, load, [*stack, *[-1] * args.num_replicas], moved)


def mixture(
    args: Mixture, weights: Weights, x: Tensor, logits: Tensor, own: OwnExperts | None = None,
    positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x: [tokens, hidden]; logits: the router's product; positions: [tokens], of the tokens in their sequences, needed
    where ranks share out the experts."""
    scales, chosen = route(args.router, logits, weights.vector(args.correction))
    if (expert_scale := weights.vector(args.expert_scale)) is not None:
        scales = scales * expert_scale.float()[chosen]
    if args.router.rounds_weights:
        scales = scales.to(x.dtype)
    slots = chosen
    if own is not None:
        assert positions is not None, "experts of several ranks take turns by the tokens' positions"
        slots = own.place(chosen, positions)
    # A token and one of its experts are an assignment; `order` sorts those of this rank by expert.
    num_elsewhere, *counts = (slots.view(-1) + 1).bincount(minlength=args.num_slots + 1).tolist()
    order = slots.view(-1).argsort(stable=True)[num_elsewhere:]
    if own is not None:
        own.load.add_(torch.tensor(counts[: args.num_slots]))
    states = x.index_select(0, order // args.router.top_k)
    if args.router.on == "input":
        states = states * scales.reshape(-1)[order, None].to(x.dtype)
    results = torch.empty((len(order) + 1, args.down.rows), dtype=x.dtype, device=x.device)
    results[-1] = 0  # of all that other ranks compute
    first = 0
    for expert, count in enumerate(counts):
        if count:
            some = states[first : first + count]
            has_weights = expert < args.num_slots
            result = _expert(args, weights, expert, some) if has_weights else some * args.router.zero_scale
            results[first : first + count] = result
            first += count
    place_of = torch.full((slots.numel(),), len(order), device=x.device)
    place_of[order] = torch.arange(len(order), device=x.device)
    place_of = place_of.view(-1, args.router.top_k)
    # Added one choice after another, the best first, in float32 as transformers does, so that a token's bits do not
    # depend on the batch.
    total = torch.zeros((len(x), args.down.rows), dtype=torch.float32, device=x.device)
    for choice in range(args.router.top_k):
        part = results[place_of[:, choice]]
        part = part if args.router.on == "input" else part * scales[:, choice, None]
        total = part.float() if not choice else total + part
    return total.to(x.dtype)


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
