"""The steps between the QKV projection and attention in one kernel: the norm of each head, the rotary embedding, and
the write of keys and values into the KV cache.

Queries go to a buffer of their own, keys and values directly into head-major pages. The norm rounds as transformers
does; the rotation is computed in float32 from a float32 table and rounded once, so the kernel needs no sine. Pages may
be of 8 bits: a value x is stored as x / scale.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .decode_attention import stride_of_pages
from .variant import WIDE, Plan, Variant, shaped

_MAX_HEADS = 16  # per program: with 4 warps a thread has 8 values of each half of a head


@triton.jit
def _move(source, target, low_at, high_at, inside, norm, eps, cos, sin, factor, DIM: tl.constexpr):
    """Loads heads, norms them (unless norm is None), rotates them (unless cos is None), multiplies by factor, stores.

    source, target: [heads, 1] pointers to heads; low_at, high_at: [1, DIM / 2] the features that turn together;
    inside: [heads, 1]; norm: pointer to [DIM]; cos, sin: [1, DIM / 2] float32.
    """
    dtype = source.dtype.element_ty
    low = tl.load(source + low_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + high_at, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        low = low * scale
        high = high * scale
        if norm.dtype.element_ty == dtype:  # see rms_norm.py
            low = low.to(dtype).to(tl.float32)
            high = high.to(dtype).to(tl.float32)
        low = (low * tl.load(norm + low_at).to(tl.float32)).to(dtype).to(tl.float32)
        high = (high * tl.load(norm + high_at).to(tl.float32)).to(dtype).to(tl.float32)
    if cos is not None:
        low, high = low * cos - high * sin, high * cos + low * sin
    tl.store(target + low_at, (low * factor).to(target.dtype.element_ty), mask=inside)
    tl.store(target + high_at, (high * factor).to(target.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rotary_write(
    qkv,
    q_norm,
    k_norm,
    rotary,
    positions,
    slots,
    q_out,
    k_pages,
    v_pages,
    qkv_stride,
    page_stride,
    eps,
    k_factor,
    v_factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    """One token and some of its heads: a token's first programs take queries, the others keys and values. The features
    i and i + PAIRS of a head turn together, for i < PAIRS; the others are taken in two halves."""
    HALF: tl.constexpr = DIM // 2
    Q_GROUPS: tl.constexpr = (HEADS + Q_BLOCK - 1) // Q_BLOCK
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, HALF)[None, :]
    low_at = columns
    high_at = columns + HALF
    if PAIRS < HALF:
        low_at = tl.where(columns < PAIRS, columns, columns + PAIRS)
        high_at = tl.where(columns < PAIRS, columns + PAIRS, columns + HALF)
    angles = rotary + tl.load(positions + token).to(tl.int64) * DIM + columns
    cos = tl.load(angles)
    sin = tl.load(angles + HALF)
    states = qkv + token * qkv_stride
    if group < Q_GROUPS:
        q_heads = (group * Q_BLOCK + tl.arange(0, Q_BLOCK))[:, None]
        q_target = q_out + token * (HEADS * DIM) + q_heads * DIM
        q_states = states + q_heads * DIM
        _move(q_states, q_target, low_at, high_at, q_heads < HEADS, q_norm, eps, cos, sin, 1.0, DIM)
    else:
        kv_heads = ((group - Q_GROUPS) * KV_BLOCK + tl.arange(0, KV_BLOCK))[:, None]
        slot = tl.load(slots + token).to(tl.int64)
        inside = (kv_heads < KV_HEADS) & (slot >= 0)
        target = slot // PAGE * page_stride + (kv_heads * PAGE + slot % PAGE) * DIM
        keys = states + (HEADS + kv_heads) * DIM
        values = keys + KV_HEADS * DIM
        _move(keys, k_pages + target, low_at, high_at, inside, k_norm, eps, cos, sin, k_factor, DIM)
        _move(values, v_pages + target, low_at, high_at, inside, None, eps, None, None, v_factor, DIM)


def rotary_table(
    inverse_frequencies: Tensor, attention_factor: float, max_len: int, head_dim: int | None = None
) -> Tensor:
    """[max_len, head_dim] float32: the cosines of a position's head_dim / 2 angles, then their sines. Pairs without a
    frequency do not turn.

    inverse_frequencies: [n ≤ head_dim / 2] float32, radians a position; head_dim None: 2 · n.
    """
    positions = torch.arange(max_len, dtype=torch.float32, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies
    rest = (0, (head_dim or 2 * len(inverse_frequencies)) // 2 - len(inverse_frequencies))
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return torch.cat((F.pad(cos, rest, value=1.0), F.pad(sin, rest)), dim=-1)


def norm_rotary_write(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotary: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_out: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
    *,
    turning: int | None = None,
) -> None:
    """Norms, rotates and stores the states of a step's tokens.

    qkv: [tokens, (heads + 2 · kv_heads) · dim], queries, keys, values; norms: of queries and of keys, each [dim], of
    qkv's type or float32; rotary: see `rotary_table`; turning: features of a head that turn, the first ones; None: all;
    positions, slots: [tokens] int32, a slot is page · block_size + offset, or -1 for a token that is not written;
    q_out: [tokens, heads, dim]; k_pages, v_pages: [pages, kv_heads, block_size, dim], pages of one stride, of the same
    type or of 8 bits; scales: of keys and of values.
    """
    tokens, heads, dim = q_out.shape
    kv_heads, page = k_pages.shape[1:3]
    assert qkv.shape == (tokens, (heads + 2 * kv_heads) * dim) and qkv.stride(1) == 1, (qkv.shape, q_out.shape)
    assert q_out.is_contiguous() and rotary.is_contiguous() and rotary.shape[1] == dim, (rotary.shape, dim)
    if tokens == 0:
        return
    options = _options(heads, kv_heads, dim, page, turning or dim)
    grid = (tokens, triton.cdiv(heads, options["Q_BLOCK"]) + triton.cdiv(kv_heads, options["KV_BLOCK"]))
    _norm_rotary_write[grid](
        qkv,
        None if norms is None else norms[0],
        None if norms is None else norms[1],
        rotary,
        positions,
        slots,
        q_out,
        k_pages,
        v_pages,
        qkv.stride(0),
        stride_of_pages(k_pages, v_pages),
        eps,
        1 / scales[0],
        1 / scales[1],
        **options,
    )


def _options(heads: int, kv_heads: int, dim: int, page: int, turning: int) -> dict[str, int]:
    """The compile-time options for these shapes."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PAIRS": turning // 2,
        "PAGE": page,
        "Q_BLOCK": min(triton.next_power_of_2(heads), _MAX_HEADS),
        "KV_BLOCK": min(triton.next_power_of_2(kv_heads), _MAX_HEADS),
        "num_warps": 4,
    }


def _variant(
    heads: int, kv_heads: int, *, normed: bool, fp8: bool = False, wide: bool = False, turning: int = 128
) -> Variant:
    """wide: norms of float32."""
    dim, page = 128, 64

    def launch(rows: int) -> None:
        slots, norm = shaped(rows, dtype=torch.int32), shaped(dim, dtype=torch.float32 if wide else torch.bfloat16)
        pages = shaped(4, kv_heads, page, dim, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
        norm_rotary_write(
            shaped(rows, (heads + 2 * kv_heads) * dim),
            (norm, norm) if normed else None,
            1e-6,
            shaped(1000, dim, dtype=torch.float32),
            slots,
            slots,
            shaped(rows, heads, dim),
            pages,
            pages,
            turning=turning,
        )

    stored = ("LDG.E.128", "F2FP.SATFINITE.E4M3") if fp8 else WIDE.sm_90
    return Variant(
        name=f"norm_rotary_write bf16 D128 {heads}/{kv_heads}"
        + " normed" * normed
        + " wide" * wide
        + " fp8 pages" * fp8
        + (f" {turning} turn" if turning < dim else ""),
        launch=launch,
        plans={"_norm_rotary_write": Plan(sm_80=WIDE.sm_80, sm_90=stored)},
        architecture=89 if fp8 else 80,
    )


# Qwen3-0.6B and Llama-3.1-8B.
VARIANTS = (
    _variant(16, 8, normed=True),
    _variant(16, 8, normed=True, fp8=True),
    _variant(32, 8, normed=False),
    _variant(32, 8, normed=False, fp8=True),
    _variant(32, 16, normed=True, wide=True),  # Gemma 3 27B
    _variant(96, 8, normed=True, turning=64),  # GLM-4.5
)
