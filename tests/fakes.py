"""A worker without a device that obeys the contract of StepPlan exactly.

The KV of a position is a hash of its id and of the KV before it. The next token is a hash of all KV, read *through the
block table*. So any lost, doubled, reordered, wrongly cached or too early reused block changes every token after it.
"""

from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from zlib import crc32

from msgspec import structs

from pagewire.ipc.messages import (
    Constraint,
    Enqueue,
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


def expected_output(
    prompt: list[int],
    max_tokens: int,
    max_len: int,
    seed: int,
    ignore_eos: bool,
    stops: Sequence[int] = (),
    min_tokens: int = 0,
    grammar: int | None = None,
) -> list[int]:
    """The output that a request must have in every case. `grammar`: the rid of a sequence that follows its grammar."""
    ids, kv = list(prompt), bytearray(kv_of(prompt))
    last = int.from_bytes(kv[-KV_BYTES:], "little")
    while len(ids) - len(prompt) < max_tokens and len(ids) < max_len:
        allowed = None if grammar is None else allowed_after(grammar, ids[len(prompt) :])
        if allowed == ():
            break
        ends = {*stops, *(() if ignore_eos else (EOS,))}
        ids.append(next_token(kv, seed, allowed, ends if len(ids) - len(prompt) < min_tokens else ()))
        if ids[-1] in ends:
            break
        last = next_kv(last, ids[-1])
        kv += last.to_bytes(KV_BYTES, "little")
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
    )


class FakeRow:
    """The worker's state of a row."""

    __slots__ = ("blocks", "ends", "ids", "min_len", "num_computed", "num_prompt", "pooled", "pooling", "sampling")

    def __init__(self, message: RowOpen) -> None:
        self.ids = bytes_to_ids(message.ids)
        self.num_prompt = message.num_prompt
        self.num_computed = message.num_computed
        self.blocks = list(bytes_to_ids(message.block_ids))
        self.sampling = message.sampling
        self.min_len = message.min_len
        self.ends = frozenset(bytes_to_ids(message.ends))
        self.pooling = message.pooling
        self.pooled = b""  # the KV of the positions computed since the row was opened


class FakeWorker:
    """Runs plans at once, in order. Raises AssertionError if a plan breaks the contract."""

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
    ) -> None:
        """`carry_out`: runs a plan's metadata for the worker half of a KV connector. `draft`: gives at most that many
        draft tokens for a row. `fits`: whether there is memory for a step of that many positions."""
        self.block_size = block_size
        self.block_bytes = KV_BYTES * block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.memory = bytearray(num_blocks * self.block_bytes)  # the KV of every block
        self.rows: list[FakeRow | None] = [None] * max_num_seqs
        self.last_step: int | None = None
        self.fail_seeds: set[int] = set()  # requests whose logits are "not finite"
        self.is_faulted = False  # until a plan with `after_fault`
        self._carry_out = carry_out
        self._draft = draft
        self._fits = fits

    def read_block(self, block: int) -> bytes:
        """The content of a block."""
        return bytes(self.memory[block * self.block_bytes : (block + 1) * self.block_bytes])

    def write_block(self, block: int, content: bytes) -> None:
        """Overwrites a whole block."""
        assert len(content) == self.block_bytes, len(content)
        self.memory[block * self.block_bytes : (block + 1) * self.block_bytes] = content

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
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
        masked = bytes_to_ids(plan.masked_rows)
        assert set(masked) <= {row for row, samples in zip(rows, plan.sample, strict=True) if samples}, (
            "a mask for a row that does not sample"
        )
        masks = _allowed(masked, plan.masks)
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
        for row, block in zip(bytes_to_ids(plan.grow_rows), bytes_to_ids(plan.grow_blocks), strict=True):
            self._row(row).blocks.append(block)
        if plan.kv:
            assert self._carry_out is not None, "metadata without a connector"
            self._carry_out(plan.kv)
        pairs = bytes_to_ids(plan.copies)
        assert not set(pairs[::2]) & set(pairs[1::2]), "a block is both source and target of a copy"
        for block, content in zip(pairs[1::2], list(map(self.read_block, pairs[::2])), strict=True):
            self.write_block(block, content)

    def _draft_tokens(self, state: FakeRow, end: int, most: int) -> list[int]:
        assert len(state.ids) >= state.min_len, "tokens are withheld, which works only for one position"
        draft_tokens = [] if self._draft is None else list(self._draft(state, most))
        assert len(draft_tokens) <= most
        assert end + most <= len(state.blocks) * self.block_size, "draft tokens without a block"
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
        for position in range(state.num_computed, state.num_computed + count):
            slot = self._slot(state, position)
            self.memory[slot : slot + KV_BYTES] = b"\xee" * KV_BYTES

    def _speculate(self, state: FakeRow, draft_tokens: list[int]) -> list[int]:
        """Computes one position and these draft tokens. Returns the tokens up to the first mismatch."""
        ids, start = state.ids, state.num_computed
        ids.extend(draft_tokens)
        kv = self._compute(state, start, start + 1 + len(draft_tokens))
        tokens: list[int] = []
        for end in range(start + 1, start + 2 + len(draft_tokens)):
            token = next_token(kv[: end * KV_BYTES], state.sampling.seed)
            tokens.append(-1 if state.sampling.seed in self.fail_seeds else token)
            if tokens[-1:] != draft_tokens[end - start - 1 : end - start]:
                break
        del ids[start + len(tokens) :]
        ids.append(token)
        state.num_computed = start + len(tokens)
        return tokens

    def device_ms(self, counts: "array[int]") -> float:
        """The duration of a step, linear in the number of positions."""
        return 1.0 + 0.01 * sum(counts)

    def _row(self, row: int) -> FakeRow:
        state = self.rows[row]
        assert state is not None, f"row {row} was never opened"
        return state

    def _compute(self, state: FakeRow, start: int, end: int) -> bytes:
        """Writes the KV of these positions. Returns all KV before `end`, read through the block table."""
        size, memory = self.block_size, self.memory
        last = self._slot(state, start - 1) if start else None
        before = 0 if last is None else int.from_bytes(memory[last : last + KV_BYTES], "little")
        for position in range(start, end):
            before = next_kv(before, state.ids[position])
            slot = self._slot(state, position)
            memory[slot : slot + KV_BYTES] = before.to_bytes(KV_BYTES, "little")
        state.num_computed = end
        return b"".join(map(self.read_block, state.blocks[: -(-end // size)]))[: end * KV_BYTES]

    def _slot(self, state: FakeRow, position: int) -> int:
        block, place = divmod(position, self.block_size)
        return state.blocks[block] * self.block_bytes + place * KV_BYTES


def _allowed(rows: "array[int]", masks: bytes) -> dict[int, list[int]]:
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
