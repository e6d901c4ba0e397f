"""The core side of the guard around third-party connectors. The worker's side is in runner/test_transfers.py."""

import logging
from array import array
from dataclasses import dataclass, field

import msgspec
import pytest
from kv_instance import Asked

from pagewire.engine.core.kv_connector import KvEvent
from pagewire.engine.kv_connector.base import ConnectorFacts
from pagewire.engine.kv_connector.guard import Guarded, GuardedCore, GuardedWorker, UnderWay
from pagewire.engine.kv_connector.one_group import OneGroup
from pagewire.errors import ConfigError
from pagewire.ipc.messages import Transferred, ids_to_bytes

FACTS = ConnectorFacts(block_size=4, block_bytes=1, model_key=bytes(32))


@dataclass
class FakeRequest:
    rid: int = 7
    ids: "array[int]" = field(default_factory=lambda: array("i", range(30)))
    num_computed: int = 8
    root: bytes = b""
    awaits_kv: bool = False
    kv_peer: str = ""

    def block_keys(self, num, block_size):
        return [bytes([i]) * 32 for i in range(num)]


class Careless:
    """A core half that returns or raises what it is given."""

    def __init__(self):
        self.answer = (8, True)
        self.metadata = b"own"
        self.holds = True
        self.events = []
        self.closed = False

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def update_state_after_alloc(self, request, block_ids, num_external_tokens): ...

    def build_connector_meta(self):
        return self.metadata

    def request_finished(self, request, block_ids):
        return self.holds

    def blocks_evicted(self, evicted): ...

    def update_connector_output(self, output): ...

    def take_events(self):
        return self.events

    def tiers(self):
        return ("a tier",)

    def reset(self): ...

    def close(self):
        self.closed = True


class Kind:
    @staticmethod
    def check(options):
        raise ConfigError("it is checked")

    @staticmethod
    def core(options, facts):
        return Careless()


@pytest.fixture
def core() -> Asked:
    core = Guarded(Kind, "careless").core({}, FACTS)
    assert isinstance(core, GuardedCore) and isinstance(core._inner, OneGroup)
    return Asked(core)


def test_the_connector_checks_its_options():
    with pytest.raises(ConfigError, match="it is checked"):
        Guarded(Kind, "careless").check({})


def test_loads_and_held_requests_are_sent_with_the_metadata(core):
    request = FakeRequest()
    assert core.get_num_new_matched_tokens(request, 4) == (8, True)
    core.update_state_after_alloc(request, [5, 6, 9], 8)
    assert core.request_finished(FakeRequest(rid=3), [1])
    decoded = msgspec.msgpack.decode(core.build_connector_meta(), type=UnderWay)
    assert decoded == UnderWay(((7, ids_to_bytes([6, 9])),), (3,), b"own")
    core._inner.connector.metadata = b""
    assert core.build_connector_meta() == b""


@pytest.mark.parametrize("answer", [RuntimeError("a bug"), (3, False), (28, False), (-4, True), "nonsense", None])
def test_a_core_half_that_raised_or_answered_wrongly_is_not_called_again(answer, core, caplog):
    core.update_state_after_alloc(FakeRequest(), [5, 6], 4)
    core._inner.connector.answer = answer
    with caplog.at_level(logging.ERROR):
        assert core.get_num_new_matched_tokens(FakeRequest(), 4) == (0, False)
        core._inner.connector.answer = (8, True)
        assert core.get_num_new_matched_tokens(FakeRequest(), 4) == (0, False)
        assert (core.request_finished(FakeRequest(), [1]), core.take_events(), core.tiers()) == (False, [], ())
        core.update_connector_output(Transferred((), b"", ()))
        core.blocks_evicted([])
        loads = msgspec.msgpack.decode(core.build_connector_meta(), type=UnderWay).loads
        assert loads == ((7, ids_to_bytes([6])),), "the worker half reports the loads under way"
    assert len(caplog.records) == 1
    core.close()
    assert core._inner.connector.closed


@pytest.mark.parametrize("metadata", [None, "text", {"a": 1}, 7])
def test_metadata_of_a_wrong_type_disables_the_half(core: Asked, metadata: object) -> None:
    core._inner.connector.metadata = metadata
    assert core.build_connector_meta() == b"" and core.is_broken


def test_events_that_nobody_can_publish_are_left_out(core: Asked, caplog: pytest.LogCaptureFixture) -> None:
    valid = KvEvent(True, (bytes(32),), "theirs")
    core._inner.connector.events = [KvEvent(True, (), "theirs"), valid, valid._replace(group=1)]
    with caplog.at_level(logging.WARNING):
        assert core.take_events() == [valid]
        assert core.take_events() == [valid] and not core.is_broken
        core._inner.connector.events = [valid._replace(group=-1)]
        assert core.take_events() == []
    assert len(caplog.records) == 1 and "careless" in caplog.text


def test_events_of_another_kind_disable_the_half(core: Asked) -> None:
    core._inner.connector.events = ["an event"]
    assert core.take_events() == [] and core.is_broken


@pytest.mark.parametrize(("answer", "holds"), [((False, None), False), ((True, {"a": 1}), True), (None, False)])
def test_answers_in_the_form_of_other_engines_are_accepted(core: Asked, answer: object, holds: bool) -> None:
    inner = core._inner.connector
    inner.holds = answer
    assert core.request_finished(FakeRequest(), [1, 2]) is holds


class Writing:
    """A worker half that returns None and later raises; its thread would write until it is closed."""

    num_pending = 1

    def __init__(self):
        self.fails = False
        self.num_closed = 0

    def bind_connector_metadata(self, metadata): ...

    def get_finished(self):
        if self.fails:
            raise RuntimeError("it broke")
        return None, None

    def close(self):
        self.num_closed += 1


def test_a_worker_half_that_raises_is_closed_and_its_loads_fail() -> None:
    inner = Writing()
    worker = GuardedWorker(inner, "writing")
    worker.bind_connector_metadata(msgspec.msgpack.encode(UnderWay(((7, ids_to_bytes([1, 2])),), (), b"")))
    assert worker.get_finished() == (set(), set()) and not worker.is_broken
    inner.fails = True
    assert worker.get_finished() == (set(), {7}) and inner.num_closed == 1
    assert worker.get_block_ids_with_load_errors() == {1, 2} and worker.is_broken
    worker.close()
    assert inner.num_closed == 1


def test_a_load_that_never_ends_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.engine.kv_connector.guard.LOAD_TIMEOUT_S", 0.0)
    inner = Writing()
    worker = GuardedWorker(inner, "silent")
    worker.bind_connector_metadata(msgspec.msgpack.encode(UnderWay(((7, ids_to_bytes([1, 2])),), (), b"")))
    assert worker.num_pending == 1
    while not (answer := worker.get_finished())[1]:
        pass
    assert answer == (set(), {7}) and worker.get_block_ids_with_load_errors() == {1, 2} and inner.num_closed == 1
