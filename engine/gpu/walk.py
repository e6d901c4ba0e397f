"""Turns a program into launches, once at load: for each part of `rules.parts_of` a function with the arguments of its
kernels. A step calls them in order, and a recorded graph records them.

A kind of operation that gets kernels gets an entry in `_makers` here, and leaves `_lacks` in `rules.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import triton
from torch import Tensor

from ...kernels.triton.decode_attention import DecodeWorkspace, decode_attention, workspace_decode
from ...kernels.triton.extend_attention import extend_attention, tile_tokens
from ...kernels.triton.latent_attention import LatentLayer, attend_latent
from ...kernels.triton.moe import MoeWorkspace, workspace_moe
from ...kernels.triton.norm_rotary_write import norm_rotary_write, rotary_table
from ...kernels.triton.rms_norm import rms_norm
from ...kernels.triton.small_product import MAX_ROWS, workspace_small_product
from ..attention.kv_cache import KvCache
from ..executors.functions import normalize
from ..executors.mixers import MIXERS
from ..executors.reference import Reference, Step
from ..executors.reference import Registers as TorchRegisters
from ..executors.rotary import inverse_frequencies
from ..executors.weights import Weights
from ..models.description import Rope
from ..models.program import (
    Attend,
    AttendLatent,
    GatedProduct,
    Matrix,
    Mixture,
    Normalize,
    Op,
    Product,
    Program,
    Rotate,
    View,
)
from ..parallel.collectives import Group
from .attention import HostAttention
from .experts import Experts
from .mixers import DeviceMixers
from .packet import Limits
from .products import (
    MAX_NARROW_ROWS,
    DenseProduct,
    InvariantProduct,
    Norm,
    ProductMatrix,
    QuantizedProduct,
    interleave,
)
from .products import Product as ProductOf
from .rules import Kind, Part, body_of, is_rms_norm, largest_group, parts_of
from .weights import Loaded

_LEAST_ROWS = 16  # of an attention tile


class Registers(TorchRegisters):
    """The registers of a step. One has memory of its own, which stays after the step."""

    def __init__(self, widths: Sequence[int], kept: int, states: Tensor) -> None:
        """kept: the register in `states`, [tokens, width]."""
        super().__init__()
        self._widths, self._kept, self._states = widths, kept, states
        self._tensors[kept] = states

    def into(self, view: View) -> Tensor:
        """Memory for the view, to be written."""
        if view.register not in self._tensors:
            self._tensors[view.register] = self._states.new_empty((len(self._states), self._widths[view.register]))
        return self.get(view)

    def fill(self, values: Mapping[int, Tensor]) -> None:
        """Writes whole registers, [tokens, width] each."""
        for register, numbers in values.items():
            self.into(View(register, 0, self._widths[register])).copy_(numbers)

    def put(self, view: View, width: int, value: Tensor) -> None:
        if view.register == self._kept:
            self.get(view).copy_(value)
        else:
            super().put(view, width, value)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A step on its way through the operations. The host knows its shape only."""

    registers: Registers
    step: Step  # ids and positions: [tokens] int32
    cache: KvCache
    slots: Tensor  # [tables, tokens] int32
    tables: Tensor  # [tables, rows, blocks] int32
    context_lens: Tensor  # [rows] int32
    num_tokens: Tensor  # [1] int32, that are no padding
    tiles: Tensor | None  # of rows with several tokens; None: there are none
    tile_rows: int


Launch = Callable[[Pass], None]
Walk = list[tuple[Part, Launch, tuple[int, ...]]]  # with the registers that nothing reads afterwards


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
    ) -> None:
        """The arguments of `TritonDecoder`."""
        self._without = without
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
        self._small = workspace_small_product(even, loaded.device, narrow=narrow)
        for each in tables:
            values = loaded.values(each)
            product = (
                InvariantProduct(values, None) if is_deterministic else DenseProduct(values, None, self._small, without)
            )
            wide = None if each == program.head_project else torch.float32
            self.weights.matrices[each.key] = (ProductMatrix(values, product, wide),)
        self._products = {args.matrix.key: self._product_of(args, is_deterministic) for args in products}
        self._scratch = self._lend_scratch()
        self._moe: dict[tuple[int, ...], MoeWorkspace] = {}
        self._experts: list[Experts] = []
        self._latents: list[LatentLayer] = []
        self._decode: dict[tuple[int, ...], DecodeWorkspace] = {}
        self._rotary: dict[tuple[Rope | None, int], Tensor] = {}
        self._zeros = torch.zeros(limits.tokens, dtype=torch.int32, device=loaded.device)
        many = parts_of(program, without=without)
        turns_in_torch = any(part.kind == "torch" and isinstance(part.ops[0].args, Rotate) for part in many)
        self.reference = Reference(
            program, self.weights, max_len=max_len if turns_in_torch else 1, dtype=dtype, weight_dtype=dtype,
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
            "experts": self._mixture,
            "latent": self._latent,
            "mix": self._mix,
            "sum": self._sum,
            "torch": self._torch,
        }
        _, self._last = body_of(program)
        self.kept = program.result if self._last is None else self._last.ins[0]
        made: dict[tuple[Op, ...], Launch] = {}
        self._many = self._walk(many, made)
        self._few = self._walk(parts_of(program, fuses=self._fuses, without=without), made)

    @property
    def decode_workspaces(self) -> Sequence[DecodeWorkspace]:
        """That each step must plan."""
        return tuple(self._decode.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept between steps."""
        kept = [self._zeros, self._scratch, *self._rotary.values(), *self._small]
        for workspace in self._moe.values():
            kept += [getattr(workspace, field.name) for field in fields(workspace)]
        backend = 0 if self._attention is None else self._attention.backend.nbytes
        planned = backend + sum(workspace.nbytes for workspace in self._decode.values())
        tables = self.reference.rotary.values()
        return planned + sum(tensor.nbytes for tensor in kept) + sum(table.num_bytes for table in tables)

    def parts(self, tokens: int) -> Sequence[tuple[Part, Launch]]:
        """The launches of a step of so many tokens."""
        return [(part, launch) for part, launch, _ in self._of(tokens)]

    def product_kernel(self, args: Product | GatedProduct, tokens: int) -> str:
        """The module of the kernel that computes it for so many tokens; empty: torch does."""
        return self._products[args.matrix.key].kernel(tokens, is_gated=isinstance(args, GatedProduct))

    def run(self, step: Pass, tokens: int) -> None:
        for _, launch, unused in self._of(tokens):
            launch(step)
            for register in unused:
                step.registers.drop(register)

    def finish(self, states: Tensor) -> Tensor:
        """The last norm, of states [n, hidden] that `run` left in the register `kept`; it may overwrite them."""
        last = self._last
        if last is None:
            return states
        assert isinstance(last.args, Normalize)
        norm, weight, bias = last.args.norm, self.weights.vector(last.args.weight), self.weights.vector(last.args.bias)
        if weight is None or not is_rms_norm(last) or "rms_norm" in self._without:
            return normalize(states, norm.size, norm.kind, norm.eps, weight, bias)
        rms_norm(states, weight, norm.eps, states)
        return states

    def _walk(self, parts: Sequence[Part], made: dict[tuple[Op, ...], Launch]) -> Walk:
        """made: the launches so far."""
        last: dict[int, int] = {}
        for number, part in enumerate(parts):
            if part.ops not in made:
                made[part.ops] = self._makers[part.kind](part)
            last |= {view.register: number for op in part.ops for view in (*op.ins, *op.outs)}
        last.pop(self.kept.register)
        unused: list[list[int]] = [[] for _ in parts]
        for register, number in last.items():
            unused[number].append(register)
        return [(part, made[part.ops], tuple(registers)) for part, registers in zip(parts, unused, strict=True)]

    def _of(self, tokens: int) -> Walk:
        return self._few if tokens <= MAX_ROWS else self._many

    def _product_of(self, args: Product | GatedProduct, is_deterministic: bool) -> ProductOf:
        is_gated = isinstance(args, GatedProduct)
        bias, weight = self._loaded.vector(args.bias), self._loaded.take(args.matrix)
        if is_gated and bias is not None:
            bias = interleave(bias)
        if not isinstance(weight, Tensor):
            return QuantizedProduct(
                weight.interleave() if is_gated else weight, bias, self._small, dtype=self._dtype,
                has_narrow_inputs=self._loaded.has_narrow_inputs,
            )  # fmt: skip
        weight = interleave(weight) if is_gated else weight
        if is_deterministic:
            return InvariantProduct(weight, bias)
        return DenseProduct(weight, bias, self._small, self._without)

    def _lend_scratch(self) -> Tensor:
        """Memory for one widened weight, for steps of many rows."""
        quantized = [each for each in self._products.values() if isinstance(each, QuantizedProduct)]
        size = max((each.scratch_size for each in quantized), default=0)
        scratch = torch.empty(
            size if self._limits.tokens > MAX_NARROW_ROWS else 0, dtype=self._dtype, device=self._loaded.device
        )
        for each in quantized:
            each.lend(scratch)
        return scratch

    def _fuses(self, matrix: Matrix) -> bool:
        return self._products[matrix.key].fused(MAX_ROWS) is not None

    def _norm_of(self, op: Op) -> Norm:
        assert isinstance(op.args, Normalize) and op.args.weight is not None
        return Norm(self.weights.vectors[op.args.weight.key], op.args.norm.eps)

    # A function for each kind of part.

    def _torch(self, part: Part) -> Launch:
        (op,) = part.ops
        return lambda step: self.reference.run(op, step.registers, step.step)

    def _mix(self, part: Part) -> Launch:
        (op,) = part.ops
        assert isinstance(op.args, MIXERS)
        mix, out = self.mixers.operation(op.args), op.outs[0]
        width = self._program.widths[out.register]
        return lambda step: step.registers.put(out, width, mix([step.registers.get(view) for view in op.ins]))

    def _sum(self, part: Part) -> Launch:
        view = part.ops[0].ins[0]
        return lambda step: self._ranks.all_reduce(step.registers.get(view))

    def _add(self, part: Part) -> Launch:
        (op,) = part.ops

        def launch(step: Pass) -> None:
            x, y = (step.registers.get(view) for view in op.ins)
            torch.add(x, y, out=step.registers.into(op.outs[0]))

        return launch

    def _norm(self, part: Part) -> Launch:
        op = part.ops[-1]
        weight, eps = self._norm_of(op)
        added = part.ops[0].ins[1] if part.kind == "add norm" else None

        def launch(step: Pass) -> None:
            of, out = step.registers.get(op.ins[0]), step.registers.into(op.outs[0])
            if added is None:
                rms_norm(of, weight, eps, out)
            else:
                rms_norm(step.registers.get(added), weight, eps, out, residual=of)

        return launch

    def _product(self, part: Part) -> Launch:
        op = part.ops[1 if part.kind == "norm product" else 0]
        assert isinstance(op.args, Product | GatedProduct)
        product, is_gated = self._products[op.args.matrix.key], isinstance(op.args, GatedProduct)
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
        sizes = args.num_experts, args.router.top_k, args.down.rows, args.down.columns
        if sizes not in self._moe:
            self._moe[sizes] = workspace_moe(
                max_tokens=self._limits.tokens, num_experts=sizes[0], top_k=sizes[1], hidden=sizes[2], inter=sizes[3],
                dtype=self._dtype, device=self._loaded.device,
            )  # fmt: skip
        experts = Experts(args, self._loaded, self._moe[sizes])
        self._experts.append(experts)

        def launch(step: Pass) -> None:
            x, logits = (step.registers.get(view) for view in op.ins)
            experts(x, logits, step.registers.into(op.outs[0]), step.num_tokens)

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
        heads, group = (args.heads, args.head_dim), args.heads // args.kv_heads
        joined = _joined(op.ins)
        other = self._attention if self._attention is not None and self._attention.takes(args) else None
        parameters = self.reference.attention(args)

        def launch(step: Pass) -> None:
            (k_pages, v_pages), table = step.cache.pages[args.tile], step.cache.tables[args.tile]
            query = step.registers.get(op.ins[0]).view(-1, *heads)
            if len(op.ins) > 1:
                query = query.new_empty(query.shape)
                if joined is None:
                    states = torch.cat([step.registers.get(view) for view in op.ins], dim=1)
                else:
                    states = step.registers.get(joined)
                positions = self._zeros[: len(query)] if rope is None else step.step.positions
                norm_rotary_write(
                    states, pair, eps, rotary, positions, step.slots[table], query, k_pages, v_pages,
                    turning=None if rope is None else rope.dims,
                )  # fmt: skip
            tables, attended = step.tables[table], step.registers.into(out).view(-1, *heads)
            now = other if other is not None and other.rows is not None else None
            if workspace is not None and (now is None or not now.backend.decodes):
                rows = len(tables)
                decode_attention(
                    attended[:rows], query[:rows], k_pages, v_pages, tables, workspace, scale=args.scale,
                    softcap=softcap, sinks=sinks,
                )  # fmt: skip
            if now is not None:
                now.attend(attended, query, args.tile, parameters)
            elif step.tiles is not None:
                extend_attention(
                    attended, query, k_pages, v_pages, tables, step.context_lens, step.tiles, scale=args.scale,
                    num_programs=num_programs, window=window, softcap=softcap, sinks=sinks,
                    tile_rows=self._tile_rows(group, step.tile_rows),
                )  # fmt: skip

        return launch

    def _latent(self, part: Part) -> Launch:
        (op,) = part.ops
        args = op.args
        assert isinstance(args, AttendLatent)
        keys, values = (self._loaded.values(each).view(args.heads, -1, args.rank) for each in (args.keys, args.values))
        layer = LatentLayer(keys=keys, values=values, rope_dim=args.rope_dim, scale=args.scale)
        self._latents.append(layer)
        key = 0, args.heads, 1, args.rank
        if key not in self._decode:
            self._decode[key] = layer.workspace(
                rows=self._limits.rows, max_context=self._max_len, num_programs=self._num_programs(args.rank)
            )
        workspace = self._decode[key]

        def launch(step: Pass) -> None:
            query, latent, rotated = (step.registers.get(view) for view in op.ins)
            (pages, _), table = step.cache.pages[args.tile], step.cache.tables[args.tile]
            attend_latent(
                step.registers.into(op.outs[0]), query, latent, rotated, layer, pages, step.slots[table],
                step.tables[table], step.context_lens, workspace, step.tiles, tile_rows=step.tile_rows,
                per_tile=tile_tokens(self._largest_group, step.tile_rows),
            )  # fmt: skip

        return launch

    def _tile_rows(self, group: int, rows: int) -> int:
        """The step's tiles have as many tokens as `rows` rows of the layers with the largest group hold."""
        if group == self._largest_group:
            return rows
        needed: int = triton.next_power_of_2(tile_tokens(self._largest_group, rows) * group)
        return max(_LEAST_ROWS, needed)

    def _rotary_of(self, rope: Rope | None, head_dim: int) -> Tensor:
        """None: nothing turns, at position 0."""
        key = rope, head_dim
        if key not in self._rotary:
            angles = torch.zeros(0) if rope is None else inverse_frequencies(rope)
            scale, max_len = (1.0, 1) if rope is None else (rope.cos_scale, self._max_len)
            self._rotary[key] = rotary_table(angles.to(self._loaded.device), scale, max_len, head_dim)
        return self._rotary[key]

    def _decode_of(self, args: Attend) -> DecodeWorkspace:
        key = args.reach.positions, args.heads, args.kv_heads, args.head_dim
        if key not in self._decode:
            self._decode[key] = workspace_decode(
                rows=self._limits.rows, max_context=self._max_len, heads=args.heads, kv_heads=args.kv_heads,
                head_dim=args.head_dim, num_programs=self._num_programs(args.head_dim),
                window=args.reach.positions or None, device=self._loaded.device,
            )  # fmt: skip
        return self._decode[key]


def _joined(views: tuple[View, ...]) -> View | None:
    """The columns of the views, if they are adjacent."""
    register, first, at = views[0].register, views[0].first, views[0].first
    for view in views:
        if (view.register, view.first) != (register, at):
            return None
        at += view.width
    return View(register, first, at - first)
