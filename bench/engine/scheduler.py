"""The scheduler's cost per step: `plan` and `apply` of N decoding rows, without a device.

`python -m pagewire.bench.engine.scheduler` prints microseconds of CPU time per step (median and range of repetitions).
"""

import argparse
import time
from pathlib import Path

from ...engine.core.block_pool import BlockPool
from ...engine.core.scheduler import Scheduler
from ...ipc.codec import encode
from ...ipc.messages import Enqueue, Limits, Sampling, StepPlan, StepResult, TextSpec, ids_to_bytes
from ..report import Row, machine, print_table, write_json

_PROMPT_LEN = 20


def measure(num_rows: int, num_steps: int) -> dict[str, float]:
    """Mean microseconds per step of plan, apply, and of encoding the messages to the worker and the detokenizer."""
    scheduler = Scheduler(
        pool=BlockPool(num_pages=num_rows * 64),
        block_size=16,
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(2048, num_rows),
        max_model_len=1024,
        max_queued_requests=num_rows,
        max_queued_tokens=num_rows * 1024,
        depth=2,
        eos_token_ids=(7,),
    )
    for rid in range(num_rows):
        prompt = ids_to_bytes([rid % 50, rid // 50, *range(100, 98 + _PROMPT_LEN)])
        scheduler.add(Enqueue(rid, prompt, Sampling(), Limits(None, (), True), TextSpec()))
    plans: list[StepPlan] = []
    spent = {"plan µs": 0.0, "apply µs": 0.0, "encode µs": 0.0}
    warm_up = 20 + num_rows * _PROMPT_LEN // 2048
    clock = time.process_time
    for step in range(warm_up + num_steps):
        if step == warm_up:
            spent = dict.fromkeys(spent, 0.0)
        started = clock()
        plan = scheduler.plan()
        assert plan is not None
        planned = clock()
        encode(plan)
        encoded = clock()
        plans.append(plan)
        spent["plan µs"] += planned - started
        spent["encode µs"] += encoded - planned
        if len(plans) == 2:
            oldest = plans.pop(0)
            result = StepResult(oldest.step, ids_to_bytes([5] * sum(oldest.sample)), {}, {}, 0.0)
            started = clock()
            scheduler.apply(result)
            outputs = scheduler.take_outputs()
            applied = clock()
            for message in outputs:
                encode(message)
            spent["apply µs"] += applied - started
            spent["encode µs"] += clock() - applied
    assert scheduler.num_running == num_rows
    micros = {name: seconds / num_steps * 1e6 for name, seconds in spent.items()}
    return micros | {"plan + apply µs": micros["plan µs"] + micros["apply µs"]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024], help="decoding rows")
    parser.add_argument("--steps", type=int, default=300, help="steps per repetition")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/scheduler.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    rows = {num: Row(f"{num} rows") for num in arguments.rows}
    for _ in range(arguments.repeat):
        for num, row in rows.items():
            row.add(**measure(num, arguments.steps))
    print_table(list(rows.values()))
    write_json(arguments.json, "scheduler", list(rows.values()), facts, {"steps": arguments.steps})


if __name__ == "__main__":
    main()
