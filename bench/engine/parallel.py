"""What stages and ranks cost on a CPU: P × T workers serve the same streams as one.

`python -m pagewire.bench.engine.parallel` starts an engine for each of `--sizes`, in turns, lets it generate with all
requests at once, and prints tokens/s, the times between tokens, the share of the stages' time that was lost, and the
ratio of tokens/s to one rank. `1x2x2` are two ranks that are KV domains. With `--architecture`, a small random model of
that one serves instead.

`+experts` deals whole experts to the ranks of each stage, where `1x2` and `2x2` cut every expert, so `--architecture
Qwen3MoeForCausalLM --sizes 1x1,1x2,1x2+experts,2x2,2x2+experts` compares both. With KV domains the name of an
`--all2all-backend` says besides how tokens get to the experts: `1x2x2+all-to-all,1x2x2+allgather_reducescatter`. Sizes
with whole experts show what their ranks send, in bytes that others have read for each token, prompts included.

What the columns can show depends on the cores. Ranks that share cores compute no faster together than one of them
alone: with fewer cores than ranks the ratio shows what messages, sums and waiting cost, and not what further devices
gain. A stage that waits for a core counts as busy then, so the bubble is too small.
"""

import argparse
import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import astuple

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
    """The share of the stages' time with plans in flight, between two snapshots, in which they were not busy. Stages
    report twice a second."""
    busy, total = (after_s - before_s for after_s, before_s in zip(_seconds(after), _seconds(before), strict=True))
    return 1 - busy / total if total else 0.0


def _seconds(snapshot: Snapshot) -> tuple[float, float]:
    """Of all stages: busy, and with plans in flight."""
    of_all = [(each.plan_s, *astuple(each.seconds)) for each in snapshot.stages]
    return sum(each.seconds.busy for each in snapshot.stages), sum(map(sum, of_all))


@dataclass(frozen=True)
class _Size:
    """Of an engine."""

    stages: int
    ranks: int  # of a stage
    domains: int
    experts: str  # whole ones: `experts`, or by which backend domains exchange tokens; empty: parts of each expert

    @staticmethod
    def of(text: str) -> "_Size":
        numbers, _, experts = text.partition("+")
        stages, ranks, domains = (int(part) for part in (*numbers.split("x"), "1")[:3])
        return _Size(stages, ranks, domains, experts)

    @property
    def name(self) -> str:
        of = " domains" * (self.domains > 1)
        how = "whole experts" if self.experts == "experts" else self.experts
        return f"{self.stages} × {self.ranks}{of}{how and ', '}{how}"

    @property
    def flags(self) -> dict[str, object]:
        sizes: dict[str, object] = {
            "pipeline_parallel_size": self.stages, "tensor_parallel_size": self.ranks, "kv_domains": self.domains
        }  # fmt: skip
        backend = {} if self.experts in ("", "experts") else {"all2all_backend": self.experts}
        return sizes | backend | ({"enable_expert_parallel": True} if self.experts else {})


async def measure(
    folder: Path, size: _Size, batch: list[list[int]], length: int, options: dict[str, object]
) -> dict[str, float]:
    """The columns of one engine of P × T ranks."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    async with AsyncLLM(str(folder), enable_prefix_caching=False, **size.flags, **options) as llm:
        await _Streams().one(llm, batch[0], params)  # memory is touched, and the cost of a step is learned
        await asyncio.sleep(_REPORT_S)
        before = await llm.snapshot()
        streams, started = _Streams(), time.perf_counter()
        await asyncio.gather(*(streams.one(llm, prompt, params) for prompt in batch))
        seconds = time.perf_counter() - started
        await asyncio.sleep(_REPORT_S)
        after = await llm.snapshot()
    sent_bytes = sum(after.rank_sent_bytes) - sum(before.rank_sent_bytes)
    num_tokens = streams.num_tokens + sum(map(len, batch))
    gaps_ms = streams.gaps_ms  # none if every stream came in one piece
    return {
        "tok/s": streams.num_tokens / seconds,
        **({f"ITL p{percent} ms": percentile(gaps_ms, percent) for percent in (50, 99)} if gaps_ms else {}),
        "bubble %": 100 * bubble(before, after),
        **({"kB/token": sent_bytes / num_tokens / 1e3} if size.experts else {}),
    }


@contextlib.contextmanager
def _served(arguments: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """The model's folder and name."""
    folder, name = locate(arguments.model, None)
    if not arguments.architecture:
        yield folder, name
        return
    # Only here, since transformers takes seconds to import.
    from .families import make, tiny

    with tempfile.TemporaryDirectory() as made:
        make(Path(made), tiny(arguments.architecture))
        for file in ("tokenizer.json", "tokenizer_config.json"):  # the demo model has fewer tokens
            shutil.copy(folder / file, made)
        yield Path(made), arguments.architecture


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, json="bench/results/parallel.json")
    flags.set_defaults(output_len=256, repeat=3)
    flags.add_argument(
        "--sizes",
        default="1x1,2x1,1x2,2x2,1x2x2",
        help="stages x ranks of a stage [x KV domains] [+experts or +BACKEND, for whole experts], the reference first",
    )
    flags.add_argument("--architecture", default="", help="of a small random model that serves instead")
    arguments = flags.parse_args(argv)
    with _served(arguments) as (folder, name):
        _compare(arguments, folder, name)


def _compare(arguments: argparse.Namespace, folder: Path, name: str) -> None:
    facts = machine()
    batch = prompts(folder, arguments.num_prompts, arguments.input_len)
    sizes = [_Size.of(text) for text in arguments.sizes.split(",")]
    rows = {size: Row(size.name) for size in sizes}
    options: dict[str, object] = {"threads": arguments.threads, "dtype": arguments.dtype}
    for _ in range(arguments.repeat):
        reference = 0.0
        for size in sizes:  # in turns, so that changes of the machine's load meet all alike
            found = asyncio.run(measure(folder, size, batch, arguments.output_len, options))
            reference = reference or found["tok/s"]
            rows[size].add(**found, ratio=found["tok/s"] / reference)
    most = max(size.stages * size.ranks for size in sizes)
    if (cores := int(str(facts["cores"]))) < most:
        print(f"{cores} cores for up to {most} ranks: the ratio shows costs, not what more devices would gain")
    print_table(list(rows.values()))
    write_json(arguments.json, "Stages and ranks on a CPU", list(rows.values()), facts, settings(arguments, name))


if __name__ == "__main__":
    main()
