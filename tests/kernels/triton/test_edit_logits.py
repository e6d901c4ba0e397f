"""Edited logits, and the tokens sampled from them, against those of the CPU's sampler."""

import random

import numpy as np
import pytest
import torch

from pagewire.engine.steps import sampler as cpu
from pagewire.engine.steps.rows import Rows
from pagewire.ipc.messages import RowOpen, Sampling, ids_to_bytes
from pagewire.kernels.ops import reference_ops
from pagewire.kernels.triton.edit_logits import EditColumns, count_sampled, edit_logits
from pagewire.kernels.triton.sampling import SamplingColumns, sample, workspace_sampling

BIG = torch.cuda.is_available()
VOCAB = 128256 if BIG else 5003


def _rows(samplings, prompts, outputs):
    rows = Rows(num_rows=len(samplings), max_len=600, block_size=16, vocab_size=VOCAB)
    for i, (sampling, prompt, output) in enumerate(zip(samplings, prompts, outputs, strict=True)):
        ids = prompt + output
        rows.open(RowOpen(i, ids_to_bytes(ids), len(prompt), len(ids), ids_to_bytes([i]), sampling))
    return rows


def _columns(rows, device):
    """The columns that a host writes. Rows with penalties have histories of their own, in reverse order."""
    samplings = rows.sampling
    penalised = [i for i, s in enumerate(samplings) if s.repetition_penalty != 1 or _counts(s)]
    history = np.full(len(samplings), -1, np.int32)
    history[penalised] = np.arange(len(penalised))[::-1]
    seen = np.zeros((len(penalised) + 1, -(-VOCAB // 32) * 32), np.uint8)
    counts = np.zeros((len(penalised) + 1, VOCAB), np.int16)
    for i in penalised:
        ids, num_prompt = rows.ids[i, : rows.num_ids[i]], rows.num_prompt[i]
        seen[history[i], ids[:num_prompt]] = 1
        np.add.at(counts[history[i]], ids[num_prompt:], 1)
    biases = [list((s.logit_bias or {}).items()) for s in samplings]
    firsts = np.cumsum([0] + [len(bias) for bias in biases])
    entries = [entry for bias in biases for entry in bias] or [(0, 0.0)]

    def column(values, dtype):
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.array(values).astype(dtype)).to(device)

    return EditColumns(
        repetition_penalty=column([s.repetition_penalty for s in samplings], np.float32),
        presence_penalty=column([s.presence_penalty for s in samplings], np.float32),
        frequency_penalty=column([s.frequency_penalty for s in samplings], np.float32),
        history=column(history, np.int32),
        prompt_bits=column(np.packbits(seen, axis=1, bitorder="little").view("<i4"), np.int32),
        output_counts=column(counts, np.int16),
        bias_first=column(firsts[:-1], np.int32),
        bias_len=column([len(bias) for bias in biases], np.int32),
        bias_ids=column([token for token, _ in entries], np.int32),
        bias_values=column([value for _, value in entries], np.float32),
    )


def _counts(sampling):
    return bool(sampling.presence_penalty or sampling.frequency_penalty)


def _edit(logits, rows, columns, *, places, grammars=None, grammar_bits=None):
    """The edited logits [places, vocab], NaN where nothing was written."""
    device, picks = logits.device, logits.shape[0]
    edited = torch.full((picks + 1, VOCAB + 3), torch.nan, device=device)[:, :VOCAB]
    if grammars is None:
        grammars, grammar_bits = [-1] * picks, torch.zeros((1, -(-VOCAB // 32)), dtype=torch.int32, device=device)

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    before = logits.clone()
    edit_logits(edited, logits, int32(places), int32(range(picks)), columns, int32(grammars), grammar_bits)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return edited


def _random_sampling(rng):
    bias = {rng.randrange(VOCAB + 50): rng.uniform(-20, 20) for _ in range(rng.choice([0, 1, 3, 300]))}
    return Sampling(
        temperature=rng.choice([0.0, 0.8]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2, 0.7]),
        presence_penalty=rng.choice([0.0, 0.5, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.1, 2.0]),
        logit_bias=bias or None,
        seed=rng.randrange(2**63),
    )


@pytest.fixture
def case(device):
    """(logits, rows, columns) of rows with and without edits."""
    rng = random.Random(7)
    samplings = [_random_sampling(rng) for _ in range(12)]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 200))] for _ in samplings]
    outputs = [[rng.choice([5, VOCAB - 1, rng.randrange(VOCAB)]) for _ in range(rng.randrange(90))] for _ in samplings]
    samplings[3] = Sampling(logit_bias={7: 1e300, VOCAB - 1: -1e300, 2047: 3.0, 2048: -3.0, VOCAB: 5.0})
    samplings[4] = Sampling(logit_bias={7: 1e300}, repetition_penalty=1e-30, presence_penalty=1.0)
    outputs[4] = [7, 8, 7]
    rows = _rows(samplings, prompts, outputs)
    return torch.randn(12, VOCAB + 9, device=device)[:, :VOCAB] * 5, rows, _columns(rows, device)


def test_edited_logits_equal_those_of_the_cpu(case):
    logits, rows, columns = case
    places = [5, 3, -1, 0, 1, 2, 4, 6, 7, 8, 9, 10]
    edited = _edit(logits, rows, columns, places=places)
    for i, place in enumerate(places):
        if place >= 0:
            expected = logits[i].cpu().clone()
            cpu._edit(expected, rows.sampling[i], rows.bias(i), rows.ids[i, : rows.num_ids[i]], int(rows.num_prompt[i]))
            torch.testing.assert_close(edited[place].cpu(), expected, atol=1e-6 if BIG else 0, rtol=1e-6 if BIG else 0)
    assert edited[11:].isnan().all(), "rows without a place are not written"


def test_tokens_sampled_from_edited_logits_equal_those_of_the_cpu(case):
    logits, rows, columns = case
    device, picked = logits.device, np.arange(12)
    sampler = cpu.Sampler(vocab_size=VOCAB, device=torch.device("cpu"), ops=reference_ops())
    expected = sampler.sample(logits.cpu(), rows, picked, rows.num_ids[:12])

    places = np.where(rows.edits_logits, picked, -1).tolist()
    edited = _edit(logits, rows, columns, places=places)

    def column(values, dtype):
        return torch.from_numpy(np.asarray(values).astype(dtype)).to(device)

    out = torch.empty(12, dtype=torch.int32, device=device)
    sample(
        out,
        logits,
        edited,
        column(places, np.int32),
        column(picked, np.int32),
        column(rows.num_ids - rows.num_prompt, np.int32),
        SamplingColumns(
            temperature=column(rows.temperature, np.float32),
            top_k=column(rows.top_k, np.int32),
            top_p=column(rows.top_p, np.float32),
            min_p=column(rows.min_p, np.float32),
            seed=column(rows.seed, np.int64),
        ),
        workspace_sampling(max_picked=12, vocab_size=VOCAB, device=device),
        kind="filtered",
    )
    assert out.tolist() == expected.tolist()


def test_tokens_that_a_grammar_forbids_get_minus_infinity(device):
    logits = torch.randn(3, VOCAB, device=device)
    samplings = [Sampling(), Sampling(logit_bias={40: 100.0, 41: 50.0}), Sampling()]
    rows = _rows(samplings, [[1]] * 3, [[]] * 3)
    allowed = np.zeros((2, -(-VOCAB // 32) * 32), np.uint8)
    allowed[1, [0, 31, 32, 41, 2047, 2048, VOCAB - 1]] = 1
    bits = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view("<i4").copy()).to(device)
    edited = _edit(logits, rows, _columns(rows, device), places=[0, 1, 2], grammars=[1, 1, -1], grammar_bits=bits)
    expected = logits.clone()
    expected[1, 40] += 100
    expected[1, 41] += 50
    expected[:2][:, torch.from_numpy(allowed[1, :VOCAB] == 0).to(device)] = -torch.inf
    assert torch.equal(edited[:3], expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_becomes_nan(device, value):
    """Even if the bias and the grammar apply to that token."""
    logits = torch.randn(1, VOCAB, device=device)
    logits[0, 2500] = value
    rows = _rows([Sampling(logit_bias={2500: -1e300})], [[1]], [[]])
    forbid = torch.zeros((1, -(-VOCAB // 32)), dtype=torch.int32, device=device)
    edited = _edit(logits, rows, _columns(rows, device), places=[0], grammars=[0], grammar_bits=forbid)
    assert edited[0].isnan().nonzero().tolist() == [[2500]]


def test_logits_of_minus_infinity_stay(device):
    logits = torch.full((1, VOCAB), -torch.inf, device=device)
    logits[0, 9] = 1.0
    rows = _rows([Sampling(logit_bias={9: -5.0, 10: 100.0}, presence_penalty=1.0)], [[1]], [[9, 9]])
    edited = _edit(logits, rows, _columns(rows, device), places=[0])
    assert edited[0, 9] == -5 and edited[0].isneginf().sum() == VOCAB - 1


def test_sampled_tokens_are_counted(device):
    samplings = [Sampling(presence_penalty=1.0), Sampling(), Sampling(frequency_penalty=1.0)]
    rows = _rows(samplings, [[1]] * 3, [[4], [], [4, 4]])
    columns = _columns(rows, device)  # histories: row 0 has 1, row 2 has 0
    columns.output_counts[0, 8] = 2**15 - 1

    def count(ids, picked):
        count_sampled(*(torch.tensor(values, dtype=torch.int32, device=device) for values in (ids, picked)), columns)

    count([4, 6, 8], [0, 1, 2])
    count([-1, VOCAB - 1], [0, 2])
    counts = columns.output_counts
    assert counts[1, 4] == 2 and counts[0, 4] == 2 and counts[0, VOCAB - 1] == 1
    assert counts[0, 8] == 2**15 - 1, "the count does not overflow"
    assert counts.sum() == 2 + 2 + 1 + 2**15 - 1 and (counts[2] == 0).all()
