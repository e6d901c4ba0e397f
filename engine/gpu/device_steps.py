"""Steps on a device that runs ahead of the host: a plan is launched while the previous one still runs.

The host knows how long each row may be; only the device knows the ids that the last step sampled, and how many draft
tokens it accepted. So a launch writes a packet, sends it, starts the work recorded for a step of this size, and
returns. The results are copied to the host while later steps run. Nothing in a launch waits for the device.

Draft tokens come from the text that the host has. With a pipeline of n plans that is the text up to n - 1 steps before
the one with the draft tokens, even if the host has read more by then: so all ranks propose the same ones. What they
propose covers the positions of the steps in between.
"""

import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config.config import EngineConfig
from ...ipc.messages import PassReads, RowOpen, StepPlan, StepResult
from ...kernels.states import StateRows
from ...kernels.triton.copy_pages import fill_choices, fill_copies
from ...kernels.triton.edit_rows import Edit, fill_edits
from ...kernels.triton.extend_attention import extend_work, max_tiles, tile_tokens
from ...kernels.triton.logprobs import MAX_BEST
from ...kernels.triton.open_rows import FIELDS as OPEN_FIELDS
from ...kernels.triton.prepare_step import fill_packet
from ...kernels.triton.scans import fill_states
from ..attention.kv_cache import KvCache, KvShape
from ..device.queue import Mark, Queue, Work
from ..executors.by_layer import ByLayer
from ..executors.expert_replicas import ExpertReplicas
from ..executors.experts import OwnExperts
from ..parallel.domains import Domain
from ..steps.draft_states import DraftStates, within
from ..steps.logprobs import PromptScores, prompt_scores, row_logprobs
from ..steps.ngram import draft
from ..steps.pooling import PooledStates, RowPooler
from ..steps.rows import Rows, up_to_wrong
from ..steps.sampled import Sampled, learn_drafts, take_in
from ..steps.step_inputs import Samples, samples_of, states_of
from .attention import HostAttention, HostRows
from .decoder import DRAFT_ROWS, INVARIANT_ROWS, PROMPT_ROWS, TritonDecoder
from .handover import Handover, Waits
from .packet import HostPacket, Limits, Packet, size_of
from .recordings import Recordings
from .shapes import SampleShape, StepShape, at_least, decode_sizes, mixed_sizes, powers
from .state import KINDS, RowState, bias_edit, has_penalties, history_edits, write_opens

_MAX_PART = 256  # tokens sampled at once: each takes 4 bytes of logits per vocabulary entry
_ALIGNED = 4  # int32: arrays that kernels read begin at a multiple of 16 bytes
_NO_IDS: NDArray[np.int64] = np.zeros(0, np.int64)
_NO_INT32: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """A model that runs on the Triton kernels, with all its memory but the KV cache."""

    decoder: TritonDecoder
    state: RowState
    limits: Limits
    queue: Queue
    kv_shape: KvShape
    weights: int  # bytes
    workspace: int  # bytes: buffers already allocated, and what torch's functions take in a step
    reads: PassReads  # of its weights, in each step
    graphs: int  # bytes that recorded steps take: the same again, and the graphs
    note: str  # for the operator
    failed_kernels: tuple[str, ...] = ()  # that torch replaces
    temporary: int = 0  # bytes that a step takes from the allocator for tensors of more than 1 MB
    attention: HostAttention | None = None  # of the steps that it serves, instead of Triton
    handover: Handover | None = None  # of a stage of a pipeline
    replicas: ExpertReplicas | None = None  # of `own_experts`, if there is room for some
    domain: Domain | None = None  # of this rank; None: there is one domain
    by_layer: ByLayer | None = None  # who is told of layers as they are launched, in steps that are never recorded
    head_major = True

    @property
    def own_experts(self) -> Mapping[int, OwnExperts]:
        """By layer, if ranks share them out."""
        return self.decoder.own_experts

    def steps(self, config: EngineConfig, cache: KvCache) -> "DeviceSteps":
        return DeviceSteps(config=config, model=self, cache=cache)


class _Slot:
    """An entry of the ring: the pinned memory that one step sends and fetches."""

    def __init__(self, queue: Queue, limits: Limits, size: int) -> None:
        """size: of a packet."""
        self._queue = queue
        width = 1 + MAX_BEST
        self.packet = HostPacket(queue.host_memory(size, torch.int32), limits)
        self.ids = queue.host_memory(limits.samples, torch.int32)
        self.best_ids = queue.host_memory(limits.samples * width, torch.int32).view(-1, width)
        self.best_values = queue.host_memory(limits.samples * width, torch.float32).view(-1, width)
        # What few steps need, allocated for the first of them: masks, what is sent besides the packet, and results.
        self.masks: Tensor | None = None  # [rows, ⌈vocab / 32⌉] int32
        self._sent: Tensor | None = None
        self._fetched: dict[torch.dtype, Tensor] = {}

    def attach(self, arrays: Sequence[NDArray[np.int32]]) -> list[Tensor]:
        """Sends arrays besides the packet, in one copy. Returns them on the device. At least one is not empty."""
        firsts = np.cumsum([0, *(-(-len(array) // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
        total = firsts.pop()
        self._sent = self._at_least(self._sent, total, torch.int32)
        host = self._sent.numpy()
        for first, array in zip(firsts, arrays, strict=True):
            host[first : first + len(array)] = array
        whole = torch.empty(total, dtype=torch.int32, device=self._queue.device)
        self._queue.send(self._sent[:total], whole)
        return [whole[first : first + len(array)] for first, array in zip(firsts, arrays, strict=True)]

    def landing(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host memory for results of these shapes and types."""
        taken: dict[torch.dtype, int] = {}
        for tensor in tensors:
            taken[tensor.dtype] = taken.get(tensor.dtype, 0) + tensor.numel()
        for dtype, size in taken.items():
            self._fetched[dtype] = self._at_least(self._fetched.get(dtype), size, dtype)
        landed = []
        for tensor in reversed(tensors):
            taken[tensor.dtype] -= tensor.numel()
            first = taken[tensor.dtype]
            landed.append(self._fetched[tensor.dtype][first : first + tensor.numel()].view(tensor.shape))
        return landed[::-1]

    def _at_least(self, memory: Tensor | None, size: int, dtype: torch.dtype) -> Tensor:
        if memory is not None and len(memory) >= size:
            return memory
        return self._queue.host_memory(size if memory is None else max(size, 2 * len(memory)), dtype)


@dataclass(kw_only=True)
class _Launched:
    """A step whose samples are not part of the host's text yet."""

    plan: StepPlan
    slot: _Slot
    begun: Mark
    waits: Waits | None = None  # of a stage's pass, for other stages
    passed: Mark | None = None  # after its pass, if it has late rows
    resumed: Mark | None = None  # before it samples, if it has late rows
    done: Mark | None = None  # None: it has not sampled
    samples: Samples  # `ends` as if all draft tokens were accepted of which the host does not know
    num_opens: NDArray[np.int64]  # [samples] how often each one's row had been opened
    num_logprobs: NDArray[np.int64]  # [samples] best tokens asked for; -1: no log-probabilities
    draft_tokens: NDArray[np.int64]
    sent_ids: NDArray[np.int32]  # ids of the packet
    ids_at: NDArray[np.int64]  # [samples] where the ids of each one's row stand in `sent_ids`, less their position
    prompt: list[tuple[int, Tensor, Tensor]]  # index into the plan's rows, ids and values of prompt log-probabilities
    pooled: list[tuple[PooledStates, Tensor | None]]
    held: list[Tensor]  # device tensors that the copies to the host read
    landed: list[Tensor]  # host memory for them
    # For its samples:
    parts: list[tuple[int, SampleShape]]
    num_rows: int
    draft_states: DraftStates | None
    draft_copies: Tensor | None  # of the states behind draft tokens, on the device
    # Once the host has read the results:
    result: Sampled | None = None
    ids: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)  # [samples]
    kept: NDArray[np.bool_] | None = None  # [samples] which are part of the text


class _Rows(NamedTuple):
    """The rows of a step in step order. All are [rows] int64."""

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]  # positions that each computes
    starts: NDArray[np.int64]  # the first of them, as if all draft tokens were accepted of which the host does not know
    nums: NDArray[np.int64]  # samples, after its last positions
    order: NDArray[np.int64]  # index into the plan's rows


_NO_ROWS = _Rows(_NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS)


class _Sent(NamedTuple):
    """A packet on its way."""

    shape: StepShape  # of the pass
    parts: list[tuple[int, SampleShape]]  # of the samples: index of the first, and shape
    opens: slice  # of the section `step`: records of opened rows
    ids: NDArray[np.int32]
    ids_at: NDArray[np.int64]  # [rows] index of each row's first id, less its position


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
        behind=draft_tokens * (config.num_in_flight - 1),
    )


def num_draft_tokens(config: EngineConfig) -> int:
    """The most draft tokens of a row in a step."""
    return 0 if config.speculative is None else config.block_size - 1  # the planner's limit


def num_graphs(limits: Limits, *, samples: bool) -> int:
    """About how many graphs will be recorded in the end."""
    return len(_planned(limits, is_deterministic=False, samples=samples))


def _planned(limits: Limits, *, is_deterministic: bool, samples: bool) -> list[Hashable]:
    """Shapes to record. Decode steps come before steps with prompts, which are rarer. samples: not in the stages before
    the last one."""
    _, prompt = _tile_rows(is_deterministic)
    parts = decode_sizes(limits.part) if samples else ()
    shapes = _decodes(decode_sizes(limits.rows), parts, is_deterministic=is_deterministic)
    mixed = (StepShape(size, prompt) for size in reversed(mixed_sizes(limits.tokens)))
    return [*shapes, *(shape for shape in mixed if shape.is_recorded)]


def _decodes(passes: tuple[int, ...], samples: tuple[int, ...], *, is_deterministic: bool) -> list[Hashable]:
    """Of steps without prompts, in these sizes of the pass and of the samples."""
    decode, _ = _tile_rows(is_deterministic)
    shapes: list[Hashable] = [StepShape(size, decode) for size in reversed(passes)]
    for size in reversed(samples):
        shapes += [(0, SampleShape(size, kind, False, False)) for kind in range(len(KINDS))]
    return shapes


def _tile_rows(is_deterministic: bool) -> tuple[int, int]:
    """Of steps without and with prompts."""
    return (INVARIANT_ROWS, INVARIANT_ROWS) if is_deterministic else (0, PROMPT_ROWS)


def _kinds(limits: Limits, *, is_deterministic: bool, samples: bool) -> list[Hashable]:
    """Shapes that together launch every kernel. Which ones are launched depends on the number of tokens between powers
    of two at most, and Triton compiles kernels for one token and for multiples of 16 by themselves."""
    decode, prompt = _tile_rows(is_deterministic)
    mixed, parts = mixed_sizes(limits.tokens), decode_sizes(limits.part)
    shapes: list[Hashable] = [StepShape(size, decode) for size in powers(decode_sizes(limits.rows))]
    shapes += [
        StepShape(size, prompt) for size in reversed(powers(mixed))
    ]  # smaller ones use the memory of larger ones
    shapes += [] if is_deterministic else [StepShape(mixed[0], DRAFT_ROWS)]
    few = (1, 2, 16) if samples else ()
    for size in dict.fromkeys(at_least(parts, min(wanted, limits.part)) for wanted in few):
        for kind in range(len(KINDS)):
            shapes += [(0, SampleShape(size, kind, extra, extra)) for extra in (False, True)]
    return shapes


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
        # The lengths in `_rows` count all draft tokens of steps that the host has not read: so many may be too many.
        self._num_unsure: NDArray[np.int64] = np.zeros(limits.rows, np.int64)
        self._num_known: NDArray[np.int64] = np.zeros(limits.rows, np.int64)  # ids; those behind them are drafts
        self._has_penalties: NDArray[np.bool_] = np.zeros(limits.rows, np.bool_)
        self._part = limits.part
        self._decode_sizes = decode_sizes(limits.rows)
        self._mixed_sizes = mixed_sizes(limits.tokens)
        self._sample_sizes = decode_sizes(self._part)
        size = size_of(limits)
        self._packet = Packet.over(torch.zeros(size, dtype=torch.int32, device=queue.device), limits)
        # One for each step that can be in flight, one for the next, and one with an empty packet for recording.
        slots = [_Slot(queue, limits, size) for _ in range(config.num_in_flight + 2)]
        self._empty, self._free = slots[0].packet, deque(slots[1:])
        self._emptied: Mark | None = None  # after the empty packet's last copy
        self._pending: deque[_Launched] = deque()  # to be collected
        self._unknown: deque[_Launched] = deque()  # whose samples are not in `_rows`; the last ones are pending
        self._fetched: Mark | None = None
        self._attention = model.attention
        self._handover, self._domain = model.handover, model.domain
        self._samples = model.decoder.is_last  # the stages before the last one do not
        planned = _planned(limits, is_deterministic=config.deterministic, samples=self._samples)
        self._planned = [shape for shape in planned if not self._is_unrecorded(shape)]
        self._recordings = Recordings(queue, self._work, self._planned, is_strict=config.strict_kernels)
        self._temporary = model.temporary
        queue.reserve(self._temporary)  # last, or what is kept would lie in it

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_recorded(self) -> int:
        return self._recordings.num_recorded

    def is_done(self) -> bool:
        done = self._pending[0].done if self._pending else None
        return done is not None and done.is_reached()

    def collect(self) -> StepResult:
        result = self._read(self._pending[0])
        step = self._pending.popleft()
        self._free.append(step.slot)
        assert step.done is not None
        wait_ms = 0.0
        if step.passed is not None and step.resumed is not None:
            wait_ms = step.resumed.ms_since(step.passed)
        if self._handover is not None and step.waits is not None:
            self._handover.ended(step.waits, step.done)
        return result.result(step.plan.step, step.done.ms_since(step.begun) - wait_ms, wait_ms)

    def launch(self, plan: StepPlan) -> None:
        slot = self._free.popleft()
        try:
            step = self._pass(plan, slot)
            self._pending.append(step)
            if self._samples:
                self._unknown.append(step)
            if plan.late_rows:
                step.passed = self._queue.mark()
            else:
                self._sample(step)
        except Exception:
            self._drop(slot)
            raise

    def sample(self, masks: Mapping[int, bytes]) -> None:
        step = self._pending[-1]
        assert step.passed is not None and step.done is None, "no plan waits for masks"
        try:
            self._rows.mask_late(masks)
            step.resumed = self._queue.mark()
            self._send_masks(step.slot)
            self._sample(step)
        except Exception:
            self._drop(step.slot)
            raise

    def _drop(self, slot: _Slot) -> None:
        """Drops the step of this slot, which has raised an error."""
        self._queue.mark().wait()  # the copies from the slot have ended
        self._free.append(slot)
        for steps in (self._pending, self._unknown):
            if steps and steps[-1].slot is slot and steps[-1].done is None:
                steps.pop()
        self._learn(0)  # the device may have sampled ids that do not count

    def _pass(self, plan: StepPlan, slot: _Slot) -> _Launched:
        """Launches all of a step but its samples."""
        rows = self._rows
        # Attention that is planned on the host needs the rows' lengths, which draft tokens leave open.
        is_open = self._attention is not None and self._config.speculative is not None
        self._learn(0 if is_open else self._config.num_in_flight - 1)
        self._take_rows(plan)
        if self._domain is not None:
            self._domain.begin(plan)
        begun = self._queue.mark()
        step, draft_tokens, draft_states = self._arrange(plan)
        ends = step.starts + step.counts
        samples = samples_of(step.rows, ends, np.cumsum(step.counts), step.order, step.nums)
        edits, scores = [], []
        if self._samples:
            edits = self._edits(plan, rows.lift_minimum(samples.rows, samples.ends))
            scores = prompt_scores(rows, step.rows, step.starts, step.counts, step.order)
        states = None
        if rows.has_states:
            states = states_of(plan, rows, step.rows, step.starts, step.counts, self._cache.storage, draft_states)
        attached = self._attach(slot, plan, edits, draft_states, scores)
        sent = self._send(slot.packet, step, samples, states, plan.open)
        if rows.masks and self._samples and not plan.late_rows:
            self._send_masks(slot)
        if plan.open:
            self._state.open(self._packet.step[sent.opens], len(plan.open))
        if attached:
            self._state.edit(attached[0], len(edits))
            self._state.copy(self._cache.words, attached[1], len(plan.copies) // 8)

        prompt: list[tuple[int, Tensor, Tensor]] = []
        pooled: list[PooledStates] = []
        waits: Waits | None = None
        if len(step.rows) or (self._domain is not None and self._domain.num_all):
            if self._handover is None:
                self._run(sent.shape, step)
            else:
                waits = self._run_stage(self._handover, sent.shape, step, samples)
                begun = waits.ready
        if len(step.rows) and self._samples:
            for each, target in zip(scores, attached[3:], strict=True):
                prompt.append((each.index, *self._score(each, target)))
            pooled = self._pooler.states(
                step.rows, step.starts, step.counts, step.order, rows.num_prompt, self._hidden_of
            )
        held = [tensor for _, ids, values in prompt for tensor in (ids, values)]
        held += [each.states for each in pooled if each.states is not None]
        landed = slot.landing(held)
        landing = iter(landed)
        rows.num_computed[step.rows] = ends
        rows.num_ids[samples.rows] = samples.ends + 1
        rows.advance_states(step.rows)
        self._num_unsure[np.frombuffer(plan.rows, "<i4", plan.num_speculative)] += draft_tokens
        return _Launched(
            plan=plan,
            slot=slot,
            begun=begun,
            waits=waits,
            samples=samples,
            num_opens=self._num_opens[samples.rows],
            num_logprobs=rows.num_logprobs[samples.rows],
            draft_tokens=draft_tokens,
            sent_ids=sent.ids,
            ids_at=np.repeat(sent.ids_at, step.nums),
            prompt=[(index, next(landing), next(landing)) for index, _, _ in prompt],
            pooled=[(each, None if each.states is None else next(landing)) for each in pooled],
            held=held,
            landed=landed,
            parts=sent.parts,
            num_rows=len(step.rows),
            draft_states=draft_states,
            draft_copies=attached[2] if draft_states is not None else None,
        )

    def _sample(self, step: _Launched) -> None:
        """Launches the samples of a step, and what follows them."""
        plan, draft_states = step.plan, step.draft_states
        if not self._samples:
            step.done = self._queue.mark()
            return
        if self._fetched is not None:
            self._queue.follow(self._fetched)  # the previous step's ids are copied from the memory that this one writes
        for part in step.parts:
            self._recordings.run(part)
        if step.draft_tokens.any():
            self._state.accept(self._packet, self._decoder.ids, rows=step.num_rows, most=1 + plan.speculate)
        if draft_states is not None and step.draft_copies is not None:
            pages = draft_states.pages.shape[1]
            self._state.copy(self._cache.words, step.draft_copies, len(draft_states.rows) * pages, between=pages)
        if self._handover is not None and len(step.samples.rows):
            self._handover.send_ids(len(step.samples.rows))
        fetched = self._results(step.slot, len(step.samples.rows), step.parts)
        step.done = self._fetched = self._queue.fetch((*fetched, *zip(step.held, step.landed, strict=True)))

    def _take_rows(self, plan: StepPlan) -> None:
        """What the plan says of rows before their positions."""
        rows = self._rows
        for opened in plan.open:
            rows.open(opened)
            self._pooler.open(opened)
            self._num_sent[opened.row] = 0
            self._num_opens[opened.row] += 1
            self._num_unsure[opened.row] = 0
            self._num_known[opened.row] = rows.num_ids[opened.row]
            self._has_penalties[opened.row] = has_penalties(opened.sampling)
        if plan.keep_rows and self._num_unsure[np.frombuffer(plan.keep_rows, "<i4")].any():
            for step in self._pending:  # the core knows these rows' lengths, so the steps have ended on the first rank
                self._read(step)
        rows.mask(plan)
        rows.grow(plan)

    def _arrange(self, plan: StepPlan) -> tuple[_Rows, NDArray[np.int64], DraftStates | None]:
        """The plan's rows in step order; the number of draft tokens of each speculative row; and where states are kept
        behind them, if the model has recurrent layers and there are draft tokens."""
        rows = self._rows
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
        picked, counts = planned[order], counts[order]
        starts = rows.num_computed[picked]
        least_ends = starts - self._num_unsure[picked] + counts
        assert (least_ends <= rows.num_positions(picked)).all(), f"step {plan.step}: no block"
        return _Rows(picked, counts, starts, nums[order], order), draft_tokens, draft_states

    def _attach(
        self,
        slot: _Slot,
        plan: StepPlan,
        edits: list[Edit],
        draft_states: DraftStates | None,
        scores: list[PromptScores],
    ) -> list[Tensor]:
        """Sends what few steps need besides the packet. Returns it on the device: edits, copies before the pass, copies
        behind draft tokens, and targets of each of the scores; nothing if there is none of it."""
        if not edits and not plan.copies and draft_states is None and not scores:
            return []
        choices = _NO_INT32
        if draft_states is not None:
            targets = self._rows.state_written[draft_states.rows]
            choices = fill_choices(draft_states.rows, draft_states.nums, draft_states.pages, targets)
        pairs = np.frombuffer(plan.copies, "<i4").reshape(-1, 2)
        return slot.attach((fill_edits(edits), fill_copies(pairs), choices, *(each.targets for each in scores)))

    def forget_addresses(self) -> None:
        if self._handover is not None:
            self._handover.settle()
        self._recordings.forget()
        self._decoder.drop_scratch()

    def restore(self) -> None:
        self._decoder.restore_scratch()
        self._queue.reserve(self._temporary)

    def warm_up(self) -> dict[str, float]:
        is_deterministic, num_ranks, limits = self._config.deterministic, self._decoder.num_ranks, self._limits
        started = time.perf_counter()
        self._send_empty()
        for shape in _kinds(limits, is_deterministic=is_deterministic, samples=self._samples):
            self._work(shape)()
        self._queue.mark().wait()
        compiled = time.perf_counter()
        passes, samples = decode_sizes(limits.rows), decode_sizes(limits.part)
        if num_ranks == 1:  # the other ones are recorded while it is idle
            passes, samples = powers(passes), powers(samples)
        for shape in _decodes(passes, samples if self._samples else (), is_deterministic=is_deterministic):
            if not self._is_unrecorded(shape):
                self._recordings.record(shape)
        self._queue.mark().wait()
        num = self._recordings.num_recorded
        left = "the others while idle" if num_ranks == 1 else "the others when they have come up three times"
        graphs = f"{num} of {len(self._planned)} graphs, {left}"
        return {"kernels": compiled - started, graphs: time.perf_counter() - compiled}

    def use_idle(self) -> bool:
        # The ranks of a group would have to be idle at the same time, so they record only shapes that run often.
        shape = self._recordings.next_shape() if self._decoder.num_ranks == 1 else None
        if shape is None:
            return False
        self._send_empty()
        self._recordings.record(shape)
        return self._recordings.next_shape() is not None

    def _work(self, shape: Hashable) -> Work:
        if isinstance(shape, StepShape):
            return lambda: self._decoder.run(self._packet, self._state, shape)
        assert isinstance(shape, tuple)
        first, samples = shape

        def sample() -> None:
            tokens = self._packet.parts[first // self._part].tokens[: samples.samples]
            if self._decoder.num_ranks > 1 and self._domain is None and samples.is_plain:
                hidden = self._decoder.sampled_hidden(tokens)
                self._state.sample_of_parts(self._decoder.vocabulary, hidden, self._packet, first, samples)
            else:
                self._state.sample(self._decoder.sampled_logits(tokens), self._packet, first, samples)

        return sample

    def _run_stage(self, handover: Handover, shape: StepShape, step: _Rows, samples: Samples) -> Waits:
        """Runs the pass through a stage's layers between its transfers."""
        num_tokens = int(step.counts.sum())
        waits = handover.begin(shape, num_tokens, step.rows[step.starts >= self._num_known[step.rows]])
        self._run(shape, step)
        if not handover.is_last:
            handover.end(shape, num_tokens)
        if handover.is_first and len(samples.rows):
            handover.ask(self._packet, samples.rows)
        return waits

    def _run(self, shape: StepShape, step: _Rows) -> None:
        """Runs the pass through the model."""
        if self._attention is None or not self._is_unrecorded(shape):
            if shape.is_recorded:
                self._recordings.run(shape)
            else:
                self._work(shape)()
            return
        rows = HostRows(
            num_decode=int(np.count_nonzero(step.counts == 1)),
            query_lens=step.counts,
            context_lens=step.starts + step.counts,
            tables=self._rows.tables[:, step.rows],
        )
        with self._attention.step(rows):
            self._work(shape)()

    def _is_unrecorded(self, shape: Hashable) -> bool:
        """Whether the attention of such steps is planned on the host."""
        if self._attention is None or not isinstance(shape, StepShape):
            return False
        return self._attention.serves(has_prompts=shape.tile_rows == PROMPT_ROWS)

    def _draft(self, plan: StepPlan, speculative: NDArray[np.int64]) -> NDArray[np.int64]:
        ends = self._rows.num_computed[speculative] + 1 + plan.speculate
        draft_tokens = draft(
            self._rows, speculative, plan.speculate, plan.break_even, num_ids=self._num_known[speculative], ends=ends
        )
        # A sampled token changes the row's penalties, and the device counts one token per row and step.
        draft_tokens[self._has_penalties[speculative]] = 0
        return within(draft_tokens, len(self._cache.spare_states)) if self._rows.has_states else draft_tokens

    def _edits(self, plan: StepPlan, lifted: list[int]) -> list[Edit]:
        """lifted: rows whose end tokens are allowed from now on."""
        edits = []
        for opened in plan.open:
            if self._has_penalties[opened.row]:
                edits += history_edits(opened, self._vocab_size)
        for row in dict.fromkeys([*(opened.row for opened in plan.open), *lifted]):
            bias = self._rows.bias(row)
            if bias or row in lifted:
                edits.append(bias_edit(row, bias))
        return edits

    def _send(
        self,
        packet: HostPacket,
        step: _Rows,
        samples: Samples,
        states: StateRows | None,
        opens: tuple[RowOpen, ...],
    ) -> _Sent:
        """Sends a step's packet. states: of a model with recurrent layers."""
        shape, num_step, ids, ids_at = self._fill(packet, step, self._size(step.counts))
        if states is not None:
            num_step += fill_states(packet.step[num_step:], states)
        first = num_step
        if opens:
            first, records = packet.opens(num_step, len(opens))
            write_opens(opens, records)
            num_step = first + records.size
        parts = self._fill_samples(packet, samples)
        used = packet.used(num_step, num_parts=len(parts), has_tiles=shape.tile_rows > 0)
        self._queue.send(packet.whole[used], self._packet.whole[used])
        return _Sent(shape, parts, slice(first, first + OPEN_FIELDS * len(opens)), ids, ids_at)

    def _send_empty(self) -> None:
        """A packet that every shape can be recorded with."""
        if self._emptied is not None:
            self._emptied.wait()  # its memory is still read by the last copy
        packet, none = self._empty, _NO_IDS
        _, num_step, _, _ = self._fill(packet, _NO_ROWS, (0, 0))
        if self._rows.has_states:
            num_step += fill_states(packet.step[num_step:], StateRows.of(self._cache.storage, [], [], []))
        packet.tiles[:, 2] = 0
        for number in range(len(packet.parts)):
            self._fill_part(packet, number, Samples(none, none, none, none))
        used = packet.used(num_step, num_parts=len(packet.parts), has_tiles=True)
        self._queue.send(packet.whole[used], self._packet.whole[used])
        self._emptied = self._queue.mark()

    def _size(self, counts: NDArray[np.int64]) -> tuple[int, int]:
        """From which the shape of a pass follows: its tokens, and the most of a row. With KV domains these are the most
        of any of them, so all ranks choose the same shape: they exchange tensors of its size, and NCCL needs steps that
        all of them have recorded, or none."""
        if self._domain is not None:
            return self._domain.num_most, self._domain.longest
        return int(counts.sum()), int(counts.max(initial=0))

    def _fill(
        self, packet: HostPacket, step: _Rows, size: tuple[int, int]
    ) -> tuple[StepShape, int, NDArray[np.int32], NDArray[np.int64]]:
        """Writes the rows and tokens of the packet. size: `_size` of them. Returns the shape of the pass, the length of
        the packet's last section, and `_Sent.ids` and `ids_at`."""
        picked, counts, starts, nums, _ = step
        rows = self._rows
        # Decode attention sums in another order than prompt attention, so `deterministic` does without it.
        num_decode = 0 if self._config.deterministic else int(np.count_nonzero(counts == 1))
        total, most = size
        num_behind = self._num_unsure[picked]
        num_ids, bases = counts + num_behind, starts - num_behind
        firsts = np.cumsum(num_ids) - num_ids
        ids_at = firsts - bases
        row_of_id = np.repeat(picked, num_ids)
        positions = np.arange(len(row_of_id)) - np.repeat(ids_at, num_ids)
        ids = rows.ids[row_of_id, np.minimum(positions, rows.ids.shape[1] - 1)]
        ids[firsts[bases >= self._num_known[picked]]] = -1
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
            ids=ids,
            places=self._num_sent[picked],
            num_new=num_new,
            pages=rows.tables[:, row_of_block, place],
            num_decode=num_decode,
            num_behind=num_behind,
            num_samples=nums,
            num_prompt=rows.num_prompt[picked],
            rotary_firsts=rows.regime[picked] * (self._config.model.regime_limit or 0),
        )
        self._num_sent[picked] = num_blocks
        if most <= 1 and num_decode == len(picked):  # also if there are no rows
            return StepShape(at_least(self._decode_sizes, max(total, 1)), 0), num_step, ids, ids_at
        tile_rows = DRAFT_ROWS if most <= DRAFT_ROWS else PROMPT_ROWS
        if self._config.deterministic:
            tile_rows = INVARIANT_ROWS
        lens = counts.copy()
        lens[:num_decode] = 0
        work = extend_work(lens, starts + counts, tile_tokens(self._decoder.group, tile_rows))
        work[1:, 1] += num_decode
        packet.tiles[: len(work)] = work
        sizes = self._decode_sizes if most == 1 else self._mixed_sizes
        return StepShape(at_least(sizes, total), tile_rows), num_step, ids, ids_at

    def _fill_samples(self, packet: HostPacket, samples: Samples) -> list[tuple[int, SampleShape]]:
        """Writes the samples of the packet. Returns the parts: index of the first sample, and shape."""
        firsts = range(0, len(samples.rows), self._part)
        return [(first, self._fill_part(packet, number, samples)) for number, first in enumerate(firsts)]

    def _fill_part(self, packet: HostPacket, number: int, samples: Samples) -> SampleShape:
        """Writes one part of the samples."""
        rows, target = self._rows, packet.parts[number]
        part = slice(number * self._part, (number + 1) * self._part)
        picked = samples.rows[part]
        num = len(picked)
        target.tokens[:num], target.tokens[num:] = samples.tokens[part], 0
        target.rows[:num], target.rows[num:] = picked, self._limits.rows
        target.places[:] = target.masks[:] = target.asking[:] = -1
        if rows.masks:
            places = np.full(self._limits.rows, -1, np.int32)
            places[list(rows.masks)] = np.arange(len(rows.masks))
            target.masks[:num] = places[picked]
        edits = np.flatnonzero(rows.edits_logits[picked] | rows.is_masked[picked])
        asking = np.flatnonzero(rows.num_logprobs[picked] >= 0)
        target.places[edits] = np.arange(len(edits))
        target.asking[: len(asking)] = asking
        is_sampled = rows.temperature[picked] > 0
        is_filtered = is_sampled & ((rows.top_k[picked] > 0) | (rows.top_p[picked] < 1) | (rows.min_p[picked] > 0))
        kind = 2 if is_filtered.any() else int(is_sampled.any())
        size = at_least(self._sample_sizes, max(num, 1))
        return SampleShape(size, kind, len(edits) > 0, len(asking) > 0)

    def _send_masks(self, slot: _Slot) -> None:
        """Sends the masks in the order of `Rows.masks`. The queue keeps order, so earlier steps have read theirs."""
        device_masks, masks = self._state.masks, self._rows.masks
        if slot.masks is None:
            slot.masks = self._queue.host_memory(device_masks.numel(), torch.int32).view(device_masks.shape)
        np.stack(list(masks.values()), out=slot.masks.numpy()[: len(masks)])
        self._queue.send(slot.masks[: len(masks)], device_masks[: len(masks)])

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

    def _score(self, scores: PromptScores, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`PromptScores.compute` in the scratch of samplings. targets: on the device."""
        shape = len(targets), 1 + min(scores.num_best, self._vocab_size)
        ids, values = (torch.empty(shape, dtype=of, device=targets.device) for of in (torch.int32, torch.float32))
        for at in range(0, len(targets), self._limits.scored):
            own = slice(at, at + self._limits.scored)
            first, num = scores.first + at, len(targets[own])
            tokens = torch.arange(first, first + num, dtype=torch.int32, device=targets.device)
            self._state.score(self._decoder.sampled_logits(tokens), targets[own], ids[own], values[own])
        return ids, values

    def _read(self, step: _Launched) -> Sampled:
        """Waits for a step's results and takes them from its slot. Steps are read in the order of their launches."""
        if step.result is not None:
            return step.result
        assert step.done is not None, "a step that has not sampled"
        step.done.wait()
        if not self._samples:
            step.result = Sampled({})
            return step.result
        samples, slot = step.samples, step.slot
        ids = step.ids = slot.ids[: len(samples.rows)].numpy().astype(np.int64)
        kept = step.kept = self._accepted(step)
        logprobs = {}
        asking = np.flatnonzero(step.num_logprobs >= 0)
        in_part = np.bincount(asking // self._part, minlength=1)  # a part's log-probabilities stand at its beginning
        moved = np.repeat(np.arange(len(in_part)) * self._part - (np.cumsum(in_part) - in_part), in_part)
        for i, at in zip(asking.tolist(), (np.arange(len(asking)) + moved).tolist(), strict=True):
            width = 1 + min(int(step.num_logprobs[i]), self._vocab_size)
            if ids[i] >= 0:
                row = slot.best_ids[at : at + 1, :width].numpy(), slot.best_values[at : at + 1, :width].numpy()
                logprobs[int(samples.order[i])] = row_logprobs(*row)
        prompt = {index: row_logprobs(best.numpy(), values.numpy()) for index, best, values in step.prompt}
        vectors = {}
        for pooled, states in step.pooled:
            vector = pooled.take(None if states is None else states.numpy().copy())
            if vector is not None:
                vectors[pooled.index] = vector
        step.result = take_in(step.plan, samples, ids, kept, step.draft_tokens, prompt, logprobs, vectors)
        step.prompt, step.pooled, step.held, step.landed, step.draft_copies = [], [], [], [], None
        return step.result

    def _accepted(self, step: _Launched) -> NDArray[np.bool_]:
        """Which samples of a step are part of the text, as the device has decided. Corrects the lengths of rows, and
        the positions of later steps, that count rejected draft tokens."""
        samples, rows = step.samples, self._rows
        if not step.draft_tokens.any():
            return np.ones(len(samples.rows), np.bool_)
        drafts = step.sent_ids[np.minimum(step.ids_at + samples.ends, len(step.sent_ids) - 1)]
        kept = up_to_wrong(samples.rows, drafts != step.ids)
        num_wrong = np.bincount(samples.rows[~kept], minlength=self._limits.rows)
        num_opens: NDArray[np.int64] = np.full(self._limits.rows, -1)
        num_opens[samples.rows] = step.num_opens
        is_same = num_opens == self._num_opens
        rows.num_computed -= np.where(is_same, num_wrong, 0)
        rows.num_ids -= np.where(is_same, num_wrong, 0)
        speculative = np.frombuffer(step.plan.rows, "<i4", len(step.draft_tokens))
        self._num_unsure[speculative] -= np.where(is_same[speculative], step.draft_tokens, 0)
        for later in self._unknown:
            if later is not step and later.result is None:
                own = later.samples.rows
                later.samples.ends[:] -= np.where(num_opens[own] == later.num_opens, num_wrong[own], 0)
        return kept

    def _learn(self, num_left: int) -> None:
        """Adds the samples of all but the last `num_left` steps to the text from which draft tokens come, of rows that
        were not opened again since."""
        rows = self._rows
        while len(self._unknown) > num_left:
            step = self._unknown[0]
            self._read(step)
            self._unknown.popleft()
            assert step.kept is not None
            samples = step.samples
            kept = step.kept & (self._num_opens[samples.rows] == step.num_opens)
            own, ends = samples.rows[kept], samples.ends[kept]
            rows.ids[own, ends] = np.maximum(step.ids[kept], 0)
            self._num_known[own] = ends + 1  # NumPy keeps the last of a row's assignments
            if step.draft_tokens.any():
                learn_drafts(step.plan, rows, samples, kept, step.draft_tokens)
