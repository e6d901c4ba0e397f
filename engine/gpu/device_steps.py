"""Steps on a device that runs ahead of the host: a plan is launched while the previous one still runs.

The host knows how long each row will be; only the device knows the ids that the last step sampled. So a launch writes a
packet, sends it, starts the work recorded for a step of this size, and returns. The sampled ids are copied to the host
while later steps run. Only draft tokens need the rows' ids on the host: a step with draft tokens waits for all earlier
steps.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config.config import EngineConfig
from ...ipc.messages import RowLogprobs, StepPlan, StepResult
from ...kernels.states import StateRows
from ...kernels.triton.extend_attention import extend_work, max_tiles, tile_tokens
from ...kernels.triton.logprobs import MAX_BEST
from ...kernels.triton.prepare_step import fill_packet
from ...kernels.triton.scans import fill_states
from ..attention.kv_cache import KvCache, KvShape
from ..device.queue import Mark, Queue, Work
from ..steps.draft_states import DraftStates, within
from ..steps.logprobs import prompt_logprobs, row_logprobs
from ..steps.ngram import draft
from ..steps.pooling import RowPooler
from ..steps.rows import Rows
from ..steps.sampled import Sampled, take_in
from ..steps.step_inputs import Samples, samples_of, states_of
from .decoder import DRAFT_ROWS, INVARIANT_ROWS, PROMPT_ROWS, TritonDecoder
from .packet import HostPacket, Limits, Packet, size_of
from .recordings import Recordings
from .shapes import SampleShape, StepShape, at_least, decode_sizes, mixed_sizes
from .state import KINDS, RowState, has_penalties, write_opens

_MAX_PART = 256  # tokens sampled at once: each takes 4 bytes of logits per vocabulary entry
_COPY_BYTES = 64 << 20  # of pages copied at once, which takes as much memory besides


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """A model that runs on the Triton kernels, with all its memory but the KV cache."""

    decoder: TritonDecoder
    state: RowState
    limits: Limits
    queue: Queue
    kv_shape: KvShape
    weights: int  # bytes
    workspace: int  # bytes: buffers already allocated, and the estimate for a step
    graphs: int  # bytes that recorded steps may take
    note: str  # for the operator
    head_major = True

    def steps(self, config: EngineConfig, cache: KvCache) -> "DeviceSteps":
        return DeviceSteps(config=config, model=self, cache=cache)


@dataclass
class _Slot:
    """An entry of the ring: the pinned memory that one step sends and fetches."""

    packet: HostPacket
    ids: Tensor  # [samples] int32
    best_ids: Tensor  # [samples, 1 + MAX_BEST] int32
    best_values: Tensor  # the same shape, float32
    masks: Tensor | None = None  # [rows, ⌈vocab / 32⌉] int32, allocated for the first step with masks
    copies: Tensor | None = None  # [2 · pages] int64: of the last copy of pages


@dataclass(kw_only=True)
class _Pending:
    """A launched step whose result was not collected."""

    plan: StepPlan
    slot: _Slot
    begun: Mark
    done: Mark
    samples: Samples
    num_opens: NDArray[np.int64]  # [samples] how often each one's row had been opened
    num_logprobs: NDArray[np.int64]  # [samples] best tokens asked for; -1: no log-probabilities
    draft_tokens: NDArray[np.int64]
    draft_states: DraftStates | None  # of a model with recurrent layers, if there are draft tokens
    prompt_logprobs: dict[int, RowLogprobs]
    vectors: dict[int, bytes]
    sampled: Sampled | None = None  # set once the host has read the ids


def limits_of(config: EngineConfig, *, group: int, draft_tokens: int, tables: int = 1, state_pages: int = 0) -> Limits:
    """The largest step that the core may plan. group: query heads per kv head; draft_tokens: the most per row; tables:
    of a row; state_pages: of a row's recurrent state."""
    rows = config.max_num_seqs
    tokens = max(config.max_num_batched_tokens, rows)
    part = min(rows, _MAX_PART)
    tiles = max(max_tiles(tokens, rows, tile_tokens(group, tile_rows)) for tile_rows in (DRAFT_ROWS, PROMPT_ROWS))
    return Limits(
        rows=rows,
        tokens=tokens,
        samples=-(-min(rows * (1 + draft_tokens), tokens) // part) * part,
        part=part,
        tiles=tiles,
        blocks=-(-(config.max_model_len + 1) // config.block_size),
        tables=tables,
        state_pages=state_pages,
    )


def num_draft_tokens(config: EngineConfig) -> int:
    """The most draft tokens of a row in a step."""
    return 0 if config.speculative is None else config.block_size - 1  # the planner's limit


def num_graphs(limits: Limits) -> int:
    """About how many graphs will be recorded in the end."""
    return len(_planned(limits, is_deterministic=False))


def _planned(limits: Limits, *, is_deterministic: bool) -> list[Hashable]:
    """Shapes to record, largest first, because smaller graphs then reuse the pool's memory. Decode steps come before
    steps with prompts, which are rarer."""
    decode, prompt = (INVARIANT_ROWS, INVARIANT_ROWS) if is_deterministic else (0, PROMPT_ROWS)
    shapes: list[Hashable] = [StepShape(size, decode) for size in reversed(decode_sizes(limits.rows))]
    for size in reversed(decode_sizes(limits.part)):
        shapes += [(0, SampleShape(size, kind, False, False)) for kind in range(len(KINDS))]
    return shapes + [StepShape(size, prompt) for size in reversed(mixed_sizes(limits.tokens))]


class DeviceSteps:
    """`Steps` on a device. One thread."""

    def __init__(self, *, config: EngineConfig, model: DeviceModel, cache: KvCache) -> None:
        self._config = config
        self._vocab_size = config.model.vocab_size
        self._decoder, self._state = model.decoder, model.state
        self._queue, self._limits = model.queue, model.limits
        limits, queue = model.limits, model.queue
        self._cache = cache
        self._decoder.open(cache)
        self._rows = Rows(
            num_rows=limits.rows,
            max_len=config.max_model_len,
            block_size=config.block_size,
            vocab_size=self._vocab_size,
            groups=cache.groups,
        )
        assert limits.state_pages == cache.groups.state_pages, (limits, cache.groups)
        self._pooler = RowPooler(num_rows=limits.rows)
        self._num_sent: NDArray[np.int64] = np.zeros(limits.rows, np.int64)  # blocks in the device's tables
        self._num_opens: NDArray[np.int64] = np.zeros(limits.rows, np.int64)
        self._has_penalties: NDArray[np.bool_] = np.zeros(limits.rows, np.bool_)
        self._part = limits.part
        self._decode_sizes = decode_sizes(limits.rows)
        self._mixed_sizes = mixed_sizes(limits.tokens)
        self._sample_sizes = decode_sizes(self._part)
        size = size_of(limits)
        self._packet = Packet.over(torch.zeros(size, dtype=torch.int32, device=queue.device), limits)
        # One for each step that can be in flight, one for the next, and one with an empty packet for recording.
        slots = [self._slot(size) for _ in range(config.pipeline_depth + 2)]
        self._empty, self._free = slots[0].packet, deque(slots[1:])
        self._pending: deque[_Pending] = deque()
        self._fetched: Mark | None = None
        self._recordings = Recordings(queue, self._work, _planned(limits, is_deterministic=config.deterministic))

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_recorded(self) -> int:
        return self._recordings.num_recorded

    def is_done(self) -> bool:
        return bool(self._pending) and self._pending[0].done.is_reached()

    def collect(self) -> StepResult:
        self._settle(self._pending[0])
        step = self._pending.popleft()
        assert step.sampled is not None
        self._free.append(step.slot)
        return replace(step.sampled, vectors=step.vectors).result(step.plan.step, step.done.ms_since(step.begun))

    def launch(self, plan: StepPlan) -> None:
        slot = self._free.popleft()
        try:
            self._pending.append(self._launch(plan, slot))
        except Exception:
            self._queue.mark().wait()  # the copies from the slot have ended
            self._free.append(slot)
            raise

    def _launch(self, plan: StepPlan, slot: _Slot) -> _Pending:
        rows = self._rows
        if plan.num_speculative or any(step.draft_tokens.any() for step in self._pending):
            for step in self._pending:
                self._settle(step)
        for opened in plan.open:
            rows.open(opened)
            self._pooler.open(opened)
            self._num_sent[opened.row] = 0
            self._num_opens[opened.row] += 1
            self._has_penalties[opened.row] = has_penalties(opened.sampling)
        rows.mask(plan)
        rows.grow(plan)
        packet = slot.packet
        write_opens(plan.open, packet.opens)
        begun = self._queue.mark()

        planned = np.frombuffer(plan.rows, "<i4").astype(np.int64)
        draft_tokens = self._draft(plan, planned[: plan.num_speculative])
        draft_states = None
        if rows.has_states and draft_tokens.any():
            draft_states = DraftStates.of(plan, rows, draft_tokens, self._cache.spare_states)
        counts = np.frombuffer(plan.counts, "<i4").astype(np.int64)
        nums = np.frombuffer(plan.sample, np.uint8).astype(np.int64)
        counts[: len(draft_tokens)] += draft_tokens
        nums[: len(draft_tokens)] += draft_tokens
        order = np.argsort(counts != 1, kind="stable")  # decode rows come first
        picked, counts, nums = planned[order], counts[order], nums[order]
        starts = rows.num_computed[picked]
        ends = starts + counts
        assert (ends <= rows.num_positions(picked)).all(), f"step {plan.step}: no block"
        samples = samples_of(picked, ends, np.cumsum(counts), order, nums)

        lifted = rows.lift_minimum(samples.rows, samples.ends)
        states = None
        if rows.has_states:
            states = states_of(plan, rows, picked, starts, counts, self._cache.storage, draft_states)
        shape, parts = self._send(packet, picked, counts, starts, samples, states)
        if rows.masks:
            self._send_masks(slot)
        if plan.open:
            self._state.open(plan.open, self._packet)
        for row in lifted:
            self._state.change_bias(row, rows.bias(row))
        if plan.copies:
            pairs = torch.from_numpy(np.frombuffer(plan.copies, "<i4").astype(np.int64))
            self._copy(slot, pairs[::2], pairs[1::2])
        prompt: dict[int, RowLogprobs] = {}
        vectors: dict[int, bytes] = {}
        if len(picked):
            self._recordings.run(shape)
            prompt = prompt_logprobs(rows, picked, starts, counts, order, self._logits_of, self._vocab_size)
            vectors = self._pooler.take(picked, starts, counts, order, rows.num_prompt, self._hidden_of)
        if self._fetched is not None:
            self._queue.follow(self._fetched)  # the previous step's ids are copied from the memory that this one writes
        for part in parts:
            self._recordings.run(part)
        done = self._fetched = self._queue.fetch(self._results(slot, len(samples.rows), parts))
        rows.num_computed[picked] = ends
        rows.advance_states(picked)
        if not draft_tokens.any():  # else `take_in` sets the rows' lengths
            rows.num_ids[samples.rows] = samples.ends + 1
            rows.ids[samples.rows, samples.ends] = -1  # only the device knows
        return _Pending(
            plan=plan,
            slot=slot,
            begun=begun,
            done=done,
            samples=samples,
            num_opens=self._num_opens[samples.rows],
            num_logprobs=rows.num_logprobs[samples.rows],
            draft_tokens=draft_tokens,
            draft_states=draft_states,
            prompt_logprobs=prompt,
            vectors=vectors,
        )

    def forget_addresses(self) -> None:
        self._recordings.forget()

    def use_idle(self) -> bool:
        # The ranks of a group would have to be idle at the same time, so they record only shapes that run often.
        shape = self._recordings.next_shape() if self._decoder.num_ranks == 1 else None
        if shape is None:
            return False
        empty = np.zeros(0, np.int64)
        states = StateRows.of(self._cache.storage, [], [], []) if self._rows.has_states else None
        self._send(self._empty, empty, empty, empty, Samples(empty, empty, empty, empty), states)
        self._recordings.record(shape)
        return self._recordings.next_shape() is not None

    def _slot(self, size: int) -> _Slot:
        samples, width = self._limits.samples, 1 + MAX_BEST
        return _Slot(
            packet=HostPacket(self._queue.host_memory(size, torch.int32), self._limits),
            ids=self._queue.host_memory(samples, torch.int32),
            best_ids=self._queue.host_memory(samples * width, torch.int32).view(samples, width),
            best_values=self._queue.host_memory(samples * width, torch.float32).view(samples, width),
        )

    def _work(self, shape: Hashable) -> Work:
        if isinstance(shape, StepShape):
            return lambda: self._decoder.run(self._packet, self._state, shape)
        assert isinstance(shape, tuple)
        first, samples = shape

        def sample() -> None:
            part = slice(first, first + samples.samples)
            hidden = self._decoder.hidden(self._packet.sample_tokens[part])
            if self._decoder.num_ranks > 1 and samples.is_plain:
                self._state.sample_of_parts(self._decoder.vocabulary, hidden, self._packet, first, samples)
            else:
                self._state.sample(self._decoder.logits(hidden), self._packet, first, samples)

        return sample

    def _draft(self, plan: StepPlan, speculative: NDArray[np.int64]) -> NDArray[np.int64]:
        draft_tokens = draft(self._rows, speculative, plan.speculate, plan.break_even)
        # A sampled token changes the row's penalties, and the device counts one token per row and step.
        draft_tokens[self._has_penalties[speculative]] = 0
        return within(draft_tokens, len(self._cache.spare_states)) if self._rows.has_states else draft_tokens

    def _send(
        self,
        packet: HostPacket,
        picked: NDArray[np.int64],
        counts: NDArray[np.int64],
        starts: NDArray[np.int64],
        samples: Samples,
        states: StateRows | None,
    ) -> tuple[StepShape, list[tuple[int, SampleShape]]]:
        """Sends a step's packet. states: of a model with recurrent layers. Returns the shapes to run: of the pass, and
        of each part of its samples."""
        shape, num_step = self._fill(packet, picked, counts, starts)
        if states is not None:
            num_step += fill_states(packet.step[num_step:], states)
        parts = self._fill_samples(packet, samples)
        sent = packet.filled(num_step)
        self._queue.send(sent, self._packet.whole[: len(sent)])
        return shape, parts

    def _fill(
        self, packet: HostPacket, picked: NDArray[np.int64], counts: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[StepShape, int]:
        """Writes the rows and tokens of the packet. Returns the shape of the pass and the length of the packet's last
        section. All arguments are [rows], with the rows of one token first."""
        rows = self._rows
        # Decode attention sums in another order than prompt attention, so `deterministic` does without it.
        num_decode = 0 if self._config.deterministic else int(np.count_nonzero(counts == 1))
        total, most = int(counts.sum()), int(counts.max(initial=0))
        row_of_token = np.repeat(picked, counts)
        positions = np.arange(total) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        num_blocks = rows.num_positions(picked) // self._config.block_size
        num_new = num_blocks - self._num_sent[picked]
        row_of_block = np.repeat(picked, num_new)
        place = np.arange(len(row_of_block)) + np.repeat(
            self._num_sent[picked] - (np.cumsum(num_new) - num_new), num_new
        )
        num_step = fill_packet(
            packet.step,
            rows=picked,
            counts=counts,
            starts=starts,
            ids=rows.ids[row_of_token, positions],
            places=self._num_sent[picked],
            num_new=num_new,
            pages=rows.tables[:, row_of_block, place],
        )
        self._num_sent[picked] = num_blocks
        packet.decode_lens[:num_decode] = starts[:num_decode] + 1
        packet.decode_lens[num_decode:] = 0
        if num_decode == len(picked):  # also if there are no rows
            return StepShape(at_least(self._decode_sizes, max(total, 1)), 0), num_step
        tile_rows = DRAFT_ROWS if most <= DRAFT_ROWS else PROMPT_ROWS
        if self._config.deterministic:
            tile_rows = INVARIANT_ROWS
        lens = counts.copy()
        lens[:num_decode] = 0
        work = extend_work(lens, starts + counts, tile_tokens(self._decoder.group, tile_rows))
        work[:, 1] += num_decode
        packet.tiles[: len(work)] = work
        packet.tiles[len(work) :, 2] = 0
        sizes = self._decode_sizes if most == 1 else self._mixed_sizes
        return StepShape(at_least(sizes, total), tile_rows), num_step

    def _fill_samples(self, packet: HostPacket, samples: Samples) -> list[tuple[int, SampleShape]]:
        """Writes the samples of the packet. Returns the parts: index of the first sample, and shape."""
        rows, num = self._rows, len(samples.rows)
        packet.sample_tokens[:num], packet.sample_tokens[num:] = samples.tokens, 0
        packet.sample_rows[:num], packet.sample_rows[num:] = samples.rows, self._limits.rows
        packet.sample_positions[:num], packet.sample_positions[num:] = samples.ends - rows.num_prompt[samples.rows], 0
        packet.places[:] = packet.masks[:] = -1
        packet.asking[:] = -1
        if rows.masks:
            places = np.full(self._limits.rows, -1, np.int32)
            places[list(rows.masks)] = np.arange(len(rows.masks))
            packet.masks[:num] = places[samples.rows]
        parts = []
        for first in range(0, num, self._part):
            part = slice(first, min(first + self._part, num))
            picked = samples.rows[part]
            edits = np.flatnonzero(rows.edits_logits[picked] | rows.is_masked[picked])
            asking = np.flatnonzero(rows.num_logprobs[picked] >= 0)
            packet.places[first + edits] = np.arange(len(edits))
            packet.asking[first : first + len(asking)] = asking
            is_sampled = rows.temperature[picked] > 0
            is_filtered = is_sampled & ((rows.top_k[picked] > 0) | (rows.top_p[picked] < 1) | (rows.min_p[picked] > 0))
            kind = 2 if is_filtered.any() else int(is_sampled.any())
            size = at_least(self._sample_sizes, len(picked))
            parts.append((first, SampleShape(size, kind, len(edits) > 0, len(asking) > 0)))
        return parts

    def _send_masks(self, slot: _Slot) -> None:
        """Sends the masks in the order of `Rows.masks`. The queue keeps order, so earlier steps have read theirs."""
        device_masks, masks = self._state.masks, self._rows.masks
        if slot.masks is None:
            slot.masks = self._queue.host_memory(device_masks.numel(), torch.int32).view_as(device_masks)
        np.stack(list(masks.values()), out=slot.masks.numpy()[: len(masks)])
        self._queue.send(slot.masks[: len(masks)], device_masks[: len(masks)])

    def _copy(self, slot: _Slot, sources: Tensor, targets: Tensor) -> None:
        """Copies pages of the cache in queue order. No source is a target. Both [pages] int64, on the host."""
        num = len(sources)
        if slot.copies is None or len(slot.copies) < 2 * num:
            slot.copies = self._queue.host_memory(2 * num, torch.int64)
        pairs = torch.cat((sources, targets), out=slot.copies[: 2 * num])
        sent = torch.empty(2 * num, dtype=torch.int64, device=self._queue.device)
        self._queue.send(pairs, sent)
        size = max(1, _COPY_BYTES // max(1, self._cache.groups.page_bytes))
        for first in range(0, num, size):
            last = min(first + size, num)
            self._cache.copy(sent[first:last], sent[num + first : num + last])

    def _results(
        self, slot: _Slot, num: int, parts: list[tuple[int, SampleShape]]
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """The copies to the host: (device tensor, host tensor)."""
        state = self._state
        pairs = [(state.sampled[:num], slot.ids[:num])] if num else []
        if any(shape.logprobs for _, shape in parts):
            pairs += [(state.best_ids[:num], slot.best_ids[:num]), (state.best_values[:num], slot.best_values[:num])]
        return tuple(pairs)

    def _hidden_of(self, first: int, last: int) -> Tensor:
        return self._decoder.hidden(torch.arange(first, last, dtype=torch.int32, device=self._queue.device))

    def _logits_of(self, first: int, last: int) -> Tensor:
        return self._decoder.logits(self._hidden_of(first, last))

    def _settle(self, step: _Pending) -> None:
        """Waits for the sampled ids and stores them in the rows that were not opened again since."""
        if step.sampled is not None:
            return
        step.done.wait()
        samples, slot, rows = step.samples, step.slot, self._rows
        ids = slot.ids[: len(samples.rows)].numpy().astype(np.int64)
        logprobs = {}
        asking = np.flatnonzero(step.num_logprobs >= 0)
        in_part = np.bincount(asking // self._part, minlength=1)  # a part's log-probabilities stand at its beginning
        moved = np.repeat(np.arange(len(in_part)) * self._part - (np.cumsum(in_part) - in_part), in_part)
        for i, at in zip(asking.tolist(), (np.arange(len(asking)) + moved).tolist(), strict=True):
            width = 1 + min(int(step.num_logprobs[i]), self._vocab_size)
            if ids[i] >= 0:
                row = slot.best_ids[at : at + 1, :width].numpy(), slot.best_values[at : at + 1, :width].numpy()
                logprobs[int(samples.order[i])] = row_logprobs(*row)
        if step.draft_tokens.any():
            step.sampled = take_in(step.plan, rows, samples, ids, step.draft_tokens, step.prompt_logprobs, logprobs)
            if step.draft_states is not None and (copies := step.draft_states.copies(rows)) is not None:
                self._copy(slot, *copies)
            return
        same = self._num_opens[samples.rows] == step.num_opens
        rows.ids[samples.rows[same], samples.ends[same]] = np.maximum(ids[same], 0)
        step.sampled = Sampled(step.prompt_logprobs, logprobs, ids[np.argsort(samples.order, kind="stable")])
