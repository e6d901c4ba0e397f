"""Estimates, without a GPU, how long a step takes on one: an estimate, and no measurement. No GPU has run the kernels.

    python -m pagewire.bench.gpu.estimate                            H200, all models
    python -m pagewire.bench.gpu.estimate --devices A100 B200 --models llama-3.1-8b --rows 1 32 --kernels
    python -m pagewire.bench.gpu.estimate --devices A100 4090 H100 H200 B200 --write
                                          writes the table that the report of `verify.sh` prints beside measurements

`launches.py` lists what a step of the engine launches, and compiles it. A launch is estimated as

    the gap between nodes of a CUDA graph
    + the chain: loads that wait for each other, of which one goes to memory and the others to the cache
    + the largest of  memory: bytes, by the bandwidth that the bytes in flight of all running programs allow
                      tensor cores: multiplications and additions, with the padding of tiles
                      issue: instructions of the main loop, by four a cycle and multiprocessor
      each for the full rounds of programs and for the last one, whose programs are fewer: they leave multiprocessors
      idle, and reach the bandwidth only if they have enough bytes in flight

What is left out: contention, clocks below the boost clock, overlap of a launch with the next, caches between launches.
An error of a quarter would be no surprise.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .devices import DEVICES, Device

if TYPE_CHECKING:
    from torch import Tensor

    from .launches import Kernel, Launch

PATH = Path(__file__).resolve().parents[1] / "results" / "gpu_estimates.json"
MODELS = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b")
ROWS = (1, 8, 32, 64, 128, 256)
CONTEXT = 1024

_NODE_US = 1.3  # between two nodes of a graph: published for H100 (HazyResearch, "no bubbles")
_REACH = 0.9  # of the bandwidth, that a copy reaches: 4.3 of 4.8 TB/s are published for H200
_TENSOR_REACH = 0.8  # of the tensor cores' rate, that products reach: 790 of 989 TFLOP/s are published for H200
_LIBRARY_CHAIN = 3  # loads in a row of a library's kernel
_TILE = 128  # rows and columns of a program of a library's product
_EVEN = 1e9  # pieces: as many as any number of programs divides evenly
_SCHEDULERS = 4  # instructions that a multiprocessor issues per cycle
_SMALL = 64 << 10  # bytes that a program of another kernel reads and writes at most
_PER_ROW = 1024  # bytes of a row that a kernel for bookkeeping reads and writes
_PER_PROGRAM = 1024  # bytes of shared memory that the system takes of each program
_SCRATCH = ("k_pages", "v_pages", "partials", "arrivals", "rotary", "edited", "candidates", "block_table", "tables")


class Step(NamedTuple):
    """What the launches do not show: the numbers on the device."""

    rows: int
    context: int  # keys of each row
    is_prompt: bool = False  # each row computes all its positions; else one


class Work(NamedTuple):
    bytes: float
    operations: float  # of tensor cores, with padding
    units: float  # equal pieces that the programs take


class Cost(NamedTuple):
    """Microseconds of a launch."""

    node: float
    chain: float
    memory: float
    tensor_cores: float
    issue: float

    @property
    def total(self) -> float:
        return self.node + self.chain + max(self.memory, self.tensor_cores, self.issue)

    @property
    def largest(self) -> str:
        return max(self._fields, key=lambda name: float(getattr(self, name)))


def resident(kernel: "Kernel", device: Device) -> int:
    """Programs that a multiprocessor holds at once; 0: not even one fits."""
    threads = 32 * kernel.warps
    by_shared = device.shared // (kernel.shared + _PER_PROGRAM)
    registers = -(-kernel.registers // 8) * 8  # are given out in eights
    return min(by_shared, device.registers // max(1, registers * threads), device.threads // threads, 32)


def cost(kernel: "Kernel | None", programs: int, work: Work, device: Device) -> Cost:
    """kernel: None: a library's, which has as many programs as the device holds, one on each multiprocessor."""
    cycle_us = 1e-3 / device.ghz
    if kernel is None:
        slots, is_warpgroup, chain, flight = device.processors, True, _LIBRARY_CHAIN, float("inf")
        passes, instructions = 0.0, 0
    else:
        main, outside = kernel.code.main, kernel.code.outside
        slots = min(programs, device.processors * max(1, resident(kernel, device)))
        is_warpgroup, chain = kernel.code.is_warpgroup, kernel.code.chain
        loaded = kernel.warps * max(main.loaded, outside.loaded)
        flight = max(kernel.shared if main.copied else 0, loaded, 1)
        moved = main.copied + main.loaded
        by_loads = work.bytes / moved if moved else 0.0
        passes, instructions = (work.operations / main.operations if main.operations else by_loads), main.instructions
    units = max(1.0, work.units)
    slots = max(1, min(slots, math.ceil(units)))
    num_full, num_last = divmod(units, slots)
    latency_us = device.dram_cycles * cycle_us

    def bandwidth(num: float) -> float:
        """Bytes per microsecond of programs that run at once."""
        return min(1e3 * device.gbs * _REACH, num * flight / latency_us)

    def busy(num: float) -> float:
        """Multiprocessors that these programs keep busy until the last of them ends."""
        return num / math.ceil(num / device.processors)

    def by_rounds(rate: Callable[[float], float]) -> float:
        """Rounds of all slots, and one of the rest, per unit of work."""
        full = num_full * slots / rate(slots)
        return (full + (num_last / rate(num_last) if num_last else 0.0)) / units

    rate = 1e6 * device.tflops * _TENSOR_REACH * (1.0 if is_warpgroup else device.mma_share) / device.processors
    return Cost(
        node=_NODE_US,
        chain=((chain - 1) * device.cache_cycles + device.dram_cycles) * cycle_us if chain else 0.0,
        memory=work.bytes * by_rounds(bandwidth),
        tensor_cores=work.operations / rate * by_rounds(busy),
        issue=passes * instructions / _SCHEDULERS * cycle_us * by_rounds(busy),
    )


def work_of(launch: "Launch", step: Step, chunk: int) -> Work:
    """chunk: positions of a chunk of decode attention."""
    rule = _RULES.get(launch.name)
    if rule is not None:
        return rule(launch, step, chunk)
    tensors = _tensors(launch)
    if launch.kernel is None:
        return Work(sum(each.nbytes for each in tensors), 0, _EVEN)
    most = launch.programs * _SMALL
    return Work(sum(min(each.nbytes, most) for each in tensors), 0, launch.programs)


def _tensors(launch: "Launch") -> list["Tensor"]:
    import torch

    return [arg for name, arg in launch.arguments.items() if isinstance(arg, torch.Tensor) and name not in _SCRATCH]


def _own_product(launch: "Launch", step: Step, chunk: int) -> Work:
    """`_product`: each program reads its part of the weight."""
    of = launch.arguments
    x, weight, out = launch.tensor("x"), launch.tensor("weight"), launch.tensor("out")
    n, k = of["N"], of["K"]
    rows = math.ceil(x.shape[0] / of["BLOCK_M"]) * of["BLOCK_M"]
    num_bytes = weight.nbytes + x.nbytes + out.nbytes + (out.nbytes if of["residual"] is not None else 0)
    return Work(num_bytes, 2.0 * rows * n * k, launch.programs)


def _decode(launch: "Launch", step: Step, chunk: int) -> Work:
    """Prompts have no rows for it, but an empty item for each row and unit."""
    of = launch.arguments
    pages, query = launch.tensor("k_pages"), launch.tensor("query")
    tiles = math.ceil(of["GROUP"] / of["TILE_ROWS"])
    heads = of["KV_HEADS"] * tiles
    if step.is_prompt:
        return Work(2 * query.nbytes, 0, query.shape[0] * heads)
    keys = step.rows * step.context
    per_key = of["WIDTH"] if of["v_pages"] is None else 2 * of["WIDTH"]
    num_bytes = keys * of["KV_HEADS"] * per_key * pages.element_size() + 2 * query.nbytes
    operations = 2.0 * keys * heads * of["TILE_ROWS"] * (2 * of["HEAD_DIM"] + of["ROPE_DIM"])
    return Work(num_bytes, operations, step.rows * math.ceil(step.context / chunk) * heads)


def _extend(launch: "Launch", step: Step, chunk: int) -> Work:
    """Each tile of a prompt sees the keys before it and its own."""
    of = launch.arguments
    query, pages = launch.tensor("query"), launch.tensor("k_pages")
    pairs = step.rows * step.context * (step.context + 1) / 2 * of["KV_HEADS"] * of["GROUP"]
    operations = 2.0 * pairs * (2 * of["HEAD_DIM"] + of["ROPE_DIM"])
    tiles = math.ceil(step.rows * step.context * of["GROUP"] / of["TILE_ROWS"]) * of["KV_HEADS"]
    per_key = of["WIDTH"] if of["v_pages"] is None else 2 * of["WIDTH"]
    num_bytes = step.rows * step.context * of["KV_HEADS"] * per_key * pages.element_size() + 2 * query.nbytes
    return Work(num_bytes, operations, tiles)


def distinct_experts(num_experts: int, num_assigned: float) -> float:
    """The expected number, if every choice is equally likely."""
    return num_experts * (1.0 - math.exp(num_assigned * math.log1p(-1 / num_experts)))


def _experts(launch: "Launch", step: Step, chunk: int) -> Work:
    of = launch.arguments
    weight, x, out = launch.tensor("gate_up" if "gate_up" in of else "weight"), launch.tensor("x"), launch.tensor("out")
    num_experts, n, k = weight.shape
    num_assigned = of["num_assigned"]
    touched = distinct_experts(num_experts, num_assigned)
    blocks = max(touched, num_assigned / of["ROWS"] + touched / 2 * (num_assigned > of["ROWS"]))
    columns = math.ceil(out.shape[1] / of["COLUMNS"])
    num_bytes = touched * n * k * weight.element_size() + min(x.nbytes, num_assigned * k * 2) + num_assigned * n * 2
    return Work(num_bytes, 2.0 * blocks * of["ROWS"] * n * k, blocks * columns)


def _library_product(launch: "Launch", step: Step, chunk: int) -> Work:
    """aten.mm(x, w), aten.addmm(b, x, w) and aten.bmm."""
    out, x = launch.tensor("out"), launch.tensor("1" if launch.name == "aten.addmm" else "0")
    rows, n, k = out.numel() // out.shape[-1], out.shape[-1], x.shape[-1]
    operands = [each for name, each in launch.arguments.items() if name in "012" and hasattr(each, "nbytes")]
    tiles = math.ceil(rows / _TILE) * math.ceil(n / _TILE)
    units = tiles if tiles > _TILE else _EVEN  # few tiles are cut along k, so that all multiprocessors read
    return Work(sum(each.nbytes for each in operands) + out.nbytes, 2.0 * max(rows, 16) * n * k, units)


def _bookkeeping(launch: "Launch", step: Step, chunk: int) -> Work:
    """Some numbers of each row: of its place in the step, or of the blocks of its logits."""
    return Work(step.rows * _PER_ROW, 0, launch.programs)


def _lookup(launch: "Launch", step: Step, chunk: int) -> Work:
    return Work(2 * launch.tensor("out").nbytes, 0, _EVEN)


_RULES = {
    "_product": _own_product,
    "_decode_kernel": _decode,
    "_extend_kernel": _extend,
    "_gate_up_kernel": _experts,
    "_product_kernel": _experts,
    "_prepare_step": _bookkeeping,
    "_plan_kernel": _bookkeeping,
    "_pick_kernel": _bookkeeping,
    "_remember_sampled": _bookkeeping,
    "aten.mm": _library_product,
    "aten.addmm": _library_product,
    "aten.bmm": _library_product,
    "aten.embedding": _lookup,
    "aten.index_select": _lookup,
    "aten.index": _lookup,
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one step."""

    costs: tuple[tuple[str, Cost], ...]  # of each launch, with its name
    works: tuple[Work, ...]

    @property
    def ms(self) -> float:
        return sum(each.total for _, each in self.costs) / 1e3

    def by_kernel(self) -> Mapping[str, tuple[int, float]]:
        """(launches, milliseconds), the largest first."""
        found: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for name, each in self.costs:
            number, ms = found[name]
            found[name] = number + 1, ms + each.total / 1e3
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def by_term(self) -> Mapping[str, float]:
        """Milliseconds of each term where it counts, the largest first."""
        found: defaultdict[str, float] = defaultdict(float)
        for _, each in self.costs:
            found["node"] += each.node / 1e3
            found["chain"] += each.chain / 1e3
            work = {name: getattr(each, name) for name in ("memory", "tensor_cores", "issue")}
            name = max(work, key=work.__getitem__)
            found[name] += work[name] / 1e3
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def bandwidth(self, kernel: str) -> float:
        """GB/s of the first launch of a kernel."""
        number = next(i for i, (name, _) in enumerate(self.costs) if name == kernel)
        return self.works[number].bytes / self.costs[number][1].total / 1e3


def estimate(launches: Iterable["Launch"], step: Step, device: Device) -> Estimate:
    launches = tuple(launches)
    chunk = next((each.arguments["CHUNK"] for each in launches if each.name == "_plan_kernel"), 256)
    works = tuple(work_of(each, step, chunk) for each in launches)
    costs = tuple(
        (each.name, cost(each.kernel, each.programs, work, device)) for each, work in zip(launches, works, strict=True)
    )
    return Estimate(costs=costs, works=works)


class Target(NamedTuple):
    """For one H200."""

    model: str
    rows: int
    ms: float


TARGETS = (
    Target("qwen3-0.6b", 1, 0.9),
    Target("llama-3.1-8b", 1, 4.0),
    Target("qwen3-0.6b", 256, 8.0),
    Target("llama-3.1-8b", 256, 13.0),
)
_LEAST_SHARE = 88  # % of the bandwidth of a copy, of decode attention at 64 rows


def steps_of(
    model: str, rows: Sequence[int], device: Device, *, context: int = CONTEXT, prompts: bool = True
) -> dict[str, tuple[Step, Estimate]]:
    """The estimates of a model by the names of the figures of `steps.py`."""
    import torch

    from .launches import Model, program

    engine = Model(
        program(model), rows=max(rows), tokens=context, programs=device.processors * 3, dtype=torch.bfloat16
    )  # fmt: skip
    found = {}
    for number in rows:
        step = Step(number, context)
        launches = engine.step(device.architecture, tokens=number, samples=number, is_prompt=False)
        found[f"step, {number} × {context}"] = step, estimate(launches, step, device)
    if prompts:
        step = Step(1, context, is_prompt=True)
        launches = engine.step(device.architecture, tokens=context, samples=1, is_prompt=True)
        found[f"step, prompt of {context}"] = step, estimate(launches, step, device)
    return found


def verdicts(model: str, found: Mapping[str, tuple[Step, Estimate]], device: Device) -> list[str]:
    """A sentence for each target of the model, and what is too large where the estimate misses it."""
    lines = []
    for target in (each for each in TARGETS if each.model == model):
        made = found.get(f"step, {target.rows} × {CONTEXT}")
        if made is None:
            continue
        ms = made[1].ms
        text = f"{target.rows} × {CONTEXT}: {ms:.2f} ms estimated, target {target.ms:g} ms: "
        if ms <= target.ms:
            lines.append(text + "met by estimate")
            continue
        terms = ", ".join(f"{name} {part:.2f}" for name, part in made[1].by_term().items() if part >= 0.01)
        lines.append(f"{text}missed by {ms - target.ms:.2f} ms; terms: {terms} ms")
    made = found.get(f"step, 64 × {CONTEXT}")
    if made is not None:
        share = attention_share(made[1], device)
        is_met = "met by estimate" if share >= _LEAST_SHARE else "missed by estimate"
        lines.append(f"decode attention, 64 × {CONTEXT}: {share:.0f} % of a copy, target {_LEAST_SHARE} %: {is_met}")
    return lines


def attention_share(of: Estimate, device: Device) -> float:
    """% of the bandwidth of a copy."""
    return 100 * of.bandwidth("_decode_kernel") / (device.gbs * _REACH)


_HEADS = {"qwen3-0.6b": "16/8", "llama-3.1-8b": "32/8"}
_PARTS = {"qwen3-0.6b": "steps-0.6b", "llama-3.1-8b": "steps-8b", "qwen3-30b-a3b": "steps-30b"}


def figures_of(model: str, found: Mapping[str, tuple[Step, Estimate]], device: Device) -> dict[str, float]:
    """The estimates by "part: figure" of the report of `verify.sh`."""
    figures = {f"{_PARTS[model]}: {name}": round(made.ms, 3) for name, (_, made) in found.items()}
    for step, made in found.values():
        if model in _HEADS and not step.is_prompt and step.rows >= 64:
            title = f"attention: decode attention, {_HEADS[model]} heads, {step.rows} × {step.context}"
            figures[title] = round(made.bandwidth("_decode_kernel"))
            figures[f"{title}, of a copy"] = round(attention_share(made, device))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    names = [device.name for device in DEVICES]
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--devices", nargs="+", choices=names, default=["H200"])
    flags.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    flags.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    flags.add_argument("--kernels", action="store_true", help="print the parts of each step")
    flags.add_argument("--write", action="store_true", help=f"write {PATH.name}")
    given = flags.parse_args(argv)
    written: dict[str, dict[str, float]] = {}
    print("ESTIMATES from compiled code and data sheets. No GPU has run the kernels.")
    for device in (each for each in DEVICES if each.name in given.devices):
        for model in given.models:
            found = steps_of(model, given.rows, device)
            print(f"\n{device.name}, {model}, bfloat16")
            for name, (_, made) in found.items():
                print(f"  {name}: {made.ms:.3f} ms, {len(made.costs)} launches")
                for kernel, (number, ms) in made.by_kernel().items() if given.kernels else ():
                    print(f"    {ms:8.3f} ms  {number:4} × {kernel}")
            for line in verdicts(model, found, device) if device.name == "H200" else ():
                print(f"  {line}")
            written.setdefault(device.name, {}).update(figures_of(model, found, device))
    if given.write:
        PATH.write_text(json.dumps({"title": "Estimates, not measurements", "devices": written}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
