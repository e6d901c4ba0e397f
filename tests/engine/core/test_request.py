"""A request's counters: how each method changes them, and that nothing but its methods does."""

import ast
from array import array
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import pytest
from fakes import EOS, enqueue

import pagewire
from pagewire.engine.core.block_hash import regime_key
from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.request import Request, State, Table

ROOT = Path(pagewire.__file__).resolve().parent
FIELDS = frozenset((*Request.__slots__, "blocks"))
ROOMS = {  # the folders that handle requests, and the fields that each knows
    "engine/core": FIELDS,
    "engine/kv_connector": frozenset({"rid", "ids", "num_computed"}),
    "procs": FIELDS - {"state"},  # which a model has there, too
}
LISTS = FIELDS & {"blocks", "ids", "keys", "tables"}
CHANGES = frozenset(
    {"append", "clear", "extend", "frombytes", "fromlist", "insert", "pop", "remove", "reverse", "sort"}
)
SIZE = 4


def make(num_prompt: int = 10, *, regime_limit: int = 1000, **more: Any) -> Request:
    message = enqueue(1, list(range(num_prompt)), **{"max_tokens": 20, **more})
    return Request(
        message,
        choice=0,
        arrival=1,
        queue_key=None,
        max_model_len=100,
        block_size=SIZE,
        root=b"",
        eos_token_ids=frozenset({EOS}),
        regime_limit=regime_limit,
    )


def admitted(num_prompt: int = 10, **more: Any) -> Request:
    """A request with a row and three blocks whose whole prompt is in flight."""
    request = make(num_prompt, **more)
    request.admit(0, [Table([5, 6, 7])], 3, num_found=0, num_loading=0)
    request.open()
    request.plan(num_prompt, 1)
    return request


def counters(request: Request) -> tuple[int, int, int, int, int]:
    return (request.num_computed, request.num_planned, request.num_total, len(request.ids), request.num_in_flight)


def writes(source: str, fields: Set[str] = FIELDS) -> Iterator[str]:
    """Yields where the source changes one of these fields of anything but `self`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del(), attr=name, value=owner) if name in fields:
                pass
            case ast.Subscript(ctx=ast.Store() | ast.Del(), value=ast.Attribute(attr=name, value=owner)) if (
                name in LISTS & fields
            ):
                pass
            case ast.Call(func=ast.Attribute(attr=change, value=ast.Attribute(attr=name, value=owner))) if (
                name in LISTS & fields and change in CHANGES
            ):
                pass
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=name), *_]) if name in fields:
                pass
            case _:
                continue
        if not (isinstance(owner, ast.Name) and owner.id == "self"):
            yield f"line {node.lineno} changes {name!s}"


def test_only_a_request_changes_its_fields() -> None:
    files = {file: fields for room, fields in ROOMS.items() for file in (ROOT / room).rglob("*.py")}
    assert len(files) > 40
    found = [
        f"{file.relative_to(ROOT)}: {where}"
        for file, fields in files.items()
        if file != ROOT / "engine/core/request.py"
        for where in writes(file.read_text(), fields)
    ]
    assert not found, found


def test_the_rest_of_its_own_file_does_not_change_its_fields() -> None:
    tree = ast.parse((ROOT / "engine/core/request.py").read_text())
    for node in tree.body:
        if not (isinstance(node, ast.ClassDef) and node.name == "Request"):
            assert not list(writes(ast.unparse(node)))


@pytest.mark.parametrize(
    "line",
    [
        "request.num_planned += 1",
        "a, r.state = 1, 2",
        "del lost.blocks",
        "first.blocks[0] = 3",
        "flight.decodes[0].ids.append(3)",
        "setattr(request, 'num_total', 3)",
        "for request.row in rows: pass",
    ],
)
def test_the_check_sees_every_way_to_change_a_field(line: str) -> None:
    assert list(writes(line))
    assert not list(writes("self.row = request.row"))


def test_a_plan_and_its_result_move_all_counters() -> None:
    request = admitted()
    assert counters(request) == (0, 10, 11, 10, 1)
    request.plan(1, 1)
    assert counters(request) == (0, 11, 12, 10, 2)
    request.apply(10, array("i", [30]))
    request.apply(1, array("i", [31]))
    assert counters(request) == (11, 11, 12, 12, 0) and list(request.ids[-2:]) == [30, 31]


def test_rejected_draft_tokens_are_rolled_back() -> None:
    request = admitted()
    request.apply(10, array("i", [30]))
    request.plan(3, 3)
    assert counters(request) == (10, 13, 14, 11, 1)
    request.roll_back(1)
    request.apply(2, array("i", [31, 32]))
    assert counters(request) == (12, 12, 13, 13, 0)


def test_a_discarded_step_leaves_no_trace() -> None:
    request = admitted()
    request.plan(1, 1)
    request.discard(1, 1)
    assert counters(request) == (0, 10, 11, 10, 1)


def test_a_step_without_memory_sets_a_request_back_to_its_computed_positions() -> None:
    request = admitted()
    request.apply(10, array("i", [30]))
    request.commit(2)
    request.plan(1, 1)
    request.set_back(4)
    assert (request.num_computed, request.num_planned, request.num_total) == (4, 4, 11)
    assert request.num_committed == 1 and not request.is_open and request.num_in_flight == 1
    assert request.fast_limit == -1


@pytest.mark.parametrize("ends", [True, False])
def test_row_and_blocks_stay_while_a_step_is_in_flight(ends: bool) -> None:
    request = admitted()
    request.end() if ends else request.preempt()
    assert request.row == 0 and request.blocks and not request.may_release
    with pytest.raises(AssertionError):
        request.release()
    request.discard(10, 1)
    assert request.may_release
    request.release()
    assert (request.row, request.blocks, request.state) == (-1, [], State.ENDED if ends else State.WAITING)
    assert counters(request) == (0, 0, 10, 10, 0)


def test_a_request_ends_once_and_is_preempted_only_while_it_runs() -> None:
    request = make()
    with pytest.raises(AssertionError):
        request.preempt()
    request.end()
    with pytest.raises(AssertionError):
        request.end()


def test_a_load_counts_as_in_flight_and_blocks_that_failed_to_load_are_computed() -> None:
    request = make()
    request.admit(0, [Table([5, 6])], 2, num_found=0, num_loading=2, num_wanted=8)
    assert request.state == State.LOADING and request.num_in_flight == 1 and not request.has_work
    request.loaded(4)
    assert counters(request) == (4, 4, 10, 10, 0) and request.state == State.RUNNING  # type: ignore[comparison-overlap]  # `loaded` changed it


def test_a_preempted_request_does_not_run_when_its_load_ends() -> None:
    request = make()
    request.admit(0, [Table([5, 6])], 2, num_found=0, num_loading=2)
    request.preempt()
    request.loaded(2)
    assert request.state is State.LEAVING and request.may_release


def test_a_replaced_worker_resets_all_counters() -> None:
    request = admitted()
    request.poison()
    request.reset()
    assert request.state is State.WAITING and counters(request) == (0, 0, 10, 10, 0)
    assert not request.is_poisoned, "the next worker computes all of its KV again"


def test_only_a_request_with_cached_kv_may_recover_from_non_finite_numbers() -> None:
    request = admitted()
    assert not request.poison() and not request.wants_all
    request = make()
    request.admit(0, [Table([5, 6, 7])], 3, num_found=6, num_loading=0)
    assert counters(request) == (6, 6, 10, 10, 0)
    assert request.poison() and request.wants_all
    request.preempt()
    assert request.starts_again
    request.release()
    assert not request.is_poisoned


def test_a_block_raises_the_limit_of_a_decode_row() -> None:
    request = admitted()
    assert request.fast_limit == 12
    request.grow(1, [[8]])
    assert request.fast_limit == 16
    request.grow(11, [range(9, 20)])
    assert request.fast_limit == request.num_needed == 29


def test_a_constrained_request_is_not_a_decode_row() -> None:
    request = make()
    request.is_constrained = True
    request.admit(0, [Table([5, 6, 7])], 3, num_found=0, num_loading=0)
    request.open()
    assert request.fast_limit == -1


def test_a_request_computes_nothing_beyond_the_limit_of_its_regime() -> None:
    request = make(10, regime_limit=11)
    assert (request.regime, request.num_due, request.num_needed) == (0, 11, 29)
    request.admit(0, [Table([5, 6, 7])], 3, num_found=0, num_loading=0)
    request.open()
    assert request.fast_limit == 11
    request.plan(10, 1)
    request.plan(1, 1)
    assert not request.has_work
    request.apply(10, array("i", [30]))
    assert not request.changes_regime
    first = request.block_keys(2, SIZE)
    request.apply(1, array("i", [31]))
    assert request.changes_regime and not request.has_work
    request.preempt()
    request.release()
    assert (request.regime, request.num_due, request.changes_regime) == (1, 29, False)
    assert not set(request.block_keys(2, SIZE)) & set(first)
    assert request.root == regime_key(b"", 1) != b""


def test_a_long_prompt_begins_in_the_second_regime() -> None:
    request, long = make(12, regime_limit=12), make(13, regime_limit=12)
    assert (request.regime, long.regime) == (0, 1)
    assert request.block_keys(1, SIZE) != long.block_keys(1, SIZE)
    assert long.as_row(BlockPool(num_pages=1)).regime == 1
    resumed = make(10, regime_limit=12, resume_ids=[20, 21, 22])
    assert resumed.regime == 1 and resumed.root == long.root


@pytest.mark.parametrize(
    ("sources", "slot_from", "num_kept", "is_spoiled"),
    [
        ([(0, 11)], 26, 4, True),  # the beginning of its second block was not copied
        ([], 12, 4, True),  # nor was its state
        ([], 26, 6, False),  # everything was loaded
    ],
)
def test_what_was_to_be_copied_before_the_first_pass_is_not_kept_by_an_end_before_it(
    sources: list[tuple[int, int]], slot_from: int, num_kept: int, is_spoiled: bool
) -> None:
    request = make()
    request.admit(0, [Table([5, 6])], 2, num_found=0, num_loading=1, num_wanted=6, sources=sources)
    request.give_state(26, slot_from, b"key", 0)
    request.loaded(6)
    assert request.num_computed == 6 and not request.is_spoiled
    request.end()
    request.settle_end()
    assert request.num_computed == num_kept and request.is_spoiled == is_spoiled
