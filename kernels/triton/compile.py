"""Compiles the kernels for sm_80 and sm_90, and some for all GPUs, on a machine without one, and reports on the code.

    python -m pagewire.kernels.triton.compile [module …]                 prints a line for each kernel
    python -m pagewire.kernels.triton.compile --write golden.json        writes the reports
    python -m pagewire.kernels.triton.compile --check golden.json        fails if a kernel is worse than its report
    python -m pagewire.kernels.triton.compile --check golden.json --sample
                                          compiles one variant a module unless a source file has changed
    python -m pagewire.kernels.triton.compile --ship sm_90.zip --arch 90 writes the archive that `cubins.py` installs

A kernel is worse if it uses stack (spilled registers), a tenth more registers (lower occupancy), no tensor cores or no
asynchronous copies where the variant plans them, fewer pipelining buffers or more loops than planned, more shared
memory than the architecture has, or if the number of rows changes which kernels are compiled. No numerical test would
show any of this. Registers and stack are compared only under the same Triton version, because their allocation differs
between them. Triton's cache makes an unchanged kernel cheap to compile again.
"""

import argparse
import hashlib
import importlib
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

import triton
from triton.backends.compiler import GPUTarget

from .cubins import pack
from .limits import MAX_SHARED
from .variant import Plan, Variant

MODULES = (
    "decode_attention",
    "extend_attention",
    "latent_attention",
    "rms_norm",
    "activations",
    "elementwise",
    "rotate",
    "row_statistics",
    "silu_mul",
    "norm_rotary_write",
    "small_product",
    "product",
    "quantized_product",
    "widen",
    "round_rows",
    "open_rows",
    "edit_rows",
    "copy_pages",
    "prepare_step",
    "edit_logits",
    "sampling",
    "logprobs",
    "moe",
    "scans",
    "gated_norm",
)
ARCHITECTURES = (80, 90)  # checked by default, besides those of a variant; --arch takes others
# `tuned.py` has no kernel, but its table changes them.
_NO_KERNELS = ("__init__.py", "compile.py", "cubins.py", "grid.py", "limits.py")
_COUNTED = ("HMMA", "HGMMA", "QGMMA", "LDGSTS", "UTMALDG", "ATOMG", "LDL", "STL")  # always reported
_MORE_REGISTERS = 1.1  # the growth beyond which a kernel is worse
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)", re.MULTILINE)  # guard, opcode
_TOUCHES = re.compile(r"LD(?!C)|ST|ATOM|RED|UTMA|UBLK|CCTL|BR|JMP|CALL|RET|EXIT")
"""What a kernel that is launched early may not do before it waits: access memory (constants hold its arguments), branch
around the wait, or end."""
_BRANCH = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?BRA\b[^;]*?0x([0-9a-f]+)\s*;")  # address and target
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_BUFFERS = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x")

Result = TypeVar("Result")
Files = dict[str, Path]
"""A kernel's files in Triton's cache, by suffix: ".cubin", ".json", ".ttgir", …"""


class Golden(TypedDict):
    """The file of golden reports."""

    triton: str  # version
    sources: str  # `sources_key` when the reports were written
    reports: dict[str, dict[str, dict[str, Any]]]  # by title (variant and architecture), then by kernel


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler made of a kernel for one architecture."""

    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes per program
    buffers: int  # the fewest pipelining buffers of any operand; 1: no pipelining
    opcodes: dict[str, int]  # SASS mnemonic → occurrences, of `_COUNTED` and of the plan
    loops: int = 0  # branches back
    is_early: bool = False  # launched while the kernel before it runs: `dependent_launch.py`
    waits: bool = False  # for the end of that kernel, before it touches memory

    def __str__(self) -> str:
        opcodes = " ".join(f"{name} {n}" for name, n in self.opcodes.items())
        return (
            f"{self.registers:3} registers {self.stack:4} stack {self.shared:6} shared {self.buffers} buffers "
            f"{self.loops} loops {opcodes}"
        )


class NoDevice:
    """Stands in for the driver of a GPU, so that a launch compiles the kernel and runs nothing."""

    _numbers = itertools.count()  # a new device id for each instance: Triton caches compiled kernels by device

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)
        self._device = next(self._numbers)
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**30}

    def load_binary(self, *args: object) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 2**30  # module, function, registers, spills, maximum number of threads

    def launcher_cls(self, *args: object) -> Callable[..., None]:
        return lambda *args: None


def variants(modules: Sequence[str] = MODULES) -> list[Variant]:
    return [variant for name in modules for variant in importlib.import_module(f"{__package__}.{name}").VARIANTS]


def sources_key() -> str:
    """A hash of all files on which the variants depend. Triton's own version is not included."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in _NO_KERNELS:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def launched(variant: Variant, rows: int, architecture: int) -> list[str]:
    """The specialisations that a launch for `rows` rows asks for. Compiles nothing."""
    found = []

    def remember(*, compile: dict[str, Any], **_: object) -> bool:
        found.append(compile["specialization_data"])
        return True  # tells Triton not to compile

    triton.runtime.driver.set_active(NoDevice(architecture))
    triton.knobs.runtime.jit_cache_hook = remember
    try:
        variant.launch(rows)
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    return found


def compiled(launch: Callable[[], object], architecture: int) -> list[tuple[str, Files]]:
    """The name and files of each kernel that a call launches, each specialisation once, in the order of the launches. A
    kernel from a shipped archive has only its .cubin and .json."""
    found: list[tuple[str, Files]] = []

    def remember(*, src: Any, metadata_group: dict[str, str], **_: object) -> None:
        found.append((src.name, {Path(path).suffix: Path(path) for path in metadata_group.values()}))

    triton.runtime.driver.set_active(NoDevice(architecture))
    triton.knobs.compilation.listener = remember
    try:
        launch()
    finally:
        triton.knobs.compilation.listener = None
    return found


def compile_variant(variant: Variant, architecture: int) -> dict[str, Files]:
    """The files of each kernel by its name."""
    found = compiled(lambda: variant.launch(variant.rows[0]), architecture)
    names = [name for name, _ in found]
    assert set(names) == variant.plans.keys() and len(names) == len(variant.plans), (names, variant.plans.keys())
    return dict(found)


def disassembled(cubin: Path) -> tuple[int, int, str]:
    """(registers and bytes of stack per thread, SASS)."""
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = _RESOURCES.search(text)
    assert resources is not None, text[:1000]
    return int(resources[1]), int(resources[2]), text


def report_of(files: Files, wanted: Iterable[str]) -> Report:
    """wanted: opcodes to count besides `_COUNTED`."""
    registers, stack, text = disassembled(files[".cubin"])
    found = Counter(_OPCODE.findall(text))
    counts = {
        name: sum(n for opcode, n in found.items() if f"{opcode}.".startswith(f"{name}."))
        for name in sorted({*_COUNTED, *wanted})
    }
    metadata = json.loads(files[".json"].read_text())
    return Report(
        registers=registers,
        stack=stack,
        shared=metadata["shared"],
        buffers=min(map(int, _BUFFERS.findall(files[".ttgir"].read_text())), default=1),
        opcodes={name: n for name, n in counts.items() if n},
        loops=sum(int(target, 16) < int(address, 16) for address, target in _BRANCH.findall(text)),
        is_early=metadata["launch_pdl"],
        waits=waits(text),
    )


def waits(sass: str) -> bool:
    """Whether all threads of the kernel wait for the end of the kernel before it, before they touch memory."""
    for guard, opcode in _INSTRUCTION.findall(sass):
        if opcode == "ACQBULK":
            return not guard
        if _TOUCHES.match(opcode):
            return False
    return False


def failures(plan: Plan, architecture: int, report: Report, before: Report | None, *, same_compiler: bool) -> list[str]:
    """What is worse than planned, or worse than `before` under the same compiler."""
    found = [f"no {name}" for name in _opcodes(plan, architecture) if name not in report.opcodes]
    if plan.buffers is not None and report.buffers < plan.buffers:
        found.append(f"{report.buffers} buffers, {plan.buffers} planned")
    if plan.loops is not None and report.loops > plan.loops and architecture != 100:  # whose waits are loops
        found.append(f"{report.loops} loops, {plan.loops} planned")
    if report.is_early and not report.waits:
        found.append("launched early, and does not wait first")
    if report.shared > 1024 * MAX_SHARED.get(architecture, math.inf):
        found.append(f"{report.shared} bytes of shared memory, more than sm_{architecture} has")
    if plan.stack is not None and report.stack > plan.stack and same_compiler:
        found.append(f"{report.stack} bytes of stack")
    if before and same_compiler and report.registers > _MORE_REGISTERS * before.registers:
        found.append(f"{report.registers} registers, {before.registers} before")
    return found


def _opcodes(plan: Plan, architecture: int) -> tuple[str, ...]:
    """None of sm_100, whose tensor cores have other instructions."""
    return {90: plan.sm_90, 100: ()}.get(architecture, plan.sm_80)


def _architectures(variant: Variant, asked: list[int] | None) -> list[int]:
    """asked: by --arch."""
    return [each for each in asked or sorted({*ARCHITECTURES, *variant.architectures}) if each >= variant.architecture]


class _Job(NamedTuple):
    """A variant to compile in another process. A kernel cannot be pickled, so it is named by its index."""

    modules: tuple[str, ...]
    number: int  # of the variant in `variants(modules)`
    architecture: int


def _files(job: _Job) -> dict[str, Files]:
    return compile_variant(variants(job.modules)[job.number], job.architecture)


def _reports(job: _Job) -> dict[str, Report] | str:
    """The report of each kernel by its name, or the compiler's error."""
    plans = variants(job.modules)[job.number].plans
    try:
        return {name: report_of(files, _opcodes(plans[name], job.architecture)) for name, files in _files(job).items()}
    except Exception as error:  # the compiler may raise anything; the other variants are still reported
        return f"{type(error).__name__}: {error}"


def _in_parallel(run: Callable[[_Job], Result], jobs: Sequence[_Job]) -> list[Result]:
    """Runs the jobs in one process per core. fork: each process has the kernels imported, and no thread runs yet."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
        return list(pool.map(run, jobs))


def _sample(jobs: Sequence[_Job], chosen: Sequence[Variant]) -> list[_Job]:
    """The first variant of each module, for the newest architecture."""
    newest = [job for job in jobs if job.architecture == ARCHITECTURES[-1]]
    return list({chosen[job.number].launch.__module__: job for job in reversed(newest)}.values())


def _check(chosen: Sequence[Variant], jobs: Sequence[_Job], golden: Golden | None, sample: bool) -> tuple[Golden, int]:
    """The reports of these jobs, and the number of variants that are worse."""
    same_compiler = golden is None or golden["triton"] == triton.__version__
    unchanged = golden is not None and same_compiler and golden["sources"] == sources_key()
    compiled = _sample(jobs, chosen) if sample and unchanged else jobs
    results = dict(zip(compiled, _in_parallel(_reports, compiled), strict=True))
    taken: Golden = {"triton": triton.__version__, "sources": sources_key(), "reports": {}}
    num_worse = 0
    for job in jobs:
        variant = chosen[job.number]
        title = f"{variant.name} sm_{job.architecture}"
        before = {k: Report(**numbers) for k, numbers in golden["reports"].get(title, {}).items()} if golden else {}
        reports = results.get(job, before)
        worse = []
        if golden and not before:
            worse.append("no golden report")
        if len({tuple(launched(variant, rows, job.architecture)) for rows in variant.rows}) > 1:
            worse.append(f"the kernels differ between {variant.rows} rows")
        if isinstance(reports, str):
            worse.append(reports)
        else:
            for name, report in reports.items():
                found = failures(
                    variant.plans[name], job.architecture, report, before.get(name), same_compiler=same_compiler
                )
                worse += [f"{name}: {text}" for text in found]
                if job in results:
                    print(f"{title:56} {name:20} {report}")
            taken["reports"][title] = {name: asdict(report) for name, report in reports.items()}
        if worse:
            print(f"WORSE: {title}: {'; '.join(worse)}")
        num_worse += bool(worse)
    print(f"{len(compiled)} of {len(jobs)} compiled with triton {triton.__version__}, {num_worse} worse")
    return taken, num_worse


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagewire.kernels.triton.compile")
    parser.add_argument("modules", nargs="*", help="only these, for example rms_norm")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the reports to this file")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with these reports")
    parser.add_argument("--sample", action="store_true", help="with --check: compile all only if a source has changed")
    parser.add_argument("--ship", type=Path, metavar="ZIP", help="write the compiled kernels to this archive")
    parser.add_argument("--arch", type=int, action="append", help="only for this one, for example 89; may be repeated")
    options = parser.parse_args(arguments)
    modules = tuple(options.modules) or MODULES
    chosen = variants(modules)
    jobs = [_Job(modules, i, a) for i, v in enumerate(chosen) for a in _architectures(v, options.arch)]
    if options.ship:
        pack(options.ship, (files for made in _in_parallel(_files, jobs) for files in made.values()))
        return 0
    golden: Golden | None = json.loads(options.check.read_text()) if options.check else None
    taken, num_worse = _check(chosen, jobs, golden, options.sample)
    if golden and not options.modules and not options.arch and golden["reports"].keys() - taken["reports"].keys():
        print("WORSE: the golden file has reports of variants that no longer exist; write it again")
        num_worse += 1
    if options.write:
        lines = ",\n".join(f"  {json.dumps(title)}: {json.dumps(of)}" for title, of in taken["reports"].items())
        head = json.dumps({**taken, "reports": {}}, indent=1)
        options.write.write_text(head.replace('"reports": {}', f'"reports": {{\n{lines}\n }}') + "\n")
    return 1 if num_worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
