"""Runs a program in torch, on any device: what each operation computes is defined here, and faster executors are tested
against it. They also use it for the operations that they lack."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import reference_scans
from ...kernels.ops import Matrix
from ...kernels.reference import RelativeBias
from ...kernels.states import StateRows
from ..attention.base import Alibi, AttentionBackend, AttentionParameters, CrossBackend
from ..attention.kv_cache import KvShape
from ..attention.whole_text import WholeTextAttention
from ..models.description import Rope
from ..models.lower import latent_width
from ..models.program import (
    Activate,
    Add,
    AllReduce,
    Attend,
    AttendLatent,
    Clip,
    Embed,
    GatedProduct,
    Glu,
    Heat,
    Keep,
    MatchMagnitude,
    MeanSquares,
    MixStreams,
    Mixture,
    Multiply,
    Normalize,
    Op,
    Positions,
    Product,
    Program,
    Rotate,
    Scale,
    Spread,
    Store,
)
from ..parallel.collectives import Group
from ..parallel.domains import Domain
from .by_layer import ByLayer
from .experts import OwnExperts, exchanged_mixture, mixture, own_experts
from .functions import activate, glu, normalize, sparse, xielu
from .mixers import MIXERS, Mixers
from .registers import Registers
from .rotary import RotaryTable, places_of
from .vocabulary import Vocabulary
from .weights import Weights


@dataclass
class Step:
    """The tokens of a step, row after row."""

    ids: Tensor  # [tokens] int64 or int32
    positions: Tensor  # [tokens] int64 or int32
    backend: AttentionBackend | None  # None: an executor that attends itself
    places: Tensor  # [tokens], of the positions in the rotary tables
    rotary: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cosines and sines of the positions

    @property
    def attention(self) -> AttentionBackend:
        assert self.backend is not None, "the executor attends itself"
        return self.backend


class Reference:
    """The operations of one program with its weights."""

    def __init__(
        self, program: Program, weights: Weights, *, max_len: int, dtype: torch.dtype, weight_dtype: torch.dtype,
        device: torch.device, group: Group, domain: Domain | None = None, by_layer: ByLayer | None = None,
    ) -> None:  # fmt: skip
        """dtype: of activations. weight_dtype: of the checkpoint's matrices, to which factors of embeddings are
        rounded. domain: this rank's; None: there is one domain. by_layer: where a runner plugin or a KV connector is
        told of layers during a pass; None: nobody is."""
        self.program, self.weights = program, weights
        self._dtype, self._weight_dtype, self._device = dtype, weight_dtype, device
        self.group, self.domain, self.by_layer = group, domain, by_layer or ByLayer(program)
        self._attention: dict[Attend | AttendLatent, AttentionParameters] = {}
        self.mixers = Mixers[StateRows](weights, device, reference_scans)
        ropes = dict.fromkeys(op.args.rope for op in program.ops if isinstance(op.args, Rotate))
        limit = program.regime_limit
        self.rotary: Mapping[Rope, RotaryTable] = {
            rope: RotaryTable(rope, max_len=max_len, dtype=dtype, device=device, regime_limit=limit) for rope in ropes
        }
        # By the layer, of experts that ranks share out.
        self.own_experts: dict[int, OwnExperts] = {}
        for op in program.ops:
            num_domains = 1 if domain is None else group.size
            if isinstance(op.args, Mixture) and (own := own_experts(op.args, device, num_domains=num_domains)):
                assert op.layer not in self.own_experts, f"layer {op.layer} has two mixtures of experts"
                self.own_experts[op.layer] = own
        self._functions: dict[type, Callable[[Op, Registers, Step], Tensor]] = {
            Embed: self._embed,
            Positions: self._positions,
            Normalize: self._normalize,
            MeanSquares: self._mean_squares,
            Product: self._product,
            GatedProduct: self._gated_product,
            Add: self._add,
            Scale: self._scale,
            Activate: self._activate,
            Glu: self._glu,
            Multiply: self._multiply,
            MixStreams: self._mix_streams,
            MatchMagnitude: self._match_magnitude,
            Clip: self._clip,
            Rotate: self._rotate,
            Heat: self._heat,
            Attend: self._attend,
            Store: self._store,
            AttendLatent: self._attend_latent,
            Mixture: self._mixture,
            AllReduce: self._all_reduce,
            Spread: self._spread,
            Keep: self._keep,
            **dict.fromkeys(MIXERS, self._mixer),
        }

    def run(self, op: Op, registers: Registers, step: Step) -> None:
        is_shared = op.outs[0].register in self.program.shared or self.exchanges(op)
        if self.domain is not None and not self.domain.num_own and not is_shared:
            return
        value = self._functions[type(op.args)](op, registers, step)
        registers.put_adjacent(op.outs, self.program.widths[op.outs[0].register], value)

    def exchanges(self, op: Op) -> bool:
        """Whether the operation exchanges tokens by itself: then every rank runs it, also without tokens."""
        return isinstance(op.args, Mixture) and op.args.is_exchanged and self.domain is not None

    def step(self, ids: Tensor, positions: Tensor, attention: AttentionBackend, regimes: Tensor | None = None) -> Step:
        """The tokens of a step. All are [tokens] int64."""
        return Step(ids, positions, attention, places_of(positions, regimes, self.program.regime_limit))

    def no_step(self) -> Step:
        """A step without tokens of this rank."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        return Step(none, none, None, none)

    # What each operation computes. They return the columns of `op.outs`.

    def _embed(self, op: Op, registers: Registers, step: Step) -> Tensor:
        assert isinstance(op.args, Embed)
        return self.embed(op.args, step.ids)

    def embed(self, args: Embed, ids: Tensor) -> Tensor:
        """The embeddings of ids. Every rank has those of its own rows; the others are 0."""
        matrix = self.weights.matrix(args.table)
        if args.is_whole:
            out = matrix.lookup(ids.where(ids < args.table.rows, 0))
        elif self.group.size == 1:
            out = matrix.lookup(ids)
        else:
            local = ids - args.first_id
            is_elsewhere = (local < 0) | (local >= args.table.rows)
            out = matrix.lookup(local.clamp(0, args.table.rows - 1)).masked_fill_(is_elsewhere[:, None], 0)
        if args.scale != 1.0:
            out = out * self.embedding_scale(args)
        return out

    def embedding_scale(self, args: Embed) -> float:
        return float(torch.tensor(args.scale, dtype=self._weight_dtype))

    def _positions(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Positions)
        return registers.get(op.outs[0]) + self.weights.matrix(args.table).lookup(step.positions + args.offset)

    def _normalize(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Normalize)
        x, norm, weight = registers.get(op.ins[0]), args.norm, self.weights.vector(args.weight)
        if len(op.ins) > 1:
            normed = x.float() * torch.rsqrt(registers.get(op.ins[1]) + norm.eps)
            return (normed if weight is None else normed * weight.float()).to(x.dtype)
        return normalize(x, norm.size, norm.kind, norm.eps, weight, self.weights.vector(args.bias))

    def _mean_squares(self, op: Op, registers: Registers, step: Step) -> Tensor:
        """In float32."""
        args = op.args
        assert isinstance(args, MeanSquares)
        x = registers.get(op.ins[0]).float()
        out = x.new_zeros(x.shape[0], args.groups)
        out[:, args.group] = x.square().sum(dim=-1) / args.count
        return out

    def _product(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Product)
        x = registers.get(op.ins[0]).contiguous()
        return self.weights.matrix(args.matrix).product(x, self.weights.vector(args.bias))

    def _gated_product(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, GatedProduct)
        x = registers.get(op.ins[0]).contiguous()
        return self.weights.matrix(args.matrix).silu_mul(x, self.weights.vector(args.bias))

    def _add(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Add)
        x, y = (registers.get(view) for view in op.ins)
        x = x if args.alpha == 1.0 else x * args.alpha
        return x + y if args.beta == 1.0 else x + y * args.beta

    def _scale(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Scale)
        x = registers.get(op.ins[0])
        if args.vector is not None:
            return x * self.weights.vectors[args.vector.key]
        return x * args.factor if args.factor != 1.0 else x.clone()

    def _activate(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Activate)
        x, weights = registers.get(op.ins[0]), self.weights.vector(args.weights)
        return activate(x, args.act) if weights is None else xielu(x, weights)

    def _glu(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Glu)
        gate, up = (registers.get(view) for view in op.ins)
        if args.sparsity:
            whole = gate if args.ranks == 1 else torch.cat([*self.group.all_gather(gate.contiguous())], dim=1)
            gate = sparse(gate, whole, args.sparsity)
        return glu(gate, up, args.act, limit=args.limit, sharpness=args.sharpness, gate_scale=args.gate_scale)

    def _multiply(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Multiply)
        x, by = (registers.get(view) for view in op.ins)
        factor = by if not args.act else torch.sigmoid(by) if args.act == "sigmoid" else F.silu(by)
        return (x.view(x.shape[0], factor.shape[1], -1) * factor[:, :, None]).flatten(1)

    def _mix_streams(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, MixStreams)
        x, others, weights = (registers.get(view) for view in op.ins)
        streams = others.view(len(x), -1, args.size)
        weights = (weights + args.shift).view(len(x), -1, streams.shape[1])
        out = x.view(len(x), -1, args.size)
        for number in range(streams.shape[1]):
            out = torch.addcmul(out, weights[:, :, number, None], streams[:, None, number])
        return out.flatten(1)

    def _match_magnitude(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, MatchMagnitude)
        x, to = (registers.get(view) for view in op.ins)
        own = x.square().mean(-1, keepdim=True).clamp(min=args.floor).sqrt()
        return x * to.square().mean(-1, keepdim=True).sqrt() / own

    def _clip(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Clip)
        return registers.get(op.ins[0]).clamp(-args.limit, args.limit)

    def _rotate(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Rotate)
        x = registers.get(op.ins[0])
        heads = x.view(x.shape[0], args.heads, -1)
        if args.rope not in step.rotary:
            step.rotary[args.rope] = self.rotary[args.rope].at(step.places)
        cos, sin = step.rotary[args.rope]
        last = args.first + args.rope.dims
        turning = heads[..., args.first : last]
        turned = torch.addcmul(turning * cos, turning.roll(args.rope.dims // 2, -1), sin)
        return torch.cat((heads[..., : args.first], turned, heads[..., last:]), dim=-1).flatten(1)

    def _heat(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Heat)
        heat, x = args.temperature, registers.get(op.ins[0])
        steps = ((step.positions + heat.shift).float() / heat.every).floor()
        return x * (torch.log1p(steps) * heat.scale + 1).to(x.dtype)[:, None]

    def _attend(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Attend)
        q, *kv = (registers.get(view) for view in op.ins)
        key, value = (part.view(part.shape[0], args.kv_heads, -1) for part in kv) if kv else (None, None)
        query = q.view(q.shape[0], args.heads, -1)
        attention = step.attention
        if args.reach.kind == "cross":
            attention = cast(CrossBackend, attention).cross
        return attention.forward(args.tile, query, key, value, self.attention(args)).flatten(1)

    def _store(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args, attention = op.args, step.attention
        assert isinstance(args, Store) and isinstance(attention, WholeTextAttention), "stores outside an encoder"
        key, value = (registers.get(view) for view in op.ins)
        attention.store(args.tile, *(part.reshape(part.shape[0], args.kv_heads, -1) for part in (key, value)))
        return key

    def _attend_latent(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, AttendLatent)
        q, latent, key = (registers.get(view) for view in op.ins)
        query = q.view(q.shape[0], args.heads, -1)
        in_latents = _by_head(self.weights.matrices[args.keys.key], query[..., : args.nope_dim])
        query = torch.cat((in_latents, query[..., args.nope_dim :]), dim=-1)
        both = torch.cat((latent, key), dim=-1)[:, None]
        padding = (0, latent_width(args.rank, args.rope_dim) - both.shape[2])
        query, both = F.pad(query, padding), F.pad(both, padding)
        attended = step.attention.forward(args.tile, query, both, None, self.latent_attention(args))
        return _by_head(self.weights.matrices[args.values.key], attended).flatten(1)

    def latent_attention(self, args: AttendLatent) -> AttentionParameters:
        """The parameters of a layer; the same object for the same layer."""
        if args not in self._attention:
            self._attention[args] = AttentionParameters(scale=args.scale, latent=args.rank)
        return self._attention[args]

    def attention(self, args: Attend) -> AttentionParameters:
        """The parameters of a layer; the same object for the same layer."""
        if args not in self._attention:
            alibi, relative = args.alibi, args.relative
            table = self.weights.vector(args.relative_table)
            self._attention[args] = AttentionParameters(
                scale=args.scale,
                window=args.reach.positions if args.reach.kind == "window" else None,
                chunk=args.reach.positions if args.reach.kind == "chunk" else None,
                softcap=args.softcap or None,
                sinks=self.weights.vector(args.sinks),
                alibi=None
                if alibi is None
                else Alibi(
                    torch.tensor(alibi.slopes, device=self._device),
                    before_scale=alibi.before_scale,
                    rounded=alibi.is_rounded,
                ),
                relative=None
                if relative is None or table is None
                else RelativeBias(table, relative.longest, relative.is_two_sided),
            )
        return self._attention[args]

    def _mixture(self, op: Op, registers: Registers, step: Step) -> Tensor:
        args = op.args
        assert isinstance(args, Mixture)
        own, domain = self.own_experts.get(op.layer), self.domain
        if args.is_exchanged and domain is not None and own is not None:
            x, logits = (
                registers.get(view)
                if domain.num_own
                else torch.empty((0, view.width), dtype=self._dtype, device=self._device)
                for view in op.ins
            )
            return exchanged_mixture(args, self.weights, x, logits, own, step.positions, self.group, domain.num_all)
        x, logits = (registers.get(view) for view in op.ins)
        return mixture(args, self.weights, x, logits, own, self.turns(step))

    def turns(self, step: Step) -> Tensor:
        """Numbers of the tokens, where all ranks have all of them, by which the ranks that have an expert take turns:
        the same on all ranks."""
        if self.domain is None:
            return step.positions
        return torch.arange(self.domain.num_all, device=self._device)

    def _mixer(self, op: Op, registers: Registers, step: Step) -> Tensor:
        assert isinstance(op.args, MIXERS)
        return self.mixers.run(op.args, [registers.get(view) for view in op.ins], step.attention)

    def _all_reduce(self, op: Op, registers: Registers, step: Step) -> Tensor:
        x = registers.get(op.ins[0]).contiguous()
        self.group.all_reduce(x)
        return x

    def _spread(self, op: Op, registers: Registers, step: Step) -> Tensor:
        if self.domain is None:
            return registers.get(op.ins[0]).clone()
        out = torch.zeros((self.domain.num_all, op.outs[0].width), dtype=self._dtype, device=self._device)
        if self.domain.num_own:
            out[self.domain.first : self.domain.first + self.domain.num_own] = registers.get(op.ins[0])
        return out

    def _keep(self, op: Op, registers: Registers, step: Step) -> Tensor:
        x = registers.get(op.ins[0])
        return x.clone() if self.domain is None else x[self.domain.first : self.domain.first + self.domain.num_own]


def _by_head(matrices: Sequence[Matrix], x: Tensor) -> Tensor:
    """The product of each head with a matrix of its own. x: [tokens, heads, k]; matrices: [n, k] → [tokens, heads,
    n]."""
    parts = [matrix.product(x[:, head].contiguous(), None) for head, matrix in enumerate(matrices)]
    return torch.stack(parts, dim=1)


class ReferenceModel:
    """A `Model` that runs every operation in torch."""

    def __init__(self, reference: Reference, vocabulary: Vocabulary, kv_shape: KvShape) -> None:
        self.kv_shape = kv_shape
        self._reference = reference
        self._vocabulary = vocabulary
        self.logits, self.greedy = vocabulary.logits, vocabulary.greedy
        program = reference.program
        last: dict[int, int] = {}
        for number, op in enumerate(program.ops):
            for view in (*op.ins, *op.outs):
                last[view.register] = number
        for view in (program.result, *program.sends):
            last.pop(view.register, None)
        self._dropped: list[list[int]] = [[] for _ in program.ops]
        for register, number in last.items():
            self._dropped[number].append(register)

    def hidden(
        self, ids: Tensor, positions: Tensor, attention: AttentionBackend, regimes: Tensor | None = None
    ) -> Tensor:
        return self.stage(ids, positions, attention, regimes, None)

    def stage(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        regimes: Tensor | None,
        received: Tensor | None,
    ) -> Tensor:
        program = self._reference.program
        step, registers = self._reference.step(ids, positions, attention, regimes), Registers()
        put_received(registers, program, received)
        self._run(registers, step)
        return result_of(registers, program)

    def help_others(self, attention: AttentionBackend) -> None:
        """Runs a step for a domain without rows: this rank's part of what all domains share."""
        self._run(Registers(), self._reference.no_step())

    def _run(self, registers: Registers, step: Step) -> None:
        def run(first: int, last: int) -> None:
            ops = self._reference.program.ops[first:last]
            for op, dropped in zip(ops, self._dropped[first:last], strict=True):
                self._reference.run(op, registers, step)
                for register in dropped:
                    registers.drop(register)

        self._reference.by_layer.run(registers, run)


def put_received(registers: Registers, program: Program, received: Tensor | None) -> None:
    """Puts what the stage before has sent into the registers. received: [tokens, columns]; None: the first stage."""
    assert (received is None) == (not program.receives), "what a stage receives is the result of the one before"
    if received is not None:
        first = 0
        for view in program.receives:
            registers.put(view, program.widths[view.register], received[:, first : first + view.width])
            first += view.width


def result_of(registers: Registers, program: Program) -> Tensor:
    """What the head takes, or of a stage before the last one what it sends: [tokens, columns], in new memory."""
    if program.sends:
        return torch.cat([registers.get(view) for view in program.sends], dim=1)
    return registers.get(program.result)
