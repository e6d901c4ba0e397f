"""A mixture of experts: the kernels multiply, whichever way the experts are chosen."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ...kernels.ops import use_one_thread
from ...kernels.triton.moe import MoeWorkspace, experts
from ...kernels.triton.moe import route as route_in_triton
from ..executors.expert_replicas import Put
from ..executors.experts import own_experts, route
from ..models.description import Router
from ..models.program import Mixture
from .weights import Loaded

_COPIES = 5  # of an activation's operands, that torch takes at most beside the products


class Experts:
    def __init__(self, args: Mixture, loaded: Loaded, workspace: MoeWorkspace, num_domains: int = 1) -> None:
        """loaded: whose stacks it takes. workspace: for these sizes. num_domains: KV domains."""
        self._args, self._workspace = args, workspace
        self._gate_up, self._down = loaded.values(args.gate_up), loaded.values(args.down)
        self._gate_up_bias, self._down_bias = loaded.vector(args.gate_up_bias), loaded.vector(args.down_bias)
        self._correction, self._scale = loaded.vector(args.correction), loaded.vector(args.expert_scale)
        self._has_router = _has_kernel(args.router, args)
        self.own = own_experts(args, loaded.device, num_domains=num_domains)
        self._any = torch.full((1,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=loaded.device)

    def __call__(self, x: Tensor, logits: Tensor, out: Tensor, num_tokens: Tensor, positions: Tensor) -> None:
        """x, out: [tokens, hidden]; logits: the router's product; num_tokens: [1] int32, the tokens that are no
        padding; positions: [tokens] int32."""
        self.choose(x, logits, num_tokens, positions)
        self.compute(x, out)

    def of_domains(self, x: Tensor, logits: Tensor, out: Tensor, padding: Tensor, numbers: Tensor) -> None:
        """For the tokens of all KV domains. padding: [tokens, 1] bool, which are padding; numbers: [tokens] int32."""
        self.choose(x, logits, self._any, numbers)
        self._workspace.experts[: len(x)].masked_fill_(padding, -1)
        self.compute(x, out)

    def choose(self, x: Tensor, logits: Tensor, num_tokens: Tensor, positions: Tensor | None = None) -> None:
        """Fills the workspace: experts of -1 are those of padding. positions: of the tokens, if the slots of this
        rank's experts are wanted, and -1 for the others."""
        router, own = self._args.router, self.own if positions is not None else None
        if not self._has_router:
            self._route(x, logits, num_tokens, positions)
            return
        route_in_triton(
            logits, num_tokens, self._workspace, top_k=router.top_k,
            renormalize=router.renorm or router.score == "softmax_of_chosen",
            places=None if own is None else own.places, positions=None if own is None else positions,
        )  # fmt: skip

    def compute(self, x: Tensor, out: Tensor) -> None:
        """The sum over the slots in the workspace. x: [tokens, hidden], rows of any stride; out: [tokens, hidden]."""
        args, router = self._args, self._args.router
        if router.on == "input":
            weights = self._workspace.weights[: len(x), :, None].to(x.dtype)
            x = (x[:, None] * weights).flatten(0, 1)
        experts(
            out, x, self._gate_up, self._down, self._workspace, act=args.act, has_gate=args.has_gate, limit=args.limit,
            sharpness=args.sharpness, gate_up_bias=self._gate_up_bias, down_bias=self._down_bias,
            is_weighted=router.on == "output", zero_scale=router.zero_scale if router.zero_experts else None,
            num_all=args.num_experts, load=None if self.own is None else self.own.load,
        )  # fmt: skip

    def put(self, slot: int, read: Loaded) -> None:
        """Gives a slot another expert, from the next launch on. read: this expert alone, on the host."""
        args = self._args
        for stack, matrix in ((self._gate_up, args.gate_up), (self._down, args.down)):
            stack[slot].copy_(read.values(matrix)[0])
        for biases, vector in ((self._gate_up_bias, args.gate_up_bias), (self._down_bias, args.down_bias)):
            if biases is not None and vector is not None:
                biases[slot].copy_(read.vectors[vector.key][0])

    def _route(self, x: Tensor, logits: Tensor, num_tokens: Tensor, positions: Tensor | None) -> None:
        workspace, router = self._workspace, self._args.router
        scales, chosen = route(router, logits, self._correction)
        if self._scale is not None:
            scales = scales * self._scale.float()[chosen]
        if router.rounds_weights:
            scales = scales.to(x.dtype)
        tokens = len(x)
        is_real = torch.arange(tokens, device=x.device)[:, None] < num_tokens
        workspace.weights[:tokens] = scales
        slots = chosen if self.own is None or positions is None else self.own.place(chosen, positions)
        workspace.experts[:tokens] = torch.where(is_real, slots, -1)

    def left_to_torch(self, itemsize: int) -> int:
        """Bytes per token that a call takes from the allocator, estimated: of the choice of experts."""
        if self._has_router:
            return 0
        args, router = self._args, self._args.router
        placing = 64 * router.top_k if self.own is not None else 0
        return 8 * 4 * args.num_experts + self.inputs_left_to_torch(itemsize) + placing

    def inputs_left_to_torch(self, itemsize: int) -> int:
        """Bytes per token of the inputs of experts, where each expert has another one."""
        args, router = self._args, self._args.router
        return router.top_k * args.gate_up.columns * itemsize if router.on == "input" else 0


class DeviceSlots:
    """The stacks of experts by layer, as `expert_replicas.Slots`. An expert is read to the host, since the device's
    memory is taken."""

    def __init__(self, experts: Mapping[int, Experts], dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def prepare(self, layer: int, args: Mixture, slot: int) -> tuple[Loaded, Put]:
        loaded = Loaded(dtype=self._dtype, device=torch.device("cpu"), keeps=False)
        return loaded, partial(self._experts[layer].put, slot, loaded)

    def begin_thread(self) -> None:
        use_one_thread()


def _has_kernel(router: Router, args: Mixture) -> bool:
    """Whether `moe.route` chooses as this router."""
    is_plain = router.groups == 1 and router.scale == 1.0 and router.on == "output" and not router.zero_experts
    score = router.score in ("softmax", "softmax_of_chosen")
    return is_plain and score and args.correction is None and args.expert_scale is None
