"""Weights that are packed once: into a segment of shared memory, which the supervisor keeps.

The first worker packs the matrices into the segment and seals it. A worker that replaces it, and those of other engines
that were given the same segment, map it and read no tensor of the checkpoint.
"""

import ctypes
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ...config.config import EngineConfig
from ...kernels import ops as kernels
from ...kernels.ops import Ops, Storage, StoredMatrix
from ...kernels.stored import Stored
from ...version import __version__
from ..checkpoint.spec import fingerprint
from ..executors.weights import Packing, Weights
from ..models.program import Matrix, Vector
from ..weights.segment import (
    Index,
    NotLockableError,
    Segment,
    SegmentWriter,
    StoredParts,
    is_open,
    locked,
    open_segment,
)

log = logging.getLogger(__name__)

Fill = Callable[[Packing], None]


class SharedWeights:
    """The segment that a worker was given for its part of the weights."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.fits = True  # False: it holds something else, and can serve no further worker of this launch

    def load(self, config: EngineConfig, rank: int, packing: Packing, ops: Ops, fill: Fill) -> Weights:
        """The packed weights. fill: reads the checkpoint into a packing; it is called if the segment is not written
        yet, or holds something else. packing: for the second case."""
        storage = ops.storage
        assert storage is not None
        key = segment_key(config, rank, storage.layout)  # before the checkpoint is read
        try:
            with locked(self._fd):
                if is_open(self._fd):
                    into = _IntoSegment(SegmentWriter(self._fd), packing)
                    fill(into)
                    into.finish(key)
                    _trim()
            segment = open_segment(self._fd, key)
        except NotLockableError:
            segment = None
        if segment is None:
            log.warning("the packed weights in shared memory do not fit this checkpoint any more; it is read again")
            self.fits = False
            fill(packing)
            return packing.weights
        return _of_segment(segment, storage)


def segment_key(config: EngineConfig, rank: int, layout: str) -> bytes:
    """32 bytes that differ if the packed weights may differ. Reads the headers of the checkpoint's files."""
    model = config.model
    files = fingerprint(Path(model.path), Path(model.adapter) if model.adapter else None)
    parts = (__version__, layout, rank, files, torch.__version__, config.weights_key)
    return sha256(repr(parts).encode()).digest()


class _IntoSegment(Packing):
    """Packs matrices into a segment, each as soon as it is filled, and keeps none."""

    def __init__(self, writer: SegmentWriter, like: Packing) -> None:
        assert like.options.ops.storage is not None
        super().__init__(replace(like.options, ops=like.options.ops.storage.ops_into(writer)))
        self._writer = writer
        self._index = Index({}, {})

    def take(self, target: Matrix, packed: Iterable[kernels.Matrix]) -> None:
        self._index.matrices[target.key] = tuple(_stored(self._writer, cast(StoredMatrix, each)) for each in packed)

    def take_vector(self, target: Vector, values: Tensor) -> None:
        self._index.parameters[target.key] = self._writer.put(values)

    def finish(self, key: bytes) -> None:
        """Seals the segment."""
        self._writer.finish(key, self._index)


def _stored(writer: SegmentWriter, matrix: StoredMatrix) -> StoredParts:
    kind, tensors, fields = matrix.stored()
    return StoredParts(kind, tuple(None if tensor is None else writer.put(tensor) for tensor in tensors), fields)


def _of_segment(segment: Segment, storage: Storage) -> Weights:
    def restored(parts: StoredParts) -> kernels.Matrix:
        tensors = tuple(None if part is None else segment.tensor(part) for part in parts.tensors)
        return storage.restored(Stored(parts.kind, tensors, parts.fields))

    weights = Weights()
    for key, stack in segment.index.matrices.items():
        weights.matrices[key] = tuple(restored(parts) for parts in stack)
    for key, part in segment.index.parameters.items():
        weights.vectors[key] = segment.tensor(part)
    return weights


def _trim() -> None:
    """Gives freed memory back to the system. The worker's malloc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
