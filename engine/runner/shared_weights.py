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

import torch
from torch import Tensor, nn

from ...config.config import EngineConfig
from ...kernels.ops import Ops, Storage, StoredMatrix
from ...kernels.stored import Stored
from ...version import __version__
from ..checkpoint.spec import fingerprint
from ..layers.linear import Weight
from ..layers.moe import MoeMlp
from ..models.decoder import Decoder
from ..weights.loader import Consumer
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

Fill = Callable[[Consumer | None], None]


class SharedWeights:
    """The segment that a worker was given for its part of the weights."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.fits = True  # False: it holds something else, and can serve no further worker of this launch

    def load(self, config: EngineConfig, rank: int, decoder: Decoder, ops: Ops, fill: Fill) -> int:
        """Gives the decoder its packed weights. fill: reads the checkpoint into the decoder's parameters, through the
        consumer if there is one; it is called if the segment is not written yet, or holds something else. Returns the
        bytes of all parameters."""
        storage = ops.storage
        assert storage is not None
        key = segment_key(config, rank, storage.layout)  # before the checkpoint is read
        try:
            with locked(self._fd):
                if is_open(self._fd):
                    packing = _Packing(SegmentWriter(self._fd), decoder, ops)
                    fill(packing)
                    packing.finish(key)
                    _trim()
            segment = open_segment(self._fd, key)
        except NotLockableError:
            segment = None
        if segment is None:
            log.warning("the packed weights in shared memory do not fit this checkpoint any more; it is read again")
            self.fits = False
            fill(None)
            return decoder.pack(ops)
        return _give(segment, decoder, storage)


def segment_key(config: EngineConfig, rank: int, layout: str) -> bytes:
    """32 bytes that differ if the packed weights may differ. Reads the headers of the checkpoint's files."""
    parts = (__version__, layout, rank, fingerprint(Path(config.model.path)), torch.__version__, config.weights_key)
    return sha256(repr(parts).encode()).digest()


class _Packing:
    """Packs a decoder's matrices into a segment, each as soon as it is filled; a `Consumer`. The decoder loses them."""

    def __init__(self, writer: SegmentWriter, decoder: Decoder, ops: Ops) -> None:
        self._writer, self._decoder, self._ops = writer, decoder, ops
        self._index = Index({}, {})
        self._num_left: dict[str, int] = {}  # module → its matrices that are not filled yet
        self.names: set[str] = set()
        for name, module in _packable(decoder):
            leaves = [leaf for leaf, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1]
            self._num_left[name] = len(leaves)
            self.names |= {f"{name}.{leaf}" for leaf in leaves}

    def begin(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        module = self._decoder.get_submodule(path)
        outline = module.get_parameter(leaf)
        memory = torch.empty(outline.shape, dtype=outline.dtype)
        setattr(module, leaf, nn.Parameter(memory, requires_grad=False))
        return memory

    def end(self, name: str) -> None:
        path, _, _ = name.rpartition(".")
        self._num_left[path] -= 1
        if not self._num_left[path]:
            self._pack(path)

    def finish(self, key: bytes) -> None:
        """Packs what is left and seals the segment."""
        for name, _ in _packable(self._decoder):
            if name not in self._index.matrices:
                self._pack(name)
        for name, parameter in self._decoder.named_parameters():
            self._index.parameters[name] = self._writer.put(parameter.data)
        self._writer.finish(key, self._index)

    def _pack(self, name: str) -> None:
        module = cast(Weight | MoeMlp, self._decoder.get_submodule(name))
        module.pack(self._ops)
        self._index.matrices[name] = tuple(_stored(self._writer, cast(StoredMatrix, m)) for m in module.matrices)
        module.matrices = ()


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
