"""Plans for ranks that are processes with a device each. NCCL has no two ranks on one device, so a smoke run takes gloo
and Triton's interpreter."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.runner.runner import Runner
from ...ipc.messages import StepPlan
from .setting import ROOT, Setting

DEPTH = 2  # plans of one rank that are in flight, and one more with two stages
_TIMEOUT_S = 300.0


def run_ranks(module: str, folder: Path, setting: Setting, *flags: str, num: int = 2) -> None:
    """Runs a module once for each rank, with a checkpoint, the folder for what the ranks write, the rank and the flags
    as its arguments. Raises RuntimeError if one fails."""
    command = [sys.executable, "-m", module, str(folder), str(setting.scratch), *flags, *["--smoke"] * setting.smoke]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(num)]
    try:
        codes = [rank.wait(_TIMEOUT_S) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


def interpret_kernels() -> None:
    """Of a smoke run, in the process of a rank."""
    from ...tools.triton_interpreter import interpret

    interpret()
    np.seterr(all="ignore")  # warnings about masked lanes


def from_tests(module: str) -> Any:
    if (folder := str(ROOT / "tests")) not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module)


def serve(runner: Runner, plans: list[StepPlan], before: Callable[[int], None] = lambda _: None) -> list[bytes]:
    """What each step sampled. before: called with each step before its plan."""
    runner.open_cache(4 * (max(len(opened.block_ids) // 4 for plan in plans for opened in plan.open)))
    found = []
    for plan in plans:
        if runner.num_pending > DEPTH:
            found.append(runner.collect().ids)
        before(plan.step)
        runner.launch(plan)
    while runner.num_pending:
        found.append(runner.collect().ids)
    return found
