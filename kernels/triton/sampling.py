"""Samples the next token of each row, without synchronising with the host.

The semantics and the noise (`noise.py`) are those of `engine/steps/sampler.py`: temperature divides the logits, min_p,
top_k and top_p filter the tokens, and the token with the greatest logit + noise is sampled. `edit_logits.py` runs
before, for the rows that need it.

There are two launches. `_scan_kernel` reads a block of a row's logits and stores its maximum and its best token with
noise. `_pick_kernel`, one program per row, takes the best of all blocks. A row with filters is sampled there instead.
It needs the least logit that may be sampled, which is the least value above which there are fewer than k logits, or
less than p of the probability mass. This value is found by bisection over values, not by sorting. The maxima of groups
of logits bound the search: k groups have at least k logits as great as the k-th greatest maximum, so nothing below it
is needed. No sum depends on other rows or on the order of arrival, so a row's token does not depend on the batch.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import exponential, noise_key
from .order import from_ordinal, to_ordinal
from .variant import FEW_BYTES, Plan, Variant, shaped

Kind = Literal["greedy", "sampled", "filtered"]
"""The most that any row of a batch needs: no noise; noise; noise and top_k, top_p or min_p."""

_GREEDY, _FILTERED = tl.constexpr(0), tl.constexpr(2)
_KINDS: dict[Kind, int] = {"greedy": 0, "sampled": 1, "filtered": 2}
_BLOCK = 2048  # logits that one program scans
_GROUP = 256  # logits that share one maximum; divides _BLOCK
_TILE = 1024  # candidates that are read at a time
_PICK_WARPS: dict[Kind, int] = {"greedy": 1, "sampled": 1, "filtered": 8}
_COLDEST = tl.constexpr(1e-5)  # temperatures below count as this one: float32 could not tell them apart
_PIVOTS = tl.constexpr(8)  # parts into which a search step divides its interval
_PIVOTS_LOG2 = tl.constexpr(3)
_FIRST_CUT = tl.constexpr(-8.0)  # below the greatest logit: the first bound of candidates without one; then doubled
_LAST_CUT = tl.constexpr(-20.0)  # below it all tokens become candidates


@dataclass(frozen=True, kw_only=True)
class SamplingColumns:
    """The sampling parameters of each row. The host writes a row when a request takes it."""

    temperature: Tensor  # [rows] float32; 0: greedy
    top_k: Tensor  # [rows] int32; 0: off
    top_p: Tensor  # [rows] float32; 1: off
    min_p: Tensor  # [rows] float32; 0: off
    seed: Tensor  # [rows] int64


@dataclass(frozen=True, kw_only=True)
class SamplingWorkspace:
    """Scratch memory between the launches, from `workspace_sampling`. It holds nothing from one `sample` to the
    next."""

    block_most: Tensor  # [picked, blocks] float32, the greatest logit, or NaN if any logit is NaN
    block_token: Tensor  # [picked, blocks] int32, the best token
    block_logit: Tensor  # [picked, blocks] float32, its logit; not of greedy rows
    block_mass: Tensor  # [picked, blocks] float32, the sum of exp((logit - block_most) / temperature)
    group_most: Tensor  # [picked, groups] float32
    groups: Tensor  # [picked, groups] int32, the groups that have candidates
    candidates: Tensor  # [picked, vocab] int32, tokens


def workspace_sampling(*, max_picked: int, vocab_size: int, device: torch.device | str) -> SamplingWorkspace:
    """For up to `max_picked` rows a step. Nearly all of it is for the candidates, 4 bytes a logit."""
    blocks = triton.cdiv(vocab_size, _BLOCK)
    groups = blocks * (_BLOCK // _GROUP)

    def buffer(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((max_picked, width), dtype=dtype, device=device)

    return SamplingWorkspace(
        block_most=buffer(blocks, torch.float32),
        block_token=buffer(blocks, torch.int32),
        block_logit=buffer(blocks, torch.float32),
        block_mass=buffer(blocks, torch.float32),
        group_most=buffer(groups, torch.float32),
        groups=buffer(groups, torch.int32),
        candidates=buffer(vocab_size, torch.int32),
    )


@triton.jit
def _source(logits, logits_stride, edited, edited_stride, places, pick):
    """A pointer to the row's edited logits, or to the raw ones if it has no edit."""
    place = tl.load(places + pick)
    raw = logits + pick.to(tl.int64) * logits_stride
    return tl.where(place >= 0, edited + place.to(tl.int64) * edited_stride, raw)


@triton.jit
def _scaled(x, greatest, temperature):
    """The logits over the temperature, with the row's greatest at 0. greatest: finite; if the row's logits are not, any
    finite number."""
    return tl.div_rn(x - greatest, temperature)


@triton.jit
def _finite_or_0(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _filters(top_k, top_p, min_p, vocab):
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _scan_kernel(
    logits,
    logits_stride,
    edited,
    edited_stride,
    places,
    picked,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    block_most,
    block_token,
    block_logit,
    block_mass,
    group_most,
    vocab,
    first_token,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """vocab: logits of a row, of which the first is that of `first_token`."""
    pick, block = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    source = _source(logits, logits_stride, edited, edited_stride, places, pick)
    x = tl.load(source + tokens, mask=tokens < vocab, other=float("-inf"))
    any_nan = tl.max((x != x).to(tl.int32), axis=0)
    x = tl.where(x == x, x, float("-inf"))
    most, best = tl.max(x, axis=0, return_indices=True)
    at = pick * tl.num_programs(1) + block
    tl.store(block_most + at, tl.where(any_nan == 0, most, float("nan")))
    if KIND != _GREEDY:
        row = tl.load(picked + pick)
        heat = tl.load(temperature + row)
        if heat > 0:
            # Relative to the block's maximum, which gives the same choice within the block as the row's maximum.
            scaled = _scaled(x, _finite_or_0(most), tl.maximum(heat, _COLDEST))
            filtered = False
            if KIND == _FILTERED:
                filtered = _filters(tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), vocab)
            if filtered:
                GROUPS: tl.constexpr = BLOCK // GROUP
                maxima = tl.max(tl.reshape(x, (GROUPS, GROUP)), axis=1)
                tl.store(group_most + at * GROUPS + tl.arange(0, GROUPS), maxima)
                tl.store(block_mass + at, tl.sum(tl.exp(scaled), axis=0))
            else:
                key = noise_key(tl.load(seed + row), tl.load(positions + pick))
                best = tl.argmax(scaled - tl.log(exponential(key, first_token + tokens)), axis=0)
        tl.store(block_logit + at, tl.sum(tl.where(tl.arange(0, BLOCK) == best, x, 0.0), axis=0))
    tl.store(block_token + at, first_token + block * BLOCK + best)


@triton.jit
def _least_kept(
    values,
    index,
    num,
    greatest,
    heat,
    lowest,
    limit,
    INDEXED: tl.constexpr,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The least scaled logit, at least `lowest`, that has less than `limit` above it: a number of logits, or if BY_MASS
    the sum of their exp.

    Searches `num` logits that include the greatest: values[i] or, if INDEXED, values[index[i]]. All sums of a step are
    taken in the same order, so they never grow with the pivot, and the result is one of the logits, or `lowest`.
    """
    low = to_ordinal(lowest).to(tl.int64) - 1
    high = tl.zeros((), tl.int64)  # the ordinal of the greatest, which is always kept
    parts = tl.arange(0, _PIVOTS) + 1
    while high - low > 1:
        span = high - low
        pivots = (low + (span * parts >> _PIVOTS_LOG2)).to(tl.int32)
        above = tl.zeros((_PIVOTS,), tl.float32)
        for first in range(0, num, TILE):
            i = first + tl.arange(0, TILE)
            inside = i < num
            if INDEXED:
                i = tl.load(index + i, mask=inside, other=0)
            value = _scaled(tl.load(values + i, mask=inside, other=float("-inf")), greatest, heat)
            weight = tl.where(inside, tl.exp(value) if BY_MASS else 1.0, 0.0)
            is_above = to_ordinal(value)[:, None] > pivots[None, :]
            above += tl.sum(tl.where(is_above, weight[:, None], 0.0), axis=0)
        passed = tl.sum((above >= limit).to(tl.int64), axis=0)  # a prefix of the pivots, never all of them
        high = low + (span * (passed + 1) >> _PIVOTS_LOG2)
        low = low + (span * passed >> _PIVOTS_LOG2)
    return from_ordinal(high.to(tl.int32))


@triton.jit
def _list_candidates(
    source,
    group_most,
    groups,
    candidates,
    greatest,
    heat,
    cut,
    num_groups,
    vocab,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Lists the tokens whose scaled logits are at least `cut`, in order of their ids. Returns their number and mass."""
    lane = tl.arange(0, TILE)
    num_listed = 0
    for first in range(0, num_groups, TILE):
        group = first + lane
        most = tl.load(group_most + group, mask=group < num_groups, other=float("-inf"))
        listed = (group < num_groups) & (_scaled(most, greatest, heat) >= cut)
        place = num_listed + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        tl.store(groups + place, group, mask=listed)
        num_listed += tl.sum(listed.to(tl.int32), axis=0)
    tl.debug_barrier()  # threads load what other threads stored
    num = 0
    mass = 0.0
    for first in range(0, num_listed * GROUP, TILE):
        i = first + lane
        inside = i < num_listed * GROUP
        token = tl.load(groups + i // GROUP, mask=inside, other=0) * GROUP + i % GROUP
        inside = inside & (token < vocab)
        value = _scaled(tl.load(source + token, mask=inside, other=float("-inf")), greatest, heat)
        kept = inside & (value >= cut)
        place = num + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(candidates + place, token, mask=kept)
        num += tl.sum(kept.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(kept, tl.exp(value), 0.0), axis=0)
    tl.debug_barrier()
    return num, mass


@triton.jit
def _mass_from(source, candidates, num, greatest, heat, floor, TILE: tl.constexpr):
    """The sum of exp over the candidates whose scaled logits are at least `floor`."""
    mass = 0.0
    for first in range(0, num, TILE):
        i = first + tl.arange(0, TILE)
        token = tl.load(candidates + i, mask=i < num, other=0)
        value = _scaled(tl.load(source + token, mask=i < num, other=float("-inf")), greatest, heat)
        mass += tl.sum(tl.where(value >= floor, tl.exp(value), 0.0), axis=0)
    return mass


@triton.jit
def _sample_filtered(
    source,
    group_most,
    groups,
    candidates,
    greatest,
    heat,
    row_mass,
    k,
    p,
    min_p,
    key,
    num_groups,
    vocab,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The sampled token of a row whose greatest logit is finite. row_mass: the sum of exp over all its tokens."""
    has_k = (k > 0) & (k < vocab)
    limit = k.to(tl.float32)
    # No token below `bound` is sampled. min_p 0 gives -inf.
    bound = tl.log(min_p)
    if has_k & (k <= num_groups):
        bound = _least_kept(group_most, groups, num_groups, greatest, heat, bound, limit, False, False, TILE)

    cut = tl.where(bound > float("-inf"), bound, _FIRST_CUT)
    num = 0
    mass = 0.0
    short = bound <= 0.0
    while short:
        num, mass = _list_candidates(
            source, group_most, groups, candidates, greatest, heat, cut, num_groups, vocab, GROUP, TILE
        )
        short = (cut > bound) & tl.where(has_k, num < k, mass < p * row_mass)
        cut = tl.where(short, tl.where(cut > _LAST_CUT, 2 * cut, float("-inf")), cut)

    floor = cut
    if has_k:
        floor = _least_kept(source, candidates, num, greatest, heat, cut, limit, True, False, TILE)
    if p < 1.0:
        total = row_mass
        if has_k | (min_p > 0.0):
            total = _mass_from(source, candidates, num, greatest, heat, floor, TILE)
        floor = _least_kept(source, candidates, num, greatest, heat, floor, p * total, True, True, TILE)

    lane = tl.arange(0, TILE)
    best = float("-inf")
    chosen = 0
    for first in range(0, num, TILE):
        inside = first + lane < num
        token = tl.load(candidates + first + lane, mask=inside, other=0)
        value = _scaled(tl.load(source + token, mask=inside, other=float("-inf")), greatest, heat)
        score = tl.where(value >= floor, value - tl.log(exponential(key, token)), float("-inf"))
        most, place = tl.max(score, axis=0, return_indices=True)
        here = tl.sum(tl.where(lane == place, token, 0), axis=0)
        chosen = tl.where(most > best, here, chosen)
        best = tl.maximum(most, best)
    return chosen


# Vectorised loads of the groups' maxima in `_least_kept` would take so many registers that some spill.
@triton.jit(do_not_specialize_on_alignment=["group_most"])
def _pick_kernel(
    out,
    logits,
    logits_stride,
    edited,
    edited_stride,
    places,
    picked,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    block_most,
    block_token,
    block_logit,
    block_mass,
    group_most,
    groups,
    candidates,
    vocab,
    num_blocks,
    KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    pick = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    at = pick * num_blocks + blocks
    most = tl.load(block_most + at, mask=blocks < num_blocks, other=float("-inf"))
    tokens = tl.load(block_token + at, mask=blocks < num_blocks, other=0)
    any_nan = tl.max((most != most).to(tl.int32), axis=0)
    most = tl.where(most == most, most, float("-inf"))
    greatest = tl.max(most, axis=0)
    finite = (tl.abs(greatest) < float("inf")) & (any_nan == 0)
    scores = most
    if KIND != _GREEDY:
        row = tl.load(picked + pick)
        heat = tl.load(temperature + row)
        key = noise_key(tl.load(seed + row), tl.load(positions + pick))
        if heat > 0:
            x = tl.load(block_logit + at, mask=blocks < num_blocks, other=float("-inf"))
            scaled = _scaled(x, _finite_or_0(greatest), tl.maximum(heat, _COLDEST))
            scores = scaled - tl.log(exponential(key, tokens))
    chosen = tl.sum(tl.where(blocks == tl.argmax(scores, axis=0), tokens, 0), axis=0)
    if KIND == _FILTERED:
        k, p, least_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        if finite & (heat > 0) & _filters(k, p, least_p, vocab):
            heat = tl.maximum(heat, _COLDEST)
            masses = tl.load(block_mass + at, mask=blocks < num_blocks, other=0.0)
            GROUPS: tl.constexpr = BLOCK // GROUP
            source = _source(logits, logits_stride, edited, edited_stride, places, pick)
            first_group = pick * num_blocks * GROUPS
            chosen = _sample_filtered(
                source,
                group_most + first_group,
                groups + first_group,
                candidates + pick.to(tl.int64) * vocab,
                greatest,
                heat,
                tl.sum(masses * tl.exp(_scaled(most, greatest, heat)), axis=0),
                k,
                p,
                least_p,
                key,
                num_blocks * GROUPS,
                vocab,
                GROUP,
                TILE,
            )
    tl.store(out + pick, tl.where(finite, chosen, -1))


def sample(
    out: Tensor,
    logits: Tensor,
    edited: Tensor,
    places: Tensor,
    picked: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    workspace: SamplingWorkspace,
    *,
    kind: Kind,
) -> None:
    """One id for each of the rows `picked`; -1 where logits are not finite. A row may be picked for several positions.

    out: [picked] int32. logits: [picked, vocab] float32, left unchanged; edited: [places, vocab] float32, used instead
    by the rows that have a place in it (places: [picked] int32, -1: none). Rows of both may have any stride.
    picked: [picked] int32, rows of `columns`. positions: [picked] int32, output positions, from 0.
    kind: the most that any row needs; a row that needs less is still sampled as it asks.
    """
    num_picked, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    assert logits.stride(1) == edited.stride(1) == 1, (logits.stride(), edited.stride())
    assert workspace.candidates.shape[1] == vocab and num_picked <= workspace.candidates.shape[0], logits.shape
    if num_picked == 0:
        return
    rows = (logits, logits.stride(0), edited, edited.stride(0), places, picked, positions)
    found = (workspace.block_most, workspace.block_token, workspace.block_logit)
    how, partial = _parameters(columns), (*found, workspace.block_mass, workspace.group_most)
    sizes = {"KIND": _KINDS[kind], "BLOCK": _BLOCK, "GROUP": _GROUP}
    _scan_kernel[(num_picked, blocks)](*rows, *how, *partial, vocab, 0, **sizes, num_warps=4)
    _pick_kernel[(num_picked,)](
        out,
        *rows,
        *how,
        *partial,
        workspace.groups,
        workspace.candidates,
        vocab,
        blocks,
        BLOCKS=triton.next_power_of_2(blocks),
        TILE=_TILE,
        **sizes,
        num_warps=_PICK_WARPS[kind],
    )


def best_of_part(
    logits: Tensor,
    places: Tensor,
    picked: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    *,
    first_token: int,
    largest_part: int,
    kind: Kind,
) -> Tensor:
    """What `sample_of_parts` needs of a rank's part of the vocabulary, a few thousandths of the logits: float32 [3,
    picked, blocks].

    logits: [picked, part] float32, of the tokens from `first_token` on; places: -1 for each row, which has no edits;
    largest_part: of any rank; kind: not filtered. The rest as in `sample`.
    """
    num_picked, part = logits.shape
    blocks = triton.cdiv(largest_part, _BLOCK)
    assert kind != "filtered" and part <= largest_part and logits.stride(1) == 1, (kind, logits.shape)
    found = torch.empty((3, num_picked, blocks), dtype=torch.float32, device=logits.device)
    if num_picked:
        most, tokens, values = found[0], found[1].view(torch.int32), found[2]
        rows = (logits, logits.stride(0), logits, logits.stride(0), places, picked, positions)
        _scan_kernel[(num_picked, blocks)](
            *rows, *_parameters(columns), most, tokens, values, None, None, part, first_token, KIND=_KINDS[kind],
            BLOCK=_BLOCK, GROUP=_GROUP, num_warps=4,
        )  # fmt: skip
    return found


def sample_of_parts(
    out: Tensor, parts: Tensor, picked: Tensor, positions: Tensor, columns: SamplingColumns, *, kind: Kind
) -> None:
    """`sample`, with the results of `best_of_part` of all ranks: [ranks, 3, picked, blocks]."""
    ranks, _, num_picked, blocks = parts.shape
    if num_picked == 0:
        return
    most, tokens, values = parts.permute(1, 2, 0, 3).reshape(3, num_picked, ranks * blocks).contiguous()
    _pick_kernel[(num_picked,)](
        out, None, 0, None, 0, None, picked, positions, *_parameters(columns), most, tokens.view(torch.int32), values,
        None, None, None, None, 0, ranks * blocks, BLOCKS=triton.next_power_of_2(ranks * blocks), TILE=_TILE,
        KIND=_KINDS[kind], BLOCK=_BLOCK, GROUP=_GROUP, num_warps=_PICK_WARPS[kind],
    )  # fmt: skip


def _parameters(columns: SamplingColumns) -> tuple[Tensor, ...]:
    return columns.temperature, columns.top_k, columns.top_p, columns.min_p, columns.seed


def _variant(kind: Kind, vocab: int) -> Variant:
    def launch(rows: int) -> None:
        logits, picked = shaped(rows, vocab, dtype=torch.float32), shaped(rows, dtype=torch.int32)
        numbers, integers = shaped(256, dtype=torch.float32), shaped(256, dtype=torch.int32)
        columns = SamplingColumns(
            temperature=numbers, top_k=integers, top_p=numbers, min_p=numbers, seed=shaped(256, dtype=torch.int64)
        )
        workspace = workspace_sampling(max_picked=rows, vocab_size=vocab, device="meta")
        sample(picked, logits, logits, picked, picked, picked, columns, workspace, kind=kind)

    scan = Plan(sm_80=("LDG.E.128",), sm_90=("LDG.E.128",))
    pick = Plan(stack=FEW_BYTES)
    return Variant(name=f"sampling {kind} {vocab}", launch=launch, plans={"_scan_kernel": scan, "_pick_kernel": pick})


# The vocabularies of Qwen3 and Llama-3.
VARIANTS = tuple(_variant(kind, vocab) for kind in _KINDS for vocab in (151936, 128256))
