"""Recurrent layers on the device: the operations of `executors/mixers.py` with the scans of Triton.

What a step does with states is in its packet, as the table of `kernels/triton/scans.py`. So the kernels can be
recorded, and the host waits for nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels import reference_scans
from ...kernels.states import Tiles
from ...kernels.triton import scans
from ...kernels.triton.gated_norm import gated_norm
from ...kernels.triton.scans import StateTable
from ..attention.kv_cache import KvCache
from ..executors.mixers import Mixer, Mixers
from ..executors.weights import Weights
from ..models.program import GatedNormalize
from .packet import Packet

Mix = Callable[[list[Tensor]], Tensor]
"""An operation: its columns of a step's tokens → the columns of its result. All are [tokens, width]."""


class DeviceScans:
    """The functions of `reference_scans` for rows on the device. Results have the type of the activations."""

    conv = staticmethod(scans.conv)
    scan_delta = staticmethod(scans.scan_delta)
    scan_mamba1 = staticmethod(scans.scan_mamba1)
    scan_mamba2 = staticmethod(scans.scan_mamba2)
    scan_lightning = staticmethod(scans.scan_lightning)
    gated_norm = staticmethod(gated_norm)


class ScansWithTorchNorm(DeviceScans):
    gated_norm = staticmethod(reference_scans.gated_norm)


class DeviceMixers:
    """The recurrent mixers of one program. `open` comes before the first step, and `begin` before its operations."""

    def __init__(self, weights: Weights, device: torch.device, without: frozenset[str] = frozenset()) -> None:
        """without: kernels that torch replaces."""
        scans = ScansWithTorchNorm() if "gated_norm" in without else DeviceScans()
        self._mixers = Mixers(weights, device, scans)
        self._cache: KvCache | None = None
        self._tiles: dict[tuple[int, int, int], Tiles] = {}
        self._used: set[tuple[int, int, int]] = set()  # arguments of `state_tiles` in steps
        self._rows: StateTable | None = None

    def open(self, cache: KvCache) -> None:
        """Copies to the device where states lie in the cache, since no step may wait for that."""
        self._cache = cache
        for first, count, per_tile in self._used:
            tiles = cache.state_tiles(first, count, per_tile)
            self._tiles[first, count, per_tile] = Tiles(
                tiles.shelves.to(cache.device), tiles.offsets.to(cache.device), per_tile
            )

    def begin(self, packet: Packet, *, num_rows: int, is_long: bool) -> None:
        """num_rows: that the packet may describe at most. is_long: there may be rows of so many tokens that scans
        compute them in chunks."""
        assert self._cache is not None and packet.states is not None, "begin before open, or a packet without states"
        self._rows = StateTable(
            memory=self._cache.storage,
            place=packet.states,
            num_rows=num_rows,
            num_pages=self._cache.groups.state_pages,
            is_long=is_long,
        )

    def operation(self, args: Mixer) -> Mix:
        if not isinstance(args, GatedNormalize):
            self._used.add((args.states.first, args.states.count, args.states.per_tile))
        return lambda ins: self._mixers.run(args, ins, self)

    # Where the states of the step are.

    @property
    def states(self) -> StateTable | None:
        return self._rows

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        """Where the states of `count` adjacent units lie in the cache (`KvCache.state_tiles`), on the device."""
        return self._tiles[first, count, per_tile]
