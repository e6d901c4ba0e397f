"""Copies between the device and the memory of the host."""

import mmap
import sys

import pytest
import torch
from kv_instance import BLOCK_BYTES, FACTS, SHAPE, SIZE, Instance, content, sequence
from msgspec import msgpack

from pagewire.engine.attention.kv_cache import KvCache
from pagewire.engine.kv_connector.block_copy import BlockCopier
from pagewire.engine.kv_connector.host_meta import HostMeta
from pagewire.engine.kv_connector.host_worker import HostWorker
from pagewire.ipc.messages import Transferred, ids_to_bytes


def test_a_long_load_takes_several_steps() -> None:
    engine = Instance(f"host,size={64 * BLOCK_BYTES}")
    worker = engine.worker
    assert isinstance(worker, HostWorker)
    worker._copier.chunk = 2
    engine.serve(sequence(1, (1, 20 * SIZE + 1)))
    engine.fill_device(2)
    request = sequence(3, (1, 20 * SIZE + 1))
    assert engine.admit(request)
    engine.step()
    assert worker.num_pending == 1
    engine.settle()
    assert engine.num_loaded == 20


def test_copies_are_bit_equal_in_chunks_of_any_size() -> None:
    cache = KvCache(shape=SHAPE, num_pages=9, block_size=SIZE, device=torch.device("cpu"))
    copier = BlockCopier(cache)
    rows = torch.stack([content(bytes([i])) for i in range(6)])
    blocks = [7, 0, 3, 8, 2, 5]
    for chunk in (1, 2, 4, 6, 100):
        copier.chunk = chunk
        copier.write(blocks, rows)
        assert torch.equal(torch.cat(list(copier.read(blocks))), rows)
    keys, values = cache.pages[1]
    flat = torch.stack([keys[3], values[3]]).flatten().view(torch.uint8)
    assert torch.equal(flat, rows[2].view(3, -1)[1])
    for bad in ([9], [-1], [0, 100]):
        with pytest.raises(ValueError, match="of a cache of 9"):
            list(copier.read(bad))
        with pytest.raises(ValueError, match="of a cache of 9"):
            copier.write(bad, rows[: len(bad)])
    assert copier.block_bytes == FACTS.block_bytes


def test_a_load_of_a_block_that_was_never_stored_fails() -> None:
    engine = Instance(f"host,size={4 * BLOCK_BYTES}")
    core = engine.core
    request = sequence(1, (1, SIZE + 1))
    request.blocks = engine.pool.allocate(1)
    engine.loading[1] = (request, 0)
    core.update_state_after_alloc(request, request.blocks, SIZE)  # never stored
    engine.step()
    assert engine.failed == request.keys[:1] and engine.worker.num_pending == 0


def test_a_load_of_another_connector_fails_no_block_of_the_host() -> None:
    engine = Instance(f"host,size={4 * BLOCK_BYTES}")
    core, stored = engine.core, sequence(1, (1, 2 * SIZE + 1))
    engine.serve(stored)
    engine.fill_device(2)
    request = sequence(3, (1, 2 * SIZE + 1))
    assert engine.admit(request) and len(request.blocks) == 2  # being loaded
    before = core.tiers()
    core.update_connector_output(Transferred((77,), ids_to_bytes(request.blocks), ()))
    assert core.tiers() == before and before[0].num_failed == 0
    engine.step()
    engine.settle()
    assert engine.num_loaded == 2 and not engine.failed


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not told")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_of_slots_that_are_given_up_returns_and_the_others_keep_their_blocks(device: str) -> None:
    """Also beside a GPU, where pinned memory would stay, and be as much as the next power of two."""
    size = 3 * mmap.PAGESIZE // BLOCK_BYTES + 1  # slots with two whole system pages, at least
    worker = HostWorker(num_slots=3 * size, facts=FACTS)
    cache = KvCache(shape=SHAPE, num_pages=4, block_size=SIZE, device=torch.device("cpu"))
    cache.device = torch.device(device)  # no block is copied from it
    worker.register_kv_caches(cache)
    worker._slots.fill_(7)
    given_up = [*range(size), 2 * size]
    worker.bind_connector_metadata(msgpack.encode(HostMeta(b"", b"", (), ids_to_bytes(given_up))))
    worker.start_load_kv()
    assert int((worker._slots[:size] == 0).sum()) >= 2 * mmap.PAGESIZE
    kept = [slot for slot in range(3 * size) if slot not in given_up]
    assert bool((worker._slots[kept] == 7).all())
