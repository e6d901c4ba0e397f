"""A device's memory that is given back while an engine sleeps, and taken again."""

from collections.abc import Iterator

import torch
from torch import Tensor


class Parked:
    """Numbers of a device that wait in the host's memory. The tensors stay who they are, and so do their views: it is
    the storage behind them that shrinks to nothing and is filled again. Recorded graphs know addresses, and are void.

    The host's memory is not pinned: torch would round it up, and keep it afterwards."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []

    def park(self, storages: list[torch.UntypedStorage]) -> int:
        """Brings them here. Returns how many bytes of the device that frees."""
        for storage in storages:
            self._held.append((storage, _bytes_of(storage).to("cpu", copy=True)))
            storage.resize_(0)
        return sum(host.nbytes for _, host in self._held)

    def restore(self) -> None:
        """Brings them back. Raises torch.OutOfMemoryError; those that are left can be brought back later."""
        while self._held:
            storage, host = self._held[-1]
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host)
            self._held.pop()


def storages_of(root: object, device: torch.device, without: Tensor) -> list[torch.UntypedStorage]:
    """Of all tensors on the device that our objects and modules below `root` hold, each once, but for one tensor's."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors(root, set()):
        if tensor.device == device and (storage := tensor.untyped_storage()).resizable() and storage.nbytes():
            found[storage._cdata] = storage
    found.pop(without.untyped_storage()._cdata, None)
    return list(found.values())


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part, seen)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, seen)
    elif isinstance(value, torch.nn.Module) or type(value).__module__.startswith("pagewire."):
        yield from _tensors(getattr(value, "__dict__", {}), seen)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
