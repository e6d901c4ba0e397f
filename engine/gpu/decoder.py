"""A program on the Triton kernels, with buffers at fixed addresses, so that its steps can be recorded.

All inputs of a step are on the device when it begins: the packet, and the state of the rows. The order of operations is
that of the program (`walk.py`). A layer like Llama's takes six launches for up to 16 tokens: norm and QKV projection,
rotary embedding and KV write, attention, output projection and residual, norm and gates, down projection and residual.
More tokens take cuBLAS and a norm that adds the residual.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...kernels.triton.decode_attention import plan_decode
from ...kernels.triton.extend_attention import max_tiles, tile_tokens
from ...kernels.triton.prepare_step import prepare_step
from ..attention.kv_cache import KvCache, KvShape
from ..executors.by_layer import ByLayer
from ..executors.experts import OwnExperts
from ..executors.reference import Step
from ..executors.vocabulary import Vocabulary
from ..models.program import Program
from ..parallel.collectives import Alone, Group
from .attention import HostAttention
from .experts import Experts
from .packet import Limits, Packet
from .rules import largest_group
from .scratch import aligned
from .shapes import StepShape
from .state import RowState
from .walk import Pass, Walker
from .weights import Loaded

DRAFT_ROWS = 16  # attention tile rows for steps in which rows have a few tokens,
PROMPT_ROWS = 128  # for steps with prompts,
INVARIANT_ROWS = 64  # and for all steps of `--deterministic`: the fewest rows that wgmma takes


class TritonDecoder:
    """`open` comes before the first `run`. One step runs at a time."""

    def __init__(
        self,
        program: Program,
        loaded: Loaded,
        *,
        shape: KvShape,
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
        """program: one that `rules.in_torch` does not refuse. loaded: its weights, which it takes. num_programs: by the
        head dimension, how many of decode attention the device holds at once. is_deterministic: a token's bits depend
        on its own request only. without: kernels that torch replaces, some of `trial.OPTIONAL`. attention: of the steps
        that it serves, instead of Triton. num_domains: KV domains; if there are several, each is a rank of the
        group. by_layer: is told of the layers of steps that are never recorded, once they are launched."""
        self.kv_shape = shape
        self._attention = attention
        self._ranks = group
        self._limits = limits
        self.weights = loaded.num_bytes
        self.group = largest_group(program)  # query heads per kv head, for which attention's tiles are cut
        self.device = device = loaded.device
        self._walk = Walker(
            program, loaded, group=group, max_len=max_len, limits=limits, dtype=dtype, num_programs=num_programs,
            is_deterministic=is_deterministic, without=without, attention=attention, num_domains=num_domains,
            by_layer=by_layer,
        )  # fmt: skip
        # A domain has a whole head, and samples by itself.
        self.vocabulary = Vocabulary(program, self._walk.weights, group if num_domains == 1 else Alone())

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.ids, self._positions = integers(limits.tokens), integers(limits.tokens)  # of the last step
        self._places = None if program.regime_limit is None else integers(limits.tokens)  # in the rotary tables
        self._slots = integers(limits.tables, limits.tokens)
        self._context_lens, self._decode_lens = integers(limits.rows), integers(limits.rows)
        self._tables = integers(limits.tables, limits.rows, limits.blocks)
        # What the last norm takes, or in a stage before the last one something that it sends.
        width = program.widths[self._walk.kept.register]
        self._states = torch.zeros((limits.tokens, width), dtype=dtype, device=device)
        self.is_last = not program.sends  # it has the layers of the last stage, or all
        self.received_width, self.sent_width = program.received_width, program.sent_width
        most, rows = limits.scored, program.head.rows if self.is_last else 0
        logits = aligned(most * rows * dtype.itemsize) + aligned(most * rows * 4)
        projected = program.head_project.rows * dtype.itemsize if program.head_project is not None else 0
        hidden = aligned(most * self._states.shape[1] * dtype.itemsize) + aligned(most * projected)
        self._walk.allocate(least=hidden + logits)
        self._vocab = program.vocab
        self._cache: KvCache | None = None

    @property
    def own_experts(self) -> Mapping[int, OwnExperts]:
        """By layer, if ranks share them out."""
        return {layer: experts.own for layer, experts in self.experts.items() if experts.own is not None}

    @property
    def experts(self) -> Mapping[int, Experts]:
        """By layer."""
        return self._walk.experts

    @property
    def num_ranks(self) -> int:
        return self._ranks.size

    @property
    def left_to_torch(self) -> int:
        """Bytes that a step takes from the allocator at most, estimated: what torch's functions return."""
        gathers = self.vocabulary.group.size > 1 and self.is_last
        gathered = 3 * self._limits.scored * self._vocab * 4 if gathers else 0
        normed = self._limits.scored * self._walk.finishing
        return max(self._limits.tokens * self._walk.left_to_torch, gathered + normed)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept between steps."""
        own = [
            self.ids,
            self._positions,
            self._slots,
            self._context_lens,
            self._decode_lens,
            self._tables,
            self._states,
        ]
        own += [] if self._places is None else [self._places]
        return self._walk.nbytes + sum(tensor.nbytes for tensor in own)

    def drop_scratch(self) -> None:
        """Frees what holds nothing between steps."""
        self._walk.scratch.drop()

    def restore_scratch(self) -> None:
        """Allocates it again. Raises torch.OutOfMemoryError."""
        self._walk.scratch.restore()

    def open(self, cache: KvCache) -> None:
        """cache: head-major."""
        assert cache.groups.num_tables - cache.groups.state_pages == self._limits.tables, (cache.groups, self._limits)
        self._cache = cache
        if self._attention is not None:
            self._attention.backend.open(cache)
        self._walk.mixers.open(cache)

    def run(self, packet: Packet, state: RowState, shape: StepShape) -> None:
        """Runs the packet's tokens through the layers; `hidden` and `sampled_logits` then give the results."""
        self._walk.run(self.begin(packet, state, shape), shape.tokens)

    def begin(self, packet: Packet, state: RowState, shape: StepShape) -> Pass:
        """Prepares the packet's tokens for the layers."""
        cache = self._cache
        assert cache is not None, "run before open"
        tokens, rows = shape.tokens, min(shape.tokens, self._limits.rows)
        ids, positions, slots = self.ids[:tokens], self._positions[:tokens], self._slots[:, :tokens]
        lens, decode_lens = self._context_lens[:rows], self._decode_lens[:rows]
        tables = self._tables[:, :rows]
        places = None if self._places is None else self._places[:tokens]
        block_size = cache.block_size
        prepare_step(
            packet.step, state.last_ids, state.last_positions, state.tables, ids, positions, slots, lens, decode_lens,
            state.sample_positions, tables, block_size, places,
        )  # fmt: skip
        for workspace in self._walk.decode_workspaces:
            plan_decode(decode_lens, workspace)
        tiles = None
        if shape.tile_rows:
            per_tile = tile_tokens(self.group, shape.tile_rows)
            tiles = packet.tiles[: 1 + max_tiles(tokens, rows, per_tile)]
        if packet.states is not None:
            self._walk.mixers.begin(packet, num_rows=rows, is_long=shape.tile_rows == PROMPT_ROWS)
        return Pass(
            registers=self._walk.registers(self._states[:tokens]),
            scratch=self._walk.scratch,
            step=Step(ids, positions, None, positions if places is None else places),
            cache=cache,
            slots=slots,
            tables=tables,
            context_lens=lens,
            num_tokens=packet.step[1:2],
            padding=self._walk.padding(packet.step[1:2], tokens),
            may_wait=not shape.is_recorded,
            tiles=tiles,
            tile_rows=shape.tile_rows,
        )

    def put_received(self, received: Tensor) -> None:
        """Takes what the stage before has computed for the next step. received: [tokens of the step's shape,
        columns]."""
        self._walk.put_received(self._states[: len(received)], received)

    def take_sent(self, shape: StepShape, out: Tensor) -> None:
        """Gives what the next stage needs of the step that has run. out: [tokens of the step, columns], to be
        written."""
        self._walk.take_sent(self._states[: shape.tokens], out)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The normed states of tokens of the step. tokens: [n] int32 → [n, hidden]."""
        return self._walk.finish(self._states.index_select(0, tokens))

    def sampled_hidden(self, tokens: Tensor) -> Tensor:
        """`hidden` of at most `limits.scored` tokens of the step, until the next call or step."""
        scratch = self._walk.scratch
        scratch.begin()
        hidden = scratch.take((len(tokens), self._states.shape[1]), self._states.dtype)
        torch.index_select(self._states, 0, tokens, out=hidden)
        return self._walk.finish(hidden)

    def sampled_logits(self, tokens: Tensor) -> Tensor:
        """The logits of at most `limits.scored` tokens of the step, until the next call or step. tokens: [n] int32 →
        [n, vocab] float32."""
        return self.vocabulary.logits_in(self.sampled_hidden(tokens), self._walk.scratch.take)
