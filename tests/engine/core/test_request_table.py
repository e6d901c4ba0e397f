"""How requests are added, resumed, cancelled and reset, and when their rows and blocks are freed."""

import pytest
from fakes import enqueue, expected_output
from invariants import check

from pagewire.ipc.messages import Accepted, Failed, Opened, TokenBatch

from .test_scheduler import drain, make, output, worker_for


def test_a_request_cancelled_in_flight_keeps_row_and_blocks_until_it_is_applied() -> None:
    scheduler = make(depth=2)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1, 2], max_tokens=10))
    results = [worker.run(scheduler.plan()), worker.run(scheduler.plan())]  # type: ignore[arg-type]
    scheduler.cancel(1)
    assert scheduler.pool.num_held == 1 and scheduler.num_running == 0
    scheduler.apply(results[0])
    assert scheduler.pool.num_held == 1
    scheduler.apply(results[1])
    assert scheduler.pool.num_held == 0
    assert [type(item) for item in scheduler.take_outputs()] == [Opened, TokenBatch]


def test_cancelled_requests_leave_nothing_in_a_long_queue() -> None:
    scheduler = make(max_num_seqs=1)
    for rid in range(1, 60):
        scheduler.add(enqueue(rid, [rid]))
    for rid in range(1, 60):
        scheduler.cancel(rid)
        check(scheduler)
    assert scheduler.num_waiting == 0 and scheduler.plan() is None


def test_the_choices_of_one_prompt_are_numbered_seeded_and_forked() -> None:
    scheduler = make(budget=64)
    worker = worker_for(scheduler)
    prompt = list(range(10))
    assert [reply.rid for reply in scheduler.add(enqueue(5, prompt, max_tokens=6, seed=40, n=3))] == [5, 6, 7]
    outputs = drain(scheduler, worker)
    for choice in range(3):
        assert output(outputs[5 + choice]) == expected_output(prompt, 6, 100, 40 + choice, ignore_eos=False)
    cached = {rid: n[-1].usage.num_cached for rid, n in outputs.items() if n[-1].usage}
    assert cached == {5: 0, 6: 9, 7: 9}, "all but the last position is shared: two blocks, and a copy of the third"


@pytest.mark.parametrize("num_delivered", range(9))
def test_a_resumed_request_continues_after_its_delivered_tokens(num_delivered: int) -> None:
    whole = expected_output([1, 2, 3], 8, 100, 5, ignore_eos=True)
    scheduler = make()
    worker = worker_for(scheduler)
    message = enqueue(1, [1, 2, 3], max_tokens=8, seed=5, ignore_eos=True, resume_ids=whole[:num_delivered])
    assert isinstance(scheduler.add(message)[0], Accepted)
    outputs = drain(scheduler, worker)[1]
    assert output(outputs) == whole[num_delivered:]
    assert outputs[-1].finish == "length" and outputs[-1].usage is not None and outputs[-1].usage.num_output == 8


def test_resume_ids_longer_than_the_output_may_be_are_refused() -> None:
    scheduler = make()
    for rid, max_tokens in ((1, 4), (2, None)):
        ids = [5] * (5 if max_tokens else scheduler.max_model_len - 2)
        (refused,) = scheduler.add(enqueue(rid, [1, 2, 3], max_tokens=max_tokens, resume_ids=ids))
        assert isinstance(refused, Failed) and refused.kind == "invalid_request" and f"{len(ids)}" in refused.detail


def test_reset_gives_a_new_worker_every_request_again() -> None:
    scheduler = make(depth=2)
    worker = worker_for(scheduler)
    prompts = {rid: [rid * 3 + i for i in range(6)] for rid in range(1, 5)}
    for rid, prompt in prompts.items():
        scheduler.add(enqueue(rid, prompt, max_tokens=9, seed=rid, ignore_eos=True))
    for _ in range(3):
        scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.plan()
    scheduler.cancel(2)
    scheduler.reset()
    check(scheduler)
    assert scheduler.num_in_flight == 0 and scheduler.pool.num_held == 0 and scheduler.num_waiting == 3
    outputs = drain(scheduler, worker_for(scheduler))
    for rid in (1, 3, 4):
        assert output(outputs[rid]) == expected_output(prompts[rid], 9, 100, rid, ignore_eos=True)
