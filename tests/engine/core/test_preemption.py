"""Preempted requests resume with the same output."""

from fakes import enqueue, expected_output

from .test_scheduler import drain, make, output, worker_for


def test_preempted_requests_resume_with_their_output() -> None:
    scheduler = make(num_blocks=10, max_model_len=40)
    worker = worker_for(scheduler)
    prompts = {rid: [rid * 3 + i for i in range(6)] for rid in range(1, 5)}
    for rid, prompt in prompts.items():
        scheduler.add(enqueue(rid, prompt, max_tokens=20, seed=rid, ignore_eos=True))
    outputs = drain(scheduler, worker)
    assert scheduler.counters.num_preemptions > 0
    for rid, prompt in prompts.items():
        assert output(outputs[rid]) == expected_output(prompt, 20, 100, rid, ignore_eos=True)


def test_preempted_requests_of_unequal_lengths_resume_with_their_output() -> None:
    scheduler = make(num_blocks=12, max_model_len=48, budget=64)
    worker = worker_for(scheduler)
    lengths = {1: 7, 2: 4, 3: 15, 4: 3}
    for rid, length in lengths.items():
        scheduler.add(enqueue(rid, [rid * 9 + i for i in range(length)], max_tokens=24, seed=rid, ignore_eos=True))
    outputs = drain(scheduler, worker)
    assert scheduler.counters.num_preemptions > 0
    for rid, length in lengths.items():
        prompt = [rid * 9 + i for i in range(length)]
        assert output(outputs[rid]) == expected_output(prompt, 24, 100, rid, ignore_eos=True)
