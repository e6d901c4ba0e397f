"""Runs the tests of the kernels and of the GPU's step, which use the GPU if there is one."""

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from .figures import Figure
from .setting import ROOT, Setting

_FOLDERS = ("tests/kernels/triton", "tests/engine/gpu")
_FILES = ("tests/kernels/triton/test_silu_mul.py",)
_NO_GPU = "tests/kernels/triton/test_compiled.py"  # compiles for other devices and needs no GPU
_PROCESSES = "8"  # most of the time is compilation


def measure(setting: Setting) -> Iterator[Figure]:
    report = setting.scratch / "tests.xml"
    command = [sys.executable, "-m", "pytest", *setting.choose(_FOLDERS, _FILES), f"--ignore={_NO_GPU}"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
    if not setting.smoke and importlib.util.find_spec("xdist") is not None:
        command += ["-n", _PROCESSES]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not report.exists():
        raise RuntimeError(f"pytest ended with {code} and no report")
    tests, failed = _counts(report)
    yield Figure(name="passed", value=tests - failed, unit="tests", least=1, is_proof=True)
    yield Figure(name="failed", value=failed, unit="tests", most=0, is_proof=True)


def _counts(report: Path) -> tuple[int, int]:
    """(tests that ran, tests that failed or had an error)."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))

    def total(*names: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites for name in names)

    return total("tests") - total("skipped"), total("failures", "errors")
