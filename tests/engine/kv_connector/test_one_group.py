"""A connector with the methods of a `CoreConnector`, called as the scheduler calls all connectors."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kv_instance import SIZE, held, sequence

from pagewire.engine.core.kv_connector import Item, KvRequest, TierConnector
from pagewire.engine.kv_connector.one_group import OneGroup


class Inner(SimpleNamespace):
    """Answers as it is told, and notes what it is asked."""

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked = num_computed_tokens
        return self.num, True

    def update_state_after_alloc(self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        self.loaded = list(block_ids), num_external_tokens

    def request_finished(self, request: KvRequest, block_ids: Sequence[int]) -> Any:
        self.ended = list(block_ids)
        return self.answer


def items(places: Sequence[int]) -> list[Item]:
    return [Item(bytes([place]) * 32, place) for place in places]


@pytest.mark.parametrize(
    ("places", "num_blocks", "expected"),
    [
        ([2, 3, 4], 2, [True, True, False]),
        ([2, 3, 4], 0, [False, False, False]),
        ([2, 3, 5], 4, [True, True, False]),  # it could load block 5 only with block 4, which the device has
        ([], 0, []),
    ],
)
def test_blocks_are_available_without_gaps(places: list[int], num_blocks: int, expected: list[bool]) -> None:
    inner: Any = Inner(num=num_blocks * SIZE)
    assert OneGroup(inner, block_size=SIZE).available(sequence(1, (1, 40)), items(places)) == expected
    assert inner.asked == (places[0] if places else 39 // SIZE) * SIZE


def test_an_unknown_match_is_passed_on_and_a_wrong_one_is_refused() -> None:
    inner: Any = Inner(num=None)
    group = OneGroup(inner, block_size=SIZE)
    assert group.available(sequence(1, (1, 40)), items([2])) is None
    for num in (-SIZE, SIZE + 1, 40):
        inner.num = num
        with pytest.raises(ValueError, match="is invalid"):
            group.available(sequence(1, (1, 40)), items([2]))


def test_the_last_blocks_of_a_table_are_loaded_and_full_blocks_are_offered() -> None:
    inner: Any = Inner(answer=(True, {"more": 1}))
    group = OneGroup(inner, block_size=SIZE)
    assert isinstance(group, TierConnector)
    request = sequence(1, (1, 40))
    group.load(request, held(request, [7, 8, 9, 5])[2:])
    assert inner.loaded == ([-1, -1, 9, 5], 2 * SIZE)
    assert group.ended(request, held(request, [7, 8, 9])) is True and inner.ended == [7, 8, 9]
    assert group.standing(request, bytes(32), 0) == {}
