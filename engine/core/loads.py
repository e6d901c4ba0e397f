"""What a connector loads from behind the device: what is under way, and whether it pays.

A request whose load is under way holds its row and blocks and computes nothing. What could not be loaded is computed
instead, so a load that fails costs only time.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

from ...ipc.messages import Transferred, bytes_to_ids
from .block_pool import BlockPool
from .cost import NO_WORK, CostModel, with_chunk
from .kv_connector import Held, Item, TierConnector
from .prefix import Found, PrefixCache, Undecided, state_name
from .request import Request

_WEIGHT = 0.2  # in the running mean of ms per page, of a load that took longer than the mean
_MAX_REFUSED = 65_536  # keys
_LONG = 1024  # positions of a prefix for which `keeps` is decided
_DOUBT = 0.98  # factor on that mean for each load that is not tried because of it, so that it is tried again one day


class Loads:
    """The loads of all requests."""

    def __init__(
        self, connector: TierConnector, prefix: PrefixCache, pool: BlockPool, cost: CostModel, block_size: int
    ) -> None:
        self._connector = connector
        self._prefix = prefix
        self._pool = pool
        self._cost = cost
        self._block_size = block_size
        self._requests: dict[int, tuple[Request, list[Held]]] = {}  # rid → request whose load is under way, and of what
        self._ms_per_page: float | None = None  # None: nothing was loaded yet
        self._names: set[bytes] = set()  # of all items under way
        self.keys: set[bytes] = set()  # of these, as `Found.missing` has them
        self._refused: dict[bytes, None] = {}  # keys of blocks that are not to be loaded, the oldest first
        self.asks_again = False  # the connector has not decided about a request

    def __len__(self) -> int:
        return len(self._requests)

    def match(self, request: Request, found: Found) -> Found | None:
        """The longest prefix that the device and the connector have together; `found`, what the device has, if that is
        as long or loading the rest does not pay. None: ask again, soon or when the loads under way are over."""
        try:
            better = self._prefix.find(request, tiers=self)
        except Undecided:
            self.asks_again = True
            return None
        if better.num <= found.num or not better.wanted:
            return found
        if any(item.name in self._names for item in better.wanted):
            return None
        if self._pays(found.num, better.num - found.num, self._num_pages(better.wanted)):
            return better
        assert self._ms_per_page is not None
        self._ms_per_page *= _DOUBT
        return found

    def available(self, request: Request, items: Sequence[Item]) -> Sequence[bool]:
        """Which of these items the tiers can load for the request. Raises Undecided while they do not know."""
        answer = self._connector.available(request, items)
        if answer is None:
            raise Undecided
        refused, failed = self._refused, request.not_loaded
        has = [
            ok and item.key not in refused and item.name not in failed for ok, item in zip(answer, items, strict=False)
        ]
        return has + [False] * (len(items) - len(has))

    def standing(self, request: Request, behind: bytes, place: int) -> Mapping[bytes, int]:
        """The states behind a block that the tiers can load: key → how many positions after the block."""
        group = self._pool.groups.state
        assert group is not None, "states of a model that has none"
        standing = self._connector.standing(request, behind, place)
        if not standing:
            return standing
        items = {key: Item(key, place, behind, group, num) for key, num in standing.items()}
        return {
            key: num
            for key, num in standing.items()
            if key not in self._refused and items[key].name not in request.not_loaded
        }

    def start(self, request: Request, wanted: Sequence[Item]) -> None:
        """These items are to be loaded into the blocks that the request has for them."""
        held = [Held(item, tuple(self._pool.pages([request.block_for(item, self._pool.groups)]))) for item in wanted]
        self._requests[request.rid] = (request, held)
        for item in wanted:
            self._names.add(item.name)
            self.keys.add(state_name(item.key) if item.group == self._pool.groups.state else item.key)
        self._connector.load(request, held)

    def finish(self, message: Transferred) -> list[tuple[Request, list[Held], list[Held]]]:
        """(request, what was loaded, what could not be loaded) for each load that is over."""
        if message.num_blocks:
            ms = message.load_ms / message.num_blocks
            mean = self._ms_per_page
            # A fast load counts at once: a load that does not pay costs little, never loading again costs much.
            self._ms_per_page = ms if mean is None or ms < mean else mean + _WEIGHT * (ms - mean)
        failed = set(bytes_to_ids(message.failed_blocks))
        done = []
        for rid in message.loaded:
            request, held = self._requests.pop(rid)
            self._forget(held)
            good = [one for one in held if failed.isdisjoint(one.pages)]
            done.append((request, good, [one for one in held if not failed.isdisjoint(one.pages)]))
        return done

    def refuse(self, request: Request) -> None:
        """What is stored of this request is bad: do not load it again."""
        full = min(request.num_planned, len(request.ids)) // self._block_size
        self._refused.update(dict.fromkeys(request.block_keys(full, self._block_size)))
        self._refused.update(dict.fromkeys(request.snapshots))
        for key in list(islice(self._refused, max(0, len(self._refused) - _MAX_REFUSED))):
            del self._refused[key]

    def requests(self) -> list[Request]:
        """Those whose loads are under way."""
        return [request for request, _ in self._requests.values()]

    def forget(self) -> list[Request]:
        """Drops all loads, because their worker died. Returns their requests."""
        requests = self.requests()
        self._requests.clear()
        self._names.clear()
        self.keys.clear()
        return requests

    def ms_to_load(self, num_pages: int) -> float | None:
        """Milliseconds to load so many pages; None if nothing is known."""
        return None if self._ms_per_page is None else self._ms_per_page * num_pages

    @property
    def keeps(self) -> bool:
        """Whether blocks that leave the device are worth keeping behind it: whether loading a long prefix would pay."""
        groups = self._pool.groups
        return self._pays(0, _LONG, groups.num_pages(0, _LONG, 1, self._block_size))

    def _forget(self, held: Sequence[Held]) -> None:
        for item, _ in held:
            self._names.discard(item.name)
            self.keys.discard(state_name(item.key) if item.group == self._pool.groups.state else item.key)

    def _num_pages(self, items: Sequence[Item]) -> int:
        return sum([self._pool.groups.sizes[item.group] for item in items])

    def _pays(self, past: int, num: int, num_pages: int) -> bool:
        """Whether loading costs less than computing, as far as both are known."""
        load_ms = self.ms_to_load(num_pages)
        if load_ms is None or not self._cost.is_ready:
            return True
        return load_ms <= self._cost.predict_more(with_chunk(NO_WORK, past, num))
