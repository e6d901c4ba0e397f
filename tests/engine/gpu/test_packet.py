"""Which part of a packet is sent."""

import pytest
import torch

from pagewire.engine.gpu.packet import HostPacket, Limits, Packet, size_of

LIMITS = Limits(rows=5, tokens=40, samples=18, part=6, tiles=7, blocks=3)


@pytest.mark.parametrize(("num_parts", "has_tiles"), [(0, False), (1, False), (1, True), (2, True), (3, True)])
def test_the_sent_part_has_what_the_step_uses_and_nothing_else(num_parts, has_tiles):
    size = size_of(LIMITS)
    host = HostPacket(torch.full((size,), -1, dtype=torch.int32), LIMITS)
    ours = Packet.over(torch.full((size,), -1, dtype=torch.int32), LIMITS)
    host.tiles[:], host.step[:30] = 70, 90
    for number, part in enumerate(host.parts):
        for place, column in enumerate((part.tokens, part.rows, part.places, part.masks, part.asking)):
            column[:] = 10 * number + place
    used = host.used(30, num_parts=num_parts, has_tiles=has_tiles)
    ours.whole[used].copy_(host.whole[used])
    assert ours.step[:31].tolist() == [90] * 30 + [-1]
    assert ours.tiles.unique().tolist() == ([70] if has_tiles else [-1])
    assert len(ours.parts) == 3
    for number, sent in enumerate(ours.parts):
        for place, values in enumerate((sent.tokens, sent.rows, sent.places, sent.masks, sent.asking)):
            expected = 10 * number + place if number < max(1, num_parts) else -1
            assert values.tolist() == [expected] * LIMITS.part
            assert values.storage_offset() % 4 == 0, "kernels need 16 bytes"


def test_records_of_opened_rows_follow_the_step():
    host = HostPacket(torch.zeros(size_of(LIMITS), dtype=torch.int32), LIMITS)
    first, records = host.opens(30, LIMITS.rows)
    records[:] = 5
    assert first == 32 and (host.step[first : first + records.size] == 5).all() and not host.step[:first].any()


def test_a_step_of_decode_rows_is_short():
    """256 rows where a step may have 8,192 tokens: 12 KiB of rows, 5 KiB of samples, 1 KiB of ids."""
    limits = Limits(rows=256, tokens=8192, samples=256, part=256, tiles=1248, blocks=65)
    host = HostPacket(torch.zeros(size_of(limits), dtype=torch.int32), limits)
    used = host.used(8 + 12 * 256 + 256, num_parts=1, has_tiles=False)
    assert 4 * (used.stop - used.start) < 19 << 10
