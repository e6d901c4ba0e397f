"""Sampling: against a plain reference for one row, against transformers, and its statistics."""

import math
import random

import numpy as np
import pytest
import torch
import transformers

from pagewire.engine.steps.rows import Rows
from pagewire.engine.steps.sampler import Sampler
from pagewire.ipc.messages import RowOpen, Sampling, StepPlan, ids_to_bytes
from pagewire.kernels.ops import reference_ops

VOCAB = 50


def _rows(samplings, *, prompts=None, outputs=None):
    """Rows with these prompts and outputs, ready to sample their next token."""
    rows = Rows(num_rows=len(samplings), max_len=64, block_size=16, vocab_size=VOCAB)
    for i, sampling in enumerate(samplings):
        prompt = prompts[i] if prompts else [1, 2, 3]
        output = outputs[i] if outputs else []
        ids = prompt + output
        rows.open(RowOpen(i, ids_to_bytes(ids), len(prompt), len(ids), ids_to_bytes([i]), sampling))
    return rows


def _sample(logits, samplings, **state):
    sampler = Sampler(vocab_size=logits.shape[1], device=torch.device("cpu"), ops=reference_ops())
    before = logits.clone()
    rows = _rows(samplings, **state)
    ids = sampler.sample(logits, rows, np.arange(len(samplings)), rows.num_ids[: len(samplings)])
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the raw logits are still needed for logprobs"
    return ids.tolist()


def _masked(logits, samplings, masks):
    """One sampled id per row; masks: row → its allowed tokens."""
    rows = _rows(samplings)
    all_rows, nothing = np.arange(len(samplings)), b""
    bits = b"".join(sum(1 << t for t in tokens).to_bytes(8, "little") for tokens in masks.values())
    planned, masked = ids_to_bytes(all_rows.tolist()), ids_to_bytes(list(masks))
    rows.mask(StepPlan(0, (), nothing, nothing, planned, nothing, nothing, masked_rows=masked, masks=bits))
    sampler = Sampler(vocab_size=VOCAB, device=torch.device("cpu"), ops=reference_ops())
    return rows, sampler.sample(logits, rows, all_rows, rows.num_ids[all_rows]).tolist()


def test_only_allowed_tokens_are_sampled():
    torch.manual_seed(0)
    greedy, hot = Sampling(temperature=0), Sampling(temperature=2.0, top_k=30, top_p=0.9, min_p=0.001, seed=1)
    liked = Sampling(temperature=0, logit_bias={3: 90.0, 9: 50.0}, repetition_penalty=1.5)
    few = Sampling(temperature=1.5, allowed_token_ids=(1, 7, 49))
    for _ in range(20):
        logits = torch.randn(6, VOCAB) * 5
        masks = {0: [4, 33], 1: [0, 49, 12], 2: [9, 10], 3: [7, 8], 5: [2]}
        _, ids = _masked(logits, [greedy, hot, liked, few, few, few], masks)
        assert ids[0] == max([4, 33], key=lambda token: logits[0, token]) and ids[1] in masks[1]
        assert ids[2:4] == [9, 7] and ids[4] in (1, 7, 49)
        assert ids[5] == -1  # the mask and allowed_token_ids leave no token


def test_a_mask_applies_to_one_step_and_row():
    greedy, logits = Sampling(temperature=0), torch.randn(2, VOCAB)
    rows, ids = _masked(logits, [greedy, greedy], {1: [5]})
    assert ids == [int(logits[0].argmax()), 5]
    nothing = b""
    rows.mask(StepPlan(1, (), nothing, nothing, ids_to_bytes([0, 1]), nothing, nothing))
    assert not rows.is_masked.any() and not rows.masks
    rows.open(RowOpen(1, ids_to_bytes([1]), 1, 0, nothing, Sampling(allowed_token_ids=(6,))))
    rows.mask(StepPlan(2, (), nothing, nothing, ids_to_bytes([1]), nothing, nothing))
    assert rows.is_masked.tolist() == [False, True]
    rows.open(RowOpen(1, ids_to_bytes([1]), 1, 0, nothing, greedy))
    rows.mask(StepPlan(3, (), nothing, nothing, ids_to_bytes([1]), nothing, nothing))
    assert not rows.is_masked.any()


def _splitmix64(state):
    """The next number of Vigna's splitmix64.c after a state."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _reference(logits, sampling, output_position):
    """The definition of sampling, token by token in plain Python."""
    scaled = [(value - max(logits)) / max(sampling.temperature, 1e-5) for value in logits]
    kept = [value >= (math.log(sampling.min_p) if sampling.min_p else -math.inf) for value in scaled]
    if sampling.top_k:
        kth = sorted(scaled, reverse=True)[min(sampling.top_k, len(scaled)) - 1]
        kept = [k and value >= kth for k, value in zip(kept, scaled, strict=True)]
    weights = [math.exp(value) if k else 0.0 for k, value in zip(kept, scaled, strict=True)]
    mass = 0.0
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        kept[i] = kept[i] and mass < sampling.top_p
        mass += weights[i] / sum(weights)

    def noise(token):
        key = _splitmix64(_splitmix64(sampling.seed) + output_position * 0x9E3779B97F4A7C15)
        bits = _splitmix64(key + token * 0x9E3779B97F4A7C15) >> 33
        return -math.log(-math.log1p(-min((bits + 0.5) * 2**-31, 1 - 2**-24)))

    return max((scaled[i] + noise(i), i) for i in range(len(logits)) if kept[i])[1]


def _random_sampling(rng, seed):
    return Sampling(
        temperature=rng.choice([0.3, 0.7, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 1, 5, 20, 49, 50, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.05]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
        seed=seed,
    )


def test_end_tokens_are_not_sampled_before_min_len():
    """Positions before `min_len` sample as if the end tokens' logits were -inf; others are unchanged."""
    rng = random.Random(4)
    sampler = Sampler(vocab_size=VOCAB, device=torch.device("cpu"), ops=reference_ops())
    num_hit = 0
    for seed in range(200):
        sampling = rng.choice((_random_sampling(rng, seed), Sampling(temperature=0)))
        ends, num_output, least = rng.sample(range(VOCAB), 5), rng.randrange(4), rng.randrange(4)
        rows = Rows(num_rows=1, max_len=64, block_size=16, vocab_size=VOCAB)
        ids = ids_to_bytes([1, 2, 3] + [4] * num_output)
        rows.open(RowOpen(0, ids, 3, 3 + num_output, ids_to_bytes([0]), sampling, 3 + least, ids_to_bytes(ends)))
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
        logits[0, ends] += 2
        picked, at = np.array([0]), rows.num_ids[:1]
        assert rows.lift_minimum(picked, at) == ([0] if 0 < least + 3 <= 3 + num_output else [])
        free = logits[0].tolist()
        if num_output < least:
            free = [-math.inf if i in ends else value for i, value in enumerate(free)]
        sampled = int(sampler.sample(logits, rows, picked, at)[0])
        if sampling.temperature:
            assert sampled == _reference(free, sampling, num_output), seed
        else:
            assert sampled == max(range(VOCAB), key=lambda i: free[i]), seed
        num_hit += sampled in ends
    assert 20 < num_hit < 180, "some samples should be end tokens and some not"


def test_samples_agree_with_the_definition():
    rng = random.Random(1)
    torch.manual_seed(1)
    logits = torch.randn(400, VOCAB) * 3
    samplings = [_random_sampling(rng, rng.randrange(2**63)) for _ in range(400)]
    outputs = [[7] * rng.randrange(20) for _ in range(400)]
    expected = [
        _reference(row, s, len(output)) for row, s, output in zip(logits.tolist(), samplings, outputs, strict=True)
    ]
    assert _sample(logits, samplings, outputs=outputs) == expected


def test_a_row_samples_the_same_alone_and_in_a_batch():
    rng = random.Random(2)
    torch.manual_seed(2)
    vocab = 3000  # too many for top_p to sort them all at once
    logits = (torch.randn(64, vocab) * 2).to(torch.bfloat16).float()  # bfloat16: many equal logits
    samplings = [_random_sampling(rng, rng.randrange(2**63)) for _ in range(60)] + [Sampling(temperature=0)] * 4
    together = _sample(logits, samplings)
    assert [_sample(logits[i : i + 1], [samplings[i]])[0] for i in range(64)] == together


def test_top_p_may_keep_more_than_the_256_best_tokens():
    logits = torch.zeros(1, 5000)  # a flat distribution: the best 256 hold 5 % of it
    logits[0, 0] = 1e-3
    sampled = {_sample(logits, [Sampling(top_p=0.999, seed=seed)])[0] for seed in range(300)}
    assert len(sampled) > 250


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.6), Sampling(top_k=7), Sampling(top_p=0.8), Sampling(min_p=0.1)]
)
def test_frequencies_follow_the_softmax(sampling):
    torch.manual_seed(3)
    logits = torch.randn(1, 20)
    samples = 8000
    each = [Sampling(**{**_fields(sampling), "seed": seed}) for seed in range(samples)]
    counts = np.bincount(_sample(logits.expand(samples, -1).contiguous(), each), minlength=20)

    probs = (logits[0] / sampling.temperature).softmax(-1)
    if sampling.top_k:
        probs[probs < probs.topk(sampling.top_k).values[-1]] = 0
    if sampling.min_p:
        probs[probs < sampling.min_p * probs.max()] = 0
    ordered, order = probs.sort(descending=True)
    probs[order[(ordered.cumsum(-1) - ordered) >= sampling.top_p]] = 0
    expected = (probs / probs.sum()).numpy() * samples
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom), "more than four standard deviations"


def test_positions_of_one_request_are_independent():
    samples = 6000
    logits = torch.zeros(samples, 4)
    ids = np.array(
        _sample(
            logits,
            [Sampling(seed=i // 60) for i in range(samples)],
            prompts=[[1]] * samples,
            outputs=[[1] * (i % 60) for i in range(samples)],
        )
    )
    pairs = np.bincount(ids[:-1] * 4 + ids[1:], minlength=16)
    assert ((pairs - samples / 16) ** 2 / (samples / 16)).sum() < 15 + 4 * math.sqrt(30)


def _fields(sampling):
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


@pytest.mark.parametrize("temperature", [1e-30, 100.0])
def test_extreme_temperatures_sample_the_best_or_nearly_uniformly(temperature):
    torch.manual_seed(4)
    logits = torch.randn(1, VOCAB) * 30
    sampled = {_sample(logits, [Sampling(temperature=temperature, seed=seed)])[0] for seed in range(100)}
    assert sampled == {int(logits.argmax())} if temperature < 1 else len(sampled) > 30


def test_repetition_penalty_is_that_of_transformers():
    torch.manual_seed(5)
    logits = torch.randn(6, VOCAB)
    prompts = [torch.randint(VOCAB, (5,)).tolist() for _ in range(6)]
    outputs = [torch.randint(VOCAB, (3,)).tolist() for _ in range(6)]
    sampling = Sampling(temperature=0, repetition_penalty=1.7)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    expected = [
        int(processor(torch.tensor([p + o]), row[None].clone()).argmax())
        for p, o, row in zip(prompts, outputs, logits, strict=True)
    ]
    assert _sample(logits, [sampling] * 6, prompts=prompts, outputs=outputs) == expected
    assert expected != logits.argmax(-1).tolist(), "the penalty should matter here"


def test_presence_and_frequency_count_the_output_only():
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 5, 6, 7]] = torch.tensor([3.0, 2.9, 2.5, 2.45])
    state = {"prompts": [[7, 7, 7]], "outputs": [[4, 4, 5]]}
    assert _sample(logits, [Sampling(temperature=0)], **state) == [4]
    assert _sample(logits, [Sampling(temperature=0, frequency_penalty=0.3)], **state) == [5]  # 2.4, 2.6, 2.5
    assert _sample(logits, [Sampling(temperature=0, presence_penalty=1.0)], **state) == [6]
    assert _sample(logits, [Sampling(temperature=0, presence_penalty=-1.0)], **state) == [4]


def test_bias_comes_before_penalties():
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 1.0
    biased = Sampling(temperature=0, logit_bias={3: 2.0, 10_000: 50.0}, repetition_penalty=4.0)
    assert _sample(logits, [biased], prompts=[[1]]) == [3]
    assert _sample(logits, [biased], prompts=[[3]]) == [9]  # (0 + 2) / 4 < 1
    banned = Sampling(logit_bias={i: -100.0 for i in range(VOCAB) if i != 20}, seed=1)
    assert _sample(logits, [banned]) == [20]


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0])
def test_extreme_parameters_do_not_affect_other_rows(temperature):
    torch.manual_seed(8)
    logits = torch.randn(6, VOCAB)
    extreme = [
        Sampling(temperature, top_p=1e-300, min_p=1e-300, logit_bias={3: 1e300}),
        Sampling(temperature, top_p=0.5, repetition_penalty=1e-300),
        Sampling(temperature, top_k=2, repetition_penalty=100.0, logit_bias={i: -1e300 for i in range(VOCAB)}),
        Sampling(temperature, top_p=1e-300),
        Sampling(temperature, min_p=1.0),
    ]
    healthy = Sampling(seed=5)
    ids = _sample(logits, [*extreme, healthy])
    assert ids[0] == 3
    assert ids[3:5] == logits.argmax(-1).tolist()[3:5]
    assert all(0 <= token < VOCAB for token in ids)
    assert ids[5] == _sample(logits[5:], [healthy])[0]


def test_logit_bias_affects_only_its_row():
    torch.manual_seed(6)
    logits = torch.randn(5, VOCAB)
    plain = [Sampling(temperature=0), Sampling(seed=4), Sampling(seed=5, top_k=3), Sampling(seed=6)]
    edited = Sampling(seed=7, logit_bias={11: 100.0})
    assert _sample(logits, [*plain[:2], edited, *plain[2:]])[2] == 11
    without = _sample(logits[[0, 1, 3, 4]], plain)
    assert [token for i, token in enumerate(_sample(logits, [*plain[:2], edited, *plain[2:]])) if i != 2] == without


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_only_their_row(bad):
    torch.manual_seed(7)
    logits = torch.randn(4, VOCAB)
    samplings = [Sampling(temperature=0), Sampling(seed=1), Sampling(seed=2, top_p=0.5), Sampling(temperature=0)]
    healthy = _sample(logits, samplings)
    logits[1, 3] = bad
    logits[2, 4] = bad
    logits[3] = -math.inf
    assert _sample(logits, samplings) == [healthy[0], -1, -1, -1]
