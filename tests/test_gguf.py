"""GGUF files through the whole engine but HTTP: their greedy tokens equal transformers' over the same weights.

The files are written by the `gguf` package from tiny checkpoints. F32 and BF16 files hold the checkpoint's own weights;
of the quantized types transformers gets what the package dequantizes.
"""

from pathlib import Path
from typing import Any

import checkpoints
import gguf_files
import pytest
import torch
import vocabulary
from quantized_checkpoints import multiply_as_stored

from pagewire import LLM, SamplingParams
from pagewire.engine.weights.gguf import GgufReader
from pagewire.engine.weights.open import open_checkpoint
from pagewire.kernels.grouped_weight import GroupedWeight
from pagewire.kernels.superblock_weight import SuperblockWeight

pytestmark = pytest.mark.slow

MAX_TOKENS = 24
NUM_ROUNDED = 5  # tokens until a sum that lies between two roundings, which another order of sums may change
PROMPTS = [[5], [7, 8, 9, 10], [(11 * i) % 300 + 3 for i in range(70)]]
KINDS = ["llama", "llama-biased", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]


def make(folder: Path, kind: str, **changes: Any) -> Path:
    if kind == "qwen3_moe":
        changes["mlp_only_layers"] = []  # llama.cpp's files have experts in all layers
    return vocabulary.add_tokenizer(checkpoints.make_checkpoint(folder, kind, **changes))


def greedy(model: Path, **options: object) -> list[list[int]]:
    llm = LLM(str(model), **{"dtype": "float32", "max_model_len": 256, "threads": 1, **options})
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def check_quantized(file: Path, widened: Path) -> None:
    """With torch the tokens of the widened weights. The C kernels keep the quantized ones and round activations to 8
    bits: the tokens of transformers whose projections do the same."""
    assert greedy(file, cpu_kernels="torch") == checkpoints.reference_greedy(widened, PROMPTS, MAX_TOKENS)

    def quantize(model: torch.nn.Module) -> None:
        with open_checkpoint(file) as reader:
            assert isinstance(reader, GgufReader)

            def read(name: str, n: int, k: int) -> GroupedWeight | SuperblockWeight:
                stored = f"{name}.weight" if f"{name}.weight" in reader else "model.embed_tokens.weight"
                return reader.stored(stored, (0, n), (0, k))

            multiply_as_stored(model, read, also=("lm_head",))

    expected = checkpoints.reference_greedy(widened, PROMPTS, NUM_ROUNDED, quantize)
    assert [output[:NUM_ROUNDED] for output in greedy(file)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", kind)
    file = gguf_files.write_gguf(folder, tmp_path / "model.gguf")
    assert greedy(file) == checkpoints.reference_greedy(folder, PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_16_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "llama", dtype=dtype)
    file = gguf_files.write_gguf(folder, tmp_path / "model.gguf", kind)
    assert greedy(file) == checkpoints.reference_greedy(folder, PROMPTS, MAX_TOKENS)
    assert greedy(file, dtype="auto") == greedy(folder, dtype="auto")


@pytest.mark.parametrize("kind", gguf_files.QUANTIZED)
def test_quantized(kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "llama", **gguf_files.QUANTIZED_SIZES)
    file = gguf_files.write_gguf(folder, tmp_path / "model.gguf", kind, widened=tmp_path / "widened")
    check_quantized(file, tmp_path / "widened")


def test_types_that_are_mixed_within_a_fused_matrix(tmp_path: Path) -> None:
    """The mixture of Q4_K_M files, where v and the first layers' down have more bits than the others."""
    folder = make(tmp_path / "folder", "qwen3", **gguf_files.QUANTIZED_SIZES, tie_word_embeddings=False)
    types = {"v_proj.weight": "Q6_K", "1.mlp.down_proj.weight": "Q5_K", "embed_tokens.weight": "Q8_0"}
    file = gguf_files.write_gguf(folder, tmp_path / "m.gguf", "Q4_K", types=types, widened=tmp_path / "widened")
    expected = checkpoints.reference_greedy(tmp_path / "widened", PROMPTS, MAX_TOKENS)
    assert greedy(file, cpu_kernels="torch") == expected
    assert all(len(output) == MAX_TOKENS for output in greedy(file))


def test_quantized_experts(tmp_path: Path) -> None:
    sizes = {**gguf_files.QUANTIZED_SIZES, "moe_intermediate_size": 256, "num_experts": 4}
    folder = make(tmp_path / "folder", "qwen3_moe", **sizes)
    types = {"down_proj.weight": "Q6_K"}
    file = gguf_files.write_gguf(folder, tmp_path / "m.gguf", "Q4_K", types=types, widened=tmp_path / "widened")
    check_quantized(file, tmp_path / "widened")


def test_experts_whose_gates_and_ups_have_other_types_are_widened(tmp_path: Path) -> None:
    sizes = {**gguf_files.QUANTIZED_SIZES, "moe_intermediate_size": 256, "num_experts": 4}
    folder = make(tmp_path / "folder", "qwen3_moe", **sizes)
    types = {"up_proj.weight": "Q6_K"}
    file = gguf_files.write_gguf(folder, tmp_path / "m.gguf", "Q4_K", types=types, widened=tmp_path / "widened")
    expected = checkpoints.reference_greedy(tmp_path / "widened", PROMPTS, MAX_TOKENS)
    assert greedy(file, cpu_kernels="torch") == expected
    assert all(len(output) == MAX_TOKENS for output in greedy(file))


def test_split_files_from_any_part(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "llama")
    first = gguf_files.write_gguf(folder, tmp_path / "model.gguf", split=10)
    expected = checkpoints.reference_greedy(folder, PROMPTS, MAX_TOKENS)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 4 and parts[0] == first
    assert greedy(first) == greedy(parts[2]) == expected


def test_a_quantized_file_quantized_to_int8(tmp_path: Path) -> None:
    """--quantization int8 quantizes what the file's types stand for."""
    folder = make(tmp_path / "folder", "llama", **gguf_files.QUANTIZED_SIZES)
    file = gguf_files.write_gguf(folder, tmp_path / "model.gguf", "Q6_K", widened=tmp_path / "widened")
    vocabulary.add_tokenizer(tmp_path / "widened")
    assert greedy(file, quantization="int8") == greedy(tmp_path / "widened", quantization="int8")
