"""Tries the Triton kernels that a program needs, with the model's own sizes, and compares them with torch.

The steps are those that serve: `DeviceSteps` fills packets, and `TritonDecoder` prepares them. But each operation runs
by itself, on random numbers, so that an error does not reach the next one and is reported with its kernel's name.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...config.config import EngineConfig
from ...errors import BrokenDeviceError
from ...ipc.messages import PassReads
from ..attention.kv_cache import KvShape
from ..device.queue import Queue
from ..executors.registers import Registers as TorchRegisters
from ..models.program import GatedNormalize, GatedProduct, Product, Program, View
from ..parallel.collectives import Alone
from ..steps import trial
from ..steps.trial import Check, Expected, Fill, Report
from ..steps.trial_journal import TrialJournal
from .decoder import TritonDecoder
from .device_steps import DeviceModel, limits_of
from .packet import Packet
from .products import MAX_NARROW_ROWS, QuantizedProduct
from .rules import Part, largest_group, needs
from .shapes import StepShape
from .state import RowState
from .walk import Pass
from .weights import Loaded

OPTIONAL = frozenset(
    {
        "rms_norm", "gated_norm", "rotate", "activations", "elementwise", "row_statistics", "small_product",
        "quantized_product", "silu_mul", "widen", "round_rows",
    }
)  # fmt: skip
"""Kernels whose operation torch can compute in the midst of a step of the others. Without any other kernel the whole
model runs in torch."""
_MANY_ROWS = MAX_NARROW_ROWS + 1


def try_kernels(
    config: EngineConfig,
    program: Program,
    *,
    queue: Queue,
    dtype: torch.dtype,
    shape: KvShape,
    is_kept: bool,
    has_narrow_inputs: bool = False,
    fill: Fill,
    without: frozenset[str] = frozenset(),
    journal: TrialJournal,
) -> tuple[Check, ...]:
    """program: one that `rules.in_torch` does not refuse. shape: of its KV. is_kept: quantized matrices stay as they
    are stored. has_narrow_inputs: they were made for activations of 8 bits. without: kernels that are known to fail
    and not tried.
    Raises BrokenDeviceError if a kernel broke the device for this process."""
    has_many_rows = config.max_num_batched_tokens > MAX_NARROW_ROWS
    small, config = trial.trial_program(program), trial.trial_config(config)
    report = trial.report_for(dtype, shape.dtype)
    loaded = Loaded(dtype=dtype, device=queue.device, keeps=is_kept, has_narrow_inputs=has_narrow_inputs)
    packing = trial.packing_for(dtype, queue.device)
    fill(small, (loaded, packing))
    expected = Expected(config, small, packing, shape, dtype=dtype, samples=True)
    groups = shape.groups(config.block_size)
    limits = limits_of(
        config, group=largest_group(small), draft_tokens=0, tables=groups.num_tables - groups.state_pages,
        state_pages=groups.state_pages,
    )  # fmt: skip
    decoder = _TrialDecoder(
        small, loaded, shape=shape, group=Alone(), max_len=config.max_model_len, limits=limits, dtype=dtype,
        num_programs=queue.num_programs, is_deterministic=config.deterministic, without=without,
    )  # fmt: skip
    decoder.begin_trial(expected, report, queue, journal)
    model = DeviceModel(
        decoder=decoder, state=RowState(limits=limits, vocab_size=config.model.vocab_size, device=queue.device),
        limits=limits, queue=queue, kv_shape=shape, weights=0, workspace=0, graphs=0, reads=PassReads(), note="",
    )  # fmt: skip
    steps = model.steps(config, trial.empty_cache(config, shape, queue.device, head_major=True))
    for plan in trial.plans(config, shape, samples=True):
        expected.steps.launch(plan)
        wanted = expected.steps.collect()
        started = time.perf_counter()
        try:
            steps.launch(plan)
            found = steps.collect()
        except Exception as error:
            decoder.check_device()
            report.add(trial.module_of(error, "triton") or decoder.trying, problem=trial.summary_of(error))
            break
        ms = (time.perf_counter() - started) * 1000 - decoder.take_ms()
        problems = trial.compare_results(found, wanted)
        for name in ("sampling", "logprobs"):
            report.add(name, problem=problems.get(name, ""), ms=ms if name == "sampling" else 0.0)
        if problems:
            break  # the sides go on with other tokens
    if has_many_rows:
        decoder.try_many_rows()
    return tuple(report.checks.values())


class _TrialDecoder(TritonDecoder):
    """Its step compares each operation with the reference. Logits are those of the trial."""

    def begin_trial(self, expected: Expected, report: Report, queue: Queue, journal: TrialJournal) -> None:
        self._expected, self._report, self._queue, self._journal = expected, report, queue, journal
        self.trying = "prepare_step"  # the kernel that runs
        self._tried: set[object] = set()
        self._ms = 0.0

    def take_ms(self) -> float:
        """What the operations took since the last call."""
        ms, self._ms = self._ms, 0.0
        return ms

    def run(self, packet: Packet, state: RowState, shape: StepShape) -> None:
        expected = self._expected
        assert expected.step is not None, "the host runs first"
        self._begin("prepare_step")
        step = self.begin(packet, state, shape)
        self._queue.mark().wait()
        num = len(expected.step.ids)
        for name in ("ids", "positions", "places"):
            is_same = torch.equal(getattr(step.step, name)[:num].long(), getattr(expected.step, name))
            self._report.add("prepare_step", problem="" if is_same else f"its {name} are not the step's")
        for number, (part, launch) in enumerate(self._walk.parts(shape.tokens)):
            kernel = self._kernel_of(part, step, shape.tokens)
            key = kernel, part.kind, tuple(map(trial.signature, part.ops)), shape.tile_rows
            if kernel and key not in self._tried:
                self._tried.add(key)
                self._try(part, launch, kernel, step, num, number)
        self._begin("sampling")

    def hidden(self, tokens: Tensor) -> Tensor:
        index = tokens.long()
        return self._expected.places(self.ids[index].long(), self._positions[index].long())

    def sampled_logits(self, tokens: Tensor) -> Tensor:
        return self._expected.logits(self.hidden(tokens))

    def _begin(self, kernel: str) -> None:
        self.trying = kernel
        self._journal.begin(kernel)

    def check_device(self) -> None:
        """Raises BrokenDeviceError if this process cannot use its device any more."""
        try:
            self._queue.mark().wait()
        except RuntimeError as error:
            self._journal.confirm()
            raise BrokenDeviceError(self.trying, trial.summary_of(error)) from error

    def _kernel_of(self, part: Part, step: Pass, tokens: int) -> str:
        """The module of the part's kernel; empty: torch's."""
        args = part.ops[-1].args
        match part.kind:
            case "attend":
                return "decode_attention" if step.tiles is None else "extend_attention"
            case "latent":
                return "latent_attention"
            case "norm" | "add norm" | "rotate" | "elementwise":
                return needs(part.kind, part.ops[-1])
            case "experts":
                return "moe"
            case "mix":
                return "gated_norm" if isinstance(args, GatedNormalize) else "scans"
            case "product" | "norm product" | "product add":
                (args,) = (op.args for op in part.ops if isinstance(op.args, Product | GatedProduct))
                return self._walk.product_of(args).kernel(tokens, is_gated=isinstance(args, GatedProduct))
        return ""

    def _try(self, part: Part, launch: Callable[[Pass], None], kernel: str, step: Pass, num: int, number: int) -> None:
        expected, tokens = self._expected, len(step.step.ids)
        inputs = expected.inputs(part.ops, tokens, number)
        step.registers.fill(inputs)
        ms = self._time(kernel, lambda: launch(step))
        if ms is None:
            return
        self._ms += ms
        wanted = expected.run(part.ops, {register: values[:num] for register, values in inputs.items()})
        self._compare(part, kernel, step.registers, wanted, num, ms)

    def _time(self, kernel: str, run: Callable[[], None]) -> float | None:
        """Milliseconds of a launch; None: it failed, which is in the report. Raises BrokenDeviceError."""
        self._begin(kernel)
        started = time.perf_counter()
        try:
            run()
            self._queue.mark().wait()
        except Exception as error:
            self.check_device()
            self._report.add(trial.module_of(error, "triton") or kernel, problem=trial.summary_of(error))
            return None
        return (time.perf_counter() - started) * 1000

    def try_many_rows(self) -> None:
        """Products of so many rows that weights of 8 and 4 bits take other kernels than in the trial's steps."""
        expected, seen = self._expected, set[object]()
        for number, op in enumerate(expected.program.ops):
            args, key = op.args, trial.signature(op)
            if not isinstance(args, Product | GatedProduct) or key in seen:
                continue
            seen.add(key)
            product, is_gated = self._walk.product_of(args), isinstance(args, GatedProduct)
            if not isinstance(product, QuantizedProduct):
                continue
            kernel, inputs = product.kernel(_MANY_ROWS, is_gated=is_gated), expected.inputs((op,), _MANY_ROWS, number)
            whole = View(op.outs[0].register, op.outs[0].first, sum(view.width for view in op.outs))
            registers, wanted = TorchRegisters(), expected.run((op,), inputs)
            for register, values in inputs.items():
                registers.put(View(register, 0, values.shape[1]), values.shape[1], values)
            # The trial's steps are over, so their scratch is free.
            scratch, x = self._walk.scratch, registers.get(op.ins[0])
            out = torch.empty((_MANY_ROWS, whole.width), dtype=x.dtype, device=x.device)
            scratch.expect(*product.taken(_MANY_ROWS, x.dtype.itemsize, is_gated=is_gated))
            scratch.allocate(registers=0, least=0)
            scratch.begin()
            ms = self._time(kernel, partial(product, x, out, is_gated=is_gated))
            if ms is not None:
                limit = trial.FP8_LIMIT if kernel == "round_rows" else 0.0  # activations have 8 bits
                self._report.compare(kernel, out, wanted.get(whole), ms=ms, limit=limit)

    def _compare(
        self, part: Part, kernel: str, found: TorchRegisters, wanted: TorchRegisters, num: int, ms: float
    ) -> None:
        kept = part.ops if part.kind == "add norm" else part.ops[-1:]  # what the launch stores
        for view in (view for op in kept for view in op.outs):
            is_routed = part.kind == "experts"
            self._report.compare(kernel, found.get(view)[:num], wanted.get(view), ms=ms, is_routed=is_routed)
            ms = 0.0
