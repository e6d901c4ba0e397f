"""Compiles the kernels for sm_80 and sm_90 on a machine without a GPU, and says what the compiler made of them.

    python -m pagewire.kernels.triton.compile [module …]                 a line for each variant
    python -m pagewire.kernels.triton.compile --write golden.json        keeps the numbers
    python -m pagewire.kernels.triton.compile --check golden.json        fails where they have become worse
    python -m pagewire.kernels.triton.compile --check golden.json --sample
                                          compiles one variant a module if no source has changed since they were taken

Worse is: stack (registers are spilled), a tenth more registers (fewer programs share a processor), no tensor cores or
asynchronous copies where the variant has planned them, fewer pipelining buffers than planned. No test of numbers would
fail for any of that. Registers are compared only if the same Triton took the golden numbers. Triton keeps what it
compiled in its own cache, so an unchanged kernel is only read again.
"""

import argparse
import hashlib
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .variant import Variant

MODULES = (
    "decode_attention",
    "extend_attention",
    "rms_norm",
    "silu_mul",
    "norm_rotary_write",
    "small_product",
    "prepare_step",
    "edit_logits",
    "sampling",
    "logprobs",
    "moe",
)
ARCHITECTURES = (80, 90)
_NO_KERNELS = ("__init__.py", "compile.py", "cubins.py")
_COUNTED = ("HMMA", "HGMMA", "QGMMA", "LDGSTS", "UTMALDG", "ATOMG", "LDL", "STL")  # kept with the golden numbers
_MORE_REGISTERS = 1.1  # than before is worse
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_BUFFERS = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x")


class Golden(TypedDict):
    """The numbers that were taken once, and of what."""

    triton: str  # its version
    sources: str  # `sources_key` at that time
    reports: dict[str, dict[str, Any]]  # of each variant and architecture, by title


@dataclass(frozen=True, kw_only=True)
class Report:
    """A variant compiled for one architecture."""

    registers: int  # of a thread
    stack: int  # bytes of a thread
    shared: int  # bytes of a program
    buffers: int  # of the matrix with the fewest that are filled ahead; 1: none is
    opcodes: dict[str, int]  # how often each of _COUNTED and of what the variant asks for stands in the code

    def __str__(self) -> str:
        opcodes = " ".join(f"{name} {n}" for name, n in self.opcodes.items())
        return (
            f"{self.registers:3} registers {self.stack:4} stack {self.shared:6} shared {self.buffers} buffers {opcodes}"
        )


def variants(modules: Sequence[str] = MODULES) -> list[Variant]:
    """Of the modules that exist, in order."""
    found = [name for name in modules if importlib.util.find_spec(f"{__package__}.{name}") is not None]
    return [variant for name in found for variant in importlib.import_module(f"{__package__}.{name}").VARIANTS]


def sources_key() -> str:
    """What everything that `variants` lists depends on, but Triton itself."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in _NO_KERNELS:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_variant(variant: Variant, architecture: int) -> Report:
    names = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs=variant.constexprs,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    text = _disassembled(compiled.asm["cubin"])
    resources = _RESOURCES.search(text)
    assert resources is not None, text[:1000]
    opcodes = Counter(_OPCODE.findall(text))
    wanted = {*_COUNTED, *_planned(variant, architecture)}
    counts = {name: sum(n for code, n in opcodes.items() if f"{code}.".startswith(f"{name}.")) for name in wanted}
    return Report(
        registers=int(resources[1]),
        stack=int(resources[2]),
        shared=compiled.metadata.shared,
        buffers=min(map(int, _BUFFERS.findall(compiled.asm["ttgir"])), default=1),
        opcodes={name: n for name, n in sorted(counts.items()) if n},
    )


def failures(variant: Variant, architecture: int, report: Report, most_registers: float) -> list[str]:
    """What is worse than planned."""
    found = [f"no {name}" for name in _planned(variant, architecture) if name not in report.opcodes]
    if variant.buffers is not None and report.buffers < variant.buffers:
        found.append(f"{report.buffers} buffers, planned are {variant.buffers}")
    if report.stack:
        found.append(f"{report.stack} bytes of stack")
    if report.registers > most_registers:
        found.append(f"{report.registers} registers, at most {most_registers:.0f} would not be worse")
    return found


def _planned(variant: Variant, architecture: int) -> tuple[str, ...]:
    return variant.sm_80 if architecture == 80 else variant.sm_90


def _runs_on(variant: Variant, architecture: int) -> bool:
    """Numbers of the type e4m3 came with sm_89."""
    return architecture >= 89 or not any("fp8e4nv" in type_ for type_ in variant.signature.values())


def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class _Job(NamedTuple):
    """What another process is to compile: a kernel cannot be sent to it."""

    modules: tuple[str, ...]
    place: int  # of the variant among those of the modules
    architecture: int


def _run(job: _Job) -> Report | str:
    """The report, or why there is none."""
    try:
        return compile_variant(variants(job.modules)[job.place], job.architecture)
    except Exception as error:  # the compiler raises whatever it likes; the other variants are still of interest
        return f"{type(error).__name__}: {error}"


def _compiled(jobs: Sequence[_Job]) -> Iterator[Report | str]:
    """By as many processes as there are cores; forked, so that each has the kernels already, and nothing has started a
    thread by now."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_run, jobs)


def _sample(jobs: Sequence[_Job], chosen: Sequence[Variant]) -> list[_Job]:
    """The first variant of each module, for the newest architecture."""
    first = {chosen[job.place].kernel.module: job for job in reversed(jobs) if job.architecture == ARCHITECTURES[-1]}
    return list(first.values())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagewire.kernels.triton.compile")
    parser.add_argument("modules", nargs="*", help="only these, for example rms_norm")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the numbers here")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with these numbers")
    parser.add_argument("--sample", action="store_true", help="with --check: compile all only if a source has changed")
    options = parser.parse_args(arguments)
    modules = tuple(options.modules) or MODULES
    chosen = variants(modules)
    jobs = [_Job(modules, i, a) for i, v in enumerate(chosen) for a in ARCHITECTURES if _runs_on(v, a)]
    titles = [f"{chosen[job.place].name} sm_{job.architecture}" for job in jobs]
    assert len(set(titles)) == len(titles), [title for title, n in Counter(titles).items() if n > 1]

    golden: Golden | None = json.loads(options.check.read_text()) if options.check else None
    same_compiler = golden is not None and golden["triton"] == triton.__version__
    unchanged = golden is not None and same_compiler and golden["sources"] == sources_key()
    compiled_jobs = _sample(jobs, chosen) if options.sample and unchanged else jobs
    reports = dict(zip(compiled_jobs, _compiled(compiled_jobs), strict=True))
    written: dict[str, dict[str, Any]] = {}
    num_worse = 0
    for job, title in zip(jobs, titles, strict=True):
        before = Report(**golden["reports"][title]) if golden and title in golden["reports"] else None
        report = reports.get(job, before)
        if isinstance(report, Report):
            most_registers = _MORE_REGISTERS * before.registers if before and same_compiler else math.inf
            worse = failures(chosen[job.place], job.architecture, report, most_registers)
            written[title] = asdict(report)
        else:
            worse = [report or "not compiled"]
        if golden and before is None:
            worse.append("no golden numbers")
        if job in reports or worse:
            print(f"{title:64} {report}")
        for text in worse:
            print(f"  WORSE: {text}")
        num_worse += bool(worse)
    if golden and not options.modules:
        for title in sorted(golden["reports"].keys() - set(titles)):
            print(f"{title}: golden numbers of a variant that there is not any more\n  WORSE: write them anew")
            num_worse += 1
    if options.write:
        lines = ",\n".join(f"  {json.dumps(title)}: {json.dumps(report)}" for title, report in written.items())
        of = f'"triton": {json.dumps(triton.__version__)},\n "sources": {json.dumps(sources_key())}'
        options.write.write_text(f'{{\n {of},\n "reports": {{\n{lines}\n }}\n}}\n')
    print(f"{len(reports)} of {len(jobs)} compiled with triton {triton.__version__}, {num_worse} worse")
    return 1 if num_worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
