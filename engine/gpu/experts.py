"""A mixture of experts: the kernels multiply, whichever way the experts are chosen and whatever their activation."""

import torch
from torch import Tensor

from ...kernels.triton.moe import MoeWorkspace, experts, moe
from ..executors.experts import route
from ..executors.functions import activate, glu
from ..models.description import Router
from ..models.program import Mixture
from .weights import Loaded

_COPIES = 5  # of an activation's operands, that torch takes at most beside the products


class Experts:
    def __init__(self, args: Mixture, loaded: Loaded, workspace: MoeWorkspace) -> None:
        """args: with sizes that are multiples of 32. loaded: whose stacks it takes. workspace: for these sizes."""
        self._args, self._workspace = args, workspace
        self._gate_up, self._down = loaded.values(args.gate_up), loaded.values(args.down)
        self._gate_up_bias, self._down_bias = loaded.vector(args.gate_up_bias), loaded.vector(args.down_bias)
        self._correction, self._scale = loaded.vector(args.correction), loaded.vector(args.expert_scale)
        is_silu = args.gate_up.use == "gated experts" and args.gate_up_bias is None
        self._act = None if is_silu else self._activate
        self._is_plain = is_silu and args.down_bias is None and _has_kernel(args.router, args)

    def __call__(self, x: Tensor, logits: Tensor, out: Tensor, num_tokens: Tensor) -> None:
        """x, out: [tokens, hidden]; logits: the router's product; num_tokens: [1] int32, the tokens that are no
        padding."""
        args, workspace = self._args, self._workspace
        router, weights = args.router, (self._gate_up, self._down)
        if self._is_plain:
            renormalize = router.renorm or router.score == "softmax_of_chosen"
            moe(out, x, logits, *weights, num_tokens, workspace, top_k=router.top_k, renormalize=renormalize)
            return
        scales, chosen = route(router, logits, self._correction)
        if self._scale is not None:
            scales = scales * self._scale.float()[chosen]
        if router.rounds_weights:
            scales = scales.to(x.dtype)
        tokens = len(x)
        is_real = torch.arange(tokens, device=x.device)[:, None] < num_tokens
        workspace.weights[:tokens] = scales
        workspace.experts[:tokens] = torch.where(is_real, chosen, -1)
        if router.on == "input":
            x = (x[:, None] * scales[:, :, None].to(x.dtype)).flatten(0, 1)
        experts(
            out, x, *weights, workspace, act=self._act, gate_up_bias=self._gate_up_bias, down_bias=self._down_bias,
            is_weighted=router.on == "output",
        )  # fmt: skip

    def left_to_torch(self, itemsize: int) -> int:
        """Bytes per token that a call takes from the allocator, estimated: of the choice of experts, and of
        activations that are computed beside the products."""
        args, top_k = self._args, self._args.router.top_k
        if self._is_plain:
            return 0
        chosen = 8 * 4 * args.gate_up.experts
        inputs = top_k * args.gate_up.columns * itemsize if args.router.on == "input" else 0
        if self._act is None:
            return chosen + inputs
        return inputs + max(chosen, top_k * (args.gate_up.rows + _COPIES * args.down.columns) * itemsize)

    def _activate(self, products: Tensor) -> Tensor:
        args = self._args
        if not args.has_gate:
            return activate(products, args.act)
        gate, up = products.chunk(2, dim=-1)
        return glu(gate, up, args.act, limit=args.limit, sharpness=args.sharpness)


def _has_kernel(router: Router, args: Mixture) -> bool:
    """Whether `moe.route` chooses as this router."""
    is_plain = router.groups == 1 and router.scale == 1.0 and router.on == "output"
    score = router.score in ("softmax", "softmax_of_chosen")
    return is_plain and score and args.correction is None and args.expert_scale is None
