"""Weights that are packed once: into a segment of shared memory, which the supervisor keeps.

The first worker packs the matrices into the segment and seals it. A worker that replaces it, and those of other engines
that were given the same segment, map it and read no tensor of the checkpoint.
"""

import ctypes
import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import nn

from ...config.config import EngineConfig
from ...kernels.ops import Ops, Storage, StoredMatrix
from ...kernels.stored import Stored
from ...version import __version__
from ..checkpoint.spec import fingerprint
from ..layers.linear import Weight
from ..layers.moe import MoeMlp
from ..models.decoder import Decoder
from ..weights.segment import Index, Segment, SegmentWriter, StoredParts, is_open, locked, open_segment

log = logging.getLogger(__name__)

_TRIM_BYTES = 64 << 20  # of packed weights whose sources' memory is then given back to the system


class SharedWeights:
    """The segment that a worker was given for its part of the weights."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.fits = True  # False: it holds something else, and can serve no further worker of this launch

    def load(self, config: EngineConfig, rank: int, decoder: Decoder, ops: Ops, fill: Callable[[], None]) -> int:
        """Gives the decoder its packed weights. fill: reads the checkpoint into the decoder's parameters; it is called
        if the segment is not written yet, or holds something else. Returns the bytes of all parameters."""
        storage = ops.storage
        assert storage is not None
        key = segment_key(config, rank, storage.layout)  # before the checkpoint is read
        with locked(self._fd):
            if is_open(self._fd):
                fill()
                _write(self._fd, key, decoder, ops, storage)
            segment = open_segment(self._fd, key)
        if segment is None:
            log.warning("the packed weights in shared memory do not fit this checkpoint any more; it is read again")
            self.fits = False
            fill()
            return decoder.pack(ops)
        return _give(segment, decoder, storage)


def segment_key(config: EngineConfig, rank: int, layout: str) -> bytes:
    """32 bytes that differ if the packed weights may differ. Reads the headers of the checkpoint's files."""
    parts = (__version__, layout, rank, fingerprint(Path(config.model.path)), torch.__version__)
    return sha256(repr(parts).encode() + msgspec.msgpack.encode(config, order="deterministic")).digest()


def _write(fd: int, key: bytes, decoder: Decoder, ops: Ops, storage: Storage) -> None:
    """Packs the filled decoder into the segment, whose parameters it loses."""
    writer = SegmentWriter(fd)
    index = Index({}, {})
    num_bytes = 0
    for name, module in _packable(decoder):
        with storage.placed(writer.empty):
            module.pack(ops)
        index.matrices[name] = tuple(_stored(writer, cast(StoredMatrix, matrix)) for matrix in module.matrices)
        num_bytes += sum(matrix.nbytes for matrix in module.matrices)
        module.matrices = ()
        if num_bytes > _TRIM_BYTES:
            num_bytes = 0
            _trim()
    for name, parameter in decoder.named_parameters():
        index.parameters[name] = writer.put(parameter.data)
    writer.finish(key, index)
    _trim()


def _stored(writer: SegmentWriter, matrix: StoredMatrix) -> StoredParts:
    kind, tensors, fields = matrix.stored()
    return StoredParts(kind, tuple(None if tensor is None else writer.put(tensor) for tensor in tensors), fields)


def _give(segment: Segment, decoder: Decoder, storage: Storage) -> int:
    for name, module in _packable(decoder):
        module.matrices = tuple(
            storage.restored(
                Stored(
                    parts.kind,
                    tuple(None if part is None else segment.tensor(part) for part in parts.tensors),
                    parts.fields,
                )
            )
            for parts in segment.index.matrices[name]
        )
    for name, part in segment.index.parameters.items():
        path, _, leaf = name.rpartition(".")
        setattr(decoder.get_submodule(path), leaf, nn.Parameter(segment.tensor(part), requires_grad=False))
    return decoder.num_bytes


def _packable(decoder: Decoder) -> list[tuple[str, Weight | MoeMlp]]:
    return [(name, module) for name, module in decoder.named_modules() if isinstance(module, Weight | MoeMlp)]


def _trim() -> None:
    """Gives freed memory back to the system. The worker's malloc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
