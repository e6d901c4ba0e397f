"""The disk and shared tiers, both halves, on real folders."""

from pathlib import Path

import pytest
from kv_instance import FACTS, FILE_BYTES, SIZE, Instance, sequence
from msgspec.structs import replace

from pagewire.engine.kv_connector import disk
from pagewire.engine.kv_connector.disk import DiskCore
from pagewire.errors import ConfigError

KINDS = pytest.mark.parametrize("kind", ["disk", "shared"])


def spec(kind: str, path: Path, num_blocks: int = 64) -> str:
    return f"{kind},path={path}/kv,size={num_blocks * FILE_BYTES}"


def block_files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != ".lock")


@KINDS
def test_blocks_are_loaded_after_a_restart(kind: str, tmp_path: Path) -> None:
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
def test_the_last_position_is_never_loaded(kind: str, tmp_path: Path) -> None:
    engine = Instance(spec(kind, tmp_path))
    engine.serve(sequence(1, (1, 3 * SIZE)))
    engine.fill_device(2)
    core = engine.core
    engine.wait_until_written()
    assert core.get_num_new_matched_tokens(sequence(3, (1, 3 * SIZE)), 0) == (2 * SIZE, True)
    assert core.get_num_new_matched_tokens(sequence(4, (1, 3 * SIZE + 1)), SIZE) == (2 * SIZE, True)
    assert core.get_num_new_matched_tokens(sequence(5, (1, 1)), 0) == (0, False)
    engine.close()


def test_the_least_recently_used_blocks_are_evicted_first(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path, 10), num_blocks=12)
    for i in (1, 2):
        engine.serve(sequence(i, (i, 4 * SIZE)))
    engine.serve(sequence(3, (1, 4 * SIZE)))  # is still on the device, but counts as a use
    engine.serve(sequence(4, (4, 4 * SIZE)))
    engine.close()
    engine = Instance(spec("disk", tmp_path, 10), num_blocks=12)
    matched = {i: engine.core.get_num_new_matched_tokens(sequence(9, (i, 4 * SIZE), (9, 1)), 0)[0] for i in (1, 2, 4)}
    assert matched == {1: 4 * SIZE, 2: 2 * SIZE, 4: 4 * SIZE}
    assert len(block_files(tmp_path)) == 10
    engine.close()


def test_blocks_are_evicted_when_the_size_is_smaller_after_a_restart(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path))
    engine.serve(sequence(1, (1, 8 * SIZE)))
    engine.close()
    engine = Instance(spec("disk", tmp_path, 3))
    assert engine.core.get_num_new_matched_tokens(sequence(9, (1, 8 * SIZE)), 0)[0] == 3 * SIZE
    engine.step()
    engine.close()
    assert len(block_files(tmp_path)) == 3


def test_a_sequence_larger_than_the_disk_stays_within_its_size(tmp_path: Path) -> None:
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


def test_a_second_engine_on_the_same_disk_folder_is_refused(tmp_path: Path) -> None:
    engine = Instance(spec("disk", tmp_path))
    with pytest.raises(ConfigError, match="another engine uses this folder"):
        Instance(spec("disk", tmp_path))
    engine.close()
    Instance(spec("disk", tmp_path)).close()


@KINDS
def test_reset_forgets_loads_under_way(kind: str, tmp_path: Path) -> None:
    engine = Instance(spec(kind, tmp_path))
    engine.serve(sequence(1, (1, 4 * SIZE + 1)))
    engine.fill_device(2)
    engine.wait_until_written()
    request = sequence(3, (1, 4 * SIZE + 1))
    assert engine.admit(request)
    engine.core.reset()
    assert engine.core.build_connector_meta() == b""
    assert engine.core.get_num_new_matched_tokens(request, 0) == (4 * SIZE, True)
    engine.core.update_state_after_alloc(request, request.blocks, 4 * SIZE)  # the same rid, once more
    engine.close()


def test_a_smaller_disk_tier_removes_files_plan_by_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_AT_ONCE", 4)
    engine = Instance(spec("disk", tmp_path))
    engine.serve(sequence(1, (1, 10 * SIZE + 2)))
    engine.wait_until_written()
    core: DiskCore = engine.core.core
    core.resize(3 * FILE_BYTES)
    engine.step()
    assert core.tiers()[0].num_blocks == 6, "the next plan removes four"
    engine.step()
    tier = core.tiers()[0]
    assert (tier.num_blocks, tier.capacity, tier.num_evicted) == (3, 3, 7)
    engine.wait_until_written()
    assert len(block_files(tmp_path)) == 3
    core.resize(64 * FILE_BYTES)
    engine.fill_device(2)
    assert engine.serve(sequence(3, (1, 10 * SIZE + 2))) == 3 and core.tiers()[0].capacity == 64
    engine.close()
