"""The memory that models would take, by the memory plan and before anything is loaded: `python -m
pagewire.engine.runner.needs`.

A process of its own, because the plan needs torch: it reads the configurations of engines as a JSON array from its
input, and writes a `Need` for each.
"""

import sys

import msgspec
from msgspec import Struct

from ...config.config import EngineConfig
from ...errors import PagewireError


class Need(Struct, frozen=True):
    """Bytes of one engine, without its processes."""

    weights: int = 0
    workspace: int = 0
    kv_cache: int = 0
    problem: str = ""  # one sentence: why it cannot be served


def need(config: EngineConfig) -> Need:
    """What this engine takes, all ranks together."""
    from .forecast import forecast

    try:
        found = forecast(config)
    except PagewireError as error:
        return Need(problem=str(error))
    plan, ranks = found.memory, config.num_ranks
    return Need(ranks * plan.weights, ranks * plan.workspace, ranks * found.num_pages * plan.page_bytes)


def main() -> None:
    configs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[EngineConfig])
    sys.stdout.buffer.write(msgspec.json.encode([need(config) for config in configs]))


if __name__ == "__main__":
    main()
