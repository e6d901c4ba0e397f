"""Ways to choose experts, and kinds of experts, that no family of transformers shows alone."""

import pytest
import torch

from pagewire.engine.executors.experts import mixture, route
from pagewire.engine.executors.weights import Options, Packing
from pagewire.engine.models.description import Part, Router, Weight
from pagewire.engine.models.program import Matrix, Mixture, Vector
from pagewire.kernels.ops import reference_ops

HIDDEN, INTER = 8, 6
ROUTER = Weight((), HIDDEN)


def _stack(key: str, experts: int, rows: int, columns: int) -> Matrix:
    return Matrix(key, (Weight((Part(key, rows),), columns, experts=experts),), "experts")


def _weights(*matrices: Matrix) -> Packing:
    options = Options(
        ops=reference_ops(), dtype=torch.float32, weight_dtype=torch.float32, device=torch.device("cpu"), keeps=False
    )
    packing = Packing(options)
    torch.manual_seed(1)
    for matrix in matrices:
        packing.end(matrix, torch.randn(matrix.experts, matrix.rows, matrix.columns))
    return packing


def test_groups_are_chosen_before_experts() -> None:
    """The best expert is in a group whose two best are worse together than those of another."""
    logits = torch.tensor([[5.0, -9.0, 2.0, 2.0, 3.0, -1.0]])
    router = Router(ROUTER, 2, "sigmoid", groups=3, top_groups=1)
    assert route(router, logits, None)[1].sort().values.tolist() == [[2, 3]]
    by_best = Router(ROUTER, 2, "sigmoid", groups=3, top_groups=1, group_by="max")
    assert route(by_best, logits, None)[1].sort().values.tolist() == [[0, 1]]


def test_experts_outside_the_groups_lose_to_negative_scores() -> None:
    logits, correction = torch.zeros((1, 4)), torch.tensor([-3.0, -3.0, -9.0, -9.0])
    router = Router(ROUTER, 2, "sigmoid", groups=2, top_groups=1)
    assert route(router, logits, correction)[1].sort().values.tolist() == [[0, 1]]


@pytest.mark.parametrize(("floor_by", "expected"), [("add", 0.25), ("max", 0.5)])
def test_floors_of_the_sum_of_weights(floor_by, expected) -> None:
    logits = torch.zeros((1, 2))  # two sigmoids of 1/2
    router = Router(ROUTER, 2, "sigmoid", renorm=True, floor=1.0, floor_by=floor_by)
    weights, _ = route(router, logits, None)
    assert weights.tolist() == [[pytest.approx(expected)] * 2]


def test_the_last_experts_return_their_input() -> None:
    gate_up, down = _stack("gate_up", 2, 2 * INTER, HIDDEN), _stack("down", 2, HIDDEN, INTER)
    args = Mixture(Router(ROUTER, 1, zero_experts=2), 2, gate_up, down, "gelu", 0.0)
    x = torch.randn(3, HIDDEN)
    logits = torch.tensor([[0.0, 0, 0, 50], [0, 0, 50, 0], [0, 50, 0, 0]])
    out = mixture(args, _weights(gate_up, down).weights, x, logits)
    torch.testing.assert_close(out[:2], x[:2])
    assert not torch.allclose(out[2], x[2])


def test_experts_without_gates_and_with_scales_of_their_own() -> None:
    up, down, scale = _stack("up", 2, INTER, HIDDEN), _stack("down", 2, HIDDEN, INTER), Vector("scale", ())
    packing = _weights(up, down)
    packing.take_vector(scale, torch.tensor([2.0, 3.0]))
    args = Mixture(Router(ROUTER, 1), 2, up, down, "relu2", 0.0, has_gate=False, expert_scale=scale)
    x, weights = torch.randn(2, HIDDEN), packing.weights
    out = mixture(args, weights, x, torch.tensor([[50.0, 0], [0, 50.0]]))
    for token, factor in ((0, 2.0), (1, 3.0)):
        inner = weights.matrices["up"][token].product(x[token : token + 1], None).relu().square()
        expected = weights.matrices["down"][token].product(inner, None)[0] * factor
        torch.testing.assert_close(out[token], expected)
