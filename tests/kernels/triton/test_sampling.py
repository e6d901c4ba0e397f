"""Sampling on the device gives the same tokens as the CPU's sampler for the same logits."""

import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pagewire.engine.steps import sampler as cpu
from pagewire.engine.steps.rows import Rows
from pagewire.ipc.messages import RowOpen, Sampling, ids_to_bytes
from pagewire.kernels.ops import reference_ops
from pagewire.kernels.triton.noise import exponential, noise_key
from pagewire.kernels.triton.sampling import (
    SamplingColumns,
    best_of_part,
    sample,
    sample_of_parts,
    workspace_sampling,
)

BIG = torch.cuda.is_available()
VOCAB = 151936 if BIG else 5003  # three blocks of logits, the last one of them short
GROUPS = triton.cdiv(VOCAB, 2048) * 8


def _rows(samplings, outputs):
    rows = Rows(num_rows=len(samplings) + 1, max_len=64, block_size=16, vocab_size=VOCAB)
    for i, (sampling, output) in enumerate(zip(samplings, outputs, strict=True)):
        ids = [1, 2, 3, *output]
        rows.open(RowOpen(i, ids_to_bytes(ids), 3, len(ids), ids_to_bytes([i]), sampling))
    return rows


def _columns(rows, device):
    def column(values, dtype):
        return torch.from_numpy(values.astype(dtype)).to(device)

    return SamplingColumns(
        temperature=column(rows.temperature, np.float32),
        top_k=column(rows.top_k, np.int32),
        top_p=column(rows.top_p, np.float32),
        min_p=column(rows.min_p, np.float32),
        seed=column(rows.seed, np.int64),
    )


def _with_gaps(values, device):
    """The same logits in rows that are not contiguous, with NaN between them."""
    padded = torch.full((values.shape[0], values.shape[1] + 13), torch.nan, device=device)
    padded[:, : values.shape[1]] = values
    return padded[:, : values.shape[1]]


def _workspace(rows, vocab, device):
    workspace = workspace_sampling(max_picked=rows, vocab_size=vocab, device=device)
    for tensor in (workspace.block_most, workspace.block_logit, workspace.block_mass, workspace.group_most):
        tensor.fill_(torch.nan)
    for tensor in (workspace.block_token, workspace.groups, workspace.candidates):
        tensor.fill_(2**30)
    return workspace


def _sample(logits, samplings, kind, device, *, outputs=None, picked=None, ends=None, ranks=1):
    """The ids sampled on the device, and those sampled on the CPU. ranks: that have a part of the logits each."""
    rows = _rows(samplings, outputs or [[]] * len(samplings))
    picked = np.arange(len(samplings)) if picked is None else np.array(picked)
    ends = rows.num_ids[picked] if ends is None else np.array(ends)
    sampler = cpu.Sampler(vocab_size=logits.shape[1], device=torch.device("cpu"), ops=reference_ops())
    expected = sampler.sample(logits, rows, picked, ends).tolist()

    def int32(values):
        return torch.from_numpy(np.asarray(values).astype(np.int32)).to(device)

    out = torch.full((len(picked),), -7, dtype=torch.int32, device=device)
    if ranks > 1:
        size, numbers, found = -(-logits.shape[1] // ranks), int32(ends - rows.num_prompt[picked]), []
        for first in range(0, logits.shape[1], size):
            part = _with_gaps(logits[:, first : first + size], device)
            none = int32(np.full(len(picked), -1))
            found.append(
                best_of_part(
                    part,
                    none,
                    int32(picked),
                    numbers,
                    _columns(rows, device),
                    first_token=first,
                    largest_part=size,
                    kind=kind,
                )
            )
        sample_of_parts(out, torch.stack(found), int32(picked), numbers, _columns(rows, device), kind=kind)
        return out.tolist(), expected
    sample(
        out,
        _with_gaps(logits, device),
        torch.full((1, logits.shape[1]), torch.nan, device=device),
        int32(np.full(len(picked), -1)),
        int32(picked),
        int32(ends - rows.num_prompt[picked]),
        _columns(rows, device),
        _workspace(len(picked) + 1, logits.shape[1], device),
        kind=kind,
    )
    return out.tolist(), expected


@triton.jit
def _exponential_kernel(out, seeds, positions, vocab, BLOCK: tl.constexpr):
    row, tokens = tl.program_id(0), tl.arange(0, BLOCK)
    key = noise_key(tl.load(seeds + row), tl.load(positions + row))
    tl.store(out + row * vocab + tokens, exponential(key, tokens), mask=tokens < vocab)


def test_noise_equals_that_of_the_cpu(device):
    seeds = torch.tensor([0, 1, 12345678901, 2**63 - 1, 2**62 + 7], dtype=torch.int64)
    positions = torch.tensor([0, 5, 0, 131071, 2**31 - 2], dtype=torch.int32)
    vocab = 4000
    out = torch.empty(5, vocab, device=device)
    _exponential_kernel[(5,)](out, seeds.to(device), positions.to(device), vocab, BLOCK=4096)
    keys = torch.from_numpy(cpu._keys(seeds.numpy().astype(np.uint64), positions.numpy().astype(np.int64)))
    steps = torch.arange(1, vocab + 1, dtype=torch.int64) * cpu._signed(cpu._STEP)
    expected = cpu._exponential(keys[:, None] + steps)
    torch.testing.assert_close(out.cpu(), expected, atol=0, rtol=4e-7)  # two or three ulps


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_exchange_the_best_tokens_of_their_parts_sample_the_same(device, kind, ranks):
    logits = 3 * torch.randn(9, VOCAB)
    logits[1] = 3.0  # equal logits: the first token counts
    logits[2, VOCAB - 5] = torch.nan
    logits[3] = -torch.inf
    logits[4, : VOCAB // 2] = -torch.inf  # all of the first part
    heats = [0.0] * 9 if kind == "greedy" else [0.0, 0.0, 1.0, 1.0, 0.7, 1.5, 0.0, 1e-7, 100.0]
    samplings = [Sampling(temperature=heat, seed=70 + i) for i, heat in enumerate(heats)]
    sampled, expected = _sample(logits, samplings, kind, device, ranks=ranks)
    assert sampled == expected and len(set(sampled)) > 5


@pytest.mark.parametrize("kind", ["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("vocab", [1, 100, 2048, VOCAB])
def test_greedy_rows(device, kind, vocab):
    logits = torch.randn(6, vocab)
    logits[1] = 3.0  # equal logits: the first token counts
    logits[2, vocab // 2 :] = 7.0
    logits[3] = -torch.inf
    logits[3, vocab - 1] = -5.0
    logits[4] = -3.4e38
    ours, expected = _sample(logits, [Sampling(temperature=0, top_k=3, top_p=0.5)] * 6, kind, device)
    assert ours == expected and ours[1:4] == [0, vocab // 2, vocab - 1]


@pytest.mark.parametrize("kind", ["sampled", "filtered"])
def test_rows_with_a_temperature(device, kind):
    logits = torch.randn(12, VOCAB) * 3
    logits[3] = 0.0
    logits[4] = (logits[4] / 2).to(torch.bfloat16)  # many equal logits
    temperatures = [0.0, 1.0, 0.6, 1.0, 1.3, 1e-7, 1e-5, 0.01, 100.0, 2.0, 1e-30, 0.3]
    samplings = [Sampling(temperature=temperature, seed=i * 2**59 + 3) for i, temperature in enumerate(temperatures)]
    ours, expected = _sample(logits, samplings, kind, device, outputs=[[5] * i for i in range(12)])
    assert ours == expected
    assert ours[5] == logits[5].argmax() and len(set(ours)) > 6


def _filtered(rng, seed):
    return Sampling(
        temperature=rng.choice([0.3, 0.7, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 1, 5, 20, GROUPS, GROUPS + 1, 1000, VOCAB - 1, VOCAB, 2**31 - 1]),
        top_p=rng.choice([1.0, 1.0, 0.999999, 0.95, 0.5, 0.05]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.02, 0.3, 1.0]),
        seed=seed,
    )


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_filtered_rows(device, scale):
    rng = random.Random(int(2 * scale))
    count = 100 if BIG else 9
    logits = torch.randn(count + 2, VOCAB) * scale
    logits[2:6] = logits[2:6].to(torch.bfloat16)  # many equal logits, also where the tail is cut
    samplings = [_filtered(rng, rng.randrange(2**63)) for _ in range(count)]
    samplings += [Sampling(temperature=0), Sampling(seed=9)]
    ours, expected = _sample(logits, samplings, "filtered", device)
    assert ours == expected


@pytest.mark.parametrize(
    ("other_logits", "sampling"),
    [
        # Most of the mass is far below the maximum: by 8, 16, 32 and more.
        (-9.0, Sampling(top_p=0.9)),
        (-17.0, Sampling(top_p=0.99999)),
        (-40.0, Sampling(top_p=0.9999999)),
        (-8.1, Sampling(top_k=GROUPS + 50)),
        (-9.0, Sampling(top_k=GROUPS + 50, top_p=0.3)),
        (-40.0, Sampling(top_k=VOCAB - 5, top_p=0.9)),
        (-200.0, Sampling(top_k=VOCAB - 5)),
        (-torch.inf, Sampling(top_k=VOCAB - 5)),
        (-torch.inf, Sampling(top_k=5, top_p=0.7, min_p=0.1)),
        (-torch.inf, Sampling(top_p=0.7)),
        (0.0, Sampling(top_k=5)),  # all logits are equal, so all tokens stay
        (0.0, Sampling(top_p=0.05)),
        (-0.001, Sampling(top_p=0.999)),
        (-1.0, Sampling(min_p=0.99)),
        (-1.0, Sampling(min_p=0.3)),
    ],
)
def test_flat_and_steep_distributions(device, other_logits, sampling):
    logits = torch.full((2, VOCAB), other_logits)
    logits[:, [77, VOCAB - 1]] = 0.0
    samplings = [Sampling(**{**_fields(sampling), "seed": seed}) for seed in range(2)]
    ours, expected = _sample(logits, samplings, "filtered", device)
    assert ours == expected


def _fields(sampling):
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def test_every_sampling_parameter_has_an_effect(device):
    """Changing a single parameter changes the tokens."""
    logits = (torch.randn(1, VOCAB) * 2).expand(5, -1).contiguous()
    base = [Sampling(seed=seed) for seed in range(5)]
    sampled = [_sample(logits, base, "filtered", device)[0]]
    for changes in ({"temperature": 0.5}, {"top_k": 30}, {"top_p": 0.3}, {"min_p": 0.2}, {"seed": 99}):
        samplings = [Sampling(**{**_fields(sampling), **changes}) for sampling in base]
        ours, expected = _sample(logits, samplings, "filtered", device)
        assert ours == expected
        sampled.append(ours)
    assert len({tuple(ids) for ids in sampled}) == len(sampled)


def test_a_row_is_picked_for_several_positions_and_in_any_order(device):
    samplings = [Sampling(seed=4), Sampling(seed=5, top_k=8), Sampling(temperature=0)]
    picked, ends = [1, 1, 1, 0, 2, 0], [3, 4, 5, 40, 3, 3]
    logits = torch.randn(1, VOCAB).expand(6, -1).contiguous()
    ours, expected = _sample(logits, samplings, "filtered", device, picked=picked, ends=ends)
    assert ours == expected and len(set(ours)) > 3


@pytest.mark.parametrize("kind", ["greedy", "sampled", "filtered"])
def test_rows_with_logits_that_are_not_finite_give_minus_one(device, kind):
    logits = torch.randn(8, VOCAB)
    logits[0, 3] = torch.nan
    logits[1, VOCAB - 1] = torch.inf
    logits[2, 0] = -torch.inf  # is never sampled and is not an error
    logits[3] = -torch.inf
    logits[4] = torch.nan
    logits[5, [2, 2100]] = torch.tensor([torch.inf, torch.nan])
    for sampling in (Sampling(temperature=0), Sampling(seed=3), Sampling(seed=3, top_k=4, top_p=0.9)):
        if kind == "greedy" and sampling.temperature > 0:
            continue
        ours, expected = _sample(logits, [sampling] * 8, kind, device)
        not_finite = [0, 1, 3, 4, 5]
        assert all(ours[i] == -1 for i in not_finite) and all(ours[i] >= 0 for i in (2, 6, 7))
        if kind == "filtered" or not sampling.top_k:
            assert ours == expected


def test_rows_with_edited_logits_sample_from_them(device):
    logits = torch.randn(3, VOCAB, device=device)
    edited = torch.full((2, VOCAB), -torch.inf, device=device)
    edited[0, 123], edited[1, 4567] = 1.0, 2.0
    rows = _rows([Sampling(temperature=0), Sampling(seed=1), Sampling(top_k=3)], [[]] * 3)
    places = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    for kind in ("sampled", "filtered"):
        out = torch.empty(3, dtype=torch.int32, device=device)
        picked, positions = torch.arange(3, dtype=torch.int32, device=device), torch.zeros_like(out)
        workspace = _workspace(3, VOCAB, device)
        sample(out, logits, edited, places, picked, positions, _columns(rows, device), workspace, kind=kind)
        assert out[0] == 4567 and out[2] == 123 and out[1] not in (123, 4567)


def test_a_row_samples_the_same_in_any_batch(device):
    rng = random.Random(2)
    logits = (torch.randn(6, VOCAB) * 2).to(torch.bfloat16).float()
    samplings = [_filtered(rng, rng.randrange(2**63)) for _ in range(6)]
    together = _sample(logits, samplings, "filtered", device)[0]
    for i in range(6):
        assert _sample(logits[i : i + 1], [samplings[i]], "filtered", device)[0] == [together[i]]
