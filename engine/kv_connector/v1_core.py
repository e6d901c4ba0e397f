"""The core half of a `KVConnectorBase_V1`.

vLLM's connectors are told of every step and follow each request through it. Pagewire saves whole blocks once a request
has ended, and loads before a request computes. So the connector is shown steps in which the same happens:

- A request with an external hit: `update_state_after_alloc`, then a step in which it is new, with nothing scheduled. If
  the load is asynchronous, the step does not name it, as in vLLM.
- A request that has ended: a step in which it is new and its prompt is computed, and if there are full blocks of output
  a second one in which it is cached and those are computed; one that was shown before is only cached. Then
  `request_finished`, and the next step has it in `finished_req_ids`. One that ended before its prompt was computed is
  not shown.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...ipc.messages import TierSnapshot, Transferred, bytes_to_ids, ids_to_bytes
from ..core.kv_connector import Evicted, KvEvent, KvRequest
from .base import ConnectorFacts
from .v1_meta import V1Load, V1Plan, V1Step, encode_metadata
from .v1_names import (
    CachedRequestData,
    KVCacheBlocks,
    KVConnectorOutput,
    NewRequestData,
    Request,
    SchedulerOutput,
    V1Connector,
)

_MAX_MATCHES = 4096  # requests of which is remembered how they would be loaded


class _Admitted(NamedTuple):
    request: Request
    rid: int
    blocks: list[int]
    kept: list[int]  # blocks that the device has; between them and those to be loaded, other connectors may load
    num_computed: int  # positions once it is loaded
    is_async: bool


class _Loading(NamedTuple):
    first: int  # position
    blocks: list[int]  # that are filled


class V1Core:
    def __init__(self, connector: V1Connector, facts: ConnectorFacts) -> None:
        self._connector = connector
        self._name = type(connector).__name__
        self._block_size = facts.block_size
        self._matches: OrderedDict[int, bool] = OrderedDict()  # rid → whether its load would be asynchronous
        self._admitted: list[_Admitted] = []  # for the next plan
        self._loading: dict[int, _Loading] = {}  # by rid
        self._shown: dict[int, int] = {}  # rid → positions that steps have shown
        self._before: list[V1Step] = []  # for the next plan: see `V1Plan`
        self._after: list[V1Step] = []
        self._held: list[int] = []  # for the next plan
        self._finished: set[str] = set()  # for the next step
        self._num_hit_tokens = self._num_failed = 0

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The connector's answer in whole blocks, which leave a position to compute."""
        seen = Request(request, self._block_size)
        num, is_async = self._connector.get_num_new_matched_tokens(seen, num_computed_tokens)
        if num is None:
            return None, is_async
        self._matches[request.rid] = is_async
        self._matches.move_to_end(request.rid)
        while len(self._matches) > _MAX_MATCHES:
            self._matches.popitem(last=False)
        num = min(num, len(request.ids) - 1 - num_computed_tokens)
        return max(0, num // self._block_size * self._block_size), is_async

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        blocks = list(request.blocks)
        seen = Request(request, self._block_size)
        self._connector.update_state_after_alloc(seen, KVCacheBlocks(blocks), num_external_tokens)
        num_hit = len(block_ids) * self._block_size - num_external_tokens
        is_async = self._matches.pop(request.rid, False)
        kept = blocks[: request.num_computed // self._block_size]
        self._admitted.append(_Admitted(seen, request.rid, blocks, kept, num_hit + num_external_tokens, is_async))
        filled = blocks[num_hit // self._block_size : len(block_ids)]
        self._loading[request.rid] = _Loading(num_hit, filled)
        if not is_async:
            self._shown[request.rid] = num_hit + num_external_tokens

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        seen, num_prompt = Request(request, self._block_size), request.num_prompt
        if len(block_ids) >= num_prompt // self._block_size:
            self._show_loads()  # in the order in which the connector was told of them
            self._show(seen, request.rid, list(block_ids))
        self._matches.pop(request.rid, None)
        self._shown.pop(request.rid, None)
        stays, _ = self._connector.request_finished(seen, list(block_ids))
        self._finished.add(seen.request_id)
        if stays:
            self._held.append(request.rid)
        return stays

    def build_connector_meta(self) -> bytes:
        self._show_loads()
        if self._finished:
            self._after.append(self._step([], _cached(), {}))
        if not self._before and not self._after:
            return b""
        plan = V1Plan(tuple(self._before), tuple(self._after), tuple(self._held))
        for column in (self._before, self._after, self._held):
            column.clear()
        return msgspec.msgpack.encode(plan)

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        """Does nothing: the blocks of ended requests were offered already."""

    def update_connector_output(self, output: Transferred) -> None:
        failed = set(bytes_to_ids(output.failed_blocks))
        over = {rid: loading for rid in output.loaded if (loading := self._loading.pop(rid, None)) is not None}
        bad: set[int] = set()
        for rid, (first, blocks) in over.items():
            lost = [i for i, block in enumerate(blocks) if block in failed]
            bad.update(blocks[i] for i in lost)
            self._num_hit_tokens += (len(blocks) - len(lost)) * self._block_size
            if lost and rid in self._shown:  # from there on it is computed
                self._shown[rid] = first + lost[0] * self._block_size
        self._num_failed += len(bad)
        if over or output.sent:
            self._connector.update_connector_output(
                KVConnectorOutput(
                    finished_sending={str(rid) for rid in output.sent},
                    finished_recving={str(rid) for rid in over},
                    invalid_block_ids=bad,
                )
            )

    def take_events(self) -> list[KvEvent]:
        """None: a connector's events name blocks by hashes of its own."""
        return []

    def tiers(self) -> tuple[TierSnapshot, ...]:
        """What it stores is not known here."""
        return (TierSnapshot(self._name, 0, 0, self._num_hit_tokens, 0, 0, self._num_failed),)

    def reset(self) -> None:
        for column in (self._admitted, self._before, self._after, self._held):
            column.clear()
        self._loading.clear()
        self._shown.clear()
        self._connector.reset_cache()

    def close(self) -> None:
        self._connector.shutdown()

    def _show_loads(self) -> None:
        """The step of the requests that were admitted and not shown yet."""
        if not self._admitted:
            return
        shown = [one for one in self._admitted if not one.is_async]
        new = [_new(one.request, one.blocks, num_computed=one.num_computed) for one in shown]
        loads = tuple(V1Load(one.rid, one.is_async, ids_to_bytes(one.kept)) for one in self._admitted)
        self._admitted.clear()
        self._after.append(self._step(new, _cached(), {one.request.request_id: 0 for one in shown}, loads))

    def _show(self, request: Request, rid: int, blocks: list[int]) -> None:
        """The steps of an ended request. blocks: all of its full ones."""
        size, num = self._block_size, len(blocks) * self._block_size
        before = self._shown.get(rid, 0)
        if not before:
            num_first = min(-(-request.num_prompt_tokens // size), len(blocks))
            before = request.num_prompt_tokens
            new = _new(request, blocks[:num_first], num_computed=0)
            self._before.append(self._step([new], _cached(), {request.request_id: before}))
        if num > before:
            more = blocks[-(-before // size) :]
            self._before.append(self._step([], _cached(request, more, before), {request.request_id: num - before}))

    def _step(
        self,
        new: list[NewRequestData],
        cached: CachedRequestData,
        scheduled: dict[str, int],
        loads: tuple[V1Load, ...] = (),
    ) -> V1Step:
        finished, self._finished = self._finished, set()
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=finished,
        )
        metadata = encode_metadata(self._connector.build_connector_meta(output))
        return V1Step(metadata, loads, tuple(sorted(finished)))


def _new(request: Request, blocks: list[int], *, num_computed: int) -> NewRequestData:
    return NewRequestData(
        req_id=request.request_id, prompt_token_ids=request.prompt_token_ids, mm_features=request.mm_features,
        block_ids=(blocks,), num_computed_tokens=num_computed,
    )  # fmt: skip


def _cached(request: Request | None = None, blocks: Sequence[int] = (), num_computed: int = 0) -> CachedRequestData:
    """Of one request, or of none."""
    if request is None:
        return CachedRequestData(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    return CachedRequestData(
        req_ids=[request.request_id], resumed_req_ids=set(), new_block_ids=[(list(blocks),)],
        num_computed_tokens=[num_computed],
    )  # fmt: skip
