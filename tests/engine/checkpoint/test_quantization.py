"""`quantization_config`, valid and invalid."""

import subprocess
import sys
from pathlib import Path

import pytest
import quantized_checkpoints

from pagewire.engine.checkpoint.quantization import CompressedScheme, Fp8Scheme, Int4Scheme, read_scheme
from pagewire.errors import ConfigError

FILE = Path("config.json")
COMPRESSED = quantized_checkpoints.CONFIGS["fp8-channel"]


def _compressed(**weights):
    return {**COMPRESSED, "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, **weights}}}}


def _packed(other=None, **weights):
    """A config of integers of 4 bits; with another group of weights that of `other`."""
    config = quantized_checkpoints.CONFIGS["packed"]
    group = config["config_groups"]["group_0"]
    groups = {"group_0": {**group, "weights": {**group["weights"], **weights}}}
    if other is not None:
        groups["group_1"] = other["config_groups"]["group_0"]
    return {**config, "config_groups": groups}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (quantized_checkpoints.CONFIGS["fp8-block"], Fp8Scheme((32, 32), False)),
        (quantized_checkpoints.CONFIGS["fp8-tensor"], Fp8Scheme(None, True)),
        (COMPRESSED, Fp8Scheme(None, False)),
        (_compressed(strategy="block", block_structure=[128, 128]), Fp8Scheme((128, 128), False, False)),
        (_compressed(strategy="channel", block_structure="128x128"), Fp8Scheme(None, False, False)),
        ({**_compressed(), "format": "naive-quantized"}, Fp8Scheme(None, False, False)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Fp8Scheme(None, True)),
        (quantized_checkpoints.CONFIGS["awq"], Int4Scheme("awq", 32)),
        (quantized_checkpoints.CONFIGS["gptq"], Int4Scheme("gptq", 32, 1)),
        (quantized_checkpoints.CONFIGS["gptq-v2-ordered"], Int4Scheme("gptq", 32)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, Int4Scheme("gptq", None, 1)),
        (quantized_checkpoints.CONFIGS["packed"], CompressedScheme("pack-quantized", 4, 32)),
        (quantized_checkpoints.CONFIGS["packed-zeros"], CompressedScheme("pack-quantized", 4, 32, False)),
        (quantized_checkpoints.CONFIGS["packed-channel"], CompressedScheme("pack-quantized", 4, None)),
        (quantized_checkpoints.CONFIGS["int8"], CompressedScheme("int-quantized", 8, None, True, True)),
        (quantized_checkpoints.CONFIGS["int8-zeros"], CompressedScheme("int-quantized", 8, None, False)),
        (quantized_checkpoints.CONFIGS["mxfp4"], CompressedScheme("mxfp4-pack-quantized", 4, 32)),
        (quantized_checkpoints.CONFIGS["nvfp4"], CompressedScheme("nvfp4-pack-quantized", 4, 16)),
        (quantized_checkpoints.CONFIGS["nvfp4-modelopt"], CompressedScheme("nvfp4", 4, 16)),
    ],
)
def test_valid_configs_give_their_scheme(config, expected):
    assert read_scheme(config, FILE) == expected


def test_the_note_says_that_input_scales_are_not_used():
    static, dynamic = (read_scheme(quantized_checkpoints.CONFIGS[kind], FILE) for kind in ("fp8-tensor", "fp8-block"))
    assert "input scales are not used" in static.note
    assert "input scales" not in dynamic.note and "32 x 32" in dynamic.note


def test_has_kernels_depends_on_the_block_size():
    assert [Fp8Scheme(block).has_kernels for block in (None, (128, 128), (1, 16), (32, 8), (96, 128))] == [
        1,
        1,
        1,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantized with bitsandbytes, .* fp8, mxfp4, compressed-tensors .*, and awq",
        ),
        ({}, "quantized with None"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"of fp8 that .*: Invalid enum value 'e5m2' - at `\$\.fmt`"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "blocks of 0 x 128"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "Invalid enum value 8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "Invalid enum value 'gemv'"),
        ({"quant_method": "gptq", "bits": 4}, "missing required field `group_size`"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 24}, "group_size of 24, which should be -1 or a multiple"),
        ({**COMPRESSED, "format": "marlin-24"}, "Invalid enum value 'marlin-24'"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "type float with 8 bits in groups of None, which nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "Invalid enum value 'W4A8_AWQ'"),
        ({**COMPRESSED, "format": "pack-quantized"}, "type float with 8 bits in groups of None, which pack-quantized"),
        (_packed(num_bits=3), "Invalid enum value 3"),
        (_packed(group_size=12), "group_size of 12, which should be a multiple of 8"),
        ({**_packed(), "config_groups": {}}, "has 0 config_groups with 0 forms of weights"),
        (_packed(_packed(num_bits=8)), "has 2 config_groups with 2 forms of weights"),
        ({**_packed(), "format": "mxfp4-pack-quantized"}, "type int with 4 bits in groups of 32, which mxfp4"),
        (_compressed(num_bits=4), "Invalid enum value 4"),
        ({**COMPRESSED, "config_groups": {}}, "has 0 config_groups"),
        (_compressed(strategy="block", block_structure="128x128"), r"block structures \['128x128'\]"),
        (_compressed(strategy="block"), r"block structures \[None\]"),
    ],
)
def test_unsupported_configs_are_refused(config, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_scheme(config, FILE)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_reading_a_scheme_does_not_import_torch():
    code = "import sys, pagewire.engine.checkpoint.quantization; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
