"""A worker without a device that obeys the contract of StepPlan exactly.

What a layer stores of a position is a hash of its id and of what the layer reads of the positions before. The next
token is a hash of everything that the layers of all groups read, *through the block tables*. So any lost, doubled,
reordered, wrongly cached or too early reused page changes every token after it.
"""

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, islice
from zlib import crc32

from msgspec import structs

from pagewire.engine.core.groups import PLAIN, Groups
from pagewire.ipc.messages import (
    Constraint,
    Enqueue,
    GroupShape,
    GroupTable,
    Limits,
    Pooling,
    RowLogprobs,
    RowOpen,
    Sampling,
    StepPlan,
    StepResult,
    TextSpec,
    TokenBatch,
    Tokens,
    bytes_to_ids,
    ids_to_bytes,
)

VOCAB = 50
EOS = 7
KV_BYTES = 4  # of one position


def all_tokens(batch: TokenBatch) -> list[Tokens]:
    """All tokens of a batch, columns first."""
    return [*(Tokens(rid, data) for rid, data in batch.columns()), *batch.tokens]


def next_kv(before: int, token_id: int) -> int:
    """The KV of a position."""
    return crc32(token_id.to_bytes(4, "little"), before)


def kv_of(ids: Sequence[int]) -> bytes:
    """The KV of a whole sequence, `KV_BYTES` a position."""
    return array("I", list(accumulate(ids, next_kv, initial=0))[1:]).tobytes()


# In page i of a block every byte is xored with i, so that pages cannot be exchanged.
_SHELVES = [bytes(byte ^ i for byte in range(256)) for i in range(16)]


def shelved(data: bytes | bytearray, num: int) -> list[bytes]:
    """What each of the `num` pages of a block holds of these values."""
    return [bytes(data.translate(table)) for table in _SHELVES[:num]]


def seen(token_id: int, regime: int) -> int:
    """What layers compute with: in another regime they see other tokens."""
    return token_id + regime * 2**20


def next_value(kind: str, before: Sequence[bytes | bytearray], token_id: int) -> bytes:
    """What a group stores of a position. `before`: what its layers read of the positions before, page by page."""
    token = token_id.to_bytes(4, "little")
    if kind == "full":  # it reads all positions; the last depends on all others
        last, *others = [read[-KV_BYTES:] for read in before]
        return crc32(token + b"".join(others), int.from_bytes(last, "little")).to_bytes(KV_BYTES, "little")
    return crc32(token + b"".join(before)).to_bytes(KV_BYTES, "little")


class StagedGroups(Groups):
    """The cache groups of a model whose layers are divided into stages. Each stage has layers of each group."""

    def __init__(self, groups: Groups, num_stages: int) -> None:
        super().__init__(groups.shapes, interval=groups._interval)
        self.num_stages = num_stages


def hidden_of(groups: Groups, values: Iterable[bytes | bytearray], state: int) -> int:
    """What a stage hands to the next one of a position. `values`: what its groups store of the position. `state`: after
    it."""
    return crc32(b"".join(values), 0 if groups.state is None else state)


class Content:
    """What the cache of a sequence holds, from its ids and its regime alone; of one stage if there are several."""

    def __init__(self, groups: Groups, ids: Sequence[int] = (), regime: int = 0, stage: int = 0) -> None:
        """`stage`: the first that is computed; `ids` are its inputs."""
        self._groups = groups
        is_last = not isinstance(groups, StagedGroups) or stage + 1 == groups.num_stages
        self.next_stage = None if is_last else Content(groups, stage=stage + 1)
        self._regime = regime
        self.num = 0  # positions
        self.values = [bytearray() for _ in range(groups.num_tables)]  # of each group with block tables
        self.states = [0]  # the recurrent state after 0, 1, 2 … positions
        for token_id in ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Adds a position."""
        token_id = seen(token_id, self._regime)
        for group, values in enumerate(self.values):
            shape = self._groups.shapes[group]
            before = values[KV_BYTES * read_from(shape, self.num) :]
            values += next_value(shape.kind, shelved(before, shape.pages), token_id)
        self.states.append(next_kv(self.states[-1], token_id))
        self.num += 1
        if self.next_stage is not None:
            self.next_stage.append(hidden_of(self._groups, (v[-KV_BYTES:] for v in self.values), self.states[-1]))

    def reads(self) -> bytes:
        """What all layers of the last stage read to compute the last position, that one included."""
        if self.next_stage is not None:
            return self.next_stage.reads()
        shapes = self._groups.shapes
        reads = [
            shelved(values[KV_BYTES * read_from(shape, self.num - 1) :], shape.pages)
            for shape, values in zip(shapes, self.values, strict=False)
        ]
        return join_reads(self._groups, reads, self.states[-1])


def encoded_kv(ids: Sequence[int]) -> bytes:
    """What an encoder stores of a whole prompt: every position depends on all of them."""
    whole = crc32(array("i", ids).tobytes())
    return array("I", [crc32(token_id.to_bytes(4, "little"), whole) for token_id in ids]).tobytes()


def regime_with(groups: Groups, encoded: Sequence[bytes]) -> int:
    """A number that stands for the encoder's result, by its pages, in what the decoder computes. Other results have
    another one, nearly always."""
    return crc32(b"".join(encoded)) % 4000 if groups.cross is not None else 0


def read_from(shape: GroupShape, position: int) -> int:
    """The first position that the layers of a group read to compute this one."""
    if shape.kind == "window":
        return max(0, position + 1 - shape.span)
    return position - position % shape.span if shape.kind == "chunk" else 0


def join_reads(groups: Groups, reads: Sequence[Sequence[bytes]], state: int) -> bytes:
    """What all layers read, from what those of each group with a block table read, page by page, and the state."""
    joined = b"".join(page for pages in reads for page in pages)
    return joined if groups.state is None else joined + state.to_bytes(KV_BYTES, "little")


def next_token(
    kv: bytes | bytearray, seed: int, allowed: Sequence[int] | None = None, withheld: Collection[int] = ()
) -> int:
    """The token after the positions with this KV, of those that are `allowed`, or the first after it that is not
    `withheld`. About one in 50 is EOS."""
    if allowed is not None:
        return allowed[crc32(kv, seed) % len(allowed)]
    token = crc32(kv, seed) % VOCAB
    while token in withheld:
        token = (token + 1) % VOCAB
    return token


def allowed_after(rid: int, output: Sequence[int]) -> Sequence[int] | None:
    """The tokens that the grammar of sequence `rid` allows after this output. None: all; (): it is complete."""
    state = crc32(array("i", output).tobytes(), rid)
    if len(output) > 2 and state % 23 == 0:
        return ()
    return None if state % 5 == 0 else sorted({(state >> shift) % VOCAB for shift in range(1 + state % 9)})


def bits_of(tokens: Sequence[int]) -> bytes:
    """The mask that allows these tokens."""
    return sum(1 << token for token in tokens).to_bytes(4 * -(-VOCAB // 32), "little")


def regime_of(groups: Groups, prompt: Sequence[int]) -> int:
    """`regime_with` what the encoder makes of this prompt."""
    assert groups.cross is not None
    return regime_with(groups, shelved(encoded_kv(prompt), groups.sizes[groups.cross]))


def expected_output(
    prompt: list[int],
    max_tokens: int,
    max_len: int,
    seed: int,
    ignore_eos: bool,
    stops: Sequence[int] = (),
    min_tokens: int = 0,
    grammar: int | None = None,
    groups: Groups = PLAIN,
    regime_limit: int | None = None,
    encoded: Sequence[int] = (),
) -> list[int]:
    """The output that a request must have in every case. `grammar`: the rid of a sequence that follows its grammar.
    `regime_limit`: ids, beyond which all positions are computed in regime 1. `encoded`: what an encoder reads."""
    limit = sys.maxsize if regime_limit is None else regime_limit
    regime = regime_of(groups, encoded) if encoded else int(len(prompt) > limit)
    ids, content = list(prompt), Content(groups, prompt, regime)
    while len(ids) - len(prompt) < max_tokens and len(ids) < max_len:
        allowed = None if grammar is None else allowed_after(grammar, ids[len(prompt) :])
        if allowed == ():
            break
        ends = {*stops, *(() if ignore_eos else (EOS,))}
        ids.append(next_token(content.reads(), seed, allowed, ends if len(ids) - len(prompt) < min_tokens else ()))
        if ids[-1] in ends:
            break
        if len(ids) == limit + 1:
            content = Content(groups, ids, 1)
        else:
            content.append(ids[-1])
    return ids[len(prompt) :]


def enqueue(
    rid: int,
    prompt: list[int],
    *,
    max_tokens: int | None = 16,
    seed: int = 0,
    priority: int = 0,
    tenant: str = "",
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    queue_timeout_s: float | None = None,
    salt: bytes = b"",
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    n: int = 1,
    resume_ids: Sequence[int] = (),
    min_tokens: int = 0,
    constraint: Constraint | None = None,
    pooling: Pooling | None = None,
    marks: tuple[int, ...] = (),
    latency_class: str = "",
) -> Enqueue:
    """A request as the tokenizer sends it."""
    return Enqueue(
        rid,
        ids_to_bytes(prompt),
        Sampling(seed=seed, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
        Limits(
            max_tokens=max_tokens if pooling is None else 0,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            queue_timeout_s=queue_timeout_s,
            min_tokens=min_tokens,
        ),
        TextSpec(),
        priority,
        salt,
        tenant,
        n,
        ids_to_bytes(list(resume_ids)),
        constraint,
        pooling=pooling,
        marks=marks,
        latency_class=latency_class,
    )


class FakeRow:
    """The worker's state of a row."""

    __slots__ = (
        *("ends", "firsts", "ids", "min_len", "num_computed", "num_prompt", "pooled", "pooling", "sampling"),
        *("cross", "first_state", "num_encoded", "read_state_from", "regime", "state", "states", "stored", "tables"),
    )

    def __init__(self, message: RowOpen) -> None:
        self.ids = bytes_to_ids(message.ids)
        self.num_prompt = message.num_prompt
        self.num_computed = message.num_computed
        tables = message.tables or (GroupTable(0, message.block_ids),)
        self.tables = [list(bytes_to_ids(table.pages)) for table in tables]  # group → pages, from block `firsts` on
        self.firsts = [table.first for table in tables]
        self.state = bytes_to_ids(message.state)  # pages
        self.read_state_from: array[int] | None = bytes_to_ids(message.state_from)  # by the next pass; None: `state`
        self.first_state = 0  # the position before the last pass
        self.states: list[int] = []  # after each position of the last pass, and before it
        self.stored: list[list[bytes]] = []  # for the next stage: what the groups have stored of each of its positions
        self.sampling = message.sampling
        self.min_len = message.min_len
        self.ends = frozenset(bytes_to_ids(message.ends))
        self.pooling = message.pooling
        self.pooled = b""  # the KV of the positions computed since the row was opened
        self.regime = message.regime
        self.cross = bytes_to_ids(message.cross)  # pages
        self.num_encoded = message.num_encoded


class FakeWorker:
    """Runs plans at once, in order. Raises AssertionError if a plan breaks the contract."""

    has_next = False  # another stage computes from what this one stores

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        carry_out: Callable[[bytes], None] | None = None,
        draft: "Callable[[FakeRow, int], Sequence[int]] | None" = None,
        fits: Callable[[int], bool] = lambda num: True,
        groups: Groups = PLAIN,
    ) -> None:
        """`carry_out`: runs a plan's metadata for the worker half of a KV connector. `draft`: gives at most that many
        draft tokens for a row. `fits`: whether there is memory for a step of that many positions. With `groups`,
        `num_blocks` are pages."""
        self.block_size = block_size
        self.groups = groups
        self.block_bytes = KV_BYTES * block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.memory = bytearray(num_blocks * self.block_bytes)  # of every page
        self.rows: list[FakeRow | None] = [None] * max_num_seqs
        self.last_step: int | None = None
        self.fail_seeds: set[int] = set()  # requests whose logits are "not finite"
        self.is_faulted = False  # until a plan with `after_fault`
        self._carry_out = carry_out
        self._draft = draft
        self._fits = fits

    def read_block(self, block: int) -> bytes:
        """The content of a page."""
        return bytes(self.memory[block * self.block_bytes : (block + 1) * self.block_bytes])

    def write_block(self, block: int, content: bytes) -> None:
        """Overwrites a whole page."""
        assert len(content) == self.block_bytes, len(content)
        self.memory[block * self.block_bytes : (block + 1) * self.block_bytes] = content

    def waits(self, plan: StepPlan, late: Iterable[int]) -> bool:
        """Whether the plan cannot be run yet, with the masks of these late rows."""
        return not (self.is_faulted and not plan.after_fault) and not set(bytes_to_ids(plan.late_rows)) <= set(late)

    def run(self, plan: StepPlan, late: Mapping[int, Sequence[int] | None] | None = None) -> StepResult:
        """Runs one step. `late`: the tokens that each late row may sample; None: all."""
        assert self.last_step is None or plan.step == self.last_step + 1, "plans must come in order"
        self.last_step = plan.step
        if self.is_faulted and not plan.after_fault:
            return self._drop(plan)
        self.is_faulted = False
        self._change_rows(plan)
        rows, counts = bytes_to_ids(plan.rows), bytes_to_ids(plan.counts)
        assert len(rows) == len(counts) == len(plan.sample)
        assert rows or plan.kv, "an empty plan"
        assert len(set(rows)) == len(rows), "a row is twice in a plan"
        most = sum(counts) + plan.num_speculative * plan.speculate
        assert most <= self.max_num_batched_tokens, "over the token budget"
        assert plan.num_speculative <= len(rows) and (plan.num_speculative > 0) == (plan.speculate > 0)
        if rows and not self._fits(most):
            for row, count in zip(rows, counts, strict=True):
                self._spoil(self._row(row), count)
            return self._drop(structs.replace(plan, kv=b""))
        for opened in plan.open:
            if opened.encoder_ids:
                self._encode(self._row(opened.row), bytes_to_ids(opened.encoder_ids))
        masks = _masks(plan, late or {})
        sampled: list[int] = []
        num_sampled: list[int] = []
        num_drafts = num_draft_tokens = 0
        logprobs: dict[int, RowLogprobs] = {}
        prompt_logprobs: dict[int, RowLogprobs] = {}
        vectors: dict[int, bytes] = {}
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            state = self._row(row)
            ids, start, end = state.ids, state.num_computed, state.num_computed + count
            assert count >= 1 and end <= len(ids), "positions without ids"
            sampling = state.sampling
            if i < plan.num_speculative:
                assert count == plan.sample[i] == 1 and sampling.logprobs is None, "this row may not have draft tokens"
                draft_tokens = self._draft_tokens(state, end, plan.speculate)
                num_drafts += bool(draft_tokens)
                num_draft_tokens += len(draft_tokens)
                tokens = self._speculate(state, draft_tokens)
                sampled += tokens
                num_sampled.append(len(tokens))
                continue
            kv = self._compute(state, start, end)
            if state.pooling is not None:
                assert not plan.sample[i], "a pooled row samples no token"
                if (vector := self._pool(state, kv, start, end)) is not None:
                    vectors[i] = vector
            if sampling.prompt_logprobs is not None:
                scored = ids[start + 1 : min(end + 1, state.num_prompt)]
                if scored:
                    prompt_logprobs[i] = _certain(scored)
            if plan.sample[i]:
                assert end == len(ids), "a token may only be sampled after the last id"
                withheld = state.ends if len(ids) < state.min_len else ()
                token = next_token(kv, sampling.seed, masks.get(row), withheld)
                ids.append(token)
                if sampling.seed in self.fail_seeds:
                    token = -1
                elif sampling.logprobs is not None:
                    logprobs[i] = _certain(ids[-1:])
                sampled.append(token)
                num_sampled.append(1)
        self._keep_states(plan, rows[plan.num_speculative :])
        return StepResult(
            plan.step,
            ids_to_bytes(sampled),
            logprobs,
            prompt_logprobs,
            self.device_ms(counts),
            ids_to_bytes(num_sampled) if len(sampled) > len(num_sampled) else b"",
            num_drafts,
            num_draft_tokens,
            vectors,
        )

    def _change_rows(self, plan: StepPlan) -> None:
        """Applies what precedes the pass: opened rows, new blocks, transfers and copies."""
        for opened in plan.open:
            self.rows[opened.row] = FakeRow(opened)
        rows, pages = bytes_to_ids(plan.grow_rows), iter(bytes_to_ids(plan.grow_blocks))
        for row, group in zip(rows, bytes_to_ids(plan.grow_groups) or [0] * len(rows), strict=True):
            self._row(row).tables[group] += islice(pages, self.groups.sizes[group])
        assert next(pages, None) is None, "more pages than the rows get"
        if plan.kv:
            assert self._carry_out is not None, "metadata without a connector"
            self._carry_out(plan.kv)
        pairs = bytes_to_ids(plan.copies)
        assert not set(pairs[::2]) & set(pairs[1::2]), "a page is both source and target of a copy"
        for block, content in zip(pairs[1::2], list(map(self.read_block, pairs[::2])), strict=True):
            self.write_block(block, content)

    def _draft_tokens(self, state: FakeRow, end: int, most: int) -> list[int]:
        assert len(state.ids) >= state.min_len, "tokens are withheld, which works only for one position"
        draft_tokens = [] if self._draft is None else list(self._draft(state, most))
        assert len(draft_tokens) <= most
        for group in range(self.groups.num_tables):
            self._slot(state, group, end + most - 1)  # there must be a block
        return draft_tokens

    def _pool(self, state: FakeRow, kv: bytes, start: int, end: int) -> bytes | None:
        """The vector of a pooled row, once its whole prompt is computed."""
        assert state.pooling is not None
        state.pooled += kv[start * KV_BYTES :]
        if end < state.num_prompt:
            return None
        vector = state.pooled[-KV_BYTES:] if state.pooling.how == "last" else state.pooled
        return b"" if state.sampling.seed in self.fail_seeds else vector

    def _drop(self, plan: StepPlan) -> StepResult:
        """Answers a plan that has no memory, or that follows such a plan. Its rows are closed."""
        self.is_faulted = True
        if plan.kv:
            assert self._carry_out is not None, "metadata without a connector"
            self._carry_out(plan.kv)
        for row in bytes_to_ids(plan.rows):
            self.rows[row] = None
        return StepResult(plan.step, b"", {}, {}, 1.0, fault="out_of_memory")

    def _spoil(self, state: FakeRow, count: int) -> None:
        """Overwrites the positions of a pass that ran out of memory."""
        for group in range(self.groups.num_tables):
            for position in range(state.num_computed, state.num_computed + count):
                for slot in self._slot(state, group, position):
                    self.memory[slot : slot + KV_BYTES] = b"\xee" * KV_BYTES
        for page in state.state:
            self.write_block(page, b"\xee" * self.block_bytes)

    def _keep_states(self, plan: StepPlan, rows: Sequence[int]) -> None:
        """Stores the states that the plan keeps, of rows without draft tokens."""
        pages = iter(bytes_to_ids(plan.keep_pages))
        for number, position in zip(bytes_to_ids(plan.keep_rows), bytes_to_ids(plan.keep_positions), strict=True):
            row = self._row(number)
            assert number in rows and row.first_state < position <= row.num_computed, "a state that is not computed"
            kept = list(islice(pages, self.groups.state_pages))
            self._write_state(kept, row.states[position - row.first_state])
        assert next(pages, None) is None, "more pages than states are kept"

    def _write_state(self, pages: Sequence[int], state: int) -> None:
        for page, part in zip(pages, shelved(state.to_bytes(KV_BYTES, "little"), len(pages)), strict=True):
            self.memory[page * self.block_bytes : page * self.block_bytes + KV_BYTES] = part

    def _read_state(self, row: FakeRow) -> int:
        """The recurrent state before a pass: any number if its pages do not belong together."""
        pages, row.read_state_from = row.state if row.read_state_from is None else row.read_state_from, None
        parts = [self.read_block(page)[:KV_BYTES] for page in pages]
        if parts and shelved(parts[0], len(parts)) != parts:
            return crc32(b"".join(parts))
        return int.from_bytes(parts[0], "little") if parts else 0

    def _speculate(self, state: FakeRow, draft_tokens: list[int]) -> list[int]:
        """Computes one position and these draft tokens. Returns the tokens up to the first mismatch."""
        ids, start = state.ids, state.num_computed
        ids.extend(draft_tokens)
        self._compute(state, start, start + 1 + len(draft_tokens))
        tokens: list[int] = []
        for end in range(start + 1, start + 2 + len(draft_tokens)):
            token = next_token(self._reads(state, end), state.sampling.seed)
            tokens.append(-1 if state.sampling.seed in self.fail_seeds else token)
            if tokens[-1:] != draft_tokens[end - start - 1 : end - start]:
                break
        del ids[start + len(tokens) :]
        ids.append(token)
        state.num_computed = start + len(tokens)
        self._write_state(state.state, state.states[len(tokens)])
        return tokens

    def device_ms(self, counts: "array[int]") -> float:
        """The duration of a step, linear in the number of positions."""
        return 1.0 + 0.01 * sum(counts)

    def _row(self, row: int) -> FakeRow:
        state = self.rows[row]
        assert state is not None, f"row {row} was never opened"
        return state

    def _compute(self, state: FakeRow, start: int, end: int) -> bytes:
        """Writes what each group stores of these positions. Returns all that is read to compute the last of them."""
        inputs = self._inputs(state, start, end)
        state.stored = [[] for _ in inputs] if self.has_next else []
        for group in range(self.groups.num_tables):
            shape = self.groups.shapes[group]
            first = read_from(shape, start)
            before = list(map(bytearray, self._read(state, group, first, start)))
            for position in range(start, end):
                skip = KV_BYTES * (read_from(shape, position) - first)
                value = next_value(shape.kind, [page[skip:] for page in before], inputs[position - start])
                if self.has_next:
                    state.stored[position - start].append(value)
                parts = zip(self._slot(state, group, position), before, shelved(value, len(before)), strict=True)
                for slot, page, part in parts:
                    page += part
                    self.memory[slot : slot + KV_BYTES] = part
        state.first_state, state.states = start, [self._read_state(state)]
        for number in inputs:
            state.states.append(next_kv(state.states[-1], number))
        state.num_computed = end
        self._write_state(state.state, state.states[-1])
        return self._reads(state, end)

    def _inputs(self, state: FakeRow, start: int, end: int) -> Sequence[int]:
        """What the first layers compute these positions from."""
        regime = self.regime_of(state)
        return [seen(token_id, regime) for token_id in state.ids[start:end]]

    def _encode(self, state: FakeRow, ids: Sequence[int]) -> None:
        """Stores what an encoder makes of a whole prompt."""
        assert len(ids) == state.num_encoded and self.groups.cross is not None
        num, size = self.groups.sizes[self.groups.cross], self.block_bytes
        assert len(state.cross) == num * -(-len(ids) // self.block_size), (
            "another number of pages than the prompt needs"
        )
        for shelf, part in enumerate(shelved(encoded_kv(ids), num)):
            for place, page in enumerate(state.cross[shelf::num]):
                own = part[place * size : (place + 1) * size]
                self.memory[page * size : page * size + len(own)] = own

    def regime_of(self, state: FakeRow) -> int:
        """The regime of a row; with an encoder, what its pages hold of the encoder's result decides it."""
        if self.groups.cross is None:
            return state.regime
        num = self.groups.sizes[self.groups.cross]
        parts = (b"".join(map(self.read_block, state.cross[shelf::num])) for shelf in range(num))
        return regime_with(self.groups, [part[: state.num_encoded * KV_BYTES] for part in parts])

    def _reads(self, state: FakeRow, end: int) -> bytes:
        """What all layers read to compute the position before `end`."""
        shapes = self.groups.shapes[: self.groups.num_tables]
        reads = [self._read(state, group, read_from(shape, end - 1), end) for group, shape in enumerate(shapes)]
        return join_reads(self.groups, reads, state.states[end - state.first_state])

    def _read(self, state: FakeRow, group: int, start: int, end: int) -> list[bytes]:
        """What the pages of a group hold of these positions, one part for each page of a block."""
        size, num, first = self.block_size, self.groups.sizes[group], state.firsts[group]
        assert start >= first * size or start == end, "positions are read whose blocks are not in the table"
        pages = state.tables[group][(start // size - first) * num : (-(-end // size) - first) * num]
        skip = start % size * KV_BYTES
        parts = (b"".join(map(self.read_block, pages[i::num])) for i in range(num))
        return [part[skip : skip + (end - start) * KV_BYTES] for part in parts]

    def _slot(self, state: FakeRow, group: int, position: int) -> list[int]:
        """Where the pages of a group hold a position."""
        (block, place), num = divmod(position, self.block_size), self.groups.sizes[group]
        first = (block - state.firsts[group]) * num
        pages = state.tables[group][first : first + num]
        assert first >= 0 and len(pages) == num, "a position without a block"
        return [page * self.block_bytes + place * KV_BYTES for page in pages]


def _masks(plan: StepPlan, late: Mapping[int, Sequence[int] | None]) -> dict[int, Sequence[int] | None]:
    """The tokens that masked rows and late rows may sample; None: all."""
    masked, late_rows = bytes_to_ids(plan.masked_rows), set(bytes_to_ids(plan.late_rows))
    sampling = {row for row, samples in zip(bytes_to_ids(plan.rows), plan.sample, strict=True) if samples}
    assert {*masked, *late_rows} <= sampling, "a mask for a row that does not sample"
    assert late_rows.isdisjoint(masked), "a row has a mask and is late"
    assert late_rows == late.keys(), "masks of other rows than the late ones"
    return {**allowed_by_row(masked, plan.masks), **late}


def allowed_by_row(rows: "array[int]", masks: bytes) -> dict[int, list[int]]:
    """The tokens that each of the rows may sample."""
    allowed = {}
    for i, row in enumerate(rows):
        bits = int.from_bytes(masks[i * len(masks) // len(rows) : (i + 1) * len(masks) // len(rows)], "little")
        allowed[row] = [token for token in range(VOCAB) if bits >> token & 1]
    assert len(allowed) == len(rows) and all(allowed.values()), "a row with two masks, or none"
    return allowed


def _certain(ids: "array[int]") -> RowLogprobs:
    """Log-probabilities of these positions, each with its own id alone."""
    return RowLogprobs(1, ids.tobytes(), array("f", [-1.0] * len(ids)).tobytes())
