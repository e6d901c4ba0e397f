"""Mixture of experts against the reference, in float64."""

from typing import Any

import pytest
import torch

from pagewire.engine.executors import functions
from pagewire.engine.models.expert_places import places as places_of
from pagewire.engine.models.expert_places import table
from pagewire.kernels import reference
from pagewire.kernels.triton import moe

BIG = torch.cuda.is_available()
CLOSE = 6e-3  # gate, up, silu, their product, the part and the sum are each rounded to bfloat16, as in transformers


def _case(device, *, tokens, num_experts, top_k, hidden, inter, max_tokens=None, dtype=torch.bfloat16):
    """Activations, router logits, weights, and a workspace full of NaN."""
    x = torch.randn(tokens, hidden + 8, device=device).to(dtype)[:, :hidden]  # rows need not be contiguous
    logits = torch.randn(tokens, num_experts, device=device)
    gate_up = (torch.randn(num_experts, 2 * inter, hidden, device=device) * hidden**-0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, inter, device=device) * inter**-0.5).to(dtype)
    workspace = moe.workspace_moe(
        max_tokens=max_tokens or tokens,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        inter=inter,
        dtype=dtype,
        device=device,
    )
    for tensor in (workspace.weights, workspace.gated, workspace.parts):
        tensor.fill_(torch.nan)
    for tensor in (workspace.experts, workspace.assignments, workspace.block_experts, workspace.num_blocks):
        tensor.fill_(2**30)
    return x, logits, gate_up, down, workspace


def _moe(x, logits, gate_up, down, workspace, *, renormalize=True, num_tokens=None):
    out = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, dtype=x.dtype, device=x.device)
    num = torch.tensor([x.shape[0] if num_tokens is None else num_tokens], dtype=torch.int32, device=x.device)
    top_k = workspace.experts.shape[1]
    moe.moe(out[:, : x.shape[1]], x, logits, gate_up, down, num, workspace, top_k=top_k, renormalize=renormalize)
    assert out[:, x.shape[1] :].isnan().all()
    return out[:, : x.shape[1]]


def _expected(x, logits, gate_up, down, top_k, renormalize=True):
    weights, experts = reference.route(logits, top_k, renormalize)
    return reference.moe(x.double(), weights, experts, gate_up.double(), down.double())


def _error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8), (3, 3), (5, 1)])
def test_routing_equals_the_reference(device, num_experts, top_k, renormalize):
    logits = torch.randn(9, num_experts + 4, device=device)[:, :num_experts]
    logits[3] = 0.5  # equal logits: the first experts count
    workspace = _case(device, tokens=9, num_experts=num_experts, top_k=top_k, hidden=32, inter=32)[-1]
    num_tokens = torch.tensor([8], dtype=torch.int32, device=device)
    moe.route(logits, num_tokens, workspace, top_k=top_k, renormalize=renormalize)
    weights, experts = reference.route(logits, top_k, renormalize)
    torch.testing.assert_close(workspace.weights[:8], weights[:8], atol=1e-6, rtol=1e-5)
    distinct = [i for i in range(8) if i != 3]
    assert torch.equal(workspace.experts[distinct].long(), experts[distinct])
    assert workspace.experts[3].tolist() == list(range(top_k))
    assert (workspace.experts[8] == -1).all(), "a padding token has no expert"


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"),
    [(1, 8, 2), (3, 6, 4), (40, 5, 2), (300, 3, 4), (290, 1, 1), (1300, 1, 1), (520, 37, 6), (4300, 5, 4)],
)
def test_assignments_are_sorted_by_expert_and_padded_to_blocks(device, tokens, num_experts, top_k):
    workspace = _case(device, tokens=tokens, num_experts=num_experts, top_k=top_k, hidden=32, inter=32)[-1]
    num_assigned = tokens * top_k
    rows = moe._tiles(num_assigned, num_experts).rows
    experts = torch.randint(-1, num_experts + 2, (num_assigned,), dtype=torch.int32)  # the last two have no weights
    experts[experts == num_experts - 2] = -1  # an expert without assignments
    workspace.experts.copy_(experts.view(tokens, top_k))
    moe.align(workspace, num_assigned=num_assigned, num_experts=num_experts)
    num_blocks = workspace.num_blocks.item()
    expected_assignments, expected_experts = [], []
    for expert in range(num_experts):
        own = (experts == expert).nonzero()[:, 0].tolist()
        expected_assignments += own + [num_assigned] * (-len(own) % rows)
        expected_experts += [expert] * -(-len(own) // rows)
    assert num_blocks == len(expected_experts) <= moe._max_blocks(num_assigned, num_experts, rows)
    assert workspace.block_experts[:num_blocks].tolist() == expected_experts
    assert workspace.assignments[: num_blocks * rows].tolist() == expected_assignments


def test_max_blocks_holds_in_the_worst_case():
    for num_experts in (1, 8, 60):
        for num_assigned in range(1, 3000, 7):
            rows = moe._tiles(num_assigned, num_experts).rows
            used = min(num_experts, num_assigned)  # all but one have one row more than whole blocks
            worst = used + (num_assigned - used) // rows
            assert worst <= moe._max_blocks(num_assigned, num_experts, rows), (num_experts, num_assigned)


_SHAPES = [
    # tokens, experts, top_k, hidden, inter: blocks of 16 rows, of 64 and of 128
    (1, 8, 2, 64, 32),
    (7, 6, 3, 96, 160),
    (33, 3, 2, 128, 64),
    (270, 1, 1, 64, 96),
]
if BIG:
    _SHAPES += [
        (tokens, *model) for tokens in (1, 32, 256, 2048, 8192) for model in ((128, 8, 2048, 768), (8, 2, 4096, 14336))
    ]


@pytest.mark.parametrize(("tokens", "num_experts", "top_k", "hidden", "inter"), _SHAPES)
def test_moe(device, tokens, num_experts, top_k, hidden, inter):
    sizes = {"num_experts": num_experts, "top_k": top_k, "hidden": hidden, "inter": inter}
    x, logits, gate_up, down, workspace = _case(device, tokens=tokens, **sizes)
    out = _moe(x, logits, gate_up, down, workspace)
    assert _error(out, _expected(x, logits, gate_up, down, top_k)) < CLOSE


def test_float16_without_renormalized_router_weights(device):
    sizes = {"num_experts": 4, "top_k": 2, "hidden": 64, "inter": 64}
    x, logits, gate_up, down, workspace = _case(device, tokens=5, dtype=torch.float16, **sizes)
    out = _moe(x, logits, gate_up, down, workspace, renormalize=False)
    assert _error(out, _expected(x, logits, gate_up, down, 2, renormalize=False)) < 1e-3


def test_padding_tokens_are_not_computed_and_change_no_other_token(device):
    sizes = {"num_experts": 6, "top_k": 2, "hidden": 64, "inter": 64}
    x, logits, gate_up, down, workspace = _case(device, tokens=9, max_tokens=20, **sizes)
    x[6:] = torch.nan
    logits[7:] = torch.nan
    out = _moe(x, logits, gate_up, down, workspace, num_tokens=6)
    assert _error(out[:6], _expected(x[:6], logits[:6], gate_up, down, 2)) < CLOSE
    assert (out[6:] == 0).all()
    assert (workspace.gated.isnan().sum(dim=1) == 64).sum() == 40 - 12, "only assignments of real tokens are written"


def test_a_nan_token_changes_no_other_token(device):
    sizes = {"num_experts": 5, "top_k": 2, "hidden": 64, "inter": 64}
    x, logits, gate_up, down, workspace = _case(device, tokens=8, **sizes)
    expected = _moe(x, logits, gate_up, down, workspace).clone()
    x[2] = torch.nan
    logits[2] = torch.nan
    out = _moe(x, logits, gate_up, down, workspace)
    others = [0, 1, 3, 4, 5, 6, 7]
    assert out[2].isnan().all() and torch.equal(out[others], expected[others])


def test_a_token_has_the_same_bits_in_any_batch(device):
    """Among launches with the same number of rows per block."""
    sizes = {"num_experts": 8, "top_k": 2, "hidden": 64, "inter": 64}
    x, logits, gate_up, down, workspace = _case(device, tokens=24, **sizes)
    together = _moe(x, logits, gate_up, down, workspace).clone()
    for part in (slice(0, 1), slice(5, 9), slice(20, 24)):
        assert torch.equal(_moe(x[part], logits[part], gate_up, down, workspace), together[part])


ACTS: dict[str, dict[str, Any]] = {
    "silu": {},
    "swiglu_clamped": {"limit": 1.5, "sharpness": 1.3},
    "gelu_tanh": {},
    "relu2": {"has_gate": False},
}


def _exact(case, inputs, chosen, weights, biases, act, options, *, zero_scale=None):
    """The sum over the experts of each token in float64. inputs: [tokens, top_k, hidden]."""
    _, _, gate_up, down, _ = case
    options = dict(options)
    has_gate = options.pop("has_gate", True)
    expected = torch.zeros(len(inputs), down.shape[1], dtype=torch.float64, device=inputs.device)
    for token in range(len(inputs)):
        for choice, expert in enumerate(chosen[token].tolist()):
            x, weight = inputs[token, choice].double(), weights[token, choice]
            if expert >= len(down):
                expected[token] += x * zero_scale * weight
            elif expert >= 0:
                inner = x @ gate_up[expert].double().t()
                inner = inner if biases[0] is None else inner + biases[0][expert]
                halves = inner.chunk(2)
                inner = functions.glu(*halves, act, **options) if has_gate else functions.activate(inner, act)
                result = inner @ down[expert].double().t()
                expected[token] += (result if biases[1] is None else result + biases[1][expert]) * weight
    return expected


@pytest.mark.parametrize("own_inputs", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_experts_of_any_activation(device, act, own_inputs, has_biases):
    """own_inputs: each assignment has its own input, and the results are not weighted."""
    tokens, num_experts, top_k, hidden, inter = 5, 6, 2, 64, 96
    options = ACTS[act]
    case = _case(device, tokens=tokens, num_experts=num_experts, top_k=top_k, hidden=hidden, inter=inter)
    x, _, gate_up, down, workspace = case
    width = 2 * inter if options.get("has_gate", True) else inter
    gate_up = gate_up[:, :width].contiguous()
    chosen = torch.stack([torch.randperm(num_experts, device=device)[:top_k] for _ in range(tokens)])
    chosen[3, 1] = -1  # computed nowhere
    weights = torch.rand(tokens, top_k, device=device)
    workspace.experts.copy_(chosen)
    workspace.weights.copy_(weights)
    biases = (
        [torch.randn(num_experts, n, device=device).bfloat16() for n in (width, hidden)] if has_biases else [None] * 2
    )
    each = x[:, None].expand(-1, top_k, -1)
    each = each * weights[:, :, None].bfloat16() if own_inputs else each
    out = torch.full((tokens, hidden), torch.nan, dtype=x.dtype, device=device)
    moe.experts(
        out, each.flatten(0, 1) if own_inputs else x, gate_up, down, workspace, act=act, gate_up_bias=biases[0],
        down_bias=biases[1], is_weighted=not own_inputs, **options,
    )  # fmt: skip
    weights = torch.ones_like(weights) if own_inputs else weights
    case = (x, None, gate_up, down, workspace)
    assert _error(out, _exact(case, each, chosen, weights, biases, act, options)) < CLOSE


@pytest.mark.parametrize("tokens", [5, 200])
def test_experts_without_weights_return_their_input(device, tokens):
    num_experts, top_k = 4, 3
    case = _case(device, tokens=tokens, num_experts=num_experts, top_k=top_k, hidden=64, inter=32)
    x, _, gate_up, down, workspace = case
    chosen = torch.stack([torch.randperm(num_experts + 4, device=device)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, device=device)
    workspace.experts.copy_(chosen)
    workspace.weights.copy_(weights)
    out = torch.full((tokens, 64), torch.nan, dtype=x.dtype, device=device)
    moe.experts(out, x, gate_up, down, workspace, zero_scale=0.5)
    each = x[:, None].expand(-1, top_k, -1)
    assert _error(out, _exact(case, each, chosen, weights, (None, None), "silu", {}, zero_scale=0.5)) < CLOSE


@pytest.mark.parametrize("tokens", [5, 600])
def test_the_parts_of_ranks_with_whole_experts_add_up(device, tokens):
    """Of five experts two ranks have three each; the one that both have is computed by turns."""
    num_experts, top_k, hidden, inter = 5, 3, 64, 32
    sizes = {"num_experts": num_experts, "top_k": top_k, "hidden": hidden, "inter": inter}
    x, logits, gate_up, down, _ = _case(device, tokens=tokens, **sizes)
    positions = torch.randint(0, 9, (tokens,), dtype=torch.int32, device=device)
    num_tokens = torch.tensor([tokens - 1], dtype=torch.int32, device=device)
    total, loads = torch.zeros(tokens, hidden, device=device), torch.zeros(num_experts, device=device)
    slots = ((0, 1, 2), (2, 3, 4))
    for rank, own in enumerate(slots):
        workspace = _case(device, tokens=tokens, **sizes | {"num_experts": len(own)})[-1]
        places = torch.tensor(table(places_of(num_experts, slots, rank), len(own), 0), dtype=torch.int32)
        load = torch.zeros(len(own), dtype=torch.int64, device=device)
        moe.route(
            logits, num_tokens, workspace, top_k=top_k, renormalize=True, places=places.to(device), positions=positions
        )
        out = torch.full((tokens, hidden), torch.nan, dtype=x.dtype, device=device)
        own_ones = list(own)
        moe.experts(out, x, gate_up[own_ones], down[own_ones], workspace, num_all=num_experts, load=load)
        moe.experts(out, x, gate_up[own_ones], down[own_ones], workspace, num_all=num_experts, load=load)
        total += out
        loads.index_add_(0, torch.tensor(own, device=device), load.float())
        assert 0 < load[own.index(2)] < 2 * (reference.route(logits, top_k, True)[1] == 2).sum()
    assert _error(total[:-1], _expected(x, logits, gate_up, down, top_k)[:-1]) < CLOSE
    assert not total[-1].any()
    chosen = reference.route(logits, top_k, True)[1][:-1].flatten().bincount(minlength=num_experts)
    assert loads.tolist() == (2 * chosen).tolist(), "each launch adds its assignments"


@pytest.mark.parametrize(("hidden", "inter"), [(40, 24), (72, 100), (1064, 33)])
def test_sizes_that_are_no_multiples_of_a_step(device, hidden, inter):
    sizes = {"num_experts": 5, "top_k": 2, "hidden": hidden, "inter": inter}
    x, logits, gate_up, down, workspace = _case(device, tokens=6, **sizes)
    out = _moe(x, logits, gate_up, down, workspace)
    assert _error(out, _expected(x, logits, gate_up, down, 2)) < CLOSE
