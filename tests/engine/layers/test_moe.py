"""The mixture-of-experts layer against the reference on the stacked weights and against transformers' blocks."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from pagewire.engine.layers.moe import MoeMlp
from pagewire.engine.parallel.collectives import Alone
from pagewire.kernels import reference
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.operations import native_ops
from pagewire.kernels.ops import reference_ops

HIDDEN, INTER = 64, 48
OPS = {"torch": reference_ops()}
if build.compiler() is not None:
    OPS["native"] = native_ops(Kernels(build.find().load()))


class Case:
    """A layer, and its weights before packing."""

    def __init__(self, ops, *, num_experts=6, top_k=2, renormalize=True):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "renormalize": renormalize,
            "rounds_weights": False,
        }
        self.layer = MoeMlp(HIDDEN, INTER, **sizes, group=Alone(), ops=ops)
        for parameter in self.layer.parameters():
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        self.gate, self.gate_up, self.down = (
            tensor.detach().clone() for tensor in (self.layer.gate.weight, self.layer.gate_up, self.layer.down)
        )
        self.layer.gate.pack(ops)
        self.layer.pack(ops)

    def expected(self, x):
        logits = x.double() @ self.gate.double().t()
        weights, experts = reference.route(logits, self.layer.top_k, self.layer.renormalize)
        return reference.moe(x.double(), weights, experts, self.gate_up.double(), self.down.double()).float()


@pytest.fixture(params=OPS)
def ops(request):
    return OPS[request.param]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 2), (16, 8), (3, 3), (5, 1)])
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_the_layer_agrees_with_the_reference(ops, num_experts, top_k, tokens, renormalize):
    case = Case(ops, num_experts=num_experts, top_k=top_k, renormalize=renormalize)
    x = torch.randn(tokens, HIDDEN)
    torch.testing.assert_close(case.layer(x), case.expected(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
@pytest.mark.parametrize("tokens", [1, 50])
def test_the_layer_rounds_where_transformers_rounds(family, dtype, tokens):
    """Nearly all numbers are bit-equal; one more rounding would change half of them."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 3}
    if family == "qwen3":
        config = transformers.Qwen3MoeConfig(num_experts=8, moe_intermediate_size=INTER, norm_topk_prob=True, **sizes)
        theirs = Qwen3MoeSparseMoeBlock(config)
    else:
        theirs = MixtralSparseMoeBlock(
            transformers.MixtralConfig(num_local_experts=8, intermediate_size=INTER, **sizes)
        )
    theirs.experts.config._experts_implementation = "grouped_mm"  # the default of a whole model
    for parameter in theirs.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    theirs.to(dtype)
    sizes = {"num_experts": 8, "top_k": 3, "renormalize": True, "rounds_weights": family == "qwen3"}
    ours = MoeMlp(HIDDEN, INTER, **sizes, group=Alone(), ops=OPS["torch"])
    ours.gate.weight.data = theirs.gate.weight.data
    ours.gate_up.data, ours.down.data = theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data
    ours.gate.pack(OPS["torch"])
    ours.pack(OPS["torch"])
    x = torch.randn(tokens, HIDDEN).to(dtype)
    with torch.inference_mode():
        assert (ours(x) == theirs(x[None])[0]).float().mean() > 0.95


@pytest.mark.skipif("native" not in OPS, reason="no C compiler")
def test_a_token_gets_the_same_bits_in_any_batch():
    case = Case(OPS["native"], num_experts=16, top_k=4)
    x = torch.randn(40, HIDDEN)
    together = case.layer(x)
    for first, count in ((0, 1), (3, 2), (7, 5), (20, 13)):
        assert torch.equal(case.layer(x[first : first + count]), together[first : first + count])


def test_a_token_with_nan_changes_no_other_token(ops):
    case = Case(ops)
    x = torch.randn(9, HIDDEN)
    x[4] = torch.nan
    out = case.layer(x)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert out[4].isnan().all()
    torch.testing.assert_close(out[others], case.expected(x[others]), atol=1e-5, rtol=1e-4)


def test_packed_weights_are_counted_and_replace_the_parameters(ops):
    case = Case(ops)
    assert sum(matrix.nbytes for matrix in case.layer.matrices) == case.gate_up.nbytes + case.down.nbytes
    assert not list(case.layer.parameters())


@pytest.mark.skipif("native" not in OPS, reason="no C compiler")
@pytest.mark.parametrize("native", [False, True])
def test_8_bits_leave_the_router_exact(native):
    ops = (
        native_ops(Kernels(build.find().load()), quantization="int8") if native else reference_ops(quantization="int8")
    )
    case = Case(ops)
    assert sum(matrix.nbytes for matrix in case.layer.matrices) < 0.4 * (case.gate_up.nbytes + case.down.nbytes)
    x = torch.randn(60, HIDDEN)
    torch.testing.assert_close(case.layer.gate(x), x @ case.gate.t(), atol=1e-5, rtol=1e-4)
    out, expected = case.layer(x), case.expected(x)
    assert 1e-4 < (out - expected).norm() / expected.norm() < 0.03


class Rank:
    """A rank that records what it would sum, for the test to add up."""

    size = 2

    def __init__(self, rank):
        self.rank, self.partial_sums = rank, []

    def all_reduce(self, x):
        self.partial_sums.append(x.clone())


def test_the_outputs_of_two_ranks_add_up(ops):
    case = Case(ops)
    x = torch.randn(30, HIDDEN)
    partial_sums = []
    for rank in (Rank(0), Rank(1)):
        columns = slice(rank.rank * INTER // 2, (rank.rank + 1) * INTER // 2)
        sizes: dict[str, Any] = {"num_experts": 6, "top_k": 2, "renormalize": True, "rounds_weights": False}
        part = MoeMlp(HIDDEN, INTER // 2, **sizes, group=rank, ops=ops)
        part.gate.weight.data = case.gate.clone()
        gates, ups = case.gate_up[:, :INTER], case.gate_up[:, INTER:]
        part.gate_up.data = torch.cat((gates[:, columns], ups[:, columns]), dim=1)
        part.down.data = case.down[:, :, columns].contiguous()
        part.gate.pack(ops)
        part.pack(ops)
        part(x)
        partial_sums += rank.partial_sums
    assert len(partial_sums) == 2, "each rank sums once per layer"
    torch.testing.assert_close(partial_sums[0] + partial_sums[1], case.expected(x), atol=1e-5, rtol=1e-4)
