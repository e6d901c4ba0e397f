"""A mixture of experts for the C program."""

from typing import cast

from ...kernels.cpu.dense import PackedMatrix
from ...kernels.cpu.experts import CHOSEN, NEAR, SIGMOID, SOFTMAX, NativeExperts
from ...kernels.cpu.structs import RouterFields
from ..models.program import Mixture
from .experts import OwnExperts
from .weights import Weights

_SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "softmax_of_chosen": CHOSEN, "sparsemixer": NEAR}


def router_fields(args: Mixture, weights: Weights) -> RouterFields:
    """They point to vectors of `weights`."""
    router = args.router
    correction, expert_scale = weights.vector(args.correction), weights.vector(args.expert_scale)
    is_softmax = router.score == "softmax_of_chosen"  # a division by the sum makes it one
    is_scaled = router.score != "sparsemixer"
    return RouterFields(
        correction=0 if correction is None else correction.data_ptr(),
        expert_scale=0 if expert_scale is None else expert_scale.data_ptr(),
        num=args.num_experts + router.zero_experts,
        top_k=router.top_k,
        score=_SCORES[router.score],
        groups=router.groups,
        top_groups=router.top_groups,
        by_two=router.group_by == "top2",
        renormalize=is_softmax or (router.renorm and is_scaled),
        adds_floor=router.floor_by == "add",
        floor=0.0 if is_softmax else router.floor,
        scale=router.scale if is_scaled else 1.0,
        jitter=router.jitter,
    )


def native_experts(args: Mixture, weights: Weights, own: OwnExperts | None, **between: float) -> NativeExperts:
    """own: if ranks share out the experts; its load is counted. between: the fields of `Map` for what stands between
    the products of matrices that are not gated. The result is valid as long as `weights` and `own`."""

    def stack(key: str) -> tuple[PackedMatrix, ...]:
        return tuple(cast(PackedMatrix, matrix) for matrix in weights.matrices[key])

    return NativeExperts(
        stack(args.gate_up.key), stack(args.down.key), router_fields(args, weights),
        places=None if own is None else own.places, load=None if own is None else own.load,
        holders=None if own is None else own.holders,
        gate_up_bias=weights.vector(args.gate_up_bias), down_bias=weights.vector(args.down_bias),
        scales_input=args.router.on == "input", zero_scale=args.router.zero_scale, **between,
    )  # fmt: skip
