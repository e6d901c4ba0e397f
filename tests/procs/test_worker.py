"""The worker's loop while KV transfers are in flight."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import checkpoints
import msgspec
import pytest
from recording_connector import Recording

from pagewire.config.flags import make_config
from pagewire.engine.kv_connector.guard import UnderWay
from pagewire.engine.runner.runner import Runner
from pagewire.engine.steps.host_steps import HostSteps
from pagewire.ipc.channel import MemoryChannel
from pagewire.ipc.messages import (
    CacheOffer,
    Facts,
    OpenCache,
    StepPlan,
    StepResult,
    Stop,
    ToWorker,
    Transferred,
    ids_to_bytes,
)
from pagewire.procs.prepare import prepare
from pagewire.procs.worker import Worker, run

TIMEOUT_S = 30.0


@pytest.mark.slow
def test_finished_transfers_are_reported_at_once_and_not_with_the_next_step(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, "llama")
    config = prepare(make_config(model=str(tmp_path), threads=1, kv_connector=("recording_connector:Recording",)))
    inbox: MemoryChannel[ToWorker] = MemoryChannel(ToWorker)
    posted: queue.Queue[object] = queue.Queue()
    thread = threading.Thread(
        target=run,
        args=(Worker(config), inbox, lambda _, message: posted.put(message), posted.put, lambda: posted.put("pong")),
    )
    thread.start()
    try:
        offer = posted.get(timeout=TIMEOUT_S)
        assert isinstance(offer, CacheOffer) and offer.block_bytes == 12_288
        inbox.send(OpenCache(8))
        posted.get(timeout=TIMEOUT_S)  # the worker's facts
        connector = Recording.workers[-1]
        metadata = msgspec.msgpack.encode(UnderWay(((7, ids_to_bytes([3])),), (), b"x"))
        connector.keep_pending = 1
        inbox.send(StepPlan(1, (), b"", b"", b"", b"", b"", kv=metadata))
        result = posted.get(timeout=TIMEOUT_S)
        assert isinstance(result, StepResult) and result.step == 1
        connector.finished = (set(), {7})  # no message arrives, and the worker polls the connector anyway
        assert posted.get(timeout=TIMEOUT_S) == Transferred((7,), b"", (), 2, 1.5)
    finally:
        inbox.send(Stop(0.0, "the test is over"))
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert connector.calls[-1] == "close"


@pytest.mark.slow
def test_a_worker_is_ready_only_when_its_first_steps_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.make_checkpoint(tmp_path, "llama")
    config = prepare(make_config(model=str(tmp_path), threads=1))
    order: list[str] = []
    own = {name: getattr(Runner, name) for name in ("open_cache", "warm_up")}

    def seen(name: str) -> Callable[..., None]:
        def call(*args: object) -> None:
            own[name](*args)
            order.append(name)

        return call

    for name in own:
        monkeypatch.setattr(Runner, name, seen(name))
    monkeypatch.setattr(HostSteps, "warm_up", lambda self: {"3 of 4 graphs, the other while idle": 0.5})
    inbox: MemoryChannel[ToWorker] = MemoryChannel(ToWorker)
    facts: list[Facts] = []
    for message in (OpenCache(8), OpenCache(8), Stop(0.0, "the test is over")):
        inbox.send(message)

    def on_ready(found: Facts) -> None:
        order.append("ready")
        facts.append(found)

    run(Worker(config), inbox, lambda _, message: None, on_ready, lambda: None)
    assert order == ["open_cache", "warm_up", "ready"] * 2, "the second time after a restart of the core"
    assert facts[0].timings["3 of 4 graphs, the other while idle"] == 0.5
