"""Log-probabilities on the device against those of the CPU runner."""

import numpy as np
import pytest
import torch

from pagewire.engine.steps.logprobs import best_logprobs
from pagewire.kernels.triton.logprobs import logprobs, workspace_logprobs


def _logprobs(logits, asking, chosen, num_best, width=21):
    """(ids, values) that the kernels write; -7 and NaN where they write nothing."""
    device = logits.device
    workspace = workspace_logprobs(max_asking=len(asking) + 2, vocab_size=logits.shape[1], device=device)
    workspace.block_most.fill_(torch.nan)
    workspace.block_mass.fill_(torch.nan)
    workspace.best.fill_(2**31 - 1)
    ids = torch.full((len(asking), width), -7, dtype=torch.int32, device=device)
    values = torch.full((len(asking), width), torch.nan, device=device)
    places = torch.tensor(asking, dtype=torch.int32, device=device)
    logprobs(ids, values, logits, places, chosen, workspace, num_best=num_best)
    assert (ids[:, 1 + num_best :] == -7).all() and values[:, 1 + num_best :].isnan().all()
    return ids[:, : 1 + num_best].cpu().numpy(), values[:, : 1 + num_best].cpu().numpy()


def _logits(rows, vocab, device):
    """Random logits in rows that are not contiguous, with NaN between them."""
    logits = torch.full((rows, vocab + 5), torch.nan, device=device)
    logits[:, :vocab] = torch.randn(rows, vocab, device=device) * 4
    return logits[:, :vocab]


@pytest.mark.parametrize("num_best", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [20, 2047, 2048, 5003])
def test_logprobs_equal_those_of_the_cpu(device, vocab, num_best):
    logits = _logits(6, vocab, device)
    chosen = torch.randint(0, vocab, (6,), dtype=torch.int32, device=device)
    asking = [4, 0, -1, 5]
    real = [0, 1, 3]
    ids, values = _logprobs(logits, asking, chosen, num_best)
    picked = [asking[i] for i in real]
    expected_ids, expected = best_logprobs(logits[picked], chosen[picked].long(), num_best)
    np.testing.assert_array_equal(ids[real], expected_ids)
    np.testing.assert_allclose(values[real], expected, rtol=1e-6, atol=2e-6)
    assert (ids[2] == -7).all() and np.isnan(values[2]).all(), "a row without log-probabilities is not written"


def test_the_best_token_has_the_same_value_as_the_chosen_token(device):
    logits = _logits(3, 5003, device)
    chosen = logits.argmax(dim=-1).int()
    ids, values = _logprobs(logits, [0, 1, 2], chosen, 5)
    assert (ids[:, 0] == ids[:, 1]).all() and (values[:, 0] == values[:, 1]).all()


def test_equal_logits_are_in_the_order_of_their_ids(device):
    logits = torch.zeros(1, 5003, device=device)
    logits[0, [4999, 17, 2500]] = 3.0
    ids, values = _logprobs(logits, [0], torch.zeros(1, dtype=torch.int32, device=device), 6)
    assert ids.tolist() == [[0, 17, 2500, 4999, 0, 1, 2]] and values[0, 1] == values[0, 3] > values[0, 4]


def test_tokens_with_probability_zero(device):
    """They have the value -9999 for -inf, and distinct ids."""
    logits = torch.full((2, 5003), -torch.inf, device=device)
    logits[0, 3000], logits[0, 7], logits[1, 0] = 1.0, 2.0, 5.0
    chosen = torch.tensor([9, 0], dtype=torch.int32, device=device)
    ids, values = _logprobs(logits, [0, 1], chosen, 4)
    assert ids[0].tolist() == [9, 7, 3000, 0, 1] and ids[1].tolist() == [0, 0, 1, 2, 3]
    np.testing.assert_allclose(values[0], [-9999, -0.3132617, -1.3132617, -9999, -9999], rtol=1e-6)
    np.testing.assert_allclose(values[1], [0, 0, -9999, -9999, -9999], rtol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_with_logits_that_are_not_finite(device, value):
    logits = _logits(3, 5003, device)
    chosen = torch.tensor([5, -1, 2], dtype=torch.int32, device=device)
    expected = _logprobs(logits, [2], chosen, 3)
    logits[0, 4000] = value
    ids, values = _logprobs(logits, [0, 1, 2], chosen, 3)
    assert (values[0] == -9999).all() and ((ids[0] >= 0) & (ids[0] < 5003)).all() and len(set(ids[0, 1:])) == 3
    assert ids[1, 0] == -1 and values[1, 0] == -9999 and (values[1, 1:] > -9999).all(), "no token was chosen"
    assert (ids[2] == expected[0][0]).all() and (values[2] == expected[1][0]).all()
