"""A mixture of experts in torch, against a formula and against the blocks of transformers."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from pagewire.engine.executors.experts import mixture, route
from pagewire.engine.executors.weights import Weights
from pagewire.engine.models.description import Part, Router, Weight
from pagewire.engine.models.program import Matrix, Mixture, Vector
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.ops import Ops, reference_ops

HIDDEN, INTER = 64, 48
OPS = {"torch": reference_ops()}
if build.compiler() is not None:
    OPS["native"] = native_ops(Kernels(build.find().load()))
needs_c = pytest.mark.skipif("native" not in OPS, reason="no C compiler")


def weight(rows: int, columns: int, experts: int = 0) -> Weight:
    return Weight((Part("w", rows),), columns, experts=experts)


@dataclass(frozen=True)
class Experts:
    """A mixture and its weights before they are packed: gate_up [experts, 2 · width, hidden], gates first; down
    [experts, hidden, width]."""

    router: Router
    gate: Tensor
    gate_up: Tensor
    down: Tensor
    act: Any = "silu"
    limit: float = 0.0
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    correction: Tensor | None = None

    def run(self, x: Tensor, ops: Ops) -> Tensor:
        """With the matrices of a table of operations."""
        num, double, hidden = self.gate_up.shape
        is_silu = self.act == "silu"
        loaded = Weights()
        loaded.matrices["gate_up"] = tuple(map(ops.gated if is_silu else ops.matrix, self.gate_up.clone()))
        loaded.matrices["down"] = tuple(map(ops.matrix, self.down.clone()))
        vectors: dict[str, Vector | None] = {}
        for name in ("gate_up_bias", "down_bias", "correction"):
            if (values := getattr(self, name)) is not None:
                loaded.vectors[name] = values
            vectors[name] = None if values is None else Vector(name, ())
        args = Mixture(
            self.router,
            num,
            Matrix("gate_up", (weight(double, hidden, num),), "gated experts" if is_silu else "experts"),
            Matrix("down", (weight(hidden, double // 2, num),), "experts"),
            self.act,
            self.limit,
            **vectors,
        )
        return mixture(args, loaded, x, ops.router(self.gate.clone()).product(x, None))

    def expected(self, x: Tensor) -> Tensor:
        """Token by token in float64, for a softmax over all experts."""
        scores = torch.softmax(x.double() @ self.gate.double().t(), -1)
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, row in enumerate(scores):
            scales, chosen = row.topk(self.router.top_k)
            scales = scales / scales.sum() if self.router.renorm else scales
            for scale, expert in zip(scales, chosen.tolist(), strict=True):
                gate, up = (self.gate_up[expert].double() @ x[token].double()).chunk(2)
                out[token] += scale * (self.down[expert].double() @ (gate * torch.sigmoid(gate) * up))
        return out.float()


def make(*, num: int = 6, top_k: int = 2, renorm: bool = True) -> Experts:
    def random(*size: int) -> Tensor:
        return torch.randn(size) / math.sqrt(size[-1])

    torch.manual_seed(0)
    router = Router(weight(num, HIDDEN), top_k, renorm=renorm, rounds_weights=False)
    return Experts(router, random(num, HIDDEN), random(num, 2 * INTER, HIDDEN), random(num, HIDDEN, INTER))


@pytest.fixture(params=OPS)
def ops(request):
    return OPS[request.param]


@pytest.mark.parametrize("renorm", [False, True])
@pytest.mark.parametrize(("num", "top_k"), [(6, 2), (16, 8), (3, 3), (5, 1)])
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_a_mixture_is_the_weighted_sum_over_the_best_experts(ops, num, top_k, tokens, renorm):
    experts = make(num=num, top_k=top_k, renorm=renorm)
    x = torch.randn(tokens, HIDDEN)
    torch.testing.assert_close(experts.run(x, ops), experts.expected(x), atol=1e-5, rtol=1e-4)


def randomized(block: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    for name, parameter in block.named_parameters():
        parameter.data.normal_(std=0.3 if "bias" in name else parameter.shape[-1] ** -0.5)
    return block.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
@pytest.mark.parametrize("tokens", [1, 50])
def test_a_mixture_rounds_where_transformers_rounds(family, dtype, tokens):
    """Nearly all numbers are bit-equal; one more rounding would change half of them."""
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 3}
    if family == "qwen3":
        config = transformers.Qwen3MoeConfig(num_experts=8, moe_intermediate_size=INTER, norm_topk_prob=True, **sizes)
        theirs = Qwen3MoeSparseMoeBlock(config)
    else:
        theirs = MixtralSparseMoeBlock(
            transformers.MixtralConfig(num_local_experts=8, intermediate_size=INTER, **sizes)
        )
    theirs.experts.config._experts_implementation = "grouped_mm"  # the default of a whole model
    randomized(theirs, dtype)
    router = Router(weight(8, HIDDEN), 3, renorm=True, rounds_weights=family == "qwen3")
    ours = Experts(router, theirs.gate.weight.data, theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    with torch.inference_mode():
        assert (ours.run(x, OPS["torch"]) == theirs(x[None])[0]).float().mean() > 0.95


def test_experts_in_groups_are_those_of_deepseek_v3():
    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=INTER, n_routed_experts=16, n_shared_experts=1, n_group=4,
        topk_group=2, num_experts_per_tok=3, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    theirs = randomized(DeepseekV3MoE(config))
    correction = torch.randn(16) * 0.2
    theirs.gate.e_score_correction_bias.copy_(correction)
    router = Router(
        weight(16, HIDDEN), 3, "sigmoid", groups=4, top_groups=2, renorm=True, floor=1e-20, scale=2.5,
        rounds_weights=False,
    )  # fmt: skip
    ours = Experts(
        router, theirs.gate.weight.data, theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data,
        correction=correction,
    )  # fmt: skip
    x = torch.randn(40, HIDDEN)
    with torch.inference_mode():
        expected = theirs(x[None])[0] - theirs.shared_experts(x)
        torch.testing.assert_close(ours.run(x, OPS["torch"]), expected, atol=1e-5, rtol=1e-4)


def test_clamped_experts_with_biases_are_those_of_gpt_oss():
    """Its gates and ups alternate in the file."""
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INTER, num_local_experts=5, num_experts_per_tok=2
    )
    theirs = randomized(GptOssMLP(config))
    theirs.experts.gate_up_proj.data.mul_(20)  # so that some numbers exceed the limit of 7
    gate_up = theirs.experts.gate_up_proj.data.transpose(1, 2)
    biases = theirs.experts.gate_up_proj_bias.data
    # The router's bias is a part of its product, which comes before the mixture.
    theirs.router.bias.data.zero_()
    ours = Experts(
        Router(weight(5, HIDDEN), 2, "softmax_of_chosen", rounds_weights=False),
        theirs.router.weight.data,
        torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1),
        theirs.experts.down_proj.data.transpose(1, 2).contiguous(),
        act="swiglu_clamped",
        limit=7.0,
        gate_up_bias=torch.cat((biases[:, ::2], biases[:, 1::2]), dim=1),
        down_bias=theirs.experts.down_proj_bias.data,
    )
    x = torch.randn(30, HIDDEN)
    with torch.inference_mode():
        expected = theirs(x[None])[0].view(30, HIDDEN)
        assert float((x @ gate_up[0].t()).abs().max()) > 7
        torch.testing.assert_close(ours.run(x, OPS["torch"]), expected, atol=1e-4, rtol=1e-4)


def test_weights_of_the_input_are_those_of_llama_4():
    config = transformers.Llama4TextConfig(
        hidden_size=HIDDEN, intermediate_size=INTER, num_local_experts=4, num_experts_per_tok=1
    )
    theirs = randomized(Llama4TextMoe(config))
    ours = Experts(
        Router(weight(4, HIDDEN), 1, "sigmoid", on="input"),
        theirs.router.weight.data,
        theirs.experts.gate_up_proj.data.transpose(1, 2).contiguous(),
        theirs.experts.down_proj.data.transpose(1, 2).contiguous(),
    )
    x = torch.randn(30, HIDDEN)
    with torch.inference_mode():
        expected = theirs(x[None])[0].view(30, HIDDEN) - theirs.shared_expert(x)
        torch.testing.assert_close(ours.run(x, OPS["torch"]), expected, atol=1e-5, rtol=1e-4)


def test_groups_are_chosen_by_their_best_or_two_best_experts():
    """Group 0 has the best expert, group 1 the two best together."""
    logits = torch.tensor([[9.0, 0, 0, 8, 7, 0]])
    router = Router(weight(6, 1), 2, "sigmoid", groups=2, top_groups=1)
    bias = torch.tensor([0.5, 0, 0, 0, 0, 0])
    assert route(replace(router, group_by="max"), logits, bias)[1].tolist()[0][0] == 0
    assert sorted(route(replace(router, group_by="top2"), logits, None)[1].tolist()[0]) == [3, 4]


@pytest.mark.parametrize(("floor_by", "total"), [("add", 0.5 + 0.25 + 0.2), ("max", 0.75)])
def test_a_floor_of_the_sum_of_weights(floor_by, total):
    scores = torch.tensor([[0.5, 0.25, 0.1]])
    router = Router(weight(3, 1), 2, "sigmoid", renorm=True, floor=0.2, floor_by=floor_by, scale=3.0)
    found, _ = route(router, torch.logit(scores), None)
    torch.testing.assert_close(found, 3 * scores[:, :2] / total)


@needs_c
def test_a_token_gets_the_same_bits_in_any_batch():
    experts = make(num=16, top_k=4)
    x = torch.randn(40, HIDDEN)
    together = experts.run(x, OPS["native"])
    for first, count in ((0, 1), (3, 2), (7, 5), (20, 13)):
        assert torch.equal(experts.run(x[first : first + count], OPS["native"]), together[first : first + count])


def test_a_token_with_nan_changes_no_other_token(ops):
    experts = make()
    x = torch.randn(9, HIDDEN)
    x[4] = torch.nan
    out = experts.run(x, ops)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert out[4].isnan().all()
    torch.testing.assert_close(out[others], experts.expected(x[others]), atol=1e-5, rtol=1e-4)


@needs_c
@pytest.mark.parametrize("native", [False, True])
def test_8_bits_leave_the_router_exact(native):
    ops = (
        native_ops(Kernels(build.find().load()), quantization="int8") if native else reference_ops(quantization="int8")
    )
    experts = make()
    x = torch.randn(60, HIDDEN)
    torch.testing.assert_close(ops.router(experts.gate).product(x, None), x @ experts.gate.t(), atol=1e-5, rtol=1e-4)
    out, expected = experts.run(x, ops), experts.expected(x)
    assert 1e-4 < (out - expected).norm() / expected.norm() < 0.03


def test_the_outputs_of_two_ranks_add_up(ops):
    experts = make()
    x = torch.randn(30, HIDDEN)
    total = torch.zeros(30, HIDDEN)
    for rank in range(2):
        columns = slice(rank * INTER // 2, (rank + 1) * INTER // 2)
        gates, ups = experts.gate_up.chunk(2, dim=1)
        part = torch.cat((gates[:, columns], ups[:, columns]), dim=1)
        total += replace(experts, gate_up=part, down=experts.down[:, :, columns].contiguous()).run(x, ops)
    torch.testing.assert_close(total, experts.expected(x), atol=1e-5, rtol=1e-4)
