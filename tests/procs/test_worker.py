"""The worker's loop: KV transfers in flight, its start, and plans that wait for masks."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    ExpertsRead,
    Facts,
    LateMasks,
    OpenCache,
    Ping,
    PlaceExperts,
    ReadExperts,
    Reset,
    RowOpen,
    Sampling,
    Sleep,
    StepPlan,
    StepResult,
    Stop,
    ToWorker,
    Transferred,
    Wake,
    WorkerUsage,
    bytes_to_ids,
    ids_to_bytes,
)
from pagewire.procs.prepare import prepare
from pagewire.procs.worker import Worker, run

TIMEOUT_S = 60.0


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


@contextmanager
def running(folder: Path) -> Iterator[tuple[MemoryChannel[ToWorker], "queue.Queue[object]"]]:
    """A worker in a thread, whose cache is open: its mailbox, and what it posts but for its `WorkerUsage`."""
    checkpoints.make_checkpoint(folder, "llama")
    config = prepare(make_config(model=str(folder), threads=1, max_num_seqs=4))
    inbox: MemoryChannel[ToWorker] = MemoryChannel(ToWorker)
    posted: queue.Queue[object] = queue.Queue()

    def post(_: str, message: object) -> None:
        if not isinstance(message, WorkerUsage):
            posted.put(message)

    arguments = Worker(config), inbox, post, posted.put, lambda: posted.put("pong")
    thread = threading.Thread(target=run, args=arguments)
    thread.start()
    try:
        assert isinstance(posted.get(timeout=TIMEOUT_S), CacheOffer)
        inbox.send(OpenCache(8))
        assert isinstance(posted.get(timeout=TIMEOUT_S), Facts)
        yield inbox, posted
    finally:
        inbox.send(Stop(0.0, "the test is over"))
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def _plan(step: int, *, late: bool = True, after_fault: bool = False) -> StepPlan:
    """Two rows, the first of which is late; a prompt of three ids in the first step."""
    prompt = ids_to_bytes([5, 6, 7])
    opens = tuple(RowOpen(row, prompt, 3, 0, ids_to_bytes([2 + row]), Sampling(temperature=0)) for row in (0, 1))
    return StepPlan(
        step=step,
        open=opens if step == 1 else (),
        grow_rows=b"",
        grow_blocks=b"",
        rows=ids_to_bytes([0, 1]),
        counts=ids_to_bytes([3, 3] if step == 1 else [1, 1]),
        sample=b"\1\1",
        late_rows=ids_to_bytes([0] if late else []),
        after_fault=after_fault,
    )


def _masks(step: int, token: int) -> LateMasks:
    bits = (1 << token).to_bytes(4 * -(-checkpoints.VOCAB_SIZE // 32), "little")
    return LateMasks(step, ids_to_bytes([0]), bits)


@pytest.mark.slow
def test_a_plan_waits_for_its_masks_and_later_plans_wait_for_it(tmp_path: Path) -> None:
    with running(tmp_path) as (inbox, posted):
        for message in (_plan(1), _plan(2, late=False), _plan(3), _masks(3, 40), Ping()):
            inbox.send(message)
        assert posted.get(timeout=TIMEOUT_S) == "pong", "it takes in mail while a plan waits"
        inbox.send(_masks(1, 30))
        results = [posted.get(timeout=TIMEOUT_S) for _ in range(3)]
        ids = []
        for step, result in enumerate(results, start=1):
            assert isinstance(result, StepResult) and result.step == step and result.fault is None
            assert (result.mask_wait_ms > 0) == (step != 2)
            ids.append(list(bytes_to_ids(result.ids)))
        assert ids[0][0] == 30 and ids[2][0] == 40
        inbox.send(_plan(4))
        inbox.send(LateMasks(4, b"", b"", ids_to_bytes([0])))
        result = posted.get(timeout=TIMEOUT_S)
        assert isinstance(result, StepResult) and len(bytes_to_ids(result.ids)) == 2


@pytest.mark.slow
def test_experts_move_between_the_same_plans_although_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int | str] = []
    launch = Runner.launch

    def launched(self: Runner, plan: StepPlan) -> None:
        order.append(plan.step)
        launch(self, plan)

    monkeypatch.setattr(Runner, "launch", launched)
    monkeypatch.setattr(Runner, "place_experts", lambda self, message: order.append("experts"))
    monkeypatch.setattr(Runner, "read_experts", lambda self, message: order.append("the next ones"))
    moves = PlaceExperts(0, ()), ReadExperts(2, 1, ())  # reading would drop what is to be placed
    with running(tmp_path) as (inbox, posted):
        for message in (_plan(1), _plan(2, late=False), *moves, _plan(3, late=False), _masks(1, 30)):
            inbox.send(message)
        for step in (1, 2, 3):
            result = posted.get(timeout=TIMEOUT_S)
            assert isinstance(result, StepResult) and result.step == step
    assert order == [1, 2, "experts", "the next ones", 3]


def test_that_experts_are_read_is_told_with_the_next_ping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.make_checkpoint(tmp_path, "llama")
    config = prepare(make_config(model=str(tmp_path), threads=1, max_num_seqs=4))
    now = 100.0
    read: ExpertsRead | None = None
    monkeypatch.setattr("pagewire.procs.worker.time.monotonic", lambda: now)
    monkeypatch.setattr(Runner, "experts_read", property(lambda self: read))
    posted: list[object] = []
    worker = Worker(config)
    worker.start(lambda _, message: posted.append(message))
    worker.open(OpenCache(8))
    first, second = ExpertsRead(1), ExpertsRead(2, "It is gone.")
    told: list[list[ExpertsRead | None]] = []
    for at, found in ((100.0, None), (100.5, first), (100.6, first), (101.1, second), (102.0, second), (102.5, None)):
        now, read = at, found
        posted.clear()
        worker.rest()
        told.append([message.read for message in posted if isinstance(message, WorkerUsage)])
    worker.close()
    assert told == [[None], [first], [], [second], [second], []]


@pytest.mark.slow
def test_a_plan_that_waits_is_given_up_with_its_core(tmp_path: Path) -> None:
    with running(tmp_path) as (inbox, posted):
        inbox.send(_plan(1))
        inbox.send(_plan(2))
        inbox.send(Reset(2, 2, ("core",), "It died."))
        assert isinstance(posted.get(timeout=TIMEOUT_S), CacheOffer)
        inbox.send(_plan(1, late=False))
        result = posted.get(timeout=TIMEOUT_S)
        assert isinstance(result, StepResult) and result.step == 1 and len(bytes_to_ids(result.ids)) == 2
        inbox.send(_plan(2))
        inbox.send(Ping())
        assert posted.get(timeout=TIMEOUT_S) == "pong"  # and the loop ends while a plan waits


def test_a_ping_has_the_worker_say_what_it_takes_about_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.make_checkpoint(tmp_path, "llama")
    config = prepare(make_config(model=str(tmp_path), threads=1, max_num_seqs=4))
    now = 100.0
    monkeypatch.setattr("pagewire.procs.worker.time.monotonic", lambda: now)
    posted: list[object] = []
    worker = Worker(config)
    worker.start(lambda _, message: posted.append(message))
    (offer,) = posted
    assert isinstance(offer, CacheOffer) and offer.reads.fixed > 0 and offer.reads.experts == 0
    worker.open(OpenCache(8))
    found: list[dict[str, int]] = []
    for at, task in ((100.0, None), (100.5, None), (101.0, Sleep()), (102.0, Wake()), (103.0, None)):
        now = at
        posted.clear()
        if task is not None:
            worker.take(task)
        worker.rest()
        usages = [message for message in posted if isinstance(message, WorkerUsage)]
        assert len(usages) == (at != 100.5), at
        for usage in usages:
            assert usage.rank == 0 and usage.process.num_threads > 0 and usage.process.cpu_s > 0
            assert usage.bandwidth == 0.0 and usage.gpu == {}, "no plan has run, and there is no GPU"
            found.append(usage.memory)
    worker.close()
    awake = {**found[0], "kv_cache": 8 * offer.block_bytes}
    assert found == [awake, {**awake, "kv_cache": 0}, awake, awake]
    assert awake["weights"] > offer.reads.fixed, "the table of the vocabulary is not read"
