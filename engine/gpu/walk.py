"""Turns a program into launches, once at load: for each part of `rules.parts_of` a function with the arguments of its
kernels. A step calls them in order, and a recorded graph records them. Registers lie in the scratch, except those that
torch's functions return, which are kept as they come.

A kind of operation that gets kernels gets an entry in `_makers` here, and leaves `_lacks` in `rules.py`.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Protocol

import torch
import triton
from torch import Tensor

from ...kernels.quantized_weight import QuantizedWeight
from ...kernels.reference import TorchMatrix
from ...kernels.triton.decode_attention import DecodeWorkspace, Slopes, decode_attention, workspace_decode
from ...kernels.triton.extend_attention import extend_attention, tile_tokens
from ...kernels.triton.latent_attention import LatentLayer, attend_latent
from ...kernels.triton.moe import MoeWorkspace, workspace_moe
from ...kernels.triton.norm_rotary_write import norm_rotary_write, rotary_table
from ...kernels.triton.rms_norm import layer_norm, rms_norm
from ...kernels.triton.rotate import rotate
from ...kernels.triton.small_product import MAX_ROWS, workspace_small_product
from ..attention.kv_cache import KvCache
from ..executors.by_layer import ByLayer
from ..executors.functions import normalize
from ..executors.mixers import MIXERS
from ..executors.reference import Reference, Step
from ..executors.registers import Registers as TorchRegisters
from ..executors.rotary import inverse_frequencies, regime_lengths
from ..executors.weights import Weights
from ..models.description import Alibi, Reach, Rope
from ..models.program import (
    Activate,
    Args,
    Attend,
    AttendLatent,
    Clip,
    Embed,
    GatedProduct,
    Glu,
    Heat,
    Keep,
    Layout,
    Matrix,
    MeanSquares,
    Mixture,
    Multiply,
    Normalize,
    Op,
    Product,
    Program,
    Rotate,
    Scale,
    ScanDelta,
    Spread,
    View,
    placed,
)
from ..parallel.collectives import Group
from .attention import HostAttention
from .elementwise import run_of
from .exchange import DomainTokens, ExpertExchange
from .experts import Experts
from .mixers import DeviceMixers
from .packet import Limits
from .products import (
    DenseProduct,
    InvariantProduct,
    Norm,
    ProductMatrix,
    QuantizedProduct,
    fresh,
)
from .products import Product as ProductOf
from .rules import Kind, Part, body_of, largest_group, parts_of
from .scratch import Scratch
from .shapes import most_recorded
from .weights import Loaded, interleave

_LEAST_ROWS = 16  # of an attention tile
_PLACE = 128  # numbers: a register's place per token is a multiple of it, so that pointers are aligned for any tokens
_NORM_COPIES = 6  # some norms are computed in float32, in several steps


class Registers(TorchRegisters):
    """The registers of a step. One has memory of its own, which stays after the step."""

    def __init__(
        self, widths: Sequence[int], kept: int, states: Tensor, scratch: Scratch, places: Layout, passed: Set[int],
        domains: Sequence[int],
    ) -> None:  # fmt: skip
        """kept: the register in `states`, [tokens, width]. places: of the other registers in the scratch. passed: those
        that stages pass on, which are never elsewhere. domains: of how many KV domains each register has the tokens,
        as many for each."""
        super().__init__()
        self._widths, self._kept, self._states, self._passed = widths, kept, states, passed
        self._domains = domains
        self._scratch, self._places = scratch, places
        self._tensors[kept] = states

    def into(self, view: View) -> Tensor:
        """Memory for the view, to be written."""
        if view.register not in self._tensors:
            tokens, dtype = len(self._states), self._states.dtype
            first = self._places.offsets[view.register] * tokens * dtype.itemsize
            shape = tokens * self._domains[view.register], self._widths[view.register]
            self._tensors[view.register] = self._scratch.at(first, shape, dtype)
        return self.get(view)

    def fill(self, values: Mapping[int, Tensor]) -> None:
        """Writes whole registers, [tokens, width] each."""
        for register, numbers in values.items():
            if register == self._kept:
                self._states.copy_(numbers)
            else:
                self._tensors[register] = numbers.clone()  # torch may compute it, so it may have no place

    def put(self, view: View, width: int, value: Tensor) -> None:
        if view.register != self._kept and view.register not in self._passed and view.width == width:
            super().put(view, width, value)
        else:
            self.into(view).copy_(value)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A step on its way through the operations. The host knows its shape only."""

    registers: Registers
    scratch: Scratch
    step: Step  # ids, positions and places: [tokens] int32
    cache: KvCache
    slots: Tensor  # [tables, tokens] int32
    tables: Tensor  # [tables, rows, blocks] int32
    context_lens: Tensor  # [rows] int32
    num_tokens: Tensor  # [1] int32, that are no padding
    padding: Tensor | None  # [tokens of all KV domains, 1] bool, which are padding; None: of no use
    may_wait: bool  # a step of its shape is never recorded, on any rank
    tiles: Tensor | None  # of rows with several tokens; None: there are none
    tile_rows: int


Launch = Callable[[Pass], None]


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The launches for steps of some sizes."""

    launches: Sequence[tuple[Part, Launch, tuple[int, ...]]]  # with the registers that nothing reads afterwards
    ends: Sequence[int]  # of each launch: the operation after its last one
    places: Layout  # of the registers in the scratch
    returned: int  # numbers per token of the registers that torch's functions return


class _Norm(Protocol):
    """x, out: [tokens, width], which may be the same. residual, mean_squares: see `rms_norm`."""

    def __call__(
        self, x: Tensor, out: Tensor, *, residual: Tensor | None = None, mean_squares: Tensor | None = None
    ) -> None: ...


class Walker:
    """The kernels' arguments of one program. Sleep finds its tensors in attributes, not in functions."""

    def __init__(
        self,
        program: Program,
        loaded: Loaded,
        *,
        group: Group,
        max_len: int,
        limits: Limits,
        dtype: torch.dtype,
        num_programs: Callable[[int], int],
        is_deterministic: bool,
        without: frozenset[str] = frozenset(),
        attention: HostAttention | None = None,
        num_domains: int = 1,
        by_layer: ByLayer | None = None,
    ) -> None:
        """The arguments of `TritonDecoder`."""
        self._by_layer, self._num_ops = by_layer or ByLayer(program), len(program.ops)
        self._without = without
        self._num_domains = num_domains
        self._domains = [num_domains if each in program.shared else 1 for each in range(len(program.widths))]
        self._program, self._loaded, self._ranks = program, loaded, group
        self._max_len, self._limits, self._dtype, self._num_programs = max_len, limits, dtype, num_programs
        self._attention, self._is_deterministic = attention, is_deterministic
        self._largest_group = largest_group(program)
        self.weights = Weights()
        self.weights.vectors = loaded.vectors
        products = [op.args for op in program.ops if isinstance(op.args, Product | GatedProduct)]
        tables = [each for each in program.matrices if each.use == "table" or each == program.head_project]
        multiplied = [args.matrix for args in products] + tables
        even = {(each.rows, each.columns) for each in multiplied if each.rows % 16 == 0}
        narrow = {(each.rows, each.columns) for each in multiplied if loaded.is_quantized(each)}
        self.scratch = Scratch(loaded.device)
        self._temporary = 0  # bytes per token that the launch takes which takes most from the allocator
        self._small = workspace_small_product(even, loaded.device, narrow=narrow)
        for each in tables:
            values, wide = loaded.values(each), None if each == program.head_project else torch.float32
            takes = fresh(loaded.device), self.scratch.take
            if is_deterministic:
                matrix = ProductMatrix(values, InvariantProduct(values, None), wide)
            else:
                anywhere, in_scratch = (DenseProduct(values, None, self._small, take, without) for take in takes)
                matrix = ProductMatrix(values, anywhere, wide, in_scratch)
            self.weights.matrices[each.key] = (matrix,)
        by_matrix: dict[str, tuple[Product | GatedProduct, int]] = {}  # some matrices have several products
        for op in program.ops:
            if isinstance(op.args, Product | GatedProduct):
                key, domains = op.args.matrix.key, self._domains[op.outs[0].register]
                by_matrix[key] = op.args, max(domains, by_matrix[key][1] if key in by_matrix else 1)
        self._products = {
            key: self._make_product(args, domains, is_deterministic) for key, (args, domains) in by_matrix.items()
        }
        self._moe: dict[tuple[int, ...], MoeWorkspace] = {}
        self.experts: dict[int, Experts] = {}  # by layer
        self._latents: list[LatentLayer] = []
        self._decode: dict[tuple[Reach, int, int, int], DecodeWorkspace] = {}
        self._slopes: dict[Alibi, Tensor] = {}
        self._rotary: dict[tuple[Rope | None, int], Tensor] = {}
        self._zeros = torch.zeros(limits.tokens, dtype=torch.int32, device=loaded.device)
        self._numbers = torch.arange(num_domains * limits.tokens, dtype=torch.int32, device=loaded.device)
        self._domain_tokens: DomainTokens | None = None  # of those that all ranks give to experts
        if any(isinstance(op.args, Mixture) and op.outs[0].register in program.shared for op in program.ops):
            self._domain_tokens = DomainTokens(group, num_domains, self._numbers)
        many = parts_of(program, without=without)
        self._turns_in_torch = any(part.kind == "torch" and isinstance(part.ops[0].args, Rotate) for part in many)
        self.reference = Reference(
            program, self.weights, max_len=max_len if self._turns_in_torch else 1, dtype=dtype, weight_dtype=dtype,
            device=loaded.device, group=group,
        )  # fmt: skip
        self.mixers = DeviceMixers(self.weights, loaded.device, without)
        self._makers: dict[Kind, Callable[[Part], Launch]] = {
            "attend": self._attend,
            "product": self._product,
            "norm product": self._product,
            "product add": self._product,
            "norm": self._norm,
            "add norm": self._norm,
            "add": self._add,
            "elementwise": self._elementwise,
            "rotate": self._rotate,
            "experts": self._mixture,
            "latent": self._latent,
            "mix": self._mix,
            "sum": self._sum,
            "gather": self._gather,
            "scatter": self._scatter,
            "torch": self._torch,
        }
        _, last = body_of(program)
        self._last_norm = None if last is None else self._norm_run(last)
        self.kept = program.result if last is None else last.ins[0]
        made: dict[tuple[Op, ...], Launch] = {}
        self._many = self._walk(many, made)
        self._few = self._walk(parts_of(program, fuses=self._fuses, without=without), made)

    def padding(self, num_tokens: Tensor, tokens: int) -> Tensor | None:
        """`Pass.padding` of a step. num_tokens: [1] int32; tokens: with padding."""
        return None if self._domain_tokens is None else self._domain_tokens.padding(num_tokens, tokens)

    @property
    def decode_workspaces(self) -> Sequence[DecodeWorkspace]:
        """That each step must plan."""
        return tuple(self._decode.values())

    def allocate(self, least: int) -> None:
        """Allocates the scratch. least: its bytes at least."""
        size = max(self._many.places.size, self._few.places.size)
        self.scratch.allocate(registers=self._limits.tokens * size * self._dtype.itemsize, least=least)

    @property
    def left_to_torch(self) -> int:
        """Bytes per token that the largest step takes from the allocator: registers that torch's functions return, and
        what a launch takes for itself, estimated."""
        tables = sum(2 * rope.dims for rope in self.reference.rotary) * 4 if self._turns_in_torch else 0
        return self._many.returned * self._dtype.itemsize + self._temporary + tables

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept between steps."""
        kept = [self._zeros, self._numbers, *self._rotary.values(), *self._slopes.values(), *self._small]
        for workspace in self._moe.values():
            kept += [getattr(workspace, field.name) for field in fields(workspace)]
        backend = 0 if self._attention is None else self._attention.backend.nbytes
        planned = backend + sum(workspace.nbytes for workspace in self._decode.values())
        tables = self.reference.rotary.values()
        of_tables = sum(table.num_bytes for table in tables)
        of_domains = 0 if self._domain_tokens is None else self._domain_tokens.nbytes
        return self.scratch.nbytes + planned + of_domains + sum(tensor.nbytes for tensor in kept) + of_tables

    def registers(self, states: Tensor) -> Registers:
        """Of a step. states: the memory of `kept`."""
        places, program = self._of(len(states)).places, self._program
        registers = Registers(
            program.widths, self.kept.register, states, self.scratch, places, program.passed, self._domains
        )
        for view in program.receives:
            registers.into(view)
        return registers

    def put_received(self, states: Tensor, received: Tensor) -> None:
        """Puts what the stage before has sent into the registers of a step. states: see `registers`; received: [tokens,
        columns]."""
        registers, first = self.registers(states), 0
        for view in self._program.receives:
            registers.into(view).copy_(received[:, first : first + view.width])
            first += view.width

    def take_sent(self, states: Tensor, out: Tensor) -> None:
        """Takes what the next stage needs from the registers of a step that has run, until the next one. states: see
        `registers`; out: [tokens, columns] of its first tokens, to be written."""
        registers, first = self.registers(states), 0
        for view in self._program.sends:
            out[:, first : first + view.width].copy_(registers.into(view)[: len(out)])
            first += view.width

    def parts(self, tokens: int) -> Sequence[tuple[Part, Launch]]:
        """The launches of a step of so many tokens."""
        walk = self._of(tokens)
        return [(part, self._alone(walk, launch, tokens)) for part, launch, _ in walk.launches]

    def _alone(self, walk: Walk, launch: Launch, tokens: int) -> Launch:
        def run(step: Pass) -> None:
            self.scratch.begin(self._behind(walk, tokens))
            launch(step)

        return run

    def _behind(self, walk: Walk, tokens: int) -> int:
        """The byte of the scratch behind the registers."""
        return walk.places.size * self._dtype.itemsize * tokens

    def product_of(self, args: Product | GatedProduct) -> ProductOf:
        return self._products[args.matrix.key]

    def run(self, step: Pass, tokens: int) -> None:
        walk = self._of(tokens)
        behind = self._behind(walk, tokens)

        def run(first: int, last: int) -> None:
            """The operations from `first` to before `last`."""
            begin, end = bisect_right(walk.ends, first), bisect_right(walk.ends, last)
            assert last in (walk.ends[end - 1], self._num_ops), "a launch is cut"
            for _, launch, unused in walk.launches[begin:end]:
                self.scratch.begin(behind)
                launch(step)
                for register in unused:
                    step.registers.drop(register)

        if step.may_wait:
            self._by_layer.run(None, run)
        else:  # it may be recorded, and is then one launch
            run(0, walk.ends[-1])

    def _of(self, tokens: int) -> Walk:
        return self._few if tokens <= MAX_ROWS else self._many

    def finish(self, states: Tensor) -> Tensor:
        """The last norm, of states [n, hidden] that `run` left in the register `kept`; it may overwrite them."""
        if self._last_norm is not None:
            self._last_norm(states, states)
        return states

    @property
    def finishing(self) -> int:
        """Bytes per token that `finish` takes from the allocator, estimated."""
        is_torch = self._last_norm is not None and "rms_norm" in self._without
        return _NORM_COPIES * self.kept.width * self._dtype.itemsize if is_torch else 0

    def _walk(self, parts: Sequence[Part], made: dict[tuple[Op, ...], Launch]) -> Walk:
        """made: the launches so far."""
        last: dict[int, int] = {}
        for number, part in enumerate(parts):
            if part.ops not in made:
                made[part.ops] = self._makers[part.kind](part)
            last |= {view.register: number for op in part.ops for view in (*op.ins, *op.outs)}
        last.pop(self.kept.register, None)
        unused: list[list[int]] = [[] for _ in parts]
        for register, number in last.items():
            unused[number].append(register)
        launches = [(part, made[part.ops], tuple(registers)) for part, registers in zip(parts, unused, strict=True)]
        in_scratch, returned = self._memory_of(parts)
        received, sent = ({view.register for view in views} for views in (self._program.receives, self._program.sends))
        uses = [received, *map(_registers, parts), sent]
        sizes = zip(self._program.widths, self._domains, strict=True)
        widths = [-(-width // _PLACE) * _PLACE * num for width, num in sizes]
        return Walk(
            launches=launches,
            ends=tuple(accumulate(len(part.ops) for part in parts)),
            places=placed([found & in_scratch for found in uses], widths),
            returned=placed([found & returned for found in uses], widths).size,
        )

    def _memory_of(self, parts: Sequence[Part]) -> tuple[set[int], set[int]]:
        """The registers that launches write to the scratch, and those that torch's functions return. What only one
        launch uses is not stored."""
        num_parts = Counter(register for part in parts for register in _registers(part))
        widths, in_scratch, returned = self._program.widths, set[int](self._program.passed), set[int]()
        in_scratch.discard(self.kept.register)
        for part in parts:
            for view in (view for op in part.ops for view in op.outs):
                is_between = len(part.ops) > 1 and num_parts[view.register] == 1
                is_returned = part.kind in ("torch", "mix") and view.width == widths[view.register]
                is_returned = is_returned and not isinstance(part.ops[0].args, Embed)
                if view.register != self.kept.register and not is_between:
                    (returned if is_returned else in_scratch).add(view.register)
        return in_scratch, returned - in_scratch

    def _make_product(self, args: Product | GatedProduct, domains: int, is_deterministic: bool) -> ProductOf:
        """domains: whose tokens it multiplies."""
        is_gated = isinstance(args, GatedProduct)
        bias, weight = self._loaded.vector(args.bias), self._loaded.take(args.matrix)
        if is_gated and bias is not None:
            bias = interleave(bias)
        if not isinstance(weight, Tensor):
            return self._quantized(weight, bias, is_gated, domains)
        return InvariantProduct(weight, bias) if is_deterministic else self._dense(weight, bias, is_gated, domains)

    def _dense(self, weight: Tensor, bias: Tensor | None, is_gated: bool, domains: int) -> DenseProduct:
        if is_gated:
            self.scratch.expect(domains * self._limits.tokens * weight.shape[0] * self._dtype.itemsize)
        return DenseProduct(weight, bias, self._small, self.scratch.take, self._without)

    def _quantized(
        self, weight: QuantizedWeight, bias: Tensor | None, is_gated: bool, domains: int
    ) -> QuantizedProduct:
        product = QuantizedProduct(
            weight, bias, self._small, self.scratch.take, dtype=self._dtype,
            has_narrow_inputs=self._loaded.has_narrow_inputs, without=self._without,
        )  # fmt: skip
        tokens = domains * self._limits.tokens
        self.scratch.expect(*product.taken(tokens, self._dtype.itemsize, is_gated=is_gated))
        self._leave_to_torch(domains * product.left_to_torch(self._dtype.itemsize))
        return product

    def _fuses(self, matrix: Matrix) -> bool:
        return self._products[matrix.key].fused(MAX_ROWS) is not None

    def _norm_of(self, op: Op) -> Norm:
        assert isinstance(op.args, Normalize) and op.args.weight is not None
        return Norm(self.weights.vectors[op.args.weight.key], op.args.norm.eps)

    # A function for each kind of part.

    def _torch(self, part: Part) -> Launch:
        (op,) = part.ops
        assert not isinstance(op.args, Spread | Keep), f"{op} is no part of an exchange"
        if isinstance(op.args, Embed) and self._looks_up(op, op.args):
            return self._embed(op, op.args)
        out = op.outs[0]
        self._leave_to_torch(_copies(op.args) * self._domains[out.register] * out.width * self._dtype.itemsize)
        return lambda step: self.reference.run(op, step.registers, step.step)

    def _looks_up(self, op: Op, args: Embed) -> bool:
        """Whether embeddings are rows of the table, which can be copied to the register."""
        has_all = self._ranks.size == 1 or self._num_domains > 1
        is_plain = has_all and args.scale == 1.0 and not args.is_whole
        return is_plain and op.outs[0].width == self._program.widths[op.outs[0].register]

    def _leave_to_torch(self, per_token: int) -> None:
        """A launch takes so many bytes per token from the allocator."""
        self._temporary = max(self._temporary, per_token)

    def _embed(self, op: Op, args: Embed) -> Launch:
        (matrix,) = self.weights.matrices[args.table.key]
        assert isinstance(matrix, TorchMatrix)
        weight = matrix.weight

        def launch(step: Pass) -> None:
            torch.index_select(weight, 0, step.step.ids, out=step.registers.into(op.outs[0]))

        return launch

    def _mix(self, part: Part) -> Launch:
        (op,) = part.ops
        assert isinstance(op.args, MIXERS)
        mix, out = self.mixers.operation(op.args), op.outs[0]
        width, args = self._program.widths[out.register], op.args
        changes = args.value_heads * (args.value_dim + args.key_dim) * 4 if isinstance(args, ScanDelta) else 0
        self._leave_to_torch(2 * out.width * self._dtype.itemsize + changes)
        return lambda step: step.registers.put(out, width, mix([step.registers.get(view) for view in op.ins]))

    def _sum(self, part: Part) -> Launch:
        view = part.ops[0].ins[0]
        return lambda step: self._ranks.all_reduce(step.registers.get(view))

    def _gather(self, part: Part) -> Launch:
        """The tokens of all domains."""
        of, out = part.ops[0].ins[0], part.ops[0].outs[0]

        def launch(step: Pass) -> None:
            x, whole = step.registers.get(of), step.registers.into(out)
            if not x.is_contiguous():
                x = step.scratch.take(tuple(x.shape), x.dtype).copy_(x)
            if self._num_domains == 1:
                whole.copy_(x)
            else:
                self._ranks.all_gather(x, whole)

        self.scratch.expect(self._limits.tokens * of.width * self._dtype.itemsize)
        return launch

    def _scatter(self, part: Part) -> Launch:
        """The sum over the ranks, of the tokens of this domain."""
        of, out = part.ops[0].ins[0], part.ops[1].outs[0]

        def launch(step: Pass) -> None:
            whole, kept = step.registers.get(of), step.registers.into(out)
            if self._num_domains == 1:
                kept.copy_(whole)
            else:
                self._ranks.reduce_scatter(whole, kept)

        return launch

    def _add(self, part: Part) -> Launch:
        (op,) = part.ops

        def launch(step: Pass) -> None:
            x, y = (step.registers.get(view) for view in op.ins)
            torch.add(x, y, out=step.registers.into(op.outs[0]))

        return launch

    def _norm(self, part: Part) -> Launch:
        op = part.ops[-1]
        run = self._norm_run(op)
        added = part.ops[0].ins[1] if part.kind == "add norm" else None

        def launch(step: Pass) -> None:
            of, *mean = (step.registers.get(view) for view in op.ins)
            out = step.registers.into(op.outs[0])
            if added is None:
                run(of, out, mean_squares=mean[0] if mean else None)
            else:
                run(step.registers.get(added), out, residual=of)

        return launch

    def _norm_run(self, op: Op) -> _Norm:
        args = op.args
        assert isinstance(args, Normalize)
        norm, weight, bias = args.norm, self.weights.vector(args.weight), self.weights.vector(args.bias)

        def run(x: Tensor, out: Tensor, *, residual: Tensor | None = None, mean_squares: Tensor | None = None) -> None:
            if "rms_norm" in self._without:  # of the last norm, which is no part of the walk
                out.copy_(normalize(x, norm.size, norm.kind, norm.eps, weight, bias))
            elif norm.kind == "layer":
                layer_norm(x, weight, bias, norm.eps, out, residual, size=norm.size)
            else:
                rms_norm(x, weight, norm.eps, out, residual, size=norm.size, mean_squares=mean_squares)

        return run

    def _elementwise(self, part: Part) -> Launch:
        (op,) = part.ops
        run = run_of(op, self.weights)

        def launch(step: Pass) -> None:
            run([step.registers.get(view) for view in op.ins], step.registers.into(op.outs[0]), step.step.positions)

        return launch

    def _rotate(self, part: Part) -> Launch:
        (op,) = part.ops
        args = op.args
        assert isinstance(args, Rotate) and op.ins == op.outs, op
        table = self._rotary_of(args.rope, args.rope.dims)

        def launch(step: Pass) -> None:
            x = step.registers.get(op.ins[0])
            rotate(x, table, step.step.places, heads=args.heads, first=args.first)

        return launch

    def _product(self, part: Part) -> Launch:
        op = part.ops[1 if part.kind == "norm product" else 0]
        assert isinstance(op.args, Product | GatedProduct)
        product, is_gated = self.product_of(op.args), isinstance(op.args, GatedProduct)
        first, out = op.outs[0], View(op.outs[0].register, op.outs[0].first, sum(view.width for view in op.outs))
        assert first.first == 0, first
        if part.kind == "product":
            return lambda step: product(step.registers.get(op.ins[0]), step.registers.into(out), is_gated=is_gated)
        fused = product.fused(MAX_ROWS)
        assert fused is not None
        if part.kind == "norm product":
            norm, of = self._norm_of(part.ops[0]), part.ops[0].ins[0]
            return lambda step: fused(step.registers.get(of), step.registers.into(out), norm=norm, is_gated=is_gated)
        add = part.ops[1]

        def launch(step: Pass) -> None:
            x, residual = step.registers.get(op.ins[0]), step.registers.get(add.ins[0])
            fused(x, step.registers.into(add.outs[0]), residual=residual)

        return launch

    def _mixture(self, part: Part) -> Launch:
        (op,) = part.ops
        args = op.args
        assert isinstance(args, Mixture)
        domains, limits, itemsize = self._domains[op.outs[0].register], self._limits, self._dtype.itemsize
        is_exchanged = args.is_exchanged and self._num_domains > 1
        gathered = most_recorded(limits.tokens)
        tokens = max(limits.tokens * domains, gathered * self._num_domains if is_exchanged else 0)
        sizes = args.num_slots, args.router.top_k, args.down.rows, args.down.columns
        if sizes not in self._moe:
            self._moe[sizes] = workspace_moe(
                max_tokens=tokens, num_experts=sizes[0], top_k=sizes[1], hidden=sizes[2], inter=sizes[3],
                dtype=self._dtype, device=self._loaded.device,
            )  # fmt: skip
        experts = Experts(args, self._loaded, self._moe[sizes], self._num_domains)
        assert op.layer not in self.experts, f"layer {op.layer} has two mixtures of experts"
        self.experts[op.layer] = experts
        self._leave_to_torch(domains * experts.left_to_torch(itemsize))
        if is_exchanged:
            exchange = ExpertExchange(
                args, experts, self._moe[sizes], self._ranks, self._dtype, self.scratch.take, self._numbers
            )
            self.scratch.expect(*exchange.taken(gathered, itemsize))
            self._leave_to_torch(exchange.left_to_torch(itemsize, sends=limits.tokens > gathered))

        def launch(step: Pass) -> None:
            x, logits = (step.registers.get(view) for view in op.ins)
            out = step.registers.into(op.outs[0])
            if is_exchanged:
                (exchange.send if step.may_wait else exchange.gather)(x, logits, out, step.num_tokens)
            elif step.padding is not None:
                experts.of_domains(x, logits, out, step.padding, self._numbers[: len(x)])
            else:
                experts(x, logits, out, step.num_tokens, step.step.positions)

        return launch

    def _attend(self, part: Part) -> Launch:
        op = part.ops[-1]
        args, out = op.args, op.outs[0]
        assert isinstance(args, Attend)
        norms = [self._norm_of(each) for each in part.ops if isinstance(each.args, Normalize)]
        ropes = [each.args.rope for each in part.ops if isinstance(each.args, Rotate)]
        rope = ropes[0] if ropes else None
        pair = (norms[0].weight, norms[1].weight) if norms else None
        eps, rotary = norms[0].eps if norms else 0.0, self._rotary_of(rope, args.head_dim)
        # With `--deterministic` all rows have tiles.
        workspace = None if self._is_deterministic else self._decode_of(args)
        sinks, window, softcap = self.weights.vector(args.sinks), args.reach.positions or None, args.softcap or None
        num_programs = self._num_programs(args.head_dim)
        group, is_chunked, slopes = args.heads // args.kv_heads, args.reach.kind == "chunk", self._slopes_of(args)
        joined = _joined(op.ins)
        if len(op.ins) > 1:
            taken = [op.ins[0].width] + ([] if joined is not None else [sum(view.width for view in op.ins)])
            self.scratch.expect(*(self._limits.tokens * width * self._dtype.itemsize for width in taken))
        other = self._attention if self._attention is not None and self._attention.takes(args) else None
        parameters = self.reference.attention(args)

        def launch(step: Pass) -> None:
            (k_pages, v_pages), table = step.cache.pages[args.tile], step.cache.tables[args.tile]
            query = step.registers.get(op.ins[0]).view(-1, args.heads, args.head_dim)
            if len(op.ins) > 1:
                query = step.scratch.take(tuple(query.shape), query.dtype)
                if joined is None:
                    states = step.scratch.take((len(query), sum(view.width for view in op.ins)), query.dtype)
                    torch.cat([step.registers.get(view) for view in op.ins], dim=1, out=states)
                else:
                    states = step.registers.get(joined)
                places = self._zeros[: len(query)] if rope is None else step.step.places
                norm_rotary_write(
                    states, pair, eps, rotary, places, step.slots[table], query, k_pages, v_pages,
                    turning=None if rope is None else rope.dims,
                )  # fmt: skip
            tables, attended = step.tables[table], step.registers.into(out).view(-1, args.heads, args.value_dim)
            now = other if other is not None and other.rows is not None else None
            if workspace is not None and (now is None or not now.backend.decodes):
                rows = len(tables)
                decode_attention(
                    attended[:rows], query[:rows], k_pages, v_pages, tables, workspace, scale=args.scale,
                    softcap=softcap, sinks=sinks, slopes=slopes,
                )  # fmt: skip
            if now is not None:
                now.attend(attended, query, args.tile, parameters)
            elif step.tiles is not None:
                extend_attention(
                    attended, query, k_pages, v_pages, tables, step.context_lens, step.tiles, scale=args.scale,
                    num_programs=num_programs, window=window, is_chunked=is_chunked, softcap=softcap, sinks=sinks,
                    slopes=slopes, tile_rows=self._tile_rows(group, step.tile_rows),
                )  # fmt: skip

        return launch

    def _latent(self, part: Part) -> Launch:
        (op,) = part.ops
        args = op.args
        assert isinstance(args, AttendLatent)
        keys, values = (self._loaded.values(each).view(args.heads, -1, args.rank) for each in (args.keys, args.values))
        layer = LatentLayer(keys=keys, values=values, rope_dim=args.rope_dim, scale=args.scale)
        self._latents.append(layer)
        key = Reach(), args.heads, 1, args.rank
        if key not in self._decode:
            self._decode[key] = layer.workspace(
                rows=self._limits.rows, max_context=self._max_len, num_programs=self._num_programs(args.rank)
            )
        workspace = self._decode[key]
        self.scratch.expect(*[self._limits.tokens * args.heads * args.rank * self._dtype.itemsize] * 2)

        def launch(step: Pass) -> None:
            query, latent, rotated = (step.registers.get(view) for view in op.ins)
            (pages, _), table = step.cache.pages[args.tile], step.cache.tables[args.tile]
            attend_latent(
                step.registers.into(op.outs[0]), query, latent, rotated, layer, pages, step.slots[table],
                step.tables[table], step.context_lens, workspace, step.tiles, tile_rows=step.tile_rows,
                per_tile=tile_tokens(self._largest_group, step.tile_rows), take=step.scratch.take,
            )  # fmt: skip

        return launch

    def _tile_rows(self, group: int, rows: int) -> int:
        """The step's tiles have as many tokens as `rows` rows of the layers with the largest group hold."""
        if group == self._largest_group:
            return rows
        needed: int = triton.next_power_of_2(tile_tokens(self._largest_group, rows) * group)
        return max(_LEAST_ROWS, needed)

    def _rotary_of(self, rope: Rope | None, head_dim: int) -> Tensor:
        """Of all places, as `executors.rotary.RotaryTable` has them. None: nothing turns, at place 0."""
        key = rope, head_dim
        if key not in self._rotary:
            device = self._loaded.device
            if rope is None:
                parts = [rotary_table(torch.zeros(0, device=device), 1.0, 1, head_dim)]
            else:
                parts = [
                    rotary_table(inverse_frequencies(rope, regime).to(device), rope.cos_scale, length, head_dim)
                    for regime, length in enumerate(regime_lengths(self._max_len, self._program.regime_limit))
                ]
            self._rotary[key] = torch.cat(parts)
        return self._rotary[key]

    def _decode_of(self, args: Attend) -> DecodeWorkspace:
        key = args.reach, args.heads, args.kv_heads, args.value_dim
        if key not in self._decode:
            self._decode[key] = workspace_decode(
                rows=self._limits.rows, max_context=self._max_len, heads=args.heads, kv_heads=args.kv_heads,
                head_dim=args.value_dim, num_programs=self._num_programs(args.head_dim),
                window=args.reach.positions or None, is_chunked=args.reach.kind == "chunk", device=self._loaded.device,
            )  # fmt: skip
        return self._decode[key]

    def _slopes_of(self, args: Attend) -> Slopes | None:
        """Of ALiBi."""
        alibi = args.alibi
        if alibi is None:
            return None
        if alibi not in self._slopes:
            values = torch.tensor(alibi.slopes, device=self._loaded.device)
            self._slopes[alibi] = values.bfloat16().float() if alibi.is_rounded else values
        return Slopes(self._slopes[alibi], args.scale if alibi.before_scale else 1.0, alibi.is_rounded)


def _copies(args: Args) -> int:
    """How many tensors of its result's size and type a function of torch takes at most, besides the result."""
    match args:
        case Normalize() | MeanSquares():
            return _NORM_COPIES
        case Glu():
            return 5 if args.act == "swiglu_clamped" or args.sparsity else 2 if args.gate_scale != 1.0 else 1
        case Activate():
            return 5 if args.weights is not None else 2 if args.act in ("quick_gelu", "relu2") else 0
        case Scale() | Clip():
            return 0
        case Heat() | Multiply():
            return 1
        case Rotate():
            return 2
    return 3


def _registers(part: Part) -> set[int]:
    return {view.register for op in part.ops for view in (*op.ins, *op.outs)}


def _joined(views: tuple[View, ...]) -> View | None:
    """The columns of the views, if they are adjacent."""
    register, first, at = views[0].register, views[0].first, views[0].first
    for view in views:
        if (view.register, view.first) != (register, at):
            return None
        at += view.width
    return View(register, first, at - first)
