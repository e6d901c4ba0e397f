"""A folder that several engines share."""

import random
from pathlib import Path

from kv_instance import BLOCK_BYTES, FACTS, SIZE, Instance, sequence

from pagewire.engine.core.kv_connector import Item
from pagewire.engine.kv_connector.block_files import BlockFiles

from .test_disk import block_files, spec


def test_the_size_of_a_shared_folder_counts_the_files_of_other_engines(tmp_path: Path) -> None:
    rng = random.Random(1)
    files = BlockFiles(path=f"{tmp_path}/kv", facts=FACTS)
    files.open("shared")
    old = [(rng.randbytes(32), i) for i in range(30)]
    for key, place in old:
        files.write(Item(key, place), memoryview(bytes(BLOCK_BYTES)))
        files.touch(Item(key, place), 1_000_000_000)
    engine = Instance(spec("shared", tmp_path, 20))
    engine.wait_until_written()
    assert len(block_files(tmp_path)) <= 20, "the files of evicted blocks are removed"
    engine.serve(sequence(1, (1, 6 * SIZE)))
    engine.wait_until_written()
    engine.close()
    assert len(block_files(tmp_path)) <= 20
    assert all(list(tmp_path.rglob(f"{key.hex()}.*")) for key in sequence(1, (1, 6 * SIZE)).block_keys(6, SIZE))
    left = [place for key, place in old if files.has(Item(key, place))]
    assert left == list(range(len(left))), "of equal age, the blocks farthest from the start are evicted first"


def test_a_present_shared_block_is_not_written_again(tmp_path: Path) -> None:
    engines = [Instance(spec("shared", tmp_path)) for _ in range(2)]
    runs = [engine.run(sequence(1, (1, 5 * SIZE))) for engine in engines]  # both compute it
    for engine, request in zip(engines, runs, strict=True):
        engine.end(request)
    engines[0].step()
    engines[0].wait_until_written()
    before = [path.stat().st_ino for path in block_files(tmp_path)]
    engines[1].core._index._seen.clear()
    engines[1].step()
    engines[1].wait_until_written()
    assert [path.stat().st_ino for path in block_files(tmp_path)] == before
    for engine in engines:
        engine.close()
