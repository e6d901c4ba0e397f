"""Turns a plan into the input tensors of one forward pass.

Decode rows (one token) come first, in ascending order of context; rows with more tokens follow in the plan's order.
`order` maps this step order to the plan's rows. A row with draft tokens has several tokens and samples after each.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.messages import StepPlan
from ...kernels.states import StateRows
from ..attention.base import AttentionStep
from ..attention.kv_cache import KvCache
from .draft_states import DraftStates
from .rows import Rows


@dataclass(frozen=True)
class Samples:
    """The tokens that a step samples, row after row in step order. All are [samples] int64."""

    rows: NDArray[np.int64]
    ends: NDArray[np.int64]  # the position of the sampled token
    tokens: NDArray[np.int64]  # index of the step's token before that position, whose logits are used
    order: NDArray[np.int64]  # index of the row into the plan's rows


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One forward pass over `tokens` tokens of `rows` rows, on the device."""

    order: NDArray[np.int64]  # [rows] step order → index into the plan's rows
    rows: NDArray[np.int64]  # [rows] in step order
    starts: NDArray[np.int64]  # [rows] first position each row computes
    counts: NDArray[np.int64]  # [rows] positions each row computes
    sampled: "Samples"
    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    regimes: Tensor | None  # [tokens] int64; None: all are 0
    fresh_pages: Tensor | None  # [n] int64: pages that this step begins and leaves partly empty
    attention: AttentionStep


def step_inputs(
    plan: StepPlan,
    rows: Rows,
    draft_tokens: NDArray[np.int64],
    *,
    cache: KvCache,
    draft_states: DraftStates | None = None,
) -> StepInputs:
    """Changes no row. draft_tokens: [speculative rows] number of draft tokens that stand after each one's ids.
    draft_states: of models with states, if there are draft tokens."""
    block_size, device = cache.block_size, cache.device
    planned = np.frombuffer(plan.rows, "<i4").astype(np.int64)
    counts = np.frombuffer(plan.counts, "<i4").astype(np.int64)
    samples = np.frombuffer(plan.sample, np.uint8).astype(np.int64)
    starts = rows.num_computed[planned]
    counts[: len(draft_tokens)] += draft_tokens
    samples[: len(draft_tokens)] += draft_tokens
    num_ids = rows.num_ids[planned]
    num_ids[: len(draft_tokens)] += draft_tokens

    order = np.argsort(np.where(counts == 1, starts, np.iinfo(np.int64).max), kind="stable")
    planned, counts, starts = planned[order], counts[order], starts[order]
    ends = starts + counts
    assert (ends <= num_ids[order]).all(), f"step {plan.step} computes positions whose ids are not known"
    assert (ends <= rows.num_positions(planned)).all(), f"step {plan.step} computes positions without a block"

    bounds = np.cumsum(counts)
    row_of_token = np.repeat(planned, counts)
    positions = np.arange(bounds[-1]) + np.repeat(starts - (bounds - counts), counts)
    slots = rows.tables[:, row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size

    # A page that this step begins and does not fill still holds the values of its previous owner.
    partly = (ends % block_size != 0) & (ends - ends % block_size >= starts)
    begun = rows.tables[:, planned[partly], ends[partly] // block_size]
    fresh = begun.astype(np.int64).flatten()
    regimes = rows.regime[row_of_token]
    return StepInputs(
        order=order,
        rows=planned,
        starts=starts,
        counts=counts,
        sampled=samples_of(planned, ends, bounds, order, samples[order]),
        ids=torch.from_numpy(rows.ids[row_of_token, positions].astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        regimes=torch.from_numpy(regimes).to(device) if regimes.any() else None,
        fresh_pages=torch.from_numpy(fresh).to(device) if len(fresh) else None,
        attention=AttentionStep(
            num_decode=int(np.count_nonzero(counts == 1)),
            context_lens=ends,
            query_lens=counts,
            tables=rows.tables[:, planned, : -(-int(ends.max()) // block_size)],
            slots=torch.from_numpy(np.ascontiguousarray(slots)).to(device),
            order=order,
            states=states_of(plan, rows, planned, starts, counts, cache.storage, draft_states)
            if rows.has_states
            else None,
            extension=plan.extension,
            cross=_cross_of(rows, row_of_token) if rows.has_cross else None,
        ),
    )


def _cross_of(rows: Rows, row_of_token: NDArray[np.int64]) -> AttentionStep:
    """Attention of each token to the encoder's result of its row."""
    lengths = rows.num_encoded[row_of_token]
    own = rows.cross[:, row_of_token, : -(-int(lengths.max()) // rows.block_size)]
    others = np.zeros((len(rows.tables), *own.shape[1:]), np.int32)
    return AttentionStep(
        num_decode=len(row_of_token),
        context_lens=lengths,
        query_lens=np.ones_like(lengths),
        tables=np.concatenate((others, own)),
        slots=torch.zeros((0, len(row_of_token)), dtype=torch.int64),
        order=np.arange(len(row_of_token)),
    )


def states_of(
    plan: StepPlan,
    rows: Rows,
    planned: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    memory: Tensor,
    drafts: DraftStates | None,
) -> StateRows:
    """The pages of the states of `planned` rows, which begin at `starts`. memory: the cache's."""
    num_pages = rows.state_written.shape[1]
    keep_pages = np.frombuffer(plan.keep_pages, "<i4").reshape(-1, num_pages)
    kept, positions = (np.frombuffer(column, "<i4") for column in (plan.keep_rows, plan.keep_positions))
    if drafts is not None:
        kept, positions = np.append(kept, drafts.keep_rows), np.append(positions, drafts.keep_positions)
        keep_pages = np.concatenate((keep_pages, drafts.pages))
    place = {row: i for i, row in enumerate(planned.tolist())} if len(kept) else {}
    keep_rows = np.array([place[row] for row in kept.tolist()], np.int64)
    keep_counts = positions.astype(np.int64) - starts[keep_rows]
    assert ((keep_counts > 0) & (keep_counts <= counts[keep_rows])).all(), f"step {plan.step} keeps states of no pass"
    by_row = np.lexsort((keep_counts, keep_rows))
    return StateRows(
        memory=memory,
        counts=torch.from_numpy(counts),
        read=torch.from_numpy(rows.state_read[planned]),
        written=torch.from_numpy(rows.state_written[planned]),
        keep_rows=torch.from_numpy(keep_rows[by_row]),
        keep_counts=torch.from_numpy(keep_counts[by_row]),
        keep_pages=torch.from_numpy(keep_pages[by_row]),
    )


def samples_of(
    rows: NDArray[np.int64],
    ends: NDArray[np.int64],
    bounds: NDArray[np.int64],
    order: NDArray[np.int64],
    nums: NDArray[np.int64],
) -> Samples:
    """The `nums` last positions of each row are sampled. bounds: where the row's tokens end. All are [rows]."""
    places = np.flatnonzero(nums)
    last = bounds - 1
    if len(places) == nums.sum():
        return Samples(rows[places], ends[places], last[places], order[places])
    places = np.repeat(np.arange(len(nums)), nums)
    back = np.cumsum(nums)[places] - 1 - np.arange(len(places))  # samples of the row after this one
    return Samples(rows[places], ends[places] - back, last[places] - back, order[places])
