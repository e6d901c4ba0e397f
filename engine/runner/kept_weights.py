"""A GPU's weights that outlive their worker: in memory that a keeper process holds (`device/keeper.py`).

The protocol is that of the CPU (`shared_weights.py`): the first worker fills memory once and seals a segment with the
index; a worker that replaces it maps what is there and reads no tensor of the checkpoint. The tensors lie in the
keeper's allocations, and the segment has only the index. Whatever does not work leaves the weights in the worker.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...config.config import EngineConfig
from ...kernels.stored import Stored
from ..device.allocations import AllocationError, memory_of
from ..device.base import choose_device, is_out_of_memory
from ..device.keeper import Keeper, Received
from ..device.kept_memory import KeptMemory, Mapped
from ..gpu.weights import Loaded
from ..parallel.rank import RankInfo
from ..steps.trial_journal import TrialJournal
from ..weights.loader import Sink
from ..weights.segment import (
    Index,
    Kept,
    NotLockableError,
    Part,
    SegmentWriter,
    StoredParts,
    is_open,
    locked,
    name_of,
    open_segment,
    tensor_in,
)

log = logging.getLogger(__name__)

_ALLOCATION_BYTES = 1 << 30  # what filling takes beside the weights, which it moves one after the other
_ALIGNMENT = 512  # bytes, as of torch's allocator
_PATTERN = 256  # bytes that are written at start, to see whether it works
_TRIED = "weight keeper"


class _Unusable(Exception):
    """What is kept cannot be used; the text says why."""


class KeptWeights:
    """What a worker knows of the weights in its keeper's memory."""

    def __init__(
        self,
        fd: int,
        address: str,
        memory: KeptMemory,
        *,
        trim: Callable[[], None],
        journal: TrialJournal | None = None,
    ) -> None:
        """fd: a memfd for the index. address: the keeper's. trim: gives the allocator's free memory to the system.
        journal: remembers that a process died in the first use of the memory."""
        self._fd, self._address, self._memory, self._trim = fd, address, memory, trim
        self._journal = journal
        self._token = b""
        self._mapped: list[Mapped] = []  # in the order in which the keeper has them
        self._parked: dict[int, Tensor] = {}  # number of an allocation → its bytes, while the engine sleeps
        self.fits = True  # False: the segment holds something else, and can serve no further worker of this launch
        self.num_found = 0  # bytes that the keeper held when this worker came
        self.num_padding = 0  # bytes of its allocations that hold no weights
        self.note = ""  # for the operator

    def load(self, key: bytes, loaded: Loaded, fill: Callable[[Sink], None]) -> None:
        """Fills `loaded`: from the keeper, or with `fill`, which reads the checkpoint. Raises what `fill` raises."""
        keeper: Keeper | None = None
        with contextlib.ExitStack() as stack:
            try:
                keeper = stack.enter_context(Keeper(self._address))
                self.num_found = keeper.num_kept()
                with self._remembered():
                    try_memory(keeper, self._memory)
                with locked(self._fd):
                    if is_open(self._fd):
                        keeper.drop(kept=True)
                        fill(loaded)
                        self._fill(keeper, key, loaded)
                        return
                with self._remembered():
                    self._map(keeper, key, loaded)
            except AllocationError as error:
                log.warning(
                    "the weights stay in the worker, and one that replaces it reads the checkpoint again: %s", error
                )
                if not loaded.matrix_keys:
                    self._forget(keeper)
                    fill(loaded)
            except (_Unusable, NotLockableError) as error:
                why = str(error) or "the segment of their index cannot be locked"
                log.warning("the weights that the keeper holds cannot be used: %s; the checkpoint is read again", why)
                self.fits = False
                self._forget(keeper)
                loaded.clear()
                fill(loaded)

    def park(self) -> int:
        """Moves the weights to the host and frees the device's memory, the keeper's too. No work that uses them may be
        under way. Returns the freed bytes."""
        for number, mapped in enumerate(self._mapped):
            self._parked[number] = mapped.bytes.to("cpu", copy=True)
            mapped.unmap()
        if self._mapped:
            with contextlib.suppress(AllocationError), Keeper(self._address) as keeper:
                keeper.drop(kept=True)
        return sum(mapped.num_bytes for mapped in self._mapped)

    def restore(self) -> None:
        """Moves them back to the same addresses. Raises torch.OutOfMemoryError; a later call restores the rest, and
        the weights are this process's own then."""
        if not self._parked:
            return
        with contextlib.ExitStack() as stack:
            keeper = None
            if len(self._parked) == len(self._mapped):
                with contextlib.suppress(AllocationError):
                    keeper = stack.enter_context(Keeper(self._address))
            for number in sorted(self._parked):
                mapped = self._mapped[number]
                if keeper is not None and not self._remap(keeper, mapped):
                    keeper = None
                if keeper is None:
                    self._remap_alone(mapped)
                with torch.inference_mode():
                    mapped.bytes.copy_(self._parked[number])
                del self._parked[number]
            if keeper is not None and self._token:
                with contextlib.suppress(AllocationError):
                    keeper.keep(self._token)

    # Filling.

    def _fill(self, keeper: Keeper, key: bytes, loaded: Loaded) -> None:
        """Moves what was loaded to the keeper's memory, and seals the segment. Raises AllocationError; what was moved
        until then stays there and can be used."""
        keys = loaded.matrix_keys
        left = loaded.num_bytes + _ALIGNMENT * (4 * len(keys) + len(loaded.vectors))
        writer = _Writer(left, lambda num_bytes: self._allocated(keeper, num_bytes))
        index = Index({}, {})
        for each in keys:
            parts = loaded.take_stored(each)
            try:
                placed = tuple(None if tensor is None else writer.put(tensor) for tensor in parts.tensors)
            except AllocationError:
                loaded.put_stored(each, parts)
                raise
            index.matrices[each] = (StoredParts(parts.kind, placed, parts.fields),)
            loaded.put_stored(each, self._stored(index.matrices[each][0]))
            del parts
        for each, values in loaded.vectors.items():
            index.parameters[each] = writer.put(values)
            loaded.put_vector(each, self._tensor(index.parameters[each]))
        self._trim()
        self.num_padding = sum(mapped.num_bytes for mapped in self._mapped) - loaded.num_bytes
        self._token = os.urandom(16)
        # The host reads the sums, so all copies to this memory are done before it is kept and sealed.
        sums = tuple(sum_of(mapped.bytes) for mapped in self._mapped)
        sizes = tuple(mapped.num_bytes for mapped in self._mapped)
        keeper.keep(self._token)
        SegmentWriter(self._fd).finish(key, Index(index.matrices, index.parameters, Kept(self._token, sizes, sums)))
        self.note = "; a keeper process holds the weights for a worker that replaces this one"

    def _allocated(self, keeper: Keeper, num_bytes: int) -> Mapped:
        self._trim()
        self._mapped.append(self._received(keeper.allocate(self._memory.kind, num_bytes)))
        return self._mapped[-1]

    # Mapping.

    def _map(self, keeper: Keeper, key: bytes, loaded: Loaded) -> None:
        """Raises _Unusable."""
        segment = open_segment(self._fd, key)
        if segment is None or segment.index.kept is None:
            raise _Unusable("they are of another checkpoint or other options")
        index, kept = segment.index, segment.index.kept
        try:
            for number, size in enumerate(kept.sizes):
                self._mapped.append(self._received(keeper.open(kept.token, number), size))
            for key_of_matrix, stack in index.matrices.items():
                loaded.put_stored(key_of_matrix, self._stored(*stack))
            for name, part in index.parameters.items():
                loaded.put_vector(name, self._tensor(part))
            # Only now, since what the last worker had put into the room for replicas is cleared.
            if tuple(sum_of(mapped.bytes) for mapped in self._mapped) != kept.sums:
                raise _Unusable("their sums are not those that were written")
        except (AllocationError, ValueError, TypeError) as error:
            raise _Unusable(str(error)) from error
        self._token = kept.token
        self.num_padding = sum(kept.sizes) - loaded.num_bytes
        self.note = "; the weights are mapped from the keeper"

    def _forget(self, keeper: Keeper | None) -> None:
        """Frees what is mapped and kept, before there are other weights."""
        with contextlib.suppress(AllocationError):
            for mapped in self._mapped:
                mapped.close()
        self._mapped.clear()
        if keeper is not None:
            with contextlib.suppress(AllocationError):
                keeper.drop(kept=True)

    def _stored(self, parts: StoredParts) -> Stored:
        tensors = tuple(None if part is None else self._tensor(part) for part in parts.tensors)
        return Stored(parts.kind, tensors, parts.fields)

    def _tensor(self, part: Part) -> Tensor:
        return tensor_in(self._mapped[part.allocation].bytes, part)

    # The keeper.

    @contextlib.contextmanager
    def _remembered(self) -> Iterator[None]:
        """Later processes do without the keeper, if processes end in this context. Raises AllocationError then."""
        journal = self._journal
        if journal is None:
            yield
            return
        if crashed := journal.crashed():
            raise AllocationError(f"processes ended when they tried it; remove {crashed[_TRIED]} to try it again")
        journal.begin(_TRIED)
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                journal.confirm()  # the device is broken for this process
                raise
            journal.close()
            raise AllocationError(str(error)) from error
        except BaseException:
            journal.close()
            raise
        journal.close()

    def _received(self, received: Received, num_bytes: int | None = None) -> Mapped:
        """Maps an allocation. num_bytes: that it must have. Raises AllocationError."""
        try:
            if num_bytes not in (None, received.num_bytes):
                raise AllocationError(f"the keeper has {received.num_bytes} bytes instead of {num_bytes}")
            return self._memory.map(received.fd, received.num_bytes)
        finally:
            os.close(received.fd)

    def _remap(self, keeper: Keeper, mapped: Mapped) -> bool:
        """Gives it the keeper's memory again. False: the keeper has none."""
        try:
            fd, _ = keeper.allocate(self._memory.kind, mapped.num_bytes)
            try:
                mapped.remap(fd)
            finally:
                os.close(fd)
        except AllocationError:
            return False
        return True

    def _remap_alone(self, mapped: Mapped) -> None:
        """Gives it memory that ends with this process. Raises torch.OutOfMemoryError."""
        try:
            memory = memory_of(self._memory.kind)
            allocation = memory.allocate(mapped.num_bytes)
            try:
                mapped.remap(allocation.fd)
            finally:
                memory.free(allocation)  # the mapping holds it
        except AllocationError as error:
            raise torch.OutOfMemoryError(str(error)) from error


class _Writer:
    """Copies tensors to allocations, one after the other."""

    def __init__(self, left: int, allocate: Callable[[int], Mapped]) -> None:
        """left: the bytes that will be written, about."""
        self._left, self._allocate = left, allocate
        self._mapped: Mapped | None = None  # the last allocation
        self._number, self._used = -1, 0  # its number, and its bytes so far

    def put(self, tensor: Tensor) -> Part:
        """Raises AllocationError."""
        if self._mapped is None or self._used + tensor.nbytes > self._mapped.num_bytes:
            self._mapped = self._allocate(max(tensor.nbytes, min(self._left, _ALLOCATION_BYTES)))
            self._number, self._used = self._number + 1, 0
        part = Part(self._used, tuple(tensor.shape), name_of(tensor.dtype), self._number)
        tensor_in(self._mapped.bytes, part).copy_(tensor)
        taken = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._used, self._left = self._used + taken, self._left - taken
        return part


def try_memory(keeper: Keeper, memory: KeptMemory) -> None:
    """Writes to an allocation through one mapping and reads it through another. Raises AllocationError."""
    fd, num_bytes = keeper.allocate(memory.kind, _PATTERN)
    try:
        first = memory.map(fd, num_bytes)
        second = memory.map(fd, num_bytes)
    finally:
        os.close(fd)
    pattern = torch.arange(_PATTERN).to(torch.uint8)
    first.bytes[:_PATTERN].copy_(pattern)
    found = second.bytes[:_PATTERN].to("cpu", copy=True)
    first.close()
    second.close()
    keeper.drop(kept=False)
    if not torch.equal(found, pattern):
        raise AllocationError("two mappings of the same memory hold different bytes")


def try_keeper(config: EngineConfig, address: str) -> str:
    """Why the weights on this machine's device cannot outlive a worker; empty: they can. For `pagewire doctor --gpu`.
    Raises ConfigError."""
    memory = choose_device(config, rank_info=RankInfo()).kept_memory
    if memory is None:
        return "this device has no memory that outlives a process"
    try:
        with Keeper(address) as keeper:
            try_memory(keeper, memory)
    except AllocationError as error:
        return str(error)
    return ""


def sum_of(memory: Tensor) -> int:
    """memory: uint8. The sum of its bytes as int64, modulo 2^64, which the host waits for."""
    return int(memory.view(torch.int64).sum())


def journal_in(folder: Path, key: str) -> TrialJournal:
    """key: of the device and the versions."""
    return TrialJournal(folder, f"{key}-keeper")
