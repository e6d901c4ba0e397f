"""Compares kernels with torch before they serve: a few steps over a few layers, operation by operation.

The layers are those of the model, one of each kind, with random weights and random numbers in the registers. Two sides
run the same plans: the host's steps with the reference (`Expected`), and what is tried. Only what is tried differs
(`engine/gpu/trial.py`, `engine/runner/native_trial.py`), and both report here.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from ...config.config import EngineConfig
from ...ipc.messages import GroupTable, RowLogprobs, RowOpen, Sampling, StepPlan, StepResult, ids_to_bytes
from ...kernels import reference as in_torch
from ...kernels.ops import reference_ops
from ..attention.base import AttentionBackend, AttentionParameters
from ..attention.kv_cache import KvCache, KvShape
from ..attention.torch_paged import TorchPagedAttention
from ..executors.reference import Reference, Step
from ..executors.registers import Registers
from ..executors.weights import Options, Packing
from ..models.description import Data, Part
from ..models.program import Embed, Matrix, Op, Positions, Program, States, View
from ..parallel.collectives import Alone
from ..weights.loader import Sink
from .host_steps import HostSteps

ROWS = 4
TOKENS = 32  # of the largest step
_PROMPTS = (18, 3, 5, 4)  # tokens of each row's prompt
_POSITIONS = 24  # that a row may get
_SAMPLINGS = (
    Sampling(temperature=0.9, top_k=7, top_p=0.8, min_p=0.02, seed=7),
    Sampling(temperature=0, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={3: 2.0, 5: -100.0}, logprobs=3),
    Sampling(temperature=1.0, seed=2**62 + 11),
    Sampling(temperature=0, logprobs=0),
)
# (row, tokens) of each step, the rows of one token first and in the order of their lengths, as both sides run them:
# prompts; tokens of all rows; the same beside a short prompt; a greedy row alone; a sampled row alone.
_STEPS = (
    ((0, 18), (1, 3), (2, 5)),
    ((1, 1), (2, 1), (0, 1)),
    ((1, 1), (2, 1), (0, 1), (3, 4)),
    ((1, 1),),
    ((2, 1),),
)
_HOST_STEPS = (_STEPS[0], _STEPS[1], _STEPS[3])  # without sampling, and without the attention tiles of a GPU
_HEAD_ROWS = 16  # of the table of the vocabulary
_LOGITS = 16  # rows of logits, of which each token has one
_NUMBERS = 262_139  # random weights, which repeat; a prime, so that the rows of a matrix differ
_ROUNDINGS = 4  # of the type, that an operation may differ by
_LEAST_LIMIT = 1e-3  # of float32, whose products may be rounded to fewer bits
FP8_LIMIT = 0.1
_PEAK = 8  # a single number may differ by this many times the limit of a token


Fill = Callable[[Program, Sequence[Sink]], None]
"""Gives several sinks the same weights of a program."""


@dataclass(frozen=True)
class Check:
    """A kernel, over all operations and steps in which it was tried."""

    kernel: str  # the name of its module
    problem: str  # empty: it gives what torch gives
    error: float  # the greatest, relative to torch's numbers
    ms: float  # of all its runs, compiling and loading included


@dataclass
class Report:
    """What was tried so far, by kernel."""

    limit: float  # of errors
    checks: dict[str, Check] = field(default_factory=dict)

    def add(self, kernel: str, *, problem: str = "", error: float = 0.0, ms: float = 0.0) -> None:
        """The first problem of a kernel is kept."""
        old = self.checks.get(kernel, Check(kernel, "", 0.0, 0.0))
        problem = old.problem or problem
        self.checks[kernel] = Check(kernel, problem, max(old.error, error), old.ms + ms)

    def compare(
        self,
        kernel: str,
        found: Tensor,
        expected: Tensor,
        *,
        ms: float = 0.0,
        is_routed: bool = False,
        limit: float = 0.0,
    ) -> None:
        """Both [tokens, width]. is_routed: a rounding may send a token to another expert, so most tokens count. limit:
        of these errors, if it is greater than that of the others."""
        errors = _errors(found, expected)
        if not errors:
            return
        error = errors[3 * (len(errors) - 1) // 4] if is_routed else errors[-1]
        problem = ""
        limit = max(limit, self.limit)
        if not error <= limit:
            problem = f"it differs from torch by {error:.2g} of the numbers' size; at most {limit:.2g} is rounding"
        self.add(kernel, problem=problem, error=error, ms=ms)

    @property
    def failed(self) -> dict[str, str]:
        """Kernel → its problem."""
        return {check.kernel: check.problem for check in self.checks.values() if check.problem}


def report_for(dtype: torch.dtype, kv_dtype: torch.dtype) -> Report:
    """dtype: of activations."""
    limit = max(_ROUNDINGS * torch.finfo(dtype).eps, _LEAST_LIMIT)
    return Report(max(limit, FP8_LIMIT if kv_dtype.itemsize == 1 else _ROUNDINGS * torch.finfo(kv_dtype).eps))


def _errors(found: Tensor, expected: Tensor) -> list[float]:
    """Of each token whose expected numbers are finite, ascending."""
    found, expected = found.float(), expected.float()
    is_finite = expected.isfinite().all(dim=1)
    found, expected = found[is_finite], expected[is_finite]
    if not len(expected):
        return []
    off, size = (found - expected).abs(), expected.norm(dim=1)
    size = torch.where(size > 0, size, expected.shape[1] ** 0.5)
    peak = off.amax(dim=1) * expected.shape[1] ** 0.5 / (_PEAK * size)
    worst = torch.maximum(off.norm(dim=1) / size, peak).nan_to_num(torch.inf, torch.inf)
    return sorted(worst.tolist())


def summary_of(error: Exception) -> str:
    """One line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def module_of(error: Exception, folder: str) -> str | None:
    """The kernel's module in a folder of `kernels` whose function raised the error; None: none of them."""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.parts[-3:-1] == ("kernels", folder):
            return path.stem
    return None


def trial_program(program: Program) -> Program:
    """One layer of each kind, with what is before and behind the layers. Without look-ups, and with a head of a few
    rows, since both are torch's and their tables are large."""
    kept: list[Op] = []
    seen = set()
    for _, of_layer in groupby(program.ops, key=lambda op: op.layer):
        ops = [op for op in of_layer if not isinstance(op.args, Embed | Positions)]
        kind = tuple(map(signature, ops))
        if kind not in seen or ops[-1] is program.ops[-1]:
            seen.add(kind)
            kept += ops
    (table, *_) = program.head.weights
    few = replace(table, parts=(replace(table.parts[0], count=_HEAD_ROWS, times=1),))
    head = replace(program.head, weights=(few,))
    return replace(program, ops=tuple(kept), head=head, head_bias=None, head_project=None, encoder=None)


def signature(op: Op) -> tuple[object, ...]:
    """Operations of equal signatures take the same launches."""
    return (_shape(op.args), *(view.width for view in (*op.ins, *op.outs)))


_NAMES = {"key", "name", "layer", "tile", "decay", "only", "places"}  # fields that tell layers of a kind apart


def _shape(value: object) -> object:
    match value:
        case Part():
            return value.rows
        case States():
            return value.count, value.per_tile
        case Data():
            return type(value).__name__, *(_shape(each) for name, each in vars(value).items() if name not in _NAMES)
        case tuple():
            return tuple(map(_shape, value))
    return value


def fill_random(program: Program, sinks: Sequence[Sink]) -> None:
    """Gives all sinks the same weights."""
    numbers = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(0))
    offset = 0
    for target in program.targets:
        first, *others = [sink.begin(target) for sink in sinks]
        mean, spread = (0.0, target.columns**-0.5) if isinstance(target, Matrix) else (1.0, 0.5)
        part = (numbers * spread + mean).to(first.device)
        part = -part.abs() - 0.1 if target.weights[0].map == "neg_exp" else part  # else states would grow
        flat = first.view(-1)
        for start in range(0, flat.numel(), _NUMBERS):
            piece = flat[start : start + _NUMBERS]
            piece.copy_(part.roll(-offset)[: len(piece)])
        offset += 7919  # so that no two matrices are equal
        for values in others:
            values.copy_(first)
        for sink, values in zip(sinks, (first, *others), strict=True):
            sink.end(target, values)


def trial_config(config: EngineConfig) -> EngineConfig:
    """Of steps as small as those of the trial."""
    return structs.replace(
        config,
        max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS,
        max_model_len=min(config.max_model_len, 2 * TOKENS),
        speculative=None,
        kv_connector=(),
        extension=None,
    )


class _Rounding(TorchPagedAttention):
    """Keys and values are rounded to fp8, but kept in the type of the queries, since torch does not index fp8."""

    def forward(
        self, tile: int, query: Tensor, key: Tensor | None, value: Tensor | None, parameters: AttentionParameters
    ) -> Tensor:
        key, value = (None if each is None else each.to(torch.float8_e4m3fn).to(each.dtype) for each in (key, value))
        return super().forward(tile, query, key, value, parameters)


class Expected:
    """What torch computes of the trial's steps; a `Model` of `HostSteps` whose logits are given."""

    def __init__(
        self,
        config: EngineConfig,
        program: Program,
        packing: Packing,
        shape: KvShape,
        *,
        dtype: torch.dtype,
        samples: bool,
    ) -> None:
        """config: of `trial_config`; packing: the filled weights of the program, of `packing_for`; shape: of the KV;
        dtype: of activations; samples: the plans sample tokens."""
        self.program, self.device = program, packing.device
        self.is_fp8 = shape.dtype.itemsize == 1
        self.kv_shape = replace(shape, dtype=dtype) if self.is_fp8 else shape
        self.dtype = dtype
        self.reference = Reference(
            program, packing.weights, max_len=config.max_model_len, dtype=dtype, weight_dtype=dtype,
            device=packing.device, group=Alone(),
        )  # fmt: skip
        self.step: Step | None = None  # of the plan that was launched last
        cache = empty_cache(config, self.kv_shape, packing.device, head_major=False)
        kind = _Rounding if self.is_fp8 else TorchPagedAttention
        size = _LOGITS, config.model.vocab_size if samples else 1
        numbers = torch.randn(size, generator=torch.Generator().manual_seed(1))
        self._logits = (3 * numbers).to(packing.device)
        self.steps = HostSteps(
            config=config, model=self, cache=cache, attention=kind(cache=cache, ops=reference_ops(), dtype=dtype),
            ops=reference_ops(), synchronize=lambda: None,
        )  # fmt: skip

    def hidden(
        self, ids: Tensor, positions: Tensor, attention: AttentionBackend, regimes: Tensor | None = None
    ) -> Tensor:
        """Computes nothing: `run` computes one operation."""
        self.step = self.reference.step(ids, positions, attention, regimes)
        return self.places(ids, positions)

    def places(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[tokens, 1], the tokens' rows of the given logits: the hidden states of the trial."""
        return ((ids * 7 + positions) % _LOGITS).long()[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[hidden[:, 0]]

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return in_torch.greedy(self.logits(hidden))

    def run(self, ops: Sequence[Op], inputs: dict[int, Tensor]) -> Registers:
        """The registers after these operations. inputs: [tokens, width] of each register that they use."""
        assert self.step is not None, "run before a plan"
        registers = Registers()
        for register, values in inputs.items():
            width = self.program.widths[register]
            registers.put(View(register, 0, width), width, values.clone())
        for op in ops:
            self.reference.run(op, registers, self.step)
        return registers

    def inputs(self, ops: Sequence[Op], tokens: int, number: int) -> dict[int, Tensor]:
        """Random numbers for every register of these operations. number: another one gives other numbers."""
        generator = torch.Generator().manual_seed(number)
        used = dict.fromkeys(view.register for op in ops for view in (*op.ins, *op.outs))
        return {
            register: torch.randn((tokens, self.program.widths[register]), generator=generator)
            .to(self.dtype)
            .to(self.device)
            for register in used
        }


def packing_for(dtype: torch.dtype, device: torch.device, weight_dtype: torch.dtype | None = None) -> Packing:
    """For the weights of `Expected`."""
    return Packing(
        Options(ops=reference_ops(), dtype=dtype, weight_dtype=weight_dtype or dtype, device=device, keeps=False)
    )


def empty_cache(config: EngineConfig, shape: KvShape, device: torch.device, *, head_major: bool) -> KvCache:
    """With room for the trial's rows, and zeros."""
    groups = shape.groups(config.block_size)
    blocks = -(-_POSITIONS // config.block_size)
    pages = sum(group.pages * (1 if group.lifetime.kind == "state" else blocks) for group in groups.groups)
    cache = KvCache(
        shape=shape, num_pages=ROWS * pages, block_size=config.block_size, device=device, head_major=head_major
    )
    cache.storage.zero_()
    return cache


def plans(config: EngineConfig, shape: KvShape, *, samples: bool) -> Iterator[StepPlan]:
    """The steps of a trial. samples: each row samples a token; else its next ones are those of its prompt."""
    groups, next_page = shape.groups(config.block_size).groups, 0
    blocks = -(-_POSITIONS // config.block_size)

    def take(num: int) -> bytes:
        nonlocal next_page
        next_page += num
        return ids_to_bytes(list(range(next_page - num, next_page)))

    opened: set[int] = set()
    for number, rows in enumerate(_STEPS if samples else _HOST_STEPS):
        opens = []
        for row, _ in rows:
            if row in opened:
                continue
            opened.add(row)
            tables = tuple(
                GroupTable(0, take(blocks * each.pages))
                for each in groups
                if each.lifetime.kind not in ("cross", "state")
            )
            cross = b"".join(take(blocks * each.pages) for each in groups if each.lifetime.kind == "cross")
            state = b"".join(take(each.pages) for each in groups if each.lifetime.kind == "state")
            prompt = [
                (11 * i + 5 * row + 2) % config.model.vocab_size for i in range(_PROMPTS[row] + (0 if samples else 2))
            ]
            opens.append(
                RowOpen(
                    row=row,
                    ids=ids_to_bytes(prompt),
                    num_prompt=len(prompt),
                    num_computed=0,
                    block_ids=b"",
                    sampling=_SAMPLINGS[row],
                    tables=tables,
                    state=state,
                    cross=cross,
                    num_encoded=_POSITIONS if cross else 0,
                )
            )
        yield StepPlan(
            step=number, open=tuple(opens), grow_rows=b"", grow_blocks=b"",
            rows=ids_to_bytes([row for row, _ in rows]), counts=ids_to_bytes([count for _, count in rows]),
            sample=bytes([samples] * len(rows)),
        )  # fmt: skip


def compare_results(found: StepResult, expected: StepResult) -> dict[str, str]:
    """Kernel → its problem."""
    if found.ids != expected.ids:
        return {"sampling": "it samples other tokens than torch"}
    is_same = found.logprobs.keys() == expected.logprobs.keys() and all(
        _are_close(found.logprobs[row], expected.logprobs[row]) for row in expected.logprobs
    )
    return {} if is_same else {"logprobs": "its log-probabilities are not those of torch"}


def _are_close(found: RowLogprobs, expected: RowLogprobs) -> bool:
    if (found.width, found.ids) != (expected.width, expected.ids):
        return False
    ours, theirs = (np.frombuffer(each.values, "<f4") for each in (found, expected))
    return bool(np.allclose(ours, theirs, atol=1e-2))
