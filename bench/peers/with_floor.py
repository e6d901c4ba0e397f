"""Not an engine but a bound: every step reads each byte of the checkpoint's weights once and hardly computes.

With one stream, no engine with unquantized weights can be faster than memory bandwidth allows; with many streams,
arithmetic and KV add to it. The read is a product of a float32 matrix and a vector, on as many threads as cores.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from .base import Load
from .child import Settings, serve
from .in_child import InChild, has_modules

_COLUMNS = 4096  # float32 numbers; long rows, so that a thread reads in one run


class Floor:
    name = "floor"

    def __init__(self, python: str) -> None:
        self._python = python

    def missing(self) -> str:
        return "" if has_modules(self._python, "torch") else "pip install torch"

    def convert(self, folder: Path) -> Path:
        return folder

    def start(self, load: Load) -> InChild:
        return InChild(self._python, "with_floor", load)


class _Engine:
    def __init__(self, settings: Settings) -> None:
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        num_bytes = (settings.path / "model.safetensors").stat().st_size
        rows = -(-num_bytes // (4 * _COLUMNS))
        self._torch = torch
        self._weights = torch.ones(rows, _COLUMNS)  # the values do not matter, but the pages must be allocated
        self._vector = torch.ones(_COLUMNS)
        self._result = torch.empty(rows)

    def run(self, requests: Sequence[tuple[list[int], int]]) -> list[list[float]]:
        times = []
        for _ in range(max(num_tokens for _, num_tokens in requests)):
            self._torch.mv(self._weights, self._vector, out=self._result)
            times.append(time.perf_counter())
        return [times[:num_tokens] for _, num_tokens in requests]


def child(arguments: Sequence[str]) -> None:
    serve(_Engine, arguments)
