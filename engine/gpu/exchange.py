"""What KV domains exchange within a step: which tokens of all domains are padding, and the tokens of a layer whose
experts the ranks share out.

Every rank runs each step with the same padded number of tokens, so all choose the form of the exchange alike. Steps of
shapes that are recorded give all tokens to all ranks, and add what these compute: what is exchanged has a fixed size.
Larger steps are launched one by one, and give each rank only the tokens that chose one of its experts; the host waits
for their numbers once in each layer. Here nothing limits how many tokens a rank may get.
"""

import torch
from torch import Tensor

from ...kernels.triton.moe import MoeWorkspace
from ..models.program import Mixture
from ..parallel.collectives import Group
from .experts import Experts
from .products import Take

_ALIGNED = 64  # bytes: of the rows that are exchanged, so that kernels read them as they read registers


class DomainTokens:
    """The tokens of all domains, each with a step's padded number of them."""

    def __init__(self, group: Group, num_domains: int, numbers: Tensor) -> None:
        """numbers: 0, 1, … of all tokens that a step may have, int32."""
        self._group, self._num_domains, self._numbers = group, num_domains, numbers
        self._padding = torch.zeros(len(numbers), dtype=torch.bool, device=numbers.device)
        self._nums = torch.zeros((num_domains, 1), dtype=torch.int32, device=numbers.device)

    @property
    def nbytes(self) -> int:
        return self._padding.nbytes + self._nums.nbytes

    def padding(self, num_tokens: Tensor, tokens: int) -> Tensor:
        """Which ones are padding, until the next call: [domains · tokens, 1] bool. num_tokens: [1] int32, of this
        domain. All ranks call it for a step."""
        if self._num_domains == 1:
            self._nums.copy_(num_tokens)
        else:
            self._group.all_gather(num_tokens, self._nums)
        padding = self._padding[: self._num_domains * tokens].view(-1, tokens)
        return torch.ge(self._numbers[:tokens], self._nums, out=padding).view(-1, 1)


class ExpertExchange:
    """A layer of experts for the tokens of this rank's domain, which the ranks of all domains compute together."""

    def __init__(
        self, args: Mixture, experts: Experts, workspace: MoeWorkspace, group: Group, dtype: torch.dtype, take: Take,
        numbers: Tensor,
    ) -> None:  # fmt: skip
        """workspace: of `experts`, for the tokens of all domains in a recorded step and those of one domain in any.
        take: memory in the scratch. numbers: 0, 1, …, of as many tokens, int32."""
        self._args, self._experts, self._workspace, self._group = args, experts, workspace, group
        self._dtype, self._take = dtype, take
        self._num_numbers, top_k = args.gate_up.columns, args.router.top_k  # of a token's state
        self._widths = self._num_numbers * dtype.itemsize, 4 * top_k, 4 * top_k
        self._row = -(-sum(self._widths) // _ALIGNED) * _ALIGNED
        assert experts.own is not None and experts.own.holders is not None, "nobody knows which rank has an expert"
        self._own, self._holders = experts.own, experts.own.holders
        self._numbers = numbers

    def gather(self, x: Tensor, logits: Tensor, out: Tensor, num_tokens: Tensor) -> None:
        """Gives all tokens to all ranks, and adds what they find. x: [tokens, numbers]; logits: the router's product;
        out: [tokens, hidden]; num_tokens: [1] int32, the tokens that are no padding."""
        workspace, group, tokens = self._workspace, self._group, len(x)
        self._experts.choose(x, logits, num_tokens)
        own = self._take((tokens, self._row), torch.uint8)
        self._fill(own, x, workspace.experts[:tokens], workspace.weights[:tokens])
        rows = self._take((group.size * tokens, self._row), torch.uint8)
        group.all_gather(own, rows)
        found = self._take((len(rows), out.shape[1]), out.dtype)
        chosen = self._parts(rows)[1].long()
        slots = self._own.place(chosen.clamp(min=0), self._numbers[: len(rows)]).masked_fill(chosen < 0, -1)
        if self._args.router.zero_experts:
            for elsewhere in (slots[: group.rank * tokens], slots[(group.rank + 1) * tokens :]):
                elsewhere.masked_fill_(elsewhere >= self._args.num_slots, -1)
        self._compute(rows, slots, found)
        group.reduce_scatter(found, out)

    def send(self, x: Tensor, logits: Tensor, out: Tensor, num_tokens: Tensor) -> None:
        """Gives each rank the tokens of which it has an expert, and takes back what it found. The host waits. The
        arguments are those of `gather`."""
        workspace, group, tokens = self._workspace, self._group, len(x)
        self._experts.choose(x, logits, num_tokens)
        chosen, weights = workspace.experts[:tokens].long(), workspace.weights[:tokens]
        is_there = self._ranks_of(chosen) == torch.arange(group.size, device=x.device)[:, None, None]
        is_sent = is_there.any(2)  # [ranks, tokens]
        nums = is_sent.sum(1)
        sent, got = torch.stack((nums, group.all_gather(nums)[:, group.rank])).tolist()
        order = (~is_sent).flatten().byte().argsort(stable=True)[: sum(sent)]
        to, token = order // tokens, order % tokens
        rows = torch.empty((len(order), self._row), dtype=torch.uint8, device=x.device)
        self._fill(rows, x[token], chosen[token].where(is_there[to, token], -1), weights[token])
        came, _ = group.all_to_all(rows, sent, sum(got), got)
        found = torch.empty((len(came), out.shape[1]), dtype=out.dtype, device=x.device)
        most = len(workspace.experts)
        for part in (slice(first, first + most) for first in range(0, len(came), most)):
            sent_here = self._parts(came[part])[1].long()
            slots = self._own.places[sent_here.clamp(min=0), 0].masked_fill(sent_here < 0, -1)
            self._compute(came[part], slots, found[part])
        back, _ = group.all_to_all(found, got, sum(sent), sent)
        total = torch.zeros(out.shape, dtype=torch.float32, device=x.device)
        for tokens_there, results in zip(torch.split(token, sent), torch.split(back, sent), strict=True):
            total.index_add_(0, tokens_there, results.float())  # no token twice, so the order is that of the ranks
        out.copy_(total)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States, chosen experts and weights in rows that are exchanged, [n, bytes] uint8."""
        first, second, third = self._widths
        states, experts, weights, _ = torch.split(
            rows, [first, second, third, self._row - first - second - third], dim=1
        )
        return states.view(self._dtype), experts.view(torch.int32), weights.view(torch.float32)

    def _fill(self, rows: Tensor, states: Tensor, experts: Tensor, weights: Tensor) -> None:
        for part, values in zip(self._parts(rows), (states, experts, weights), strict=True):
            part.copy_(values)

    def _ranks_of(self, chosen: Tensor) -> Tensor:
        """Who computes each choice of this rank's tokens, -1 of padding. Ranks that have the same expert take turns by
        the token. chosen: [tokens, top_k] int64."""
        expert = chosen.clamp(min=0)
        num = self._holders[expert, 0]
        turn = self._numbers[: len(chosen), None] % num.clamp(min=1)
        ranks = self._holders[expert, 1 + 2 * turn].where(num > 0, self._group.rank)  # those without weights: here
        return ranks.masked_fill(chosen < 0, -1)

    def _compute(self, rows: Tensor, slots: Tensor, out: Tensor) -> None:
        """What this rank's experts give for tokens, at most as many as the workspace is for."""
        states, _, weights = self._parts(rows)
        self._workspace.experts[: len(rows)] = slots
        self._workspace.weights[: len(rows)] = weights
        self._experts.compute(states, out)

    def taken(self, tokens: int, itemsize: int) -> tuple[int, ...]:
        """Bytes of what `gather` takes for so many tokens of a domain."""
        of_all = self._group.size * tokens
        return tokens * self._row, of_all * self._row, of_all * self._args.down.rows * itemsize

    def left_to_torch(self, itemsize: int, *, sends: bool) -> int:
        """Bytes per token that a call takes from the allocator, estimated. sends: whether some steps are of `send`."""
        top_k, hidden = self._args.router.top_k, self._args.down.rows
        each = 48 * top_k + self._experts.inputs_left_to_torch(itemsize)
        if sends:
            each += 2 * self._row + 2 * hidden * itemsize + 4 * hidden + 60 * top_k + 48
        return self._group.size * each + 8 * hidden * sends
