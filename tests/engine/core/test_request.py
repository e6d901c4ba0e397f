"""What ends a request, and what may not end it yet."""

import msgspec
from fakes import EOS, enqueue

from pagewire.ipc.messages import bytes_to_ids

from .test_scheduler import drain, make, output, worker_for


def test_output_stops_at_the_context_length() -> None:
    scheduler = make(num_blocks=4, max_model_len=14)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, list(range(10)), max_tokens=None, ignore_eos=True))
    outputs = drain(scheduler, worker)[1]
    assert len(output(outputs)) == 4 and outputs[-1].finish == "length"


def test_the_worker_is_told_what_may_not_end_a_request_yet() -> None:
    scheduler = make(num_blocks=8, depth=1)
    message = enqueue(1, list(range(3, 11)), max_tokens=9, stop_token_ids=(40, 30))
    limits = msgspec.structs.replace(message.limits, min_tokens=3)
    scheduler.add(msgspec.structs.replace(message, limits=limits))
    worker = worker_for(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    (opened,) = plan.open
    assert opened.min_len == 11 and sorted(bytes_to_ids(opened.ends)) == sorted((EOS, 30, 40))
    request = scheduler.table.requests[1]
    assert not request.may_speculate
    assert plan is not None
    scheduler.apply(worker.run(plan))
    for min_len in (11, 11, 0):  # as it would be told of again after a preemption
        row = request.as_row()
        assert row.min_len == min_len and bool(row.ends) == bool(min_len), len(request.ids)
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(worker.run(plan))


def test_nothing_is_withheld_from_a_request_that_nothing_ends() -> None:
    scheduler = make()
    message = enqueue(1, [5, 6], max_tokens=4, ignore_eos=True)
    scheduler.add(msgspec.structs.replace(message, limits=msgspec.structs.replace(message.limits, min_tokens=3)))
    plan = scheduler.plan()
    assert plan is not None and plan.open[0].min_len == 0
