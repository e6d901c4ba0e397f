"""Several connectors as one: each part loads its blocks, and saves blocks before another part overwrites them."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from kv_instance import BLOCK_BYTES, FILE_BYTES, SIZE, Asked, Instance, sequence

from pagewire.engine.core.kv_connector import Evicted, KvEvent, KvRequest
from pagewire.engine.kv_connector.chain import ChainCore, ChainWorker
from pagewire.engine.kv_connector.host_worker import HostWorker
from pagewire.engine.kv_connector.one_group import OneGroup
from pagewire.ipc.messages import TierSnapshot, Transferred, ids_to_bytes


def test_a_farther_tier_loads_the_blocks_after_those_of_the_nearer_tier(tmp_path: Path) -> None:
    engine = Instance(f"host,size={4 * BLOCK_BYTES}", f"disk,path={tmp_path},size={64 * FILE_BYTES}", num_blocks=12)
    request = sequence(1, (1, 10 * SIZE + 1))
    engine.serve(request)
    engine.fill_device(2)  # of the 10 evicted blocks, the host keeps the first 4
    engine.core.take_events()
    assert engine.core.get_num_new_matched_tokens(request, 0) == (10 * SIZE, True)
    assert engine.core.get_num_new_matched_tokens(request, 2 * SIZE) == (8 * SIZE, True)
    assert engine.serve(sequence(4, (1, 10 * SIZE + 1))) == 10
    host, disk = engine.core.tiers()
    assert (host.name, host.num_hit_tokens, disk.name, disk.num_hit_tokens) == ("host", 4 * SIZE, "disk", 6 * SIZE)
    assert {event.tier for event in engine.core.take_events()} == {"host"}
    engine.close()


def test_failed_loads_are_counted_by_the_part_that_loaded(tmp_path: Path) -> None:
    engine = Instance(f"host,size={4 * BLOCK_BYTES}", f"disk,path={tmp_path},size={64 * FILE_BYTES}", num_blocks=12)
    request = sequence(1, (1, 10 * SIZE + 1))
    engine.serve(request)
    engine.fill_device(2)
    key = request.keys[7]
    engine.close()
    engine.close()  # closing twice is allowed
    engine = Instance(f"host,size={4 * BLOCK_BYTES}", f"disk,path={tmp_path},size={64 * FILE_BYTES}", num_blocks=12)
    next(tmp_path.rglob(f"{key.hex()}.*")).unlink()
    assert engine.serve(sequence(4, (1, 10 * SIZE + 1))) == 9
    assert engine.failed == [key]
    host, disk = engine.core.tiers()
    assert (host.num_failed, disk.num_failed) == (0, 1)
    engine.close()


def num_saved_blocks(path: Path) -> int:
    """One plan loads a request into the blocks that another frees. Returns how many of the freed ones load again."""
    engine = Instance(f"host,size={8 * BLOCK_BYTES}", f"disk,path={path},size={64 * FILE_BYTES}", num_blocks=8)
    try:
        engine.serve(sequence(1, (1, 8 * SIZE)))  # stored on the disk, and idle on the device
        engine.end(engine.run(sequence(2, (2, 8 * SIZE))))  # the first request's blocks are evicted to the host
        again = sequence(3, (1, 8 * SIZE))
        assert engine.admit(again)
        engine.step()
        engine.settle()
        assert engine.step() == [again]
        engine.end(again)
        engine.step()
        return engine.serve(sequence(4, (2, 8 * SIZE)))
    finally:
        engine.close()


def test_a_part_saves_blocks_before_another_part_overwrites_them(tmp_path: Path) -> None:
    assert num_saved_blocks(tmp_path) == 7


def test_a_part_that_writes_too_early_is_noticed(tmp_path: Path) -> None:
    original = HostWorker.start_load_kv

    def early(worker: HostWorker) -> None:
        original(worker)
        for chunk in worker._chunks:
            worker._copier.write(chunk.blocks, worker._slots[chunk.slots])

    with patch.object(HostWorker, "start_load_kv", early), pytest.raises(AssertionError, match="holds something else"):
        num_saved_blocks(tmp_path)


class Part:
    """Both halves of a connector with given answers, which records its calls."""

    def __init__(self, num: int | None, *, keeps: bool = False) -> None:
        self.num = num
        self.keeps = keeps
        self.calls: list[tuple[object, ...]] = []
        self.finished: tuple[set[int], set[int]] = (set(), set())
        self.failed: set[int] = set()
        self.num_pending = 0

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.num, True

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        self.calls.append(("alloc", list(block_ids), num_external_tokens))

    def build_connector_meta(self) -> bytes:
        return b"x"

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        return self.keeps

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        self.calls.append(("evicted", evicted))

    def update_connector_output(self, output: Transferred) -> None:
        self.calls.append(("output", output))

    def take_events(self) -> list[KvEvent]:
        return []

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return ()

    def reset(self) -> None:
        self.calls.append(("reset",))

    def register_kv_caches(self, cache: object) -> None:
        self.calls.append(("register",))

    def bind_connector_metadata(self, metadata: bytes) -> None:
        self.calls.append(("bind", metadata))

    def start_load_kv(self) -> None:
        self.calls.append(("start",))

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(("layer", layer))

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(("saved", layer))

    def wait_for_save(self) -> None:
        self.calls.append(("wait",))

    def get_finished(self) -> tuple[set[int], set[int]]:
        finished, self.finished = self.finished, (set(), set())
        return finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def take_load_cost(self) -> tuple[int, float]:
        return 2, 1.5

    def close(self) -> None:
        self.calls.append(("close",))


def chain(*parts: Part) -> tuple[Asked, ChainWorker]:
    return Asked(ChainCore([OneGroup(part, block_size=SIZE) for part in parts])), ChainWorker(parts)


def test_each_part_loads_the_blocks_that_it_matched() -> None:
    parts = [Part(2 * SIZE), Part(0), Part(3 * SIZE)]
    core, _ = chain(*parts)
    request = sequence(1, (1, 40))
    assert core.get_num_new_matched_tokens(request, SIZE) == (5 * SIZE, True)
    core.update_state_after_alloc(request, [10, 11, 12, 13, 14, 15], 5 * SIZE)
    assert [part.calls for part in parts] == [
        [("alloc", [-1, 11, 12], 2 * SIZE)],
        [],
        [("alloc", [-1, -1, -1, 13, 14, 15], 3 * SIZE)],
    ]


def test_a_load_may_be_shorter_than_its_match() -> None:
    parts = [Part(2 * SIZE), Part(3 * SIZE)]
    core, _ = chain(*parts)
    request = sequence(1, (1, 40))
    core.get_num_new_matched_tokens(request, 0)
    core.update_state_after_alloc(request, [10, 11], 2 * SIZE)
    assert [part.calls for part in parts] == [[("alloc", [10, 11], 2 * SIZE)], []]


def test_the_match_is_unknown_while_one_part_does_not_know_its_own() -> None:
    core, _ = chain(Part(SIZE), Part(None))
    assert core.get_num_new_matched_tokens(sequence(1, (1, 40)), 0)[0] is None


def test_matches_of_requests_that_never_start_are_forgotten() -> None:
    core, _ = chain(Part(SIZE), Part(SIZE))
    for rid in range(3000):
        core.get_num_new_matched_tokens(sequence(rid, (1, 40)), 0)
    assert len(core._owners) <= 1024
    core.update_state_after_alloc(sequence(0, (1, 40)), [1, 2], 2 * SIZE)  # forgotten, so the last part loads all
    core.request_finished(sequence(2999, (1, 40)), [])
    assert 2999 not in core._owners


def test_a_load_ends_when_all_parts_are_done() -> None:
    parts = [Part(SIZE, keeps=True), Part(SIZE, keeps=True)]
    core, worker = chain(*parts)
    first, second = sequence(1, (1, 40)), sequence(2, (2, 40))
    for request, blocks in ((first, [4, 5]), (second, [6, 7])):
        core.get_num_new_matched_tokens(request, 0)
        core.update_state_after_alloc(request, blocks, 2 * SIZE)
    assert core.request_finished(sequence(3, (3, 4)), [9])
    worker.bind_connector_metadata(core.build_connector_meta())
    worker.start_load_kv()
    parts[0].finished, parts[0].failed = ({3}, {1, 2}), {4, 6}
    assert worker.get_finished() == (set(), set())
    assert worker.get_block_ids_with_load_errors() == set()
    parts[1].finished, parts[1].failed = (set(), {2}), {7}
    assert worker.get_finished() == (set(), {2})
    assert worker.get_block_ids_with_load_errors() == {6, 7}
    parts[1].finished = ({3}, {1})
    assert worker.get_finished() == ({3}, {1})
    assert worker.get_block_ids_with_load_errors() == {4}
    assert worker.get_finished() == (set(), set())
    assert not (worker._left or worker._rid_of or worker._blocks_of or worker._bad or worker._kept)


def test_every_call_is_passed_to_all_parts() -> None:
    parts = [Part(0), Part(0)]
    core, worker = chain(*parts)
    output = Transferred((1,), ids_to_bytes(array("i")), ())
    core.blocks_evicted([Evicted(1, b"k", 0)])
    core.update_connector_output(output)
    core.reset()
    worker.bind_connector_metadata(core.build_connector_meta())
    worker.wait_for_layer_load(1)
    worker.save_kv_layer(1)
    worker.wait_for_save()
    assert worker.take_load_cost() == (4, 3.0)
    worker.close()
    expected = [
        ("evicted", [Evicted(1, b"k", 0)]),
        ("output", output),
        ("reset",),
        ("bind", b"x"),
        ("layer", 1),
        ("saved", 1),
        ("wait",),
        ("close",),
    ]
    assert parts[0].calls == parts[1].calls == expected
