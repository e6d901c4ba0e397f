"""Runs an engine's Python API behind a pipe, in a peer's environment. Standard library only.

Each message is one line of JSON. Input: `[[prompt, num_tokens], …]`, to be run at once. Output: `{"ready": true}`, then
for each line `{"times": [[seconds, …], …]}`, the times of every token of every request since the line's arrival, or
`{"error": text}`. The program ends with its input.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Settings:
    """The settings of the engine."""

    path: Path  # the checkpoint, converted
    num_streams: int
    max_len: int  # tokens
    kv_bytes: int


class Engine(Protocol):
    def run(self, requests: Sequence[tuple[list[int], int]]) -> list[list[float]]:
        """Runs the requests greedily, ignoring eos. Returns for each request `time.perf_counter` at each token."""


def serve(make: Callable[[Settings], Engine], arguments: Sequence[str]) -> None:
    """Makes the engine and answers lines. Output of the engine's libraries goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    path, *numbers = arguments
    engine = make(Settings(Path(path), *map(int, numbers)))
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        came = time.perf_counter()
        try:
            times = engine.run([(prompt, num_tokens) for prompt, num_tokens in json.loads(line)])
        except Exception as error:  # any error is reported by the parent
            replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        else:
            replies.write(json.dumps({"times": [[t - came for t in stream] for stream in times]}) + "\n")
