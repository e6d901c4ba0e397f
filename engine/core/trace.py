"""The step trace: everything that went into the scheduler and every plan that came out, in order.

The scheduler has no clock, no I/O and no randomness, so the same calls must give the same plans bit by bit; `replay`
checks it. A trace is a row of frames, each 4 bytes of little-endian length and a msgpack message.
"""

from collections.abc import Iterable, Iterator
from typing import BinaryIO, assert_never

import msgspec
from msgspec import Struct

from ...config import EngineConfig
from ...ipc.messages import Cancel, Enqueue, StepPlan, StepResult, StopHit
from .block_pool import BlockPool
from .scheduler import Scheduler


class Opened(Struct, frozen=True, array_like=True, tag=True):
    """The first frame: what the scheduler was made of."""

    config: EngineConfig
    num_blocks: int


class Arrived(Struct, frozen=True, array_like=True, tag=True):
    """`add` was called."""

    enqueue: Enqueue
    now: float


class Expired(Struct, frozen=True, array_like=True, tag=True):
    """`expire` was called."""

    now: float


class Planned(Struct, frozen=True, array_like=True, tag=True):
    """`plan` was called and gave this."""

    plan: StepPlan | None


Event = Opened | Arrived | Cancel | StopHit | Expired | Planned | StepResult

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


def write(file: BinaryIO, event: Event) -> None:
    """Appends one frame."""
    data = _encode(event)
    file.write(len(data).to_bytes(4, "little") + data)


def read(file: BinaryIO) -> Iterator[Event]:
    """The frames of a trace. A last frame that was cut off is left out: the engine may have been killed."""
    while len(head := file.read(4)) == 4:
        data = file.read(int.from_bytes(head, "little"))
        if len(data) < int.from_bytes(head, "little"):
            return
        yield _decode(data)


def make_scheduler(config: EngineConfig, num_blocks: int) -> Scheduler:
    """The scheduler of an engine with this configuration and so many KV blocks."""
    return Scheduler(
        pool=BlockPool(num_blocks=num_blocks),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        depth=config.pipeline_depth,
        eos_token_ids=config.eos_token_ids,
        prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
        itl_target_ms=config.itl_target_ms,
        model_key=f"{config.model_path} {config.dtype}".encode(),
    )


def replay(events: Iterable[Event]) -> tuple[int, str | None]:
    """Runs a trace again. How many plans were reproduced, and one sentence about the first that was not."""
    scheduler: Scheduler | None = None
    num_plans = 0
    for event in events:
        if isinstance(event, Opened):
            scheduler = make_scheduler(event.config, event.num_blocks)
            continue
        if scheduler is None:
            return 0, "This is no step trace: its first frame does not say how the scheduler was made."
        match event:
            case Arrived():
                scheduler.add(event.enqueue, event.now)
            case Cancel():
                for rid in event.rids:
                    scheduler.cancel(rid)
            case StopHit():
                for rid in event.rids:
                    scheduler.stop_hit(rid)
            case Expired():
                scheduler.expire(event.now)
            case StepResult():
                scheduler.apply(event)
            case Planned():
                plan = scheduler.plan()
                if plan != event.plan:
                    return num_plans, f"The plan after {num_plans} differs: {plan} instead of {event.plan}."
                num_plans += plan is not None
            case _:
                assert_never(event)
    return num_plans, None
