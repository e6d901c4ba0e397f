"""Which engines a door of a Ray Serve application has."""

from pagewire.ray.roster import FORGET_S, Registry, Roster

A, B = "http://a:1", "http://b:1"


def test_engines_are_added_once_and_removed_when_they_leave() -> None:
    roster = Roster()
    assert roster.hear({A: False}, 0.0) == ([A], [])
    assert roster.hear({A: False, B: False}, 1.0) == ([B], [])
    assert roster.hear({A: True, B: False}, 2.0) == ([], [A])
    assert roster.hear({A: True, B: False}, 3.0) == ([], [])


def test_a_new_registry_that_knows_nobody_removes_nobody_yet() -> None:
    roster = Roster()
    roster.hear({A: False}, 0.0)
    assert roster.hear({}, FORGET_S) == ([], [])
    assert roster.hear({}, FORGET_S + 0.1) == ([], [A])
    assert roster.hear({A: False}, FORGET_S + 1.0) == ([A], []), "it is there again"


def test_the_registry_forgets_engines_that_say_nothing_and_no_departure_before() -> None:
    registry = Registry()
    registry.announce(A, False, 0.0)
    registry.announce(B, True, 10.0)
    assert registry.engines(10.0) == {A: False, B: True}
    registry.announce(B, False, 11.0)
    assert registry.engines(FORGET_S + 1.0) == {B: True}, "a message that was late takes no departure back"
