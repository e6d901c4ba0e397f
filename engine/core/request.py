"""One sequence as the scheduler sees it: a few integers, its ids, and what it holds."""

import sys
from array import array
from collections.abc import Hashable
from enum import Enum
from hashlib import sha256

from msgspec.structs import replace

from ...ipc.messages import (
    Enqueue,
    Failed,
    FinishReason,
    Opened,
    RowLogprobs,
    RowOpen,
    Tokens,
    Usage,
    bytes_to_ids,
    ids_to_bytes,
)
from .block_hash import block_key

_NUM_CONTEXT_IDS = 16  # of the prompt's end, for the detokenizer
COMMIT_BLOCKS = 8
"""Output is offered to the prefix cache so many blocks at a time, and the rest of it when the request gives its row
back: hardly anybody looks for what a request is still writing."""


class State(Enum):
    """Where a request is. Only RUNNING is planned; all but WAITING may hold a row and blocks."""

    WAITING = "waiting"  # holds nothing
    LOADING = "loading"  # the KV connector fills some of its blocks: RUNNING once it has said how that went
    RUNNING = "running"
    LEAVING = "leaving"  # preempted while steps in flight touch its row: WAITING again once they are applied
    ENDED = "ended"  # its terminal message is out


class Request:
    """A request's counters. `ids[: num_total]` are its tokens; the last `num_total - len(ids)` are still on the device.

    Positions: ``0 ≤ num_computed ≤ num_planned ≤ num_total``, and nothing from `end` on is ever computed. While plans
    with guesses are in flight, `num_planned` and `num_total` are upper bounds: as if every guess came true.
    """

    __slots__ = (
        "arrival",
        "block_size",
        "blocks",
        "end",
        "fast_limit",
        "ids",
        "is_constrained",
        "is_open",
        "is_poisoned",
        "keys",
        "limits",
        "mask",
        "max_len",
        "max_tokens",
        "may_speculate",
        "min_len",
        "next_check",
        "num_allowed",
        "num_cached",
        "num_committed",
        "num_computed",
        "num_found",
        "num_in_flight",
        "num_loading",
        "num_planned",
        "num_prompt",
        "num_prompt_logprobs",
        "num_resumed",
        "num_total",
        "opened",
        "pooling",
        "queue_key",
        "resume_chars",
        "rid",
        "root",
        "row",
        "sampling",
        "state",
        "stops",
        "text",
        "times",
        "type_ids",
        "wants_all",
    )

    def __init__(
        self,
        message: Enqueue,
        *,
        choice: int,
        arrival: int,
        queue_key: Hashable,
        max_model_len: int,
        block_size: int,
        root: bytes,
        eos_token_ids: frozenset[int],
    ) -> None:
        """`choice`: which of the message's `n` sequences."""
        self.rid = message.rid + choice
        self.block_size = block_size
        self.arrival = arrival  # its place among its equals
        self.queue_key = queue_key  # of the policy
        self.ids: array[int] = bytes_to_ids(message.prompt_ids)  # prompt and the output applied so far
        self.num_prompt = len(self.ids)
        self.ids.frombytes(message.resume_ids)
        self.num_resumed = len(self.ids) - self.num_prompt  # output that was delivered before the engine lost it
        self.resume_chars = message.resume_chars  # of its text
        self.sampling = message.sampling
        if choice:
            self.sampling = replace(message.sampling, seed=(message.sampling.seed + choice) % 2**63)
        self.pooling = message.pooling
        self.type_ids = message.type_ids
        # Something is told of every position of the prompt, so none may come from a cache.
        self.wants_all = message.sampling.prompt_logprobs is not None or (
            message.pooling is not None and message.pooling.how != "last"
        )
        self.limits = message.limits
        self.text = message.text
        self.times = message.times  # for the detokenizer, like `text`
        room = max_model_len - self.num_prompt
        self.max_tokens = room if message.limits.max_tokens is None else min(room, message.limits.max_tokens)
        self.max_len = self.num_prompt + self.max_tokens  # ids when it ends at the latest
        stops = frozenset(message.limits.stop_token_ids)
        self.stops = stops if message.limits.ignore_eos else stops | eos_token_ids  # drawing one of them ends it
        self.end = self.num_prompt + max(0, self.max_tokens - 1)  # the last token drawn needs no KV
        self.is_constrained = message.constraint is not None
        self.min_len = self.num_prompt + min(message.limits.min_tokens, self.max_tokens) if self.stops else 0
        # Log-probabilities are told of one token a step, what may not be drawn yet is known of one, and a grammar must
        # have read a token before the next is drawn.
        one_by_one = message.sampling.logprobs is not None or message.limits.min_tokens or self.is_constrained
        self.may_speculate = not one_by_one
        self.num_allowed = len(self.ids) if self.is_constrained else sys.maxsize  # ids it may have before the next mask
        self.mask = b""  # of the last of them: which tokens it may be, see `StepPlan.masks`; empty: any
        self.state = State.WAITING
        self.row = -1  # on the worker, while it holds one
        self.blocks: list[int] = []  # its block table
        self.num_computed = 0  # positions whose KV is known to be there
        self.num_planned = 0  # positions computed once every plan in flight is applied
        self.num_total = len(self.ids)  # ids including those drawn by plans in flight
        self.num_in_flight = 0  # plans in flight, and loads, that touch it; row and blocks stay while there is one
        self.num_loading = 0  # blocks that the KV connector fills, after those that the prefix index had
        self.is_open = False  # the worker knows its row
        # A position below it needs no block, is to be computed, and draws. -1 unless RUNNING, and if constrained.
        self.fast_limit = -1
        self.next_check = 0  # once so many positions are computed, applying a token is more than storing it
        self.is_poisoned = False  # its KV gave numbers that are not finite
        self.root = root  # parent key of its first block
        self.keys: list[bytes] = []  # keys of its full blocks, as far as they were needed
        self.num_found = 0  # positions that the device had when it was last admitted
        self.num_committed = 0  # its leading blocks that were offered to the prefix index
        self.num_cached = 0  # prompt tokens found in the prefix index when it was first scheduled
        self.num_prompt_logprobs = 0  # prompt positions whose log-probabilities were delivered
        self.opened = False  # the detokenizer has heard of it

    @property
    def num_output(self) -> int:
        """Output tokens that were applied."""
        return len(self.ids) - self.num_prompt

    def block_keys(self, num: int, block_size: int) -> list[bytes]:
        """Keys of its first `num` blocks, all of which must be full of known ids."""
        assert num * block_size <= len(self.ids), (num, len(self.ids))
        keys = self.keys
        while len(keys) < num:
            start = len(keys) * block_size
            parent = keys[-1] if keys else self.root
            keys.append(block_key(parent, self.ids[start : start + block_size].tobytes()))
        return keys[:num]

    def partial_keys(self, num_full: int, num: int, block_size: int) -> list[bytes]:
        """Keys of the first 1, 2 … `num` positions of the block after `num_full` full ones; fewer than a block."""
        digest = sha256(self.block_keys(num_full, block_size)[-1] if num_full else self.root)
        keys = []
        start = num_full * block_size
        for i in range(start, start + num):
            digest.update(self.ids[i : i + 1].tobytes())
            keys.append(digest.digest())
        return keys

    @property
    def num_computable(self) -> int:
        """Positions that may be computed: whose ids are known, here or on the device, and whose KV somebody will need.
        Not the last one, from which a token is drawn, as long as nobody has said which tokens it may be."""
        num = self.num_total if self.num_total < self.num_allowed else self.num_total - 1
        return min(num, self.end)

    @property
    def starts_again(self) -> bool:
        """Its numbers were not finite, and may be when it has computed all of them itself."""
        return self.is_poisoned and self.state is State.LEAVING

    @property
    def has_work(self) -> bool:
        """There is something that a plan could compute of it."""
        return self.state is State.RUNNING and self.num_planned < self.num_computable

    def allow(self, mask: bytes) -> None:
        """The grammar has read all its ids: this is what may follow them."""
        self.num_allowed = len(self.ids) + 1
        self.mask = mask

    def finish_of(self, token: int) -> FinishReason | None:
        """Why it ends with `token`, its last; None: it goes on."""
        if token in self.stops:
            return "stop"
        return "length" if len(self.ids) >= self.max_len else None

    def forget_row(self) -> None:
        """It has given its row and its blocks back."""
        self.blocks = []
        self.row = -1
        self.is_open = False
        self.num_loading = 0
        self.num_computed = self.num_planned = 0
        self.num_total = len(self.ids)

    def settle(self) -> None:
        """Computes `fast_limit` and `next_check` after a change of state, blocks or computed positions."""
        block_size = self.block_size
        if self.state is not State.RUNNING:
            self.fast_limit, self.next_check = -1, 0
            return
        is_free = self.max_tokens and self.is_open and not self.is_constrained
        self.fast_limit = min(self.end, len(self.blocks) * block_size) if is_free else -1
        stretch = COMMIT_BLOCKS * block_size
        self.next_check = min((self.num_computed // stretch + 1) * stretch, self.end)

    def as_row(self) -> RowOpen:
        """How the worker is told of it when it gets a row."""
        return RowOpen(
            row=self.row,
            ids=self.ids.tobytes(),
            num_prompt=self.num_prompt,
            num_computed=self.num_computed,
            block_ids=ids_to_bytes(self.blocks),
            sampling=self.sampling,
            min_len=self.min_len if self.min_len > len(self.ids) else 0,
            ends=ids_to_bytes(sorted(self.stops)) if self.min_len > len(self.ids) else b"",
            pooling=self.pooling,
            type_ids=self.type_ids,
        )

    def as_opened(self, num_resumed: int | None = None) -> Opened:
        """How the detokenizer is told of it. `num_resumed`: of the output that it had when it came (default: all)."""
        first = 0 if self.text.prompt else max(0, self.num_prompt - _NUM_CONTEXT_IDS)
        resumed = self.num_resumed if num_resumed is None else num_resumed
        return Opened(
            self.rid,
            self.num_prompt,
            self.num_cached,
            self.ids[first : self.num_prompt].tobytes(),
            self.text,
            self.times,
            self.ids[self.num_prompt : self.num_prompt + resumed].tobytes(),
            self.resume_chars,
        )

    def last_word(self, prompt_logprobs: RowLogprobs | None, vector: bytes) -> Tokens | Failed:
        """The news that ends it when its prompt is computed and nothing is to be generated."""
        if self.pooling is None:
            return self.terminal("length", prompt_logprobs=prompt_logprobs)
        return replace(self.terminal("stop"), vector=vector) if vector else self.failure()

    def failure(self) -> Failed:
        """The news that ends it when its numbers are no numbers."""
        return Failed(self.rid, "internal", "The model gave numbers that are not finite for this request.")

    def terminal(
        self,
        finish: FinishReason,
        ids: bytes = b"",
        logprobs: RowLogprobs | None = None,
        prompt_logprobs: RowLogprobs | None = None,
        stop_token_id: int | None = None,
    ) -> Tokens:
        """The news that ends it."""
        usage = Usage(self.num_prompt, self.num_output, self.num_cached)
        return Tokens(self.rid, ids, logprobs, prompt_logprobs, finish, stop_token_id, usage)

    def take_undelivered(self, start: int, logprobs: RowLogprobs) -> RowLogprobs | None:
        """Leaves out the prompt positions that were delivered before a preemption. `start`: first of the chunk."""
        skip = (self.num_prompt_logprobs - start) * logprobs.width * 4
        num = len(logprobs.ids) // (4 * logprobs.width)
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, start + num)
        if skip <= 0:
            return logprobs
        if skip >= len(logprobs.ids):
            return None
        return RowLogprobs(logprobs.width, logprobs.ids[skip:], logprobs.values[skip:])
