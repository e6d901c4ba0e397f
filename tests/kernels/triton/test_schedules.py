"""Merges, counters and work lists give the same bits in whatever order a kernel's programs run, and leave nothing
behind that the next launch would see. Memory that was not written is NaN.

The interpreter alone runs one program after the other, in which most races do not show: see `triton_schedules.py`. On a
GPU `bench/gpu/determinism.py` launches the same kernels 100,000 times.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from triton_schedules import Schedule, scheduled

from pagewire.kernels.triton import decode_attention as decode_module
from pagewire.kernels.triton import moe as moe_module
from pagewire.kernels.triton import small_product as product_module

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")
SEEDS = range(6)
FOLDER = Path(decode_module.__file__).parent
ATOMIC = r"tl\.atomic_add\((\w+(?: \+ \w+)?), 1, sem=\"acq_rel\", scope=\"gpu\"\)"


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """New memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def split_product(module: ModuleType) -> Callable[[], Tensor]:
    """A product whose sums are split, with a workspace that serves many launches."""
    n, k = 32, 1024
    assert module.tiling(n, k).splits > 1
    x, weight, residual = torch.randn(3, k), torch.randn(n, k), torch.randn(3, n)
    workspace = module.workspace_small_product([(n, k)], "cpu")

    def run() -> Tensor:
        workspace.partials.fill_(torch.nan)
        out = torch.full((3, n), torch.nan)
        module.small_product(x, weight, out, workspace, residual=residual)
        return out

    return run


def decode(module: ModuleType) -> Callable[[], Tensor]:
    """Rows of one and of several chunks, on fewer programs than there are chunks."""
    contexts = [33, 5, 7, 80, 32, 97]
    query, pages = torch.randn(len(contexts), 4, 16), torch.randn(2, 40, 2, 16, 16)
    table = torch.randperm(40).to(torch.int32)[: 7 * len(contexts)].repeat(2)[: 7 * len(contexts)].view(-1, 7)
    workspace = module.workspace_decode(
        rows=8, max_context=128, heads=4, kv_heads=2, head_dim=16, num_programs=9, chunk=16, device="cpu"
    )

    def run() -> Tensor:
        for memory in (workspace.partials, workspace.sums):
            memory.fill_(torch.nan)
        workspace.items.fill_(2**30)
        module.plan_decode(torch.tensor(contexts, dtype=torch.int32), workspace)
        out = torch.full_like(query, torch.nan)
        module.decode_attention(out, query, *pages, table, workspace, scale=0.2)
        return out

    return run


def experts(module: ModuleType) -> Callable[[], Tensor]:
    tokens, num_experts, top_k, hidden, inter = 9, 4, 2, 64, 32
    workspace = module.workspace_moe(
        max_tokens=tokens, num_experts=num_experts, top_k=top_k, hidden=hidden, inter=inter, dtype=torch.float16,
        device="cpu",
    )  # fmt: skip
    x, logits = torch.randn(tokens, hidden).half(), torch.randn(tokens, num_experts).half()
    up, down = torch.randn(num_experts, 2 * inter, hidden).half(), torch.randn(num_experts, hidden, inter).half()
    real = torch.tensor([tokens - 1], dtype=torch.int32)

    def run() -> Tensor:
        for memory in (workspace.gated, workspace.parts, workspace.weights):
            memory.fill_(torch.nan)
        workspace.assignments.fill_(2**30)
        out = torch.full_like(x, torch.nan)
        module.moe(out, x, logits, up, down, real, workspace, top_k=top_k, renormalize=True)
        return out

    return run


WORKS = {"split product": (split_product, product_module), "decode": (decode, decode_module),
         "experts": (experts, moe_module)}  # fmt: skip


def differing(run: Callable[[], Tensor], expected: Tensor) -> list[int]:
    """Seeds of the orders in which one of two launches, one after the other, gives other bits."""
    found = []
    for seed in SEEDS:
        with scheduled(seed):
            outs = [run(), run()]
        if not all(torch.equal(out, expected) for out in outs):
            found.append(seed)
    return found


@pytest.mark.parametrize("name", WORKS)
def test_every_order_of_programs_gives_the_same_bits(name: str) -> None:
    make, module = WORKS[name]
    run = make(module)
    expected = run()
    assert not expected.isnan().any()
    assert differing(run, expected) == []


def mutant(name: str, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """A kernel's module with other source text. changes: pattern, replacement. That of the frame of products is given
    as a `small_product` on it."""
    if name == "product":
        frame = changed(name, folder, *changes)
        sys.modules[frame.__name__] = frame
        try:
            return changed("small_product", folder, (r"from \.product import", "from .product_mutant import"))
        finally:
            del sys.modules[frame.__name__]
    return changed(name, folder, *changes)


def changed(name: str, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    source = (FOLDER / f"{name}.py").read_text()
    for pattern, new in changes:
        source, number = re.subn(pattern, new, source)
        assert number == 1, f"{name}.py has {number} of {pattern!r}: change this test with it"
    path = folder / f"{name}_mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"pagewire.kernels.triton.{name}_mutant", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


MUTANTS = {
    "a split product that merges before the last arrival": (
        "split product", "product", [(r"TILE, BLOCK_M\) != SPLITS - 1", "TILE, BLOCK_M) != SPLITS - 2")],
    ),
    "a split product that counts its arrival before it stores": (
        "split product",
        "product",
        [
            (r"( +)(tl\.store\(address \+ split \* .*)\n", r"\1count = tl.atomic_add(arrival, 1)\n\1\2\n"),
            (rf"return {ATOMIC}", "return count"),
        ],
    ),
    "a split product that does not reset its counter": (
        "split product", "product", [(r"tl\.store\(arrivals \+ tile, 0\)", "pass")],
    ),
    "a merge of chunks before the last arrival": (
        "decode", "decode_attention", [(rf"{ATOMIC} == count - 1", r"tl.atomic_add(\1, 1) == count - 2")],
    ),
    "a chunk that is stored after its arrival": (
        "decode",
        "decode_attention",
        [
            (r"( +)(tl\.store\(partials \+ item .*)\n", r"\1arrival = arrivals + row * UNITS + unit\n"
             r"\1arrived = tl.atomic_add(arrival, 1)\n\1\2\n"),
            (rf"if {ATOMIC} == count - 1", "if arrived == count - 1"),
        ],
    ),
    "a merge that does not reset its counter": (
        "decode", "decode_attention", [(r"tl\.store\(arrival, 0\)", "pass")],
    ),
}  # fmt: skip


SLOW = [what for what, (name, *_) in MUTANTS.items() if name == "decode"]


@pytest.mark.parametrize("what", [pytest.param(each, marks=[pytest.mark.long] * (each in SLOW)) for each in MUTANTS])
def test_broken_merges_are_found(what: str, tmp_path: Path) -> None:
    name, file, changes = MUTANTS[what]
    make, module = WORKS[name]
    torch.manual_seed(0)
    expected = make(module)()
    torch.manual_seed(0)
    assert differing(make(mutant(file, tmp_path, *changes)), expected)


def test_programs_do_switch() -> None:
    run = decode(decode_module)
    with scheduled(0) as schedule:
        run()
    assert schedule.num_switches > 50


def test_an_error_of_a_program_ends_the_others() -> None:
    schedule, ended = Schedule(0), []

    def work() -> None:
        try:
            schedule.switch()
            raise ValueError("of a program")
        except Exception as error:
            ended.append(type(error).__name__)
            raise

    with pytest.raises(ValueError, match="of a program"):
        schedule.run([(i, 0, 0) for i in range(5)], work, lambda index: None)
    assert ended.count("ValueError") == 1
