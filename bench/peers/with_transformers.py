"""transformers' `generate`, the baseline without an engine. All requests are one batch, padded on the left to the
longest prompt and run to the longest output; tokens beyond a request's own length cost time but are not counted.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .base import Load
from .child import Settings, serve
from .in_child import InChild, has_modules


class Transformers:
    name = "transformers"

    def __init__(self, python: str) -> None:
        self._python = python

    def missing(self) -> str:
        return "" if has_modules(self._python, "transformers", "torch") else "pip install transformers torch"

    def convert(self, folder: Path) -> Path:
        return folder

    def start(self, load: Load) -> InChild:
        return InChild(self._python, "with_transformers", load)


class _Engine:
    def __init__(self, settings: Settings) -> None:
        import torch
        import transformers

        self._torch = torch
        kind: Any = transformers.AutoModelForCausalLM
        self._model = kind.from_pretrained(settings.path, dtype=torch.bfloat16).eval()

    def run(self, requests: Sequence[tuple[list[int], int]]) -> list[list[float]]:
        longest = max(len(prompt) for prompt, _ in requests)
        most = max(num_tokens for _, num_tokens in requests)
        padding = [longest - len(prompt) for prompt, _ in requests]
        ids = self._torch.tensor([[0] * pad + prompt for pad, (prompt, _) in zip(padding, requests, strict=True)])
        mask = self._torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        clock = _Clock()
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=most,
                min_new_tokens=most,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
        return [clock.times[1 : 1 + num_tokens] for _, num_tokens in requests]


class _Clock:
    """A streamer that records the time when `generate` passes it the prompt, then each step's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def child(arguments: Sequence[str]) -> None:
    serve(_Engine, arguments)
