"""The rehearsal refuses models that call attention in ways that a paged KV cache cannot serve."""

import re

import pytest
import torch

from pagewire.engine.attention.base import AttentionParameters
from pagewire.engine.executors.rehearsal import NUM_TOKENS, STEPS, Rehearsal, compare
from pagewire.errors import UnsupportedModel


def call(rehearsal: Rehearsal, layer: int, num: int, *, num_keys: int | None = None, scale: float = 0.25) -> None:
    kv = torch.randn(num if num_keys is None else num_keys, 2, 16)
    rehearsal.forward(layer, torch.randn(num, 4, 16), kv, kv, AttentionParameters(scale=scale))


def test_layers_may_call_attention_in_any_order() -> None:
    rehearsal = Rehearsal("XForCausalLM")
    for rows in STEPS:
        requests, _ = rehearsal.step(rows)
        for layer in (2, 0, 1):
            call(rehearsal, layer, len(requests))
        rehearsal.finish(3)
    assert {(c.num_heads, c.num_kv_heads, c.head_dim) for c in rehearsal.calls.values()} == {(4, 2, 16)}


def test_the_steps_cover_each_position_once() -> None:
    rehearsal = Rehearsal("XForCausalLM")
    steps = [rehearsal.step(rows) for rows in STEPS]
    at = [(r, p) for requests, positions in steps for r, p in zip(requests.tolist(), positions.tolist(), strict=True)]
    assert sorted(at) == [(request, position) for request in range(2) for position in range(NUM_TOKENS)]
    assert at[18:42] == [(1, position) for position in range(5, 26)] + [(0, 13), (0, 14), (0, 15)]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([(0, {}), (0, {})], "it calls attention more than once in layer 0"),
        ([(0, {})], "it has 2 layers, and 1 of them use attention"),
        ([(0, {}), (1, {"num_keys": 9})], "for 18 tokens layer 1 computes 18 queries and 9 keys"),
        ([(0, {}), (3, {})], "it has 2 layers, and 1 of them use attention"),
    ],
)
def test_a_step_with_unexpected_attention_calls_is_refused(
    calls: list[tuple[int, dict[str, int]]], reason: str
) -> None:
    rehearsal = Rehearsal("XForCausalLM")
    rehearsal.step(STEPS[0])
    with pytest.raises(UnsupportedModel, match=f"^XForCausalLM cannot be served: {re.escape(reason)}"):
        for layer, how in calls:
            call(rehearsal, layer, 18, num_keys=how.get("num_keys"))
        rehearsal.finish(2)


def test_a_scale_that_changes_between_steps_is_refused() -> None:
    rehearsal = Rehearsal("XForCausalLM")
    rehearsal.step(STEPS[0])
    call(rehearsal, 0, 18)
    rehearsal.step(STEPS[1])
    with pytest.raises(UnsupportedModel, match="layer 0 changes its scale, window or heads"):
        call(rehearsal, 0, 24, scale=0.5)


def random_logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, NUM_TOKENS, 50, generator=torch.Generator().manual_seed(seed))


def steps_of(logits: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """These logits as two steps compute them."""
    rehearsal, steps = Rehearsal("XForCausalLM"), []
    for rows in STEPS:
        requests, positions = rehearsal.step(rows)
        steps.append((logits[requests, positions], requests))
    return steps


def check(
    ours: torch.Tensor,
    expected: torch.Tensor,
    again: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 3,
    max_len: int = 100,
) -> None:
    again = expected if again is None else again
    compare("X", steps_of(ours), expected, again, dtype=dtype, num_layers=num_layers, max_len=max_len)


def test_equal_logits_pass_and_different_ones_are_refused() -> None:
    expected = random_logits()
    check(expected, expected)
    check(expected + 3, expected)  # a constant changes no probability
    reason = (
        r"it computes .* in a trial of 64 random positions 6\d tokens differ .* log-probabilities by 1\.\d of their"
    )
    with pytest.raises(UnsupportedModel, match=f"^X cannot be served: {reason}"):
        check(random_logits(1), expected)


@pytest.mark.parametrize(("row", "step"), [(row, step) for step, rows in enumerate(STEPS) for row, _ in rows])
def test_wrong_logits_of_one_request_in_one_step_are_refused(row: int, step: int) -> None:
    """Attention that loses what an earlier step cached, or the positions of one request."""
    expected, wrong = random_logits(), random_logits()
    first, last = (sum(dict(rows)[row] for rows in STEPS[:end]) for end in (step, step + 1))
    wrong[row, first:last] += torch.linspace(-1e-3, 1e-3, 50)
    with pytest.raises(UnsupportedModel):
        check(wrong, expected)


def test_positions_beyond_the_greatest_length_are_not_compared() -> None:
    expected, wrong = random_logits(), random_logits()
    wrong[0, 20:] += torch.linspace(-1, 1, 50)
    check(wrong, expected, max_len=20)
    with pytest.raises(UnsupportedModel, match=r"trial of 60 random positions \d tokens"):
        check(wrong, expected, max_len=30)


def test_one_wrong_token_passes() -> None:
    other = random_logits()  # as if rounding sent one token to another expert
    other[0, 2] += torch.linspace(-1, 1, 50)
    check(other, random_logits())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_limit_follows_the_roundings_of_the_type(dtype: torch.dtype) -> None:
    expected, eps = random_logits(), torch.finfo(dtype).eps
    for num_layers, roundings in ((1, 16), (16, 64)):
        limit = min(roundings * eps, 1 / 8)
        check(expected + 0.8 * limit * random_logits(1), expected, dtype=dtype, num_layers=num_layers)
        with pytest.raises(UnsupportedModel):
            check(expected + 1.5 * limit * random_logits(1), expected, dtype=dtype, num_layers=num_layers)


def test_the_limit_follows_the_rounding_errors_of_transformers() -> None:
    expected = random_logits()
    noisy = expected + 0.2 * random_logits(1)
    check(noisy, expected, expected + 0.1 * random_logits(2), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModel):
        check(noisy, expected, expected, dtype=torch.bfloat16)


def test_nan_logits_pass_only_if_transformers_gives_them_too() -> None:
    nans = torch.full((2, NUM_TOKENS, 50), torch.nan)
    with pytest.raises(UnsupportedModel):
        check(nans, random_logits())
    check(nans, nans)
