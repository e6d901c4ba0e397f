"""The recurrent mixers on the device against those of the executors, over steps whose packets come to one memory."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.engine.attention.kv_cache import KvCache, KvShape, StateTile, Tile
from pagewire.engine.executors.mixers import Mixer, Mixers
from pagewire.engine.executors.weights import Weights
from pagewire.engine.gpu.mixers import DeviceMixers
from pagewire.engine.gpu.packet import HostPacket, Limits, Packet, size_of
from pagewire.engine.models.description import Norm
from pagewire.engine.models.program import (
    Convolve,
    GatedNormalize,
    ScanDelta,
    ScanLightning,
    ScanMamba1,
    ScanMamba2,
    States,
    Vector,
)
from pagewire.kernels import reference_scans
from pagewire.kernels.lanes import LANES
from pagewire.kernels.states import StateRows, Tiles
from pagewire.kernels.triton.prepare_step import fill_packet
from pagewire.kernels.triton.scans import fill_states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_PAGES, TOKENS, ROWS = 40, 48, 4


def _vector(key: str) -> Vector:
    return Vector(key, ())


STATES = [(1, 2, 10), (2, 6, 5), (2, 6, 5), (3, 4, 7), (2, 5, LANES), (2, 6, 6)]
SHAPE = KvShape(layers=(Tile(1, 4, 4),), dtype=torch.float32, states=tuple(map(StateTile, STATES)))
OPERATIONS: dict[str, tuple[Mixer, list[int], dict[str, tuple[int, ...]]]] = {
    # The operation, the widths of its columns, and the shapes of its vectors.
    "convolution": (
        Convolve(States(0, 1, 1), 3, _vector("weight"), _vector("bias"), "silu"),
        [10],
        {"weight": (10, 3), "bias": (10,)},
    ),
    "delta": (
        ScanDelta(States(1, 2, 2), 2, 4, 6, 5, _vector("a"), _vector("dt")),
        [12, 12, 20, 4, 4],
        {"a": (4,), "dt": (4,)},
    ),
    "delta by channel": (
        ScanDelta(States(1, 2, 2), 4, 4, 6, 5, _vector("a"), _vector("dt"), "channel"),
        [24, 24, 20, 4, 24],
        {"a": (4,), "dt": (24,)},
    ),
    "mamba2": (
        ScanMamba2(States(3, 1, 3), 3, 7, 4, 1, _vector("a"), _vector("dt"), _vector("d"), (0.1, 2.0)),
        [21, 4, 4, 3],
        {"a": (3,), "dt": (3,), "d": (3,)},
    ),
    "mamba1": (
        ScanMamba1(States(4, 1, 2), 20, 5, _vector("a"), _vector("dt"), _vector("d")),
        [20, 20, 5, 5],
        {"a": (20, 5), "dt": (20,), "d": (20,)},
    ),
    "lightning": (ScanLightning(States(5, 1, 2), 2, 6, (0.9, 0.4)), [12, 12, 12], {}),
    "gated norm": (GatedNormalize(Norm(5), _vector("weight"), "silu", True), [10, 10], {"weight": (5,)}),
}


@dataclass
class Places:
    """The states of a step for the executors."""

    cache: KvCache
    states: StateRows | None = None

    def state_tiles(self, first: int, count: int, per_tile: int) -> Tiles:
        return self.cache.state_tiles(first, count, per_tile)


class Engine:
    """An operation on the device, of which nothing changes between steps but the packet, and in the reference."""

    def __init__(self, name: str, *, is_long: bool) -> None:
        torch.manual_seed(0)
        self.args, self.widths, vectors = OPERATIONS[name]
        weights, same = Weights(), Weights()
        for key, shape in vectors.items():
            weights.vectors[key] = -torch.rand(shape) * 2 if key == "a" else torch.randn(shape)
            same.vectors[key] = weights.vectors[key].to(DEVICE)
        cpu, device = torch.device("cpu"), torch.device(DEVICE)
        self.theirs = Places(KvCache(shape=SHAPE, num_pages=NUM_PAGES, block_size=16, device=cpu))
        self.theirs.cache.storage.fill_(255)  # NaN
        self.cache = KvCache(shape=SHAPE, num_pages=NUM_PAGES, block_size=16, device=device)
        self.cache.storage.copy_(self.theirs.cache.storage)
        self.num_pages = self.cache.groups.state_pages
        limits = Limits(
            rows=ROWS, tokens=TOKENS, samples=4, part=4, tiles=4, blocks=4, tables=1, state_pages=self.num_pages
        )
        whole = torch.full((size_of(limits),), 99, dtype=torch.int32)
        self.host, self.packet = HostPacket(whole, limits), Packet.over(whole.clone().to(DEVICE), limits)
        mixers = DeviceMixers(same, device)
        self.operation = mixers.operation(self.args)
        mixers.open(self.cache)
        vars(self.cache)["state_tiles"] = None  # steps find the places of states on the device
        mixers.begin(self.packet, num_rows=ROWS, is_long=is_long)
        self.reference = Mixers[StateRows](weights, cpu, reference_scans)

    def pages(self, number: int) -> list[int]:
        """Those of one state."""
        return list(range(number * self.num_pages, (number + 1) * self.num_pages))

    def step(
        self,
        counts: list[int],
        read: list[int],
        written: list[int],
        keeps: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        """read, written: numbers of states, -1: zeros; keeps: row, tokens, state. Compares results and memories."""
        none = [-1] * self.num_pages
        rows = StateRows.of(
            self.theirs.cache.storage,
            counts,
            [none if number < 0 else self.pages(number) for number in read],
            [self.pages(number) for number in written],
            [(row, count, self.pages(number)) for row, count, number in keeps],
        )
        num, each = sum(counts), np.arange(len(counts))
        filled = fill_packet(
            self.host.step, rows=each, counts=np.array(counts, np.int64), starts=0 * each, ids=np.zeros(num, np.int64),
            places=0 * each, num_new=1 + 0 * each, pages=each[None],
        )  # fmt: skip
        filled += fill_states(self.host.step[filled:], rows)
        used = self.host.used(filled, num_parts=1, has_tiles=True)
        self.packet.whole[used].copy_(self.host.whole[used])

        whole = torch.randn(TOKENS, sum(self.widths) + 3)  # a packet has fewer tokens than the launch
        columns = list(torch.split(whole, [*self.widths, 3], dim=1))[:-1]
        found = self.operation(list(torch.split(whole.to(DEVICE), [*self.widths, 3], dim=1))[:-1])
        if num:
            self.theirs.states = rows
            expected = self.reference.run(self.args, [part[:num] for part in columns], self.theirs)
            assert found.shape == (TOKENS, expected.shape[1])
            torch.testing.assert_close(found[:num].cpu(), expected, atol=2e-5, rtol=2e-5)
        mine, theirs = (self.numbers(cache) for cache in (self.cache, self.theirs.cache))
        assert torch.equal(mine.isnan(), theirs.isnan())
        torch.testing.assert_close(mine.nan_to_num(), theirs.nan_to_num(), atol=2e-5, rtol=2e-5)

    def numbers(self, cache: KvCache) -> Tensor:
        return cache.storage[: cache.zero_page].view(torch.float32).cpu()


@pytest.mark.parametrize("name", OPERATIONS)
def test_steps_of_one_launch_equal_the_executors(name: str) -> None:
    """Rows begin, continue in other places of the step, read what another one kept, and there are none."""
    engine = Engine(name, is_long=False)
    engine.step([2, 1, 3], [-1, -1, -1], [0, 1, 2], keeps=((2, 1, 3), (0, 2, 4)))
    engine.step([1, 1, 1, 1], [2, 0, 3, 1], [2, 0, 5, 1])
    engine.step([], [], [])
    engine.step([2, 1], [4, 5], [0, 5], keeps=((0, 1, 3),))


@pytest.mark.parametrize("name", ["convolution", "delta", "delta by channel", "mamba2", "lightning"])
def test_long_rows_equal_the_executors(name: str) -> None:
    """In chunks, where the scan has them; beside a row of one token."""
    engine = Engine(name, is_long=True)
    engine.step([1, 37], [-1, -1], [0, 1], keeps=((1, 16, 2), (1, 30, 3)))
    engine.step([1, 18], [0, 2], [0, 4])
