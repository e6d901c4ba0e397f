"""Block copies, plans without rows, and the runner's calls of a KV connector, including one that fails."""

import logging

import msgspec
import numpy as np
import pytest
import torch
from p2p_prompt import followed_prompt, socket_address
from recording_connector import Recording, RecordingWorker

from pagewire.engine.executors.reference import Reference
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.guard import UnderWay
from pagewire.engine.models.program import Attend
from pagewire.engine.runner.runner import Runner
from pagewire.ipc.messages import RowOpen, Sampling, StepPlan, Transferred, bytes_to_ids, ids_to_bytes

GREEDY = Sampling(temperature=0)


def plan(step=1, rows=(), counts=(), **fields):
    return StepPlan(
        step=step,
        open=fields.pop("open", ()),
        grow_rows=b"",
        grow_blocks=b"",
        rows=ids_to_bytes(list(rows)),
        counts=ids_to_bytes(list(counts)),
        sample=bytes([1] * len(rows)),
        **fields,
    )


def metadata(loads=(), held=(), own=b"x"):
    """Metadata as the guard around a third-party connector packs it. loads: (rid, blocks)."""
    return msgspec.msgpack.encode(UnderWay(tuple((rid, ids_to_bytes(b)) for rid, b in loads), tuple(held), own))


@pytest.fixture
def runner(checkpoint, resolved):
    runners = []

    def start(*, connector=("recording_connector:Recording",), num_blocks=40):
        runner = Runner.load(resolved(checkpoint("llama"), kv_connector=connector))
        runner.open_cache(num_blocks)
        runners.append(runner)
        return runner

    yield start
    for started in runners:
        started.close()


def opened(row, ids, blocks, num_computed=0):
    return RowOpen(row, ids_to_bytes(ids), len(ids), num_computed, ids_to_bytes(blocks), GREEDY)


def test_a_copied_block_equals_the_computed_one(runner):
    """Two rows share a prompt that ends in the middle of a block: the second copies the block and computes the end."""
    engine = runner(connector=())
    ids = list(np.random.default_rng(1).integers(3, 300, 26))
    engine.launch(plan(1, [0], [26], open=(opened(0, ids, [4, 5]),)))
    first = engine.collect().ids
    copies = ids_to_bytes([4, 8, 5, 9])
    engine.launch(plan(2, [1], [1], open=(opened(1, ids, [8, 9], num_computed=25),), copies=copies))
    assert engine.collect().ids == first
    for pages in engine._cache.pages[2]:
        copied, computed = pages[[8, 9]].flatten(0, 1)[:26], pages[[4, 5]].flatten(0, 1)[:26]
        torch.testing.assert_close(copied, computed)


def test_all_copies_are_read_before_any_is_written(runner):
    engine = runner(connector=())
    for pair in engine._cache.pages:
        for page in pair:
            for block in range(40):
                page[block] = block
    engine.launch(plan(copies=ids_to_bytes([1, 2, 2, 1, 1, 3, 7, 8])))
    assert (engine.collect().ids, engine.take_transferred(), engine.num_transfers) == (b"", None, 0)
    for pair in engine._cache.pages:
        for page in pair:
            assert page[[1, 2, 3, 7, 8], 0, 0, 0].tolist() == [2, 1, 1, 7, 7]


def test_the_connector_is_called_in_order(runner):
    engine = runner()
    connector = Recording.workers[-1]
    assert connector.facts.block_bytes == engine.block_bytes == 12_288
    assert len(connector.facts.model_key) == 32
    engine.launch(plan(1, [0], [3], open=(opened(0, [5, 6, 7], [0]),)))
    assert connector.calls == [("register", 40)], "a step without metadata does not call the connector"
    engine.launch(plan(2, [0], [1], kv=metadata()))
    waits, saves = ([(call, layer) for layer in range(3)] for call in ("wait", "save"))
    expected = [("bind", b"x"), "start", *waits, *saves, "wait for save"]
    assert connector.calls[1:] == expected
    del connector.calls[:]
    engine.launch(plan(3, kv=metadata()))
    assert connector.calls == expected
    del connector.calls[:]
    engine.launch(plan(4, [0], [1]))
    assert connector.calls == []
    engine.close()
    assert connector.calls == ["close"]


def test_a_pass_with_a_connector_is_one_call_of_c(runner, monkeypatch):
    engine = runner()
    if engine._config.kernels != "compiled":
        pytest.skip("torch computes here")
    monkeypatch.setattr(Reference, "run", lambda *_: pytest.fail("an operation ran in torch"))
    engine.launch(plan(1, [0], [3], open=(opened(0, [5, 6, 7], [0]),), kv=metadata()))
    assert engine.collect().step == 1


class Following(RecordingWorker):
    """Is told of layers during the pass. Notes which layers' keys of its block were written by then."""

    layer_stops = (0, 1)

    def save_kv_layer(self, layer):
        super().save_kv_layer(layer)
        self.calls.append([bool(keys[5].any()) for keys, _ in self.cache.pages])


@pytest.mark.parametrize("computes", ["compiled", "torch", "no memory"])
def test_a_connector_follows_a_pass_layer_by_layer(computes, runner, monkeypatch):
    """After the last stop the others follow, unless the pass was dropped."""
    engine = runner(connector=())
    if computes == "compiled" and engine._config.kernels != "compiled":
        pytest.skip("torch computes here")
    if computes != "compiled":
        wrapped = type("Wrapped", (), {"__getattr__": lambda self, name: getattr(self.inner, name)})()
        wrapped.inner = engine._steps._attention
        engine._steps._attention = wrapped  # no kernels of C know it
    for pair in engine._cache.pages:
        for page in pair:
            page[5] = 0
    engine._connector = connector = Following(ConnectorFacts(block_size=16, block_bytes=1, model_key=bytes(32)))
    connector.cache = engine._cache
    if computes == "no memory":
        run, attends = Reference.run, []

        def out_of_memory(self, op, registers, step):
            attends.extend([op] if isinstance(op.args, Attend) else [])
            if len(attends) == 2:
                raise torch.OutOfMemoryError
            run(self, op, registers, step)

        monkeypatch.setattr(Reference, "run", out_of_memory)
    engine.launch(plan(1, [0], [3], open=(opened(0, [5, 6, 7], [5]),), kv=b"x"))
    waits = [("wait", layer) for layer in range(3)]
    seen = [("save", 0), [True, False, False], ("save", 1), [True, True, False], ("save", 2), [True, True, True]]
    seen = seen[:2] if computes == "no memory" else seen
    assert connector.calls == [("bind", b"x"), "start", *waits, *seen, "wait for save"]
    del connector.calls[:]
    connector.layer_stops = ()
    monkeypatch.undo()
    engine.launch(plan(2, [0], [1], kv=b"x", after_fault=True))
    assert [call for call in connector.calls if isinstance(call, list)] == [[True, True, True]] * 3


def test_a_plan_behind_one_without_memory_is_told_of_no_layer(runner):
    engine = runner(connector=())
    engine._connector = connector = RecordingWorker(ConnectorFacts(block_size=16, block_bytes=1, model_key=bytes(32)))
    engine._is_faulted = True
    engine.launch(plan(1, [0], [3], open=(opened(0, [5, 6, 7], [5]),), kv=b"x"))
    assert engine.collect().fault == "out_of_memory"
    assert connector.calls[-2:] == [("wait", 2), "wait for save"]


def test_layers_of_a_prompt_are_sent_while_the_pass_runs(runner):
    with socket_address() as address:
        engine = runner(connector=(f"p2p,serve={address},size=1M",), num_blocks=8)
        assert followed_prompt(engine, address) == [True, True]


def test_loads_are_written_before_copies(runner):
    engine = runner()
    connector = Recording.workers[-1]
    start = connector.start_load_kv

    def load():
        start()
        for pair in connector.cache.pages:
            for page in pair:
                page[6] = 3

    connector.start_load_kv = load
    engine.launch(plan(1, kv=metadata(), copies=ids_to_bytes([6, 7])))
    keys, _ = engine._cache.pages[1]
    assert bool((keys[7] == 3).all())


def test_a_transfer_is_reported_once(runner):
    engine = runner()
    connector = Recording.workers[-1]
    engine.launch(plan(1, kv=metadata(loads=[(7, [1, 2]), (8, [3])], held=[9])))
    assert engine.take_transferred() is None
    connector.finished, connector.failed = ({9}, {7}), {2}
    assert engine.num_transfers == 3, "two loads and one request that is being sent"
    assert engine.take_transferred() == Transferred((7,), ids_to_bytes([2]), (9,), 2, 1.5)
    assert engine.take_transferred() is None
    assert engine.num_transfers == 1, "the load of 8"


@pytest.mark.parametrize("call", ["bind", "start", "wait", "save", "wait for save", "finished"])
def test_a_connector_that_fails_is_no_longer_used(call, runner, caplog):
    """The step is still computed. The connector's pending transfers end, and all blocks of its loads have failed."""
    engine = runner(connector=())
    engine.launch(plan(1, [0], [3], open=(opened(0, [5, 6, 7], [0]),)))
    expected = engine.collect().ids
    engine = runner()
    connector = Recording.workers[-1]
    connector.explode = call
    with caplog.at_level(logging.ERROR):
        kv = metadata(loads=[(7, [11, 12])], held=[9])
        engine.launch(plan(1, [0], [3], open=(opened(0, [5, 6, 7], [0]),), kv=kv))
        assert engine.collect().ids == expected
        report = engine.take_transferred()
        assert (report.loaded, list(bytes_to_ids(report.failed_blocks)), report.sent) == ((7,), [11, 12], (9,))
        assert engine.num_transfers == 0
        engine.launch(plan(2, kv=metadata(loads=[(8, [13])])))
        assert engine.num_transfers == 1
        report = engine.take_transferred()
        assert (report.loaded, list(bytes_to_ids(report.failed_blocks)), report.sent) == ((8,), [13], ())
    assert len(caplog.records) == 1, "the failure is logged once"
    engine.close()
    assert connector.calls[-1] == "close"
