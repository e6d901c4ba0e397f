"""The tensors that a piece of work allocates and frees, in order, on any device; also on `meta`, whose tensors have no
memory, so that models of any size can be traced. Kernels of Triton do not run, as in a capture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagewire.engine.device.queue import EagerQueue, Work


@dataclass(frozen=True)
class Event:
    number: int  # of the tensor
    num_bytes: int  # 0: it is freed


@dataclass
class Trace:
    """What one run of a piece of work allocated and freed. All is freed at its end, since the results of steps are in
    tensors that exist before."""

    name: object
    events: list[Event] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Bytes in use at the same time, at most."""
        live: dict[int, int] = {}
        most = 0
        for event in self.events:
            if event.num_bytes:
                live[event.number] = event.num_bytes
            else:
                del live[event.number]
            most = max(most, sum(live.values()))
        return most


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class
    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self.live: dict[int, StorageWeakRef] = {}  # by number
        self._known: dict[int, int] = {}  # address of a storage → number
        self._num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sweep()
        found = func(*args, **(kwargs or {}))
        given = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(found):
            if not isinstance(leaf, torch.Tensor):
                continue
            address, num_bytes = storage_of(leaf), leaf.untyped_storage().nbytes()
            if address in given or address in self._known or not num_bytes:
                continue  # a view, or a result that was written to memory which was given
            self._known[address] = self._num
            self.live[self._num] = StorageWeakRef(leaf.untyped_storage())  # type: ignore[no-untyped-call]
            self._trace.events.append(Event(self._num, num_bytes))
            self._num += 1
        return found

    def sweep(self) -> None:
        """Notes the tensors that are freed by now."""
        for number, reference in list(self.live.items()):
            if reference.expired():  # type: ignore[no-untyped-call]
                del self.live[number]
                self._known = {address: known for address, known in self._known.items() if known != number}
                self._trace.events.append(Event(number, 0))


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def traced(name: object, work: Work, *, may_keep: bool = False) -> Trace:
    """may_keep: the work may keep tensors that it makes once. They are left out, as they stay beside the others."""
    trace = Trace(name)
    tracker = _Tracker(trace)
    with tracker:
        work()
    tracker.sweep()
    assert may_keep or not tracker.live, f"{name} keeps {len(tracker.live)} tensors that it allocated"
    trace.events = [event for event in trace.events if event.number not in tracker.live]
    return trace


class TracingQueue(EagerQueue):
    """Traces what is recorded, and does not run it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.traces: list[Trace] = []
        self.reserved = 0

    def reserve(self, num_bytes: int) -> None:
        self.reserved = num_bytes

    def record(self, work: Work) -> Work:
        self.traces.append(traced(len(self.traces), work))
        return work


@contextmanager
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches of Triton's kernels do nothing."""
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.JITFunction, "run", nothing)
        patch.setattr(InterpretedFunction, "run", nothing)
        yield
