"""What the scheduler asks of a KV connector: the core half, without torch.

A connector keeps KV of full blocks somewhere behind the device, names it by the same keys as the prefix cache, and
loads it again. Names and meanings follow vLLM's V1 connector where it has them, with these differences:

- A request is computed only once its load is known to be over, so blocks that failed to load are computed and never
  read. Nothing depends on the second value of `get_num_new_matched_tokens`; see the worker half.
- No parameter of a connector comes from a client's request; KV is found by key only.
- `blocks_evicted` is pagewire's own: the device's prefix cache evicts blocks, and a tier may keep them.

Every method is called by the scheduler's thread, between steps, and must not block.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...ipc.messages import TierSnapshot, Transferred


class KvRequest(Protocol):
    """What a connector may know of a request."""

    rid: int
    ids: "array[int]"  # prompt, and output that was applied
    num_computed: int  # leading positions whose KV is in its blocks

    def block_keys(self, num: int, block_size: int) -> list[bytes]:
        """Keys of its first `num` blocks, all of them full. Each is 32 bytes and names its whole prefix."""


class Evicted(NamedTuple):
    """A block that leaves the device's prefix cache. Its content is there until the next plan runs."""

    block: int
    key: bytes
    place: int  # which block of its sequence it is, from 0: what it costs to compute again grows with it
    parent: bytes | None = None  # key of the block before it, if there is one
    group: int = 0  # of the cache; its keys are its own


class KvEvent(NamedTuple):
    """The content of a tier has changed."""

    stored: bool  # else removed
    keys: tuple[bytes, ...]
    tier: str


class CoreConnector(Protocol):
    """The core half."""

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(how many tokens beyond the device's `num_computed_tokens` it could load, whether the load spans steps).

        Both counts are whole blocks, and at least one position of the request stays to be computed. None: not known
        yet, ask again soon. Has no side effects on what is held.
        """

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request is admitted with this block table, and `num_external_tokens` of the matched ones are to be
        loaded into the blocks after its device hits: those from `len(block_ids) - num_external_tokens / block_size`
        on. Not called when nothing is to be loaded."""

    def build_connector_meta(self) -> bytes:
        """What the worker half must do with the next plan; handed over once. Empty: nothing."""

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        """A request has ended and no plan in flight touches it; its KV is whole as far as `num_computed`. True: its
        blocks stay until `Transferred.sent` names it. False: the next plan may give them to other requests, and its
        metadata can still have them read first."""

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        """The plan under construction gives these blocks to other requests. A tier that wants their content reads it
        with that plan."""

    def update_connector_output(self, output: Transferred) -> None:
        """What the worker half reported."""

    def take_events(self) -> list[KvEvent]:
        """What its tiers stored and removed since the last call. Called with each plan, or more often."""

    def tiers(self) -> tuple[TierSnapshot, ...]:
        """For metrics."""

    def reset(self) -> None:
        """The worker was replaced: KV that only its memory held is lost, and nothing is under way."""

    def close(self) -> None:
        """Closes files and sockets."""
