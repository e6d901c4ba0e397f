"""Matrix products and the cost of a launch: small products and experts by bandwidth, large ones by operations."""

import time
from collections.abc import Iterator
from functools import partial

import torch

from ...engine.device.queue import Queue
from ...engine.gpu.products import InvariantProduct, Product, QuantizedProduct
from ...kernels.quantized_weight import Fp8Weight, Int4Weight
from ...kernels.triton.moe import moe, workspace_moe
from ...kernels.triton.rms_norm import rms_norm
from ...kernels.triton.small_product import small_product, workspace_small_product
from .clock import copies_beyond_cache, microseconds
from .figures import Figure
from .setting import Setting

LAYERS = (  # [n, k] of a layer's weights: Qwen3-0.6B, Llama-3.1-8B
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072),
    (6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336),
)  # fmt: skip
SHAPES = (*LAYERS, (151_936, 1024), (128_256, 4096))
"""[n, k] of the layers and of the LM heads."""


def small_product_us(queue: Queue, n: int, k: int, *, rows: int, torch_too: bool = False) -> list[float]:
    """Microseconds of a product with a weight [n, k] that is in no cache; with `torch_too` also of torch's product."""
    weights = [
        torch.randn(n, k, dtype=torch.bfloat16, device=queue.device)
        for _ in range(copies_beyond_cache(queue, 2 * n * k))
    ]
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=queue.device)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=queue.device)
    workspace = workspace_small_product([(n, k)], queue.device)
    found = [microseconds(queue, [partial(small_product, x, weight, out, workspace) for weight in weights])]
    if torch_too:
        found.append(microseconds(queue, [partial(torch.mm, x, weight.t(), out=out) for weight in weights]))
    return found


def product_us(queue: Queue, kernel: str, n: int, k: int, *, rows: int) -> tuple[float, int]:
    """Microseconds of a product by `kernel`, one of `KERNELS`, and the bytes of its weight."""
    made = [_weight(queue, kernel, n, k)]
    num_bytes = made[0][1]
    made += [_weight(queue, kernel, n, k) for _ in range(copies_beyond_cache(queue, num_bytes) - 1)]
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=queue.device)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=queue.device)
    return microseconds(queue, [partial(product, x, out) for product, _ in made]), num_bytes


KERNELS = ("fp8_product", "int4_product", "product")
"""Weights of 8 bits with a scale for 128 × 128, of 4 bits in groups of 128, and of bfloat16 for --deterministic."""


def _weight(queue: Queue, kernel: str, n: int, k: int) -> tuple[Product, int]:
    """A product with a weight [n, k], and the weight's bytes."""
    device, groups = queue.device, (-(-n // 128), -(-k // 128))
    if kernel == "product":
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
        return InvariantProduct(weight, None), weight.nbytes
    if kernel == "fp8_product":
        values = torch.randn(n, k, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
        fp8 = Fp8Weight(values, torch.ones(groups, device=device), (128, 128))
        return _quantized(fp8), fp8.nbytes
    packed, zeros = (
        torch.randint(0, most, shape, dtype=torch.uint8, device=device)
        for most, shape in ((256, (n, k // 2)), (17, (groups[1], n)))
    )
    int4 = Int4Weight(packed, torch.ones(groups[1], n, dtype=torch.bfloat16, device=device), zeros, half=64)
    return _quantized(int4), int4.nbytes


def _quantized(weight: Fp8Weight | Int4Weight) -> QuantizedProduct:
    device = (weight.values if isinstance(weight, Fp8Weight) else weight.packed).device
    workspace = workspace_small_product([], device, narrow=[weight.shape])
    widened = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)  # without gates it takes nothing else
    return QuantizedProduct(weight, None, workspace, lambda shape, dtype: widened.view(shape), dtype=torch.bfloat16)


def moe_us(queue: Queue, *, tokens: int, num_experts: int, top_k: int, hidden: int, inter: int) -> tuple[float, int]:
    """Microseconds of a layer of experts, and the bytes of the weights that its tokens use."""
    torch.manual_seed(0)
    workspace = workspace_moe(
        max_tokens=tokens,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        inter=inter,
        dtype=torch.bfloat16,
        device=queue.device,
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=queue.device)

    x, logits = random(tokens, hidden), random(tokens, num_experts)
    gate_up, down = random(num_experts, 2 * inter, hidden), random(num_experts, hidden, inter)
    num_tokens = torch.tensor([tokens], dtype=torch.int32, device=queue.device)
    out = torch.empty_like(x)

    def launch() -> None:
        moe(out, x, logits, gate_up, down, num_tokens, workspace, top_k=top_k, renormalize=True)

    taken = microseconds(queue, [launch])
    return taken, len(set(workspace.experts.flatten().tolist())) * 3 * hidden * inter * 2


def measure(setting: Setting) -> Iterator[Figure]:
    queue = setting.open_queue()
    yield from _launches(queue, setting.choose(100, 3))
    for n, k in setting.choose(SHAPES, ((32, 64),)):
        for rows in setting.choose((1, 16), (2,)):
            ours, theirs = small_product_us(queue, n, k, rows=rows, torch_too=True)
            name = f"small product, {rows} × {k} · {n}"
            yield Figure(name=name, value=2 * n * k / ours / 1e3, unit="GB/s")
            yield Figure(name=f"{name}, torch's", value=2 * n * k / theirs / 1e3, unit="GB/s")
    n, k = setting.choose((28_672, 4096), (32, 128))
    for kernel in KERNELS:
        for rows in setting.choose((1, 16, 64), (2,)):
            taken, num_bytes = product_us(queue, kernel, n, k, rows=rows)
            yield Figure(name=f"{kernel}, {rows} × {k} · {n}", value=num_bytes / taken / 1e3, unit="GB/s")
        rows = setting.choose(2048, 20)
        taken, _ = product_us(queue, kernel, n, k, rows=rows)
        yield Figure(name=f"{kernel}, {rows} × {k} · {n}", value=2e-6 * rows * n * k / taken, unit="TFLOP/s")
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=queue.device)
    for rows in setting.choose((64, 256, 2048, 8192), (64,)):
        x = torch.randn(rows, k, dtype=torch.bfloat16, device=queue.device)
        out = torch.empty(rows, n, dtype=torch.bfloat16, device=queue.device)
        taken = microseconds(queue, [partial(torch.mm, x, weight.t(), out=out)])
        yield Figure(name=f"torch's product, {rows} × {k} · {n}", value=2e-6 * rows * n * k / taken, unit="TFLOP/s")
    num_experts, top_k, hidden, inter = setting.choose((128, 8, 2048, 768), (4, 2, 64, 32))
    for tokens in setting.choose((1, 32, 256), (3,)):
        taken, num_bytes = moe_us(
            queue, tokens=tokens, num_experts=num_experts, top_k=top_k, hidden=hidden, inter=inter
        )
        name = f"experts, {tokens} tokens, {top_k} of {num_experts} of {hidden} × {inter}"
        yield Figure(name=name, value=num_bytes / taken / 1e3, unit="GB/s")


def _launches(queue: Queue, num: int) -> Iterator[Figure]:
    """Microseconds of the smallest kernel: of the host for a launch, and of the device in a recording."""
    x = torch.zeros(1, 16, dtype=torch.bfloat16, device=queue.device)
    work = partial(rms_norm, x, x[0], 1e-6, x)
    yield Figure(name="smallest kernel, recorded", value=microseconds(queue, [work] * num), unit="µs")
    started = time.perf_counter()
    for _ in range(num):
        work()
    taken = time.perf_counter() - started
    queue.mark().wait()
    yield Figure(name="launch, not recorded, of the host", value=taken / num * 1e6, unit="µs")
