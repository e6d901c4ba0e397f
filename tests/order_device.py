"""A device that is only an order: streams, events, pinned memory, an allocator and recordings as CUDA's, on a CPU.

It is a `Device` and the `Driver` of a `CudaQueue`, so the engine's own queue and steps run on it. It does two things:

- It runs work late, early or at random times, but always in an order that streams and events allow. If the engine
  relies on an order that it has not asked for, it reads the wrong numbers.
- It keeps a vector clock for the host and for each stream, and for each four bytes of memory the last write and the
  last reads. An access that no stream, event or wait orders after an earlier one is reported, whatever its numbers are.

Tensors of the device are `DeviceTensor`s on torch's device `meta`. The host cannot read one except by a copy, as on
CUDA. Torch's operations arrive through a dispatch mode, and their schemas say which arguments are written. Launches of
Triton kernels are deferred too; the interpreter says which addresses each of them reads and writes. The host's accesses
to pinned memory are seen through the NumPy arrays that `Tensor.numpy` gives.

Also reported: memory that returns to the allocator while another stream may use it, memory of a recording that is kept
after it, a recording that runs after its memory was freed, a kernel that touches memory of no argument, and pinned
memory that changes before the copy from it has run. The clock of a query is not joined: `is_reached` alone orders
nothing here.
"""

import ctypes
import gc
import random
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pagewire.engine.device.allocations import HOST
from pagewire.engine.device.kept_memory import KeptMemory
from pagewire.engine.device.queue import CudaQueue, Event, Stream, Work
from pagewire.engine.parallel.collectives import Alone
from pagewire.engine.runner import runner as runner_module

META = torch.device("meta")
_INTERPRETER = threading.Lock()  # Triton's interpreter runs one kernel at a time
_here = threading.local()  # .device, .group, .ring: of the runners that this thread loads
POLICIES = ("late", "early", "copies first", "random")
_HOST = 0  # actor; streams are 1, 2 …
_MAX_ACTORS = 16
_MAX_REPORTS = 20
_GRANULE = 4  # bytes
_aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# Operations on whole rows of `self`, which `index` names.
_BY_ROWS = {_aten.index_select.default, _aten.index_copy_.default, _aten.index_fill_.int_Scalar}
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}

Clock = Any  # int64 [_MAX_ACTORS]: how much of each actor's work comes before
Granules = Any  # an index into a block's granules: a slice, or an array


class Block:
    """A range of memory and its history."""

    def __init__(self, storage: torch.UntypedStorage, name: str) -> None:
        self.storage, self.name = storage, name
        self.start, self.size = storage.data_ptr(), storage.nbytes()
        num = -(-self.size // _GRANULE)
        self._written_by = np.zeros(num, np.uint8)
        self._written_at = np.zeros(num, np.int64)
        self._read_at: dict[int, Any] = {}

    @property
    def end(self) -> int:
        return self.start + self.size

    def granules(self, tensor: Tensor) -> Granules:
        """Those of a tensor in this block."""
        first, itemsize = tensor.data_ptr() - self.start, tensor.element_size()
        if tensor.numel() == 0:
            return slice(0, 0)
        extent = (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * itemsize
        if extent == tensor.numel() * itemsize:
            return slice(first // _GRANULE, -(-(first + extent) // _GRANULE))
        offsets = np.zeros(1, np.int64)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
        firsts = first + offsets * itemsize
        parts = [(firsts + at) // _GRANULE for at in range(0, itemsize, _GRANULE)]
        return np.unique(np.concatenate(parts))

    def conflict(self, at: Granules, actor: int, clock: Clock, is_write: bool) -> tuple[int, int, str] | None:
        """(actor, time, what it did) of an earlier access that nothing orders before this one; None: there is none.
        Takes this access into the history."""
        found = None
        by, when = self._written_by[at], self._written_at[at]
        if (late := when > clock[by]).any():
            found = int(by[late][0]), int(when[late][0]), "writes"
        if not is_write:
            if actor not in self._read_at:
                self._read_at[actor] = np.zeros(len(self._written_at), np.int64)
            self._read_at[actor][at] = clock[actor]
            return found
        for other, read_at in self._read_at.items():
            if found is None and (late := read_at[at] > clock[other]).any():
                found = other, int(read_at[at][late][0]), "reads"
        self._written_by[at], self._written_at[at] = actor, clock[actor]
        return found


class Memory:
    """An allocation. The allocator gets it back when the last tensor in it is gone; work that is under way does not
    hold it."""

    def __init__(self, block: Block, capture: "_Capture | None") -> None:
        self.block, self.capture = block, capture


@dataclass(frozen=True)
class Access:
    block: Block
    at: Granules
    is_write: bool


Run = Callable[[], Iterable[Access]]
"""Executes an operation, and says what it accessed."""


@dataclass(frozen=True)
class _Launched:
    name: str
    run: Run
    clock: Clock


class OrderStream:
    def __init__(self, device: "OrderDevice", number: int, name: str) -> None:
        self.device, self.number, self.name = device, number, name
        self.clock: Clock = np.zeros(_MAX_ACTORS, np.int64)
        self.pending: deque[_Launched | OrderEvent] = deque()  # launched and not executed; an event is waited for
        self.num_put = self.num_done = 0
        self.may_go_on: Callable[[], bool] = lambda: True  # False: its next work would block, so only a wait runs it

    def wait_stream(self, stream: Stream) -> None:
        event = self.device.event()
        event.record(stream)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, OrderEvent)
        if event.stream is not None:
            self.clock = np.maximum(self.clock, event.clock)
            self.put(event)

    def put(self, item: "_Launched | OrderEvent") -> None:
        self.pending.append(item)
        self.num_put += 1


class OrderEvent:
    def __init__(self, device: "OrderDevice") -> None:
        self._device = device
        self.stream: OrderStream | None = None
        self.number = 0  # of the stream's work that comes before it
        self.clock: Clock = np.zeros(_MAX_ACTORS, np.int64)

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, OrderStream)
        self.stream, self.number, self.clock = stream, stream.num_put, stream.clock.copy()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.wait_on_host(self)

    def elapsed_time(self, end_event: Event) -> float:
        return 1.0

    @property
    def is_reached(self) -> bool:
        return self.stream is None or self.stream.num_done >= self.number


class DeviceTensor(Tensor):
    """A tensor in the device's memory. `inside` is a CPU tensor with its numbers, once the work that fills it ran."""

    inside: Tensor
    memory: Memory
    machine: "OrderDevice"
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(inner: Tensor, memory: Memory, machine: "OrderDevice") -> "DeviceTensor":
        with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
            made: DeviceTensor = Tensor._make_wrapper_subclass(
                DeviceTensor, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
                dtype=inner.dtype, device=META,
            )  # fmt: skip
        made.inside, made.memory, made.machine = inner, memory, machine
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch's documentation has it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
        return found.machine.dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inside.data_ptr()

    def untyped_storage(self) -> Any:
        return DeviceStorage(self.memory, self.machine)

    def set_(self, storage: "DeviceStorage") -> "DeviceTensor":  # type: ignore[override]  # the only form in use
        return DeviceTensor.of(self.inside.set_(storage.memory.block.storage), storage.memory, self.machine)


class DeviceStorage:
    """What `sleep` uses of a storage."""

    device = META

    def __init__(self, memory: Memory, machine: "OrderDevice") -> None:
        self.memory, self._machine = memory, machine
        self._cdata = id(memory)

    def nbytes(self) -> int:
        return self.memory.block.storage.nbytes()

    def resizable(self) -> bool:
        return self.memory.block.storage.resizable()

    def resize_(self, size: int) -> None:
        self._machine.resize(self.memory, size)


class _Capture:
    """A recording while it is made."""

    def __init__(self) -> None:
        self.nodes: list[tuple[str, Run]] = []
        self.made: list[weakref.ref[Memory]] = []
        self.blocks: list[Block] = []  # of `made`: the pool's memory
        self.used: dict[int, tuple[weakref.ref[Memory], Block]] = {}  # memory from outside


class OrderError(Exception):
    """Something is not ordered."""


class OrderDevice:
    """One thread uses it. `policy`: when work runs that nothing waits for yet.

    late: never. early: that of the main stream at once. copies first: that of all streams but the main one at once.
    random: at random."""

    torch_device = META

    def __init__(self, policy: str = "late", *, seed: int = 0) -> None:
        assert policy in POLICIES, policy
        self.capability: int | None = None
        self.kept_memory: KeptMemory | None = KeptMemory(HOST, self._mapped)
        self.violations: list[str] = []
        self.is_strict = False  # True: the first violation is raised, too
        self.num_waits = 0  # of the host for a stream, other than by events
        self.running = 0  # > 0: operations are executed, not launched
        self._policy, self._random = policy, random.Random(seed)
        self._host: Clock = np.zeros(_MAX_ACTORS, np.int64)
        self._streams: list[OrderStream] = []
        self._names: dict[tuple[int, int], str] = {}
        self._pinned: list[tuple[int, Block]] = []  # sorted by address
        self._freed: list[tuple[Block, OrderStream]] = []
        self._capture: _Capture | None = None
        self._current = self.stream()  # CUDA's default stream
        self._queue = CudaQueue(META, self)

    # The device of a runner.

    def queue(self) -> CudaQueue:
        return self._queue

    def cache_memory(self, *, taken: int, found: int = 0) -> int:
        return 1 << 30

    def synchronize(self) -> None:
        self._refuse_in_capture("synchronize")
        for stream in self._streams:
            self._run_until(stream, stream.num_put)
            self._host = np.maximum(self._host, stream.clock)

    def trim(self) -> None:
        pass

    # The driver of a queue.

    @property
    def current(self) -> OrderStream:
        """Where this thread launches its work."""
        return self._current

    def stream(self) -> OrderStream:
        number = len(self._streams) + 1
        assert number < _MAX_ACTORS
        names = {1: "the default stream", 2: "the main stream", 3: "the copy stream"}
        self._streams.append(OrderStream(self, number, names.get(number, f"stream {number}")))
        return self._streams[-1]

    def event(self) -> OrderEvent:
        return OrderEvent(self)

    def use(self, stream: Stream) -> None:
        assert isinstance(stream, OrderStream)
        self._current = stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self._current
        self.use(stream)
        try:
            yield
        finally:
            self._current = before

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.zeros(size, dtype=dtype)
        block = Block(tensor.untyped_storage(), f"pinned memory [{size}] {dtype}")
        if block.size:
            self._pinned = sorted([*self._pinned, (block.start, block)], key=lambda pair: pair[0])
        return tensor

    def capture(self, work: Work, stream: Stream) -> Work:
        assert stream is self._current
        capture = self._capture = _Capture()
        try:
            work()
        finally:
            self._capture = None
        if any(memory() is not None for memory in capture.made):
            gc.collect()
        for made in capture.made:
            if (memory := made()) is not None:
                self.report(f"{memory.block.name} is allocated in a recording and kept after it")

        def replay() -> None:
            for used, block in capture.used.values():
                held = used()
                if held is None or held.block is not block:
                    self.report(f"a recording runs that uses {block.name}, which was freed")
            if capture.blocks:
                self._launch("the reuse of a pool's memory", lambda: [_poison(block) for block in capture.blocks])
            for name, run in capture.nodes:
                self._launch(name, run)

        return replay

    def reserve(self, num_bytes: int) -> None:
        pass

    blas_workspace = 0

    def num_programs(self, head_dim: int) -> int:
        return 4

    # Launches and their execution.

    def report(self, text: str) -> None:
        if len(self.violations) < _MAX_REPORTS:
            self.violations.append(text)
        if self.is_strict:
            raise OrderError(text)

    def wait_on_host(self, event: OrderEvent) -> None:
        self._refuse_in_capture("wait for an event")
        if event.stream is not None:
            self._run_until(event.stream, event.number)
            self._host = np.maximum(self._host, event.clock)

    def run_ready(self, streams: Sequence[OrderStream]) -> None:
        """Executes the streams' work as far as other streams allow."""
        self._run_while_allowed(streams)

    def finish(self) -> None:
        """Executes what is left."""
        self._free()
        for stream in self._streams:
            self._run_until(stream, stream.num_put)

    def _launch(self, name: str, run: Run) -> None:
        if self._capture is not None:
            self._capture.nodes.append((name, run))
            return
        self._free()
        self._put(self._current, name, run)

    def _put(self, stream: OrderStream, name: str, run: Run) -> None:
        stream.clock = np.maximum(stream.clock, self._host)
        stream.clock[stream.number] += 1
        self._names[stream.number, int(stream.clock[stream.number])] = name
        stream.put(_Launched(name, run, stream.clock.copy()))
        self._advance()

    def _free(self) -> None:
        """The allocator hands freed memory to the next work of its stream: that counts as a write."""
        while self._freed:
            block, stream = self._freed.pop(0)
            self._put(stream, f"the reuse of {block.name}", partial(_of_all, block))

    def _advance(self) -> None:
        match self._policy:
            case "early":
                self._run_while_allowed(self._streams[:2])
            case "copies first":
                self._run_while_allowed(self._streams[2:])
            case "random":
                for _ in range(self._random.randrange(3)):
                    ready = [stream for stream in self._streams if self._is_ready(stream)]
                    if ready:
                        chosen = self._random.choice(ready)
                        self._run_until(chosen, chosen.num_done + 1)

    def _run_while_allowed(self, streams: Sequence[OrderStream]) -> None:
        while ready := [stream for stream in streams if self._is_ready(stream)]:
            self._run_until(ready[0], ready[0].num_done + 1)

    def _is_ready(self, stream: OrderStream) -> bool:
        if not stream.pending or not stream.may_go_on():
            return False
        head = stream.pending[0]
        return isinstance(head, _Launched) or head.is_reached

    def _run_until(self, stream: OrderStream, number: int) -> None:
        """Executes the stream's work up to this number, and what it waits for."""
        while stream.num_done < number:
            item = stream.pending.popleft()
            stream.num_done += 1
            if isinstance(item, OrderEvent):
                assert item.stream is not None
                self._run_until(item.stream, item.number)
            else:
                with self._executing():
                    accesses = list(item.run())
                for access in accesses:
                    self._check(access, stream.number, item.clock, item.name)

    @contextmanager
    def _executing(self) -> Iterator[None]:
        self.running += 1
        try:
            with torch.inference_mode():
                yield
        finally:
            self.running -= 1

    def _check(self, access: Access, actor: int, clock: Clock, name: str) -> None:
        found = access.block.conflict(access.at, actor, clock, access.is_write)
        if found is None:
            return
        other, time, did = found
        mine, their = (self._name(each) for each in (actor, other))
        self.report(
            f"{name} ({mine}) {'writes' if access.is_write else 'reads'} {access.block.name}, and nothing orders it "
            f"after {self._names[other, time]} ({their}), which {did} it"
        )

    def _name(self, actor: int) -> str:
        return "the host" if actor == _HOST else self._streams[actor - 1].name

    def _wait_for_current(self, why: str) -> None:
        """Waits for the current stream, which CUDA does for a copy to or from memory that is not pinned."""
        self._refuse_in_capture(why)
        self.num_waits += 1
        self._run_until(self._current, self._current.num_put)
        self._host = np.maximum(self._host, self._current.clock)

    def _refuse_in_capture(self, why: str) -> None:
        if self._capture is not None:
            self.report(f"{why}: the host waits for the device in a recording")
            raise RuntimeError("operation not permitted when stream is capturing")

    # Memory.

    def host_touches(self, low: int, high: int, *, is_write: bool, name: str) -> None:
        """The host accesses these addresses, which count if they are pinned memory."""
        block = self._pinned_at(low)
        if block is None or high <= low or self.running:
            return
        self._host[_HOST] += 1
        self._names[_HOST, int(self._host[_HOST])] = name
        at = slice((low - block.start) // _GRANULE, -(-(high - block.start) // _GRANULE))
        self._check(Access(block, at, is_write), _HOST, self._host, name)

    def resize(self, memory: Memory, size: int) -> None:
        """The allocator takes the memory, or gives other memory for it."""
        self.finish()
        self._freed.append((memory.block, self._current))
        self.finish()
        memory.block.storage.resize_(size)
        memory.block = Block(memory.block.storage, memory.block.name)
        if size:
            _poison(memory.block)

    def _mapped(self, address: int, num_bytes: int) -> DeviceTensor:
        """Memory that a keeper holds, as a tensor."""
        inner = torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)
        return DeviceTensor.of(inner, Memory(Block(inner.untyped_storage(), "kept weights"), None), self)

    def _pinned_at(self, address: int) -> Block | None:
        i = bisect_right(self._pinned, address, key=lambda pair: pair[0]) - 1
        if i < 0 or address >= self._pinned[i][1].end:
            return None
        return self._pinned[i][1]

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and self._pinned_of(tensor) is not None

    def _pinned_of(self, tensor: Tensor) -> Block | None:
        return self._pinned_at(tensor.data_ptr()) if self._pinned and tensor.numel() else None

    def _allocate(self, like: Tensor, name: str) -> DeviceTensor:
        """like: a tensor of this size, strides and type."""
        self._free()
        with torch.inference_mode(False):
            inner = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        block = Block(inner.untyped_storage(), f"the result of {name} {list(like.shape)}")
        memory = Memory(block, self._capture)
        if block.size:
            _poison(block)
            if self._capture is not None:
                self._capture.made.append(weakref.ref(memory))
                self._capture.blocks.append(block)
            else:
                weakref.finalize(memory, self._freed.append, (block, self._current)).atexit = False
        return DeviceTensor.of(inner, memory, self)

    def _uses(self, tensors: Iterable[DeviceTensor]) -> None:
        capture = self._capture
        for tensor in tensors if capture is not None else ():
            assert capture is not None
            if tensor.memory.capture is not capture and tensor.memory.block.size:
                capture.used[id(tensor.memory)] = weakref.ref(tensor.memory), tensor.memory.block

    # Operations of torch.

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        if not ours and not _is_here(kwargs.get("device")):
            self._on_host(func, args, kwargs)
            return func(*args, **kwargs)
        assert not any(type(leaf) is Tensor and leaf.is_meta for leaf in leaves), f"{func}: a tensor of nothing"
        if func is _aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is _aten._to_copy.default:
            return self._to_copy(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return self._now(func, args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with _Operations(self):
                return func.decompose(*args, **kwargs)
        inner_args, inner_kwargs = _inner((args, kwargs))
        if func.is_view:
            (of,) = ours
            return tree_map(
                lambda each: DeviceTensor.of(each, of.memory, self) if isinstance(each, Tensor) else each,
                func(*inner_args, **inner_kwargs),
            )
        if func.overloadpacket in _EMPTY:
            return self._allocate(func(*_meta(args), **_meta(kwargs)), str(func))
        return self._operation(func, args, kwargs)

    def _operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        ours = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor)]
        if any(type(leaf) is Tensor and leaf.dim() for leaf in tree_leaves((args, kwargs))):
            self._wait_for_current(f"{func} with a tensor of the host")
        self._uses(ours)
        arguments = _by_name(func, args, kwargs)
        written = {alias: value for name, value in arguments.items() if (alias := _written(func, name))}
        results = [min(ret.alias_info.before_set) if ret.alias_info else None for ret in func._schema.returns]
        made: list[DeviceTensor] = []
        if None in results:
            try:
                shapes = func(*_meta(args), **_meta(kwargs))
            except (NotImplementedError, RuntimeError):  # the numbers decide about the shape
                return self._now(func, args, kwargs)
            made = [self._allocate(shape, str(func)) for shape in tree_leaves(shapes)]
        outs = [tensor.inside for tensor in made]
        inner_args, inner_kwargs = _inner((args, kwargs), clones=True)
        accesses = self._accesses(func, arguments)
        accesses += [self._access(tensor, is_write=True) for tensor in made]
        # Work must not hold tensors, or their memory would not return to the allocator.
        by_rows = None
        if func in _BY_ROWS and arguments["dim"] == 0 and isinstance(arguments["index"], DeviceTensor):
            by_rows = arguments["self"].inside, arguments["index"].inside, arguments["self"].memory.block

        def run() -> Iterable[Access]:
            found = func(*inner_args, **inner_kwargs)
            if outs:
                for out, result in zip(outs, tree_leaves(found), strict=True):
                    out.copy_(result)
            return accesses if by_rows is None else _of_rows(*by_rows, accesses)

        self._launch(str(func), run)
        if not results:
            return None
        if made and len(results) == 1:
            return made if func._schema.returns[0].type.kind() == "ListType" else made[0]
        left = iter(made)
        given = tuple(next(left) if alias is None else written[alias] for alias in results)
        return given[0] if len(given) == 1 else given

    def _accesses(self, func: Any, arguments: dict[str, Any]) -> list[Access]:
        return [
            self._access(leaf, is_write=_written(func, name) is not None)
            for name, value in arguments.items()
            for leaf in tree_leaves(value)
            if isinstance(leaf, DeviceTensor)
        ]

    def _access(self, tensor: DeviceTensor, *, is_write: bool) -> Access:
        block = tensor.memory.block
        return Access(block, block.granules(tensor.inside), is_write)

    def _now(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation whose result the host needs at once."""
        inner_args, inner_kwargs = _inner((args, kwargs))
        accesses = self._accesses(func, _by_name(func, args, kwargs))
        found: list[Any] = []

        def run() -> Iterable[Access]:
            found.append(func(*inner_args, **inner_kwargs))
            return accesses

        self._refuse_in_capture(str(func))
        self._launch(str(func), run)
        self._wait_for_current(str(func))

        def onto_device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            made = self._allocate(value, str(func))
            made.inside.copy_(value)
            return made

        return tree_map(onto_device, found[0])

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            self._operation(_aten.copy_.default, (target, source), {})
        elif isinstance(target, DeviceTensor):
            self._to_device(target, source, non_blocking)
        else:
            assert isinstance(source, DeviceTensor)
            self._to_host(target, source, non_blocking)
        return target

    def _to_device(self, target: DeviceTensor, source: Tensor, non_blocking: bool) -> None:
        block, sent = self._pinned_of(source), source.clone()
        self._uses([target])
        accesses, inner = [self._access(target, is_write=True)], target.inside
        name = f"a copy to the device {list(target.shape)}"
        if block is not None:
            accesses.append(Access(block, block.granules(source), False))
        else:
            source = sent

        def run() -> Iterable[Access]:
            if block is not None and not np.array_equal(_bytes(source), _bytes(sent)):
                self.report(f"{name} comes after its memory has changed")
            inner.copy_(source)
            return accesses

        if block is None or not non_blocking:
            self._refuse_in_capture(name)
        self._launch(name, run)
        if not non_blocking:
            self._wait_for_current(name)

    def _to_host(self, target: Tensor, source: DeviceTensor, non_blocking: bool) -> None:
        block, inner = self._pinned_of(target), source.inside
        self._uses([source])
        accesses, name = [self._access(source, is_write=False)], f"a copy to the host {list(source.shape)}"
        if block is not None:
            accesses.append(Access(block, block.granules(target), True))

        def run() -> Iterable[Access]:
            target.copy_(inner)
            return accesses

        is_waited = block is None or not non_blocking
        if is_waited:
            self._refuse_in_capture(name)
        self._launch(name, run)
        if is_waited:
            self._wait_for_current(name)

    def _to_copy(self, tensor: Tensor, **kwargs: Any) -> Tensor:
        device, non_blocking = kwargs.pop("device", None), kwargs.pop("non_blocking", False)
        kwargs.pop("pin_memory", None)
        if not isinstance(tensor, DeviceTensor):
            on_host = _aten._to_copy.default(tensor, **kwargs)
            target = self._allocate(on_host, "a copy to the device")
            self._to_device(target, on_host, non_blocking)
            return target
        if device is not None and device.type == "cpu":
            shape = _aten._to_copy.default(_meta(tensor), **kwargs)
            result = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
            self._to_host(result, tensor, non_blocking)
            return result
        copied: Tensor = self._operation(_aten._to_copy.default, (tensor,), kwargs)
        return copied

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """An operation of the host: it may access pinned memory."""
        if self.running or not self._pinned or func.is_view:
            return
        for name, value in _by_name(func, args, kwargs).items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and self.is_pinned(leaf):
                    self.host_touches(*_bounds(leaf), is_write=_written(func, name) is not None, name=str(func))

    # Launches of Triton kernels.

    def launch(
        self, name: str, work: Callable[[], object], reads: Sequence[DeviceTensor], writes: Sequence[DeviceTensor]
    ) -> None:
        """Work on the CPU tensors of these."""
        self._uses([*reads, *writes])
        accesses = [self._access(tensor, is_write=False) for tensor in reads]
        accesses += [self._access(tensor, is_write=True) for tensor in writes]

        def run() -> Iterable[Access]:
            work()
            return accesses

        self._launch(name, run)

    def launch_kernel(self, execute: Any, name: str, args: Any, kwargs: Any) -> None:
        """execute: called with the arguments on the CPU."""
        leaves = tree_leaves((args, kwargs))
        ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        blocks = {id(leaf.memory.block): leaf.memory.block for leaf in ours}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor) and leaf.numel():
                block = self._pinned_of(leaf)
                assert block is not None, f"{name}: a tensor of the host"
                blocks[id(block)] = block
        self._uses(ours)
        inner_args, inner_kwargs = _inner((args, kwargs))

        def run() -> Iterable[Access]:
            recorder = _Recorder(self, name, blocks.values())
            with _INTERPRETER, recorder.recording():
                execute(*inner_args, **inner_kwargs)
            return recorder.accesses()

        self._launch(name, run)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: OrderDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device.running:
            return func(*args, **(kwargs or {}))
        return self._device.dispatch(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What does not reach the dispatcher: tensors of lists, and NumPy arrays of tensors."""

    def __init__(self, device: OrderDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._device.running:
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and _is_here(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(META)
        name = getattr(func, "__name__", "")
        if name not in ("numpy", "tolist") or isinstance(args[0], DeviceTensor):
            return func(*args, **kwargs)
        if self._device.is_pinned(args[0]):
            self._device.host_touches(*_bounds(args[0]), is_write=False, name=f"Tensor.{name}")
            if name == "numpy":
                guarded = func(*args, **kwargs).view(GuardedArray)
                guarded.machine = self._device
                return guarded
        return func(*args, **kwargs)


class GuardedArray(np.ndarray):
    """Tells the device about accesses to pinned memory."""

    machine: OrderDevice | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.machine = getattr(source, "machine", None)

    def touch(self, name: str, *, is_write: bool) -> None:
        if self.machine is not None and self.size:
            low, high = np.lib.array_utils.byte_bounds(self)
            self.machine.host_touches(low, high, is_write=is_write, name=f"the host's {name}")

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, GuardedArray):
            value.touch("assignment", is_write=False)
        part = super().__getitem__(key)
        if isinstance(part, GuardedArray) and part.size and _is_within(part, self):
            part.touch("assignment", is_write=True)
        elif not isinstance(part, np.ndarray) or part.size:
            self.touch("assignment", is_write=True)
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        if not (isinstance(part, GuardedArray) and part.size and _is_within(part, self)):
            self.touch("read", is_write=False)
        return part

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is not None:
            kwargs["out"] = tuple(_plain(each, ufunc.__name__, is_write=True) for each in out)
        found = getattr(ufunc, method)(*(_plain(each, ufunc.__name__) for each in inputs), **kwargs)
        return found if out is None else out[0] if len(out) == 1 else out

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name, out = func.__name__, kwargs.pop("out", None)
        first = args[:1] if name == "copyto" else ()
        args = (*(_plain(each, name, is_write=True) for each in first), *tree_map(_reader(name), args[len(first) :]))
        if out is not None:
            kwargs = {**kwargs, "out": _plain(out, name, is_write=True)}
        found = func(*args, **tree_map(_reader(name), kwargs))
        return found if out is None else out

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self, "astype").astype(*args, **kwargs)

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self, "copy").copy(*args, **kwargs)

    def tolist(self) -> Any:
        return _plain(self, "tolist").tolist()

    def tobytes(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self, "tobytes").tobytes(*args, **kwargs)

    def fill(self, value: Any) -> None:
        _plain(self, "fill", is_write=True).fill(value)


def _is_within(part: Any, whole: Any) -> bool:
    (low, high), (first, last) = (np.lib.array_utils.byte_bounds(each) for each in (part, whole))
    return bool(first <= low and high <= last)


def _plain(value: Any, name: str, *, is_write: bool = False) -> Any:
    if not isinstance(value, GuardedArray):
        return value
    value.touch(name, is_write=is_write)
    return value.view(np.ndarray)


def _reader(name: str) -> Callable[[Any], Any]:
    return lambda value: _plain(value, name)


class _Recorder:
    """The addresses that a kernel reads and writes in the interpreter. It may touch its arguments only: lanes that do
    not are reported and left out, or a wrong number could end the process."""

    current: "_Recorder | None" = None

    def __init__(self, device: OrderDevice, name: str, blocks: Iterable[Block]) -> None:
        """blocks: those of the kernel's arguments."""
        self._device, self._name = device, name
        self._blocks = sorted(blocks, key=lambda block: block.start)
        self._starts = np.array([block.start for block in self._blocks], np.uint64)
        self._ends = np.array([block.end for block in self._blocks], np.uint64)
        self._touched: dict[tuple[int, bool], list[Any]] = {}  # block's index, is_write → granules

    @contextmanager
    def recording(self) -> Iterator[None]:
        _Recorder.current = self
        try:
            yield
        finally:
            _Recorder.current = None

    @staticmethod
    def take(ptrs: Any, mask: Any, *, is_write: bool) -> Any:
        """The mask of the lanes that may go on."""
        recorder = _Recorder.current
        return mask if recorder is None else recorder._take(ptrs, mask, is_write)

    def _take(self, ptrs: Any, mask: Any, is_write: bool) -> Any:
        addresses = np.asarray(ptrs.data)
        is_on = np.ones(addresses.shape, np.bool_)
        if mask is not None:
            is_on = np.broadcast_to(mask.data, addresses.shape).astype(np.bool_)
        width = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        index = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        is_inside = (index >= 0) & (addresses + np.uint64(width) <= self._ends[np.maximum(index, 0)])
        if (is_on & ~is_inside).any():
            self._device.report(
                f"{self._name} {'writes' if is_write else 'reads'} memory that is none of its arguments"
            )
            assert mask is not None, "the interpreter would end the process"
            is_on = is_on & is_inside
            mask = type(mask)(is_on, mask.dtype)
        used, index = addresses[is_on], index[is_on]
        for i in np.unique(index).tolist():
            firsts = (used[index == i] - self._starts[i]).astype(np.int64)
            parts = [(firsts + at) // _GRANULE for at in range(0, width, _GRANULE)]
            self._touched.setdefault((i, is_write), []).extend(parts)
        return mask

    def accesses(self) -> list[Access]:
        return [
            Access(self._blocks[i], np.concatenate(parts), is_write) for (i, is_write), parts in self._touched.items()
        ]


def _is_here(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _inner(value: Any, *, clones: bool = False) -> Any:
    """With CPU tensors for those of the device. clones: of the host's tensors, which may change."""

    def inner(leaf: Any) -> Any:
        if isinstance(leaf, DeviceTensor):
            return leaf.inside
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return leaf.clone() if clones and isinstance(leaf, Tensor) else leaf

    return tree_map(inner, value)


def _meta(value: Any) -> Any:
    """With tensors without numbers."""

    def meta(leaf: Any) -> Any:
        if isinstance(leaf, DeviceTensor):
            return torch.empty_strided(leaf.inside.size(), leaf.inside.stride(), dtype=leaf.inside.dtype, device=META)
        return leaf.to(META) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return tree_map(meta, value)


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _written(func: Any, name: str) -> str | None:
    """The alias set of an argument that the operation writes."""
    for argument in func._schema.arguments:
        if argument.name == name and argument.alias_info is not None and argument.alias_info.is_write:
            return str(min(argument.alias_info.before_set))
    return None


def _of_rows(tensor: Tensor, index: Tensor, block: Block, accesses: list[Access]) -> list[Access]:
    """With the rows in the place of the whole tensor."""
    whole, is_write = block.granules(tensor), False
    kept = []
    for access in accesses:
        is_whole = access.block is block and isinstance(access.at, slice) and access.at == whole
        is_write |= is_whole and access.is_write
        kept += [] if is_whole else [access]
    rows = [Access(block, block.granules(tensor[row]), is_write) for row in sorted(set(index.tolist()))]
    return kept + rows


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and behind the last."""
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + extent) * tensor.element_size()


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _of_all(block: Block) -> list[Access]:
    return [Access(block, slice(None), True)]


def _poison(block: Block) -> Access:
    """Numbers that no one may rely on: NaN, or -1."""
    torch.empty(0, dtype=torch.uint8).set_(block.storage).fill_(255)
    return Access(block, slice(None), True)


@contextmanager
def order_device(policy: str = "late", *, seed: int = 0) -> Iterator[OrderDevice]:
    """The device on which runners load while the context is open. Triton must be interpreted."""
    with kernels_on_devices(), on_device(OrderDevice(policy, seed=seed)) as device:
        yield device


@contextmanager
def on_device(
    device: OrderDevice, group: "OrderGroup | None" = None, ring: "OrderRing | None" = None
) -> Iterator[OrderDevice]:
    """This thread's runners load there, as a rank of this group, or as a stage."""
    _here.device, _here.group, _here.ring = device, group, ring
    with _Operations(device), _Functions(device):
        yield device
        if not (device.is_strict and device.violations):
            device.finish()


@contextmanager
def kernels_on_devices() -> Iterator[None]:
    """Triton's kernels run on the device of their arguments."""
    from triton.runtime import interpreter

    function, builder = interpreter.InterpretedFunction, interpreter.InterpreterBuilder
    first_run = function.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        def execute(*args: Any, **kwargs: Any) -> None:
            first_run(self, *args, grid=grid, warmup=False, **kwargs)

        device = next(leaf.machine for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
        device.launch_kernel(execute, self.fn.__name__, args, kwargs)

    firsts = {
        name: getattr(builder, name)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    }

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        mask = _Recorder.take(ptrs, mask, is_write=False)
        return firsts["create_masked_load"](self, ptrs, mask, *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask = _Recorder.take(ptrs, mask, is_write=True)
        return firsts["create_masked_store"](self, ptrs, value, mask, *rest)

    def atomic_rmw(self: Any, how: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask = _Recorder.take(ptrs, mask, is_write=True)
        return firsts["create_atomic_rmw"](self, how, ptrs, value, mask, *rest)

    def atomic_cas(self: Any, ptrs: Any, *rest: Any) -> Any:
        _Recorder.take(ptrs, None, is_write=True)
        return firsts["create_atomic_cas"](self, ptrs, *rest)

    first_join = vars(runner_module)["join"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "run", run)
        for name, replaced in zip(firsts, (masked_load, masked_store, atomic_rmw, atomic_cas), strict=True):
            patch.setattr(builder, name, replaced)
        patch.setattr(runner_module, "choose_device", lambda *args, **kwargs: _here.device)
        patch.setattr(runner_module, "join", lambda *args, **kwargs: _here.group or first_join(*args, **kwargs))
        patch.setattr(runner_module, "join_stages", lambda *args: (Alone(), _here.ring))
        yield


class Meeting:
    """Where the ranks of a group exchange tensors, each in a thread of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=300)
        self._parts: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        """Of all ranks in their order, when all are there."""
        self._parts[rank] = part.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def leave(self) -> None:
        """After an error: the others wait no longer."""
        self._barrier.abort()


class OrderGroup:
    """A rank's side of its group, with sums and exchanges in the order of its stream, as NCCL has them."""

    can_give_up = False
    sent_bytes = 0

    def __init__(self, device: OrderDevice, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._device, self._meeting = device, meeting

    def agree(self) -> None:
        pass

    def give_up(self) -> None:
        raise AssertionError("no step is given up here")

    def all_reduce(self, x: Tensor) -> None:
        assert isinstance(x, DeviceTensor) and x.is_contiguous()
        self._launch("all_reduce", x, x, lambda parts: torch.stack(parts).sum(0))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = x.new_empty((self.size, *x.shape)) if out is None else out
        assert isinstance(x, DeviceTensor) and isinstance(out, DeviceTensor) and x.is_contiguous()
        shape = out.shape
        self._launch("all_gather", x, out, lambda parts: torch.stack(parts).view(shape))
        return out

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        assert isinstance(x, DeviceTensor) and isinstance(out, DeviceTensor) and x.is_contiguous()
        shape, rank = (self.size, *out.shape), self.rank
        self._launch("reduce_scatter", x, out, lambda parts: torch.stack(parts).sum(0).view(shape)[rank])

    def all_to_all(
        self, x: Tensor, counts: Sequence[int], most: int, known: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        raise AssertionError("only steps too large for these tests exchange tokens by their numbers")

    def _launch(self, name: str, x: DeviceTensor, out: DeviceTensor, join: Callable[[list[Tensor]], Tensor]) -> None:
        inner, result = x.inside, out.inside
        self._device.launch(name, lambda: result.copy_(join(self._meeting.exchange(self.rank, inner))), [x], [out])


Edge = SimpleQueue[Tensor | None]
"""What a stage has sent to another one. None: it ended with an error."""


class OrderRing:
    """A stage's side, each stage on a device and in a thread of its own. As of NCCL, a transfer begins after the work
    of the stream in which it is started, on a stream of its own for each direction."""

    def __init__(self, device: OrderDevice, sends: Edge, receives: Edge) -> None:
        self._device, self._sends, self._receives = device, sends, receives
        self._out, self._in = device.stream(), device.stream()
        self._in.may_go_on = lambda: not receives.empty()
        self._sending: list[OrderStream] = []  # with the stream in which sends are started

    def send(self, x: Tensor) -> "OrderTransfer":
        assert isinstance(x, DeviceTensor) and x.is_contiguous()
        inner = x.inside
        self._sending = [self._device.current, self._out]
        return self._start(self._out, "send", lambda: self._sends.put(inner.clone()), [x], [])

    def receive(self, x: Tensor) -> "OrderTransfer":
        assert isinstance(x, DeviceTensor) and x.is_contiguous()
        inner = x.inside

        def come() -> None:
            self._device.run_ready(self._sending)  # as a device does while it waits for another one
            came = self._receives.get(timeout=100)
            if came is None:
                raise OrderError("the stage before has ended")
            assert (came.shape, came.dtype) == (inner.shape, inner.dtype), "the stages planned different tensors"
            inner.copy_(came)

        return self._start(self._in, "receive", come, [], [x])

    def _start(
        self, stream: OrderStream, name: str, work: Callable[[], None], reads: Sequence[DeviceTensor],
        writes: Sequence[DeviceTensor],
    ) -> "OrderTransfer":  # fmt: skip
        stream.wait_stream(self._device.current)
        with self._device.on(stream):
            self._device.launch(name, work, reads, writes)
        event = self._device.event()
        event.record(stream)
        return OrderTransfer(self._device, event)

    def leave(self) -> None:
        """After an error: the next stage waits no longer."""
        self._sends.put(None)


class OrderTransfer:
    def __init__(self, device: OrderDevice, event: OrderEvent) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        self._device.current.wait_event(self._event)
