"""The disk and shared tiers, both halves, on real folders."""

from pathlib import Path

import pytest
from kv_instance import BLOCK_BYTES, FACTS, FILE_BYTES, SIZE, Instance, sequence
from msgspec.structs import replace
from waiting import until

from pagewire.engine.kv_connector.file_worker import FileWorker
from pagewire.errors import ConfigError

KINDS = pytest.mark.parametrize("kind", ["disk", "shared"])


def spec(kind: str, path: Path, num_blocks: int = 64) -> str:
    return f"{kind},path={path}/kv,size={num_blocks * FILE_BYTES}"


def written(engine: Instance) -> None:
    """Waits until the worker's thread has done all its jobs."""
    assert isinstance(engine.worker, FileWorker)
    writer = engine.worker._writer
    until(lambda: not writer._jobs and not writer._pending, "all is written")


def block_files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != ".lock")


@KINDS
def test_over_a_restart(kind: str, tmp_path: Path) -> None:
    engine = Instance(spec(kind, tmp_path))
    engine.serve(sequence(1, (1, 10 * SIZE + 2)))
    assert engine.serve(sequence(2, (1, 10 * SIZE + 2))) == 0  # the device has it
    engine.close()
    assert len(block_files(tmp_path)) == 10
    engine = Instance(spec(kind, tmp_path))
    tier = engine.core.tiers()[0]
    assert (tier.name, tier.num_blocks, tier.capacity, tier.num_stored) == (kind, 10, 64, 0)
    assert engine.serve(sequence(3, (1, 10 * SIZE + 2))) == 10
    assert engine.serve(sequence(4, (2, 10 * SIZE + 2))) == 0
    tier = engine.core.tiers()[0]
    assert (tier.num_blocks, tier.num_hit_tokens, tier.num_stored, tier.num_failed) == (20, 10 * SIZE, 10, 0)
    engine.close()


@KINDS
def test_the_last_position_is_left_to_compute(kind: str, tmp_path: Path) -> None:
    engine = Instance(spec(kind, tmp_path))
    engine.serve(sequence(1, (1, 3 * SIZE)))
    engine.fill_device(2)
    core = engine.core
    written(engine)
    assert core.get_num_new_matched_tokens(sequence(3, (1, 3 * SIZE)), 0) == (2 * SIZE, True)
    assert core.get_num_new_matched_tokens(sequence(4, (1, 3 * SIZE + 1)), SIZE) == (2 * SIZE, True)
    assert core.get_num_new_matched_tokens(sequence(5, (1, 1)), 0) == (0, False)
    engine.close()


def test_the_oldest_are_evicted_first(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path, 10), num_blocks=12)
    for i in (1, 2):
        engine.serve(sequence(i, (i, 4 * SIZE)))
    engine.serve(sequence(3, (1, 4 * SIZE)))  # was on the device, but counts as use
    engine.serve(sequence(4, (4, 4 * SIZE)))
    engine.close()
    engine = Instance(spec("disk", tmp_path, 10), num_blocks=12)
    asks = {i: engine.core.get_num_new_matched_tokens(sequence(9, (i, 4 * SIZE), (9, 1)), 0)[0] for i in (1, 2, 4)}
    assert asks == {1: 4 * SIZE, 2: 2 * SIZE, 4: 4 * SIZE}
    assert len(block_files(tmp_path)) == 10
    engine.close()


def test_a_smaller_disk_after_a_restart(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path))
    engine.serve(sequence(1, (1, 8 * SIZE)))
    engine.close()
    engine = Instance(spec("disk", tmp_path, 3))
    assert engine.core.get_num_new_matched_tokens(sequence(9, (1, 8 * SIZE)), 0)[0] == 3 * SIZE
    engine.step()
    engine.close()
    assert len(block_files(tmp_path)) == 3


def test_a_sequence_larger_than_the_disk(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path, 5))
    engine.serve(sequence(1, (1, 20 * SIZE)))
    engine.fill_device(2)
    assert engine.core.tiers()[0].num_blocks == 5
    engine.close()
    assert len(block_files(tmp_path)) == 5


def test_files_of_another_model_are_never_found_and_removed_first(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path, 10))
    engine.serve(sequence(1, (1, 8 * SIZE)))
    engine.close()
    other = replace(FACTS, model_key=b"another".ljust(32))
    engine = Instance(spec("disk", tmp_path, 10), facts=other)
    assert engine.core.get_num_new_matched_tokens(sequence(2, (1, 8 * SIZE)), 0) == (0, False)
    engine.serve(sequence(3, (3, 6 * SIZE)))
    engine.close()
    assert len(block_files(tmp_path)) == 10
    assert len(list(tmp_path.glob(f"kv/{other.model_key.hex()[:16]}/*/*"))) == 6


def test_one_disk_has_one_engine(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path))
    with pytest.raises(ConfigError, match="another engine uses this folder"):
        Instance(spec("disk", tmp_path))
    engine.close()
    Instance(spec("disk", tmp_path)).close()


def test_partial_files_are_removed(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path))
    engine.serve(sequence(1, (1, 2 * SIZE)))
    engine.close()
    part = block_files(tmp_path)[0].parent / ".part.1.2"
    part.write_bytes(b"half")
    engine = Instance(spec("disk", tmp_path))
    assert engine.core.tiers()[0].num_blocks == 2
    engine.close()
    assert not part.exists()


def test_blocks_that_wait_to_be_written_can_be_loaded(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path))
    first = sequence(1, (1, 4 * SIZE + 1))
    engine.serve(first)
    written(engine)
    assert isinstance(engine.worker, FileWorker)
    path = next(tmp_path.rglob(f"{first.keys[0].hex()}.*"))
    data = memoryview(path.read_bytes())[-BLOCK_BYTES:]
    path.unlink()
    engine.worker._writer._pending[first.keys[0]] = data  # as if its turn had not come
    engine.fill_device(2)
    assert engine.serve(sequence(3, (1, 4 * SIZE + 1))) == 4
    engine.close()


def test_a_present_shared_block_is_not_written_again(tmp_path: Path) -> None:
    engines = [Instance(spec("shared", tmp_path)) for _ in range(2)]
    runs = [engine.run(sequence(1, (1, 5 * SIZE))) for engine in engines]  # both compute it
    for engine, request in zip(engines, runs, strict=True):
        engine.end(request)
    engines[0].step()
    written(engines[0])
    before = [path.stat().st_ino for path in block_files(tmp_path)]
    engines[1].core._seen.clear()  # type: ignore[attr-defined]
    engines[1].step()
    written(engines[1])
    assert [path.stat().st_ino for path in block_files(tmp_path)] == before
    for engine in engines:
        engine.close()


@KINDS
def test_reset_forgets_what_was_under_way(kind: str, tmp_path: Path) -> None:
    engine = Instance(spec(kind, tmp_path))
    engine.serve(sequence(1, (1, 4 * SIZE + 1)))
    engine.fill_device(2)
    written(engine)
    request = sequence(3, (1, 4 * SIZE + 1))
    assert engine.admit(request)
    engine.core.reset()
    assert engine.core.build_connector_meta() == b""
    assert engine.core.get_num_new_matched_tokens(request, 0) == (4 * SIZE, True)
    engine.core.update_state_after_alloc(request, request.blocks, 4 * SIZE)  # the same rid, once more
    engine.close()
