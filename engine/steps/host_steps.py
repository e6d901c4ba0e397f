"""Steps that run one at a time: the host knows every token before it starts the next step. On a CPU that costs
nothing."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config.config import EngineConfig
from ...ipc.messages import RowLogprobs, StepPlan
from ...kernels.ops import Ops
from ..attention.base import AttentionBackend
from ..attention.kv_cache import KvCache
from ..executors.base import DescribedModel, Model
from ..parallel.domains import Domain
from ..plugin.guard import PluginGuard
from .base import ImmediateSteps, copy_blocks
from .draft_states import DraftStates, within
from .encoder_pass import EncoderPass
from .logprobs import PromptScores, best_logprobs, prompt_scores, row_logprobs
from .ngram import draft
from .pooling import RowPooler
from .rows import Rows
from .sampled import Sampled, learn_drafts, take_in
from .sampler import Sampler
from .step_inputs import StepInputs, step_inputs


@dataclass
class _Passed:
    """A plan whose pass has run. Without rows, there is nothing to sample."""

    plan: StepPlan
    started: float
    ended: float = 0.0  # if it has late rows
    hidden: Tensor | None = None  # [tokens, hidden size]
    step: StepInputs | None = None
    draft_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # per speculative row
    draft_states: DraftStates | None = None
    prompt: dict[int, RowLogprobs] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)


class HostSteps(ImmediateSteps):
    def __init__(
        self,
        *,
        config: EngineConfig,
        model: Model,
        cache: KvCache,
        attention: AttentionBackend,
        ops: Ops,
        synchronize: Callable[[], None],
        domain: Domain | None = None,
        agree: Callable[[], None] = lambda: None,
        plugin: PluginGuard | None = None,
        encoder: Model | None = None,
    ) -> None:
        """domain: of this rank, of a model that can be divided; None: there is one domain. agree: called at the end of
        a pass, and of sampling; raises an error if another rank has failed there. plugin: the same that the model's
        executor calls between layers. encoder: that the model reads, if there is one."""
        super().__init__()
        self._domain = domain
        self._agree = agree
        self._plugin = plugin
        self._config = config
        self._model = model
        self._cache = cache
        self._attention = attention
        self._device = cache.device
        self._synchronize = synchronize
        self.rows = Rows(
            num_rows=config.max_num_seqs,
            max_len=config.max_model_len,
            block_size=config.block_size,
            vocab_size=config.model.vocab_size,
            groups=cache.groups,
        )
        self._encoder = None if encoder is None else EncoderPass(encoder, cache, ops)
        self._pooler = RowPooler(num_rows=config.max_num_seqs)
        self._passed: _Passed | None = None  # the plan launched last, until it has sampled
        self._sampler = Sampler(vocab_size=config.model.vocab_size, device=self._device, ops=ops)

    def launch(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        self.begin(plan)
        self._passed = self._pass(plan, started)
        if plan.late_rows:
            self._synchronize()
            self._agree()
            self._passed.ended = time.perf_counter()
        else:
            self.sample({})

    def sample(self, masks: Mapping[int, bytes]) -> None:
        passed, self._passed = self._passed, None
        assert passed is not None, "no plan waits for masks"
        self.rows.mask_late(masks)
        wait_s = time.perf_counter() - passed.ended if passed.plan.late_rows else 0.0
        sampled = self._sample(passed)
        self._synchronize()
        self._agree()
        device_s = time.perf_counter() - passed.started - wait_s
        self._results.append(sampled.result(passed.plan.step, 1000 * device_s, 1000 * wait_s))

    def begin(self, plan: StepPlan) -> None:
        """Applies what precedes the pass."""
        for row in plan.open:
            self.rows.open(row)
            self._pooler.open(row)
        if self._plugin is not None:
            self._plugin.open(plan.open)
        self.rows.mask(plan)
        self.rows.grow(plan)
        copy_blocks(plan, self._cache)
        self._clear_rests(plan)

    def _clear_rests(self, plan: StepPlan) -> None:
        """Clears the rest of a block in whose middle a row begins: it may hold stale numbers, NaN among them."""
        for row in plan.open:
            index, first = divmod(row.num_computed, self._config.block_size)
            if first:
                for table, page in self.rows.pages_of_block(row.row, index):
                    self._cache.clear_rest(table, page, first)

    def _pass(self, plan: StepPlan, started: float) -> "_Passed":
        """Runs the forward pass, and updates the rows as far as it computed them."""
        passed = _Passed(plan, started)
        if self._domain is not None:
            self._domain.begin(plan)
        if not plan.rows:
            if self._domain is not None and self._domain.num_all:
                cast(DescribedModel, self._model).help_others(self._attention)
            return passed
        rows = self.rows
        if self._encoder is not None:
            self._encoder.run(plan, rows)
        draft_tokens = self.propose(plan)
        if rows.has_states and draft_tokens.any():
            draft_tokens = within(draft_tokens, len(self._cache.spare_states))
            passed.draft_states = DraftStates.of(plan, rows, draft_tokens, self._cache.spare_states)
        step = self.inputs(plan, draft_tokens, passed.draft_states)
        if self._plugin is not None:
            self._plugin.begin(
                plan.step, step.rows, step.order, step.starts, step.counts, step.ids, step.positions, rows.ids,
                rows.num_ids,
            )  # fmt: skip
        self._take_hidden(
            passed, step, self._model.hidden(step.ids, step.positions, self._attention, step.regimes), draft_tokens
        )
        return passed

    def propose(self, plan: StepPlan) -> NDArray[np.int64]:
        """Writes draft tokens behind the ids of the plan's speculative rows. Returns their number for each."""
        speculative = np.frombuffer(plan.rows, "<i4", plan.num_speculative).astype(np.int64)
        return draft(self.rows, speculative, plan.speculate, plan.break_even)

    def inputs(
        self, plan: StepPlan, draft_tokens: NDArray[np.int64], draft_states: DraftStates | None = None
    ) -> StepInputs:
        """Prepares the pass over a plan with rows."""
        step = step_inputs(plan, self.rows, draft_tokens, cache=self._cache, draft_states=draft_states)
        if step.fresh_pages is not None:
            self._cache.clear(step.fresh_pages)
        self._attention.begin(step.attention)
        return step

    def finish(self, plan: StepPlan, step: StepInputs, hidden: Tensor, draft_tokens: NDArray[np.int64]) -> Sampled:
        """What follows the pass: samples, and updates the rows. hidden: [tokens, hidden_size], of the step's tokens."""
        passed = _Passed(plan, 0.0)
        self._take_hidden(passed, step, hidden, draft_tokens)
        return self._sample(passed)

    def _take_hidden(
        self, passed: "_Passed", step: StepInputs, hidden: Tensor, draft_tokens: NDArray[np.int64]
    ) -> None:
        """What follows the pass and needs no masks."""
        rows = self.rows

        def logits_of(first: int, last: int) -> Tensor:
            return self._model.logits(hidden[first:last])

        passed.prompt = {
            each.index: row_logprobs(*self._prompt_logprobs(each, logits_of))
            for each in prompt_scores(rows, step.rows, step.starts, step.counts, step.order)
        }
        for pooled in self._pooler.states(
            step.rows, step.starts, step.counts, step.order, rows.num_prompt, lambda first, last: hidden[first:last]
        ):
            vector = pooled.take(None if pooled.states is None else pooled.states.cpu().numpy())
            if vector is not None:
                passed.vectors[pooled.index] = vector
        rows.num_computed[step.rows] += step.counts
        rows.advance_states(step.rows)
        passed.hidden, passed.step, passed.draft_tokens = hidden, step, draft_tokens

    def _sample(self, passed: "_Passed") -> Sampled:
        """What follows the masks."""
        sampled = self._sampled(passed)
        if self._plugin is None or passed.step is None:
            return sampled
        return replace(sampled, plugin=self._plugin.end(self.rows.ids, self.rows.num_ids))

    def _sampled(self, passed: "_Passed") -> Sampled:
        """Samples, and updates the rows by what was sampled."""
        plan, rows, prompt, vectors, hidden = passed.plan, self.rows, passed.prompt, passed.vectors, passed.hidden
        if passed.step is None or hidden is None or not len(passed.step.sampled.rows):
            return Sampled(prompt, vectors=vectors)
        samples, draft_tokens, draft_states = passed.step.sampled, passed.draft_tokens, passed.draft_states
        rows.lift_minimum(samples.rows, samples.ends)
        if len(samples.tokens) < hidden.shape[0]:
            hidden = hidden.index_select(0, torch.from_numpy(samples.tokens).to(self._device))
        parts: list[NDArray[np.int64]] = []
        logprobs: dict[int, RowLogprobs] = {}
        size = self._config.max_num_seqs  # the workspace has this many rows of logits; only draft tokens need more
        for part in (slice(at, at + size) for at in range(0, len(samples.rows), size)):
            picked = samples.rows[part]
            is_edited = self._plugin is not None and self._plugin.edits_logits
            if not is_edited and not (rows.uses_logits | rows.is_masked)[picked].any():
                parts.append(self._sampler.greedy(*self._model.greedy(hidden[part])))
                continue
            logits = self._model.logits(hidden[part])
            edited = logits
            if self._plugin is not None and is_edited:
                edited = logits.clone() if (rows.num_logprobs[picked] >= 0).any() else logits
                self._plugin.on_logits(edited, picked, samples.ends[part])
            parts.append(self._sampler.sample(edited, rows, picked, samples.ends[part]))
            logprobs |= self._logprobs(logits, parts[-1], samples.order[part], rows.num_logprobs[picked])
        ids = np.concatenate(parts)
        kept = rows.append(samples.rows, samples.ends, ids)
        if draft_tokens.any():
            learn_drafts(plan, rows, samples, kept, draft_tokens)
        sampled = take_in(plan, samples, ids, kept, draft_tokens, prompt, logprobs, vectors)
        if draft_states is not None and (copies := draft_states.copies(rows)) is not None:
            self._cache.copy(*copies)
        return sampled

    def _prompt_logprobs(
        self, scores: PromptScores, logits_of: Callable[[int, int], Tensor]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        targets = torch.from_numpy(scores.targets).to(self._device)
        ids, values = scores.compute(targets, logits_of, self._config.model.vocab_size)
        return ids.cpu().numpy(), values.cpu().numpy()

    def _logprobs(
        self, logits: Tensor, ids: NDArray[np.int64], plan_rows: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> dict[int, RowLogprobs]:
        """The log-probabilities of the sampled tokens, for the rows that want them. All arguments are parallel."""
        asking = np.flatnonzero((wanted >= 0) & (ids >= 0))
        if not len(asking):
            return {}
        index = torch.from_numpy(asking).to(logits.device)
        chosen = torch.from_numpy(ids[asking]).to(logits.device)
        best_ids, values = best_logprobs(logits[index], chosen, int(wanted[asking].max()))
        return {
            int(plan_rows[i]): row_logprobs(best_ids[j : j + 1, : wanted[i] + 1], values[j : j + 1, : wanted[i] + 1])
            for j, i in enumerate(asking.tolist())
        }
