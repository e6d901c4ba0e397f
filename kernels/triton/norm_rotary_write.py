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
from .dependent_launch import await_previous, dependent
from .variant import WIDE, Plan, Variant, pages_shaped, shaped

_MAX_HEADS = 16  # per program: with 4 warps a thread has 8 values of each half of a head


@triton.jit
def _move(source, target, low_at, high_at, inside, of_head, norm, eps, cos, sin, factor, DIM: tl.constexpr):
    """Loads heads, norms them (unless norm is None), rotates them (unless cos is None), multiplies by factor, stores.

    source, target: [heads, 1] pointers to heads; low_at, high_at: [1, n ≥ DIM / 2] the features that turn together;
    inside: [heads, 1 or n]; of_head: [1, n] which features there are; None: all; norm: pointer to [DIM]; cos, sin: [1,
    n] float32.
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
        if of_head is None:
            low_weight = tl.load(norm + low_at)
            high_weight = tl.load(norm + high_at)
        else:
            low_weight = tl.load(norm + low_at, mask=of_head, other=0.0)
            high_weight = tl.load(norm + high_at, mask=of_head, other=0.0)
        low = (low * low_weight.to(tl.float32)).to(dtype).to(tl.float32)
        high = (high * high_weight.to(tl.float32)).to(dtype).to(tl.float32)
    if cos is not None:
        low, high = low * cos - high * sin, high * cos + low * sin
    tl.store(target + low_at, (low * factor).to(target.dtype.element_ty), mask=inside)
    tl.store(target + high_at, (high * factor).to(target.dtype.element_ty), mask=inside)


@dependent
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
    VALUE_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """One token and some of its heads: a token's first programs take queries, the others keys and values. The features
    i and i + PAIRS of a head turn together, for i < PAIRS; the others are taken in two halves, as are values. BLOCK,
    VALUE_BLOCK: the powers of two from the halves on."""
    await_previous()
    HALF: tl.constexpr = DIM // 2
    VALUE_HALF: tl.constexpr = VALUE_DIM // 2
    Q_GROUPS: tl.constexpr = (HEADS + Q_BLOCK - 1) // Q_BLOCK
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK)[None, :]
    low_at = columns
    high_at = columns + HALF
    if PAIRS < HALF:
        low_at = tl.where(columns < PAIRS, columns, columns + PAIRS)
        high_at = tl.where(columns < PAIRS, columns + PAIRS, columns + HALF)
    angles = rotary + tl.load(positions + token).to(tl.int64) * DIM + columns
    of_head = None
    if BLOCK == HALF:
        cos = tl.load(angles)
        sin = tl.load(angles + HALF)
    else:
        of_head = columns < HALF
        cos = tl.load(angles, mask=of_head, other=0.0)
        sin = tl.load(angles + HALF, mask=of_head, other=0.0)
    states = qkv + token * qkv_stride
    if group < Q_GROUPS:
        q_heads = (group * Q_BLOCK + tl.arange(0, Q_BLOCK))[:, None]
        q_target = q_out + token * (HEADS * DIM) + q_heads * DIM
        q_states = states + q_heads * DIM
        q_inside = q_heads < HEADS
        if of_head is not None:
            q_inside = q_inside & of_head
        _move(q_states, q_target, low_at, high_at, q_inside, of_head, q_norm, eps, cos, sin, 1.0, DIM)
    else:
        kv_heads = ((group - Q_GROUPS) * KV_BLOCK + tl.arange(0, KV_BLOCK))[:, None]
        slot = tl.load(slots + token).to(tl.int64)
        page = slot // PAGE * page_stride
        line = kv_heads * PAGE + slot % PAGE
        inside = (kv_heads < KV_HEADS) & (slot >= 0)
        k_inside = inside
        if of_head is not None:
            k_inside = inside & of_head
        keys = states + (HEADS + kv_heads) * DIM
        target = k_pages + page + line * DIM
        _move(keys, target, low_at, high_at, k_inside, of_head, k_norm, eps, cos, sin, k_factor, DIM)
        value_columns = tl.arange(0, VALUE_BLOCK)[None, :]
        if VALUE_BLOCK > VALUE_HALF:
            inside = inside & (value_columns < VALUE_HALF)
        values = states + (HEADS + KV_HEADS) * DIM + kv_heads * VALUE_DIM
        target = v_pages + page + line * VALUE_DIM
        if DIM == VALUE_DIM:  # the same threads take the same features
            _move(values, target, low_at, high_at, inside, None, None, eps, None, None, v_factor, DIM)
        else:
            _move(
                values, target, value_columns, value_columns + VALUE_HALF, inside, None, None, eps, None, None,
                v_factor, VALUE_DIM,
            )  # fmt: skip


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

    qkv: [tokens, (heads + kv_heads) · dim + kv_heads · value_dim], queries, keys, values; both dims even; norms: of
    queries and of keys, each [dim], of qkv's type or float32; rotary: see `rotary_table`; turning: features of a head
    that turn, the first ones; None: all; positions, slots: [tokens] int32, a slot is page · block_size + offset, or -1
    for a token that is not written; q_out: [tokens, heads, dim]; k_pages: [pages, kv_heads, block_size, dim]; v_pages:
    the same of value_dim, pages of one stride, of the same type or of 8 bits; scales: of keys and of values.
    """
    tokens, heads, dim = q_out.shape
    kv_heads, page = k_pages.shape[1:3]
    value_dim = v_pages.shape[3]
    width = (heads + kv_heads) * dim + kv_heads * value_dim
    assert qkv.shape == (tokens, width) and qkv.stride(1) == 1, (qkv.shape, q_out.shape, v_pages.shape)
    assert dim % 2 == value_dim % 2 == 0, (dim, value_dim)
    assert q_out.is_contiguous() and rotary.is_contiguous() and rotary.shape[1] == dim, (rotary.shape, dim)
    if tokens == 0:
        return
    options = _options(heads, kv_heads, dim, value_dim, page, turning or dim)
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


def _options(heads: int, kv_heads: int, dim: int, value_dim: int, page: int, turning: int) -> dict[str, int]:
    """The compile-time options for these shapes."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "PAIRS": turning // 2,
        "PAGE": page,
        "Q_BLOCK": min(triton.next_power_of_2(heads), _MAX_HEADS),
        "KV_BLOCK": min(triton.next_power_of_2(kv_heads), _MAX_HEADS),
        "BLOCK": triton.next_power_of_2(dim // 2),
        "VALUE_BLOCK": triton.next_power_of_2(value_dim // 2),
        "num_warps": 4,
    }


def _variant(
    heads: int,
    kv_heads: int,
    *,
    normed: bool,
    fp8: bool = False,
    wide: bool = False,
    turning: int | None = None,
    dim: int = 128,
    value_dim: int | None = None,
) -> Variant:
    """wide: norms of float32. turning, value_dim: None: dim."""
    page, of_values = 64, value_dim or dim

    def launch(rows: int) -> None:
        slots, norm = shaped(rows, dtype=torch.int32), shaped(dim, dtype=torch.float32 if wide else torch.bfloat16)
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        k_pages, v_pages = pages_shaped(4, kv_heads, page, dim, of_values, dtype=dtype)
        norm_rotary_write(
            shaped(rows, (heads + kv_heads) * dim + kv_heads * of_values),
            (norm, norm) if normed else None,
            1e-6,
            shaped(1000, dim, dtype=torch.float32),
            slots,
            slots,
            shaped(rows, heads, dim),
            k_pages,
            v_pages,
            turning=turning,
        )

    stored = ("LDG.E.128", "F2FP.SATFINITE.E4M3") if fp8 else WIDE.sm_90
    plan = Plan(sm_80=WIDE.sm_80, sm_90=stored) if dim & (dim - 1) == 0 else Plan()
    return Variant(
        name=f"norm_rotary_write bf16 D{dim} {heads}/{kv_heads}"
        + " normed" * normed
        + " wide" * wide
        + " fp8 pages" * fp8
        + (f" {turning} turn" if turning else "")
        + (f" values of {value_dim}" if value_dim else ""),
        launch=launch,
        plans={"_norm_rotary_write": plan},
        architecture=89 if fp8 else 80,
    )


VARIANTS = (
    _variant(16, 8, normed=True),  # Qwen3-0.6B
    _variant(16, 8, normed=True, fp8=True),
    _variant(32, 8, normed=False),  # Llama-3.1-8B
    _variant(32, 8, normed=False, fp8=True),
    _variant(32, 16, normed=True, wide=True),  # Gemma 3 27B
    _variant(96, 8, normed=True, turning=64),  # GLM-4.5
    _variant(32, 32, normed=False, dim=80, turning=20),  # StableLM 3B
    _variant(32, 8, normed=False, dim=96),  # Phi 3
    _variant(64, 4, normed=False, dim=192, value_dim=128, turning=64),  # MiMo V2 Flash
    _variant(8, 1, normed=True, wide=True, dim=512, turning=128),  # Gemma 4
)
