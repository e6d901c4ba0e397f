"""What the scheduler asks of a KV connector: the core half, without torch.

A connector keeps KV of blocks, and recurrent states, somewhere behind the device, names them by the same keys as the
prefix cache, and loads them again. The scheduler calls a `TierConnector`, whose units are items of any cache group.
A `CoreConnector` stores blocks of a model with one group; its names and meanings follow vLLM's V1 connector, with these
differences, and `engine/kv_connector/one_group.py` makes a `TierConnector` of it:

- A request is computed only once its load is known to be over, so blocks that failed to load are computed and never
  read. Nothing depends on the second value of `get_num_new_matched_tokens`; see the worker half.
- KV is found by key only. Of a client's request a connector learns no more than whether another engine computes its
  prompt, and which.
- `blocks_evicted` is pagewire's own: the device's prefix cache evicts blocks, and a tier may keep them.

Every method is called by the scheduler's thread, between steps, and must not block.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ...ipc.messages import TierSnapshot, Transferred


class KvRequest(Protocol):
    """What a connector may know of a request."""

    rid: int
    ids: "array[int]"  # prompt, and output that was applied
    num_computed: int  # leading positions whose KV is in its blocks
    root: bytes  # what its first block has instead of the key of the block before it

    @property
    def num_prompt(self) -> int:
        """How many of its ids are the prompt's."""

    @property
    def blocks(self) -> list[int]:
        """Its block table in the first group, while it has a row."""

    @property
    def awaits_kv(self) -> bool:
        """Another engine computes its prompt and may not have begun: waiting a while for its KV is worth it."""

    @property
    def kv_peer(self) -> str:
        """The address of the engine that has or computes its KV; empty: the request names none."""

    @property
    def keeps_before_last(self) -> bool:
        """Of a model with recurrent states: the one before its prompt's last position is kept, if there is room."""

    def block_keys(self, num: int, block_size: int) -> list[bytes]:
        """Keys of its first `num` blocks, all of them full. Each is 32 bytes and names its whole prefix."""

    def partial_keys(self, num_full: int, num: int, block_size: int) -> list[bytes]:
        """Keys of the first 1, 2 … `num` positions of the block after `num_full` full ones; fewer than a block."""


class Item(NamedTuple):
    """What a tier keeps as one: a block of one group, the beginning of a block, or a recurrent state.

    Groups have equal keys for equal beginnings; the pages of an item differ from group to group."""

    key: bytes  # 32 bytes, which name all positions up to the item's end
    place: int  # which block of its sequence it is, from 0; of a state: how many full blocks are before it
    parent: bytes | None = None  # key of the block before it, if there is one; of a state without one: the root
    group: int = 0
    num: int = 0  # of the beginning of a block, and of a state: its positions after `place` full blocks

    @property
    def name(self) -> bytes:
        """32 bytes. Different items have different names, as far as SHA-256 has no collisions."""
        return item_name(self.key, self.group)


def item_name(key: bytes, group: int) -> bytes:
    """The name of an item. Applied to the name, it gives the key."""
    return bytes((key[0] ^ group,)) + key[1:] if group else key


class Held(NamedTuple):
    """An item and the pages that hold it, or are to hold it."""

    item: Item
    pages: tuple[int, ...]


class Evicted(NamedTuple):
    """A block or state that leaves the device's prefix cache. Its content is there until the next plan runs."""

    block: int  # its first page
    key: bytes
    place: int  # which block of its sequence it is, from 0: what it costs to compute again grows with it
    parent: bytes | None = None  # key of the block before it, if there is one
    group: int = 0  # of the cache; its keys are its own
    num: int = 0  # as in `Item`
    rest: tuple[int, ...] = ()  # its other pages

    @property
    def item(self) -> Item:
        return Item(self.key, self.place, self.parent, self.group, self.num)

    @property
    def pages(self) -> tuple[int, ...]:
        return (self.block, *self.rest)


class KvEvent(NamedTuple):
    """The content of a tier has changed."""

    stored: bool  # else removed
    keys: tuple[bytes, ...]
    tier: str
    group: int = 0


class AnyConnector(Protocol):
    """What both kinds of core halves have."""

    def build_connector_meta(self) -> bytes:
        """What the worker half must do with the next plan; handed over once. Empty: nothing."""

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


class CoreConnector(AnyConnector, Protocol):
    """The core half of a connector for models with one group of full attention, whose blocks are pages."""

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(how many tokens beyond the device's `num_computed_tokens` it could load, whether the load spans steps).

        Both counts are whole blocks, and at least one position of the request stays to be computed. None: not known
        yet, ask again soon. Has no side effects on what is held.
        """

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request is admitted with this block table, and `num_external_tokens` of the matched ones are to be
        loaded into the blocks after its device hits: those from `len(block_ids) - num_external_tokens / block_size`
        on. Not called when nothing is to be loaded."""

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        """A request has ended and no plan in flight touches it; its KV is whole as far as `num_computed`. True: its
        blocks stay until `Transferred.sent` names it. False: the next plan may give them to other requests, and its
        metadata can still have them read first."""


@runtime_checkable
class TierConnector(AnyConnector, Protocol):
    """The core half of a connector for all groups: what the scheduler calls. A load fails or succeeds by item;
    `Transferred.failed_blocks` names at least one page of an item that failed."""

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        """Which of these items, which the device lacks, it could load; those after the end of the answer it could not.
        None: not known yet, ask again soon. Has no side effects on what is held.

        It is called once for each attempt to admit a request with items of the full group in their order, perhaps
        none, and as of the first missing one they are of no use; then for the others that are needed with these."""

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        """The recurrent states that it has behind the block with the key `behind`, the last of `place` full ones, or
        behind the root: key → positions between. Called after `available`."""

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        """The request is admitted, and these items, at least one, are to be loaded into these pages."""

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        """A request has ended, no plan in flight touches it, and its pages hold these items, in the order of their
        positions. True: they stay until `Transferred.sent` names it. False: the next plan may give them to other
        requests, and its metadata can still have them read first."""


@runtime_checkable
class DomainTier(Protocol):
    """A core half whose tier only its own KV domain reads, so that it matters which domain a request gets."""

    def num_kept(self, names: Sequence[bytes]) -> int:
        """How many of these items it has before the first that it lacks."""


@runtime_checkable
class ChunkConnector(Protocol):
    """A core half that can keep the blocks of a prompt while the rest of it is still computed."""

    @property
    def wants_chunks(self) -> bool:
        """Whether the other methods are to be called. Never changes."""

    def filling(self, request: KvRequest, held: Sequence[Held]) -> None:
        """The plan under construction computes a part of its prompt, and fills these blocks, in the order of their
        positions. Its metadata can have their layers read as they are computed, but that the blocks are whole and good
        is known only when `filled` or `ended` says so: a pass may be dropped, or spoil them."""

    def filled(self, request: KvRequest, held: Sequence[Held]) -> None:
        """A part of its prompt was computed, and it holds these full blocks, in the order of their positions, of a
        window perhaps not the first ones. They stay until the next plan, whose metadata can have them read."""

    def spoiled(self, request: KvRequest) -> None:
        """What passes have computed of it is bad, and it ends or starts again; or it ends while it waits for a row, for
        the first time or again. `filled` and `ended` are not called for the blocks of which `filling` was called last.
        The connector may not know it."""
