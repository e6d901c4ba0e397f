"""Plans for ranks that are processes with a device each. NCCL has no two ranks on one device, so a smoke run takes gloo
and Triton's interpreter."""

import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.runner.runner import Runner
from ...ipc.messages import StepPlan
from .setting import ROOT, Setting

DEPTH = 2  # plans of one rank that are in flight, and one more with two stages
_LIMIT_S = 80.0  # less than a part has, which would be ended without a reason
_SMOKE_LIMIT_S = 300.0
_POLL_S = 0.05


def run_ranks(module: str, folder: Path, setting: Setting, *flags: str, num: int = 2) -> None:
    """Runs a module once for each rank, with a checkpoint, the folder for what the ranks write, the rank and the flags
    as its arguments. Raises RuntimeError if one fails."""
    command = [sys.executable, "-m", module, str(folder), str(setting.scratch), *flags, *["--smoke"] * setting.smoke]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(num)]
    wait_for(ranks, setting.choose(_LIMIT_S, _SMOKE_LIMIT_S))


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Returns when all have ended. Raises RuntimeError as soon as one has failed, because the others may wait for it
    for ever, and after limit_s; it ends those that are left."""
    end = time.monotonic() + limit_s
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes) and time.monotonic() < end:
            time.sleep(_POLL_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(code != 0 for code in codes):
        waited = f" after {limit_s:.0f} s" if time.monotonic() >= end else ""
        raise RuntimeError(f"the ranks ended with {codes}{waited}; None: it still ran")


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
