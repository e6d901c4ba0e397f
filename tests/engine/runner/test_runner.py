"""What a runner guarantees besides greedy tokens: seeds, log-probabilities, failures, memory."""

import random

import checkpoints
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import RowOpen, Sampling, StepPlan, bytes_to_ids, ids_to_bytes


def _prompts(n, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(rng.choice([3, 20, 70]))] for _ in range(n)]


def _sampling(i):
    return Sampling(temperature=1.3, seed=1000 + i, top_p=0.9 if i % 2 else 1.0, frequency_penalty=0.5 * (i % 3))


def test_seeded_requests_do_not_depend_on_the_batch(checkpoint, driver, make_request):
    served = driver(checkpoint("llama"))
    prompts = _prompts(12)

    def run(indices, **how):
        requests = [make_request(prompts[i], sampling=_sampling(i), max_new=12) for i in indices]
        served.run(requests, **how)
        return {i: request.output for i, request in zip(indices, requests, strict=True)}

    together = run(range(12), rows=8)
    assert run([*reversed(range(12))], chunk=7, rows=5, seed=3) == together
    for i in range(0, 12, 3):
        assert run([i], rows=1, chunk=2048)[i] == together[i]


def test_a_preempted_request_continues_with_the_same_tokens(checkpoint, driver, make_request):
    """After a preemption the core opens a row again with prompt and output; positions still count from num_prompt."""
    served = driver(checkpoint("llama"))
    request = make_request(_prompts(1)[0], sampling=_sampling(4), max_new=12)
    served.run([request])
    ids = request.prompt + request.output[:5]
    runner = served.runner
    reopened = RowOpen(3, ids_to_bytes(ids), len(request.prompt), 0, ids_to_bytes(range(10)), request.sampling)
    tokens = []
    for step in range(7):
        count = len(ids) if step == 0 else 1
        runner.launch(_plan([3], [count], open=(reopened,) if step == 0 else ()))
        tokens += bytes_to_ids(runner.collect().ids)
    assert tokens == request.output[5:]


def test_computed_positions_are_read_from_the_cache(checkpoint, driver, make_request):
    served = driver(checkpoint("mistral"))
    prompt = _prompts(1, seed=2)[0] + list(range(3, 100))
    request = make_request(prompt, max_new=1)
    served.run([request])
    blocks = ids_to_bytes(request.blocks)
    runner = served.runner
    runner.launch(
        _plan([0], [len(prompt) - 32], open=(RowOpen(0, ids_to_bytes(prompt), len(prompt), 32, blocks, Sampling(0)),))
    )
    assert list(bytes_to_ids(runner.collect().ids)) == request.output


def _plan(rows, counts, open=(), sample=None):
    return StepPlan(
        step=0,
        open=open,
        grow_rows=b"",
        grow_blocks=b"",
        rows=ids_to_bytes(rows),
        counts=ids_to_bytes(counts),
        sample=bytes([1] * len(rows)) if sample is None else sample,
    )


@pytest.mark.parametrize("kind", ["qwen3", "granite"])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(kind, checkpoint, driver, make_request, logprob_arrays):
    folder = checkpoint(kind)
    model = checkpoints.load_reference(folder)
    served = driver(folder)
    wanted = [None, 0, 3, 20]
    requests = [
        make_request(
            prompt, sampling=Sampling(temperature=t, seed=i, logprobs=wanted[i % 4], repetition_penalty=1.5), max_new=5
        )
        for i, (prompt, t) in enumerate(zip(_prompts(8), [0, 2.0] * 4, strict=True))
    ]
    served.run(requests)
    for request in requests:
        if request.sampling.logprobs is None:
            assert not request.logprobs
            continue
        ids, values = logprob_arrays(request.logprobs)
        assert ids.shape == (5, 1 + request.sampling.logprobs)
        assert ids[:, 0].tolist() == request.output
        with torch.inference_mode():
            logits = model(torch.tensor([request.prompt + request.output])).logits[0, len(request.prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        np.testing.assert_allclose(values[:, 0], expected.gather(1, torch.tensor(ids[:, :1]).long())[:, 0], atol=2e-4)
        np.testing.assert_allclose(values[:, 1:], expected.topk(request.sampling.logprobs).values, atol=2e-4)
        for row_ids, row_values in zip(ids, values, strict=True):
            if len(row_ids) > 1 and row_ids[0] == row_ids[1]:
                assert row_values[0] == row_values[1]


def test_prompt_logprobs_in_chunks_are_those_of_one_full_pass(
    checkpoint, driver, make_request, logprob_arrays, monkeypatch
):
    folder = checkpoint("llama")
    model = checkpoints.load_reference(folder)
    monkeypatch.setattr("pagewire.engine.steps.logprobs._LOGITS_BYTES", 10 * 4 * checkpoints.VOCAB_SIZE)
    prompts = [[5], [5, 6], *_prompts(6, seed=4)]
    for chunk in (16, 2048):
        requests = [
            make_request(p, sampling=Sampling(temperature=0, prompt_logprobs=i % 3), max_new=2)
            for i, p in enumerate(prompts)
        ]
        driver(folder).run(requests, chunk=chunk)
        assert not requests[0].prompt_logprobs
        for request in requests[1:]:
            ids, values = logprob_arrays(request.prompt_logprobs)
            assert ids[:, 0].tolist() == request.prompt[1:]
            with torch.inference_mode():
                expected = model(torch.tensor([request.prompt])).logits[0, :-1].log_softmax(-1)
            chosen = expected.gather(1, torch.tensor(request.prompt[1:])[:, None])[:, 0]
            np.testing.assert_allclose(values[:, 0], chosen, atol=2e-4)
            best = expected.topk(request.sampling.prompt_logprobs).values
            np.testing.assert_allclose(values[:, 1:], best, atol=2e-4)


def _poisoned(folder, token):
    """The checkpoint with NaN as the embedding of one token."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_row_that_is_not_finite_fails_alone_and_in_later_steps_too(checkpoint, driver):
    poison = 7
    runner = driver(_poisoned(checkpoint("llama"), poison)).runner
    opens = tuple(
        RowOpen(
            i, ids_to_bytes([5, token, 6]), 3, 0, ids_to_bytes([i]), Sampling(temperature=i % 2, logprobs=1, seed=9)
        )
        for i, token in enumerate([4, 4, poison, poison])
    )
    runner.launch(_plan([0, 1], [3, 3], open=opens))
    healthy = bytes_to_ids(runner.collect().ids)
    runner.launch(_plan([3, 0, 2, 1], [3, 3, 3, 3], open=opens))
    runner.launch(_plan([0, 1, 2, 3], [1] * 4))  # planned before the failures were known
    assert runner.num_pending == 2
    result = runner.collect()
    assert list(bytes_to_ids(result.ids)) == [-1, healthy[0], -1, healthy[1]]
    assert sorted(result.logprobs) == [1, 3]
    later = list(bytes_to_ids(runner.collect().ids))
    assert later[2:] == [-1, -1]
    assert -1 not in later[:2]


def test_blocks_of_a_failed_row_can_be_used_again(checkpoint, driver):
    runner = driver(_poisoned(checkpoint("llama"), 7)).runner
    first = RowOpen(0, ids_to_bytes([5, 7, 6]), 3, 0, ids_to_bytes([0]), Sampling(temperature=0))
    second = RowOpen(0, ids_to_bytes([5, 4]), 2, 0, ids_to_bytes([0]), Sampling(temperature=0))
    runner.launch(_plan([0], [2], open=(second,)))
    expected = runner.collect().ids
    runner.launch(_plan([0], [3], open=(first,)))
    assert list(bytes_to_ids(runner.collect().ids)) == [-1]
    runner.launch(_plan([0], [2], open=(second,)))
    assert runner.collect().ids == expected


def test_an_empty_plan_gives_an_empty_result(checkpoint, driver):
    runner = driver(checkpoint("llama")).runner
    runner.launch(_plan([], []))
    result = runner.collect()
    assert (result.ids, result.logprobs, result.prompt_logprobs) == (b"", {}, {})


def test_offer_follows_from_the_requests_or_from_kv_cache_memory(checkpoint, resolved):
    folder = checkpoint("llama")  # 3 layers, 2 key heads of 16, float32: 12,288 bytes a block
    runner = Runner.load(resolved(folder, max_num_seqs=4, max_model_len=100))
    assert runner.offer() == 4 * 7
    assert Runner.load(resolved(folder, kv_cache_memory=12_288 * 50 + 5)).offer() == 50
    assert Runner.load(resolved(folder, kv_cache_memory=1)).offer() == 1
    assert list(runner.timings) == ["weights"]
    assert "KV cache 336.0 kB = 28 blocks of 16 tokens, 4 requests of 100 tokens" in runner.notes[1]
    runner.open_cache(7)
    assert "KV cache 84.0 kB = 7 blocks of 16 tokens, 1 request of 100 tokens" in runner.notes[1]
