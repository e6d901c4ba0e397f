"""Moves a device's memory to the host while an engine sleeps, and back."""

from collections.abc import Iterator

import torch
from torch import Tensor


class Parked:
    """Storages of a device whose bytes are in host memory. The tensors and their views stay valid objects: their
    storage is resized to nothing and filled again. Recorded graphs hold old addresses and must be dropped.

    The host memory is not pinned: torch would round it up, and keep it afterwards."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []

    def park(self, storages: list[torch.UntypedStorage]) -> int:
        """Moves the storages to the host. Returns the freed bytes of the device."""
        for storage in storages:
            self._held.append((storage, _bytes_of(storage).to("cpu", copy=True)))
            storage.resize_(0)
        return sum(host.nbytes for _, host in self._held)

    def restore(self) -> None:
        """Moves them back. Raises torch.OutOfMemoryError; a later call restores the rest."""
        while self._held:
            storage, host = self._held[-1]
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host)
            self._held.pop()


def storages_of(root: object, device: torch.device, without: Tensor) -> list[torch.UntypedStorage]:
    """The storages of all tensors on the device below `root`, each once, except that of the tensor `without`. Follows
    our own objects and torch modules."""
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
