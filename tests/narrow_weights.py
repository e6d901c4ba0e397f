"""Random weights of 8 and 4 bits of every kind that the Triton kernels take."""

import torch

from pagewire.kernels.quantized_weight import Fp8Weight, Int8Weight, QuantizedWeight, fp4_weight, int4_weight

KINDS = ("fp8 row", "fp8 block", "int8 row", "int8 64", "int4 64", "int4 32", "mxfp4", "nvfp4")
"""The form, and the size of its groups."""


def fp8_codes(n: int, k: int) -> torch.Tensor:
    """Random values among all finite e4m3 numbers, with subnormal numbers and both zeros."""
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    return finite[torch.randint(len(finite), (n, k))].view(torch.float8_e4m3fn)


def make_weight(
    kind: str, shape: tuple[int, int], device: str = "cpu", block: tuple[int, int] = (32, 32)
) -> QuantizedWeight:
    """kind: one of `KINDS`. block: of fp8 with blocks."""
    n, k = shape
    form, _, size = kind.partition(" ")
    group = k if size == "row" else int(size) if size.isdigit() else 0
    target = torch.device(device)
    match form:
        case "fp8" if size == "row":
            return Fp8Weight(fp8_codes(n, k), torch.rand(n) / 400).to(target)
        case "fp8":
            scale = torch.rand(-(-n // block[0]), -(-k // block[1])) / 400
            return Fp8Weight(fp8_codes(n, k), scale, block).to(target)
        case "int8":
            values = torch.randint(-128, 128, shape, dtype=torch.int8)
            return Int8Weight(values, (0.5 + torch.rand(k // group, n)) / 256).to(target)
        case "int4":
            numbers = torch.randint(0, 16, shape, dtype=torch.uint8)
            zeros = torch.randint(0, 17, (k // group, n), dtype=torch.uint8)  # GPTQ checkpoints have zero points of 16
            return int4_weight(numbers, (0.5 + torch.rand(k // group, n)).half() / 8, zeros).to(target)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    if form == "mxfp4":
        powers = torch.ldexp(torch.ones(k // 32, n), torch.randint(-6, 0, (k // 32, n)))
        return fp4_weight(codes, powers.bfloat16()).to(target)
    return fp4_weight(codes, fp8_codes(k // 16, n), (0.5 + torch.rand(n)) / 1000).to(target)
