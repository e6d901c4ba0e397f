"""Requests that are refused on arrival, or that leave the queue at their timeout."""

import msgspec
from fakes import enqueue

from pagewire.ipc.messages import Accepted, Failed

from .test_scheduler import drain, make, worker_for


def test_a_request_fails_when_its_queue_timeout_passes() -> None:
    scheduler = make(max_num_seqs=1)
    worker = worker_for(scheduler)
    scheduler.add(enqueue(1, [1], max_tokens=5, ignore_eos=True), now=10.0)
    for rid, timeout in ((2, 5.0), (3, 50.0)):
        message = enqueue(rid, [rid], max_tokens=5, ignore_eos=True)
        limits = msgspec.structs.replace(message.limits, queue_timeout_s=timeout)
        scheduler.add(msgspec.structs.replace(message, limits=limits), now=10.0)
    scheduler.apply(worker.run(scheduler.plan()))  # type: ignore[arg-type]
    scheduler.take_outputs()
    scheduler.expire(14.9)
    assert scheduler.take_outputs() == [] and scheduler.num_waiting == 2
    scheduler.expire(15.0)
    (failed,) = scheduler.take_outputs()
    assert isinstance(failed, Failed) and failed.rid == 2 and failed.kind == "unavailable"
    assert set(drain(scheduler, worker)) == {1, 3}
    scheduler.expire(1e9)
    assert scheduler.take_outputs() == []


def test_the_queue_is_bounded_in_tokens() -> None:
    scheduler = make(max_queued_tokens=30)

    def add(rid: int, num_prompt: int, n: int = 1) -> set[type]:
        return {type(reply) for reply in scheduler.add(enqueue(rid, [1] * num_prompt, max_tokens=4, n=n))}

    assert add(1, 8) == {Accepted}
    assert add(2, 6, n=2) == {Failed}  # 2 · (6 + 4) tokens beside the 12 that wait: both choices are refused
    assert scheduler.num_waiting == 1
    assert add(4, 5, n=2) == {Accepted}
    scheduler.cancel(1)
    assert add(6, 8) == {Accepted}


def test_a_request_that_never_fits_into_the_queue_is_invalid() -> None:
    scheduler = make(max_queued_tokens=30)
    (refused, _) = scheduler.add(enqueue(1, [1] * 12, max_tokens=4, n=2))
    assert isinstance(refused, Failed) and refused.kind == "invalid_request" and "32 tokens" in refused.detail


def test_the_queue_is_bounded_and_a_prompt_must_fit() -> None:
    scheduler = make(num_blocks=4, max_queued_requests=2)
    assert isinstance(scheduler.add(enqueue(1, [1]))[0], Accepted)
    (refused,) = scheduler.add(enqueue(2, list(range(16)), max_tokens=None))
    assert isinstance(refused, Failed) and refused.kind == "context_length_exceeded" and "16 tokens" in refused.detail
    assert isinstance(scheduler.add(enqueue(3, [1]))[0], Accepted)
    (refused,) = scheduler.add(enqueue(4, [1]))
    assert isinstance(refused, Failed) and refused.kind == "queue_full"
    (refused,) = scheduler.add(enqueue(5, []))
    assert isinstance(refused, Failed) and refused.kind == "invalid_request"
