"""Runs the kernels once on small shapes under NVIDIA's compute-sanitizer, where it is installed: accesses out of
bounds (memcheck), shared memory that is read while it is written (racecheck), barriers that not all threads reach
(synccheck).

    python -m pagewire.bench.gpu.sanitize         runs the kernels alone, for example under another tool
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ...engine.device.queue import CudaQueue, EagerQueue, Queue
from ...kernels.triton.fp8_product import fp8_product
from ...kernels.triton.int4_product import int4_product
from ...kernels.triton.moe import moe, workspace_moe
from ...kernels.triton.norm_rotary_write import norm_rotary_write, rotary_table
from ...kernels.triton.product import product
from ...kernels.triton.rms_norm import rms_norm
from ...kernels.triton.sampling import SamplingColumns, sample, workspace_sampling
from ...kernels.triton.silu_mul import silu_mul
from ...kernels.triton.small_product import small_product, workspace_small_product
from .attention import Cached
from .figures import Figure, SkippedError
from .setting import ROOT, Setting

TOOLS = ("memcheck", "racecheck", "synccheck")
_TOOL_S = 40.0  # a tool that takes longer is ended, which is no failure
_FOUND = 86  # exit code for errors of the kernels
_SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")


def kernels(queue: Queue) -> dict[str, Callable[[], None]]:
    """Each as a function that launches it on small shapes, with rows at the edges of tiles and blocks."""
    device = queue.device

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    case = Cached.of(queue, [1, 16, 17, 47], heads=4, kv_heads=2, head_dim=16, block_size=16)
    query = case.queries(4)
    found: dict[str, Callable[[], None]] = {
        "decode attention, with merges": lambda: case.decode(torch.empty_like(query), query, case.workspace(chunk=16)),
        "prompts' attention": lambda: case.extend(torch.empty_like(prompt), prompt, case.tiles()),
    }
    prompt = case.queries(int(case.lens.sum()))
    x, weight, split = numbers(3, 1024), numbers(32, 1024), workspace_small_product([(32, 1024)], device)
    found["small product, split"] = lambda: small_product(x, weight, numbers(3, 32), split)
    gates = numbers(64, 256)
    found["small product, norm and gates"] = lambda: small_product(
        x[:, :256], gates, numbers(3, 32), workspace_small_product([(64, 256)], device),
        norm=(numbers(256), 1e-6), is_gated=True,
    )  # fmt: skip
    found["product"] = lambda: product(x, weight, numbers(3, 32))
    codes, scale = torch.ones(32, 1024, device=device).to(torch.float8_e4m3fn), torch.ones(1, 8, device=device)
    found["fp8 product"] = lambda: fp8_product(x, codes, scale, numbers(3, 32), block=(32, 128))
    packed = torch.zeros(32, 512, dtype=torch.uint8, device=device)
    scales = torch.ones(8, 32, device=device).half()
    zeros = torch.zeros(8, 32, dtype=torch.uint8, device=device)
    found["int4 product"] = lambda: int4_product(x, packed, scales, zeros, numbers(3, 32), half=64)
    found["norm"] = lambda: rms_norm(x, numbers(1024), 1e-6, numbers(3, 1024), numbers(3, 1024))
    found["gates"] = lambda: silu_mul(numbers(3, 128), numbers(3, 64), interleaved=True)
    rotary = rotary_table(torch.ones(8, device=device), 1.0, 64)
    pair = numbers(16), numbers(16)
    found["norms, rotation and write"] = lambda: norm_rotary_write(
        numbers(3, 8 * 16), pair, 1e-6, rotary, integers(0, 5, 63), integers(0, 17, -1), numbers(3, 4, 16),
        case.k_pages, case.v_pages,
    )  # fmt: skip
    scratch = workspace_moe(
        max_tokens=5, num_experts=4, top_k=2, hidden=64, inter=32, dtype=torch.bfloat16, device=device
    )
    tokens, gate_up, down = numbers(5, 64), numbers(4, 64, 64), numbers(4, 64, 32)
    found["experts"] = lambda: moe(
        numbers(5, 64), tokens, numbers(5, 4), gate_up, down, integers(4), scratch, top_k=2, renormalize=True
    )
    logits, picked = torch.randn(2, 1000, device=device), integers(0, 1)
    columns = SamplingColumns(
        temperature=torch.ones(2, device=device), top_k=integers(5, 0), top_p=torch.full((2,), 0.9, device=device),
        min_p=torch.zeros(2, device=device), seed=torch.zeros(2, dtype=torch.int64, device=device),
    )  # fmt: skip
    room = workspace_sampling(max_picked=2, vocab_size=1000, device=device)
    found["sampling"] = lambda: sample(
        integers(0, 0), logits, logits, integers(-1, -1), picked, picked, columns, room, kind="filtered"
    )
    return found


def measure(setting: Setting) -> Iterator[Figure]:
    """Without a GPU the kernels run without a tool."""
    if setting.smoke:
        ran = run(EagerQueue(torch.device("cpu")))
        yield Figure(name="kernels that ran on small shapes", value=ran, unit="", least=ran, is_proof=True)
        return
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise SkippedError("compute-sanitizer, a program of the CUDA toolkit, is not in PATH.")
    for name in TOOLS:
        errors = check(tool, name, setting.scratch / f"{name}.log")
        if errors is None:
            yield Figure(name=f"{name}: seconds without a result", value=_TOOL_S, unit="s")
        else:
            yield Figure(name=f"{name}: errors", value=errors, unit="", most=0, is_proof=True)


def check(tool: str, name: str, log: Path, *, limit_s: float = _TOOL_S) -> int | None:
    """The errors that a tool finds in the kernels; None: it took too long. Raises RuntimeError if it did not run."""
    command = [tool, "--tool", name, "--error-exitcode", str(_FOUND), "--target-processes", "all"]
    command += [sys.executable, "-m", "pagewire.bench.gpu.sanitize"]
    # Otherwise torch's own cache of memory hides what lies out of bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
    text = log.read_text(errors="replace")
    found = sum(map(int, _SUMMARY.findall(text)))
    if done.returncode == _FOUND:
        return max(1, found)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {' '.join(text.split())[-300:]}")
    return found


def run(queue: Queue) -> int:
    """The number of kernels that ran."""
    launches = kernels(queue)
    for launch in launches.values():
        launch()
        queue.mark().wait()
    return len(launches)


if __name__ == "__main__":
    print(run(CudaQueue(torch.device("cuda", 0))), "kernels ran")
