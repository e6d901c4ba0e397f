"""One sequence as the scheduler sees it: a few integers, its ids, and what it holds."""

from array import array
from collections.abc import Hashable
from enum import Enum

from ...ipc.messages import Enqueue, FinishReason, RowLogprobs, RowOpen, Tokens, Usage, bytes_to_ids, ids_to_bytes
from .block_hash import block_key


class State(Enum):
    """Where a request is. Only RUNNING is planned; RUNNING, LEAVING and ENDED may still hold a row and blocks."""

    WAITING = "waiting"  # holds nothing
    RUNNING = "running"
    LEAVING = "leaving"  # preempted while steps in flight touch its row: WAITING again once they are applied
    ENDED = "ended"  # its terminal message is out


class Request:
    """A request's counters. `ids[: num_total]` are its tokens; the last `num_total - len(ids)` are still on the device.

    Positions: ``0 ≤ num_computed ≤ num_planned ≤ num_total``, and nothing from `end` on is ever computed.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "end",
        "ids",
        "keys",
        "limits",
        "line",
        "max_len",
        "max_tokens",
        "num_cached",
        "num_committed",
        "num_computed",
        "num_in_flight",
        "num_planned",
        "num_prompt",
        "num_prompt_logprobs",
        "num_total",
        "opened",
        "rid",
        "root",
        "row",
        "sampling",
        "state",
        "stops",
        "text",
    )

    def __init__(
        self,
        message: Enqueue,
        *,
        arrival: int,
        line: Hashable,
        max_model_len: int,
        root: bytes,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.rid = message.rid
        self.arrival = arrival  # its place among its equals
        self.line = line  # of the policy
        self.ids: array[int] = bytes_to_ids(message.prompt_ids)  # prompt and the output applied so far
        self.num_prompt = len(self.ids)
        self.sampling = message.sampling
        self.limits = message.limits
        self.text = message.text
        room = max_model_len - self.num_prompt
        self.max_tokens = room if message.limits.max_tokens is None else min(room, message.limits.max_tokens)
        self.max_len = self.num_prompt + self.max_tokens  # ids when it ends at the latest
        stops = frozenset(message.limits.stop_token_ids)
        self.stops = stops if message.limits.ignore_eos else stops | eos_token_ids  # drawing one of them ends it
        self.end = self.num_prompt + max(0, self.max_tokens - 1)  # the last token drawn needs no KV
        self.state = State.WAITING
        self.row = -1  # on the worker, while it holds one
        self.blocks: list[int] = []  # its block table
        self.num_computed = 0  # positions whose KV is known to be there
        self.num_planned = 0  # positions computed once every plan in flight is applied
        self.num_total = self.num_prompt  # ids including those drawn by plans in flight
        self.num_in_flight = 0  # plans in flight that touch it; row and blocks stay while there is one
        self.root = root  # parent key of its first block
        self.keys: list[bytes] = []  # keys of its full blocks, as far as they were needed
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

    def as_row(self) -> RowOpen:
        """How the worker is told of it when it gets a row."""
        return RowOpen(
            row=self.row,
            ids=self.ids.tobytes(),
            num_prompt=self.num_prompt,
            num_computed=self.num_computed,
            block_ids=ids_to_bytes(self.blocks),
            sampling=self.sampling,
        )

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
