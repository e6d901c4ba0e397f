"""Micro-batches in virtual time: how busy P stages are under the real scheduler, and how long rows wait for tokens.

Either clients send one request after another, of random lengths, or a batch of equal requests comes at once. Each
stage takes a P-th of the time of a step, which grows with its rows and the positions of prompts; plans, ids and results
take a moment between processes. No clock is read and nothing is computed, so the figures do not depend on the machine.
`all eligible` is the scheduler without shares: each plan takes every row whose token is P plans old.

`python -m pagewire.bench.engine.stages` prints tokens per second, the share of the stages' time without work (while
plans are in flight), and percentiles of the time between two tokens of a row.
"""

import argparse
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import NamedTuple

from ...engine.core.block_pool import BlockPool
from ...engine.core.micro_batches import MicroBatches, Turn
from ...engine.core.request import Request
from ...engine.core.scheduler import Scheduler
from ...ipc.messages import (
    Enqueue,
    Limits,
    Sampling,
    StepPlan,
    StepResult,
    TextSpec,
    TokenBatch,
    bytes_to_ids,
    ids_to_bytes,
)
from ..report import Row, machine, print_table, write_json

_DEPTH = 2
_MAX_LEN = 1024


class AllEligible(MicroBatches):
    """Takes every row whose token is P plans old."""

    def take(self, running: list[Request], turn: Turn) -> list[Request]:
        if turn.num_in_flight >= self.num_stages + self._depth - 1:
            return list(self._prompts)
        self._latest = max(turn.step - self.num_stages, turn.applied)
        return [*self.ready(), *self._prompts]


class Machine(NamedTuple):
    """What things cost, in virtual milliseconds."""

    num_stages: int
    step_ms: float  # of all stages together, whatever a step computes
    row_ms: float  # more, for each row of one position
    prompt_ms: float  # more, for each other position
    hop_ms: float  # a message from one process to another

    def stage_ms(self, num_rows: int, num_prompt: int) -> float:
        """The time of one stage for a step."""
        return (self.step_ms + self.row_ms * num_rows + self.prompt_ms * num_prompt) / self.num_stages


class Stages:
    """The workers: each runs the plans in order, and the first waits for the ids of a plan's rows."""

    def __init__(self, machine: Machine, max_num_seqs: int) -> None:
        self._machine = machine
        self._free_at = [0.0] * machine.num_stages
        self._known_at = [0.0] * max_num_seqs  # row → when the first stage knows its last id
        self.busy_ms = 0.0  # of all stages
        self._spans: deque[tuple[float, float]] = deque()  # when the plans were under way

    def run(self, plan: StepPlan, now: float) -> tuple[float, float]:
        """A plan is sent. Returns (when its tokens leave the last stage, the time of a stage)."""
        machine = self._machine
        counts = bytes_to_ids(plan.counts)
        rows = bytes_to_ids(plan.rows)
        for opened in plan.open:
            self._known_at[opened.row] = 0.0
        num_rows = sum(count == 1 for count in counts)
        ms = machine.stage_ms(num_rows, sum(counts) - num_rows)
        at = max([now + machine.hop_ms, *(self._known_at[row] for row in rows)])
        for stage, free_at in enumerate(self._free_at):
            at = max(at, free_at) + ms
            self._free_at[stage] = at
            if stage + 1 < machine.num_stages:
                at += machine.hop_ms
        for row, samples in zip(rows, plan.sample, strict=True):
            if samples:
                self._known_at[row] = at + machine.hop_ms
        self.busy_ms += ms * machine.num_stages
        return at, ms


def measure(
    machine: Machine, num_clients: int, num_tokens: int, rule: Callable[..., MicroBatches], *, is_batch: bool
) -> dict[str, float]:
    """Serves `num_clients` clients until each has got so many tokens on average. The first half is a warm-up."""
    num_output, num_tokens = num_tokens, num_tokens * num_clients
    rng = Random(num_clients)
    scheduler = Scheduler(
        pool=BlockPool(num_pages=num_clients * (_MAX_LEN // 16)),
        block_size=16,
        max_num_seqs=num_clients,
        max_num_batched_tokens=2048,
        max_model_len=_MAX_LEN,
        max_queued_requests=num_clients,
        max_queued_tokens=num_clients * _MAX_LEN,
        depth=_DEPTH,
        num_stages=machine.num_stages,
        eos_token_ids=(),
        prefix_caching=False,
    )
    batches = rule(machine.num_stages, _DEPTH, scheduler._cost)
    scheduler.micro_batches = scheduler._planner._micro_batches = scheduler.table._micro_batches = batches
    stages = Stages(machine, num_clients)
    results: list[tuple[float, int, StepResult]] = []  # a heap: (when the core has it, step, result)
    last_at: dict[int, float] = {}  # rid → when its last token was sampled
    gaps: list[float] = []
    now, num_sent, num_got, idle_since, idle_ms = 0.0, 0, 0, 0.0, 0.0
    warm_at = warm_busy = warm_idle = 0.0
    warm_got = 0

    def send() -> None:
        nonlocal num_sent
        num_sent += 1
        prompt = ids_to_bytes([5] * (32 if is_batch else rng.randint(32, 512)))
        limits = Limits(max_tokens=num_output if is_batch else rng.randint(32, 480), ignore_eos=True)
        scheduler.add(Enqueue(num_sent, prompt, Sampling(), limits, TextSpec()))

    for _ in range(num_clients):
        send()
    while num_got < num_tokens:
        while (plan := scheduler.plan()) is not None:
            if scheduler.num_in_flight == 1:
                idle_ms += now - idle_since
            at, ms = stages.run(plan, now)
            ids = ids_to_bytes([5] * sum(plan.sample))
            heappush(results, (at + machine.hop_ms, plan.step, StepResult(plan.step, ids, {}, {}, ms)))
        now, _, result = heappop(results)
        scheduler.apply(result)
        if not scheduler.num_in_flight:
            idle_since = now
        is_warm = num_got >= num_tokens // 2
        if is_warm and not warm_at:
            warm_at, warm_busy, warm_idle, warm_got = now, stages.busy_ms, idle_ms, num_got
        for item in scheduler.take_outputs():
            if not isinstance(item, TokenBatch):
                continue
            ended = {tokens.rid for tokens in item.tokens if tokens.finish is not None}
            for rid in [*(rid for rid, _ in item.columns()), *(tokens.rid for tokens in item.tokens)]:
                num_got += 1
                if is_warm and rid in last_at:
                    gaps.append(now - last_at[rid])
                last_at[rid] = now
            for rid in ended:
                del last_at[rid]
                send()
    gaps.sort()
    span = now - warm_at - (idle_ms - warm_idle)
    return {
        "tokens/s": (num_got - warm_got) / (now - warm_at) * 1000,
        "bubble %": 100 * (1 - (stages.busy_ms - warm_busy) / (machine.num_stages * span)),
        "ITL p50 ms": gaps[len(gaps) // 2],
        "ITL p99 ms": gaps[len(gaps) * 99 // 100],
    }


RULES: dict[str, Callable[..., MicroBatches]] = {"all eligible": AllEligible, "shares": MicroBatches}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1, 8, 64, 256], help="clients, each with one request"
    )
    parser.add_argument("--stages", type=int, default=4, help="stages")
    parser.add_argument("--step-ms", type=float, default=20.0, help="a step of all stages, without rows")
    parser.add_argument("--row-ms", type=float, default=0.5, help="more for each row")
    parser.add_argument("--prompt-ms", type=float, default=0.05, help="more for each position of a prompt")
    parser.add_argument("--hop-ms", type=float, default=0.1, help="a message between processes")
    parser.add_argument("--tokens", type=int, default=800, help="tokens of each client, half of them to warm up")
    parser.add_argument("--json", type=Path, default=Path("bench/results/stages.json"), help="where to write")
    arguments = parser.parse_args(argv)
    costs = Machine(arguments.stages, arguments.step_ms, arguments.row_ms, arguments.prompt_ms, arguments.hop_ms)
    rows = []
    for is_batch in (False, True):
        for num in arguments.clients:
            for name, rule in RULES.items():
                row = Row(f"{num} {'at once' if is_batch else 'clients'}, {name}")
                row.add(**measure(costs, num, arguments.tokens, rule, is_batch=is_batch))
                rows.append(row)
    print_table(rows)
    write_json(arguments.json, "stages", rows, machine(), costs._asdict())


if __name__ == "__main__":
    main()
