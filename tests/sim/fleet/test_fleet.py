"""Histories of a fleet keep every invariant, and every mutant breaks one."""

from collections import Counter

import pytest
from msgspec.structs import replace

from .fleet import Broken, Fleet, Setting
from .mutants import MUTANTS, mutated

SETTINGS = {
    "calm": Setting(num_conversations=2000),
    "few engines": Setting(num_engines=2, num_conversations=300, deaths=2),
    "deaths": Setting(num_conversations=2000, deaths=6),
    "slow engines": Setting(num_conversations=2000, num_slow=2),
    "checks that fail": Setting(num_conversations=2000, blackout=5.0),
    "short questions": Setting(num_routers=8, num_conversations=8000, duration=40.0, share_short=1.0),
    "other clients": Setting(num_conversations=2000, num_outside=20),
    "roles": Setting(num_conversations=1500, num_prefill=4),
    "roles and deaths": Setting(num_conversations=1500, num_prefill=6, num_routers=2, deaths=8, restart=8.0),
    "an upgrade": Setting(num_conversations=2000, duration=240.0, is_upgraded=True),
    "several routers": Setting(num_engines=48, num_routers=3, num_conversations=4000, table=4000, deaths=2),
}
MOST_MOVES = 0.08  # of all turns, without a reason, where several routers know different parts
MOST_UNEVEN = 1.27  # busiest engine / mean engine, where all requests are alike
MOST_UNKNOWN = 0.04  # of all turns that a router could not know to be later ones, moved
LARGE = Setting(num_engines=1000, num_routers=4, num_conversations=20_000, deaths=20, blackout=10.0)
# One router: an engine gets a request a second, and each router has to see by itself which ones are slow.
LARGE_AND_CHANGING = replace(LARGE, num_routers=1, num_slow=20, is_upgraded=True)


def play(setting: Setting) -> Counter[str]:
    """Raises Broken."""
    fleet = Fleet(setting, seed=0)
    counts = fleet.run()
    if setting.share_short and fleet.unevenness > MOST_UNEVEN:
        raise Broken(f"the busiest engine has {fleet.unevenness} times the mean load")
    if counts["moved without a reason"] > (MOST_MOVES * counts["requests"] if setting.num_routers > 1 else 0):
        raise Broken(f"conversations moved without a reason: {counts}")
    if counts["moved unknown to the router"] > MOST_UNKNOWN * counts["requests"]:
        raise Broken(f"plain prompts moved from router to router: {counts}")
    return counts


@pytest.mark.parametrize("name", SETTINGS)
def test_a_history_keeps_every_invariant(name: str) -> None:
    play(SETTINGS[name])


def test_the_histories_have_what_they_are_about() -> None:
    upgrade, deaths = (play(SETTINGS[name]) for name in ("an upgrade", "deaths"))
    assert upgrade["upgrades"] >= 8 and upgrade["moved by an upgrade"] > 50
    roles, roles_and_deaths = (play(SETTINGS[name]) for name in ("roles", "roles and deaths"))
    assert roles["legs"] > 0.7 * roles["requests"]
    assert roles_and_deaths["legs lost"] and roles_and_deaths["legs refused"]
    assert deaths["deaths"] == 6 and deaths["resumed"] > 20 and deaths["moved by a death"] > 50


def test_several_routers_find_nearly_as_much_and_load_engines_as_evenly_as_one() -> None:
    one, four = (Fleet(Setting(num_conversations=2000, num_routers=num), seed=0) for num in (1, 4))
    one.run()
    four.run()
    assert four.share_found > one.share_found - 0.03
    assert four.unevenness < 1.1 * one.unevenness


@pytest.mark.long
def test_a_thousand_engines() -> None:
    assert play(LARGE)["deaths"] == 20


@pytest.mark.long
def test_a_thousand_engines_of_which_some_are_slow_and_others_are_replaced() -> None:
    counts = play(LARGE_AND_CHANGING)
    assert counts["deaths"] == 20 and counts["upgrades"] > 20 and counts["moved by an upgrade"] > 20


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_some_history_fails_for_each_mutant(name: str) -> None:
    with mutated(name):
        for setting in SETTINGS.values():
            try:
                play(setting)
            except Broken:
                return
    pytest.fail(f"no history has noticed: {name}")
