"""Log-probabilities of the raw logits: of the sampled token and of the best tokens, best first.

The semantics are those of `engine/steps/logprobs.py`. There are two launches: `_scan_kernel` stores a block's mass and
its best tokens, and `_merge_kernel`, one program per row, merges them. Equal logits are ordered by id. Sums are taken
in a fixed order, so a row's values do not depend on the batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .order import REMOVED, from_ordinal, to_ordinal
from .variant import Plan, Variant, shaped

MAX_BEST = 20  # the most that a request may ask for
_BLOCK = 2048  # logits that one program scans
_LEAST = tl.constexpr(-9999.0)  # replaces -inf, which JSON cannot express


@dataclass(frozen=True, kw_only=True)
class LogprobsWorkspace:
    """Scratch memory between the launches, from `workspace_logprobs`."""

    block_most: Tensor  # [asking, blocks] float32, the greatest logit
    block_mass: Tensor  # [asking, blocks] float32, the sum of exp(logit - block_most), or NaN if any logit is NaN
    best: Tensor  # [asking, blocks, MAX_BEST] int32, ordinals of the best logits, or REMOVED
    best_ids: Tensor  # [asking, blocks, MAX_BEST] int32


def workspace_logprobs(*, max_asking: int, vocab_size: int, device: torch.device | str) -> LogprobsWorkspace:
    """For up to `max_asking` rows at a time."""
    shape = (max_asking, triton.cdiv(vocab_size, _BLOCK))
    return LogprobsWorkspace(
        block_most=torch.empty(shape, device=device),
        block_mass=torch.empty(shape, device=device),
        best=torch.empty((*shape, MAX_BEST), dtype=torch.int32, device=device),
        best_ids=torch.empty((*shape, MAX_BEST), dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["num_best"])
def _scan_kernel(
    logits,
    logits_stride,
    asking,
    block_most,
    block_mass,
    best,
    best_ids,
    vocab,
    num_best,
    BLOCK: tl.constexpr,
    MAX_BEST: tl.constexpr,
):
    at, block = tl.program_id(0), tl.program_id(1)
    pick = tl.load(asking + at)
    if pick < 0:
        return
    lane = tl.arange(0, BLOCK)
    tokens = block * BLOCK + lane
    x = tl.load(logits + pick.to(tl.int64) * logits_stride + tokens, mask=tokens < vocab, other=float("-inf"))
    any_nan = tl.max((x != x).to(tl.int32), axis=0)
    most = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    mass = tl.sum(tl.exp(x - tl.where(most > float("-inf"), most, 0.0)), axis=0)
    place = at * tl.num_programs(1) + block
    tl.store(block_most + place, most)
    tl.store(block_mass + place, tl.where(any_nan == 0, mass, float("nan")))
    ordinals = tl.where(tokens < vocab, to_ordinal(x), REMOVED)
    for i in range(num_best):
        greatest, index = tl.max(ordinals, axis=0, return_indices=True)
        tl.store(best + place * MAX_BEST + i, greatest)
        tl.store(best_ids + place * MAX_BEST + i, block * BLOCK + index)
        ordinals = tl.where(lane == index, REMOVED, ordinals)


@triton.jit
def _reported(logprob):
    return tl.where(logprob > float("-inf"), logprob, _LEAST)


@triton.jit(do_not_specialize=["num_best"])
def _merge_kernel(
    out_ids,
    out_values,
    out_stride,
    logits,
    logits_stride,
    asking,
    chosen,
    block_most,
    block_mass,
    best,
    best_ids,
    vocab,
    num_best,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BEST: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    at = tl.program_id(0)
    pick = tl.load(asking + at)
    if pick < 0:
        return
    num_blocks = tl.cdiv(vocab, BLOCK)
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    most = tl.load(block_most + at * num_blocks + blocks, mask=inside, other=float("-inf"))
    mass = tl.load(block_mass + at * num_blocks + blocks, mask=inside, other=0.0)
    greatest = tl.max(most, axis=0)
    log_total = tl.log(tl.sum(mass * tl.exp(most - greatest), axis=0))

    token = tl.load(chosen + pick)
    x = tl.load(logits + pick.to(tl.int64) * logits_stride + token, mask=token >= 0, other=float("-inf"))
    tl.store(out_ids + at * out_stride, token)
    tl.store(out_values + at * out_stride, _reported(x - greatest - log_total))

    lane = tl.arange(0, CANDIDATES)
    kept = (lane < num_blocks * MAX_BEST) & (lane % MAX_BEST < num_best)
    ordinals = tl.load(best + at * num_blocks * MAX_BEST + lane, mask=kept, other=REMOVED)
    ids = tl.load(best_ids + at * num_blocks * MAX_BEST + lane, mask=kept, other=0)
    for i in range(num_best):
        ordinal, index = tl.max(ordinals, axis=0, return_indices=True)
        tl.store(out_ids + at * out_stride + 1 + i, tl.sum(tl.where(lane == index, ids, 0), axis=0))
        tl.store(out_values + at * out_stride + 1 + i, _reported(from_ordinal(ordinal) - greatest - log_total))
        ordinals = tl.where(lane == index, REMOVED, ordinals)


def logprobs(
    out_ids: Tensor,
    out_values: Tensor,
    logits: Tensor,
    asking: Tensor,
    chosen: Tensor,
    workspace: LogprobsWorkspace,
    *,
    num_best: int,
) -> None:
    """For each row of logits that asks: the log-probability of its chosen token, then those of the `num_best` best.

    out_ids: [asking, ≥ 1 + num_best] int32; out_values: the same, float32, -9999 for -inf and for logits that are not
    finite. logits: [picked, vocab] float32, rows of any stride. asking: [asking] int32, rows of logits; -1: none, and
    its output is not written. chosen: [picked] int32, a token of each row of logits; -1: its value is -9999.
    """
    (num_asking,), vocab = asking.shape, logits.shape[1]
    blocks = triton.cdiv(vocab, _BLOCK)
    assert 0 <= num_best <= min(MAX_BEST, vocab), (num_best, vocab)
    assert out_ids.stride() == out_values.stride() and out_ids.shape[1] > num_best, (out_ids.shape, num_best)
    assert logits.stride(1) == 1 and workspace.block_most.shape[1] == blocks, (logits.shape, workspace.block_most.shape)
    assert num_asking <= workspace.block_most.shape[0], num_asking
    if num_asking == 0:
        return
    partial = (workspace.block_most, workspace.block_mass, workspace.best, workspace.best_ids)
    sizes = {"BLOCK": _BLOCK, "MAX_BEST": MAX_BEST, "num_warps": 4}
    _scan_kernel[(num_asking, blocks)](logits, logits.stride(0), asking, *partial, vocab, num_best, **sizes)
    _merge_kernel[(num_asking,)](
        out_ids,
        out_values,
        out_ids.stride(0),
        logits,
        logits.stride(0),
        asking,
        chosen,
        *partial,
        vocab,
        num_best,
        **_merge_options(vocab),
        **sizes,
    )


def _merge_options(vocab: int) -> dict[str, int]:
    blocks = triton.cdiv(vocab, _BLOCK)
    return {"BLOCKS": triton.next_power_of_2(blocks), "CANDIDATES": triton.next_power_of_2(blocks * MAX_BEST)}


def _variant(vocab: int) -> Variant:
    def launch(rows: int) -> None:
        out_ids, out_values = (shaped(rows, 1 + MAX_BEST, dtype=of) for of in (torch.int32, torch.float32))
        logits, asking = shaped(rows, vocab, dtype=torch.float32), shaped(rows, dtype=torch.int32)
        workspace = workspace_logprobs(max_asking=rows, vocab_size=vocab, device="meta")
        logprobs(out_ids, out_values, logits, asking, asking, workspace, num_best=min(rows, MAX_BEST))

    scan = Plan(sm_80=("LDG.E.128",), sm_90=("LDG.E.128",))
    return Variant(name=f"logprobs {vocab}", launch=launch, plans={"_scan_kernel": scan, "_merge_kernel": Plan()})


# The vocabularies of Qwen3 and Llama-3.
VARIANTS = tuple(_variant(vocab) for vocab in (151936, 128256))
