"""Steps over rows whose states lie in random pages, for tests of kernels that have states."""

import random

import torch
from torch import Tensor

from pagewire.kernels.states import StateRows, Tiles

PAGES = 64


class StatePages:
    """A memory of pages, and a layer's tiles in them: of `units` states of `unit_bytes`, each row's in `k` pages."""

    def __init__(self, units: int, unit_bytes: int, *, k: int = 1, per_tile: int = 1, seed: int = 0) -> None:
        self.random = random.Random(seed)
        num = -(-units // per_tile)
        tile_bytes = per_tile * unit_bytes
        of_page = -(-num // k)  # tiles in a page
        self.memory = torch.randint(0, 255, (PAGES, 16 + of_page * tile_bytes + 16), dtype=torch.uint8)
        self.tiles = Tiles(
            shelves=torch.tensor([i // of_page for i in range(num)], dtype=torch.int32),
            offsets=torch.tensor([16 + i % of_page * tile_bytes for i in range(num)], dtype=torch.int64),
            per_tile=per_tile,
        )
        self.k, self.free = k, self.random.sample(range(PAGES), PAGES)

    def take(self) -> list[int]:
        """The pages of a state that nothing else uses."""
        return [self.free.pop() for _ in range(self.k)]

    @property
    def none(self) -> list[int]:
        return [-1] * self.k


def on(rows: StateRows, memory: Tensor) -> StateRows:
    """The same rows with their states in another memory."""
    return StateRows(memory, rows.counts, rows.read, rows.written, rows.keep_rows, rows.keep_counts, rows.keep_pages)
