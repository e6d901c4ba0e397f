"""Every variant compiles, for both architectures, to what was planned: see `kernels/triton/compile.py`.

All of them are a minute of work, and nothing but a changed source or another Triton changes what comes out. So only a
sample is compiled, and the golden numbers are looked through, until one of these is not what the numbers were taken of.
`python -m pagewire.kernels.triton.compile --write tests/kernels/triton/golden.json` takes them anew.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.kernels.triton.compile import Report, failures
from pagewire.kernels.triton.decode_attention import VARIANTS

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = Path(__file__).with_name("golden.json")


@pytest.mark.slow
def test_no_variant_is_worse_than_its_golden_numbers():
    """In a process of its own, because this one interprets its kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / ".typing")
    command = [sys.executable, "-m", "pagewire.kernels.triton.compile", "--check", str(GOLDEN), "--sample"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_is_worse_is_said():
    variant = next(variant for variant in VARIANTS if variant.buffers is not None)
    good = Report(registers=100, stack=0, shared=0, buffers=variant.buffers, opcodes=dict.fromkeys(variant.sm_90, 1))
    assert failures(variant, 90, good, most_registers=110) == []
    assert failures(variant, 90, replace(good, registers=111), most_registers=110)
    assert failures(variant, 90, replace(good, stack=8), most_registers=110) == ["8 bytes of stack"]
    assert failures(variant, 90, replace(good, buffers=variant.buffers - 1), most_registers=110)
    assert failures(variant, 90, replace(good, opcodes={}), most_registers=110) == [f"no {n}" for n in variant.sm_90]
