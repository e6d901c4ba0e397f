"""KV that a connector loads from behind the device: what is under way, and whether it pays.

A request whose load is under way holds its row and blocks and computes nothing. A block that could not be loaded is
computed instead, so a load that fails costs only time.
"""

from itertools import islice

from ...ipc.messages import Transferred, bytes_to_ids
from .cost import NO_WORK, CostModel, with_chunk
from .kv_connector import CoreConnector
from .request import Request

_WEIGHT = 0.2  # in the running mean of ms per block, of a load that took longer than the mean
_MAX_REFUSED = 65_536  # keys
_LONG = 1024  # positions of a prefix for which `keeps` is decided
_DOUBT = 0.98  # factor on that mean for each load that is not tried because of it, so that it is tried again one day


class Loads:
    """The loads of all requests."""

    def __init__(self, connector: CoreConnector, cost: CostModel, block_size: int) -> None:
        self._connector = connector
        self._cost = cost
        self._block_size = block_size
        # rid → request whose load is under way, and keys of its blocks
        self._requests: dict[int, tuple[Request, tuple[bytes, ...]]] = {}
        self._ms_per_block: float | None = None  # None: nothing was loaded yet
        self.keys: set[bytes] = set()  # of all blocks under way
        self._refused: dict[bytes, None] = {}  # keys of blocks that are not to be loaded, the oldest first
        self.asks_again = False  # the connector has not decided about a request

    def __len__(self) -> int:
        return len(self._requests)

    def match(self, request: Request, num_cached: int) -> int | None:
        """How many positions after the first `num_cached` are to be loaded. None: ask again soon."""
        num, _ = self._connector.get_num_new_matched_tokens(request, num_cached)
        if num is None:
            self.asks_again = True
            return None
        assert num % self._block_size == 0 and num_cached + num < len(request.ids), (num, num_cached)
        if self._refused:
            first = num_cached // self._block_size
            keys = request.block_keys(first + num // self._block_size, self._block_size)[first:]
            num = next((i for i, key in enumerate(keys) if key in self._refused), len(keys)) * self._block_size
        if num == 0 or self._pays(num_cached, num):
            return num
        assert self._ms_per_block is not None
        self._ms_per_block *= _DOUBT
        return 0

    def start(self, request: Request) -> None:
        """The last `num_loading` blocks of the request's table are to be loaded."""
        keys = tuple(request.block_keys(len(request.blocks), self._block_size)[-request.num_loading :])
        self._requests[request.rid] = (request, keys)
        self.keys.update(keys)
        self._connector.update_state_after_alloc(request, request.blocks, request.num_loading * self._block_size)

    def finish(self, message: Transferred) -> list[tuple[Request, int]]:
        """(request, how many of its blocks were loaded before the first that failed) for each load that is over."""
        if message.num_blocks:
            ms = message.load_ms / message.num_blocks
            mean = self._ms_per_block
            # A fast load counts at once: a load that does not pay costs little, never loading again costs much.
            self._ms_per_block = ms if mean is None or ms < mean else mean + _WEIGHT * (ms - mean)
        failed = set(bytes_to_ids(message.failed_blocks))
        done = []
        for rid in message.loaded:
            request, keys = self._requests.pop(rid)
            self.keys.difference_update(keys)
            blocks = request.blocks[-request.num_loading :]
            good = next((i for i, block in enumerate(blocks) if block in failed), len(blocks))
            done.append((request, good))
        return done

    def refuse(self, request: Request) -> None:
        """What is stored of this request is bad: do not load it again."""
        full = min(request.num_planned, len(request.ids)) // self._block_size
        self._refused.update(dict.fromkeys(request.block_keys(full, self._block_size)))
        for key in list(islice(self._refused, max(0, len(self._refused) - _MAX_REFUSED))):
            del self._refused[key]

    def requests(self) -> list[Request]:
        """Those whose loads are under way."""
        return [request for request, _ in self._requests.values()]

    def forget(self) -> list[Request]:
        """Drops all loads, because their worker died. Returns their requests."""
        requests = self.requests()
        self._requests.clear()
        self.keys.clear()
        return requests

    def ms_to_load(self, num_blocks: int) -> float | None:
        """Milliseconds to load so many blocks; None if nothing is known."""
        return None if self._ms_per_block is None else self._ms_per_block * num_blocks

    @property
    def keeps(self) -> bool:
        """Whether blocks that leave the device are worth keeping behind it: whether loading a long prefix would pay."""
        return self._pays(0, _LONG)

    def _pays(self, past: int, num: int) -> bool:
        """Whether loading costs less than computing, as far as both are known."""
        load_ms = self.ms_to_load(num // self._block_size)
        if load_ms is None or not self._cost.is_ready:
            return True
        return load_ms <= self._cost.predict_more(with_chunk(NO_WORK, past, num))
