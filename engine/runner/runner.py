"""One model on one device: loads it, opens its KV cache, and runs plans.

The worker process calls it and knows nothing of torch. Life: `load`, `offer`, `open_cache`, then `launch` and `collect`
in turn; plans are answered in the order they were launched. The runner keeps the rows (see `rows.py`); everything else
about a request is the core's.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config import EngineConfig
from ...errors import ConfigError
from ...ipc.messages import RowLogprobs, StepPlan, StepResult, Transferred, ids_to_bytes
from ..attention.base import AttentionBackend
from ..cache.kv_cache import KvCache
from ..device.base import Device, choose_device
from ..extension.load import load_extension
from ..kv_connector.attention import ConnectorAttention
from ..kv_connector.base import ConnectorFacts, WorkerConnector
from ..kv_connector.registry import worker_connector
from ..models import registry
from ..models.decoder import Model
from ..models.spec import ModelSpec, read_spec
from ..parallel.collectives import Group, join
from ..parallel.place import Place
from ..weights.dummy import fill_dummy
from ..weights.loader import load_weights
from ..weights.mapping import checkpoint_targets
from ..weights.reader import CheckpointReader
from .backend import Backend, choose_backend
from .logprobs import best_logprobs, row_logprobs
from .memory import MemoryPlan, workspace_bytes
from .ngram import guess, learn
from .rows import Rows
from .sampler import Sampler
from .step_inputs import StepInputs, step_inputs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ALONE = Place()
_LOGITS_BYTES = 32 << 20  # most float32 logits of prompt positions at once


class Runner:
    """See the head of the file. One thread, which also called `load`."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        model: Model,
        device: Device,
        group: Group,
        backend: Backend,
        memory: MemoryPlan,
        timings: dict[str, float],
    ) -> None:
        self.timings = timings  # part of the start → seconds
        self._config = config
        self._model = model
        self._device = device
        self._group = group
        self._backend = backend
        self._memory = memory
        self._rows = Rows(num_rows=config.max_num_seqs, max_len=config.max_model_len, block_size=config.block_size)
        self._sampler = Sampler(vocab_size=config.vocab_size, device=device.torch_device, ops=backend.ops)
        self._num_blocks = 0  # of the cache, once it is open
        self._cache: KvCache | None = None
        self._attention: AttentionBackend | None = None
        self._connector: WorkerConnector | None = None
        self._connector_attention: ConnectorAttention | None = None
        self._results: deque[StepResult] = deque()

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        place: Place = _ALONE,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Runner":
        """Reads the checkpoint, or this rank's part of it. `progress` is told (bytes done, bytes in all). Raises
        ConfigError, CheckpointError, and StartError if the ranks do not meet."""
        timings = {}
        started = time.perf_counter()
        folder = Path(config.model_path)
        spec = read_spec(folder)
        size = config.tensor_parallel_size
        device = choose_device(config.device, num_threads=config.num_threads, place=place)
        group = join(place, size, device.torch_device)
        if size > 1:
            timings["ranks"] = time.perf_counter() - started
            started = time.perf_counter()
        dtype = _DTYPES[config.dtype]
        backend = choose_backend(device.torch_device, dtype, spec.dtype, int8=config.quantization == "int8")
        model, weights = _load_model(config, spec, folder, dtype, device.torch_device, backend, group, progress)
        timings["weights"] = time.perf_counter() - started
        model.kv_shape = replace(model.kv_shape, dtype=_DTYPES[config.kv_cache_dtype])
        block = model.kv_shape.block_bytes(config.block_size)
        workspace = workspace_bytes(
            tokens=config.max_num_batched_tokens,
            rows=config.max_num_seqs,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size // size,
            vocab_size=spec.vocab_size,
            itemsize=dtype.itemsize,
            cache_bytes=_blocks_needed(config) * block // model.kv_shape.num_layers,
        )
        memory = MemoryPlan(
            weights=weights,
            workspace=workspace,
            block=block,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
        )
        return cls(
            config=config, model=model, device=device, group=group, backend=backend, memory=memory, timings=timings
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the operator; the KV cache as it was opened, or before that as it would be offered."""
        size = self._group.size
        ranks = (f"{size} ranks; each of them:",) if size > 1 else ()
        return (*ranks, self._backend.note, *self._memory.lines(self._num_blocks or self.offer()))

    @property
    def block_bytes(self) -> int:
        """Of one KV block, all layers."""
        return self._memory.block

    @property
    def num_pending(self) -> int:
        """Plans launched and not collected."""
        return len(self._results)

    @property
    def num_transfers(self) -> int:
        """KV transfers under way, of which `take_transferred` will tell."""
        return 0 if self._connector is None else self._connector.num_pending

    def offer(self) -> int:
        """Blocks that there is room for: what `kv_cache_memory` holds, or as many as could ever be used if the device's
        free memory allows it. At least one."""
        if self._config.kv_cache_memory is not None:
            return self._memory.num_blocks(self._config.kv_cache_memory)
        return min(self._memory.num_blocks(self._device.cache_memory()), _blocks_needed(self._config))

    def open_cache(self, num_blocks: int) -> None:
        """Allocates the KV cache, and starts what the configuration puts beside it. Once, before the first `launch`.
        Raises ConfigError."""
        assert self._attention is None, "the cache is open already"
        cache = KvCache(
            shape=self._model.kv_shape,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            device=self._device.torch_device,
        )
        self._num_blocks = num_blocks
        self._cache = cache
        self._attention = self._backend.attention(cache)
        if self._config.extension is not None:
            extension, options = load_extension(self._config.extension)
            self._attention = extension.wrap_attention(options, self._attention, cache)
        if self._config.kv_connector:
            facts = ConnectorFacts(
                block_size=self._config.block_size, block_bytes=self.block_bytes, model_key=self._config.kv_model_key
            )
            self._connector = worker_connector(self._config.kv_connector, facts)
            assert self._connector is not None, self._config.kv_connector
            self._connector.register_kv_caches(cache)
            self._attention = self._connector_attention = ConnectorAttention(self._attention, self._connector)

    def launch(self, plan: StepPlan) -> None:
        """Runs the plan; its result waits for `collect`."""
        for row in plan.open:
            self._rows.open(row)
        self._rows.grow(np.frombuffer(plan.grow_rows, "<i4"), np.frombuffer(plan.grow_blocks, "<i4"))
        connector = self._connector if plan.kv else None
        if self._connector_attention is not None:
            self._connector_attention.is_active = connector is not None
        with torch.inference_mode():
            if connector is not None:
                connector.bind_connector_metadata(plan.kv)
                connector.start_load_kv()
            started = time.perf_counter()  # the connector says itself what its transfers cost
            self._copy_blocks(plan)
            drawn = self._run(plan)
            if connector is not None:
                connector.wait_for_save()
        self._device.synchronize()
        self._results.append(
            StepResult(
                step=plan.step,
                ids=drawn.ids.astype("<i4").tobytes(),
                logprobs=drawn.logprobs,
                prompt_logprobs=drawn.prompt_logprobs,
                device_ms=(time.perf_counter() - started) * 1000,
                num_drawn=drawn.nums.astype("<i4").tobytes(),
                num_drafts=int(np.count_nonzero(drawn.guesses)),
                num_draft_tokens=int(drawn.guesses.sum()),
            )
        )

    def collect(self) -> StepResult:
        """The result of the oldest plan that was launched. Raises IndexError if there is none."""
        return self._results.popleft()

    def take_transferred(self) -> Transferred | None:
        """KV transfers that are over and were not told before, if there are any."""
        connector = self._connector
        if connector is None:
            return None
        sent, loaded = connector.get_finished()
        if not sent and not loaded:
            return None
        failed = sorted(connector.get_block_ids_with_load_errors())
        num_blocks, load_ms = connector.take_load_cost()
        return Transferred(tuple(sorted(loaded)), ids_to_bytes(failed), tuple(sorted(sent)), num_blocks, load_ms)

    def close(self) -> None:
        """Ends what the KV connector has running."""
        if self._connector is not None:
            self._connector.close()
            self._connector = None

    def _copy_blocks(self, plan: StepPlan) -> None:
        if plan.copies:
            assert self._cache is not None, "launch before open_cache"
            pairs = torch.from_numpy(np.frombuffer(plan.copies, "<i4").astype(np.int64)).to(self._device.torch_device)
            self._cache.copy(pairs[::2], pairs[1::2])

    def _run(self, plan: StepPlan) -> "_Drawn":
        """What the pass gave, and the rows brought up to date."""
        assert self._attention is not None, "launch before open_cache"
        if not plan.rows:
            return _Drawn({})
        device, rows = self._device.torch_device, self._rows
        speculative = np.frombuffer(plan.rows, "<i4", plan.num_speculative).astype(np.int64)
        guesses = guess(rows, speculative, plan.speculate, plan.break_even)
        step = step_inputs(plan, rows, guesses, block_size=self._config.block_size, device=device)
        self._attention.begin(step.attention)
        hidden = self._model.hidden(step.ids, step.positions, self._attention)

        prompt_logprobs = self._prompt_logprobs(hidden, step)
        rows.num_computed[step.rows] += step.counts
        draws = step.drawn
        if not len(draws.rows):
            return _Drawn(prompt_logprobs)
        if len(draws.tokens) < hidden.shape[0]:
            hidden = hidden.index_select(0, torch.from_numpy(draws.tokens).to(device))
        parts: list[NDArray[np.int64]] = []
        logprobs: dict[int, RowLogprobs] = {}
        size = self._config.max_num_seqs  # there is memory for so many logits; only guesses need more
        for part in (slice(at, at + size) for at in range(0, len(draws.rows), size)):
            picked = draws.rows[part]
            if not rows.uses_logits[picked].any():
                parts.append(self._sampler.greedy(*self._model.greedy(hidden[part])))
                continue
            logits = self._model.logits(hidden[part])
            parts.append(self._sampler.sample(logits, rows, picked, draws.ends[part]))
            logprobs |= self._logprobs(logits, parts[-1], draws.order[part], rows.num_logprobs[picked])
        ids = np.concatenate(parts)
        kept = rows.append(draws.rows, draws.ends, ids)
        places = draws.order[kept]
        ids = ids[kept][np.argsort(places, kind="stable")]
        if not guesses.any():
            return _Drawn(prompt_logprobs, logprobs, ids)
        nums = np.bincount(places, minlength=len(step.order))
        made = np.flatnonzero(guesses)
        learn(rows, speculative[made], nums[made] - 1 >= plan.break_even * guesses[made], plan.break_even)
        return _Drawn(prompt_logprobs, logprobs, ids, nums[np.frombuffer(plan.sample, np.bool_)], guesses)

    def _logprobs(
        self, logits: Tensor, ids: NDArray[np.int64], plan_rows: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> dict[int, RowLogprobs]:
        """Of the tokens drawn, for the rows that want them. All arguments are parallel."""
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

    def _prompt_logprobs(self, hidden: Tensor, step: StepInputs) -> dict[int, RowLogprobs]:
        """For the rows that want them: of each prompt token whose predecessor this step computed."""
        rows = self._rows
        result = {}
        slice_len = max(1, _LOGITS_BYTES // (4 * self._config.vocab_size))
        for place in np.flatnonzero(rows.num_prompt_logprobs[step.rows] >= 0).tolist():
            row, start, first = int(step.rows[place]), int(step.starts[place]), int(step.first_tokens[place])
            num_positions = min(int(step.counts[place]), int(rows.num_prompt[row]) - 1 - start)
            if num_positions <= 0:
                continue
            targets = torch.from_numpy(rows.ids[row, start + 1 : start + 1 + num_positions].astype(np.int64))
            parts = [
                best_logprobs(
                    self._model.logits(hidden[first + at : first + min(at + slice_len, num_positions)]),
                    targets[at : at + slice_len].to(hidden.device),
                    int(rows.num_prompt_logprobs[row]),
                )
                for at in range(0, num_positions, slice_len)
            ]
            ids, values = (np.concatenate(column) for column in zip(*parts, strict=True))
            result[int(step.order[place])] = row_logprobs(ids, values)
        return result


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Drawn:
    """What a step gave; see `StepResult`."""

    prompt_logprobs: dict[int, RowLogprobs]
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    ids: NDArray[np.int64] = field(default_factory=_none)  # those of each row that draws, in the plan's order
    nums: NDArray[np.int64] = field(default_factory=_none)  # how many of them each of these rows drew; empty: one each
    guesses: NDArray[np.int64] = field(default_factory=_none)  # of each speculative row


def _load_model(
    config: EngineConfig,
    spec: ModelSpec,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
    group: Group,
    progress: Callable[[int, int], None] | None,
) -> tuple[Model, int]:
    """(the model with its weights, their bytes). Raises ConfigError, CheckpointError."""
    max_len = config.max_model_len
    model = registry.build_native(
        spec,
        max_len=max_len,
        dtype=dtype,
        weight_dtype=backend.weight_dtype,
        device=device,
        group=group,
        ops=backend.ops,
    )
    if model is None:
        if group.size > 1:
            known = ", ".join(registry.NATIVE)
            raise ConfigError(f"--tensor-parallel-size is there for {known}; this is {spec.architecture}.")
        if config.load_format == "dummy":
            known = ", ".join(registry.NATIVE)
            raise ConfigError(f"--load-format dummy is there for {known}; this is {spec.architecture}.")
        if config.quantization is not None:
            known = ", ".join(registry.NATIVE)
            raise ConfigError(f"--quantization is there for {known}; this is {spec.architecture}.")
        from ..models.transformers_fallback import load_fallback

        CheckpointReader(folder).close()  # complains of damaged and missing files in our own words
        return load_fallback(spec, folder, max_len=max_len, dtype=dtype, device=device)
    parameters = dict(model.named_parameters())
    if config.load_format == "dummy":
        fill_dummy(parameters)
    else:
        with CheckpointReader(folder) as reader:
            load_weights(
                reader,
                parameters,
                checkpoint_targets(parameters, model.fused, model.cuts),
                redundant=model.redundant,
                progress=progress,
            )
    del parameters  # so that each goes as it is packed
    num_bytes = model.pack(backend.ops)
    return (backend.model(model) if group.size == 1 else model), num_bytes  # ranks exchange between its layers


def _blocks_needed(config: EngineConfig) -> int:
    """Blocks for as many requests as may run at once, each as long as it may get."""
    return config.max_num_seqs * -(-config.max_model_len // config.block_size)
