"""Every variant compiles for both architectures as planned: see `kernels/triton/compile.py`.

Compiling all variants takes a minute, and the result changes only with the source or the version of Triton. So only a
sample is compiled, and the golden numbers are checked, as long as source and Triton are those of the golden numbers.
`python -m pagewire.kernels.triton.compile --write tests/kernels/triton/golden.json` writes new numbers.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.kernels.triton.compile import Report, failures, variants
from pagewire.kernels.triton.limits import MAX_SHARED
from pagewire.kernels.triton.variant import GRID, Plan

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = Path(__file__).with_name("golden.json")


@pytest.mark.long
@pytest.mark.slow
def test_no_variant_is_worse_than_its_golden_numbers():
    """In a process of its own, because this one runs Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / ".typing")
    command = [sys.executable, "-m", "pagewire.kernels.triton.compile", "--check", str(GOLDEN), "--sample"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


WIDE = [
    f"{kernel}_attention {name} 16/2 D256"
    for kernel, names in {"decode": ["bf16", "fp16", "fp32"], "extend": ["bf16", "bf16 draft", "fp16", "fp32"]}.items()
    for name in names
] + [f"latent {name} H16" for name in ("decode bf16", "decode fp32", "extend bf16", "extend bf16 draft", "extend fp32")]


@pytest.mark.parametrize("architecture", GRID)
def test_wide_heads_and_latents_fit_into_shared_memory(architecture):
    """The golden numbers, which the test above compares with the compiler."""
    assert set(WIDE) <= {variant.name for variant in variants() if variant.architectures == GRID}
    reports = json.loads(GOLDEN.read_text())["reports"]
    used = {name: max(report["shared"] for report in reports[f"{name} sm_{architecture}"].values()) for name in WIDE}
    assert 0 < max(used.values()) <= 1024 * MAX_SHARED[architecture], used


def test_kernels_worse_than_the_golden_numbers_are_reported():
    plan = Plan(sm_80=("HMMA",), sm_90=("HGMMA", "LDGSTS"), buffers=2)
    good = Report(registers=100, stack=0, shared=232448, buffers=2, opcodes={"HGMMA": 4, "LDGSTS": 8})

    def found(architecture=90, same_compiler=True, **changes):
        return failures(plan, architecture, replace(good, **changes), good, same_compiler=same_compiler)

    assert found() == found(registers=110) == []
    assert found(architecture=80) == ["no HMMA", "232448 bytes of shared memory, more than sm_80 has"]
    assert found(stack=8) == ["8 bytes of stack"]
    assert found(registers=111) == ["111 registers, 100 before"]
    assert found(buffers=1, opcodes={}) == ["no HGMMA", "no LDGSTS", "1 buffers, 2 planned"]
    assert found(shared=232449) == ["232449 bytes of shared memory, more than sm_90 has"]
    assert found(registers=111, stack=8, same_compiler=False) == []
