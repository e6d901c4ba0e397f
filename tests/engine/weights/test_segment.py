"""Segments of shared memory: what is written is found again, and nothing else is ever used."""

import fcntl
import itertools
import mmap
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from pagewire.engine.weights.segment import Index, Part, SegmentWriter, StoredParts, is_open, open_segment
from pagewire.procs.weight_memory import close_segments, new_segment

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd")

KEY, OTHER = b"k" * 32, b"o" * 32
_ADD_SEALS = 1033


@pytest.fixture
def make() -> Iterator[Callable[[], int]]:
    made: list[int] = []

    def make_one() -> int:
        made.append(new_segment())
        return made[-1]

    yield make_one
    close_segments(made)


def fill(fd: int, *, key: bytes = KEY) -> torch.Tensor:
    """Writes a matrix and a parameter. Returns the parameter."""
    writer = SegmentWriter(fd)
    packed = torch.arange(300).bfloat16()
    parts = StoredParts("Packed", (writer.put(packed), None), (3, 100, True, None))
    norm = torch.randn(5, 7).t()  # not contiguous
    index = Index({"layers.0": (parts,)}, {"norm": writer.put(norm)})
    writer.finish(key, index)
    return norm


def copied(fd: int, size: int, into: int, seals: int = 0x2 | 0x4 | 0x8) -> int:
    """The first bytes of a segment in another one, sealed."""
    os.ftruncate(into, size)
    os.pwrite(into, os.pread(fd, size, 0), 0)
    fcntl.fcntl(into, _ADD_SEALS, seals)
    return into


def test_what_was_written_is_found_again(make: Callable[[], int]) -> None:
    fd = make()
    assert is_open(fd) and open_segment(fd, KEY) is None
    norm = fill(fd)
    assert not is_open(fd)
    segment = open_segment(fd, KEY)
    assert segment is not None
    (parts,) = segment.index.matrices["layers.0"]
    assert (parts.kind, parts.fields, parts.tensors[1]) == ("Packed", (3, 100, True, None), None)
    assert parts.tensors[0] is not None
    packed = segment.tensor(parts.tensors[0])
    assert packed.dtype == torch.bfloat16 and torch.equal(packed, torch.arange(300).bfloat16())
    assert packed.data_ptr() % 64 == 0
    assert torch.equal(segment.tensor(segment.index.parameters["norm"]), norm)


def test_tensors_are_filled_in_pieces(make: Callable[[], int]) -> None:
    """Among others, of which one is written while pieces are filled."""
    fd, unit, num_units = make(), 1000, 2500  # more than one piece, and the last one is short
    writer = SegmentWriter(fd)
    pieces: list[tuple[int, int]] = []

    def fill(piece: torch.Tensor, first: int) -> None:
        pieces.append((first, piece.numel()))
        piece.copy_(torch.arange(first, first + piece.numel()))

    index = Index({}, {"before": writer.put(torch.full((4 << 20,), 1, dtype=torch.uint8))})
    filled = writer.filled(unit * num_units, torch.int32, unit, fill)
    index.parameters["filled"] = writer.put(filled)
    index.parameters["empty"] = writer.put(writer.filled(0, torch.int32, unit, fill))
    index.parameters["after"] = writer.put(torch.full((100,), 2, dtype=torch.uint8))
    assert len(pieces) > 2 and all(num % unit == 0 for _, num in pieces)
    assert pieces[0][0] == 0 and all(a + num == b for (a, num), (b, _) in itertools.pairwise(pieces))
    del filled
    writer.finish(KEY, index)
    segment = open_segment(fd, KEY)
    assert segment is not None
    before, found, empty, after = (segment.tensor(part) for part in segment.index.parameters.values())
    assert torch.equal(found, torch.arange(unit * num_units, dtype=torch.int32)) and found.data_ptr() % 64 == 0
    assert (before == 1).all() and (after == 2).all() and len(after) == 100 and not len(empty)


def test_tensors_of_all_sizes(make: Callable[[], int]) -> None:
    fd, sizes = make(), (30 << 20, 1, 100, 5000)
    writer = SegmentWriter(fd)
    index = Index({}, {})
    for i, size in enumerate(sizes):
        index.parameters[str(i)] = writer.put(torch.full((size,), i, dtype=torch.uint8))
    index.parameters["empty"] = writer.put(torch.empty(0, 3))
    writer.finish(KEY, index)
    segment = open_segment(fd, KEY)
    assert segment is not None
    for i, size in enumerate(sizes):
        tensor = segment.tensor(segment.index.parameters[str(i)])
        assert len(tensor) == size and (tensor == i).all()
    assert segment.tensor(segment.index.parameters["empty"]).shape == (0, 3)


def test_a_sealed_segment_cannot_be_changed(make: Callable[[], int]) -> None:
    fd = make()
    fill(fd)
    for change in (
        lambda: os.pwrite(fd, b"x", 100),
        lambda: os.ftruncate(fd, 100),
        lambda: os.ftruncate(fd, 1 << 30),
        lambda: mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED),
    ):
        with pytest.raises(PermissionError):
            change()


def test_another_key_a_part_and_a_foreign_file_are_refused(make: Callable[[], int], tmp_path: object) -> None:
    fd = make()
    fill(fd)
    size = os.fstat(fd).st_size
    assert open_segment(copied(fd, size, make()), KEY) is not None, "the copies are made in the right way"
    assert open_segment(fd, OTHER) is None
    assert open_segment(copied(fd, size, make(), seals=0x2 | 0x4), KEY) is None, "it can still be written"
    for length in (0, 10, 4096, size // 2, size - 1):
        assert open_segment(copied(fd, length, make()), KEY) is None, length
    with open("/proc/self/exe", "rb") as file:
        assert open_segment(file.fileno(), KEY) is None and not is_open(file.fileno())
    assert open_segment(10**6, KEY) is None and not is_open(10**6)


def test_a_damaged_index_and_one_that_points_outside_are_refused(make: Callable[[], int]) -> None:
    fd = make()
    fill(fd)
    size = os.fstat(fd).st_size
    damaged = make()
    os.pwrite(damaged, os.pread(fd, size, 0), 0)
    os.pwrite(damaged, b"\xff", size - 3)
    fcntl.fcntl(damaged, _ADD_SEALS, 0x2 | 0x4 | 0x8)
    assert open_segment(damaged, KEY) is None
    for part in (
        Part(0, (10,), "uint8"),
        Part(4096, (1 << 30,), "uint8"),
        Part(4096, (-1,), "uint8"),
        Part(4096, (10,), "nn"),
    ):
        outside = make()
        SegmentWriter(outside).finish(KEY, Index({}, {"a": part}))
        assert open_segment(outside, KEY) is None, part


def test_what_a_dead_process_left_half_written_is_dropped(make: Callable[[], int]) -> None:
    fd = make()
    SegmentWriter(fd).put(torch.zeros(5 << 20, dtype=torch.uint8))
    assert is_open(fd) and open_segment(fd, KEY) is None
    norm = fill(fd)
    segment = open_segment(fd, KEY)
    assert segment is not None and torch.equal(segment.tensor(segment.index.parameters["norm"]), norm)
    assert os.fstat(fd).st_size < 1 << 20
