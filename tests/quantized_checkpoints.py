"""Quantizes the projections of a float checkpoint with independent packing code, and gives the dequantized weights.

Rounding is simple. The quantized files and the float copy must hold the same numbers.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from pagewire.kernels import reference
from pagewire.kernels.grouped_weight import GroupedWeight
from pagewire.kernels.quantized_weight import concatenate
from pagewire.kernels.superblock_weight import SuperblockWeight

GROUP = 32
BLOCK = 32
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the numbers in a word, the lowest bits first


def _compressed(format: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {**group, "input_activations": activations, "output_activations": None}},
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8-block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.norm"],
    },
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fp8-channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "gptq-v2-ordered": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": False,
        "desc_act": True,
        "checkpoint_format": "gptq_v2",
    },
    "packed": _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
    "packed-zeros": _compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False
    ),
    "packed-ordered": _compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, actorder="group"
    ),
    "packed-channel": _compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
    "packed-8": _compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "int8": _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        num_bits=8,
        type="int",
        strategy="channel",
    ),
    "int8-zeros": _compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    "mxfp4": _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "nvfp4": _compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
    ),
    "nvfp4-modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.35.0"},
    },
}


def quantize_checkpoint(source: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """(the checkpoint of `source` quantized, the same weights as floats), both inside `folder`."""
    quantized, widened = folder / "quantized", folder / "widened"
    for path in (quantized, widened):
        shutil.copytree(source, path)
    tensors = load_file(source / "model.safetensors")
    packed, floats = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        is_product = "_proj" in module.rpartition(".")[2] or ".experts." in name
        if is_product and name.endswith(".weight") and _fits(weight, kind):
            del packed[name]
            parts, floats[name] = quantize(weight, kind)
            packed |= {f"{module}.{leaf}": tensor for leaf, tensor in parts.items()}
    save_file(packed, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, widened / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[kind]}))
    return quantized, widened


def _fits(weight: Tensor, kind: str) -> bool:
    """Whether a format can hold a matrix of this size."""
    n, k = weight.shape
    return kind.startswith("fp8") or (n % 8 == 0 and k % GROUP == 0)


_Stored = GroupedWeight | SuperblockWeight
"""What the C kernels multiply as integers."""
_Matrix = reference.TorchGroupedMatrix | reference.TorchSuperblockMatrix


def multiply_as_stored(
    model: torch.nn.Module, read: Callable[[str, int, int], _Stored], *, also: tuple[str, ...] = ()
) -> None:
    """Replaces the projections and experts of transformers' model by `reference.quantized_matrix`, whose bits the C
    kernels' products have. read: (a module of the checkpoint, n, k) → its weight. also: more modules."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path.endswith(("_proj", *also)):
            matrix = reference.quantized_matrix(read(path, *module.weight.shape))
            setattr(module, "forward", partial(_product, matrix, module.bias))  # noqa: B010  # mypy knows forward as a method
        elif isinstance(module, MixtralExperts | Qwen3MoeExperts):
            setattr(module, "forward", partial(_experts, _expert_matrices(path, module, read)))  # noqa: B010


_Pair = tuple[_Matrix, _Matrix]


def _expert_matrices(
    path: str, module: MixtralExperts | Qwen3MoeExperts, read: Callable[[str, int, int], _Stored]
) -> list[_Pair]:
    names = ("gate_proj", "up_proj", "down_proj")
    if isinstance(module, MixtralExperts):
        path, names = path.replace(".mlp.", ".block_sparse_moe."), ("w1", "w3", "w2")
    found = []
    for i in range(module.num_experts):
        gate, up = (read(f"{path}.{i}.{name}", module.intermediate_dim, module.hidden_dim) for name in names[:2])
        down = read(f"{path}.{i}.{names[2]}", module.hidden_dim, module.intermediate_dim)
        gate_up = concatenate([gate, up])
        assert isinstance(gate_up, GroupedWeight | SuperblockWeight)
        found.append((reference.quantized_matrix(gate_up), reference.quantized_matrix(down)))
    return found


def _product(matrix: _Matrix, bias: Tensor | None, x: Tensor) -> Tensor:
    return matrix.product(x.flatten(0, -2), bias).view(*x.shape[:-1], -1)


def _experts(matrices: list[_Pair], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """ids, weights: [tokens, top_k], the best first."""
    rows = []
    for row, row_ids, row_weights in zip(x, ids.tolist(), weights, strict=True):
        total = torch.zeros_like(row)
        for i, weight in zip(row_ids, row_weights, strict=True):
            gate_up, down = matrices[i]
            total = total + down.product(gate_up.silu_mul(row[None], None), None)[0] * weight
        rows.append(total)
    return torch.stack(rows)


def quantize(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of the format by their last names, the float32 weight that they stand for)."""
    if kind.startswith("fp8"):
        return _fp8(weight, kind)
    if kind == "mxfp4":
        return _mxfp4(weight)
    if kind.startswith("nvfp4"):
        return _nvfp4(weight, kind)
    if kind.startswith(("packed", "int8")):
        return _integers(weight, kind)
    return _int4(weight, kind)


def _fp8(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    n, k = weight.shape
    if kind == "fp8-block":
        rows, columns = -(-n // BLOCK), -(-k // BLOCK)
        scale = torch.zeros(rows, columns)
        whole = torch.zeros(n, k)
        for i in range(n):
            for j in range(0, k, BLOCK):
                part = weight[i, j : j + BLOCK].abs().max() / 448
                scale[i // BLOCK, j // BLOCK] = max(scale[i // BLOCK, j // BLOCK], part)
        for i in range(n):
            for j in range(columns):
                whole[i, j * BLOCK : (j + 1) * BLOCK] = scale[i // BLOCK, j]
        leaf = "weight_scale_inv"
    elif kind == "fp8-channel":
        scale = weight.abs().amax(dim=1, keepdim=True) / 448
        whole, leaf = scale, "weight_scale"
    else:
        scale = weight.abs().max() / 448
        whole, leaf = scale, "weight_scale"
    values = (weight / whole).to(torch.float8_e4m3fn)
    parts = {"weight": values, leaf: scale}
    if kind == "fp8-tensor":
        parts["input_scale"] = torch.tensor(0.1)
    return parts, values.float() * whole


def _int4(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    n, k = weight.shape
    is_awq, is_v2, is_symmetric = kind == "awq", "v2" in kind, kind == "gptq"
    group_of = np.arange(k) // GROUP
    if "ordered" in kind:
        group_of = group_of[np.random.default_rng(k).permutation(k)]
    w = weight.float().numpy().astype(np.float64)
    scales = np.zeros((k // GROUP, n), np.float16)
    zeros = np.zeros((k // GROUP, n), np.int64)
    numbers = np.zeros((n, k), np.int64)
    for group in range(k // GROUP):
        columns = group_of == group
        low, high = np.minimum(w[:, columns].min(axis=1), 0), np.maximum(w[:, columns].max(axis=1), 0)
        if is_symmetric:
            scales[group], zeros[group] = np.maximum(-low, high) / 7.5, 8
        else:
            scales[group] = (high - low) / 15
            zeros[group] = np.clip(np.round(-low / scales[group]), 1, 15)
        numbers[:, columns] = np.clip(np.round(w[:, columns] / scales[group][:, None]) + zeros[group][:, None], 0, 15)
    exact = np.zeros((n, k), np.float32)
    for i in range(n):
        for j in range(k):
            exact[i, j] = np.float32(scales[group_of[j], i]) * np.float32(numbers[i, j] - zeros[group_of[j], i])
    order = _AWQ_COLUMNS if is_awq else range(8)
    parts = {
        "qweight": _words(numbers.T, order) if is_awq else _words(numbers, order).T.contiguous(),
        "qzeros": _words(zeros if is_awq or is_v2 else zeros - 1, order),
        "scales": torch.from_numpy(scales),
    }
    if not is_awq:
        parts["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return parts, torch.from_numpy(exact)


def _integers(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """pack-quantized and int-quantized of compressed-tensors."""
    n, k = weight.shape
    arguments = CONFIGS[kind]["config_groups"]["group_0"]["weights"]
    bits, size = arguments["num_bits"], arguments.get("group_size", k)
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    group_of = np.arange(k) // size
    if "ordered" in kind:
        group_of = group_of[np.random.default_rng(k).permutation(k)]
    w = weight.float().numpy().astype(np.float64)
    scales = np.zeros((n, k // size), np.float32)
    zeros = np.zeros((n, k // size), np.int64)
    numbers = np.zeros((n, k), np.int64)
    for group in range(k // size):
        part = w[:, group_of == group]
        least, most = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        if arguments["symmetric"]:
            scales[:, group] = torch.from_numpy(np.maximum(-least, most) / high).bfloat16().float().numpy()
        else:
            scales[:, group] = torch.from_numpy((most - least) / (high - low)).bfloat16().float().numpy()
            zeros[:, group] = np.clip(np.round(low - least / scales[:, group]), low, high)
        rounded = np.round(part / scales[:, group, None]) + zeros[:, group, None]
        numbers[:, group_of == group] = np.clip(rounded, low, high)
    exact = (numbers - zeros[:, group_of]).astype(np.float32) * scales[:, group_of]
    parts = {"weight_scale": torch.from_numpy(scales).bfloat16()}
    if kind.startswith("int8"):
        parts["weight"] = torch.from_numpy(numbers.astype(np.int8))
        if not arguments["symmetric"]:
            parts["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    else:
        order = range(32 // bits)
        parts["weight_packed"] = _words(numbers - low, order, bits)
        parts["weight_shape"] = torch.tensor([n, k])
        if not arguments["symmetric"]:
            parts["weight_zero_point"] = _words(zeros.T - low, order, bits).T.contiguous()
        if "ordered" in kind:
            parts["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return parts, torch.from_numpy(exact)


_FLOATS_OF_4_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    n, k = weight.shape
    values = _FLOATS_OF_4_BITS
    w = weight.float().numpy().astype(np.float64).reshape(n, k // 32, 32)
    exponents = np.floor(np.log2(np.abs(w).max(axis=2))) - 2
    codes = np.abs((w / 2 ** exponents[:, :, None])[..., None] - values).argmin(axis=3)
    exact = (values[codes] * 2 ** exponents[:, :, None]).reshape(n, k).astype(np.float32)
    codes = codes.reshape(n, k // 2, 2).astype(np.uint8)
    parts = {
        "weight_packed": torch.from_numpy(codes[..., 0] | codes[..., 1] << 4),
        "weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }
    return parts, torch.from_numpy(exact)


def _nvfp4(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    n, k = weight.shape
    w = weight.float().numpy().astype(np.float64).reshape(n, k // 16, 16)
    most = np.abs(w).max(axis=2)
    whole = np.float32(most.max() / (6 * 448))
    narrow = torch.from_numpy((most / 6 / whole).astype(np.float32)).to(torch.float8_e4m3fn)
    if kind == "nvfp4-modelopt":
        number, leaves = whole, ("weight", "weight_scale_2")
        scales = (narrow.float() * torch.tensor(number)).numpy()
    else:
        number, leaves = np.float32(1 / whole), ("weight_packed", "weight_global_scale")
        scales = (narrow.float() / torch.tensor(number)).numpy()
    codes = np.abs((w / scales[:, :, None])[..., None] - _FLOATS_OF_4_BITS).argmin(axis=3)
    exact = (_FLOATS_OF_4_BITS.astype(np.float32)[codes] * scales[:, :, None]).reshape(n, k)
    codes = codes.reshape(n, k // 2, 2).astype(np.uint8)
    parts = {
        leaves[0]: torch.from_numpy(codes[..., 0] | codes[..., 1] << 4),
        leaves[1]: torch.tensor(number).reshape(() if kind == "nvfp4-modelopt" else (1,)),
        "weight_scale": narrow,
        "input_scale" if kind == "nvfp4-modelopt" else "input_global_scale": torch.tensor(0.1),
    }
    return parts, torch.from_numpy(exact)


def _words(numbers: NDArray[np.int64], order: Any, bits: int = 4) -> Tensor:
    """[rows, columns] of `bits` each → int32 [rows, columns · bits / 32]."""
    share = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // share), np.uint32)
    for column in range(words.shape[1]):
        for i, place in enumerate(order):
            words[:, column] |= (numbers[:, share * column + place] << bits * i).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))
