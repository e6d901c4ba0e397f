"""Faults in each kernel: a wrong result, an error, and a device that breaks. The trial finds them, torch serves
instead, and the tokens stay those of transformers."""

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import msgspec
import pytest
import quantized_checkpoints
import torch
from defaults import COMPILED, machine
from family_kinds import FEW_EXPERTS, LATENT_ON_GPU, make_kind
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from runner_driver import Driver, Request, engine_config

from pagewire.api.gateway.gateway import Gateway
from pagewire.api.gateway.metrics import Metrics
from pagewire.engine.device.queue import EagerQueue
from pagewire.engine.runner import kernel_checks
from pagewire.engine.runner.runner import Runner
from pagewire.engine.steps.trial_journal import TrialJournal
from pagewire.errors import BrokenDeviceError, ConfigError, StartError
from pagewire.ipc.messages import Message, Ping, Snapshot
from pagewire.kernels.triton import compile
from pagewire.kernels.triton.decode_attention import decode_attention
from pagewire.kernels.triton.latent_attention import attend_latent
from pagewire.kernels.triton.moe import experts as multiply
from pagewire.kernels.triton.quantized_product import quantized_product
from pagewire.kernels.triton.rms_norm import rms_norm
from pagewire.procs.core import CoreActor
from pagewire.procs.worker import Worker

NUM_BLOCKS = 96
SMALL: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4}  # since the interpreter is slow

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the faults are planted into the interpreter")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Without the journals of other processes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(
    folder: Path, *, changes: dict[str, Any] | None = None, queue: EagerQueue | None = None, **flags: Any
) -> Runner:
    """changes: of the resolved configuration, which `resolve` would refuse for a CPU."""
    with machine(COMPILED):
        config = engine_config(folder, cpu_kernels="torch", **{**SMALL, **flags})
    config = msgspec.structs.replace(config, **(changes or {}))
    return Runner.load(config, queue=queue or EagerQueue(torch.device("cpu")), is_checked=True)


def prompts() -> list[list[int]]:
    rng = random.Random("trial")
    return [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(num)] for num in (1, 19)]


def outputs(runner: Runner) -> list[list[int]]:
    runner.open_cache(NUM_BLOCKS)
    requests = [Request(prompt, max_new=4) for prompt in prompts()]
    Driver(runner, NUM_BLOCKS).run(requests, chunk=20, budget=32, rows=3)
    return [request.output for request in requests]


def wrong(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The function with a result, its argument at `place`, that is off."""

    def planted(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        args[place].mul_(1.25).add_(0.25)
        return found

    return planted


GPU = "pagewire.engine.gpu."
# Kernel, where it is called from, the place of its result among the arguments, and whether the others still serve.
FAULTS = [
    ("rms_norm", f"{GPU}walk.rms_norm", 3, True),
    ("small_product", f"{GPU}products.small_product", 2, True),
    ("silu_mul", f"{GPU}products.silu_mul", 1, True),
    ("decode_attention", f"{GPU}walk.decode_attention", 0, False),
    ("extend_attention", f"{GPU}walk.extend_attention", 0, False),
    ("sampling", f"{GPU}state.sample", 0, False),
    ("logprobs", f"{GPU}state.logprobs", 1, False),
    ("prepare_step", f"{GPU}decoder.prepare_step", 4, False),
]


@pytest.mark.parametrize(
    ("kernel", "target", "place", "is_optional"),
    [pytest.param(*each, id=each[0], marks=() if each[0] == "rms_norm" else pytest.mark.long) for each in FAULTS],
)
def test_a_kernel_with_wrong_results_is_replaced(kernel, target, place, is_optional, checkpoint, monkeypatch, caplog):
    folder = checkpoint("qwen3", num_hidden_layers=1)
    module, name = target.rsplit(".", 1)
    function = getattr(__import__(module, fromlist=[name]), name)
    planted = wrong_ids(function, place) if kernel in ("sampling", "prepare_step") else wrong(function, place)
    monkeypatch.setattr(target, planted)
    with caplog.at_level(logging.WARNING):
        runner = load(folder)
    # A step of prompts beside rows of one token attends with both kernels, and other ids sample other tokens.
    assert kernel in runner.failed_kernels and set(runner.failed_kernels) <= {kernel, "extend_attention", "sampling"}
    (line,) = [each for each in caplog.messages if f"The GPU kernel {kernel} failed its check" in each]
    assert "pagewire doctor --gpu" in line
    assert ("that operation" in line) == is_optional
    assert runner.notes[0].startswith("Triton kernels" if is_optional else "kernels of torch"), runner.notes
    assert outputs(runner) == checkpoints.reference_greedy(folder, prompts(), 4)


def wrong_ids(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    def planted(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        args[place].add_(1)
        return found

    return planted


def test_kernels_that_agree_are_not_replaced(checkpoint, caplog):
    runner = load(checkpoint("qwen3", num_hidden_layers=2), strict_kernels=True)
    assert runner.failed_kernels == () and runner.notes[0].startswith("Triton kernels")
    assert "failed its check" not in caplog.text
    assert not list(Path(runner._config.model.path).glob("trial-*"))


class Uncompilable:
    """A Triton kernel that does not compile, or fails at its launch."""

    def __getitem__(self, grid):
        raise RuntimeError("PTXAS error: out of resource\nmore")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "function"), [("norm_rotary_write", "_norm_rotary_write"), ("open_rows", "_open_rows")]
)
def test_a_kernel_that_does_not_compile_is_replaced(kernel, function, checkpoint, monkeypatch, caplog):
    """The error names the module that raised it, whatever called it."""
    monkeypatch.setattr(f"pagewire.kernels.triton.{kernel}.{function}", Uncompilable())
    with caplog.at_level(logging.WARNING):
        runner = load(checkpoint("qwen3", num_hidden_layers=1))
    assert kernel in runner.failed_kernels
    assert f"The GPU kernel {kernel} failed its check: RuntimeError: PTXAS error: out of resource." in caplog.text
    assert outputs(runner) == checkpoints.reference_greedy(Path(runner._config.model.path), prompts(), 4)


def test_strict_kernels_end_the_start(checkpoint, monkeypatch):
    from pagewire.engine.gpu import walk

    monkeypatch.setattr(walk, "rms_norm", wrong(rms_norm, 3))
    with pytest.raises(StartError, match=r"The GPU kernel rms_norm failed its check: it differs .* --strict-kernels"):
        load(checkpoint("qwen3", num_hidden_layers=1), strict_kernels=True)


@pytest.mark.long
def test_what_torch_cannot_do_is_refused(checkpoint, monkeypatch):
    """An fp8 cache needs the kernels."""
    from pagewire.engine.gpu import walk

    folder = checkpoint("qwen3", num_hidden_layers=1)
    assert load(folder, changes={"kv_cache_dtype": "fp8"}).failed_kernels == ()
    monkeypatch.setattr(walk, "decode_attention", wrong(decode_attention, 0))
    with pytest.raises(ConfigError, match=r"fp8 needs the Triton kernels.*_attention failed its check"):
        load(folder, changes={"kv_cache_dtype": "fp8"})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fp8-block", "awq"])
def test_without_their_kernels_quantized_matrices_are_widened(kind, tmp_path, monkeypatch):
    from pagewire.engine.gpu import products

    source = checkpoints.make_checkpoint(tmp_path / "float", "qwen3", num_hidden_layers=1)
    quantized, widened = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    half = {"dtype": "float16", "kv_cache_dtype": "float16", "arithmetic": "float16"}
    kept = load(quantized, changes=half)
    assert kept.failed_kernels == ()
    monkeypatch.setattr(products, "quantized_product", wrong(quantized_product, 2))
    runner = load(quantized, changes=half)
    assert runner.failed_kernels == ("quantized_product",)
    assert runner.memory.weights > kept.memory.weights
    found, reference = outputs(runner), checkpoints.load_reference(widened)
    for prompt, output in zip(prompts(), found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (logits.amax(dim=1) - chosen).max() < 0.05 * logits.std()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "target", "result", "failed"),
    [
        ("awq", "widen", 1, ("widen",)),
        ("int8", "scale_sums", 3, ("round_rows",)),
        ("awq", "silu_mul", 1, ("widen", "silu_mul")),  # gates are tried in the same call; then those of wide weights
    ],
)
def test_products_of_many_rows_are_tried(kind, target, result, failed, tmp_path, monkeypatch):
    """Weights of 8 and 4 bits take other kernels above 256 rows, which no step of the trial has."""
    from pagewire.engine.gpu import products

    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    source = checkpoints.make_checkpoint(tmp_path / "float", "llama", **sizes)
    quantized, _ = quantized_checkpoints.quantize_checkpoint(source, tmp_path, kind)
    flags = {
        "changes": {"dtype": "float16", "kv_cache_dtype": "float16", "arithmetic": "float16"},
        "max_num_batched_tokens": products.MAX_NARROW_ROWS + 64,
    }
    monkeypatch.setattr(products, target, wrong(getattr(products, target), result))
    runner = load(quantized, **flags)
    assert runner.failed_kernels == failed and runner.notes[0].startswith("Triton kernels")
    narrow = [product for product in runner._model.decoder._walk._products.values() if hasattr(product, "_narrow")]
    assert bool(narrow) == ("widen" not in failed) and not any(product._narrow for product in narrow)


@pytest.mark.long
def test_the_kernels_of_experts(checkpoint, monkeypatch):
    from pagewire.engine.gpu import experts

    folder = checkpoint("qwen3_moe-sparse", num_hidden_layers=2)
    assert load(folder).failed_kernels == ()
    monkeypatch.setattr(experts, "experts", wrong(multiply, 0))
    runner = load(folder)
    assert runner.failed_kernels == ("moe",)
    assert outputs(runner) == checkpoints.reference_greedy(folder, prompts(), 4)


class BrokenQueue(EagerQueue):
    """A device that no wait returns from any more, once it is broken."""

    is_broken = False

    def mark(self):
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().mark()


def test_a_kernel_that_breaks_the_device_is_left_out_by_the_next_start(checkpoint, monkeypatch, tmp_path):
    from pagewire.engine.gpu import walk

    folder, queue = checkpoint("qwen3", num_hidden_layers=1), BrokenQueue(torch.device("cpu"))

    def breaking(*args, **options):
        queue.is_broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    journals: list[TrialJournal] = []

    class Kept(TrialJournal):
        def __init__(self, *args):
            super().__init__(*args)
            journals.append(self)

    monkeypatch.setattr(kernel_checks, "TrialJournal", Kept)
    monkeypatch.setattr(walk, "rms_norm", breaking)
    with pytest.raises(
        BrokenDeviceError, match=r"GPU kernel rms_norm broke the device .* The next process leaves that"
    ):
        load(folder, queue=queue)
    (file,) = (tmp_path / "cache" / "pagewire").glob("trial-*")
    os.close(journals[0]._fd)  # as the system does when the process ends
    monkeypatch.setattr(walk, "rms_norm", rms_norm)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)  # that of the next process
        runner = load(folder)
    assert runner.failed_kernels == ("rms_norm",)
    assert outputs(runner) == checkpoints.reference_greedy(folder, prompts(), 4)
    file.unlink()
    assert load(folder).failed_kernels == ()


def test_the_metrics_page_names_a_kernel_that_failed_in_a_worker(checkpoint, monkeypatch):
    """The second worker after one whose device a kernel broke; its cache folder keeps nothing."""
    from pagewire.engine.gpu import walk

    monkeypatch.setattr(walk, "rms_norm", None)  # it is not tried
    monkeypatch.setattr(kernel_checks, "cache_folder", lambda: None)
    queue, read = EagerQueue(torch.device("cpu")), Runner.load
    monkeypatch.setattr(Runner, "load", lambda config, **given: read(config, queue=queue, is_checked=True, **given))
    with machine(COMPILED):
        config = engine_config(checkpoint("qwen3", num_hidden_layers=1), cpu_kernels="torch", **SMALL)
    worker, core, gateway = (
        Worker(config, broken_kernels=("rms_norm",)),
        CoreActor(config),
        Gateway(lambda message: None),
    )

    def post(receiver: str, message: Message) -> None:
        if receiver == "core":
            core.handle([message])  # type: ignore[list-item]  # the topology says which messages a process gets
        elif isinstance(message, Snapshot):
            gateway.handle([message])

    core.start(post)
    worker.start(post)
    core.handle([Ping()])
    (family,) = [each for each in families_of(Metrics(gateway, config)) if each.name == "pagewire:kernel_fallbacks"]
    assert [(sample.labels["kernel"], sample.value) for sample in family.samples] == [("rms_norm", 1.0)]


def families_of(metrics: Metrics) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.render().decode()))


def test_the_ranks_agree_on_what_failed():
    class Two:
        rank, size = 0, 2

        def all_reduce(self, x):
            x.add_(theirs)

    assert tuple(sorted(compile.MODULES)) == kernel_checks.GPU_KERNELS  # a name that is not there stops all ranks
    theirs = torch.zeros(len(kernel_checks.GPU_KERNELS) + 1)
    theirs[kernel_checks.GPU_KERNELS.index("moe")] = 1
    found = kernel_checks._of_all_ranks({"rms_norm": "it differs"}, Two(), torch.device("cpu"))
    assert list(found) == ["rms_norm", "moe"] and found["moe"] == "it failed on another rank"
    theirs.zero_()
    theirs[-1] = 1
    assert len(kernel_checks._of_all_ranks({}, Two(), torch.device("cpu"))) == 1


LATENT = LATENT_ON_GPU | FEW_EXPERTS | {"num_hidden_layers": 1}


def test_a_wrong_kernel_of_latent_attention_is_replaced(tmp_path, monkeypatch):
    folder = make_kind(tmp_path / "model", "DeepseekV3Config", LATENT)
    monkeypatch.setattr(f"{GPU}walk.attend_latent", wrong(attend_latent, 0))
    runner = load(folder)
    assert runner.failed_kernels == ("latent_attention",) and runner.notes[0].startswith("kernels of torch")
    assert outputs(runner) == checkpoints.reference_greedy(folder, prompts(), 4)


RECURRENT = {
    "conv": ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "scan_delta": (
        "qwen3_5",
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
        },
    ),
    "scan_mamba1": ("jamba", {"num_hidden_layers": 2, "mamba_d_state": 5, "num_experts": 2, "hidden_size": 64}),
    "scan_mamba2": ("mamba2", {"num_hidden_layers": 1}),
    "scan_lightning": ("minimax", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
}


@pytest.mark.parametrize(
    "scan", [pytest.param(each, marks=() if each == "scan_mamba2" else pytest.mark.long) for each in RECURRENT]
)
def test_a_wrong_kernel_of_recurrent_layers_is_replaced(scan, checkpoint, monkeypatch):
    from pagewire.engine.gpu import mixers

    kind, changes = RECURRENT[scan]
    folder, original = checkpoint(kind, **changes), getattr(mixers.DeviceScans, scan)
    monkeypatch.setattr(mixers.DeviceScans, scan, staticmethod(lambda *args: original(*args) * 1.5))
    runner = load(folder)
    assert runner.failed_kernels == ("scans",) and runner.notes[0].startswith("kernels of torch")
    assert outputs(runner) == checkpoints.reference_greedy(folder, prompts(), 4)


@pytest.mark.long
def test_a_hybrid_without_the_gated_norm(checkpoint, monkeypatch):
    from pagewire.engine.gpu import mixers

    folder = checkpoint(
        "qwen3_5",
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=1,
    )
    assert load(folder).failed_kernels == ()
    original = mixers.DeviceScans.gated_norm
    monkeypatch.setattr(mixers.DeviceScans, "gated_norm", staticmethod(lambda *args: original(*args) * 1.5))
    runner = load(folder)
    assert runner.failed_kernels == ("gated_norm",) and runner.notes[0].startswith("Triton kernels")
    assert outputs(runner) == checkpoints.reference_greedy(folder, prompts(), 4)


@pytest.mark.long
def test_the_doctor_tries_the_kernels_without_a_worker(checkpoint, monkeypatch):
    from pagewire.engine.gpu import walk

    config = engine_config(checkpoint("qwen3", num_hidden_layers=1), **SMALL, strict_kernels=True)
    queue = EagerQueue(torch.device("cpu"))
    checks = {check.kernel: check for check in kernel_checks.try_all(config, queue=queue).checks}
    assert checks.keys() >= {
        "prepare_step", "small_product", "decode_attention", "extend_attention", "rms_norm", "silu_mul", "sampling",
        "logprobs",
    }  # fmt: skip
    assert not any(check.problem for check in checks.values())
    assert all(check.ms > 0 for check in checks.values() if check.kernel not in ("prepare_step", "logprobs"))
    monkeypatch.setattr(walk, "rms_norm", wrong(rms_norm, 3))
    checks = {check.kernel: check for check in kernel_checks.try_all(config, queue=queue).checks}
    assert [name for name, check in checks.items() if check.problem] == ["rms_norm"]
