"""One sequence as the scheduler sees it: what was asked for, its tokens, its place on the worker, and how far it is."""

import sys
from array import array
from collections.abc import Hashable, Iterable, Sequence, Set
from enum import Enum
from hashlib import sha256

from msgspec.structs import replace

from ...ipc.messages import (
    Enqueue,
    Failed,
    FinishReason,
    GroupTable,
    Opened,
    RowLogprobs,
    RowOpen,
    Tokens,
    Usage,
    bytes_to_ids,
    ids_to_bytes,
)
from .block_hash import block_key, regime_key
from .block_pool import BlockPool
from .encoded import NOTHING, Encoded
from .groups import Groups
from .kv_connector import Item

_NUM_CONTEXT_IDS = 16  # of the prompt's end, for the detokenizer
_MAX_GRID = 4  # states that a request keeps at regular intervals, while nobody has found them
_COMMIT_BLOCKS = 8
"""A running request offers its output to the prefix cache in batches of so many blocks, and the rest when it gives its
row back: another request seldom needs the output of one that is still running."""


def _given(limit: int | None) -> int:
    return sys.maxsize if limit is None else limit


class State(Enum):
    """Where a request is. Only RUNNING requests are planned; all but WAITING ones may hold a row and blocks."""

    WAITING = "waiting"  # holds no row and no block
    LOADING = "loading"  # the KV connector fills some of its blocks; RUNNING when the load is over
    RUNNING = "running"
    LEAVING = "leaving"  # preempted while steps in flight touch its row; WAITING once they are applied
    ENDED = "ended"  # its terminal message is out


class Table:
    """A request's block table in one group of the cache."""

    __slots__ = ("blocks", "first")

    def __init__(self, blocks: list[int], first: int = 0) -> None:
        self.first = first  # the blocks before it were released, or were never needed
        self.blocks = blocks


class Request:
    """A sequence. Only its own methods write its fields (`tests/engine/core/test_request.py` checks it).

    `ids[: num_total]` are its tokens; the last `num_total - len(ids)` of them are still on the device.

    Unless it has ended: ``0 ≤ num_computed ≤ num_planned ≤ num_total ≤ max_len`` and ``num_planned ≤ end``. While plans
    with draft tokens are in flight, `num_planned` and `num_total` are upper bounds: as if all of them were accepted.
    """

    __slots__ = (  # noqa: SIM905  # in groups, as in `__init__`
        "rid asked arrival arrived_ms queue_key place block_size root is_constrained wants_all stops may_speculate "
        "ids num_prompt num_resumed max_len num_needed regime_limit regime keys num_allowed mask may_be_late late "
        "state row tables num_blocks num_in_flight num_loading num_wanted not_loaded sources is_open is_poisoned "
        "is_taken_back "
        "slot slot_from is_spoiled junction snapshots grid after num_after "
        "encoded "
        "num_computed num_planned num_total num_found num_restored num_committed "
        "opened num_cached num_prompt_logprobs fast_limit next_check"
    ).split()

    def __init__(
        self,
        message: Enqueue,
        *,
        choice: int,
        arrival: int,
        arrived_ms: float = 0.0,
        queue_key: Hashable,
        place: float = 0.0,
        max_model_len: int,
        block_size: int,
        root: bytes,
        eos_token_ids: frozenset[int],
        keys: Iterable[bytes] = (),
        regime_limit: int = sys.maxsize,
        decoder_start_ids: Sequence[int] = (),
    ) -> None:
        """`choice`: which of the message's `n` sequences. `keys`: of its leading blocks, if they are known already.
        `regime_limit`: ids, beyond which a sequence is in another regime. `decoder_start_ids`: the message's prompt is
        what an encoder reads, and this the prompt of the decoder."""
        limits, sampling = message.limits, message.sampling
        # What was asked for. It never changes, but for `wants_all`.
        self.rid = message.rid + choice
        if choice:
            sampling = replace(sampling, seed=(sampling.seed + choice) % 2**63)
        self.asked = replace(message, sampling=sampling, prompt_ids=b"", resume_ids=b"", constraint=None)
        self.arrival = arrival  # its number among those that arrived, by which requests of the same place are served
        self.arrived_ms = arrived_ms  # when, on the clock of `Policy.place`
        self.join(queue_key, place)
        self.block_size = block_size
        self.is_constrained = message.constraint is not None
        # Every position of its prompt has an output, so none may come from a cache.
        self.wants_all = sampling.prompt_logprobs is not None or (
            message.pooling is not None and message.pooling.how != "last"
        )
        stops = frozenset(limits.stop_token_ids)
        self.stops = stops if limits.ignore_eos else stops | eos_token_ids  # sampling one of them ends it
        # A step reports log-probabilities of one token of a row, `min_len` is checked for one token of it, and a
        # grammar must have read a token before the next is sampled.
        self.may_speculate = not (sampling.logprobs is not None or limits.min_tokens or self.is_constrained)

        # Its tokens.
        self.encoded = Encoded(message.prompt_ids) if decoder_start_ids else NOTHING
        # Prompt, or what a decoder beside an encoder begins with, and output that was applied.
        self.ids: array[int] = array("i", decoder_start_ids) or bytes_to_ids(message.prompt_ids)
        self.num_prompt = len(self.ids)
        self.ids.frombytes(message.resume_ids)
        self.num_resumed = len(self.ids) - self.num_prompt  # output that was delivered before the engine lost it
        max_tokens = min(max_model_len - self.num_prompt, _given(limits.max_tokens))
        self.max_len = self.num_prompt + max_tokens  # its ids never exceed it
        self.num_needed = self.num_prompt + max(0, max_tokens - 1)  # positions to compute: the last token needs no KV
        # How the model computes its positions: 1 if the token after them follows more than `regime_limit` ids, else 0.
        # All its positions have one regime. A request whose regime changes gives its row back and is computed again.
        self.regime_limit = regime_limit
        self.regime = int(len(self.ids) > regime_limit)
        self.root = regime_key(root, 1) if self.regime else root  # parent key of its first block
        self.keys = list(keys)  # of its full blocks, as far as they were needed
        self.num_allowed = len(self.ids) if self.is_constrained else sys.maxsize  # ids that may be known with this mask
        self.mask = b""  # of the token at `num_allowed - 1`: what it may be, see `StepPlan.masks`; empty: anything

        # What it holds.
        self.state = State.WAITING
        self.row = -1  # on the worker; -1 if WAITING, ≥ 0 if LOADING, RUNNING or LEAVING
        self.tables: list[Table] = []  # of each group with block tables; none without a row
        self.num_blocks = 0  # where all of them end: there is room for so many blocks of positions, ≥ `num_planned`
        self.slot = -1  # the block of its recurrent state, which its passes write; it has no key meanwhile
        self.slot_from = -1  # until its row is opened, the block of the state that its first pass reads; -1: zero
        self.is_spoiled = False  # a pass has left the state behind at no position
        self.junction = 0  # where a state is to be kept because other requests went on differently from there
        self.snapshots: list[bytes] = []  # keys of the states that it has found and kept
        self.grid: list[bytes] = []  # of them, those that it keeps at regular intervals and nobody has found
        self.after = array("i")  # tokens sampled after its end, by plans that were in flight
        self.num_after = 0  # positions computed after its end
        self.num_in_flight = 0  # plans in flight, and loads, that touch it; row and blocks stay while it is not 0
        self.num_loading = 0  # blocks and states that the KV connector fills or has filled
        self.num_wanted = 0  # positions from which it goes on if that succeeds
        self.not_loaded: set[bytes] = set()  # names of items that could not be loaded for it; it does not try again
        self.sources: list[
            tuple[int, int]
        ] = []  # (group, block) that its last block is copied from before its first pass
        self.is_open = False  # the worker knows its row
        self.is_poisoned = False  # its KV gave numbers that are not finite; none of it may be found by others

        # How far it is.
        self.num_computed = 0  # positions whose KV is known to be there
        self.num_planned = 0  # positions computed once every plan in flight is applied
        self.num_total = len(self.ids)  # ids, including those that plans in flight sample
        self.num_found = 0  # positions whose KV the device had when the request was last admitted
        self.num_restored = 0  # with those that were loaded then
        self.num_committed = 0  # its leading blocks that were offered to the prefix cache; ≤ num_planned // block_size

        self._be_on_time()

        # What was delivered.
        self.opened = False  # the detokenizer knows it
        self.num_cached = 0  # prompt tokens that were cached when it was first planned
        self.num_prompt_logprobs = 0  # prompt positions whose log-probabilities were delivered

        # Of `num_blocks`, `num_computed` and `state`, kept for the loops over decode rows; `_settle` computes them.
        self.fast_limit = -1  # positions below need no block and sample a token; -1 unless RUNNING, or if constrained
        self.next_check = 0  # while fewer positions are computed, a token needs to be stored and nothing else

    # ── its life, in order; nothing else changes its fields ──────────────────────────────────────────────────────────

    def allow(self, mask: bytes) -> None:
        """The grammar has read all its ids: `mask` is what may follow them."""
        self.num_allowed = len(self.ids) + 1
        self.mask = mask

    def let_be_late(self, may_be_late: bool) -> None:
        """Whether plans may sample its tokens before their masks have come."""
        self.may_be_late = may_be_late

    @property
    def is_masked(self) -> bool:
        """The mask of the next token that a plan samples is here, or it needs none."""
        return self.num_total < self.num_allowed

    def _be_on_time(self) -> None:
        self.may_be_late = False  # a plan may sample a token of it before the mask has come
        self.late: list[int] = []  # steps in flight that wait for masks of it, in order
        self.is_taken_back = False  # results of plans in flight do not count

    def plan_late(self, step: int) -> None:
        """The plan of this step is to sample a token of it whose mask has not come."""
        self.late.append(step)

    def take_late(self) -> int | None:
        """The step that samples the token after its known ids, if it waits for the mask, which has come."""
        return self.late.pop(0) if self.late else None

    def drop_late(self) -> list[int]:
        """Takes the steps that wait for masks of it: what they sample does not count any more."""
        steps, self.late = self.late, []
        if steps:
            self.spoil()  # a pass may compute a token that is not part of it
        return steps

    def admit(
        self,
        row: int,
        tables: list[Table],
        num_blocks: int,
        *,
        num_found: int,
        num_loading: int = 0,
        num_wanted: int = 0,
        sources: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Gives it a row and block tables that end after `num_blocks`. They hold the KV that later positions read of
        its first `num_found`; with the `num_loading` blocks and states that the KV connector fills, which counts as one
        thing in flight, that of its first `num_wanted`. Before its first pass the last of these blocks are copied from
        `sources`, which are held for it until then."""
        assert self.state is State.WAITING and not self.num_in_flight, (self.rid, self.state)
        self.state = State.LOADING if num_loading else State.RUNNING
        self.row, self.tables, self.num_blocks = row, tables, num_blocks
        self.num_loading, self.num_in_flight = num_loading, int(num_loading > 0)
        self.num_wanted, self.sources = num_wanted, list(sources)
        self.num_committed = num_found // self.block_size
        self.num_computed = self.num_planned = self.num_found = self.num_restored = num_found
        self._settle()

    def give_state(self, slot: int, slot_from: int, key: bytes, junction: int) -> None:
        """Gives it a block for its recurrent state, after `admit`. Its first pass reads the state of `slot_from`, which
        `key` names and is held for it until then, unless that is -1. It may be `slot`, if that is loaded."""
        self.slot, self.slot_from, self.junction = slot, slot_from, junction
        self.is_spoiled = self.state is State.LOADING  # until the load is over
        self.snapshots = [key] if key else []
        self.grid = []

    def kept(self, key: bytes, is_grid: bool) -> bytes | None:
        """It has kept a state. Returns the key of an older one that is to make room for it, if any."""
        self.snapshots.append(key)
        if is_grid:
            self.grid.append(key)
        return self.grid.pop(0) if len(self.grid) > _MAX_GRID else None

    def spoil(self) -> None:
        """A pass was dropped, and has perhaps changed its recurrent state."""
        self.is_spoiled = True
        self.after, self.num_after = array("i"), 0

    def run_on(self, num: int, tokens: "array[int]") -> None:
        """After its end, a plan in flight computed `num` positions more and sampled these tokens. They are no output,
        but its recurrent state has moved on over them."""
        if self.slot >= 0 and not self.is_spoiled:
            self.num_after += num
            self.after += tokens

    def join(self, queue_key: Hashable, place: float) -> None:
        """A policy orders it. `place`: in its queue; the smallest is served first."""
        self.queue_key, self.place = queue_key, place

    def be_late(self, place: float) -> None:
        """It can no longer meet its target, and steps behind."""
        self.place = place

    def settle_end(self) -> None:
        """Nothing in flight touches it: what it holds is known to its last position."""
        if self.state is State.ENDED and self.num_after:
            self.ids += self.after
            self.num_computed += self.num_after
            self.num_planned = self.num_computed
        if self.sources or self.slot_from not in (-1, self.slot):  # copies that were to be made with its first pass
            self.num_computed -= self.num_computed % self.block_size
            self.is_spoiled = True

    def loaded(self, num: int) -> None:
        """Its load is over. It goes on after its first `num` positions if it still wants to."""
        self.num_in_flight -= 1
        if self.state is State.LOADING:
            self.state = State.RUNNING
            self.num_computed = self.num_planned = self.num_restored = num
            self.is_spoiled = False
            self._settle()

    def drop_sources(self) -> list[int]:
        """It is to go on before the block that was to be copied. Returns the sources, which it no longer holds."""
        blocks = [block for _, block in self.sources]
        self.sources = []
        return blocks

    def not_restored(self, names: Iterable[bytes]) -> None:
        """Its load is over, and what was not loaded, these items, leaves it nothing to go on from."""
        self.num_in_flight -= 1
        self.not_loaded.update(names)

    def open(self) -> bool:
        """The worker is told of its row. True: for the first time, so the detokenizer must be told of the request."""
        self.is_open = True
        self.encoded.told()
        self.slot_from = -1
        self.sources = []
        self._settle()
        if self.opened:
            return False
        self.opened = True
        self.num_cached = min(self.num_computed, self.num_prompt)
        if self.encoded:
            self.num_cached = self.encoded.was_found * len(self.encoded)
        return True

    def grow(self, num: int, blocks: Sequence[Sequence[int]]) -> None:
        """Appends `num` blocks to each of its tables."""
        for table, new in zip(self.tables, blocks, strict=True):
            table.blocks += new
        self.num_blocks += num
        if self.fast_limit >= 0:
            self.fast_limit = min(self.num_due, self.num_blocks * self.block_size)

    @staticmethod
    def grow_each(requests: Sequence["Request"], blocks: Sequence[Sequence[int]]) -> None:
        """`grow(1, …)` for each; for each of their tables there is a sequence with a block for each request."""
        for group, new in enumerate(blocks):
            for request, block in zip(requests, new, strict=True):
                request.tables[group].blocks.append(block)
        for request in requests:
            request.num_blocks += 1
            if request.fast_limit >= 0:
                request.fast_limit = min(request.num_due, request.num_blocks * request.block_size)

    def drop_behind(self, groups: Groups) -> list[int]:
        """Takes the blocks that no position after the computed ones reads out of its tables. Returns them.

        Positions in flight do not count: they may have to be computed again."""
        dropped: list[int] = []
        for group in groups.moving:
            table = self.tables[group]
            num = groups.need_from(group, self.num_computed) // self.block_size - table.first
            if num > 0:
                dropped += table.blocks[:num]
                del table.blocks[:num]
                table.first += num
        return dropped

    def plan(self, num: int, num_sampled: int) -> None:
        """A plan computes its next `num` positions and samples `num_sampled` tokens, at most."""
        self.num_planned += num
        self.num_total += num_sampled
        self.num_in_flight += 1

    @staticmethod
    def plan_each(requests: Iterable["Request"], num: int = 1) -> None:
        """`plan(num, num)` for each."""
        for request in requests:
            request.num_planned += num
            request.num_total += num
            request.num_in_flight += 1

    def commit(self, num_blocks: int) -> None:
        """So many leading blocks were offered to the prefix cache."""
        self.num_committed = num_blocks

    def apply(self, num: int, tokens: "array[int]") -> None:
        """The oldest plan in flight computed `num` positions and sampled these tokens."""
        self.num_in_flight -= 1
        self.num_computed += num
        self.ids += tokens
        if self.num_computed >= self.next_check:
            self._settle()

    @staticmethod
    def apply_each(requests: Iterable["Request"], tokens: Iterable[int]) -> "list[tuple[Request, array[int]]]":
        """`apply` of one position and one token for each request where the token is to be stored and nothing else.
        Returns the other requests with their tokens. More tokens may follow."""
        left: list[tuple[Request, array[int]]] = []
        for request, token in zip(requests, tokens, strict=False):
            computed = request.num_computed + 1
            if computed < request.next_check and token not in request.stops:
                request.num_computed = computed
                request.num_in_flight -= 1
                request.ids.append(token)
            else:
                left.append((request, array("i", [token])))
        return left

    def roll_back(self, num: int) -> None:
        """The oldest plan in flight gave `num` fewer tokens than it might have: those draft tokens were wrong, or come
        after the end."""
        self.num_planned -= num
        self.num_total -= num

    @staticmethod
    def apply_drafted(
        requests: Iterable["Request"], nums: Iterable[int], most: int, tokens: "array[int]"
    ) -> "list[tuple[Request, array[int]]]":
        """`roll_back` for each request, which sampled the next `num` of the tokens where `most` were planned, and then
        `apply` where they are to be stored and nothing else. Returns the other requests with their tokens."""
        left: list[tuple[Request, array[int]]] = []
        end = 0
        for request, num in zip(requests, nums, strict=False):
            start, end = end, end + num
            request.num_planned -= most - num
            request.num_total -= most - num
            computed, token, stops = request.num_computed + num, tokens[end - 1], request.stops
            is_plain = computed < request.next_check and token >= 0
            if is_plain and num == 1 and token not in stops:
                request.num_computed = computed
                request.num_in_flight -= 1
                request.ids.append(token)
            elif is_plain and num > 1 and stops.isdisjoint(own := tokens[start:end]):
                request.num_computed = computed
                request.num_in_flight -= 1
                request.ids += own
            else:
                left.append((request, tokens[start:end]))
        return left

    def discard(self, num: int = 0, num_sampled: int = 0) -> None:
        """The oldest plan in flight is over, and these positions and tokens of it do not count."""
        self.num_in_flight -= 1
        self.num_planned -= num
        self.num_total -= num_sampled

    def set_back(self, num: int) -> None:
        """No position after the first `num` is computed or under way, and the worker has no row for it."""
        self.num_computed = self.num_planned = num
        self.num_total = len(self.ids)
        self.num_committed = min(self.num_committed, num // self.block_size)
        self.is_open = False
        self.encoded.lose()
        self.late = []  # the worker has dropped those plans
        self._settle()

    def poison(self) -> bool:
        """Its KV gave numbers that are not finite. True: it may have found their cause in a cache, so from now on it
        computes all of its positions itself."""
        self.is_poisoned = True
        has_found = self.num_found > 0 or self.num_loading > 0 or self.encoded.was_found
        may_recover = self.state is not State.ENDED and has_found
        self.wants_all |= may_recover
        return may_recover

    def take_back(self) -> None:
        """What plans in flight compute and sample of it does not count. It is preempted."""
        self.is_taken_back = True

    def preempt(self) -> None:
        """It gives row and blocks back as soon as nothing in flight touches it, and then waits again."""
        assert self.state in (State.RUNNING, State.LOADING), (self.rid, self.state)
        self.state = State.LEAVING
        self._settle()

    def end(self) -> None:
        """It gives row and blocks back as soon as nothing in flight touches it, and is over."""
        assert self.state is not State.ENDED, self.rid
        self.state = State.ENDED
        self._settle()

    def release(self) -> None:
        """It has given row and blocks back. A preempted request waits again, with its output as part of its prompt."""
        assert self.may_release, (self.rid, self.state, self.num_in_flight)
        self._forget()

    def reset(self) -> None:
        """The worker is gone with everything in flight. The request waits again unless it has ended."""
        self.num_in_flight = 0
        self._forget()

    def _forget(self) -> None:
        self.row, self.tables, self.num_blocks = -1, [], 0
        self.slot = self.slot_from = -1
        self.encoded.leave()
        self.sources, self.num_wanted = [], 0
        self.after, self.num_after = array("i"), 0
        self.is_open = False
        self._be_on_time()
        self.num_loading = 0
        self.num_computed = self.num_planned = 0
        self.num_total = len(self.ids)
        if self.state is not State.ENDED:
            self.state = State.WAITING
            self.is_poisoned = False
            if self.changes_regime:
                self.regime = 1
                self.root = regime_key(self.root, 1)
                self.keys = []
        self._settle()

    def _settle(self) -> None:
        if self.state is not State.RUNNING:
            self.fast_limit, self.next_check = -1, 0
            return
        is_fast = self.is_open and self.generates and not self.is_constrained
        self.fast_limit = min(self.num_due, self.num_blocks * self.block_size) if is_fast else -1
        stretch = _COMMIT_BLOCKS * self.block_size
        self.next_check = min((self.num_computed // stretch + 1) * stretch, self.num_due)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def awaits_kv(self) -> bool:
        """Another engine computes its prompt and may not have begun."""
        return self.asked.awaits_kv

    @property
    def kv_peer(self) -> str:
        """The address of the engine that has or computes its KV; empty: it names none."""
        return self.asked.kv_peer

    @property
    def num_to_encode(self) -> int:
        """Tokens that the encoder reads before its next pass, if its row is not open."""
        return 0 if self.is_open or self.encoded.is_there else len(self.encoded)

    def misses(self, num: int) -> bool:
        """Whether it wants no computing if no more than `num` tokens of its prompt are found in caches."""
        threshold = self.asked.cache_hit_threshold
        is_new = not self.opened and not self.num_resumed
        return threshold is not None and is_new and num < threshold * self.num_asked

    @property
    def salt_name(self) -> str:
        """What routers are told of its salt: the client's name for it, or one that says nothing of it; empty: none."""
        salt = self.asked.salt
        return self.asked.cache_salt or (sha256(b"name of a salt" + salt).hexdigest()[:16] if salt else "")

    @property
    def blocks(self) -> list[int]:
        """Its block table in the first group, the only one of most models."""
        return self.tables[0].blocks if self.tables else []

    @property
    def held(self) -> list[int]:
        """Its blocks of all groups, in the order of their positions, those of the encoder's result, its recurrent
        state, and what its first pass is to read or copy."""
        if len(self.tables) == 1 and self.slot < 0 and not self.sources:
            return [*self.encoded.blocks, *self.tables[0].blocks] if self.encoded else self.tables[0].blocks
        blocks = [t.blocks[i - t.first] for i in range(self.num_blocks) for t in self.tables if i >= t.first]
        blocks = [*self.encoded.blocks, *blocks]
        return [*blocks, *self.pinned] if self.slot < 0 else [*blocks, *self.pinned, self.slot]

    @property
    def pinned(self) -> list[int]:
        """The blocks, not its own, that its first pass is to read or copy."""
        state = [self.slot_from] if self.slot_from not in (-1, self.slot) else []
        return [*(block for _, block in self.sources), *state]

    def block_for(self, item: Item, groups: Groups) -> int:
        """Its block into which this item is to be loaded."""
        if item.group == groups.state:
            return self.slot
        table = self.tables[item.group]
        return table.blocks[item.place - table.first]

    def keep_positions(self, start: int, end: int, interval: int, *, with_end: bool) -> list[int]:
        """After how many positions a pass from `start` to `end` is to keep a state: at the junction, at marks, before
        the last position if it `keeps_before_last`, and at regular intervals; with_end: and at the end. At a mark
        others go on differently: they find the whole blocks before it."""
        end = min(end, len(self.ids))
        size = self.block_size if self.tables else 1
        wanted = {self.junction, *(mark // size * size for mark in self.asked.marks)}
        if self.keeps_before_last:
            wanted.add(self.num_prompt - 1)
        wanted.update(range(start // interval * interval + interval, end + 1, interval))
        if with_end:
            wanted.add(end)
        return sorted(num for num in wanted if start < num <= end)

    @property
    def keeps_before_last(self) -> bool:
        """A recurrent state is kept before the last position of its prompt, where its other choices or, as it has one
        token to sample, another engine go on."""
        return self.asked.n > 1 or self.max_len == self.num_prompt + 1

    def blocks_from(self, place: int) -> list[int]:
        """Its blocks of positions from block `place` on."""
        return [block for table in self.tables for block in table.blocks[max(0, place - table.first) :]]

    def num_before(self, bad: Set[int]) -> int:
        """How many leading blocks of its computed positions there are before the first of these."""
        num = self.num_computed // self.block_size
        return min(
            (
                t.first + i
                for t in self.tables
                for i, block in enumerate(t.blocks[: max(0, num - t.first)])
                if block in bad
            ),
            default=num,
        )

    def has_dropped(self, groups: Groups) -> bool:
        """Whether it has released a block that the positions after the computed ones read."""
        return bool(self.tables) and any(
            groups.need_from(group, self.num_computed) // self.block_size < self.tables[group].first
            for group in groups.moving
        )

    @property
    def generates(self) -> bool:
        """It samples at least one token."""
        return self.max_len > self.num_prompt

    @property
    def is_streaming(self) -> bool:
        """A token of it was sampled, or is by a plan in flight."""
        return self.num_total > self.num_prompt

    @property
    def num_due(self) -> int:
        """Positions to compute before it ends or its regime changes."""
        return self.num_needed if self.regime or self.num_needed <= self.regime_limit else self.regime_limit

    @property
    def changes_regime(self) -> bool:
        """Its last ids are beyond the limit of its regime: none of what was computed is of use for what follows."""
        return not self.regime and len(self.ids) > self.regime_limit

    @property
    def num_computable(self) -> int:
        """Positions that may be computed: those whose ids are known, here or on the device, and whose KV is needed; not
        the last one, from which a token is sampled, while its mask is missing and must not be late; in another regime
        none before its row is given back."""
        num = self.num_total if self.may_be_late or self.is_masked else self.num_total - 1
        return min(num, self.num_due)

    @property
    def has_work(self) -> bool:
        """A plan could compute a position of it."""
        return self.state is State.RUNNING and self.num_planned < self.num_computable

    @property
    def may_release(self) -> bool:
        """It no longer needs its row and blocks, and nothing in flight touches them."""
        return self.num_in_flight == 0 and self.state in (State.ENDED, State.LEAVING)

    @property
    def starts_again(self) -> bool:
        """Its numbers were not finite, or its masks took too long: it was preempted, and results of plans in flight do
        not count."""
        return (self.is_poisoned or self.is_taken_back) and self.state is State.LEAVING

    def finish_of(self, token: int) -> FinishReason | None:
        """Why it ends with `token`, its last; None: it goes on."""
        if token in self.stops:
            return "stop"
        return "length" if len(self.ids) >= self.max_len else None

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

    # ── messages about it ────────────────────────────────────────────────────────────────────────────────────────────

    def as_row(self, pool: BlockPool) -> RowOpen:
        """What the worker is told when it gets a row."""
        is_plain = pool.groups.is_plain
        limits = self.asked.limits
        min_len = min(self.num_prompt + limits.min_tokens, self.max_len)
        is_short = bool(self.stops) and len(self.ids) < min_len
        return RowOpen(
            row=self.row,
            ids=self.ids.tobytes(),
            num_prompt=self.num_prompt,
            num_computed=self.num_computed,
            block_ids=ids_to_bytes(self.blocks) if is_plain else b"",
            sampling=self.asked.sampling,
            min_len=min_len if is_short else 0,
            ends=ids_to_bytes(sorted(self.stops)) if is_short else b"",
            pooling=self.asked.pooling,
            type_ids=self.asked.type_ids,
            tables=() if is_plain else tuple(GroupTable(t.first, pool.pages_of(t.blocks)) for t in self.tables),
            state=pool.pages_of([self.slot]) if self.slot >= 0 else b"",
            state_from=pool.pages_of([self.slot_from]) if self.slot_from >= 0 else b"",
            regime=self.regime,
            rid=self.rid,
            cross=pool.pages_of(self.encoded.blocks) if self.encoded else b"",
            num_encoded=len(self.encoded),
            encoder_ids=b"" if self.encoded.is_there else self.encoded.ids.tobytes(),
        )

    @property
    def num_asked(self) -> int:
        """Tokens of the prompt that its client has sent."""
        return len(self.encoded) or self.num_prompt

    def as_opened(self, num_resumed: int | None = None) -> Opened:
        """What the detokenizer is told first. `num_resumed`: of the output that it came with (default: all)."""
        asked, num = self.asked, self.num_prompt
        end = num + (self.num_resumed if num_resumed is None else num_resumed)
        context = self.ids[0 if asked.text.prompt else max(0, num - _NUM_CONTEXT_IDS) : num].tobytes()
        if asked.text.prompt and self.encoded:
            context = self.encoded.ids.tobytes()
        resumed = self.ids[num:end].tobytes()
        return Opened(
            self.rid, self.num_asked, self.num_cached, context, asked.text, asked.times, resumed, asked.resume_chars
        )

    def last_word(self, prompt_logprobs: RowLogprobs | None, vector: bytes) -> Tokens | Failed:
        """Its terminal message when its prompt is computed and nothing is to be generated."""
        if self.asked.pooling is None:
            return self.terminal("length", prompt_logprobs=prompt_logprobs)
        return replace(self.terminal("stop"), vector=vector) if vector else self.failure()

    def failure(self) -> Failed:
        """Its terminal message when its numbers are not finite."""
        return Failed(self.rid, "internal", "The model gave numbers that are not finite for this request.")

    def terminal(
        self,
        finish: FinishReason,
        ids: bytes = b"",
        logprobs: RowLogprobs | None = None,
        prompt_logprobs: RowLogprobs | None = None,
        stop_token_id: int | None = None,
    ) -> Tokens:
        """Its terminal message when it has finished. ids: int32, output that was not told before."""
        usage = Usage(self.num_asked, len(self.ids) - self.num_prompt, self.num_cached)
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
