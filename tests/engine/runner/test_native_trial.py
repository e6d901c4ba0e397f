"""C kernels with wrong results: the trial finds them, a lower level or torch serves, and the tokens stay those of
transformers."""

import ctypes
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import families
import numpy as np
import pytest
import quantized_checkpoints
from runner_driver import Driver, Request, engine_config

from pagewire.engine.runner import kernel_checks, native_trial
from pagewire.engine.runner.runner import Runner
from pagewire.errors import StartError
from pagewire.kernels.cpu import levels
from pagewire.kernels.cpu.library import Kernels
from pagewire.kernels.cpu.structs import Operation, StepFields

pytestmark = pytest.mark.usefixtures("c_kernels")
PRODUCT, ATTEND, MAP, NORM, TURN, ROTATE, EXPERTS, MIX = 1, 3, 5, 6, 8, 2, 4, 13  # `OpKind` of program.c


@pytest.fixture(autouse=True)
def _nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_trial, "_tried", {})


def spoil(monkeypatch: pytest.MonkeyPatch, kind: int, level: str = "") -> None:
    """Makes the operations of a kind wrong, of all levels or of one: what they wrote is a quarter too large."""
    first = Kernels.__init__

    def init(self: Kernels, library: ctypes.CDLL) -> None:
        first(self, library)
        program = self.program

        def spoiled(operations: int, count: int, step: int) -> None:
            for at in range(operations, operations + count * ctypes.sizeof(Operation), ctypes.sizeof(Operation)):
                program(at, 1, step)
                operation, fields = Operation.from_address(at), StepFields.from_address(step)
                if operation.kind == kind:
                    out, tokens = operation.out, fields.tokens
                    place = (ctypes.c_float * (out.stride * tokens)).from_address(fields.work + 4 * out.offset * tokens)
                    np.frombuffer(place, np.float32).reshape(tokens, out.stride)[:, out.first :] *= 1.25

        if not level or self.name.rpartition("-")[0] == level:  # `amx-emulated` begins like `amx`
            self.program = spoiled

    monkeypatch.setattr(Kernels, "__init__", init)


def prompts() -> list[list[int]]:
    rng = random.Random("trial")
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in (1, 19)]


def outputs(runner: Runner) -> list[list[int]]:
    runner.open_cache(64)
    requests = [Request(prompt, max_new=4) for prompt in prompts()]
    Driver(runner, 64).run(requests, chunk=20, budget=32, rows=3)
    return [request.output for request in requests]


@pytest.mark.parametrize(
    ("kind", "kernel", "changes"),
    [
        (PRODUCT, "product", {}),
        (ATTEND, "attention", {}),
        (NORM, "rows", {}),
        (ROTATE, "rows", {}),
        (MAP, "elements", {"hidden_act": "gelu"}),
    ],
)
def test_a_wrong_kernel_is_replaced_by_torch(
    kind: int, kernel: str, changes: dict[str, Any], checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = checkpoint("llama", num_hidden_layers=1, **changes)
    best = levels.levels_here()[0]
    monkeypatch.setattr(kernel_checks, "levels_here", lambda: (best,))
    spoil(monkeypatch, kind)
    with caplog.at_level(logging.WARNING):
        runner = Runner.load(engine_config(folder))
    assert kernel in runner.failed_kernels
    assert f"The C kernel {kernel} of the level {best.name} failed its check: it differs from torch by" in caplog.text
    assert runner.notes[0].startswith("kernels of torch")
    assert outputs(runner) == checkpoints.reference_greedy(folder, prompts(), 4)


def test_a_lower_level_comes_before_torch(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, best = checkpoint("llama", num_hidden_layers=1), levels.levels_here()[0]
    monkeypatch.setattr(kernel_checks, "levels_here", lambda: (best, levels.emulated()))
    spoil(monkeypatch, PRODUCT, best.name)
    with caplog.at_level(logging.WARNING):
        runner = Runner.load(engine_config(folder))
    assert runner.failed_kernels == ("product",) and "the level amx-emulated is used instead" in caplog.text
    assert runner.notes[0].startswith("C kernels for amx-emulated")
    assert outputs(runner) == checkpoints.reference_greedy(folder, prompts(), 4)


def test_strict_kernels_end_the_start(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, ATTEND)
    with pytest.raises(StartError, match=r"The C kernel attention of the level .* Without --strict-kernels"):
        Runner.load(engine_config(checkpoint("llama", num_hidden_layers=1), strict_kernels=True))


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4"}),
        ("llama", {"kv_cache_dtype": "bfloat16"}),
        ("qwen3_moe", {}),
        ("qwen3_5", {}),
    ],
)
def test_sound_kernels_pass(kind: str, flags: dict[str, Any], checkpoint: Callable[..., Path]) -> None:
    runner = Runner.load(engine_config(checkpoint(kind), strict_kernels=True, **flags))
    assert runner.failed_kernels == () and runner.notes[0].startswith("C kernels")
    (checks,) = native_trial._tried.values()
    assert len(checks) >= 4 and all(check.error < 0.25 for check in checks)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_kernels_of_other_families_pass(kind: str, tmp_path: Path) -> None:
    runner = Runner.load(engine_config(families.make_family(tmp_path, kind), strict_kernels=True))
    assert runner.failed_kernels == () and runner.notes[0].startswith("C kernels")


@pytest.mark.parametrize("kind", ["fp8-block", "awq"])
def test_kernels_of_quantized_checkpoints_pass(kind: str, tmp_path: Path) -> None:
    source = checkpoints.make_checkpoint(tmp_path / "float", "qwen3", num_hidden_layers=1)
    quantized, _ = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    runner = Runner.load(engine_config(quantized, strict_kernels=True))
    assert runner.failed_kernels == () and runner.notes[0].startswith("C kernels")
