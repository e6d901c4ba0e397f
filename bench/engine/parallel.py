"""What stages and ranks cost on a CPU: P × T workers serve the same streams as one.

`python -m pagewire.bench.engine.parallel` starts an engine for each of `--sizes`, in turns, lets it generate with all
requests at once, and prints tokens/s, the times between tokens, the share of the stages' time that was lost, and the
ratio of tokens/s to one rank. `1x2x2` are two ranks that are KV domains.

What the columns can show depends on the cores. Ranks that share cores compute no faster together than one of them
alone: with fewer cores than ranks the ratio shows what messages, sums and waiting cost, and not what further devices
gain. A stage that waits for a core counts as busy then, so the bubble is too small.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from ...engine.checkpoint.source import locate
from ...ipc.messages import Snapshot
from ...offline.async_llm import AsyncLLM
from ...offline.sampling_params import SamplingParams
from ..report import Row, machine, percentile, print_table, write_json
from ..workload import parser, prompts, settings

_REPORT_S = 1.2  # the core reports twice a second


@dataclass
class _Streams:
    """The times of the tokens of all requests."""

    num_tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)

    async def one(self, llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> None:
        last, num = time.perf_counter(), 0
        async for output in llm.generate(prompt, params):
            now, new = time.perf_counter(), len(output.outputs[0].token_ids) - num
            if num:  # tokens that come together share their time
                self.gaps_ms += [(now - last) * 1e3 / max(1, new)] * new
            last, num = now, num + new
        self.num_tokens += num


def bubble(before: Snapshot, after: Snapshot) -> float:
    """The share of the stages' time with plans in flight, between two snapshots, in which they were not busy."""
    lost = total = 0.0
    for old, new in zip(before.stages, after.stages, strict=True):
        busy = new.busy_s - old.busy_s
        waited = sum(getattr(new, state) - getattr(old, state) for state in ("plan_s", "input_s", "ids_s"))
        lost, total = lost + waited, total + busy + waited
    return lost / total if total else 0.0


async def measure(
    folder: Path, size: tuple[int, int, int], batch: list[list[int]], length: int, options: dict[str, object]
) -> dict[str, float]:
    """The columns of one engine of P × T ranks."""
    stages, ranks, domains = size
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks, "kv_domains": domains}
    async with AsyncLLM(str(folder), enable_prefix_caching=False, **sizes, **options) as llm:
        await _Streams().one(llm, batch[0], params)  # memory is touched, and the cost of a step is learned
        await asyncio.sleep(_REPORT_S)
        before = await llm.snapshot()
        streams, started = _Streams(), time.perf_counter()
        await asyncio.gather(*(streams.one(llm, prompt, params) for prompt in batch))
        seconds = time.perf_counter() - started
        await asyncio.sleep(_REPORT_S)
        after = await llm.snapshot()
    return {
        "tok/s": streams.num_tokens / seconds,
        "ITL p50 ms": percentile(streams.gaps_ms, 50),
        "ITL p99 ms": percentile(streams.gaps_ms, 99),
        "bubble %": 100 * bubble(before, after),
    }


def _size(text: str) -> tuple[int, int, int]:
    stages, ranks, domains = (int(part) for part in (*text.split("x"), "1")[:3])
    return stages, ranks, domains


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, json="bench/results/parallel.json")
    flags.set_defaults(output_len=256, repeat=3)
    flags.add_argument(
        "--sizes", default="1x1,2x1,1x2,2x2,1x2x2", help="stages x ranks of a stage [x KV domains], the reference first"
    )
    arguments = flags.parse_args(argv)
    folder, name = locate(arguments.model, None)
    facts = machine()
    batch = prompts(folder, arguments.num_prompts, arguments.input_len)
    sizes = [_size(text) for text in arguments.sizes.split(",")]
    rows = {size: Row(f"{size[0]} × {size[1]}" + " domains" * (size[2] > 1)) for size in sizes}
    options = {"threads": arguments.threads, "dtype": arguments.dtype}
    for _ in range(arguments.repeat):
        reference = 0.0
        for size in sizes:  # in turns, so that changes of the machine's load meet all alike
            found = asyncio.run(measure(folder, size, batch, arguments.output_len, options))
            reference = reference or found["tok/s"]
            rows[size].add(**found, ratio=found["tok/s"] / reference)
    most = max(stages * ranks for stages, ranks, _ in sizes)
    if (cores := int(str(facts["cores"]))) < most:
        print(f"{cores} cores for up to {most} ranks: the ratio shows costs, not what more devices would gain")
    print_table(list(rows.values()))
    write_json(arguments.json, "Stages and ranks on a CPU", list(rows.values()), facts, settings(arguments, name))


if __name__ == "__main__":
    main()
