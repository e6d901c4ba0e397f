"""How a checkpoint's matrices are quantized: `quantization_config` of its config.json.

Imports without torch, because the command line reads config.json. `engine/weights/quantized.py` knows the tensors of
each scheme and how they are packed.

The lists of modules that were not quantized (`modules_to_not_convert`, `ignored_layers`, `ignore`) are not read: their
writers disagree on patterns and defaults, and the tensors show it, because a quantized weight has a scale.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import msgspec
from msgspec import Struct

from ...errors import ConfigError


class Fp8Scheme(Struct, frozen=True):
    """Weights are float8 e4m3 with scales: one per weight, per row or per block."""

    narrower: ClassVar[int] = 2  # quantized weights that fit into 16 bits
    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: one per weight or row
    has_input_scales: bool = False  # the checkpoint has scales for quantizing activations, which are not used
    has_narrow_inputs: bool = True  # made for activations of 8 bits

    @property
    def note(self) -> str:
        scales = "" if self.block is None else f" with a scale for {self.block[0]} x {self.block[1]}"
        unused = ", its input scales are not used" if self.has_input_scales else ""
        return f"a checkpoint of 8 bits{scales}{unused}"

    @property
    def has_kernels(self) -> bool:
        """Whether the Triton kernels support this block shape."""
        return self.block is None or (self.block[1] >= 16 and all(size & (size - 1) == 0 for size in self.block))


class Int4Scheme(Struct, frozen=True):
    """Weights are 4-bit integers; `group_size` weights of a row share a scale and a zero point."""

    narrower: ClassVar[int] = 4  # quantized weights that fit into 16 bits
    has_kernels: ClassVar[bool] = True
    has_narrow_inputs: ClassVar[bool] = False
    layout: Literal["awq", "gptq"]
    group_size: int | None  # None: the whole row
    zero_offset: int = 0  # added to the stored zero points

    @property
    def note(self) -> str:
        return f"a checkpoint of 4 bits ({self.layout})"


class GgufScheme(Struct, frozen=True):
    """Weights of a GGUF file, each of a type of its own (`engine/weights/gguf.py`)."""

    has_kernels: ClassVar[bool] = False
    has_narrow_inputs: ClassVar[bool] = False
    types: tuple[str, ...]  # of the quantized weights

    @property
    def note(self) -> str:
        return f"a GGUF file ({', '.join(self.types)})"


class CompressedScheme(Struct, frozen=True):
    """compressed-tensors of integers, or of floats of 4 bits: MXFP4, whose scales are powers of two, or NVFP4, whose
    scales are floats of 8 bits times a number of the whole weight. nvfp4: as NVIDIA's ModelOpt stores it."""

    format: Literal["pack-quantized", "int-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "nvfp4"]
    bits: Literal[4, 8]
    group_size: int | None  # weights of a row that share a scale; None: the whole row
    is_symmetric: bool = True  # without zero points
    has_narrow_inputs: bool = False  # made for activations of 8 bits

    @property
    def narrower(self) -> int:
        """Quantized weights that fit into 16 bits."""
        return 16 // self.bits if self.format != "int-quantized" else 2

    @property
    def has_kernels(self) -> bool:
        """Whether the Triton kernels have this format."""
        if self.bits == 8 and not self.is_symmetric:
            return False
        return (self.group_size or 16) % 16 == 0

    @property
    def note(self) -> str:
        return f"a checkpoint of {self.bits} bits ({self.format})"


Scheme = Fp8Scheme | Int4Scheme | CompressedScheme | GgufScheme


class _Fp8(Struct):
    """Qwen3-FP8, DeepSeek-V3 and transformers' FineGrainedFP8Config; without blocks AutoFP8 of neuralmagic."""

    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[int, int] | None = None
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"


class _FloatArguments(Struct):
    """QuantizationArgs of compressed-tensors, for floats of 8 bits."""

    type: Literal["float"]
    num_bits: Literal[8]
    strategy: Literal["tensor", "channel", "block"] = "tensor"
    block_structure: tuple[int, int] | str | None = None  # a string in old files, which means nothing for these types


class _Inputs(Struct):
    num_bits: int = 8
    dynamic: bool | Literal["local"] = False


class _FloatGroup(Struct):
    weights: _FloatArguments
    input_activations: _Inputs | None = None


class _CompressedFloats(Struct):
    """vllm-project/compressed-tensors, QuantizationConfig, with weights of 8-bit floats."""

    config_groups: dict[str, _FloatGroup]
    format: Literal["float-quantized", "naive-quantized"]


class _IntArguments(Struct):
    """QuantizationArgs of compressed-tensors, for integers, MXFP4 and NVFP4. Their order of columns (`actorder`) shows
    in the tensors."""

    type: Literal["int", "float"]
    num_bits: Literal[4, 8]
    strategy: Literal["tensor", "channel", "group", "tensor_group"] = "tensor"
    group_size: int | None = None
    symmetric: bool = True


class _IntGroup(Struct):
    weights: _IntArguments
    input_activations: _Inputs | None = None


class _CompressedIntegers(Struct):
    """QuantizationConfig with weights of integers, MXFP4 or NVFP4."""

    config_groups: dict[str, _IntGroup]
    format: Literal["pack-quantized", "int-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"]


class _ModelOpt(Struct):
    """NVIDIA's ModelOpt."""

    quant_algo: Literal["FP8", "NVFP4"]


class _Awq(Struct):
    """casper-hansen/AutoAWQ, AwqConfig."""

    bits: Literal[4]
    group_size: int
    version: Literal["gemm", "GEMM"] = "gemm"
    zero_point: Literal[True] = True


class _Gptq(Struct):
    """AutoGPTQ and its successor GPTQModel, quantize_config.json."""

    bits: Literal[4]
    group_size: int
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None


FORMATS = "fp8", "AWQ", "GPTQ", "int8", "int4", "MXFP4", "NVFP4"
"""What `read_scheme` reads, in short."""


def read_scheme(config: Mapping[str, object], file: Path) -> Scheme:
    """config: `quantization_config` of `file`. Raises ConfigError."""
    method = config.get("quant_method")
    match method:
        case "fp8":
            fp8 = _fields(config, _Fp8, file)
            return Fp8Scheme(_block(fp8.weight_block_size, file), fp8.activation_scheme == "static")
        case "compressed-tensors" if config.get("format") in _INTEGER_FORMATS:
            return _compressed(_fields(config, _CompressedIntegers, file), file)
        case "compressed-tensors":
            groups = list(_fields(config, _CompressedFloats, file).config_groups.values())
            blocks = {group.weights.block_structure for group in groups if group.weights.strategy == "block"}
            block = next(iter(blocks), None)
            if len(blocks) > 1 or not groups or isinstance(block, str) or blocks == {None}:
                raise ConfigError(f"{file} has {len(groups)} config_groups with the block structures {[*blocks]}.")
            inputs = [group.input_activations for group in groups if group.input_activations is not None]
            is_static = any(each.dynamic is False for each in inputs)
            return Fp8Scheme(_block(block, file), is_static, len(inputs) == len(groups))
        case "mxfp4":  # gpt-oss
            return CompressedScheme("mxfp4-pack-quantized", 4, 32)
        case "modelopt" | "modelopt_fp4":
            if _fields(config, _ModelOpt, file).quant_algo == "FP8":
                return Fp8Scheme(None, True)
            return CompressedScheme("nvfp4", 4, 16)
        case "awq":
            return Int4Scheme("awq", _group_size(_fields(config, _Awq, file).group_size, file))
        case "gptq":
            gptq = _fields(config, _Gptq, file)
            offset = 0 if gptq.checkpoint_format == "gptq_v2" else 1
            return Int4Scheme("gptq", _group_size(gptq.group_size, file), offset)
        case _:
            raise ConfigError(
                f"{file} has weights quantized with {method}, which pagewire does not read; it reads "
                "fp8, mxfp4, compressed-tensors of 8-bit floats, of integers of 8 or 4 bits, of mxfp4 and of nvfp4, "
                "modelopt of fp8 and nvfp4, and awq and gptq of 4 bits."
            )


def _compressed(found: _CompressedIntegers, file: Path) -> CompressedScheme:
    forms = {
        (w.type, w.num_bits, w.group_size if "group" in w.strategy else None, w.symmetric)
        for w in (group.weights for group in found.config_groups.values())
    }
    if len(forms) != 1:
        raise ConfigError(
            f"{file} has {len(found.config_groups)} config_groups with {len(forms)} forms of weights; pagewire reads "
            "checkpoints with one."
        )
    kind, bits, group, is_symmetric = next(iter(forms))
    of_floats = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}.get(found.format)
    is_float = of_floats is not None
    if (kind == "float") != is_float or (is_float and (bits, group, is_symmetric) != (4, of_floats, True)):
        raise ConfigError(
            f"{file} has weights of type {kind} with {bits} bits in groups of {group}, which {found.format} does not "
            "have."
        )
    if group is not None and (group < 8 or group % 8):
        raise ConfigError(f"{file} has a group_size of {group}, which should be a multiple of 8.")
    inputs = [group.input_activations for group in found.config_groups.values()]
    is_narrow = found.format == "int-quantized" and all(each is not None and each.num_bits == 8 for each in inputs)
    return CompressedScheme(found.format, bits, group, is_symmetric, is_narrow)


_INTEGER_FORMATS = ("pack-quantized", "int-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
_T = TypeVar("_T")


def _fields(config: Mapping[str, object], kind: type[_T], file: Path) -> _T:
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as e:
        method = config["quant_method"]
        raise ConfigError(f"{file} has a quantization_config of {method} that pagewire does not read: {e}.") from None


def _block(block: tuple[int, int] | None, file: Path) -> tuple[int, int] | None:
    if block is not None and min(block) < 1:
        raise ConfigError(f"{file} has blocks of {block[0]} x {block[1]} weights.")
    return block


def _group_size(size: int, file: Path) -> int | None:
    if size != -1 and (size < 16 or size % 16):
        raise ConfigError(f"{file} has a group_size of {size}, which should be -1 or a multiple of 16.")
    return None if size == -1 else size
