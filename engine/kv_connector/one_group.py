"""A connector for models with one group of full attention, as the scheduler calls connectors."""

from collections.abc import Mapping, Sequence

from ...ipc.messages import TierSnapshot, Transferred
from ..core.kv_connector import CoreConnector, Evicted, Held, Item, KvEvent, KvRequest


class OneGroup:
    """A `TierConnector` whose items are the full blocks of the only group, and whose blocks are pages."""

    def __init__(self, connector: CoreConnector, *, block_size: int) -> None:
        self.connector = connector
        self._block_size = block_size

    def available(self, request: KvRequest, items: Sequence[Item]) -> Sequence[bool] | None:
        """The connector loads blocks without gaps: blocks that the device has in between end what it has."""
        size = self._block_size
        first = items[0].place if items else (len(request.ids) - 1) // size
        num, _ = self.connector.get_num_new_matched_tokens(request, first * size)
        if num is None:
            return None
        if not (0 <= num < len(request.ids) - first * size and num % size == 0):
            raise ValueError(f"a match of {num} out of {len(request.ids) - first * size} tokens is invalid")
        last = first + num // size
        return [item.place < last and item.place == first + i for i, item in enumerate(items)]

    def standing(self, request: KvRequest, behind: bytes, place: int) -> Mapping[bytes, int]:
        return {}

    def load(self, request: KvRequest, held: Sequence[Held]) -> None:
        last, num = held[-1].item.place + 1, len(held)
        blocks = [*[-1] * (last - num), *(one.pages[0] for one in held)]
        self.connector.update_state_after_alloc(request, blocks, num * self._block_size)

    def ended(self, request: KvRequest, held: Sequence[Held]) -> bool:
        answer: object = self.connector.request_finished(request, [one.pages[0] for one in held])
        return bool(answer[0] if isinstance(answer, tuple) else answer)  # vLLM's return a second value

    def build_connector_meta(self) -> bytes:
        return self.connector.build_connector_meta()

    def blocks_evicted(self, evicted: Sequence[Evicted]) -> None:
        self.connector.blocks_evicted(evicted)

    def update_connector_output(self, output: Transferred) -> None:
        self.connector.update_connector_output(output)

    def take_events(self) -> list[KvEvent]:
        return self.connector.take_events()

    def tiers(self) -> tuple[TierSnapshot, ...]:
        return self.connector.tiers()

    def reset(self) -> None:
        self.connector.reset()

    def close(self) -> None:
        self.connector.close()
