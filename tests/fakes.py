"""A worker without a device that keeps the StepPlan contract to the letter.

The KV of a position is a hash of its id and of the KV before it, and the next token is a hash of all the KV that is
read back *through the block table*. So any lost, doubled, reordered, wrongly cached or too early reused block changes
every token after it.
"""

from array import array
from itertools import accumulate
from zlib import crc32

from pagewire.ipc.messages import (
    Enqueue,
    Limits,
    RowLogprobs,
    Sampling,
    StepPlan,
    StepResult,
    TextSpec,
    bytes_to_ids,
    ids_to_bytes,
)

VOCAB = 50
EOS = 7
UNWRITTEN = 0


def next_kv(before: int, token_id: int) -> int:
    """The KV of a position."""
    return crc32(token_id.to_bytes(4, "little"), before)


def next_token(kv: list[int], seed: int) -> int:
    """The token after the positions with this KV. About one in 50 is EOS."""
    return crc32(array("I", kv).tobytes(), seed) % VOCAB


def expected_output(prompt: list[int], max_tokens: int, max_len: int, seed: int, ignore_eos: bool) -> list[int]:
    """What a request must give, whatever else happens."""
    ids, kv = list(prompt), list(accumulate(prompt, next_kv, initial=0))[1:]
    while len(ids) - len(prompt) < max_tokens and len(ids) < max_len:
        ids.append(next_token(kv, seed))
        kv.append(next_kv(kv[-1], ids[-1]))
        if ids[-1] == EOS and not ignore_eos:
            break
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
    salt: bytes = b"",
    prompt_logprobs: int | None = None,
) -> Enqueue:
    """A request as the tokenizer would send it."""
    return Enqueue(
        rid,
        ids_to_bytes(prompt),
        Sampling(seed=seed, prompt_logprobs=prompt_logprobs),
        Limits(max_tokens=max_tokens, ignore_eos=ignore_eos),
        TextSpec(),
        priority,
        salt,
        tenant,
    )


class FakeWorker:
    """Runs plans at once, in order. Raises AssertionError if a plan breaks the contract."""

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.rows: list[dict | None] = [None] * max_num_seqs
        self.last_step = 0
        self.fail_seeds: set[int] = set()  # requests whose logits are "not finite"

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        assert plan.step == self.last_step + 1, "plans must come in order"
        self.last_step = plan.step
        for opened in plan.open:
            self.rows[opened.row] = {
                "ids": bytes_to_ids(opened.ids),
                "num_prompt": opened.num_prompt,
                "computed": opened.num_computed,
                "blocks": list(bytes_to_ids(opened.block_ids)),
                "sampling": opened.sampling,
            }
        for row, block in zip(bytes_to_ids(plan.grow_rows), bytes_to_ids(plan.grow_blocks), strict=True):
            self.rows[row]["blocks"].append(block)
        rows, counts = bytes_to_ids(plan.rows), bytes_to_ids(plan.counts)
        assert len(rows) == len(counts) == len(plan.sample) > 0
        assert len(set(rows)) == len(rows), "a row is twice in a plan"
        assert sum(counts) <= self.max_num_batched_tokens, "over the token budget"
        drawn, prompt_logprobs = [], {}
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            state = self.rows[row]
            start, end = state["computed"], state["computed"] + count
            assert count >= 1 and end <= len(state["ids"]), "positions without ids"
            kv = [self._slot(state, p) for p in range(start)]
            for p in range(start, end):
                kv.append(next_kv(kv[-1] if kv else 0, state["ids"][p]))
                self.kv[state["blocks"][p // self.block_size]][p % self.block_size] = kv[-1]
            state["computed"] = end
            if state["sampling"].prompt_logprobs is not None:
                scored = [state["ids"][p + 1] for p in range(start, end) if p + 1 < state["num_prompt"]]
                if scored:
                    values = array("f", [-1.0] * len(scored)).tobytes()
                    prompt_logprobs[i] = RowLogprobs(1, ids_to_bytes(scored), values)
            if plan.sample[i]:
                assert end == len(state["ids"]), "a token may only be drawn after the last id"
                token = next_token(kv, state["sampling"].seed)
                failing = state["sampling"].seed in self.fail_seeds
                drawn.append(-1 if failing else token)
                state["ids"].append(token)
        return StepResult(plan.step, ids_to_bytes(drawn), {}, prompt_logprobs, self.device_ms(counts))

    def device_ms(self, counts: "array[int]") -> float:
        """How long a step takes: linear in what it computes."""
        return 1.0 + 0.01 * sum(counts)

    def _slot(self, state: dict, position: int) -> int:
        return self.kv[state["blocks"][position // self.block_size]][position % self.block_size]
