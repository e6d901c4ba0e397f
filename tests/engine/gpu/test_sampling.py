"""Sampling, logprobs, masks and draft tokens: the GPU runner gives the same as the CPU runner."""

import random

import checkpoints
import numpy as np
from runner_driver import Driver, Request, arrays, engine_config

from pagewire.engine.gpu.decoder import TritonDecoder
from pagewire.engine.gpu.state import RowState
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import RowOpen, Sampling, StepPlan, bytes_to_ids, ids_to_bytes

SMALL = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "dtype": "float32"}
LAYERS = {"num_hidden_layers": 1}


def _cpu_driver(folder) -> Driver:
    runner = Runner.load(engine_config(folder, device="cpu", **SMALL))
    runner.open_cache(96)
    return Driver(runner, 96)


def _requests():
    rng = random.Random(5)
    samplings = (
        Sampling(temperature=0.9, seed=7),
        Sampling(temperature=1.2, top_k=7, top_p=0.8, min_p=0.02, seed=2**62 + 11),
        Sampling(temperature=0, repetition_penalty=1.8, presence_penalty=1.0, frequency_penalty=0.5, logprobs=3),
        Sampling(temperature=0.7, seed=3, logit_bias={11: 6.5, 12: -100.0, 10**9: 5.0}, logprobs=0),
        Sampling(temperature=0, prompt_logprobs=2, logprobs=20),
    )
    return [
        Request([rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(n)], sampling=sampling, max_new=5)
        for n, sampling in zip((9, 3, 12, 5, 21), samplings, strict=True)
    ]


def test_tokens_and_logprobs_are_those_of_the_cpu_runner(checkpoint, driver):
    folder = checkpoint("llama", **LAYERS)
    ours, theirs = _requests(), _requests()
    driver(folder, **SMALL).run(ours, chunk=16, budget=32, rows=4)
    _cpu_driver(folder).run(theirs, chunk=16, budget=32, rows=4)
    assert [request.output for request in ours] == [request.output for request in theirs]
    assert len({tuple(request.output) for request in ours}) == len(ours)
    for mine, other in zip(ours, theirs, strict=True):
        for our_logprobs, their_logprobs in (
            (mine.logprobs, other.logprobs),
            (mine.prompt_logprobs, other.prompt_logprobs),
        ):
            assert len(our_logprobs) == len(their_logprobs)
            if our_logprobs:
                (my_ids, my_values), (ids, values) = arrays(our_logprobs), arrays(their_logprobs)
                assert my_ids.tolist() == ids.tolist()
                assert np.abs(my_values - values).max() < 1e-3


def test_end_tokens_are_withheld_before_min_tokens(checkpoint, driver):
    """Each row's end tokens are ones that it would sample, so its output shows how long they are withheld."""
    folder = checkpoint("llama", **LAYERS)
    samplings = (
        Sampling(temperature=0),
        Sampling(temperature=0.9, seed=7),
        Sampling(temperature=0, logit_bias={11: 30.0, 12: 29.0}),
        Sampling(temperature=0.7, seed=3, repetition_penalty=1.5, presence_penalty=1.0),
        Sampling(temperature=0, logprobs=2),
    )
    prompts = [list(range(3 + i, 9 + 2 * i)) for i in range(len(samplings))]
    free = [Request(p, sampling=s, max_new=6) for p, s in zip(prompts, samplings, strict=True)]
    _cpu_driver(folder).run(free, rows=4)
    cases = [
        (f.prompt, f.sampling, tuple(dict.fromkeys([*f.output[:2], 11])), min_new)
        for f, min_new in zip(free, (1, 3, 4, 3, 2), strict=True)
    ]

    def requests():
        return [Request(p, sampling=s, max_new=6, min_new=n, ends=e) for p, s, e, n in cases]

    ours, theirs = requests(), requests()
    driver(folder, **SMALL).run(ours, chunk=16, budget=32, rows=4)
    _cpu_driver(folder).run(theirs, chunk=16, budget=32, rows=4)
    assert [request.output for request in ours] == [request.output for request in theirs]
    for request in ours:
        assert not set(request.output[: request.min_new]) & set(request.ends)
    assert ours[0].output[1:] != free[0].output[1:]
    assert set(ours[2].output[4:]) <= {11, 12}, "its bias applies again once the end tokens are allowed"
    assert 11 in ours[2].output[4:] and set(ours[2].output[:4]) == {12}


def _masked_requests():
    masks, few = [[5, 6, 7, 40], list(range(3, 300, 7)), [9]], tuple(range(30, 60))
    samplings = (
        (Sampling(temperature=0), masks),
        (Sampling(temperature=1.1, seed=3, top_k=20, top_p=0.9, logprobs=2), masks),
        (Sampling(temperature=0, repetition_penalty=1.8, logit_bias={5: 30.0, 8: 90.0}), masks),
        (Sampling(temperature=0.9, seed=4, allowed_token_ids=few), []),
        (Sampling(temperature=0, allowed_token_ids=few), [list(range(50, 100)), [31, 100]]),
        (Sampling(temperature=0), []),
        (Sampling(temperature=0, allowed_token_ids=(3,)), [[3], [4]]),  # the mask and allowed_token_ids leave no token
    )
    return [
        Request([7, 8, 9 + i] * (1 + 3 * i), sampling=sampling, max_new=6, allowed=allowed)
        for i, (sampling, allowed) in enumerate(samplings)
    ]


def test_masks_and_allowed_token_ids_limit_what_is_sampled(checkpoint, driver):
    folder = checkpoint("llama", **LAYERS)
    ours, theirs = _masked_requests(), _masked_requests()
    driver(folder, **SMALL).run(ours, chunk=16, budget=32, rows=4)
    _cpu_driver(folder).run(theirs, chunk=16, budget=32, rows=4)
    assert [request.output for request in ours] == [request.output for request in theirs]
    for request in ours[:-1]:
        for i, token in enumerate(request.output):
            assert not request.allowed or token in request.allowed[i % len(request.allowed)]
            assert token in (request.sampling.allowed_token_ids or [token])
    assert ours[-1].output[:2] == [3, -1]
    (_, my_values), (_, values) = arrays(ours[1].logprobs), arrays(theirs[1].logprobs)
    assert np.abs(my_values - values).max() < 1e-3


def test_speculation_changes_no_token(checkpoint, driver):
    """The random model repeats itself only because a bias leaves it few tokens."""
    folder = checkpoint("llama", **LAYERS)
    prompt = [40, 41, 42] * 6
    sampling = Sampling(temperature=0, logit_bias={40: 100.0, 41: 100.0, 42: 100.0})
    plain = Request(prompt, sampling=sampling, max_new=24)
    _cpu_driver(folder).run([plain], rows=4)
    served = driver(folder, speculative="ngram", **SMALL)
    opened = RowOpen(
        row=2,
        ids=ids_to_bytes(prompt),
        num_prompt=18,
        num_computed=0,
        block_ids=ids_to_bytes([3, 1, 6]),
        sampling=sampling,
    )
    output, num_drafts, most = [], 0, 1
    for step in range(24):
        if len(output) >= 24:
            break
        served.runner.launch(
            StepPlan(
                step=step,
                open=() if step else (opened,),
                grow_rows=b"",
                grow_blocks=b"",
                rows=ids_to_bytes([2]),
                counts=ids_to_bytes([1 if step else 18]),
                sample=b"\1",
                num_speculative=min(step, 1),
                speculate=3 if step else 0,
                break_even=0.1,
            )
        )
        result = served.runner.collect()
        ids = bytes_to_ids(result.ids)
        output += ids
        most = max(most, len(ids))
        num_drafts += result.num_drafts
    assert output[:24] == plain.output
    assert num_drafts > 0 and most > 1, "some draft token should be accepted"


def test_speculation_ahead_of_the_host_changes_no_token(checkpoint, driver):
    """Several plans are in flight, and the draft tokens of all of them are accepted or not on the device."""
    folder = checkpoint("llama", **LAYERS)
    few = {40: 100.0, 41: 100.0, 42: 100.0}
    prompts = [[40, 41, 42] * 6, [41, 41, 40] * 5, [42, 40] * 8]
    samplings = [
        Sampling(temperature=0, logit_bias=few),
        Sampling(temperature=6, seed=7, logit_bias=few),
        Sampling(temperature=0, logit_bias=few, repetition_penalty=1.05),  # a row with penalties has no draft tokens
    ]
    plain = [Request(p, sampling=s, max_new=24) for p, s in zip(prompts, samplings, strict=True)]
    _cpu_driver(folder).run(plain, rows=4)
    for depth in (2, 3):
        flags = SMALL | {"max_num_batched_tokens": 64}
        served = driver(folder, speculative="ngram,tokens=3", pipeline_depth=depth, **flags)
        output, in_flight, step = [[] for _ in prompts], 0, 0
        num_drafts = num_accepted = 0
        while min(map(len, output)) < 24:
            opens = [
                RowOpen(
                    row=row,
                    ids=ids_to_bytes(prompt),
                    num_prompt=len(prompt),
                    num_computed=0,
                    block_ids=ids_to_bytes(range(10 * row, 10 * row + 10)),
                    sampling=samplings[row],
                )
                for row, prompt in enumerate(prompts)
            ]
            while in_flight < depth:
                served.runner.launch(
                    StepPlan(
                        step=step,
                        open=() if step else tuple(opens),
                        grow_rows=b"",
                        grow_blocks=b"",
                        rows=ids_to_bytes([0, 1, 2]),
                        counts=ids_to_bytes([1, 1, 1] if step else [len(prompt) for prompt in prompts]),
                        sample=b"\1\1\1",
                        num_speculative=3 if step else 0,
                        speculate=3 if step else 0,
                        break_even=0.1,
                    )
                )
                step, in_flight = step + 1, in_flight + 1
            result = served.runner.collect()
            in_flight -= 1
            ids, nums = bytes_to_ids(result.ids).tolist(), bytes_to_ids(result.num_sampled).tolist() or [1, 1, 1]
            for row, num in enumerate(nums):
                output[row] += ids[:num]
                del ids[:num]
            num_drafts += result.num_drafts
            num_accepted += sum(nums) - 3
        assert [own[:24] for own in output] == [request.output for request in plain]
        assert num_drafts > 0 and num_accepted > 0, "some draft token should be accepted"


def test_a_preempted_request_continues_with_the_same_tokens(checkpoint, driver):
    """After a preemption the row is opened with prompt and output so far; penalties count that output."""
    folder = checkpoint("llama", **LAYERS)
    sampling = Sampling(temperature=0.8, seed=5, repetition_penalty=1.5, frequency_penalty=1.0)
    whole = Request([5, 6, 7, 8], sampling=sampling, max_new=6)
    _cpu_driver(folder).run([whole], rows=4)
    served = driver(folder, **SMALL)
    ids = whole.prompt + whole.output[:3]
    opened = RowOpen(
        row=1, ids=ids_to_bytes(ids), num_prompt=4, num_computed=0, block_ids=ids_to_bytes([5]), sampling=sampling
    )
    output = []
    for step, count in enumerate((len(ids), 1, 1)):
        served.runner.launch(
            StepPlan(
                step=step,
                open=(opened,) if step == 0 else (),
                grow_rows=b"",
                grow_blocks=b"",
                rows=ids_to_bytes([1]),
                counts=ids_to_bytes([count]),
                sample=b"\1",
            )
        )
    for _ in range(3):
        output += bytes_to_ids(served.runner.collect().ids)
    assert output == whole.output[3:]


def test_ranks_sample_the_same_tokens_from_the_best_of_their_parts(checkpoint, driver, monkeypatch):
    """With the exchange of a group of one rank; the kernels' tests have several."""
    folder = checkpoint("qwen3", num_hidden_layers=1)
    outputs, calls, of_parts = [], [], RowState.sample_of_parts
    monkeypatch.setattr(RowState, "sample_of_parts", lambda *args: calls.append(of_parts(*args)))
    for ranks in (1, 2):
        monkeypatch.setattr(TritonDecoder, "num_ranks", ranks)
        requests = [
            Request([5, 6, 7], max_new=4),
            Request([9, 8], max_new=4, sampling=Sampling(temperature=0.8, seed=3)),
            Request([11], max_new=2, sampling=Sampling(temperature=0.8, seed=4, top_k=5)),
        ]
        driver(folder, max_num_batched_tokens=32, max_num_seqs=4).run(requests, chunk=20, budget=32, rows=3)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1] and calls
