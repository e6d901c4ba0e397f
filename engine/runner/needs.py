"""The memory that models would take, by the memory plan and before anything is loaded: `python -m
pagewire.engine.runner.needs`.

A process of its own, because the plan needs torch: it reads the engines as a JSON array of `Question`s from its input,
and writes a `Need` for each. It opens no GPU.
"""

import sys

import msgspec
from msgspec import Struct

from ...config.config import EngineConfig
from ...errors import PagewireError


class Question(Struct, frozen=True):
    config: EngineConfig
    gpu_bytes: int = 0  # that each rank may take of its GPU; 0: the engine runs on the host
    capability: int | None = None  # of the GPU; see `MachineFacts`


class Need(Struct, frozen=True):
    """Bytes of one rank, without its process."""

    weights: int = 0
    workspace: int = 0
    kv_cache: int = 0
    problem: str = ""  # one sentence: why it cannot be served


def need(asked: Question) -> Need:
    from .forecast import PlannedGpu, forecast

    gpu = PlannedGpu(asked.gpu_bytes, asked.capability) if asked.gpu_bytes else None
    try:
        found = forecast(asked.config, gpu)
    except PagewireError as error:
        return Need(problem=str(error))
    plan = found.memory
    return Need(plan.weights, plan.workspace, found.num_pages * plan.page_bytes)


def main() -> None:
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question])
    sys.stdout.buffer.write(msgspec.json.encode([need(each) for each in asked]))


if __name__ == "__main__":
    main()
