"""Blocks of prompts, and the engines that have processed them."""

from pagewire.api.engines.prefixes import BLOCK_BYTES, MAX_BLOCKS, MAX_HOLDERS, Prefixes, prefix_blocks

LONG = bytes(range(256)) * 64


def test_equal_beginnings_have_equal_blocks() -> None:
    whole = prefix_blocks(b"", LONG)
    assert len(whole) == len(LONG) // BLOCK_BYTES and len(set(whole)) == len(whole)
    other = prefix_blocks(b"", LONG[: 5 * BLOCK_BYTES + 7] + b"?" * 1000)
    assert other[:5] == whole[:5] and other[5] != whole[5]
    assert prefix_blocks(b"another owner", LONG)[0] != whole[0]


def test_only_whole_blocks_up_to_a_maximum_count() -> None:
    assert prefix_blocks(b"", LONG[: BLOCK_BYTES - 1]) == []
    assert len(prefix_blocks(b"", b"x" * BLOCK_BYTES * (MAX_BLOCKS + 9))) == MAX_BLOCKS


def test_the_longest_prefix_of_each_holder_is_found() -> None:
    prefixes = Prefixes()
    prefixes.add([1, 2, 3, 4], holder=7)
    prefixes.add([1, 2, 8], holder=9)
    assert prefixes.matches([1, 2, 3, 5]) == {7: 3, 9: 2}
    assert prefixes.matches([5]) == {} and prefixes.matches([]) == {}


def test_the_last_holders_of_a_block_are_remembered() -> None:
    prefixes = Prefixes()
    for holder in range(MAX_HOLDERS + 3):
        prefixes.add([1, 2], holder)
    prefixes.add([1, 2], MAX_HOLDERS)  # known already
    assert prefixes.matches([1, 2, 9]) == dict.fromkeys(range(3, MAX_HOLDERS + 3), 2)


def test_a_long_prefix_is_searched_in_few_steps() -> None:
    prefixes = Prefixes()
    prefixes.add(range(500), holder=7)
    prefixes.add(range(3), holder=9)
    found = prefixes.matches(range(510))
    assert found[7] == 500 and 0 < found[9] <= 3, "a shorter beginning is found as well, perhaps not all of it"


def test_the_ends_of_the_least_recently_used_prefixes_are_evicted_first() -> None:
    prefixes = Prefixes(capacity=4)
    prefixes.add([1, 2, 3], holder=7)
    prefixes.add([4, 5], holder=8)
    assert prefixes.matches([1, 2, 3]) == {7: 2}
    assert prefixes.matches([4, 5]) == {8: 2}
