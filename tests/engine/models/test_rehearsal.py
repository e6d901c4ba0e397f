"""What is seen of a model that calls attention in ways which a paged cache cannot answer."""

import re

import pytest
import torch

from pagewire.engine.models.rehearsal import NUM_TOKENS, STEPS, Rehearsal, compare
from pagewire.errors import UnsupportedModel


def call(rehearsal: Rehearsal, layer: int, num: int, *, num_keys: int | None = None, scale: float = 0.25) -> None:
    kv = torch.randn(num if num_keys is None else num_keys, 2, 16)
    rehearsal.forward(layer, torch.randn(num, 4, 16), kv, kv, scale=scale)


def test_layers_may_come_in_any_order() -> None:
    rehearsal = Rehearsal("XForCausalLM")
    for rows in STEPS:
        requests, _ = rehearsal.step(rows)
        for layer in (2, 0, 1):
            call(rehearsal, layer, len(requests))
        rehearsal.finish(3)
    assert {(c.num_heads, c.num_kv_heads, c.head_dim) for c in rehearsal.calls.values()} == {(4, 2, 16)}


def test_a_step_goes_on_where_the_one_before_has_cut() -> None:
    rehearsal = Rehearsal("XForCausalLM")
    found = [rehearsal.step(rows) for rows in STEPS]
    at = [(r, p) for requests, positions in found for r, p in zip(requests.tolist(), positions.tolist(), strict=True)]
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
def test_a_step_that_is_refused(calls: list[tuple[int, dict[str, int]]], reason: str) -> None:
    rehearsal = Rehearsal("XForCausalLM")
    rehearsal.step(STEPS[0])
    with pytest.raises(UnsupportedModel, match=f"^XForCausalLM cannot be served: {re.escape(reason)}"):
        for layer, how in calls:
            call(rehearsal, layer, 7, num_keys=how.get("num_keys"))
        rehearsal.finish(2)


def test_what_changes_from_step_to_step_is_refused() -> None:
    rehearsal = Rehearsal("XForCausalLM")
    rehearsal.step(STEPS[0])
    call(rehearsal, 0, 7)
    rehearsal.step(STEPS[1])
    with pytest.raises(UnsupportedModel, match="layer 0 changes its scale, window or heads"):
        call(rehearsal, 0, 7, scale=0.5)


def draw(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, NUM_TOKENS, 50, generator=torch.Generator().manual_seed(seed))


def steps_of(logits: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """These logits as two steps compute them."""
    rehearsal, found = Rehearsal("XForCausalLM"), []
    for rows in STEPS:
        requests, positions = rehearsal.step(rows)
        found.append((logits[requests, positions], requests))
    return found


def test_equal_logits_pass_and_others_do_not() -> None:
    expected = draw()
    compare("X", steps_of(expected), expected, None, torch.float32)
    compare("X", steps_of(expected + 3), expected, None, torch.float32)  # no token is likelier
    with pytest.raises(UnsupportedModel, match=r"^X cannot be served: its logits .* differ by 1\d\d% from"):
        compare("X", steps_of(draw(1)), expected, None, torch.float32)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("step", [0, 1])
def test_one_part_that_is_wrong_is_enough(row: int, step: int) -> None:
    """As with an attention that loses what the step before has cached, or the positions of one request."""
    expected, wrong = draw(), draw()
    first = dict(STEPS[0])[row]
    wrong[row, slice(0, first) if step == 0 else slice(first, None)] += torch.linspace(-1, 1, 50)
    with pytest.raises(UnsupportedModel):
        compare("X", steps_of(wrong), expected, None, torch.float32)


def test_one_token_that_went_to_another_expert_is_not() -> None:
    other = draw()
    other[0, 2] += torch.linspace(-1, 1, 50)
    compare("X", steps_of(other), draw(), None, torch.float32)


def test_rounding_counts_by_what_it_does_to_transformers_itself() -> None:
    expected = draw()
    noisy = expected + 0.2 * draw(1)
    compare("X", steps_of(noisy), expected, expected + 0.1 * draw(2), torch.bfloat16)
    with pytest.raises(UnsupportedModel):
        compare("X", steps_of(noisy), expected, expected, torch.bfloat16)


def test_numbers_that_are_none() -> None:
    spoilt = torch.full((2, NUM_TOKENS, 50), torch.nan)
    with pytest.raises(UnsupportedModel):
        compare("X", steps_of(spoilt), draw(), None, torch.float32)
    compare("X", steps_of(spoilt), spoilt, None, torch.float32)
