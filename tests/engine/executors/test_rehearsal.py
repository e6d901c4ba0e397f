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
    assert at[7:] == [(1, 3), (1, 4), (1, 5), (1, 6), (0, 4), (0, 5), (0, 6)]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([(0, {}), (0, {})], "it calls attention more than once in layer 0"),
        ([(0, {})], "it has 2 layers, and 1 of them use attention"),
        ([(0, {}), (1, {"num_keys": 9})], "for 7 tokens layer 1 computes 7 queries and 9 keys"),
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
            call(rehearsal, layer, 7, num_keys=how.get("num_keys"))
        rehearsal.finish(2)


def test_a_scale_that_changes_between_steps_is_refused() -> None:
    rehearsal = Rehearsal("XForCausalLM")
    rehearsal.step(STEPS[0])
    call(rehearsal, 0, 7)
    rehearsal.step(STEPS[1])
    with pytest.raises(UnsupportedModel, match="layer 0 changes its scale, window or heads"):
        call(rehearsal, 0, 7, scale=0.5)


def random_logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, NUM_TOKENS, 50, generator=torch.Generator().manual_seed(seed))


def steps_of(logits: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """These logits as two steps compute them."""
    rehearsal, steps = Rehearsal("XForCausalLM"), []
    for rows in STEPS:
        requests, positions = rehearsal.step(rows)
        steps.append((logits[requests, positions], requests))
    return steps


def test_equal_logits_pass_and_different_ones_are_refused() -> None:
    expected = random_logits()
    compare("X", steps_of(expected), expected, None, torch.float32)
    compare("X", steps_of(expected + 3), expected, None, torch.float32)  # a constant changes no probability
    with pytest.raises(UnsupportedModel, match=r"^X cannot be served: its logits .* differ by 1\d\d% from"):
        compare("X", steps_of(random_logits(1)), expected, None, torch.float32)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("step", [0, 1])
def test_wrong_logits_of_one_request_in_one_step_are_refused(row: int, step: int) -> None:
    """Attention that loses what the previous step cached, or the positions of one request."""
    expected, wrong = random_logits(), random_logits()
    first = dict(STEPS[0])[row]
    wrong[row, slice(0, first) if step == 0 else slice(first, None)] += torch.linspace(-1, 1, 50)
    with pytest.raises(UnsupportedModel):
        compare("X", steps_of(wrong), expected, None, torch.float32)


def test_one_wrong_token_passes() -> None:
    other = random_logits()  # as if rounding sent one token to another expert
    other[0, 2] += torch.linspace(-1, 1, 50)
    compare("X", steps_of(other), random_logits(), None, torch.float32)


def test_the_tolerance_follows_the_rounding_error_of_transformers() -> None:
    expected = random_logits()
    noisy = expected + 0.2 * random_logits(1)
    compare("X", steps_of(noisy), expected, expected + 0.1 * random_logits(2), torch.bfloat16)
    with pytest.raises(UnsupportedModel):
        compare("X", steps_of(noisy), expected, expected, torch.bfloat16)


def test_nan_logits_pass_only_if_transformers_gives_them_too() -> None:
    nans = torch.full((2, NUM_TOKENS, 50), torch.nan)
    with pytest.raises(UnsupportedModel):
        compare("X", steps_of(nans), random_logits(), None, torch.float32)
    compare("X", steps_of(nans), nans, None, torch.float32)
