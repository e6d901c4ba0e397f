"""The memory calculated for a model equals what the runner measures when it loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import gguf_files
import msgspec
import pooling_checkpoints
import pytest
import torch
import vocabulary
from quantized_checkpoints import quantize_checkpoint

from pagewire.config.config import EngineConfig
from pagewire.engine.gpu.weights import Loaded, room_of
from pagewire.engine.runner.forecast import PlannedGpu, forecast
from pagewire.engine.runner.runner import Runner
from pagewire.engine.weights.loader import load_weights
from pagewire.engine.weights.open import open_checkpoint


def check(config: EngineConfig, *, within: float = 0.08) -> None:
    """The kernels' layouts pad weights a little; all other numbers are equal."""
    found = forecast(config)
    plan = found.memory
    runner = Runner.load(config)
    assert msgspec.structs.replace(plan, weights=runner.memory.weights) == runner.memory
    assert plan.weights == pytest.approx(runner.memory.weights, rel=within)
    assert found.num_pages == runner.offer()
    assert found.served.note in runner.notes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "llama-biased", "qwen3", "qwen3_moe", "mixtral", "phi3", "persimmon"])
def test_the_forecast_equals_the_measured_memory(
    kind: str, dtype: str, checkpoint: Callable[..., Path], resolved: Callable[..., EngineConfig]
) -> None:
    check(resolved(checkpoint(kind), dtype=dtype, kv_cache_memory=1 << 20))


Checkpoint = Callable[..., Path]
Resolved = Callable[..., EngineConfig]


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_integers_instead_of_floats(
    kind: str, quantization: str, cpu_kernels: str, checkpoint: Checkpoint, resolved: Resolved
) -> None:
    folder = checkpoint(kind, hidden_size=128, intermediate_size=128)
    options = {"dtype": "float32", "quantization": quantization, "cpu_kernels": cpu_kernels}
    check(resolved(folder, **options, kv_cache_memory=1 << 20))


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["fp8-block", "awq", "packed", "int8", "mxfp4"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_quantized_checkpoints(
    family: str, kind: str, cpu_kernels: str, checkpoint: Checkpoint, resolved: Resolved, tmp_path: Path
) -> None:
    """The C kernels keep them as they are, torch's widen them."""
    sizes_of: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}
    folder, _ = quantize_checkpoint(checkpoint(family, **sizes_of), tmp_path, kind)
    check(resolved(folder, dtype="float32", cpu_kernels=cpu_kernels, kv_cache_memory=1 << 20))


DEALT: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_replicas": 1}


@pytest.mark.parametrize("flags", [{}, {"tensor_parallel_size": 2}, DEALT])
@pytest.mark.parametrize(("family", "kind"), [("mixtral", "fp8-channel"), ("qwen3_moe", "awq")])
def test_experts_of_a_quantized_checkpoint_are_widened_on_a_gpu(
    family: str, kind: str, flags: dict[str, Any], checkpoint: Checkpoint, resolved: Resolved, tmp_path: Path
) -> None:
    """And the slots of replicas have memory. The weights are loaded as on a GPU, to the host."""
    sizes_of: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
    sizes_of |= {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    folder, _ = quantize_checkpoint(checkpoint(family, **sizes_of), tmp_path, kind)
    config = resolved(folder, kv_cache_memory=1 << 20, **flags)
    of_gpu = {"kernels": None, "dtype": "bfloat16", "arithmetic": "bfloat16", "kv_cache_dtype": "bfloat16"}
    found = forecast(msgspec.structs.replace(config, **of_gpu), PlannedGpu(1 << 30, 90))
    served = found.served
    assert served.executor == "Triton" and served.is_kept and served.program is not None and served.found is not None
    sink = Loaded(dtype=served.dtype, device=torch.device("cpu"), keeps=True, room=room_of(served.program))
    with open_checkpoint(folder) as reader:
        load_weights(reader, served.program, served.found, sink, scheme=served.spec.scheme)
    assert found.memory.weights == pytest.approx(sink.num_bytes, rel=0.03)


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_mixture_of_types_of_a_gguf_file(family: str, cpu_kernels: str, tmp_path: Path, resolved: Resolved) -> None:
    """Each matrix counts with its own type. With the C kernels the bytes are those of the file, but for 2 % more: the
    norms are small beside the matrices."""
    sizes: dict[str, Any] = {**gguf_files.QUANTIZED_SIZES, "hidden_size": 512}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 256, "num_experts": 4, "mlp_only_layers": []}
    folder = vocabulary.add_tokenizer(checkpoints.make_checkpoint(tmp_path / "folder", family, **sizes))
    types = {"v_proj.weight": "Q6_K", "1.mlp.down_proj.weight": "Q5_K", "embed_tokens.weight": "Q8_0"}
    file = gguf_files.write_gguf(folder, tmp_path / "m.gguf", "Q4_K", types=types)
    config = resolved(file, dtype="float32", cpu_kernels=cpu_kernels, kv_cache_memory=1 << 20)
    check(config, within=0.03)
    if cpu_kernels == "auto":
        plan = forecast(config).memory
        with open_checkpoint(file) as reader:
            stored = sum(reader.num_bytes(name) for name in reader.names())
        assert plan.weights < 1.05 * stored


def test_the_forecast_of_an_encoder_has_no_kv_cache(tmp_path: Path, resolved: Callable[..., EngineConfig]) -> None:
    config = resolved(pooling_checkpoints.make_encoder(tmp_path / "m"), dtype="float32", max_num_seqs=4)
    check(config)
    assert forecast(config).memory.lines(1)[0].endswith("no KV cache")


def test_the_default_kv_cache_size_is_what_all_requests_could_use(
    checkpoint: Callable[..., Path], resolved: Callable[..., EngineConfig]
) -> None:
    check(resolved(checkpoint("llama"), max_num_seqs=4))


def test_ranks_split_weights_and_blocks(checkpoint: Callable[..., Path], resolved: Callable[..., EngineConfig]) -> None:
    one = forecast(resolved(checkpoint("llama"), kv_cache_memory=1 << 20)).memory
    two = forecast(resolved(checkpoint("llama"), tensor_parallel_size=2, kv_cache_memory=1 << 20)).memory
    assert two.page_bytes == one.page_bytes // 2 and 0.4 < two.weights / one.weights < 0.6
