"""The choice of experts in C, on every level of the kernels, against `experts.route`."""

import ctypes

import pytest
import torch
from kernel_levels import kernels_of_level, level
from torch import Tensor

from pagewire.engine.executors.experts import route
from pagewire.engine.executors.native_experts import router_fields
from pagewire.engine.executors.weights import Weights
from pagewire.engine.models.description import Router, Weight
from pagewire.engine.models.program import Matrix, Mixture, Vector

__all__ = ["kernels_of_level", "level"]

EXPERTS, TOP_K, TOKENS = 24, 5, 300
NONE = Weight((), 8)
ROUTERS = {
    "softmax": Router(NONE, TOP_K),
    "renormed": Router(NONE, TOP_K, renorm=True, scale=3.0),
    "sigmoid": Router(NONE, TOP_K, "sigmoid"),
    "corrected": Router(NONE, TOP_K, "sigmoid", renorm=True, floor=1e-20, scale=2.5),
    "groups": Router(NONE, TOP_K, "sigmoid", groups=6, top_groups=3, renorm=True, floor=0.5),
    "groups by their best": Router(NONE, TOP_K, groups=6, top_groups=3, group_by="max"),
    "floor": Router(NONE, TOP_K, renorm=True, floor=0.7, floor_by="max"),
    "chosen": Router(NONE, TOP_K, "softmax_of_chosen", scale=0.5),
    "near": Router(NONE, 2, "sparsemixer", jitter=0.4),
    "zero experts": Router(NONE, TOP_K, zero_experts=6),
}


@pytest.mark.parametrize("has_vectors", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_experts_with_the_same_weights(level, name, has_vectors) -> None:  # the fixture
    router, generator = ROUTERS[name], torch.Generator().manual_seed(3)
    if has_vectors and router.score in ("sparsemixer", "softmax_of_chosen"):
        pytest.skip("these scores are not corrected")
    weights, names = Weights(), {}
    if has_vectors:
        names = {"correction": Vector("correction", ()), "expert_scale": Vector("scale", ())}
        weights.vectors["correction"] = torch.randn(EXPERTS, generator=generator) * 0.1
        weights.vectors["scale"] = torch.rand(EXPERTS, generator=generator)
    stack = Matrix("none", ())
    args = Mixture(router, EXPERTS - router.zero_experts, stack, stack, "silu", 0.0, **names)
    fields = router_fields(args, weights)
    logits = torch.randn(TOKENS, EXPERTS + 3, generator=generator)[:, :EXPERTS] * 2

    def chosen(rows: Tensor) -> tuple[Tensor, Tensor]:
        m, top_k = len(rows), router.top_k
        scales, ids = torch.empty(m, top_k), torch.empty(m, top_k, dtype=torch.int32)
        level.route(
            ctypes.addressof(fields), rows.data_ptr(), rows.stride(0), scales.data_ptr(), ids.data_ptr(), m
        )  # fmt: skip
        return scales, ids

    ours, ids = chosen(logits)
    theirs, expected = route(router, logits, weights.vector(args.correction))
    if has_vectors:
        theirs = theirs * weights.vectors["scale"][expected]
    assert torch.equal(ids.long(), expected)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
    for first, count in ((0, 1), (7, 12), (TOKENS - 1, 1)):
        some, some_ids = chosen(logits[first : first + count])
        assert torch.equal(some, ours[first : first + count]) and torch.equal(some_ids, ids[first : first + count])


def test_no_number_is_an_expert_beyond_the_last(level) -> None:
    """The ids are places in memory."""
    stack = Matrix("none", ())
    logits = torch.full((8, EXPERTS), float("nan"))
    logits[1:, 3], logits[2:] = float("inf"), -float("inf")
    for router in ROUTERS.values():
        fields = router_fields(Mixture(router, EXPERTS, stack, stack, "silu", 0.0), Weights())
        fields.num = EXPERTS
        scales, ids = torch.empty(8, router.top_k), torch.full((8, router.top_k), -1, dtype=torch.int32)
        level.route(ctypes.addressof(fields), logits.data_ptr(), EXPERTS, scales.data_ptr(), ids.data_ptr(), 8)
        assert int(ids.min()) >= 0 and int(ids.max()) < EXPERTS
