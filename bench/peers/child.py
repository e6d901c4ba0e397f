"""Inside a peer's environment: an engine's Python API behind a pipe. Standard library only.

One line of JSON a message. Comes: `[[prompt, num_tokens], …]`, all at once. Goes: `{"ready": true}`, then for each line
`{"times": [[seconds, …], …]}`, every token of every request counted from the line's arrival, or `{"error": text}`. The
end of the input is the end.
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
    """What the engine is made with."""

    path: Path  # the checkpoint, converted
    num_streams: int
    max_len: int  # tokens
    kv_bytes: int


class Engine(Protocol):
    def run(self, requests: Sequence[tuple[list[int], int]]) -> list[list[float]]:
        """Per request, `time.perf_counter` at each of its tokens. Greedy, no end at an eos."""


def serve(make: Callable[[Settings], Engine], arguments: Sequence[str]) -> None:
    """Makes the engine and answers lines. What the engine's libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    path, *numbers = arguments
    engine = make(Settings(Path(path), *map(int, numbers)))
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        came = time.perf_counter()
        try:
            times = engine.run([(prompt, num_tokens) for prompt, num_tokens in json.loads(line)])
        except Exception as error:  # whatever it is, the other side shall say it
            replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        else:
            replies.write(json.dumps({"times": [[t - came for t in stream] for stream in times]}) + "\n")
