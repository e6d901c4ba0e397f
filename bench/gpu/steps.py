"""The worker's step: its duration, the idle time between steps, and its memory compared with the forecast.

Plans are launched as the worker gets them, one ahead of the device. The context of one row is computed; the other rows
get copies of its blocks, which take as long to read.
"""

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ...config.flags import convert
from ...engine.runner.runner import Runner
from ...ipc.messages import RowLogprobs, RowOpen, Sampling, StepPlan, StepResult, bytes_to_ids, ids_to_bytes
from ...procs.prepare import prepare
from .figures import Figure, SkippedError
from .setting import Setting
from .timeline import busy_us, by_node, kernels_of, node_gaps_us, step_gaps_us

_AHEAD = 2  # plans in flight
_WARM_UP = 8  # steps; the third of a shape is recorded, on a GPU
_STEP_MS = {"qwen3-0.6b": 0.9, "llama-3.1-8b": 4.0}  # most of a step of one row
_MANY_MS = {"qwen3-0.6b": 8.0, "llama-3.1-8b": 13.0}  # and of 256 rows
_PROMPT_MS = {"llama-3.1-8b": 25.0}  # most to the first token of a prompt of 1k
_GAP_US = 50


class Stepper:
    """A runner, and plans for it. Decoding rows are opened once and reused."""

    def __init__(self, setting: Setting, *, max_len: int, rows: int, **flags: object) -> None:
        config = prepare(convert({**setting.flags(), "max_model_len": max_len, "max_num_seqs": rows, **flags}))
        self.runner = Runner.load(config, queue=setting.open_queue() if setting.smoke else None)
        self._blocks_a_row = -(-max_len // config.block_size)
        self.num_blocks = rows * self._blocks_a_row
        if self.num_blocks > (room := self.runner.offer()):
            raise SkippedError(
                f"{rows} rows of {max_len} tokens take {self.num_blocks} blocks; there is room for {room}."
            )
        self.runner.open_cache(self.num_blocks)
        self._vocab_size = config.model.vocab_size
        self._num_warm_up = setting.choose(_WARM_UP, 1)
        self._num_steps = 0

    def opened(self, row: int, num_ids: int, num_computed: int, logprobs: int | None = None) -> RowOpen:
        """A greedy row of random ids."""
        ids = np.random.default_rng(row).integers(self._vocab_size // 2, self._vocab_size, num_ids)
        blocks = np.arange(row * self._blocks_a_row, (row + 1) * self._blocks_a_row)
        sampling = Sampling(temperature=0, logprobs=logprobs)
        ids_of, blocks_of = ids_to_bytes(ids.tolist()), ids_to_bytes(blocks.tolist())
        return RowOpen(row, ids_of, num_ids, num_computed, blocks_of, sampling)

    def plan(
        self,
        counts: Sequence[int],
        opens: Sequence[RowOpen] = (),
        *,
        first: int = 0,
        samples: bool = True,
        copied_to: int | None = None,
    ) -> StepPlan:
        """A plan in which the rows from `first` on compute so many positions each, and sample. `copied_to`: a row that
        gets the blocks of row 0 first."""
        self._num_steps += 1
        num = len(counts)
        rows, columns = ids_to_bytes(list(range(first, first + num))), ids_to_bytes(list(counts))
        copies = b""
        if copied_to is not None:
            own = np.arange(self._blocks_a_row)
            copies = ids_to_bytes(np.stack((own, own + copied_to * self._blocks_a_row), axis=1).ravel().tolist())
        return StepPlan(self._num_steps, tuple(opens), b"", b"", rows, columns, bytes([samples] * num), copies)

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        """Runs the plans, one ahead of the device."""
        results = []
        for plan in plans:
            self.runner.launch(plan)
            if self.runner.num_pending == _AHEAD:
                results.append(self.runner.collect())
        while self.runner.num_pending:
            results.append(self.runner.collect())
        return results

    def decode_ms(self, rows: int, context: int, num: int) -> float:
        """Mean of `num` steps of the rows, which begin after `context` positions."""
        self.run([self.plan([context - 1], [self.opened(0, context, 0)], samples=False)])
        for row in range(1, rows):
            self.run([self.plan([], [self.opened(row, context, context - 1)], copied_to=row)])
        self.run([self.plan([1] * rows) for _ in range(1 + self._num_warm_up)])
        plans = [self.plan([1] * rows) for _ in range(num)]
        started = time.perf_counter()
        results = self.run(plans)
        taken = time.perf_counter() - started
        if any(-1 in bytes_to_ids(result.ids) for result in results):
            raise RuntimeError(f"logits that are not finite, of {rows} rows")
        return taken * 1e3 / num

    def prompt_ms(self, length: int, num: int) -> float:
        """Median from the launch of a step with a prompt to its token on the host."""
        found = []
        for _ in range(self._num_warm_up + num):
            plan = self.plan([length], [self.opened(0, length, 0)])
            started = time.perf_counter()
            self.run([plan])
            found.append((time.perf_counter() - started) * 1e3)
        return statistics.median(found[-num:])


def measure(setting: Setting) -> Iterator[Figure]:
    model, context = setting.model, setting.choose(1024, 16)
    num, many = setting.choose((200, 256), (2, 2))
    max_len, max_tokens = setting.choose((1280, 2048), (40, 16))
    stepper = Stepper(setting, max_len=max_len, rows=many, max_num_batched_tokens=max_tokens)
    ms = stepper.decode_ms(1, context, num)
    yield Figure(name=f"step, 1 × {context}", value=ms, unit="ms", most=_STEP_MS.get(model))
    ms = stepper.prompt_ms(context, setting.choose(20, 1))
    yield Figure(name=f"step, prompt of {context}", value=ms, unit="ms", most=_PROMPT_MS.get(model))
    for rows in setting.choose((8, 64, 256), (2,)):
        ms = stepper.decode_ms(rows, context, setting.choose(100, 2))
        most = _MANY_MS.get(model) if rows == many else None
        yield Figure(name=f"step, {rows} × {context}", value=ms, unit="ms", most=most)
    if not setting.smoke:
        yield from _of_device(stepper, many, context)


def _of_device(stepper: Stepper, rows: int, context: int) -> Iterator[Figure]:
    """The figures that need a GPU: idle time of the device and memory."""
    import torch

    memory = stepper.runner.memory
    accounted = memory.weights + memory.workspace + memory.graphs + stepper.num_blocks * memory.page_bytes
    taken = torch.cuda.max_memory_reserved() / accounted
    yield Figure(name="most memory taken, of what was accounted for", value=100 * taken, unit="%", most=100)
    stepper.decode_ms(rows, context, 1)
    plans = [stepper.plan([1] * rows) for _ in range(40)]
    kernels = kernels_of(lambda: stepper.run(plans))
    gaps = step_gaps_us(kernels)
    if not gaps:
        raise SkippedError("torch's profiler saw no steps, so nothing is known of what lies between them.")
    yield Figure(name=f"idle between steps, {rows} × {context}", value=statistics.median(gaps), unit="µs", most=_GAP_US)
    yield Figure(name="the longest of them", value=max(gaps), unit="µs")
    span = kernels[-1].end - kernels[0].start
    yield Figure(name="the device's time in which a kernel ran", value=100 * busy_us(kernels) / span, unit="%")


def nodes(setting: Setting) -> Iterator[Figure]:
    """A step of one row, kernel by kernel."""
    context, num = setting.choose((1024, 50), (16, 2))
    stepper = Stepper(setting, max_len=setting.choose(1280, 40), rows=1)
    ms = stepper.decode_ms(1, context, num)
    yield Figure(name=f"step, 1 × {context}", value=ms, unit="ms", most=_STEP_MS.get(setting.model))
    if setting.smoke:
        return
    kernels = kernels_of(lambda: stepper.run([stepper.plan([1]) for _ in range(num)]))
    found = by_node(kernels, num)
    if not found:
        raise SkippedError("torch's profiler saw no kernels.")
    yield Figure(name="kernels of a step", value=len(kernels) / num, unit="")
    yield Figure(
        name="between two kernels of a step, median", value=statistics.median(node_gaps_us(kernels)), unit="µs"
    )
    for name, (count, us) in found.items():
        yield Figure(name=f"{count:g} × {name[:60]}, each", value=us, unit="µs")


def probe(setting: Setting) -> Iterator[Figure]:
    """Whether a row has bit-identical logits alone and in a batch, with --deterministic."""
    context, sizes, pieces = setting.choose((512, (1, 7, 64), 4), (8, (2,), 2))
    max_len, max_tokens = setting.choose((1024, 2048), (16, 8))
    flags: dict[str, object] = {"deterministic": True, "max_num_batched_tokens": max_tokens}
    stepper = Stepper(setting, max_len=max_len, rows=max(sizes), **flags)

    def seen(rows: int, pieces: int) -> RowLogprobs:
        """The logits of row 0 after the prompts were computed in `pieces` chunks each."""
        for row in range(rows):
            for piece in range(pieces):
                opens = [] if piece else [stepper.opened(row, context, 0, logprobs=20)]
                is_last = piece == pieces - 1
                stepper.run([stepper.plan([context // pieces], opens, first=row, samples=is_last)])
        return stepper.run([stepper.plan([1] * rows)])[0].logprobs[0]

    alone = seen(1, 1)
    for rows, cuts in [*((rows, 1) for rows in sizes[:-1]), (sizes[-1], pieces)]:
        name = f"a row among {rows}, prompts in {cuts} piece(s): other bits than alone"
        yield Figure(name=name, value=int(seen(rows, cuts) != alone), unit="", most=0, is_proof=True)
