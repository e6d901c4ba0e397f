"""The requests of a scheduler: those that wait, in queues, and those that run, with their rows and blocks.

Requests are added, preempted and ended here and nowhere else. The in-flight rule: row and blocks return to their pools
only once a request has ended or been preempted *and* nothing in flight touches it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from ...ipc.messages import Failed, Masks, Tokens
from .block_pool import BlockPool
from .constraints import Constraints, allow
from .kv_connector import ChunkConnector, Held, TierConnector
from .micro_batches import MicroBatches
from .output_buffer import OutputBuffer
from .policy import Policy
from .prefix import PrefixCache
from .request import Request, State, Table
from .stats import Counters
from .waiting import Waiting

_arrival = attrgetter("arrival")


class RequestTable:
    """All requests of one scheduler."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        prefix: PrefixCache,
        policy: Policy,
        outputs: OutputBuffer,
        counters: Counters,
        connector: TierConnector | None,
        micro_batches: MicroBatches,
        constraints: Constraints,
        num_rows: int,
    ) -> None:
        self._pool = pool
        self._prefix = prefix
        self._policy = policy
        self._outputs = outputs
        self._counters = counters
        self._connector = connector
        self.chunks: ChunkConnector | None = None  # the same, if it wants to be told of chunks
        behind: object = connector  # of which mypy does not know that it can be both
        if isinstance(behind, ChunkConnector) and behind.wants_chunks:
            self.chunks = behind
        self._micro_batches = micro_batches
        self.constraints = constraints
        self.requests: dict[int, Request] = {}  # every request that has not ended
        self.waiting = Waiting(policy)
        self.running: list[Request] = []  # by arrival: all that hold a row, and ended ones not yet swept
        self.num_leaving = 0  # of them, those that are LEAVING
        self.num_constrained = 0  # of `requests`
        self.held: dict[int, list[int]] = {}  # ended rid → blocks that the connector still reads
        self._num_rows = num_rows
        self.max_rows = num_rows  # that requests may hold, at most; more do for a while after it was lowered
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self._has_ended = False  # a request in running

    @property
    def has_free_row(self) -> bool:
        """Whether a waiting request may get a row."""
        return len(self.free_rows) > self._num_rows - self.max_rows

    def follow(self, policy: Policy, place: Callable[[Request], float]) -> None:
        """Another policy orders the requests from now on. place: the one of a request there. They join as they came."""
        self._policy = policy
        self.waiting = Waiting(policy)
        for request in sorted(self.requests.values(), key=_arrival):
            request.join(policy.join(request.asked), place(request))
            if request.state is State.WAITING:
                self.waiting.add(request)

    def join(self, request: Request) -> None:
        """A new request waits."""
        self.requests[request.rid] = request
        self.num_constrained += request.is_constrained
        self.waiting.add(request)

    def be_late(self, request: Request, place: float) -> None:
        """A waiting request steps behind to another place in its queue."""
        self.waiting.remove(request)
        request.be_late(place)
        self.waiting.add(request)

    def admit(
        self,
        request: Request,
        tables: list[Table],
        num_blocks: int,
        num_found: int,
        num_loading: int,
        num_wanted: int,
        sources: list[tuple[int, int]],
    ) -> None:
        """A waiting request gets a row and these block tables, which hold what `Request.admit` says."""
        self.waiting.remove(request)
        row = self.free_rows.pop()
        request.admit(
            row,
            tables,
            num_blocks,
            num_found=num_found,
            num_loading=num_loading,
            num_wanted=num_wanted,
            sources=sources,
        )
        insort(self.running, request, key=_arrival)
        self._micro_batches.join(request)

    def sweep(self) -> None:
        """Removes ended requests from `running`."""
        if self._has_ended:
            self.running = [r for r in self.running if r.state is not State.ENDED]
            self._has_ended = False

    def end(self, request: Request, terminal: Tokens | Failed) -> None:
        """Ends a request: it has finished, was cancelled or failed. Its terminal message goes out."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
            if self.chunks is not None:
                self.chunks.spoiled(request)  # without a row it is not `ended`; it may have had one, or asked for one
        else:
            self._has_ended = True
            self.num_leaving -= request.state is State.LEAVING
            self._micro_batches.leave(request)
        self._policy.leave(request.queue_key)
        request.end()
        del self.requests[request.rid]
        if request.is_constrained:
            self.num_constrained -= 1
            self.constraints.end(request.rid)
            self.constraints.free(request)
        if isinstance(terminal, Tokens):
            self._outputs.add(terminal)
        else:
            self._outputs.add_item(terminal)
        self.release_if_idle(request)

    def allow(self, message: Masks) -> None:
        """The masks of constrained requests; those to which nothing can be added end."""
        self._outputs.close_batch()  # it may have output of them
        for request, end in allow(message, self.requests, self.constraints):
            self.end(request, end)
        rids = (*memoryview(message.rids).cast("q"), *memoryview(message.free).cast("q"))
        self._micro_batches.allow([self.requests[rid] for rid in rids if rid in self.requests])

    def preempt(self, request: Request) -> None:
        """Frees its row and blocks. It waits again in its old place, with its output as part of its prompt."""
        self._counters.num_preemptions += 1
        self._leave(request)
        self.release_if_idle(request)

    def change_regime(self, request: Request) -> None:
        """Preempts it because its last token is beyond the limit of its regime. All of it is computed in the next."""
        self._counters.num_regime_changes += 1
        self.preempt(request)

    def start_again(self, request: Request) -> None:
        """Preempts a request whose results in flight do not count."""
        self.constraints.free(request)
        if request.state is State.RUNNING:
            self._leave(request)

    def compute_again(self, request: Request, num: int) -> None:
        """Sets a request back to its first `num` positions: plans of later ones were dropped."""
        request.set_back(num)
        if request.state is State.RUNNING:
            self._micro_batches.join(request)

    def take_back(self, request: Request) -> None:
        """Preempts a request whose masks take too long. The plans in flight go on without it."""
        self._counters.num_taken_back += 1
        request.take_back()
        self.start_again(request)

    def release_if_idle(self, request: Request) -> None:
        """Releases it if it has ended or was preempted and nothing in flight touches it any more."""
        if request.may_release:
            self.release(request)

    def release(self, request: Request) -> None:
        """Takes row and blocks back; a preempted request waits again. Nothing in flight touches it."""
        was_preempted = request.state is State.LEAVING
        if request.row >= 0:
            kept = False
            held: list[Held] = []
            request.settle_end()
            if not request.is_poisoned:
                self._prefix.commit(request)
                self._prefix.commit_beginning(request, request.num_computed)
                if request.slot >= 0 and not request.is_spoiled:
                    self._prefix.commit_state(request, request.slot, request.num_computed)
                if request.state is State.ENDED and self._connector is not None:
                    held = self._prefix.held_by(request)
                    kept = self._connector.ended(request, held)
            if kept:
                own = set(request.held)
                found = [one.pages[0] for one in held if one.pages[0] not in own]  # states that it has found or kept
                self._pool.hold(found)
                self.held[request.rid] = [*request.held, *found]
            else:
                self._pool.release(request.held)
            self.free_rows.append(request.row)
        request.release()
        if was_preempted:
            self.num_leaving -= 1
            del self.running[bisect_left(self.running, request.arrival, key=_arrival)]
            self.waiting.add(request)

    def loaded(self, request: Request, loaded: list[Held], failed: list[Held]) -> None:
        """Its load is over. If too little was loaded, it waits again, and finds what was."""
        num = self._prefix.restorable(request, [item for item, _ in failed])
        if num is None:
            request.not_restored(item.name for item, _ in failed)
            if not request.is_poisoned:
                self._prefix.commit_loaded(loaded)
            if request.state is State.LOADING:
                self._leave(request)
        else:
            if num < request.num_wanted:
                self._pool.release(request.drop_sources())
            request.loaded(num)
            if request.state is State.RUNNING:
                self._prefix.commit(request)
        self.release_if_idle(request)

    def sent(self, rids: Iterable[int]) -> None:
        """The connector no longer reads the blocks of these ended requests."""
        for rid in rids:
            self._pool.release(self.held.pop(rid))

    def mend(self) -> str | None:
        """While no request is open: what is wrong with rows and blocks, which are then counted again. None: nothing."""
        flaw = self._pool.flaw(self.held.values())
        if flaw is None and sorted(self.free_rows) != list(range(self._num_rows)):
            flaw = f"{len(self.free_rows)} rows of {self._num_rows} are free while no request is open"
        if flaw is not None:
            self._counters.num_mended += 1
            self._pool.rebuild(self.held.values())
            self.free_rows = list(range(self._num_rows - 1, -1, -1))
        return flaw

    def reset(self, touched: Iterable[Request]) -> None:
        """All KV and everything in flight is lost; requests that ran wait again. `touched`: what was in flight touched
        them."""
        self.constraints.forget_late()
        holders = {id(r): r for r in (*touched, *self.running) if r.row >= 0}
        for request in holders.values():
            self._pool.release(request.held)
            self.free_rows.append(request.row)
            request.reset()
            if request.state is not State.ENDED:
                self.waiting.add(request)
        self.running = []
        self._micro_batches.clear()
        self._has_ended = False
        self.num_leaving = 0
        for blocks in self.held.values():
            self._pool.release(blocks)
        self.held.clear()

    def _leave(self, request: Request) -> None:
        """It gives its row and blocks back as soon as nothing in flight touches it."""
        request.preempt()
        self._micro_batches.leave(request)
        self.num_leaving += 1
