"""The rules of the choice, one by one; `tests/sim/fleet` plays them together."""

import itertools
from collections import Counter

import pytest

from pagewire.api.engines.choice import (
    ECHO,
    MAX_SLOWNESS,
    RAMP_S,
    SLACK,
    Choice,
    Condition,
    Conversation,
    Member,
)
from pagewire.api.engines.presence import Presence
from pagewire.api.engines.stable_hash import stable_hash

NOW = 1000.0


def choice_of(num: int, *, seed: int = 0) -> Choice[Member]:
    choice: Choice[Member] = Choice(seed=seed)
    for i in range(num):
        member = Member(f"http://engine-{i}:8000")
        choice.add(member)
        choice.turned(member, Condition.ABLE)
    return choice


def names(choice: Choice[Member], num: int, *, holds: bool = True) -> Counter[str]:
    """The engines of `num` requests without anything in common; `holds`: they stay open."""
    found: Counter[str] = Counter()
    for _ in range(num):
        member = choice.choose([], None, NOW)
        assert member is not None
        found[member.name] += 1
        if holds:
            choice.opened(member)
    return found


def test_requests_without_a_past_are_spread_evenly() -> None:
    assert set(names(choice_of(5), 50).values()) == {10}
    assert set(names(choice_of(5), 50, holds=False).values()) == {10}, "in turn while all are idle"
    many = names(choice_of(300), 30_000)
    assert len(many) == 300 and max(many.values()) <= 110


def test_a_prompt_goes_where_its_beginning_is_until_that_engine_is_too_busy() -> None:
    choice = choice_of(8)
    first = choice.choose([1, 2, 3], None, NOW)
    assert first is not None
    chosen = []
    for _ in range(SLACK + 2):
        member = choice.choose([1, 2, 3, 4], None, NOW)
        assert member is not None
        chosen.append(member)
        choice.opened(member)
    assert chosen == [first] * (SLACK + 1) + chosen[-1:] and chosen[-1] is not first


def test_a_beginning_that_many_engines_have_does_not_decide() -> None:
    choice = choice_of(8)
    for i, only in itertools.product(range(3), list(choice.members)):
        choice.choose([1, 2, 100 + i], None, NOW, [other for other in choice.members if other is not only])
    found = Counter(member.name for i in range(64) if (member := choice.choose([1, 2, 200 + i], None, NOW)))
    assert len(found) == 8 and set(found.values()) == {8}


def test_routers_that_share_nothing_send_a_conversation_to_the_same_engine() -> None:
    one, other = choice_of(40), choice_of(40, seed=9)
    homes = Counter[str]()
    for number in range(400):
        conversation = Conversation(stable_hash(b"%d" % number), 2)
        a, b = (choice.choose([number, -number], conversation, NOW) for choice in (one, other))
        assert a is not None and b is not None and a.name == b.name
        homes[a.name] += 1
    assert len(homes) == 40 and max(homes.values()) < 30, "the places on the ring are spread"


def test_other_routers_are_taken_to_do_between_reports_in_proportion_what_this_one_does() -> None:
    choice = choice_of(2)
    first, second = choice.members
    for _ in range(2):
        choice.opened(first)
        choice.opened(second)
    for member in choice.members:
        choice.reported(member, 8)  # 6 of other routers, 3 for one of this router
    choice.compare()
    assert first.load == second.load == 8
    for _ in range(2):
        choice.opened(first)
    assert first.load == 8 + 2 + 2 * 3 * ECHO and second.load == 8
    choice.reported(first, 10)
    assert first.load == 10, "the report says what they did"
    for _ in range(4):
        choice.closed(first)
    assert first.load == 0, "nor less than none"


def test_routers_agree_on_the_home_of_a_prompt_of_which_they_know_only_what_many_engines_have() -> None:
    one, other = choice_of(40), choice_of(40, seed=9)

    def sent(choice: Choice[Member], prompt: list[int]) -> str:
        chosen = choice.choose(prompt, None, NOW, key_of=lambda num: stable_hash(b"%d" % prompt[num - 1]))
        assert chosen is not None
        return chosen.name

    for choice, start in ((one, 100), (other, 200)):  # a system prompt of two blocks, met in other conversations
        for number in range(4):
            others = [member for i, member in enumerate(choice.members) if i != 9 * number]
            choice.choose([1, 2, start + number], None, NOW, others)
    homes = Counter[str]()
    for number in range(1000, 1200):
        homes[sent(one, [1, 2, number])] += 1
        assert sent(one, [1, 2, number]) == sent(other, [1, 2, number, -number]), "its next turn"
    assert len(homes) > 30, "each conversation has a home of its own"
    everywhere = {sent(one, [1, 2]) for _ in range(100)}
    assert len(everywhere) > 10, "a prompt that many engines have does not need a home"


def test_a_later_turn_goes_home_and_not_where_only_the_system_prompt_is() -> None:
    choice, elsewhere = choice_of(8), choice_of(8)
    conversation = Conversation(stable_hash(b"a"), 3)
    home = elsewhere.choose([1, 2, 3], conversation, NOW)  # another router had the first turn
    assert home is not None
    choice.choose([1, 2], None, NOW, [member for member in choice.members if member.name == home.name])
    again = choice.choose([1, 2, 3, 4], conversation, NOW)
    assert again is not None and again.name == home.name


def test_a_lost_engine_has_lost_its_cache() -> None:
    choice = choice_of(3)
    first = choice.choose([1, 2, 3], None, NOW)
    assert first is not None
    choice.lost(first)
    second = choice.choose([1, 2, 3], None, NOW)
    assert second is not None and second is not first
    choice.turned(first, Condition.ABLE)
    assert choice.choose([1, 2, 3], None, NOW) is second


def test_an_engine_that_has_just_started_gets_its_share_little_by_little() -> None:
    choice = choice_of(4)
    names(choice, 80)
    (new,) = (member for member in choice.members if member.name.startswith("http://engine-2"))
    for _ in range(20):
        choice.closed(new)
    choice.started(new, NOW)
    names(choice, 8)
    assert new.load <= 3 and new.ramp(NOW + RAMP_S) == 1.0


def test_a_slow_engine_gets_less_but_not_nothing() -> None:
    choice = choice_of(5)
    slow = choice.members[3]
    for member in choice.members:
        choice.paced(member, 0.3 if member is slow else 0.02)
    choice.compare()
    assert slow.slowness == MAX_SLOWNESS
    found = names(choice, 205)
    assert 3 <= found[slow.name] <= 8
    for _ in range(20):
        choice.paced(slow, 0.02)
    choice.compare()
    assert slow.slowness == 1.0


def test_when_most_engines_are_silent_they_are_chosen_from_as_well() -> None:
    choice = choice_of(6)
    for member in choice.members[:3]:
        choice.turned(member, Condition.SILENT)
    assert len(names(choice, 60)) == 3
    choice.turned(choice.members[3], Condition.SILENT)
    choice.turned(choice.members[0], Condition.OUT)
    assert len(names(choice, 600)) == 5


def test_conversations_of_a_leaving_engine_move_to_the_one_that_started_last() -> None:
    choice = choice_of(6)
    old = choice.choose([1, 2, 3], Conversation(7, 2), NOW)
    new = Member("http://new:8000")
    assert old is not None
    choice.add(new)
    choice.started(new, NOW)
    choice.turned(new, Condition.ABLE)
    choice.leaves(old, True)
    assert choice.choose([1, 2, 3, 4], Conversation(7, 2), NOW) is new
    choice.remove(old)
    assert choice.choose([1, 2, 3, 4, 5], Conversation(7, 2), NOW) is new


@pytest.mark.parametrize("num", [1, 2, 20])
def test_no_engine_may_be_left(num: int) -> None:
    choice = choice_of(num)
    assert choice.choose([1], None, NOW, list(choice.members)) is None
    for member in choice.members:
        choice.lost(member)
    assert choice.choose([1], Conversation(1, 1), NOW) is None


def with_roles(**roles: str) -> tuple[Choice[Member], dict[str, Member]]:
    choice: Choice[Member] = Choice(seed=0)
    found = {}
    for name, role in roles.items():
        found[name] = member = Member(name)
        choice.add(member)
        choice.turned(member, Condition.ABLE)
        choice.described(member, role, 1.0, 0.1)
    return choice, found


def test_a_long_prompt_beside_streams_is_computed_elsewhere() -> None:
    choice, of = with_roles(p="prefill", d="decode")
    blocks = list(range(40))
    assert choice.legs(blocks, None, 2560, NOW) == (of["d"], None), "nothing runs beside it"
    choice.opened(of["d"])
    others = list(range(100, 140))
    assert choice.legs(others, None, 2560, NOW) == (of["d"], of["p"])
    assert choice.legs([-2], None, 255, NOW) == (of["d"], None), "a short one is not worth it"
    assert choice.legs([*others, 99], None, 2624, NOW) == (of["d"], None), "the rest is short"


def test_a_queue_of_prompts_or_a_slow_link_keeps_a_prompt_at_home() -> None:
    choice, of = with_roles(p="prefill", q="prefill", d="decode")
    choice.opened(of["d"])
    of["p"].num_due_tokens = 5000
    assert choice.legs([1, 2], None, 2000, NOW) == (of["d"], of["q"])
    of["q"].num_due_tokens = 5000
    assert choice.legs([3, 4], None, 2000, NOW) == (of["d"], None)
    of["p"].num_due_tokens = of["q"].num_due_tokens = 0
    choice.described(of["d"], "decode", 1.0, 1.5)
    assert choice.legs([5, 6], None, 2000, NOW) == (of["d"], None)
    choice.described(of["d"], "decode", 0.0, 0.0)
    for one in "pq":
        choice.described(of[one], "prefill", 0.0, 0.0)
    assert choice.legs([7, 8], None, 2000, NOW)[1] is not None, "prices are not known yet"
    assert choice.legs([9, 8], None, 2000, NOW, avoid=(of["p"], of["q"])) == (of["d"], None)


def test_prompts_that_others_compute_do_not_make_the_router_forget_who_has_the_stream() -> None:
    helpers = {name: "prefill" for name in "pqrst"}
    choice, of = with_roles(**helpers, d="decode", e="decode")
    first, _ = choice.legs([1, 2], None, 2000, NOW)
    assert first is not None
    for member in (of["d"], of["e"]):
        choice.opened(member)
    for turn in range(3, 12):
        others = [of[name] for i, name in enumerate(helpers) if i != turn % len(helpers)]
        stream, helper = choice.legs([*range(1, turn)], None, 9000, NOW, others)
        assert stream is first and (helper is None or helper.role == "prefill")


def test_roles_are_preferences() -> None:
    choice, of = with_roles(p="prefill", d="decode")
    assert {choice.choose([i], None, NOW) for i in range(9)} == {of["d"]}
    choice.turned(of["d"], Condition.OUT)
    assert choice.legs([1, 2], None, 2000, NOW) == (of["p"], None)
    choice.turned(of["d"], Condition.ABLE)
    choice.opened(of["d"])
    choice.turned(of["p"], Condition.SILENT)
    assert choice.legs([3, 4], None, 2000, NOW) == (of["d"], None)
    choice.turned(of["p"], Condition.ABLE)
    choice.leaves(of["p"], True)
    assert choice.legs([5, 6], None, 2000, NOW) == (of["d"], None)
    choice.leaves(of["p"], False)
    assert choice.legs([17, 18], None, 2000, NOW) == (of["d"], of["p"])
    choice.described(of["p"], "both", 1.0, 0.1)
    assert {choice.choose([i], None, NOW) for i in range(20, 29)} == {of["p"]}, "the idler one"


LOADED, FITS, UNLOADED, FAILED = Presence


def served(choice: Choice[Member], model: str | None, num: int) -> list[str]:
    """The engines of so many requests for a model, which stay open."""
    found = []
    for _ in range(num):
        member, _ = choice.legs([], None, 0, NOW, model=model)
        assert member is not None
        choice.opened(member)
        found.append(member.name)
    return found


def test_a_model_is_used_where_it_is_loaded_and_loaded_once_before_the_engine_says_so() -> None:
    choice = choice_of(3)
    for member, presence in zip(choice.members, (FITS, LOADED, FITS), strict=True):
        choice.hosts(member, {"a": presence, "b": FITS})
    assert set(served(choice, "a", 3)) == {choice.members[1].name}
    (home,) = set(served(choice, "b", 3))
    assert home != choice.members[1].name, "the one with a model has more to do"
    assert set(served(choice, "unknown", 6)) == {member.name for member in choice.members}, "each says so itself"


def test_a_model_whose_engine_is_busy_is_loaded_by_another_one_that_has_room() -> None:
    choice = choice_of(2)
    first, second = choice.members
    choice.hosts(first, {"a": LOADED, "b": LOADED})
    choice.hosts(second, {"a": UNLOADED, "b": LOADED})
    assert set(served(choice, "a", 20)) == {first.name}, "b would have to go from the other one"
    choice.hosts(second, {"a": FITS, "b": LOADED})
    assert served(choice, "a", 1) == [second.name]
    assert Counter(served(choice, "a", 15))[second.name] == 15, "it has it now, and less to do"


def test_a_request_without_a_model_is_for_the_first_one_and_other_requests_are_for_none() -> None:
    choice = choice_of(2)
    for member, presence in zip(choice.members, (LOADED, FITS), strict=True):
        choice.hosts(member, {"a": presence, "b": LOADED})
    assert set(served(choice, "", 2)) == set(served(choice, "a:latest", 2)) == {choice.members[0].name}
    assert set(served(choice, None, 4)) == {choice.members[1].name}


def test_who_has_refused_is_not_asked_again_for_the_model() -> None:
    choice = choice_of(2)
    first, second = choice.members
    choice.hosts(first, {"a": LOADED})
    choice.hosts(second, {"a": UNLOADED})
    assert choice.legs([], None, 0, NOW, [first], model="a") == (second, None)
    assert choice.legs([], None, 0, NOW, [first, second], model="a") == (None, None)
